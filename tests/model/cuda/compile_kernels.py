"""Compiles every kernel launch of a few steps for GPUs that are not here: run by `test_triton_compiles.py`.

Prints for each kernel, shape and architecture: bytes that a thread spills, bytes of shared memory, and which of its
instructions are approximate. A process of its own, because Triton decides when it is imported whether it compiles or
interprets.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from app.engine.batch import StepBatch
from app.model.adapters import PRODUCTS
from app.model.attention import AttentionRules
from app.model.cuda import (
    adapter_kernels,
    batch_invariant,
    block_kernels,
    decoder_kernels,
    device_blocks,
    expert_kernels,
    fp8,
    invariant_kernels,
    recurrence,
    recurrence_kernels,
    sampler,
    sampler_kernels,
)
from app.model.cuda import adapters as triton_adapters
from app.model.cuda import attention as triton_attention
from app.model.cuda import decoder as triton_decoder
from app.model.cuda import experts as triton_experts
from app.model.cuda import kernels as attention_kernels
from app.model.cuda.tuning import tuning_of
from app.model.inputs import build_inputs
from app.model.kv_cache import KVCache, LayerShape
from app.model.llama import DecoderSettings, ExpertSettings, LayerSettings
from app.model.recurrence import DeltaRuleInputs, MambaInputs, StatePieces
from tests.kit.models import CPU, scheduled

ARCHITECTURES = (80, 89, 90, 100)  # A100; L4, L40, RTX 4090; H100 and H200; B200
_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32",
    torch.uint8: "*u8", fp8.FP8: "*fp8e4nv",
}  # fmt: skip


class Compiled(NamedTuple):
    """What the compiler makes of one kernel for one architecture."""

    kernel: str
    shape: str
    architecture: int
    spilled: int  # bytes of a thread's stack
    shared: int  # bytes of a program
    approximate: str  # instructions of PTX, "-" for none


class CompileOnly:
    """Stands for a kernel: a launch compiles it for what it is given, and runs nothing."""

    def __init__(self, kernel: Any, shape: str, results: list[Compiled], architectures: tuple[int, ...]) -> None:
        self._kernel, self._shape, self._results, self._architectures = kernel, shape, results, architectures

    def __getitem__(self, grid: tuple[int, ...]) -> CompileOnly:
        assert all(size > 0 for size in grid), grid
        return self

    def __call__(
        self, *given: Any, num_warps: int = 4, num_stages: int = 3, enable_fp_fusion: bool = True, **named: Any
    ) -> None:
        parameters = self._kernel.params
        arguments = {p.name: value for p, value in zip(parameters, given, strict=False)} | named
        assert arguments.keys() == {p.name for p in parameters}, arguments.keys() ^ {p.name for p in parameters}
        constants = {p.name: arguments[p.name] for p in parameters if p.is_constexpr}
        signature = {p.name: "constexpr" if p.is_constexpr else type_of(arguments[p.name]) for p in parameters}
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion}
        for architecture in self._architectures:
            source = ASTSource(
                fn=self._kernel, signature=signature, constexprs=constants, attrs=aligned(parameters, arguments)
            )
            compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
            spilled, shared = spilled_bytes(compiled.asm["cubin"]), compiled.metadata.shared
            approximate = ",".join(sorted(set(re.findall(r"\w+\.(?:approx|full)[.\w]*", compiled.asm["ptx"])))) or "-"
            self._results.append(
                Compiled(self._kernel.__name__, self._shape, architecture, spilled, shared, approximate)
            )


@contextmanager
def compiling(
    launching: Any, kernels: Any, shape: str, results: list[Compiled], architectures: tuple[int, ...]
) -> Iterator[None]:
    """What a module launches meanwhile is compiled. kernels: the module that has them."""
    names = [name for name, found in vars(kernels).items() if isinstance(found, triton.JITFunction)]
    stand_in = type(
        "Kernels", (), {name: CompileOnly(getattr(kernels, name), shape, results, architectures) for name in names}
    )
    before, launching.kernels_of = launching.kernels_of, lambda *_: stand_in
    try:
        yield
    finally:
        launching.kernels_of = before


def spilled_bytes(cubin: bytes) -> int:
    """Of a thread's stack: what did not fit into its registers."""
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


