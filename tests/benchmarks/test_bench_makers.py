"""Workloads and models that are made from a seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.workload import read_workload
from benchmarks.make_model import SHAPES, Shape, make_model
from benchmarks.make_workload import WORKLOADS, Line, main, make_workload


def lengths(lines: Iterable[Line]) -> list[tuple[int, int]]:
    return [(len(line["prompt_token_ids"]), line["max_tokens"]) for line in lines]


@pytest.mark.parametrize(
    ("name", "num_requests", "num_prompt", "num_output"),
    [("sharegpt", 64, 9543, 5764), ("uniform", 32, 4096, 2048), ("shared_prefix", 64, 64 * 416, 4096)],
)
def test_a_workload_has_the_sizes_that_the_peers_were_measured_with(
    name: str, num_requests: int, num_prompt: int, num_output: int
) -> None:
    lines = make_workload(name)
    assert len(lines) == num_requests
    assert sum(prompt for prompt, _ in lengths(lines)) == num_prompt
    assert sum(output for _, output in lengths(lines)) == num_output
    assert all(300 <= token < 49152 for line in lines for token in line["prompt_token_ids"])


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_gives_the_same_workload_and_another_another(name: str) -> None:
    assert make_workload(name) == make_workload(name)
    assert make_workload(name) != make_workload(name, seed=1)
    assert lengths(make_workload(name)) == lengths(make_workload(name, vocab_size=763))


def test_tokens_are_those_that_the_peers_were_measured_with() -> None:
    """Fixed for ever: figures of other days are of these tokens."""
    tokens = [line["prompt_token_ids"] for name in ("sharegpt", "uniform") for line in make_workload(name)]
    assert sha256(repr(tokens).encode()).hexdigest()[:16] == "b8591288dc5af977"


def test_prompts_of_shared_prefix_share_384_tokens_and_no_more() -> None:
    prompts = [line["prompt_token_ids"] for line in make_workload("shared_prefix")]
    assert len({tuple(prompt[:384]) for prompt in prompts}) == 1
    assert len({tuple(prompt[384:]) for prompt in prompts}) == 64


def test_the_file_reads_back(tmp_path: Path) -> None:
    out = tmp_path / "new" / "uniform.jsonl"
    assert main(["uniform", "--out", str(out), "--vocab", "500"]) == 0
    workload = read_workload(str(out))
    assert len(workload.requests) == 32
    assert all(timed.request.sampling.ignore_eos for timed in workload.requests)


def test_more_requests_are_the_same_ones_and_others() -> None:
    assert make_workload("sharegpt", num_requests=80)[:64] == make_workload("sharegpt")


def test_the_first_tenant_sends_half_and_the_others_share_the_rest() -> None:
    lines = make_workload("uniform", num_requests=40, num_tenants=3)
    assert Counter(line["tenant"] for line in lines) == {"tenant-0": 20, "tenant-1": 10, "tenant-2": 10}


def test_a_vocabulary_too_small_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="--vocab 300"):
        make_workload("uniform", vocab_size=300)


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    shape = Shape(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
        vocab_size=400,
    )  # fmt: skip
    for name in ("one", "two"):
        torch.manual_seed(len(name))  # must not matter
        make_model(shape, str(tmp_path / name), seed=3, init_range=0.1, texts=[Path(__file__)])
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_the_shapes_are_those_of_the_peers_figures() -> None:
    assert (SHAPES["135m"].hidden_size, SHAPES["135m"].num_hidden_layers, SHAPES["135m"].vocab_size) == (576, 30, 49152)
    assert (SHAPES["25m"].hidden_size, SHAPES["25m"].num_hidden_layers, SHAPES["25m"].vocab_size) == (384, 8, 8192)
