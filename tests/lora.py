"""Random LoRA adapters as PEFT writes them, and models with their weights merged in by hand."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from app.engine.request import Adapter
from app.model.adapter_files import adapter_digest

ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    folder: Path,
    model: PreTrainedModel,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: tuple[str, ...] = ALL_LINEARS,
    size: float = 0.3,
    **config: object,
) -> Adapter:
    """targets: linear layers, by whole names or by their ends. size: of its numbers.
    config: other fields of adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, linear in model.named_modules():
        if not {name, name.rpartition(".")[2]}.isdisjoint(targets) and isinstance(linear, torch.nn.Linear):
            for factor, shape in (("A", (rank, linear.in_features)), ("B", (linear.out_features, rank))):
                values = size * torch.randn(*shape, generator=numbers)
                tensors[f"base_model.model.{name}.lora_{factor}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(targets)} | config
    (folder / "adapter_config.json").write_text(json.dumps(given))
    return Adapter(name=folder.name, path=str(folder), digest=adapter_digest(folder))


def merge(model: PreTrainedModel, folder: Path, scale: float) -> PreTrainedModel:
    """Add B · A · scale to the weights, in place. The oracle: nothing of what it tests is used."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    for name, linear in model.named_modules():
        prefix = f"base_model.model.{name}"
        if f"{prefix}.lora_A.weight" in tensors:
            update = tensors[f"{prefix}.lora_B.weight"] @ tensors[f"{prefix}.lora_A.weight"]
            linear.weight.data += scale * update  # type: ignore[union-attr,operator]
    return model
