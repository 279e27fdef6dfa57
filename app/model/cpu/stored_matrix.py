"""Matrices in the quantised types of a GGUF file, and their layout for the C++ decoder. See `stored.h`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from app.model.cpu.library import LANES, ThreadPool, library

LINE = LANES  # units of 32 bits in a line; must match the C++ sources
_PLAIN = 0  # the kind of a matrix that is not quantised; must match the C++ sources


class FileRows(NamedTuple):
    """Rows of a tensor as a GGUF file stores them."""

    kind: int  # the number of the rows' ggml type
    blocks: torch.Tensor  # [num_rows, bytes of a row], uint8


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [outputs, inputs] that stays quantised in the types of a GGUF file. Its rows may differ in type."""

    pieces: tuple[FileRows, ...]  # in the order of the outputs
    num_inputs: int
    dtype: torch.dtype  # the type of the dequantised matrix

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(len(piece.blocks) for piece in self.pieces), self.num_inputs))

    @property
    def is_meta(self) -> bool:
        return self.pieces[0].blocks.is_meta

    @property
    def device(self) -> torch.device:
        return self.pieces[0].blocks.device

    def new_zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.pieces[0].blocks.new_zeros(shape, dtype=dtype or self.dtype)

    def in_runs(self, size: int, order: Callable[[int], Iterable[int]]) -> StoredMatrix:
        """Return the matrix with its runs of `size` rows reordered. order: maps the number of runs to their order."""
        [piece] = self.pieces
        runs = torch.split(piece.blocks, size)
        return StoredMatrix(
            tuple(FileRows(piece.kind, runs[at]) for at in order(len(runs))), self.num_inputs, self.dtype
        )

    def in_turn(self, other: StoredMatrix) -> StoredMatrix:
        """Return a matrix that alternates `LANES` rows of this matrix with `LANES` rows of the other."""
        pairs = zip(self._strips(), other._strips(), strict=True)
        return StoredMatrix(tuple(rows for pair in pairs for rows in pair), self.num_inputs, self.dtype)

    def multiplied_out(self) -> torch.Tensor:
        """Return the dequantised matrix, [outputs, inputs] in `dtype`."""
        if self.is_meta:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        parts = [dequantised(piece, self.num_inputs).to(self.dtype) for piece in self.pieces]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _strips(self) -> Iterator[FileRows]:
        for piece in self.pieces:
            for blocks in torch.split(piece.blocks, LANES):
                yield FileRows(piece.kind, blocks)


def can_be_stored(kind: int) -> bool:
    """Return whether the C++ code multiplies matrices of a ggml type without dequantising them in memory."""
    code = library()
    return code is not None and code.carousel_stored_lines(kind, 0) >= 0


def form_of(kind: int) -> int:
    """Return the bit with which the C++ code encodes how it rounds the inputs of matrices of this type."""
    code = library()
    assert code is not None, "only native code multiplies stored matrices"
    form: int = code.carousel_stored_form(kind)
    return form


@cache
def _threads(number: int) -> ThreadPool:
    """Return a cached pool, because a mixture of experts dequantises thousands of matrices."""
    return ThreadPool(number)


def dequantised(rows: FileRows, num_inputs: int) -> torch.Tensor:
    """Return dequantised rows, [num_rows, num_inputs] float32."""
    if not can_be_stored(rows.kind):
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        return torch.from_numpy(dequantize(rows.blocks.numpy(), GGMLQuantizationType(rows.kind)))
    weights = torch.empty(len(rows.blocks), num_inputs)
    threads = _threads(torch.get_num_threads())
    blocks = rows.blocks.contiguous()
    threads.code.carousel_dequantise(threads.handle, rows.kind, blocks.data_ptr(), weights.numel(), weights.data_ptr())
    return weights


class Layout:
    """The memory layout of joined matrices: where each strip of `LANES` rows is stored."""

    def __init__(self, matrices: Sequence[StoredMatrix]) -> None:
        self._num_inputs = matrices[0].num_inputs
        self._strips = [strip for matrix in matrices for strip in matrix._strips()]
        if len(self._strips) % 2:  # the C++ code reads panels of two strips
            kind, blocks = self._strips[-1]
            self._strips.append(FileRows(kind, blocks[:0]))
        code = library()
        assert code is not None, "only native code multiplies stored matrices"
        self.num_lines = -(-2 * len(self._strips) // LINE)
        self._first_lines = []
        for strip in self._strips:
            self._first_lines.append(self.num_lines)
            self.num_lines += code.carousel_stored_lines(strip.kind, self._num_inputs)

    @property
    def forms(self) -> int:
        """A bit mask of the ways in which inputs are rounded, see `form_of`."""
        forms = 0
        for kind in {strip.kind for strip in self._strips}:
            forms |= form_of(kind)
        return forms

    def pack(self, threads: ThreadPool, packed: torch.Tensor) -> None:
        """Write all strips to their places. packed: [num_lines, LINE] int32."""
        blocks = [strip.blocks.contiguous() for strip in self._strips]
        sources = torch.tensor(
            [
                (strip.kind, own.data_ptr(), len(own), line)
                for strip, own, line in zip(self._strips, blocks, self._first_lines, strict=True)
            ]
        )
        threads.code.carousel_pack_stored(
            threads.handle, sources.data_ptr(), len(sources), self._num_inputs, packed.data_ptr()
        )


def plain_lines(weights: Sequence[torch.Tensor | StoredMatrix], panel: int) -> int:
    """Return the number of lines for joined, dequantised matrices: the line of `mark_plain`, and the panels' lines."""
    num_outputs, num_inputs = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    return 1 + -(-num_outputs // panel) * panel * num_inputs * weights[0].dtype.itemsize // (4 * LINE)


def mark_plain(packed: torch.Tensor) -> None:
    """Write the first line of memory for dequantised matrices, which marks them as not quantised."""
    packed[0] = torch.tensor([_PLAIN, 1] * (LINE // 2))
