"""Contents of files in a storage that fsspec knows: an object store, a file server. Blocks: call it in a thread."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec

from app.errors import InvalidSetup

_BUFFER_BYTES = 1024 * 1024
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")


class RemoteContents:
    """`Contents` below a URL, in a folder of this service's own: what is beside it is never touched."""

    def __init__(self, url: str, own_name: str) -> None:
        """`own_name` is the folder's. Raises InvalidSetup for a URL that nothing installed here can open."""
        self._filesystem, root = filesystem_at(url)
        self._folder = f"{root.rstrip('/')}/{own_name}"
        with _as_os_errors():
            self._filesystem.makedirs(self._folder, exist_ok=True)

    def keep(self, draft: Path, file_id: str) -> None:
        """See `Contents`. Where files are not taken whole, the catalog does not know what a crash leaves."""
        with _as_os_errors():
            self._filesystem.put_file(str(draft), self._path(file_id))
        draft.unlink()

    def open(self, file_id: str) -> BinaryIO:
        """See `Contents`."""
        with _as_os_errors():
            file = _Read(self._filesystem.open(self._path(file_id), "rb"))
        return cast(BinaryIO, io.BufferedReader(file, _BUFFER_BYTES))

    def read(self, file_id: str, offset: int, num_bytes: int) -> bytes:
        """See `Contents`."""
        with _as_os_errors():
            return bytes(self._filesystem.cat_file(self._path(file_id), start=offset, end=offset + num_bytes))

    def delete(self, file_id: str) -> None:
        """See `Contents`."""
        with _as_os_errors():
            if self._filesystem.exists(self._path(file_id)):
                self._filesystem.rm_file(self._path(file_id))

    def ids(self) -> Iterator[str]:
        """See `Contents`."""
        with _as_os_errors():
            self._filesystem.invalidate_cache()
            names = [str(path).rpartition("/")[2] for path in self._filesystem.ls(self._folder, detail=False)]
        return (name for name in names if _FILE_ID.fullmatch(name))

    def _path(self, file_id: str) -> str:
        return f"{self._folder}/{file_id}"


def filesystem_at(url: str) -> tuple[Any, str]:
    """The filesystem of a URL, and the path in it. Raises InvalidSetup, which does not show the URL."""
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
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
        raise OSError(f"the storage of files failed: {error!r}") from error


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
