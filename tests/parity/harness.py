"""Tiny random models of every architecture, and ways to run them chunk by chunk over paged KV."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from agentserve.core.plan import Chunk, ChunkResult, PageCopy, Plan, Sampled, SampleSpec
from agentserve.executor.pool import KVPool
from agentserve.executor.runner import TorchExecutor
from agentserve.models.config import DecoderConfig
from agentserve.models.decoder import Decoder
from agentserve.models.hf_config import read_hf_config
from agentserve.models.load import load_model
from agentserve.models.source import ModelSource
from agentserve.models.weights import DecoderWeights
from agentserve.types import Sampling, SessionId, TurnId
from kernels import ops_for
from kernels.ops import Activations, Logits, Ops

CPU = torch.device("cpu")
VOCAB = 96
GREEDY = Sampling(temperature=0.0)

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 10000.0},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-tied-mha": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 6},
    "llama-linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-llama3": {"model_type": "llama", "rope_parameters": _LLAMA3},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 24},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "head_dim": 8},
    "qwen2-windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
        "head_dim": 8,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "rope_theta": 1000000.0},
    "qwen3-yarn": {"model_type": "qwen3", "rope_scaling": _YARN},
    "smollm3": {
        "model_type": "smollm3",
        "num_hidden_layers": 5,
        "tie_word_embeddings": True,
        "head_dim": 8,
        "no_rope_layer_interval": 2,
        "pad_token_id": 0,
    },
}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def config_json(name: str) -> dict[str, Any]:
    """The `config.json` of one of `ARCHITECTURES`."""
    own = ARCHITECTURES[name]
    return _BASE | own | {"architectures": [_CLASSES[own["model_type"]]]}


def transformers_model(folder: Path) -> Any:
    """transformers' own model of a folder, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def write_model(folder: Path, name: str, seed: int = 0) -> None:
    """A random model of an architecture as transformers itself writes it, its logits spread out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(name)))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, value in model.state_dict().items():
        centre = 1.0 if key.endswith("norm.weight") else 0.0
        state[key] = centre + 0.25 * torch.randn(value.shape, generator=generator)
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@dataclass
class Spy:
    """A greedy sampler that keeps the logits it was given, by session."""

    rows: dict[str, Tensor] = field(default_factory=dict)

    def sample(self, logits: Logits, specs: Sequence[tuple[SessionId, TurnId, SampleSpec]]) -> list[Sampled]:
        assert torch.equal(logits.best, logits.values.argmax(dim=-1))
        for row, (session, _, _) in zip(logits.values, specs, strict=True):
            self.rows[session] = row.clone()
        return [Sampled(best) for best in logits.best.tolist()]

    def define_grammar(self, grammar_id: str, compiled: str) -> None:
        raise NotImplementedError

    def drop_grammar(self, grammar_id: str) -> None:
        raise NotImplementedError


class Engine:
    """A decoder, its pool and an executor; hands out pages in a shuffled order."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        pages: int = 96,
        page_size: int = 16,
        seed: int = 0,
        most_rows: int = 512,
        ops: Ops | None = None,
        activations: Activations = "float",
    ) -> None:
        """ops: the backend; by default the one that a server on this machine would use."""
        self.config = config
        self.decoder = Decoder(config, weights, ops or ops_for(CPU), 4096, activations)
        count = len(config.layer_groups())
        self.pool = KVPool(config, [pages] * count, page_size, weights.dtype)
        for storage in self.pool.storages:
            storage.fill_(float("nan"))  # what nobody wrote must not be read
        self.spy = Spy()
        self.executor = TorchExecutor(self.decoder, self.pool, self.spy, most_rows)
        order = random.Random(seed)
        self._free = [order.sample(range(pages), pages) for _ in range(count)]

    def tables(self, tokens: int) -> tuple[array[int], ...]:
        """Fresh pages for a sequence of this many tokens, one table per KV group."""
        pages = -(-tokens // self.pool.page_size)
        return tuple(array("i", [free.pop() for _ in range(pages)]) for free in self._free)

    def chunk(
        self,
        session: str,
        tokens: Sequence[int],
        start: int,
        end: int,
        tables: tuple[array[int], ...],
        sample: bool = True,
    ) -> Chunk:
        """Tokens `start .. end-1` of a sequence; page tables end with the chunk, as the core's do."""
        pages = -(-end // self.pool.page_size)
        cut = tuple(table[:pages] for table in tables)
        spec = SampleSpec(GREEDY, tokens, 0, end) if sample else None
        return Chunk(SessionId(session), TurnId(1), 0, start, array("i", tokens[start:end]), cut, spec)

    def run(self, *chunks: Chunk, copies: Sequence[PageCopy] = ()) -> tuple[ChunkResult, ...]:
        """Run one plan; every chunk must succeed."""
        result = self.executor.run(Plan(1, tuple(copies), chunks, 0.0, ()))
        assert [chunk.error for chunk in result.chunks] == [""] * len(chunks)
        return result.chunks

    def logits(
        self,
        tokens: Sequence[int],
        sizes: Sequence[int],
        tables: tuple[array[int], ...] | None = None,
        start: int = 0,
    ) -> dict[int, Tensor]:
        """Logits at the end of each chunk; chunks of these sizes from `start` (the last size repeats)."""
        tables = tables or self.tables(len(tokens))
        found: dict[int, Tensor] = {}
        turn = 0
        while start < len(tokens):
            end = min(len(tokens), start + sizes[min(turn, len(sizes) - 1)])
            self.run(self.chunk("s", tokens, start, end, tables))
            found[end - 1] = self.spy.rows["s"]
            start, turn = end, turn + 1
        return found

    def free(self, tables: tuple[array[int], ...]) -> None:
        for free, table in zip(self._free, tables, strict=True):
            free.extend(table)


def greedy(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """The prompts, each with its greedy continuation of so many tokens, all in one batch."""
    histories = [list(prompt) for prompt in prompts]
    tables = [engine.tables(len(prompt) + tokens) for prompt in prompts]
    computed = [0] * len(prompts)
    for _ in range(tokens):
        chunks = [
            engine.chunk(str(number), history, computed[number], len(history), tables[number])
            for number, history in enumerate(histories)
        ]
        for number, result in enumerate(engine.run(*chunks)):
            assert result.sampled is not None
            computed[number] = len(histories[number])
            histories[number].append(result.sampled.token)
    return histories


@dataclass(frozen=True)
class Case:
    """One architecture: its folder, our model of it, transformers' logits for `tokens`."""

    name: str
    folder: Path
    config: DecoderConfig
    weights: DecoderWeights
    tokens: list[int]
    expected: Tensor  # [tokens, vocab]
    ops: Ops | None = None

    def engine(self, **options: Any) -> Engine:
        return Engine(self.config, self.weights, ops=self.ops, **options)

    def altered(self, **changes: Any) -> Engine:
        """An engine with a wrong config, to show that parity would notice."""
        return Engine(replace(self.config, **changes), self.weights, ops=self.ops)

    def error(self, found: dict[int, Tensor]) -> float:
        """Largest absolute difference from transformers, over the positions found."""
        return max(float((row - self.expected[at]).abs().max()) for at, row in found.items())


def make_case(folder: Path, name: str, length: int = 70) -> Case:
    write_model(folder, name)
    tokens = random.Random(name).choices(range(VOCAB), k=length)
    with torch.inference_mode():
        expected = transformers_model(folder)(torch.tensor([tokens])).logits[0]
    loaded = load_model(ModelSource("folder", folder, name), torch.float32, CPU)
    assert loaded.config == read_hf_config(folder / "config.json")
    return Case(name, folder, loaded.config, loaded.weights, tokens, expected)
