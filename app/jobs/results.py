"""The store of a job's results: a folder of append-only journals with one result for each item that has ended.

    journal         one line for each item that has ended: a checksum, the item's number, its counts, its output line;
                    each opening starts a new journal: `journal.1`, `journal.2` and so on
    begun.bits      one bit for each item that has begun; survives a kill of this process, because the kernel writes it
    partial.tokens  the tokens of items that have begun and not ended
    recovery.json   how much work was lost so far because processes or engines died
    deaths.json     how many processes died while computing each item that has not ended

When `append` returns, the lines are in the journal and survive a crash of the process. After `sync`, they also survive
a crash of the machine. When the store is opened, it reads each journal up to its first torn line to find the items that
have ended. Only `delete` removes results. `app/jobs/outputs.py` makes output files from the journals.

Only one process at a time holds a folder. A process that has lost it without noticing writes only to its own journal,
so it cannot damage the next process's results. If an item ended in both processes, only its first result counts.
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
    """Raised if the store cannot be written now. Results that are already stored are safe."""


class ItemSet:
    """A set of items from 0 to num_items - 1 with one bit per item, so that a million items occupy 125 kB."""

    def __init__(self, num_items: int, bits: bytearray | mmap.mmap | None = None) -> None:
        self._bits = bytearray(_num_bytes(num_items)) if bits is None else bits
        self._count = sum(byte.bit_count() for byte in self._bits[:])

    @classmethod
    def in_file(cls, path: Path, num_items: int) -> ItemSet:
        """Open or create a set in a memory-mapped file. Added items survive any crash of this process."""
        with path.open("a+b") as file:
            # Allocate all blocks now, because on a full disk, a write to a hole in a mapped file kills the process.
            os.posix_fallocate(file.fileno(), 0, _num_bytes(num_items))
            return cls(num_items, mmap.mmap(file.fileno(), _num_bytes(num_items)))

    @classmethod
    def from_bytes(cls, bits: bytes) -> ItemSet:
        """Restore a set from the result of `to_bytes`."""
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
        """Return whether the set contains all items from `first` to `first + num_items - 1`."""
        return all(item in self for item in range(first, first + num_items))

    def minus(self, other: ItemSet) -> Iterator[int]:
        """Yield the items of this set that are not in the other, in order."""
        for place, (mine, others) in enumerate(zip(self.to_bytes(), other.to_bytes(), strict=True)):
            if left := mine & ~others & 0xFF:
                yield from (8 * place + bit for bit in range(8) if left >> bit & 1)


class PartialOutputs:
    """The tokens of items that have begun but not ended, from which another engine or another run can continue.

    Each token depends only on the item, its seed and the tokens before it, so an item has no other state. The tokens
    are stored in memory and in a file that is replaced as a whole. A crash loses only the most recent tokens.
    """

    def __init__(self, path: Path) -> None:
        """Load the tokens that an earlier run left in the file. A torn file counts as empty."""
        self._path = path
        self._token_ids = dict(_read_partial(path))
        self._has_changed = False
        self._next_save_at = 0.0

    def __contains__(self, item: int) -> bool:
        return item in self._token_ids

    def token_ids(self, item: int) -> tuple[int, ...]:
        """Return the item's tokens so far; empty if none are known."""
        return tuple(self._token_ids.get(item, ()))

    def add(self, token_ids: Mapping[int, Sequence[int]]) -> None:
        """Append the new tokens of each item in `token_ids`."""
        self._has_changed = self._has_changed or bool(token_ids)
        for item, more in token_ids.items():
            self._token_ids.setdefault(item, array("q")).extend(more)

    def drop(self, item: int) -> None:
        self._token_ids.pop(item, None)

    def save(self) -> None:
        """Write all tokens to the file, unless they are unchanged or were written recently. Raises OSError."""
        began_at = time.monotonic()
        if not self._has_changed or began_at < self._next_save_at:
            return
        content = array("q")
        for item, token_ids in self._token_ids.items():
            content.extend((item, len(token_ids)))
            content.extend(token_ids)
        body = content.tobytes()
        # The checksum detects a file torn by a crash of the machine. The items then start from the beginning.
        with replaced(self._path, survives_machine=False) as temporary:
            temporary.write_bytes(crc32(body).to_bytes(_PARTIAL_HEAD_BYTES, "big") + body)
        self._has_changed = False
        ended_at = time.monotonic()
        partial_share_of_time = 0.02  # at most this share of the time is spent on writing, however large the file is
        self._next_save_at = ended_at + (ended_at - began_at) / partial_share_of_time


