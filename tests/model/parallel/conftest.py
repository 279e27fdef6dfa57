"""Ranks of the decoder for CUDA compute in Triton's interpreter here."""

from tests.model.cuda.conftest import _quick_interpreter

__all__ = ["_quick_interpreter"]
