"""Workloads and models that are made from a seed."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
import torch

from benchmarks.harness.command import BenchmarkError
from benchmarks.make_model import SHAPES, make_model
from benchmarks.make_workload import WORKLOADS, make_workload


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_gives_the_same_workload_and_another_another(name: str) -> None:
    assert make_workload(name) == make_workload(name)
    assert make_workload(name) != make_workload(name, seed=1)


def test_tokens_are_those_that_the_peers_were_measured_with() -> None:
    """Fixed for ever: figures of other days are of these tokens."""
    tokens = [line["prompt_token_ids"] for name in ("sharegpt", "uniform") for line in make_workload(name)]
    assert sha256(repr(tokens).encode()).hexdigest()[:16] == "b8591288dc5af977"


def test_prompts_of_one_length_can_have_another() -> None:
    lines = make_workload("decode", num_requests=2, num_prompt=16_000)
    assert [(len(line["prompt_token_ids"]), line["max_tokens"]) for line in lines] == [(16_000, 128)] * 2
    with pytest.raises(BenchmarkError, match="prompts of sharegpt have lengths of their own"):
        make_workload("sharegpt", num_prompt=16_000)


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    shape = SHAPES["25m"] | {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 400}
    for name in ("one", "two"):
        torch.manual_seed(len(name))  # must not matter
        make_model(shape, str(tmp_path / name), seed=3, init_range=0.1, texts=[Path(__file__)])
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
