"""Grammars whose steps grow are found before a worker runs them; others are let through, soon."""

import pytest
import xgrammar

from tests.grammar_rig import BYTES, EOS, VOCAB, compiler_of_bytes
from tools_bridge.compile_child import compiled
from tools_bridge.grammar import GrammarError, ResponseFormat, ToolChoice, reply_grammar
from tools_bridge.probe import check_speed
from tools_bridge.types import ToolSpec
from tools_bridge.vocabulary import GrammarVocabulary

WORDS = r"^(([A-Za-z]+ ?)+[,.]? ?)+$"
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
        pattern(r"^(\w+\s?)*$"),
        pattern("^([a-z]*[a-z]*[a-z]*[a-z]*){0,20}$"),
        *(make(text) for make in (pattern, regex) for text in (WORDS, "^((([a-z ]*)*)*){0,50}Q$")),
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
        pattern("a+"),  # grows, too, but not by much
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


def test_a_pattern_deep_in_one_of_many_tools_is_refused_by_the_compiler():
    def tool(n, city):
        inner = {"type": "object", "properties": {"first": {"type": "integer"}, "city": city}}
        return ToolSpec(f"t{n}", {"type": "object", "properties": {"in": inner}}, strict=True)

    tools = [tool(n, {"type": "string", "pattern": WORDS if n == 17 else "^[a-z]+$"}) for n in range(30)]
    compiler = compiler_of_bytes(timeout=60, processes=1)
    try:
        for choice in ("auto", "required"):
            with pytest.raises(GrammarError, match="too ambiguous"):
                compiler.compile(reply_grammar(tools, ToolChoice(choice)))
        assert compiler.compile(reply_grammar(tools[:17], ToolChoice("auto")))
    finally:
        compiler.close()
