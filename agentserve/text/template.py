"""Renders conversations to prompt ids, so that users cannot forge and caches can match.

- Control strings in what users supply are hidden from the template and come back as plain text
  (`agentserve.text.hiding`).
- The ids an assistant message was generated as take its place (`spliced`), so that the prompt of
  the next turn begins with exactly the ids that have KV already.
- On benign conversations the ids equal `transformers`' `apply_chat_template`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType

from agentserve.text.chat import CHATML, Chat
from agentserve.text.conversation import Message, RawMessage, check_json, parse_messages
from agentserve.text.errors import TextError
from agentserve.text.facts import TemplateFacts
from agentserve.text.frames import Frames
from agentserve.text.hiding import Hider, Placeholders, strings_of
from agentserve.text.kimi_ids import in_tokens, numbered
from agentserve.text.splices import Splice, cut, marked, plan
from agentserve.text.template_sources import TemplateSources
from agentserve.text.tokenizer import Tokenizer
from tools_bridge.json_value import Json

ENDS_OF_CALLS = ("<|call|>", "<|eom_id|>", "<|observation|>", "<|tool_response>")
"""What gpt-oss, Llama, GLM and Gemma write where a tool is to be run."""

_MOST_FRAMES = 16
_NO_SPLICES: Mapping[int, Sequence[int]] = MappingProxyType({})
_NOT_KNOWN: Mapping[int, str] = MappingProxyType({})


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


@dataclass(slots=True)
class _Memory:
    """Frames of turns, by whose request they were learned for."""

    frames: dict[tuple[str, str], Frames] = field(default_factory=dict)


class ChatTemplate:
    """A model's chat template. Stateless: one conversation always renders to the same ids
    (templates that print today's date aside)."""

    def __init__(
        self,
        sources: TemplateSources,
        tokenizer: Tokenizer,
        *,
        steadily: bool = False,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile and probe; TextError where the template is broken. `steadily`: see `steady`.

        A model without a template gets ChatML if its vocabulary knows it; else `available` is
        False and rendering is a TextError. `stop_ids`: the tokens that end an assistant's turn.
        """
        self._tokenizer = tokenizer
        if sources.default is None and "<|im_start|>" in tokenizer.control:
            sources = TemplateSources(CHATML)
        available = sources.default is not None
        self._chat = Chat(sources, tokenizer.special_texts, now, steadily=steadily) if available else None
        self.facts: TemplateFacts | None = self._chat.facts if self._chat else None
        self.wrapper: str | None = self._chat.wrapper if self._chat else None
        self._call_end: int | None = None  # what a turn with calls ends with, if it is no end of others
        self.stop_ids: frozenset[int] = self._ends_of_turns(self._chat) if self._chat else frozenset()
        self._end_ids = self.stop_ids | tokenizer.eos_ids
        self._memory = _Memory()
        self._owner = ""

    @property
    def available(self) -> bool:
        return self._chat is not None

    @property
    def moves(self) -> bool:
        """Whether the template moves tools or the system message from turn to turn."""
        return self._chat is not None and self._chat.moves

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
        tails: Mapping[int, str] = _NOT_KNOWN,
    ) -> array[int]:
        """Prompt ids (int32) of OpenAI-shaped `messages`.

        `spliced[i]`: the ids that assistant message i was generated as, without the end-of-turn
        token; `tails[i]`: the `tail` of the prompt that it was generated behind, where it may have been
        another than this request's. A splice the template would drop, repeat or refuse is rendered from
        its text instead. `continue_final_message`: the prompt ends inside the last, assistant, message.
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
        if chat.numbers_calls:
            request = replace(request, messages=self._numbered(request.messages, spliced))
        rendered = self._rendered(chat, request, spliced, tails)
        ids = self._tokenizer.encode_rendered(
            rendered.text, restore=rendered.restore, spliced=rendered.spliced
        )
        return array("i", ids)

    def tail(
        self,
        messages: Sequence[RawMessage],
        *,
        tools: Sequence[Mapping[str, Json]] | None = None,
        kwargs: Mapping[str, Json] | None = None,
    ) -> str:
        """What stands behind the last message in such a prompt for a new turn, for `tails`; "" where a
        control string that a client wrote is in it. The arguments are as `render` took them."""
        chat = self._available_chat()
        hider = Hider(self._tokenizer.matcher, Placeholders([*strings_of((), kwargs or {}), *chat.sources]))
        hidden = {key: hider.json(value) for key, value in (kwargs or {}).items()}
        tail = self._frames(chat, hidden, bool(tools)).behind(str(messages[-1].get("role"))).tail
        return "" if any(chr(code) in tail for code in hider.restore) else tail

    def apart(self, owner: str) -> ChatTemplate:
        """The same template, which finds nothing that was rendered or encoded for others."""
        other = copy(self)
        other._owner, other._tokenizer = owner, self._tokenizer.apart(owner)
        return other

    def _numbered(self, messages: Sequence[Message], spliced: Mapping[int, Sequence[int]]) -> list[Message]:
        """With ids of calls as Kimi has them: a result answers the id that stands in the turn's tokens."""
        written = {
            index: in_tokens(ids, self._tokenizer.control, self._tokenizer.decode)
            for index, ids in spliced.items()
        }
        return numbered(messages, written)

    def _available_chat(self) -> Chat:
        if self._chat is None:
            raise TextError("the model has no chat template: name one with --chat-template")
        return self._chat

    def _rendered(
        self,
        chat: Chat,
        request: _Request,
        spliced: Mapping[int, Sequence[int]],
        tails: Mapping[int, str],
    ) -> _Rendered:
        for index in spliced:
            if not 0 <= index < len(request.messages) or request.messages[index].role != "assistant":
                raise TextError(f"messages[{index}]: only an assistant message can be spliced")
        kept, as_text = dict(spliced), set[int]()
        while True:
            try:
                rendered, lost = self._attempt(chat, request, kept, tails, as_text)
            except TextError:
                if not kept:
                    raise
                # Some want to see the calls that results answer, others refuse several calls in a turn.
                if as_text >= kept.keys():
                    kept.clear()
                as_text.update(kept)
                continue
            if not lost:
                return rendered
            for index in lost:
                if index in as_text or not request.messages[index].calls:
                    del kept[index]
                as_text.add(index)  # calls that were not found as such

    def _attempt(
        self,
        chat: Chat,
        request: _Request,
        spliced: Mapping[int, Sequence[int]],
        tails: Mapping[int, str],
        as_text: Collection[int],
    ) -> tuple[_Rendered, set[int]]:
        """The rendered request, and the splices that were not found in it."""
        texts = strings_of(request.messages, *request.tools, request.kwargs)
        placeholders = Placeholders([*texts, *tails.values(), *chat.sources])
        hider = Hider(self._tokenizer.matcher, placeholders)
        kwargs = {key: hider.json(value) for key, value in request.kwargs.items()}
        splices: list[Splice] = []
        if spliced:
            frames = self._frames(chat, kwargs, bool(request.tools))
            splices = plan(request.messages, spliced, as_text, frames, placeholders.take, tails=tails)
        messages = [
            message
            if index in spliced and not message.calls
            else hider.message(chat.split_reasoning(message))
            for index, message in enumerate(request.messages)
        ]
        messages = marked(messages, splices)
        end = placeholders.take() if request.continue_final else ""
        if end:
            messages[-1] = replace(messages[-1], parts=(messages[-1].text + end,))
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
        text, lost = cut(text, splices, self._turn_ends)
        ids = {splice.mark: spliced[splice.index] for splice in splices}
        return _Rendered(text, hider.restore, ids), lost

    def _frames(self, chat: Chat, kwargs: Mapping[str, Json], tools: bool) -> Frames:
        """Remembered for the last few kinds of requests."""
        key = json.dumps([kwargs, tools], sort_keys=True)
        place, known = (self._owner, key), self._memory.frames
        frames = known.get(place)
        if frames is None:
            frames = chat.frames(Placeholders([*chat.sources, key]).take(), kwargs, tools=tools)
            if len(known) >= _MOST_FRAMES:
                known = {}
            # Several threads render: none may change what another one walks through.
            self._memory.frames = known | {place: frames}
        return frames

    def _turn_ends(self, text: str) -> Iterator[int]:
        found = [(start, token.id) for start, _, token in self._tokenizer.matcher.find(text)]
        known = [start for start, id_ in found if id_ in self._end_ids]
        return iter(known or [start for start, id_ in found if id_ == self._call_end])

    def _ends_of_turns(self, chat: Chat) -> frozenset[int]:
        """The control tokens with which a turn is over: what the template writes behind an assistant's
        text, and what families write behind calls."""
        placeholders = Placeholders(chat.sources)
        frames = chat.frames(placeholders.take(), {})
        controls = [token for _, _, token in self._tokenizer.matcher.find(frames.after_call)]
        if controls and controls[-1].special:
            self._call_end = controls[-1].id
        after = frames.after.lstrip()
        first = next(self._tokenizer.matcher.find(after), None)
        found = set[int]()
        if first is not None and first[0] == 0:
            token = first[2]
            if chat.ends_turns(token.text, (placeholders.take(), placeholders.take())):
                found.add(token.id)
        for text in ENDS_OF_CALLS:
            if text in self._tokenizer.control and any(text in source for source in chat.sources):
                found.add(next(self._tokenizer.matcher.find(text))[2].id)
        return frozenset(found)


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
