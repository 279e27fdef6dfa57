"""The linear layers of a model, as any engine has to compute them: sizes from its configuration, no weights read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from app.assembly import resolve_model_path
from benchmarks.engine.probes import is_linear
from benchmarks.harness.errors import BenchmarkError

# Layers with the same input, which one product can compute.
_TOGETHER = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One weight matrix."""

    num_inputs: int
    num_outputs: int

    @property
    def num_weights(self) -> int:
        return self.num_inputs * self.num_outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayers:
    """Those that every token passes, and the one that only sampled tokens pass."""

    body: tuple[LinearShape, ...]
    head: LinearShape
    kv_values_per_token: int | None  # numbers that all layers store for a token, as a Llama does; None: not known

    @property
    def num_body_weights(self) -> int:
        return sum(shape.num_weights for shape in self.body)

    @property
    def num_weights(self) -> int:
        return self.num_body_weights + self.head.num_weights


def linear_layers(path: str) -> LinearLayers:
    """Raises BenchmarkError when there is no such model, or it has no linear layers."""
    try:
        config = AutoConfig.from_pretrained(resolve_model_path(path), trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"the configuration of {path} cannot be read: {error}") from error
    head = model.get_output_embeddings()
    outputs: dict[tuple[str, int, str], int] = defaultdict(int)  # (parent, inputs, which) → outputs
    for name, module in model.named_modules():
        if is_linear(module) and module is not head:
            parent, _, own = name.rpartition(".")
            rows, columns = _sizes(module)
            outputs[parent, rows, _group(own)] += columns
    if not outputs or head is None:
        raise BenchmarkError(f"{path} has no linear layers to measure a floor with")
    return LinearLayers(
        body=tuple(LinearShape(num_inputs, num_outputs) for (_, num_inputs, _), num_outputs in outputs.items()),
        head=LinearShape(*_sizes(head)),
        kv_values_per_token=_kv_values_per_token(config.get_text_config()),
    )


def _group(name: str) -> str:
    return next(("+".join(sorted(names)) for names in _TOGETHER if name in names), name)


def _sizes(module: torch.nn.Module) -> tuple[int, int]:
    weight = module.weight
    assert isinstance(weight, torch.Tensor), "a linear layer has a weight"
    first, second = weight.shape
    return (second, first) if isinstance(module, torch.nn.Linear) else (first, second)  # Conv1D: inputs first


def _kv_values_per_token(config: object) -> int | None:
    num_heads: int | None = getattr(config, "num_attention_heads", None)
    hidden_size: int | None = getattr(config, "hidden_size", None)
    num_layers: int | None = getattr(config, "num_hidden_layers", None)
    if num_heads is None or hidden_size is None or num_layers is None:
        return None
    head_dim: int = getattr(config, "head_dim", None) or hidden_size // num_heads
    num_kv_heads: int = getattr(config, "num_key_value_heads", None) or num_heads
    return 2 * num_layers * num_kv_heads * head_dim
