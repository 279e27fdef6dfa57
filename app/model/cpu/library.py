"""Builds the C++ code in this folder once, with the machine's compiler, and makes it callable through ctypes.

The library is stored in the user's cache folder under a hash of everything it depends on, so later processes do not
rebuild it. `python -m app.model.cpu.library` builds libraries for several classes of x86-64 CPUs, which an image
ships to machines without a compiler. Without a compiler and a library, models run in plain torch.
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
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from app.disk import cache_folder, locked_if_possible
from app.errors import InvalidSetup
from app.model.sampler import DRAW_FLOATS, DRAW_INTEGERS
from app.progress import step_within

logger = logging.getLogger(__name__)

LANES = 16  # numbers in a vector; must match the C++ sources
MOST_PARTS = 3  # the most matrices in one product; must match the C++ sources
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}  # the supported types and their function suffixes

_SOURCES = Path(__file__).parent
# Compiler flags for the CPU, by the machine's name.
_CPU_FLAGS = {"x86_64": ("-march=native", "-mprefer-vector-width=512"), "aarch64": ("-mcpu=native",)}
# Symbols are hidden, because two libraries in one process would otherwise share symbols of the same name.
_COMMON_FLAGS = (
    "-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-pthread", "-fPIC", "-fvisibility=hidden",
)  # fmt: skip
_FLAGS = (*_COMMON_FLAGS, *_CPU_FLAGS.get(platform.machine(), ()))
# Compilation units, which are compiled in parallel.
_UNITS = (
    *((f"-DTYPE={suffix}", "typed.cpp") for suffix in reversed(DTYPES.values())),
    ("stored.cpp",),
    ("library.cpp",),
)


@dataclass(frozen=True, slots=True)
class Level:
    """A class of CPUs that one library, built on any machine, supports. Flags are named as in /proc/cpuinfo."""

    name: str
    march: str
    more: tuple[str, ...]  # flags in addition to those of `march`

    @property
    def options(self) -> tuple[str, ...]:
        more = (f"-m{flag.replace('_', '-' if flag.startswith('amx') else '')}" for flag in self.more)
        return (*_COMMON_FLAGS, f"-march={self.march}", *more, "-mprefer-vector-width=512")

    @property
    def cpu_flags(self) -> frozenset[str]:
        of_v3 = ("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm")
        of_v4 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
        return frozenset((*of_v3, *(of_v4 if self.march == "x86-64-v4" else ()), *self.more))


_BF16 = ("avx512_vnni", "avx512_bf16")
LEVELS = (  # from best to worst
    Level("amx", "x86-64-v4", (*_BF16, "amx_tile", "amx_bf16", "amx_int8")),
    Level("avx512-bf16", "x86-64-v4", _BF16),
    Level("avx512", "x86-64-v4", ()),
    Level("avx2", "x86-64-v3", ()),
)


_POINTER, _INT32, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def _fields(kind: Any, *names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names)


class Filled(ctypes.Structure):
    """A structure of the C++ code. The constructor requires every field, by name, so that none is forgotten."""

    def __init__(self, **values: Any) -> None:
        names = [field[0] for field in self._fields_]
        assert values.keys() == set(names), f"{type(self).__name__} has {names}, given are {list(values)}"
        super().__init__(**values)

    @classmethod
    def packing(cls) -> str:
        """Return the format for `struct.pack`, without the leading "=", for values in the order of the fields."""
        characters, end = "", 0
        for field in cls._fields_:
            place = getattr(cls, field[0])
            characters += "x" * (place.offset - end) + _PACKED[field[1]]
            end = place.offset + place.size
        return characters + "x" * (ctypes.sizeof(cls) - end)


_PACKED: dict[Any, str] = {_POINTER: "Q", _INT64: "q", _FLOAT: "f"}


class AttentionShape(Filled):
    _fields_ = (
        *_fields(_INT64, "num_heads", "num_kv_heads", "key_dim", "value_dim", "block_size"),
        *_fields(_FLOAT, "scaling", "softcap"), ("sliding_window", _INT64), ("sinks", _POINTER),
        *_fields(_INT64, "heads_in_block", "scales_in_block", "is_latent"),
    )  # fmt: skip


class Strides(Filled):
    _fields_ = _fields(_INT64, "query_token", "query_head", "key_token", "key_head", "value_token", "value_head")

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Strides:
        """Return the strides of three tensors [num_tokens, num_heads, dim], whose last dimension must be contiguous."""
        return cls(
            query_token=query.stride(0), query_head=query.stride(1), key_token=key.stride(0), key_head=key.stride(1),
            value_token=value.stride(0), value_head=value.stride(1),
        )  # fmt: skip


class ExpertsShape(Filled):
    _fields_ = _fields(_INT64, "num_experts", "per_token", "intermediate_size", "weights_sum_to_one", "rounds_weights")


class ConvolutionShape(Filled):
    _fields_ = _fields(_INT64, "num_channels", "kernel_size", "input_token", "slot", "has_silu")


class RecurrenceShape(Filled):
    _fields_ = (
        *_fields(_INT64, "num_key_heads", "num_value_heads", "key_dim", "value_dim", "slot", "normalises"),
        ("scale", _FLOAT),
    )  # fmt: skip


class PerLayerShape(Filled):
    _fields_ = (
        *_fields(_INT64, "size", "total_size"), *_fields(_POINTER, "embedding", "projection", "norm"),
        *_fields(_FLOAT, "embedding_scale", "projection_scale", "sum_scale"),
    )  # fmt: skip


class DecoderShape(Filled):
    _fields_ = (
        *_fields(
            _INT64, "hidden_size", "num_heads", "vocab_size", "block_size", "num_layers", "weight_bits", "num_groups",
            "gates_attention", "norms_all_heads", "norms_values", "rounds_in_norms", "rounds_rotary", "has_gelu",
        ),
        *_fields(_FLOAT, "epsilon", "scaling", "softcap", "logits_softcap", "embedding_scale"),
        ("per_layer", PerLayerShape),
        ("experts", ExpertsShape), ("convolution", ConvolutionShape), ("delta_rule", RecurrenceShape),
    )  # fmt: skip


class MlpWeights(Filled):
    _fields_ = _fields(_POINTER, "gate_up", "down")


class LayerWeights(Filled):
    _fields_ = (
        *_fields(_INT64, "mixer", "intermediate_size"),
        *_fields(
            _POINTER, "mixer_input_norm", "mixer_output_norm", "feed_forward_input_norm", "feed_forward_output_norm",
            "projection", "projection_bias", "output", "output_bias", "query_norm", "key_norm", "keys", "values",
            "scales",
        ),
        *_fields(
            _INT64, "heads_in_block", "scales_in_block", "num_kv_heads", "head_dim", "num_kv_projections",
            "sliding_window", "group", "rotary", "rotary_dim",
        ),
        *_fields(
            _POINTER, "taps", "tap_biases", "convolution_states", "rates", "decay", "decay_bias", "gate_norm",
            "delta_states", "per_layer_gate", "per_layer_projection", "per_layer_norm", "output_scale", "router",
            "mlps",
        ),
    )  # fmt: skip


class LowRank(ctypes.Structure):
    _fields_ = (("down", _POINTER), ("up", _POINTER * MOST_PARTS), ("rank", _INT64 * MOST_PARTS))


class AdapterLayer(ctypes.Structure):
    _fields_ = _fields(LowRank, "query_key_value", "output", "gate_up", "down")


class DecoderStep(Filled):
    _fields_ = (
        *_fields(_INT64, "num_tokens", "num_segments", "num_pieces", "num_rows", "num_logits"),
        *_fields(_POINTER, "token_ids", "positions", "slots", "segments", "tables", "pieces", "rows", "logits_rows"),
        *_fields(_POINTER, "rotary", "logits", "likeliest", "hidden"),
        ("num_adapters", _INT64), *_fields(_POINTER, "adapters", "adapter_of"),
    )  # fmt: skip


class Segment(Filled):
    """A row of `Segments.segments` in inputs.py."""

    _fields_ = _fields(_INT32, "first_token", "num_tokens", "start", "table_offset")


class Piece(Filled):
    """A row of `StatePieces.table` in recurrence.py."""

    _fields_ = _fields(_INT32, "first_token", "num_tokens", "read_slot", "written_slot")


class Draw(Filled):
    _fields_ = (*_fields(_INT64, "position", *DRAW_INTEGERS), *_fields(_FLOAT, *DRAW_FLOATS))


class Adjustments(Filled):
    _fields_ = (
        ("repetition_penalty", _FLOAT), ("seen", _POINTER), ("num_seen", _INT64),
        ("deducted", _POINTER), ("num_deducted", _INT64), ("deductions", _POINTER),
        ("biased", _POINTER), ("num_biased", _INT64), ("biases", _POINTER),
        ("banned", _POINTER), ("num_banned", _INT64), ("mask", _INT64),
    )  # fmt: skip


STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    AttentionShape, Strides, ExpertsShape, PerLayerShape, DecoderShape, MlpWeights, LayerWeights, LowRank, AdapterLayer,
    DecoderStep, Segment, Piece, ConvolutionShape, RecurrenceShape, Draw, Adjustments,
)  # fmt: skip


# Name → (argument types, result type). A name that ends in {} stands for one function per type.
_FUNCTIONS: dict[str, tuple[tuple[type, ...], type | None]] = {
    "thread_pool_new": ((_INT32,), _POINTER),
    "thread_pool_delete": ((_POINTER,), None),
    "touch": ((_POINTER, _POINTER, _INT64), None),
    "adjust": ((_POINTER, _POINTER, _INT64) + (_POINTER,) * 2 + (_INT64, _POINTER, _INT64, _POINTER), None),
    "draw": ((_POINTER, _POINTER, _INT64, _POINTER, _POINTER, _INT64, _POINTER), None),
    "logprobs": ((_POINTER, _POINTER, _INT64, _POINTER, _POINTER, _INT64, _INT64) + (_POINTER,) * 5, None),
    "is_fast_in_{}": ((), _INT32),
    "layouts_{}": ((), ctypes.c_char_p),
    "amx_refusal": ((), _INT32),
    "attention_step_{}": ((_POINTER,) * 7 + (_INT64,) + (_POINTER,) * 4 + (_INT64,) + (_POINTER,) * 2, None),
    "short_convolution_{}": ((_POINTER,) * 7 + (_INT64, _POINTER), None),
    "gated_delta_rule_{}": ((_POINTER,) * 10 + (_INT64, _POINTER), None),
    "mamba1_{}": ((_POINTER,) * 11 + (_INT64, _POINTER), None),
    "mamba2_{}": ((_POINTER,) * 11 + (_INT64, _POINTER), None),
    "decoder_new_{}": ((_POINTER,) * 6, _POINTER),
    "decoder_run_{}": ((_POINTER,) * 2, None),
    "decoder_delete_{}": ((_POINTER,), None),
    "pack": ((_POINTER, _POINTER, _INT64, _INT64, _POINTER), None),
    "pack_stored": ((_POINTER, _POINTER, _INT64, _INT64, _POINTER), None),
    "stored_form": ((_INT64,), _INT64),
    "stored_lines": ((_INT64, _INT64), _INT64),
    "dequantise": ((_POINTER, _INT64, _POINTER, _INT64, _POINTER), None),
    "pack_in_8_bits_{}": ((_POINTER, _POINTER, _INT64, _INT64, _POINTER), None),
    "pack_in_4_bits_{}": ((_POINTER, _POINTER, _INT64, _INT64, _POINTER), None),
}


@cache
def library() -> ctypes.CDLL | None:
    """Return the library, built if needed, or None after logging a warning. Its functions start with `carousel_`."""
    compiler = _compiler()
    try:
        path = _built(compiler) if compiler else _built_elsewhere()
        if path is None:
            logger.warning(
                "no C++ compiler found, so the model runs on plain torch, which is several times slower; install c++, "
                "g++ or clang++"
            )
            return None
        found = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("the native code cannot be built (%s), so the model runs on plain torch, which is slower", error)
        return None
    for pattern, (arguments, result) in _FUNCTIONS.items():
        for name in {pattern.format(suffix) for suffix in DTYPES.values()}:
            function = getattr(found, f"carousel_{name}")
            function.argtypes, function.restype = arguments, result
    for suffix in DTYPES.values():
        check_layouts(getattr(found, f"carousel_layouts_{suffix}")().decode(), STRUCTURES)
    return found


def check_layouts(native: str, structures: Iterable[type[ctypes.Structure]]) -> None:
    """Compare the ctypes structures with the compiled ones, as layouts.h reports them.

    Raises RuntimeError, with both layouts, if a size or the offset of a field differs. Without this check, the C++ code
    would silently read wrong fields.
    """
    lines = {line.split(maxsplit=1)[0]: line for line in native.splitlines()}
    own = {kind.__name__: _layout_of(kind) for kind in structures}
    for name in sorted(lines.keys() | own.keys()):
        if lines.get(name) != own.get(name):
            raise RuntimeError(
                f"the native code and Python lay out {name} differently; the structure in C++, layouts.h and "
                f"library.py must change together. Size, then name, offset and size of each field: "
                f"C++ has {lines.get(name)!r}, Python has {own.get(name)!r}"
            )


def _layout_of(kind: type[ctypes.Structure]) -> str:
    """Return a structure's layout in the format of layouts.h."""
    places = [(name, getattr(kind, name)) for name, *_ in kind._fields_]
    fields = "".join(f" {name} {place.offset} {place.size}" for name, place in places)
    return f"{kind.__name__} {ctypes.sizeof(kind)}{fields}"


