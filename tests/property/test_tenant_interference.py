"""Whatever one tenant does, another is told the same: B's replies in a world with A and in one without."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api_rig import CHAT, TOOLS, hermes, user
from tests.fakes import ScriptedEngine, say
from tests.tenants_rig import Tenants

TEXTS = ["Hello.", "The vault's code is 4711.", "Hello."]
NAMES = [None, "one", "two"]
KINDS = [
    "chat",
    "call",
    "result",
    "messages",
    "response",
    "conversation",
    "completion",
    "warm",
    "list",
    "sessions",
    "show",
    "fork",
    "hints",
    "close",
    "items",
    "repeat",
    "nonsense",
]
STEPS = st.lists(
    st.tuples(st.sampled_from("aab"), st.sampled_from(KINDS), st.integers(0, 8)), min_size=4, max_size=14
)
# Of moments, which differ anyway.
_TIMES = re.compile(r"_at$|^at$|^created$|_seconds$|^(as_of|deadline|until|since)$")
_ID = re.compile(
    r"\b(?:sess-|call_|msg_\d+_sess-|[a-z]+_|chatcmpl-|cmpl-|req-)[0-9a-f]{16,}\b|\b[0-9a-f]{8}-\d+\b"
)


class Client:
    """One tenant, who knows what it was told."""

    def __init__(self, rig: Tenants, client: httpx.AsyncClient) -> None:
        self._rig = rig
        self._client = client
        self._known: dict[str, list[str]] = {
            "sessions": ["one"],
            "response": ["resp_x"],
            "conversation": ["conv_x"],
        }
        self._asked: list[dict[str, Any]] = [user("x")]
        self._names: dict[str, str] = {}
        self.told: list[Any] = []

    async def step(self, kind: str, pick: int) -> None:
        known = {name: ids[pick % len(ids)] for name, ids in self._known.items()}
        session, text = f"/agentserve/sessions/{known['sessions']}", TEXTS[pick % 3]
        plain: dict[str, Any] = {"model": "tiny", "messages": [user(text)]}
        chat = plain | {"session_id": NAMES[pick // 3]}
        answer = {"model": "tiny", "input": text}
        self._rig.engine.reply = say(hermes("now", "{}")) if kind == "call" else say("Good day.")
        match kind:
            case "chat":
                await self._post(CHAT, chat)
            case "call":
                reply = await self._post(CHAT, chat | {"tools": TOOLS})
                self._asked = [user(text), reply["choices"][0]["message"]]
            case "result":
                calls = self._asked[-1].get("tool_calls") or [{"id": "call_none"}]
                result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "noon"}
                await self._post(CHAT, chat | {"messages": [*self._asked, result], "tools": TOOLS})
            case "messages":
                await self._post(
                    "/v1/messages", {"model": "tiny", "messages": [user(text)], "max_tokens": 20}
                )
            case "response":
                before = {"previous_response_id": known["response"]} if pick % 2 else {}
                await self._post("/v1/responses", answer | before)
            case "conversation":
                made = await self._post("/v1/conversations", {"items": [{"role": "user", "content": text}]})
                await self._post("/v1/responses", answer | {"conversation": made["id"]})
            case "completion":
                await self._post(
                    "/v1/completions", {"model": "tiny", "prompt": text, "cache_salt": NAMES[pick // 3]}
                )
            case "warm":
                await self._post("/v1/messages", plain | {"max_tokens": 0})
            case "list":
                for path in ("/v1/models", "/health", "/metrics", f"/v1/responses/{known['response']}"):
                    await self._ask("GET", path)
            case "sessions":
                await self._ask("GET", f"/agentserve/sessions?detail={'true' if pick % 2 else 'false'}")
            case "show":
                await self._ask("GET", session)
            case "fork":
                await self._post(f"{session}/fork", {})
            case "hints":
                await self._post(f"{session}/hints", {"priority": 1, "final": bool(pick % 2)})
            case "close":
                await self._post("/close_session", {"session_id": known["sessions"]})
            case "items":
                await self._ask("GET", f"/v1/conversations/{known['conversation']}/items")
            case "repeat":
                await self._post(CHAT, chat, {"idempotency-key": f"k{pick % 2}"})
            case "nonsense":
                await self._post(CHAT, {"model": "tiny", "messages": pick})

    async def _post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        return await self._ask("POST", path, body, headers)

    async def _ask(self, method: str, path: str, body: Any = None, headers: Any = None) -> Any:
        given = {} if body is None else {"content-type": "application/json"}
        content = None if body is None else json.dumps(body)
        reply = await self._client.request(method, path, content=content, headers=given | (headers or {}))
        value = reply.json()
        for name, key in (("sessions", "session_id"), ("response", "id"), ("conversation", "id")):
            id_ = value.get(key)
            if isinstance(id_, str) and (name == "sessions" or id_.startswith(name[:4])):
                self._known[name].append(id_)
        self.told.append((method, reply.status_code, self._named(self._timeless(value))))
        self.told.append(self._named(sorted(set(reply.headers) - {"content-length"})))
        return value

    def _timeless(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: None if _TIMES.search(k) else self._timeless(v) for k, v in value.items()}
        return [self._timeless(one) for one in value] if isinstance(value, list) else value

    def _named(self, value: Any) -> str:
        """Ids, which are drawn, by the order in which they came."""
        return _ID.sub(lambda m: self._names.setdefault(m[0], f"<{len(self._names)}>"), json.dumps(value))


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_what_one_tenant_is_told_does_not_depend_on_another(steps: list[tuple[str, str, int]]) -> None:
    async def run(tenants: str) -> list[Any]:
        rig = Tenants(ScriptedEngine(max_model_len=4096))
        clients = {"a": Client(rig, rig.a), "b": Client(rig, rig.b)}
        for tenant, kind, pick in [*steps, ("b", "sessions", 1), ("b", "list", 0)]:
            if tenant in tenants:
                await clients[tenant].step(kind, pick)
        return clients["b"].told

    assert asyncio.run(run("ab")) == asyncio.run(run("b"))
