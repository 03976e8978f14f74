"""Forced calls over SmolLM2's real vocabulary: whatever the model says, the arguments are valid."""

import json
from array import array

import numpy as np
import pytest
import torch

from agentserve.core.plan import SampleSpec
from agentserve.executor.sampler import Sampler
from agentserve.types import Sampling, SessionId, TurnId
from kernels.ops import Logits
from tests.reply_rig import read
from tests.smollm2_vocabulary import smollm2_vocabulary
from tools_bridge.grammar import ToolChoice, reply_grammar
from tools_bridge.registry import DEFAULT_FORM
from tools_bridge.source_compiler import SourceCompiler
from tools_bridge.types import ToolSpec

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def vocabulary():
    return smollm2_vocabulary()


TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "unit": {"enum": ["celsius", "fahrenheit", None]},
        "stops": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
        "inner": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}


def check_trip(value):
    assert set(value) <= set(TRIP["properties"])
    assert {"city", "days", "unit"} <= set(value)
    assert isinstance(value["city"], str)
    assert len(value["city"]) <= 12
    assert type(value["days"]) is int
    assert 1 <= value["days"] <= 30
    assert value["unit"] in ("celsius", "fahrenheit", None)
    stops = value.get("stops", [])
    assert len(stops) <= 3
    assert all(isinstance(stop, str) and len(stop) <= 5 for stop in stops)
    inner = value.get("inner", {"ok": True})
    assert list(inner) == ["ok"]
    assert isinstance(inner["ok"], bool)


TOOLS = [ToolSpec("plan_trip", TRIP), ToolSpec("now")]


def generate(sampler, grammar, vocab_size, eos, seed, temperature, limit=3000):
    tokens, rng = array("i", [1]), np.random.default_rng(seed)
    sampling = Sampling(temperature=temperature, seed=seed, grammar=grammar)
    while len(tokens) <= limit:
        logits = torch.from_numpy(rng.normal(size=(1, vocab_size)).astype(np.float32))
        spec = SampleSpec(sampling, tokens, 1, len(tokens))
        result = sampler.sample(Logits.of(logits), [(SessionId("s"), TurnId(seed + 1), spec)])[0]
        tokens.append(result.token)
        if result.ended:
            return tokens[1:-1] if result.token == eos else tokens[1:]
    raise AssertionError(f"no end after {limit} tokens")


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e6])
def test_forced_calls_are_always_valid(vocabulary, parallel, temperature):
    data, eos = vocabulary
    source = reply_grammar(TOOLS, ToolChoice("required"), parallel=parallel)
    sampler = Sampler(len(data), data, [eos])
    sampler.define_grammar("g", SourceCompiler(data, len(data), [eos]).compile(source))
    names = set()
    for seed in range(15):
        tokens = generate(sampler, "g", len(data), eos, seed, temperature)
        text = b"".join(data[token] for token in tokens).decode("utf-8")  # whole characters, too
        parsed = read(DEFAULT_FORM.parser(), [text])
        assert parsed.content == ""
        assert parsed.calls
        assert parallel or len(parsed.calls) == 1
        for call in parsed.calls:
            assert call.complete
            names.add(call.name)
            if call.name == "plan_trip":
                check_trip(json.loads(call.arguments))
            else:
                assert json.loads(call.arguments) == {}
    assert names == {"plan_trip", "now"}
