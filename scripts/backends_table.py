"""Write the table of backends in docs/design/gpu.md: `python -m scripts.backends_table`.

The rows follow from `app.model.gpu_backends`.
"""

from __future__ import annotations

from pathlib import Path

from app.model.gpu_backends import BACKENDS
from scripts.written_tables import with_table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "design" / "gpu.md"


def table() -> str:
    head = ("`model.backend`", "Computes", "Needs", "Weights in FP8", "FP8 KV, `batch_invariant`, KV elsewhere")
    rows = [
        (f"`{name}`", each.computes, each.needs, _yes(each.has_decoder), _yes(each.has_triton))
        for name, each in BACKENDS.items()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def page() -> str:
    """Return the text of the page with the current table."""
    return with_table(PAGE, table(), command="scripts.backends_table", source="app/model/gpu_backends.py")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
