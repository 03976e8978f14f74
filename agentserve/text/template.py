"""Renders conversations to prompt ids, so that users cannot forge and caches can match.

- Control strings in what users supply are hidden from the template and come back as plain text
  (`agentserve.text.hiding`).
- The ids an assistant message was generated as take its place (`spliced`), so that the prompt of
  the next turn begins with exactly the ids that have KV already.
- On benign conversations the ids equal `transformers`' `apply_chat_template`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType

from agentserve.text import hermes
from agentserve.text.conversation import (
    Json,
    Message,
    RawMessage,
    check_json,
    merge_leading_system,
    parse_messages,
)
from agentserve.text.errors import TextError
from agentserve.text.facts import TemplateFacts, TemplateMessage, probe
from agentserve.text.hiding import Hider, Placeholders, strings_of
from agentserve.text.jinja import CompiledTemplate
from agentserve.text.template_sources import TemplateSources
from agentserve.text.tokenizer import Tokenizer

_NO_SPLICES: Mapping[int, Sequence[int]] = MappingProxyType({})
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)
_CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A template's output before it becomes ids. `spliced`: placeholder -> ids."""

    text: str
    restore: Mapping[int, str]
    spliced: Mapping[str, Sequence[int]]


class ChatTemplate:
    """A model's chat template. Stateless: one conversation always renders to the same ids
    (templates that print today's date aside)."""

    def __init__(
        self, sources: TemplateSources, tokenizer: Tokenizer, *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Compile and probe; TextError where the template is broken.

        A model without a template gets ChatML if its vocabulary knows it; else `available` is
        False and rendering is a TextError.
        """
        self._tokenizer = tokenizer
        self._specials = {
            name: text for name, text in tokenizer.special_texts.items() if name not in _RESERVED
        }
        default = sources.default
        if default is None and "<|im_start|>" in tokenizer.control:
            default = _CHATML
        self._default = CompiledTemplate(default, now) if default is not None else None
        self._tool_use = (
            CompiledTemplate(sources.tool_use, now) if sources.tool_use is not None else self._default
        )
        self.facts: TemplateFacts | None = probe(self._run) if self._default is not None else None
        native = self.facts is None or (self.facts.tools and self.facts.tool_calls)
        self.wrapper: str | None = None if native else hermes.NAME
        self.stop_ids: frozenset[int] = self._end_of_turn() if self._default is not None else frozenset()

    @property
    def available(self) -> bool:
        return self._default is not None

    # --- rendering -----------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[RawMessage],
        *,
        tools: Sequence[Mapping[str, Json]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Json] | None = None,
        spliced: Mapping[int, Sequence[int]] = _NO_SPLICES,
    ) -> array[int]:
        """Prompt ids (int32) of OpenAI-shaped `messages`.

        `spliced[i]`: the ids that assistant message i was generated as, without the end-of-turn
        token. A splice the template would drop, repeat or refuse is rendered from its text
        instead. `continue_final_message`: the prompt ends inside the last, assistant, message.
        TextError names the message that is broken.
        """
        rendered = self._render(
            messages, tools, add_generation_prompt, continue_final_message, kwargs or {}, spliced
        )
        ids = self._tokenizer.encode_rendered(
            rendered.text, restore=rendered.restore, spliced=rendered.spliced
        )
        return array("i", ids)

    def render_text(
        self,
        messages: Sequence[RawMessage],
        *,
        tools: Sequence[Mapping[str, Json]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Json] | None = None,
        spliced: Mapping[int, Sequence[int]] = _NO_SPLICES,
    ) -> str:
        """The prompt as text, for people: it does not show which control strings are real."""
        rendered = self._render(
            messages, tools, add_generation_prompt, continue_final_message, kwargs or {}, spliced
        )
        shown = {ord(key): self._tokenizer.decode(ids, False) for key, ids in rendered.spliced.items()}
        return rendered.text.translate({**rendered.restore, **shown})

    def _render(
        self,
        messages: Sequence[RawMessage],
        tools: Sequence[Mapping[str, Json]] | None,
        add_generation_prompt: bool,
        continue_final: bool,
        kwargs: Mapping[str, Json],
        spliced: Mapping[int, Sequence[int]],
    ) -> _Rendered:
        if self.facts is None:
            raise TextError("the model has no chat template: name one with --chat-template")
        parsed = parse_messages(messages)
        if continue_final:
            if add_generation_prompt:
                raise TextError("continue_final_message and add_generation_prompt exclude each other")
            if parsed[-1].role != "assistant" or parsed[-1].calls:
                raise TextError("continue_final_message: the last message must be an assistant's text")
        tool_list = _checked_tools(tools)
        check_json(dict(kwargs), "chat_template_kwargs")
        if taken := _RESERVED & kwargs.keys() or self._specials.keys() & kwargs.keys():
            raise TextError(f"chat_template_kwargs: {min(taken)!r} is reserved")
        for index in spliced:
            if not 0 <= index < len(parsed) or parsed[index].role != "assistant":
                raise TextError(f"messages[{index}]: only an assistant message can be spliced")

        placeholders = Placeholders(strings_of(parsed, *tool_list, kwargs, *self._sources()))
        hider = Hider(self._tokenizer.matcher, placeholders)
        marks = {index: placeholders.take() for index in spliced}
        end = placeholders.take() if continue_final else ""
        hidden = [
            replace(message, parts=(marks[index],), calls=(), reasoning=None)
            if index in marks
            else hider.message(message)
            for index, message in enumerate(parsed)
        ]
        if end:
            hidden[-1] = replace(hidden[-1], parts=(hidden[-1].text + end,))
        hidden_tools = [hider.json(tool) for tool in tool_list]
        hidden_kwargs = {key: hider.json(value) for key, value in kwargs.items()}
        try:
            text = self._chat(hidden, hidden_tools, add_generation_prompt, hidden_kwargs)
        except TextError:
            if not spliced:
                raise
            text = ""  # some templates want to see the calls that results answer
        lost = {index for index, mark in marks.items() if text.count(mark) != 1}
        if lost:
            kept = {index: ids for index, ids in spliced.items() if text and index not in lost}
            return self._render(messages, tools, add_generation_prompt, continue_final, kwargs, kept)
        if end:
            text = text[: _only(text, end)]
        if marks:
            extra = self._generation_extra(hidden_kwargs, placeholders)
            for mark in marks.values():
                text = text.replace(mark, extra + mark)
        return _Rendered(text, hider.restore, {mark: spliced[index] for index, mark in marks.items()})

    def _chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Json],
    ) -> str:
        """Run the template on checked and hidden messages, wrapped where it needs that."""
        facts = self.facts
        assert facts is not None
        merged = merge_leading_system(messages, keeps_developer=self._knows("developer"))
        if self.wrapper is not None:
            merged = hermes.wrap(
                merged,
                tools,
                default_system=facts.default_system,
                consecutive_users=facts.consecutive_users,
            )
            tools = ()
        if not facts.system:
            merged = _system_into_user(merged)
        shaped = [self._shape(message, facts) for message in merged]
        return self._run(
            shaped, tools=list(tools) or None, add_generation_prompt=add_generation_prompt, **kwargs
        )

    def _run(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: object,
    ) -> str:
        template = self._tool_use if tools else self._default
        assert template is not None
        variables = {
            **self._specials,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return template.render(variables)

    def _shape(self, message: Message, facts: TemplateFacts) -> TemplateMessage:
        """A message as templates expect it: absent keys are absent, arguments are objects."""
        content: object = message.text
        if facts.list_content and len(message.parts) > 1:
            content = [{"type": "text", "text": part} for part in message.parts]
        shaped: TemplateMessage = {"role": message.role, "content": content}
        if message.calls:
            if facts.null_content and not message.parts:
                shaped["content"] = None
            shaped["tool_calls"] = [
                {
                    "id": _call_id(call.id, facts),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.calls
            ]
        if message.call_id is not None:
            shaped["tool_call_id"] = _call_id(message.call_id, facts)
        if message.name is not None:
            shaped["name"] = message.name
        if message.reasoning is not None:
            shaped["reasoning_content"] = message.reasoning
        return shaped

    # --- what the template does ----------------------------------------------------------

    def _sources(self) -> list[Json]:
        return [template.source for template in (self._default, self._tool_use) if template is not None]

    def _knows(self, word: str) -> bool:
        return any(isinstance(source, str) and word in source for source in self._sources())

    def _frame(self, mark: str, kwargs: Mapping[str, Json]) -> tuple[str, str, str] | None:
        """(generation prompt, text before, text after) around an assistant message `mark`."""
        user, reply = Message("user", ("u",)), Message("assistant", (mark,))
        try:
            start = self._chat([user], (), False, kwargs)
            asked = self._chat([user], (), True, kwargs)
            answered = self._chat([user, reply, user], (), False, kwargs)
        except TextError:
            return None
        if not asked.startswith(start) or not answered.startswith(start) or answered.count(mark) != 1:
            return None
        before, _, after = answered[len(start) :].partition(mark)
        return asked[len(start) :], before, after

    def _generation_extra(self, kwargs: Mapping[str, Json], placeholders: Placeholders) -> str:
        """What the generation prompt has and a past assistant turn lacks (say, an opened `<think>`).

        The spliced ids were generated behind it, so it has to be there when they are shown again.
        """
        frame = self._frame(placeholders.take(), kwargs)
        if frame is None:
            return ""
        prompt, before, _ = frame
        return prompt.removeprefix(before) if prompt.startswith(before) else ""

    def _end_of_turn(self) -> frozenset[int]:
        """The control token the template writes behind an assistant's text."""
        frame = self._frame(Placeholders(map(str, self._sources())).take(), {})
        if frame is None:
            return frozenset()
        after = frame[2].lstrip()
        for start, _, token in self._tokenizer.matcher.find(after):
            return frozenset({token.id}) if start == 0 else frozenset()
        return frozenset()


def _checked_tools(tools: Sequence[Mapping[str, Json]] | None) -> list[dict[str, Json]]:
    checked = []
    for index, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping):
            raise TextError(f"tools[{index}]: an object is expected")
        as_dict = dict(tool)
        check_json(as_dict, f"tools[{index}]")
        checked.append(as_dict)
    return checked


def _system_into_user(messages: Sequence[Message]) -> list[Message]:
    """For templates that refuse a system message: its text opens the first user message."""
    if not messages or messages[0].role != "system":
        return list(messages)
    system, rest = messages[0], list(messages[1:])
    if not rest or rest[0].role != "user":
        return [replace(system, role="user"), *rest]
    return [replace(rest[0], parts=(f"{system.text}\n\n{rest[0].text}",)), *rest[1:]]


def _call_id(call_id: str, facts: TemplateFacts) -> str:
    """Templates of the Mistral family refuse ids that are not nine letters and digits."""
    if not facts.short_call_ids or (len(call_id) == 9 and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _only(text: str, mark: str) -> int:
    if text.count(mark) != 1:
        raise TextError("continue_final_message: the template does not show the last message once")
    return text.index(mark)
