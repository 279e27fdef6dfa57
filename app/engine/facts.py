"""What an engine knows about its model once it is loaded: the numbers the HTTP side checks requests against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Measured at load, never configured. Crosses processes."""

    max_model_len: int  # tokens of prompt and output together that one request may have
    vocab_size: int  # token ids are 0 <= id < vocab_size
    eos_token_ids: tuple[int, ...]  # generation ends at any of these
    embedding_size: int | None = None  # numbers in an embedding; None: it gives none
