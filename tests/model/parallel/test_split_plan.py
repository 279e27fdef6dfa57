from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from app.errors import InvalidSetup, UnsupportedModel
from app.model.parallel.group import RankGroup
from app.model.parallel.split_plan import SplitPlan, check_divisible, shared_numbers
from tests.tiny_models import VOCAB_SIZE, build_tiny_model

T = TypeVar("T")
TOKEN_IDS = torch.arange(3, 15)[None]


def on_ranks(size: int, folder: Path, compute: Callable[[RankGroup], T]) -> list[T]:
    """What each rank computes, each in a thread."""

    def one(rank: int) -> T:
        group = RankGroup(rank, size, store=folder / "store", device=torch.device("cpu"), timeout_s=30)
        return compute(group)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


def logits_of_split(architecture: str, size: int, folder: Path, **changes: object) -> tuple[torch.Tensor, list[int]]:
    """The logits of a model divided among ranks, which rank 0 has, and the numbers that each has of it.

    The others have theirs where the output layer is divided.
    """
    lock, num_weights = threading.Lock(), [0] * size
    folder.mkdir(exist_ok=True)

    @torch.inference_mode()
    def compute(group: RankGroup) -> torch.Tensor:
        with lock:  # the seed is the process's
            model = build_tiny_model(architecture, **changes)
        SplitPlan(model, group, path=architecture).split("", model)
        num_weights[group.rank] = sum(weight.numel() for weight in model.parameters())
        return model(input_ids=TOKEN_IDS, use_cache=False).logits

    found = on_ranks(size, folder, compute)
    whole = found[0]
    for rank, other in enumerate(found[1:], start=1):
        num_columns = other.shape[-1]
        first = rank * num_columns if num_columns < whole.shape[-1] else 0
        assert torch.equal(whole[..., first : first + num_columns], other)
    return found[0], num_weights


ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_neox", "phi3", "mixtral", "qwen3_moe"]


@pytest.mark.parametrize(
    ("architecture", "size"), [*((each, 2) for each in ARCHITECTURES), ("llama", 4), ("qwen3_moe", 4)]
)
def test_ranks_compute_what_the_whole_model_computes(architecture: str, size: int, tmp_path: Path) -> None:
    changes = {"num_key_value_heads": 4} if size == 4 else {}
    whole = build_tiny_model(architecture, **changes)
    found, num_weights = logits_of_split(architecture, size, tmp_path, **changes)
    with torch.inference_mode():
        expected = whole(input_ids=TOKEN_IDS, use_cache=False).logits
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    # All but the embedding, the output layer of 211 tokens, and norms.
    of_layers = sum(weight.numel() for weight in whole.parameters()) - 2 * VOCAB_SIZE * 64
    assert max(num_weights) - 2 * VOCAB_SIZE * 64 < 1.2 / size * of_layers


def test_an_even_output_layer_is_divided_too(tmp_path: Path) -> None:
    expected = build_tiny_model("llama", vocab_size=212)(input_ids=TOKEN_IDS, use_cache=False).logits
    found, num_weights = logits_of_split("llama", 2, tmp_path, vocab_size=212)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert max(num_weights) < logits_of_split("llama", 2, tmp_path / "odd")[1][0]


def test_what_the_ranks_cannot_share_is_refused_with_the_numbers() -> None:
    numbers = shared_numbers(build_tiny_model("llama").config)
    check_divisible(numbers, 2, of="tiny")
    with pytest.raises(
        InvalidSetup, match=r"got 4, which does not divide num_key_value_heads 2 of tiny; it can be 1, 2"
    ):
        check_divisible(numbers, 4, of="tiny")


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    model = build_tiny_model("gpt2")
    with pytest.raises(UnsupportedModel, match=r"tiny \(gpt2\) cannot be split among 2 ranks: transformers has no"):
        SplitPlan(model, FakeGroup(), path="tiny")  # type: ignore[arg-type]


def test_a_plan_that_is_not_known_is_refused() -> None:
    model = build_tiny_model("llama")
    model._tp_plan["model.layers.*.mlp"] = "sideways"
    with pytest.raises(UnsupportedModel, match="uses sideways, which is not implemented"):
        SplitPlan(model, FakeGroup(), path="tiny")  # type: ignore[arg-type]


class FakeGroup:
    rank, size = 0, 2
