"""Traces of the experiment: what is drawn, what is loaded, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentserve.sim.experiment.loaders import load, mooncake, table
from agentserve.sim.experiment.script import Trace, TraceError, arrivals
from agentserve.sim.experiment.synthetic import K, draw

VOCAB = 1000


def prompt(trace: Trace, session: int) -> list[int]:
    return list(trace.sessions[session].turns[0].tokens(VOCAB))


def test_the_lengths_are_those_of_the_source_text() -> None:
    chat, long = draw("chat", 3).sessions[0], draw("long", 3).sessions[0]
    assert [(turn.fresh, turn.output) for turn in chat.turns] == [(1024, 128)]
    assert [(turn.fresh, turn.output) for turn in long.turns] == [(64 * K, 128)]
    agent = draw("agents", 3).sessions[0]
    assert len(agent.turns) == 20
    assert agent.turns[0].fresh == 80 * K
    assert all(turn.fresh + turn.output == K for turn in agent.turns[1:])
    assert agent.longest == 80 * K + 128 + 19 * K


def test_waits_of_agents_lie_between_a_tenth_and_ten_seconds_evenly_in_the_logarithm() -> None:
    waits = sorted(turn.wait for session in draw("agents", 50).sessions for turn in session.turns)
    assert 0.1 <= waits[0] < 0.11
    assert 9.0 < waits[-1] <= 10.0
    assert waits[len(waits) // 2] == pytest.approx(1.0, rel=0.15)


def test_agents_share_a_beginning_and_nothing_else() -> None:
    trace = draw("agents", 2, scale=1 / 64)
    one, other = prompt(trace, 0), prompt(trace, 1)
    assert one[:64] == other[:64]
    assert one[64:128] != other[64:128]


def test_the_same_seed_is_the_same_trace_and_a_shorter_one_its_beginning() -> None:
    assert draw("mix", 40, seed=3) == draw("mix", 40, seed=3)
    assert draw("mix", 40, seed=3).digest != draw("mix", 40, seed=4).digest
    assert draw("mix", 40, seed=3).sessions[:7] == draw("mix", 7, seed=3).sessions


def test_the_mix_has_all_kinds_and_tenants() -> None:
    trace = draw("mix", 1000, scale=1 / 64)
    assert {session.kind for session in trace.sessions} == {"chat", "long", "agents"}
    assert {session.tenant for session in trace.sessions} == set(trace.weights)


def test_arrivals_come_at_the_rate_that_is_asked_for() -> None:
    trace = draw("chat", 2000)
    slow, fast = arrivals(trace, 2.0), arrivals(trace, 8.0)
    assert slow[-1] == pytest.approx(1000.0, rel=0.1)
    assert fast == pytest.approx([time / 4 for time in slow])
    with pytest.raises(TraceError, match="above 0"):
        arrivals(trace, 0.0)


def test_scaling_multiplies_all_lengths_and_says_so() -> None:
    turn = draw("long", 1, scale=1 / 16).sessions[0].turns[0]
    assert (turn.fresh, turn.output) == (4096, 8)
    assert draw("long", 1, scale=1 / 16).title == "long, lengths x 0.0625"
    assert draw("chat", 1, scale=1e-6).sessions[0].turns[0].output == 1
    with pytest.raises(TraceError, match="at most 1"):
        draw("long", 1, scale=2.0)
    with pytest.raises(TraceError, match="there are: chat, long, agents, mix"):
        draw("longer", 1)


# --- Mooncake ---------------------------------------------------------------------------------

MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 3]}
{"timestamp": 2000, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 9]}

{"timestamp": 8000, "input_length": 600, "output_length": 5, "hash_ids": [8, 2]}
"""


def test_mooncakes_equal_ids_are_equal_text_and_its_times_are_kept() -> None:
    trace = mooncake(MOONCAKE, "conversation.jsonl")
    assert [session.turns[0].fresh for session in trace.sessions] == [1100, 1500, 600]
    assert [session.turns[0].output for session in trace.sessions] == [20, 5, 5]
    one, other, third = (prompt(trace, number) for number in range(3))
    assert one[:1024] == other[:1024]
    assert one[1024:1100] != other[1024:1100]
    assert third[:512] != one[:512]
    assert third[512:600] == one[512:600]
    assert trace.own_rate == pytest.approx(2 / 8)
    assert arrivals(trace, 0.25) == pytest.approx([0.0, 2.0, 8.0])


def test_a_scaled_mooncake_trace_still_shares() -> None:
    trace = mooncake(MOONCAKE, "t.jsonl", scale=1 / 8)
    assert [session.turns[0].fresh for session in trace.sessions] == [64 + 64 + 10, 64 + 64 + 60, 64 + 11]
    assert prompt(trace, 0)[:128] == prompt(trace, 1)[:128]


