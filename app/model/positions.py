"""Rotary positions that follow the length of a sequence, made to depend on nothing but a token's own place.

transformers computes `dynamic` and `longrope` frequencies from the longest sequence of a forward pass. In a step with
several sequences a request's keys would follow from what shares its steps, and cached blocks would mix frequencies.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

ROTARY_BY_LENGTH = frozenset({"dynamic", "longrope"})


def fix_positions(module: PreTrainedModel, max_model_len: int) -> None:
    """Use for every sequence the frequencies that transformers has for one of `max_model_len` tokens, as vLLM does.

    Up to the length that a model was trained with, they are those of any sequence. Nothing is read from the device
    afterwards, so that a step can be captured in a CUDA graph.
    """
    fixed = "default"  # the kind of which transformers changes nothing in a forward pass
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if isinstance(kinds, str) and kinds in ROTARY_BY_LENGTH:
            _fix(part, max_model_len, kinds, "inv_freq")
            part.rope_type = fixed
        elif isinstance(kinds, dict):  # one for each type of layer
            following = [(layer_type, kind) for layer_type, kind in kinds.items() if kind in ROTARY_BY_LENGTH]
            for layer_type, kind in following:
                _fix(part, max_model_len, kind, f"{layer_type}_inv_freq", layer_type=layer_type)
            part.rope_type = kinds | dict.fromkeys(dict(following), fixed)


def why_places_matter(module: PreTrainedModel, max_model_len: int) -> str | None:
    """Why queries follow from the place of a token in a forward pass, not from its position; None if they do not.

    Llama 4 scales queries so in layers without rotary positions, from a length on that no short comparison reaches.
    """
    for part in module.modules():
        is_scaled = getattr(part, "attn_temperature_tuning", False) and not getattr(part, "use_rope", True)
        if is_scaled and max_model_len >= (first := int(getattr(part, "floor_scale", 1))):
            return (
                f"it scales queries by the place of a token in a forward pass from token {first:,} on; a "
                f"model.max_model_len below {first:,} can be served"
            )
    return None


def _fix(part: Any, max_model_len: int, kind: str, frequencies: str, **options: str) -> None:
    """Have a rotary part compute the last position there can be: it keeps the frequencies that it used."""
    before = getattr(part, frequencies).clone()
    if before.is_meta:  # of a model that has sizes and no numbers
        return
    last = torch.full((1, 1), max_model_len - 1, device=before.device)
    part(before, last, **options)
    if not torch.equal(before, getattr(part, frequencies)):
        logger.info(
            "all sequences have the %s positions of one of %d tokens; a smaller model.max_model_len gives those of "
            "shorter ones",
            kind, max_model_len,
        )  # fmt: skip
