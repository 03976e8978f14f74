"""Callback tokens: each is for one call, and nobody can make one."""

import base64

import msgspec
import pytest

from tools_bridge.webhooks.callback import Call, CallbackTokens

KEY = bytes(range(32))
CALL = Call("sess_1", "call_1", 3)


def test_a_token_names_its_call_also_after_a_restart():
    token = CallbackTokens(KEY).issue(CALL)
    again = CallbackTokens(bytes(KEY))
    assert again.read(token) == CALL
    assert again.is_for(token, CALL)
    assert again.issue(CALL) == token
    assert set(token) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")


def test_it_is_for_no_other_call():
    tokens = CallbackTokens(KEY)
    token = tokens.issue(CALL)
    for other in (CALL._replace(session="sess_2"), CALL._replace(call_id="call_2"), CALL._replace(epoch=4)):
        assert not tokens.is_for(token, other)
        assert tokens.issue(other) != token
    # Where one name ends and the next begins is part of what is signed.
    assert tokens.issue(Call("a", "bc", 1)).split(".")[1] != tokens.issue(Call("ab", "c", 1)).split(".")[1]


def test_no_change_of_a_token_is_one():
    tokens = CallbackTokens(KEY)
    token = tokens.issue(CALL)
    for at in range(len(token)):
        for other in "Aa0-_.=~ü\0":
            if other != token[at]:
                assert tokens.read(token[:at] + other + token[at + 1 :]) is None
        assert tokens.read(token[:at]) is None
        assert tokens.read(token[:at] + token[at + 1 :]) is None
    for other in (token + "=", token + "A", "=" + token, token + ".", f" {token}", token + "\n", token * 50):
        assert tokens.read(other) is None


def test_no_key_no_token():
    said = msgspec.msgpack.encode(CALL)
    token = CallbackTokens(bytes(32)).issue(CALL)
    assert CallbackTokens(KEY).read(token) is None
    unsigned = base64.urlsafe_b64encode(said).decode().rstrip("=")
    for forged in (unsigned, unsigned + ".", f"{unsigned}.{unsigned}", ".", "", "..", f".{unsigned}"):
        assert CallbackTokens(KEY).read(forged) is None


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_key_has_32_bytes(size):
    with pytest.raises(ValueError, match="32 bytes"):
        CallbackTokens(bytes(size))


def test_names_that_are_too_long():
    with pytest.raises(ValueError, match="too long"):
        CallbackTokens(KEY).issue(Call("s" * 1000, "c", 0))
