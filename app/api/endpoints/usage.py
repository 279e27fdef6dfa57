"""GET /admin/usage: the usage of keys by model, request class and day, as JSON or CSV."""

from __future__ import annotations

import asyncio
import csv
import io
import time
from datetime import date

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.endpoints.admin import Collect
from app.api.http.operations import TEXT, Operation, RouteGroup
from app.errors import InvalidRequest
from app.json_pieces import Json
from app.usage import Owner, UsageQuery, Used, grouped
from app.usage.records import UsageRows, day_of, month_of

# The fields of `UsedFor`, by their names in the API.
_GROUPS = {"key": "key", "model": "model", "class": "request_class", "day": "day"}
_CSV = "text/csv"
_DAY: Json = {"schema": TEXT | {"format": "date"}}
_QUERY: Json = {
    "from": _DAY | {"description": "the first day in UTC, such as 2026-11-01; default: the first of this month"},
    "to": _DAY | {"description": "the last day in UTC, included; default: today"},
    "group_by": {
        "schema": TEXT,
        "description": "one or more of key, model, class and day, separated by commas; default: key",
    },
    "format": {"schema": {"enum": ["json", "csv"]}},
}


class UsageRoutes(RouteGroup):
    def __init__(self, owner: Owner | None, collect: Collect) -> None:
        """`owner` stores the ledger. Without an owner, the answer sums the counts of all processes."""
        self._owner = owner
        self._collect = collect

    @Operation("get", "/admin/usage", "The usage of keys", "AdminUsage", ("400", "503"), media=(_CSV,), query=_QUERY)
    async def usage(self, request: Request) -> Response:
        """Return the usage, summed by the `group_by` fields. Requests that ended in the last second may be missing."""
        query, is_csv = _asked(request)
        processes: Json | None = None
        if self._owner is not None:
            rows = await self._owner.usage(query)
        else:
            answers = await self._collect()
            processes = {"answered": len(answers.reports), "missing": answers.num_missing}
            rows = grouped((used for report in answers.reports for used in report.used.items()), query)
        if len(rows) > query.max_rows:
            raise InvalidRequest(
                f"the result has more than {query.max_rows:,} rows; request fewer days, or fewer fields in group_by",
                param="group_by",
            )
        about: Json = {"kept": self._owner is not None, "processes": processes}
        # Writing thousands of rows would block the event loop.
        return await asyncio.to_thread(_csv if is_csv else _json, query, rows, about)


def _asked(request: Request) -> tuple[UsageQuery, bool]:
    """Return the query, and whether the answer is CSV. Raises InvalidRequest."""
    given, today = request.query_params, day_of(time.time())
    first, last = _day(given.get("from", f"{month_of(today)}-01"), "from"), _day(given.get("to", today), "to")
    if first > last:
        raise InvalidRequest(f"`from` is {first}, which is after `to`, {last}; send an earlier `from`", param="from")
    names = given.get("group_by", "key").split(",")
    unknown = [name for name in names if name not in _GROUPS]
    if unknown:
        raise InvalidRequest(
            f"group_by contains {unknown[0][:40]!r}; send one or more of {', '.join(_GROUPS)}, separated by commas",
            param="group_by",
        )
    form = given.get("format", "json")
    if form not in ("json", "csv"):
        raise InvalidRequest(f"`format` is {form[:40]!r}; it must be json or csv", param="format")
    group_by = tuple(field for name, field in _GROUPS.items() if name in names)
    return UsageQuery(first_day=first, last_day=last, group_by=group_by), form == "csv"


def _day(text: str, param: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise InvalidRequest(f"`{param}` is {text[:40]!r}; send a day such as 2026-11-01", param=param) from None


def _sums(used: Used) -> Json:
    return {
        "requests": used.num_requests,
        "prompt_tokens": used.num_prompt_tokens,
        "cached_tokens": used.num_cached_tokens,
        "output_tokens": used.num_output_tokens,
        "cost": round(used.cost, 6),
    }


def _entries(query: UsageQuery, rows: UsageRows) -> tuple[list[str], list[Json]]:
    """Return the names of the group fields, and the rows as objects."""
    names = [name for name, field in _GROUPS.items() if field in query.group_by]
    return names, [dict(zip(names, group, strict=True)) | _sums(used) for group, used in rows]


def _json(query: UsageQuery, rows: UsageRows, about: Json) -> Response:
    names, entries = _entries(query, rows)
    asked = {"from": query.first_day, "to": query.last_day, "group_by": names}
    return JSONResponse({"object": "list", "data": entries, **asked, **about})


def _csv(query: UsageQuery, rows: UsageRows, _: Json) -> Response:
    names, entries = _entries(query, rows)
    written = io.StringIO()
    writer = csv.DictWriter(written, [*names, *_sums(Used())], lineterminator="\n")
    writer.writeheader()
    writer.writerows(entries)
    return Response(written.getvalue(), media_type=_CSV)