def launch_attention(
    architecture: int,
    *,
    num_heads: int,
    layer: LayerShape,
    dtype: torch.dtype,
    block_size: int,
    rules: AttentionRules,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """kv_dtype: of keys and values; None: as of all else."""
    attention = triton_attention.TritonAttention(
        {0: layer}, num_blocks=16, block_size=block_size, max_rows=4, max_blocks=2048, dtype=kv_dtype or dtype,
        device=CPU,
    )  # fmt: skip
    attention.tuning = tuning_of(divmod(architecture, 10))
    attention.device = torch.device("meta")  # so that nothing is widened for the interpreter
    items = [scheduled(40, 0, [1, 2, 3]), scheduled(1, 20, [4, 5])]
    batch = StepBatch(tuple(items), ())
    inputs = build_inputs(batch, block_size=block_size, device=CPU)
    qkv = [
        torch.zeros(heads, 41, dim, dtype=dtype).transpose(0, 1)
        for heads, dim in (
            (num_heads, layer.key_dim), (layer.num_kv_heads, layer.key_dim), (layer.num_kv_heads, layer.value_dim),
        )
    ]  # fmt: skip
    rows = triton_attention.StepRows(
        inputs.slots[0], torch.zeros(4, 1, dtype=torch.long), triton_attention.Pieces([(0, 40, 0, 0)], CPU)
    )  # fmt: skip
    step = triton_attention.TritonStep(attention, [rows])
    step.attend(0, *qkv, rules)


def launch_invariant(dtype: torch.dtype) -> None:
    x, weight = (torch.zeros(*size, dtype=dtype, device="meta") for size in ((40, 4096), (1024, 4096)))
    with batch_invariant.BatchInvariantMode():
        torch.nn.functional.linear(x, weight, weight[:, 0].contiguous()).mean(-1)


def launch_decoder(
    *, hidden_size: int, num_heads: int, num_kv_heads: int, inner_size: int, has_norm: bool, in_fp8: bool = False
) -> None:
    """The kernels between the products and the attention of one layer. in_fp8: inputs of products, keys and values."""

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=torch.bfloat16, device="meta")

    head_dim = 128
    layer = SimpleNamespace(query_norm=zeros(head_dim) if has_norm else None, key_norm=zeros(head_dim))
    layers = (LayerSettings(num_kv_heads=num_kv_heads, head_dim=head_dim),)
    settings = SimpleNamespace(num_heads=num_heads, layers=layers, epsilon=1e-6, experts=ExpertSettings())
    weights = SimpleNamespace(settings=settings, layers=(), rotary=zeros(4096, head_dim))
    cache = KVCache(
        {0: LayerShape(num_kv_heads=num_kv_heads, key_dim=head_dim, value_dim=head_dim)}, num_blocks=8, block_size=16,
        dtype=fp8.FP8 if in_fp8 else torch.bfloat16, device=torch.device("meta"),
    )  # fmt: skip
    decoder = triton_decoder.CudaDecoder(weights, SimpleNamespace(device=CPU, cache=cache, batch_invariant=False))  # type: ignore[arg-type]
    states, numbers = zeros(4, hidden_size), torch.zeros(4, dtype=torch.long)

    def empty(size: int) -> fp8.Rows:
        return fp8.empty_inputs(fp8.in_fp8(zeros(1, size)) if in_fp8 else zeros(1, size), 4)

    decoder._add_norm(states, states, zeros(hidden_size), empty(hidden_size))
    heads = zeros(4, num_heads + 2 * num_kv_heads, head_dim)
    decoder._rotate_and_write(0, layer, heads, numbers, numbers)  # type: ignore[arg-type]
    decoder._gated(zeros(4, 2 * inner_size), empty(inner_size))
    decoder._as_inputs(zeros(4, num_heads * head_dim), empty(num_heads * head_dim))


def launch_experts(
    *, hidden_size: int, inner_size: int, num_experts: int, per_token: int, dtype: torch.dtype, num_shared: int = 0
) -> None:
    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device="meta")

    mixture = triton_experts.ExpertMixture(ExpertSettings(num_experts=num_experts, per_token=per_token), CPU)
    mixture._widen = False
    of_router, num_experts = num_experts + (num_shared > 0), num_experts + num_shared
    mixture(
        zeros(40, hidden_size), zeros(of_router, hidden_size), zeros(num_experts, 2 * inner_size, hidden_size),
        zeros(num_experts, hidden_size, inner_size), torch.zeros(num_experts, dtype=torch.int32),
    )  # fmt: skip


