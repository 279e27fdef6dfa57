"""The live page at /, served from memory. Its static files contain no data; the page loads data from guarded routes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from app.api.http.operations import Operation, RouteGroup
from app.errors import NotFound

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# The page loads nothing from other origins, cannot be framed, and runs no inline code that a displayed name contains.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PageRoutes(RouteGroup):
    """The routes `/` and `/page/NAME`, one for each file of the page. The routes need no key."""

    def __init__(self) -> None:
        folder = Path(__file__).parent.parent / "page"
        self._files = {path.name: _File(path) for path in folder.iterdir() if path.suffix in _TYPES}

    @Operation("get", "/", "The live page", media=("text/html",))
    async def index(self, request: Request) -> Response:
        return self._files["index.html"].response(request)

    @Operation("get", "/page/{name}", "A file of the live page", None, ("404",), media=tuple(_TYPES.values()))
    async def file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:
            raise NotFound(f"the page has no file {name[:100]!r}; the page is at /")
        return self._files[name].response(request)


class _File:
    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._media_type = _TYPES[path.suffix]
        self._headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'}

    def response(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["ETag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers, media_type=self._media_type)
