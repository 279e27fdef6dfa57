"""KV memory in FP8: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.config import CacheConfig, EngineConfig
from app.errors import InvalidSetup
from app.model.attention import AttentionRules
from app.model.implementations.cuda_decoder import CudaModel
from app.model.implementations.gpu import with_one_block
from app.model.loader import load_model
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import DEVICE, attend, config_of, relative_error, scheduled

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.build import build_sync_engine
from app.model.cuda.attention import TritonAttention
from app.model.cuda.captured_inputs import StepSize, decode_size
from app.model.cuda.fp8 import FP8, Fp8Rows, in_fp8
from app.model.loader import load_runner
from tests.model.cuda.counting import launches_of_a_layer
from tests.model.cuda.test_decoder_kernels import BLOCK_SIZE, SHAPES, decoder_of
from tests.model.cuda.test_decoder_kernels import Shape as HeadShape
from tests.model.cuda.test_triton_attention import TABLES, Shape, assert_all_steps_agree, check_pieces, triton

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no FP8"
)
PLAIN = AttentionRules(scaling=0.25)


@pytest.fixture(autouse=True)
def _rounded(rounded_fp8: None) -> None: ...


def rounded(heads: torch.Tensor) -> torch.Tensor:
    """[num_tokens, num_heads, dim], as FP8 holds them."""
    values, scales = in_fp8(heads.reshape(-1, heads.shape[-1]))
    return (values.float() * scales).to(heads.dtype).view(heads.shape)


def stored(attention: TritonAttention, slots: torch.Tensor) -> tuple[Fp8Rows, Fp8Rows]:
    """Keys and values of tokens. Both: [num_tokens * num_kv_heads, dim]."""
    cache, blocks, places = attention.cache, slots // attention.block_size, slots % attention.block_size
    scales = cache.scales[0][blocks, :, :, places]  # [num_tokens, num_kv_heads, 2]
    keys, values = (
        Fp8Rows(numbers[blocks, places].flatten(0, 1), scales[..., at].reshape(-1, 1))
        for at, numbers in enumerate(cache.layer(0))
    )
    return keys, values


def same_rows(ours: Fp8Rows, theirs: Fp8Rows) -> bool:
    return torch.equal(ours.values.view(torch.uint8), theirs.values.view(torch.uint8)) and torch.equal(
        ours.scales, theirs.scales
    )


@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(num_heads=3, num_kv_heads=3, key_dim=24, value_dim=40, dtype=torch.bfloat16)],
    ids=["float32", "bfloat16"],
)
def test_each_key_and_value_is_rounded_with_its_own_scale(shape: Shape) -> None:
    torch.manual_seed(0)
    attention = triton(shape, kv_dtype=FP8)
    query, key, value = shape.tensors(5)
    key[2] *= 1e4
    value[1, 0] = 0
    attend(attention, [scheduled(5, 14, TABLES[0])], [query, key, value], PLAIN)
    slots = torch.tensor([TABLES[0][at // 16] * 16 + at % 16 for at in range(14, 19)], device=DEVICE)
    for ours, right in zip(stored(attention, slots), (key, value), strict=True):
        assert same_rows(ours, in_fp8(right.reshape(-1, right.shape[-1])))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_decoder_stores_what_the_attention_would(shape: HeadShape) -> None:
    positions, slots = (torch.tensor(numbers, device=DEVICE) for numbers in ([5, 0, 17], [9, 2, 16]))
    heads = shape.random(3, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    plain, ours = decoder_of(shape), decoder_of(shape, kv_dtype=FP8)
    for decoder in (plain, ours):
        decoder._rotate_and_write(0, decoder._weights.layers[0], heads.clone(), positions, slots)
    for found, right in zip(stored(ours._attention, slots), plain._attention.cache.layer(0), strict=True):
        assert same_rows(found, in_fp8(right.flatten(0, 1)[slots].flatten(0, 1)))
    others = torch.ones(ours._attention.cache.scales[0].shape[0] * BLOCK_SIZE, dtype=torch.bool)
    others[slots] = False
    assert not ours._attention.cache.scales[0].transpose(1, 3).flatten(0, 1)[others].any()


@pytest.mark.parametrize(
    ("shape", "rules"),
    [
        (Shape(), PLAIN),
        (Shape(dtype=torch.bfloat16), PLAIN),
        (Shape(num_heads=8, num_kv_heads=1, key_dim=48, value_dim=32), AttentionRules(scaling=0.2, sliding_window=20)),
        (
            Shape(block_size=48),
            AttentionRules(scaling=0.25, softcap=1.5, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE)),
        ),
    ],
    ids=["float32", "bfloat16", "window", "softcap and sinks"],
)
def test_prompts_and_single_tokens_in_splits_attend_to_the_rounded_keys_and_values(
    shape: Shape, rules: AttentionRules
) -> None:
    assert_all_steps_agree(shape, rules, rounded, kv_dtype=FP8)


def test_outputs_are_as_close_to_those_of_the_models_type_as_numbers_of_four_bits_allow() -> None:
    """A number of e4m3 is off by a sixteenth at most, or by 2^-10 of its scale, which is less of the largest."""
    torch.manual_seed(0)
    shape = Shape()
    query, key, value = shape.tensors(40)
    whole = [scheduled(40, 0, TABLES[0])]
    outputs = [attend(triton(shape, kv_dtype=kind), whole, [query, key, value], PLAIN) for kind in (FP8, None)]
    of_scores = PLAIN.scaling * shape.key_dim * query.abs().max() * key.abs().amax(-1).max() / 16
    of_values = value.abs().max() / 16
    assert 0 < (outputs[0] - outputs[1]).abs().max() < of_values + (torch.exp(2 * of_scores) - 1) * value.abs().max()
    assert relative_error(*outputs) < 1 / 16


@pytest.mark.usefixtures("equal_rows")
def test_batch_invariant_rows_do_not_depend_on_pieces_or_neighbours() -> None:
    torch.manual_seed(0)
    check_pieces(Shape(num_heads=3, num_kv_heads=1, key_dim=24, dtype=torch.bfloat16), kv_dtype=FP8)


def test_what_is_not_a_number_shows_in_its_sequence_alone() -> None:
    torch.manual_seed(0)
    shape = Shape()
    poisoned, clean = triton(shape, kv_dtype=FP8), triton(shape, kv_dtype=FP8)
    for tensor in (*poisoned.cache.layer(0), poisoned.cache.scales[0]):
        tensor.fill_(float("nan"))
    for start, size in ((0, 6), (6, 1), (7, 20)):
        item, qkv = scheduled(size, start, TABLES[0]), shape.tensors(size)
        assert torch.equal(attend(poisoned, [item], qkv, PLAIN), attend(clean, [item], qkv, PLAIN))
    for broken in (1, 2):  # a key, a value
        items, qkv = [scheduled(1, 27, TABLES[0]), scheduled(1, broken - 1, TABLES[1])], shape.tensors(2)
        qkv[broken][1, 0, 3] = float("nan")
        output = attend(clean, items, qkv, PLAIN)
        assert output[0].isfinite().all()
        assert output[1, :2].isnan().any()


def test_a_rank_with_some_heads_computes_what_the_whole_computes_of_them() -> None:
    torch.manual_seed(0)
    shape = Shape(dtype=torch.bfloat16)
    part = replace(shape, num_heads=2, num_kv_heads=1)
    whole, of_rank = triton(shape, kv_dtype=FP8), triton(part, kv_dtype=FP8)
    for start, size in ((0, 9), (9, 1)):
        item, qkv = scheduled(size, start, TABLES[0]), shape.tensors(size)
        ours = attend(of_rank, [item], [t[:, len(t[0]) // 2 :] for t in qkv], PLAIN)
        torch.testing.assert_close(ours, attend(whole, [item], qkv, PLAIN)[:, 2:])


def in_fp8_config(path: Path, *, num_blocks: int = 40, **model: Any) -> EngineConfig:
    return config_of(
        path, cache={"block_size": 4, "num_blocks": num_blocks, "dtype": "fp8"},
        scheduler={"max_running": 3, "max_step_tokens": 24, "prefill_chunk_tokens": 9},
        **{"device": "auto", "dtype": "bfloat16"} | model,
    )  # fmt: skip


@pytest.mark.usefixtures("triton_here")
def test_tokens_are_the_same_alone_among_others_and_after_preemption(tiny_model_path: Callable[[str], Path]) -> None:
    engine = build_sync_engine(in_fp8_config(tiny_model_path("llama"), num_blocks=4, dtype="float32", backend="triton"))
    requests = [make_request(prompt, max_tokens=4, ignore_eos=True) for prompt in ((5, 6, 7), tuple(range(3, 12)))]
    alone: dict[str, tuple[int, ...]] = {}
    for request in requests:
        alone |= run_to_end(engine, request).token_ids  # type: ignore[arg-type]
    assert engine.stats().total_preemptions == 0
    again = [replace(request, request_id=f"{request.request_id} again") for request in requests]
    together = run_to_end(engine, *again).token_ids
    assert [together[request.request_id] for request in again] == [*alone.values()]
    assert engine.stats().total_preemptions > 0


@pytest.mark.usefixtures("triton_here")
@pytest.mark.skipif(DEVICE.type == "cuda", reason="counted in Triton's interpreter")
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_a_layer_takes_as_many_launches_as_in_the_models_type_and_one_more_with_weights_in_fp8(
    quantization: str, tiny_model_path: Callable[[str], Path]
) -> None:
    config = in_fp8_config(tiny_model_path("llama"), quantization=quantization)
    model = load_model(config.model, config.model.path, block_size=4)
    assert isinstance(model, CudaModel)
    runner = with_one_block(config, model)
    for size, most in ((decode_size(2), 10), (StepSize(8, 2, 2), 11)):
        launches, has_fp8 = launches_of_a_layer(runner, model, size), quantization == "fp8"
        assert launches.total() <= most + has_fp8 <= 12
        assert (launches["_scaled_mm"], launches["quantise_kernel"]) == ((4, 1) if has_fp8 else (0, 0))


class TestRefused:
    """At the start, with the reason and what to set."""

    def test_a_cpu(self, tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TritonAttention, "fits", staticmethod(lambda device: False))
        monkeypatch.setattr("app.model.loader.load_model", None)  # before any weight is read
        reason = r"only Triton's attention on a GPU supports; .* on cpu; a CPU supports cache\.dtype: int8\. .* to auto"
        with pytest.raises(InvalidSetup, match=f"cache.dtype is fp8, which {reason}"):
            load_runner(in_fp8_config(tiny_model_path("llama"), device="cpu"))

    @pytest.mark.usefixtures("triton_here")
    def test_a_gpu_without_it(self, tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("app.model.loader.device_of", lambda config: torch.device("cuda"))
        monkeypatch.setattr("app.model.loader.load_model", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
        with pytest.raises(InvalidSetup, match=r"A100 has compute capability 8\.0, but FP8 needs 8\.9 or higher"):
            load_runner(in_fp8_config(tiny_model_path("llama")))
        in_int8 = in_fp8_config(tiny_model_path("llama")).model_copy(update={"cache": CacheConfig(dtype="int8")})
        with pytest.raises(InvalidSetup, match=r"only native attention on a CPU supports; .* it runs on cuda"):
            load_runner(in_int8)
