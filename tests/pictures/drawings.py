"""Small drawings, and how to read what came out."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from decodescope.pictures import (
    Bar,
    Curve,
    Matrix,
    Panel,
    Row,
    Texts,
    draw_atlas,
    draw_bars,
    draw_curves,
    draw_heat_map,
)

NONE = Texts("")


def causal(tokens: int) -> np.ndarray:
    """Even attention over all earlier tokens, NaN over later ones."""
    shares = np.tril(np.ones((tokens, tokens))) / np.arange(1, tokens + 1)[:, None]
    return np.where(np.tril(np.ones((tokens, tokens))) > 0, shares, np.nan)


def heat_map(path: Path, labels: list[str], texts: Texts = NONE) -> tuple[str, ...]:
    return draw_heat_map(path, Matrix(causal(len(labels)), labels, labels), texts)


def atlas(path: Path, texts: Texts = NONE) -> tuple[str, ...]:
    panels = [Panel(causal(5), f"head {head}", f"KV {head // 2}") for head in range(4)]
    return draw_atlas(path, [Row(f"layer {layer}", panels) for layer in range(3)], texts)


def curves(path: Path, label: str = "cached", texts: Texts = NONE) -> tuple[str, ...]:
    x = np.array([16.0, 32, 64])
    return draw_curves(path, [Curve(label, x, x / 10), Curve("uncached", x, np.array([1, np.nan, 9]))], texts)


def bars(path: Path, texts: Texts = NONE) -> tuple[str, ...]:
    rows = [Bar("batch of 1", 10, 9, 12, limit=20), Bar("transformers", 5, 5, 5)]
    return draw_bars(path, [(rows, texts), (rows[1:], texts)])


DRAWINGS = {
    "heat map": lambda path: heat_map(path, ["用", "$a$", "_b"]),
    "atlas": atlas,
    "curves": curves,
    "bars": bars,
}


def words(path: Path) -> list[str]:
    """Every text of an SVG, in the order it is drawn."""
    elements = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return [element.text or "" for element in elements]
