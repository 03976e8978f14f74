"""`agentserve demo`: the main job, from an agent's first message to the answer after its tool call."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from agentserve.cli import demo_story as story
from agentserve.cli.chat import ChatError, error_text, events
from agentserve.cli.local_server import NoServer, local_server
from agentserve.cli.output import fail
from agentserve.cli.timeline import timeline

Message = dict[str, Any]


@dataclass
class Turn:
    """What one streamed chat completion brought."""

    session: str = ""
    text: str = ""
    ids: list[int] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def generated(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def computed(self) -> int:
        """Prompt tokens the executor ran."""
        return self.prompt - self.cached

    @property
    def first_token(self) -> float:
        """TTFT in seconds, as the server measured it."""
        return float(self.usage["agentserve"]["ttft_seconds"])


def demo(
    *,
    model: Annotated[str, typer.Option(help="What to serve.")] = "smollm2-135m",
    url: Annotated[
        str | None, typer.Option(help="Use this server.", show_default="starts one of its own")
    ] = None,
    wait: Annotated[float, typer.Option(help="Seconds the tool takes.", min=0.0)] = 2.0,
) -> None:
    """Run an agent session with a tool call, and show what the resume had to compute."""
    console = Console(highlight=False)
    with contextlib.ExitStack() as stack:
        try:
            if url is None:
                console.print(f"Starting a server on {model} ...")
                url = stack.enter_context(local_server(["--model", model]))
            client = stack.enter_context(httpx.Client(base_url=url, timeout=httpx.Timeout(10, read=None)))
            problem = run(client, console, wait)
        except NoServer as error:
            fail(str(error))
        except ChatError as error:
            fail(f"the server refused: {error}")
        except httpx.HTTPError as error:
            fail(f"cannot talk to {url}: {error}")
    if problem:
        fail(problem)


def run(client: httpx.Client, console: Console, wait: float) -> str:
    """The whole story; what went wrong in it, or an empty text. Raises ChatError, httpx.HTTPError."""
    page = int(client.get("/health").json()["page_size"])
    messages: list[Message] = [
        {"role": "system", "content": story.system_prompt()},
        {"role": "user", "content": story.QUESTION},
    ]
    console.rule("1  The agent asks; the model must call a tool")
    console.print(f"user: {story.QUESTION}")
    forced = {"type": "function", "function": {"name": "look_up_order"}}
    first = ask(client, messages, tool_choice=forced, max_tokens=96)
    if not first.call_id:
        return "the model made no tool call"
    arguments = json.loads(first.arguments)
    console.print(f"call: {first.name}({json.dumps(arguments)})   every byte sampled under a grammar")
    console.print(f"its {len(first.ids)} token ids: {first.ids}", soft_wrap=True)

    console.rule(f"2  The tool works for {wait:g} s; the session keeps its KV")
    state = session_of(client, first.session)["state"]
    console.print(f"session {first.session} is {state}")
    if state != "WAITING_TOOL":
        return f"the session should be WAITING_TOOL, but is {state}"
    with console.status("the tool is working"):
        time.sleep(wait)
    console.print(f"tool: {story.RESULT}", soft_wrap=True)

    console.rule("3  The result comes; only what is new is prefilled")
    call = {"id": first.call_id, "type": "function"}
    call["function"] = {"name": first.name, "arguments": first.arguments}  # type: ignore[assignment]
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": first.call_id, "content": story.RESULT},
    ]
    second = ask(client, messages, tool_choice="none", max_tokens=48, session=first.session)
    console.print(f"assistant: {second.text.strip()}", soft_wrap=True)
    console.print(figures(first, second))
    shown = session_of(client, second.session)
    console.rule(f"Session {second.session}: {shown['state']}")
    console.print(timeline(shown["history"], time.time()))
    return verdict(console, first, second, page)


def ask(
    client: httpx.Client,
    messages: list[Message],
    *,
    tool_choice: object,
    max_tokens: int,
    session: str | None = None,
) -> Turn:
    """One streamed chat completion with the story's tools. Raises ChatError."""
    body = {
        "model": client.get("/v1/models").json()["data"][0]["id"],
        "messages": messages,
        "tools": story.tools(),
        "tool_choice": tool_choice,
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    turn = Turn()
    headers = {"x-session-id": session} if session else {}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        if response.status_code != 200:
            response.read()
            raise ChatError(error_text(response))
        turn.session = response.headers["x-session-id"]
        for choice in choices(turn, events(response.iter_lines())):
            turn.ids += choice.get("token_ids") or []
            delta = choice.get("delta") or {}
            turn.text += delta.get("content") or ""
            for piece in delta.get("tool_calls") or ():
                function = piece.get("function") or {}
                turn.call_id += piece.get("id") or ""
                turn.name += function.get("name") or ""
                turn.arguments += function.get("arguments") or ""
    return turn


def choices(turn: Turn, stream: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The choices of each event; its usage goes to the turn, an error is a ChatError."""
    for event in stream:
        if "error" in event:
            raise ChatError(str(event["error"].get("message")))
        turn.usage = event.get("usage") or turn.usage
        yield from event.get("choices") or ()


def session_of(client: httpx.Client, session: str) -> dict[str, Any]:
    """What the server knows of a session. Raises ChatError."""
    response = client.get(f"/agentserve/sessions/{session}")
    if response.status_code != 200:
        raise ChatError(error_text(response))
    found: dict[str, Any] = response.json()
    return found


def figures(first: Turn, second: Turn) -> Table:
    """Both turns side by side."""
    table = Table(box=None)
    for name in ("", "prompt", "cached", "computed", "generated", "TTFT"):
        table.add_column(name, justify="right" if name else "left")
    for name, turn in (("first turn", first), ("resume", second)):
        counts = (turn.prompt, turn.cached, turn.computed, turn.generated)
        table.add_row(name, *(f"{count:,}" for count in counts), f"{1000 * turn.first_token:,.0f} ms")
    return table


def appended(first: Turn, second: Turn) -> int:
    """Tokens that the tool message added to the prompt: its rendered form, up to the next answer."""
    return second.prompt - first.prompt - first.generated


def verdict(console: Console, first: Turn, second: Turn, page: int) -> str:
    """Did the resume compute the tool message and at most one page more? What is wrong, or nothing."""
    added = appended(first, second)
    if second.session != first.session:
        return f"the result opened session {second.session} instead of resuming {first.session}"
    if second.computed > added + page:
        return (
            f"the resume computed {second.computed} tokens; the tool message has {added}, "
            f"so at most {added + page} were needed"
        )
    console.print(
        f"The resume computed {second.computed} of {second.prompt:,} prompt tokens: the rendered tool "
        f"message is {added} tokens, and at most one page of {page} may come on top."
    )
    return ""
