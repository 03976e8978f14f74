r"""How long a grammar's matcher takes per step, found out before a worker has to run it.

xgrammar follows all readings of a text at once (an Earley parser; Earley 1970). Where a grammar reads one
text in many ways (`(([a-z]+ ?)+,? ?)+`) they multiply with each character: a step of a microsecond takes
seconds at the hundredth token, and nothing bounds it in a worker. So somebody walks there first: along
texts that repeat themselves, which is where readings multiply, from many places of the grammar.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from tools_bridge.repetitions import AMBIGUOUS
from tools_bridge.schemas import GrammarError
from tools_bridge.vocabulary import GrammarVocabulary

if TYPE_CHECKING:
    import xgrammar

# Times what a character of a plain grammar takes on this machine just now: the 400th `a` where one may stand
# anywhere takes a hundred, in an ambiguous grammar a thousand and more, on every machine alike.
SLOW = 250
PLAIN = 'root ::= ([a-z] " "?)* "."'
PLAIN_STEPS = 100
GROWN = 8  # times what it took at first: a grammar that is merely wide does not grow
FIRST_REPEATS = 48  # then it is seen whether a repetition grows at all
MOST_REPEATS = 400
MOST_STEPS = 12_000  # of repetitions that do not grow, in all: some tens of milliseconds
PART_STEPS = 3_000  # of those in one part of many
WALKS = 3
WALK_CHARS = 120
TRIED = b'aA0 _-.,"[]{}():;+/<\\\n'  # one of each class of characters that grammars tell apart
PRINTED = bytes([9, 10, *range(32, 127)])
FEW = 24  # that are tried one by one
BESIDE = b"a0 .,-_\n"  # what repeats in turns with another

Clock = Callable[[], float]


def parts_of(source: str) -> list[str]:
    """The patterns and grammars in a source, each as a source of its own: walks that begin at the beginning
    of it all do not come to everything. Those of a structural tag's text."""
    found: dict[str, None] = {}
    rest: list[tuple[object, dict[str, object]]] = [(json.loads(source), {})]
    while rest:
        node, written = rest.pop()
        if isinstance(node, list):
            rest.extend((item, written) for item in node)
        if not isinstance(node, dict):
            continue
        if node.get("type") in ("regex", "grammar"):
            found[_part(node)] = None
            continue
        if "json_schema" in node:
            written = {key: node[key] for key in ("style", "excludes") if key in node}
        patterns = node.get("patternProperties")
        names = list(patterns) if isinstance(patterns, dict) else []
        for text in (node.get("pattern"), *names):
            if isinstance(text, str):
                found[_part(_pattern(text, written))] = None
        rest.extend((value, written) for key, value in node.items() if key not in ("enum", "const"))
    return list(found)


def _pattern(text: str, written: dict[str, object]) -> dict[str, object]:
    """Of one text; in forms of calls that are not JSON, of the only argument."""
    schema: dict[str, object] = {"type": "string", "pattern": text}
    if written:
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        schema["additionalProperties"] = False
    return {"type": "json_schema", "json_schema": schema, **written}


def _part(form: dict[str, object]) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def check_speed(
    grammar: xgrammar.CompiledGrammar, clock: Clock = time.thread_time, steps: int = MOST_STEPS
) -> None:
    """A grammar whose steps take ever longer is a GrammarError. `clock`: seconds of CPU."""
    import xgrammar

    budget = _Budget(steps)
    unit = Unit(clock)
    seen: set[tuple[bytes, bytes]] = set()
    places: set[bytes] = set()
    for seed in range(WALKS):
        matcher = xgrammar.GrammarMatcher(grammar)
        for open_ in wander(matcher, random.Random(seed)):
            for text in _texts(matcher, open_) if open_ not in places else ():
                if budget.left <= 0:
                    return
                if (open_, text) not in seen:
                    seen.add((open_, text))
                    budget.left -= _repeat(matcher, text, clock, unit)
            places.add(open_)


