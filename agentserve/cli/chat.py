"""`agentserve chat`: talk to a running server from the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer

from agentserve.cli.output import fail

Message = dict[str, Any]


@dataclass
class Conversation:
    """One session with the server: its history here, its KV there."""

    client: httpx.Client
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    session: str | None = None
    history: list[Message] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    def say(self, text: str) -> Iterator[str]:
        """Send one user message; the answer as it comes. The history grows when it is complete."""
        messages = [*self.history, {"role": "user", "content": text}]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if self.temperature is not None:
            body["temperature"] = self.temperature
        headers = {"x-session-id": self.session} if self.session else {}
        parts: list[str] = []
        with self.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                response.read()
                raise ChatError(error_text(response))
            self.session = response.headers.get("x-session-id", self.session)
            for event in events(response.iter_lines()):
                if "error" in event:
                    raise ChatError(str(event["error"].get("message", event["error"])))
                self.usage = event.get("usage") or self.usage
                for choice in event.get("choices", ()):
                    piece = choice.get("delta", {}).get("content")
                    if piece:
                        parts.append(piece)
                        yield piece
        self.history = [*messages, {"role": "assistant", "content": "".join(parts)}]


class ChatError(Exception):
    """The server refused or failed; its own words."""


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, to `[DONE]` or the end."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if isinstance(event, dict):
            yield event


def error_text(response: httpx.Response) -> str:
    """What an error reply says, whatever its shape."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}: {response.text[:200]}"


def chat(
    message: Annotated[str | None, typer.Argument(help="One message; without it, a conversation.")] = None,
    *,
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Its name.", show_default="the server's first")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    session: Annotated[str | None, typer.Option(help="Go on with this session.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0)] = None,
    api_key: Annotated[str | None, typer.Option()] = None,
) -> None:
    """Talk to a running server. Ends with /exit, Ctrl-D or Ctrl-C."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10, read=None)) as client:
        try:
            conversation = Conversation(
                client, model or first_model(client), max_tokens, temperature, session
            )
            if system:
                conversation.history.append({"role": "system", "content": system})
            if message is not None:
                _answer(conversation, message)
            else:
                _converse(conversation)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            fail(f"cannot talk to {url}: {error}")
        except ChatError as error:
            fail(str(error))


def first_model(client: httpx.Client) -> str:
    """The first model the server lists. Raises ChatError."""
    response = client.get("/v1/models")
    if response.status_code != 200:
        raise ChatError(error_text(response))
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ChatError("the server lists no model") from None


def _converse(conversation: Conversation) -> None:
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            typer.echo()
            return
        if text in ("/exit", "/quit"):
            return
        if text:
            try:
                _answer(conversation, text)
            except ChatError as error:  # this message failed; the conversation goes on without it
                typer.echo(f"agentserve: {error}", err=True)


def _answer(conversation: Conversation, text: str) -> None:
    for piece in conversation.say(text):
        typer.echo(piece, nl=False)
    typer.echo()
    usage = conversation.usage
    if usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        typer.echo(
            f"[{conversation.session}: {usage.get('prompt_tokens', 0)} prompt tokens, {cached} cached, "
            f"{usage.get('completion_tokens', 0)} generated]",
            err=True,
        )
