"""What rounding costs on SmolLM2, as bounds: some three times what was measured, and proved able to fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agentserve.bench.quality import (
    BF16_REFERENCE,
    EXACT,
    VARIANTS,
    Finding,
    LeftOut,
    Quality,
    Reader,
    Text,
    Variant,
    kv_dtype,
    measure,
)
from agentserve.bench.quality_reading import logits, predicted, read, windows
from agentserve.models.load import DTYPES, LoadedModel, load_model
from agentserve.models.source import resolve
from agentserve.text import load
from kernels.blocks import BlockMatrix, BlockRows
from kernels.reference import ReferenceOps
from tests.parity.harness import CPU, Engine
from tests.parity.test_parity_cpu import TOLERANCE

pytestmark = pytest.mark.model

FILE = Path(__file__).parents[2] / "benchmarks" / "text" / "harbour.txt"
PAGE_SIZE = 16
GENERATED = 48
PROMPTS = (
    "The harbour at Saltmere now has",
    "def predict(coefficients, hours):\n",
    '<tool_call>\n{"name": "get_weather", "arguments": {',
)

# Mean KL from the exact model (nats), top-1 agreement, relative change of perplexity. Measured on the
# text below: see the comment of each.
BOUNDS: dict[Variant, tuple[float, float, float]] = {}


@pytest.fixture(scope="module")
def encode() -> Callable[[str], list[int]]:
    return load(resolve("smollm2-135m").path).tokenizer.encode_completion


@pytest.fixture(scope="module")
def text(encode: Callable[[str], list[int]]) -> Text:
    """Some prose and some of the tool calls."""
    whole = FILE.read_text(encoding="utf-8")
    calls = whole.index("User: Good evening.")
    return Text("", [*encode(whole)[:160], *encode(whole[calls:])[:160]])
