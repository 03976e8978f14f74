"""OpenVINO GenAI's continuous-batching pipeline on a GGUF file, step by step."""

from __future__ import annotations

import importlib
import time
from typing import Any

Prompts = list[list[int]]
SPARE_TOKENS = 64  # the first prompts are already decoding while the last are prefilled


class OpenVino:
    def __init__(self, orders: dict[str, Any]) -> None:
        self._genai = importlib.import_module("openvino_genai")
        self._openvino = importlib.import_module("openvino")
        self._numpy = importlib.import_module("numpy")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = orders["kv_gib"]
        scheduler.max_num_batched_tokens = orders["positions"]  # whole prompts in one step
        scheduler.max_num_seqs = orders["rows"]
        scheduler.enable_prefix_caching = False
        properties = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": orders["threads"]}
        pipeline = self._genai.ContinuousBatchingPipeline
        self._pipeline = pipeline(orders["model"], scheduler, "CPU", properties)
        self.version = self._genai.__version__
        self.settings = {
            "model": orders["model"],
            "pipeline": "ContinuousBatchingPipeline",
            "cache_size": scheduler.cache_size,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_num_seqs": scheduler.max_num_seqs,
            "enable_prefix_caching": False,
            **properties,
            **self._defaults(),
        }
        self._requests = 0

    def prefill(self, prompts: Prompts) -> float:
        began = time.perf_counter()
        handles = self._add(prompts, 1)
        given = [0] * len(handles)
        while not all(given):
            self._step(handles, given)
        seconds = time.perf_counter() - began
        self._finish(handles)
        return seconds

    def decode(self, prompts: Prompts, steps: int) -> list[float]:
        handles = self._add(prompts, steps + SPARE_TOKENS)
        given = [0] * len(handles)
        while not all(given):
            self._step(handles, given)
        seconds = []
        for _ in range(steps):
            before = sum(given)
            seconds.append(self._step(handles, given))
            if sum(given) - before != len(handles):
                raise RuntimeError(f"a step gave {sum(given) - before} tokens to {len(handles)} prompts")
        self._finish(handles)
        return seconds

    def _add(self, prompts: Prompts, tokens: int) -> list[Any]:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        handles = []
        for prompt in prompts:
            ids = self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
            handles.append(self._pipeline.add_request(self._requests, ids, config))
            self._requests += 1
        return handles

    def _step(self, handles: list[Any], given: list[int]) -> float:
        """One step's seconds; the tokens read after it are added to `given`."""
        began = time.perf_counter()
        self._pipeline.step()
        seconds = time.perf_counter() - began
        for index, handle in enumerate(handles):
            while handle.can_read():
                given[index] += sum(len(output.generated_ids) for output in handle.read().values())
        return seconds

    def _finish(self, handles: list[Any]) -> None:
        for handle in handles:
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()

    def _defaults(self) -> dict[str, str]:
        """What the CPU plugin chooses by itself for what bears on speed and precision."""
        core = self._openvino.Core()
        types = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
        found = {f"default {name}": core.get_property("CPU", name).get_type_name() for name in types}
        group = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
        return found | {f"default {group}": str(core.get_property("CPU", group))}


def build(orders: dict[str, Any]) -> OpenVino:
    return OpenVino(orders)
