"""Splits a transformers model among ranks, for any architecture with a tensor parallel plan.

A plan (`base_model_tp_plan`, `_tp_plan`) specifies how modules and weights are split. Its format has been stable
over many versions. transformers' own code that applies plans is not used: it relies on DTensor and a global process
group, changes from version to version, and cannot end an exchange that hangs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from app.errors import InvalidSetup, UnsupportedModel
from app.model.parallel.sums import SumMethod, in_order, sum_method

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Styles that only affect gradients, or that leave weights whole on every rank. The embedding is left whole as well,
# because other code reads the size of the vocabulary from it.
_WHOLE = frozenset(
    {"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "embedding_rowwise",
     "embedding_colwise"}
)  # fmt: skip
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
_WITH_WHOLE_INPUT = frozenset({"rowwise_split_input", "rowwise_rep"})
_OF_LINEAR = frozenset({"colwise", "rowwise"}) | _GATHERED | _WITH_WHOLE_INPUT
_OF_WEIGHTS = frozenset({"colwise", "rowwise", "packed_colwise", "packed_rowwise"})
_OF_MODULES = frozenset({"all_reduce", "moe_tp_experts", "moe_identity_expert"})
# The sizes of attention, MLPs and experts in a model's configuration that the number of ranks must divide.
_DIVIDED = (
    "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size",
    "shared_expert_intermediate_size",
)  # fmt: skip


def shared_numbers(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the sizes that are divided among ranks, by name in the configuration. A size is None if it is missing."""
    text = config.get_text_config()
    return {name: getattr(text, name, None) for name in _DIVIDED}


def check_divisible(numbers: Mapping[str, Any], size: int, *, of: str) -> None:
    """Raise InvalidSetup, with the possible sizes, if `size` does not divide all of these numbers."""
    counts = {name: number for name, number in numbers.items() if isinstance(number, int)}
    odd = [f"{name} {number}" for name, number in counts.items() if number % size]
    if odd:
        fitting = [str(n) for n in range(1, min(counts.values()) + 1) if not any(c % n for c in counts.values())]
        raise InvalidSetup(
            f"replicas.tensor_parallel: got {size}, which does not divide {' and '.join(odd)} of {of}; "
            f"it can be {', '.join(fitting)}"
        )


