"""The fleet over the real model, and a grammar that the checks before a worker did not see through: at a
token that would take minutes its turn ends, soon and alone."""

from __future__ import annotations

import asyncio
import os
import signal
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import xgrammar

from agentserve.config import load
from agentserve.messages import Submit, Token, TurnEnded, pack_tokens
from agentserve.models.source import resolve
from agentserve.server.workers.fleet import Fleet
from agentserve.server.workers.running import RunningTurn
from agentserve.server.workers.slot import RestartPolicy
from agentserve.server.workers.spec import worker_spec
from agentserve.server.workers.supervisor import WorkerProcess, private_directory
from agentserve.server.workers.vocabulary import shown_bytes
from agentserve.text import load as load_text
from agentserve.types import FinishReason, Sampling, SessionId, TurnId
from tests.grammar_rig import chain
from tools_bridge.vocabulary import GrammarVocabulary

pytestmark = [pytest.mark.process, pytest.mark.model]

PROMPT = pack_tokens(array("i", range(100, 140)))
WORDS = 'root ::= ([a-z]+ " ")* "\\u0007"'  # the model does not write a bell


@asynccontextmanager
async def fleet_of_one() -> AsyncIterator[Fleet]:
    config = load({"device_kv": "64MiB", "threads": 1, "log_level": "warning"})
    with private_directory() as directory:

        async def start(index: int) -> WorkerProcess:
            path = str(directory / f"worker-{index}.sock")
            return await WorkerProcess.start(worker_spec(config, index, path, os.getpid(), cores=1))

        async with Fleet(start, 1, RestartPolicy(first_pause=0.01)) as fleet:
            yield fleet


def kill_host(worker: int) -> None:
    [host] = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    os.kill(int(host), signal.SIGKILL)


async def told(turn: RunningTurn, first: asyncio.Event | None = None) -> tuple[list[Token], TurnEnded]:
    tokens: list[Token] = []
    async for event in turn:
        if isinstance(event, Token):
            tokens.append(event)
            if first is not None:
                first.set()
        if isinstance(event, TurnEnded):
            return tokens, event
    raise AssertionError


async def test_a_grammar_that_hangs_fails_its_own_turn_and_others_say_the_same_as_without_it() -> None:
    text = load_text(resolve("smollm2-135m").path)
    data = shown_bytes(text.tokenizer)
    vocabulary = GrammarVocabulary(data, len(data), text.end_ids)
    compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
    compiled = {
        name: vocabulary.seal(compiler.compile_grammar(xgrammar.Grammar.from_ebnf(source)))
        for name, source in (("hangs", chain(12, "~|%")), ("words", WORDS))
    }
    mine = {
        "words": Sampling(temperature=0.8, seed=5, max_tokens=30, grammar="words", logprobs=1),
        "free": Sampling(temperature=0.9, seed=6, max_tokens=30, ignore_eos=True, logprobs=1),
    }
    hangs = Sampling(
        temperature=0.0, max_tokens=4, grammar="hangs", logit_bias={data.index(b"#" * 80): 100.0}
    )
    async with asyncio.timeout(120), fleet_of_one() as fleet:
        for name, text in compiled.items():
            await fleet.define_grammar(name, text)

        def submit(name: str, sampling: Sampling, turn: int) -> RunningTurn:
            return fleet.submit(Submit(SessionId(f"{name}-{turn}"), TurnId(1), PROMPT, sampling))

        worker = fleet.hello.pid
        quiet = {name: await told(submit(name, sampling, 1)) for name, sampling in mine.items()}
        begun = {name: asyncio.Event() for name in mine}
        others = {
            name: asyncio.create_task(told(submit(name, sampling, 2), begun[name]))
            for name, sampling in mine.items()
        }
        for name, event in begun.items():
            assert quiet[name][1].error == ""
            await event.wait()
        for attempt in (1, 2):
            tokens, ended = await told(submit("hangs", hangs, attempt))
            assert (tokens, ended.reason) == ([], FinishReason.REFUSED)
            assert "too ambiguous" in ended.error
        for name, task in others.items():
            same, ended = await task
            assert ended.error == ""
            assert len(same) == 30
            assert [(token.token, token.logprob) for token in same] == [
                (token.token, token.logprob) for token in quiet[name][0]
            ]
        assert [slot.worker.pid for slot in fleet._slots if slot.worker] == [worker]  # nobody died for it

        # The host of matchers is gone: its worker ends of it, and the turn is moved to the next one.
        kill_host(worker)
        for turn in (3, 4):
            same, ended = await told(submit("words", mine["words"], turn))
            assert ended.error == ""
            assert [token.token for token in same] == [token.token for token in quiet["words"][0]]
        assert [slot.worker.pid for slot in fleet._slots if slot.worker] != [worker]
