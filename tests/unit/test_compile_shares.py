"""Compilers are shared: no tenant has them all, and whose grammars take too long waits before the next."""

import threading

import pytest

from tools_bridge.compile_process import TooSlow
from tools_bridge.compile_shares import FIRST_PAUSE, FORGOTTEN, CompilerUnavailable, OverShare, Shares
from tools_bridge.compiler import MAX_JOBS, GrammarCompiler
from tools_bridge.reply_request import GrammarRequest
from tools_bridge.schemas import GrammarError

PLACES = 6


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def shares(now):
    return Shares(2, PLACES, lambda: now[0])


def test_one_owner_has_half_of_the_places_and_others_of_what_is_left(shares):
    for _ in range(3):
        shares.enter("b")
    with pytest.raises(OverShare, match="of your schemas"):
        shares.enter("b")
    shares.enter("a")
    shares.leave("b", late=False)
    shares.enter("a")
    with pytest.raises(OverShare):
        shares.enter("b")
    shares.enter("c")


def test_without_owners_there_are_no_shares_and_no_pauses(shares):
    for _ in range(PLACES):
        shares.enter("")
    for _ in range(PLACES):
        shares.leave("", late=True)
    shares.enter("")


def test_whose_grammars_take_too_long_waits_longer_each_time(shares, now):
    for times in range(3):
        shares.enter("b")
        shares.leave("b", late=True)
        with pytest.raises(OverShare, match="took too long") as caught:
            shares.enter("b")
        pause = FIRST_PAUSE * 2**times
        assert caught.value.seconds == pause
        shares.enter("a")
        shares.leave("a", late=False)
        now[0] += pause
    now[0] += FORGOTTEN
    shares.enter("b")
    shares.leave("b", late=True)
    now[0] += FIRST_PAUSE
    shares.enter("b")


def test_a_process_is_left_to_others_and_who_was_served_longest_ago_is_next(shares):
    order, release = [], {name: threading.Event() for name in ("b1", "b2", "b3", "a1", "c1")}
    entered = {name: threading.Event() for name in release}

    def work(name):
        with shares.process(name[0], 60):
            order.append(name)
            entered[name].set()
            assert release[name].wait(60)

    threads = {name: threading.Thread(target=work, args=(name,)) for name in release}

    def begin(name, running):
        threads[name].start()
        if running:
            assert entered[name].wait(60)
        else:
            with shares._changed:
                assert shares._changed.wait_for(
                    lambda: any(owner == name[0] for _, owner in shares._waiting), 60
                )

    begin("b1", running=True)
    begin("b2", running=False)  # the other process is not for it
    begin("a1", running=True)
    begin("c1", running=False)
    release["b1"].set()
    assert entered["c1"].wait(60)  # it came after b2, but b was served
    release["a1"].set()
    assert entered["b2"].wait(60)
    for name in ("b2", "c1"):
        release[name].set()
    for name in ("b1", "b2", "a1", "c1"):
        threads[name].join()
    assert order == ["b1", "a1", "c1", "b2"]
    with (
        shares.process("a", 60),
        pytest.raises(CompilerUnavailable, match="too many"),
        shares.process("a", 0),
    ):
        pass


def test_a_late_grammar_is_its_owners_and_others_are_compiled(monkeypatch, now):
    compiler = GrammarCompiler([b"a"], 2, [1], clock=lambda: now[0])

    def compile_(wanted):
        if wanted.data.startswith(b"slow"):
            raise TooSlow("", "the schema took longer than 10 s to compile")
        return "text"

    monkeypatch.setattr(compiler, "_compile", compile_)
    assert compiler.compile(GrammarRequest(b"known", "b")) == "text"
    with pytest.raises(GrammarError, match="took longer"):
        compiler.compile(GrammarRequest(b"slow 1", "b"))
    for data in (b"slow 2", b"plain"):
        with pytest.raises(OverShare) as caught:
            compiler.compile(GrammarRequest(data, "b"))
        assert caught.value.seconds == FIRST_PAUSE
    assert compiler.compile(GrammarRequest(b"known", "b")) == "text"
    assert compiler.compile(GrammarRequest(b"plain", "a")) == "text"
    now[0] += FIRST_PAUSE
    assert compiler.compile(GrammarRequest(b"plain", "b")) == "text"
    assert MAX_JOBS == PLACES
