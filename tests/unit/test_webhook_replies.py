"""What an answer means."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools_bridge.webhooks.replies import Again, Answered, Failed, Fault, Gone, Never, Taken, judge
from tools_bridge.webhooks.types import Kind, ToolResult, Why

JSON = "application/json"


def tool(body, status=200, content_type=JSON, encoding=""):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return judge(Kind.TOOL, Answered(status, None, content_type, encoding, body), 0.0)


@pytest.mark.parametrize("status", range(100, 600))
def test_only_2xx_is_success(status):
    verdict = judge(Kind.LIFECYCLE, Answered(status), 0.0)
    assert isinstance(verdict, Taken) == (200 <= status < 300)
    assert isinstance(verdict, Gone) == (status == 410)
    if isinstance(verdict, Again):
        assert bool(verdict.pause) == (status in (429, 502, 504))
        assert verdict.counts == (status != 429)
        assert ("redirect" in verdict.error) == (300 <= status < 400)
    assert judge(Kind.TOOL, Answered(status, content_type="text/html", body=b""), 0.0) == verdict


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 301])
def test_a_receiver_says_when_to_come_back(status):
    verdict = judge(Kind.TOOL, Answered(status, retry_after="17"), 0.0)
    assert verdict.pause == 17


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ({"output": "4 degrees"}, ToolResult(True, "4 degrees")),
        ({"output": ""}, ToolResult(True, "")),
        ({"output": None}, ToolResult(True, "")),
        ({"output": {"t": 4}}, ToolResult(True, '{"t":4}')),
        ({"output": [1, "ü"]}, ToolResult(True, '[1,"ü"]')),
        ({"output": []}, ToolResult(True, "[]")),
        ({"output": 4.5}, ToolResult(True, "4.5")),
        ({"output": False}, ToolResult(True, "false")),
        (
            {"output": [{"type": "input_text", "text": "x"}], "call_id": "c", "more": {}},
            ToolResult(True, [{"type": "input_text", "text": "x"}]),
        ),
        ({"success": False, "error": "no such city"}, ToolResult(False, "", "no such city")),
        ({"success": False}, ToolResult(False, "", "")),
        ({"success": False, "output": "half", "error": "x" * 9999}, ToolResult(False, "half", "x" * 4096)),
        ({"success": True, "output": "x", "error": None}, ToolResult(True, "x")),
    ],
)
def test_results(body, result):
    assert tool(body) == Taken(result)
    assert tool(body, 201, "Application/Problem+JSON; charset=utf-8", "Identity") == Taken(result)
    msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=ToolResult)


@pytest.mark.parametrize(
    ("body", "status"), [(b"", 200), (b" \r\n", 200), (b"", 201), (b"x", 202), (b"", 204)]
)
def test_the_result_comes_later(body, status):
    assert tool(body, status, "text/plain") == Taken(None)


@pytest.mark.parametrize(
    "body",
    [
        *({}, [], "ok", 1, None, {"status": "ok"}, {"success": True}, {"output": "x", "error": "y"}),
        *({"output": "x", "success": "yes"}, {"error": {"a": 1}}, {"error": "x"}),
        *(b"ok", b"{", b'{"output": "\xff"}', b'{"output": "x"} x', b"\xff\xfe{\0}\0"),
        *(
            b'{"output": "\\ud800"}',
            b'{"output": {"a": "\\udfff"}}',
            b'{"success": false, "error": "\\ud800"}',
        ),
        b'{"output": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"output": NaN}',
    ],
)
def test_garbage_is_a_defined_failure_that_does_not_repeat_it(body):
    verdict = tool(body)
    assert isinstance(verdict, Never)
    assert verdict.why is Why.BAD_REPLY
    assert len(verdict.error) < 200


@pytest.mark.parametrize(
    "media", ["", "text/html", "text/plain; x=application/json", "json", "application/xml"]
)
def test_only_json_is_a_result(media):
    assert tool({"output": "x"}, content_type=media).why is Why.BAD_REPLY


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "x"])
def test_nothing_is_unpacked(encoding):
    assert tool({"output": "x"}, encoding=encoding).why is Why.BAD_REPLY


@given(st.binary(max_size=200), st.sampled_from([JSON, "text/plain"]), st.integers(100, 599), st.text())
def test_any_answer_means_something(body, media, status, retry):
    verdict = judge(Kind.TOOL, Answered(status, retry, media, "", body), 0.0)
    assert isinstance(verdict, Taken | Again | Never | Gone)


@pytest.mark.parametrize("fault", Fault)
def test_no_reply_is_tried_again_but_for_what_stays_so(fault):
    event, call = (judge(kind, Failed(fault, "why", 200), 0.0) for kind in (Kind.LIFECYCLE, Kind.TOOL))
    assert isinstance(event, Again)
    never = {Fault.REFUSED: Why.ADDRESS_REFUSED, Fault.TOO_LARGE: Why.BAD_REPLY}
    if fault in never:
        assert call.why is never[fault]
    else:
        assert isinstance(call, Again)
