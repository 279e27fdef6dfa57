"""Packing from a model's mapped files."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from app.config import ModelConfig
from app.model import source
from app.model.cpu.checkpoint import Checkpoint
from app.model.cpu.library import is_fast, library
from app.model.loader import load_model
from app.model.ways import native_decoder
from app.model.ways.loaded_model import LoadedModel
from app.model.ways.native_decoder import NativeModel
from app.model.ways.transformers_code import TransformersModel
from tests.model.cpu.test_decoder import PROMPT, chunk, decoder_of, step

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
LLAMA_LIKE = ("llama", "qwen2", "qwen3", "mistral")


@pytest.fixture
def model_path(tiny_model_path, tmp_path: Path) -> Path:  # type: ignore[no-untyped-def]
    return Path(shutil.copytree(tiny_model_path("llama"), tmp_path / "model"))


def load(path: Path, dtype: str = "float32", quantization: str = "none") -> LoadedModel:
    if not is_fast(getattr(torch, dtype)):
        pytest.skip(f"this CPU has no vector instructions for {dtype}")
    settings = {"path": str(path), "device": "cpu", "dtype": dtype, "quantization": quantization}
    return load_model(ModelConfig.model_validate(settings), str(path))


def from_whole_model(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: str) -> LoadedModel:
    with monkeypatch.context() as patch:
        patch.setattr("app.model.ways.transformers_code.mapped_model", lambda *_: None)
        return load(path, **settings)


@torch.inference_mode()
def logits_of(model: LoadedModel) -> torch.Tensor:
    return step(decoder_of(model), chunk(PROMPT, 0, 70, [3, 8, 1, 0, 9]))


@pytest.mark.parametrize("architecture", LLAMA_LIKE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_it_is_the_same_model_without_transformers_reading_its_weights(
    architecture: str, dtype: str, quantization: str, tiny_model_path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    path, settings = tiny_model_path(architecture), {"dtype": dtype, "quantization": quantization}
    whole = from_whole_model(path, monkeypatch, **settings)
    monkeypatch.setattr(source, "module_of_transformers", None)
    model = load(path, **settings)
    assert (model.facts, model.layers, model.dtype) == (whole.facts, whole.layers, whole.dtype)
    assert torch.equal(logits_of(model), logits_of(whole))


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


def test_a_model_that_native_code_computes_otherwise_is_read_by_transformers(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = native_decoder.settings_of
    monkeypatch.setattr(
        native_decoder, "settings_of", lambda *given: dataclasses.replace(right(*given), epsilon=0.5)
    )  # fmt: skip
    model = load(model_path)
    assert not isinstance(model, NativeModel)
    assert isinstance(model, TransformersModel)
    assert not any(weight.is_meta for weight in model.module.parameters())
