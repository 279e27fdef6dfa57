from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec import structs

from app.engine.batch import ScheduledSequence
from app.model.adapters import read_adapter
from app.model.cpu.adapters import AdaptedModel, NativeAdapter
from app.model.cpu.decoder import NativeDecoder
from tests.kit.models import BLOCKS, DTYPES, PROMPT, chunk, decoder_of, load_native, own_model, step
from tests.lora import merge, save_adapter
from tests.tiny_models import build_tiny_model

RANKS = {"first": 5, "second": 64}  # one that is odd, and the largest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base, and two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    build_tiny_model("llama").save_pretrained(folder / "base")
    for name, rank in RANKS.items():
        save_adapter(folder / name, build_tiny_model("llama"), rank=rank, seed=rank, size=0.1)
    return folder


def prepared(decoder: NativeDecoder, folder: Path) -> NativeAdapter:
    return decoder.adapting.prepare(read_adapter(folder, decoder.adapting.sizes))


def under(adapter: NativeAdapter, item: ScheduledSequence) -> ScheduledSequence:
    return structs.replace(item, adapter=adapter)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RANKS)
@torch.inference_mode()
def test_logits_are_those_of_merged_weights(name: str, dtype: str, folder: Path) -> None:
    merged = merge(own_model(folder / "base"), folder / name, 8 / RANKS[name]).to(DTYPES[dtype])
    expected = merged(torch.tensor([PROMPT])).logits[0, -1].float()
    decoder = decoder_of(load_native(folder / "base", dtype=dtype))
    got = step(decoder, under(prepared(decoder, folder / name), chunk(PROMPT, 0, 70, BLOCKS)))[0]
    assert torch.allclose(got, expected, atol=1e-4 if dtype == "float32" else 0.06 * float(expected.abs().max()))
    assert not torch.allclose(step(decoder, chunk(PROMPT, 0, 70, BLOCKS))[0], expected, atol=0.5)


@pytest.mark.parametrize("architecture", ["gemma3", "gemma4", "gemma4_large", "lfm2", "olmo2", "qwen3_5"])
@torch.inference_mode()
def test_an_adapter_changes_attention_and_mlps_of_every_architecture(architecture: str, tmp_path: Path) -> None:
    """Queries that have gates beside them, or no keys or no values; recurrent layers; linear layers of other names."""
    build_tiny_model(architecture).save_pretrained(tmp_path / "base")
    decoder = decoder_of(load_native(tmp_path / "base"))
    targets = tuple(decoder.adapting.sizes)
    save_adapter(tmp_path / "own", build_tiny_model(architecture), seed=4, size=0.1, targets=targets)
    merged = merge(own_model(tmp_path / "base"), tmp_path / "own", 8 / 4)
    expected = merged(torch.tensor([PROMPT])).logits[0, -1].float()
    got = step(decoder, under(prepared(decoder, tmp_path / "own"), chunk(PROMPT, 0, 70, BLOCKS)))[0]
    assert torch.allclose(got, expected, atol=1e-4)
    assert not torch.allclose(step(decoder, chunk(PROMPT, 0, 70, BLOCKS))[0], expected, atol=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RANKS)
def test_what_an_adapter_takes_follows_from_its_rank(name: str, dtype: str, folder: Path) -> None:
    model = load_native(folder / "base", dtype=dtype)
    measured = prepared(decoder_of(model), folder / name).num_bytes
    assert AdaptedModel.of(model.weights).adapter_bytes(RANKS[name]) == measured


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("float32", "int8")])
@torch.inference_mode()
def test_a_sequences_logits_do_not_depend_on_the_adapters_beside_it(
    dtype: str, quantization: str, folder: Path
) -> None:
    """Bit for bit: alone, in chunks, beside rows of another adapter and of none, on other threads."""
    model = load_native(folder / "base", dtype=dtype, quantization=quantization)
    alone = decoder_of(model)
    first = prepared(alone, folder / "first")
    plain = step(alone, chunk(PROMPT, 0, 70, BLOCKS))[0]
    expected = step(alone, under(first, chunk(PROMPT, 0, 70, BLOCKS)))[0]
    assert not torch.equal(plain, expected)

    crowded = decoder_of(model, num_threads=3)
    first, second = prepared(crowded, folder / "first"), prepared(crowded, folder / "second")
    backwards = PROMPT[::-1]
    for start, size in ((0, 33), (33, 5), (38, 31), (69, 1)):
        rows = step(
            crowded,
            under(second, chunk(backwards, start, 1, [2, 7, 4, 5, 6])),
            under(first, chunk(PROMPT, start, size, BLOCKS)),
            chunk(PROMPT, start, size, [13, 14, 15, 16, 17]),
            under(second, chunk(backwards, 0, 40, [10, 11, 12])),
        )
    assert torch.equal(rows[1], expected)
    assert torch.equal(rows[2], plain)
