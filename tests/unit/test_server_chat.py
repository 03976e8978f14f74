"""POST /v1/chat/completions, whole and streamed."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from agentserve.types import FinishReason
from tests.api_rig import CHAT, Rig, joined, settled, user
from tests.fakes import END, EOS, ByteTemplate, Script, ScriptedEngine, say


async def test_a_reply_has_the_shape_clients_expect() -> None:
    rig = Rig(ScriptedEngine(say("Hello!")))
    reply = await rig.chat([user("hi")], model="tiny")
    assert reply["id"].startswith("chatcmpl-")
    assert (reply["object"], reply["model"]) == ("chat.completion", "tiny")
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello!", "refusal": None, "annotations": []}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    usage = reply["usage"]
    prompt = len(ByteTemplate().render([user("hi")]))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 7)
    assert usage["total_tokens"] == prompt + 7
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": prompt}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    again = (await rig.chat([user("hi")]))["usage"]["prompt_tokens_details"]
    assert again == {"cached_tokens": prompt - 1, "cache_write_tokens": 1}
    rig.check_rest()


async def test_a_stream_says_what_the_whole_reply_says() -> None:
    text = "Grüße \u2028 aus 東京 🗼\u0085data: x\r\n"
    rig = Rig(ScriptedEngine(say(text)))
    whole = await rig.chat([user("a")])
    chunks = await rig.chat_stream([user("b")], stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-3]["choices"][0]["delta"] == {}
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1
    message = joined(chunks)
    assert message["content"] == whole["choices"][0]["message"]["content"] == text
    assert message["finish_reason"] == "stop"
    assert message["usage"]["completion_tokens"] == len(text.encode()) + 1


async def test_no_reader_can_split_an_event_at_a_unicode_line_break() -> None:
    rig = Rig(ScriptedEngine(say("a\u2028b\u2029c\u0085d\x0be")))
    reply = await rig.post(CHAT, {"messages": [user("x")], "stream": True})
    lines = [line for line in reply.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)


@pytest.mark.parametrize("size", range(1, 12))
async def test_a_stop_string_is_cut_wherever_it_falls(size: int) -> None:
    stop = "STOP" * 3
    rig = Rig(ScriptedEngine(say("one " + "x" * size + " two" + stop[:-1] + "-" + stop + "never")))
    expected = "one " + "x" * size + " two" + stop[:-1] + "-"
    whole = await rig.chat([user("a")], stop=stop)
    assert whole["choices"][0]["message"]["content"] == expected
    assert whole["choices"][0]["finish_reason"] == "stop"
    message = joined(await rig.chat_stream([user("b")], stop=[stop, "zzz"]))
    assert (message["content"], message["finish_reason"]) == (expected, "stop")


async def test_the_beginning_of_a_stop_string_is_not_lost_at_the_end() -> None:
    rig = Rig(ScriptedEngine(say("almost STO")))
    assert joined(await rig.chat_stream([user("a")], stop="STOP"))["content"] == "almost STO"


async def test_max_tokens_ends_with_length_and_a_larger_context_is_clamped() -> None:
    rig = Rig(ScriptedEngine(say("0123456789"), max_model_len=64))
    reply = await rig.chat([user("a")], max_tokens=4)
    assert reply["choices"][0]["message"]["content"] == "0123"
    assert reply["choices"][0]["finish_reason"] == "length"
    await rig.chat([user("b")], max_completion_tokens=10_000)
    prompt = len(ByteTemplate().render([user("b")]))
    assert rig.engine.submits[-1].sampling.max_tokens == 64 - prompt
    await rig.chat([user("c")])
    assert rig.engine.submits[-1].sampling.max_tokens == 64 - prompt


async def test_a_prompt_that_fills_the_context_is_refused() -> None:
    rig = Rig(ScriptedEngine(max_model_len=64))
    frame = len(ByteTemplate().render([user("")]))
    for extra in (0, 1, 100):
        reply = await rig.post(CHAT, {"messages": [user("x" * (64 - frame + extra))]})
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert not rig.engine.submits
    reply = await rig.chat([user("x" * (63 - frame))])
    assert reply["usage"]["completion_tokens"] == 1
    rig.check_rest()


async def test_sampling_fields_reach_the_engine() -> None:
    rig = Rig()
    await rig.chat(
        [user("a")],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=-5,
        min_tokens=2,
        repetition_penalty=1.2,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={"5": -100},
        stop_token_ids=[9],
        stop=["x"],
        priority=3,
        cache_salt="tenant a",
        ignore_eos=True,
        max_tokens=6,
    )
    submit = rig.engine.submits[-1]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.seed, sampling.min_tokens, sampling.max_tokens) == (-5, 2, 6)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.2, -1.0)
    assert (sampling.frequency_penalty, sampling.logit_bias) == (2.0, {5: -100.0})
    assert (sampling.stop_token_ids, sampling.stop, sampling.ignore_eos) == ((9,), ("x",), True)
    assert submit.priority == 3
    assert "tenant a" in submit.namespace


@pytest.mark.parametrize("token", [END, EOS])
async def test_every_end_token_ends_a_turn_unless_eos_is_ignored(token: int) -> None:
    """One set for API and engine; with EOS ignored its text is shown where it has any."""
    script = Script([*b"ab", token, *b"cd"], eos=False)
    rig = Rig(ScriptedEngine(script))
    reply = await rig.chat([user("a")])
    assert reply["choices"][0]["message"]["content"] == "ab"
    assert reply["choices"][0]["finish_reason"] == "stop"
    reply = await rig.chat([user("a")], ignore_eos=True)
    assert reply["choices"][0]["message"]["content"] == "abcd"
    assert [submit.sampling.stop_token_ids for submit in rig.engine.submits] == [(), ()]


@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_continued_message_keeps_its_first_space(goes_on: bool) -> None:
    """SentencePiece drops the space of a text's first word; a continuation has none to drop."""
    rig = Rig()
    asked: list[bool] = []
    tokenizer = rig.context.tokenizer
    make = tokenizer.detokenizer

    def spy(*, skip_control: bool = True, continues: bool = False) -> Any:
        asked.append(continues)
        return make(skip_control=skip_control, continues=continues)

    tokenizer.detokenizer = spy  # type: ignore[method-assign]
    said = {"role": "assistant", "content": "Well,"}
    await rig.chat([user("a"), said], continue_final_message=goes_on, add_generation_prompt=not goes_on)
    assert asked[-1] == goes_on  # the answer's; the end of the prompt was looked at before


