"""The answer fold: what is streamed adds up to the whole, and stored ids spell what was shown."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from agentserve.messages import Token, TurnUsage
from agentserve.server.http.reply_parsers import CallParser
from agentserve.server.sessions.answer import Answer, Outcome
from agentserve.types import FinishReason, SessionId, TurnId
from tests.api_rig import hermes
from tests.fakes import END, EOS, ByteTokenizer
from tools_bridge.registry import DEFAULT_FORM

USAGE = TurnUsage(1, 0, 0, 1, 0, 0.0, 0.0, 0.0, 0.0)
TOKENIZER = ByteTokenizer()
pieces = st.sampled_from(
    [
        "a",
        "é",
        "🗼",
        " ",
        "\n",
        "ST",
        "OP",
        "<tool_call>",
        "</tool_call>",
        hermes("f", '{"x": "STOP é"}'),
        "{",
        "<",
    ]
)


def run(
    ids: list[int],
    reason: FinishReason,
    *,
    stops: tuple[str, ...] = (),
    tools: bool = False,
    min_tokens: int = 0,
) -> tuple[str, list[list[str | None]], list[int], Outcome]:
    """Joined text, joined calls and joined ids of the deltas, and the outcome."""
    answer = Answer(
        TOKENIZER.detokenizer(),
        stops=stops,
        end_ids=frozenset({END}),
        min_tokens=min_tokens,
        parser=CallParser(DEFAULT_FORM.parser()) if tools else None,
        decode=TOKENIZER.decode,
    )
    deltas = []
    for index, token in enumerate(ids):
        deltas.append(answer.push(Token(SessionId("s"), TurnId(1), index, token)))
        if answer.stopped:
            reason = FinishReason.STOP
            break
    last, outcome = answer.finish(reason, USAGE)
    deltas.append(last)
    calls: list[list[str | None]] = []
    for delta in deltas:
        for call in delta.calls:
            if call.index == len(calls):
                calls.append([call.id, call.name, ""])
            calls[call.index][2] = (calls[call.index][2] or "") + call.arguments
    streamed = [id_ for delta in deltas for id_ in delta.ids]
    return "".join(delta.text for delta in deltas), calls, streamed, outcome


@given(st.lists(pieces, max_size=12), st.booleans(), st.booleans(), st.booleans())
def test_deltas_add_up_to_the_outcome(texts: list[str], stop: bool, tools: bool, ended: bool) -> None:
    ids = [*"".join(texts).encode()] + ([END] if ended else [])
    reason = FinishReason.STOP if ended else FinishReason.LENGTH
    text, calls, streamed, outcome = run(ids, reason, stops=("STOP",) if stop else (), tools=tools)
    assert text == outcome.text
    assert calls == [[call.id, call.name, call.arguments] for call in outcome.calls]
    assert streamed == list(outcome.ids)
    if stop:
        assert "STOP" not in text
    if not stop and not tools:
        assert text == "".join(texts)
    if outcome.generated is not None and not tools:
        assert TOKENIZER.decode(outcome.generated) == text


def test_an_end_token_is_not_shown_and_not_stored() -> None:
    text, _, _, outcome = run([*b"hi", END], FinishReason.STOP)
    assert text == "hi"
    assert outcome.generated == array("i", [*b"hi"])
    assert [token.token for token in outcome.tokens] == [*b"hi"]
    assert outcome.ids == (*b"hi", END)


def test_an_end_token_before_min_tokens_does_not_end_anything() -> None:
    text, _, _, outcome = run([97, END, 98], FinishReason.LENGTH, min_tokens=3)
    assert text == "ab"
    assert outcome.generated == array("i", [97, END, 98])


def test_another_control_token_is_kept_in_the_ids() -> None:
    text, _, _, outcome = run([97, EOS, 98, END], FinishReason.STOP)
    assert text == "ab"
    assert outcome.generated == array("i", [97, EOS, 98])


def test_half_a_character_at_the_end_shows_as_broken() -> None:
    text, _, _, _ = run([97, 0xC3], FinishReason.LENGTH)
    assert text == "a\ufffd"


def test_a_stop_that_begins_within_a_token_leaves_no_ids_to_splice() -> None:
    class Fold:
        """One token is the text `ab.c`."""

        def push(self, token: int) -> str:
            return "ab.c"

        def flush(self) -> str:
            return ""

    answer = Answer(Fold(), stops=(".",), decode=lambda ids: "ab.c" * len(ids))
    answer.push(Token(SessionId("s"), TurnId(1), 0, 1))
    _, outcome = answer.finish(FinishReason.STOP, USAGE)
    assert (outcome.text, outcome.generated) == ("ab", None)


def test_a_truncated_call_is_not_spliced() -> None:
    _, _, _, outcome = run([*b'<tool_call>{"na'], FinishReason.LENGTH, tools=True)
    assert (outcome.generated, outcome.has_calls, outcome.calls) == (None, False, ())


def test_reasoning_is_no_part_of_the_text_and_its_tokens_are_counted() -> None:
    said = "<think>\nwhy?</think>\n\nyes " + hermes("f", "{}")
    answer = Answer(
        TOKENIZER.detokenizer(),
        end_ids=frozenset({END}),
        parser=CallParser(DEFAULT_FORM.parser()),
        decode=TOKENIZER.decode,
    )
    deltas = [
        answer.push(Token(SessionId("s"), TurnId(1), index, token))
        for index, token in enumerate([*said.encode(), END])
    ]
    last, outcome = answer.finish(FinishReason.STOP, USAGE)
    deltas.append(last)
    assert (outcome.reasoning, outcome.text, [call.name for call in outcome.calls]) == ("why?", "yes", ["f"])
    assert "".join(delta.reasoning for delta in deltas) == "why?"
    assert "".join(delta.text for delta in deltas) == "yes"
    assert all(delta for delta in deltas if delta.reasoning)
    assert outcome.reasoning_tokens == len("<think>\nwhy?</think>")
    assert outcome.generated == array("i", list(said.encode()))  # what is spliced is all of it
    assert [id_ for delta in deltas for id_ in delta.ids] == list(outcome.ids)
