"""Which code runs, as a step log says it."""

from __future__ import annotations

import platform
import shutil

import pytest
import torch

from app.versions import commit, versions


def test_the_versions_are_those_of_what_is_installed() -> None:
    found = versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__
    assert found.keys() >= {"carousel", "transformers", "triton"}


def test_a_commit_is_a_hash_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = commit()
    assert found is None or len(found.removesuffix("-dirty")) == 40
    monkeypatch.setenv("PATH", "")
    assert shutil.which("git") is None
    assert commit() is None
