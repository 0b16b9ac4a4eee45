"""`decodescope sample`: settings side by side on one prompt, or on the stored logits of a saved run."""

from contextlib import closing
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from decodescope.cli import options as o
from decodescope.cli.one_prompt import check_image, opened
from decodescope.cli.sample_picture import write_picture
from decodescope.cli.sample_view import draw_report, tell_parquet
from decodescope.errors import InputError
from decodescope.locale import translate as t
from decodescope.trace.folder import refuse_used
from decodescope.trace.lines import document_text

if TYPE_CHECKING:
    from decodescope.experiments.sample_grid import Grid
    from decodescope.experiments.sample_records import SampleReport
    from decodescope.options import RunOptions

GridWords = Annotated[list[str] | None, o.option("sample.grid", "--grid", metavar="KNOB=VALUE,...")]
Seeds = Annotated[str | None, o.option("sample.seeds", "--seeds", metavar="N,N,...")]
FromRun = Annotated[Path | None, o.option("sample.from", "--from", metavar="RUN")]
Save = Annotated[Path | None, o.option("sample.save", "--save", metavar="DIR")]
Parquet = Annotated[Path | None, o.option("sample.parquet", "--parquet", metavar="FILE")]

# What only decoding has a use for, as the reader knows it.
_OF_DECODING = {
    "prompt": "prompt", "chat": "--chat", "system": "--system", "stop": "--stop", "ignore_eos": "--ignore-eos",
    "save": "--save", "model": "--model", "max_new_tokens": "--max-new-tokens", "dtype": "--dtype",
    "quantize": "--quantize", "cache_dtype": "--cache-dtype", "device": "--device", "threads": "--threads",
    "engine": "--engine",
}  # fmt: skip


def sample(
    prompt: Annotated[str | None, o.prompt_argument("run.prompt")] = None,
    grid: GridWords = None,
    seeds: Seeds = None,
    from_run: FromRun = None,
    model: o.Model = "starter",
    chat: o.Chat = None,
    system: o.System = None,
    max_new_tokens: o.MaxNewTokens = 128,
    stop: o.Stop = None,
    ignore_eos: o.IgnoreEos = False,
    checkpoint_settings: o.CheckpointSettings = False,
    save: Save = None,
    parquet: Parquet = None,
    image: o.Image = None,
    json: o.Json = False,
    dtype: o.Dtype = None,
    quantize: o.Quantize = "none",
    cache_dtype: o.CacheDtype = None,
    random_weights: o.RandomWeights = None,
    layers_on_disk: o.LayersOnDisk = "0",
    max_memory: o.MaxMemory = None,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    engine: o.Engine = "native",
    lang: o.Lang = None,
) -> None:
    given = dict(locals())
    _check(given)
    from decodescope.experiments.sample_grid import parse_grid

    cells = parse_grid(grid or (), seeds)
    if from_run is None:
        _decode(cells, given)
        return
    from decodescope.experiments.reroll import reroll

    _tell(reroll(from_run, cells, checkpoint_settings), given)


sample.__doc__ = t("help.sample")


def _check(given: dict[str, Any]) -> None:
    """What can be refused before anything is read."""
    if given["from_run"] is None and given["prompt"] is None:
        raise InputError("sample.no_prompt")
    options = signature(sample).parameters
    superfluous = [known for name, known in _OF_DECODING.items() if given[name] not in (options[name].default, [])]
    if given["from_run"] is not None and superfluous:
        raise InputError("sample.from_alone", names=", ".join(superfluous))
    if given["save"] is not None:
        refuse_used(given["save"])
    if given["image"] is not None:
        check_image(given["image"])
    if given["parquet"] is not None:
        from decodescope.experiments.sample_parquet import check_parquet

        check_parquet(given["parquet"])


def _decode(grid: "Grid", given: dict[str, Any]) -> None:
    """Decode all rows. Whatever ends the work, what there is by then is shown."""
    from decodescope.experiments.sample import SideBySide

    options = _options(given)
    with opened(given) as (session, prompt, progress):
        study = SideBySide(session, prompt, grid, options)
        try:
            with closing(study.steps(progress.reading)) as steps:
                for done, most in steps:
                    progress.decoding(done, most)
        finally:
            progress.close()
            if study.begun:
                _tell(study.report(), given)


def _options(given: dict[str, Any]) -> "RunOptions":
    from decodescope.options import RunOptions

    return RunOptions(
        checkpoint_settings=given["checkpoint_settings"],
        max_new_tokens=given["max_new_tokens"],
        stop=tuple(given["stop"] or ()),
        ignore_eos=given["ignore_eos"],
        save=given["save"],
    )


def _tell(report: "SampleReport", given: dict[str, Any]) -> None:
    if given["json"]:
        print(document_text(report))
    else:
        draw_report(report)
    if given["parquet"] is not None:
        from decodescope.experiments.sample_parquet import write_parquet

        write_parquet(given["parquet"], report)
        tell_parquet(given["parquet"])
    if given["image"] is not None:
        write_picture(given["image"], report)
