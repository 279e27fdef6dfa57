"""Matrices with the numbers of a GGUF file: what they stand for, and what the C++ decoder computes with them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from app.build import build_sync_engine
from app.config import ModelConfig
from app.model.allocated_bytes import num_bytes_of
from app.model.cpu.decoder import NativeDecoder
from app.model.cpu.kv_cache import NativeKVCache
from app.model.cpu.library import ThreadPool, library
from app.model.cpu.stored_matrix import FileRows, StoredMatrix, can_be_stored, dequantised
from app.model.gguf.checkpoint import checkpoint_of
from app.model.implementations.native_decoder import NativeModel
from app.model.inputs import build_inputs
from app.model.loader import load_model
from app.model.planned_memory import planned_native_model
from app.model.verification import TrialBlocks, step_of
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import config_of
from tests.model.gguf.files import tiny_model, write_gguf

STORED = [GGMLQuantizationType[name] for name in "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split()]
OTHERS = [GGMLQuantizationType[name] for name in "F32 F16 BF16 Q2_K Q3_K IQ3_S".split()]
IN_GROUPS, IN_BLOCKS = 1, 2  # as in the sources
PROMPT = [40, 41, 42, 7, 9, 100, 3, 44, 45, 46, 200, 8, 61, 62, 63, 64, 65]

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")


def random_blocks(kind: GGMLQuantizationType, num_rows: int, num_inputs: int) -> torch.Tensor:
    size, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(3).integers(0, 256, (num_rows, num_inputs // size, num_bytes), np.uint8)
    factors = np.random.default_rng(4).normal(0, 0.01, blocks.shape[:2]).astype(np.float16).view(np.uint8)
    at = num_bytes - 2 if kind == GGMLQuantizationType.Q6_K else 0
    blocks[..., at : at + 2] = factors.reshape(*blocks.shape[:2], 2)
    if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        blocks[..., 2:4] = factors.reshape(*blocks.shape[:2], 2)[::-1]
    return torch.from_numpy(blocks.reshape(num_rows, -1))


@pytest.mark.parametrize("kind", STORED, ids=lambda kind: kind.name)
def test_blocks_stand_for_the_numbers_of_the_gguf_package_bit_for_bit(kind: GGMLQuantizationType) -> None:
    blocks = random_blocks(kind, 24, 512)
    assert can_be_stored(kind)
    assert torch.equal(dequantised(FileRows(kind, blocks), 512), torch.from_numpy(dequantize(blocks.numpy(), kind)))


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.name)
def test_other_types_are_multiplied_out(kind: GGMLQuantizationType) -> None:
    assert not can_be_stored(kind)


def test_rows_change_their_order_without_their_numbers() -> None:
    blocks = random_blocks(GGMLQuantizationType.Q8_0, 64, 64)
    whole = StoredMatrix((FileRows(GGMLQuantizationType.Q8_0, blocks),), 64, torch.float32)
    values = whole.multiplied_out()
    assert whole.shape == values.shape == (64, 64)
    turned = whole.in_runs(16, lambda count: range(count - 1, -1, -1)).multiplied_out()
    assert torch.equal(turned, values.view(4, 16, 64).flip(0).view(64, 64))
    in_turn = whole.in_turn(whole).multiplied_out().view(4, 2, 16, 64)
    assert torch.equal(in_turn, values.view(4, 1, 16, 64).expand(4, 2, 16, 64))


def served(path: Path, folder: Path, **settings: object) -> NativeModel:
    config = ModelConfig.model_validate({"path": str(path), "dtype": "float32", **settings})
    model = load_model(config, str(checkpoint_of(path, folder / "models")), checks=folder / "checks")
    assert isinstance(model, NativeModel)
    return model


def logits_of(model: NativeModel, *token_ids: list[int]) -> list[torch.Tensor]:
    """Of prompts that share a step; [num_tokens, vocab_size] each."""
    num_blocks = sum(-(-len(each) // 16) for each in token_ids)
    blocks = replace(TrialBlocks.enough(16), num_blocks=num_blocks, max_blocks=num_blocks)
    pages = NativeKVCache(model.in_block, num_blocks=num_blocks, block_size=16, dtype=model.dtype)
    decoder = NativeDecoder(model.weights, pages, ThreadPool(2))
    pieces, first = [], 0
    for at, each in enumerate(token_ids):
        pieces.append(blocks.piece(f"prompt-{at}", each, 0, first_block=first))
        first += -(-len(each) // 16)
    batch = step_of(*pieces)
    logits = decoder.predict(batch, build_inputs(batch, block_size=16, device=torch.device("cpu"))).logits
    return list(logits.split([len(each) for each in token_ids]))


# By the ends of tensors' names: a mixture of types, as llama.cpp makes it, with matrices side by side that differ.
MIXED: Mapping[str, str] = {
    "attn_q.weight": "Q4_K", "attn_k.weight": "Q5_0", "attn_v.weight": "Q6_K", "attn_output.weight": "Q5_K",
    "ffn_gate.weight": "Q4_K", "ffn_up.weight": "Q8_0", "ffn_down.weight": "Q6_K", "token_embd.weight": "Q6_K",
    "output.weight": "Q4_1",
}  # fmt: skip
# With one that is not quantised, and one of a type that is multiplied out.
WITH_PLAIN = {**MIXED, "attn_k.weight": "F16", "ffn_down.weight": "Q2_K", "token_embd.weight": "BF16"}


@pytest.mark.parametrize(
    ("kinds", "forms"),
    [
        *((kind.name, IN_BLOCKS if kind.name.endswith(("K", "XS")) else IN_GROUPS) for kind in STORED),
        (MIXED, IN_GROUPS | IN_BLOCKS),
        (WITH_PLAIN, IN_GROUPS | IN_BLOCKS),
    ],
    ids=[*(kind.name for kind in STORED), "mixed", "with plain ones"],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_a_model_computes_with_the_numbers_of_its_file(
    kinds: str | Mapping[str, str], forms: int, tied: bool, tmp_path: Path
) -> None:
    """What differs from plain torch on the same numbers is the rounding of inputs to eight bits."""
    model = tiny_model(tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "a.gguf", model, kinds)  # the model has the numbers of the file then
    found = served(path, tmp_path)
    assert found.weights.weight_bits == forms
    [logits] = logits_of(found, PROMPT)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert (logits - expected).norm() < 0.03 * expected.norm()


def test_a_rows_bits_do_not_depend_on_what_shares_its_step(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", tiny_model(), MIXED)
    model = served(path, tmp_path)
    [alone] = logits_of(model, PROMPT)
    for num_others in (1, 2, 5, 11):
        beside = logits_of(model, *([[7, 8, at + 10] for at in range(num_others)]), PROMPT)
        assert torch.equal(beside[-1], alone)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_a_mixture_of_experts_computes_with_the_numbers_of_its_file(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    found = served(write_gguf(tmp_path / "a.gguf", model, "Q4_K"), tmp_path)
    assert found.weights.weight_bits == IN_BLOCKS
    [logits] = logits_of(found, PROMPT)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    # Near ties of the router may go another way.
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.03


@pytest.mark.parametrize("architecture", ["gemma3", "gemma4", "gemma4_large", "lfm2", "olmo2", "qwen3_5"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_layers_do_so_too(architecture: str, dtype: str, tmp_path: Path) -> None:
    """Gated queries, short convolutions, a gated delta rule with an output whose columns have another order."""
    model = tiny_model(architecture, vocab_size=292)  # no multiple of 16
    path = write_gguf(tmp_path / "a.gguf", model, "Q8_0")
    found = served(path, tmp_path, dtype=dtype)
    assert found.weights.weight_bits == IN_GROUPS


@pytest.mark.parametrize("kinds", ["F16", "F32"])
def test_matrices_of_one_size_stay_apart(kinds: str, tmp_path: Path) -> None:
    """Queries and keys whose rows have another order in the file: each is a copy, which may lie where another did."""
    model = tiny_model(num_key_value_heads=4, num_attention_heads=4)
    found = served(write_gguf(tmp_path / "a.gguf", model, kinds), tmp_path)
    [logits] = logits_of(found, PROMPT)
    with torch.inference_mode():
        assert torch.allclose(logits, model(torch.tensor([PROMPT])).logits[0], atol=2e-4)


def test_a_setting_rounds_the_weights_further(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", tiny_model(), "Q8_0")
    assert served(path, tmp_path, quantization="int4").weights.weight_bits == 4


def test_a_second_start_packs_the_same(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", tiny_model(), MIXED)
    first, second = (served(path, tmp_path) for _ in range(2))
    assert second.reference is None, "it was verified before"
    assert torch.equal(logits_of(first, PROMPT)[0], logits_of(second, PROMPT)[0])


@pytest.mark.parametrize(
    ("architecture", "kinds", "quantization"),
    [
        ("llama", MIXED, "none"), ("llama", WITH_PLAIN, "none"), ("llama", MIXED, "int4"), ("llama", "F16", "none"),
        ("mixtral", "Q4_K", "none"), ("qwen3_5", "Q8_0", "none"), ("qwen3_5", "Q8_0", "int8"), ("lfm2", "Q6_K", "none"),
    ],
)  # fmt: skip
def test_its_memory_is_planned_without_its_numbers(
    architecture: str,
    kinds: str | Mapping[str, str],
    quantization: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "a.gguf", tiny_model(architecture, tie_word_embeddings=False), kinds)
    planned = planned_native_model(config_of(path, dtype="float32", quantization=quantization))
    found = served(path, tmp_path, quantization=quantization)
    assert num_bytes_of(planned.tensors()) == num_bytes_of(found.tensors())
    assert planned.weights.weight_bits == found.weights.weight_bits


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_file_that_is_cut_short_while_it_is_served_changes_nothing(backend: str, tmp_path: Path) -> None:
    """A page of a mapped file that is not there any more ends the process: none is read after the start."""
    path = write_gguf(tmp_path / "a.gguf", tiny_model(), WITH_PLAIN)
    config = config_of(path, cache={"num_blocks": 16}, dtype="float32", backend=backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        engine = build_sync_engine(config)
    first, second = (make_request(tuple(PROMPT), max_tokens=8, ignore_eos=True, cache_salt=salt) for salt in "ab")
    expected = run_to_end(engine, first).token_ids[first.request_id]
    os.truncate(path, 100)
    assert run_to_end(engine, second).token_ids[second.request_id] == expected
