"""What the HTTP side needs of tokenizers, chat templates, tool-call formats and grammars.

Narrow on purpose: the text room and the tools bridge satisfy these, tests satisfy them in a page.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

JsonObject = dict[str, Any]


class Detokenizer(Protocol):
    """Folds token ids into text; never gives half a character."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> Collection[int]: ...

    @property
    def control(self) -> Mapping[str, int]:
        """Control strings and their ids; content never yields one of these."""
        ...

    @property
    def token_bytes(self) -> Sequence[bytes]: ...

    def encode(self, text: str) -> list[int]:
        """Plain text; never a control id, no BOS."""
        ...

    def encode_completion(self, text: str) -> list[int]:
        """As a prompt of its own: with BOS if the model wants one."""
        ...

    def apart(self, owner: str) -> Tokenizer:
        """The same, which remembers nothing that others have had encoded."""
        ...

    def decode(self, ids: Sequence[int], skip_control: bool = True) -> str: ...

    def detokenizer(self, *, skip_control: bool = True, continues: bool = False) -> Detokenizer:
        """A fresh fold; `continues`: its text goes on from other text (a leading space is real)."""
        ...


class ChatTemplate(Protocol):
    @property
    def stop_ids(self) -> Collection[int]:
        """Control tokens that end an assistant message."""
        ...

    def apart(self, owner: str) -> ChatTemplate:
        """The same, which remembers nothing of what was rendered for others."""
        ...

    def render(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        spliced: Mapping[int, Sequence[int]] = {},
        tails: Mapping[int, str] = {},
    ) -> array[int]:
        """Prompt ids. A history it cannot render is a ValueError that names the message. `tails`: of what
        is `spliced`, the `tail` of the prompt that it was generated behind."""
        ...

    def tail(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """What such a prompt ends with, behind its last message; "": that cannot be said."""
        ...
