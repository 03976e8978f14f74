"""Grammars that are followed in another process: whoever hangs it fails alone, and the others go on."""

import os
import signal
from itertools import count
from pathlib import Path

import pytest
import xgrammar

from agentserve.executor import matcher_link
from agentserve.executor.grammars import TOO_LARGE, GrammarStore, GrammarTooSlow
from agentserve.executor.matcher_link import HostGone, allowed_seconds
from agentserve.executor.matcher_process import DEFINE_SECONDS, Define, fork_host
from agentserve.executor.matchers import GuardedGrammars
from tests.grammar_rig import chain, fresh_host
from tools_bridge.vocabulary import GrammarVocabulary

# Python 3.12 warns of forks beside threads; the worker has none where it forks.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

RUN, EOS, SIZE = 257, 256, 300
TOKENS = [*(bytes([n]) for n in range(256)), b"", b"#" * 80]
# What it keeps of a text grows with it, and each step is quick.
GROWS = 'root ::= "#" (a | b) "!"\na ::= root "x" | "y"\nb ::= root "z" | "y"'
TEXT = b'{"a": [1, {"b": "c d"}, 2.5e3]'


@pytest.fixture(scope="module")
def texts():
    vocabulary = GrammarVocabulary(TOKENS, SIZE, [EOS])
    compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
    hangs = compiler.compile_grammar(xgrammar.Grammar.from_ebnf(chain(12, "~|%")))
    return {
        "json": vocabulary.seal(compiler.compile_builtin_json_grammar()),
        "hangs": vocabulary.seal(hangs),
        "grows": vocabulary.seal(compiler.compile_grammar(xgrammar.Grammar.from_ebnf(GROWS))),
    }


@pytest.fixture
def grammars(texts):
    found = GuardedGrammars(fork_host(), TOKENS, SIZE, [EOS])
    for name, text in texts.items():
        found.define(name, text)
    yield found
    found.close()


def here(texts, name="json"):
    store = GrammarStore(TOKENS, SIZE, [EOS])
    store.define(name, texts[name])
    return store.start(name)


def same(fold, other):
    return (fold.over, fold.allowed().tolist()) == (other.over, other.allowed().tolist())


def test_it_says_what_a_fold_in_this_process_says(grammars, texts):
    fold, other = grammars.start("json"), here(texts)
    assert fold.size == grammars.start("json").size > 0
    assert same(fold, other)
    for token in TEXT:
        for one in (fold, other):
            assert not one.push(1)
            assert one.push(token)
        assert same(fold, other)
    for one in (fold, other):
        assert one.push(ord("}"))
        assert one.over
        assert not one.push(EOS)
    assert same(fold, other)


def test_who_hangs_it_fails_alone_and_the_others_are_folded_again(grammars, texts):
    fold, other, bomb = grammars.start("json"), here(texts), grammars.start("hangs")
    for n, token in enumerate(TEXT):
        if n == 7:
            worker = grammars.pid
            for _ in range(3):  # it is not asked again
                with pytest.raises(GrammarTooSlow, match="too ambiguous"):
                    bomb.push(RUN)
                with pytest.raises(GrammarTooSlow):
                    bomb.allowed()
            assert grammars.deaths == 1
            assert grammars.pid != worker
            with pytest.raises(ProcessLookupError):
                os.kill(worker, 0)
        assert fold.push(token)
        assert other.push(token)
        assert same(fold, other)
    with pytest.raises(GrammarTooSlow):
        grammars.start("hangs")  # another turn does not try it, nor when it is sent again
    grammars.define("hangs", texts["hangs"])
    with pytest.raises(GrammarTooSlow):
        grammars.start("hangs")
    assert grammars.deaths == 1


def test_one_that_was_killed_from_outside_is_nobodys_fault(grammars, texts):
    fold, other = grammars.start("json"), here(texts)
    for token in TEXT:
        os.kill(grammars.pid, signal.SIGKILL)
        assert fold.push(token)
        assert other.push(token)
        assert same(fold, other)
    assert grammars.deaths == len(TEXT)


@pytest.mark.parametrize("order", [1, -1])
def test_who_needs_all_memory_fails_alone(texts, order):
    grammars = GuardedGrammars(fresh_host(), TOKENS, SIZE, [EOS], memory_bytes=32 * 2**20)
    for name, text in texts.items():
        grammars.define(name, text)
    fold, other, bomb = grammars.start("json"), here(texts), grammars.start("grows")
    assert fold.push(ord("["))
    assert other.push(ord("["))
    grown = 0

    def innocent():
        for one in (fold, other):
            assert one.push(ord(" "))
        assert same(fold, other)

    def greedy():
        nonlocal grown
        assert bomb.push(RUN)
        grown += 1

    def until_it_fails():
        while grown < 5000:
            for ask in (innocent, greedy)[::order]:
                ask()

    with pytest.raises(GrammarTooSlow, match="too much memory"):
        until_it_fails()
    assert grown > 100
    assert grammars.deaths >= 2  # it had a process of its own before it was blamed
    deaths = grammars.deaths
    for _ in range(20):
        innocent()
    with pytest.raises(GrammarTooSlow, match="too much memory"):
        grammars.start("grows")
    assert grammars.start("json").push(ord("{"))
    assert grammars.deaths == deaths
    grammars.close()


