"""The commands, gathered."""

import typer

import decodescope
from decodescope.cli import options as o
from decodescope.cli.attention import attention
from decodescope.cli.bench import bench
from decodescope.cli.fork import fork
from decodescope.cli.forward import forward
from decodescope.cli.kv import kv
from decodescope.cli.lens import lens
from decodescope.cli.model import model
from decodescope.cli.monitor import monitor
from decodescope.cli.pull import pull
from decodescope.cli.run import run
from decodescope.cli.sample import sample
from decodescope.cli.serve import serve
from decodescope.cli.show import export, show
from decodescope.cli.tokens import tokens
from decodescope.locale import translate as t

app = typer.Typer(
    name="decodescope",
    help=t("help.decodescope"),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut Chinese lines short
    context_settings={"help_option_names": ["--help", "-h"]},
)
for command in (run, fork, forward, lens, attention, kv, sample, serve, bench, tokens, model, pull, show, export):
    app.command()(command)
app.add_typer(monitor, name="monitor")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    lang: o.Lang = None,
    version: bool = typer.Option(False, "--version", help=t("help.version"), show_default=False),
) -> None:
    """Options of the program itself."""
    if version:
        print(f"decodescope {decodescope.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


root.__doc__ = t("help.decodescope")
