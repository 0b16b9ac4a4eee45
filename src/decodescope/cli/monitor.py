"""`decodescope monitor`: a server watched in the terminal, and what Prometheus and Grafana need."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from decodescope.cli import options as o
from decodescope.cli.monitor_init import init
from decodescope.errors import InputError
from decodescope.locale import translate as t

Url = Annotated[str, typer.Argument(help=t("help.monitor.url"), show_default=False, metavar="URL")]
Token = Annotated[str | None, o.option("monitor.token", "--token", metavar="TOKEN")]
TokenFile = Annotated[Path | None, o.option("monitor.token_file", "--token-file", metavar="FILE")]
Every = Annotated[float, o.option("monitor.every", "--every", metavar="SECONDS")]
Once = Annotated[bool, o.option("monitor.once", "--once")]
_LEAST_S, _MOST_S = 0.2, 3600.0


class _UrlFirst(TyperGroup):
    """`monitor URL` is `monitor watch URL`: whatever is no command is what to watch."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["watch", *args]
        return super().parse_args(ctx, args)


def watch(
    url: Url,
    token: Token = None,
    token_file: TokenFile = None,
    every: Every = 2.0,
    once: Once = False,
    json: o.Json = False,
    lang: o.Lang = None,
) -> None:
    if not _LEAST_S <= every <= _MOST_S:
        raise InputError("monitor.every", value=every, least=_LEAST_S, most=_MOST_S)
    if token and token_file:
        raise InputError("monitor.two_tokens")
    from decodescope.cli.monitor_view import draw
    from decodescope.monitor.scrape import address_of, token_from
    from decodescope.monitor.watching import Watch, readings, second_look

    watched = Watch(address_of(url, token_from(token_file) if token_file else token))
    with suppress(KeyboardInterrupt):  # the way to end it
        draw([second_look(watched, every)] if once else readings(watched, every), json)


watch.__doc__ = t("help.monitor.watch")
monitor = typer.Typer(cls=_UrlFirst, help=t("help.monitor"), rich_markup_mode=None, no_args_is_help=True)
monitor.command()(watch)
monitor.command()(init)