def test_who_comes_where_another_has_taken_the_memory_is_not_blamed(texts):
    grammars = GuardedGrammars(fresh_host(), TOKENS, SIZE, [EOS], memory_bytes=32 * 2**20)
    for name, text in texts.items():
        grammars.define(name, text)
    greedy, held = grammars.start("grows"), []
    for _ in range(500):
        assert greedy.push(RUN)
    assert grammars.deaths == 0
    while not grammars.deaths and len(held) < 200_000:
        held.append(grammars.start("json"))  # at last, for want of memory
    assert grammars.deaths == 1
    assert held[-1].push(ord("{"))
    assert held[0].push(ord("{"))
    assert greedy.push(RUN)  # it fits, beside few
    assert grammars.deaths == 1
    grammars.close()


def test_those_that_lack_memory_together_do_not_end_it_for_ever(texts):
    """Each fits by itself, so that none was at fault, and each step of everybody's ended it again."""
    grammars = GuardedGrammars(fresh_host(), TOKENS, SIZE, [EOS], memory_bytes=32 * 2**20)
    for name, text in texts.items():
        grammars.define(name, text)
    greedy, fold, other = [grammars.start("grows") for _ in range(3)], grammars.start("json"), here(texts)
    for one in (fold, other):
        assert one.push(ord("["))
    told, steps = [], 0
    while not told:
        steps += 1
        for one in greedy.copy():
            try:
                assert one.push(RUN)
            except GrammarTooSlow as error:
                told.append(str(error))
                greedy.remove(one)
        for one in (fold, other):
            assert one.push(ord(" "))
        assert grammars.deaths <= 4
        assert steps < 2000
    assert steps > 100
    assert told == [TOO_LARGE]
    deaths = grammars.deaths
    for _ in range(20):  # there is room again
        assert all(one.push(RUN) for one in greedy)
        for one in (fold, other):
            assert one.push(ord(" "))
        assert same(fold, other)
    assert grammars.deaths == deaths
    grammars.close()


def state_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    while state_of(pid) != "T":
        pass


def ended(pid):
    while state_of(pid) not in "XZ":
        pass


def test_one_that_stands_still_is_given_up_and_is_nobodys_fault(texts):
    grammars = GuardedGrammars(fork_host(), TOKENS, SIZE, [EOS], still_seconds=0.5)
    grammars.define("json", texts["json"])
    fold, other = grammars.start("json"), here(texts)
    for n, token in enumerate(TEXT):
        if n == 3:
            before = grammars.pid
            stopped(before)
        for one in (fold, other):
            assert one.push(token)
        assert same(fold, other)
    assert grammars.pid != before
    stopped(grammars.pid)
    grammars.define("large", texts["json"] + " " * 2**20)  # it is not read to its end
    assert grammars.start("json").push(ord("{"))
    grammars.close()


def test_one_that_is_at_work_is_waited_for(texts, monkeypatch):
    grammars = GuardedGrammars(fork_host(), TOKENS, SIZE, [EOS], still_seconds=0.01)
    link = grammars._link
    answers = iter([False] * 5 + [True])
    used = count()
    monkeypatch.setattr(matcher_link, "cpu_seconds", lambda pid: float(next(used)))
    assert link._answers(lambda seconds: next(answers), 1)
    assert not link._answers(lambda seconds: False, 1)
    assert next(used) == 5 + 1 + matcher_link.LOOKS + 1
    grammars.close()


@pytest.mark.parametrize(("seconds", "late"), [(0.4, False), (0.6, True)])
def test_one_that_is_late_is_at_fault_only_for_time_that_it_used(texts, monkeypatch, seconds, late):
    grammars = GuardedGrammars(fork_host(), TOKENS, SIZE, [EOS])
    grammars.define("json", texts["json"])
    fold = grammars.start("json")
    used = iter([0.0, seconds])
    monkeypatch.setattr(matcher_link, "cpu_seconds", lambda pid: next(used, 0.0))
    answers = iter([False])  # then it does
    monkeypatch.setattr(grammars._link, "_answers", lambda readable, pid: next(answers, True))
    if late:
        with pytest.raises(GrammarTooSlow):
            fold.push(ord("{"))
    else:
        assert fold.push(ord("{"))
    assert grammars.deaths == 1
    assert allowed_seconds(Define("g", "")) == DEFINE_SECONDS
    grammars.close()


def test_what_cannot_be_used_is_said(grammars, texts):
    with pytest.raises(ValueError, match="another vocabulary"):
        grammars.define("bad", "no grammar")
    for name in ("bad", "never"):
        with pytest.raises(ValueError, match="not defined"):
            grammars.start(name)
    fold = grammars.start("json")
    grammars.drop("json")
    with pytest.raises(ValueError, match="not defined"):
        grammars.start("json")
    assert fold.push(ord("{"))
    os.kill(grammars.pid, signal.SIGKILL)
    assert fold.push(ord("}"))  # it keeps what it needs
    grammars.define("json", texts["json"])
    assert grammars.start("json").push(ord("{"))
    assert grammars.deaths == 1


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_ends_of_a_host_that_is_gone(texts, end):
    host = fork_host()
    grammars = GuardedGrammars(host, TOKENS, SIZE, [EOS], still_seconds=0.5)
    grammars.define("json", texts["json"])
    fold = grammars.start("json")
    if end == signal.SIGSTOP:
        stopped(host.pid)
        os.kill(grammars.pid, signal.SIGKILL)
    else:
        os.kill(host.pid, end)
        ended(grammars.pid)  # with it
    for ask in (lambda: fold.push(ord("{")), lambda: grammars.define("again", texts["json"])):
        with pytest.raises(HostGone) as caught:
            ask()
        assert not isinstance(caught.value, Exception)  # no step and no turn is said to have failed of it
        assert "Errno" not in str(caught.value)
    grammars.close()
    with pytest.raises(ProcessLookupError):
        os.kill(host.pid, 0)
