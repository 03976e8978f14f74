"""Standard Webhooks 1.0.0: what is signed, by which secrets, and whether a signature is right.

A signature is HMAC-SHA256 over `id.timestamp.body`, of the bytes that are sent
(github.com/standard-webhooks/standard-webhooks, spec/standard-webhooks.md).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence

import msgspec

PREFIX = "whsec_"
LEAST_KEY, MOST_KEY = 24, 64  # bytes
TOLERANCE = 300.0  # seconds between the sender's clock and ours
MOST_SECRETS = 4  # of one endpoint, while they are exchanged
MOST_SIGNATURES = 16  # that are looked at
_MOST_HEADER = 4096  # characters
_EVENT_ID = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")  # a dot would make what is signed ambiguous


class BadSignature(Exception):
    """In one line, without any of the secret."""


class Secret(msgspec.Struct, frozen=True):
    """`text` as its owner has it, `whsec_…`. It signs until `until`; None: until it is exchanged."""

    text: str
    until: float | None = None

    def __repr__(self) -> str:
        return f"Secret({hint(self.text)}, until={self.until})"

    def active(self, now: float) -> bool:
        return self.until is None or now < self.until


def make_secret(key: bytes) -> str:
    """`key`: random bytes. ValueError if they are too few or too many."""
    if not LEAST_KEY <= len(key) <= MOST_KEY:
        raise ValueError(f"a signing key has {LEAST_KEY} to {MOST_KEY} bytes, not {len(key)}")
    return PREFIX + base64.b64encode(key).decode("ascii")


def key_of(secret: str) -> bytes:
    """ValueError where it is not `whsec_` and base64 of 24 to 64 bytes."""
    if not secret.startswith(PREFIX):
        raise ValueError(f"a signing secret begins with {PREFIX}")
    try:
        text = secret[len(PREFIX) :].rstrip("=")
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("a signing secret is base64") from None
    if not LEAST_KEY <= len(key) <= MOST_KEY:
        raise ValueError(f"a signing secret has {LEAST_KEY} to {MOST_KEY} bytes, not {len(key)}")
    return key


def hint(secret: str) -> str:
    """What may be shown of it: enough to tell two apart."""
    return f"{PREFIX}…{secret.rstrip('=')[-4:]}"


def active(secrets: Sequence[Secret], now: float) -> tuple[Secret, ...]:
    """Those that sign now, the newest first."""
    return tuple(secret for secret in secrets if secret.active(now))


def rotated(secrets: Sequence[Secret], new: str, now: float, keep: float) -> tuple[Secret, ...]:
    """`new` signs from now on; those that did so far, for `keep` seconds more, or as long as they had."""
    key_of(new)
    until, before = now + keep, active(secrets, now)
    kept = [Secret(old.text, until if old.until is None else min(old.until, until)) for old in before]
    return (Secret(new), *(old for old in kept if old.active(now)))[:MOST_SECRETS]


def signed(secrets: Sequence[Secret], event: str, at: float, body: bytes) -> dict[str, str]:
    """The three headers of an attempt made at `at`, by the receiver's clock as far as is known; `secrets`
    are active, by ours. ValueError: none is, or an id that cannot be signed."""
    check_event_id(event)
    keys = [key_of(secret.text) for secret in secrets]
    if not keys:
        raise ValueError("no secret is active")
    stamp = str(int(at))
    signatures = " ".join("v1," + base64.b64encode(_mac(key, event, stamp, body)).decode() for key in keys)
    return {"webhook-id": event, "webhook-timestamp": stamp, "webhook-signature": signatures}


def verify(
    secrets: Sequence[str], headers: Mapping[str, str], body: bytes, now: float, tolerance: float = TOLERANCE
) -> str:
    """The id of the event. BadSignature. Any of `secrets` will do."""
    found = {name.lower(): value for name, value in headers.items()}
    try:
        event, stamp = found["webhook-id"], found["webhook-timestamp"]
        signatures = found["webhook-signature"]
    except KeyError as missing:
        raise BadSignature(f"the header {missing.args[0]} is missing") from None
    if len(event) > _MOST_HEADER or len(signatures) > _MOST_HEADER or "." in event:
        raise BadSignature("the headers are not those of a webhook")
    if not re.fullmatch(r"[0-9]{1,12}", stamp):
        raise BadSignature("webhook-timestamp is not a number of seconds")
    if abs(now - int(stamp)) > tolerance:
        raise BadSignature(f"webhook-timestamp is more than {tolerance:g} s from the time here")
    given = [_decoded(part[3:]) for part in signatures.split(" ")[:MOST_SIGNATURES] if part.startswith("v1,")]
    wanted = [_mac(key_of(secret), event, stamp, body) for secret in secrets]
    # Every pair is compared: how long that takes says nothing.
    same = [hmac.compare_digest(one, other) for one in given for other in wanted]
    if not any(same):
        raise BadSignature("no signature is right")
    return event


def check_event_id(event: str) -> None:
    if not _EVENT_ID.match(event):
        raise ValueError("an event id has 1 to 128 letters, digits, '_' and '-'")


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _mac(key: bytes, event: str, stamp: str, body: bytes) -> bytes:
    return hmac.digest(key, f"{event}.{stamp}.".encode() + body, hashlib.sha256)
