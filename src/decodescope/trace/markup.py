"""HTML put together so that no text can become markup: strings go in through `text`, elements through `tag`.

There is no script, no link and no outside file in it, and every style is bound to the class of its outermost
element. Colours are transparent layers over whatever the page has, light or dark.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NewType, TypeVar

from decodescope.visible import visible

Markup = NewType("Markup", str)
T = TypeVar("T")

STYLE = Markup("""<style>
.dsc { font: 13px/1.55 system-ui, "Noto Sans CJK SC", "Microsoft YaHei", sans-serif; color: inherit }
.dsc .dsc-title { font-size: 15px; font-weight: 600 }
.dsc .dsc-dim { opacity: .65 }
.dsc .dsc-part { margin: .9em 0 .25em; font-weight: 600 }
.dsc .dsc-text { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.85; padding-left: .8em;
  border-left: 3px solid rgba(128,128,128,.3) }
.dsc .dsc-token { unicode-bidi: isolate; border-radius: 3px; padding: .1em 0;
  box-shadow: inset 1px 0 rgba(128,128,128,.35) }
.dsc .dsc-template { opacity: .5 }
.dsc .dsc-warn { color: #d9480f; font-weight: 600 }
.dsc .dsc-scroll { overflow-x: auto }
.dsc table { border-collapse: collapse; border: 0; margin: 0; font-size: 12px; font-variant-numeric: tabular-nums }
.dsc tr, .dsc th, .dsc td { background: none; border: 0 }
.dsc th, .dsc td { border-bottom: 1px solid rgba(128,128,128,.2); padding: .2em .6em; text-align: left;
  vertical-align: middle; white-space: nowrap; max-width: none }
.dsc th { font-weight: 500; opacity: .65 }
.dsc th.dsc-num, .dsc td.dsc-num { text-align: right }
.dsc tr.dsc-bad td { background: rgba(224,49,49,.2) }
.dsc .dsc-chips { display: flex; gap: 5px }
.dsc .dsc-chip { display: flex; justify-content: space-between; gap: 6px; width: 8.6em; padding: 0 5px;
  border-radius: 3px; border: 1px solid rgba(128,128,128,.3) }
.dsc .dsc-chosen { border-color: rgb(34,139,230); font-weight: 600 }
.dsc .dsc-clip { unicode-bidi: isolate; overflow: hidden; text-overflow: ellipsis; white-space: pre;
  max-width: 14em }
.dsc .dsc-facts td:first-child { opacity: .65 }
.dsc .dsc-facts td:last-child { white-space: normal; overflow-wrap: anywhere }
.dsc svg { display: block; color: inherit }
</style>""")


def text(value: object) -> Markup:
    """Any text, so that it is read and never obeyed: markup escaped, control and bidi characters made visible."""
    return Markup(escape(visible(str(value))))


def joined(parts: Iterable[Markup]) -> Markup:
    """One after the other."""
    return Markup("".join(parts))


def tag(name: str, *inside: Markup, **attributes: str | float) -> Markup:
    """An element; `class_` becomes class, `stroke_width` stroke-width."""
    given = (f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{''.join(given)}>{''.join(inside)}</{name}>")


def view(*parts: Markup) -> Markup:
    """A whole fragment, its styles with it."""
    return tag("div", STYLE, *parts, class_="dsc")


def table(heads: Sequence[tuple[str, str]], rows: Iterable[Markup]) -> Markup:
    """A table that scrolls by itself; `heads` are (text, class)."""
    cells = (tag("th", text(head), class_=style, scope="col") for head, style in heads)
    whole = tag("table", tag("thead", tag("tr", *cells)), tag("tbody", *rows))
    return tag("div", whole, class_="dsc-scroll")


def cell(value: object, style: str = "") -> Markup:
    """A cell of text."""
    return tag("td", text(value), class_=style) if style else tag("td", text(value))


def ends(items: Sequence[T], first: int, last: int) -> tuple[Sequence[T], int, Sequence[T]]:
    """The first and the last of many, and how many lie between; all of them as the first where they are few."""
    if len(items) <= first + last:
        return items, 0, ()
    return items[:first], len(items) - first - last, items[len(items) - last :]
