"""Files under names that we make, whole or not at all. Blocks: call it in a thread."""

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
    """The drafts and contents of all files. Only ids that `FileDraft` made are ever names in it."""

    def __init__(self, folder: Path) -> None:
        """Create the folders where they are missing; only this user may look into them.

        Raises InvalidSetup for a folder whose contents a former version has kept behind a URL.
        """
        elsewhere = folder / "files-name"
        if elsewhere.exists():
            raise InvalidSetup(
                f"{folder}: a former version has kept its files at the URL of batches.files, below "
                f"{elsewhere.read_text(encoding='ascii')}/; this one keeps them in {folder / 'files'}: copy them "
                f"there, and remove {elsewhere}"
            )
        self._drafts, self._contents = folder / "drafts", folder / "files"
        for each in (folder, self._drafts, self._contents):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)

    def draft(self) -> FileDraft:
        """Begin a file that is in no list until it is kept."""
        return FileDraft(self._drafts, self._contents)

    def open(self, file_id: str) -> BinaryIO:
        """A file's content, from its beginning. The id must be one that the catalog knows: it becomes a path."""
        return (self._contents / file_id).open("rb")

    def read(self, file_id: str, offset: int, num_bytes: int) -> bytes:
        """A piece of a file's content that begins before its end; the id as for `open`. Raises FileNotFoundError."""
        with self.open(file_id) as file:
            file.seek(offset)
            return file.read(num_bytes)

    def delete(self, file_id: str) -> None:
        """Remove a file's content, if it is there."""
        (self._contents / file_id).unlink(missing_ok=True)

    def sweep(self, known: Callable[[], Iterable[str]]) -> None:
        """Remove what a crash has left: drafts, and files that the catalog does not know. For use before any work.

        `known` is called once it is clear what may be removed, and raises where this process may not remove it.
        """
        drafts, file_ids = list(self._drafts.iterdir()), [each.name for each in self._contents.iterdir()]
        kept = set(known())
        for draft in drafts:
            draft.unlink(missing_ok=True)
        for file_id in file_ids:
            if file_id not in kept:
                self.delete(file_id)


class FileDraft:
    """A file that is being written."""

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
        """Add to its end."""
        self._file.write(data)
        self.num_bytes += len(data)

    def keep(self) -> None:
        """Make it a file that survives a crash of the machine."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._is_written = True
        self._path.replace(self._content)
        sync_folder(self._content.parent)

    def described(self, owner: str, filename: str, purpose: str, now: int, keep_s: int | None) -> StoredFile:
        """The file as it is listed from `now` on, until it expires `keep_s` later; None: never."""
        expires_at = None if keep_s is None else now + keep_s
        return StoredFile(
            id=self.id, owner=owner, bytes=self.num_bytes, created_at=now, expires_at=expires_at, filename=filename,
            purpose=purpose,
        )  # fmt: skip

    def abandon(self) -> None:
        """Remove it, and what `keep` has made of it, whole or in part."""
        with suppress(OSError):  # on a full disk what is buffered cannot be written, and need not be
            self._file.close()
        self._path.unlink(missing_ok=True)
        if self._is_written:
            self._content.unlink(missing_ok=True)
