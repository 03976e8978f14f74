"""The packaged SmolLM2: greedy tokens equal transformers', which reads the same GGUF by its own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentserve.models.load import LoadedModel, load_model
from agentserve.models.source import resolve
from tests.parity.harness import CPU, Engine, greedy

pytestmark = pytest.mark.model

GENERATED = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "List three fruits:",
    "The quick brown fox",
    "In 1969, humans first",
    "SELECT name FROM users WHERE",
    "My favourite season is autumn because",
    "To make a cup of tea, first",
    "The theory of relativity says that",
    "Dear Sir or Madam,",
    "<html>\n<head>",
    "Q: What is 2 + 2?\nA:",
    "An agent that calls tools must",
    "Breaking news:",
    "The opposite of hot is",
    "for (int i = 0; i < n; i++) {",
    "Photosynthesis is the process by which",
    "She opened the letter and",
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(resolve("smollm2-135m"), torch.float32, CPU)


@pytest.fixture(scope="module")
def oracle() -> tuple[Any, Any]:
    """transformers' tokenizer and float32 model out of the same GGUF file."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = Path(resolve("smollm2-135m").path)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config).float()
    state = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return tokenizer, model.eval()


def test_greedy_tokens_equal_transformers(loaded: LoadedModel, oracle: tuple[Any, Any]) -> None:
    """Each generated token is transformers' own greedy choice after the same ids, hence the texts agree."""
    tokenizer, model = oracle
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROMPTS]
    histories = greedy(Engine(loaded.config, loaded.weights, pages=160), prompts, GENERATED)
    assert len({tuple(history[-20:]) for history in histories}) > 15, "degenerate text proves little"
    for prompt, history in zip(prompts, histories, strict=True):
        with torch.inference_mode():
            choices = model(torch.tensor([history[:-1]])).logits[0].argmax(dim=-1)
        assert choices[len(prompt) - 1 :].tolist() == history[len(prompt) :]


def test_config_and_size(loaded: LoadedModel) -> None:
    config = loaded.config
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.tie_embeddings
    assert config.eos_token_ids == (2,)
    assert loaded.weights.parameters == 134_515_008
    assert len(loaded.digest) == 64


def test_interleaved_rotary_rows_would_show(loaded: LoadedModel, oracle: tuple[Any, Any]) -> None:
    """Had Q and K been left as the file has them, the first token would already be far off."""
    tokenizer, model = oracle
    tokens = tokenizer(PROMPTS[1], add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    engine = Engine(loaded.config, loaded.weights, pages=8)
    good = engine.logits(tokens, [len(tokens)])[len(tokens) - 1]
    assert float((good - expected).abs().max()) < 1e-2
    for layer in loaded.weights.layers:  # back to the file's order
        for start, heads in ((0, 9), (576, 3)):
            rows = layer.qkv[start : start + heads * 64].clone()
            layer.qkv[start : start + heads * 64] = (
                rows.view(heads, 2, 32, 576).transpose(1, 2).reshape(heads * 64, 576)
            )
    engine = Engine(loaded.config, loaded.weights, pages=8)
    bad = engine.logits(tokens, [len(tokens)])[len(tokens) - 1]
    assert float((bad - expected).abs().max()) > 1.0
