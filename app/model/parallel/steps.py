"""A step as rank 0 sends it to the others: what a forward pass needs of a batch, as 32-bit numbers.

Of a sequence that the others know only its new block ids are sent. A sequence is identified by its list of block ids,
as on a GPU (`cuda/block_tables.py`): the scheduler replaces that list when it takes the blocks back, and never shortens
it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from app.engine.batch import Batch, ScheduledSequence
from app.engine.request import SamplingParams

_HEADER = 3  # number of sequences, of tables to forget, whether log-probabilities are wanted
_FACTS = 7  # of a sequence: number of its table, new blocks, tokens, start, whether it samples, targets, the first
_KEPT_TABLES = 256  # of sequences that are not in a step, beside as many as are
_UNUSED = SamplingParams(max_tokens=1, temperature=0.0)  # rank 0 draws


@dataclass(slots=True)
class _Table:
    """Refers to a list of block ids, so that no other list can get the same `id`."""

    number: int
    block_ids: list[int]
    num_sent: int = 0


class StepWriter:
    """Rank 0's side. Remembers what the others know."""

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}  # by the identity of the list of block ids
        self._next_number = 0

    def message(self, batch: Batch) -> bytes:
        """To be read by every other rank, once and in order."""
        facts, token_ids, block_ids = array("i"), array("i"), array("i")
        for item in batch.scheduled:
            table = self._table(item.block_ids)
            new = item.block_ids[table.num_sent :]
            table.num_sent += len(new)
            facts.extend(
                (table.number, len(new), len(item.token_ids), item.start, item.samples, len(item.targets),
                 item.first_target)
            )  # fmt: skip
            token_ids.extend(item.token_ids)
            block_ids.extend(new)
        forgotten = self._forgotten(batch.scheduled)
        header = array("i", (len(batch.scheduled), len(forgotten), batch.has_logprobs))
        return (header + forgotten + facts + token_ids + block_ids).tobytes()

    def _table(self, block_ids: list[int]) -> _Table:
        table = self._tables.get(id(block_ids))
        if table is None:
            table = self._tables[id(block_ids)] = _Table(self._next_number, block_ids)
            self._next_number += 1
        return table

    def _forgotten(self, items: Sequence[ScheduledSequence]) -> array[int]:
        """The numbers of tables that are not needed any more, as a rule: their sequences come anew if they do."""
        if len(self._tables) <= 2 * len(items) + _KEPT_TABLES:
            return array("i")
        present = {id(item.block_ids) for item in items}
        absent = [key for key in self._tables if key not in present]
        return array("i", [self._tables.pop(key).number for key in absent])


class StepReader:
    """Another rank's side."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}  # by their numbers

    def batch(self, message: bytes) -> Batch:
        """The step, without what only draws need."""
        numbers = array("i")
        numbers.frombytes(message)
        num_items, num_forgotten, has_logprobs = numbers[:_HEADER]
        at = _HEADER + num_forgotten
        for number in numbers[_HEADER:at]:
            del self._tables[number]
        facts = [numbers[place : place + _FACTS] for place in range(at, at + num_items * _FACTS, _FACTS)]
        at += num_items * _FACTS
        at_blocks = at + sum(each[2] for each in facts)
        items = []
        for number, num_blocks, num_tokens, start, samples, num_targets, first_target in facts:
            block_ids = self._tables.setdefault(number, [])
            block_ids += numbers[at_blocks : at_blocks + num_blocks]
            items.append(
                ScheduledSequence(
                    str(number), tuple(numbers[at : at + num_tokens]), start, block_ids, bool(samples), _UNUSED,
                    targets=(0,) * num_targets, first_target=first_target,
                )
            )  # fmt: skip
            at += num_tokens
            at_blocks += num_blocks
        return Batch(tuple(items), (), has_logprobs=bool(has_logprobs))
