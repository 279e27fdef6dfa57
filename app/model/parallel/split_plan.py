"""A model of transformers divided among ranks by the plan that transformers has for it: any architecture with one.

A plan names modules and weights and how each is divided (`base_model_tp_plan`, `_tp_plan`). Only the plan is used here,
which has been the same for many versions. What transformers does with it (DTensor, a global process group) changes from
version to version, and cannot end an exchange that hangs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from app.errors import InvalidSetup, UnsupportedModel
from app.model.parallel.sums import SumWay, in_order, way_of_sum

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Styles that say something about gradients alone, or about weights that every rank has as a whole. The embedding is
# whole, too: other code asks it for the size of the vocabulary.
_WHOLE = frozenset(
    {"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "embedding_rowwise",
     "embedding_colwise"}
)  # fmt: skip
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
_WITH_WHOLE_INPUT = frozenset({"rowwise_split_input", "rowwise_rep"})
_OF_LINEAR = frozenset({"colwise", "rowwise"}) | _GATHERED | _WITH_WHOLE_INPUT
_OF_WEIGHTS = frozenset({"colwise", "rowwise", "packed_colwise", "packed_rowwise"})
_OF_MODULES = frozenset({"all_reduce", "moe_tp_experts", "moe_identity_expert"})
# Numbers in a model's configuration that its ranks share: of attention, of MLPs and of experts.
_DIVIDED = (
    "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size",
    "shared_expert_intermediate_size",
)  # fmt: skip


def shared_numbers(config: PreTrainedConfig) -> dict[str, Any]:
    """What of a model its ranks share, by name; None: it has none."""
    text = config.get_text_config()
    return {name: getattr(text, name, None) for name in _DIVIDED}


def check_divisible(numbers: Mapping[str, Any], size: int, *, of: str) -> None:
    """Raises InvalidSetup, with the numbers, if `size` ranks cannot share them."""
    counts = {name: number for name, number in numbers.items() if isinstance(number, int)}
    odd = [f"{name} {number}" for name, number in counts.items() if number % size]
    if odd:
        fitting = [str(n) for n in range(1, min(counts.values()) + 1) if not any(c % n for c in counts.values())]
        raise InvalidSetup(
            f"replicas.tensor_parallel: got {size}, which does not divide {' and '.join(odd)} of {of}; "
            f"it can be {', '.join(fitting)}"
        )


class Exchange(Protocol):
    """What a divided model needs of its ranks: a `RankGroup`, or sizes alone."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> None: ...

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def gather_at_first(self, tensor: torch.Tensor) -> torch.Tensor: ...


