"""Write the table of architectures in docs/guide/serve-a-model.md: `python -m scripts.architectures_table`.

The rows follow from `app.model.abilities`. Whether an architecture has recurrent layers is read from its code in
transformers, and whether it has windows is read from its default configuration. An ability that every architecture
has gets no column.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from app.model.abilities import Abilities, Ability
from app.model.architectures import ARCHITECTURES
from app.model.kv_cache import LayerGroups, LayerShape
from app.model.recurrent_layers import has_operators
from scripts.written_tables import with_table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "guide" / "serve-a-model.md"
# Hybrids and widely served models that run on transformers' code. All other architectures are like GPT-2.
_ON_TRANSFORMERS_CODE = (
    "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM", "Lfm2MoeForCausalLM", "GraniteMoeHybridForCausalLM",
    "BambaForCausalLM", "FalconH1ForCausalLM", "NemotronHForCausalLM", "GptOssForCausalLM", "Phi3ForCausalLM",
    "GPT2LMHeadModel",
)  # fmt: skip


def abilities() -> list[Abilities]:
    """Return the abilities of each architecture in the table."""
    classes = {each.__name__: (config, each) for config, each in AutoModelForCausalLM._model_mapping.items()}
    return [_of(*classes[name]) for name in (*ARCHITECTURES, *_ON_TRANSFORMERS_CODE)]


def _of(config: type[PreTrainedConfig], model: type[PreTrainedModel]) -> Abilities:
    found: Any = config()
    kinds = getattr(found, "layer_types", None) or ()
    window = getattr(found, "sliding_window", None)
    has_states = has_operators(model)
    if "sliding_attention" not in kinds and not (window and not kinds):
        return Abilities(architecture=model.__name__, has_states=has_states, windows="none")
    layers = {layer: _shape(found, layer) for layer in range(found.num_hidden_layers)}
    windows = {layer: window if not kinds or kinds[layer] == "sliding_attention" else None for layer in layers}
    groups = LayerGroups.of(layers, windows, max_model_len=2 * window)
    is_freed = groups.num_groups > 1 and not has_states
    return Abilities(architecture=model.__name__, has_states=has_states, windows="freed" if is_freed else "kept")


def _shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer. In some models, layers with full attention have another head size."""
    by_layer = getattr(config, "per_layer_config", None)
    own = by_layer[layer] if by_layer else config
    size = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    return LayerShape(num_kv_heads=own.num_key_value_heads, key_dim=size, value_dim=size)


def table() -> str:
    """Return the table, with one row for all architectures that have the same abilities."""
    architectures: dict[frozenset[Ability], list[str]] = {}
    for each in abilities():
        architectures.setdefault(frozenset(each.why_not()), []).append(each.architecture)
    columns = [name for name in get_args(Ability) if any(name in refused for refused in architectures)]
    lines = [f"| Architecture | {' | '.join(columns)} |", f"|{'---|' * (1 + len(columns))}"]
    for refused, names in architectures.items():
        cells = ["no" if name in refused else "yes" for name in columns]
        lines.append(f"| {', '.join(names)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    """Return the text of the page with the current table."""
    return with_table(PAGE, table(), command="scripts.architectures_table", source="app/model/abilities.py")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
