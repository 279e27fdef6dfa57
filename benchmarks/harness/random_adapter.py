"""Writes LoRA adapters with random weights in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

_SCALE = 0.02  # standard deviation of the weights: large enough to change outputs, small enough to keep them finite


def save_random_adapter(
    folder: Path, sizes: Mapping[str, tuple[int, int]], *, rank: int, seed: int, scale: float = _SCALE
) -> None:
    """Write an adapter for linear layers into a new folder. sizes: (inputs, outputs) of each layer, by name."""
    numbers = np.random.default_rng(seed)
    tensors = {}
    for name, (num_inputs, num_outputs) in sizes.items():
        for factor, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            values = scale * numbers.standard_normal(shape, dtype=np.float32)
            tensors[f"base_model.model.{name}.lora_{factor}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def projections_in(model: Path) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of the attention and MLP layers, by name, for a folder with one model.safetensors."""
    suffix = "_proj.weight"
    with safe_open(model / "model.safetensors", framework="numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys() if name.endswith(suffix)}  # noqa: SIM118
    return {name.removesuffix(".weight"): (inputs, outputs) for name, (outputs, inputs) in shapes.items()}
