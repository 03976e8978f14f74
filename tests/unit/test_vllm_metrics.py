"""vLLM's names show the very numbers that ours do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from agentserve.types import FinishReason
from tests.api_rig import CHAT, Rig, user
from tests.fakes import Script, ScriptedEngine, say

LABELS = {"model_name": "tiny", "engine": "0"}
ASKED_FOR = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_prefill_kv_computed_tokens_bucket",
    "cache_config_info",
    "lora_requests_info",
]


async def page(rig: Rig) -> dict[str, list[Sample]]:
    reply = await rig.client.get("/metrics")
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def value(samples: dict[str, list[Sample]], name: str, **labels: str) -> float:
    [sample] = [s for s in samples[name] if labels.items() <= s.labels.items()]
    return sample.value


@pytest.fixture
async def rig() -> Rig:
    """Two turns of one session, one that failed, one that was cut."""
    scripts: Iterator[Script] = iter(
        [
            say("Hello!"),
            say("Hello!"),
            Script([72], reason=FinishReason.ERROR, error="it broke"),
            say("Hello!"),
        ]
    )
    made = Rig(ScriptedEngine(lambda submit: next(scripts)))
    await made.chat([user("a")])
    await made.chat([user("a"), {"role": "assistant", "content": "Hello!"}, user("b")])
    await made.post(CHAT, {"messages": [user("x")]})
    await made.chat([user("c")], max_tokens=3)
    return made


async def test_every_name_that_tools_look_for_is_there_with_its_labels(rig: Rig) -> None:
    samples = await page(rig)
    for name in ASKED_FOR:
        assert samples[f"vllm:{name}"], name
        for sample in samples[f"vllm:{name}"]:
            assert LABELS.items() <= sample.labels.items()
    assert value(
        samples, "vllm:cache_config_info", block_size="16", num_gpu_blocks=str(rig.engine.hello.pages)
    )


async def test_the_numbers_are_ours(rig: Rig) -> None:
    samples = await page(rig)
    for ours, theirs in (
        ("agentserve_prompt_tokens_total", "vllm:prompt_tokens_total"),
        ("agentserve_prompt_tokens_total", "vllm:prefix_cache_queries_total"),
        ("agentserve_cached_tokens_total", "vllm:prefix_cache_hits_total"),
        ("agentserve_cached_tokens_total", "vllm:prompt_tokens_cached_total"),
        ("agentserve_generated_tokens_total", "vllm:generation_tokens_total"),
        ("agentserve_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count"),
        ("agentserve_prefilled_tokens_sum", "vllm:request_prefill_kv_computed_tokens_sum"),
        ("agentserve_decode_seconds_sum", "vllm:request_decode_time_seconds_sum"),
    ):
        assert value(samples, theirs) == value(samples, ours)
    assert value(samples, "vllm:prefix_cache_hits_total") > 0
    computed = value(samples, "vllm:prompt_tokens_total") - value(samples, "vllm:prompt_tokens_cached_total")
    assert value(samples, "vllm:request_prefill_kv_computed_tokens_sum") == computed
    counts = {s.labels["finished_reason"]: s.value for s in samples["vllm:request_success_total"]}
    assert counts == {"stop": 2, "length": 1, "abort": 0, "error": 1}
    assert value(samples, "vllm:kv_cache_usage_perc") == value(samples, "agentserve_kv_pages_live") / value(
        samples, "agentserve_kv_pages"
    )
    # a scrape counts nothing
    assert await page(rig) == samples
