"""Attention as a picture file: one head as a heat map, a layer's heads as an atlas, or all layers by all heads."""

from pathlib import Path
from typing import TYPE_CHECKING

from decodescope.cli.attention_view import error_text, group_name, labels, pooled_text
from decodescope.cli.one_prompt import tell_image
from decodescope.locale import translate as t
from decodescope.visible import visible

if TYPE_CHECKING:
    from decodescope.experiments.attention import Attention
    from decodescope.pictures import Panel, Texts


def write_picture(path: Path, found: "Attention") -> None:
    """Draw what was found into a file. Raises InputError."""
    grid = found.grid
    alone = len(grid.layers) == len(grid.heads) == 1
    missing = _draw_head(path, found) if alone else _draw_heads(path, found)
    tell_image(path, missing)


def _draw_head(path: Path, found: "Attention") -> tuple[str, ...]:
    from decodescope.pictures import Matrix, draw_heat_map

    report, grid = found.report, found.grid
    matrix = Matrix(grid.values[0, 0], labels(report, grid.rows), labels(report, grid.columns))
    head = t("attention.one_head", layer=grid.layers[0], head=grid.heads[0])
    return draw_heat_map(path, matrix, _texts(found, f"{head} · {group_name(report.heads[0].kv_head)}"))


def _draw_heads(path: Path, found: "Attention") -> tuple[str, ...]:
    """One layer in rows of its KV heads, several layers as a row each."""
    from decodescope.pictures import Row, draw_atlas, rows_by_group

    grid = found.grid
    if len(grid.layers) == 1:
        texts = _texts(found, t("attention.layer", layer=grid.layers[0]))
        return draw_atlas(path, rows_by_group(_panels(found, 0)), texts)
    rows = [
        Row(t("attention.layer", layer=layer), _panels(found, index)) for index, layer in enumerate(grid.layers)
    ]
    return draw_atlas(path, rows, _texts(found, t("attention.all_layers")))


def _panels(found: "Attention", layer: int) -> "list[Panel]":
    from decodescope.pictures import Panel

    grid = found.grid
    kv_heads = {head.head: head.kv_head for head in found.report.heads}
    return [
        Panel(grid.values[layer, index], f"{t('attention.head')} {head}", group_name(kv_heads[head]))
        for index, head in enumerate(grid.heads)
    ]


def _texts(found: "Attention", subject: str) -> "Texts":
    from decodescope.pictures import Texts

    report, grid = found.report, found.grid
    title = t("attention.picture", model=visible(report.model), subject=subject)
    remarks = [error_text(report)] + ([pooled_text(grid)] if grid.pooled != (1, 1) else [])
    return Texts(
        "\n".join([title, *remarks]), x=t("attention.keys"), y=t("attention.queries"), scale=t("attention.weight")
    )
