"""The store of a job's results: one folder with append-only journals, in which each item ends once.

    journal         one line for each item that has ended: a checksum, the item's number, its counts, its output line;
                    each opening writes to a new journal: `journal.1`, `journal.2` and so on
    begun.bits      one bit for each item that has begun; survives a kill of this process, because the kernel writes it
    partial.tokens  the tokens of items that have begun and not ended
    recovery.json   the work lost to deaths of processes and engines so far
    deaths.json     how often the process died while it had an item that has not ended

When `append` returns, the lines are in the journal and survive the death of the process. After `sync`, the lines also
survive the death of the machine. Opening the store reads each journal up to its first torn line, and so finds the items
that have ended. Only `delete` removes results. Output files are made from the journals, see `app/jobs/outputs.py`.

One process at a time holds a folder. A process that has lost the folder unnoticed writes only to its own journal, so it
cannot damage the next process's results. An item that ended in both processes counts once.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from zlib import crc32

from app.disk import replaced, write_atomically
from app.jobs.job import Counts, ItemResult

JOURNAL, BEGUN, PARTIAL, RECOVERY = "journal", "begun.bits", "partial.tokens", "recovery.json"
DEATHS = "deaths.json"
_PARTIAL_HEAD_BYTES = 8


class ResultsUnwritable(OSError):
    """The store cannot be written now. Stored results stay."""


class ItemSet:
    """A set of items from 0 to num_items - 1. Each item takes one bit: a million items take 125 kB."""

    def __init__(self, num_items: int, bits: bytearray | mmap.mmap | None = None) -> None:
        self._bits = bytearray(_num_bytes(num_items)) if bits is None else bits
        self._count = sum(byte.bit_count() for byte in self._bits[:])

    @classmethod
    def in_file(cls, path: Path, num_items: int) -> ItemSet:
        """Open or create a set in a memory-mapped file. Added items survive any death of this process."""
        with path.open("a+b") as file:
            # Allocate all blocks now: on a full disk, a write to a hole in a mapped file would kill the process.
            os.posix_fallocate(file.fileno(), 0, _num_bytes(num_items))
            return cls(num_items, mmap.mmap(file.fileno(), _num_bytes(num_items)))

    @classmethod
    def from_bytes(cls, bits: bytes) -> ItemSet:
        """Return the set that `to_bytes` has turned into `bits`."""
        return cls(8 * len(bits), bytearray(bits))

    def to_bytes(self) -> bytes:
        return bytes(self._bits)

    def add(self, item: int) -> None:
        if item not in self:
            self._bits[item >> 3] |= 1 << (item & 7)
            self._count += 1

    def update(self, items: Iterable[int]) -> None:
        for item in items:
            self.add(item)

    def __contains__(self, item: int) -> bool:
        return bool(self._bits[item >> 3] >> (item & 7) & 1)

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        self._bits[:] = bytes(len(self._bits))
        self._count = 0

    def has_all(self, first: int, num_items: int) -> bool:
        """Return whether the `num_items` items from `first` on are all in the set."""
        return all(item in self for item in range(first, first + num_items))

    def minus(self, other: ItemSet) -> Iterator[int]:
        """Yield the items that are in this set and not in the other, in order."""
        for place, (mine, others) in enumerate(zip(self.to_bytes(), other.to_bytes(), strict=True)):
            if left := mine & ~others & 0xFF:
                yield from (8 * place + bit for bit in range(8) if left >> bit & 1)


class PartialOutputs:
    """The tokens of items that have begun and not ended. Another engine, or another run, continues after these tokens.

    A token is a function of the item, its seed and the tokens before it, so an item has no other state. The tokens are
    in memory and in a file that is replaced as a whole. After a crash, the file lacks only the most recent tokens.
    """

    def __init__(self, path: Path) -> None:
        """Read the tokens that an earlier run left in the file. A torn file counts as empty."""
        self._path = path
        self._token_ids = dict(_read_partial(path))
        self._has_changed = False
        self._next_save_at = 0.0

    def __contains__(self, item: int) -> bool:
        return item in self._token_ids

    def token_ids(self, item: int) -> tuple[int, ...]:
        """Return the known tokens of an item."""
        return tuple(self._token_ids.get(item, ()))

    def add(self, token_ids: Mapping[int, Sequence[int]]) -> None:
        """Append new tokens to items."""
        self._has_changed = self._has_changed or bool(token_ids)
        for item, more in token_ids.items():
            self._token_ids.setdefault(item, array("q")).extend(more)

    def drop(self, item: int) -> None:
        """Forget the tokens of an item that has ended."""
        self._token_ids.pop(item, None)

    def save(self) -> None:
        """Write all tokens, unless nothing has changed or a slow write was done recently. Raises OSError."""
        began_at = time.monotonic()
        if not self._has_changed or began_at < self._next_save_at:
            return
        content = array("q")
        for item, token_ids in self._token_ids.items():
            content.extend((item, len(token_ids)))
            content.extend(token_ids)
        body = content.tobytes()
        # The checksum shows whether the death of the machine left the file torn. If so, the items start again.
        with replaced(self._path, survives_machine=False) as temporary:
            temporary.write_bytes(crc32(body).to_bytes(_PARTIAL_HEAD_BYTES, "big") + body)
        self._has_changed = False
        ended_at = time.monotonic()
        partial_share_of_time = 0.02  # the most time for writing partial tokens: a large file is written less often
        self._next_save_at = ended_at + (ended_at - began_at) / partial_share_of_time


@dataclass(slots=True)
class Recovery:
    """The costs of deaths, over all runs on this folder."""

    runs: int = 0
    engines_lost: int = 0
    continued_items: int = 0  # items that lost their engine or the driver, and continued after their known tokens
    recomputed_items: int = 0  # items that lost their engine or the driver, and started again without any known token


class ResultStore:
    """The results of one job. `ended` has the items that have ended."""

    def __init__(self, folder: Path, num_items: int) -> None:
        """Open the store in a folder, or create a new one. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.num_items = num_items
        self.ended = ItemSet(num_items)
        self.counts = Counts()
        self.partial = PartialOutputs(folder / PARTIAL)
        self._syncing = threading.Lock()
        self._appending = threading.Lock()
        self._is_closed = False
        self._is_torn = False  # the journal ends with part of a line, and recovery would not read later lines
        earlier = journals_in(folder)
        self._earlier = {path: self._recover(path) for path in earlier}  # the bytes of whole lines in each journal
        self._path = folder / (f"{JOURNAL}.{_number(earlier[-1]) + 1}" if earlier else JOURNAL)
        self._end = 0
        self.begun = ItemSet(num_items)
        self._journal = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            self.begun = ItemSet.in_file(folder / BEGUN, num_items)
            self.recovery = _read_recovery(folder / RECOVERY)
            self._saved_recovery = replace(self.recovery)
            self.recovery.runs += 1
            self.deaths = _read_deaths(folder / DEATHS)
            self._note_death()
            self._save_recovery()
        except BaseException:
            self.close()
            raise

    @property
    def is_complete(self) -> bool:
        """Whether every item has ended."""
        return len(self.ended) == self.num_items

    @property
    def num_bytes(self) -> int:
        """The size of all journals."""
        return sum(self._earlier.values()) + self._end

    def close(self) -> None:
        """Close the store. Waits for a `sync` or an `append` in another thread."""
        with self._syncing, self._appending:
            self._is_closed = True
            os.close(self._journal)
            self._note_stop()
        if not self._end:
            with suppress(OSError):
                self._path.unlink()

    def _note_death(self) -> None:
        """Count a death for each item that was under way when the previous process died."""
        under_way = list(self.begun.minus(self.ended))
        if under_way:
            self.deaths.update(under_way)
            write_atomically(self.folder / DEATHS, json.dumps(self.deaths).encode() + b"\n")
            self.note_interrupted(under_way)
            self.begun.clear()

    def _note_stop(self) -> None:
        """Note that the items under way stop without a death."""
        under_way = list(self.begun.minus(self.ended))
        if under_way:
            self.note_interrupted(under_way)
            self.begun.clear()
            with suppress(OSError):  # only the summary uses these numbers
                self._save_recovery()

    def delete(self) -> None:
        """Delete all files of the store. Raises OSError."""
        for path in (*self._earlier, self._path, *(self.folder / name for name in (BEGUN, PARTIAL, RECOVERY, DEATHS))):
            path.unlink(missing_ok=True)

    def append(self, results: Iterable[ItemResult]) -> list[ItemResult]:
        """Write results and return the new ones. An item that has ended before keeps its result. Any thread may call.

        Raises ResultsUnwritable; in that case, no result was added.
        """
        given = list(results)
        if not given:
            return []
        lines = {result.number: _to_line(result) for result in given}
        with self._appending:
            if self._is_closed:
                raise ResultsUnwritable("the store is closed")
            if self._is_torn:
                raise ResultsUnwritable(f"{self._path} has a torn end; the next opening begins another journal")
            new = {result.number: result for result in given if result.number not in self.ended}
            content = b"".join([lines[number] for number in new])
            try:
                _write_all(self._journal, content)
            except OSError as error:
                self._cut_torn_end()
                raise ResultsUnwritable(*error.args) from error
            self._end += len(content)
            for result in new.values():
                self._note_end(result)
        return list(new.values())

    def _cut_torn_end(self) -> None:
        try:
            os.ftruncate(self._journal, self._end)
        except OSError:
            self._is_torn = True

    def progress(self, token_ids: Mapping[int, Sequence[int]]) -> None:
        """Add new tokens of items that have not ended, and store all partial tokens. Raises ResultsUnwritable."""
        self.partial.add(token_ids)
        try:
            self.partial.save()
        except OSError as error:
            raise ResultsUnwritable(*error.args) from error

    def note_interrupted(self, items: Iterable[int]) -> None:
        """Count items that had begun when they lost their engine."""
        for item in items:
            if item in self.partial:
                self.recovery.continued_items += 1
            else:
                self.recovery.recomputed_items += 1

    def sync(self) -> None:
        """Sync the journal and `recovery` to the disk. Any thread may call. Raises ResultsUnwritable."""
        try:
            with self._syncing:
                if not self._is_closed:
                    os.fsync(self._journal)
                    self._save_recovery()
        except OSError as error:
            raise ResultsUnwritable(*error.args) from error

    def results(self) -> Iterator[ItemResult]:
        """Yield all results in the order in which their items ended. Any thread may call."""
        yielded = ItemSet(self.num_items)
        for path, end in {**self._earlier, self._path: self._end}.items():
            if not end:  # the process of an empty journal may have removed it
                continue
            with path.open("rb") as journal:
                while journal.tell() < end:
                    result = _from_line(journal.readline(), self.num_items)
                    assert result is not None, "what was appended or recovered is whole"
                    if result.number not in yielded:
                        yielded.add(result.number)
                        yield result

    def _recover(self, path: Path) -> int:
        """Add the results before the first torn line of a journal, and sync the journal. Returns the results' size."""
        end = 0
        try:
            journal = path.open("rb")
        except FileNotFoundError:  # a process that has lost the folder has just removed its empty journal
            return 0
        with journal:
            for line in journal:
                result = _from_line(line, self.num_items)
                if result is None:
                    break
                if result.number not in self.ended:
                    self._note_end(result)
                end += len(line)
            os.fsync(journal.fileno())  # the process that wrote the journal may have died before syncing it
        return end

    def _note_end(self, result: ItemResult) -> None:
        self.ended.add(result.number)
        self.counts.add(result)
        self.partial.drop(result.number)

    def _save_recovery(self) -> None:
        if self.recovery != self._saved_recovery:
            now = replace(self.recovery)
            write_atomically(self.folder / RECOVERY, json.dumps(asdict(now), indent=2).encode() + b"\n")
            self._saved_recovery = now


