"""Write docs/reference/configuration.md from the settings themselves: `python -m scripts.configuration_page`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from app.config import (
    PRESETS,
    ApplicationConfig,
    KeyConfig,
    SchedulerConfig,
    branches_of,
    choice_of,
    names_of,
    parameters_of,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "configuration.md"

_HEAD = """\
# Configuration

<!-- Written by `python -m scripts.configuration_page` from app/config/. Change the settings there, not this page. -->

The `args` of the application in the Serve config file (`deployments/serve.yaml`). A wrong value or an unknown name
stops the start, with its path and the fix. `[]` marks a list. One file with most of what an operator sets, to copy:
[docs/examples/complete.yaml](../examples/complete.yaml), with [its keys](../examples/keys.yaml).

A strategy or a policy ([list](../guide/deployment.md#strategies-and-policies)) is a name (`strategy: static`),
or a name with its parameters (`strategy: {name: static, max_wait_ms: 20}`). A pipeline's step
([kinds](../guide/pipelines.md#pipelines)) has a `kind` instead.
"""
_WORDS = {int: "integer", float: "number", bool: "true or false", dict: "mapping", str: ""}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page() -> str:
    """Return the text of the whole page."""
    keys = "## The file that `api.keys_file` names\n\nA list of API keys.\n"
    return "\n".join([_HEAD, *_section(ApplicationConfig, ""), keys, *_table(KeyConfig.model_fields.items())])


def _section(branch: type[BaseModel], path: str) -> Iterator[str]:
    """Yield a branch's own settings as a table, then the choices by name, then each branch below this branch."""
    fields = branch.model_fields.items()
    inner = {name: kinds for name, field in fields if len(kinds := branches_of(field)) > 0}
    own = [(name, field) for name, field in fields if len(inner.get(name, ())) != 1 or field.default is None]
    if path and own:
        yield f"## `{path}`\n\n{branch.__doc__}\n"
    if own:
        yield from _table(own)
    if branch is SchedulerConfig:
        yield from _presets()
    for name, kinds in inner.items():
        if len(kinds) > 1 and any(map(parameters_of, kinds)):
            yield from _choice(_marked(name, branch.model_fields[name]), kinds)
    for name, kinds in inner.items():
        below = _marked(f"{path}.{name}" if path else name, branch.model_fields[name])
        if len(kinds) == 1:
            yield from _section(kinds[0], below)
            continue
        for parameter, field in ((each, field) for kind in kinds for each, field in parameters_of(kind).items()):
            for inner_branch in branches_of(field):
                yield from _section(inner_branch, _marked(f"{below}.{parameter}", field))


def _marked(path: str, field: FieldInfo) -> str:
    """Return the path, with `[]` after it if the field is a list of branches."""
    return f"{path}[]" if get_origin(field.annotation) is tuple else path


def _presets() -> Iterator[str]:
    """Yield a table with the values that each preset sets."""
    names = list(dict.fromkeys(name for values in PRESETS.values() for name in values))
    yield f"| `preset` | {' | '.join(f'`{name}`' for name in names)} |\n|{'---|' * (len(names) + 1)}"
    for preset in PRESETS:
        config = SchedulerConfig.model_validate({"preset": preset})
        yield f"| `{preset}` | {' | '.join(f'`{getattr(config, name)}`' for name in names)} |"
    yield ""


def _choice(name: str, kinds: Iterable[type[BaseModel]]) -> Iterator[str]:
    """Yield a table of the choices by name, with the parameters of each choice."""
    yield f"| `{name}` | Parameter | Default; others | Meaning |\n|---|---|---|---|"
    seen: set[str] = set()  # a row that several choices share is written once
    for kind in kinds:
        rows = {
            parameter: f"`{parameter}` | {_default_and_values(field)} | {field.description}"
            for parameter, field in parameters_of(kind).items()
        }
        again = ", ".join(f"`{parameter}`" for parameter, row in rows.items() if row in seen)
        cells = [*([f"{again}: as above | |"] if again else []), *(row for row in rows.values() if row not in seen)]
        for number, cell in enumerate(cells or ["| |"]):
            yield f"{'| |' if number else f'| `{choice_of(kind)}` |'} {cell} |"
        seen.update(rows.values())
    yield ""


def _table(fields: Iterable[tuple[str, FieldInfo]]) -> Iterator[str]:
    yield "| Setting | Default; others | Meaning |\n|---|---|---|"
    for name, field in fields:
        yield f"| `{name}` | {_default_and_values(field)} | {field.description or ''} |"
    yield ""


def _default_and_values(field: FieldInfo) -> str:
    """Return the default and the values in one cell. A default shows the kind of value and is one of the choices."""
    default, values = _default(field), _values(field)
    if isinstance(field.default, (bool, int, float, str)):
        kind = next((word for word in _WORDS.values() if values.startswith(word)), "")
        values = values.removeprefix(kind).lstrip(", ")
    values = ", ".join(each for each in values.split(", ") if each != default)
    return f"{default}; {values}" if values else default


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.default
    if default is None or default in ((), {}):
        return "–"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, BaseModel):
        return f"`{getattr(default, 'name', default)}`"
    return f"`{', '.join(map(str, default)) if isinstance(default, tuple) else default}`"


def _values(field: FieldInfo) -> str:
    """Return the valid values of a setting: the choices, the range, or the kind of value."""
    if branches_of(field):
        return ", ".join(f"`{name}`" for name in names_of(field)) or "see below"
    annotation, metadata = _plain(field.annotation, list(field.metadata))
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "list"
    return _values_of(annotation, metadata)


def _values_of(annotation: Any, metadata: Iterable[Any]) -> str:
    limits = {sign: getattr(each, sign) for each in metadata for sign in _SIGNS if hasattr(each, sign)}
    kind = _WORDS[get_origin(annotation) or annotation]
    if limits.keys() == {"ge", "le"}:
        return f"{_number(limits['ge'])} to {_number(limits['le'])}"
    return ", ".join(f"{_SIGNS[sign]} {_number(limit)}" for sign, limit in limits.items()) or kind


def _number(limit: float) -> str:
    return f"{limit:,}"


def _plain(annotation: Any, metadata: list[Any]) -> tuple[Any, list[Any]]:
    """Return the annotation without None and without `Annotated`, and the metadata with the limits of `Annotated`."""
    if get_origin(annotation) in (Union, UnionType):
        [annotation] = [each for each in get_args(annotation) if each is not NoneType]
        return _plain(annotation, metadata)
    if get_origin(annotation) is Annotated:
        inner, *found = get_args(annotation)
        limits = [limit for each in found for limit in getattr(each, "metadata", [each])]
        return _plain(inner, metadata + limits)
    return annotation, metadata


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
