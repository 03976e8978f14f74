"""Everything the endpoints share, in one typed place: `request.app.state.context`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from starlette.requests import Request

from agentserve.clock import Clock
from agentserve.metrics import Metrics
from agentserve.server.agents.office import Office
from agentserve.server.engine_port import Engine
from agentserve.server.errors import ApiError
from agentserve.server.http.agents.telling import Telling
from agentserve.server.http.endings import OpenRequests
from agentserve.server.http.grammars import Grammars
from agentserve.server.http.known_errors import bad_value
from agentserve.server.http.reply_port import ParserMaker
from agentserve.server.http.responses.desk import Desk
from agentserve.server.http.sampling import ModelFacts
from agentserve.server.http.sessions.background import Background
from agentserve.server.http.sessions.exclusive import Exclusive
from agentserve.server.limits import Limits
from agentserve.server.sessions.advice import settle
from agentserve.server.sessions.book import booked
from agentserve.server.sessions.chronicle import Chronicle
from agentserve.server.sessions.directory import SessionDirectory
from agentserve.server.sessions.journal import Journal
from agentserve.server.sessions.request_log import RequestLog
from agentserve.server.sessions.seats import Chain
from agentserve.server.sessions.session_record import Session
from agentserve.server.sessions.transcript import Transcript
from agentserve.server.sessions.turns import TurnRunner
from agentserve.server.tenants.accounts import Accounts
from agentserve.server.tenants.keyring import Keyring
from agentserve.server.tenants.terms import Terms
from agentserve.server.text_port import ChatTemplate, Tokenizer
from agentserve.server.webhooks.hooks import Hooks
from agentserve.slo_classes import Promises, SloConfig
from agentserve.tenant_limits import TenantsConfig
from agentserve.tools import Tool
from tools_bridge.mcp.types import Mcp

log = logging.getLogger(__name__)

Params = ParamSpec("Params")
Result = TypeVar("Result")

REASONING_FIELDS = ("reasoning", "reasoning_content")
"""Of a chat message: vLLM's name, and DeepSeek's, which most clients know."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    model: str  # the name clients use
    aliases: tuple[str, ...] = ()
    version: str = "0"
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # of the default tenant
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    tenants: TenantsConfig = field(default_factory=TenantsConfig)  # what each may ask for
    slo: SloConfig = field(default_factory=SloConfig)  # classes of promises
    host: str = "127.0.0.1"  # that the server is bound to
    force_usage: bool = False  # send the usage chunk although nobody asked
    reasoning_fields: tuple[str, ...] = REASONING_FIELDS  # where replies show it
    keep_alive_seconds: float = 9.0
    default_max_tokens: int = 16  # of /v1/completions, as OpenAI's
    tool_wait_seconds: float = 3600.0  # after that a session no longer waits for its tool results
    session_ttl_seconds: float | None = None  # then an idle session is forgotten; None: never for age
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class ServerContext:
    options: ServerOptions
    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model has no chat format
    end_ids: tuple[int, ...]  # tokens that end a turn, as the workers have them
    chain: Chain
    tool_parser: ParserMaker
    grammars: Grammars
    directory: SessionDirectory
    chronicle: Chronicle
    background: Background  # turns that go on without a reader
    exclusive: Exclusive  # one at a time may begin a session's next turn
    metrics: Metrics
    runner: TurnRunner
    log: RequestLog  # what became of requests
    clock: Clock
    wall: Callable[[], float]  # Unix time, for what clients are shown
    started: float  # Unix time
    clock_at_start: float
    new_seed: Callable[[], int]
    responses: Desk  # what the Responses API remembers
    hooks: Hooks  # webhooks: endpoints, and what is delivered to them
    keyring: Keyring  # who is let in, and as whom
    accounts: Accounts  # what tenants have used of their limits
    promises: Promises  # what turns are promised
    terms: Terms  # what each tenant may ask for
    agents: Office  # agents' sessions, and their turns
    telling: Telling  # the events of agents' sessions
    python_tools: Mapping[str, Tool]  # that agents may call in this process
    mcp: Mcp  # remote servers whose tools agents have
    text_pool: Executor  # rendering and encoding long prompts stays off the event loop
    terms_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    open_requests: OpenRequests = field(default_factory=OpenRequests)  # that were let in, and are not over
    journal: Journal | None = None  # keeps the directory on disk; None: sessions end with the server

    @property
    def facts(self) -> ModelFacts:
        hello = self.engine.hello
        return ModelFacts(
            vocab_size=min(hello.vocab_size, self.tokenizer.vocab_size),
            max_model_len=hello.max_model_len,
            end_ids=self.end_ids,
        )

    def unix(self, at: float) -> float:
        """A moment of the monotonic clock as Unix time."""
        if self.journal is not None:  # the same moment stays the same across restarts
            return self.journal.unix(at)
        return self.started + at - self.clock_at_start

    def expired(self, session: Session) -> bool:
        """It may be forgotten, if it does not run or wait."""
        ttl = self.options.session_ttl_seconds
        return ttl is not None and self.clock.now() - session.active >= ttl

    def end_waits(self) -> None:
        """Nobody waits for results longer than the server does, or than their client."""
        now = self.clock.now()
        self.directory.end_waits(now)
        self.directory.end_deadlines(now)
        settle(self.directory, self.engine, self.chronicle)

    def expire(self) -> None:
        """Forget sessions that were idle for too long."""
        ttl = self.options.session_ttl_seconds
        if ttl is not None:
            self.directory.end_waits(self.clock.now())
            self.directory.expire(self.clock.now(), ttl)
        self.end_waits()

    def look_at_keys(self) -> None:
        """Take in what was done to keys, and end what runs for those that are gone."""
        self.keyring.look()
        if cut := self.open_requests.cut(self.keyring.holds):
            log.info("%d request(s) ended with their keys", cut)

    def check_named(self, name: str | None) -> None:
        """OpenAI has a chat request without a model refused; some dialects do without."""
        if name is None:
            raise ApiError(
                f"model: missing required field `model`; this server has {self.options.model!r}.",
                param="model",
                code="invalid_value",
            )

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.options.model and name not in self.options.aliases:
            raise ApiError(
                f"The model {name!r} does not exist; this server has {self.options.model!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )

    def check_stored(self, tenant: str) -> None:
        """Whether a tenant may have more responses and conversations kept. OverLimit."""
        self.accounts.check_stored(tenant, self.responses.bytes_of(tenant))

    async def check_storage(self) -> None:
        """Refuse what could not be kept before anything is computed for it. StorageFailed."""
        if self.journal is not None:
            await self.journal.ready()

    async def keep_words(self, session: Session) -> None:
        """What was taken for a session, or given to it, does not end with the server. StorageFailed."""
        words = self.chronicle.transcripts.export(session.key) if self.directory.durable else b""
        await booked(self.directory.keep_words(session, words))

    def give_back(self, session: Session, before: Transcript) -> None:
        """Hold what was held before something was taken: on disk too, where what was taken may be by now,
        or it would come back with the next server. Nobody waits for that."""
        self.chronicle.transcripts.put_back(before)
        if self.directory.durable:
            self.directory.keep_words(session, self.chronicle.transcripts.export(session.key))

    async def off_loop(
        self, work: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        """Run blocking text work in the pool; a ValueError it raises is the client's."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.text_pool, lambda: work(*args, **kwargs))
        except ValueError as error:
            raise bad_value(error) from None


def context_of(request: Request) -> ServerContext:
    found: ServerContext = request.app.state.context
    return found
