"""A model's safetensors files, mapped into memory, and transformers' model computed from them a layer at a time.

A weight is a view of its file, so its pages are in memory once however often it is read, and only while they are used.
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

from app.model.cpu.library import advise
from app.model.llama import EMBEDDING, HEAD, by_expert
from app.model.quantised_checkpoint import Quantised, can_be_multiplied, multiplied_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Parts of names: in Mixtral's files, and in transformers' other mixtures.
_MIXTRAL_NAMES = (
    (".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."),
)  # fmt: skip
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Names of a weight's scales: DeepSeek's, which is the scale itself and not its inverse, and compressed-tensors'. What
# else a weight may have makes it more than its numbers times its scales.
_SCALES = ("_scale_inv", "_scale")
_NOT_BY_SCALES = ("zero_point", "g_idx")
_PIECE = 2**22  # numbers that are converted at a time


class Checkpoint:
    """The weights in a model's files, each read when it is asked for."""

    def __init__(
        self,
        location: Path,
        dtype: torch.dtype,
        quantised: Quantised | None = None,
        *,
        part: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """dtype: of the weights as they are given; one that the files have as well is not copied.
        quantised: what config.json says of the files. Weights of 8 bits are given multiplied by their scales.
        part: of the weight of a name, a view of it. No more of it is read, unless it is multiplied by scales.

        Raises OSError if a file cannot be read.
        """
        self._dtype = dtype
        self._quantised = quantised
        self._part = part
        self._files: dict[str, tuple[Any, str]] = {}  # by the name of a weight: its file, and its name there
        self._used: list[torch.Tensor] = []
        self._converted: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()  # by where they are mapped
        for path in sorted(location.glob("model*.safetensors")):
            try:
                file: Any = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise OSError(f"{path}: {error}") from error
            self._files |= {_renamed(key): (file, key) for key in [*file.keys()]}

    def __call__(self, name: str) -> torch.Tensor | None:
        """The weight of this name. A head that is tied to the embedding is not in the files."""
        mapped = self._mapped(name)
        if mapped is None:
            return None
        if (scales := self._scales(name)) is not None and mapped.dtype is not self._dtype:
            assert self._quantised is not None, "only then there are scales"
            multiplied = multiplied_out(mapped, scales, self._quantised.block, self._dtype)
            advise(mapped, mmap.MADV_DONTNEED)
            return self._part_of(name, multiplied)
        weight = self._part_of(name, mapped)
        if weight.dtype is self._dtype or not weight.is_contiguous():
            self._used.append(mapped)
        if weight.dtype is self._dtype:
            return weight
        converted = self._converted.get(weight.data_ptr())
        if converted is None:  # else a tied head, while the embedding is there
            converted = self._converted[weight.data_ptr()] = _converted(weight, self._dtype)
        return converted

    def _part_of(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight if self._part is None else self._part(name, weight)

    def release(self) -> None:
        """Give back the memory of all weights read so far. One that is used again is read from its file again."""
        for weight in self._used:
            advise(weight, mmap.MADV_DONTNEED)
        self._used.clear()

    def has_weights_of(self, module: PreTrainedModel) -> bool:
        """Whether every weight of a model is in the files, under its name in the model and in its shape."""
        is_tied = bool(module.config.tie_word_embeddings)
        for name, weight in by_expert(module.state_dict()).items():
            if name == HEAD and name not in self._files and not is_tied:
                return False
            mapped = self._mapped(name)
            if mapped is None or mapped.shape != weight.shape:
                return False
            if mapped.dtype not in _DTYPES and not self._can_multiply(name, mapped):
                return False
        return True

    def _can_multiply(self, name: str, weight: torch.Tensor) -> bool:
        if self._quantised is None or any(f"{name}_{other}" in self._files for other in _NOT_BY_SCALES):
            return False
        return can_be_multiplied(weight, self._scales(name), self._quantised.block)

    def _scales(self, name: str) -> torch.Tensor | None:
        """What a weight is to be multiplied with, if it is quantised."""
        if self._quantised is None or not self._quantised.has_scales:
            return None
        return next((found for suffix in _SCALES if (found := self._mapped(name + suffix)) is not None), None)

    def _mapped(self, name: str) -> torch.Tensor | None:
        if name == HEAD and name not in self._files:
            name = EMBEDDING
        if name not in self._files:
            return None
        file, key = self._files[name]
        weight: torch.Tensor = file.get_tensor(key)
        return weight


def _converted(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of a mapped weight. The pages of the mapped one are given back piece by piece."""
    converted = torch.empty_like(weight, dtype=dtype)
    if not weight.is_contiguous():  # some of its columns
        return converted.copy_(weight)
    for to, piece in zip(torch.split(converted.flatten(), _PIECE), torch.split(weight.flatten(), _PIECE), strict=True):
        to.copy_(piece)
        advise(piece, mmap.MADV_DONTNEED)
    return converted


def _renamed(key: str) -> str:
    for mixtrals, name in _MIXTRAL_NAMES:
        key = key.replace(mixtrals, name)
    return key


def compute_from(checkpoint: Checkpoint, module: PreTrainedModel) -> None:
    """Give each part of a Llama-like model on the meta device its weights while it computes, and no longer."""
    add_positions(module)
    for name, part in _parts(module):
        part.register_forward_pre_hook(partial(_fill, checkpoint, name))
        part.register_forward_hook(partial(_empty, checkpoint))


def load_from(checkpoint: Checkpoint, module: PreTrainedModel, device: torch.device) -> None:
    """Give a Llama-like model on the meta device its weights on a device; the host has those of one layer at a time."""
    add_positions(module)
    module.model.rotary_emb.to(device)
    for name, part in _parts(module):
        if part is module.lm_head and module.config.tie_word_embeddings:
            part.weight = module.model.embed_tokens.weight
        else:
            _fill(checkpoint, name, part, device=device)
        checkpoint.release()


def add_positions(module: PreTrainedModel) -> None:
    """The numbers of rotary positions are computed from the configuration; they are no weights."""
    module.model.rotary_emb = type(module.model.rotary_emb)(config=module.config)


def _parts(module: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """All that has weights, one layer at a time, with names."""
    names = {part: name for name, part in module.named_modules()}
    parts = (module.model.embed_tokens, *module.model.layers, module.model.norm, module.lm_head)
    return [(names[part], part) for part in parts]


def _fill(
    checkpoint: Checkpoint, name: str, part: nn.Module, _arguments: Any = (), *, device: torch.device | None = None
) -> None:
    weights = {}
    for own, weight in part.state_dict().items():
        found = checkpoint(f"{name}.{own}")
        found = _joined(checkpoint, f"{name}.{own}", weight) if found is None else found
        weights[own] = found if device is None else found.to(device, copy=True)  # not the file's own pages
    part.load_state_dict(weights, assign=True)


def _joined(checkpoint: Checkpoint, name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight that the model has for all experts of a layer together, as one copy. weight: on the meta device."""
    joined = torch.empty_like(weight, device="cpu")
    for own, matrix in by_expert({name: joined}).items():
        found = checkpoint(own)
        assert found is not None, "`has_weights_of` has looked for it"
        matrix.copy_(found)
    return joined


def _empty(checkpoint: Checkpoint, part: nn.Module, _arguments: Any, _output: Any) -> None:
    part.to(device="meta")
    checkpoint.release()
