"""GPUs by name, with their memory and bandwidth. None of these numbers has been measured by this project."""

from __future__ import annotations

import re
from typing import NamedTuple

from app.config import GIB
from app.errors import InvalidSetup


class Card(NamedTuple):
    """The properties of a GPU."""

    name: str
    memory_gib: float  # as reported by CUDA, which is less than the label says
    bandwidth_gbs: float | None = None  # GB/s, or None if unknown
    capability: tuple[int, int] | None = None  # CUDA compute capability, or None if unknown

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)


# The memory of T4, L4, RTX-3090, RTX-4090, L40S, A100-80GB, H100 and H200 is the "total capacity" in torch's messages,
# as found in public reports. For other cards, it is estimated from the label. Bandwidths are as commonly published, but
# have not been checked against data sheets.
CARDS = (
    Card("T4", 14.5, 320, (7, 5)),
    Card("L4", 22.0, 300, (8, 9)),
    Card("A10", 22.0, 600, (8, 6)),
    Card("RTX-3090", 23.6, 936, (8, 6)),
    Card("RTX-4090", 23.5, 1008, (8, 9)),
    Card("RTX-5090", 31.3, 1792, (12, 0)),
    Card("A100-40GB", 39.3, 1555, (8, 0)),
    Card("L40S", 44.3, 864, (8, 9)),
    Card("A100-80GB", 79.1, 2039, (8, 0)),
    Card("H100", 79.1, 3350, (9, 0)),
    Card("H100-NVL", 93.0, 3900, (9, 0)),
    Card("H200", 139.7, 4800, (9, 0)),
    Card("B200", 178.3, 8000, (10, 0)),
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB)?", re.IGNORECASE)
_UNITS = {"gib": 1.0, "gb": 1e9 / GIB, "mib": 1 / 1024}


def card_of(text: str) -> Card:
    """Return a known card, such as `H200`, or a card with a given memory, such as `80GiB`. Raises InvalidSetup."""
    named = {_plain(card.name): card for card in CARDS} | {_plain("A100"): _named("A100-80GB")}
    found = named.get(_plain(text))
    if found is not None:
        return found
    known = ", ".join(card.name for card in CARDS)
    return Card(text, _size_gib(text, f"--gpu: got {text!r}; must be a known card ({known}) or a size"))


def bytes_of(text: str, *, option: str) -> int:
    """Parse a size such as 16GiB. Raises InvalidSetup, with the option's name, if the text is not a size."""
    return int(_size_gib(text, f"{option}: got {text!r}; must be a size") * GIB)


def _size_gib(text: str, refusal: str) -> float:
    """Parse a size. The default unit is GiB."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise InvalidSetup(f"{refusal}, such as 80GiB")
    return float(found[1]) * _UNITS[(found[2] or "GiB").lower()]


def _named(name: str) -> Card:
    return next(card for card in CARDS if card.name == name)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia"))
