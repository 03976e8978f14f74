"""The application for one model, put together from the text room and the tools bridge."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette

from agentserve import __version__
from agentserve.clock import WallClock
from agentserve.config import NOT_RECORDED, HttpConfig, RecordingConfig, ServeConfig
from agentserve.messages import Hello
from agentserve.models.source import resolve
from agentserve.records.series import requests_writer
from agentserve.records.writer import Bounds, LineWriter
from agentserve.server.agents.disk import Disk
from agentserve.server.agents.shelf import Shelf
from agentserve.server.engine_port import Engine
from agentserve.server.http.app import create_app
from agentserve.server.http.context import REASONING_FIELDS, ServerOptions
from agentserve.server.http.reply_parsers import ReplyGrammars, ReplyParsers
from agentserve.server.http.responses.desk import Desk, DeskBounds
from agentserve.server.http.responses.records import Records
from agentserve.server.launch import Prepared
from agentserve.server.limits import Limits
from agentserve.server.sessions.chronicle import Chronicle
from agentserve.server.sessions.directory import SessionDirectory
from agentserve.server.sessions.events import EventLogs
from agentserve.server.sessions.identity import new_session_id
from agentserve.server.sessions.journal import Journal, OpenStore
from agentserve.server.sessions.room import owners
from agentserve.server.sessions.store import SessionStore
from agentserve.server.sessions.transcript import Transcripts
from agentserve.server.tenants.accounts import quotas
from agentserve.server.tenants.audit import FOLDER as AUDIT_FOLDER
from agentserve.server.tenants.audit import Audit, AuditLog, to_log
from agentserve.server.tenants.keyfile import FOLDER as KEYS_FOLDER
from agentserve.server.tenants.keyfile import KeyFile
from agentserve.server.tenants.keyring import Keyring
from agentserve.server.tenants.terms import Terms
from agentserve.server.text_port import JsonObject
from agentserve.server.webhooks.hooks import Hooks
from agentserve.server.webhooks.making import make_hooks
from agentserve.server.workers.vocabulary import shown_bytes
from agentserve.text import TextModel, canonical, load
from agentserve.text.conversation import unread
from agentserve.tools import Tool, load_tools
from tools_bridge.compiler import GrammarCompiler
from tools_bridge.mcp.remote import RemoteMcp
from tools_bridge.mcp.types import Mcp
from tools_bridge.webhooks.address import AddressPolicy

log = logging.getLogger(__name__)

SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Kept:
    """Sessions on disk, and the directory they are in."""

    directory: SessionDirectory
    journal: Journal
    chronicle: Chronicle


@dataclass(frozen=True, slots=True)
class Keepers:
    """Who is let in, and where it is written down what they did."""

    keyring: Keyring
    audit: Audit | None
    terms: Terms


def prepare_app(config: ServeConfig, open_store: OpenStore = SessionStore) -> Prepared:
    """Everything of the API side that needs no worker. Raises ModelError or TextError (ValueErrors),
    and a ValueError or OSError where sessions cannot be kept in the data directory."""
    source = resolve(config.model.name)
    model = config.model
    text = load(
        source.path,
        model.chat_template,
        model.tool_parser,
        model.reasoning_parser,
        steadily=model.steady_prompt,
    )
    if not text.template.available:
        log.warning("the model has no chat template: only /v1/completions can be used")
    elif text.template.wrapper:
        log.info("the chat template renders no tools: the %s form is used", text.template.wrapper)
    elif text.template.moves and not model.steady_prompt:
        log.info("the chat template moves tools to the last user's message: see --steady-prompt")
    log.info("tool calls are read as those of %s", text.replies.family.name)
    names = config.model.served_names or (source.name,)
    options = ServerOptions(
        model=names[0],
        aliases=names[1:],
        version=__version__,
        api_keys=config.api_keys,
        admin_keys=config.http.admin_keys,
        tenants=config.tenants,
        slo=config.slo,
        host=config.http.host,
        limits=Limits(body_bytes=config.http.max_body, body_seconds=config.http.body_seconds),
        force_usage=config.http.force_usage,
        reasoning_fields=REASONING_FIELDS
        if config.http.reasoning_field == "both"
        else (config.http.reasoning_field,),
        tool_wait_seconds=config.http.tool_wait_seconds,
        session_ttl_seconds=config.http.session_ttl_seconds,
    )
    folder = config.storage.data_dir
    bounds = DeskBounds(
        responses_bytes=config.http.keep_responses, ttl=config.http.response_ttl_days * SECONDS_PER_DAY
    )
    kept, records, audit, shelf = None, None, None, Shelf()
    file = None if folder is None else KeyFile(folder / KEYS_FOLDER)
    keyring = Keyring(config.api_keys, config.http.admin_keys, file)
    terms = Terms(options.tenants, None if file is None else file.folder)
    if folder is not None:
        audit = AuditLog(folder / AUDIT_FOLDER)
        patience = options.limits.storage_seconds
        kept = open_sessions(open_store(folder / "sessions"), text, options, patience, terms)
        records = open_records(folder / "responses", patience)
        shelf = open_shelf(folder / "agents", patience)
    guards = Keepers(keyring, audit or (to_log if keyring.closed else None), terms)
    desk = Desk(time.time, bounds, records)
    tools = load_tools(config.http.tools)
    mcp = RemoteMcp(AddressPolicy(hosts=config.http.private_hosts), unread, version=__version__)
    hooks = make_hooks(
        None if folder is None else folder / "webhooks",
        allow_private=config.http.allow_private_callbacks,
        callback_url=config.http.callback_url or _listening(config.http),
        patience=options.limits.storage_seconds,
    )
    app = http_app(
        text, options, kept, desk, guards,
        agents=shelf, tools=tools, hooks=hooks, mcp=mcp, recording=config.recording,
    )  # fmt: skip
    return Prepared(names[0], app)


def _listening(http: HttpConfig) -> str:
    """Where the server can be reached, as far as is known before it listens."""
    if http.port == 0 or http.host in ("0.0.0.0", "::"):
        return ""
    return f"http://{http.host}:{http.port}"


def open_sessions(
    store: SessionStore,
    text: TextModel,
    options: ServerOptions,
    patience: float,
    terms: Terms | None = None,
) -> Kept:
    """All sessions of the store, as they were but for turns that ran. `patience`: seconds that a client
    waits for the disk."""
    clock = WallClock()
    journal = Journal(store, text.digest(), clock, time.time, patience)
    directory = SessionDirectory(
        new_session_id,
        max_wait=options.tool_wait_seconds,
        book=journal,
        quota=quotas(terms or options.tenants),
    )
    directory.restore(journal.sessions(), clock.now())
    if len(directory) or journal.skipped:
        log.info("%d session(s) are back, %d could not be read", len(directory), journal.skipped)
    transcripts = Transcripts()
    transcripts.on_drop, transcripts.owner_of = journal.drop_words, owners(directory.find)
    for transcript in journal.transcripts:
        transcripts.restore(transcript)
    journal.words_of = transcripts.export
    return Kept(directory, journal, Chronicle(transcripts, EventLogs(lambda: secrets.token_hex(4))))


def open_records(folder: Path, patience: float) -> Records:
    """All responses and conversations that are kept there. ValueError, OSError."""
    records = Records(folder, time.time, patience)
    if records.skipped:
        log.warning("%d response(s) or conversation(s) could not be read", records.skipped)
    return records


def open_shelf(folder: Path, patience: float) -> Shelf:
    """All agents and their sessions that are kept there. ValueError, OSError."""
    disk = Disk(folder, time.time, patience)
    shelf = Shelf(book=disk)
    skipped = shelf.restore(disk.read())
    disk.content_of = shelf.encoded
    if skipped:
        log.warning("%d record(s) of agents could not be read", skipped)
    return shelf


def http_app(
    text: TextModel,
    options: ServerOptions,
    kept: Kept | None = None,
    responses: Desk | None = None,
    keepers: Keepers | None = None,
    *,
    agents: Shelf | None = None,
    tools: Mapping[str, Tool] | None = None,
    mcp: Mcp | None = None,
    hooks: Hooks | None = None,
    recording: RecordingConfig = NOT_RECORDED,
) -> Callable[[Engine], Starlette]:
    """In two steps: this one may run in a thread while workers start, the result takes the engine."""
    shown = shown_bytes(text.tokenizer)
    template = text.template if text.template.available else None

    def build(engine: Engine) -> Starlette:
        compiler = GrammarCompiler(shown, engine.hello.vocab_size, text.end_ids)
        return create_app(
            engine,
            options,
            tokenizer=text.tokenizer,
            template=template,
            end_ids=text.end_ids,
            chain=chain,
            tool_parser=ReplyParsers(text.replies),
            grammar_maker=ReplyGrammars(compiler, text.replies),
            directory=kept.directory if kept else None,
            journal=kept.journal if kept else None,
            chronicle=kept.chronicle if kept else None,
            responses=responses,
            keyring=keepers.keyring if keepers else None,
            audit=keepers.audit if keepers else None,
            terms=keepers.terms if keepers else None,
            agents=agents,
            tools=tools,
            mcp=mcp,
            hooks=hooks,
            recording=_requests(recording, engine.hello, options.model),
            now=None if hooks is None else hooks.now,
        )

    return build


def _requests(recording: RecordingConfig, hello: Hello, model: str) -> LineWriter | None:
    if recording.dir is None:
        return None
    bounds = Bounds(recording.file_size, recording.files)
    return requests_writer(recording.dir, bounds, hello, model, WallClock())


def chain(parent: bytes, message: JsonObject) -> bytes:
    """The canonical key of a history; an empty `parent` begins one."""
    return canonical.chain(parent or canonical.ROOT, message)
