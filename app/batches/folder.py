"""Files on disk: under names that we make, whole or not at all. Blocks: call it in a thread."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from app.batches.objects import new_file_id
from app.disk import sync_folder


class FileFolder:
    """The folder of all files' contents. Only ids that `FileDraft` made are ever names in it."""

    def __init__(self, folder: Path) -> None:
        """Create the folders where they are missing; only this user may look into them."""
        self._files = folder / "files"
        self._drafts = folder / "drafts"
        for each in (folder, self._files, self._drafts):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)

    def draft(self) -> FileDraft:
        """Begin a file that nobody sees until it is kept."""
        return FileDraft(self._drafts, self._files)

    def path(self, file_id: str) -> Path:
        """Where a file's content is. The id must be one that the store knows: it becomes a path."""
        return self._files / file_id

    def delete(self, file_id: str) -> None:
        """Remove a file's content, if it is there."""
        self.path(file_id).unlink(missing_ok=True)

    def sweep(self, known: Iterable[str]) -> None:
        """Remove what a crash has left: drafts, and files that the store does not know. For use before any work."""
        for draft in self._drafts.iterdir():
            draft.unlink()
        kept = set(known)
        for path in self._files.iterdir():
            if path.name not in kept:
                path.unlink()


class FileDraft:
    """A file that is being written."""

    def __init__(self, drafts: Path, files: Path) -> None:
        self.id = new_file_id()
        self.num_bytes = 0
        self._path = drafts / self.id
        self._kept_path = files / self.id
        self._file: BinaryIO = self._path.open("xb")

    def __enter__(self) -> FileDraft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        self._path.replace(self._kept_path)
        sync_folder(self._kept_path.parent)

    def abandon(self) -> None:
        """Remove it, unless it was kept."""
        self._file.close()
        self._path.unlink(missing_ok=True)


class FolderLock:
    """Only one process may write: whoever holds this. The system frees it when its holder dies, however."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = (folder / "lock").open("a")

    def try_acquire(self) -> bool:
        """Whether it is ours now."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Give it back; it cannot be acquired again."""
        self._file.close()
