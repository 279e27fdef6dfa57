"""Determines which engine abilities a model supports, and why it lacks the others.

The user guide, a replica's log and `carousel plan memory` show the result. It follows from the descriptions in
`architectures.py` and from the kinds of a model's layers.
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
    """The properties of a model or an architecture that determine its abilities."""

    architecture: str  # the name of the model's class in transformers
    has_states: bool  # whether the model has recurrent layers
    windows: Literal["none", "kept", "freed"]  # whether blocks behind windows are freed; "none" without windows

    def why_not(self) -> dict[Ability, str]:
        """Return the unsupported abilities and the reason for each."""
        no_decoder = {backend: self._why_no_decoder(backend) for backend in ("cpu", "cuda")}
        reasons: dict[Ability, str | None] = {
            "C++ on a CPU": no_decoder["cpu"],
            "int8 and int4": no_decoder["cpu"] and "only the C++ decoder packs weights",
            "freed windows": self._why_windows_are_kept(),
            "draft model": "a draft model would need its own state slots" if self.has_states else None,
            "ranks": "recurrent layers cannot be split" if self.has_states else None,
            "own decoder on a GPU": no_decoder["cuda"],
        }
        return {ability: reason for ability, reason in reasons.items() if reason is not None}

    def __str__(self) -> str:
        """Return one line for a log or a terminal that lists the unsupported abilities with their reasons."""
        refused = "; ".join(f"{ability} ({reason})" for ability, reason in self.why_not().items())
        return f"{self.architecture} lacks {refused}" if refused else f"{self.architecture} supports everything"

    def _why_no_decoder(self, backend: Backend) -> str | None:
        described = ARCHITECTURES.get(self.architecture)
        if described is None:
            return "it runs on transformers' code"
        if backend in described.backends:
            return None
        if described.experts is not None and described.experts.has_shared:
            return "the C++ decoder does not support shared experts"
        return "the CUDA decoder does not support it"

    def _why_windows_are_kept(self) -> str | None:
        if self.windows == "kept":
            return "its layers form one group, which keeps all blocks (see docs/design/engine.md)"
        return "it has no windows" if self.windows == "none" else None
