"""Automata of patterns: the same texts as the pattern's own matcher, whatever the pattern; the smallest."""

import random
import re

import pytest

from tests.framework_samples import PATTERNS
from tools_bridge.json_schema.automaton import states_of
from tools_bridge.json_schema.pattern_rules import string_rules
from tools_bridge.json_schema.patterns import read_pattern

ODD = [
    "",
    "a",
    "^(a|b)*abb$",
    "^(a?){5}a{5}$",
    "^(ab|a)(c|bcd)(d*)$",
    "^[^a-c]$",
    "^((a*)*b?)*$",
    "^(|x)(|y)$",
]


def ends(states, text):
    at = 0
    for char in text:
        for ranges, target in states[at].moves:
            if any(low <= ord(char) <= high for low, high in ranges):
                at = target
                break
        else:
            return False
    return states[at].ends


@pytest.mark.parametrize("pattern", [*ODD, *PATTERNS])
def test_it_takes_what_the_pattern_matches(pattern):
    read = read_pattern(pattern, "x")
    states = states_of(read.whole, 256)
    rng = random.Random(pattern)
    texts = ["", *PATTERNS.get(pattern, ())]
    texts += ["".join(rng.choices("abcdxy01-. A\n", k=rng.randint(0, 7))) for _ in range(200)]
    for text in texts:
        assert ends(states, text) == read.found_in(text), text


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("a", 2),
        ("^a$", 2),
        ("^(a|b)*abb$", 4),
        (r"^(([A-Za-z]+ ?)+[,.]? ?)+$", 5),
        ("^([a-z]*[a-z]*){0,20}$", 1),
    ],
)
def test_it_is_the_smallest(pattern, count):
    assert len(states_of(read_pattern(pattern, "x").whole, 256)) == count


@pytest.mark.parametrize("pattern", ["^(a|b)*a(a|b){20}$", "^((a{1000}){1000}){9}$", "^[ab]{0,300}$"])
def test_too_many_states_are_none_soon(pattern):
    node = read_pattern(pattern, "x").whole
    assert states_of(node, 256) is None
    assert string_rules("p", node, "") is None


def test_each_state_has_a_rule_that_ends_with_the_quote():
    rules = string_rules("p", read_pattern('^["b]+$', "x").whole, " (=x)")
    assert rules is not None
    first, *others = rules.split("\n")
    assert first == 'p ::= ("\\"" p_0)'
    assert all(re.fullmatch(r"p_\d+ ::= .* \(=x\)", line) for line in others)
    assert [line.count('("\\"")') for line in others] == [0, 1]
