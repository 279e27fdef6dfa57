"""One request walks from its body to the engine and its tokens walk back, along the tables of the page about it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from app.api import RequestHandler, ServedModel, build_app
from app.api.http.sse import SEND_NOW
from app.config import ApiConfig
from app.fleet import FailoverLimits, Fleet, ReplicaRegistry
from app.fleet.dispatch import GroupChooser, make_policy
from app.text import Tokenizer
from deployments.serve.http_server import ChunkedConnection
from deployments.serve.transport import ServeTransport
from tests.kit.fleet import Counts

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "design" / "request-path.md"
MAX_STATIONS = {"In": 12, "Back": 8}


class Station(NamedTuple):
    function: str
    file: str


def stations(heading: str) -> list[Station]:
    """A table of the page."""
    [table] = re.findall(rf"^## {heading}\n\n(.*?)(?:\n\n|\Z)", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [Station(*found) for found in re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", table, re.MULTILINE)]


def every_function(heading: str) -> set[Station]:
    """The list of the page below a heading: functions by file."""
    [table] = re.findall(rf"^### {heading}\n\n.*?\n\n(.*?)(?:\n\n|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", table, re.MULTILINE)
    return {Station(function, file) for file, functions in rows for function in re.findall(r"`([^`]+)`", functions)}


class Passed(NamedTuple):
    """A function of ours that was entered, or that gave a value back."""

    event: str  # "call" or "return"
    station: Station
    is_on_loop: bool = True
    root: str = ""  # the outermost function of ours on its stack

    @property
    def moment(self) -> tuple[str, Station]:
        return self.event, self.station


class Recorder:
    """Records the functions of `app` and `deployments` that this process enters and leaves, in all its threads.

    What is written within a function (a comprehension, a lambda) is part of it.
    """

    def __init__(self) -> None:
        self.passed: list[Passed] = []

    def __enter__(self) -> Recorder:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _profile(self, frame: FrameType, event: str, value: Any) -> None:
        if event not in ("call", "return") or not _is_ours(frame) or frame.f_code.co_name.startswith("<"):
            return
        root, outer = frame, frame.f_back
        while outer is not None:
            root, outer = (outer if _is_ours(outer) else root), outer.f_back
        is_on_loop = threading.current_thread() is threading.main_thread()
        self.passed.append(Passed(event, _station(frame), is_on_loop, root.f_code.co_qualname))


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((f"{PROJECT}/app/", f"{PROJECT}/deployments/"))


def _station(frame: FrameType) -> Station:
    return Station(frame.f_code.co_qualname, str(Path(frame.f_code.co_filename).relative_to(PROJECT)))


class Remote:
    """A method of a handle: calls the replica in this process."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._method(*arguments))


def fleet_of(replica: Any) -> Fleet:
    """One replica behind a fleet. Serve's router only says that it is there, and its handle where."""
    policy = make_policy("least_loaded", random.Random(0))
    registry = ReplicaRegistry(policy, GroupChooser([]), block_size=16, clock=time.monotonic)
    handle = SimpleNamespace(frame_address=Remote(replica.frame_address))
    registry.set_replicas(["r0"])
    limits = FailoverLimits(max_resumes=1, place_timeout_s=60.0, silence_s=60.0, step_s=60.0)
    return Fleet(ServeTransport(handle, "ingress"), registry, limits, Counts())


class RecordedConnection(ChunkedConnection):
    """Notes where in the record each event is sent."""

    def __init__(self, recorder: Recorder, sent: list[int]) -> None:
        cycle = SimpleNamespace(flow=SimpleNamespace(write_paused=False), disconnected=True)
        super().__init__(cast(RequestResponseCycle, cycle), asyncio.get_running_loop())
        self._recorder, self._sent = recorder, sent

    def send(self, data: bytes) -> None:
        super().send(data)
        self._sent.append(len(self._recorder.passed))

    def write(self, data: bytes, now: float) -> None:
        """There is no socket."""


