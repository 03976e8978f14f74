"""The sampler against a plain oracle: full sorts, probabilities written out, no caching."""

import numpy as np
import pytest
import torch

from agentserve.core.plan import Sampled
from agentserve.executor.draws import uniform
from agentserve.executor.sampler import NotSampled
from agentserve.types import Sampling, SessionId, TurnId
from kernels.ops import Logits
from tests.sampler_rig import EOS, VOCAB, make, one, row, spec


def shifted(logits, sampling, tokens, prompt):
    """Bias and penalties, token by token."""
    out = logits.astype(np.float32).copy()
    for token, bias in sampling.logit_bias.items():
        out[token] += np.float32(bias)
    generated = tokens[prompt:]
    r, f, p = (
        np.float32(x)
        for x in (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    )
    for token in sorted(set(tokens)):
        if r != 1:
            out[token] = out[token] / r if out[token] > 0 else out[token] * r
        count = generated.count(token)
        if count:
            out[token] = out[token] - f * np.float32(count)
            out[token] = out[token] - p
    return out


def distribution(logits, sampling):
    """Probabilities after temperature, top-k, top-p, min-p: full sort, whole vocabulary."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    keep = set(order)
    if sampling.top_k:
        last = scaled[order[min(sampling.top_k, len(order)) - 1]]
        keep = {i for i in order if scaled[i] >= last}
    weight = {i: np.exp(scaled[i] - scaled[order[0]]) for i in order if i in keep}
    total = sum(weight.values())
    if sampling.top_p < 1:
        mass, nucleus = 0.0, []
        for i, w in weight.items():  # in order of likelihood
            if mass >= sampling.top_p * total:
                break
            nucleus.append(i)
            mass += w
        weight = {i: weight[i] for i in nucleus or order[:1]}
    if sampling.min_p:
        weight = {i: w for i, w in weight.items() if w >= sampling.min_p}
    probabilities = np.zeros(len(logits))
    for i, w in weight.items():
        probabilities[i] = w / sum(weight.values())
    return probabilities


KNOBS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB + 9},
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.1, "temperature": 0.8},
    {"top_k": 100, "top_p": 0.95, "temperature": 3.0},
]


@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("ties", [False, True])
def test_the_draw_inverts_the_oracles_distribution(knobs, ties):
    sampler = make()
    for n in range(25):
        sampling = Sampling(seed=n, **knobs)
        logits = row(n, ties)
        probabilities = distribution(logits, sampling)
        edges = np.cumsum(probabilities)
        u = uniform(n, 10)
        token = one(sampler, logits, spec(sampling, list(range(10)), 4)).token
        assert probabilities[token] > 0
        assert edges[token] - probabilities[token] - 1e-12 <= u <= edges[token] + 1e-12


def test_draws_follow_the_distribution():
    logits = np.full(VOCAB, -np.inf, dtype=np.float32)
    logits[[10, 20, 30]] = np.log([0.5, 0.3, 0.2])
    sampler, counts = make(), dict.fromkeys((10, 20, 30), 0)
    for position in range(1, 2001):
        counts[one(sampler, logits, spec(Sampling(seed=5), [9] * position, 1)).token] += 1
    assert abs(counts[10] - 1000) < 90
    assert abs(counts[20] - 600) < 90


@pytest.mark.parametrize(
    "knobs",
    [
        {"logit_bias": {7: 100.0, 8: -100.0}},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"presence_penalty": -1.5, "frequency_penalty": -0.2},
        {
            "repetition_penalty": 1.3,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.9,
            "logit_bias": {5: 2.5},
        },
    ],
)
def test_bias_and_penalties_are_the_oracles(knobs):
    rng = np.random.default_rng(1)
    sampler = make()
    for n in range(30):
        tokens = [int(t) for t in rng.integers(4, 40, size=25)]  # few ids: many repeats
        logits = row(n)
        logits[4:40] += 4  # so that penalised tokens are in play
        greedy = Sampling(temperature=0.0, **knobs)
        expected = shifted(logits, greedy, tokens, 10)
        assert one(sampler, logits, spec(greedy, tokens, 10), turn=n).token == int(expected.argmax())
        drawn = Sampling(seed=n, top_k=30, **knobs)
        token = one(sampler, logits, spec(drawn, tokens, 10), session="d", turn=n).token
        probabilities = distribution(expected, drawn)
        edge = np.cumsum(probabilities)[token]
        assert edge - probabilities[token] - 1e-9 <= uniform(n, 25) <= edge + 1e-9


def test_greedy_takes_the_first_of_equals():
    logits = row(1, ties=True)
    expected = int(np.flatnonzero(logits == logits.max())[0])
    assert one(make(), logits, spec(Sampling(temperature=0.0), [5], 1)).token == expected
    assert one(make(), logits, spec(Sampling(temperature=0.0, logprobs=0), [5], 1)).token == expected


def test_extreme_temperatures_stay_finite():
    logits = row(3)
    for temperature in (1e-300, 1e-9, 1e300):
        token = one(make(), logits, spec(Sampling(temperature=temperature, seed=1), [5], 1)).token
        assert 0 <= token < VOCAB
    assert one(make(), logits, spec(Sampling(temperature=1e-300), [5], 1)).token == int(logits.argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_of_the_raw_distribution(temperature):
    logits = row(4, ties=True)
    exact = logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum())
    sampling = Sampling(temperature=temperature, top_k=2, logit_bias={77: 50.0}, logprobs=12, min_tokens=9)
    result = one(make(), logits, spec(sampling, [5], 1))
    assert result.token == 77
    assert result.logprob == pytest.approx(exact[77])
    best = sorted(range(VOCAB), key=lambda i: (-logits[i], i))[:12]
    assert [i for i, _ in result.top] == best
    assert [p for _, p in result.top] == pytest.approx([exact[i] for i in best])


def test_logprob_counts():
    logits = row(5)
    assert one(make(), logits, spec(Sampling(), [5], 1)).logprob is None
    bare = one(make(), logits, spec(Sampling(logprobs=0), [5], 1))
    assert bare.logprob is not None
    assert bare.top == ()
    everything = one(make(), logits, spec(Sampling(logprobs=VOCAB + 5), [5], 1))
    assert len(everything.top) == VOCAB
    assert sum(np.exp(p) for _, p in everything.top) == pytest.approx(1.0)


def test_no_end_before_min_tokens():
    logits = row(6)
    logits[[EOS, 50]] += 100
    logits[50] += 1
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, min_tokens=3, stop_token_ids=(50,))
        for generated in range(3):
            token = one(make(), logits, spec(sampling, [5] * (2 + generated), 2)).token
            assert token not in (EOS, 50)
        assert one(make(), logits, spec(sampling, [5] * 5, 2)).token in (EOS, 50)


def test_an_ignored_eos_may_be_sampled_at_any_time_and_ends_nothing():
    logits = row(7)
    logits[EOS] += 100
    sampling = Sampling(temperature=0.0, min_tokens=5, ignore_eos=True)
    assert one(make(), logits, spec(sampling, [5], 1)) == Sampled(token=EOS)
    # a stop token that the client names is an end all the same
    named = Sampling(temperature=0.0, min_tokens=5, ignore_eos=True, stop_token_ids=(EOS,))
    assert one(make(), logits, spec(named, [5], 1)).token != EOS


def mixed_requests():
    rng = np.random.default_rng(0)
    samplings = [
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, logprobs=3),
        Sampling(seed=1),
        Sampling(seed=1, top_k=5, top_p=0.8),
        Sampling(seed=2, top_p=0.9, min_p=0.05, logprobs=2),
        Sampling(temperature=0.0, repetition_penalty=1.4),
        Sampling(seed=3, frequency_penalty=0.5, stop=("ab", "x")),
        Sampling(seed=4, min_tokens=50, logit_bias={9: 3.0}),
    ]
    requests = []
    for n in range(24):
        tokens = [int(t) for t in rng.integers(4, VOCAB, size=int(rng.integers(3, 30)))]
        request = spec(samplings[n % len(samplings)], tokens, int(rng.integers(1, len(tokens))))
        requests.append((SessionId(f"s{n}"), TurnId(1), request))
    return requests, rng.normal(size=(24, VOCAB)).astype(np.float32) * 3


def test_a_row_does_not_depend_on_its_batch_mates():
    requests, logits = mixed_requests()
    alone = [make().sample(Logits.of(torch.tensor(logits[i : i + 1])), [requests[i]])[0] for i in range(24)]
    rng = np.random.default_rng(9)
    sampler = make()
    for _ in range(20):
        order = rng.permutation(24)[: int(rng.integers(1, 25))]
        batch = sampler.sample(Logits.of(torch.tensor(logits[order])), [requests[i] for i in order])
        assert batch == [alone[i] for i in order]  # exact, log-probabilities included


def test_threads_do_not_change_a_row():
    requests, logits = mixed_requests()
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(make().sample(Logits.of(torch.tensor(logits)), requests))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]


def test_shapes_are_checked():
    request = (SessionId("s"), TurnId(1), spec(Sampling(), [5], 1))
    with pytest.raises(ValueError, match="2x500 for 1 rows"):
        make().sample(Logits.of(torch.zeros(2, VOCAB)), [request])
    with pytest.raises(ValueError, match="vocabulary of 500"):
        make().sample(Logits.of(torch.zeros(1, VOCAB + 1)), [request])
    assert make().sample(Logits.of(torch.zeros(0, VOCAB)), []) == []


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1e-40),
        Sampling(repetition_penalty=1e-40, top_p=0.9),
        Sampling(repetition_penalty=1e-40, top_k=5),
        Sampling(temperature=0.0, repetition_penalty=1e-40),
        Sampling(logit_bias={7: float("inf")}),
        Sampling(logit_bias={7: float("nan")}),
    ],
)
def test_a_row_whose_logits_leave_float32_fails_alone(sampling):
    logits = np.stack([row(1), np.abs(row(2)) + 1, row(3)])
    requests = [
        (SessionId(name), TurnId(1), spec(settings, [5, 6, 7], 2))
        for name, settings in (("a", Sampling(seed=4)), ("bad", sampling), ("c", Sampling(temperature=0.0)))
    ]
    before, bad, after = make().sample(Logits.of(torch.tensor(logits)), requests)
    assert isinstance(bad, NotSampled)
    assert "finite" in bad.error
    assert before == one(make(), logits[0], requests[0][2])
    assert after == one(make(), logits[2], requests[2][2])


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (IndexError("a\nb"), "IndexError: a"),
        # What the system says of itself is for the log.
        (BrokenPipeError(32, "Broken pipe"), "the turn could not be sampled; the server's log says why"),
    ],
)
def test_a_fault_of_one_row_is_its_own(monkeypatch, caplog, fault, told):
    def broken(values, sampling, u):
        raise fault

    monkeypatch.setattr("agentserve.executor.sampler.draw", broken)
    rows = [(SessionId("a"), TurnId(1), spec(Sampling(temperature=t), [5], 1)) for t in (0.0, 1.0)]
    fine, bad = make().sample(Logits.of(torch.tensor(np.stack([row(1), row(2)]))), rows)
    assert isinstance(fine, Sampled)
    assert bad == NotSampled(told)
    assert "could not be sampled" in caplog.text
