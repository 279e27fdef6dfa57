"""GPUs by name, with their memory and bandwidth. Nothing here has been measured by this project."""

from __future__ import annotations

import re
from typing import NamedTuple

from app.config import GIB
from app.errors import InvalidSetup


class Card(NamedTuple):
    """One kind of GPU."""

    name: str
    memory_gib: float  # as CUDA reports it: less than on the label
    bandwidth_gbs: float | None = None  # GB/s; None: not known

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)


# Memory: of T4, L4, RTX-3090, RTX-4090, L40S, A100-80GB, H100 and H200 the "total capacity" in torch's messages in
# public reports; of the others an estimate from the size on the label. Bandwidth: as commonly published, not checked
# against the data sheets.
CARDS = (
    Card("T4", 14.5, 320),
    Card("L4", 22.0, 300),
    Card("A10", 22.0, 600),
    Card("RTX-3090", 23.6, 936),
    Card("RTX-4090", 23.5, 1008),
    Card("RTX-5090", 31.3, 1792),
    Card("A100-40GB", 39.3, 1555),
    Card("L40S", 44.3, 864),
    Card("A100-80GB", 79.1, 2039),
    Card("H100", 79.1, 3350),
    Card("H100-NVL", 93.0, 3900),
    Card("H200", 139.7, 4800),
    Card("B200", 178.3, 8000),
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB)?", re.IGNORECASE)
_UNITS = {"gib": 1.0, "gb": 1e9 / GIB, "mib": 1 / 1024}


def card_of(text: str) -> Card:
    """A card by its name, or one with so much memory: `H200`, `80GiB`. Raises InvalidSetup for another name."""
    named = {_plain(card.name): card for card in CARDS} | {_plain("A100"): _named("A100-80GB")}
    found = named.get(_plain(text))
    return found if found is not None else Card(text, _size_gib(text))


def _size_gib(text: str) -> float:
    """A size with its unit, GiB where there is none."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        known = ", ".join(card.name for card in CARDS)
        raise InvalidSetup(f"--gpu: got {text!r}; it is none of the known cards ({known}) and no size, such as 80GiB")
    return float(found[1]) * _UNITS[(found[2] or "GiB").lower()]


def _named(name: str) -> Card:
    return next(card for card in CARDS if card.name == name)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia"))
