"""Signatures and secrets. That the verifiers that people have accept them: `test_webhook_verifiers.py`."""

import base64
import json

import pytest

from tools_bridge.webhooks.signing import (
    BadSignature,
    Secret,
    active,
    hint,
    key_of,
    make_secret,
    rotated,
    signed,
    verify,
)

BODY = json.dumps(
    {
        "id": "evt_1",
        "object": "event",
        "type": "agent.session.idle",
        "created_at": 1,
        "data": {"id": "sess_ü"},
    },
    ensure_ascii=False,
).encode()
OLD, NEW, OTHER = (make_secret(bytes([number]) * 32) for number in (1, 2, 3))


GOOD = signed([Secret(NEW)], "evt_1", 1000.0, BODY)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"webhook-timestamp": "1299"}, "no signature"),
        ({"webhook-timestamp": "1e3"}, "not a number"),
        ({"webhook-timestamp": "١٠٠٠"}, "not a number"),
        ({"webhook-timestamp": "-1000"}, "not a number"),
        ({"webhook-timestamp": "9" * 400}, "not a number"),
        ({"webhook-timestamp": "1301"}, "300 s"),
        ({"webhook-timestamp": "699"}, "300 s"),
        ({"webhook-id": "evt_1.1000"}, "not those"),
        ({"webhook-id": "x" * 5000}, "not those"),
        ({"webhook-signature": "v1," * 5000}, "not those"),
        ({"webhook-signature": ""}, "no signature"),
        ({"webhook-signature": "v1,"}, "no signature"),
        ({"webhook-signature": "v1,!!!"}, "no signature"),
        ({"webhook-signature": GOOD["webhook-signature"].replace("v1,", "v1a,")}, "no signature"),
        ({"webhook-signature": GOOD["webhook-signature"][3:]}, "no signature"),
    ],
)
def test_refused(change, problem):
    with pytest.raises(BadSignature, match=problem):
        verify([NEW], GOOD | change, BODY, 1000.0)


@pytest.mark.parametrize("name", GOOD)
def test_every_header_is_needed(name):
    headers = {other: value for other, value in GOOD.items() if other != name}
    with pytest.raises(BadSignature, match=f"{name} is missing"):
        verify([NEW], headers, BODY, 1000.0)


def test_a_right_signature_is_found_among_others():
    line = "v1a,xx v1,AAAA " + GOOD["webhook-signature"] + " v2,zz"
    assert verify([OLD, NEW], GOOD | {"webhook-signature": line}, BODY, 1000.0) == "evt_1"


@pytest.mark.parametrize("size", [0, 1, 23, 65, 1000])
def test_keys_are_of_24_to_64_bytes(size):
    with pytest.raises(ValueError, match="24 to 64"):
        make_secret(bytes(size))
    with pytest.raises(ValueError, match="24 to 64"):
        key_of("whsec_" + base64.b64encode(bytes(size)).decode())


@pytest.mark.parametrize("text", ["", "secret", "whsec_ü", "whsec_%%%%", "WHSEC_" + "A" * 43])
def test_what_is_no_secret(text):
    with pytest.raises(ValueError):
        key_of(text)


def test_a_secret_without_padding_is_one():
    assert key_of(NEW.rstrip("=")) == key_of(NEW) == bytes([2]) * 32


def test_what_is_shown_of_a_secret_tells_it_from_others_and_little_else():
    secrets = [make_secret(bytes([number]) * 31 + bytes([number + 1])) for number in range(100)]
    assert len({hint(secret) for secret in secrets}) == 100
    for secret in secrets:
        for shown in (hint(secret), repr(Secret(secret)), str([Secret(secret)]), f"{Secret(secret)}"):
            assert secret[6:16] not in shown
            assert key_of(secret).hex() not in shown


def test_rotation_ends_when_it_said():
    secrets = rotated([Secret(OLD)], NEW, now=100.0, keep=50.0)
    assert [secret.text for secret in secrets] == [NEW, OLD]
    for now, count in ((149.9, 2), (150.0, 1)):
        headers = signed(active(secrets, now), "e", 1e9, b"")
        assert len(headers["webhook-signature"].split()) == count
    assert [secret.text for secret in rotated(secrets, OTHER, now=160.0, keep=0.0)] == [OTHER]


def test_an_old_secret_does_not_live_longer_by_another_rotation():
    secrets = rotated(rotated([Secret(OLD)], NEW, 100.0, 50.0), OTHER, 120.0, 1000.0)
    assert secrets == (Secret(OTHER), Secret(NEW, 1120.0), Secret(OLD, 150.0))


def test_many_rotations_keep_few():
    secrets = (Secret(OLD),)
    for number in range(20):
        secrets = rotated(secrets, make_secret(bytes([number]) * 32), 100.0, 1000.0)
    assert len(secrets) == 4


@pytest.mark.parametrize("event", ["", "a.b", "a b", "a\n", "ü", "x" * 129, "a,b"])
def test_ids_that_cannot_be_signed(event):
    with pytest.raises(ValueError, match="event id"):
        signed([Secret(NEW)], event, 0.0, b"")


def test_without_a_secret_nothing_is_sent():
    with pytest.raises(ValueError, match="no secret"):
        signed(active([Secret(NEW, until=5.0)], 5.0), "e", 5.0, b"")
