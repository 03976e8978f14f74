"""The compiled library's functions and structures, as `csrc/*.cpp` and `csrc/decoder.h` declare them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_double, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.build import Built

PANEL = 32
"""Outputs per panel of packed weights (`csrc/panels.h`)."""

UNIT = 32
"""Weights along k that blocks are unpacked by (`csrc/panels.h`)."""

TYPES = {torch.bfloat16: 0, torch.float32: 1}
KV_TYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2, torch.int8: 3}
"""What pages may hold (`KvType` in `csrc/kv_formats.h`)."""
KV_PAIRS = {torch.bfloat16: 2, torch.float32: 1, torch.float16: 1, torch.int8: 2}
"""Neighbours along the head dimension that lie together in pages, which it must be a multiple of."""
PAIRS = {torch.bfloat16: 2, torch.float32: 1}
"""Elements per 32-bit lane."""

PLAIN = 0
BLOCK_FORMATS = {"Q4_0": 1, "Q4_1": 2, "Q5_0": 3, "Q5_1": 4, "Q8_0": 5, "Q4_K": 6, "Q5_K": 7, "Q6_K": 8}
"""What a panel holds (`Format` in `csrc/panels.h`)."""

NEED_SUMS, NEED_CODES = 1, 2
"""What a product wants of its operand rows (`Need` in `csrc/panels.h`)."""


class Panel(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("format", c_int32),
        ("first", c_int32),
        ("width", c_int32),
    )


class Matrix(ctypes.Structure):
    _fields_ = (
        ("panels", POINTER(Panel)),
        ("bias", c_void_p),
        ("n", c_int32),
        ("steps", c_int32),
        ("units", c_int32),
        ("panel_count", c_int32),
        ("need", c_int32),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", Matrix),
        ("o", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("group", c_int32),
        ("index", c_int32),
        ("rotary", c_int32),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("hidden", c_int32),
        ("inner", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("layers", c_int32),
        ("eps", c_float),
        ("embedding", Matrix),
        ("head", Matrix),
        ("norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("layer", POINTER(Layer)),
    )


class Group(ctypes.Structure):
    _fields_ = (
        ("storage", c_void_p),
        ("page_stride", c_int64),
        ("layer_stride", c_int64),
        ("slots", c_void_p),
        ("plan", c_void_p),
        ("slots_per_page", c_int32),
        ("kv", c_int32),
    )


class Kv(ctypes.Structure):
    _fields_ = (
        ("base", c_void_p),
        ("page_stride", c_int64),
        ("slots", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("type", c_int32),
    )


_P, _N, _I = c_void_p, c_int64, c_int  # pointer, count or index, small integer
_SIGNATURES: dict[str, tuple[type[ctypes._SimpleCData[Any]] | None, tuple[type[Any], ...]]] = {
    "pack": (None, (_I, _P, _N, _N, _I, _P, _I)),
    "block_panel_bytes": (c_int64, (_I, _N)),
    "block_has_offset": (c_int, (_I,)),
    "pack_blocks": (None, (_I, _I, _P, _N, _N, _P, _I)),
    "linear": (None, (_I, POINTER(Matrix), _P, _N, _I, _P, _I)),
    "rms_norm": (None, (_I, _P, _P, _P, _N, _N, c_float, _P, _P, _I)),
    "rope": (None, (_I, _P, _N, _P, _P, _N, _N, _N, _P, _I)),
    "silu_mul": (None, (_I, _P, _N, _N, _P, _I)),
    "write_kv": (None, (_I, POINTER(Kv), _P, _P, _N, _P, _N, _N)),
    "copy_page": (None, (POINTER(Kv), _N, _I, _N, _N, _I)),
    "plan": (c_void_p, (_P, _N, _P, _N, _I, _I, _I)),
    "free_plan": (None, (_P,)),
    "shared_keys": (c_int64, (_P,)),
    "attention": (None, (_I, _P, POINTER(Kv), _I, _P, _P, _I)),
    "open": (c_void_p, (_I, POINTER(Model))),
    "close": (None, (_P,)),
    "forward": (None, (_P, _I, _P, _P, POINTER(Group), _I, _P, _P, _I)),
    "logits": (None, (_P, _I, _P, _P, _P, _P, _I)),
    "read": (c_uint32, (_P, _N, _I)),
    "repeat_dots": (c_double, (_I, _N, _I)),
}


class Library:
    """One compiled library. Attributes are its functions without their common prefix."""

    def __init__(self, built: Built) -> None:
        self.built = built
        library = ctypes.CDLL(str(built.path))

        def function(name: str) -> Callable[..., Any]:
            found = library["agentserve_" + name]
            found.restype, found.argtypes = _SIGNATURES[name]
            return found

        self.pack = function("pack")
        self.block_panel_bytes = function("block_panel_bytes")
        self.block_has_offset = function("block_has_offset")
        self.pack_blocks = function("pack_blocks")
        self.linear = function("linear")
        self.rms_norm = function("rms_norm")
        self.rope = function("rope")
        self.silu_mul = function("silu_mul")
        self.write_kv = function("write_kv")
        self.copy_page = function("copy_page")
        self.plan = function("plan")
        self.free_plan = function("free_plan")
        self.shared_keys = function("shared_keys")
        self.attention = function("attention")
        self.open = function("open")
        self.close = function("close")
        self.forward = function("forward")
        self.logits = function("logits")
        self.read = function("read")
        self.repeat_dots = function("repeat_dots")


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's data lie; null for None. The caller keeps the tensor alive."""
    return None if tensor is None else tensor.data_ptr()
