"""What turns of chat and of text completions are made of alike."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence

from agentserve.server.http.answer_form import Form
from agentserve.server.http.context import ServerContext
from agentserve.server.sessions.answer import Answer
from agentserve.server.sessions.identity import DEFAULT_TENANT
from agentserve.server.text_port import JsonObject
from agentserve.types import ReasoningCap, Sampling

log = logging.getLogger(__name__)

PROMPT_END = 16  # tokens: more than any mark has that begins reasoning


def namespace(tenant: str, salt: str | None) -> str:
    """What isolates prefix-cache hits besides the model; framed, so that two inputs never meet."""
    if tenant == DEFAULT_TENANT and salt is None:
        return ""
    return f"{len(tenant)}:{tenant}:{salt or ''}"


def prompt_end(context: ServerContext, prompt: array[int]) -> str:
    return context.tokenizer.decode(prompt[-PROMPT_END:], skip_control=False)


def answer_begins_behind(
    context: ServerContext, messages: Sequence[JsonObject], prompt: array[int], continues: bool
) -> str:
    """The text an answer goes on from: the end of the prompt, or all of the message that it `continues`."""
    if not continues:
        return prompt_end(context, prompt)
    content = messages[-1].get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def reasoning_cap(
    context: ServerContext, most: int | None, before: str, *, continues: bool
) -> ReasoningCap | None:
    """At most so many tokens of reasoning, where the model closes it with one token; else nothing can be
    held to. `before`: as in `answer_begins_behind`."""
    if most is None:
        return None
    marks = context.tool_parser.reasoning(before, continues=continues)
    close = None if marks is None else _one_token(context, marks.close)
    if marks is None or close is None:
        log.info(
            "a limit of %d tokens of reasoning cannot be held: this model has no token that ends it", most
        )
        return None
    return ReasoningCap(most, close, _one_token(context, marks.open), marks.inside)


def _one_token(context: ServerContext, text: str) -> int | None:
    control = context.tokenizer.control.get(text)
    if control is not None:
        return control
    ids = context.tokenizer.encode(text)
    return ids[0] if len(ids) == 1 else None


def answer_factory(
    context: ServerContext, settings: Sampling, *, continues: bool, form: Form | None = None, before: str = ""
) -> Callable[[], Answer]:
    """Makes the fold over a turn's tokens. `form`: what calls to look for, in an answer that has the
    model's form at all; `before`: how the prompt ends. `continues`: the answer goes on from text of the
    prompt, so that its first space is a real one; then that text is `before`."""
    ends = set(settings.stop_token_ids)
    if not settings.ignore_eos:
        ends.update(context.facts.end_ids)

    def build() -> Answer:
        return Answer(
            context.tokenizer.detokenizer(continues=continues),
            stops=settings.stop,
            end_ids=frozenset(ends),
            min_tokens=settings.min_tokens,
            parser=None if form is None else context.tool_parser(form, before, continues=continues),
            decode=context.tokenizer.decode,
        )

    return build