def journals_in(folder: Path) -> list[Path]:
    """Return the journals of a store, the oldest first, without copies that have other names."""
    numbered = (path for path in folder.glob(f"{JOURNAL}.*") if path.name.removeprefix(f"{JOURNAL}.").isdecimal())
    return [*folder.glob(JOURNAL), *sorted(numbered, key=_number)]


def _number(journal: Path) -> int:
    return int(journal.name.removeprefix(JOURNAL).removeprefix(".") or 0)


def _to_line(result: ItemResult) -> bytes:
    counts = (result.num_input_tokens, result.num_cached_tokens, result.num_output_tokens)
    body = b"%d %d %d %d %d %b" % (result.number, result.is_error, *counts, result.line)
    return b"%08x %b\n" % (crc32(body), body)


def _from_line(line: bytes, num_items: int) -> ItemResult | None:
    """Return the result in a line of the journal, or None if the line is torn."""
    checksum_digits = 8
    checksum, body = line[:checksum_digits], line[checksum_digits + 1 : -1]
    # An empty body is refused first, because it matches a checksum of zeros.
    if not body or not line.endswith(b"\n") or checksum != b"%08x" % crc32(body):
        return None
    number, is_error, *counts, content = body.split(b" ", 5)
    num_input, num_cached, num_output = map(int, counts)
    if not 0 <= int(number) < num_items:
        return None
    return ItemResult(
        number=int(number),
        is_error=is_error == b"1",
        line=content,
        num_input_tokens=num_input,
        num_cached_tokens=num_cached,
        num_output_tokens=num_output,
    )


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


