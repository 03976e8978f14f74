"""OpenVINO GenAI in `PEERS/openvino`: its own scheduler over several prompts, prefix caching off."""

from __future__ import annotations

from agentserve.bench.compare import libraries

SCENARIOS = libraries.SCENARIOS
NOTES = ("the peer keeps KV in 8 bits unless its settings say otherwise",)
