"""The dashboard's queries as Grafana would send them, and what a sane answer is."""

from decodescope.monitor.rules import ENGINES, Pace

# The least and the most that a sane value of a unit can be, at a server on this machine.
SANE = {"percentunit": (0, 1), "s": (0, 600), "bytes": (0, 2**50), "celsius": (0, 120), "watt": (0, 2000),
        "suffix: nats": (0, 10_000), "suffix: tok/s": (0, 1e6), "reqps": (0, 1e5), "none": (0, 1e4), "short": (0, 1e7)}  # fmt: skip


def asked(expr: str, pace: Pace) -> str:
    """A panel's query with its variables filled in as for "all"."""
    values = {"$job": "|".join(ENGINES), "$instance": ".*", "$model_name": ".*", "$__rate_interval": pace.window}
    for name, value in values.items():
        expr = expr.replace(name, value)
    assert "$" not in expr
    return expr
