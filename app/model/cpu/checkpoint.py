"""A model's safetensors files, mapped into memory, and transformers' model computed from them layer by layer.

A weight is a view of its file. Its pages are in memory once, no matter how often they are read, and only while in use.
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
from app.model.quantised_checkpoint import Quantised, can_be_multiplied, multiplied_out, scales_of_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Parts of names: in Mixtral's files, and in other mixtures of transformers.
_MIXTRAL_NAMES = (
    (".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."),
)  # fmt: skip
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PIECE = 2**22  # numbers that are converted at once

Part = Callable[[torch.Tensor], torch.Tensor]  # returns a view of some of a weight's numbers


class Checkpoint:
    """The weights in a model's files. Each weight is read on request."""

    def __init__(
        self,
        location: Path,
        dtype: torch.dtype,
        quantised: Quantised | None = None,
    ) -> None:
        """dtype: the type of the returned weights; weights stored in this type are not copied.
        quantised: config.json's description of the weights, which are then returned multiplied out.

        Raises OSError if a file cannot be read.
        """
        self._location = location
        self._dtype = dtype
        self._quantised = quantised
        self._files: dict[str, tuple[Any, str]] = {}  # by weight name: its file, and its name in the file
        self._used: list[torch.Tensor] = []
        self._converted: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()  # by their names in the files
        for path in sorted(location.glob("model*.safetensors")):
            try:
                file: Any = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise OSError(f"{path}: {error}") from error
            self._files |= {renamed(key): (file, key) for key in [*file.keys()]}

    def __call__(self, name: str, part: Part | None = None) -> torch.Tensor | None:
        """Return a weight or a part of it; None if the files lack it, unless it is a head tied to the embedding.

        Raises UnsupportedModel if the tensors of a packed weight do not fit each other.
        """
        packed = self._packed(name)
        if packed is not None:
            assert part is None, "a quantised checkpoint is not divided"
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
            assert self._quantised is not None, "only then there are scales"
            multiplied = multiplied_out(mapped, scales, self._quantised.block, self._dtype)
            advise(mapped, mmap.MADV_DONTNEED)
            return multiplied
        if mapped.dtype is self._dtype:
            self._used.append(mapped)
            return mapped
        own_name = self.own_name(name)
        converted = self._converted.get(own_name)
        if converted is None:  # otherwise it is a tied head, while the embedding exists
            converted = self._converted[own_name] = _converted(mapped, self._dtype)
        return converted

    def to_pack(self, name: str) -> torch.Tensor | StoredMatrix | None:
        """Return a weight for the C++ decoder, which multiplies some quantised matrices in the files' own types."""
        return self(name)

    def size_to_pack(self, name: str) -> torch.Tensor | StoredMatrix | None:
        """Return the same as `to_pack` on the meta device."""
        shape = self.shape(name)
        return None if shape is None else torch.empty(shape, dtype=self._dtype, device="meta")

    @property
    def has_stored(self) -> bool:
        """Whether `to_pack` returns matrices in the files' own types."""
        return False

    def own_name(self, name: str) -> str:
        """Return the name in the files: a tied head has the name of the embedding."""
        return EMBEDDING if name == HEAD and name not in self._files else name

    def shape(self, name: str) -> torch.Size | None:
        """Return the shape of a weight."""
        found = self._packed(name) or self._mapped(name)
        return None if found is None else found.shape

    def in_rows(self, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a whole 8-bit weight as stored in its file, and a scale for each of its rows, [num_rows, 1] float32.

        Returns None if the weight is not quantised in this type, or if one of its rows has several scales.
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
        """Free the memory of all weights read so far. A weight that is used again is read from its file again."""
        for weight in self._used:
            advise(weight, mmap.MADV_DONTNEED)
        self._used.clear()

    def has_weights_of(self, module: PreTrainedModel) -> bool:
        """Return whether the files have every weight of a module, with its name and shape.

        Raises UnsupportedModel, with the numbers, if a packed weight does not fit.
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
        """Return a weight that the files store packed; None for other weights. expected: its shape in the model."""
        packing = None if self._quantised is None else self._quantised.packing
        if packing is None:
            return None
        try:
            found = packing.weight(name, self._mapped)
            if found is not None and expected not in (None, found.shape):
                raise ValueError(f"{name} is {list(found.shape)} there, and {list(expected)} in the model")
        except ValueError as error:
            raise UnsupportedModel(
                f"{self._location}: its files do not fit its config.json ({packing}): {error}. Download them again, or "
                f"serve another checkpoint"
            ) from error
        return found

    def _can_multiply(self, name: str, weight: torch.Tensor) -> bool:
        # With these tensors, a weight is more than its numbers times its scales.
        if self._quantised is None or any(f"{name}_{other}" in self._files for other in ("zero_point", "g_idx")):
            return False
        return can_be_multiplied(weight, self._scales(name), self._quantised.block)

    def _scales(self, name: str) -> torch.Tensor | None:
        """Return the scales of a weight, if it is quantised."""
        if self._quantised is None or not self._quantised.has_scales:
            return None
        # The first name is DeepSeek's, for the scale itself and not its inverse; the second is compressed-tensors'.
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
    """Return a converted copy of a mapped weight. Frees the pages of the mapped weight piece by piece."""
    converted = torch.empty_like(weight, dtype=dtype)
    for to, piece in zip(torch.split(converted.flatten(), _PIECE), torch.split(weight.flatten(), _PIECE), strict=True):
        to.copy_(piece)
        advise(piece, mmap.MADV_DONTNEED)
    return converted


def renamed(key: str) -> str:
    """Translate the name of a weight in a file to its name in transformers."""
    if _MIXTRAL_NAMES[0][0] in key:
        for mixtrals, name in _MIXTRAL_NAMES:
            key = key.replace(mixtrals, name)
    return plain_name(key)


class MappedModel:
    """A Llama-like model of transformers on the meta device, and the files with its weights."""

    def __init__(
        self,
        module: PreTrainedModel,
        checkpoint: Checkpoint,
        device: torch.device | None = None,
        *,
        rank: int | None = None,
    ) -> None:
        """device: the device that weights are copied to on request; None leaves them as views of the files.
        rank: the rank whose part the module is, if it has been divided. Only that part is read.
        """
        self.module = module
        self.checkpoint = checkpoint
        self._device = device
        self.rank = rank
        self._shapes = {_in_files(name): weight for name, weight in module.state_dict().items()}

    def __call__(self, name: str) -> torch.Tensor | None:
        """Return a weight by its name in the files. All experts of a layer share one name, as in the model."""
        if name not in self._shapes:
            return None
        found = self._read(name, self._shapes[name])
        return self._placed(self._of_experts(name) if found is None else found)

    def _read(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """Return a weight, or a rank's part of it in each dimension in which the file has more numbers than `like`."""
        rank = self.rank
        if rank is None:
            return self.checkpoint(name)

        def part(whole: torch.Tensor) -> torch.Tensor:
            for dim, (size, own) in enumerate(zip(whole.shape, like.shape, strict=True)):
                whole = whole.narrow(dim, rank * own, own) if own < size else whole
            return whole

        return self.checkpoint(name, part)

    def in_rows(self, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Like `Checkpoint.in_rows`, on the device."""
        found = self.checkpoint.in_rows(name, dtype)
        return None if found is None else (self._placed(found[0]), self._placed(found[1]))

    def compute_from_files(self) -> None:
        """Give each part of the model its weights only while that part computes."""
        self._add_positions()
        for name, part in self._parts():
            part.register_forward_pre_hook(partial(self._fill, name))
            part.register_forward_hook(self._empty)

    def load(self) -> None:
        """Give the model its weights. The host's memory holds one layer's weights at a time."""
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
        """Return all parts that have weights, with their names, one layer at a time."""
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
        if (
            scale := getattr(part, "scalar_embed_scale", None)
        ) is not None:  # in Gemma, a scale that is no weight and is not in the files
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
        return weight if self._device is None else weight.to(self._device, copy=True)  # not the file's pages


def _in_files(name: str) -> str:
    """Return a weight's name in the files. Modules that join the results of ranks contain another linear layer."""
    return name.replace(".linear.", ".")


def add_positions(module: PreTrainedModel) -> None:
    """Compute the numbers of rotary positions, which are no weights, from the configuration."""
    module.model.rotary_emb = type(module.model.rotary_emb)(config=module.config)
