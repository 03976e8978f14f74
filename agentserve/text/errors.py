"""The one error this room raises for bad input."""

from __future__ import annotations


class TextError(ValueError):
    """A tokenizer, template or conversation that cannot be used; the message is one line."""
