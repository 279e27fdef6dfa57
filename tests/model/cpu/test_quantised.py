"""Weights of int8 in the native decoder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from app.assembly import digest_of_weights
from app.config import EngineConfig, ModelConfig
from app.engine.batch import Batch, ScheduledSequence
from app.errors import InvalidSetup
from app.model import loader
from app.model.cpu import library as native
from app.model.cpu import weights
from app.model.cpu.decoder import NativeDecoder
from app.model.inputs import build_inputs
from app.model.loader import LoadedModel, load_model
from tests.model.cpu.test_decoder import PROMPT, chunk, decoder_of, step

pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no C++ compiler")

BLOCKS = [3, 8, 1, 0, 9]
DTYPES = ("float32", "bfloat16")


def load(path: Path, dtype: str = "float32", quantization: str = "int8", checks: Path | None = None) -> LoadedModel:
    config = ModelConfig.model_validate(
        {"path": str(path), "device": "cpu", "dtype": dtype, "quantization": quantization}
    )
    return load_model(config, str(path), checks=checks)


def logits_of(model: LoadedModel) -> torch.Tensor:
    return step(decoder_of(model), chunk(PROMPT, 0, 70, BLOCKS))[0]


def rounded_to_8_bits(weight: torch.Tensor) -> torch.Tensor:
    groups = []
    for group in torch.split(weight, 64, dim=1):
        scale = (group.abs().amax(dim=1, keepdim=True) / 127).bfloat16().float()
        groups.append((group / scale).round() * scale)
    return torch.cat(groups, dim=1)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe"])
@torch.inference_mode()
def test_logits_are_those_of_weights_that_are_rounded_to_8_bits(architecture: str, tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    path = tiny_model_path(architecture)
    own = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    exact = own(torch.tensor([PROMPT])).logits[0, -1]
    for module in own.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(rounded_to_8_bits(module.weight))
        elif hasattr(module, "gate_up_proj"):  # all experts of a layer
            for matrix in (*module.gate_up_proj, *module.down_proj):
                matrix.copy_(rounded_to_8_bits(matrix))
    expected = own(torch.tensor([PROMPT])).logits[0, -1]
    got = logits_of(load(path))
    assert relative_error(got, expected) < 0.002 < relative_error(got, exact)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_logits_have_the_same_bits_in_any_step(dtype: str, tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    """In one step alone, token by token, in chunks beside others, on other threads."""
    model, others = load(tiny_model_path("llama"), dtype), [2, 7, 4, 5, 6]
    whole = logits_of(model)
    single = decoder_of(model, num_threads=1)
    for at in range(70):
        last = step(single, chunk(PROMPT, at, 1, BLOCKS))[0]
    assert torch.equal(last, whole)
    crowded, backwards = decoder_of(model, num_threads=3), PROMPT[::-1]
    for start, size in ((0, 33), (33, 5), (38, 31), (69, 1)):
        beside = chunk(backwards, start, 1, others)
        rows = step(crowded, beside, chunk(PROMPT, start, size, BLOCKS), chunk(backwards, 0, 40, [10, 11, 12]))
    assert torch.equal(rows[1], whole)


@torch.inference_mode()
def test_plain_vectors_give_the_same_bits_as_the_cpus_instruction(
    tiny_model_path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    model = load(tiny_model_path("llama"))
    expected = logits_of(model)
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-DCAROUSEL_PLAIN_INT8"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    native.library.cache_clear()
    try:
        plain = logits_of(model)
    finally:
        native.library.cache_clear()
    assert list((tmp_path / ".cache" / "carousel").glob("native-*.so"))
    assert torch.equal(plain, expected)


def test_a_row_with_a_nan_shows_it_and_other_rows_do_not(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    model = load(tiny_model_path("llama"))
    assert model.native is not None
    expected = step(decoder_of(model), chunk(PROMPT, 0, 20, [0, 1]))
    poisoned = model.native.embedding.clone()
    poisoned[205] = float("nan")
    object.__setattr__(model.native, "embedding", poisoned)
    rows = step_unchecked(decoder_of(model), chunk([205] * 5, 0, 5, [4]), chunk(PROMPT, 0, 20, [0, 1]))
    assert rows[0].isnan().all()
    assert torch.equal(rows[1:], expected)


def step_unchecked(decoder: NativeDecoder, *items: ScheduledSequence) -> torch.Tensor:
    batch = Batch(items, ())
    return decoder.predict(batch, build_inputs(batch, block_size=16, device=torch.device("cpu"))).logits


@torch.inference_mode()
def test_a_kept_check_of_other_weights_does_not_count(tiny_model_path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tiny_model_path("llama")
    for quantization in ("none", "int8"):
        load(path, quantization=quantization, checks=tmp_path)
    assert len(list(tmp_path.glob("checked-*"))) == 2
    again = load(path, checks=tmp_path)
    assert again.native is not None
    assert again.native.is_int8
    assert torch.equal(logits_of(again), logits_of(load(path)))


@pytest.mark.parametrize("num_inputs", [576, 1536, 208, 48])
def test_every_group_of_inputs_has_a_scale_of_its_own(num_inputs: int) -> None:
    weight = torch.randn(70, num_inputs) * torch.logspace(-3, 0, num_inputs)
    panels = weights._packed_int8([weight])
    found = torch.zeros(96, num_inputs)
    begin = 0
    for first in range(0, num_inputs, 128):
        size = min(128, num_inputs - first)
        scales = panels[:, begin].contiguous().view(torch.bfloat16).view(3, 32, 2).float().reshape(96, 2)
        units = panels[:, begin + 1 : begin + 1 + size // 4].contiguous().view(torch.uint8).view(3, size // 4, 32, 4)
        numbers = units.permute(0, 2, 1, 3).reshape(96, size).float() - 128
        found[:, first : first + size] = numbers * scales.repeat_interleave(64, dim=1)[:, :size]
        begin += 1 + size // 4
    assert torch.equal(found[:70], rounded_to_8_bits(weight))


def test_a_matrix_takes_little_more_than_a_byte_for_a_weight() -> None:
    weight = torch.randn(96, 576)
    assert weights._packed_int8([weight]).nbytes <= 1.04 * weight.numel()


def test_a_model_of_another_architecture_is_refused(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(
        InvalidSetup, match=r"quantization is int8, .*gemma2 cannot run there: Gemma2ForCausalLM is none"
    ):
        load(tiny_model_path("gemma2"))


def test_it_is_refused_without_native_code(tiny_model_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(loader, "library", lambda: None)
    with pytest.raises(InvalidSetup, match=r"quantization is int8, .*install a C\+\+ compiler"):
        load(tiny_model_path("llama"))


def test_a_block_size_that_native_code_cannot_use_is_refused(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    config = ModelConfig(path=str(tiny_model_path("llama")), device="cpu", quantization="int8")
    with pytest.raises(InvalidSetup, match="block_size is 8, no multiple of 16"):
        load_model(config, config.path, block_size=8)


def test_a_decoder_that_computes_something_else_is_refused(tiny_model_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    right = loader.settings_of
    monkeypatch.setattr(
        loader, "settings_of", lambda *given: dataclasses.replace(right(*given), scaling=1.5 * right(*given).scaling)
    )
    with pytest.raises(InvalidSetup, match="the first layer's output differs by"):
        load(tiny_model_path("llama"))


@pytest.mark.parametrize("other", [{"device": "cuda"}, {"backend": "torch"}, {"simulated": {}}])
def test_settings_that_exclude_the_native_decoder_are_refused(other: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=f"quantization is int8, .* and {next(iter(other))} is"):
        ModelConfig.model_validate({"quantization": "int8"} | other)


def test_its_weights_have_a_digest_of_their_own(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    path = str(tiny_model_path("llama"))
    digests = {
        digest_of_weights(EngineConfig(model=ModelConfig.model_validate({"path": path, "quantization": quantization})))
        for quantization in ("none", "int8")
    }
    assert len(digests) == 2
    assert 0 not in digests
