"""Print the configuration table of the README, made from the settings themselves: `python -m scripts.config_table`."""

from __future__ import annotations

from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from app.config import ApplicationConfig, leaves


def table() -> str:
    lines = ["| Setting | Default | What it is |", "|---|---|---|"]
    lines += [
        f"| `{path}` | {_default(field)} | {field.description or ''} |" for path, field in leaves(ApplicationConfig)
    ]
    return "\n".join(lines)


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
