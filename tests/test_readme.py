"""The pages' tables and trees say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.config import ApplicationConfig, leaves
from scripts import configuration_page

PROJECT = Path(__file__).resolve().parent.parent


def test_the_configuration_page_is_that_of_the_settings() -> None:
    assert configuration_page.PAGE.read_text() == configuration_page.page(), (
        "run `python -m scripts.configuration_page`"
    )


def test_the_configuration_page_has_every_setting() -> None:
    page = configuration_page.page()
    missing = [path for path, _ in leaves(ApplicationConfig) if f"`{path.rpartition('.')[2]}`" not in page]
    assert not missing


@pytest.mark.parametrize("page", ["README.md", "docs/design/architecture.md"])
def test_every_file_of_a_tree_exists(page: str) -> None:
    for tree in re.findall(r"```\n(app/\n.*?)```", (PROJECT / page).read_text(), flags=re.DOTALL):
        folders: list[str] = []
        for line in tree.splitlines():
            match = re.match(r"([│ ]*)(?:[├└]── )?(\S+)", line)
            assert match is not None, line
            depth, name = (len(match[1]) + 4 * ("── " in line)) // 4, match[2]
            folders[depth:] = [name.rstrip("/")]
            assert (PROJECT / "/".join(folders)).exists(), f"{page}: {line}"


def test_the_architecture_page_names_every_package() -> None:
    page = (PROJECT / "docs" / "design" / "architecture.md").read_text()
    rooms = [path.parent for package in ("app", "deployments") for path in (PROJECT / package).rglob("__init__.py")]
    assert not [str(room.relative_to(PROJECT)) for room in rooms if f"{room.name}/" not in page]
