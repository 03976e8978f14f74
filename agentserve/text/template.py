"""Renders conversations to prompt ids, so that users cannot forge and caches can match.

- Control strings in what users supply are hidden from the template and come back as plain text
  (`agentserve.text.hiding`).
- The ids an assistant message was generated as take its place (`spliced`), so that the prompt of
  the next turn begins with exactly the ids that have KV already.
- On benign conversations the ids equal `transformers`' `apply_chat_template`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType

from agentserve.text.chat import CHATML, Chat, TurnFrame
from agentserve.text.conversation import Message, RawMessage, check_json, parse_messages
from agentserve.text.errors import TextError
from agentserve.text.facts import TemplateFacts
from agentserve.text.hiding import Hider, Placeholders, find_characters, strings_of
from agentserve.text.splices import Stand, behind_their_prompts, with_marked_calls, without_calls
from agentserve.text.template_sources import TemplateSources
from agentserve.text.tokenizer import Tokenizer
from tools_bridge.json_value import Json
from tools_bridge.registry import reply_form

_NO_SPLICES: Mapping[int, Sequence[int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Request:
    """What one call of `render` asks for, checked."""

    messages: Sequence[Message]
    tools: Sequence[Json]
    kwargs: Mapping[str, Json]
    add_generation_prompt: bool
    continue_final: bool


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A template's output before it becomes ids: code point -> hidden string, mark -> ids."""

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
        False and rendering is a TextError. `stop_ids`: the token that ends an assistant's turn.
        """
        self._tokenizer = tokenizer
        if sources.default is None and "<|im_start|>" in tokenizer.control:
            sources = TemplateSources(CHATML)
        available = sources.default is not None
        self._chat = Chat(sources, tokenizer.special_texts, now) if available else None
        self.facts: TemplateFacts | None = self._chat.facts if self._chat else None
        self.wrapper: str | None = self._chat.wrapper if self._chat else None
        frame = self._chat.frame(Placeholders(self._chat.sources).take(), {}) if self._chat else None
        self.stop_ids: frozenset[int] = self._end_of_turn(frame)
        self._inner = reply_form("\n".join(self.sources)).inner

    @property
    def available(self) -> bool:
        return self._chat is not None

    @property
    def sources(self) -> tuple[str, ...]:
        """The templates as they are run; none where there is none."""
        return self._chat.sources if self._chat is not None else ()

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
        chat = self._available_chat()
        request = _checked(
            chat,
            messages,
            tools,
            kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final=continue_final_message,
        )
        rendered = self._rendered(chat, request, spliced)
        ids = self._tokenizer.encode_rendered(
            rendered.text, restore=rendered.restore, spliced=rendered.spliced
        )
        return array("i", ids)

    def _available_chat(self) -> Chat:
        if self._chat is None:
            raise TextError("the model has no chat template: name one with --chat-template")
        return self._chat

    def _rendered(self, chat: Chat, request: _Request, spliced: Mapping[int, Sequence[int]]) -> _Rendered:
        for index in spliced:
            if not 0 <= index < len(request.messages) or request.messages[index].role != "assistant":
                raise TextError(f"messages[{index}]: only an assistant message can be spliced")
        try:
            rendered, lost = self._attempt(chat, request, spliced)
        except TextError:
            if not spliced:
                raise
            # Some templates want to see the calls that tool results answer.
            try:
                rendered, lost = self._attempt(chat, request, spliced, calls=True)
            except TextError:
                return self._attempt(chat, request, _NO_SPLICES)[0]
        if lost:
            kept = {index: ids for index, ids in spliced.items() if index not in lost}
            return self._rendered(chat, request, kept)
        return rendered

    def _attempt(
        self, chat: Chat, request: _Request, spliced: Mapping[int, Sequence[int]], *, calls: bool = False
    ) -> tuple[_Rendered, set[int]]:
        """The rendered request, and the splices that did not come out exactly once. `calls`: the template
        sees the calls of spliced messages too, and what it makes of them is taken out again."""
        texts = strings_of(request.messages, *request.tools, request.kwargs)
        placeholders = Placeholders([*texts, *chat.sources])
        hider = Hider(self._tokenizer.matcher, placeholders)
        marks = {index: placeholders.take() for index in spliced}
        seen = {i: placeholders.take() for i in marks if calls and request.messages[i].calls}
        messages = [
            hider.message(chat.split_reasoning(message))
            if index not in marks
            else with_marked_calls(hider.message(message), marks[index], seen[index])
            if index in seen
            else replace(message, parts=(marks[index],), calls=(), reasoning=None)
            for index, message in enumerate(request.messages)
        ]
        end = placeholders.take() if request.continue_final else ""
        if end:
            messages[-1] = replace(messages[-1], parts=(messages[-1].text + end,))
        kwargs = {key: hider.json(value) for key, value in request.kwargs.items()}
        text = chat.text(
            messages,
            [hider.json(tool) for tool in request.tools],
            add_generation_prompt=request.add_generation_prompt,
            kwargs=kwargs,
        )
        if end:
            text, found, _ = text.partition(end)
            if not found:
                raise TextError("continue_final_message: the template does not show the last message")
        lost: set[int] = set()
        if marks:
            frame = chat.frame(placeholders.take(), kwargs)
            if seen:
                following = [message.text.strip() for message in messages[1:]] + [""]
                stands = [Stand(marks[i], last, following[i]) for i, last in sorted(seen.items())]
                opening = frame.generation_prompt if frame else ""
                text, unclear = without_calls(text, stands, opening, self._tokenizer.matcher, self._inner)
                lost = {index for index in seen if marks[index] in unclear}
            # All marks in one pass: a history may have thousands.
            shown = Counter(found.group() for found in find_characters(frozenset(marks.values()), text))
            lost |= {index for index, mark in marks.items() if shown[mark] != 1}
            text = behind_their_prompts(text, {marks[i] for i in marks if i not in seen}, frame)
        return _Rendered(text, hider.restore, {marks[index]: ids for index, ids in spliced.items()}), lost

    def _end_of_turn(self, frame: TurnFrame | None) -> frozenset[int]:
        """The control token the template writes behind an assistant's text."""
        after = frame.after.lstrip() if frame else ""
        first = next(self._tokenizer.matcher.find(after), None)
        return frozenset({first[2].id}) if first is not None and first[0] == 0 else frozenset()


def _checked(
    chat: Chat,
    messages: Sequence[RawMessage],
    tools: Sequence[Mapping[str, Json]] | None,
    kwargs: Mapping[str, Json] | None,
    *,
    add_generation_prompt: bool,
    continue_final: bool,
) -> _Request:
    parsed = parse_messages(messages)
    if continue_final and add_generation_prompt:
        raise TextError("continue_final_message and add_generation_prompt exclude each other")
    if continue_final and (parsed[-1].role != "assistant" or parsed[-1].calls):
        raise TextError("continue_final_message: the last message must be an assistant's text")
    checked: list[Json] = []
    for index, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping):
            raise TextError(f"tools[{index}]: an object is expected")
        as_dict = dict(tool)
        check_json(as_dict, f"tools[{index}]")
        checked.append(as_dict)
    extra = dict(kwargs or {})
    check_json(extra, "chat_template_kwargs")
    if taken := chat.reserved & extra.keys():
        raise TextError(f"chat_template_kwargs: {min(taken)!r} is reserved")
    return _Request(parsed, checked, extra, add_generation_prompt, continue_final)
