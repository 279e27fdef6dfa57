"""Has transformers' code compute on our attention what a decoder of ours would compute otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app.model.implementations.cuda_decoder import CudaModel
from app.model.implementations.native_decoder import NativeModel


@contextmanager
def transformers_code() -> Iterator[None]:
    """Models that are loaded meanwhile find no decoder of ours."""
    with pytest.MonkeyPatch.context() as patch:
        for way in (CudaModel, NativeModel):
            patch.setattr(way, "why_not_here", staticmethod(lambda _: "a test says so"))
        yield
