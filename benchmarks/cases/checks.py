"""The checks of an answer. A case has its checks as data.

`status`            the status is one of these numbers
`has`               values by their paths, as `choices.0.text`; `*` stands for every element
`matches`           regular expressions that the values match, by the paths of the values
`begins`            prefixes of texts, by the paths of the texts
`at_most`           the largest right numbers, by the paths of the numbers
`absent`            names that the object does not have
`header`            texts that headers contain, by the names of the headers
`no_header`         headers that the answer does not have
`lines`             every line of a stream, as Python splits lines, is a whole field of an event
`same_as`           the value at `here` equals the value at `there` in the answer to another `request`
`one_of`            several objects of checks; the checks of one object must hold

A status of 5xx is a fault in every case. So is a body that is declared as JSON and is not JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.cases.exchange import Got

Send = Callable[[Mapping[str, Any]], Got]
Expected = Mapping[str, Any]


def problems(expected: Expected, got: Got, send: Send) -> list[str]:
    """Return the faults of an answer in words; none if it is right. `send` sends the other request of `same_as`."""
    if not 200 <= got.status < 500:
        return [f"status {got.status}"]
    if "json" in got.headers.get("content-type", "") and (broken := _broken(got)):
        return [broken]
    return [problem for name, wanted in expected.items() for problem in CHECKS[name](wanted, got, send)]


def _broken(got: Got) -> str:
    try:
        json.dumps(got.content)
    except ValueError as error:
        return f"the body is no JSON: {error}"
    return ""


def _status(wanted: Sequence[int], got: Got, _: Send) -> Iterator[str]:
    if got.status not in wanted:
        yield f"status {got.status}, not {' or '.join(map(str, wanted))}"


def _has(wanted: Expected, got: Got, _: Send) -> Iterator[str]:
    yield from _compared(wanted, got, "is", lambda value, right: value == right)


def _matches(wanted: Expected, got: Got, _: Send) -> Iterator[str]:
    yield from _compared(wanted, got, "matches", lambda value, right: re.fullmatch(right, str(value)) is not None)


def _begins(wanted: Expected, got: Got, _: Send) -> Iterator[str]:
    yield from _compared(wanted, got, "begins with", lambda value, right: str(value).startswith(right))


def _at_most(wanted: Expected, got: Got, _: Send) -> Iterator[str]:
    yield from _compared(wanted, got, "is at most", lambda value, right: isinstance(value, int) and value <= right)


def _compared(wanted: Expected, got: Got, word: str, is_right: Callable[[Any, Any], bool]) -> Iterator[str]:
    for path, right in wanted.items():
        values = list(_at(path, got))
        if not values or not all(is_right(value, right) for value in values):
            there = ", ".join(map(repr, values[:3])) or "nothing"
            yield f"{path}: {there}; right {word} {right!r}"


def _absent(wanted: Sequence[str], got: Got, _: Send) -> Iterator[str]:
    for name in wanted:
        if list(_at(name, got)):
            yield f"{name} is there"


def _header(wanted: Mapping[str, str], got: Got, _: Send) -> Iterator[str]:
    for name, part in wanted.items():
        if part not in got.headers.get(name, ""):
            yield f"the header {name} is {got.headers.get(name)!r} and does not name {part!r}"


def _no_header(wanted: Sequence[str], got: Got, _: Send) -> Iterator[str]:
    yield from (f"the header {name} is {got.headers[name]!r}" for name in wanted if name in got.headers)


def _lines(_: bool, got: Got, __: Send) -> Iterator[str]:
    for line in got.text.splitlines():
        name, _found, content = line.partition(":")
        is_whole = not line or (name in ("", "event", "id", "retry", "data") and ":" in line)
        if is_whole and name == "data" and content.strip() != "[DONE]":
            is_whole = _is_json(content)
        if not is_whole:
            yield f"a reader of lines sees {line[:80]!r}"
            return


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _same_as(wanted: Expected, got: Got, send: Send) -> Iterator[str]:
    here, there = list(_at(wanted["here"], got)), list(_at(wanted["there"], send(wanted["request"])))
    if not here or here != there:
        yield f"{wanted['here']} is {here}, and {wanted['there']} of {wanted['request']['path']} is {there}"


def _one_of(wanted: Sequence[Expected], got: Got, send: Send) -> Iterator[str]:
    found = [problems(each, got, send) for each in wanted]
    if all(found):
        yield "; and ".join(", ".join(each) for each in found)


CHECKS: Mapping[str, Callable[[Any, Got, Send], Iterator[str]]] = {
    "status": _status,
    "has": _has,
    "matches": _matches,
    "begins": _begins,
    "at_most": _at_most,
    "absent": _absent,
    "header": _header,
    "no_header": _no_header,
    "lines": _lines,
    "same_as": _same_as,
    "one_of": _one_of,
}


def _at(path: str, got: Got) -> Iterator[Any]:
    """Yield the values at a path in an answer; none if the path does not exist."""
    try:
        values = [got.content]
    except ValueError:
        return
    for name in path.split("."):
        values = [inner for value in values for inner in _inside(value, name)]
    yield from values


def _inside(value: Any, name: str) -> Iterator[Any]:
    if isinstance(value, list):
        yield from value if name == "*" else value[int(name) : int(name) + 1] if name.isdigit() else ()
    elif isinstance(value, dict) and name in value:
        yield value[name]