@dataclass(slots=True)
class Recovery:
    """Counts of interruptions over all runs on this folder."""

    runs: int = 0
    engines_lost: int = 0
    continued_items: int = 0  # items that lost their engine or the driver, and resumed from their known tokens
    recomputed_items: int = 0  # items that lost their engine or the driver, and started again without any known token


class ResultStore:
    """The results of one job. `ended` is the set of items that have a result."""

    def __init__(self, folder: Path, num_items: int) -> None:
        """Open the store in a folder, or create one, and start a new journal. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.num_items = num_items
        self.ended = ItemSet(num_items)
        self.counts = Counts()
        self.partial = PartialOutputs(folder / PARTIAL)
        self._syncing = threading.Lock()
        self._appending = threading.Lock()
        self._is_closed = False
        self._is_torn = False  # whether the journal ends with part of a line; recovery would not read lines after it
        earlier = journals_in(folder)
        self._earlier = {path: self._recover(path) for path in earlier}  # the size of each journal without a torn end
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
        """Size of all journals."""
        return sum(self._earlier.values()) + self._end

    def close(self) -> None:
        """Wait for a `sync` or `append` in another thread to return, then close the store."""
        with self._syncing, self._appending:
            self._is_closed = True
            os.close(self._journal)
            self._note_stop()
        if not self._end:
            with suppress(OSError):
                self._path.unlink()

    def _note_death(self) -> None:
        """Count a death for each item that was running when the previous process died."""
        under_way = list(self.begun.minus(self.ended))
        if under_way:
            self.deaths.update(under_way)
            write_atomically(self.folder / DEATHS, json.dumps(self.deaths).encode() + b"\n")
            self.note_interrupted(under_way)
            self.begun.clear()

    def _note_stop(self) -> None:
        """Mark the running items as interrupted by a clean stop, so that the next opening counts no death."""
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
        """Write results and return the new ones. An item that has ended already keeps its first result. Thread-safe.

        Raises ResultsUnwritable, in which case none of the results are added.
        """
        given = list(results)
        if not given:
            return []
        lines = {result.number: _to_line(result) for result in given}
        with self._appending:
            if self._is_closed:
                raise ResultsUnwritable("the store is closed")
            if self._is_torn:
                raise ResultsUnwritable(
                    f"{self._path} ends in an incomplete record; reopen the store to start a new journal"
                )
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
        """Add new tokens of unfinished items, and save all partial tokens if due. Raises ResultsUnwritable."""
        self.partial.add(token_ids)
        try:
            self.partial.save()
        except OSError as error:
            raise ResultsUnwritable(*error.args) from error

    def note_interrupted(self, items: Iterable[int]) -> None:
        """Count items that had begun when they lost their engine, by whether they can resume from known tokens."""
        for item in items:
            if item in self.partial:
                self.recovery.continued_items += 1
            else:
                self.recovery.recomputed_items += 1

    def sync(self) -> None:
        """Sync the journal and `recovery` to the disk. Thread-safe. Raises ResultsUnwritable."""
        try:
            with self._syncing:
                if not self._is_closed:
                    os.fsync(self._journal)
                    self._save_recovery()
        except OSError as error:
            raise ResultsUnwritable(*error.args) from error

    def results(self) -> Iterator[ItemResult]:
        """Yield all results in the order in which their items ended. Thread-safe."""
        yielded = ItemSet(self.num_items)
        for path, end in {**self._earlier, self._path: self._end}.items():
            if not end:  # an empty journal may have been removed by the process that created it
                continue
            with path.open("rb") as journal:
                while journal.tell() < end:
                    result = _from_line(journal.readline(), self.num_items)
                    assert result is not None, "appended and recovered lines are whole"
                    if result.number not in yielded:
                        yielded.add(result.number)
                        yield result

    def _recover(self, path: Path) -> int:
        """Load a journal's results up to its first torn line, and sync the journal. Returns their size in bytes."""
        end = 0
        try:
            journal = path.open("rb")
        except FileNotFoundError:  # a process that lost the folder has just removed its empty journal
            return 0
        with journal:
            for line in journal:
                result = _from_line(line, self.num_items)
                if result is None:
                    break
                if result.number not in self.ended:
                    self._note_end(result)
                end += len(line)
            os.fsync(journal.fileno())  # the process that wrote the journal may have crashed before syncing it
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
    """Return a store's journals, oldest first. Ignores copies under other names, such as `journal.1.bak`."""
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
    # Reject an empty body first, because it matches a checksum of zeros.
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


# Errors for a missing or torn file, such as after two processes wrote it at once. The counts then restart at zero,
# because rejecting the folder would make its results unusable.
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
