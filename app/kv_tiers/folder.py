"""A folder of blocks: a file for each, which processes of a machine read and write without asking one another.

A file has its name only when it is whole, so a process may be killed at any moment. It is not brought to the disk:
after a crash of the machine its checksum tells. It has its tokens: a name that two prefixes share costs time, never
content.

    FOLDER/<namespace>/<tenant>/<name>    8 bytes of what the KV memory is of; 8 of the tenant's name; a prefix's name
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

from app.disk import take_lock

logger = logging.getLogger(__name__)

MAGIC = b"carouKV2"
HEADER = struct.Struct("<8sII")  # magic, bytes of the tokens, checksum of tokens and content
ROW_BYTES = 4096  # of the content, for its checksum
NAME = re.compile("[0-9a-f]{40}")
KEPT_SHARE = 0.9  # of its bounds, when files were deleted


class BlockFolder:
    """The blocks of one namespace in a folder that others may use as well. One thread writes and refreshes it, others
    may read."""

    def __init__(self, path: Path, *, namespace: bytes, max_bytes: int) -> None:
        """Makes the folder. max_bytes: of all files in it.

        Raises OSError where it cannot be written, or where others may write into it: a block is taken for what it says.
        """
        self._path = path
        self._own = path / namespace[:8].hex()
        self._max_bytes = max_bytes
        self._folders: dict[bytes, str] = {}  # by name: the folder that it is in
        self._changed: dict[str, int] = {}  # by folder: when it was changed before it was listed
        self._others_bytes: int | None = None  # of other namespaces, when they were last counted
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
        if self._others_bytes is None:
            self._others_bytes = sum(size for files in self._files().values() for _, size, path in files
                                     if not path.startswith(f"{self._own}/"))  # fmt: skip
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
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            descriptor = os.open(hidden, flags, 0o600)
        except FileNotFoundError:
            for each in (self._path, self._own, folder):  # `parents` of mkdir have another mode
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(hidden, flags, 0o600)
        num_bytes = len(header) + len(content)
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
        if len(self._folders) * num_bytes + (self._others_bytes or 0) > self._max_bytes:
            self.make_room()

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

    def make_room(self) -> None:
        """Delete the blocks that were not used for longest, of the tenant that has most, if there are too many."""
        lock = take_lock(self._path / ".lock")
        if lock is None:
            return  # another process does
        try:
            self._delete_oldest()
        finally:
            os.close(lock)

    def _delete_oldest(self) -> None:
        files = self._files()
        sizes = {folder: sum(size for _, size, _ in found) for folder, found in files.items()}
        if sum(sizes.values()) > self._max_bytes:
            while sum(sizes.values()) > KEPT_SHARE * self._max_bytes:
                largest = max(sizes, key=sizes.__getitem__)
                _, size, path = files[largest].pop()
                _delete(path)
                sizes[largest] -= size
                if not files[largest]:
                    with suppress(OSError):
                        os.rmdir(largest)
        self._others_bytes = sum(size for folder, size in sizes.items() if not folder.startswith(f"{self._own}/"))
        self._changed.clear()
        self.refresh()

    def _files(self) -> dict[str, list[tuple[float, int, str]]]:
        """Last use, bytes and path of the files of all models, by folder; the longest unused last."""
        files: dict[str, list[tuple[float, int, str]]] = {}
        with suppress(OSError):
            for namespace in (each for each in os.scandir(self._path) if each.is_dir()):
                for folder in os.scandir(namespace.path):
                    files[folder.path] = sorted(map(_use_of, os.scandir(folder.path)), reverse=True)
        return files


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


def _use_of(entry: os.DirEntry[str]) -> tuple[float, int, str]:
    """Last use, bytes, path. What is being written counts as just used; what a dead process left is old soon."""
    stat = entry.stat()
    return stat.st_mtime, stat.st_size, entry.path
