"""The fold from pieces to events: the response does not depend on how the pieces were cut."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentserve.messages import TurnUsage
from agentserve.server.errors import ApiError
from agentserve.server.http.responses.events import Fold, event_frame
from agentserve.server.http.responses.replay import replayed
from agentserve.server.http.responses.schemas import ReasoningConfig, ResponsesRequest
from agentserve.server.http.responses.shown import error_object, response_object
from agentserve.server.http.responses.thoughts import unpacked
from agentserve.server.http.responses.tools import Toolbox
from agentserve.server.sessions.answer import Call, CallDelta, Delta, Outcome
from agentserve.types import FinishReason
from tests.responses_rig import checked, parsed

USAGE = TurnUsage(20, 5, 9, 24, 0, 0.0, 0.1, 0.2, 0.3)


def fold(**more: Any) -> Fold:
    body = ResponsesRequest(model="m", reasoning=ReasoningConfig("low", "auto"))
    shown = response_object(body, Toolbox(), id_="resp_1", model="m", created=1, conversation=None)
    numbers = iter(range(10**6))
    return Fold(shown, Toolbox(), lambda prefix: f"{prefix}_{next(numbers)}", **more)


def outcome(reason: FinishReason = FinishReason.STOP, calls: tuple[Call, ...] = ()) -> Outcome:
    return Outcome(reason, "", calls, False, (), (), array("i"), USAGE)


def told(made: Fold, pieces: list[Delta], end: Outcome) -> list[Any]:
    events = made.created() + made.in_progress()
    for piece in pieces:
        events += made.delta(piece)
    events += made.finish(end, 7) + made.ended()
    return parsed(b"".join(map(event_frame, events)) + b"data: [DONE]\n\n")


def cut(text: str, sizes: list[int]) -> list[str]:
    """The text in pieces of these sizes, the last as long as what is left."""
    pieces: list[str] = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [piece for piece in (*pieces, text) if piece]


SIZES = st.lists(st.integers(1, 5), max_size=6)
PARTS = st.lists(
    st.tuples(st.sampled_from(["text", "call"]), st.text(min_size=1, max_size=12)), min_size=1, max_size=4
)


def pieces_of(thoughts: str, parts: list[tuple[str, str]], sizes: list[int]) -> list[Delta]:
    pieces = [Delta(reasoning=piece) for piece in cut(thoughts, sizes)]
    calls = 0
    for kind, text in parts:
        if kind == "text":
            pieces += [Delta(piece) for piece in cut(text, sizes)]
            continue
        pieces.append(Delta(calls=(CallDelta(calls, id=f"call_{calls}", name="f"),)))
        pieces += [Delta(calls=(CallDelta(calls, piece),)) for piece in cut(text, sizes)]
        calls += 1
    return pieces


@given(st.text(max_size=12), PARTS, SIZES, SIZES)
def test_a_response_is_the_same_at_every_cut(
    thoughts: str, parts: list[tuple[str, str]], one: list[int], other: list[int]
) -> None:
    calls = tuple(Call(f"call_{i}", "f", text, True) for i, (k, text) in enumerate(parts) if k == "call")
    left = checked(told(fold(), pieces_of(thoughts, parts, one), outcome(calls=calls)))
    right = checked(told(fold(), pieces_of(thoughts, parts, other), outcome(calls=calls)))
    assert left == right
    assert left["status"] == "completed"
    said = "".join(p["text"] for i in left["output"] if i["type"] == "message" for p in i["content"])
    assert said == "".join(text for kind, text in parts if kind == "text")
    assert [i["arguments"] for i in left["output"] if i["type"] == "function_call"] == [
        text for kind, text in parts if kind == "call"
    ]
    again = parsed(b"".join(map(event_frame, replayed(left, 3, None))) + b"data: [DONE]\n\n")
    assert checked(again) == left


def test_reasoning() -> None:
    made = fold(packs_reasoning=True)
    pieces = [Delta(reasoning="so", ids=(1, 2)), Delta(reasoning=" so"), Delta("yes", ids=(3,))]
    events = told(made, pieces, replace(outcome(), reasoning_tokens=4))  # who takes the reply apart counts
    final = checked(events)
    reasoning, message = final["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "so so"}]
    assert (reasoning["summary"], unpacked(reasoning["encrypted_content"])) == ([], "so so")
    assert message["content"][0]["text"] == "yes"
    assert final["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    kinds = [event["type"] for event in events[:-1]]
    assert kinds[2:6] == [
        "response.output_item.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
    ]


def test_a_piece_with_the_end_of_a_call_text_and_a_new_call() -> None:
    pieces = [
        Delta(calls=(CallDelta(0, id="a", name="f"),)),
        Delta(" then ", (CallDelta(0, "{}"), CallDelta(1, "[", id="b", name="g"))),
        Delta(calls=(CallDelta(1, "]"),)),
    ]
    calls = (Call("a", "f", "{}", True), Call("b", "g", "[]", True))
    final = checked(told(fold(), pieces, outcome(calls=calls)))
    shown = [item.get("arguments") or item["content"][0]["text"] for item in final["output"]]
    assert shown == ["{}", " then ", "[]"]


def test_what_a_limit_cuts() -> None:
    length = FinishReason.LENGTH
    whole = (Call("a", "f", "{}", True),)
    pieces = [Delta(calls=(CallDelta(0, "{}", id="a", name="f"),))]
    final = checked(told(fold(), pieces, outcome(length, whole)))
    assert (final["status"], final["output"][-1]["status"]) == ("incomplete", "completed")
    broken = (Call("a", "f", "{", False),)
    pieces = [Delta(calls=(CallDelta(0, "{", id="a", name="f"),))]
    final = checked(told(fold(), pieces, outcome(length, broken)))
    assert (final["status"], final["output"][-1]["status"]) == ("incomplete", "incomplete")
    final = checked(told(fold(), pieces, outcome(calls=broken)))
    assert final["incomplete_details"] == {"reason": "function_call_cut"}
    final = checked(told(fold(), [], outcome(length)))
    [item] = final["output"]  # the history has a reply there, which others' messages follow
    assert (item["content"][0]["text"], item["status"], final["status"]) == ("", "incomplete", "incomplete")


def test_why_it_failed_in_the_words_agents_look_for() -> None:
    busy = ApiError("All are busy.", status=503, headers={"retry-after": "3"})
    assert error_object(busy) == {
        "code": "rate_limit_exceeded",
        "message": "All are busy. Please try again in 3s.",
    }
    long = ApiError("Too long.", code="context_length_exceeded")
    assert error_object(long)["code"] == "context_length_exceeded"
    assert error_object(ApiError("x", status=500))["code"] == "server_error"
    assert error_object(ApiError("x"))["code"] == "invalid_prompt"


def test_a_broken_call_before_a_whole_one_is_not_completed() -> None:
    pieces = [
        Delta(calls=(CallDelta(0, '{"a":1,', id="a", name="f"),)),
        Delta(calls=(CallDelta(0, '"a":2}'), CallDelta(0, broken=True))),
        Delta(calls=(CallDelta(1, "{}", id="b", name="g"),)),
    ]
    calls = (Call("a", "f", '{"a":1,"a":2}', False), Call("b", "g", "{}", True))
    events = told(fold(), pieces, outcome(calls=calls))
    final = checked(events)
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "function_call_cut"})
    assert [item["status"] for item in final["output"]] == ["incomplete", "completed"]
    done = [event["item"]["status"] for event in events[:-1] if event["type"].endswith("output_item.done")]
    assert done == ["incomplete", "completed"]
