"""Comparison with servers: what their streams say, and the rates made of it."""

from __future__ import annotations

import pytest

from agentserve.bench.compare.served import BrokenStream, Stream, decode_rate, prefill_rate


def stream(sent: float, *marks: tuple[float, int], prompt: int = 10) -> Stream:
    return Stream(sent, list(marks), prompt_tokens=prompt)


def test_decode_counts_while_all_streams_decode() -> None:
    one = stream(0, (1.0, 1), (2.0, 2), (3.0, 4))
    assert decode_rate([one]) == pytest.approx(3 / 2)  # the first token belongs to the prefill
    other = stream(0, (2.0, 1), (2.5, 2), (3.0, 3), (9.0, 4))
    # From 2.0 (the second one's first token) to 3.0 (the first one's last): 2 tokens each.
    assert decode_rate([one, other]) == pytest.approx(4.0)
    assert decode_rate([one, stream(0, (3.0, 1), (4.0, 2))]) is None
    assert decode_rate([stream(0, (1.0, 5))]) is None


def test_prefill_lasts_until_everyone_has_a_token() -> None:
    assert prefill_rate([stream(1.0, (1.5, 1), prompt=100)]) == pytest.approx(200)
    pair = [stream(1.0, (1.5, 1), prompt=100), stream(1.2, (2.0, 1), prompt=60)]
    assert prefill_rate(pair) == pytest.approx(160)


def test_a_stream_believes_the_running_count() -> None:
    found = Stream(0.0)
    for now, tokens in enumerate((0, 1, 1, 3)):
        details = {"cached_tokens": 2}
        found.heard(now, {"completion_tokens": tokens, "prompt_tokens": 9, "prompt_tokens_details": details})
    found.heard(9, {"completion_tokens": 3, "prompt_tokens": 9, "prompt_tokens_details": None})
    assert found.marks == [(1, 1), (3, 3)]
    assert (found.tokens, found.prompt_tokens, found.cached_tokens) == (3, 9, 0)


def event(tokens: int) -> bytes:
    return b'data: {"choices": [], "usage": {"completion_tokens": %d, "prompt_tokens": 9}}\r\n\r\n' % tokens


def test_events_have_the_time_at_which_they_were_whole() -> None:
    first, second = event(1), event(2)
    pieces = [
        (1.0, b": comment\n" + first),
        (2.0, second[:30]),
        (3.0, second[30:] + event(4)),
        (4.0, b"data: [DONE]\n"),
    ]
    assert Stream.of(0.5, pieces) == Stream(0.5, [(1.0, 1), (3.0, 2), (3.0, 4)], prompt_tokens=9)
    with pytest.raises(BrokenStream, match="broke off"):
        Stream.of(0.5, pieces[:3])
    with pytest.raises(BrokenStream, match="no memory"):
        Stream.of(0.5, [*pieces[:3], (4.0, b'data: {"error": {"message": "no memory"}}\n')])
