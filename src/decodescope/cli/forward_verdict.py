"""What a walk through the forward pass showed: broken numbers, the first departure, what was kept."""

from typing import TYPE_CHECKING

from rich.text import Text

from decodescope.cli.console import line, out
from decodescope.cli.units import binary_bytes, count, figure
from decodescope.locale import translate as t
from decodescope.trace.site_records import address
from decodescope.visible import token_text

if TYPE_CHECKING:
    from decodescope.analysis.departure import Comparison, Departure
    from decodescope.experiments.forward_records import ForwardReport
    from decodescope.observe.kept import Dropped
    from decodescope.trace.site_records import NonFinite

_SHOWN_DROPPED = 8


def place(at: "NonFinite | Departure | Dropped") -> str:
    """`layers.3.up`, or `embed`."""
    return address(at.site, at.layer)


def draw_reference(against: "Comparison") -> None:
    """Which run this one stands beside, and whether the two can be compared: ids first, then settings."""
    out().print(line((t("forward.against", folder=against.folder), "bold")))
    if against.ids_part_at is None:
        out().print(line("  ", (t("forward.same_ids"), "green")))
    else:
        out().print(line("  ", (t("forward.other_ids", position=against.ids_part_at), "red")))
    for each in against.differences:
        said = t("forward.difference", name=each.name, here=each.here, there=each.there)
        out().print(line("  ", (said, "yellow")))
    if against.ids_part_at is not None:
        return
    sites = {"compared": count(against.compared), "missing": count(against.missing)}
    out().print(line("  ", t("forward.compared", **sites, tolerance=figure(against.tolerance))))


def draw_verdict(report: "ForwardReport") -> None:
    """The findings, worst first, and what lies in the run folder."""
    out().print()
    if report.first_nonfinite is not None:
        _draw_nonfinite(report.first_nonfinite, report)
    if report.against is not None:
        _draw_comparison(report.against)
    if report.reconstruction_error is not None:
        _explain(t("forward.recomputed", error=figure(report.reconstruction_error)))
    if report.values:
        _explain(t("forward.edges"))
    if report.growth:
        _explain(t("forward.how"))
    _draw_kept(report)
    if report.finish_reason == "interrupted":
        out().print(line((t("kv.incomplete"), "yellow")))


def _explain(text: str) -> None:
    out().print(Text(text, "dim"), soft_wrap=False)


def _draw_nonfinite(broken: "NonFinite", report: "ForwardReport") -> None:
    token = token_text(report.token_at(broken.position))
    at = {"site": place(broken), "position": broken.position, "token": token, "step": broken.step}
    index = ", ".join(map(str, broken.index))
    said = t("forward.nonfinite", value=broken.value, index=index, **at)
    limit = t("forward.limit", dtype=broken.dtype, limit=figure(broken.limit, 5))
    out().print(line((said, "bold red")))
    if broken.before is not None:
        before = t("forward.magnitude", source=broken.source, value=figure(broken.before, 5))
        out().print(line("  ", before))
    out().print(line("  ", limit))


def _draw_comparison(against: "Comparison") -> None:
    departs = against.departure
    if departs is not None:
        values = {"figure": departs.figure, "here": departs.here, "there": departs.there}
        apart = {"distance": figure(departs.distance), "tolerance": figure(against.tolerance)}
        said = t("forward.departs", site=place(departs), step=departs.step, **values, **apart)
        out().print(line((said, "bold red")))
    elif against.compared:
        said = t("forward.departs_nowhere", distance=figure(against.largest_distance))
        out().print(line((said, "green")))
    if against.tokens_part_at is not None:
        out().print(line((t("forward.other_token", step=against.tokens_part_at), "red")))


def _draw_kept(report: "ForwardReport") -> None:
    if report.trace is not None:
        out().print(line((t("forward.saved", folder=report.trace), "dim")))
    if report.kept or report.dropped:
        sizes = {"bytes": binary_bytes(report.kept_bytes), "budget": binary_bytes(report.budget_bytes)}
        out().print(line(t("forward.kept", count=count(len(report.kept)), **sizes)))
    for gone in report.dropped[:_SHOWN_DROPPED]:
        said = t("forward.dropped", site=place(gone), step=gone.step, bytes=binary_bytes(gone.bytes))
        out().print(line("  ", (said, "yellow")))
    if report.dropped[_SHOWN_DROPPED:]:
        rest = count(len(report.dropped[_SHOWN_DROPPED:]))
        out().print(line("  ", (t("forward.dropped_more", count=rest), "yellow")))