class ThreadPool:
    """Threads that share the work of each C++ call. Only one call may run at a time."""

    def __init__(self, num_threads: int) -> None:
        code = library()
        assert code is not None, "callers must have checked that the library exists"
        self.code = code
        self.handle = code.carousel_thread_pool_new(num_threads)
        weakref.finalize(self, code.carousel_thread_pool_delete, self.handle)


def is_fast(dtype: torch.dtype) -> bool:
    """Return whether the native decoder is faster than transformers' code on this machine.

    Measured on two cores, it is 1.3 to 2.2 times faster in float32 and 1.8 to 3.6 times in bfloat16 with AVX2; 1.2 to
    2.7 and 2.9 to 4.7 times with AVX-512 without bf16. On Arm, it is assumed to be faster in float32.
    """
    code = library()
    return code is not None and bool(getattr(code, f"carousel_is_fast_in_{DTYPES[dtype]}")())


def log_use_of_amx(kind: str, *sizes: int) -> None:
    """Log whether AMX multiplies numbers of this kind, or why it does not. sizes: lengths of the multiplied rows."""
    reason = why_not_amx(*sizes)
    if reason is None:
        logger.info("%s: matrix products use the CPU's matrix unit (AMX)", kind)
    else:
        logger.info("%s: matrix products use vector instructions, not AMX: %s", kind, reason)


