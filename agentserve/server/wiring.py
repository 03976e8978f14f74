"""The application for one model, put together from the text room and the tools bridge."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette

from agentserve.server.app import create_app
from agentserve.server.context import ServerOptions
from agentserve.server.engine_port import Engine
from agentserve.server.hermes_calls import HermesGrammars, HermesParser
from agentserve.server.text_port import JsonObject, Tokenizer
from agentserve.text import TextModel, canonical
from tools_bridge.compiler import GrammarCompiler


def http_app(text: TextModel, options: ServerOptions) -> Callable[[Engine], Starlette]:
    """In two steps: this one may run in a thread while workers start, the result takes the engine."""
    shown = shown_bytes(text.tokenizer)
    template = text.template if text.template.available else None
    stops = sorted({*text.tokenizer.eos_ids, *(template.stop_ids if template else ())})

    def build(engine: Engine) -> Starlette:
        compiler = GrammarCompiler(shown, engine.hello.vocab_size, stops)
        return create_app(
            engine,
            options,
            tokenizer=text.tokenizer,
            template=template,
            chain=chain,
            tool_parser=HermesParser,
            grammar_maker=HermesGrammars(compiler),
        )

    return build


def chain(parent: bytes, message: JsonObject) -> bytes:
    """The canonical key of a history; an empty `parent` begins one."""
    return canonical.chain(parent or canonical.ROOT, message)


def shown_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """What each token adds to the text a client sees: nothing for control tokens that are not shown.

    Grammars must be compiled and applied over exactly this, by server and workers alike.
    """
    shown = list(tokenizer.token_bytes)
    for token in tokenizer.control.values():
        fold = tokenizer.detokenizer()
        if not fold.push(token) + fold.flush():
            shown[token] = b""
    return shown
