"""A model that thinks: Qwen 3's layers, marks and way to write prompts, with weights that are a script.

What comes next depends on the last token alone. Attention and MLPs add nothing, so that what leaves the
last layer is the last token's embedding, and the head knows one successor for each of a few.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from agentserve.text import Tokenizer, hf_vocab
from tests.text_models import save_model, source

THOUGHT = (" so", " now", " then", " let", " me", " think", " of", " it", " well")
ANSWER = ("It", " rains", ".")
OPEN, CLOSE, END = "<think>", "</think>", "<|im_end|>"
LAYERS, HIDDEN, HEADS, HEAD = 2, 256, 4, 32


def save_thinking_model(folder: Path) -> None:
    """Behind a prompt it thinks THOUGHT and says ANSWER; where its prompt has closed the reasoning, or it
    has to end early, it says ANSWER all the same."""
    save_model(folder, words=("\n\n", *THOUGHT, *ANSWER))
    (folder / "chat_template.jinja").write_text(source("qwen3"))
    tokenizer = Tokenizer(hf_vocab.vocabulary(folder))
    ends = tokenizer.control[END]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    script = ["\n", OPEN, *THOUGHT, CLOSE, "\n\n", *ANSWER, END]
    ids = [tokenizer.control[word] if word in tokenizer.control else _one(tokenizer, word) for word in script]
    vocabulary = 1 + max(tokenizer.control.values())
    (folder / "config.json").write_text(json.dumps(_config(vocabulary)))
    save_file(
        _weights(vocabulary, list(pairwise(ids))), folder / "model.safetensors", metadata={"format": "pt"}
    )


def _one(tokenizer: Tokenizer, word: str) -> int:
    [token] = tokenizer.encode(word)
    return token


def _config(vocabulary: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def _weights(vocabulary: int, successors: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 0.1 * torch.randn(rows, columns, generator=drawn)

    embedded = torch.nn.functional.normalize(matrix(vocabulary, HIDDEN), dim=-1)
    head = torch.zeros(vocabulary, HIDDEN)
    for token, successor in successors:
        head[successor] += 4.0 * embedded[token]  # the norm makes it 64: nothing else is ever drawn
    weights = {
        "model.embed_tokens.weight": embedded,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    inner = HEADS * HEAD
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            at + "self_attn.q_proj.weight": matrix(inner, HIDDEN),
            at + "self_attn.k_proj.weight": matrix(inner, HIDDEN),
            at + "self_attn.v_proj.weight": matrix(inner, HIDDEN),
            at + "self_attn.o_proj.weight": torch.zeros(HIDDEN, inner),
            at + "self_attn.q_norm.weight": torch.ones(HEAD),
            at + "self_attn.k_norm.weight": torch.ones(HEAD),
            at + "mlp.gate_proj.weight": matrix(HIDDEN, HIDDEN),
            at + "mlp.up_proj.weight": matrix(HIDDEN, HIDDEN),
            at + "mlp.down_proj.weight": torch.zeros(HIDDEN, HIDDEN),
            at + "input_layernorm.weight": torch.ones(HIDDEN),
            at + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return weights
