from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.model.cpu.decoder import buffer_bytes
from app.model.cpu.weights import why_not_native
from app.model.implementations.native_decoder import NativeModel
from app.model.implementations.transformers_code import TransformersModel
from app.model.kv_cache import Place
from tests.kit.models import (
    BLOCKS,
    DTYPES,
    PROMPT,
    check_same_bits_in_any_step,
    chunk,
    computing_otherwise,
    decoder_of,
    load,
    load_native,
    logits_of,
    own_model,
    step,
)
from tests.model.transformers_code import transformers_code
from tests.tiny_models import NATIVE, VOCAB_SIZE, build_tiny_model


class Allocated(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def allocated_bytes() -> int:
    """What all C++ code of this process has allocated and not freed."""
    try:
        find = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("this C library does not say what is allocated")
    find.restype = Allocated
    found = find()
    return int(found.uordblks + found.hblkhd)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@torch.inference_mode()
def test_its_buffers_take_what_is_predicted(architecture: str, quantization: str, tmp_path: Path) -> None:
    build_tiny_model(architecture, hidden_size=256, intermediate_size=512).save_pretrained(tmp_path)
    decoder = decoder_of(load_native(tmp_path, quantization=quantization))
    alone, others = chunk(PROMPT, 0, 64, BLOCKS), [chunk(PROMPT, 0, 64, BLOCKS, samples=False)] * 15
    step(decoder, alone)
    before = allocated_bytes()
    step(decoder, alone, *others)
    predicted = [buffer_bytes(decoder._weights, num_tokens=size, num_positions=64) for size in (64, 16 * 64)]
    assert allocated_bytes() - before == pytest.approx(predicted[1] - predicted[0], rel=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", NATIVE)
@torch.inference_mode()
def test_logits_are_the_models_own(architecture: str, dtype: str, tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    check_logits(tiny_model_path(architecture), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_rows_of_a_tied_embedding_are_read_from_the_head(dtype: str, tmp_path: Path) -> None:
    own = build_tiny_model("llama", tie_word_embeddings=True)
    own.save_pretrained(tmp_path)
    model = load_native(tmp_path, dtype=dtype)
    assert model.weights.embedding is None
    embedding = own.get_input_embeddings().weight.detach().to(DTYPES[dtype]).contiguous()
    kept = replace(model, weights=replace(model.weights, embedding=embedding))
    every_token = list(range(VOCAB_SIZE))
    blocks = list(range(-(-VOCAB_SIZE // 16)))
    logits = [step(decoder_of(each), chunk(every_token, 0, VOCAB_SIZE, blocks)) for each in (model, kept)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_gates_far_below_zero_leave_nothing(dtype: str, tmp_path: Path) -> None:
    """e to the power of their magnitude is beyond float32."""
    own = build_tiny_model("llama")
    for layer in own.model.layers:
        layer.mlp.gate_proj.weight *= 2**14
        layer.mlp.down_proj.weight /= 2**14
    own.save_pretrained(tmp_path)
    check_logits(tmp_path, dtype)


def check_logits(path: Path, dtype: str = "float32") -> None:
    expected = own_model(path, DTYPES[dtype])(torch.tensor([PROMPT])).logits[0, -1].float()
    got = logits_of(load_native(path, dtype=dtype))
    assert torch.allclose(got, expected, atol=1e-4 if dtype == "float32" else 0.06 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", [name for name in NATIVE if name != "qwen2"])  # as llama, with biases
@torch.inference_mode()
def test_a_sequences_logits_do_not_depend_on_what_shares_its_steps(
    architecture: str, dtype: str, tiny_model_path
) -> None:  # type: ignore[no-untyped-def]
    """Bit for bit: in one step alone, in chunks, token by token, beside others, on other threads."""
    check_same_bits_in_any_step(load_native(tiny_model_path(architecture), dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@torch.inference_mode()
def test_with_keys_and_values_in_int8_logits_do_not_depend_on_it_either(
    architecture: str, dtype: str, tiny_model_path
) -> None:  # type: ignore[no-untyped-def]
    model = load_native(tiny_model_path(architecture), dtype=dtype)
    _, in_int8 = check_same_bits_in_any_step(model, in_int8=True)
    plain = logits_of(model)
    assert 0 < float((in_int8 - plain).norm() / plain.norm()) < 0.1


def test_rotary_positions_that_follow_the_batch_are_left_to_transformers(tmp_path: Path, caplog) -> None:  # type: ignore[no-untyped-def]
    caplog.set_level("INFO")
    model = build_tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model.save_pretrained(tmp_path)
    assert not isinstance(load(tmp_path), NativeModel)
    assert "dynamic rotary positions" in caplog.text


def test_a_decoder_that_computes_something_else_is_not_used(tiny_model_path, monkeypatch, caplog) -> None:  # type: ignore[no-untyped-def]
    computing_otherwise(monkeypatch, scaling=0.4)
    model = load(tiny_model_path("llama"))
    assert not isinstance(model, NativeModel)
    assert "the first layer's output differs by" in caplog.text
    assert isinstance(model, TransformersModel)
    assert not any(weight.is_meta for weight in model.module.parameters()), "its weights are read by transformers"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "per_token"), [(4, 1), (20, 3), (20, 20), (130, 2)])
@torch.inference_mode()
def test_of_experts_with_equal_scores_those_of_torch_are_chosen(
    num_experts: int, per_token: int, dtype: str, tmp_path: Path
) -> None:
    """All scores are equal, so the chosen experts, the same for all tokens, are those that `topk` happens to return."""
    model = build_tiny_model(
        "qwen3_moe",
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        num_hidden_layers=1,
        moe_intermediate_size=16,
    )
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            weight.zero_()
    model.save_pretrained(tmp_path)
    check_logits(tmp_path, dtype)


@pytest.mark.parametrize(
    "settings",
    [{"norm_topk_prob": False}, {"decoder_sparse_step": 2, "mlp_only_layers": []}, {"num_experts": 0}],
    ids=str,
)
@torch.inference_mode()
def test_other_mixtures_have_the_models_logits(settings: dict[str, object], tmp_path: Path) -> None:
    build_tiny_model("qwen3_moe", **settings).save_pretrained(tmp_path)
    check_logits(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "quantization"), [("llama", "int8"), ("mixtral", "none"), ("qwen3_moe", "none")]
)
@torch.inference_mode()
def test_a_token_without_a_number_shows_it_and_does_not_disturb_others(
    architecture: str, quantization: str, tiny_model_path
) -> None:  # type: ignore[no-untyped-def]
    """Nor their experts."""
    model = load_native(tiny_model_path(architecture), quantization=quantization)
    expected = step(decoder_of(model), chunk(PROMPT, 0, 20, [0, 1]))
    assert model.weights.embedding is not None
    poisoned = model.weights.embedding.clone()
    poisoned[205] = float("nan")
    decoder = decoder_of(replace(model, weights=replace(model.weights, embedding=poisoned)))
    logits = step(decoder, chunk([205] * 5, 0, 5, [4]), chunk(PROMPT, 0, 20, [0, 1]), has_numbers=False)
    assert logits[0].isnan().all()
    assert torch.equal(logits[1:], expected)


def test_a_shared_expert_is_left_to_transformers_code() -> None:
    assert why_not_native(build_tiny_model("qwen2_moe")) == "the C++ decoder does not support shared experts"


def test_experts_beside_an_mlp_are_left_to_transformers_code() -> None:
    model = build_tiny_model("gemma4", enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32)
    assert why_not_native(model) == "its layers have experts alongside an MLP"


def test_layers_that_read_the_keys_of_an_earlier_layer_store_none(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    path = tiny_model_path("gemma4")
    native = load_native(path)
    with transformers_code():
        own = load(path)
    for model in (native, own):
        assert {layer: shape.key_dim for layer, shape in model.layers.items()} == {0: 16, 1: 16, 2: 32}
        assert [model.groups.place_of(layer) for layer in (3, 4)] == [Place(0, 1), Place(0, 2)]
    assert native.layers == native.weights.settings.attention_layers()
