"""A folder of blocks: a file for each, which processes of a machine read and write without asking one another.

A file has its name only when it is whole, so a process may be killed at any moment. It is not brought to the disk:
after a crash of the machine its checksum tells. It has its tokens: a name that two prefixes share costs time, never
content.

    FOLDER/<namespace>/<tenant>/<name>    8 bytes of what the KV memory is of; 8 of the tenant's name; a prefix's name
    FOLDER/.lock                          held by the process that counts or deletes; the bytes of all files
"""

from __future__ import annotations

import errno
import logging
import os
import re
import struct
from array import array
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

import numpy as np

from app.disk import locked

logger = logging.getLogger(__name__)

MAGIC = b"carouKV2"
TOTAL = struct.Struct("<q")  # in the file of the lock
HEADER = struct.Struct("<8sII")  # magic, bytes of the tokens, checksum of tokens and content
ROW_BYTES = 4096  # of the content, for its checksum
NAME = re.compile("[0-9a-f]{40}")
KEPT_SHARE = 0.9  # of its bounds, when files were deleted


class BlockFolder:
    """The blocks of one namespace in a folder that others may use as well. One thread writes and refreshes it, others
    may read."""

    def __init__(self, path: Path, *, namespace: bytes, max_bytes: int) -> None:
        """Makes the folder. max_bytes: of all files in it, of all processes; each may be writing one more.

        Raises OSError where it cannot be written, or where others may write into it: a block is taken for what it says.
        """
        self._path = path
        self._own = path / namespace[:8].hex()
        self._max_bytes = max_bytes
        self._folders: dict[bytes, str] = {}  # by name: the folder that it is in
        self._changed: dict[str, int] = {}  # by folder: when it was changed before it was listed
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._own.mkdir(mode=0o700, exist_ok=True)
        if not os.access(self._own, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self._own))
        found = self._own.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "others may write into it", str(self._own))

    def has(self, name: bytes) -> bool:
        """Whether it was there when the folder was last listed, or written since. Any thread may call."""
        return name in self._folders

    def refresh(self) -> None:
        """Learn what other processes have written and deleted."""
        before, self._changed = self._changed, {}
        listed: dict[str, set[bytes]] = {folder: set() for folder in before}  # what is in those that have changed
        with suppress(OSError):
            for folder in os.scandir(self._own):
                self._changed[folder.path] = folder.stat().st_mtime_ns
                if self._changed[folder.path] == before.get(folder.path):
                    del listed[folder.path]
                else:
                    names = (each.name for each in os.scandir(folder.path))
                    listed[folder.path] = {bytes.fromhex(name) for name in names if NAME.fullmatch(name)}
        gone = [name for name, at in list(self._folders.items()) if at in listed and name not in listed[at]]
        for name in gone:
            self._folders.pop(name, None)
        for path, found in listed.items():
            self._folders |= dict.fromkeys(found, path)

    def write(self, name: bytes, tenant: str, token_ids: Sequence[int], content: memoryview) -> None:
        """Write a block's file; it has its name when it is whole. Raises OSError."""
        folder = self._folder_of(tenant)
        hidden = folder / f".{os.getpid()}"
        header = header_of(token_ids, content)
        num_bytes = len(header) + len(content)
        try:
            descriptor = self._begun(hidden, num_bytes)
        except FileNotFoundError:
            for each in (self._path, self._own, folder):  # `parents` of mkdir have another mode
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = self._begun(hidden, num_bytes)
        try:
            if os.writev(descriptor, (header, content)) != num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(hidden))
            hidden.rename(folder / name.hex())
        except OSError:
            _delete(hidden)
            raise
        finally:
            os.close(descriptor)
        self._folders[name] = str(folder)

    def _begun(self, hidden: Path, num_bytes: int) -> int:
        """The descriptor of a file that is to have so many bytes, for which there is room."""
        self.make_room(num_bytes)
        return os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def _folder_of(self, tenant: str) -> Path:
        return self._own / blake2b(tenant.encode(), digest_size=8).hexdigest()

    def read(self, name: bytes, tenant: str, token_ids: Sequence[int], content: memoryview) -> bool:
        """Fill the buffer with a block; False where it is not there or not what it should be. Then it is deleted.

        tenant: whose it is, if it is not known yet.
        """
        path = os.path.join(self._folders.get(name) or self._folder_of(tenant), name.hex())
        header = bytearray(HEADER.size + array("q").itemsize * len(token_ids))
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                is_whole = os.readv(descriptor, (header, content)) == len(header) + len(content)
                is_whole = is_whole and not os.read(descriptor, 1)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._folders.pop(name, None)
            if not isinstance(error, FileNotFoundError):
                logger.warning("the block %s cannot be read: %s", path, error)
            return False
        if is_whole and header == header_of(token_ids, content):
            return True
        logger.warning("the block %s is torn, damaged or of other tokens: it is deleted, its tokens are computed", path)
        self._folders.pop(name, None)
        _delete(path)
        return False

    def note_use(self, name: bytes, minute: int, place: int) -> None:
        """It was used in this minute, the last of `place` blocks: of those of a minute, later ones are deleted first.

        Without its beginning the end of a prefix is not found.
        """
        folder, used_at = self._folders.get(name), 1000 * (minute * 60_000_000 - place)  # ns
        if folder is not None:
            with suppress(OSError):
                os.utime(os.path.join(folder, name.hex()), ns=(used_at, used_at))

    def make_room(self, num_bytes: int) -> None:
        """Count a file before it is written. Where all would be too many, delete the blocks that were not used for
        longest, of the tenant that has most.

        All processes add to one number, so none has to know what the others write. It may be too high: files are
        counted anew before any is deleted. Raises OSError.
        """
        has_deleted = False
        with locked(self._path / ".lock") as lock:
            found = os.pread(lock, TOTAL.size, 0)
            total = TOTAL.unpack(found)[0] if len(found) == TOTAL.size else None  # a new folder, or an older version's
            if total is None or total + num_bytes > self._max_bytes:
                total, has_deleted = self._delete_oldest(num_bytes)
            os.pwrite(lock, TOTAL.pack(total + num_bytes), 0)
        if has_deleted:
            self._changed.clear()
            self.refresh()

    def _delete_oldest(self, num_bytes: int) -> tuple[int, bool]:
        """Leave room for so many bytes; returns those of the files that are left, and whether any was deleted."""
        files = self._files()
        sizes = {folder: sum(size for _, size, _ in found) for folder, found in files.items()}
        total = sum(sizes.values())
        if total + num_bytes <= self._max_bytes:
            return total, False
        while sizes and total + num_bytes > KEPT_SHARE * self._max_bytes:
            largest = max(sizes, key=sizes.__getitem__)
            _, size, path = files[largest].pop()
            _delete(path)
            total -= size
            sizes[largest] -= size
            if not files[largest]:
                del sizes[largest]
                with suppress(OSError):
                    os.rmdir(largest)
        return total, True

    def _files(self) -> dict[str, list[tuple[float, int, str]]]:
        """Last use, bytes and path of the files of all models, by folder; the longest unused last."""
        files: dict[str, list[tuple[float, int, str]]] = {}
        for namespace in _entries(self._path):
            for folder in _entries(namespace.path) if namespace.is_dir() else ():
                found = filter(None, map(_use_of, _entries(folder.path)))
                files[folder.path] = sorted(found, reverse=True)
        return {folder: found for folder, found in files.items() if found}