async def walk(make_replica: Callable[..., Any], recorder: Recorder) -> list[int]:
    """Stream three tokens of a chat; returns where in the record each event was sent.

    The chats before the last one are not recorded: the connection to the replica is open then, and what is remembered
    is known.
    """
    replica = make_replica()
    fleet = fleet_of(replica)
    model = ServedModel(
        name="demo",
        tokenizer=Tokenizer.load(str(PROJECT / "models" / "demo")),
        model_info=replica.facts(),
        generate=fleet.generate,
        created=0,
    )
    body = {"messages": [{"role": "user", "content": "3 4"}], "max_tokens": 3, "ignore_eos": True, "stream": True}
    messages: list[dict[str, Any]] = []
    sent: list[int] = []

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and message.get("body"):
            assert b"error" not in message["body"], message
            sent.append(len(recorder.passed))

    async def is_ready() -> bool:
        return True

    app = build_app(RequestHandler([model], ApiConfig()), is_ready)
    most = 20  # on a busy machine two tokens may come in one frame
    for number in range(most):
        # As the HTTP server makes it before the request comes.
        connection = RecordedConnection(recorder, sent)
        recorder.passed.clear()
        sent.clear()
        messages.append({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        await app(SCOPE | {"extensions": {SEND_NOW: connection}}, receive, send)
        if number and begin_of_token(recorder.passed, sent) is not None:
            break
    fleet.close()
    await replica._frame_server.close()
    return sent


SCOPE: dict[str, Any] = {
    "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": "/v1/chat/completions",
    "raw_path": b"/v1/chat/completions", "query_string": b"", "root_path": "",
    "headers": [(b"content-type", b"application/json")],
    "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1024),
}  # fmt: skip


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> tuple[list[Passed], list[int]]:
    """What one request passed, and where in it each of its events was sent."""
    recorder = Recorder()
    with recorder:  # before the engine's thread starts
        sent = asyncio.run(walk(request.getfixturevalue("make_replica"), recorder))
    return recorder.passed, sent


def assert_passes(passed: Sequence[Passed], expected: Sequence[Passed]) -> None:
    """These stations come in this order, others between them."""
    position = 0
    for each in expected:
        following = [index for index in range(position, len(passed)) if passed[index].moment == each.moment]
        assert following, f"{each.station.function} does not {each.event} after the station before it"
        position = following[0] + 1


def test_a_request_and_its_tokens_pass_the_stations_of_the_page(recorded: tuple[list[Passed], list[int]]) -> None:
    passed, sent = recorded
    inward, back = stations("In"), stations("Back")
    assert_passes(passed, [Passed("call", station) for station in inward])
    # The second token: its frame holds nothing else, and every part of the stream has begun.
    assert_passes(token_of(passed, sent), [Passed("call", station) for station in back])


@pytest.mark.parametrize("heading", MAX_STATIONS)
def test_the_page_has_no_more_stations_than_were_agreed_and_all_exist(heading: str) -> None:
    found = stations(heading)
    assert 0 < len(found) <= MAX_STATIONS[heading]
    for station in found:
        name = station.function.rpartition(".")[2]
        assert re.search(rf"def {name}\(", (PROJECT / station.file).read_text()), station


def test_the_page_lists_every_function_that_a_chat_passes_on_its_way_in(
    recorded: tuple[list[Passed], list[int]],
) -> None:
    passed, _ = recorded
    submitted = next(index for index, each in enumerate(passed) if each.station.function == "AsyncEngine.submit")
    assert_lists("In", entered(passed[: submitted + 1]))


def test_the_page_lists_every_function_that_a_token_passes_on_its_way_back(
    recorded: tuple[list[Passed], list[int]],
) -> None:
    passed, sent = recorded
    delivered, *others = token_of(passed, sent)
    assert_lists("Back", [delivered.station, *entered(others)])


def token_of(passed: Sequence[Passed], sent: Sequence[int]) -> Sequence[Passed]:
    """What the second token passes."""
    begins = begin_of_token(passed, sent)
    assert begins is not None, "it never came in a frame of its own"
    return passed[begins : sent[1]]


def begin_of_token(passed: Sequence[Passed], sent: Sequence[int]) -> int | None:
    """Where the second token leaves the engine; None if it came with another one."""
    delivered = ("call", stations("Back")[0])
    return next((index for index in range(sent[0], sent[1]) if passed[index].moment == delivered), None)


# They run beside all requests: the connection is held open, the loop's pauses are measured, metrics are handed over.
BACKGROUND = {
    "FrameReader._check_silence", "LoopMonitor._beat", "IngressSession._beat", "RayMetrics.export_forever",
    "ReplicaConnection._hold", "ReplicaConnection._keep_open",
}  # fmt: skip


# The age of the step that runs is asked for where one runs, which it does or not by the moment.
SOMETIMES = {"Engine.now"}


def entered(passed: Sequence[Passed]) -> list[Station]:
    """The functions that the event loop enters for the request."""
    on_loop = [each for each in passed if each.event == "call" and each.is_on_loop and each.root not in BACKGROUND]
    return [each.station for each in on_loop if each.station.function not in SOMETIMES]


def assert_lists(heading: str, found: Sequence[Station]) -> None:
    """The page has these functions and no others; else its rows are printed as they should be."""
    by_file: dict[str, dict[str, None]] = {}
    for station in found:
        by_file.setdefault(station.file, {})[station.function] = None
    rows = [f"| `{file}` | {', '.join(f'`{each}`' for each in functions)} |" for file, functions in by_file.items()]
    listed = every_function(heading)
    assert set(found) - listed == set(), "\n".join(rows)
    assert listed - set(found) == set(), "\n".join(rows)


def test_only_the_engine_of_a_gpu_interrupts_other_threads_sooner(make_replica: Callable[..., Any]) -> None:
    before_s = 0.005  # as Python begins; another test may have changed it
    sys.setswitchinterval(before_s)

    async def interval_s(num_gpus: int) -> float:
        make_replica(num_gpus=num_gpus)
        return sys.getswitchinterval()

    try:
        assert asyncio.run(interval_s(0)) == before_s
        assert asyncio.run(interval_s(1)) < 0.001 < before_s
    finally:
        sys.setswitchinterval(before_s)
