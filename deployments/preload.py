"""Prepares Ray Serve in each process of a service, which imports this module first.

Ray Serve 2.60 imports pandas where it is installed, for handlers that return data frames; none here does. The import
takes as long as the rest of Serve, in each of a service's seven processes, and there is no setting for it. Where
this module is not imported first, Serve imports pandas, and nothing else changes.
"""

from __future__ import annotations

import importlib
import sys

_NOT_IMPORTED = "pandas"

if _NOT_IMPORTED not in sys.modules:
    sys.modules[_NOT_IMPORTED] = None  # type: ignore[assignment]  # an import of it raises ImportError
    try:
        importlib.import_module("ray.serve")
    finally:
        del sys.modules[_NOT_IMPORTED]

importlib.import_module("deployments.ray_internals").keep_pages_with_the_service()
