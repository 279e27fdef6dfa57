"""Stores where a model's weights are in its GGUF file, so that later starts need not parse the file's header."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from app.errors import InvalidSetup

_NAME = "gguf.json"


class PlacedWeight(NamedTuple):
    """Where a GGUF file stores a weight, or some of its rows. It may be a whole tensor or a part of one."""

    kind: int  # ggml's number for the type
    start: int  # byte offset in the file
    num_bytes: int
    shape: list[int]  # the last dimension is contiguous
    # The name of a vector in the folder's safetensors file, if the weight's rows or columns are reordered. The vector
    # stores the tensor's index of each row or column of the weight.
    rows: str | None = None
    columns: str | None = None
    part: int = 0  # index in `Manifest.files`


class DescribedFile(NamedTuple):
    """The identity of a GGUF file when the manifest was written, to detect later changes."""

    path: str
    num_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path, stat: os.stat_result) -> DescribedFile:
        return cls(str(path), stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of a model, and its weights by their names in transformers."""

    files: Sequence[DescribedFile]
    kinds: Mapping[str, str]  # names of ggml's types by their number
    # A weight with several entries joins their rows in this order, along the second-last dimension.
    weights: Mapping[str, Sequence[PlacedWeight]]

    def write(self, folder: Path) -> None:
        content = {"files": self.files, "kinds": self.kinds, "weights": self.weights}
        (folder / _NAME).write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")


def manifest_in(folder: Path) -> Manifest | None:
    """Read the manifest in a model's folder. Returns None if there is none, as in folders that contain weights.

    Raises InvalidSetup if a GGUF file is missing or has changed since the manifest was written.
    """
    try:
        content = json.loads((folder / _NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    files = [DescribedFile(*each) for each in content["files"]]
    for file in files:
        try:
            found = DescribedFile.of(Path(file.path), os.stat(file.path))
        except OSError as error:
            raise InvalidSetup(
                f"{file.path} has the weights of this model, but cannot be read: {error.strerror}"
            ) from error
        if found != file:
            raise InvalidSetup(f"{file.path} has changed since it was read; restart")
    weights = {name: [PlacedWeight(*each) for each in placed] for name, placed in content["weights"].items()}
    return Manifest(files=files, kinds=content["kinds"], weights=weights)
