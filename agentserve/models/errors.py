"""The one error of this room."""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be used. One line that names the file, and the tensor or field where there is one."""
