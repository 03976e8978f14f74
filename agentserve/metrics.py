"""Prometheus metrics: one registry, fed with events. Label values come from closed sets only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from agentserve.messages import TurnUsage, WorkerView
from agentserve.request_metrics import RequestMetrics
from agentserve.tenant_metrics import PromiseMetrics, TenantMetrics
from agentserve.tier_metrics import TierMetrics, Totals
from agentserve.types import FinishReason, SessionState
from agentserve.vllm_metrics import vllm_page

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640)


_STALLS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Metrics:
    """What the server counts. All methods are cheap and never raise."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made = self.registry
        self._turns = Counter("agentserve_turns", "Turns ended, by reason", ["finish_reason"], registry=made)
        for reason in FinishReason:
            self._turns.labels(reason.value)  # shown as 0 from the start
        self._active = Gauge("agentserve_turns_active", "Turns submitted and not ended", registry=made)
        self._prompt = Counter("agentserve_prompt_tokens", "Prompt tokens of ended turns", registry=made)
        self._cached = Counter(
            "agentserve_cached_tokens", "Prompt tokens that needed no computation", registry=made
        )
        self._generated = Counter("agentserve_generated_tokens", "Tokens generated", registry=made)
        self._computed = Counter(
            "agentserve_computed_tokens",
            "Token rows run by ended turns, recomputation included",
            registry=made,
        )
        self._preemptions = Counter("agentserve_preemptions", "Preemptions of ended turns", registry=made)
        self._ttft = Histogram(
            "agentserve_time_to_first_token_seconds", "Arrival to first token", buckets=_LONG, registry=made
        )
        self._tbt = Histogram(
            "agentserve_time_between_tokens_seconds",
            "Gap between tokens of a turn",
            buckets=_SHORT,
            registry=made,
        )
        self._queue = Histogram(
            "agentserve_queue_seconds", "Arrival to admission", buckets=_LONG, registry=made
        )
        self._turn_time = Histogram(
            "agentserve_turn_seconds", "Arrival to end of the turn", buckets=_LONG, registry=made
        )
        self._prefill = Histogram(
            "agentserve_prefill_seconds", "Admission to first token", buckets=_LONG, registry=made
        )
        self._decode = Histogram(
            "agentserve_decode_seconds", "First token to end of the turn", buckets=_LONG, registry=made
        )
        self._per_token = Histogram(
            "agentserve_time_per_token_seconds",
            "Decode time of a turn by its tokens after the first",
            buckets=_SHORT,
            registry=made,
        )
        self._prefilled = Histogram(
            "agentserve_prefilled_tokens",
            "Prompt tokens that a turn had to compute",
            buckets=_TOKENS,
            registry=made,
        )
        self._runs = Totals(
            "agentserve_steps_run",
            "Steps by how they were run, where decode steps are recorded: replayed, missed (nothing was "
            "recorded for them), launched (more than one token of a sequence)",
            "how",
            made,
        )
        self._sessions = Gauge("agentserve_sessions", "Sessions by state", ["state"], registry=made)
        self._directory = Gauge(
            "agentserve_directory_bytes", "Estimated size of the directory", registry=made
        )
        self._storage = [
            Gauge(f"agentserve_sessions_disk_{name}", text, registry=made)
            for name, text in (
                ("failing", "1 while the disk does not take sessions"),
                ("skipped", "Sessions that could not be read at the start"),
                ("damages", "Times since the start that the sessions file was damaged or gone"),
                ("missing_records", "Records missing after those, where it is known"),
                ("damaged_files", "Damaged files that are kept beside the sessions file"),
            )
        ]
        self._responses = [
            Gauge(f"agentserve_{name}", text, registry=made)
            for name, text in (
                ("responses", "Responses that are kept"),
                ("responses_bytes", "Estimated size of them"),
                ("conversations", "Conversations that are kept"),
                ("conversations_bytes", "Estimated size of them"),
                ("responses_running", "Responses that are being made in the background"),
                ("response_events_bytes", "Size of the events of background responses"),
                ("responses_disk_failing", "1 while the disk does not take responses"),
                ("responses_disk_skipped", "Responses and conversations that could not be read at the start"),
            )
        ]
        self._webhooks = [
            Gauge(f"agentserve_webhook_{name}", text, registry=made)
            for name, text in (
                ("endpoints", "Webhook endpoints"),
                ("endpoints_disabled", "Those that are disabled"),
                ("circuits_open", "Those that keep failing, and are left alone for a while"),
                ("calls_pending", "Tool calls that are being delivered"),
                ("deliveries_pending", "Deliveries that have not ended"),
                ("disk_failing", "1 while the disk does not take webhooks"),
                ("disk_skipped", "Records of webhooks that could not be read at the start"),
                ("calls", "Tool calls accepted since the start"),
                ("calls_taken", "Of them, those that their receiver took"),
                ("calls_given_up", "Those that were given up: their tools failed"),
                ("calls_withdrawn", "Those that nobody waited for any more"),
                ("events", "Events published since the start"),
                ("events_dropped", "Events that could not be kept"),
                ("callbacks", "Results that receivers posted later"),
                ("callbacks_refused", "Those that were refused"),
            )
        ]
        self._workers = Gauge("agentserve_workers", "Workers that can take a turn", registry=made)
        self._ages = Gauge(
            "agentserve_worker_report_age_seconds",
            "Since a worker said what the gauges of KV and turns show of it",
            ["worker"],
            registry=made,
        )
        self._silent = Gauge(
            "agentserve_workers_silent", "Workers that have work and say nothing", registry=made
        )
        self._pages = Gauge("agentserve_kv_pages", "KV pages in the pool, all workers", registry=made)
        self._free = Gauge("agentserve_kv_pages_free", "Pages that hold nothing", registry=made)
        self._kept = Gauge("agentserve_kv_pages_cached", "Idle pages, evictable", registry=made)
        self._live = Gauge("agentserve_kv_pages_live", "Pages that running turns use", registry=made)
        self._running = Gauge("agentserve_engine_running", "Turns with a seat", registry=made)
        self._waiting = Gauge("agentserve_engine_waiting", "Turns in the queue", registry=made)
        self.tiers = TierMetrics(made)
        self.tenants = TenantMetrics(made)
        self.requests = RequestMetrics(made)
        self.promises = PromiseMetrics(made)
        self._stalls = Histogram(
            "agentserve_event_loop_stall_seconds",
            "Times that the API process' event loop was held up for 10 ms or more",
            buckets=_STALLS,
            registry=made,
        )
        self._longest_stall = Gauge(
            "agentserve_event_loop_longest_stall_seconds",
            "The longest of them since the start",
            registry=made,
        )
        self._longest = 0.0
        self._below: Callable[[], bytes] = bytes  # what else the page shows
        self._errors = Counter(
            "agentserve_http_errors", "Error replies, by status class", ["status"], registry=made
        )

    def turn_submitted(self) -> None:
        self._active.inc()

    def token(self, gap: float | None) -> None:
        """A token came; `gap` seconds after the turn's last one, None for its first."""
        self._generated.inc()
        if gap is not None:
            self._tbt.observe(max(gap, 0.0))

    def turn_left(self, reason: FinishReason, usage: TurnUsage | None) -> None:
        """A submitted turn is over; `usage` None when its end was not awaited."""
        self._active.dec()
        self._turns.labels(reason.value).inc()
        if usage is None or reason in (FinishReason.REFUSED, FinishReason.SHED):
            return
        self._prompt.inc(max(usage.prompt, 0))
        self._cached.inc(max(usage.cached, 0))
        self._computed.inc(max(usage.computed, 0))
        self._preemptions.inc(max(usage.preemptions, 0))
        if usage.generated:
            self._ttft.observe(max(usage.first_token - usage.arrived, 0.0))
            self._queue.observe(max(usage.admitted - usage.arrived, 0.0))
            self._prefill.observe(max(usage.first_token - usage.admitted, 0.0))
            decode = max(usage.ended - usage.first_token, 0.0)
            self._decode.observe(decode)
            if usage.generated > 1:
                self._per_token.observe(decode / (usage.generated - 1))
            self._prefilled.observe(max(usage.prompt - usage.cached, 0))
        self._turn_time.observe(max(usage.ended - usage.arrived, 0.0))

    def http_error(self, status: int) -> None:
        self._errors.labels(f"{status // 100}xx").inc()

    def stalled(self, seconds: float) -> None:
        """The event loop did nothing else for so long."""
        self._stalls.observe(seconds)
        if seconds > self._longest:
            self._longest = seconds
            self._longest_stall.set(seconds)

    def set_sessions(self, by_state: Mapping[SessionState, int], directory_bytes: int) -> None:
        for state, count in by_state.items():
            self._sessions.labels(state.value).set(count)
        self._directory.set(directory_bytes)

    def set_storage(self, *, failing: bool, skipped: int, damages: int, missing: int, kept: int) -> None:
        """How the disk that keeps sessions does."""
        for gauge, value in zip(self._storage, (failing, skipped, damages, missing, kept), strict=True):
            gauge.set(value)

    def set_responses(self, values: Sequence[float]) -> None:
        """What the Responses API remembers, in the order of the gauges."""
        for gauge, value in zip(self._responses, values, strict=True):
            gauge.set(value)

    def set_webhooks(self, values: Sequence[float]) -> None:
        """What is delivered, in the order of the gauges."""
        for gauge, value in zip(self._webhooks, values, strict=True):
            gauge.set(value)

    def set_workers(self, alive: int, views: Sequence[WorkerView]) -> None:
        self._workers.set(alive)
        self._pages.set(sum(view.pages for view in views))
        self._free.set(sum(view.pages_free for view in views))
        self._kept.set(sum(view.pages_cached for view in views))
        self._live.set(sum(view.pages_live for view in views))
        self._running.set(sum(view.running for view in views))
        self._waiting.set(sum(view.waiting for view in views))
        self._runs.follow(
            {
                "replayed": sum(view.runs.replayed for view in views),
                "missed": sum(view.runs.missed for view in views),
                "launched": sum(view.runs.launched for view in views),
            }
        )
        self.tiers.set_workers(views)
        self.promises.set([view.promises for view in views])

    def set_silence(self, ages: Mapping[int, float], silent: int) -> None:
        """ages: by worker, seconds since it told of itself."""
        for worker, age in ages.items():
            self._ages.labels(str(worker)).set(age)
        self._silent.set(silent)

    def show_as_vllm(self, model: str, facts: Mapping[str, str]) -> None:
        """Show the same numbers under vLLM's names, too. `facts`: of the KV cache."""
        self._below = vllm_page(self.registry, model, facts)

    def render(self) -> bytes:
        return generate_latest(self.registry) + self._below()
