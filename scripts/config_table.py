"""Print the configuration table of the README, made from the settings themselves: `python -m scripts.config_table`."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from app.config import ApplicationConfig, branches_of, leaves, names_of


def table() -> str:
    lines = ["| Setting | Default | What it is |", "|---|---|---|"]
    lines += [
        f"| `{path}` | {_default(field)} | {field.description or ''} |" for path, field in leaves(ApplicationConfig)
    ]
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if len(branches_of(field)) > 1:
        choices = names_of(field)
    default = "" if field.is_required() else _text(field.default)
    others = [f"`{choice}`" for choice in choices if choice != default]
    shown = "required" if field.is_required() else f"`{default}`" if default and field.default is not None else "–"
    return f"{shown} (or {', '.join(others)})" if others else shown


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, BaseModel):
        return str(getattr(value, "name", value))
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    print(table())
