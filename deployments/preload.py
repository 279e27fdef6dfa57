"""Makes the import of Ray Serve faster. All processes of a service import this module first.

Ray Serve 2.60 imports pandas and FastAPI for features that our applications do not use, and no setting prevents it. The
two imports, and Python's garbage collector, which finds nothing meanwhile, take as long as the rest of Serve, in each
of the nine processes of a service. A process that does not import this module first only starts more slowly.
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
    """The type of a class that stands for a class of FastAPI: `isinstance` accepts FastAPI's instances."""

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
    """Return the modules that Serve finds under these names. None means that the import raises ImportError."""
    kinds = {name: _ByName(name, (), {}) for name in ("FastAPI", "APIRouter", "APIRoute", "APIWebSocketRoute")}
    return {
        "pandas": None,
        "fastapi": _module("fastapi", Request=Request, **kinds),
        "fastapi.encoders": _module("fastapi.encoders", jsonable_encoder=_encode),
        "fastapi.routing": _module("fastapi.routing", _IncludedRouter=_ByName("_IncludedRouter", (), {}), **kinds),
    }


@contextmanager
def _instead(modules: dict[str, ModuleType | None]) -> Iterator[None]:
    """Put these modules into `sys.modules` for this block, apart from packages that are already imported."""
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
    internals.answer_as_the_api()
    internals.use_own_protocol()


if "ray.serve" not in sys.modules:
    gc.disable()  # imported modules stay, so there is nothing to collect
    try:
        _import_serve()
    finally:
        gc.freeze()
        gc.enable()
