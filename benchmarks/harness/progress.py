"""Progress and notes go to stderr; stdout is for results."""

from __future__ import annotations

import sys


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
