"""`agentserve sessions`: what a running server knows of its sessions."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
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
MOST = 200  # sessions of which a server tells where their KV is
LOCAL = "http://127.0.0.1:8000"

Url = Annotated[str | None, typer.Option("--url", help=f"Where the server listens.  [default: {LOCAL}]")]
Key = Annotated[str | None, typer.Option("--api-key", help="One of the server's keys.")]
AsJson = Annotated[bool, typer.Option("--json", help="The server's own JSON.")]


@dataclass(frozen=True, slots=True)
class Asking:
    """What was said before the subcommand's name; it holds where nothing else is said after it."""

    url: str | None
    api_key: str | None
    as_json: bool


sessions = typer.Typer(help="What a running server knows of its sessions.", invoke_without_command=True)


@sessions.callback()
def list_sessions(
    context: typer.Context,
    *,
    limit: Annotated[int, typer.Option(min=1, max=MOST, help="How many, the last used first.")] = 50,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """List sessions: state, size, what they wait for, where their KV is, and what was decided about it."""
    if context.invoked_subcommand is not None:
        context.obj = Asking(url, api_key, as_json)
        return
    url = _url(url)
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
    console = _console()
    console.print(listing(found, time.time(), console.width))
    if reply.get("has_more"):
        more = f"; --limit shows up to {MOST}" if limit < MOST else ""
        of_all = f" of {reply['total']}" if "total" in reply else ""
        typer.echo(f"... and older ones: this is {len(found)}{of_all}{more}")


@sessions.command("show")
def show_session(
    context: typer.Context,
    session: Annotated[str, typer.Argument(help="Its id.", metavar="ID")],
    *,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Draw one session: its states over time, its waits, where its KV is and why."""
    before = context.obj if isinstance(context.obj, Asking) else Asking(None, None, as_json=False)
    url, api_key, as_json = _url(url or before.url), api_key or before.api_key, as_json or before.as_json
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


def _url(given: str | None) -> str:
    """A host and port alone are enough."""
    if given is None:
        return LOCAL
    return given if "://" in given else f"http://{given}"


def _segment(name: str) -> str:
    """A session's id as one piece of a path, whatever is in it."""
    return quote(name, safe="")


def _console() -> Console:
    return Console(highlight=False) if sys.stdout.isatty() else Console(width=PLAIN_WIDTH, highlight=False)
