"""Reasoning, served: a real server and a model that thinks, in every dialect, streamed and whole.

What it thinks is set apart and counted, ends where its budget does, and stays in the session whether its
client sends it back or not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.dialect_talks import MODEL, Chat, Dialect, Messages, Responses
from tests.process.serving import serving
from tests.thinking_model import ANSWER, THOUGHT, save_thinking_model

pytestmark = pytest.mark.process


def thought(words: int) -> str:
    return "".join(THOUGHT[:words]).strip()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("models") / MODEL
    folder.mkdir()
    save_thinking_model(folder)
    root = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    flags = ("--model", str(folder), "--device-kv", "16MiB")
    with serving(*flags, patience=300, env=os.environ | {"PYTHONPATH": path}) as (served, _):
        yield served


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


dialects = pytest.mark.parametrize("dialect", [Chat, Messages, Responses])


@dialects
@pytest.mark.parametrize("most", [None, len(THOUGHT), 4, 1, 0])
def test_reasoning_is_apart_counted_and_ends_with_its_budget(
    client: httpx.Client, dialect: Dialect, stream: bool, most: int | None
) -> None:
    talk = dialect(client, stream)
    said = talk.ask("Weather?", **({} if most is None else talk.budget(most)))
    words = len(THOUGHT) if most is None else most
    assert (said.thought, said.text) == (thought(words), "".join(ANSWER))
    assert said.reasoning == words + 2  # with its marks
    assert said.generated == said.reasoning + 1 + len(ANSWER) + 1  # the empty line, the end


@dialects
def test_a_model_that_is_told_not_to_reason_does_not(
    client: httpx.Client, dialect: Dialect, stream: bool
) -> None:
    talk = dialect(client, stream)
    said = talk.ask("Weather?", **talk.off())
    assert (said.thought, said.text) == ("", "".join(ANSWER))
    assert (said.reasoning, said.generated) == (0, len(ANSWER) + 1)


@dialects
@pytest.mark.parametrize("told", [True, False], ids=["sent back", "not sent back"])
def test_the_next_turn_computes_what_is_new(
    client: httpx.Client, dialect: Dialect, stream: bool, told: bool
) -> None:
    talk = dialect(client, stream, told)
    question = f"{dialect.__name__} {stream} {told}?"  # nobody else computed what follows it
    first = talk.ask(question, **talk.budget(4))
    second = talk.ask("And now?")
    third = talk.ask("Well?", **talk.off())
    assert (second.thought, third.thought) == (thought(len(THOUGHT)), "")
    assert len({first.session, second.session, third.session}) == 1
    for before, after in ((first, second), (second, third)):
        assert after.cached == before.prompt + before.generated - 1  # its end was not computed


@dialects
@pytest.mark.parametrize("told", [True, False], ids=["sent back", "not sent back"])
def test_reasoning_before_a_call(client: httpx.Client, dialect: Dialect, stream: bool, told: bool) -> None:
    """In front of a call that is forced, too, and its result finds all of it computed."""
    talk = dialect(client, stream, told)
    question = f"{dialect.__name__} {stream} {told}, with a tool?"
    first = talk.ask(question, **talk.tool(forced=True), **talk.budget(3))
    assert (first.thought, first.text, first.reasoning) == (thought(3), "", 5)
    [(call, arguments)] = first.calls
    assert arguments == {"city": "Oslo"}
    second = talk.answer(call, "Rain.", **talk.tool(forced=False), **talk.budget(2))
    assert (second.thought, second.text, second.reasoning) == (thought(2), "".join(ANSWER), 4)
    assert second.session == first.session
    assert second.cached >= first.prompt + first.generated - 1


def test_a_prompt_is_counted_as_it_will_be(client: httpx.Client) -> None:
    """Behind a turn that reasoned, of one that is not to."""
    talk = Messages(client, stream=False)
    talk.ask("Counted?", **talk.budget(4))
    history = [*talk.history, {"role": "user", "content": "And now?"}]
    body = {"model": MODEL, "messages": history, **talk.off()}
    counted = client.post("/v1/messages/count_tokens", json=body).json()
    assert counted == {"input_tokens": talk.ask("And now?", **talk.off()).prompt}
