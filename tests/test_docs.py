"""The documentation says what the code says: its links, paths, modules, settings and configurations exist."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from app.api.endpoints.table import ENDPOINTS
from app.api.http.openapi import openapi_document
from app.api.prepared_request import RequestLimits
from app.api.schemas.parameters import unavailable
from app.config import ApiConfig, ApplicationConfig, KeysConfig, leaves
from app.metrics import exposition
from benchmarks.clients import with_codex
from deployments.serve.settings import parse
from scripts import answers_table, architectures_table, backends_table, configuration_page, draw_pictures
from scripts.draw_pictures import imported
from tests.doc_pages import COMMANDS, GUIDES, OUTPUT, PAGES, PROJECT, Block, blocks
from tests.metrics.test_exposition import after_one_request
from tests.test_imports import ALLOWED

README = PROJECT / "README.md"
LANGUAGES = COMMANDS | OUTPUT | {"yaml", "toml", "dockerfile", "mermaid", "http"}
CONTRIBUTING = PROJECT / "CONTRIBUTING.md"
CHANGES = (
    "sampling parameter",
    "endpoint",
    "architecture",
    "scheduling policy",
    "tool-call format",
    "metric",
    "setting",
    "alert",
)
CURRENT = [page for page in PAGES if "results" not in page.parts]  # measurements name the settings of their commit
ROOTS = "app|deployments|benchmarks|scripts|tests|docs|models"
BRANCHES = "models|engine|model|cache|scheduler|step_log|grammar|replicas|autoscaling|api|ingress|metrics|batches|jobs"


def name(page: Path) -> str:
    return str(page.relative_to(PROJECT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), f"{name(page)} links to {target}"
            assert not anchor or anchor in anchors(linked), f"{name(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_path_and_module_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = re.findall(rf"(?<![\w/.~-])((?:{ROOTS})/[\w./*-]*[\w*/])", text)
    missing = [path for path in paths if not list(PROJECT.glob(path.rstrip("/")))]
    modules = re.findall(rf"python3? -m ((?:{ROOTS})[\w.]*)", text)
    missing += [module for module in modules if importlib.util.find_spec(module) is None]
    assert not missing, f"{name(page)} names {missing}"


def test_every_noun_of_the_page_of_jobs_is_a_class_in_the_file_that_it_names() -> None:
    rows = re.findall(r"^\| (\w+) \| `(\w+\.py)` \|", (PROJECT / "docs/design/jobs.md").read_text(), re.MULTILINE)
    assert rows
    files = {path.name: path.read_text() for path in (PROJECT / "app/jobs").glob("*.py")}
    assert not [(noun, file) for noun, file in rows if f"class {noun}" not in files.get(file, "")]


@pytest.mark.parametrize("page", CURRENT, ids=name)
def test_every_setting_exists(page: Path) -> None:
    known = {re.sub(r"\[\]", "", path) for path, _ in leaves(ApplicationConfig)}
    known |= {path.rsplit(".", count)[0] for path in known for count in range(1, path.count(".") + 1)}
    settings = re.findall(rf"`((?:{BRANCHES})(?:\[\])?(?:\.[a-z_]+(?:\[\])?)+)(?::[^`]*)?`", prose(page))
    missing = [
        setting for setting in settings
        if not any(f".{path}".endswith(f".{setting.replace('[]', '')}") for path in known)
    ]  # fmt: skip
    assert not missing, f"{name(page)} names {missing}"


def test_every_promise_is_held_by_a_test_that_exists() -> None:
    page = (PROJECT / "docs/design/promises.md").read_text()
    rows = re.findall(r"^\| .* \| (.*) \|$", page, re.MULTILINE)
    held_by = [re.findall(r"`(tests/[^`]+)`(?:: `(\w+)`)?", row) for row in rows if row != "Test"]
    assert len(held_by) > 50
    assert all(held_by)
    missing = [
        (path, test)
        for path, test in (each for tests in held_by for each in tests)
        if (f"def {test}(" if test else "") not in (PROJECT / path).read_text()
    ]
    assert not missing


def test_the_places_of_changes_have_the_files_and_names_that_contributing_says() -> None:
    section = CONTRIBUTING.read_text().split("## Where do I change X?")[1].split("\n## ")[0]
    assert not [change for change in CHANGES if not re.search(rf"^(\*\*|\| )an? {change}\b", section, re.M | re.I)]
    paths = re.findall(r"`([\w/]+(?:/|\.\w+))`", section)
    missing = [path for path in paths if not (PROJECT / path).exists()]
    named = re.findall(r"`([\w/]+\.py)` \(`(\w+)`\)", section)
    named += [(path, name) for name, path in re.findall(r"`(\w+)` \(`([\w/]+\.py)`\)", section)]
    assert len(named) > 15
    missing += [
        f"{name} in {path}" for path, name in named
        if not re.search(rf"^(?:def |class )?{name}\b", (PROJECT / path).read_text(), re.MULTILINE)
    ]  # fmt: skip
    assert not missing, f"CONTRIBUTING.md names {missing}"


def test_every_block_is_of_a_known_language() -> None:
    """So that no command is passed over because its block says nothing."""
    assert not [str(block) for page in GUIDES for block in blocks(page) if block.language not in LANGUAGES]


@pytest.mark.parametrize("block", [b for p in GUIDES for b in blocks(p) if b.language == "yaml" and b.is_run], ids=str)
def test_every_configuration_is_accepted(block: Block) -> None:
    """Blocks show an application's `args`, or the content of a file of keys, which is a list."""
    content = yaml.safe_load(block.text)
    if isinstance(content, list):
        KeysConfig.model_validate({"keys": content})
    else:
        parse(content)