def why_not_amx(*sizes: int) -> str | None:
    code = library()
    assert code is not None, "only native code uses AMX"
    refusal = code.carousel_amx_refusal()
    if refusal > 0:
        return f"the kernel refuses it ({os.strerror(refusal)})"
    if refusal < 0:
        return "this compiler does not support it" if "amx_bf16" in _cpu() else "this CPU has no amx_bf16"
    amx_numbers = 32  # bfloat16 numbers in a row of a tile
    odd = sorted({size for size in sizes if size % amx_numbers})
    return f"inputs of {', '.join(map(str, odd))} are not multiples of {amx_numbers}" if odd else None


def in_large_pages(*shape: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Allocate uninitialised memory, in large pages if the system supports them, to save lookups of page addresses.

    device: meta for a tensor that needs no memory.
    """
    tensor = torch.empty(*shape, dtype=dtype, device=device)
    if hasattr(mmap, "MADV_HUGEPAGE") and not tensor.is_meta:
        advise(tensor, mmap.MADV_HUGEPAGE)
    return tensor


def advise(tensor: torch.Tensor, advice: int) -> None:
    """Advise the system on the use of a tensor's whole pages; errors are ignored. advice: one of `mmap.MADV_*`."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if num_bytes > 0:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(first, num_bytes, advice)


def build_for(levels: Iterable[Level]) -> list[Path]:
    """Build the libraries of some levels in the cache folder. Raises InvalidSetup if there is no compiler."""
    compiler = _compiler()
    if compiler is None:
        raise InvalidSetup("no C++ compiler found: install c++, g++ or clang++")
    return [_kept(compiler, level.options, _path_for(level)) for level in levels]


def _compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _built(compiler: str) -> Path:
    """Return the path of this machine's library, built if needed. If several processes start, only one builds it."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=20).stdout
    what = b"\0".join([*_source_texts(), version, " ".join(_FLAGS).encode(), _cpu().encode()])
    return _kept(compiler, _FLAGS, cache_folder() / f"native-{hashlib.sha256(what).hexdigest()[:16]}.so")


def _built_elsewhere() -> Path | None:
    """Return the fastest of the libraries in the cache folder that were built for a level of this CPU, or None."""
    flags = frozenset(_cpu().split())
    fitting = (_path_for(level) for level in LEVELS if level.cpu_flags <= flags)
    return next((path for path in fitting if path.exists()), None)


def _path_for(level: Level) -> Path:
    return cache_folder() / f"native-{hashlib.sha256(b'.'.join(_source_texts())).hexdigest()[:16]}-{level.name}.so"


def _source_texts() -> list[bytes]:
    return [path.read_bytes() for pattern in ("*.h", "*.cpp") for path in sorted(_SOURCES.glob(pattern))]


def _kept(compiler: str, flags: Sequence[str], target: Path) -> Path:
    if target.exists():
        return target
    lock = locked_if_possible(
        target.with_suffix(".lock"), without="several processes may build the native code concurrently"
    )
    with step_within("building native code (once, about half a minute)"), lock:
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                _build(compiler, flags, Path(scratch) / target.name).replace(target)
            logger.info("built %s", target)
    return target


def _build(compiler: str, flags: Sequence[str], target: Path) -> Path:
    """Build the library at `target`, with its object files in the same folder, and return `target`."""

    def run(*arguments: str | Path) -> None:
        subprocess.run([compiler, *flags, *arguments], check=True, capture_output=True, timeout=300)

    def compiled(unit: tuple[str, ...]) -> Path:
        *options, source = unit
        path = target.parent / f"{'-'.join(unit)}.o"
        run(*options, "-c", "-o", path, _SOURCES / source)
        return path

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compiled, _UNITS))
    run("-shared", "-o", target, *objects)
    return target


def _cpu() -> str:
    """Return a text that differs between CPUs for which `-march=native` may generate different code."""
    info = Path("/proc/cpuinfo")
    flags = [line for line in info.read_text().splitlines() if line.startswith("flags")] if info.exists() else []
    return flags[0] if flags else f"{platform.machine()} {platform.processor()}"


if __name__ == "__main__":
    print("\n".join(map(str, build_for(LEVELS))))
