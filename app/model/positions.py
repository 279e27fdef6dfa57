"""Makes rotary positions independent of sequence length.

transformers computes `dynamic` and `longrope` frequencies from the longest sequence of a forward pass. In a batch, a
request's keys would then depend on other requests, and cached blocks would mix frequencies.
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
    """Use transformers' frequencies for `max_model_len` tokens in all sequences, as vLLM does.

    Frequencies only change beyond the model's training length. After this call, no forward pass reads positions back
    from the device, so a step can be captured in a CUDA graph.
    """
    fixed = "default"  # transformers does not update the frequencies of this kind
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if isinstance(kinds, str) and kinds in ROTARY_BY_LENGTH:
            _fix(part, max_model_len, kinds, "inv_freq")
            part.rope_type = fixed
        elif isinstance(kinds, dict):  # one kind for each layer type
            following = [(layer_type, kind) for layer_type, kind in kinds.items() if kind in ROTARY_BY_LENGTH]
            for layer_type, kind in following:
                _fix(part, max_model_len, kind, f"{layer_type}_inv_freq", layer_type=layer_type)
            part.rope_type = kinds | dict.fromkeys(dict(following), fixed)


def why_indices_matter(module: PreTrainedModel, max_model_len: int) -> str | None:
    """Return the reason why queries depend on a token's index in the forward pass, or None if they do not.

    transformers' Llama 4 scales queries this way in layers without rotary positions, but only beyond a length that
    the trial steps do not reach.
    """
    for part in module.modules():
        is_scaled = getattr(part, "attn_temperature_tuning", False) and not getattr(part, "use_rope", True)
        if is_scaled and max_model_len >= (first := int(getattr(part, "floor_scale", 1))):
            return (
                f"from token {first:,} on, it scales queries by a token's index in the forward pass; set "
                f"model.max_model_len below {first:,}"
            )
    return None


def _fix(part: Any, max_model_len: int, kind: str, frequencies: str, **options: str) -> None:
    """Call a rotary module for the last possible position, so that it stores the longest sequence's frequencies."""
    before = getattr(part, frequencies).clone()
    if before.is_meta:  # nothing can be computed on the meta device
        return
    last = torch.full((1, 1), max_model_len - 1, device=before.device)
    part(before, last, **options)
    if not torch.equal(before, getattr(part, frequencies)):
        logger.info(
            "all sequences use the %s positions for %d tokens; set a smaller model.max_model_len to use those for "
            "shorter sequences",
            kind, max_model_len,
        )  # fmt: skip
