"""Find the files that the figures of a stage depend on: its module and all of its imports from this project."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from benchmarks.harness.machine import PROJECT

_OURS = ("app", "benchmarks", "deployments", "tests")


def digest_of(module: str, also: Iterable[str] = ()) -> str:
    """Return a digest of the files' names and contents. also: paths that the stage runs in other processes."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(files_of(module, also)):
        digest.update(f"{path.relative_to(PROJECT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def files_of(module: str, also: Iterable[str] = ()) -> set[Path]:
    """Return the files of a stage. Imports in functions also count: a needless run is cheaper than a stale figure."""
    left = [*_paths_of(module), *(path for name in also for path in _sources(PROJECT / name))]
    found: set[Path] = set()
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += _imported(path)
    return found


@cache
def _imported(path: Path) -> frozenset[Path]:
    names = list(_names(ast.parse(path.read_bytes())))
    # A module that imports names made at run time, like the kernels, imports modules of its own folder.
    beside = path.parent.glob("*.py") if "importlib.import_module" in names else ()
    return frozenset([*beside, *(each for name in names for each in _paths_of(name))])


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield every imported name that may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _paths_of(name: str) -> Iterator[Path]:
    """Yield the files of a module and of the packages around it. The last part of the name may be a name in it."""
    parts = name.split(".")
    if parts[0] not in _OURS:
        return
    for depth in range(1, len(parts) + 1):
        place = PROJECT.joinpath(*parts[:depth])
        yield from (path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file())


def _sources(place: Path) -> Iterable[Path]:
    return [place] if place.is_file() else place.rglob("*.py")
