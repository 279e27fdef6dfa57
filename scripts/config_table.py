"""Print the configuration table of the README, made from the settings themselves: `python -m scripts.config_table`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from app.config import ApplicationConfig


def rows(branch: type[BaseModel], path: str = "") -> Iterator[tuple[str, str, str]]:
    """(where, default, help) of every setting below a branch of the tree."""
    for name, field in branch.model_fields.items():
        inner = _branch_of(field)
        if inner is None:
            yield f"{path}{name}", _default(field), field.description or ""
        else:
            yield from rows(inner, f"{path}{name}{'[]' if get_origin(field.annotation) is tuple else ''}.")


def table() -> str:
    lines = ["| Setting | Default | What it is |", "|---|---|---|"]
    lines += [f"| `{where}` | {default} | {text} |" for where, default, text in rows(ApplicationConfig)]
    return "\n".join(lines)


def _branch_of(field: FieldInfo) -> type[BaseModel] | None:
    candidates: tuple[Any, ...] = (field.annotation, *get_args(field.annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _default(field: FieldInfo) -> str:
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    others = [f"`{choice}`" for choice in choices if choice != field.default]
    default = (
        "–"
        if field.default is None
        else f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"
    )
    return f"{default} (or {', '.join(others)})" if others else default


if __name__ == "__main__":
    print(table())
