"""From the form an answer must have to a grammar that the workers know."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Executor

from agentserve.server.engine_port import Engine
from agentserve.server.errors import ApiError
from agentserve.server.http.answer_form import Form
from agentserve.server.http.reply_port import GrammarMaker
from tools_bridge.compiler import CompilerUnavailable, OverShare
from tools_bridge.reply_request import GrammarRequest


class Grammars:
    """Compiles off the event loop and makes the result known to the workers.

    Only compilations are in line for `executor`: a grammar that is known, or under way for another
    request, takes none of its threads.
    """

    def __init__(
        self,
        maker: GrammarMaker,
        engine: Engine,
        executor: Executor,
        shared: Callable[[], bool] = lambda: True,
    ) -> None:
        """shared: whether tenants are kept apart; else the grammars are nobody's, and nobody has a share."""
        self._shared = shared
        self._maker = maker
        self._engine = engine
        self._executor = executor
        self._under_way: dict[str, asyncio.Future[str]] = {}

    async def define(self, form: Form, prompt_end: str = "", tenant: str = "") -> str | None:
        """The id to put into `Sampling.grammar`, or None where the form is free. `prompt_end`: what the
        answer's prompt will end with. What was compiled, or refused, for another tenant is compiled again:
        how long it takes would tell what others ask for."""
        if not form.constrained:
            return None
        try:
            source = self._maker.source(form, prompt_end, tenant if self._shared() else "")
            compiled = self._maker.cached(source)
            if compiled is None:
                compiled = await self._compiled(source)
        except (ValueError, RecursionError) as error:
            raise _refused(str(error), form) from None
        except CompilerUnavailable as error:  # others' schemas keep it busy, or it does not start
            headers = {"retry-after": str(math.ceil(error.seconds))}
            if isinstance(error, OverShare):
                raise ApiError(str(error), status=429, code="grammar_limit", headers=headers) from None
            raise ApiError(str(error), status=503, code="compiler_busy", headers=headers) from None
        if not compiled:
            return None
        await self._engine.define_grammar(source.id, compiled)  # each time: it may have been dropped
        return source.id

    def close(self) -> None:
        self._maker.close()

    async def _compiled(self, source: GrammarRequest) -> str:
        key = source.id
        work = self._under_way.get(key)
        if work is None:
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._executor, self._maker.compile, source)
            self._under_way[key] = work
            work.add_done_callback(lambda done: self._finished(key, done))
        return await asyncio.shield(work)  # a client that leaves takes nothing from the others

    def _finished(self, key: str, work: asyncio.Future[str]) -> None:
        del self._under_way[key]
        if not work.cancelled():
            work.exception()  # seen, also where every client has left


def _refused(why: str, form: Form) -> ApiError:
    """The message may name the place already."""
    for param in ("response_format", "tools"):
        if why.startswith(param):
            return ApiError(why, param=param, code="invalid_schema")
    param = "response_format" if form.held and not form.forced else "tools"
    return ApiError(f"{param}: {why}", param=param, code="invalid_schema")
