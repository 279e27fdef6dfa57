"""The commands: each one starts, and benchmarks/README.md lists all of them and no other."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name", sorted(programs() - NOT_LISTED))
def test_every_command_prints_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = f"benchmarks.{name}"
    if (found := find_spec(module)) is not None and found.submodule_search_locations is not None:
        module += ".__main__"
    with pytest.raises(SystemExit) as ended:
        import_module(module).main(["--help"])
    assert ended.value.code == 0
    assert f"python -m benchmarks.{name} " in capsys.readouterr().out