def test_the_configuration_of_codex_is_that_of_its_checks() -> None:
    [shown] = [tomllib.loads(block.text) for page in GUIDES for block in blocks(page) if block.language == "toml"]
    checked = tomllib.loads(with_codex.CONFIG)
    [name] = checked["model_providers"]
    assert shown["model_providers"][name].keys() == checked["model_providers"][name].keys()
    assert shown["model_provider"] == checked["model_provider"] == name


def test_the_configuration_page_is_that_of_the_settings() -> None:
    assert configuration_page.PAGE.read_text() == configuration_page.page(), (
        "run `python -m scripts.configuration_page`"
    )


@pytest.mark.parametrize("script", [answers_table, architectures_table, backends_table])
def test_tables_follow_from_the_code(script: ModuleType) -> None:
    assert script.PAGE.read_text() == script.page(), f"run `python -m {script.__name__}`"


def test_the_configuration_page_has_every_setting() -> None:
    page = configuration_page.page()
    missing = [path for path, _ in leaves(ApplicationConfig) if f"`{path.rpartition('.')[2]}`" not in page]
    assert not missing


def test_the_api_page_has_every_path_and_every_field() -> None:
    page = (PROJECT / "docs" / "reference" / "api.md").read_text()
    document = openapi_document(ApiConfig(), RequestLimits(), has_batches=True)
    bodies = {title: each for title, each in document["components"]["schemas"].items() if title.endswith("Request")}
    missing = [path for path in document["paths"] if f"{path}`" not in page]
    missing += [
        f"{title}.{field}" for title, body in bodies.items() for field in body["properties"]
        if not re.search(rf"\b{field}\b", page)
    ]  # fmt: skip
    assert not missing


def test_the_metrics_page_has_every_metric() -> None:
    page = (PROJECT / "docs" / "operate" / "monitoring.md").read_text()
    text = exposition(replace(after_one_request(), batches=defaultdict(int, num_paused=0))).decode()
    named = re.findall(r"^# HELP (\S+) ", text, flags=re.MULTILINE)
    assert named
    assert not [metric for metric in named if f"`{metric}`" not in page]


def test_the_page_of_the_api_has_every_field_that_is_refused() -> None:
    page = (PROJECT / "docs" / "reference" / "api.md").read_text()
    refused = {name for endpoint in ENDPOINTS.values() for name in unavailable(endpoint.schema)}
    assert len(refused) > 90
    assert not [name for name in sorted(refused) if f"`{name}`" not in page]


def test_the_readme_is_short() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    assert len(text.split()) < 1200


def test_the_architecture_page_names_every_package() -> None:
    page = (PROJECT / "docs" / "design" / "architecture.md").read_text()
    rooms = [path.parent for package in ("app", "deployments") for path in (PROJECT / package).rglob("__init__.py")]
    assert not [str(room.relative_to(PROJECT)) for room in rooms if f"{room.name}/" not in page]


def test_the_table_of_borders_is_that_of_the_test_that_keeps_them() -> None:
    page = (PROJECT / "docs" / "design" / "architecture.md").read_text()
    rows = [
        f"| `{room}` | {', '.join(f'`{each}`' for each in sorted(allowed)) or '–'} |"
        for room, allowed in ALLOWED.items()
        if room.count(".") == 1 or room == "deployments"
    ]
    assert "\n".join(rows) in page, "the table should be:\n" + "\n".join(rows)


def test_the_list_of_dependencies_has_all_of_them() -> None:
    page = (PROJECT / "docs" / "design" / "architecture.md").read_text().split("\n## Dependencies\n")[1]
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    needed = [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *project["optional-dependencies"]["plots"],
    ]
    names = [re.split(r"[^\w-]", requirement)[0] for requirement in needed]
    assert not [each for each in names if each != project["name"] and each.lower() not in page.lower()]


def test_the_picture_of_the_packages_has_all_of_them() -> None:
    packages = imported().keys()
    assert packages == draw_pictures.PLACES.keys() | (packages & draw_pictures.EVERYWHERE)


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    return set(_anchors(prose(page)))


def _anchors(text: str) -> Iterator[str]:
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lower())
        yield re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
