"""llama.cpp (llama-cpp-python) in `PEERS/llamacpp`: KV in fp16, flash attention, memory-mapped weights."""

from __future__ import annotations

from agentserve.bench.compare import libraries

# Its prefill of 8 prompts of 2,000 tokens takes minutes for each run.
SKIPPED = tuple(scenario for scenario in libraries.SCENARIOS if scenario.rows * scenario.length > 8000)
SCENARIOS = tuple(scenario for scenario in libraries.SCENARIOS if scenario not in SKIPPED)
NOTES = tuple(f"{scenario.name}: left out, the peer's prefill takes minutes" for scenario in SKIPPED)
