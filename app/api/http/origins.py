"""Decides which web pages may use the service, by the Host and Origin headers and by CORS.

A browser lets every page send requests to every address, including the addresses of this machine. A service without
keys would answer all of these requests. CORS prevents a page from reading a response, but not from sending a request.
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
    """Checks the Host and Origin of requests, answers preflights and adds CORS headers. Ignores API keys."""

    def __init__(self, allowed_origins: Collection[str], *, loopback_only: bool) -> None:
        """With `loopback_only`, refuse every Host that is not a loopback name.

        Services without keys need this check, because a page may let its own name resolve to this machine (DNS
        rebinding). The Origin of the page's requests then equals their Host.
        """
        self._allowed = frozenset(allowed_origins)
        self._loopback_only = loopback_only

    def preflight(self, method: str, headers: Mapping[str, str]) -> Response | None:
        """Return the response to a CORS preflight of an allowed page, or None for any other request.

        Raises NotPermitted if the Host or the Origin may not use the service.

        Requests without an Origin are accepted, because they are not from a page, or the page cannot read the response.
        Requests whose Origin equals their Host are accepted, because they are from the service's own address.
        Forwarding headers are ignored, because any client can send them.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._loopback_only and not _is_loopback(host):
            raise NotPermitted(
                f"the Host header is {host[:100]!r}; without API keys, this service accepts only localhost, "
                f"127.0.0.1 and [::1]; use one of them, or set up API keys",
                code="host_not_allowed",
            )
        if origin is not None and not self._allows(origin) and not _is_same(origin, host):
            raise NotPermitted(
                f"web pages from {origin[:100]!r} may not use this service; to allow them, add this origin to the "
                f"setting api.allowed_origins",
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
        """Return the CORS headers that let an allowed page read the response to this request."""
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
    """Return whether an Origin and a Host have the same address. Ignores schemes, because a proxy may terminate TLS."""
    scheme, _, address = origin.partition("://")
    return bool(scheme and address) and address.lower() == host.lower()


@lru_cache(maxsize=64)
def _is_loopback(host: str) -> bool:
    """Return whether a Host header names this machine. A missing Host is accepted, because every browser sends one."""
    match = _HOST.fullmatch(host)
    name = match[1].strip("[]").lower().removesuffix(".") if match else host
    if name in ("", "localhost", "127.0.0.1", "::1") or name.endswith(".localhost"):
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified  # 0.0.0.0 reaches this machine, and is no page's host name
