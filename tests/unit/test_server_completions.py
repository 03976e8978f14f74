"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from tests.api_rig import Rig, events
from tests.fakes import EOS, ScriptedEngine, say

PATH = "/v1/completions"


async def complete(rig: Rig, prompt: Any, **fields: Any) -> Any:
    reply = await rig.post(PATH, {"prompt": prompt, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_text_and_token_prompts_alone_and_in_batches() -> None:
    rig = Rig(ScriptedEngine(say("ok", eos=False)))
    for prompt in ("hi", [104, 105], ["hi"], [[104, 105]]):
        reply = await complete(rig, prompt, max_tokens=2)
        assert [choice["text"] for choice in reply["choices"]] == ["ok"]
        assert list(unpack_tokens(rig.engine.submits[-1].tokens)) == [104, 105]
    engine = ScriptedEngine(
        lambda submit: say("re " + bytes(list(unpack_tokens(submit.tokens))).decode(), eos=False)
    )
    reply = await complete(Rig(engine), ["one", "two"], n=2, max_tokens=6)
    assert [choice["text"] for choice in reply["choices"]] == ["re one", "re one", "re two", "re two"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == 6
    assert reply["usage"]["completion_tokens"] == 24
    assert len(set(engine.closed)) == 4
    assert not engine.live


async def test_defaults_are_openais() -> None:
    rig = Rig(ScriptedEngine(say("x" * 100)))
    reply = await complete(rig, "hi")
    assert reply["object"] == "text_completion"
    assert reply["choices"][0]["text"] == "x" * 16
    assert reply["choices"][0]["finish_reason"] == "length"
    assert rig.engine.submits[0].sampling.stop_token_ids == ()


async def test_echo_and_stream() -> None:
    rig = Rig(ScriptedEngine(lambda submit: say("é!", eos=False)))
    whole = await complete(rig, "say ", echo=True, max_tokens=3)
    assert whole["choices"][0]["text"] == "say é!"
    reply = await rig.post(
        PATH,
        {
            "prompt": ["say "],
            "echo": True,
            "stream": True,
            "max_tokens": 3,
            "stream_options": {"include_usage": True},
        },
    )
    chunks = events(reply.content)
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["usage"]["completion_tokens"] == 3
    text = "".join(choice["text"] for chunk in chunks[:-1] for choice in chunk["choices"])
    assert text == "say é!"
    assert [c["finish_reason"] for chunk in chunks[:-1] for c in chunk["choices"]][-1] == "length"


async def test_legacy_logprobs() -> None:
    rig = Rig(ScriptedEngine(say("ab", eos=False)))
    found = (await complete(rig, "x", logprobs=2, max_tokens=2))["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "b"]
    assert found["token_logprobs"] == [-0.25, -0.25]
    assert found["text_offset"] == [0, 1]
    assert [len(top) for top in found["top_logprobs"]] == [2, 2]
    found = (await complete(rig, "x", logprobs=0, max_tokens=2))["choices"][0]["logprobs"]
    assert found["top_logprobs"] is None
    reply = await rig.post(PATH, {"prompt": "x", "logprobs": 1, "stream": True, "max_tokens": 2})
    streamed = [
        offset
        for chunk in events(reply.content)[:-1]
        for choice in chunk["choices"]
        if choice["logprobs"]
        for offset in choice["logprobs"]["text_offset"]
    ]
    assert streamed == [0, 1]


async def test_ignore_eos_goes_on_past_it() -> None:
    rig = Rig(ScriptedEngine(lambda submit: say("ab", eos=False)))
    rig.engine.reply = lambda submit: type(say(""))([*b"a", EOS, *b"b"], eos=False)
    reply = await complete(rig, "x", ignore_eos=True, max_tokens=3, return_token_ids=True)
    assert reply["choices"][0]["text"] == "ab"
    assert reply["choices"][0]["token_ids"] == [97, EOS, 98]
    reply = await complete(rig, "x", max_tokens=3)
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("a", "stop")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [259]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [2**40]}, "prompt[0]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({}, "prompt"),
    ],
)
async def test_bad_prompts_name_the_parameter(fields: dict[str, Any], param: str) -> None:
    rig = Rig()
    reply = await rig.post(PATH, fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert not rig.engine.submits
