"""Reads a model's weights from its GGUF file, which is mapped into memory."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from app.model.cpu.checkpoint import Checkpoint, Part, renamed
from app.model.cpu.stored_matrix import FileRows, StoredMatrix, can_be_stored
from app.model.gguf.manifest import Manifest, PlacedWeight
from app.model.llama import EMBEDDING, by_expert

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The ggml types that are not quantised, by number.
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


class GgufCheckpoint(Checkpoint):
    """Reads weights from a GGUF file. Weights that transformers stores differently are read from the model's folder."""

    def __init__(self, location: Path, dtype: torch.dtype, manifest: Manifest) -> None:
        """Raises OSError if a file cannot be read."""
        super().__init__(location, dtype)
        self._names = [*manifest.weights]  # as in the model's own class
        placed = {renamed(name): own for name, own in manifest.weights.items()}
        self._placed = {name: own[0] for name, own in placed.items() if len(own) == 1}
        self._in_parts = {name: own for name, own in placed.items() if len(own) > 1}
        self._mapped_files = [
            torch.from_file(file.path, shared=False, size=file.num_bytes, dtype=torch.uint8) for file in manifest.files
        ]
        self._matrices: dict[str, StoredMatrix] = {}

    @property
    def has_stored(self) -> bool:
        """Whether the C++ code can multiply any of the matrices without dequantising it."""
        return any(map(self._is_stored, self._placed))

    def __call__(self, name: str, part: Part | None = None) -> torch.Tensor | None:
        """Return a weight or a part of it, dequantised, or None if it is missing. See `Checkpoint.__call__`."""
        if (parts := self._in_parts.get(name)) is not None:
            weight = torch.cat([self._numbers(each) for each in parts], dim=-2)
        elif (placed := self._blocks_of(name)) is not None:
            weight = self._numbers(placed)
        else:
            return super().__call__(name, part)
        return weight if part is None else part(weight)

    def _numbers(self, placed: PlacedWeight) -> torch.Tensor:
        if placed.kind in _PLAIN:
            return self._view(placed).to(self._dtype)
        weight = self._matrix(placed).multiplied_out().view(placed.shape)
        return weight if placed.columns is None else weight[:, self._order(placed.columns)]

    def all(self) -> dict[str, torch.Tensor]:
        """Return a dequantised copy of every weight, under its name in the model's own class."""
        names = [*self._names, *(name for name in self._files if not name.startswith("order."))]
        return {name: weight.clone() for name in names if (weight := self(renamed(name))) is not None}

    def to_pack(self, name: str) -> torch.Tensor | StoredMatrix | None:
        """Return a matrix in the file's type if the C++ code supports that type; otherwise dequantise it."""
        if not self._is_stored(name):
            return self(name)
        name = self.own_name(name)
        if name not in self._matrices:
            found = self._matrix(self._placed[name])
            if name != EMBEDDING:  # only the embedding is cached, because a tied head must be the same object
                return found
            self._matrices[name] = found
        return self._matrices[name]

    def size_to_pack(self, name: str) -> torch.Tensor | StoredMatrix | None:
        placed = self._placed.get(self.own_name(name))
        if placed is None or not self._is_stored(name):
            return super().size_to_pack(name)
        num_rows, num_inputs = placed.shape
        blocks = torch.empty(num_rows, placed.num_bytes // num_rows, dtype=torch.uint8, device="meta")
        return StoredMatrix((FileRows(placed.kind, blocks),), num_inputs, self._dtype)

    def _is_stored(self, name: str) -> bool:
        placed, matrix = self._placed.get(self.own_name(name)), 2
        if placed is None or placed.columns is not None or len(placed.shape) != matrix:
            return False
        return can_be_stored(placed.kind)

    def shape(self, name: str) -> torch.Size | None:
        if (parts := self._in_parts.get(name)) is not None:
            *before, num_rows, num_inputs = parts[0].shape
            return torch.Size((*before, num_rows * len(parts), num_inputs))
        placed = self._placed.get(self.own_name(name))
        return super().shape(name) if placed is None else torch.Size(placed.shape)

    def has_weights_of(self, module: PreTrainedModel) -> bool:
        """Return whether the file contains every weight of a module, in its shape."""
        return all(self.shape(name) == weight.shape for name, weight in by_expert(module.state_dict()).items())

    def own_name(self, name: str) -> str:
        return name if name in self._placed else super().own_name(name)

    def _blocks_of(self, name: str) -> PlacedWeight | None:
        placed = self._placed.get(self.own_name(name))
        return None if placed is None or placed.kind in _PLAIN else placed

    def _matrix(self, placed: PlacedWeight) -> StoredMatrix:
        blocks = self._bytes_of(placed).view(prod(placed.shape[:-1]), -1)
        if placed.rows is not None:
            blocks = blocks[self._order(placed.rows)]
        return StoredMatrix((FileRows(placed.kind, blocks),), placed.shape[-1], self._dtype)

    def _mapped(self, name: str) -> torch.Tensor | None:
        placed = self._placed.get(self.own_name(name))
        if placed is None:
            return super()._mapped(name)
        return self._view(placed) if placed.kind in _PLAIN else None

    def _view(self, placed: PlacedWeight) -> torch.Tensor:
        weight = self._bytes_of(placed).view(_PLAIN[placed.kind]).view(placed.shape)
        for order, dim in ((placed.rows, 0), (placed.columns, 1)):
            weight = weight if order is None else weight.index_select(dim, self._order(order))
        return weight

    def _bytes_of(self, placed: PlacedWeight) -> torch.Tensor:
        mapped = self._mapped_files[placed.part][placed.start : placed.start + placed.num_bytes]
        self._used.append(mapped)
        return mapped

    def _order(self, name: str) -> torch.Tensor:
        file, key = self._files[name]
        order: torch.Tensor = file.get_tensor(key)
        return order
