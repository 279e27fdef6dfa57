"""Speeds up the import of Ray Serve. Every process of a service should import this module first.

Ray Serve 2.60 imports pandas and FastAPI for features that our applications do not use, and no setting prevents this.
These two imports and useless garbage collections during the import take as long as the rest of Serve, in each of a
service's nine processes. A process that does not import this module only starts more slowly.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from starlette.requests import Request


class _ByName(type):
    """Metaclass of stand-ins for FastAPI's classes, for which `isinstance` accepts instances of the real class."""

    def __instancecheck__(cls, instance: object) -> bool:
        kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(instance).__mro__}
        return ("fastapi", cls.__name__) in kinds


def _encode(*arguments: Any, **options: Any) -> Any:
    return importlib.import_module("fastapi.encoders").jsonable_encoder(*arguments, **options)


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module


def _stand_ins() -> dict[str, ModuleType | None]:
    """Return the modules that Serve should import under these names. None makes the import raise ImportError."""
    kinds = {name: _ByName(name, (), {}) for name in ("FastAPI", "APIRouter", "APIRoute", "APIWebSocketRoute")}
    return {
        "pandas": None,
        "fastapi": _module("fastapi", Request=Request, **kinds),
        "fastapi.encoders": _module("fastapi.encoders", jsonable_encoder=_encode),
        "fastapi.routing": _module("fastapi.routing", _IncludedRouter=_ByName("_IncludedRouter", (), {}), **kinds),
    }


@contextmanager
def _instead(modules: dict[str, ModuleType | None]) -> Iterator[None]:
    """Put modules into `sys.modules` temporarily, except those whose package has already been imported."""
    put = {name: module for name, module in modules.items() if name.partition(".")[0] not in sys.modules}
    sys.modules.update(put)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in put:
            del sys.modules[name]


def _import_serve() -> None:
    with _instead(_stand_ins()):
        importlib.import_module("ray.serve")
    internals = importlib.import_module("deployments.ray_internals")
    internals.keep_pages_with_the_service()
    internals.end_silent_connections()
    internals.copy_request_bodies()
    internals.use_api_errors()
    internals.use_own_protocol()


if "ray.serve" not in sys.modules:
    gc.disable()  # imports create hardly any garbage
    try:
        _import_serve()
    finally:
        gc.freeze()
        gc.enable()
