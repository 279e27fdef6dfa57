"""The decoder's kernels against plain torch: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

from app.model.attention import AttentionRules
from app.model.kv_cache import LayerShape
from app.model.llama import DecoderSettings, ExpertSettings, LayerSettings, RotaryPositions
from tests.kit.models import DEVICE

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.model.cuda.attention import TritonAttention
from app.model.cuda.decoder import CudaDecoder
from app.model.cuda.weights import CudaLayer, CudaWeights

BLOCK_SIZE, NUM_BLOCKS = 4, 6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    has_norm: bool = False

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size).to(DEVICE, self.dtype)


def decoder_of(shape: Shape, *, kv_dtype: torch.dtype | None = None) -> CudaDecoder:
    """With one layer, of which only what the kernels read is there. kv_dtype: None as all else."""
    torch.manual_seed(0)
    frequencies = tuple(10_000.0 ** (-i / shape.head_dim) for i in range(0, shape.head_dim, 2))
    settings = DecoderSettings(
        architecture="LlamaForCausalLM", hidden_size=8, num_heads=shape.num_heads, experts=ExpertSettings(),
        vocab_size=8, epsilon=1e-5, scaling=0.1,
        layers=(LayerSettings(num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, intermediate_size=8),),
        rotary=(RotaryPositions(frequencies=frequencies, scaling=1.5),),
    )  # fmt: skip
    none = shape.random(0)
    norms = [shape.random(shape.head_dim) if shape.has_norm else None for _ in range(2)]
    layer = CudaLayer(
        input_norm=none, query_key_value=none, query_key_value_bias=None, query_norm=norms[0], key_norm=norms[1],
        output=none, output_bias=None, post_attention_norm=none, router=None, gate_up=none, down=none,
        rules=AttentionRules(scaling=0.1),
    )  # fmt: skip
    positions = torch.arange(NUM_BLOCKS * BLOCK_SIZE, device=DEVICE)
    weights = CudaWeights(
        settings=settings, layers=(layer,), embedding=none, final_norm=none, head=none,
        rotary=settings.rotary[0].table(positions, shape.dtype).flatten(1),
    )  # fmt: skip
    layers = {0: LayerShape(num_kv_heads=shape.num_kv_heads, key_dim=shape.head_dim, value_dim=shape.head_dim)}
    attention = TritonAttention(
        layers, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_rows=2, max_blocks=4, dtype=kv_dtype or shape.dtype,
        device=DEVICE,
    )  # fmt: skip
    for tensor in attention.cache.layer(0):
        tensor.zero_()
    return CudaDecoder(weights, attention)


def close(ours: torch.Tensor, right: torch.Tensor) -> None:
    assert ours.dtype is right.dtype
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, right, atol=tolerance, rtol=tolerance)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As transformers has it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * wide.to(x.dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 48, 64, 80, 127, 1030])
@pytest.mark.parametrize("has_addend", [False, True])
def test_the_norm_of_a_residual_sum(size: int, dtype: torch.dtype, *, has_addend: bool) -> None:
    shape = Shape(dtype=dtype)
    decoder = decoder_of(shape)
    x, addend, weight = shape.random(3, size), shape.random(3, size), shape.random(size)
    residual = x.clone()
    normed = decoder._add_norm(addend if has_addend else None, residual, weight, torch.empty_like(x))
    total = x + addend if has_addend else x
    close(residual, total)  # the interpreter does not round to bfloat16, it cuts off
    close(normed, rms_norm(total, weight))
    alone = x[1:2].clone()
    again = decoder._add_norm(addend[1:2] if has_addend else None, alone, weight, torch.empty_like(alone))
    assert torch.equal(again, normed[1:2])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 48, 1024, 1500])
def test_silu_of_the_gate_times_up(size: int, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    gate_up = shape.random(3, 2 * size)
    gated = decoder_of(shape)._gated(gate_up, gate_up.new_empty(3, size))
    close(gated, functional.silu(gate_up[:, :size]) * gate_up[:, size:])
    assert torch.equal(decoder_of(shape)._gated(gate_up[1:2], gate_up.new_empty(1, size)), gated[1:2])


SHAPES = [
    Shape(),
    Shape(num_heads=3, num_kv_heads=1, head_dim=80, has_norm=True),
    Shape(num_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16),
    Shape(num_heads=4, num_kv_heads=4, head_dim=128, dtype=torch.bfloat16, has_norm=True),
    Shape(num_heads=5, num_kv_heads=5, head_dim=16, dtype=torch.float16),
    Shape(num_heads=7, num_kv_heads=1, head_dim=6, has_norm=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_are_normed_and_turned_and_their_keys_and_values_stored(shape: Shape) -> None:
    decoder = decoder_of(shape)
    positions = torch.tensor([5, 0, 17], device=DEVICE)
    slots = torch.tensor([9, 2, 16], device=DEVICE)
    num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
    heads = shape.random(3, num_heads + 2 * num_kv_heads, shape.head_dim)
    query, key, value = heads.clone().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    layer = decoder._weights.layers[0]
    decoder._rotate_and_write(0, layer, heads, positions, slots)
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = rms_norm(query, layer.query_norm), rms_norm(key, layer.key_norm)
    cosine, sine = decoder._settings.rotary[0].table(positions, shape.dtype).repeat(1, 1, 2).unbind(1)
    close(heads[:, :num_heads], turned(query, cosine, sine))
    keys, values = (tensor.flatten(0, 1) for tensor in decoder._attention.cache.layer(0))
    close(keys[slots], turned(key, cosine, sine))
    assert torch.equal(values[slots], value)
    for stored in (keys, values):
        others = [slot for slot in range(len(stored)) if slot not in slots.tolist()]
        assert not stored[others].any()


def turned(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine[:, None] + torch.cat((-second, first), dim=-1) * sine[:, None]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_token_turns_as_it_does_alone(shape: Shape) -> None:
    positions, slots = (torch.tensor(numbers, device=DEVICE) for numbers in ([5, 0, 17], [9, 2, 16]))
    together = shape.random(3, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    alone = together[1:2].clone()
    for heads, some in ((together, slice(None)), (alone, slice(1, 2))):
        decoder = decoder_of(shape)
        decoder._rotate_and_write(0, decoder._weights.layers[0], heads, positions[some], slots[some])
    assert torch.equal(together[1:2], alone)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="bytes are counted in Triton's interpreter")
class TestBytes:
    """Activations are moved once, in both directions; a weight's are read from memory once, whatever the tokens."""

    shape = Shape(num_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, has_norm=True)
    num_tokens = 5

    def traffic(self, kernel: str, work: Any, *args: Any) -> Any:
        from tests.model.cuda.counting import counting

        with counting() as counts:
            work(*args)
        assert [each.kernel for each in counts.kernels] == [kernel]
        return counts.kernels[0]

    def test_of_the_norm(self) -> None:
        size = 96
        x, addend, weight = (self.shape.random(*each) for each in ((self.num_tokens, size),) * 2 + ((size,),))
        moved = self.traffic(
            "add_norm_kernel", decoder_of(self.shape)._add_norm, addend, x, weight, torch.empty_like(x)
        )
        assert moved.read == x.nbytes + addend.nbytes + weight.nbytes
        assert moved.loaded == x.nbytes + addend.nbytes + self.num_tokens * weight.nbytes
        assert moved.stored == moved.written == 2 * x.nbytes

    def test_of_the_gate(self) -> None:
        gate_up = self.shape.random(self.num_tokens, 2 * 96)
        moved = self.traffic("gate_kernel", decoder_of(self.shape)._gated, gate_up, gate_up[:, :96].clone())
        assert moved.read == moved.loaded == gate_up.nbytes
        assert moved.stored == moved.written == gate_up.nbytes // 2

    def test_of_turned_heads(self) -> None:
        decoder = decoder_of(self.shape)
        heads = self.shape.random(self.num_tokens, 8 + 2 * 2, 128)
        layer, positions = decoder._weights.layers[0], torch.arange(self.num_tokens)
        moved = self.traffic(
            "rotate_write_kernel", decoder._rotate_and_write, 0, layer, heads, positions, positions.clone()
        )
        of_a_token = 128 * 2 + 2 * 8  # cosines and sines, position and slot
        norms = 2 * 128 * 2
        assert moved.read == heads.nbytes + self.num_tokens * of_a_token + norms
        assert moved.loaded == heads.nbytes + self.num_tokens * 2 * (of_a_token + norms)  # by each of two KV heads
        assert moved.stored == moved.written == heads.nbytes
