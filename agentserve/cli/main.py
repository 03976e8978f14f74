"""The command line: one function per subcommand, each in a module of its own.

A new subcommand is a function with typer annotations and a line in `COMMANDS`. Nothing here or in
those modules may import torch at the top: `agentserve --help` has to be quick.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from agentserve import __version__
from agentserve.cli.bench import bench
from agentserve.cli.chat import chat
from agentserve.cli.demo import demo
from agentserve.cli.doctor import doctor
from agentserve.cli.fit import fit
from agentserve.cli.keys import keys
from agentserve.cli.output import fail
from agentserve.cli.records import records
from agentserve.cli.serve import serve
from agentserve.cli.sessions import sessions
from agentserve.cli.sim import sim
from agentserve.values import ConfigError

COMMANDS: dict[str, Callable[..., None]] = {
    "serve": serve,
    "demo": demo,
    "chat": chat,
    "doctor": doctor,
    "fit": fit,
    "records": records,
}

app = typer.Typer(
    name="agentserve",
    help="An inference server whose unit is the agent's session, not the request.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _name, _function in COMMANDS.items():
    app.command(_name)(_function)
app.add_typer(bench, name="bench")
app.add_typer(sim, name="sim")
app.add_typer(sessions, name="sessions")
app.add_typer(keys, name="keys")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"agentserve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the command `agentserve`."""
    try:
        app()
    except ConfigError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
