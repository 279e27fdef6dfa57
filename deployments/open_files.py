"""How many files the processes of a service may have open, and how many connections that is. No Ray here."""

from __future__ import annotations

import resource

from app.errors import InvalidSetup

MAXCONN = "RAY_SERVE_HAPROXY_MAXCONN"
_MOST_FILES = 65_536  # as Ray has it: some programs look at every number that a file could have
_OWN_FILES = 256  # of HAProxy and of an ingress, beside connections
_MOST_CONNECTIONS = 10_000
_FEW_CONNECTIONS, _LEAST_CONNECTIONS = 1_000, 100


def allow_many_files() -> int:
    """Let this process, and what it starts, open as many files as its user may; returns the number.

    A login has a soft limit of 1,024 by default and a far higher hard one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def max_connections(max_files: int) -> int:
    """Clients that HAProxy may have connected at once: it does not start where it cannot have the files for them.

    It counts five files for two of them: each has its own and one to an ingress, every fourth a pipe, which is two.
    """
    return max(0, min(_MOST_CONNECTIONS, (max_files - _OWN_FILES) * 2 // 5))


def check_connections(max_files: int, asked: str | None) -> str | None:
    """A warning where a service can have few clients.

    asked: the variable `RAY_SERVE_HAPROXY_MAXCONN`, where it is set.

    Raises:
        InvalidSetup: there are too few files for any service, or for as many clients as the variable says.
    """
    possible = max_connections(max_files)
    here = f"a process may open {max_files:,} files here, which is enough for {possible:,} connections"
    more = "allow more (`ulimit -n`, LimitNOFILE= of systemd, --ulimit nofile= of Docker)"
    if possible < _LEAST_CONNECTIONS:
        raise InvalidSetup(f"{here}; {more}")
    if asked is not None and asked.isdecimal() and int(asked) > possible:
        raise InvalidSetup(f"{MAXCONN}: got {asked}, but {here}; {more}, or set it to {possible} or less")
    return f"{here} at once; others wait. {more[0].upper()}{more[1:]}." if possible < _FEW_CONNECTIONS else None
