"""A stand-in for msgspec where it is not installed: the engine's structs become frozen dataclasses.

It is put in place by the import of this package, also as a plugin of pytest. Structs are made faster than dataclasses:
the stage `rates` says which of them a run had.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Struct:
    """As much of `msgspec.Struct` as the engine uses."""

    def __init_subclass__(cls, **options: Any) -> None:
        dataclass(frozen=True, eq=options.get("eq", True))(cls)


def is_missing() -> bool:
    """Whether the stand-in is in use, or has to be."""
    known = sys.modules.get("msgspec")
    return known is _module if known is not None else find_spec("msgspec") is None


_module, _structs = ModuleType("msgspec"), ModuleType("msgspec.structs")
_module.Struct = _Struct  # type: ignore[attr-defined]
_module.structs = _structs  # type: ignore[attr-defined]
_module.Meta = dict  # type: ignore[attr-defined]  # bounds, which only a decoder looks at
_structs.replace = replace  # type: ignore[attr-defined]
if is_missing():
    sys.modules |= {"msgspec": _module, "msgspec.structs": _structs}
