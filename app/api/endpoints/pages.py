"""Which page of a list a query asks for."""

from __future__ import annotations

from collections.abc import Mapping

from app.errors import InvalidRequest
from app.jobs import PageOf


def page_of(owner: str, query: Mapping[str, str], *, max_limit: int, default_limit: int) -> PageOf:
    """From `after`, `limit`, `order` and `purpose`. Raises InvalidRequest naming the one at fault."""
    limit, order = query.get("limit", str(default_limit)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and 1 <= int(limit) <= max_limit):
        raise InvalidRequest(f"limit should be 1 to {max_limit:,}; got {limit[:40]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order should be 'asc' or 'desc'; got {order[:40]!r}", param="order")
    return PageOf(
        owner=owner,
        limit=int(limit),
        after=query.get("after"),
        is_ascending=order == "asc",
        purpose=query.get("purpose"),
    )
