"""What is sent is accepted by the verifiers that people have, and nothing else is."""

import datetime
import json
import time

import pytest

from tools_bridge.webhooks.signing import Secret, make_secret, rotated, signed, verify

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
standardwebhooks = pytest.importorskip("standardwebhooks")

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


def unwrap_standard(secret, headers):
    return standardwebhooks.Webhook(secret).verify(BODY, headers)


def unwrap_openai(secret, headers):
    return openai.OpenAI(api_key="x", webhook_secret=secret).webhooks.unwrap(BODY, headers).to_dict()


def unwrap_anthropic(secret, headers):
    client = anthropic.Anthropic(api_key="x")
    return client.beta.webhooks.unwrap(BODY.decode(), headers=headers, key=secret).to_dict()


VERIFIERS = [unwrap_standard, unwrap_openai, unwrap_anthropic]


@pytest.mark.parametrize("size", [24, 32, 63, 64])
@pytest.mark.parametrize("unwrap", VERIFIERS)
def test_all_verifiers_accept_it(unwrap, size):
    secret = make_secret(bytes(range(size)))
    assert unwrap(secret, signed([Secret(secret)], "evt_1", time.time(), BODY))["id"] == "evt_1"


@pytest.mark.parametrize("unwrap", VERIFIERS)
def test_while_secrets_are_exchanged_either_will_do(unwrap):
    now = time.time()
    secrets = rotated([Secret(OLD)], NEW, now, keep=60)
    headers = signed(secrets, "evt_1", now, BODY)
    assert unwrap(OLD, headers)
    assert unwrap(NEW, headers)
    with pytest.raises(Exception, match=r"signature"):
        unwrap(OTHER, headers)


@pytest.mark.parametrize("unwrap", VERIFIERS)
def test_none_accepts_what_was_changed_or_is_old(unwrap):
    now = time.time()
    for headers in (
        signed([Secret(NEW)], "evt_1", now, BODY + b" "),
        signed([Secret(NEW)], "evt_1", now, BODY) | {"webhook-id": "evt_2"},
        signed([Secret(NEW)], "evt_1", now - 400, BODY),
        signed([Secret(NEW)], "evt_1", now + 400, BODY),
    ):
        with pytest.raises(Exception, match=r"(?i)signature|time"):
            unwrap(NEW, headers)


def test_we_accept_what_the_package_signs():
    stamp = datetime.datetime.fromtimestamp(1_800_000_000, tz=datetime.UTC)
    made = standardwebhooks.Webhook(NEW).sign("evt_1", stamp, BODY.decode())
    headers = {"Webhook-Id": "evt_1", "Webhook-Timestamp": "1800000000", "Webhook-Signature": made}
    assert verify([OLD, NEW], headers, BODY, 1_800_000_100) == "evt_1"
    assert (
        headers["Webhook-Signature"]
        == signed([Secret(NEW)], "evt_1", 1_800_000_000.9, BODY)["webhook-signature"]
    )
