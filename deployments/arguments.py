"""Kinds of arguments that several command lines take. No Ray and no torch here."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number of at least 1. For argparse, which says what is wrong with another."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}; must be at least 1")
    return value
