"""Checkpoints of other programs' quantisers: loaded, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel

from app.errors import UnsupportedModel
from app.model.cpu.library import library
from app.model.implementations.native_decoder import NativeModel
from app.model.packed_numbers import Packing
from app.model.planned_memory import planned_gpu_model
from app.model.quantised_checkpoint import Quantised, can_dequantise, multiplied_out
from tests.kit.models import PROMPT, config_of, load, logits_of
from tests.tiny_models import build_tiny_model

FP8 = torch.float8_e4m3fn
BLOCK = (32, 48)


def described(folder: Path, quantization: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    return folder


def in_blocks(weight: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of 8 bits and a scale for each block, as a quantiser writes them."""
    counts = [-(-n // size) for n, size in zip(weight.shape, block, strict=True)]
    scales = torch.empty(counts)
    numbers = torch.empty(weight.shape, dtype=dtype)
    largest = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    for i in range(counts[0]):
        for j in range(counts[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[place].abs().max() / largest
            scaled = weight[place] / scales[i, j]
            numbers[place] = (scaled.round() if dtype is torch.int8 else scaled).to(dtype)
    return numbers, scales


def plain(numbers: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Their product, written as simply as can be."""
    rows, columns = (torch.arange(n) // size for n, size in zip(numbers.shape, block, strict=True))
    return numbers.float() * scales[rows][:, columns]


def save_quantised(
    model: PreTrainedModel, folder: Path, quantization: dict[str, Any], *, dtype: torch.dtype, suffix: str, by_row: bool
) -> tuple[Path, Path]:
    """A quantised checkpoint, and one of the weights that its numbers stand for."""
    quantised, multiplied = folder / "quantised", folder / "multiplied"
    model.save_pretrained(quantised)
    model.save_pretrained(multiplied)
    before, numbers, products = load_file(quantised / "model.safetensors"), {}, {}
    for name, weight in before.items():
        numbers[name] = products[name] = weight
        if weight.dim() == 2 and "embed" not in name and "lm_head" not in name and "gate.weight" not in name:
            block = (1, weight.shape[1]) if by_row else BLOCK
            numbers[name], scales = in_blocks(weight, block, dtype)
            numbers[name + suffix] = scales
            products[name] = plain(numbers[name], scales, block)
    save_file(numbers, quantised / "model.safetensors", {"format": "pt"})
    save_file(products, multiplied / "model.safetensors", {"format": "pt"})
    return described(quantised, quantization), multiplied


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("shape", [(96, 96), (100, 130), (2500, 48)])
def test_weights_are_their_numbers_times_the_scales_of_their_blocks(shape, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    numbers, scales = in_blocks(torch.randn(shape), BLOCK, dtype)
    assert can_dequantise(numbers, scales, BLOCK)
    assert torch.equal(multiplied_out(numbers, scales, BLOCK, torch.float32), plain(numbers, scales, BLOCK))
    assert multiplied_out(numbers, scales, BLOCK, torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("shape", [(), (1,), (40,), (40, 1), (40, 6), (10, 3)])
def test_without_a_size_in_the_config_it_follows_from_the_number_of_scales(shape) -> None:  # type: ignore[no-untyped-def]
    numbers = torch.randn(40, 24).to(FP8)
    scales = torch.rand(shape)
    matrix = scales if len(shape) == 2 else scales.reshape(-1, 1)
    block = (40 // matrix.shape[0], 24 // matrix.shape[1])
    assert can_dequantise(numbers, scales, None)
    assert torch.equal(multiplied_out(numbers, scales, None, torch.float32), plain(numbers, matrix, block))


@pytest.mark.parametrize(
    ("numbers", "scales"),
    [
        (torch.zeros(40, 24).to(FP8), None),
        (torch.zeros(40, 24).to(FP8), torch.ones(7, 1)),
        (torch.zeros(40, 24).to(FP8), torch.ones(40, 1).to(torch.uint8)),
        (torch.zeros(40, 24, dtype=torch.uint8), torch.ones(40, 1)),
        (torch.zeros(2, 40, 24).to(FP8), torch.ones(40, 1)),
    ],
)
def test_what_is_not_numbers_times_scales_is_not_multiplied(numbers, scales) -> None:  # type: ignore[no-untyped-def]
    assert not can_dequantise(numbers, scales, None)


FORMS = [
    ({"quant_method": "fp8", "weight_block_size": list(BLOCK)}, FP8, "_scale_inv", False),
    ({"quant_method": "compressed-tensors", "format": "float-quantized"}, FP8, "_scale", True),
    ({"quant_method": "compressed-tensors", "format": "int-quantized"}, torch.int8, "_scale", True),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, FP8, "_scale", True),
]


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(("quantization", "dtype", "suffix", "by_row"), FORMS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@torch.inference_mode()
def test_the_native_decoder_computes_with_what_the_numbers_stand_for(  # type: ignore[no-untyped-def]
    architecture, quantization, dtype, suffix, by_row, tmp_path: Path, caplog
) -> None:
    caplog.set_level("INFO")
    model = build_tiny_model(architecture)
    quantised, multiplied = save_quantised(model, tmp_path, quantization, dtype=dtype, suffix=suffix, by_row=by_row)
    logits = []
    for path in (quantised, multiplied, quantised):  # the last from a check that was kept
        loaded = load(path, checks=tmp_path / "checks")
        assert isinstance(loaded, NativeModel)
        logits.append(logits_of(loaded))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert f"quantised by {quantization['quant_method']}, are multiplied out to torch.float32" in caplog.text


def test_transformers_code_computes_with_them_too(tmp_path: Path) -> None:
    """As on a GPU."""
    quantization, dtype, suffix, by_row = FORMS[0]
    model = build_tiny_model("qwen3")
    quantised, multiplied = save_quantised(model, tmp_path, quantization, dtype=dtype, suffix=suffix, by_row=by_row)
    ours, theirs = (load(path, backend="torch").module for path in (quantised, multiplied))
    assert ours is not None
    assert theirs is not None
    assert all(torch.equal(weight, ours.state_dict()[name]) for name, weight in theirs.state_dict().items())
    token_ids = torch.tensor([PROMPT[:9]])
    for module in (ours, theirs):
        module.set_attn_implementation("eager")
    with torch.inference_mode():
        assert torch.equal(ours(token_ids).logits, theirs(token_ids).logits)


@pytest.mark.parametrize("other", ["weight_zero_point", "weight_g_idx"])
def test_weights_that_are_more_than_numbers_times_scales_are_left_to_transformers(tmp_path: Path, other: str) -> None:
    quantization, dtype, suffix, by_row = FORMS[2]
    path, _ = save_quantised(
        build_tiny_model("llama"), tmp_path, quantization, dtype=dtype, suffix=suffix, by_row=by_row
    )
    file = path / "model.safetensors"
    more = {f"model.layers.0.mlp.up_proj.{other}": torch.zeros(1)}
    save_file(load_file(file) | more, file, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"quantised by compressed-tensors.*compressed-tensors>="):
        load(path)


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quantised by bitsandbytes_8bit, .*accelerate"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised by bitsandbytes_4bit, .*accelerate"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "quantised by gptq, .*optimum"),
        ({"quant_method": "awq", "bits": 4}, "quantised by awq, .*gptqmodel"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors>="),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "X", "_data": {}}}}, "by torchao, .*torchao"),
        ({"quant_method": "hqq"}, "quantised by hqq, .*HQQ"),
        ({"quant_method": "quanto", "weights": "int8"}, "quantised by quanto, .*optimum-quanto"),
        ({"quant_method": "eetq"}, "quantised by eetq, .*kernels"),
        ({"quant_method": "higgs"}, "quantised by higgs, .*only supported on GPU"),
        ({"quant_method": "spqr"}, "quantised by spqr, .*GPU is required"),
        ({"quant_method": "their-own"}, "quantised by their-own, .*does not support it, only .*gptq"),
        ({"bits": 4}, "quantised by unnamed, .*does not support it"),
    ],
)
def test_others_are_refused_by_name_with_what_is_missing_and_the_fix(  # type: ignore[no-untyped-def]
    quantization, reason: str, tiny_model_path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((tiny_model_path("llama") / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=rf"{reason}.*unquantised checkpoint, with model\.quantization: int8"):
        load(described(tmp_path, quantization))


def test_gpt_oss_in_mxfp4_is_multiplied_out_by_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, vocab_size=211, max_position_embeddings=128,
        sliding_window=9, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.full(
            (num_experts, num_outputs, num_inputs // 32, 16), 0x2A, dtype=torch.uint8
        )
        weights[f"{name}_scales"] = torch.full((num_experts, num_outputs, num_inputs // 32), 126, dtype=torch.uint8)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    module = load(described(tmp_path, {"quant_method": "mxfp4"})).module
    assert module is not None
    found = module.model.layers[1].mlp.experts.down_proj
    assert found.shape == (4, 32, 64)
    assert found[0, :4, 0].tolist() == [-0.5, 0.5, -0.5, 0.5]  # of 0xA and 0x2: -1 and 1, times 2 ** -1


def test_what_a_config_says_of_weights_is_read_wherever_it_stands() -> None:
    assert Quantised.of({"model_type": "llama"}) is None
    assert Quantised.of({"text_config": {"quantization_config": {"quant_method": "awq"}}}) == Quantised(
        "awq", packing=Packing("awq", bits=4, group_size=128)
    )
    with_block = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert Quantised.of(with_block) == Quantised("fp8", (128, 128))


@pytest.mark.parametrize(("method", "is_planned"), [("fp8", True), ("hqq", False)])
def test_what_is_multiplied_out_is_planned_as_that(tiny_model_path, tmp_path: Path, method, is_planned: bool) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "config.json").write_text((tiny_model_path("llama") / "config.json").read_text())
    config = config_of(described(tmp_path, {"quant_method": method}), device="auto")
    if is_planned:
        assert planned_gpu_model(config, dtype=torch.bfloat16).dtype is torch.bfloat16
    else:
        with pytest.raises(UnsupportedModel, match="quantised checkpoint"):
            planned_gpu_model(config, dtype=torch.bfloat16)


def test_weights_that_are_not_in_the_files_are_not_left_random(tiny_model_path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((tiny_model_path("llama") / name).read_text())
    weights = load_file(tiny_model_path("llama") / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lack 1 weights, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_a_model_that_refuses_to_be_moved_is_refused_with_its_words(tiny_model_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def to(module: PreTrainedModel, device: torch.device) -> None:
        raise ValueError("`.to` is not supported")

    monkeypatch.setattr(PreTrainedModel, "to", to)
    with pytest.raises(UnsupportedModel, match=r"cannot be loaded: `\.to` is not supported"):
        load(tiny_model_path("gpt2"))


def test_too_little_memory_stays_torchs_own_error(tiny_model_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def to(module: PreTrainedModel, device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PreTrainedModel, "to", to)
    with pytest.raises(torch.OutOfMemoryError):
        load(tiny_model_path("gpt2"))
