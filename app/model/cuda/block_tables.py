"""Block tables that persist on the device between steps, so that each step copies only the new block ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from app.model.inputs import to_device


@dataclass(slots=True)
class _Row:
    """A sequence's row in `BlockTables`. Keeps the list of block ids alive, so that no new list can have its `id`."""

    index: int
    block_ids: list[int]
    num_written: int = 0


class BlockTables:
    """Stores a row of block ids for each recently computed sequence.

    A decoding sequence gains a block every `block_size` steps, so a step usually sends only a few numbers. A sequence
    is identified by the identity of its list of block ids: the scheduler never shortens a list, and replaces it when it
    frees the blocks. With several groups of layers, a sequence has a list and a row for each group.
    """

    def __init__(self, *, max_rows: int, max_blocks: int, scratch_block: int, device: torch.device) -> None:
        """Allocate rows for at most `max_rows` lists in a step, of up to `max_blocks` blocks each."""
        self.scratch_row = max_rows  # the row for tokens that belong to no sequence; contains only the scratch block
        self.tensor = torch.zeros(max_rows + 1, max_blocks, dtype=torch.int32, device=device)
        self.tensor[self.scratch_row] = scratch_block
        self._free = list(reversed(range(max_rows)))
        self._rows: dict[int, _Row] = {}  # by the identity of the list of block ids

    def update(self, lists: Sequence[list[int]]) -> list[int]:
        """Copy the new block ids to the device without waiting, and return the row of each list."""
        rows = [self._row(block_ids, lists) for block_ids in lists]
        width = self.tensor.shape[1]
        grown = [row for row in rows if row.num_written < len(row.block_ids)]
        where: list[int] = []
        block_ids: list[int] = []
        for row in grown:
            num_blocks = len(row.block_ids)
            assert num_blocks <= width, f"a sequence has {num_blocks} blocks, the table has room for {width}"
            where += range(row.index * width + row.num_written, row.index * width + num_blocks)
            block_ids += row.block_ids[row.num_written :]
        if where:
            new = to_device([where, block_ids], self.tensor.device)
            self.tensor.view(-1).index_copy_(0, new[0], new[1].int())
        for row in grown:  # only after the copy, so that the next step writes these block ids again if the copy fails
            row.num_written = len(row.block_ids)
        return [row.index for row in rows]

    def _row(self, block_ids: list[int], lists: Sequence[list[int]]) -> _Row:
        row = self._rows.get(id(block_ids))
        if row is None:
            if not self._free:
                self._forget_all_but(lists)
            row = self._rows[id(block_ids)] = _Row(self._free.pop(), block_ids)
        return row

    def _forget_all_but(self, lists: Sequence[list[int]]) -> None:
        """Free the rows of all sequences outside this step. Unfinished ones get a new row when they run again."""
        present = {id(block_ids) for block_ids in lists}
        absent = [key for key in self._rows if key not in present]
        assert absent, f"more than {self.scratch_row} lists of blocks in one step"
        self._free += [self._rows.pop(key).index for key in absent]
