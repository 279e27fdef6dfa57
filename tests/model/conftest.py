"""Tiny random models on disk, made once for all tests of this room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """architecture → folder with its tiny model."""
    root = tmp_path_factory.mktemp("models")

    def path(architecture: str) -> Path:
        folder = root / architecture
        return folder if folder.exists() else save_tiny_model(architecture, folder)

    return path
