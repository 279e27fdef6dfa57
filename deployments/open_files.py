"""Raises the limit on open files, and checks that it allows enough connections. Does not import Ray."""

from __future__ import annotations

import resource

from app.errors import InvalidSetup

MAXCONN = "RAY_SERVE_HAPROXY_MAXCONN"
_MOST_FILES = 65_536  # Ray's own limit; some programs loop over all possible descriptors
_OWN_FILES = 256  # files that HAProxy and an ingress need in addition to connections
_MOST_CONNECTIONS = 10_000
_FEW_CONNECTIONS, _LEAST_CONNECTIONS = 1_000, 100


def allow_many_files() -> int:
    """Raise the soft limit on open files for this process and its children. Returns the resulting limit.

    The new limit is the hard limit, up to `_MOST_FILES`. The usual soft limit is only 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def max_connections(max_files: int) -> int:
    """Return the largest `maxconn` that HAProxy accepts if it may open `max_files` files.

    HAProxy reserves 2.5 files per connection: one for the client, one for the ingress, and a pipe (two files) for every
    fourth connection.
    """
    return max(0, min(_MOST_CONNECTIONS, (max_files - _OWN_FILES) * 2 // 5))


def check_connections(max_files: int, asked: str | None) -> str | None:
    """Return a warning if only a few clients can connect concurrently, or None.

    `asked` is the value of the environment variable `RAY_SERVE_HAPROXY_MAXCONN`, or None if it is not set.

    Raises InvalidSetup if there are too few files for a useful service, or for the connections that `asked` requests.
    """
    possible = max_connections(max_files)
    here = f"a process may open {max_files:,} files here, enough for {possible:,} connections"
    more = "raise the limit (`ulimit -n`, LimitNOFILE= of systemd, --ulimit nofile= of Docker)"
    if possible < _LEAST_CONNECTIONS:
        raise InvalidSetup(f"{here}; {more}")
    if asked is not None and asked.isdecimal() and int(asked) > possible:
        raise InvalidSetup(f"{MAXCONN}: got {asked}, but {here}; {more}, or set it to {possible} or less")
    return f"{here}; further clients wait. {more[0].upper()}{more[1:]}." if possible < _FEW_CONNECTIONS else None
