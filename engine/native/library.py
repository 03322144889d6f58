"""The compiled kernels as Python sees them: structures, signatures and how they are loaded."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from engine.native.build import BuildError

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Element types that the kernels know, with the suffix of their functions' names."""

NO_WINDOW = 1 << 62


class CacheShape(ctypes.Structure):
    """`CacheShape` of step.h."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("num_layers", "num_kv_heads", "block_size", "head_dim")
    )


class Step(ctypes.Structure):
    """`Step` of step.h; the arrays' owner keeps them alive."""

    _fields_ = (
        ("cache", ctypes.c_void_p),
        ("shape", CacheShape),
        ("num_groups", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("num_chunks", ctypes.c_int64),
        ("chunks", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_threads", ctypes.c_int64),
    )


class Layer(ctypes.Structure):
    """`Layer` of step.h."""

    _fields_ = (
        ("index", ctypes.c_int64),
        ("query", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("key_value", ctypes.c_void_p),
        ("key_value_stride", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("window", ctypes.c_int64),
    )


class QuantizedProduct(ctypes.Structure):
    """`QuantizedProduct` of quantized.h."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
    )


class Matrix(ctypes.Structure):
    """`Matrix` of product.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    )


class LayerWeights(ctypes.Structure):
    """`LayerWeights` of layer.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_attention_norm")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm")),
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
    )


class Rows(ctypes.Structure):
    """`Rows` of layer.cpp; the tensors' owner keeps them alive."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "update", "narrow", "striped", "wide")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        ("eps", ctypes.c_float),
    )


_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Library:
    """Functions for one element type. Calls release the GIL. Raises BuildError."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"cannot load {path}: {error}") from error
        suffix = DTYPES[dtype]
        self.attend = library[f"baton_attend_{suffix}"]
        self.attend.argtypes = (_POINTER, _POINTER)
        self.attend.restype = None
        self.add_norm = library[f"baton_add_norm_{suffix}"]
        self.add_norm.argtypes = (*[_POINTER] * 4, _INT, _INT, _FLOAT, _INT)
        self.add_norm.restype = None
        self.rotate = library[f"baton_rotate_{suffix}"]
        self.rotate.argtypes = (_POINTER, *[_INT] * 5, *[_POINTER] * 4, _FLOAT, _INT)
        self.rotate.restype = None
        self.gate = library[f"baton_gate_{suffix}"]
        self.gate.argtypes = (_POINTER, _POINTER, _INT, _INT, _INT)
        self.gate.restype = None
        self.pack = library[f"baton_pack_{suffix}"]
        self.pack.argtypes = (_POINTER, _POINTER, _INT, _INT, _INT)
        self.pack.restype = None
        self.linear = library[f"baton_linear_{suffix}"]
        self.linear.argtypes = (*[_POINTER] * 4, *[_INT] * 4)
        self.linear.restype = None
        self.plain_linear = library[f"baton_plain_linear_{suffix}"]
        self.plain_linear.argtypes = (*[_POINTER] * 3, *[_INT] * 4)
        self.plain_linear.restype = None
        self.quantized = {
            code: library[f"baton_quantized_{code}_{suffix}"] for code in ("int8", "fp8", "int4")
        }
        for function in self.quantized.values():
            function.argtypes = (_POINTER, _INT)
            function.restype = None
        self.integers = {code: library[f"baton_integers_{code}"] for code in ("int8", "int4")}
        for function in self.integers.values():
            function.argtypes = (_POINTER, _POINTER, _INT)
            function.restype = None
        self.max_integer_group = 0
        """Inputs that bfloat16 rows may have in one sum of integers; 0: the CPU has no such."""
        if dtype == torch.bfloat16:
            self.max_integer_group = int(library.baton_integers_max_group())
        self.per_word = 1 if dtype == torch.float32 else 2
        """Inputs that the kernels multiply in one go."""
        self.largest = library[f"baton_largest_{suffix}"]
        self.largest.argtypes = (_POINTER, _INT, _INT, _POINTER, _POINTER, _INT)
        self.largest.restype = None
        self.layer = library[f"baton_layer_{suffix}"]
        self.layer.argtypes = (*[_POINTER] * 3, _INT, _INT)
        self.layer.restype = None
        # bfloat16 needs AVX512-BF16.
        self.packs = bool(library[f"baton_packs_{suffix}"]())
        self.has_matrix_unit = bool(library.baton_has_matrix_unit())
        self.max_head_dim = int(library.baton_max_head_dim())
        self.max_num_groups = int(library.baton_max_num_groups())
