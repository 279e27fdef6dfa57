"""Whether all that `app` takes from Triton and transformers is there in the installed versions; by hand, with old ones:

    pip install --no-deps --target OLD triton==3.6.0 transformers==5.17.0 'huggingface-hub>=1.5,<2'
    PYTHONPATH=OLD:. python -m tests.oldest_versions

Looks at names alone, not at parameters: run the tests of the kernels with the same PYTHONPATH for these.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGES = ("triton", "transformers")


def used_names(source: str) -> Iterator[tuple[str, str]]:
    """What a module takes from the packages: the module there, and the name in it."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}  # by the name under which it is known here
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {each.asname or each.name: each.name for each in node.names if _is_of_packages(each.name)}
        elif isinstance(node, ast.ImportFrom) and _is_of_packages(node.module or ""):
            yield from ((node.module or "", each.name) for each in node.names)
    yield from _attributes(tree, modules)


def _is_of_packages(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _attributes(tree: ast.AST, modules: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def is_there(module: str, name: str) -> bool:
    """A name may be a module, too."""
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ImportError:
        return False


def main() -> int:
    for package in PACKAGES:
        print(package, importlib.import_module(package).__version__)
    used = {found for path in Path("app").rglob("*.py") for found in used_names(path.read_text())}
    missing = sorted(f"{module}.{name}" for module, name in used if not is_there(module, name))
    print(f"{len(used)} names are used; not there: {', '.join(missing) or 'none'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
