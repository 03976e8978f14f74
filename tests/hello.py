"""A made-up worker's first message."""

from __future__ import annotations

from typing import Any

import msgspec

from agentserve.messages import PROTOCOL_VERSION, Hello


def made_up_hello(**changes: Any) -> Hello:
    """A worker's first message, with these fields changed."""
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        pid=1,
        backend="reference",
        backend_reason="reference (made up)",
        device="cpu",
        dtype="bf16",
        weights="expanded",
        activations="float",
        kv_dtype="bf16",
        vocab_size=259,
        max_model_len=4096,
        page_size=16,
        pages=64,
        kv_bytes=4096,
        parameters=1,
        weight_bytes=200 << 20,
        weights_digest="ab" * 32,
        namespace="ef" * 32,
    )
    return msgspec.structs.replace(hello, **changes)
