"""Reads the metadata and tensors of a GGUF file.

`gguf.GGUFReader` is not used, because it takes seconds and hundreds of megabytes for a large vocabulary, and fails on
damaged or truncated files with numpy errors that do not name the problem.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from app.errors import InvalidSetup, UnsupportedModel

READ_INSTEAD = "set model.path to the model's folder or hub id with safetensors instead"
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 2**23  # limit for lists and for bytes of a text; large vocabularies have 600,000 merges


Values = np.ndarray[Any, Any]

# The 16-bit types, with their names in torch.
_PLAIN = {GGMLQuantizationType.F16: "float16", GGMLQuantizationType.BF16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is stored in its file, and in which type and shape."""

    name: str
    shape: tuple[int, ...]  # the last dimension is contiguous
    kind: GGMLQuantizationType
    start: int  # byte offset in the file
    part: int = 0  # index of the file, if a model is split into several

    @property
    def num_bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return int(prod(self.shape) // block * block_bytes)

    @property
    def is_quantised(self) -> bool:
        return bool(GGML_QUANT_SIZES[self.kind][0] > 1)

    @property
    def dtype(self) -> str:
        """The name in torch of a type that represents all values of the tensor exactly."""
        return _PLAIN.get(self.kind, "float32")

    def parts(self) -> Iterator[GgufTensor]:
        """Split the tensor along its first dimension, which the yielded tensors lack."""
        count = self.shape[0]
        for index in range(count):
            start = self.start + index * self.num_bytes // count
            yield GgufTensor(f"{self.name}[{index}]", self.shape[1:], self.kind, start, self.part)


class GgufFile:
    """A model's GGUF file, mapped into memory, or all of its files if the model is split into several."""

    def __init__(self, path: Path) -> None:
        """Read all metadata, but not the tensors' values. path: the only file, or the first of several.

        Raises:
            InvalidSetup: a file cannot be read, is truncated or not a GGUF file, or a file of the model is missing.
            UnsupportedModel: a tensor has a type that is not supported.
        """
        first = _OneFile(path, 0)
        self.path, self.metadata = path, first.metadata
        self.files = [first, *(_OneFile(each, part) for part, each in enumerate(_other_parts(first), 1))]
        self.tensors: dict[str, GgufTensor] = {}
        for file in self.files:
            if twice := self.tensors.keys() & file.tensors.keys():
                raise InvalidSetup(f"{file.path} is damaged: tensor {min(twice)} is also in another part")
            self.tensors |= file.tensors
        count = self.metadata.get("split.tensors.count", len(self.tensors))
        if count != len(self.tensors):
            raise InvalidSetup(f"{path}: the parts have {len(self.tensors):,} tensors, but {count!r} are expected")

    def values(self, tensor: GgufTensor) -> Values:
        """Return a tensor's dequantised values as a float32 copy."""
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        rows = (*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
        content = self.files[tensor.part].content
        data = np.frombuffer(content, np.uint8, tensor.num_bytes, tensor.start).reshape(rows)
        return np.ascontiguousarray(dequantize(data, tensor.kind), np.float32)


def _other_parts(first: _OneFile) -> list[Path]:
    """Return a split model's other files. Raises InvalidSetup if the first one's name does not match llama.cpp's."""
    count = first.metadata.get("split.count", 1)
    most = 10_000
    if not isinstance(count, int) or not 0 <= count < most:
        raise InvalidSetup(f"{first.path} is damaged: split.count is {repr(count)[:60]}; download it again")
    if count <= 1:
        return []
    found = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", first.path.name)
    if found is None or int(found[3]) != count:
        raise InvalidSetup(
            f"{first.path} is one of {count} parts, but its name does not end in -00001-of-{count:05}.gguf: restore "
            f"the original names of the parts, or join them with `llama-gguf-split --merge`"
        )
    if first.metadata.get("split.no") != 0:
        name = f"{found[1]}-00001-of-{count:05}.gguf"
        raise InvalidSetup(f"{first.path} is not the first of its {count} parts; set model.path to {name}")
    return [first.path.with_name(f"{found[1]}-{part:05}-of-{count:05}.gguf") for part in range(2, count + 1)]


class _OneFile:
    def __init__(self, path: Path, part: int) -> None:
        self.path, self._part = path, part
        try:
            with path.open("rb") as file:
                self.stat = os.fstat(file.fileno())
                size = self.stat.st_size
                self.content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise InvalidSetup(f"{path} cannot be read: {error.strerror}") from error
        magic = b"GGUF"
        if self.content[: len(magic)] != magic:
            raise InvalidSetup(f"{path} is not a GGUF file; model.path must be a folder, a GGUF file or a hub id")
        self._place = len(magic)
        try:
            self.metadata, self.tensors = self._header()
        except (struct.error, ValueError) as error:
            raise InvalidSetup(
                f"{path} is damaged or cut short: its header cannot be read beyond byte {self._place:,} of "
                f"{len(self.content):,} ({error}); download it again"
            ) from error
        self._check_tensors()

    def _header(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        version = self._number("I")
        versions = (2, 3)
        if version not in versions:
            raise InvalidSetup(
                f"{self.path} has version {version} of the GGUF format; only versions 2 and 3 in little endian can be "
                f"read: convert the model again with a current llama.cpp"
            )
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        for what, count in (("tensors", num_tensors), ("entries", num_entries)):
            if count > _MOST_ENTRIES:
                raise ValueError(f"it has {count:,} {what}; at most {_MOST_ENTRIES:,} are read")
        metadata = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        found = [self._tensor() for _ in range(num_tensors)]
        default_alignment = 32
        alignment = metadata.get("general.alignment", default_alignment)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise ValueError(f"general.alignment is {alignment!r}")
        first = -(-self._place // alignment) * alignment
        tensors = {
            name: GgufTensor(name, shape, kind, first + offset, self._part) for name, shape, kind, offset in found
        }
        return metadata, tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, num_dimensions = self._string(), self._number("I")
        max_dimensions = 4
        if num_dimensions > max_dimensions:
            raise ValueError(f"tensor {name} has {num_dimensions:,} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(num_dimensions)]))
        number, offset = self._number("I"), self._number("Q")
        try:
            kind = GGMLQuantizationType(number)
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except (ValueError, NotImplementedError) as error:
            shown = number if isinstance(error, ValueError) else GGMLQuantizationType(number).name
            raise UnsupportedModel(
                f"{self.path}: tensor {name} is of type {shown}, which cannot be read; use a file of the same model in "
                f"Q8_0, Q6_K, Q4_K, Q4_1, Q4_0, BF16, F16 or F32"
            ) from error
        return name, shape, kind, offset

    def _check_tensors(self) -> None:
        for tensor in self.tensors.values():
            block = GGML_QUANT_SIZES[tensor.kind][0]
            if not tensor.shape or tensor.shape[-1] % block:
                raise InvalidSetup(f"{self.path} is damaged: tensor {tensor.name} of type {tensor.kind.name} has the "
                                   f"shape {list(tensor.shape)}; download it again")  # fmt: skip
            if tensor.start % 8:
                raise InvalidSetup(
                    f"{self.path} is damaged: tensor {tensor.name} begins at byte {tensor.start:,}, which is not "
                    f"a multiple of 8; download it again"
                )
            end = tensor.start + tensor.num_bytes
            if end > len(self.content):
                raise InvalidSetup(
                    f"{self.path} is cut short: tensor {tensor.name} ends at byte {end:,}, but the file at "
                    f"{len(self.content):,}; download it again"
                )

    def _number(self, kind: str) -> int:
        (value,) = self._numbers(kind, 1)
        return int(value)

    def _numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        num_bytes = struct.calcsize(f"<{kind}") * count
        self._check_left(num_bytes)
        values = struct.unpack_from(f"<{count}{kind}", self.content, self._place)
        self._place += num_bytes
        return values

    def _string(self) -> str:
        num_bytes = self._number("Q")
        if num_bytes > _MOST_ENTRIES:
            raise ValueError(f"a text has {num_bytes:,} bytes; at most {_MOST_ENTRIES:,} are read")
        self._check_left(num_bytes)
        text = self.content[self._place : self._place + num_bytes].decode()
        self._place += num_bytes
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            if count > _MOST_ENTRIES:
                raise ValueError(f"a list has {count:,} entries; at most {_MOST_ENTRIES:,} are read")
            if inner == _STRING:
                return [self._string() for _ in range(count)]
            return list(self._numbers(self._format(inner), count))
        return self._numbers(self._format(kind), 1)[0]

    def _format(self, kind: int) -> str:
        if kind not in _FORMATS:
            raise ValueError(f"a value is of type {kind}")
        return _FORMATS[kind]

    def _check_left(self, num_bytes: int) -> None:
        # A damaged count could exceed all memory, so check it before memory is allocated.
        if num_bytes > len(self.content) - self._place:
            raise ValueError(f"{num_bytes:,} bytes should follow")
