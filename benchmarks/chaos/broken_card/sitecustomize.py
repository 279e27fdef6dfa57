"""Installs a simulated GPU that breaks in the processes of a service. Python imports this module at every start.

Only `benchmarks.chaos.lost_cards` puts this folder on Python's path.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _BreakingLoader(Loader):
    """Loads a module with the usual loader, and then installs the GPU that breaks."""

    def __init__(self, usual: Any) -> None:
        self._usual = usual

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._usual.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._usual.exec_module(module)
        from benchmarks.chaos.lost_cards import put_in

        put_in()


class _Finder(MetaPathFinder):
    """Waits for the import of the module that loads models, because most processes of a service never import torch."""

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        if name != "app.model.loader":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None, "the module is in the project"
        spec.loader = _BreakingLoader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