class SizesOfRank:
    """One of several ranks without the others, on the meta device: what it exchanges has sizes and no numbers."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Takes the memory that `RankGroup` takes where no NVLink connects the ranks."""
        way = way_of_sum(tensor, self.size)
        if way is not SumWay.ANY_ORDER:
            num_parts = 1 if way is SumWay.IN_PARTS else self.size
            in_order(tensor.new_empty(self.size, tensor.numel() * num_parts // self.size))

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * self.size, dim=-1)

    gather_at_first = gather_columns  # as rank 0 has it


class SplitPlan:
    """How one model is divided among the ranks of a group."""

    def __init__(self, module: PreTrainedModel, group: Exchange, *, path: str) -> None:
        """Raises UnsupportedModel if transformers has no plan for it, or one that is not known here."""
        self._group = group
        self._path = path
        self._output = module.get_output_embeddings()
        self._plan: dict[str, str] = dict(getattr(module, "_tp_plan", None) or {})
        if not any(style in ("rowwise", *_WITH_WHOLE_INPUT) for style in self._plan.values()):
            raise UnsupportedModel(
                f"{path} ({module.config.model_type}) cannot be divided among {group.size} ranks: transformers has no "
                f"tensor parallel plan for its layers. Set replicas.tensor_parallel to 1"
            )
        known = _WHOLE | _OF_LINEAR | _OF_WEIGHTS | _OF_MODULES
        unknown = sorted(set(self._plan.values()) - known)
        if unknown:
            raise UnsupportedModel(
                f"{path} ({module.config.model_type}) cannot be divided among {group.size} ranks: its tensor parallel "
                f"plan has {', '.join(unknown)}, which is not implemented. Set replicas.tensor_parallel to 1"
            )

    @torch.no_grad()
    def split(self, name: str, part: nn.Module) -> None:
        """Leave of a part of the model what is this rank's. `name`: the part's in the model, "" for all of it.

        Raises InvalidSetup, with the numbers, if a weight cannot be divided.
        """
        for path, owner, own in list(_modules(name, part)):
            child = getattr(owner, own) if own else owner
            for weight_name, weight in list(child.named_parameters(recurse=False)):
                style = self._style(f"{path}.{weight_name}")
                if style is not None and style not in _WHOLE:
                    setattr(child, weight_name, self._parameter(f"{path}.{weight_name}", weight, style))
            style = self._style(path)
            if style is None or style in _WHOLE or not own:
                continue
            if style in _OF_MODULES:
                self._add_hook(child, style)
            else:
                setattr(owner, own, self._linear(path, child, style))

    def _style(self, name: str) -> str | None:
        return self._plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))

    def _parameter(self, name: str, weight: torch.Tensor, style: str) -> nn.Parameter:
        """A weight that the plan names itself, as those of all experts: [experts, outputs, inputs]."""
        dim = -1 if style.endswith("rowwise") else max(-weight.dim(), -2)
        parts = weight.chunk(2, dim) if style.startswith("packed_") else (weight,)
        own = [self._evenly(name, each, dim) for each in parts]
        return nn.Parameter(torch.cat(own, dim) if len(own) > 1 else own[0].clone(), requires_grad=False)

    def _linear(self, name: str, linear: nn.Module, style: str) -> nn.Module:
        if not isinstance(linear, nn.Linear):
            raise UnsupportedModel(
                f"{self._path} cannot be divided: {name} is a {type(linear).__name__}, not a linear layer"
            )
        if style in _GATHERED and linear.out_features % self._group.size:
            return linear  # an output layer of 50,257 tokens: whole on every rank
        if style == "colwise" or style in _GATHERED:
            _set(linear, self._evenly(name, linear.weight, 0), self._bias(name, linear))
            # All ranks get all outputs, but of logits only rank 0, which draws.
            join = self._group.gather_at_first if linear is self._output else self._group.gather_columns
            return _Gathered(linear, join) if style in _GATHERED else linear
        bias = linear.bias if self._group.rank == 0 else None  # added once
        _set(linear, self._evenly(name, linear.weight, 1), bias)
        return _Summed(linear, self._group, takes_part=style in _WITH_WHOLE_INPUT)

    def _bias(self, name: str, linear: nn.Linear) -> torch.Tensor | None:
        return None if linear.bias is None else self._evenly(name, linear.bias, 0)

    def _evenly(self, name: str, weight: torch.Tensor, dim: int) -> torch.Tensor:
        size = self._group.size
        if weight.shape[dim] % size:
            raise InvalidSetup(
                f"replicas.tensor_parallel: got {size}, which does not divide the {weight.shape[dim]} numbers of "
                f"{name} of {self._path}"
            )
        return weight.chunk(size, dim)[self._group.rank]

    def _add_hook(self, module: nn.Module, style: str) -> None:
        group = self._group
        if style == "moe_identity_expert":  # each rank adds it
            module.register_forward_pre_hook(lambda _module, given: (given[0] / group.size, *given[1:]))
            return

        def summed(_module: nn.Module, _given: Any, output: torch.Tensor) -> torch.Tensor:
            output = output.contiguous()
            group.all_reduce(output)
            return output

        module.register_forward_hook(summed)


class _Gathered(nn.Module):
    """A linear layer of which each rank has some outputs, which are joined."""

    def __init__(self, linear: nn.Module, join: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = linear
        self._join = join

    @property
    def weight(self) -> torch.Tensor:
        """Some models ask for its type."""
        return self.linear.weight  # type: ignore[return-value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._join(self.linear(x))


class _Summed(nn.Module):
    """A linear layer of which each rank has some inputs; all ranks get the sum."""

    def __init__(self, linear: nn.Module, group: Exchange, *, takes_part: bool) -> None:
        """takes_part: its input comes as a whole."""
        super().__init__()
        self.linear = linear
        self._group = group
        self._takes_part = takes_part

    @property
    def weight(self) -> torch.Tensor:
        """Some models ask for its type."""
        return self.linear.weight  # type: ignore[return-value]

    @property
    def bias(self) -> torch.Tensor | None:
        """That of the sum, on rank 0."""
        return self.linear.bias  # type: ignore[return-value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._takes_part:
            x = x.chunk(self._group.size, dim=-1)[self._group.rank]
        output: torch.Tensor = self.linear(x)
        self._group.all_reduce(output)
        return output


def _set(linear: nn.Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Copies, so that the memory of the whole is given back."""
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    own_bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
    linear.register_parameter("bias", own_bias)
    linear.out_features, linear.in_features = linear.weight.shape


def _modules(name: str, part: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The path of each module below a part, the module that has it, and its name there; "" for the part itself."""
    yield name, part, ""
    for path, owner in part.named_modules():
        where = ".".join(filter(None, (name, path)))
        for own, _ in owner.named_children():
            yield ".".join(filter(None, (where, own))), owner, own
