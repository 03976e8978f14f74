"""`agentserve sessions`: what a running server knows of its sessions."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer
from rich.console import Console

from agentserve.cli.chat import error_text
from agentserve.cli.output import fail
from agentserve.cli.session_view import listing, story

PLAIN_WIDTH = 160  # columns where the output is no terminal
ANSWER_SECONDS = 30.0  # a server asks its workers, which answer between steps

Url = Annotated[str, typer.Option("--url", help="Where the server listens.")]
Key = Annotated[str | None, typer.Option("--api-key", help="One of the server's keys.")]
AsJson = Annotated[bool, typer.Option("--json", help="The server's own JSON.")]
LOCAL = "http://127.0.0.1:8000"

sessions = typer.Typer(help="What a running server knows of its sessions.", invoke_without_command=True)


@sessions.callback()
def list_sessions(
    context: typer.Context,
    *,
    limit: Annotated[int, typer.Option(min=1, max=200, help="How many, the last used first.")] = 50,
    url: Url = LOCAL,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """List sessions: state, size, where their KV is, and what was decided about it."""
    if context.invoked_subcommand is not None:
        return
    reply = ask(url, api_key, "/agentserve/sessions", {"limit": str(limit), "detail": "true"})
    if as_json:
        typer.echo(json.dumps(reply, indent=2))
        return
    found = reply.get("data")
    if not isinstance(found, list):
        fail(f"{url} does not answer as an AgentServe server does")
    if not found:
        typer.echo("no sessions")
        return
    _console().print(listing(found, time.time()))
    if reply.get("has_more"):
        typer.echo(f"... and older ones; --limit shows more than {len(found)}")


@sessions.command("show")
def show_session(
    session: Annotated[str, typer.Argument(help="Its id.", metavar="ID")],
    *,
    url: Url = LOCAL,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Draw one session: its states over time, its waits, where its KV is and why."""
    reply = ask(url, api_key, f"/agentserve/sessions/{_segment(session)}", {})
    if as_json:
        typer.echo(json.dumps(reply, indent=2))
        return
    console = _console()
    for part in story(reply, time.time()):
        console.print(part)


def ask(
    url: str,
    api_key: str | None,
    path: str,
    query: dict[str, str],
    transport: httpx.BaseTransport | None = None,
) -> dict[str, Any]:
    """A GET's JSON object. Leaves with one line where there is none."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(
            base_url=url, headers=headers, timeout=ANSWER_SECONDS, transport=transport
        ) as client:
            response = client.get(path, params=query)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        fail(f"cannot talk to {url}: {error}")
    if response.status_code != 200:
        fail(error_text(response))
    try:
        reply = response.json()
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        fail(f"{url} does not answer as an AgentServe server does")
    return reply


def _segment(name: str) -> str:
    """A session's id as one piece of a path, whatever is in it."""
    return quote(name, safe="")


def _console() -> Console:
    return Console(highlight=False) if sys.stdout.isatty() else Console(width=PLAIN_WIDTH, highlight=False)
