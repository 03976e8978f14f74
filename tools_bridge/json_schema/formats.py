"""Formats of strings that are held, as patterns where xgrammar's own are wider than the standards.

`DATE` knows how long months are, and leap years. Names that JSON Schema does not know (`int32`,
`password`) are annotations, as it says.
"""

from __future__ import annotations

_LEAP = r"([02468][048]|[13579][26])"  # two digits that four divides
_YEAR = r"\d{4}"
_LEAP_YEAR = rf"(\d{{2}}(0[48]|[2468][048]|[13579][26])|{_LEAP}00)"
DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_HEX = "[0-9a-fA-F]"
_PCHAR = r"([A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})"
_SEGMENT = _PCHAR.replace(":", "")
_TAIL = rf"(\?({_PCHAR}|[/?])*)?(#({_PCHAR}|[/?])*)?"
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*"
_HOST = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?"
_AUTHORITY = rf"{_HOST}(:\d{{1,4}})?"

PATTERNS = {
    "date": DATE,
    "time": TIME,
    "date-time": rf"{DATE}T{TIME}",
    "duration": r"P(\d+W|(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)(T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S))?"
    r"|T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S))",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL}){{0,3}}",
    "hostname": r"[A-Za-z]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?){0,2}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": rf"({_HEX}{{1,4}}(:{_HEX}{{1,4}}){{7}}|{_HEX}{{1,4}}(:{_HEX}{{1,4}}){{0,4}}::{_HEX}{{1,4}}"
    rf"|::({_HEX}{{1,4}}(:{_HEX}{{1,4}}){{0,5}})?|{_HEX}{{1,4}}(:{_HEX}{{1,4}}){{0,5}}::)",
    "uri": rf"{_SCHEME}:(//{_AUTHORITY}(/{_PCHAR}*)*|{_PCHAR}+(/{_PCHAR}*)*){_TAIL}",
    "uri-reference": rf"({_SCHEME}://{_AUTHORITY}(/{_PCHAR}*)*|/?({_SEGMENT}+(/{_PCHAR}*)*)?){_TAIL}",
    "uri-template": r"([A-Za-z0-9\-._~:/?#@!$&()*+,;=]|%[0-9A-Fa-f]{2}|\{[A-Za-z0-9_]+\})*",
    "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "json-pointer": r"(/([^\u0000-\u001f\u007f-\uffff/~]|~[01])*)*",
    "relative-json-pointer": r"(0|[1-9]{1,4})(#|(/([^\u0000-\u001f\u007f-\uffff/~]|~[01])*)*)",
}
WHOLE = frozenset({"date", "ipv4", "uuid"})
"""Formats whose patterns take all that the standard does."""
UNHELD = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "regex"})
"""Formats of the standard that are refused."""

SHORT = {
    "uri": r"https?://[A-Za-z0-9]([A-Za-z0-9.-]{0,60}[A-Za-z0-9])?(/[A-Za-z0-9._~/?=&+:@-]*)?",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)?@[A-Za-z0-9]([A-Za-z0-9-]{0,20}[A-Za-z0-9])?\.[a-z]{2,3}",
}
"""Forms that leave more of a bounded length to what matters."""
