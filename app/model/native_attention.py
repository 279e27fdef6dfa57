"""Paged attention for CPUs in C++ (`native_attention.cpp`), built once with the machine's own compiler.

Where there is no compiler, or a model's shape does not fit, `TorchAttention` serves instead. The library is kept in the
user's cache folder, by the hash of everything that went into it; a process that finds it starts at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from app.engine.batch import Batch
from app.model.attention import AttentionRules, AttentionStep
from app.model.inputs import ModelInputs, Segments, build_segments
from app.model.kv_cache import LayerShape

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("native_attention.cpp")
_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math",
    "-fopenmp", "-shared", "-fPIC",
)  # fmt: skip
_LANES = 16  # as in the source
_MAX_SEGMENT_TOKENS = 32
_FUNCTIONS = {torch.float32: "carousel_step_f32", torch.bfloat16: "carousel_step_bf16"}


class NativeAttention:
    """KV memory in the kernel's own layout, and the kernel."""

    def __init__(
        self, layers: dict[int, LayerShape], *, num_blocks: int, block_size: int, dtype: torch.dtype, num_threads: int
    ) -> None:
        """`fits` must hold."""
        self.block_size = block_size
        self.num_threads = num_threads
        self.function = getattr(_library(), _FUNCTIONS[dtype])
        self.keys: dict[int, torch.Tensor] = {}  # by layer: [num_blocks, num_kv_heads, key_dim, block_size]
        self.values: dict[int, torch.Tensor] = {}  # by layer: [num_blocks, num_kv_heads, block_size, value_dim]
        for index, layer in layers.items():
            blocks = (num_blocks, layer.num_kv_heads)
            self.keys[index] = _in_large_pages(*blocks, layer.key_dim, block_size, dtype=dtype)
            self.values[index] = _in_large_pages(*blocks, block_size, layer.value_dim, dtype=dtype)

    @staticmethod
    def fits(layers: dict[int, LayerShape], *, block_size: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether this machine and these shapes can use it."""
        shapes_fit = block_size % _LANES == 0 and all(layer.value_dim % _LANES == 0 for layer in layers.values())
        return device.type == "cpu" and dtype in _FUNCTIONS and shapes_fit and _library() is not None

    def begin_step(self, batch: Batch, inputs: ModelInputs) -> AttentionStep:
        segments = build_segments(batch, block_size=self.block_size, max_tokens=_MAX_SEGMENT_TOKENS)
        return _NativeStep(self, inputs.slots, segments)


class _NativeStep:
    def __init__(self, attention: NativeAttention, slots: torch.Tensor, segments: Segments) -> None:
        self._attention = attention
        self._slots = slots
        self._segments = segments

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: AttentionRules
    ) -> torch.Tensor:
        attention, segments = self._attention, self._segments
        query, key, value = _rows(query), _rows(key), _rows(value)
        num_tokens, num_heads, key_dim = query.shape
        output = query.new_empty(num_tokens, num_heads, value.shape[-1])
        sinks = None if rules.sinks is None else rules.sinks.float().contiguous()
        shape = _Layer(
            num_heads, key.shape[1], key_dim, value.shape[-1], attention.block_size,
            rules.scaling, rules.softcap or 0.0, rules.sliding_window or 0, None if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
        strides = _Strides(*query.stride()[:2], *key.stride()[:2], *value.stride()[:2])
        attention.function(
            ctypes.byref(shape), ctypes.byref(strides), query.data_ptr(), key.data_ptr(), value.data_ptr(),
            self._slots.data_ptr(), num_tokens, attention.keys[layer].data_ptr(), attention.values[layer].data_ptr(),
            segments.segments.data_ptr(), segments.segments.shape[0], segments.tables.data_ptr(), output.data_ptr(),
            attention.num_threads,
        )  # fmt: skip
        return output


def _in_large_pages(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory in large pages where the system has them: blocks lie scattered, and each small page costs a lookup.

    Not zeroed, so that only what is used is taken: a slot counts only after its sequence has written it.
    """
    tensor = torch.empty(*shape, dtype=dtype)
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if num_bytes > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(first, num_bytes, mmap.MADV_HUGEPAGE)  # advice: it may well be refused
    return tensor


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim", "block_size")),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sliding_window", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
    )


class _Strides(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("query_token", "query_head", "key_token", "key_head", "value_token", "value_head")
    )


_ARGUMENTS = (
    ctypes.POINTER(_Layer), ctypes.POINTER(_Strides), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
    ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32,
)  # fmt: skip


@cache
def _library() -> ctypes.CDLL | None:
    """The built library, or None, said once, where it cannot be built."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        logger.warning("no C++ compiler found: attention runs on plain torch, which is several times slower")
        return None
    try:
        library = ctypes.CDLL(str(_built(compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("the native attention cannot be built (%s): attention runs on plain torch, slower", error)
        return None
    for name in _FUNCTIONS.values():
        function = getattr(library, name)
        function.argtypes, function.restype = _ARGUMENTS, None
    return library


def _built(compiler: str) -> Path:
    """The library's path, after building it if nobody has yet. Several processes may do so at once."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=20).stdout
    what = b"\0".join([_SOURCE.read_bytes(), version, " ".join(_FLAGS).encode(), _cpu().encode()])
    folder = Path.home() / ".cache" / "carousel"
    target = folder / f"native_attention-{hashlib.sha256(what).hexdigest()[:16]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, suffix=".so")
    os.close(handle)
    try:
        subprocess.run([compiler, *_FLAGS, "-o", name, str(_SOURCE)], check=True, capture_output=True, timeout=120)
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)
    logger.info("built %s", target)
    return target


def _cpu() -> str:
    """What `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    flags = [line for line in info.read_text().splitlines() if line.startswith("flags")] if info.exists() else []
    return flags[0] if flags else f"{platform.machine()} {platform.processor()}"
