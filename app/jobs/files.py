"""Stores files atomically under generated names. All methods block; call them in a thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from app.disk import sync_folder
from app.errors import InvalidSetup
from app.jobs.job import StoredFile, new_file_id


class FileStore:
    """A folder of file contents, and of drafts that are being written. All names are ids that `FileDraft` generates."""

    def __init__(self, folder: Path) -> None:
        """Create missing folders, for this user only. Raises InvalidSetup if an earlier version used a URL instead."""
        elsewhere = folder / "files-name"
        if elsewhere.exists():
            raise InvalidSetup(
                f"{folder}: an earlier version stored its files at the URL of batches.files, below "
                f"{elsewhere.read_text(encoding='ascii')}/; this version stores files in {folder / 'files'}; copy the "
                f"files to that folder, and then delete {elsewhere}"
            )
        self._drafts, self._contents = folder / "drafts", folder / "files"
        for each in (folder, self._drafts, self._contents):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)

    def draft(self) -> FileDraft:
        """Start a new file, which becomes visible once `FileDraft.keep` is called."""
        return FileDraft(self._drafts, self._contents)

    def open(self, file_id: str) -> BinaryIO:
        """Open a file's content. Pass only the catalog's ids, because they become paths. Raises FileNotFoundError."""
        return (self._contents / file_id).open("rb")

    def read(self, file_id: str, offset: int, num_bytes: int) -> bytes:
        """Return up to `num_bytes` of a file's content from `offset` on. The same rules as for `open` apply."""
        with self.open(file_id) as file:
            file.seek(offset)
            return file.read(num_bytes)

    def delete(self, file_id: str) -> None:
        """Remove a file's content if it exists."""
        (self._contents / file_id).unlink(missing_ok=True)

    def sweep(self, known: Callable[[], Iterable[str]]) -> None:
        """Remove the leftovers of a crash: drafts, and files that the catalog does not contain. Call before other work.

        `known` returns the catalog's ids, or raises if this process may not remove files. It is called after the
        folders are listed, so that new files are not removed.
        """
        drafts, file_ids = list(self._drafts.iterdir()), [each.name for each in self._contents.iterdir()]
        kept = set(known())
        for draft in drafts:
            draft.unlink(missing_ok=True)
        for file_id in file_ids:
            if file_id not in kept:
                self.delete(file_id)


class FileDraft:
    """A file that is being written. Use it in a `with` block, which removes the draft unless `keep` is called."""

    def __init__(self, drafts: Path, contents: Path) -> None:
        self.id = new_file_id()
        self.num_bytes = 0
        self._path = drafts / self.id
        self._content = contents / self.id
        self._is_written = False
        self._file: BinaryIO = self._path.open("xb")

    def __enter__(self) -> FileDraft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None or not self._is_written:
            self.abandon()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.num_bytes += len(data)

    def keep(self) -> None:
        """Sync the draft to disk and make it a stored file, which then survives a crash of the machine."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._is_written = True
        self._path.replace(self._content)
        sync_folder(self._content.parent)

    def described(self, owner: str, filename: str, purpose: str, now: int, keep_s: int | None) -> StoredFile:
        """Return the catalog's row for this file, created at `now` and expiring `keep_s` later (None for never)."""
        expires_at = None if keep_s is None else now + keep_s
        return StoredFile(
            id=self.id, owner=owner, bytes=self.num_bytes, created_at=now, expires_at=expires_at, filename=filename,
            purpose=purpose,
        )  # fmt: skip

    def abandon(self) -> None:
        """Remove the draft and the file that `keep` stored, even if `keep` failed midway."""
        with suppress(OSError):  # a full disk rejects the buffered bytes, which are not needed
            self._file.close()
        self._path.unlink(missing_ok=True)
        if self._is_written:
            self._content.unlink(missing_ok=True)
