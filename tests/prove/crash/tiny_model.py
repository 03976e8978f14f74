"""A model of random weights with a tokenizer and a chat template, as a folder that the server loads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.text_models import save_model, source

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 4, 96, 6, 2, 16, 160


def write_tiny_model(folder: Path, seed: int = 0) -> None:
    """Its logits are spread out, so that what it says depends on all that it was told."""
    folder.mkdir(parents=True)
    save_model(folder)
    words = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    vocabulary = max(words, 1 + max(token["id"] for token in added))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(source("qwen25"))
    drawn = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 0.25 * torch.randn(rows, columns, generator=drawn)

    weights = {"model.embed_tokens.weight": matrix(vocabulary, HIDDEN)}
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            at + "self_attn.q_proj.weight": matrix(HEADS * HEAD, HIDDEN),
            at + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            at + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            at + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD),
            at + "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            at + "mlp.up_proj.weight": matrix(INNER, HIDDEN),
            at + "mlp.down_proj.weight": matrix(HIDDEN, INNER),
            at + "input_layernorm.weight": torch.ones(HIDDEN),
            at + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
