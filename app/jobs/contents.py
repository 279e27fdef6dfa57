"""Where the contents of kept files lie, under names that we made. Blocks: call it in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from app.disk import sync_folder


class Contents(Protocol):
    """Contents by the ids of their files. Every method raises OSError when the storage fails."""

    def keep(self, draft: Path, file_id: str) -> None:
        """Take over a written file, whole, so that it survives a crash of the machine."""

    def open(self, file_id: str) -> BinaryIO:
        """To be read from its beginning. Raises FileNotFoundError."""

    def read(self, file_id: str, offset: int, num_bytes: int) -> bytes:
        """A piece that begins before its end. Raises FileNotFoundError."""

    def delete(self, file_id: str) -> None:
        """Remove it, if it is there."""

    def ids(self) -> Iterator[str]:
        """Of all that are there."""


class LocalContents:
    """A folder of this machine, or one that is mounted on it."""

    def __init__(self, folder: Path) -> None:
        """Make it where there is none; only this user may look into it."""
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def keep(self, draft: Path, file_id: str) -> None:
        """See `Contents`."""
        draft.replace(self._folder / file_id)
        sync_folder(self._folder)

    def open(self, file_id: str) -> BinaryIO:
        """See `Contents`."""
        return (self._folder / file_id).open("rb")

    def read(self, file_id: str, offset: int, num_bytes: int) -> bytes:
        """See `Contents`."""
        with self.open(file_id) as file:
            file.seek(offset)
            return file.read(num_bytes)

    def delete(self, file_id: str) -> None:
        """See `Contents`."""
        (self._folder / file_id).unlink(missing_ok=True)

    def ids(self) -> Iterator[str]:
        """See `Contents`."""
        return (path.name for path in self._folder.iterdir())