class _Budget:
    def __init__(self, steps: int) -> None:
        self.left = steps


class Unit:
    """What a step of a plain grammar takes: the least of many, as what else the machine does only adds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds = 0.0

    def exceeded(self, seconds: float, times: float = SLOW) -> bool:
        """Whether a step is slow, also by what a plain one takes at this moment."""
        if seconds <= times * self._seconds:
            return False
        self._seconds = max(self._seconds, self._measured())
        return seconds > times * self._seconds

    def _measured(self) -> float:
        import xgrammar

        matcher = xgrammar.GrammarMatcher(_plain())
        times: list[float] = []
        for _ in range(PLAIN_STEPS):
            before = self._clock()
            matcher.accept_string(b"a")
            times.append(self._clock() - before)
        return min(times)


@cache
def _plain() -> xgrammar.CompiledGrammar:
    import xgrammar

    info = GrammarVocabulary([bytes([n]) for n in range(256)], 257, [256]).info
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return compiler.compile_grammar(xgrammar.Grammar.from_ebnf(PLAIN))


def _texts(matcher: xgrammar.GrammarMatcher, open_: bytes) -> Iterator[bytes]:
    """What to repeat where these may come: each, then each with what may come behind it."""
    for one in open_:
        yield bytes([one])
    for one in open_:
        if matcher.accept_string(bytes([one])):
            behind = [] if matcher.is_terminated() else _open(matcher, BESIDE)
            matcher.rollback(1)
            for other in behind:
                if other != one:
                    yield bytes([one, other])


def _open(matcher: xgrammar.GrammarMatcher, classes: bytes) -> bytes:
    """The characters that may come; one of each of `classes` where there are many."""
    found = bytes(one for one in PRINTED if _takes(matcher, one))
    return found if len(found) <= FEW else bytes(one for one in classes if one in found)


def wander(matcher: xgrammar.GrammarMatcher, rng: random.Random) -> Iterator[bytes]:
    """Goes along a text drawn at random; at each place, what may come."""
    length = 0
    while length < WALK_CHARS and not matcher.is_terminated():
        forced = matcher.find_jump_forward_string()
        if forced and matcher.accept_string(forced):
            length += len(forced)
            continue
        open_ = _open(matcher, TRIED)
        yield open_
        among = open_ or bytes(one for one in range(256) if _takes(matcher, one))
        # White space leads nowhere, and what closes a text early hides the rest of it.
        rather = bytes(one for one in among if one not in b' \n"]}') if rng.random() < 0.7 else among
        if not among or not matcher.accept_string(bytes([rng.choice(rather or among)])):
            return
        length += 1


def _takes(matcher: xgrammar.GrammarMatcher, one: int) -> bool:
    if not matcher.accept_string(bytes([one])):
        return False
    matcher.rollback(1)
    return True


def _repeat(matcher: xgrammar.GrammarMatcher, text: bytes, clock: Clock, unit: Unit) -> int:
    """Repeats `text` as long as it is taken and grows dearer; leaves the matcher where it was.

    Returns the steps that say nothing against the grammar.
    """
    characters = [text[i : i + 1] for i in range(len(text))]
    times: list[float] = []
    for n in range(MOST_REPEATS):
        before = clock()
        taken = matcher.accept_string(characters[n % len(characters)])
        times.append(clock() - before)
        if not taken:
            times.pop()
            break
        if n == FIRST_REPEATS and _lately(times) < 2 * _at_first(times):
            break
        if n > 4 and _lately(times) > GROWN * _at_first(times) and unit.exceeded(_lately(times)):
            raise GrammarError(AMBIGUOUS)
    if times:
        matcher.rollback(len(times))
    return len(times) + 1


def _at_first(times: list[float]) -> float:
    return min(times[:3])


def _lately(times: list[float]) -> float:
    return min(times[-3:])  # the least: what else the machine does only adds
