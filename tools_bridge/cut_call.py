"""A call that ended before its arguments were JSON, in the form that its family writes calls in.

Clients hold such a call as a name and the beginning of a JSON object. Written out it is what the model
wrote, up to where that was known, but for blanks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from tools_bridge.call_syntax import CallSyntax, Style
from tools_bridge.json_scan import ObjectScanner
from tools_bridge.json_value import is_text

Write = Callable[[str, str, bool], str]
"""A member of an object: its key, the raw JSON of its value, and whether that is all of it."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*(?P<end>"?)', re.DOTALL)
_COLON = re.compile(r"\s*:")
_BLANKS = re.compile(r"\s+")
_HALF_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\u[0-9a-fA-F]{0,3}$")


def cut_call(calls: CallSyntax, name: str, arguments: str) -> str:
    """The call as text, from where the family's calls are opened to the end of what is known.

    What does not begin a JSON object, as others' models may have written it, is written as it is.
    """
    number = f"0{calls.numbered}" if calls.numbered else ""
    if calls.style == "json" or not _begins_object(arguments):
        said = arguments
    elif calls.style == "gemma":
        said = _gemma(arguments)
    else:
        write = _STYLES[calls.style](calls)
        said = "".join(write(key, raw, whole) for key, raw, whole in _members(arguments))
    return f"{calls.opening}{calls.begin(name)}{number}{said}"


def _begins_object(arguments: str) -> bool:
    scanner, at = ObjectScanner(), 0
    while at < len(arguments) and not (scanner.done or scanner.failed):
        before = at
        at, piece = scanner.feed(arguments, at)
        if piece is None and at == before:
            break
    return not scanner.failed and not (scanner.done and arguments[at:].strip())


def _members(arguments: str) -> Iterator[tuple[str, str, bool]]:
    """The members of what begins a JSON object, the last one perhaps in part."""
    scanner, at, raw, key = ObjectScanner(), 0, "", None
    while not (scanner.done or scanner.failed):
        before = at
        at, piece = scanner.feed(arguments, at)
        if piece is not None:
            key, raw = piece.key, raw + piece.text
            if piece.last:
                yield key, raw, True
                raw, key = "", None
        elif at == before:
            break
        if at >= len(arguments):
            break
    if key is not None and raw:
        yield key, raw, False


def _plain(raw: str, whole: bool) -> str:
    """A text as itself, anything else as JSON."""
    if not raw.startswith('"'):
        return raw
    try:
        text: str = json.loads(raw if whole else _HALF_ESCAPE.sub(r"\1", raw) + '"', strict=False)
    except ValueError:
        return raw
    return text if is_text(text) else raw


def _is_text(raw: str) -> bool:
    return raw.startswith('"')


def _qwen(_: CallSyntax) -> Write:
    return lambda key, raw, whole: (
        f"<parameter={key}>\n{_plain(raw, whole)}" + ("\n</parameter>\n" if whole else "")
    )


def _glm(calls: CallSyntax) -> Write:
    line = "\n" if calls.begin("").endswith("\n") else ""
    return lambda key, raw, whole: (
        f"<arg_key>{key}</arg_key>{line}<arg_value>{_plain(raw, whole)}"
        + (f"</arg_value>{line}" if whole else "")
    )


def _dsml(calls: CallSyntax) -> Write:
    tag = f"｜DSML｜{' ' if calls.style == 'deepseek_v4_1_xml' else ''}parameter"
    return lambda key, raw, whole: (
        f'<{tag} name="{key}" string="{str(_is_text(raw)).lower()}">{_plain(raw, whole)}'
        + (f"</{tag}>\n" if whole else "")
    )


def _xtml(_: CallSyntax) -> Write:
    kinds = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
    return lambda key, raw, whole: (
        f'<|open|>argument key="{_attribute(key)}" type="{kinds.get(raw[0], "number")}"<|sep|>'
        f"{_plain(raw, whole)}" + ("<|close|>argument<|sep|>" if whole else "")
    )


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _gemma(raw: str) -> str:
    """JSON in Gemma's notation."""
    out, at = ["{"] if not raw else [], 0
    for found in _STRING.finditer(raw):
        out.append(_BLANKS.sub("", raw[at : found.start()]))
        at = found.end()
        whole = bool(found.group("end"))
        said = _plain(found.group(), whole)
        key = whole and _COLON.match(raw, at)
        out.append(said if key else f'<|"|>{said}' + ('<|"|>' if whole else ""))
    return "".join([*out, _BLANKS.sub("", raw[at:])])


_STYLES: dict[Style, Callable[[CallSyntax], Write]] = {
    "qwen_xml": _qwen,
    "glm_xml": _glm,
    "deepseek_xml": _dsml,
    "deepseek_v4_1_xml": _dsml,
    "kimi_k3_xml": _xtml,
}
