"""The store of a job's results: one folder with an append-only journal, in which each item ends once.

    journal         one line for each item that has ended: a checksum, the item's number, its counts, its output line;
                    each opening writes to a journal of its own, `journal.1`, `journal.2` and so on
    begun.bits      which items have been begun, one bit each, kept by the kernel when this process is killed
    partial.tokens  the tokens of items that have begun and not ended
    recovery.json   what deaths of processes have cost so far
    deaths.json     how often the process died while it had an item that has not ended

A line is in the journal when `append` returns: the death of the process cannot take it back. `sync` makes the same true
for the death of the machine. Opening the store reads all journals, each up to its first torn line, and finds the items
that have ended. Nothing here deletes a result; output files are made from the journals, see `app/jobs/outputs.py`.

One process at a time has a folder. One that has lost it without noticing writes to its own journal only: it takes
nothing from the next process, and an item that both have ended counts once.
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
    """The store cannot be written now. What it has stays."""


class ItemSet:
    """Which of the items 0 to num_items - 1 are in it, in one bit each: a million items take 125 kB."""

    def __init__(self, num_items: int, bits: bytearray | mmap.mmap | None = None) -> None:
        self._bits = bytearray(_num_bytes(num_items)) if bits is None else bits
        self._count = sum(byte.bit_count() for byte in self._bits[:])

    @classmethod
    def in_file(cls, path: Path, num_items: int) -> ItemSet:
        """A set that lives in a file: what was added is there after the death of this process, however it came."""
        with path.open("a+b") as file:
            # Given its blocks now: a write into a hole of a mapped file on a full disk kills the process.
            os.posix_fallocate(file.fileno(), 0, _num_bytes(num_items))
            return cls(num_items, mmap.mmap(file.fileno(), _num_bytes(num_items)))

    @classmethod
    def from_bytes(cls, bits: bytes) -> ItemSet:
        """What `to_bytes` was called on."""
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
        """Whether so many items from `first` on are all in it."""
        return all(item in self for item in range(first, first + num_items))

    def minus(self, other: ItemSet) -> Iterator[int]:
        """The items that are in this set and not in the other, in order."""
        for place, (mine, others) in enumerate(zip(self.to_bytes(), other.to_bytes(), strict=True)):
            if left := mine & ~others & 0xFF:
                yield from (8 * place + bit for bit in range(8) if left >> bit & 1)


class PartialOutputs:
    """The tokens of items that have begun and not ended, so that another engine, or another run, continues after them.

    A token is a function of the item, its seed and the tokens before it, so these are all the state there is. They are
    in memory, and in a file that is renewed as a whole: after a crash it holds what was known a moment before.
    """

    def __init__(self, path: Path) -> None:
        """Take up what an earlier run left in the file; nothing if it is torn."""
        self._path = path
        self._token_ids = dict(_read_partial(path))
        self._has_changed = False
        self._next_save_at = 0.0

    def __contains__(self, item: int) -> bool:
        return item in self._token_ids

    def token_ids(self, item: int) -> tuple[int, ...]:
        """What is known of an item."""
        return tuple(self._token_ids.get(item, ()))

    def add(self, token_ids: Mapping[int, Sequence[int]]) -> None:
        """Items have got further tokens."""
        self._has_changed = self._has_changed or bool(token_ids)
        for item, more in token_ids.items():
            self._token_ids.setdefault(item, array("q")).extend(more)

    def drop(self, item: int) -> None:
        """The item has ended."""
        self._token_ids.pop(item, None)

    def save(self) -> None:
        """Write all of it, unless nothing is new, or that was done just now and takes long. Raises OSError."""
        began_at = time.monotonic()
        if not self._has_changed or began_at < self._next_save_at:
            return
        content = array("q")
        for item, token_ids in self._token_ids.items():
            content.extend((item, len(token_ids)))
            content.extend(token_ids)
        body = content.tobytes()
        # The checksum shows whether the machine's death left it torn, and then those items begin again.
        with replaced(self._path, survives_machine=False) as temporary:
            temporary.write_bytes(crc32(body).to_bytes(_PARTIAL_HEAD_BYTES, "big") + body)
        self._has_changed = False
        ended_at = time.monotonic()
        partial_share_of_time = 0.02  # at most, for writing partial tokens: very many of them are written less often
        self._next_save_at = ended_at + (ended_at - began_at) / partial_share_of_time


@dataclass(slots=True)
class Recovery:
    """What deaths have cost, over all runs on this folder."""

    runs: int = 0
    engines_lost: int = 0
    continued_items: int = 0  # that had begun when their engine or the driver died, and continued after their tokens
    recomputed_items: int = 0  # such items of which no token was known, so that they began again


class ResultStore:
    """The results of one job. Items that have ended are in `ended`."""

    def __init__(self, folder: Path, num_items: int) -> None:
        """Open it, or make it where there is none. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.num_items = num_items
        self.ended = ItemSet(num_items)
        self.counts = Counts()
        self.partial = PartialOutputs(folder / PARTIAL)
        self._syncing = threading.Lock()
        self._appending = threading.Lock()
        self._is_closed = False
        self._is_torn = False  # the journal ends with part of a line, so that nothing behind it would be found again
        earlier = journals_in(folder)
        self._earlier = {path: self._recover(path) for path in earlier}  # how many bytes of each are whole lines
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
        """Of the journals."""
        return sum(self._earlier.values()) + self._end

    def close(self) -> None:
        """The job can be opened again. Waits for a `sync` or an `append` in another thread."""
        with self._syncing, self._appending:
            self._is_closed = True
            os.close(self._journal)
            self._note_stop()
        if not self._end:
            with suppress(OSError):
                self._path.unlink()

    def _note_death(self) -> None:
        """What is in `begun` and has not ended was under way when the process before this one died."""
        under_way = list(self.begun.minus(self.ended))
        if under_way:
            self.deaths.update(under_way)
            write_atomically(self.folder / DEATHS, json.dumps(self.deaths).encode() + b"\n")
            self.note_interrupted(under_way)
            self.begun.clear()

    def _note_stop(self) -> None:
        """What is under way now stops without a death."""
        under_way = list(self.begun.minus(self.ended))
        if under_way:
            self.note_interrupted(under_way)
            self.begun.clear()
            with suppress(OSError):  # numbers for the summary
                self._save_recovery()

    def delete(self) -> None:
        """Remove its files; there is nothing to read any more. Raises OSError."""
        for path in (*self._earlier, self._path, *(self.folder / name for name in (BEGUN, PARTIAL, RECOVERY, DEATHS))):
            path.unlink(missing_ok=True)

    def append(self, results: Iterable[ItemResult]) -> list[ItemResult]:
        """Write the ends of items, and return those that are new: an item that has ended stays as it was. Any thread.

        Raises ResultsUnwritable, and then none of them has ended.
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
        """Items that have not ended have got further tokens. Raises ResultsUnwritable."""
        self.partial.add(token_ids)
        try:
            self.partial.save()
        except OSError as error:
            raise ResultsUnwritable(*error.args) from error

    def note_interrupted(self, items: Iterable[int]) -> None:
        """Items that had begun have lost their engine."""
        for item in items:
            if item in self.partial:
                self.recovery.continued_items += 1
            else:
                self.recovery.recomputed_items += 1

    def sync(self) -> None:
        """Bring what was appended, and `recovery`, to the disk. Any thread. Raises ResultsUnwritable."""
        try:
            with self._syncing:
                if not self._is_closed:
                    os.fsync(self._journal)
                    self._save_recovery()
        except OSError as error:
            raise ResultsUnwritable(*error.args) from error

    def results(self) -> Iterator[ItemResult]:
        """All of them, in the order of their ends. Any thread."""
        yielded = ItemSet(self.num_items)
        for path, end in {**self._earlier, self._path: self._end}.items():
            if not end:  # its process may have removed it
                continue
            with path.open("rb") as journal:
                while journal.tell() < end:
                    result = _from_line(journal.readline(), self.num_items)
                    assert result is not None, "what was appended or recovered is whole"
                    if result.number not in yielded:
                        yielded.add(result.number)
                        yield result

    def _recover(self, path: Path) -> int:
        """Take up the results in a journal before its first unreadable line, safe on disk; how many bytes they have."""
        end = 0
        try:
            journal = path.open("rb")
        except FileNotFoundError:  # an empty one: a process that has lost the folder has just closed it
            return 0
        with journal:
            for line in journal:
                result = _from_line(line, self.num_items)
                if result is None:
                    break
                if result.number not in self.ended:
                    self._note_end(result)
                end += len(line)
            os.fsync(journal.fileno())  # the process that wrote it may have died before it did
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
    """The journals of a store, the oldest first. A copy under another name is none of them."""
    numbered = (path for path in folder.glob(f"{JOURNAL}.*") if path.name.removeprefix(f"{JOURNAL}.").isdecimal())
    return [*folder.glob(JOURNAL), *sorted(numbered, key=_number)]


def _number(journal: Path) -> int:
    return int(journal.name.removeprefix(JOURNAL).removeprefix(".") or 0)


def _to_line(result: ItemResult) -> bytes:
    counts = (result.num_input_tokens, result.num_cached_tokens, result.num_output_tokens)
    body = b"%d %d %d %d %d %b" % (result.number, result.is_error, *counts, result.line)
    return b"%08x %b\n" % (crc32(body), body)


def _from_line(line: bytes, num_items: int) -> ItemResult | None:
    """The result in a line of the journal; None if it is torn."""
    checksum_digits = 8
    checksum, body = line[:checksum_digits], line[checksum_digits + 1 : -1]
    # Nothing has a checksum too, of zeros.
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


# A file that is not there, or torn: by two processes that wrote it at the same time, or by a storage that lost a part.
# Counts of deaths are worth less than the results beside them.
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
