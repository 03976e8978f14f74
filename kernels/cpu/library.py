"""The compiled library's functions and structures, as `csrc/api.cpp` and `csrc/decoder.h` declare them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kernels.cpu.build import Built

PANEL = 32
"""Outputs per panel of packed weights (`csrc/gemm.h`)."""

TYPES = {torch.bfloat16: 0, torch.float32: 1}
PAIRS = {torch.bfloat16: 2, torch.float32: 1}
"""Elements per 32-bit lane."""

_POINTER, _TYPE, _THREADS = c_void_p, c_int, c_int


class Matrix(ctypes.Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("steps", c_int32),
        ("panel_count", c_int32),
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
        ("embedding", c_void_p),
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
    )


class Kv(ctypes.Structure):
    _fields_ = (
        ("base", c_void_p),
        ("page_stride", c_int64),
        ("slots", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
    )


class Library:
    """One compiled library. Attributes are its functions without their common prefix."""

    def __init__(self, built: Built) -> None:
        self.built = built
        library = ctypes.CDLL(str(built.path))

        def function(name: str, *arguments: object, returns: object = None) -> ctypes._CFuncPtr:  # noqa: SLF001
            found = library["agentserve_" + name]
            found.argtypes = arguments
            found.restype = returns
            return found

        i, p, n = c_int64, _POINTER, c_int
        self.pack = function("pack", _TYPE, p, i, i, c_int, p, _THREADS)
        self.linear = function("linear", _TYPE, POINTER(Matrix), p, n, p, _THREADS)
        self.rms_norm = function("rms_norm", _TYPE, p, p, p, i, i, c_float, p, p, _THREADS)
        self.rope = function("rope", _TYPE, p, i, p, p, i, i, i, p, _THREADS)
        self.silu_mul = function("silu_mul", _TYPE, p, i, i, p, _THREADS)
        self.write_kv = function("write_kv", _TYPE, POINTER(Kv), p, p, i, p, i, i)
        self.copy_page = function("copy_page", _TYPE, POINTER(Kv), i, c_int, i, i, c_int)
        self.plan = function("plan", p, i, p, i, c_int, c_int, c_int, returns=c_void_p)
        self.free_plan = function("free_plan", p)
        self.shared_keys = function("shared_keys", p, returns=c_int64)
        self.attention = function("attention", _TYPE, p, POINTER(Kv), n, p, p, _THREADS)
        self.open = function("open", _TYPE, POINTER(Model), returns=c_void_p)
        self.close = function("close", p)
        self.forward = function("forward", p, n, p, p, POINTER(Group), n, p, _THREADS)
        self.logits = function("logits", p, n, p, p, _THREADS)


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's data lie; null for None. The caller keeps the tensor alive."""
    return None if tensor is None else tensor.data_ptr()
