"""Which alerts fire when their cause is made in the real service, how soon, and whether they resolve: a JSON line each.

    python -m benchmarks.chaos.alerts kill stop overload --factor 20 --json alerts.jsonl

Debian's Prometheus scrapes the service every three seconds, with our rules. Their windows and `for` are shorter by the
factor, their bounds are as they are. Eight clients ask for streams meanwhile. Without CAUSE: all, one after the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.chaos.stage import LENGTHS, Stage, application, stage
from benchmarks.chaos.traffic import MODEL_NAME, Traffic, alike, mixed
from benchmarks.harness.command import (
    BenchmarkError,
    command_parser,
    did_you_mean,
    positive,
    refused,
    tell,
    where,
    write_json,
)
from benchmarks.harness.prometheus import Prometheus, prometheus

_EVERY_S = 3  # a scrape that misses a process takes two seconds
_NUM_CLIENTS = 8
_CROWD = 100  # more clients than slots and queues have places
_TOTAL_BYTES = 8 * 2**20  # of files
_WINDOW_S = 300.0  # of most rules, and what most alerts wait
_LONGEST_WINDOW_S = 3600.0

Fired = dict[str, dict[str, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What makes alerts fire."""

    text: str
    fires: frozenset[str] = frozenset()
    make: Callable[[Scene], Awaitable[None]]  # returns when the cause is over


