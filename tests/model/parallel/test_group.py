from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from app.model.parallel.group import RankGroup
from tests.model.parallel.other_rank import exchanged


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_exchange_tensors(size: int, tmp_path: Path) -> None:
    store = tmp_path / "store"
    others = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.model.parallel.other_rank", str(rank), str(size), str(store)],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(1, size)
    ]  # fmt: skip
    group = RankGroup(0, size, store=store, device=torch.device("cpu"), timeout_s=60)
    total, from_first, rounded, columns, least = exchanged(group)
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
        printed = other.communicate(timeout=30)[0].splitlines()
        assert printed == [str(tensor.tolist()) for tensor in (total, from_first, rounded, columns, least)]
        assert other.returncode == 0


def test_a_rank_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
        RankGroup(0, 2, store=tmp_path / "store", device=torch.device("cpu"), timeout_s=0.2)
