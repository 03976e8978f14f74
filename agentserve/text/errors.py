"""The one error this room raises for bad input."""

from __future__ import annotations


class TextError(ValueError):
    """A tokenizer, template or conversation that cannot be used; the message is one line.

    About a conversation it also says where (`param`: "messages[2].content", in the message too)
    and, where clients may want to tell cases apart, what (`code`).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