def launch_adapters(
    *, hidden_size: int, num_heads: int, num_kv_heads: int, inner_size: int, in_fp8: bool = False, **_: object
) -> None:
    """Both products of a layer, for each of its matrices."""
    meta, dtype = torch.device("meta"), torch.bfloat16
    layer = LayerSettings(num_kv_heads=num_kv_heads, head_dim=128, intermediate_size=inner_size)
    settings = DecoderSettings(
        architecture="LlamaForCausalLM", hidden_size=hidden_size, num_heads=num_heads, experts=ExpertSettings(),
        vocab_size=8, epsilon=1e-6, scaling=0.1, layers=(layer,), rotary=(),
    )  # fmt: skip
    weights = SimpleNamespace(
        settings=settings, layers=[SimpleNamespace(router=None)], embedding=torch.zeros(1, dtype=dtype, device=meta)
    )
    slots = triton_adapters.AdapterSlots(weights, 8)  # type: ignore[arg-type]
    numbers = torch.zeros(3, 4, dtype=torch.long, device=meta)
    rows = triton_adapters.AdaptedRows(slots, numbers[0], numbers)
    for name, linears in PRODUCTS.items():
        sizes = [slots.sizes[f"model.layers.0.{linear}"] for linear in linears]
        inputs: fp8.Rows = torch.zeros(4, sizes[0].num_inputs, dtype=dtype, device=meta)
        if in_fp8:
            inputs = fp8.Fp8Rows(inputs.to(fp8.FP8), torch.zeros(4, 1, device=meta))
        output = torch.zeros(4, sum(each.num_outputs for each in sizes), dtype=dtype, device=meta)
        rows.add(0, name, inputs, output)


def launch_sampler(dtype: torch.dtype) -> None:
    logits, ours = torch.zeros(2, 128_256, dtype=dtype), sampler.TritonSampler(CPU)
    ours.logprobs(logits, [0, 1], ours.sample(logits, [scheduled(1)] * 2), num_top=20)


def launch_recurrence(dtype: torch.dtype, *, key_dim: int, value_dim: int) -> None:
    """Each operator, with 16 keys for 32 heads. Of Mamba 2 the size of a state is that of a key."""

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device="meta")

    num_keys, num_heads, num_tokens = 16, 32, 4
    ours = recurrence.TritonRecurrence(CPU)
    pieces = StatePieces(torch.tensor([[0, num_tokens, -1, 0]], dtype=torch.int32))
    num_channels, by_head = num_heads * value_dim, torch.zeros(num_tokens, num_heads, device="meta")
    by_channel = torch.zeros(num_tokens, num_channels, device="meta")
    keys, values = zeros(num_tokens, num_keys, key_dim), zeros(num_tokens, num_heads, value_dim)
    for bias in (None, zeros(num_channels)):
        ours.short_convolution(
            values.flatten(1), zeros(num_channels, 4), bias, zeros(2, 3, num_channels), pieces, activation="silu"
        )
    states = torch.zeros(2, num_heads, key_dim, value_dim, device="meta")
    delta_rule = DeltaRuleInputs(keys, keys, values, by_head, by_head.to(dtype))
    ours.gated_delta_rule(delta_rule, states, pieces, scale=0.1, normalises=True)
    decay, into = by_channel.new_zeros(num_channels, 16), keys[:, 0, :16]
    first = MambaInputs(values.flatten(1), by_channel, decay, into, into, by_channel[0])
    ours.mamba1(first, by_channel.new_zeros(2, num_channels, 16), pieces)
    second = MambaInputs(values, by_head, by_head[0], keys, keys, by_head[0])
    ours.mamba2(second, states.transpose(2, 3).contiguous(), pieces)


def launch_copies() -> None:
    """Of blocks of 16 tokens of two layers, in FP8 with scales."""
    device_blocks.DeviceBlocks([torch.zeros(4, 16, 8, 128, dtype=fp8.FP8), torch.zeros(4, 8, 2, 16)] * 2)


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

IN_BFLOAT16 = {  # what the models have that the three above lack: windows, sinks, groups of 5, 7 and 16 heads
    "gemma9b": CASES["wide"] | {"num_heads": 16, "layer": shape(8, 256), "dtype": torch.bfloat16},
    "gptoss": CASES["llama8b"] | {
        "num_heads": 64, "layer": shape(8, 64), "rules": AttentionRules(
            scaling=0.125, sliding_window=128, sinks=torch.zeros(64, dtype=torch.bfloat16)
        ),
    },
    "qwen7b": CASES["llama8b"] | {
        "num_heads": 28, "layer": shape(4, 128), "rules": AttentionRules(scaling=0.1, sliding_window=4096),
    },
    "qwen14b": CASES["llama8b"] | {"num_heads": 40},
    "qwen235b": CASES["llama8b"] | {"num_heads": 64, "layer": shape(4, 128)},
}  # fmt: skip