def test_mooncake_requests_without_ids_share_nothing() -> None:
    line = '{"timestamp": 5, "input_length": 700, "output_length": 2}\n'
    trace = mooncake(line * 2, "t.jsonl")
    assert prompt(trace, 0) != prompt(trace, 1)
    assert len(prompt(trace, 0)) == 700


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: .*JSON|line 1: Input data was truncated"),
        ('{"timestamp": 0, "input_length": 5}', "line 1: .*output_length"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 5}', "line 1: input_length: expected 1 to"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 99999999}', "output_length: expected 1 to"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [1]}',
            "1 hash_ids, but 513 tokens are 2 blocks of 512",
        ),
        ('{"timestamp": "x", "input_length": 5, "output_length": 5}', "line 1: .*timestamp"),
    ],
)
def test_a_bad_line_of_mooncakes_is_named(line: str, said: str) -> None:
    with pytest.raises(TraceError, match=said) as caught:
        mooncake(line + "\n", "t.jsonl")
    assert "\n" not in str(caught.value)


def test_mooncake_times_must_not_go_back() -> None:
    lines = [f'{{"timestamp": {at}, "input_length": 5, "output_length": 5}}' for at in (7, 3)]
    with pytest.raises(TraceError, match="line 2: its timestamp is before"):
        mooncake("\n".join(lines), "t.jsonl")


# --- CSV --------------------------------------------------------------------------------------

CSV = """\
arrival_s,input_tokens,output_tokens,tenant,session,wait_s,prefix,prefix_tokens
0,300,10,red,s1,,system,200
1,400,10,blue,s2,,system,200
0,50,20,,s1,2.5,,
4,10,1,blue,,,,
"""


def test_a_table_has_sessions_tenants_waits_and_shared_beginnings() -> None:
    trace = table(CSV, "t.csv", weights={"red": 3.0})
    assert [session.name for session in trace.sessions] == ["s1", "s2", "line 5"]
    assert [session.tenant for session in trace.sessions] == ["red", "blue", "blue"]
    assert trace.weights == {"red": 3.0, "blue": 1.0}
    first, second = trace.sessions[0].turns
    assert (first.fresh, first.output, first.wait) == (300, 10, 2.5)
    assert (second.fresh, second.output, second.wait) == (50, 20, 0.0)
    assert prompt(trace, 0)[:200] == prompt(trace, 1)[:200]
    assert prompt(trace, 0)[200:300] != prompt(trace, 1)[200:300]
    assert trace.own_rate == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "its header lacks arrival_s, input_tokens, output_tokens"),
        ("arrival_s,input_tokens\n", "its header lacks output_tokens"),
        ("arrival_s,input_tokens,output_tokens,model\n", "unknown column 'model'"),
        ("arrival_s,input_tokens,output_tokens,tenant,tenant\n", "stands twice"),
        ("arrival_s,input_tokens,output_tokens\n", "no request in it"),
        ("arrival_s,input_tokens,output_tokens\n0,5\n", "line 2: 2 cells, but the header has 3"),
        ("arrival_s,input_tokens,output_tokens\n0,five,5\n", "line 2: input_tokens: expected a whole number"),
        (
            "arrival_s,input_tokens,output_tokens\n-1,5,5\n",
            "line 2: arrival_s: expected a number of at least",
        ),
        ("arrival_s,input_tokens,output_tokens\nnan,5,5\n", "line 2: arrival_s"),
        ("arrival_s,input_tokens,output_tokens\n3,5,5\n2,5,5\n", "line 3: it arrives before"),
        (
            "arrival_s,input_tokens,output_tokens,session,tenant\n0,5,5,a,red\n0,5,5,a,blue\n",
            "line 3: session a is of tenant red",
        ),
        (
            "arrival_s,input_tokens,output_tokens,prefix,prefix_tokens\n0,5,5,p,6\n",
            "line 2: prefix_tokens 6 of only 5",
        ),
        ('arrival_s,input_tokens,output_tokens\n0,5,"5\n', "line 2"),
    ],
)
def test_a_bad_table_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(TraceError, match=said) as caught:
        table(text, "t.csv")
    assert "\n" not in str(caught.value)


def test_files_are_known_by_their_ending(tmp_path: Path) -> None:
    for name, text in (("m.jsonl", MOONCAKE), ("t.csv", CSV)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert load(tmp_path / name, scale=0.5).name == name
    (tmp_path / "t.txt").write_text(CSV, encoding="utf-8")
    with pytest.raises(TraceError, match=r"\.jsonl \(Mooncake\) or \.csv"):
        load(tmp_path / "t.txt")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="no UTF-8"):
        load(tmp_path / "b.csv")