async def test_a_random_seed_is_drawn_where_none_is_given() -> None:
    rig = Rig()
    await rig.chat([user("a")])
    await rig.chat([user("a")])
    first, second = (submit.sampling.seed for submit in rig.engine.submits)
    assert first != second


async def test_logprobs_of_the_text_tokens() -> None:
    rig = Rig(ScriptedEngine(say("é!")))
    whole = await rig.chat([user("a")], logprobs=True, top_logprobs=2)
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [0x21]]
    assert all(entry["logprob"] == -0.25 for entry in content)
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    chunks = await rig.chat_stream([user("b")], logprobs=True, top_logprobs=2)
    streamed = [
        entry
        for chunk in chunks[:-1]
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content


async def test_several_choices_share_one_prompt() -> None:
    texts = iter(["first", "second", "third"])
    engine = ScriptedEngine(lambda submit: say(next(texts)))
    rig = Rig(engine)
    reply = await rig.chat([user("a")], n=3, seed=10)
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["first", "second", "third"]
    assert [submit.sampling.seed for submit in engine.submits] == [10, 11, 12]
    assert len({submit.session for submit in engine.submits}) == 3
    prompt = len(unpack_tokens(engine.submits[0].tokens))
    assert engine.forked == [(engine.submits[0].session, s.session, prompt) for s in engine.submits[1:]]
    assert reply["usage"]["prompt_tokens"] == prompt
    assert reply["usage"]["completion_tokens"] == 6 + 7 + 6
    named = {reply["session_id"], *(choice["session_id"] for choice in reply["choices"][1:])}
    assert len(named) == 3
    rig.check_rest()


async def test_choices_are_submitted_when_the_leader_has_its_first_token() -> None:
    script = say("abc", hold_at=0)
    engine = ScriptedEngine(lambda submit: script if len(engine.submits) == 1 else say("xyz"))
    rig = Rig(engine)
    task = asyncio.create_task(rig.chat_stream([user("a")], n=2))
    await settled(lambda: engine.submits)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(engine.submits) == 1
    script.release.set()
    chunks = await task
    assert len(engine.submits) == 2
    assert (joined(chunks, 0)["content"], joined(chunks, 1)["content"]) == ("abc", "xyz")


async def test_usage_can_be_forced_and_continuous() -> None:
    rig = Rig(ScriptedEngine(say("abc")), force_usage=True)
    assert joined(await rig.chat_stream([user("a")]))["usage"]["completion_tokens"] == 4
    rig = Rig(ScriptedEngine(say("abc")))
    assert joined(await rig.chat_stream([user("a")]))["usage"] is None
    chunks = await rig.chat_stream([user("b")], stream_options={"continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    *early, last = [chunk["usage"] for chunk in chunks[:-1]]
    assert last["prompt_tokens_details"]["cached_tokens"] > 0
    # The engine tells it with the turn's end: until then it is not known, and not 0.
    assert all("prompt_tokens_details" not in usage for usage in early)


async def test_token_ids_on_request() -> None:
    rig = Rig(ScriptedEngine(say("ok")))
    reply = await rig.chat([user("a")], return_token_ids=True)
    assert reply["prompt_token_ids"] == list(unpack_tokens(rig.engine.submits[0].tokens))
    assert reply["choices"][0]["token_ids"] == [*b"ok", END]
    chunks = await rig.chat_stream([user("b")], return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == list(unpack_tokens(rig.engine.submits[1].tokens))
    streamed = [id_ for chunk in chunks[:-1] for c in chunk["choices"] for id_ in c.get("token_ids", ())]
    assert streamed == [*b"ok", END]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_an_error_reply(stream: bool) -> None:
    rig = Rig(ScriptedEngine(say("", reason=FinishReason.REFUSED, error="needs 70 pages, the pool has 64")))
    reply = await rig.post(CHAT, {"messages": [user("a")], "stream": stream})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "needs 70 pages, the pool has 64"
    rig.check_rest()
    assert len(rig.context.directory) == 0


async def test_a_failure_before_and_after_the_stream_began(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(ScriptedEngine(say("half", reason=FinishReason.ERROR, error="out of memory")))
    reply = await rig.post(CHAT, {"messages": [user("a")]})
    assert (reply.status_code, reply.json()["error"]["message"]) == (500, "out of memory")
    assert f"request {reply.headers['x-request-id']}: out of memory" in caplog.text  # what to look for
    chunks = await rig.chat_stream([user("a")])
    assert chunks[-1]["error"]["message"] == "out of memory"
    assert chunks[-1]["error"]["type"] == "server_error"
    assert joined(chunks[:-1])["content"] == "half"
    assert "the stream of request req-" in caplog.text
    rig.check_rest()


async def test_a_stream_without_an_end_is_an_error() -> None:
    class Broken(ScriptedEngine):
        async def _run(self, command, script, stop):
            self.live.pop((command.session, command.turn))
            return
            yield

    rig = Rig(Broken())
    reply = await rig.post(CHAT, {"messages": [user("a")]})
    assert reply.status_code == 500
    rig.check_rest()


async def test_no_worker_is_a_503() -> None:
    rig = Rig()
    rig.engine.alive = 0
    reply = await rig.post(CHAT, {"messages": [user("a")]})
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    rig.check_rest()


async def test_continue_final_message() -> None:
    rig = Rig()
    messages = [user("a"), {"role": "assistant", "content": "so far"}]
    await rig.chat(messages, continue_final_message=True, add_generation_prompt=False)
    prompt = unpack_tokens(rig.engine.submits[-1].tokens)
    assert prompt[-6:].tolist() == list(b"so far")
    reply = await rig.post(CHAT, {"messages": [user("a")], "continue_final_message": True})
    assert reply.status_code == 400


async def test_repeated_tokens_of_a_moved_turn_are_shown_once() -> None:
    class Stutters(ScriptedEngine):
        async def _run(self, command, script, stop):
            async for event in super()._run(command, script, stop):
                yield event
                if getattr(event, "index", None) == 1:
                    yield event

    rig = Rig(Stutters(say("abc")))
    assert (await rig.chat([user("a")]))["choices"][0]["message"]["content"] == "abc"


async def test_min_tokens_lets_an_early_stop_string_pass() -> None:
    rig = Rig(ScriptedEngine(say("a.b.c.d.e.")))
    reply = await rig.chat([user("a")], stop=".", min_tokens=5)
    assert reply["choices"][0]["message"]["content"] == "a.b.c"
    message = joined(await rig.chat_stream([user("b")], stop=".", min_tokens=5))
    assert message["content"] == "a.b.c"


def test_the_prompt_type_is_packed_as_is() -> None:
    assert isinstance(ByteTemplate().render([user("a")]), array)
