"""The files of the page: that they come as what they are, and that no code but ours can run in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.service import Service

FOLDER = Path(__file__).parents[2] / "app" / "api" / "page"
FILES = sorted(FOLDER.iterdir())


def test_the_page_needs_no_key_and_the_browser_runs_nothing_from_elsewhere(service: Service) -> None:
    answer = service.call("GET", "/")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(each.strip().partition(" ")[::2] for each in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert policy["frame-ancestors"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_served_as_what_it_is(service: Service, path: Path) -> None:
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    answer = service.call("GET", f"/page/{path.name}")
    assert (answer.status, answer.body) == (200, path.read_bytes())
    assert answer.headers["content-type"].partition(";")[0] == kinds[path.suffix]
    again = service.call("GET", f"/page/{path.name}", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


def test_nothing_else_is_served(service: Service) -> None:
    for name in ("page.py", "..%2f..%2fconfig.py", "nothing", ""):
        assert service.call("GET", f"/page/{name}").status == 404


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_has_code_or_style_inline_or_names_another_origin(path: Path) -> None:
    text = path.read_text()
    if path.suffix == ".html":
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|javascript:", text)
    if path.suffix == ".js":
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_every_file_that_is_named_is_there() -> None:
    named = {name for path in FILES for name in re.findall(r"/page/([\w.]+)", path.read_text())}
    assert named == {path.name for path in FILES} - {"index.html"}
