"""Maps a model's safetensors files into memory, and runs transformers' model from them layer by layer.

A weight is a view of its mapped file: processes share its pages, which occupy memory only while they are in use.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from app.errors import UnsupportedModel
from app.model.cpu.library import advise
from app.model.cpu.stored_matrix import StoredMatrix
from app.model.language_model import plain_name
from app.model.llama import EMBEDDING, HEAD, by_expert, described_as, given
from app.model.packed_numbers import PackedWeight
from app.model.quantised_checkpoint import Quantised, can_dequantise, multiplied_out, scales_of_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Parts of weight names in Mixtral's files, and their equivalents in other mixtures of experts in transformers.
_MIXTRAL_NAMES = (
    (".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."),
)  # fmt: skip
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PIECE = 2**22  # the most numbers converted at once

Part = Callable[[torch.Tensor], torch.Tensor]  # returns a view of a part of a weight


class Checkpoint:
    """Reads weights from a model's files by name, one at a time."""

    def __init__(
        self,
        location: Path,
        dtype: torch.dtype,
        quantised: Quantised | None = None,
    ) -> None:
        """dtype: the type of the returned weights. Weights stored in this type are returned as views, without a copy.
        quantised: how the weights are quantised, according to config.json. They are returned dequantised.

        Raises OSError if a file cannot be read.
        """
        self._location = location
        self._dtype = dtype
        self._quantised = quantised
        self._files: dict[str, tuple[Any, str]] = {}  # weight name → (file, name in the file)
        self._used: list[torch.Tensor] = []
        self._converted: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()  # by name in the files
        for path in sorted(location.glob("model*.safetensors")):
            try:
                file: Any = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise OSError(f"{path}: {error}") from error
            self._files |= {renamed(key): (file, key) for key in [*file.keys()]}

    def __call__(self, name: str, part: Part | None = None) -> torch.Tensor | None:
        """Return a weight or a part of it, or None if the files lack it. A tied head is read from the embedding.

        Raises UnsupportedModel if the tensors of a packed weight do not fit together.
        """
        packed = self._packed(name)
        if packed is not None:
            assert part is None, "a quantised checkpoint is not split"
            weight = packed.multiplied_out(self._dtype)
            advise(packed.words, mmap.MADV_DONTNEED)
            return weight
        mapped = self._mapped(name)
        if mapped is None:
            return None
        if part is not None:
            self._used.append(mapped)
            return part(mapped).to(self._dtype)
        if (scales := self._scales(name)) is not None and mapped.dtype is not self._dtype:
            assert self._quantised is not None, "only quantised weights have scales"
            multiplied = multiplied_out(mapped, scales, self._quantised.block, self._dtype)
            advise(mapped, mmap.MADV_DONTNEED)
            return multiplied
        if mapped.dtype is self._dtype:
            self._used.append(mapped)
            return mapped
        own_name = self.own_name(name)
        converted = self._converted.get(own_name)
        if converted is None:  # a tied head reuses the embedding's copy while that exists
            converted = self._converted[own_name] = _converted(mapped, self._dtype)
        return converted

    def to_pack(self, name: str) -> torch.Tensor | StoredMatrix | None:
        """Return a weight for packing. Subclasses may return a matrix in a file type that the C++ decoder supports."""
        return self(name)

    def size_to_pack(self, name: str) -> torch.Tensor | StoredMatrix | None:
        """Return the result of `to_pack` on the meta device, without reading the weight."""
        shape = self.shape(name)
        return None if shape is None else torch.empty(shape, dtype=self._dtype, device="meta")

    @property
    def has_stored(self) -> bool:
        """Whether `to_pack` returns any `StoredMatrix`."""
        return False

    def own_name(self, name: str) -> str:
        """Return the name that the files use for a weight. A tied head is found under the embedding's name."""
        return EMBEDDING if name == HEAD and name not in self._files else name

    def shape(self, name: str) -> torch.Size | None:
        """Return a weight's shape, or None if the files lack it."""
        found = self._packed(name) or self._mapped(name)
        return None if found is None else found.shape

    def in_rows(self, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a whole 8-bit weight as stored in its file, and one scale per row, [num_rows, 1] float32.

        Returns None if the weight is not quantised in this type, or if a row has several scales.
        """
        numbers, scales = self._mapped(name), self._scales(name)
        if numbers is None or numbers.dtype is not dtype or scales is None or self._quantised is None:
            return None
        of_rows = scales_of_rows(numbers, scales, self._quantised.block)
        if of_rows is None:
            return None
        self._used.append(numbers)
        return numbers, of_rows

    def release(self) -> None:
        """Free the pages of all weights read so far. Using one of them afterwards rereads its file."""
        for weight in self._used:
            advise(weight, mmap.MADV_DONTNEED)
        self._used.clear()

    def has_weights_of(self, module: PreTrainedModel) -> bool:
        """Return whether the files contain every weight of a module by name and shape, in a supported type.

        Raises UnsupportedModel if the tensors of a packed weight do not fit together or do not fit the module.
        """
        is_tied = bool(module.config.tie_word_embeddings)
        for name, weight in by_expert(module.state_dict()).items():
            if self._packed(name, weight.shape) is not None:
                continue
            if name == HEAD and name not in self._files and not is_tied:
                return False
            mapped = self._mapped(name)
            if mapped is None or mapped.shape != weight.shape:
                return False
            if mapped.dtype not in _DTYPES and not self._can_multiply(name, mapped):
                return False
        return True

    def _packed(self, name: str, expected: torch.Size | None = None) -> PackedWeight | None:
        """Return a weight that the files store packed, or None for other weights. expected: its shape in the model."""
        packing = None if self._quantised is None else self._quantised.packing
        if packing is None:
            return None
        try:
            found = packing.weight(name, self._mapped)
            if found is not None and expected not in (None, found.shape):
                raise ValueError(f"{name} has the shape {list(found.shape)}, but the model expects {list(expected)}")
        except ValueError as error:
            raise UnsupportedModel(
                f"{self._location}: its files do not fit its config.json ({packing}): {error}. Download them again, or "
                f"serve another checkpoint"
            ) from error
        return found

    def _can_multiply(self, name: str, weight: torch.Tensor) -> bool:
        # A weight with one of these tensors is not simply its numbers times its scales.
        if self._quantised is None or any(f"{name}_{other}" in self._files for other in ("zero_point", "g_idx")):
            return False
        return can_dequantise(weight, self._scales(name), self._quantised.block)

    def _scales(self, name: str) -> torch.Tensor | None:
        """Return a weight's scales, or None if it is not quantised."""
        if self._quantised is None or not self._quantised.has_scales:
            return None
        # The first name is DeepSeek's, whose tensor is the scale despite its name; the second is compressed-tensors'.
        names = (f"{name}_scale_inv", f"{name}_scale")
        return next((found for each in names if (found := self._mapped(each)) is not None), None)

    def _mapped(self, name: str) -> torch.Tensor | None:
        name = self.own_name(name)
        if name not in self._files:
            return None
        file, key = self._files[name]
        weight: torch.Tensor = file.get_tensor(key)
        return weight


def _converted(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a converted copy of a mapped weight. Frees the mapped pages piece by piece, to keep the peak low."""
    converted = torch.empty_like(weight, dtype=dtype)
    for to, piece in zip(torch.split(converted.flatten(), _PIECE), torch.split(weight.flatten(), _PIECE), strict=True):
        to.copy_(piece)
        advise(piece, mmap.MADV_DONTNEED)
    return converted


def renamed(key: str) -> str:
    """Translate a weight's name in a file to its name in transformers."""
    if _MIXTRAL_NAMES[0][0] in key:
        for mixtrals, name in _MIXTRAL_NAMES:
            key = key.replace(mixtrals, name)
    return plain_name(key)


class MappedModel:
    """A Llama-like transformers model on the meta device, which reads its weights from files when they are needed."""

    def __init__(
        self,
        module: PreTrainedModel,
        checkpoint: Checkpoint,
        device: torch.device | None = None,
        *,
        rank: int | None = None,
    ) -> None:
        """device: the device to which requested weights are copied, or None to return views of the files.
        rank: if the module has been split, the rank that it belongs to. Only this rank's part of a weight is read.
        """
        self.module = module
        self.checkpoint = checkpoint
        self._device = device
        self.rank = rank
        self._shapes = {_in_files(name): weight for name, weight in module.state_dict().items()}

    def __call__(self, name: str) -> torch.Tensor | None:
        """Return a weight by its name in the files. A layer's experts are joined under one name, as in the model."""
        if name not in self._shapes:
            return None
        found = self._read(name, self._shapes[name])
        return self._placed(self._of_experts(name) if found is None else found)

    def _read(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """Return a weight, or the rank's part of it, cut in each dimension where the file's weight exceeds `like`."""
        rank = self.rank
        if rank is None:
            return self.checkpoint(name)

        def part(whole: torch.Tensor) -> torch.Tensor:
            for dim, (size, own) in enumerate(zip(whole.shape, like.shape, strict=True)):
                whole = whole.narrow(dim, rank * own, own) if own < size else whole
            return whole

        return self.checkpoint(name, part)

    def in_rows(self, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the result of `Checkpoint.in_rows` on the device."""
        found = self.checkpoint.in_rows(name, dtype)
        return None if found is None else (self._placed(found[0]), self._placed(found[1]))

    def compute_from_files(self) -> None:
        """Make each part of the model read its weights before its forward pass and drop them afterwards."""
        self._add_positions()
        for name, part in self._parts():
            part.register_forward_pre_hook(partial(self._fill, name))
            part.register_forward_hook(self._empty)

    def load(self) -> None:
        """Load the model's weights. Host memory holds one layer's weights at a time."""
        self._add_positions()
        for name, part in self._parts():
            if part is self.module.lm_head and self.module.config.tie_word_embeddings and self.rank is None:
                part.weight = self.module.model.embed_tokens.weight
            else:
                self._fill(name, part)
            self.checkpoint.release()

    def _add_positions(self) -> None:
        add_positions(self.module)
        if self._device is not None:
            self.module.model.rotary_emb.to(self._device)

    def _parts(self) -> list[tuple[str, nn.Module]]:
        """Return the names and modules of all parts with weights. Each decoder layer is one part."""
        names, base = {part: name for name, part in self.module.named_modules()}, self.module.model
        children = dict(base.named_children())
        norm = described_as(self.module).names.final_norm
        others = [part for name, part in children.items() if name not in ("embed_tokens", "layers", norm)]
        with_weights = [part for part in others if part.state_dict()]
        parts = (base.embed_tokens, *with_weights, *base.layers, children[norm], self.module.lm_head)
        return [(names[part], part) for part in parts]

    def _fill(self, name: str, part: nn.Module, _arguments: Any = ()) -> None:
        weights = {own: given(self, _in_files(f"{name}.{own}")) for own in part.state_dict()}
        part.load_state_dict(weights, assign=True)
        # Gemma's embedding scale is not in the files.
        if (scale := getattr(part, "scalar_embed_scale", None)) is not None:
            part.embed_scale = torch.tensor(scale, device=self._device)

    def _empty(self, part: nn.Module, _arguments: Any, _output: Any) -> None:
        part.to(device="meta")
        self.checkpoint.release()

    def _of_experts(self, name: str) -> torch.Tensor:
        joined = torch.empty_like(self._shapes[name], device="cpu")
        for own, matrix in by_expert({name: joined}).items():
            found = self._read(own, matrix)
            assert found is not None, f"a mixture's files have {own}"
            matrix.copy_(found)
        return joined

    def _placed(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if self._device is None else weight.to(self._device, copy=True)  # independent of the file


def _in_files(name: str) -> str:
    """Return a weight's name in the files, without the `linear` of modules that wrap one to join ranks' results."""
    return name.replace(".linear.", ".")


def add_positions(module: PreTrainedModel) -> None:
    """Compute the rotary embedding's tensors, which no file contains, from the model's configuration."""
    module.model.rotary_emb = type(module.model.rotary_emb)(config=module.config)
