"""Calls that were cut, written as their families write them: read again, they are the same."""

from __future__ import annotations

import pytest

from tests.reply_forms import NAMES, TOOLS, WRITERS, form
from tests.reply_rig import read
from tools_bridge.cut_call import cut_call

ARGUMENTS = {"n": -3, "o": {"k": [1, None, {"z": "}"}]}, "a": 'x "y"\n\\ é😀 last'}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_as_what_was_known(name: str) -> None:
    text = WRITERS[name]("f", ARGUMENTS)
    reply = form(name)
    known = set()
    for end in range(1, len(text)):
        parsed = read(reply.parser(TOOLS), [text[:end]], cut=True)
        if not parsed.calls or parsed.calls[0].complete:
            continue
        [call] = parsed.calls
        said = cut_call(reply.family.syntax.calls, call.name, call.arguments)
        found = read(reply.parser(TOOLS), [said], cut=True).calls
        if not found and call.arguments in ("", '{"n": '):
            continue  # in some forms a name is known by what comes behind it
        [again] = found
        assert again.name == call.name
        assert again.error
        assert call.arguments.startswith(again.arguments)
        assert len(call.arguments) - len(again.arguments) <= len(', "n": "')
        known.add(again.arguments)
    assert len(known) > (2 if name == "llama4" else 20)  # there an argument is known once it is whole


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("said", ["sunny", "[1, 2]", '{"a": 1, oops}', '{"a": 1} and more', '"x"'])
def test_nothing_is_lost_of_what_others_wrote(name: str, said: str) -> None:
    assert cut_call(form(name).family.syntax.calls, "f", said).endswith(said)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama4"])  # it is trained to both forms
def test_it_is_what_the_model_wrote_but_for_blanks(name: str) -> None:
    text = WRITERS[name]("f", ARGUMENTS)
    reply = form(name)
    cut = text[: text.index("last") + 2]
    [call] = read(reply.parser(TOOLS), [cut], cut=True).calls
    said = cut_call(reply.family.syntax.calls, call.name, call.arguments)
    frames = {"gpt-oss": "assistant", "kimi-k3": "<|close|>response<|sep|>"}  # of the turn, not of the call
    bare = ("".join(t.split()).removeprefix(frames.get(name, "")) for t in (said, cut))
    said, wrote = (t.replace('index="0"', 'index="1"') for t in bare)
    if name == "gpt-oss":  # the recipient may stand on either side of the channel
        said, wrote = (t[t.index("<|constrain|>") :] for t in (said, wrote))
    assert said == wrote
