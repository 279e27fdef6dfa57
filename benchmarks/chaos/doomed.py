"""Runs clients in separate processes, to be killed: `python -m benchmarks.chaos.doomed HOST PORT MODEL NUMBER`.

Each client is a fork of this small process, so hundreds of clients fit on a machine. The pids are printed, one per
line. No pid is reused until this process ends, which happens at the end of its input.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.http_call import Target

_NUM_TOKENS = 1500  # enough that an answer would outlast its client
_PADDING = b" " * 20_000  # larger than a buffer of HAProxy


@dataclass(frozen=True, slots=True)
class Requests:
    """The bytes of requests on a keep-alive connection."""

    stream: bytes  # asks for a stream
    whole: bytes  # asks for an answer without streaming
    long: bytes  # as `whole`, with a body that is too large for one buffer of the proxy


def _reads(connection: socket.socket, requests: Requests) -> None:
    connection.sendall(requests.stream)
    _read_on(connection)


def _stops_reading(connection: socket.socket, requests: Requests) -> None:
    connection.sendall(requests.stream)


def _waits(connection: socket.socket, requests: Requests) -> None:
    connection.sendall(requests.whole)
    _read_on(connection)


def _waits_again(connection: socket.socket, requests: Requests) -> None:
    _is_idle(connection, requests)
    connection.sendall(requests.long)
    _read_on(connection)


def _closes_one_way(connection: socket.socket, requests: Requests) -> None:
    connection.sendall(requests.stream)
    connection.recv(1)
    connection.shutdown(socket.SHUT_WR)
    _read_on(connection)


def _asks_ahead(connection: socket.socket, requests: Requests) -> None:
    connection.sendall(requests.whole + requests.stream)
    _read_on(connection)


def _uploads(connection: socket.socket, requests: Requests) -> None:
    connection.sendall(requests.long[:-10])


def _is_idle(connection: socket.socket, _: Requests) -> None:
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    connection.recv(65536)


def _read_on(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


KINDS: dict[str, Callable[[socket.socket, Requests], None]] = {
    "reads a stream": _reads,
    "does not read its stream": _stops_reading,
    "waits for a whole answer": _waits,
    "waits for the answer to its second, long request": _waits_again,
    "has closed one way": _closes_one_way,
    "has sent its next request": _asks_ahead,
    "is uploading": _uploads,
    "is idle": _is_idle,
}


def requests_to(target: Target, model: str, seed: int) -> Requests:
    """Return the requests of one client. Each client has its own seed, so that requests differ between clients."""
    body: dict[str, Any] = {"model": model, "prompt": [5, 6, 7], "seed": seed}
    body |= {"max_tokens": _NUM_TOKENS, "ignore_eos": True}
    bodies = (body | {"stream": True}, body, json.dumps(body).encode() + _PADDING)
    return Requests(*(target.request("completions", each, {"Connection": "keep-alive"}) for each in bodies))


def _live(kind: str, target: Target, requests: Requests) -> None:
    """Run one client until the client is killed."""
    try:
        with socket.create_connection((target.host, target.port)) as connection:
            KINDS[kind](connection, requests)
            signal.pause()
    finally:
        os._exit(1)


def main() -> None:
    host, port, model, number = sys.argv[1:]
    target = Target.parse(f"http://{host}:{port}")
    for place in range(int(number)):
        pid = os.fork()
        if pid == 0:
            _live(list(KINDS)[place % len(KINDS)], target, requests_to(target, model, place))
        print(pid, flush=True)
    print("all", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
