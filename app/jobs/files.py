"""Files under names that we make, whole or not at all. Blocks: call it in a thread."""

from __future__ import annotations

import io
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, cast

from app.disk import sync_folder
from app.errors import InvalidSetup, described
from app.jobs.job import new_file_id

_BUFFER_BYTES = 1024 * 1024
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")


class FileStore:
    """The drafts and contents of all files. Only ids that `FileDraft` made are ever names in it."""

    def __init__(self, folder: Path, files_url: str | None = None) -> None:
        """Create the folders where they are missing; only this user may look into them.

        Contents are kept in the folder, or below `files_url`, which fsspec opens. Raises InvalidSetup when it cannot.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._drafts = folder / "drafts"
        self._drafts.mkdir(mode=0o700, exist_ok=True)
        self._contents: Contents = LocalContents(folder / "files")
        if files_url is not None:
            self._contents = RemoteContents(files_url, _own_name(folder))

    def draft(self) -> FileDraft:
        """Begin a file that is in no list until it is kept."""
        return FileDraft(self._drafts, self._contents)

    def open(self, file_id: str) -> BinaryIO:
        """A file's content, from its beginning. The id must be one that the catalog knows: it becomes a path."""
        return self._contents.open(file_id)

    def read(self, file_id: str, offset: int, num_bytes: int) -> bytes:
        """A piece of a file's content that begins before its end; the id as for `open`."""
        return self._contents.read(file_id, offset, num_bytes)

    def delete(self, file_id: str) -> None:
        """Remove a file's content, if it is there."""
        self._contents.delete(file_id)

    def sweep(self, known: Callable[[], Iterable[str]]) -> None:
        """Remove what a crash has left: drafts, and files that the catalog does not know. For use before any work.

        `known` is called once it is clear what may be removed, and raises where this process may not remove it.
        """
        drafts, file_ids = list(self._drafts.iterdir()), list(self._contents.ids())
        kept = set(known())
        for draft in drafts:
            draft.unlink(missing_ok=True)
        for file_id in file_ids:
            if file_id not in kept:
                self._contents.delete(file_id)


class FileDraft:
    """A file that is being written."""

    def __init__(self, drafts: Path, contents: Contents) -> None:
        self.id = new_file_id()
        self.num_bytes = 0
        self._path = drafts / self.id
        self._contents = contents
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
        self._contents.keep(self._path, self.id)

    def abandon(self) -> None:
        """Remove it, and what `keep` has made of it, whole or in part."""
        with suppress(OSError):  # on a full disk what is buffered cannot be written, and need not be
            self._file.close()
        self._path.unlink(missing_ok=True)
        if self._is_written:
            self._contents.delete(self.id)


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


class LocalContents(Contents):
    """A folder of this machine, or one that is mounted on it."""

    def __init__(self, folder: Path) -> None:
        """Make it where there is none; only this user may look into it."""
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def keep(self, draft: Path, file_id: str) -> None:
        draft.replace(self._folder / file_id)
        sync_folder(self._folder)

    def open(self, file_id: str) -> BinaryIO:
        return (self._folder / file_id).open("rb")

    def read(self, file_id: str, offset: int, num_bytes: int) -> bytes:
        with self.open(file_id) as file:
            file.seek(offset)
            return file.read(num_bytes)

    def delete(self, file_id: str) -> None:
        (self._folder / file_id).unlink(missing_ok=True)

    def ids(self) -> Iterator[str]:
        return (path.name for path in self._folder.iterdir())


class RemoteContents(Contents):
    """A folder of this service's own below a URL that fsspec opens: what is beside it is never touched."""

    def __init__(self, url: str, own_name: str) -> None:
        """`own_name` is the folder's. Raises InvalidSetup for a URL that nothing installed here can open."""
        self._filesystem, root = filesystem_at(url)
        self._folder = f"{root.rstrip('/')}/{own_name}"
        with _as_os_errors():
            self._filesystem.makedirs(self._folder, exist_ok=True)

    def keep(self, draft: Path, file_id: str) -> None:
        """Where the storage does not take files whole, the catalog does not know what a crash leaves."""
        with _as_os_errors():
            self._filesystem.put_file(str(draft), self._path(file_id))
        draft.unlink()

    def open(self, file_id: str) -> BinaryIO:
        with _as_os_errors():
            file = _Read(self._filesystem.open(self._path(file_id), "rb"))
        return cast(BinaryIO, io.BufferedReader(file, _BUFFER_BYTES))

    def read(self, file_id: str, offset: int, num_bytes: int) -> bytes:
        with _as_os_errors():
            return bytes(self._filesystem.cat_file(self._path(file_id), start=offset, end=offset + num_bytes))

    def delete(self, file_id: str) -> None:
        with _as_os_errors():
            if self._filesystem.exists(self._path(file_id)):
                self._filesystem.rm_file(self._path(file_id))

    def ids(self) -> Iterator[str]:
        with _as_os_errors():
            self._filesystem.invalidate_cache()
            names = [str(path).rpartition("/")[2] for path in self._filesystem.ls(self._folder, detail=False)]
        return (name for name in names if _FILE_ID.fullmatch(name))

    def _path(self, file_id: str) -> str:
        return f"{self._folder}/{file_id}"


def filesystem_at(url: str) -> tuple[Any, str]:
    """The filesystem of a URL, and the path in it. Raises InvalidSetup, which does not show the URL."""
    from fsspec.core import url_to_fs  # here: few services keep files behind a URL, and the import takes 0.1 s

    try:
        filesystem, path = url_to_fs(url)
    except (ValueError, ImportError) as error:
        protocol = url.partition("://")[0]
        raise InvalidSetup(f"batches.files: {protocol[:40]}:// cannot be opened here: {error}") from None
    return filesystem, str(path)


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Each storage's client has exceptions of its own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"the storage of files failed: {described(error)}") from None


class _Read(io.RawIOBase):
    """A file of fsspec's as one of Python's, for the buffer that finds line ends in C."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _as_os_errors():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _own_name(folder: Path) -> str:
    """The name that this folder's contents have elsewhere, made once: two services on one URL never meet."""
    path = folder / "files-name"
    if not path.exists():
        new = folder / "files-name.new"
        new.write_text(f"carousel-{uuid.uuid4().hex}", encoding="ascii")
        new.replace(path)
    return path.read_text(encoding="ascii")
