"""Whatever is gone on from, in whatever order, with sessions and responses deleted in between: the model
reads exactly the items that came before (INV-60)."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.messages import unpack_tokens
from tests.api_rig import Rig, hermes
from tests.fakes import ByteTokenizer, ScriptedEngine, say
from tests.responses_rig import RESPONSES, WEATHER, Client, parsed

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["new", "on", "on", "on", "talk", "talk", "drop", "forget", "stored"]),
        st.integers(0, 10**6),
        st.booleans(),  # streamed
        st.booleans(),  # it makes a call
    ),
    min_size=1,
    max_size=14,
)


class World:
    """An application, and what each response's history must be, as the template writes it."""

    def __init__(self) -> None:
        self.rig = Rig(ScriptedEngine(max_model_len=60_000))
        self.client = Client(self.rig)
        self.after: dict[str, str] = {}  # response -> all up to its end
        self.pending: dict[str, list[str]] = {}  # response -> its calls
        self.sessions: list[str] = []
        self.talks: dict[str, str] = {}  # conversation -> all in it
        self.talk_calls: dict[str, list[str]] = {}
        self.count = 0

    async def step(self, kind: str, pick: int, streamed: bool, calls: bool) -> None:
        known = list(self.after)
        if kind == "on" and known:
            parent = known[pick % len(known)]
            await self.create(
                self.after[parent], self.pending[parent], streamed, calls, previous_response_id=parent
            )
        elif kind == "talk":
            await self.talk(pick, streamed, calls)
        elif kind == "drop" and known:
            dropped = known[pick % len(known)]
            assert (await self.rig.client.delete(f"{RESPONSES}/{dropped}")).status_code == 200
            del self.after[dropped]
        elif kind == "forget" and self.sessions:
            await self.rig.client.delete(f"/agentserve/sessions/{self.sessions[pick % len(self.sessions)]}")
        elif kind == "stored" and known:
            shown = await self.client.get(f"{RESPONSES}/{known[pick % len(known)]}")
            assert shown["status"] == "completed"
        else:
            await self.create("", [], streamed, calls)

    async def talk(self, pick: int, streamed: bool, calls: bool) -> None:
        if not self.talks or pick % 3 == 0:
            made = (await self.rig.post("/v1/conversations", {})).json()["id"]
            self.talks[made], self.talk_calls[made] = "", []
        made = list(self.talks)[pick % len(self.talks)]
        id_ = await self.create(self.talks[made], self.talk_calls[made], streamed, calls, conversation=made)
        self.talks[made], self.talk_calls[made] = self.after[id_], self.pending[id_]

    async def create(
        self, before: str, pending: list[str], streamed: bool, calls: bool, **fields: Any
    ) -> str:
        self.count += 1
        word = f"word{self.count}"
        items: list[Any] = [
            {"type": "function_call_output", "call_id": call, "output": f"result{self.count}"}
            for call in pending
        ]
        expected = before + "".join(written("tool", f"result{self.count}") for _ in pending)
        if not items:
            items, expected = [{"role": "user", "content": word}], expected + written("user", word)
        call = hermes("weather", '{"city": "Oslo"}')
        said = f"said{self.count}" + (call if calls else "")
        self.rig.engine.reply = say(said)
        body = {"model": "tiny", "input": items, "tools": [WEATHER], "stream": streamed, **fields}
        reply = await self.rig.post(RESPONSES, body)
        assert reply.status_code == 200, reply.text
        response = parsed(reply.content)[-2]["response"] if streamed else reply.json()
        prompt = ByteTokenizer().decode(unpack_tokens(self.rig.engine.submits[-1].tokens), skip_control=False)
        assert prompt.endswith("]" + expected + "<|im_start|>assistant\n")
        assert prompt.count("<|im_start|>") == expected.count("<|im_start|>") + 1
        id_: str = response["id"]
        self.after[id_] = expected + written("assistant", said)
        self.pending[id_] = [i["call_id"] for i in response["output"] if i["type"] == "function_call"]
        assert len(self.pending[id_]) == calls
        self.sessions.append(response["session_id"])
        return id_


def written(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_the_model_reads_what_came_before(steps: list[tuple[str, int, bool, bool]]) -> None:
    async def run() -> None:
        world = World()
        for step in steps:
            await world.step(*step)
        world.rig.check_rest()
        assert not world.rig.context.responses.conversations.busy
        for id_ in list(world.after):
            await world.rig.client.delete(f"{RESPONSES}/{id_}")
        shelf = world.rig.context.responses.shelf
        assert (len(shelf), shelf.size_bytes) == (0, 0)

    asyncio.run(run())
