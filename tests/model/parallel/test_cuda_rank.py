"""The decoder for CUDA in two processes, in Triton's interpreter and through gloo."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.errors import UnsupportedModel
from app.model import source
from app.model.cpu.checkpoint import MappedModel
from app.model.cuda.attention import TritonAttention
from app.model.cuda.fp8 import Fp8Rows, in_fp8
from app.model.implementations.cuda_decoder import CudaModel
from app.model.implementations.transformers_code import TransformersModel
from tests.kit.models import load
from tests.model.parallel.cuda_rank import BLOCK_SIZE, NUM_PROBE_TOKENS, answer, group_of, logits_of_tokens
from tests.tiny_models import build_tiny_model
from tests.waiting import PATIENCE_S

TOKEN_IDS = list(range(3, 10))


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks need two GPUs")


@pytest.fixture
def saved_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Saves a tiny model of an architecture, which runs on Triton's interpreter."""
    monkeypatch.setattr(TritonAttention, "fits", staticmethod(lambda device: device.type != "meta"))
    monkeypatch.setattr("app.model.verification.NUM_TOKENS", NUM_PROBE_TOKENS)
    torch.set_num_threads(1)  # as in the forked rank: bits of a product depend on it

    def save(architecture: str, **changes: Any) -> str:
        build_tiny_model(architecture, **changes).save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


@contextmanager
def other_rank(store: str, path: str, **settings: Any) -> Iterator[Callable[[], Any]]:
    """Yields what waits for the other rank and has what it says. Forked: imports take seconds."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=answer, args=(theirs, 1, 2, store, path, TOKEN_IDS, settings))
    other.start()
    theirs.close()

    def said() -> Any:
        assert ours.poll(PATIENCE_S)
        return ours.recv()

    try:
        yield said
    finally:
        other.kill()
        other.join()


@pytest.mark.parametrize(
    ("architecture", "vocab_size", "changes"), [("qwen2", 212, {}), ("qwen3_moe", 211, {"num_experts": 4})]
)
def test_two_ranks_have_the_logits_of_one_decoder(
    architecture: str, vocab_size: int, changes: dict[str, int], tmp_path: Path, saved_model: Callable[..., str]
) -> None:
    """An output layer of 212 tokens is divided, one of 211 is whole on both."""
    path = saved_model(architecture, vocab_size=vocab_size, num_hidden_layers=2, **changes)
    store = str(tmp_path / "store")
    expected_model = load(path, block_size=BLOCK_SIZE)
    assert isinstance(expected_model, CudaModel)
    expected = logits_of_tokens(expected_model, TOKEN_IDS)
    with other_rank(store, path) as said:
        model = load(path, block_size=BLOCK_SIZE, group=group_of(0, 2, store))
        got = logits_of_tokens(model, TOKEN_IDS)
        theirs = torch.tensor(said())
    assert isinstance(model, CudaModel)
    assert model.weights.layers[0].down.shape[-1] == expected_model.weights.layers[0].down.shape[-1] // 2
    assert model.weights.head.shape[0] == (vocab_size if vocab_size % 2 else vocab_size // 2)
    assert float((got - expected).abs().max()) < 2e-5
    assert torch.equal(got.argmax(dim=-1), expected.argmax(dim=-1))
    own_columns = got[:, vocab_size // 2 :] if vocab_size % 2 == 0 else got
    assert torch.equal(theirs, own_columns), "all ranks have the same bits"


def test_two_ranks_have_their_parts_in_fp8(
    tmp_path: Path, saved_model: Callable[..., str], rounded_fp8: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part has scales of its own. No rank has it in another type before, nor the whole model."""
    changes = {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}
    path = saved_model("llama", vocab_size=212, num_hidden_layers=1, **changes)
    store, settings = str(tmp_path / "store"), {"device": "auto", "dtype": "bfloat16", "quantization": "fp8"}
    monkeypatch.setattr(source, "module_on_device", None)
    with other_rank(store, path, **settings) as said:
        model = load(path, block_size=BLOCK_SIZE, group=group_of(0, 2, store), **settings)
        got = logits_of_tokens(model, TOKEN_IDS)
        theirs = torch.tensor(said())
    assert isinstance(model, CudaModel)
    files = load_file(Path(path) / "model.safetensors")
    whole, down = files["model.layers.0.mlp.down_proj.weight"].bfloat16(), model.weights.layers[0].down
    assert isinstance(down, Fp8Rows)
    expected = in_fp8(whole[:, : whole.shape[1] // 2])
    assert all(torch.equal(*(rows.view(torch.uint8) for rows in both)) for both in zip(down, expected, strict=True))
    assert torch.equal(model.weights.head, files["model.embed_tokens.weight"][:106].bfloat16())
    assert got.shape[-1] == 212
    assert torch.equal(theirs, got[:, 106:].float())


def test_all_ranks_run_transformers_code_where_one_computes_something_else(
    tmp_path: Path, saved_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, store = saved_model("llama", num_hidden_layers=1), str(tmp_path / "store")
    right, first = CudaModel.output, os.getpid()

    def output(*given: Any) -> Any:
        """The second computes as a card that adds wrongly would."""
        found = right(*given)
        return found if os.getpid() == first else replace(found, logits=-found.logits)

    monkeypatch.setattr(CudaModel, "output", output)
    with other_rank(store, path) as said:
        model = load(path, block_size=BLOCK_SIZE, group=group_of(0, 2, store))
        assert said() is None
    assert not isinstance(model, CudaModel)
    assert isinstance(model, TransformersModel)


def test_a_rank_with_the_part_of_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 knows what the whole model gives."""
    path, store = str(tmp_path / "model"), str(tmp_path / "store")
    build_tiny_model("llama").save_pretrained(path)
    monkeypatch.setattr(source, "MappedModel", lambda *given, rank=None: MappedModel(*given, rank=rank and 0))
    with other_rank(store, path), pytest.raises(UnsupportedModel, match="different results split among ranks"):
        load(path, block_size=BLOCK_SIZE, group=group_of(0, 2, store), num_threads=1)
