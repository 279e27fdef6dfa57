"""Reads an architecture's settings from the metadata of a GGUF file, and rejects unknown ones."""

from __future__ import annotations

from collections.abc import Mapping

from app.errors import UnsupportedModel
from app.model.gguf.reader import READ_INSTEAD, GgufFile, Values

# Settings that are supported for every architecture. A file with a setting that its family does not read is rejected.
_KNOWN = frozenset(
    (
        "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scaling.type",
        "rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    )
)  # fmt: skip


class FileSettings:
    """The validated settings of an architecture. Every method raises UnsupportedModel for an invalid value."""

    def __init__(self, file: GgufFile, known: frozenset[str], by_layer: frozenset[str] = frozenset()) -> None:
        """known: settings that the family reads beyond the common ones. by_layer: settings that may differ by layer.

        Raises UnsupportedModel if the file contains any other setting whose value is not zero or empty.
        """
        self.file = file
        self.architecture = str(file.metadata["general.architecture"])
        self._by_layer = by_layer
        prefix = f"{self.architecture}."
        self._found = {
            key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
        }
        for key, value in self._found.items():
            if key not in _KNOWN | known | by_layer and value:
                raise self.refusal(key, value)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a count, or the largest one if the setting differs by layer.

        Raises UnsupportedModel if the value is not a positive integer, or is missing and has no default.
        """
        value = self._found.get(key, default)
        if key in self._by_layer and isinstance(value, list):
            value = max(self.counts(key))
        if type(value) is not int or value < 1:
            raise self.refusal(key, value)
        return value

    def count_if_any(self, key: str) -> int | None:
        """Return a count, or None if it is missing or zero. Raises UnsupportedModel like `count`."""
        return self.count(key) if self.has(key) else None

    def counts(self, key: str) -> list[int]:
        """Return a count per layer. Raises UnsupportedModel if one is negative, missing or not an integer."""
        value, num_layers = self._found.get(key), self.count("block_count")
        if isinstance(value, list):
            if len(value) != num_layers or any(type(each) not in (int, bool) or each < 0 for each in value):
                raise self.refusal(key, value)
            return [int(each) for each in value]
        return [self.count(key)] * num_layers

    def flags(self, key: str) -> list[bool]:
        """Return a flag per layer, or an empty list if the setting is missing."""
        return list(map(bool, self.counts(key))) if key in self._found else []

    def number(self, key: str, default: float | None = None) -> float:
        """Return a float. Raises UnsupportedModel if it is not positive and finite, or is missing without a default."""
        value = self._found.get(key, default)
        if not isinstance(value, float) or not 0 < value < float("inf"):
            raise self.refusal(key, value)
        return value

    def has(self, key: str) -> bool:
        """Return whether the file contains the setting with a value that is not zero or empty."""
        return bool(self._found.get(key))

    def text(self, key: str, default: str) -> str:
        return str(self._found.get(key, default))

    def require_scaling(self, *known: str) -> None:
        """Raise UnsupportedModel unless the file's type of position scaling is one of `known`."""
        if (kind := self.text("rope.scaling.type", "none")) not in known:
            raise self.refusal("rope.scaling.type", kind)

    def factors(self, name: str, size: int) -> Values | None:
        """Return a tensor of `size` factors for rotary positions, or None if the file has none of this name.

        Raises UnsupportedModel if the tensor's shape is not [size].
        """
        tensor = self.file.tensors.get(name)
        if tensor is None:
            return None
        if tensor.shape != (size,):
            raise UnsupportedModel(
                f"{self.file.path}: tensor {name} has the shape {list(tensor.shape)}; expected [{size}]"
            )
        return self.file.values(tensor)

    def given(self, names: Mapping[str, str]) -> dict[str, float]:
        """Return the numbers that the file contains, under new names. names: new name → setting."""
        return {name: self.number(key) for name, key in names.items() if key in self._found}

    def refusal(self, key: str, value: object) -> UnsupportedModel:
        shown = f"{self.architecture}.{key} is {repr(value)[:60]}"
        return UnsupportedModel(f"{self.file.path}: {shown}, which cannot be read; {READ_INSTEAD}")
