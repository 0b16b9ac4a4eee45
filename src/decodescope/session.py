"""Session: an open model. Wires text, model, sampling and observers into runs; no arithmetic of its own."""

from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from decodescope.errors import InputError
from decodescope.generate import Decoding, Limits
from decodescope.live import LiveRun
from decodescope.model.checkpoint import Progress, load_model, torch_device, torch_dtype
from decodescope.models import ModelFiles, Report, find_model, silent
from decodescope.observe.description import describe_run, for_row
from decodescope.observe.recorder import RowRecorder, speller
from decodescope.observe.recording import DEFAULT_BUDGET, Recording, Watch
from decodescope.options import RunOptions, changed
from decodescope.sampling.checkpoint import read_checkpoint_settings
from decodescope.sampling.params import resolve
from decodescope.sampling.sampler import Sampler
from decodescope.text.chat import Prompt, chat_prompt, raw_prompt
from decodescope.text.messages import Message, read_messages, read_prompts, with_system
from decodescope.text.tokenizer import open_tokenizer
from decodescope.trace.records import Run, Trace
from decodescope.trace.store import TraceWriter, refuse_used

MOST_THREADS = 1024
Prompts = list[Prompt]


class Session:
    """A loaded model with its tokenizer. `Session.open("starter")`, then `run`."""

    def __init__(self, files: ModelFiles, dtype: str | None, device: str, progress: Progress | None) -> None:
        self.files = files
        with ThreadPoolExecutor(1) as beside:  # the vocabulary is read while the weights are
            tokenizer = beside.submit(open_tokenizer, files.path)
            self.model, self.weights = load_model(files.path, dtype, device, progress)
            self.tokenizer = tokenizer.result()
        self.settings = read_checkpoint_settings(files.path)
        self._spell = speller(self.tokenizer)
        self._recording: Recording | None = None  # of the next run

    @classmethod
    def open(
        cls,
        model: str = "starter",
        *,
        dtype: str | None = None,
        device: str = "cpu",
        threads: int | None = None,
        report: Report = silent,
        progress: Progress | None = None,
    ) -> "Session":
        """Find (or fetch) and load a model: see `models.find_model` for what `model` may be.

        `threads` is torch's number of threads, for the whole process. Raises InputError.
        """
        if threads is not None and not 1 <= threads <= MOST_THREADS:
            raise InputError("threads", value=threads, most=MOST_THREADS)
        if threads is not None:
            torch.set_num_threads(threads)
        if dtype is not None:
            torch_dtype(dtype)
        torch_device(device)
        return cls(find_model(model, report), dtype, device, progress)

    def prompt(self, text: str, *, chat: bool | None = None, system: str | None = None) -> Prompt:
        """A prompt as it goes in: through the chat template where the model has one (`chat` None), or raw.

        Raises InputError for an empty text, and for chat with a model that has no template.
        """
        if not text:
            raise InputError("text.empty_prompt")
        if chat is False or (chat is None and self.tokenizer.chat_template is None):
            if system is not None:
                raise InputError("chat.system_needs_template")
            return raw_prompt(self.tokenizer, text)
        return self.chat(with_system([{"role": "user", "content": text}], system))

    def chat(self, messages: Sequence[Message]) -> Prompt:
        """A conversation as it goes in."""
        return chat_prompt(self.tokenizer, messages)

    def conversation_from(self, path: Path, system: str | None = None) -> Prompt:
        """The conversation in a JSON file, as it goes in. Raises InputError."""
        return self.chat(with_system(read_messages(path), system))

    def prompts_from(self, path: Path, *, chat: bool | None = None, system: str | None = None) -> Prompts:
        """The prompts of a file, a line each (see `text.messages.read_prompts`). Raises InputError."""
        return [
            self.prompt(entry, chat=chat, system=system)
            if isinstance(entry, str)
            else self.chat(with_system(entry, system))
            for entry in read_prompts(path, messages=chat is not False)
        ]

    def run(self, prompt: str | Prompt, *, options: RunOptions | None = None, **changes: Any) -> Trace:
        """Decode one prompt to its end. Sampling values and options may be given by name:
        `run("春天", temperature=0.7, max_new_tokens=8)`."""
        ready = self.prompt(prompt) if isinstance(prompt, str) else prompt
        live = self.start([ready], changed(options or RunOptions(), changes))
        for _ in live.steps():
            pass
        return live.traces[0]

    def start(self, prompts: Sequence[Prompt], options: RunOptions, progress: Progress | None = None) -> LiveRun:
        """Prepare a run of one prompt, or of several as one batch. Raises InputError before any work is done.

        `progress` is told (positions done, positions in all) while a long prompt is read.
        """
        recording = self._taken_recording(len(prompts))
        params = resolve(options.sampling, self.settings if options.checkpoint_settings else None)
        allowed = self._allowed_tokens(prompts, options)
        samplers = [Sampler(params) for _ in prompts]
        stop_ids = frozenset() if options.ignore_eos else self.tokenizer.end_ids
        limits = Limits(allowed, stop_ids, options.use_cache, every_logit=options.every_logit)
        short = allowed < options.max_new_tokens
        notes = ("note.context_limit",) * short + ("note.observed",) * bool(recording)
        common = describe_run(self.files, self.model, limits, options.stop, params.notes + notes)
        runs = [for_row(common, *pair) for pair in zip(prompts, samplers, strict=True)]
        writers = _writers(options.save, runs)
        rows = zip(runs, writers, strict=True)
        recorders = [RowRecorder(run, self.tokenizer, self._spell, options.candidates, w) for run, w in rows]
        decoding = Decoding(self.model, [prompt.ids for prompt in prompts], samplers, limits)
        decoding.on_prefill = progress
        return LiveRun(decoding, recorders, options.keep_logits, recording)

    @contextmanager
    def observe(
        self,
        sites: Sequence[str] = (),
        *,
        summarise: Sequence[str] = (),
        steps: Container[int] | None = None,
        budget_bytes: int = DEFAULT_BUDGET,
    ) -> Iterator[Recording]:
        """Look inside the run that is started next: keep `sites` whole and sum `summarise` up (patterns such as
        `layers.*.resid_post`, see `observe.selection.select`), in `steps` or in all. Raises InputError.
        """
        watch = Watch(sites, summarise, steps, budget_bytes=budget_bytes)
        with self.watching(watch) as recording:
            yield recording

    @contextmanager
    def watching(self, watch: Watch) -> Iterator[Recording]:
        """`observe`, with everything that can be watched. Raises InputError inside another one."""
        if self._recording is not None:
            raise InputError("observe.nested")
        recording = self._recording = Recording(self.model.config, watch, self.model.lm_head.weight.device)
        try:
            yield recording
        finally:
            self._recording = None

    def _taken_recording(self, rows: int) -> Recording | None:
        """The recording for a run of `rows` sequences; it looks at one run of one sequence."""
        if self._recording is None:
            return None
        if rows > 1:
            raise InputError("observe.batch", rows=rows)
        if self._recording.taken:
            raise InputError("observe.used")
        self._recording.taken = True
        return self._recording

    def _allowed_tokens(self, prompts: Sequence[Prompt], options: RunOptions) -> int:
        """New tokens that fit behind the longest prompt."""
        config = self.model.config
        room = config.max_position_embeddings
        for prompt in prompts:
            if len(prompt.ids) >= config.max_position_embeddings:
                raise InputError(
                    "run.prompt_too_long", tokens=len(prompt.ids), context=config.max_position_embeddings
                )
            if max(prompt.ids) >= config.vocab_size:
                raise InputError("run.id_outside", id=max(prompt.ids), rows=config.vocab_size)
            room = min(room, config.max_position_embeddings - len(prompt.ids))
        return min(options.max_new_tokens, room)


def _writers(save: Path | str | None, runs: Sequence[Run]) -> list[TraceWriter | None]:
    """A writer for each row: into the folder itself, or into a numbered one inside for each row of a batch."""
    if save is None:
        return [None] * len(runs)
    folder = Path(save)
    if len(runs) == 1:
        return [TraceWriter.create(folder, runs[0])]
    refuse_used(folder)
    return [TraceWriter.create(folder / f"{row:04d}", run) for row, run in enumerate(runs)]
