"""`decodescope pull`: get a model."""

from typing import Annotated

from decodescope.cli import options as o
from decodescope.cli.console import StderrReport, line, out
from decodescope.locale import translate as t
from decodescope.trace.lines import json_text


def pull(
    model: Annotated[str, o.prompt_argument("pull.model")] = "starter",
    json: o.Json = False,
    lang: o.Lang = None,
) -> None:
    from decodescope.catalogue import fetch
    from decodescope.models import describe

    report = StderrReport()
    files = fetch(model, report)
    report.close()
    if not json:
        out().print(line(describe(files)))
        return
    fields = ("source", "revision", "sha256", "bytes", "cached")
    facts = {"model": files.name, "path": str(files.path), **{name: getattr(files, name) for name in fields}}
    print(json_text(facts))


pull.__doc__ = t("help.pull")
