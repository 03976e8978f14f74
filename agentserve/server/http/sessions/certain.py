"""What is certain of the next prompt while the text of one tool result still grows."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import msgspec

from agentserve.server.http import history
from agentserve.server.http.chat_request import render
from agentserve.server.http.sessions.going_on import TurnOptions, next_request
from agentserve.server.limits import Limits
from agentserve.server.sessions.transcript import Held, Transcript
from agentserve.server.text_port import ChatTemplate
from tools_bridge.call_syntax import HERMES, CallSyntax

UNCERTAIN_TOKENS = 4  # the last ones may come out otherwise when the text goes on
_EMPTY = Held(b'""', b"", 0)
_PROBE = "\n#"  # goes on otherwise than any end of a message


class Certain:
    """The beginning of one session's next prompt, looked at again and again as one text grows.

    What a template puts behind the text is found by comparing two prompts whose texts differ in their ends.
    It stays the same while nothing but the text changes, so after that one prompt is enough; should it not
    go on as was said of the one before, the template does otherwise, and there are two each time.
    """

    def __init__(self) -> None:
        self._behind: tuple[Transcript, int] | None = None  # of which words; tokens behind the text
        self._said: array[int] = array("i")
        self._steady = True

    def tokens(
        self,
        template: ChatTemplate,
        kept: Transcript,
        *,
        calls: Sequence[str],
        growing: str,
        text: str,
        cut: set[str],
        written: CallSyntax = HERMES,
        spliced: Mapping[int, array[int]],
        tails: Mapping[int, str],
        limits: Limits,
    ) -> array[int]:
        """The beginning of the prompt that stays as it is however `growing`'s result `text` goes on.

        Up to a few tokens, where a tokenizer looks far ahead: good enough to be computed ahead. Not for two
        threads at once.
        """

        def prompt(content: str) -> array[int]:
            held = {call: kept.held.get(call, _EMPTY) for call in calls}
            held[growing] = Held(msgspec.json.encode(content), b"", 0)
            fields = next_request(kept, held, TurnOptions())
            messages = history.message_dicts(fields.messages, limits, cut, written=written)
            tools = history.tool_dicts(fields.tools, limits)
            return render(template, fields, messages, tools, spliced, tails=tails)

        text = text.rstrip()  # white space joins what follows it, and templates may trim it
        if not text:
            return array("i")
        one = prompt(text)
        known = self._behind is not None and self._behind[0] is kept
        if known and one[: len(self._said)] != self._said:
            known = self._steady = False
        if self._behind is not None and known:
            end = len(one) - self._behind[1]
        else:
            other = prompt(text + _PROBE)
            end = _agree(one, other)
            behind = min(len(one) - end, _agree(one[::-1], other[::-1]))
            self._behind = (kept, behind) if self._steady else None
        self._said = one[: max(end - UNCERTAIN_TOKENS, 0)]
        return self._said


def _agree(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next(
        (i for i, (left, right) in enumerate(zip(one, other, strict=False)) if left != right),
        min(len(one), len(other)),
    )
