"""The places of a model's weights in its GGUF file. A second start reads them instead of the file's header."""

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
    """The place of a weight: a tensor of a GGUF file, or a part of a tensor, or some of the weight's rows."""

    kind: int  # the type of its numbers, by ggml's number
    start: int  # byte offset in the file
    num_bytes: int
    shape: list[int]  # the last dimension is contiguous
    # Names of vectors in the folder's safetensors file: the tensor's row for each row of the weight, and its column
    # for each column. None: the order is unchanged.
    rows: str | None = None
    columns: str | None = None
    part: int = 0  # index of the file


class DescribedFile(NamedTuple):
    """A GGUF file at the time of its description."""

    path: str
    num_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path, stat: os.stat_result) -> DescribedFile:
        return cls(str(path), stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of a model, and its weights by transformers' names."""

    files: Sequence[DescribedFile]
    kinds: Mapping[str, str]  # the names of the weights' types, by ggml's numbers
    # The rows of several places are joined in this order, along the second-last dimension.
    weights: Mapping[str, Sequence[PlacedWeight]]

    def write(self, folder: Path) -> None:
        content = {"files": self.files, "kinds": self.kinds, "weights": self.weights}
        (folder / _NAME).write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")


def manifest_in(folder: Path) -> Manifest | None:
    """Read the manifest from a model's folder; None if the folder holds the weights itself.

    Raises InvalidSetup if a GGUF file has changed since the manifest was written, or is missing.
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
                f"{file.path} has the weights of this model, and cannot be read: {error.strerror}"
            ) from error
        if found != file:
            raise InvalidSetup(f"{file.path} has changed since it was read; start again")
    weights = {name: [PlacedWeight(*each) for each in placed] for name, placed in content["weights"].items()}
    return Manifest(files=files, kinds=content["kinds"], weights=weights)
