"""What `$ref` points at."""

from __future__ import annotations

from urllib.parse import unquote

from tools_bridge.json_schema.dialect import Part, Schema, draft_of, refused
from tools_bridge.schemas import GrammarError


class References:
    """References of one schema; only those into it, by JSON pointer, are followed."""

    def __init__(self, root: Part, where: str) -> None:
        self._root = root
        self._where = where
        self.draft = draft_of(root, where)

    def target(self, pointer: object, where: str) -> tuple[Schema, str]:
        """(the schema, where it is)."""
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise GrammarError(f"{where}: $ref {pointer!r} must point into the same schema ('#/...')")
        found: object = self._root
        for step in pointer.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isascii() and name.isdigit() and int(name[:9]) < len(found):
                found = found[int(name[:9])]
            else:
                raise GrammarError(f"{where}: $ref {pointer!r} points at nothing")
        if not isinstance(found, dict | bool):
            raise GrammarError(f"{where}: $ref {pointer!r} points at no schema")
        return found, self._where + pointer.removeprefix("#").replace("/", ".")

    def check_base(self, part: Part, where: str) -> None:
        """An `$id` within changes what references below it mean."""
        name = part.get("id" if self.draft == 4 else "$id")
        if part is not self._root and isinstance(name, str) and not name.startswith("#") and _refers(part):
            raise refused(where, "$id", "around references cannot be held")


def _refers(part: Part) -> bool:
    stack: list[object] = [part]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if "$ref" in item:
                return True
            stack += item.values()
        elif isinstance(item, list):
            stack += item
    return False
