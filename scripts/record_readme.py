"""Record a real run on the starter model as the READMEs' pictures: docs/images/run.en.svg and run.zh.svg.

Each language runs in a process of its own, so that its times and its peak memory are those of one run.
"""

import re
from concurrent.futures import ProcessPoolExecutor
from html import escape, unescape
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

from rich.cells import cell_len

from decodescope.cli.console import out
from decodescope.cli.main import main as decodescope
from decodescope.locale import LANGUAGES

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
PROMPT = "用一句话解释什么是大语言模型"
COLUMNS = 126  # the widest line of a run
CELL_WIDTH, FONT_SIZE = 12.2, 20  # Rich's, in the picture's own units
WIDE_GAP = 2 * CELL_WIDTH - FONT_SIZE

# Rich's own format names a font on a server, which a picture in a README may not load, and no Chinese one.
FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix, .{unique_id}-title {{
  font-family: "DejaVu Sans Mono", Menlo, Consolas, "Noto Sans Mono CJK SC", "Noto Sans CJK SC",
    "PingFang SC", "Microsoft YaHei", monospace;
}}
.{unique_id}-matrix {{ font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
_TEXT = re.compile(
    r'<text (class="[^"]+-r\d+") x="([\d.]+)" (y="[\d.]+") textLength="[\d.]+" ([^>]*)>([^<]*)</text>'
)


def picture(language: str) -> str:
    """Run the README's first command in this process and return what it drew, as SVG."""
    console = out()
    console.record, console.width = True, COLUMNS
    command = ["run", PROMPT, "-n", "6", "--lang", language]
    if decodescope(command) != 0:
        raise SystemExit(f"the run in {language} failed")
    title = f'decodescope run "{PROMPT}" -n 6'
    drawn = console.export_svg(title=title, code_format=FORMAT, unique_id=f"run-{language}")
    return _TEXT.sub(_on_the_grid, drawn)


def _on_the_grid(found: re.Match[str]) -> str:
    """One text cut where the width of its characters changes: Rich measures all of them as one cell wide."""
    style, start, y, rest, content = found.groups()
    x, pieces = float(start), []
    for cells, letters in groupby(unescape(content), key=cell_len):
        text = "".join(letters)
        width = len(text) * cells * CELL_WIDTH
        if text.strip("\xa0 "):
            # A wide character is as broad as its font is high: centred in its two cells.
            fit = f'x="{x + WIDE_GAP / 2:g}" letter-spacing="{WIDE_GAP:g}"'
            if cells == 1:
                fit = f'x="{x:g}" textLength="{width:g}"'
            pieces.append(f"<text {style} {fit} {y} {rest}>{escape(text, quote=False)}</text>")
        x += width
    return "".join(pieces)


def main() -> None:
    """Write both pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for language, svg in zip(LANGUAGES, pool.map(picture, LANGUAGES), strict=True):
            (FOLDER / f"run.{language}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
