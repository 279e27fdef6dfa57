"""A stand-in for msgspec if it is not installed: the engine's structs become frozen dataclasses.

An import of this package, also as a pytest plugin, installs the stand-in. Structs are created faster than dataclasses,
so the stage `rates` says which of them a run had.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Struct:
    """The part of `msgspec.Struct` that the engine uses."""

    def __init_subclass__(cls, **options: Any) -> None:
        dataclass(frozen=True, eq=options.get("eq", True))(cls)


def is_missing() -> bool:
    """Return whether the stand-in is in use or will be needed."""
    known = sys.modules.get("msgspec")
    return known is _module if known is not None else find_spec("msgspec") is None


_module, _structs = ModuleType("msgspec"), ModuleType("msgspec.structs")
_module.Struct = _Struct  # type: ignore[attr-defined]
_module.structs = _structs  # type: ignore[attr-defined]
_module.Meta = dict  # type: ignore[attr-defined]  # bounds, which only a decoder looks at
_structs.replace = replace  # type: ignore[attr-defined]
if is_missing():
    sys.modules |= {"msgspec": _module, "msgspec.structs": _structs}
