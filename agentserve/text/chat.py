"""Runs a model's chat template on checked messages, in the form that template can render."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial

from agentserve.text import deepseek_tools, hermes
from agentserve.text.conversation import Message, merge_leading_system
from agentserve.text.errors import TextError
from agentserve.text.facts import TemplateFacts, TemplateMessage, probe, wants_marks
from agentserve.text.frames import TOOL, Frames, learn, within_a_turn
from agentserve.text.jinja import CompiledTemplate
from agentserve.text.roles import (
    late_system_into_user,
    results_with_names,
    user_into_tool,
    users_joined,
    without_empty_replies,
)
from agentserve.text.steady import moves, steady
from agentserve.text.template_sources import TemplateSources
from tools_bridge.json_value import Json
from tools_bridge.registry import detect

RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)
CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_OPEN, _CLOSE = "<think>", "</think>"


class Chat:
    """`default` and `tool_use` templates of one model, and what probing has found out about them."""

    def __init__(
        self,
        sources: TemplateSources,
        specials: Mapping[str, str],
        now: Callable[[], datetime],
        *,
        steadily: bool = False,
    ) -> None:
        """Compile and probe; a broken template, or none at all, is a TextError. `steadily`: what the
        template would move from turn to turn stays where it was first."""
        if sources.default is None:
            raise TextError("the model has no chat template")
        self._specials = {name: text for name, text in specials.items() if name not in RESERVED}
        self._default = CompiledTemplate(sources.default, now)
        self._tool_use = (
            self._default if sources.tool_use is None else CompiledTemplate(sources.tool_use, now)
        )
        self.sources = (self._default.source, self._tool_use.source)
        self.facts: TemplateFacts = probe(self._run)
        self._wants_marks = wants_marks(partial(self._run, kwargs={"thinking": True}))
        family = detect("\n".join(self.sources)).name
        told = self.facts.tool_calls and not self.facts.tools and family in deepseek_tools.CALLS
        self._told = family if told else None
        self.numbers_calls = family == "kimi-k2"
        self.wrapper = None if told or (self.facts.tools and self.facts.tool_calls) else hermes.NAME
        self.moves = moves(self._run)
        self._steadily = steadily and self.moves
        self.reserved = RESERVED | self._specials.keys()

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] = (),
        *,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Json],
    ) -> str:
        """The conversation as the template renders it."""
        messages = merge_leading_system(messages, keeps_developer=self._knows("developer"))
        if not self.facts.system_later:
            messages = late_system_into_user(messages, consecutive_users=self.facts.consecutive_users)
        if not self.facts.empty_reply:
            messages = without_empty_replies(messages, shows_reasoning=bool(self.facts.reasoning))
        if not self.facts.consecutive_users:
            messages = users_joined(messages)
        if self.wrapper is not None:
            messages = hermes.wrap(
                messages,
                tools,
                default_system=self.facts.default_system,
                consecutive_users=self.facts.consecutive_users,
            )
            tools = ()
        elif self._told and tools:
            messages = deepseek_tools.told(messages, tools, self._told)
            tools = ()
        if self.facts.result_names:
            messages = results_with_names(messages)
        if self.wrapper is None and not self.facts.user_after_tool:
            messages = user_into_tool(messages)
        if not self.facts.system:
            messages = _system_into_user(messages)
        shaped = [self._shape(message) for message in messages]
        if self._wants_marks and kwargs.get("thinking"):
            shaped = [_with_marks(message) for message in shaped]
        run = partial(self._run, kwargs=kwargs)
        if self._steadily:
            return steady(run, shaped, list(tools) or None, add_generation_prompt)
        return run(shaped, list(tools) or None, add_generation_prompt)

    def split_reasoning(self, message: Message) -> Message:
        """An assistant text that opens with `<think>` as reasoning and answer.

        Templates that drop past reasoning look for these tags, which they can no longer see once
        control strings are hidden.
        """
        aware = self._knows("reasoning_content")
        if message.role != "assistant" or message.reasoning or not (aware or self._knows("</think>")):
            return message
        # No regular expression: one with a lazy middle between newlines takes cubic time.
        thought, closed, answer = message.text.lstrip().partition(_CLOSE)
        if not closed or not thought.startswith(_OPEN):
            return message
        if aware:
            answer = answer.lstrip("\n")
        reasoning = thought.removeprefix(_OPEN).strip("\n")
        return replace(message, reasoning=reasoning, parts=(answer,) if answer else ())

    def frames(self, mark: str, kwargs: Mapping[str, Json], *, tools: bool = False) -> Frames:
        """How assistant turns are framed. `mark`: a character that the templates do not contain. `tools`:
        there are some: DeepSeek V4's templates then show past reasoning, be it empty."""
        return learn(partial(self.text, tools=[TOOL] if tools else (), kwargs=kwargs), mark)

    def ends_turns(self, control: str, marks: tuple[str, str]) -> bool:
        """Whether a control token that stands behind a turn's text ends it: harmony writes the same one
        between a turn's messages."""
        return not within_a_turn(partial(self.text, kwargs={}), marks, control)

    def _knows(self, word: str) -> bool:
        return any(word in source for source in self.sources)

    def _run(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = False,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        about_tools = tools or any(m["role"] == "tool" or "tool_calls" in m for m in messages)
        template = self._tool_use if about_tools else self._default
        return template.render(
            {
                **self._specials,
                **(kwargs or {}),
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def _shape(self, message: Message) -> TemplateMessage:
        """A message as templates expect it: absent keys are absent, arguments are objects."""
        content: object = message.text
        if self.facts.list_content and len(message.parts) > 1:
            content = [{"type": "text", "text": part} for part in message.parts]
        shaped: TemplateMessage = {"role": message.role, "content": content}
        if message.calls:
            if self.facts.null_content and not message.parts:
                shaped["content"] = None
            shaped["tool_calls"] = [
                {
                    "id": self._call_id(call.id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": self._arguments(call.arguments)},
                }
                for call in message.calls
            ]
        if message.call_id is not None:
            shaped["tool_call_id"] = self._call_id(message.call_id)
        if message.name is not None:
            shaped["name"] = message.name
        if message.reasoning is not None:
            self._think(shaped, message.reasoning)
        return shaped

    def _think(self, shaped: TemplateMessage, reasoning: str) -> None:
        """gpt-oss names reasoning otherwise; beside calls it takes that or text, and shows both alike."""
        text = shaped["content"]
        if self.facts.reasoning == "thinking" and text and "tool_calls" in shaped:
            shaped["content"] = f"{reasoning}\n\n{text}" if reasoning else text
        else:
            shaped[self.facts.reasoning or "reasoning_content"] = reasoning

    def _arguments(self, arguments: Mapping[str, Json]) -> object:
        return json.dumps(arguments, ensure_ascii=False) if self.facts.string_arguments else arguments

    def _call_id(self, call_id: str) -> str:
        """Templates of the Mistral family refuse ids that are not nine letters and digits."""
        if not self.facts.short_call_ids or (len(call_id) == 9 and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _with_marks(message: TemplateMessage) -> TemplateMessage:
    """An answer behind its reasoning, as the model wrote it."""
    if message["role"] != "assistant" or not message["content"]:
        return message
    return message | {"content": f"{_OPEN}{message.get('reasoning_content', '')}{_CLOSE}{message['content']}"}


def _system_into_user(messages: Sequence[Message]) -> list[Message]:
    """For templates that refuse a system message: its text opens the first user message."""
    if not messages or messages[0].role != "system":
        return list(messages)
    system, rest = messages[0], list(messages[1:])
    if not rest or rest[0].role != "user":
        return [replace(system, role="user"), *rest]
    return [replace(rest[0], parts=(f"{system.text}\n\n{rest[0].text}",)), *rest[1:]]
