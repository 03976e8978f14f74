"""A scripted model for tests of the client: what it says is asked for by the user's message."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from agentserve.messages import Submit, unpack_tokens
from tests.api_rig import hermes
from tests.fakes import START, Script, say


def messages_of(submit: Submit) -> list[tuple[str, str]]:
    """(role, text) of each message of a prompt."""
    found: list[tuple[str, str]] = []
    parts: list[list[int]] = []
    for token in unpack_tokens(submit.tokens):
        if token == START:
            parts.append([])
        elif parts:
            parts[-1].append(token)
    for part in parts:
        role, _, text = bytes(token for token in part if token < 256).decode().partition("\n")
        found.append((role, text.removesuffix("\n")))
    return found


def obey(submit: Submit) -> Script:
    """To a user who says `call NAME JSON; call NAME JSON` it calls these, and then answers with their
    results; to `say WORDS` it says them; to anything else `Hello.`"""
    *_, (role, text), _ = messages_of(submit)
    if role == "tool":
        said = messages_of(submit)
        last = max(i for i, (who, _) in enumerate(said) if who == "user")
        return say("Results: " + ", ".join(text for who, text in said[last:] if who == "tool"))
    if text.startswith("call "):
        calls = (order.split(" ", 2)[1:] for order in text.split("; "))
        return say("Let me see. " + "".join(hermes(name, arguments) for name, arguments in calls))
    return say(text.removeprefix("say ") if text.startswith("say ") else "Hello.")


def calling(**calls: Any) -> str:
    """A user's message that has tools called; a name may end in `_2` and so on."""
    return "; ".join(f"call {name.split('__')[0]} {json.dumps(args)}" for name, args in calls.items())


def held(at: int, scripts: list[Script]) -> Callable[[Submit], Script]:
    """As `obey`, but it stops before a token until its script is released."""

    def reply(submit: Submit) -> Script:
        script = obey(submit)
        script.hold_at = at
        scripts.append(script)
        return script

    return reply
