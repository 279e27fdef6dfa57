from __future__ import annotations

import random

import pytest
import torch

from app.model.cuda.block_tables import BlockTables
from tests.kit.models import CPU


def build(max_rows: int = 3, max_blocks: int = 6) -> BlockTables:
    return BlockTables(max_rows=max_rows, max_blocks=max_blocks, scratch_block=99, device=CPU)


def test_each_sequence_finds_its_blocks_in_its_row_whatever_came_before() -> None:
    rng = random.Random(0)
    tables = build()
    lists: list[list[int]] = [[] for _ in range(5)]
    for _ in range(200):
        chosen = rng.sample(range(5), k=rng.randint(1, 3))
        for n in chosen:
            if len(lists[n]) == 6 or rng.random() < 0.1:
                lists[n] = []  # preempted or ended: the scheduler makes a new list
            lists[n] += [rng.randrange(99) for _ in range(rng.randint(0 if lists[n] else 1, 6 - len(lists[n])))]
        rows = tables.update([lists[n] for n in chosen])
        assert len(set(rows)) == len(rows)
        for n, row in zip(chosen, rows, strict=True):
            assert tables.tensor[row, : len(lists[n])].tolist() == lists[n]
    assert tables.tensor[tables.scratch_row].tolist() == [99] * 6


def test_only_what_is_new_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, block_ids = build(), [4, 5]
    tables.update([block_ids])
    written: list[object] = []
    monkeypatch.setattr(
        "app.model.cuda.block_tables.to_device",
        lambda values, device: written.append(values) or torch.tensor(values),  # type: ignore[func-returns-value]
    )
    row = tables.update([block_ids])[0]
    block_ids.append(8)
    assert tables.update([block_ids]) == [row]
    assert written == [[[6 * row + 2], [8]]]


def test_too_many_sequences_and_too_many_blocks_fail_an_assertion() -> None:
    with pytest.raises(AssertionError, match="more than 3 lists"):
        build().update([[n] for n in range(4)])
    with pytest.raises(AssertionError, match="7 blocks, the table has room for 6"):
        build().update([[0] * 7])


def test_blocks_that_were_not_copied_are_copied_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no pinned memory")

    tables, block_ids = build(), [4, 5]
    with monkeypatch.context() as patch:
        patch.setattr("app.model.cuda.block_tables.to_device", fails)
        with pytest.raises(torch.OutOfMemoryError):
            tables.update([block_ids])
    row = tables.update([block_ids])[0]
    assert tables.tensor[row, :2].tolist() == [4, 5]
