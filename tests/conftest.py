"""Fixtures for all tests. Nothing here needs a network or a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

PROJECT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The bundled model."""
    return PROJECT / "models" / "demo"
