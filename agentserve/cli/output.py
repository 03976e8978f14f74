"""How commands speak: results on stdout, errors as one line on stderr."""

from __future__ import annotations

from typing import NoReturn

import typer


def fail(message: str) -> NoReturn:
    """Say what is wrong and leave with status 1."""
    typer.echo(f"agentserve: {message}", err=True)
    raise SystemExit(1)
