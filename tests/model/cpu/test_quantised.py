"""Quantised weights in the native decoder."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from app.config import ModelConfig
from app.errors import InvalidSetup
from app.model.cpu import library as native
from app.model.cpu import weights
from app.model.cpu.library import ThreadPool, in_large_pages
from app.model.implementations import native_decoder
from app.model.implementations.native_decoder import NativeModel
from app.model.weights_digest import digest_of_weights
from tests.kit.models import (
    BLOCKS,
    DTYPES,
    PROMPT,
    check_same_bits_in_any_step,
    chunk,
    computing_otherwise,
    config_of,
    decoder_of,
    load,
    logits_of,
    own_model,
    relative_error,
    step,
)
from tests.model.cpu.builds import QUICK, built_with
from tests.tiny_models import NATIVE

pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no C++ compiler")

QUANTISED = {"int8": 8, "int4": 4}


def quantised(
    path: Path, dtype: str = "float32", quantization: str = "int8", checks: Path | None = None
) -> NativeModel:
    loaded = load(path, dtype=dtype, quantization=quantization, checks=checks)
    assert isinstance(loaded, NativeModel)
    return loaded


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The weights that the packed matrix of [outputs, inputs] stands for."""
    return rounded_and_padded(weight, bits)[:, : weight.shape[1]]


def rounded_and_padded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The same with what pads the last group: a turn leaves errors of rounding there."""
    size, per_byte = weights.GROUPS[bits], 8 // bits
    packed = weights._Packing(ThreadPool(2), bits, in_large_pages)([weight])
    num_panels, num_groups = len(packed), -(-weight.shape[1] // size)
    rows = packed.view(num_panels, num_groups, -1, 32)
    pairs = rows[:, :, 0].contiguous().view(torch.bfloat16).view(num_panels, num_groups, 32, 1, 2).float()
    units = rows[:, :, 1:].contiguous().view(torch.uint8).view(num_panels, num_groups, -1, 32, 4)
    stored = units.permute(0, 1, 3, 2, 4).reshape(num_panels, num_groups, 32, size // per_byte)
    numbers = torch.cat([stored >> bits * part & (1 << bits) - 1 for part in range(per_byte)], dim=-1)
    groups = numbers * pairs[..., 0] + pairs[..., 1]
    if bits == 8:
        groups = groups @ hadamard(size)
    return groups.transpose(1, 2).reshape(num_panels * 32, -1)[: weight.shape[0]]


def rounded_inputs(inputs: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers from -127 to 127 in each group, the last one padded."""
    size = weights.GROUPS[bits]
    groups = torch.nn.functional.pad(inputs, (0, -inputs.shape[-1] % size)).unflatten(-1, (-1, size))
    turn = hadamard(size) if bits == 8 else torch.eye(size)
    groups = groups @ turn
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-20) / 127
    return ((groups / scales).round() * scales @ turn).flatten(-2)


def hadamard(size: int) -> torch.Tensor:
    signs = [[1 - 2 * ((row & column).bit_count() % 2) for column in range(size)] for row in range(size)]
    return torch.tensor(signs) / size**0.5


