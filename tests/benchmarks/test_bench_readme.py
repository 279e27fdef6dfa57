"""The list of commands in benchmarks/README.md: each program is in it, and no other name."""

from __future__ import annotations

import re
from pathlib import Path

import benchmarks

FOLDER = Path(benchmarks.__file__).parent
NOT_LISTED = {"bulk.counted"}  # run by `bulk.kills`


def programs() -> set[str]:
    """The names after `python -m benchmarks.`; the checks of single clients are run by `clients`."""
    paths = [path for path in FOLDER.rglob("*.py") if '\nif __name__ == "__main__":' in path.read_text()]
    names = (".".join(path.relative_to(FOLDER).with_suffix("").parts) for path in paths)
    return {name.removesuffix(".__main__") for name in names if not name.startswith("clients.with_")}


def test_the_list_has_every_command_and_no_other() -> None:
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([\w.]+)[^`]*`", row.split("|")[1])}
    assert listed == programs() - NOT_LISTED
