"""`decodescope pull`: get a model."""

from dataclasses import asdict
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

    with StderrReport() as report:
        pulled = fetch(model, report)
    if json:
        print(json_text(asdict(pulled)))
    else:
        out().print(line(pulled.description))


pull.__doc__ = t("help.pull")
