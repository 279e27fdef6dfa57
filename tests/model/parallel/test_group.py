from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.model.parallel.group import RankGroup
from tests.model.parallel.test_split_plan import on_ranks


def exchanged(group: RankGroup) -> list[torch.Tensor]:
    """What a rank has after one exchange of each kind."""
    own = torch.arange(12, dtype=torch.float32).view(3, 4) * (group.rank + 1)
    total, from_first = own.clone(), own.clone()
    group.all_reduce(total)
    group.broadcast(from_first)
    rounded = torch.full((5,), 1.0 + group.rank / 256, dtype=torch.bfloat16)
    group.all_reduce(rounded)
    return [total, from_first, rounded, group.gather_columns(own[:, :2]), torch.tensor(group.minimum(7 - group.rank))]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_exchange_tensors(size: int, tmp_path: Path) -> None:
    """In threads; tests of engines have processes."""
    first, *others = on_ranks(size, tmp_path, exchanged)
    total, from_first, rounded, columns, least = first
    numbers = torch.arange(12, dtype=torch.float32).view(3, 4)
    factors = range(1, size + 1)
    assert torch.equal(total, numbers * sum(factors))
    assert torch.equal(from_first, numbers)
    exact = sum(1.0 + rank / 256 for rank in range(size))
    assert rounded.dtype is torch.bfloat16
    assert torch.allclose(rounded.float(), torch.tensor(exact), rtol=2**-8)
    assert torch.equal(columns, torch.cat([numbers[:, :2] * factor for factor in factors], dim=-1))
    assert least == 8 - size
    for other in others:
        assert all(map(torch.equal, other, first))


def test_a_rank_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
        RankGroup(0, 2, store=tmp_path / "store", device=torch.device("cpu"), timeout_s=0.2)
