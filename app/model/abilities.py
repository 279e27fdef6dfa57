"""Tells which engine abilities a model supports, and why it does not support the others.

The user guide, a replica's log line and `carousel plan memory` use this module. The reasons follow from the
descriptions in `architectures.py` and from the types of a model's layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.model.architectures import ARCHITECTURES, Backend

Ability = Literal[
    "C++ on a CPU", "int8 and int4", "freed windows", "tiers and fetches", "lookup drafts",
    "draft model", "ranks", "own decoder on a GPU",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The properties of a model, or of an architecture, that decide which abilities it supports."""

    architecture: str  # the name of the model's class in transformers
    has_states: bool  # whether the model has recurrent layers
    windows: Literal["none", "kept", "freed"]  # whether blocks behind windows are freed; "none" without windows

    def why_not(self) -> dict[Ability, str]:
        """Return the abilities that the model does not support, each with the reason."""
        no_decoder = {backend: self._why_no_decoder(backend) for backend in ("cpu", "cuda")}
        reasons: dict[Ability, str | None] = {
            "C++ on a CPU": no_decoder["cpu"],
            "int8 and int4": no_decoder["cpu"] and "only the C++ decoder packs weights",
            "freed windows": self._why_windows_are_kept(),
            "draft model": "a draft would need slots for states of its own" if self.has_states else None,
            "ranks": "recurrent layers are not divided" if self.has_states else None,
            "own decoder on a GPU": no_decoder["cuda"],
        }
        return {ability: reason for ability, reason in reasons.items() if reason is not None}

    def __str__(self) -> str:
        """Return one line for a log or a terminal, with the unsupported abilities and the reasons."""
        refused = "; ".join(f"{ability} ({reason})" for ability, reason in self.why_not().items())
        return f"{self.architecture}: not with {refused}" if refused else f"{self.architecture}: all works with it"

    def _why_no_decoder(self, backend: Backend) -> str | None:
        described = ARCHITECTURES.get(self.architecture)
        if described is None:
            return "transformers' code computes it"
        if backend in described.backends:
            return None
        if described.experts is not None and described.experts.has_shared:
            return "the C++ decoder has no shared expert"
        return "the decoder for CUDA does not compute it"

    def _why_windows_are_kept(self) -> str | None:
        if self.windows == "kept":
            return "its layers are in one group, which keeps all (docs/design/engine.md says when)"
        return "it has no windows" if self.windows == "none" else None