def header_of(token_ids: Sequence[int], content: memoryview) -> bytes:
    """What a block outside the KV memory begins with: of what the rest is, and its tokens."""
    tokens = array("q", token_ids).tobytes()
    return HEADER.pack(MAGIC, len(tokens), crc32(tokens, _checksum(content))) + tokens


def _checksum(content: memoryview) -> int:
    """By the sums of rows and of columns, a tenth of the time of a checksum of all bytes. Of one row or column that is
    lost or moved, and of one or two flipped bits, it is sure to tell."""
    whole = len(content) // ROW_BYTES * ROW_BYTES
    table = np.frombuffer(content[:whole], dtype=np.uint64).reshape(-1, ROW_BYTES // 8)
    checksum = crc32(content[whole:])
    for sums in (table.sum(axis=1), table.sum(axis=0)):
        checksum = crc32(sums, checksum)
    return checksum


def _delete(path: Path | str) -> None:
    with suppress(OSError):
        os.unlink(path)


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """None of a folder that another process has deleted."""
    try:
        return list(os.scandir(folder))
    except OSError:
        return []


def _use_of(entry: os.DirEntry[str]) -> tuple[float, int, str] | None:
    """Last use, bytes, path; None where it has another name or is deleted by now.

    What is being written counts as just used; what a dead process left is old soon.
    """
    try:
        stat = entry.stat()
    except OSError:
        return None
    return stat.st_mtime, stat.st_size, entry.path
