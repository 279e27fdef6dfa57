"""benchmarks.harness.processes"""

from __future__ import annotations

import multiprocessing
import os
import socket
from multiprocessing.connection import Connection

from benchmarks.harness.processes import clients_of, connections


def _connect(port: int, told: Connection) -> None:
    with socket.create_connection(("127.0.0.1", port)):
        told.send("connected")
        told.recv()


def test_a_connection_is_that_of_the_process_that_listens_and_the_one_that_has_connected() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = context.Process(target=_connect, args=(listening.getsockname()[1], there))
        client.start()
        assert here.recv() == "connected"
        pids = [os.getpid(), client.pid or 0]
        assert connections(pids) == {(os.getpid(), client.pid)}
        assert connections(pids[1:]) == set(), "the other end is not among them"
        here.send("end")
        client.join()
    assert connections(pids) == set()


def test_connections_that_clients_have_closed_are_counted_until_they_are_closed_here_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, here = listening.getsockname()[1], [os.getpid()]
        with (
            socket.create_connection(("127.0.0.1", port)) as staying,
            socket.create_connection(("127.0.0.1", port)) as client,
        ):
            taken = [listening.accept()[0] for _ in range(2)]
            assert clients_of(here, port) == (2, 0)
            client.shutdown(socket.SHUT_WR)
            assert clients_of(here, port) == (2, 1)
            staying.close()
            assert clients_of([], port) == (0, 0), "they are those of other processes"
            for each in taken:
                each.close()
        assert clients_of(here, port) == (0, 0)
