"""The application for one model, put together from the text room and the tools bridge."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.applications import Starlette

from agentserve import __version__
from agentserve.config import ServeConfig
from agentserve.models.source import resolve
from agentserve.server.engine_port import Engine
from agentserve.server.http.app import create_app
from agentserve.server.http.context import ServerOptions
from agentserve.server.http.hermes_calls import HermesGrammars, HermesParser
from agentserve.server.launch import Prepared
from agentserve.server.limits import Limits
from agentserve.server.text_port import JsonObject
from agentserve.server.workers.vocabulary import shown_bytes
from agentserve.text import TextModel, canonical, load
from tools_bridge.compiler import GrammarCompiler

log = logging.getLogger(__name__)


def prepare_app(config: ServeConfig) -> Prepared:
    """Everything of the API side that needs no worker. Raises ModelError or TextError (ValueErrors)."""
    source = resolve(config.model.name)
    text = load(source.path, config.model.chat_template)
    if not text.template.available:
        log.warning("the model has no chat template: only /v1/completions can be used")
    elif text.template.wrapper:
        log.info("the chat template renders no tools: the %s form is used", text.template.wrapper)
    names = config.model.served_names or (source.name,)
    options = ServerOptions(
        model=names[0],
        aliases=names[1:],
        version=__version__,
        api_keys=config.api_keys,
        host=config.http.host,
        limits=Limits(body_bytes=config.http.max_body),
        force_usage=config.http.force_usage,
        tool_wait_seconds=config.http.tool_wait_seconds,
        session_ttl_seconds=config.http.session_ttl_seconds,
    )
    return Prepared(names[0], http_app(text, options))


def http_app(text: TextModel, options: ServerOptions) -> Callable[[Engine], Starlette]:
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
            tool_parser=HermesParser,
            grammar_maker=HermesGrammars(compiler),
        )

    return build


def chain(parent: bytes, message: JsonObject) -> bytes:
    """The canonical key of a history; an empty `parent` begins one."""
    return canonical.chain(parent or canonical.ROOT, message)
