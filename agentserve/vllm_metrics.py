"""vLLM's metric names, for tools that read no others.

Nothing is counted here: at a scrape the facts of `agentserve.metrics` are shown a second time, under the
names, labels and units that vLLM 0.33 gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

ENGINE = "0"  # all workers together

_SAME = {
    # name here -> name there, both without the suffixes of their samples
    "agentserve_engine_running": "vllm:num_requests_running",
    "agentserve_engine_waiting": "vllm:num_requests_waiting",
    "agentserve_prompt_tokens": "vllm:prompt_tokens",
    "agentserve_generated_tokens": "vllm:generation_tokens",
    "agentserve_preemptions": "vllm:num_preemptions",
    "agentserve_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "agentserve_time_between_tokens_seconds": "vllm:inter_token_latency_seconds",
    "agentserve_time_per_token_seconds": "vllm:request_time_per_output_token_seconds",
    "agentserve_turn_seconds": "vllm:e2e_request_latency_seconds",
    "agentserve_queue_seconds": "vllm:request_queue_time_seconds",
    "agentserve_prefill_seconds": "vllm:request_prefill_time_seconds",
    "agentserve_decode_seconds": "vllm:request_decode_time_seconds",
    "agentserve_prefilled_tokens": "vllm:request_prefill_kv_computed_tokens",
}
_TWICE = {
    # facts that vLLM knows under a second name
    "agentserve_prompt_tokens": ("vllm:prefix_cache_queries",),
    "agentserve_cached_tokens": ("vllm:prefix_cache_hits", "vllm:prompt_tokens_cached"),
}
_REASONS = {
    "stop": "stop",
    "length": "length",
    "aborted": "abort",
    "error": "error",
    "refused": "error",
    "shed": "error",
}


class VllmNames(Collector):
    """Shows one registry under other names."""

    def __init__(self, source: CollectorRegistry, model: str, facts: Mapping[str, str]) -> None:
        """`facts`: labels of `vllm:cache_config_info`."""
        self._source = source
        self._labels = {"model_name": model, "engine": ENGINE}
        self._facts = dict(facts)

    def collect(self) -> Iterable[Metric]:
        gauges: dict[str, float] = {}
        for metric in self._source.collect():
            if metric.name in _SAME:
                yield self._renamed(metric, _SAME[metric.name])
            for name in _TWICE.get(metric.name, ()):
                yield self._renamed(metric, name)
            if metric.name == "agentserve_turns":
                yield self._finished(metric)
            if metric.type == "gauge" and not any(sample.labels for sample in metric.samples):
                gauges.update((sample.name, sample.value) for sample in metric.samples)
        pages = gauges.get("agentserve_kv_pages", 0.0)
        used = gauges.get("agentserve_kv_pages_live", 0.0) / pages if pages else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV pages that running turns use", used)
        yield self._gauge("vllm:cache_config_info", "The KV cache", 1.0, self._facts)
        adapters = {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}
        yield self._gauge("vllm:lora_requests_info", "Adapters: there are none", 1.0, adapters)

    def _renamed(self, metric: Metric, name: str) -> Metric:
        shown = Metric(name, metric.documentation, metric.type)
        shown.samples = [
            Sample(name + sample.name[len(metric.name) :], self._labels | sample.labels, sample.value)
            for sample in metric.samples
            if not sample.name.endswith("_created")
        ]
        return shown

    def _finished(self, turns: Metric) -> Metric:
        counts: dict[str, float] = {}
        for sample in turns.samples:
            if sample.name.endswith("_total"):
                reason = _REASONS.get(sample.labels["finish_reason"], "error")
                counts[reason] = counts.get(reason, 0.0) + sample.value
        shown = Metric("vllm:request_success", "Requests ended, by reason", "counter")
        for reason, count in counts.items():
            shown.add_sample("vllm:request_success_total", self._labels | {"finished_reason": reason}, count)
        return shown

    def _gauge(self, name: str, text: str, value: float, labels: Mapping[str, str] = {}) -> Metric:
        shown = Metric(name, text, "gauge")
        shown.add_sample(name, self._labels | dict(labels), value)
        return shown


def vllm_page(source: CollectorRegistry, model: str, facts: Mapping[str, str]) -> Callable[[], bytes]:
    """The text that stands below the page of `source`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(VllmNames(source, model, facts))
    return lambda: generate_latest(registry)
