"""What a text is held to: one expression, of all that its patterns, its format and its length say."""

from __future__ import annotations

from dataclasses import replace

from tools_bridge.json_schema import formats
from tools_bridge.json_schema.dialect import Part, refused
from tools_bridge.json_schema.facts import Facts
from tools_bridge.json_schema.joined import joined
from tools_bridge.json_schema.narrower import narrower
from tools_bridge.json_schema.pattern_tree import ANY, Repeat
from tools_bridge.json_schema.patterns import Pattern, read_pattern
from tools_bridge.json_schema.pruning import NEVER

ROOM = 4  # characters that a short form leaves free, at the least
MAX_COUNT = 10_000  # characters, items, properties that are counted


def string(facts: Facts) -> Part:
    least, most = facts.min_length, facts.max_length
    if most is not None and most < least:
        return NEVER
    patterns = _patterns(facts)
    if patterns:
        pattern = _one(patterns, facts)
        return NEVER if pattern is None else {"type": "string", "pattern": pattern.source(facts.where)}
    countable(facts.where, minLength=least, maxLength=most)
    found: Part = {"type": "string"}
    if least:
        found["minLength"] = least
    return found if most is None else found | {"maxLength": most}


def name_pattern(facts: Facts) -> Pattern | None:
    """What a property's name is held to; None: nothing."""
    where, least, most = facts.where, facts.min_length, facts.max_length
    apart = [name for name in facts.apart if isinstance(name, str)]
    if "" in apart:
        least = max(least, 1)
    countable(where, minLength=least, maxLength=most)
    patterns = _patterns(facts)
    pattern = None
    if patterns:
        pattern = _one(patterns, replace(facts, min_length=least))
        if pattern is None:
            raise refused(where, "propertyNames", "cannot be held: no name is valid")
    elif least or most is not None:
        pattern = Pattern("", Repeat(ANY, least, most))
    if any(pattern is None or pattern.found_in(name) for name in apart):
        raise refused(where, "propertyNames", "without single names cannot be held")
    return pattern


def countable(where: str, **counts: int | None) -> None:
    for keyword, count in counts.items():
        if count is not None and count > MAX_COUNT:
            raise refused(where, keyword, f"of {count} is more than can be counted, {MAX_COUNT}")


def _patterns(facts: Facts) -> list[Pattern]:
    """A format beside a pattern is an annotation: the pattern is what holds."""
    if facts.patterns:
        return list(facts.patterns)
    found = []
    for form in facts.formats:
        if form in formats.UNHELD:
            raise refused(facts.where, "format", f"{form!r} cannot be held")
        if form in formats.PATTERNS:
            found.append(_of_format(formats.PATTERNS[form], facts.where))
    if len(found) > 1:
        raise refused(facts.where, "format", "beside another format cannot be held")
    return found


def _of_format(text: str, where: str) -> Pattern:
    return read_pattern(f"^{text}$", where, ours=True)


def _one(patterns: list[Pattern], facts: Facts) -> Pattern | None:
    """All of them, and the length; None where nothing is both."""
    least, most = facts.min_length, facts.max_length
    pattern = joined(patterns, bounded=least > 0 or most is not None)
    if pattern is None:
        raise refused(facts.where, "pattern", "beside this other pattern cannot be held")
    low, high = pattern.lengths
    if (most is not None and low > most) or (high is not None and high < least):
        return None
    counted = pattern.of_length(least, most)
    if counted is not None:
        return counted
    for form in () if facts.patterns else facts.formats:
        short = _of_format(formats.SHORT[form], facts.where) if form in formats.SHORT else pattern
        pattern = short if most is not None and short.lengths[0] + ROOM <= most else pattern
    counted = narrower(pattern, least, most)
    if counted is None:
        keyword = "pattern" if facts.patterns else "format"
        raise refused(facts.where, keyword, "and a length cannot be held together")
    return counted
