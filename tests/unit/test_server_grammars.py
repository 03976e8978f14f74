"""Grammars on the server: who waits for whom, and what a busy compiler means to a client."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentserve.server.errors import ApiError
from agentserve.server.http.answer_form import Form
from agentserve.server.http.grammars import Grammars
from tests.fakes import ScriptedEngine
from tools_bridge.compiler import CompilerUnavailable
from tools_bridge.grammar import GrammarSource


def form(name):
    return Form(json=True, schema={"title": name})


class Maker:
    """Knows "known"; compiles "slow" once `gate` opens; is too busy for "busy"."""

    def __init__(self):
        self.gate, self.started, self.runs = threading.Event(), threading.Event(), []
        self.looked_up = asyncio.Semaphore(0)

    def source(self, form, prompt_end, owner=""):
        return GrammarSource(form.schema["title"])

    def cached(self, source):
        self.looked_up.release()
        return "text" if source.text == "known" else None

    def compile(self, source):
        self.runs.append(source.text)
        self.started.set()
        if source.text == "busy":
            raise CompilerUnavailable("try again later")
        assert self.gate.wait(60)
        return "text"


@pytest.fixture
def maker():
    return Maker()


@pytest.fixture
def grammars(maker):
    with ThreadPoolExecutor(1) as pool:
        yield Grammars(maker, ScriptedEngine(), pool)
        maker.gate.set()


async def test_a_known_grammar_waits_for_no_compilation(maker, grammars):
    slow = asyncio.create_task(grammars.define(form("slow")))
    assert await asyncio.to_thread(maker.started.wait, 60)
    async with asyncio.timeout(60):
        assert await grammars.define(form("known")) == GrammarSource("known").id
    assert not slow.done()
    maker.gate.set()
    assert await slow == GrammarSource("slow").id


async def test_one_compilation_serves_all_who_ask_also_if_the_first_leaves(maker, grammars):
    tasks = [asyncio.create_task(grammars.define(form("slow")))]
    assert await asyncio.to_thread(maker.started.wait, 60)
    maker.looked_up = asyncio.Semaphore(0)
    tasks += [asyncio.create_task(grammars.define(form("slow"))) for _ in range(4)]
    for _ in range(4):
        await maker.looked_up.acquire()
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    maker.gate.set()
    assert await asyncio.gather(*tasks[1:]) == [GrammarSource("slow").id] * 4
    assert maker.runs == ["slow"]


async def test_a_busy_compiler_is_not_the_clients_fault(grammars):
    with pytest.raises(ApiError) as caught:
        await grammars.define(form("busy"))
    assert (caught.value.status, caught.value.headers["retry-after"]) == (503, "5")
