"""Compiles every kernel launch of a few steps for a GPU that is not here: run by `test_triton_compiles.py`.

    python -m tests.model.cuda.compile_kernels 90 llama8b

The first argument is the architecture, an H100's if left out; the others are shapes. Prints one line for each kernel
and shape: kernel, shape, bytes of shared memory, bytes that a thread spills.
A process of its own, because Triton decides when it is imported whether it compiles or interprets.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from app.engine.batch import Batch, ScheduledSequence
from app.engine.request import SamplingParams
from app.model.attention import AttentionRules
from app.model.cuda import attention as triton_attention
from app.model.cuda import batch_invariant, invariant_kernels
from app.model.cuda import kernels as triton_kernels
from app.model.cuda.tuning import tuning_of
from app.model.inputs import build_inputs
from app.model.kv_cache import LayerShape

ARCHITECTURE = int(sys.argv[1]) if len(sys.argv) > 1 else 90
TARGET = GPUTarget("cuda", ARCHITECTURE, 32)
CPU = torch.device("cpu")
_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32",
}  # fmt: skip


class CompileOnly:
    """Stands for a kernel: a launch compiles it for what it is given, and runs nothing."""

    def __init__(self, kernel: Any, shape: str) -> None:
        self._kernel, self._shape = kernel, shape

    def __getitem__(self, grid: tuple[int, ...]) -> CompileOnly:
        assert all(size > 0 for size in grid), grid
        return self

    def __call__(self, *given: Any, num_warps: int = 4, num_stages: int = 3, **named: Any) -> None:
        parameters = self._kernel.params
        arguments = {p.name: value for p, value in zip(parameters, given, strict=False)} | named
        assert arguments.keys() == {p.name for p in parameters}, arguments.keys() ^ {p.name for p in parameters}
        constants = {p.name: arguments[p.name] for p in parameters if p.is_constexpr}
        signature = {p.name: "constexpr" if p.is_constexpr else type_of(arguments[p.name]) for p in parameters}
        source = ASTSource(
            fn=self._kernel, signature=signature, constexprs=constants, attrs=aligned(parameters, arguments)
        )
        compiled = triton.compile(source, target=TARGET, options={"num_warps": num_warps, "num_stages": num_stages})
        print(self._kernel.__name__, self._shape, compiled.metadata.shared, spilled(compiled.asm["cubin"]), flush=True)


def spilled(cubin: bytes) -> int:
    """Bytes of stack of a thread: registers that did not suffice."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1])


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def is_aligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def aligned(parameters: list[Any], arguments: dict[str, Any]) -> dict[tuple[int], list[list[Any]]]:
    """What a launch would find out: pointers and integers that are multiples of 16."""
    return {
        (p.num,): [["tt.divisibility", 16]]
        for p in parameters
        if not p.is_constexpr and not p.do_not_specialize and is_aligned(arguments[p.name])
    }


def compile_for(
    name: str, *, num_heads: int, layer: LayerShape, dtype: torch.dtype, block_size: int, rules: AttentionRules
) -> None:
    kernels = type("Kernels", (), {
        kernel: CompileOnly(getattr(triton_kernels, kernel), name)
        for kernel in ("write_kernel", "decode_kernel", "reduce_kernel", "prefill_kernel")
    })  # fmt: skip
    triton_attention._kernels = lambda: kernels
    triton_attention.tuning_for = lambda device: tuning_of(divmod(ARCHITECTURE, 10))
    attention = triton_attention.TritonAttention(
        {0: layer}, num_blocks=16, block_size=block_size, max_rows=4, max_blocks=2048, dtype=dtype, device=CPU
    )
    attention.device = torch.device("meta")  # so that nothing is widened for the interpreter
    items = [piece(0, 40, [1, 2, 3]), piece(20, 1, [4, 5])]
    batch = Batch(tuple(items), ())
    inputs = build_inputs(batch, block_size=block_size, device=CPU)
    qkv = [
        torch.zeros(heads, 41, dim, dtype=dtype).transpose(0, 1)
        for heads, dim in (
            (num_heads, layer.key_dim), (layer.num_kv_heads, layer.key_dim), (layer.num_kv_heads, layer.value_dim),
        )
    ]  # fmt: skip
    step = triton_attention.TritonStep(
        attention, inputs.slots, single=torch.zeros(4, 1, dtype=torch.long),
        pieces=triton_attention.Pieces([(0, 40, 0, 0)], CPU),
    )  # fmt: skip
    step.attend(0, *qkv, rules)


def compile_invariant_kernels() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        kernels = type("Kernels", (), {
            kernel: CompileOnly(getattr(invariant_kernels, kernel), name) for kernel in ("matmul_kernel", "mean_kernel")
        })  # fmt: skip
        batch_invariant._kernels = lambda kernels=kernels: kernels
        x, weight = (torch.zeros(*size, dtype=dtype, device="meta") for size in ((40, 4096), (1024, 4096)))
        with batch_invariant.BatchInvariantMode():
            torch.nn.functional.linear(x, weight, weight[:, 0].contiguous()).mean(-1)


def piece(start: int, num_tokens: int, block_ids: list[int]) -> ScheduledSequence:
    return ScheduledSequence("r", (0,) * num_tokens, start, block_ids, True, SamplingParams(max_tokens=1))


def shape(num_kv_heads: int, key_dim: int, value_dim: int | None = None) -> LayerShape:
    return LayerShape(num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim or key_dim)


CASES = {
    "llama8b": {
        "num_heads": 32, "layer": shape(8, 128), "dtype": torch.bfloat16, "block_size": 16,
        "rules": AttentionRules(scaling=0.1),
    },
    "wide": {  # Gemma's head size, in the type that takes most room
        "num_heads": 8, "layer": shape(4, 256), "dtype": torch.float32, "block_size": 16,
        "rules": AttentionRules(scaling=0.1, softcap=50.0, sliding_window=4096),
    },
    "odd": {
        "num_heads": 21, "layer": shape(3, 96, 80), "dtype": torch.float16, "block_size": 48,
        "rules": AttentionRules(scaling=0.1, sliding_window=127, sinks=torch.zeros(21)),
    },
}  # fmt: skip

if __name__ == "__main__":
    compile_invariant_kernels()
    for case in sys.argv[2:] or CASES:
        compile_for(case, **CASES[case])  # type: ignore[arg-type]