@pytest.mark.parametrize("quantization", QUANTISED)
@pytest.mark.parametrize("architecture", NATIVE)
@torch.inference_mode()
def test_logits_are_those_of_rounded_weights_and_inputs(
    architecture: str, quantization: str, tiny_model_path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    path = tiny_model_path(architecture)
    own = own_model(path, experts_implementation="eager")
    # Texts of their own: a number that is rounded the other way moves all tokens after it.
    places = ((3, 4), (9, 6), (23, 8), (37, 10), (0, 20), (14, 35), (28, 50), (42, 60), (56, 70))
    texts = [(PROMPT[at:] + PROMPT[:at])[:size] for at, size in places]
    exact = own(torch.tensor(texts[-1:])).logits[0]
    decoder = decoder_of(quantised(path, quantization=quantization))
    got = [step(decoder, chunk(text, 0, len(text), BLOCKS))[0] for text in texts]
    routers = [
        module.weight for name, module in own.named_modules() if name.endswith(("mlp.gate", "in_proj_a", "in_proj_b"))
    ]
    linear = torch.nn.functional.linear

    def rounded_linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if any(weight is router for router in routers):
            return linear(inputs, weight, bias)
        bits = 8 if weight is own.lm_head.weight else QUANTISED[quantization]
        return linear(rounded_inputs(inputs, bits), rounded_and_padded(weight, bits), bias)

    if own.config.tie_word_embeddings:  # rows are read from the head
        own.get_input_embeddings().weight = torch.nn.Parameter(rounded(own.lm_head.weight, 8))
    if table := getattr(own.model, "embed_tokens_per_layer", None):
        table.weight = torch.nn.Parameter(rounded(table.weight, 8))
    monkeypatch.setattr(torch.nn.functional, "linear", rounded_linear)
    errors = [
        relative_error(logits, own(torch.tensor([text])).logits[0, -1]) for text, logits in zip(texts, got, strict=True)
    ]
    # A number close to the middle of two steps may be rounded the other way, which moves a few tokens by 1%.
    assert statistics.median(errors) < 0.0001
    assert statistics.median(errors) < relative_error(got[-1], exact[-1])


@pytest.mark.parametrize("middle", [7.5, 8, 3])
def test_weights_that_have_4_bits_already_keep_them(middle: float) -> None:
    """A group of 32 is a part of a file's group of 128, so it may lack the ends of the file's 16 values."""
    torch.manual_seed(0)
    numbers = (torch.randn(64, 512) * 2.5 + middle).round().clamp(0, 15)
    scales = torch.rand(64, 4).half().float().repeat_interleave(128, 1)
    weight = (numbers - middle) * scales
    assert relative_error(rounded(weight, 4), weight) < 0.01  # of scales and least weights in bfloat16


@pytest.mark.parametrize("quantization", QUANTISED)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_logits_have_the_same_bits_in_any_step(dtype: str, quantization: str, tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    """In one step alone, token by token, in chunks beside others, on other threads."""
    check_same_bits_in_any_step(quantised(tiny_model_path("llama"), dtype, quantization))


@torch.inference_mode()
def test_plain_vectors_give_the_same_bits_as_the_cpus_instruction(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    models = [quantised(tiny_model_path("llama"), quantization=quantization) for quantization in QUANTISED]
    expected = [logits_of(model) for model in models]
    with built_with("-DCAROUSEL_PLAIN_INT8", *QUICK):
        plain = [logits_of(model) for model in models]
    assert all(map(torch.equal, plain, expected))


@torch.inference_mode()
def test_a_kept_result_for_other_weights_does_not_count(tiny_model_path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tiny_model_path("llama")
    for quantization in ("none", "int8"):
        quantised(path, quantization=quantization, checks=tmp_path)
    assert len(list(tmp_path.glob("verified-*"))) == 2
    again = quantised(path, checks=tmp_path)
    assert again.weights.weight_bits == 8
    assert torch.equal(logits_of(again), logits_of(quantised(path)))


@pytest.mark.parametrize("num_inputs", [576, 1536, 208, 48])
def test_every_group_of_inputs_has_a_range_of_its_own(num_inputs: int) -> None:
    of_groups = torch.logspace(-3, 0, -(-num_inputs // 64)).repeat_interleave(64)[:num_inputs]
    weight = torch.randn(70, num_inputs) * of_groups
    for bits, allowed in ((8, 0.015), (4, 0.25)):
        errors = (rounded(weight, bits) - weight) / of_groups
        assert errors.square().mean(dim=0).sqrt().max() < allowed


@torch.inference_mode()
def test_weights_of_a_4_bit_file_stay_what_they_are() -> None:
    steps = torch.randint(0, 16, (70, 18, 32))
    steps[..., 0], steps[..., 1] = 0, 15
    scale, least = torch.rand(70, 18, 1).bfloat16().float(), torch.randn(70, 18, 1).bfloat16().float()
    weight = (steps * scale + least).flatten(1)
    assert (rounded(weight, 4) - weight).abs().max() < 1e-5 * weight.abs().max()


@torch.inference_mode()
def test_rows_of_a_tied_embedding_are_read_from_the_head(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    model = quantised(tiny_model_path("llama"))
    head = rounded(model.weights.embedding, 8)  # type: ignore[arg-type]
    packed = weights._Packing(ThreadPool(2), 8, in_large_pages)([model.weights.embedding])  # type: ignore[list-item]
    given, tied = (
        dataclasses.replace(model, weights=dataclasses.replace(model.weights, head=packed, embedding=embedding))
        for embedding in (head.contiguous(), None)
    )
    assert (logits_of(tied) - logits_of(given)).abs().max() < 1e-3


def test_an_embedding_that_is_tied_to_a_quantised_head_is_not_kept(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    model = quantised(tiny_model_path("llama"))
    native = model.weights
    names = {weights.EMBEDDING: native.embedding, weights.HEAD: native.embedding}
    packed = weights.pack_weights(
        lambda name: names.get(name, native.final_norm),
        dataclasses.replace(native.settings, layers=()),
        bits=8,
    )
    assert packed.embedding is None


def test_a_matrix_takes_little_more_than_its_bits() -> None:
    weight = torch.randn(96, 576)
    for bits in (8, 4):
        group_of_bits = weights.GROUPS[bits] * bits
        assert weights._Packing(ThreadPool(2), bits, in_large_pages)([weight]).nbytes == weight.numel() * bits / 8 * (
            1 + 32 / group_of_bits
        )


@pytest.mark.parametrize("quantization", QUANTISED)
def test_a_model_of_another_architecture_is_refused(quantization: str, tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    message = f"quantization is {quantization}, .*gpt_neox cannot run there: GPTNeoXForCausalLM is not one of"
    with pytest.raises(InvalidSetup, match=message):
        quantised(tiny_model_path("gpt_neox"), quantization=quantization)


def test_it_is_refused_without_native_code(tiny_model_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(native_decoder, "library", lambda: None)
    with pytest.raises(InvalidSetup, match=r"quantization is int8, .*install a C\+\+ compiler"):
        quantised(tiny_model_path("llama"))


def test_a_block_size_that_native_code_cannot_use_is_refused(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidSetup, match="block_size is 8, which is not a multiple of 16"):
        load(tiny_model_path("llama"), quantization="int8", block_size=8)


def test_a_decoder_that_computes_something_else_is_refused(tiny_model_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    computing_otherwise(monkeypatch, scaling=0.4)
    with pytest.raises(InvalidSetup, match="the first layer's output differs by"):
        quantised(tiny_model_path("llama"))


@pytest.mark.parametrize("other", [{"device": "cuda"}, {"backend": "torch"}, {"simulated": {}}])
def test_settings_that_exclude_the_native_decoder_are_refused(other: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=f"quantization is int8, .* but {next(iter(other))} is"):
        ModelConfig.model_validate({"quantization": "int8"} | other)


def test_its_weights_have_a_digest_of_their_own(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    path = tiny_model_path("llama")
    digests = {
        digest_of_weights(config_of(path, quantization=quantization)) for quantization in ("none", "int8", "int4")
    }
    assert len(digests) == 3
    assert 0 not in digests


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(70, 80), (32, 64), (100, 160)])
@pytest.mark.parametrize("offset", [0.0, 3.0, -0.5])
def test_no_group_has_a_greater_squared_error_than_with_the_range_of_its_weights(
    offset: float, shape: tuple[int, int], dtype: torch.dtype, bits: int
) -> None:
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) + offset).to(dtype)
    turned = groups_of(weight.float(), bits)
    least = turned.amin(-1, keepdim=True)
    stored_least = least.bfloat16().float()
    above = stored_least if bits == 8 else least
    scale = ((turned.amax(-1, keepdim=True) - above) / (2**bits - 1)).bfloat16().float()
    plain = ((turned - stored_least) / scale).round().clamp(0, 2**bits - 1) * scale + stored_least
    least_errors = (plain - turned).square().sum(-1)
    errors = (groups_of(rounded_and_padded(weight, bits), bits) - turned).square().sum(-1)
    assert (errors <= least_errors * 1.001).all()
    assert errors.sum() < least_errors.sum() * {8: 0.95, 4: 0.85}[bits]


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_a_group_may_be_all_the_same(bits: int) -> None:
    weight = torch.tensor([0.0, 0.375, -2.0, 1e-30]).repeat_interleave(20)[:, None].repeat(1, 128)
    assert (rounded(weight, bits) - weight).abs().max() < 0.008
    assert not rounded(weight, bits)[:20].any()


def groups_of(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """As they are rounded: padded and, with 8 bits, turned."""
    size = weights.GROUPS[bits]
    whole = torch.nn.functional.pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))
    return whole @ hadamard(size) if bits == 8 else whole


def test_weights_as_they_are_stand_in_panels_of_outputs() -> None:
    weight = torch.randn(70, 80).bfloat16()
    packed = weights._Packing(ThreadPool(2), 0, in_large_pages)([weight[:30], weight[30:]]).view(3, 40, 32)
    units = packed.contiguous().view(torch.bfloat16).view(3, 40, 32, 2).transpose(1, 2).reshape(96, 80)
    assert torch.equal(units[:70], weight)
    assert not units[70:].any()
