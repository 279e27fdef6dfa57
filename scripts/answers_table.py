"""Write the tables of docs/guide/compare.md: `python -m scripts.answers_table`.

The rows follow from the answers of `carousel serve` and `carousel`.
"""

from __future__ import annotations

import re
from pathlib import Path

from deployments.cli import COMMANDS_OF_OTHERS
from deployments.launcher.arguments import ANSWERS, OPTIONS
from scripts.written_tables import with_table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "guide" / "compare.md"


def table() -> str:
    """Return the table, with one row for all flags or commands that have the same answer."""
    rows = [(f"`{option.flag}`", f"the same: {option.help}") for option in OPTIONS]
    rows += [(f"`{flag}`", _marked(answer)) for flag, answer in ANSWERS.items()]
    rows += [(f"`{name}`", answer) for name, answer in COMMANDS_OF_OTHERS.items()]
    names: dict[str, list[str]] = {}
    for name, answer in rows:
        names.setdefault(answer, []).append(name)
    joined = [(", ".join(each), answer) for answer, each in names.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in [("Flag or command", "Carousel"), ("---", "---"), *joined])


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
