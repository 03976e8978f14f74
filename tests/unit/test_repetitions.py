"""Regular expressions whose repetitions overlap are found by their shape, and read in one way."""

import re

import pytest
import xgrammar

from tests.grammar_rig import chain, nest, sources_of_bytes
from tools_bridge.grammar import GrammarError, ResponseFormat, reply_grammar
from tools_bridge.json_schema.patterns import read_whole
from tools_bridge.repetitions import depth, rules_of_regex, unambiguous
from tools_bridge.token_probe import check_tokens, long_tokens
from tools_bridge.vocabulary import GrammarVocabulary

LARGE = "(a|b)*a(a|b){12}"  # whose automaton has 2 ** 13 states


@pytest.mark.parametrize(
    ("text", "deep"),
    [
        ("abc", 0),
        (r"(\w+,)*\w+", 0),
        (r".*a.*b", 0),
        ("(a?){3}", 1),
        (r"(\w+\s*)+", 1),
        ("(a*)*", 1),
        (r"(([A-Za-z]+ ?)+[,.]? ?)+", 2),
        (nest(40), 40),
        ("(ab+)+", 0),
        ("(ab+a?)+", 1),
        ("(a|ab)(c|bcd)", 0),
    ],
)
def test_depth(text, deep):
    assert depth(read_whole(text, "")) == deep


@pytest.mark.parametrize("text", [r"(\w+\s*)+", r"^(([A-Za-z]+ ?)+[,.]? ?)+$", "(a*b?)*c|(.\n?)+!", nest(3)])
def test_the_rules_take_what_the_expression_takes(text):
    info = GrammarVocabulary([bytes([n]) for n in range(256)], 257, [256]).info
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    rules = rules_of_regex(text)
    assert rules is not None
    ours, theirs = compiler.compile_grammar(xgrammar.Grammar.from_ebnf(rules)), compiler.compile_regex(text)
    for tried in (
        "",
        "a",
        "ab",
        "a b",
        "Ab cd, e. F",
        "##~#!",
        "##~~!",
        "#!",
        "aabac",
        "c",
        "é\n!",
        "\n!",
        "!",
        "a  b",
    ):
        taken = []
        for grammar in (ours, theirs):
            matcher = xgrammar.GrammarMatcher(grammar)
            taken.append(all(matcher.accept_string(c) for c in tried) and matcher.is_completed())
        assert (
            taken[0] == taken[1] == bool(re.fullmatch(text.replace(".\n", "[\\s\\S]\n"), tried, re.ASCII))
        ), tried


def test_what_does_not_overlap_or_is_not_read_stays_as_it_is():
    for text in ("abc", r"(\w+,)*\w+", "a{2,3}b", r"a(?=b)", "(", LARGE, f"({LARGE})+"):
        assert rules_of_regex(text) is None


def test_where_no_automaton_is_small_enough_repetitions_may_not_overlap_in_each_other():
    with pytest.raises(GrammarError, match="too ambiguous"):
        rules_of_regex(f"(({LARGE})+c?)+")
    compiler = sources_of_bytes()
    for kind in ("regex", "json_schema"):
        text = f"^(({LARGE})+c?)+$"
        what = {"schema": {"type": "string", "pattern": text}} if kind == "json_schema" else {"text": text}
        with pytest.raises(GrammarError, match="too ambiguous"):
            compiler.compile(reply_grammar(response=ResponseFormat(kind, **what)))


def test_expressions_in_structural_tags_are_found():
    tag = '{"type":"structural_tag","format":{"type":"or","elements":[{"type":"regex","pattern":"%s"}]}}'
    assert "s0 ::=" in unambiguous(tag % "(a+b?)+")
    assert '"pattern": "ab+"' in unambiguous(tag % "ab+")
    schema = '{"type":"json_schema","json_schema":{"type":"regex","pattern":"(a+b?)+"}}'
    assert unambiguous(schema).replace(" ", "") == schema


# --- tokens that are long ---------------------------------------------------------------------


def test_the_longest_tokens_and_runs():
    tokens = [
        b"",
        b"a",
        b"####",
        b"#" * 16,
        b"    ",
        b"  ",
        "é".encode() * 8,
        *(b"w%d" % n for n in range(99)),
    ]
    found = long_tokens(tokens)
    assert found[3] == b"#" * 16
    assert found[4] == b"    "
    assert found[6] == "é".encode() * 8
    assert 2 not in found or len(found) > 2
    assert 0 not in found
    assert 1 not in found


class Held:
    """A guard that ends nothing, and knows whether something runs under it."""

    def __init__(self):
        self.held = False

    def begin(self, seconds):
        self.held = True

    def end(self):
        self.held = False


def test_a_run_in_one_token_is_tried_in_the_text_where_it_may_come():
    """What single characters do not show soon: the letter is none that is tried, and a token has many."""
    mark = "\U0001d11e"
    tokens = [*(bytes([n]) for n in range(256)), b"", mark.encode() * 12]
    vocabulary = GrammarVocabulary(tokens, len(tokens), [256])
    compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
    guard = Held()

    def check(source, clock=None):
        grammar = compiler.compile_grammar(xgrammar.Grammar.from_ebnf(source))
        more = {} if clock is None else {"clock": clock}
        check_tokens(grammar, len(tokens), long_tokens(tokens), guard, **more)
        assert not guard.held

    looks = [0.0]

    def clock():  # each call takes as long as another, those that would end the process a second
        looks[0] += 1e-6
        return looks[0]

    check(f'root ::= "{mark}"* "!"')
    check(f'root ::= "{mark}"* "!"', clock)
    with pytest.raises(GrammarError, match="too ambiguous"):
        check(chain(4, "~|%", mark))


def test_an_attack_on_letters_of_its_own_is_refused_by_the_compiler():
    compiler = sources_of_bytes()
    for source in (chain(6, "~|%"), chain(6, "^", "q"), chain(5, "\x7f|", "Z")):
        with pytest.raises(GrammarError, match="too ambiguous"):
            compiler.compile(reply_grammar(response=ResponseFormat("ebnf", text=source)))
    assert compiler.compile(reply_grammar(response=ResponseFormat("regex", text=nest(12))))
