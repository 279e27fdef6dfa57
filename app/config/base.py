"""The base class, types and validators that all branches of the settings use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, StringConstraints

GIB = 1024**3


Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$")]


class Settings(BaseModel):
    """Base class of all branches. Branches are frozen, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def with_setting(self, path: str, value: Any) -> Self:
        """Return a copy with a new value for the setting at this dotted path. The value is not validated."""
        name, _, below = path.partition(".")
        before = getattr(self, name)
        return self.model_copy(update={name: before.with_setting(below, value) if below else value})


def repeated(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once, sorted."""
    return sorted(name for name, number in Counter(names).items() if number > 1)


def chosen(value: Any, kinds: Any, *, key: str = "name") -> Any:
    """Expand a bare name to a kind with default parameters. Raises ValueError for an unknown kind or parameter."""
    given = {key: value} if isinstance(value, str) else value
    if not isinstance(given, dict):
        return value
    named: dict[str, type[BaseModel]] = {kind.model_fields[key].default: kind for kind in get_args(kinds)}
    kind = named.get(str(given.get(key)))
    if kind is None:
        got = f"got {given[key]!r}" if key in given else f"got {given!r} without a {key}"
        raise ValueError(f"{got}; must be one of {', '.join(named)}")
    unknown = [name for name in given if name not in kind.model_fields]
    if unknown:
        parameters = ", ".join(name for name in kind.model_fields if name != key) or "no parameters"
        raise ValueError(f"{given[key]} has no parameter {unknown[0]!r}; it has {parameters}")
    return given
