from __future__ import annotations

import dataclasses

import pytest
import torch

from app.errors import InvalidSetup
from app.model.llama import DecoderSettings, ExpertSettings, by_expert
from app.model.parallel.slices import part_of, parts_of, settings_of_rank
from tests.tiny_models import build_tiny_model

WHOLE = DecoderSettings(
    hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64, experts=ExpertSettings(),
    vocab_size=211, epsilon=1e-6, scaling=0.25, sliding_windows=(0, 0), rotary_frequencies=(1.0,), rotary_scaling=1.0,
)  # fmt: skip


def ranks_of(whole: DecoderSettings, size: int, *, unit: int = 16) -> list[DecoderSettings]:
    return [settings_of_rank(whole, rank=rank, size=size, unit=unit) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe"])
def test_the_parts_of_all_ranks_joined_are_the_whole(architecture: str, size: int) -> None:
    weights = by_expert(build_tiny_model(architecture).state_dict())
    ranks = ranks_of(WHOLE, size)
    for name, weight in weights.items():
        parts = [part_of(rank, name, weight) for rank in ranks]
        if all(part.shape == weight.shape for part in parts):
            is_norm_or_bias_of_a_sum = weight.dim() == 1 and not name.endswith(("q_proj.bias", "k_proj.bias"))
            assert size == 1 or is_norm_or_bias_of_a_sum or name.endswith("mlp.gate.weight")
            assert all(part.data_ptr() == weight.data_ptr() for part in parts)
            continue
        if size == 4 and ("k_proj" in name or "v_proj" in name):  # two ranks have the same of the two heads
            parts = parts[::2]
        dim = next(d for d in range(weight.dim()) if parts[0].shape[d] != weight.shape[d])
        assert torch.equal(torch.cat(parts, dim=dim), weight), name


def test_heads_inner_sizes_and_vocabulary_are_divided() -> None:
    whole = dataclasses.replace(WHOLE, experts=ExpertSettings(num_experts=4, per_token=2, intermediate_size=128))
    for rank in ranks_of(whole, 2):
        assert (rank.num_heads, rank.num_kv_heads, rank.intermediate_size) == (2, 1, 32)
        assert (rank.experts.intermediate_size, rank.experts.num_experts) == (64, 4)
        assert (rank.rank_tokens, rank.vocab_size, rank.hidden_size) == (128, 211, 64)
    assert [rank.num_kv_heads for rank in ranks_of(WHOLE, 4)] == [1] * 4
    assert ranks_of(WHOLE, 1) == [WHOLE]


def test_parts_are_views_and_what_a_model_lacks_is_none() -> None:
    down = torch.randn(64, 64)
    weights = parts_of(ranks_of(WHOLE, 2)[1], {"model.layers.0.mlp.down_proj.weight": down}.get)
    part = weights("model.layers.0.mlp.down_proj.weight")
    assert part is not None
    assert part.shape == (64, 32)
    assert part.untyped_storage().data_ptr() == down.untyped_storage().data_ptr()
    assert weights("model.layers.0.self_attn.q_norm.weight") is None


@pytest.mark.parametrize(
    ("changes", "size", "unit", "said"),
    [
        ({}, 3, 16, "among 3 ranks: 3 does not divide its 4 query heads; 3 neither divides its 2 KV heads nor is"),
        ({"num_heads": 12, "num_kv_heads": 4}, 6, 16, "6 neither divides its 4 KV heads nor is a multiple of them"),
        ({"intermediate_size": 80}, 2, 16, "the 80 inner numbers of its MLP are no multiple of 2 x 16"),
        ({}, 2, 64, "the 64 inputs of its attention's output are no multiple of 2 x 64"),
        (
            {"experts": ExpertSettings(num_experts=4, per_token=2, intermediate_size=48)}, 2, 16,
            "the 48 inner numbers of its experts are no multiple of 2 x 16",
        ),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_divided_is_refused_with_the_numbers(
    changes: dict[str, object], size: int, unit: int, said: str
) -> None:
    with pytest.raises(InvalidSetup) as refused:
        ranks_of(dataclasses.replace(WHOLE, **changes), size, unit=unit)  # type: ignore[arg-type]
    assert said in str(refused.value)
