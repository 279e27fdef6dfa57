"""Raises the limit of open files, and checks that it allows enough connections. No Ray here."""

from __future__ import annotations

import resource

from app.errors import InvalidSetup

MAXCONN = "RAY_SERVE_HAPROXY_MAXCONN"
_MOST_FILES = 65_536  # Ray's own limit; some programs loop over all possible descriptors
_OWN_FILES = 256  # files that HAProxy and an ingress need apart from connections
_MOST_CONNECTIONS = 10_000
_FEW_CONNECTIONS, _LEAST_CONNECTIONS = 1_000, 100


def allow_many_files() -> int:
    """Raise the soft limit of open files for this process and its children. Returns the limit in force.

    The new limit is the hard limit, but at most `_MOST_FILES`. The default soft limit of a login is only 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def max_connections(max_files: int) -> int:
    """Return the largest `maxconn` with which HAProxy starts if it may open `max_files` files.

    HAProxy reserves 2.5 files per connection: one to the client, one to an ingress, and a pipe (two files) for every
    fourth connection.
    """
    return max(0, min(_MOST_CONNECTIONS, (max_files - _OWN_FILES) * 2 // 5))


def check_connections(max_files: int, asked: str | None) -> str | None:
    """Return a warning if only few clients can connect at once, or None.

    asked: the value of the environment variable `RAY_SERVE_HAPROXY_MAXCONN`, or None if it is not set.

    Raises:
        InvalidSetup: the files do not suffice for any service, or for the connections that the variable asks for.
    """
    possible = max_connections(max_files)
    here = f"a process may open {max_files:,} files here, which is enough for {possible:,} connections"
    more = "allow more (`ulimit -n`, LimitNOFILE= of systemd, --ulimit nofile= of Docker)"
    if possible < _LEAST_CONNECTIONS:
        raise InvalidSetup(f"{here}; {more}")
    if asked is not None and asked.isdecimal() and int(asked) > possible:
        raise InvalidSetup(f"{MAXCONN}: got {asked}, but {here}; {more}, or set it to {possible} or less")
    return f"{here} at once; others wait. {more[0].upper()}{more[1:]}." if possible < _FEW_CONNECTIONS else None
