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

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.model.cuda.attention import TritonAttention
from app.model.ways.cuda_decoder import CudaModel
from app.model.ways.transformers_code import TransformersModel
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
def other_rank(store: str, path: str) -> Iterator[Callable[[], Any]]:
    """Yields what waits for the other rank and has what it says. Forked: imports take seconds."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=answer, args=(theirs, 1, 2, store, path, TOKEN_IDS))
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
    assert torch.equal(theirs, got), "all ranks have the same bits"


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
