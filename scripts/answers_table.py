"""Write the table of flags in docs/guide/compare.md: `python -m scripts.answers_table`.

The rows follow from the options and the answers of `carousel serve`.
"""

from __future__ import annotations

import re
from pathlib import Path

from deployments.launcher.arguments import ANSWERS, OPTIONS
from scripts.written_tables import with_table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "guide" / "compare.md"


def table() -> str:
    """Return the table, with one row for all flags that have the same answer."""
    same = ", ".join(f"`{option.flag}`" for option in OPTIONS)
    flags: dict[str, list[str]] = {}
    for flag, answer in ANSWERS.items():
        flags.setdefault(_marked(answer), []).append(f"`{flag}`")
    rows = [("Flag", "Carousel"), ("---", "---"), (same, "the same flag; `carousel serve --help` lists its values")]
    rows += [(", ".join(each), answer) for answer, each in flags.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _marked(answer: str) -> str:
    """Return the answer with its settings and flags in backquotes."""
    if "`" in answer:
        return answer
    return re.sub(r"(models\[\]\.[\w.]+|--[a-z-]+)", r"`\1`", answer)


def page() -> str:
    """Return the text of the page with the current table."""
    return with_table(PAGE, table(), command="scripts.answers_table", source="deployments/launcher/arguments.py")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
