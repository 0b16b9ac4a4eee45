"""Which other engines there are, without importing any: what to install, and what files they read."""

from dataclasses import dataclass
from importlib.util import find_spec

from decodescope.errors import InputError
from decodescope.experiments.bench.messages import LLAMACPP, OPENVINO, STORED, TRANSFORMERS, Contender


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine: its Python module, the pip packages that bring it, and the formats it is timed in."""

    name: str
    module: str
    packages: str
    formats: tuple[str, ...]
    only_gguf: bool = False

    @property
    def installed(self) -> bool:
        """Whether the module can be found."""
        return find_spec(self.module) is not None

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """One for each format."""
        return tuple(Contender(self.name, name) for name in self.formats)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(TRANSFORMERS, "transformers", "transformers", ("bfloat16", "float16")),
        Peer(LLAMACPP, "xllamacpp", "xllamacpp", (STORED,), only_gguf=True),
        Peer(OPENVINO, "openvino_genai", "openvino-genai openvino-tokenizers", (STORED,), only_gguf=True),
    )
}


def parse_peers(text: str) -> tuple[Peer, ...]:
    """The engines of a list such as `transformers,llamacpp`, each once. Raises InputError for an unknown one."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in PEERS:
            raise InputError("bench.unknown_peer", name=name, known=", ".join(PEERS))
    return tuple(PEERS[name] for name in names)