@dataclass(frozen=True, slots=True)
class Scene:
    """A service under light traffic, and how long a cause has to last so that alerts see it."""

    running: Stage
    lasts_s: float

    async def call(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> Any:
        """The JSON of an answer to a call outside of the traffic."""
        return await asyncio.to_thread(self._call, method, path, body, kind)

    def _call(self, method: str, path: str, body: bytes | None, kind: str) -> Any:
        target = self.running.target
        url = f"http://{target.host}:{target.port}/v1/{path}"
        request = urllib.request.Request(url, body, {"content-type": kind}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise BenchmarkError(f"{method} {path}: status {error.code}: {error.read().decode()[:300]}") from error

    async def batch(self, prompts: Sequence[str], **more: Any) -> str:
        """Begin a batch; gives its id."""
        body = {"model": MODEL_NAME, "prompts": prompts, "async": True, "max_tokens": 20} | more
        begun = await self.call("POST", "batch", json.dumps(body).encode())
        return str(begun["id"])

    async def has_ended(self, batch: str) -> None:
        """Return when a batch has completed."""
        while True:
            if (await self.call("GET", f"batch/{batch}"))["status"] == "completed":
                return
            await asyncio.sleep(0.5)


async def _again_and_again(strike: Callable[[], object], scene: Scene, *, every_s: float) -> None:
    ends_at = time.monotonic() + scene.lasts_s
    while time.monotonic() < ends_at:
        strike()
        await asyncio.sleep(every_s)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it is gone already
            os.kill(pid, number)


async def _nothing(scene: Scene) -> None:
    await scene.has_ended(await scene.batch(["Hi"] * 20))
    await asyncio.sleep(2 * scene.lasts_s)


async def _kill_one(scene: Scene) -> None:
    _signal(scene.running.replicas()[:1], signal.SIGKILL)
    await scene.running.is_whole()


async def _kill_all(scene: Scene) -> None:
    await _again_and_again(lambda: _signal(scene.running.replicas(), signal.SIGKILL), scene, every_s=8.0)
    await scene.running.is_whole()


async def _kill_ingress(scene: Scene) -> None:
    await _again_and_again(lambda: _signal(scene.running.ingresses(), signal.SIGKILL), scene, every_s=1.0)
    await scene.running.is_whole()


async def _stop(pids: Sequence[int], lasts_s: float) -> None:
    _signal(pids, signal.SIGSTOP)
    try:
        await asyncio.sleep(lasts_s)
    finally:
        _signal(pids, signal.SIGCONT)


async def _stop_one(scene: Scene) -> None:
    await _stop(scene.running.replicas()[:1], scene.lasts_s / 2)
    await scene.running.is_whole()


async def _hold_ingress(scene: Scene) -> None:
    ends_at = time.monotonic() + scene.lasts_s
    while time.monotonic() < ends_at:
        await _stop(scene.running.ingresses(), 0.3)
        await asyncio.sleep(0.7)


async def _crowd(scene: Scene) -> None:
    async with Traffic(scene.running.target, alike(_CROWD, num_tokens=120), {}).flowing():
        await asyncio.sleep(scene.lasts_s)


async def _fill_disk(scene: Scene) -> None:
    data = b"x" * (_TOTAL_BYTES - 2**18)
    parts = [b'name="purpose"\r\n\r\nbatch', b'name="file"; filename="a.jsonl"\r\n\r\n' + data]
    body = b"".join(b"--part\r\ncontent-disposition: form-data; " + each + b"\r\n" for each in parts) + b"--part--\r\n"
    stored = await scene.call("POST", "files", body, "multipart/form-data; boundary=part")
    batch = await scene.batch(["Hi"] * 40, max_tokens=100, logprobs=20, ignore_eos=True)
    await asyncio.sleep(scene.lasts_s)
    await scene.call("DELETE", f"files/{stored['id']}")
    await scene.has_ended(batch)


async def _fail_lines(scene: Scene) -> None:
    await scene.has_ended(await scene.batch([*["Hi"] * 20, *["too long " * 20_000] * 5]))


class _Refusing(BaseHTTPRequestHandler):
    """A receiver of webhooks that wants no more of them."""

    def do_POST(self) -> None:
        self.send_response(410)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


async def _refuse_webhooks(scene: Scene) -> None:
    with HTTPServer(("127.0.0.1", 0), _Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        secret = "whsec_" + b64encode(secrets.token_bytes(32)).decode()
        webhook = {"url": f"http://127.0.0.1:{server.server_port}/", "secret": secret}
        await scene.has_ended(await scene.batch(["Hi"], webhook=webhook))
        await asyncio.sleep(2.0)  # the message goes out after the end
        server.shutdown()
        thread.join()


CAUSES: Mapping[str, Cause] = {
    "none": Cause(text="nothing", make=_nothing),
    "kill": Cause(text="R1: kill -9 one of 3 replicas", fires=frozenset({"CarouselReplicasLost"}), make=_kill_one),
    "stop": Cause(
        text="R4: SIGSTOP one of 3 replicas, then SIGCONT",
        fires=frozenset({"CarouselProcessMissing", "CarouselReplicasLost"}), make=_stop_one,
    ),
    "kill-all": Cause(
        text="R5: kill -9 all 3 replicas, place_timeout_s 1, every 8 s",
        fires=frozenset({"CarouselNoReplica", "CarouselCallsFail"}), make=_kill_all,
    ),
    "kill-ingress": Cause(
        text="R6: kill -9 the ingress, every second", fires=frozenset({"CarouselAbsent"}), make=_kill_ingress
    ),
    "hold-ingress": Cause(
        text="SIGSTOP the ingress for 0.3 s of each second",
        fires=frozenset({"CarouselLoopStalls", "CarouselTokensSlow"}), make=_hold_ingress,
    ),
    "overload": Cause(
        text=f"C6: {_CROWD} clients, more than slots and queues have places",
        fires=frozenset({"CarouselOverloaded", "CarouselQueueLong", "CarouselFirstTokenSlow"}), make=_crowd,
    ),
    "disk": Cause(
        text="files take batches.max_total_bytes while a batch runs", fires=frozenset({"CarouselBatchesPaused"}),
        make=_fill_disk,
    ),
    "lines": Cause(
        text="5 of the 25 lines of a batch are too long", fires=frozenset({"CarouselBatchLinesFail"}),
        make=_fail_lines,
    ),
    "webhooks": Cause(
        text="the receiver of a batch's webhook answers 410", fires=frozenset({"CarouselWebhooksGivenUp"}),
        make=_refuse_webhooks,
    ),
}  # fmt: skip


@contextmanager
def _service() -> Iterator[Stage]:
    """Three replicas of four slots and a queue for sixteen, and batches."""
    config = application(max_running=4, max_waiting=16, place_timeout_s=1.0)
    with TemporaryDirectory(prefix="carousel-benchmark-") as folder:
        batches = {"path": folder, "max_total_bytes": _TOTAL_BYTES, "webhooks": {"allowed_networks": ["127.0.0.1/32"]}}
        with stage(config | {"batches": batches}) as running:
            yield running


async def _watched(causes: Iterable[str], factor: float, setup: dict[str, Any]) -> list[str]:
    """The lines of causes, made one after the other in one service; each is printed at once."""
    lines = []
    with _service() as running:
        target = running.target
        # Time for a window to fill and for `for` to pass, and some scrapes more.
        scene = Scene(running, 2 * _WINDOW_S / factor + 4 * _EVERY_S)
        traffic = Traffic(target, mixed(_NUM_CLIENTS, max_tokens=LENGTHS), {})
        with prometheus(f"http://{target.host}:{target.port}", factor=factor, every_s=_EVERY_S) as server:
            async with traffic.flowing():
                for name in causes:
                    row = await _made(name, scene, server, patience_s=_LONGEST_WINDOW_S / factor + 20)
                    lines.append(json.dumps(row | setup))
                    print(lines[-1], flush=True)
    return lines


async def _made(name: str, scene: Scene, server: Prometheus, *, patience_s: float) -> dict[str, Any]:
    cause = CAUSES[name]
    tell(f"{name}: {cause.text}")
    await asyncio.sleep(3 * _EVERY_S)
    began = time.time()
    await cause.make(scene)
    ended = time.time()
    fires_by = began + scene.lasts_s  # also what is over in a moment
    while time.time() < ended + patience_s:
        await asyncio.sleep(2 * _EVERY_S)
        if time.time() > fires_by and not server.firing():
            break
    series = server.query(f'ALERTS{{alertstate="firing"}}[{round(time.time() - began) + 1}s]')
    fired = told(series, server.firing(), began, ended)
    tell(f"{name}: {fired}")
    return {
        "cause": name,
        "text": cause.text,
        "lasted_s": round(ended - began, 1),
        "fired": fired,
        "missed": sorted(cause.fires - fired.keys()),
        "others": sorted(fired.keys() - cause.fires),
    }


def told(series: Iterable[Mapping[str, Any]], firing: Collection[str], began: float, ended: float) -> Fired:
    """Each alert that fired: how long after its cause began, and after its end until it did no more (None: it does)."""
    times: dict[str, list[float]] = {}
    for each in series:
        times.setdefault(each["metric"]["alertname"], []).extend(at for at, _ in each["values"])
    return {
        name: {
            "after_s": round(min(values) - began, 1),
            "resolved_after_s": None if name in firing else round(max(values) + _EVERY_S - ended, 1),
        }
        for name, values in sorted(times.items())
    }


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    setup = where() | {"factor": given.factor, "scrape_s": _EVERY_S}
    try:
        for name in given.causes:
            if name not in CAUSES:
                raise BenchmarkError(f"there is no cause {name!r}{did_you_mean(name, CAUSES)}")
        lines = asyncio.run(_watched(given.causes or CAUSES, given.factor, setup))
        if given.json is not None:
            write_json(given.json, "\n".join(lines))
    except BenchmarkError as error:
        return refused(error)
    return 0


def _parser() -> Any:
    parser = command_parser("chaos.alerts", __doc__)
    parser.add_argument("causes", nargs="*", metavar="CAUSE", help=f"of {', '.join(CAUSES)}")
    parser.add_argument("--factor", type=positive, default=20, metavar="N", help="rules are faster by this factor")
    parser.add_argument("--json", metavar="FILE", help="write the lines there too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