class Exchange(Protocol):
    """The exchanges that a split model needs. Implemented by `RankGroup`, and by `SizesOfRank` on the meta device."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> None: ...

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def gather_at_first(self, tensor: torch.Tensor) -> torch.Tensor: ...


class SizesOfRank:
    """Replaces a `RankGroup` on the meta device, to predict the memory of exchanges without other ranks."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Allocate as much memory as `RankGroup` does without NVLink."""
        way = sum_method(tensor, self.size)
        if way is not SumMethod.ANY_ORDER:
            num_parts = 1 if way is SumMethod.IN_PARTS else self.size
            in_order(tensor.new_empty(self.size, tensor.numel() * num_parts // self.size))

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * self.size, dim=-1)

    gather_at_first = gather_columns  # as on rank 0


class SplitPlan:
    """Applies a model's tensor parallel plan for one rank of a group."""

    def __init__(self, module: PreTrainedModel, group: Exchange, *, path: str) -> None:
        """Read the plan. Raises UnsupportedModel if the model has no plan, or if its plan contains unknown styles."""
        self._group = group
        self._path = path
        self._output = module.get_output_embeddings()
        self._plan: dict[str, str] = dict(getattr(module, "_tp_plan", None) or {})
        if not any(style in ("rowwise", *_WITH_WHOLE_INPUT) for style in self._plan.values()):
            raise UnsupportedModel(
                f"{path} ({module.config.model_type}) cannot be split among {group.size} ranks: transformers has no "
                f"tensor parallel plan for its layers. Set replicas.tensor_parallel to 1"
            )
        known = _WHOLE | _OF_LINEAR | _OF_WEIGHTS | _OF_MODULES
        unknown = sorted(set(self._plan.values()) - known)
        if unknown:
            raise UnsupportedModel(
                f"{path} ({module.config.model_type}) cannot be split among {group.size} ranks: its tensor parallel "
                f"plan uses {', '.join(unknown)}, which is not implemented. Set replicas.tensor_parallel to 1"
            )

    @torch.no_grad()
    def split(self, name: str, part: nn.Module) -> None:
        """Reduce a part of the model to this rank's share, in place. name: its name in the model, "" for the model.

        Raises InvalidSetup, with the numbers, if a weight cannot be split evenly.
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
        """Return this rank's share of a weight that the plan names itself, such as [experts, outputs, inputs]."""
        dim = -1 if style.endswith("rowwise") else max(-weight.dim(), -2)
        parts = weight.chunk(2, dim) if style.startswith("packed_") else (weight,)
        own = [self._evenly(name, each, dim) for each in parts]
        return nn.Parameter(torch.cat(own, dim) if len(own) > 1 else own[0].clone(), requires_grad=False)

    def _linear(self, name: str, linear: nn.Module, style: str) -> nn.Module:
        if not isinstance(linear, nn.Linear):
            raise UnsupportedModel(
                f"{self._path} cannot be split: {name} is a {type(linear).__name__}, not a linear layer"
            )
        if style in _GATHERED and linear.out_features % self._group.size:
            return linear  # it stays whole on every rank, for example a head with 50,257 tokens
        if style == "colwise" or style in _GATHERED:
            _set(linear, self._evenly(name, linear.weight, 0), self._bias(name, linear))
            # Every rank needs all outputs of other layers, but only rank 0 needs the logits, because it samples.
            join = self._group.gather_at_first if linear is self._output else self._group.gather_columns
            return _Gathered(linear, join) if style in _GATHERED else linear
        bias = linear.bias if self._group.rank == 0 else None  # the sum must include the bias once
        _set(linear, self._evenly(name, linear.weight, 1), bias)
        return _Summed(linear, self._group, slices_input=style in _WITH_WHOLE_INPUT)

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
        if style == "moe_identity_expert":  # all ranks run this expert, so divide its input by the number of ranks
            module.register_forward_pre_hook(lambda _module, given: (given[0] / group.size, *given[1:]))
            return

        def summed(_module: nn.Module, _given: Any, output: torch.Tensor) -> torch.Tensor:
            output = output.contiguous()
            group.all_reduce(output)
            return output

        module.register_forward_hook(summed)


class _Gathered(nn.Module):
    """A linear layer that is split by outputs, which all ranks then gather."""

    def __init__(self, linear: nn.Module, join: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = linear
        self._join = join

    @property
    def weight(self) -> torch.Tensor:
        """This rank's part of the weight. Some models read its dtype."""
        return self.linear.weight  # type: ignore[return-value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._join(self.linear(x))


class _Summed(nn.Module):
    """A linear layer that is split by inputs. The ranks' outputs are summed, and every rank receives the sum."""

    def __init__(self, linear: nn.Module, group: Exchange, *, slices_input: bool) -> None:
        """slices_input: whether `forward` receives the whole input, and must select this rank's part."""
        super().__init__()
        self.linear = linear
        self._group = group
        self._slices_input = slices_input

    @property
    def weight(self) -> torch.Tensor:
        """This rank's part of the weight. Some models read its dtype."""
        return self.linear.weight  # type: ignore[return-value]

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias on rank 0, which adds it for all, and None on other ranks."""
        return self.linear.bias  # type: ignore[return-value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._slices_input:
            x = x.chunk(self._group.size, dim=-1)[self._group.rank]
        output: torch.Tensor = self.linear(x)
        self._group.all_reduce(output)
        return output


def _set(linear: nn.Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Replace a linear layer's weights with copies of this rank's parts, so that the whole weights are freed."""
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    own_bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
    linear.register_parameter("bias", own_bias)
    linear.out_features, linear.in_features = linear.weight.shape


def _modules(name: str, part: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (path, parent, name in the parent) for each module of a part, and (path, part, "") for the part itself."""
    yield name, part, ""
    for path, owner in part.named_modules():
        where = ".".join(filter(None, (name, path)))
        for own, _ in owner.named_children():
            yield ".".join(filter(None, (where, own))), owner, own
