"""From pieces of a reply to items: the same however it was cut."""

from __future__ import annotations

from array import array
from itertools import count, pairwise

from hypothesis import given
from hypothesis import strategies as st

from agentserve.messages import TurnUsage
from agentserve.server.agents.fold import Closed, Fold, Grew, Opened, Step, items_of_message
from agentserve.server.agents.records import AgentConfig, AgentTool, CallItem, MessageItem, ReasoningItem
from agentserve.server.sessions.answer import Call, Delta, Outcome
from agentserve.server.sessions.seats import reply_message
from agentserve.types import FinishReason

CONFIG = AgentConfig(
    "a", "m", tools=(AgentTool("python", "now"), AgentTool("function", "later", background=True))
)
USAGE = TurnUsage(1, 0, 1, 2, 0, 0.0, 0.0, 0.0, 0.0)


def outcome(text: str, thought: str, names: list[str], reason: FinishReason, whole: bool) -> Outcome:
    calls = tuple(Call(f"c{i}", name, "{}", whole) for i, name in enumerate(names))
    return Outcome(reason, text, calls, bool(names) and not whole, (), (), array("i"), USAGE, thought)


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def folded(cuts: list[int], thought: str, text: str, end: Outcome) -> tuple[list[Step], tuple[object, ...]]:
    ids = count()
    fold = Fold(CONFIG, lambda prefix: f"{prefix}{next(ids)}", 3, lambda name: 9.0 if name == "now" else None)
    steps: list[Step] = []
    for piece in pieces(thought, cuts):
        steps += fold.delta(Delta(reasoning=piece))
    for piece in pieces(text, cuts):
        steps += fold.delta(Delta(text=piece))
    last, items = fold.finish(end)
    return steps + last, items


@given(
    st.lists(st.integers(0, 99), max_size=6),
    st.sampled_from(["", "Hm.", "Let me think"]),
    st.sampled_from(["", " ", "\n\n", "It rains.", "  It rains. \n"]),
    st.lists(st.sampled_from(["now", "later", "unknown"]), max_size=3),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    st.booleans(),
)
def test_items_do_not_depend_on_cuts(
    cuts: list[int], thought: str, text: str, names: list[str], reason: FinishReason, whole: bool
) -> None:
    end = outcome(text, thought, names, reason, whole)
    steps, items = folded(cuts, thought, text, end)
    assert items == folded([], thought, text, end)[1]
    grown: dict[str, str] = {}
    for step in steps:
        if isinstance(step, Opened):
            assert step.index == 3 + len(grown)
            grown[step.item.id] = ""
        elif isinstance(step, Grew):
            grown[step.item.id] += step.text
        else:
            assert step.item.text == grown[step.item.id]
            assert step.item in items
    assert len(grown) == len(items)
    said = [item for item in items if isinstance(item, MessageItem)]
    assert len(said) <= 1
    assert "".join(item.text for item in said).strip() == text.strip()
    assert "".join(item.text for item in items if isinstance(item, ReasoningItem)) == thought
    calls = [item for item in items if isinstance(item, CallItem)]
    handed = names if whole else []
    assert [call.name for call in calls] == handed
    assert [call.kind for call in calls] == ["python" if name == "now" else "function" for name in handed]
    assert [call.background for call in calls] == [name == "later" for name in handed]
    assert [call.deadline for call in calls] == [9.0 if name == "now" else None for name in handed]
    cut = (reason is FinishReason.LENGTH and not names) or bool(names and not whole)
    assert all(item.whole for item in items) != cut


def test_a_reply_that_came_to_nothing_closes_what_is_open() -> None:
    fold = Fold(CONFIG, lambda prefix: prefix, 0, lambda name: None)
    assert fold.broken() == []
    fold.delta(Delta(text="It"))
    (closed,) = fold.broken()
    assert isinstance(closed, Closed)
    assert closed.item == MessageItem("msg", "It", final=False, whole=False)


def test_a_committed_reply_gives_the_same_items_again() -> None:
    for text, names in (("It rains.", []), ("", ["now"]), ("Hm.", ["now", "later"]), ("", [])):
        end = outcome(text, "Let me see.", list(names), FinishReason.STOP, True)
        _, items = folded([], "Let me see.", text, end)
        again = items_of_message(CONFIG, reply_message(end), lambda prefix: prefix, lambda name: None)
        kinds = [(type(item).__name__, getattr(item, "text", None)) for item in items]
        assert [(type(item).__name__, getattr(item, "text", None)) for item in again] == kinds
