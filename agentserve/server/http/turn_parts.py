"""What turns of chat and of text completions are made of alike."""

from __future__ import annotations

from collections.abc import Callable

from agentserve.server.http.context import ServerContext
from agentserve.server.http.structure import Form
from agentserve.server.sessions.answer import Answer, CallsOnly, ToolParser
from agentserve.server.sessions.identity import DEFAULT_TENANT
from agentserve.types import Sampling


def namespace(tenant: str, salt: str | None) -> str:
    """What isolates prefix-cache hits besides the model; framed, so that two inputs never meet."""
    if tenant == DEFAULT_TENANT and salt is None:
        return ""
    return f"{len(tenant)}:{tenant}:{salt or ''}"


def answer_factory(
    context: ServerContext, settings: Sampling, *, form: Form, continues: bool
) -> Callable[[], Answer]:
    """Makes the fold over a turn's tokens. `form`: what calls to look for; `continues`: the answer goes
    on from text of the prompt, so that its first space is a real one."""
    ends = set(settings.stop_token_ids)
    if not settings.ignore_eos:
        ends.update(context.facts.end_ids)

    def parser() -> ToolParser | None:
        if not form.calls:
            return None
        return CallsOnly(context.tool_parser()) if form.forced else context.tool_parser()

    def build() -> Answer:
        return Answer(
            context.tokenizer.detokenizer(continues=continues),
            stops=settings.stop,
            end_ids=frozenset(ends),
            min_tokens=settings.min_tokens,
            parser=parser(),
            decode=context.tokenizer.decode,
        )

    return build
