"""llama.cpp on a GGUF file, through its own batch interface as llama-cpp-python gives it."""

from __future__ import annotations

import importlib
import time
from typing import Any

Prompts = list[list[int]]
BATCH, MICRO_BATCH = 2048, 512
Entry = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


class LlamaCpp:
    def __init__(self, orders: dict[str, Any]) -> None:
        self._numpy = importlib.import_module("numpy")
        self._lib = lib = importlib.import_module("llama_cpp")
        lib.llama_backend_init()
        model_settings = lib.llama_model_default_params()
        model_settings.use_mmap = True
        model = lib.llama_model_load_from_file(orders["model"].encode(), model_settings)
        if not model:
            raise ValueError(f"{orders['model']}: cannot be loaded")
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        threads = orders["threads"]
        chosen = {
            # Sequences get equal shares of the context, so it is made for one kind of work at a time.
            "n_batch": BATCH,
            "n_ubatch": MICRO_BATCH,
            "n_threads": threads,
            "n_threads_batch": threads,
            "flash_attn_type": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
        }
        self._model, self._chosen = model, chosen
        self._shape = (0, 0)
        self._context: Any = None
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        self.version = f"llama-cpp-python {lib.__version__}"
        self.settings = {
            "model": orders["model"],
            "use_mmap": True,
            **chosen,
            "default type_k, type_v": "f16",
            "system": lib.llama_print_system_info().decode().strip(" |"),
        }

    def prefill(self, prompts: Prompts) -> float:
        self._open(prompts, 1)
        began = time.perf_counter()
        self._feed(prompts)
        return time.perf_counter() - began

    def decode(self, prompts: Prompts, steps: int) -> list[float]:
        self._open(prompts, steps)
        tokens = self._feed(prompts)
        seconds = []
        for step in range(steps):
            began = time.perf_counter()
            self._run([(token, len(prompts[row]) + step, row, True) for row, token in enumerate(tokens)])
            tokens = [self._best(row) for row in range(len(prompts))]
            seconds.append(time.perf_counter() - began)
        return seconds

    def _open(self, prompts: Prompts, steps: int) -> None:
        """A context that fits, empty: the last one if it can be used again."""
        lib, rows = self._lib, len(prompts)
        positions = max(map(len, prompts)) + steps
        if self._shape[0] != rows or self._shape[1] < positions:
            if self._context is not None:
                lib.llama_free(self._context)
            settings = lib.llama_context_default_params()
            for name, value in self._chosen.items():
                setattr(settings, name, value)
            each = (positions + 255) // 256 * 256
            settings.n_ctx, settings.n_seq_max = rows * each, rows
            self._context = lib.llama_init_from_model(self._model, settings)
            if not self._context:
                raise MemoryError(f"no context for {rows} x {each} tokens")
            self._shape = (rows, each)
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)

    def _feed(self, prompts: Prompts) -> list[int]:
        """Prefill each prompt; the first token of each."""
        first = []
        for row, prompt in enumerate(prompts):
            entries = [(token, at, row, at == len(prompt) - 1) for at, token in enumerate(prompt)]
            for begin in range(0, len(entries), BATCH):
                self._run(entries[begin : begin + BATCH])
            first.append(self._best(-1))
        return first

    def _run(self, entries: list[Entry]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _best(self, index: int) -> int:
        logits = self._lib.llama_get_logits_ith(self._context, index)
        return int(self._numpy.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


def build(orders: dict[str, Any]) -> LlamaCpp:
    return LlamaCpp(orders)
