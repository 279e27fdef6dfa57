"""Packing from a model's mapped files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from app.model import source
from app.model.cpu.checkpoint import Checkpoint
from app.model.cpu.library import library
from app.model.implementations.native_decoder import NativeModel
from app.model.implementations.transformers_code import TransformersModel
from tests.kit.models import load, load_native, logits_of

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
ALL = [("llama", dtype, quantization) for dtype in ("float32", "bfloat16") for quantization in ("none", "int8")]
ALL += [
    (architecture, dtype, quantization)
    for architecture in ("qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "lfm2")
    for dtype, quantization in (("float32", "none"), ("bfloat16", "int8"))
]


def from_whole_model(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: str) -> NativeModel:
    with monkeypatch.context() as patch:
        patch.setattr("app.model.implementations.transformers_code.mapped_model", lambda *_: None)
        return load_native(path, **settings)


@pytest.mark.parametrize(("architecture", "dtype", "quantization"), ALL)
def test_it_is_the_same_model_without_transformers_reading_its_weights_and_when_it_was_verified_before(
    architecture: str, dtype: str, quantization: str, tiny_model_path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    path, settings = tiny_model_path(architecture), {"dtype": dtype, "quantization": quantization}
    whole = from_whole_model(path, monkeypatch, **settings)
    monkeypatch.setattr(source, "module_of_transformers", None)
    model = load_native(path, checks=tmp_path, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(TransformersModel, "load", None)
        again = load_native(path, checks=tmp_path, **settings)
    for each in (model, again):
        assert (each.model_info, each.layers, each.dtype) == (whole.model_info, whole.layers, whole.dtype)
        assert torch.equal(logits_of(each), logits_of(whole))


@pytest.mark.parametrize("file_type", [torch.bfloat16, torch.float16])
def test_files_of_another_type_and_in_several_pieces(file_type: torch.dtype, model_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    own = AutoModelForCausalLM.from_pretrained(model_path, dtype=file_type)
    (model_path / "model.safetensors").unlink()
    own.save_pretrained(model_path, max_shard_size="100KB")
    assert len(list(model_path.glob("model-*.safetensors"))) > 1
    whole = from_whole_model(model_path, monkeypatch)
    monkeypatch.setattr(source, "module_of_transformers", None)
    assert torch.equal(logits_of(load(model_path)), logits_of(whole))


def test_no_more_than_one_layer_is_unpacked(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, used = load_file(model_path / "model.safetensors"), []
    layer = sum(weight.nbytes for name, weight in file.items() if name.startswith("model.layers.0."))
    ends = file["model.embed_tokens.weight"].nbytes + file["lm_head.weight"].nbytes
    right = Checkpoint.release

    def release(checkpoint: Checkpoint) -> None:
        used.append(sum(weight.nbytes for weight in checkpoint._used))
        right(checkpoint)

    monkeypatch.setattr(Checkpoint, "release", release)
    assert isinstance(load(model_path), NativeModel)
    assert max(used) <= max(layer, ends)


def test_pages_of_released_weights_are_given_back_and_can_be_read_again(tmp_path: Path) -> None:
    weight = torch.arange(2**24, dtype=torch.float32)  # 64 MiB
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, torch.float32)
    before = mapped_bytes()
    read = checkpoint("weight")
    assert read is not None
    assert torch.equal(read, weight)
    assert mapped_bytes() - before > 0.9 * weight.nbytes
    checkpoint.release()
    assert mapped_bytes() - before < 0.1 * weight.nbytes
    assert torch.equal(read, weight)


def test_weights_of_another_type_are_converted_without_the_whole_file_in_memory(tmp_path: Path) -> None:
    weight = torch.arange(2**24, dtype=torch.float32).view(4096, 4096)  # 64 MiB
    save_file({"model.embed_tokens.weight": weight}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, torch.bfloat16)
    before = mapped_bytes()
    embedding = checkpoint("model.embed_tokens.weight")
    assert mapped_bytes() - before < 0.1 * weight.nbytes
    assert embedding is not None
    assert torch.equal(embedding, weight.bfloat16())
    assert checkpoint("lm_head.weight") is embedding  # tied: not in memory twice


def mapped_bytes() -> int:
    [kilobytes] = re.findall(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def test_weights_under_other_names_are_read_by_transformers(model_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    expected = logits_of(load(model_path))
    file = model_path / "model.safetensors"
    weights = {name.removeprefix("model."): weight for name, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    own_names = AutoModelForCausalLM.from_pretrained(model_path).state_dict()
    read = []
    right = source.module_of_transformers
    monkeypatch.setattr(source, "module_of_transformers", lambda *given: read.append(given) or right(*given))  # type: ignore[func-returns-value]
    assert torch.equal(logits_of(load(model_path)), expected)
    assert read
    assert own_names.keys() != weights.keys()


def test_a_head_that_is_neither_in_the_files_nor_tied_is_not_taken_from_the_embedding(model_path: Path) -> None:
    file = model_path / "model.safetensors"
    weights = load_file(file)
    module = AutoModelForCausalLM.from_pretrained(model_path)
    assert Checkpoint(model_path, torch.float32).has_weights_of(module)
    del weights["lm_head.weight"]
    save_file(weights, file, {"format": "pt"})
    assert not Checkpoint(model_path, torch.float32).has_weights_of(module)
    module.config.tie_word_embeddings = True
    assert Checkpoint(model_path, torch.float32).has_weights_of(module)
