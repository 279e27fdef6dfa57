"""The number of files that a service's processes may open, and of connections that these allow. No Ray here."""

from __future__ import annotations

import resource

from app.errors import InvalidSetup

MAXCONN = "RAY_SERVE_HAPROXY_MAXCONN"
_MOST_FILES = 65_536  # Ray's limit; some programs iterate over all possible file numbers
_OWN_FILES = 256  # files that HAProxy and an ingress need besides connections
_MOST_CONNECTIONS = 10_000
_FEW_CONNECTIONS, _LEAST_CONNECTIONS = 1_000, 100


def allow_many_files() -> int:
    """Raise the limit of open files of this process and its children to the hard limit; return the new limit.

    A login has a soft limit of 1,024 by default and a far higher hard limit. The new limit is at most `_MOST_FILES`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def max_connections(max_files: int) -> int:
    """Return the largest number of connections for HAProxy, which does not start without enough files for them.

    HAProxy counts 2.5 files for a connection: one to the client, one to an ingress, and a pipe (two) for every fourth.
    """
    return max(0, min(_MOST_CONNECTIONS, (max_files - _OWN_FILES) * 2 // 5))


def check_connections(max_files: int, asked: str | None) -> str | None:
    """Return a warning if a service can have only few clients, else None.

    asked: the value of the variable `RAY_SERVE_HAPROXY_MAXCONN`, or None if it is not set.

    Raises:
        InvalidSetup: there are too few files for any service, or for the number of clients in the variable.
    """
    possible = max_connections(max_files)
    here = f"a process may open {max_files:,} files here, which is enough for {possible:,} connections"
    more = "allow more (`ulimit -n`, LimitNOFILE= of systemd, --ulimit nofile= of Docker)"
    if possible < _LEAST_CONNECTIONS:
        raise InvalidSetup(f"{here}; {more}")
    if asked is not None and asked.isdecimal() and int(asked) > possible:
        raise InvalidSetup(f"{MAXCONN}: got {asked}, but {here}; {more}, or set it to {possible} or less")
    return f"{here} at once; others wait. {more[0].upper()}{more[1:]}." if possible < _FEW_CONNECTIONS else None
