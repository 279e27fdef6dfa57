"""Has transformers' code compute on our attention what a decoder of ours would compute otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def transformers_code() -> Iterator[None]:
    """Models that are loaded meanwhile are taken for ones that no decoder of ours knows."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_why_not_packed", "_why_not_joined"):
            patch.setattr(f"app.model.loader.{name}", lambda *_: "a test says so")
        # A kept result would load the native decoder without asking.
        patch.setattr("app.model.loader._kept_check", lambda *_, **__: None)
        yield
