"""Which web pages may use the service: the headers Host and Origin, and CORS.

A browser sends the requests of every page that it shows to every address, those of this machine included. A service
without keys would answer them all; CORS alone keeps a page from reading an answer, not from causing one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from ipaddress import ip_address

from starlette.responses import Response

from app.errors import NotPermitted

ANY_ORIGIN = "*"
_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(:\d*)?")


class OriginPolicy:
    """Checks a request's Host and Origin, answers preflights, gives the CORS headers of answers. Knows no keys."""

    def __init__(self, allowed_origins: Collection[str], *, loopback_only: bool) -> None:
        """`loopback_only`: a Host with another name than loopback's is refused.

        That is for services which ask for no key: a page may have its own name point to this machine (DNS rebinding),
        and its requests then have no foreign Origin.
        """
        self._allowed = frozenset(allowed_origins)
        self._loopback_only = loopback_only

    def preflight(self, method: str, headers: Mapping[str, str]) -> Response | None:
        """The answer to a browser's question whether a page may send a request; None if the request is no such.

        Raises NotPermitted for a Host or an Origin that may not use the service.

        A request without Origin is no page's, or reads something that the page will not see. With the Host itself as
        its Origin, it is of a page on the service's own address. Forwarding headers are not looked at: any client can
        send them.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._loopback_only and not _is_loopback(host):
            raise NotPermitted(
                f"the Host header is {host[:100]!r}; without API keys this service answers only to localhost, "
                f"127.0.0.1 and [::1]: use one of them, or give the service API keys",
                code="host_not_allowed",
            )
        if origin is not None and not self._allows(origin) and not _is_same(origin, host):
            raise NotPermitted(
                f"web pages of {origin[:100]!r} may not use this service; the setting api.allowed_origins names those "
                f"that may",
                code="origin_not_allowed",
            )
        is_preflight = method == "OPTIONS" and "access-control-request-method" in headers
        if not is_preflight or not self._allows(origin or ""):
            return None
        preflight_max_age_s = 600
        methods = "GET, POST, DELETE"
        allowed = {
            "access-control-allow-methods": methods,
            "access-control-allow-headers": headers.get("access-control-request-headers", ""),
            "access-control-max-age": str(preflight_max_age_s),
        }
        return Response(status_code=204, headers=allowed)

    def response_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """What every answer to this request has: for pages that may read it, that they may."""
        if not self._allowed:
            return {}
        origin = headers.get("origin")
        if origin is None or not self._allows(origin):
            return {"vary": "Origin"}
        allowed = ANY_ORIGIN if ANY_ORIGIN in self._allowed else origin
        return {"vary": "Origin", "access-control-allow-origin": allowed, "access-control-expose-headers": "*"}

    def _allows(self, origin: str) -> bool:
        return origin in self._allowed or ANY_ORIGIN in self._allowed


def _is_same(origin: str, host: str) -> bool:
    """Whether an Origin has the address of a Host header, whatever its scheme: a proxy may have taken TLS off."""
    scheme, _, address = origin.partition("://")
    return bool(scheme and address) and address.lower() == host.lower()


@lru_cache(maxsize=64)
def _is_loopback(host: str) -> bool:
    """Whether the name in a Host header can only be this machine's. Without the header: no browser leaves it out."""
    match = _HOST.fullmatch(host)
    name = match[1].strip("[]").lower().removesuffix(".") if match else host
    if name in ("", "localhost", "127.0.0.1", "::1") or name.endswith(".localhost"):
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified  # 0.0.0.0 reaches this machine, and no page has it as a name
