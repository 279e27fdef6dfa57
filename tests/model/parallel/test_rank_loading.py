"""Each rank reads its own numbers from the files of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.config import ModelConfig
from app.model.parallel.split_plan import SizesOfRank, SplitPlan
from app.model.source import ModelSource, module_of_transformers, module_on_device
from tests.kit.models import CPU
from tests.model.parallel.rank_memory import memory_of_ranks, weight_bytes
from tests.tiny_models import build_tiny_model


def source_of(path: Path, group: Any = None) -> ModelSource:
    config = ModelConfig(path=str(path), device="cpu", dtype="float32")
    return ModelSource(config=config, location=str(path), device=CPU, dtype=torch.float32, group=group)


@pytest.mark.parametrize("file_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_rank_reads_what_the_plan_leaves_it_of_the_whole_model(
    architecture: str, file_type: torch.dtype, tmp_path: Path
) -> None:
    """The output layer is divided; that of the first is tied to the embedding."""
    model = build_tiny_model(architecture, vocab_size=212, tie_word_embeddings=architecture == "llama")
    model.to(file_type).save_pretrained(tmp_path)
    for rank in range(2):
        group = SizesOfRank(2)
        group.rank = rank
        whole, own = module_of_transformers(source_of(tmp_path)), module_on_device(source_of(tmp_path, group))
        SplitPlan(whole, group, path=architecture).split("", whole)
        assert own is not None
        expected, found = whole.state_dict(), own.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
        assert all(weight.is_contiguous() for weight in found.values())


def test_no_rank_has_the_whole_model_in_memory(tmp_path: Path) -> None:
    model = build_tiny_model(
        "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, head_dim=256, initializer_range=0.02
    )
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    own, of_torch = weight_bytes(str(tmp_path), 2), 64 * 2**20  # its code, of which each process touches pages
    for _before, peak in memory_of_ranks(str(tmp_path), 2):
        assert peak < 2 * own + of_torch, "3.4 times as much where a rank reads the whole model"
