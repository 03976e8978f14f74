"""Bodies that are no JSON, too large, too deep or too full: refused before anything is made of them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.server.errors import ApiError
from agentserve.server.limits import Limits, check_depth
from tests.api_rig import CHAT, Rig, user


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"messages": NaN}', b'{"messages":[{"role":"\\ud800"}]}'],
)
async def test_a_body_that_is_no_json_object_is_a_400(body: bytes) -> None:
    reply = await Rig().post(CHAT, body)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_over_the_limit_is_a_413() -> None:
    rig = Rig(limits=Limits(body_bytes=1000))
    reply = await rig.post(CHAT, {"messages": [user("x" * 1000)]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")

    async def parts():
        for _ in range(100):
            yield b"x" * 100

    reply = await rig.client.post(CHAT, content=parts())
    assert reply.status_code == 413


def nested(depth: int) -> Any:
    value: Any = '[{\\"' * 3
    for i in range(depth):
        value = [value] if i % 2 else {"k]}": value}
    return value


@given(st.integers(0, 40), st.integers(1, 40))
def test_depth_is_measured_outside_strings(depth: int, limit: int) -> None:
    body = json.dumps(nested(depth)).encode()
    if depth > limit:
        with pytest.raises(ApiError):
            check_depth(body, limit)
    else:
        check_depth(body, limit)


def test_brackets_that_never_close_count_too() -> None:
    with pytest.raises(ApiError):
        check_depth(b"[" * 41, 40)
    check_depth(b"[" * 40, 40)  # not too deep; what else is wrong with it the decoder says


@pytest.mark.parametrize("body", [b"[" * 100_000, b"{" * 100_000, b'{"a":' * 50_000, b"[" * 200 + b"]" * 200])
async def test_deep_nesting_is_refused(body: bytes) -> None:
    reply = await Rig().post(CHAT, body)
    assert reply.status_code == 400


def test_the_work_of_measuring_depth_does_not_grow_with_depth() -> None:
    """One pass: a body that is large and deep must not hold up everybody else."""

    def calls(body: bytes) -> int:
        count = 0

        def on_event(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(on_event)
        try:
            check_depth(body, 100)
        finally:
            sys.setprofile(None)
        return count

    deep = b"[" * 100 + b"]" * 100
    assert calls(b"[" + deep[1:-1] * 40 + b"]") == calls(b"[" + b"[]" * 4000 + b"]")


@pytest.mark.parametrize("before", [41, *range((1 << 18) - 6, (1 << 18) + 2)])
def test_depth_and_strings_go_on_from_one_block_to_the_next(before: int) -> None:
    """`before`: brackets in front of a string full of them; a block has 1 << 18 of brackets and quotes."""
    depth = 40 + before % 2
    for inside in (b'"]}[[[["', b'"[[\\\\"', b'"[[\\"[["'):
        body = b"[" * depth + b"{}," * ((before - depth) // 2) + inside + b"]" * depth
        check_depth(body, depth + 1)
        with pytest.raises(ApiError):
            check_depth(body.replace(inside, inside + b"[["), depth + 1)


async def test_bodies_of_4_mib_by_default() -> None:
    rig = Rig()
    fields = {"messages": [user("a")], "metadata": {"a": "x" * ((4 << 20) - 200)}}
    assert (await rig.post(CHAT, fields)).status_code == 200
    fields["metadata"]["a"] += "x" * 200  # type: ignore[index]
    assert (await rig.post(CHAT, fields)).status_code == 413


@pytest.mark.parametrize("pair", [b"[]", b"{}", b'{"[{":[]}'])
def test_lists_and_objects_are_counted_before_they_are_made(pair: bytes) -> None:
    most = 300_000  # more than one block has
    each = pair.count(b":") + 1
    check_depth(b"[" + b",".join([pair] * ((most - 1) // each)) + b"]", 3, most)
    with pytest.raises(ApiError, match="more than 300000"):
        check_depth(b"[" + b",".join([pair] * (most // each)) + b"]", 3, most)


async def test_a_body_of_empty_lists_is_refused() -> None:
    body = b'{"messages":[{"role":"user","content":[' + b"[]," * 100_000 + b"[]]}]}"
    reply = await Rig().post(CHAT, body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "json_too_large")
