"""A rank beside the one in the test: python -m tests.model.parallel.other_rank RANK SIZE STORE"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from app.model.parallel.group import RankGroup


def exchanged(group: RankGroup) -> list[torch.Tensor]:
    """What a rank has after one exchange of each kind."""
    own = torch.arange(12, dtype=torch.float32).view(3, 4) * (group.rank + 1)
    total, from_first = own.clone(), own.clone()
    group.all_reduce(total)
    group.broadcast(from_first)
    rounded = torch.full((5,), 1.0 + group.rank / 256, dtype=torch.bfloat16)
    group.all_reduce(rounded)
    return [total, from_first, rounded, group.gather_columns(own[:, :2]), torch.tensor(group.minimum(7 - group.rank))]


def main(rank: int, size: int, store: Path) -> None:
    group = RankGroup(rank, size, store=store, device=torch.device("cpu"), timeout_s=30)
    for tensor in exchanged(group):
        print(tensor.tolist())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
