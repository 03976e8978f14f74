"""llama.cpp (llama-cpp-python) in `PEERS/llamacpp`: KV in fp16, flash attention, memory-mapped weights."""

from __future__ import annotations

from agentserve.bench.compare import libraries

# Each run prefills all its prompts: those of more tokens than this would be most of the whole time.
MOST_TOKENS = 8000
SKIPPED = tuple(scenario for scenario in libraries.SCENARIOS if scenario.rows * scenario.length > MOST_TOKENS)
SCENARIOS = tuple(scenario for scenario in libraries.SCENARIOS if scenario not in SKIPPED)
NOTES = tuple(
    f"{scenario.name}: left out, {scenario.rows * scenario.length:,} tokens to prefill in every run"
    for scenario in SKIPPED
)
