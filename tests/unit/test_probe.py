"""Grammars whose steps grow are found before a worker runs them; others are let through, soon."""

import time

import pytest
import xgrammar

from tests.grammar_rig import BYTES, EOS, VOCAB, chain, nest, sources_of_bytes
from tools_bridge.grammar import GrammarError, ResponseFormat, ToolChoice, reply_grammar
from tools_bridge.probe import check_speed
from tools_bridge.registry import reply_form
from tools_bridge.source_compiler import compiled
from tools_bridge.types import ToolSpec
from tools_bridge.vocabulary import GrammarVocabulary

WORDS = r"^(([A-Za-z]+ ?)+[,.]? ?)+$"
SPELLED = 'root ::= (([A-Za-z]+ " "?)+ [,.]? " "?)+'
MANY = "root ::= " + " | ".join(f'x{n} "Z{n}"' for n in range(300)) + "\n"
MANY += "\n".join(f'x{n} ::= [a-z ]* x{n} [a-z ]* | "{n}"' for n in range(300))


@pytest.fixture(scope="module")
def compile_():
    info = GrammarVocabulary(BYTES, VOCAB, [EOS]).info
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return lambda source: compiled(compiler, source.text)


def pattern(text):
    return reply_grammar(response=ResponseFormat("json_schema", {"type": "string", "pattern": text}))


def regex(text):
    return reply_grammar(response=ResponseFormat("regex", text=text))


def ebnf(text):
    return reply_grammar(response=ResponseFormat("ebnf", text=text))


@pytest.mark.parametrize(
    "source",
    [
        ebnf('root ::= (([a-z ]* [a-z ]*)* ([a-z ]* [a-z ]*)*)* "Q"'),
        ebnf('root ::= root root | "a" | ""'),
        ebnf('root ::= x x x x x x x x "!"\nx ::= x x | [a-z ] | ""'),
        ebnf(MANY),
        ebnf(SPELLED),
        ebnf(chain(4, "~|%")),
        ebnf(chain(6, "^")),
    ],
)  # fmt: skip
def test_what_grows_is_refused(compile_, source):
    with pytest.raises(GrammarError, match="too ambiguous"):
        check_speed(compile_(source))


CALL = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
NODE = {"type": "object", "properties": {"v": {}, "c": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}


class Steps:
    """A clock on which each step takes as long as another; counts them."""

    def __init__(self):
        self.looks = 0

    def __call__(self):
        self.looks += 1
        return self.looks * 1e-6


@pytest.mark.parametrize(
    "source",
    [
        reply_grammar(response=ResponseFormat("json_object")),
        reply_grammar(response=ResponseFormat("json_schema", {"$ref": "#/$defs/n", "$defs": {"n": NODE}})),
        reply_grammar([ToolSpec(f"t{n}", CALL, strict=True) for n in range(30)], ToolChoice("required")),
        reply_grammar([ToolSpec(f"t{n}", CALL, strict=True) for n in range(30)], ToolChoice("auto")),
        pattern("foo"),
        pattern("a+"),
        *map(pattern, (WORDS, "^((([a-z ]*)*)*){0,50}Q$", r"^(\w+\s?)*$")),  # automata
        pattern("^([a-z]*[a-z]*[a-z]*[a-z]*){0,20}$"),
        *map(regex, (WORDS, "^((([a-z ]*)*)*){0,50}Q$", nest(40), r"((a|b)*a(a|b){12})+")),
        pattern(r"^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}$"),
        pattern(r"^([a-z0-9]+(-[a-z0-9]+)*\.)+[a-z]{2,}$"),
        regex(r"(\w+,)*\w+"),
        regex(r".*a.*b.*c.*"),
        regex(r"(\w+\s*)+"),
        regex(r"(foo|bar|\w+)( (foo|bar|\w+))*"),
        ebnf('root ::= t (("+" | "-") t)*\nt ::= f (("*" | "/") f)*\nf ::= [0-9]+ | "(" root ")"'),
    ],
)
def test_what_does_not_grow_is_let_through_after_a_bounded_number_of_steps(compile_, source):
    check_speed(compile_(source))
    steps = Steps()
    check_speed(compile_(source), steps)
    assert steps.looks < 40_000


class Machine:
    """A machine so many times slower than another, or busy for a while."""

    def __init__(self, slower=1.0):
        self.slower, self.began = slower, time.thread_time()

    def __call__(self):
        return (time.thread_time() - self.began) * self.slower


@pytest.mark.parametrize("slower", [0.2, 1, 20])
def test_what_is_refused_does_not_depend_on_the_machine(compile_, slower):
    with pytest.raises(GrammarError, match="too ambiguous"):
        check_speed(compile_(ebnf(SPELLED)), Machine(slower))
    check_speed(compile_(regex(r"(\w+\s*)+")), Machine(slower))


def test_a_pattern_in_one_of_many_tools_is_refused_by_its_place():
    """In calls that are not JSON a text stands as it is, and its pattern is no automaton."""

    def tool(n, pattern):
        city = {"type": "string", "pattern": pattern}
        properties = {"first": {"type": "integer"}, "city": city}
        return ToolSpec(f"t{n}", {"type": "object", "properties": properties}, strict=True)

    tools = [tool(n, WORDS if n == 17 else "^[a-z]+$") for n in range(30)]
    compiler = sources_of_bytes()
    syntax = reply_form("", "qwen3-xml").syntax
    for choice in ("auto", "required"):
        with pytest.raises(GrammarError, match=r"^tools\.t17\.parameters: .* too ambiguous"):
            compiler.compile(reply_grammar(tools, ToolChoice(choice), syntax=syntax))
        assert compiler.compile(reply_grammar(tools, ToolChoice(choice)))
    assert compiler.compile(reply_grammar(tools[:17], ToolChoice("auto"), syntax=syntax))
