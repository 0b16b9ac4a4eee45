"""`decodescope monitor init`: what Prometheus and Grafana need to watch a server."""

from pathlib import Path
from typing import Annotated

import typer

from decodescope.cli import options as o
from decodescope.cli.console import line, out
from decodescope.locale import translate as t

Folder = Annotated[Path, typer.Argument(help=t("help.monitor.init.folder"), show_default=False, metavar="DIR")]
Target = Annotated[list[str] | None, o.option("monitor.init.target", "--target", metavar="HOST:PORT")]
TokenFile = Annotated[Path | None, o.option("monitor.init.token_file", "--token-file", metavar="FILE")]
Vllm = Annotated[list[str] | None, o.option("monitor.init.vllm", "--vllm", metavar="HOST:PORT")]
Sglang = Annotated[list[str] | None, o.option("monitor.init.sglang", "--sglang", metavar="HOST:PORT")]
Llamacpp = Annotated[list[str] | None, o.option("monitor.init.llamacpp", "--llamacpp", metavar="HOST:PORT")]


def init(
    folder: Folder,
    target: Target = None,
    token_file: TokenFile = None,
    vllm: Vllm = None,
    sglang: Sglang = None,
    llamacpp: Llamacpp = None,
    lang: o.Lang = None,
) -> None:
    from decodescope.monitor.setup import write_setup
    from decodescope.monitor.setup_files import USUAL_ADDRESSES

    others = {"vllm": vllm or [], "sglang": sglang or [], "llamacpp": llamacpp or []}
    ours = target or ([] if any(others.values()) else [USUAL_ADDRESSES["decodescope"]])
    for path in write_setup(folder, {"decodescope": ours, **others}, token_file):
        out().print(line(str(path)))
    out().print(line(t("monitor.init.next", path=folder / "README.md")))


init.__doc__ = t("help.monitor.init")