# The errors of a missing or torn file: two processes wrote it at once, or the storage lost a part. The counts of deaths
# start again then, because the results in the same folder are worth more.
_NO_COUNTS = (FileNotFoundError, ValueError, TypeError, AttributeError)


def _read_deaths(path: Path) -> Counter[int]:
    try:
        return Counter({int(number): int(deaths) for number, deaths in json.loads(path.read_bytes()).items()})
    except _NO_COUNTS:
        return Counter()


def _read_recovery(path: Path) -> Recovery:
    try:
        return Recovery(**{name: int(number) for name, number in json.loads(path.read_bytes()).items()})
    except _NO_COUNTS:
        return Recovery()


def _read_partial(path: Path) -> Iterator[tuple[int, array[int]]]:
    content = path.read_bytes() if path.exists() else b""
    head, body = content[:_PARTIAL_HEAD_BYTES], content[_PARTIAL_HEAD_BYTES:]
    if not body or crc32(body).to_bytes(_PARTIAL_HEAD_BYTES, "big") != head:
        return
    values, place = array("q", body), 0
    while place < len(values):
        item, num_tokens = values[place], values[place + 1]
        yield item, values[place + 2 : place + 2 + num_tokens]
        place += 2 + num_tokens


def _num_bytes(num_items: int) -> int:
    return max(1, (num_items + 7) // 8)
