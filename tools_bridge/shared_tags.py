"""Tags of tools whose arguments are held to the same, as one tag."""

from __future__ import annotations

import json

Tag = dict[str, object]


def shared_tags(tags: list[Tag]) -> list[Tag]:
    """Tools whose arguments are held to the same have one tag, which begins with any of their names: a
    compiled grammar writes all of its states down with each of its rules, so many tags take the square."""
    groups: dict[str, list[Tag]] = {}
    for tag in tags:
        groups.setdefault(json.dumps(tag["content"]), []).append(tag)
    return [_of_any_name(group) if len(group) > 1 else group[0] for group in groups.values()]


def _of_any_name(tags: list[Tag]) -> Tag:
    begins = [str(tag["begin"]) for tag in tags]
    same = _common(begins)
    same = min(same, min(map(len, begins)) - 1)  # no text of a grammar may be empty
    names = [begin[same:] for begin in begins]
    after = _common([name[::-1] for name in names])
    after = min(after, min(map(len, names)) - 1)
    choice: Tag = {"type": "or", "elements": [_text(name[: len(name) - after]) for name in names]}
    parts = [choice, *([_text(names[0][len(names[0]) - after :])] if after else []), tags[0]["content"]]
    return {**tags[0], "begin": begins[0][:same], "content": {"type": "sequence", "elements": parts}}


def _common(texts: list[str]) -> int:
    """How many characters all of them begin with."""
    first, last = min(texts), max(texts)
    pairs = enumerate(zip(first, last, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(last)))


def _text(text: str) -> Tag:
    return {"type": "const_string", "value": text}
