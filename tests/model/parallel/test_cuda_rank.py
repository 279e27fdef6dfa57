"""The decoder for CUDA in two processes, in Triton's interpreter and through gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.model.cuda.attention import TritonAttention
from tests.model.parallel.cuda_rank import load, logits_of_tokens
from tests.model.parallel.native_rank import group_of
from tests.tiny_models import build_tiny_model

TOKEN_IDS = list(range(3, 10))


@pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks need two GPUs")
@pytest.mark.parametrize(("architecture", "vocab_size"), [("qwen2", 212), ("qwen3_moe", 211)])
def test_two_ranks_have_the_logits_of_one_decoder(
    architecture: str, vocab_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output layer of 212 tokens is divided, one of 211 is whole on both."""
    monkeypatch.setattr(TritonAttention, "fits", staticmethod(lambda device: device.type != "meta"))
    path, store = str(tmp_path / "model"), str(tmp_path / "store")
    build_tiny_model(architecture, vocab_size=vocab_size, num_hidden_layers=2).save_pretrained(path)
    expected_model = load(path, None)
    assert expected_model.joined is not None
    expected = logits_of_tokens(expected_model, TOKEN_IDS)
    asked = {"rank": 1, "size": 2, "store": store, "path": path, "token_ids": TOKEN_IDS}
    other = subprocess.Popen(
        [sys.executable, "-m", "tests.model.parallel.cuda_rank", json.dumps(asked)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        model = load(path, group_of(0, 2, store))
        got = logits_of_tokens(model, TOKEN_IDS)
        said, error = other.communicate(timeout=60)
    finally:
        other.kill()
        other.communicate()
    assert other.returncode == 0, error
    assert model.joined is not None
    assert model.joined.layers[0].down.shape[-1] == expected_model.joined.layers[0].down.shape[-1] // 2
    assert model.joined.head.shape[0] == (vocab_size if vocab_size % 2 else vocab_size // 2)
    assert float((got - expected).abs().max()) < 2e-5
    assert torch.equal(got.argmax(dim=-1), expected.argmax(dim=-1))
    assert torch.equal(torch.tensor(json.loads(said)), got), "all ranks have the same bits"
