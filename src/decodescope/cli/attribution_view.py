"""Drawing where a logit comes from: what embedding, attention, MLPs and heads add to it, as bars round zero."""

from typing import TYPE_CHECKING

from rich.text import Text

from decodescope.cli.bars import bar
from decodescope.cli.console import line, out
from decodescope.cli.tables import plain_table
from decodescope.cli.units import number
from decodescope.locale import translate as t
from decodescope.visible import token_text

if TYPE_CHECKING:
    from decodescope.experiments.lens_records import Attribution

_SIDE_CELLS = 10  # of a bar, on each side of zero
_HALF = "▐"


def draw_attribution(shares: "Attribution") -> None:
    """One token's logit taken apart."""
    out().print(
        line((t("lens.attribution", token=token_text(shares.text), logit=number(shares.run_logit)), "bold"))
    )
    out().print(line("  ", (t("lens.frozen", scale=f"{shares.norm_scale:.4g}"), "dim")))
    out().print(line("  ", (t("lens.indirect"), "dim")))
    _draw_layers(shares)
    _draw_heads(shares)
    sums = {"total": number(shares.total_logit, 4), "logit": number(shares.run_logit, 4)}
    errors = {"error": f"{shares.error_logit:.1e}", "heads": f"{shares.heads_error_logit:.1e}"}
    out().print(line("  ", t("lens.sum", **sums, **errors)))


def _draw_layers(shares: "Attribution") -> None:
    widest = max(
        abs(shares.embed_logit),
        *(max(abs(layer.attention_logit), abs(layer.mlp_logit)) for layer in shares.layers),
    )
    table = plain_table()
    for heading in (t("lens.layer"), t("lens.attention"), "", t("lens.mlp"), ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    table.add_row(Text(t("lens.embedding")), *_share(shares.embed_logit, widest))
    for layer in shares.layers:
        table.add_row(
            Text(str(layer.layer)), *_share(layer.attention_logit, widest), *_share(layer.mlp_logit, widest)
        )
    out().print(table)


def _draw_heads(shares: "Attribution") -> None:
    out().print(line((t("lens.heads"), "dim")))
    widest = max(abs(head.logit) for head in shares.strongest_heads)
    table = plain_table()
    table.show_header = False
    for head in shares.strongest_heads:
        place = t("lens.head", layer=head.layer, head=head.head, kv_head=head.kv_head)
        table.add_row(Text(place), *_share(head.logit, widest))
    out().print(table)


def _share(logit: float, widest: float) -> tuple[Text, Text]:
    """A contribution as a figure and as a bar that goes left for less and right for more."""
    style = "green" if logit >= 0 else "red"
    return Text(f"{logit:+.3f}", justify="right"), Text(_signed_bar(logit / (widest or 1.0)), style)


def _signed_bar(share: float) -> str:
    """A bar from zero in the middle, for -1 to 1; its left side ends in half cells, as there are no eighths."""
    whole, half = divmod(round(max(-share, 0.0) * _SIDE_CELLS * 2), 2)
    left = _HALF * half + "█" * whole
    return left.rjust(_SIDE_CELLS) + "│" + bar(share, _SIDE_CELLS)