IN_FP8 = {  # keys and values
    "llama8b-fp8": CASES["llama8b"] | {"kv_dtype": fp8.FP8},
    "gemma9b-fp8": CASES["wide"] | {"dtype": torch.bfloat16, "kv_dtype": fp8.FP8},
    "odd-fp8": CASES["odd"] | {"kv_dtype": fp8.FP8},
}

# Each generation and each tuning once for a usual shape; of others, each where it asks for most of what there is. A
# launch of attention takes the compiler 5 s of CPU time.
TELLING = {
    "llama8b": ARCHITECTURES, "wide": (89,), "odd": (90,), "llama8b-fp8": (100,), "gemma9b-fp8": (90,),
    "odd-fp8": (89,), "gemma9b": (89, 90), "gptoss": (90,), "qwen7b": (89, 90), "qwen14b": (89,), "qwen235b": (90,),
}  # fmt: skip

DECODERS = {
    "llama70b": {
        "hidden_size": 8192, "num_heads": 64, "num_kv_heads": 8, "inner_size": 28672, "has_norm": False,
    },
    "qwen0.6b": {"hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8, "inner_size": 3072, "has_norm": True},
}  # fmt: skip

EXPERTS = {
    "mixtral": {
        "hidden_size": 4096, "inner_size": 14336, "num_experts": 8, "per_token": 2, "dtype": torch.bfloat16,
    },
    "qwen1.5moe": {
        "hidden_size": 2048, "inner_size": 1408, "num_experts": 60, "per_token": 4, "dtype": torch.bfloat16,
        "num_shared": 4,
    },
    "float32": {"hidden_size": 64, "inner_size": 48, "num_experts": 4, "per_token": 2, "dtype": torch.float32},
}  # fmt: skip

RECURRENT = {
    "qwen3.5": {"dtype": torch.bfloat16, "key_dim": 128, "value_dim": 128},
    "granite4h": {"dtype": torch.bfloat16, "key_dim": 128, "value_dim": 64},
    "largest": {"dtype": torch.float32, "key_dim": 256, "value_dim": 256},
    "odd": {"dtype": torch.float16, "key_dim": 96, "value_dim": 80},
}  # fmt: skip


def compile_all() -> list[Compiled]:
    """Each kernel for the architectures that can tell something of their own.

    Kernels without products are compiled alike for all. Of those with products, Triton has another way for each
    generation; sm_80 has that of sm_89, which has the least shared memory.
    """
    results: list[Compiled] = []
    plain, generations = (89,), (89, 90, 100)
    for shape_name, decoder in DECODERS.items():
        with compiling(triton_decoder, decoder_kernels, shape_name, results, plain):
            launch_decoder(**decoder)  # type: ignore[arg-type]
    largest = DECODERS["llama70b"]
    with compiling(triton_adapters, adapter_kernels, "llama70b", results, generations):
        launch_adapters(**largest)  # type: ignore[arg-type]
    with compiling(triton_decoder, decoder_kernels, "llama70b-fp8", results, (90,)):
        launch_decoder(**largest, in_fp8=True)  # type: ignore[arg-type]
    with compiling(triton_adapters, adapter_kernels, "llama70b-fp8", results, (90,)):
        launch_adapters(**largest, in_fp8=True)  # type: ignore[arg-type]
    for shape_name, experts in EXPERTS.items():
        with compiling(triton_experts, expert_kernels, shape_name, results, generations):
            launch_experts(**experts)  # type: ignore[arg-type]
    for dtype in (torch.bfloat16, torch.float32):
        with compiling(batch_invariant, invariant_kernels, str(dtype).removeprefix("torch."), results, generations):
            launch_invariant(dtype)
    for shape_name, recurrent in RECURRENT.items():
        with compiling(recurrence, recurrence_kernels, shape_name, results, plain):
            launch_recurrence(**recurrent)  # type: ignore[arg-type]
    with compiling(device_blocks, block_kernels, "fp8", results, plain):
        launch_copies()
    with compiling(sampler, sampler_kernels, "bfloat16", results, (89, 90)):
        launch_sampler(torch.bfloat16)
    for shape_name, case in (CASES | IN_BFLOAT16 | IN_FP8).items():
        for architecture in TELLING[shape_name]:
            with compiling(triton_attention, attention_kernels, shape_name, results, (architecture,)):
                launch_attention(architecture, **case)  # type: ignore[arg-type]
    return results


if __name__ == "__main__":
    print("\n".join(" ".join(map(str, each)) for each in compile_all()))
