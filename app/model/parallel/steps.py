"""Encodes a step's inputs for the other ranks, as columns of 32-bit numbers.

For a sequence that was sent before, only its new block ids are sent. A sequence is identified by its list of block
ids, as in `cuda/block_tables.py`: the scheduler never shortens a list, and replaces it when it frees the blocks.

Every step waits until its message is written and read. To keep it short, a decode step omits the columns whose values
are the same for all of its sequences.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.request import SamplingParams
from app.model.adapters import SlottedAdapter

# The counts of sequences, of block tables to forget and of block tables with new blocks, and four flags: has
# log-probabilities, has drafts, has adapters, and is a decode step, in which every sequence has one token and samples.
_HEADER = 7
_NO_SLOT = -1
_UNUSED = SamplingParams(max_tokens=1, temperature=0.0)  # only rank 0 samples


@dataclass(slots=True)
class _Table:
    """The block ids of a sequence. Keeps the list alive, so that no other list can have its `id`."""

    number: int
    block_ids: list[int]
    num_sent: int = 0


class StepWriter:
    """Encodes steps on rank 0, and remembers the block ids that it has sent."""

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}  # by the `id` of the list of block ids
        self._next_number = 0

    def message(self, batch: StepBatch) -> bytes:
        """Return a step's message. Every other rank must read all messages, each once and in order."""
        items, known = batch.scheduled, self._tables
        tables = [known.get(id(item.block_ids)) or self._added(item.block_ids) for item in items]
        grown = [table for table in tables if table.num_sent < len(table.block_ids)]
        new = [table.block_ids[table.num_sent :] for table in grown]
        for table in grown:
            table.num_sent = len(table.block_ids)
        forgotten = self._forgotten(items)
        token_ids = list(chain.from_iterable([item.token_ids for item in items]))
        is_decode = len(token_ids) == len(items) == len(batch.sampled) and not batch.has_targets
        numbers = [
            len(items), len(forgotten), len(grown), batch.has_logprobs, batch.has_drafts, batch.has_adapters,
            is_decode,
            *forgotten,
            *[table.number for table in grown], *[len(each) for each in new], *chain.from_iterable(new),
            *[table.number for table in tables],
            *[item.start for item in items],
            *(map(_slot_of, items) if batch.has_adapters else ()),
            *([] if is_decode else _other_columns(items)),
            *token_ids,
        ]  # fmt: skip
        return array("i", numbers).tobytes()

    def _added(self, block_ids: list[int]) -> _Table:
        table = self._tables[id(block_ids)] = _Table(self._next_number, block_ids)
        self._next_number += 1
        return table

    def _forgotten(self, items: Sequence[ScheduledSequence]) -> list[int]:
        """Forget the block tables of absent sequences if there are too many. Returns the numbers of these tables.

        If such a sequence returns, its block table is sent again.
        """
        kept_tables = 256  # absent sequences that may keep their tables, plus one for each present
        if len(self._tables) <= 2 * len(items) + kept_tables:
            return []
        present = {id(item.block_ids) for item in items}
        absent = [key for key in self._tables if key not in present]
        return [self._tables.pop(key).number for key in absent]


def _slot_of(item: ScheduledSequence) -> int:
    if item.adapter is None:
        return _NO_SLOT
    assert isinstance(item.adapter, SlottedAdapter), "ranks store adapters in slots"
    return item.adapter.slot


def _other_columns(items: Sequence[ScheduledSequence]) -> list[int]:
    """Return the columns that a decode step omits."""
    return [
        *[len(item.token_ids) for item in items],
        *[item.samples for item in items],
        *[len(item.targets) for item in items],
        *[item.first_target for item in items],
    ]


class StepReader:
    """Decodes steps on the other ranks."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}  # by number
        self._adapters: dict[int, SlottedAdapter | None] = {_NO_SLOT: None}  # by slot; sequences must share one object

    def batch(self, message: bytes) -> StepBatch:
        """Return a step's batch, without the data for sampling, which only rank 0 needs."""
        numbers = array("i")
        numbers.frombytes(message)
        left = iter(numbers)
        num_items, num_forgotten, num_grown, has_logprobs, has_drafts, adapts, is_decode = islice(left, _HEADER)
        for number in islice(left, num_forgotten):
            del self._tables[number]
        grown, num_new = list(islice(left, num_grown)), list(islice(left, num_grown))
        for number, count in zip(grown, num_new, strict=True):
            self._tables.setdefault(number, []).extend(islice(left, count))
        tables = [self._tables[number] for number in islice(left, num_items)]
        starts = list(islice(left, num_items))
        slots = list(islice(left, num_items)) if adapts else [_NO_SLOT] * num_items
        adapters = [self._adapters.setdefault(slot, SlottedAdapter(slot)) for slot in slots]
        no_name = ""  # request ids are not sent
        if is_decode:
            items = [
                ScheduledSequence(no_name, token_ids, start, block_ids, True, _UNUSED, adapter=adapter)
                for block_ids, start, adapter, token_ids
                in zip(tables, starts, adapters, zip(left, strict=True), strict=True)
            ]  # fmt: skip
        else:
            columns = [list(islice(left, num_items)) for _ in range(4)]
            items = [
                ScheduledSequence(
                    no_name, tuple(islice(left, num_tokens)), start, block_ids, bool(samples), _UNUSED,
                    targets=(0,) * num_targets, first_target=first_target, adapter=adapter,
                )
                for block_ids, start, adapter, num_tokens, samples, num_targets, first_target
                in zip(tables, starts, adapters, *columns, strict=True)
            ]  # fmt: skip
        return StepBatch(tuple(items), (), has_logprobs=bool(has_logprobs), has_drafts=bool(has_drafts))
