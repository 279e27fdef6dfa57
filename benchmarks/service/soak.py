"""Runs a service for an hour with honest tenants beside an attacker, kills and a full disk.

    python -m benchmarks.service.soak --minutes 60
    python -m benchmarks.service.soak --minutes 60 --kill replica,ingress,batches,controller,head --updates

Starts the service as `make serve` does: two replicas of the bundled model with little KV memory, adapters, pipelines,
speculation, API keys, and batches on their own in-memory file system, which needs root on Linux (`--disk-mib 0`: no
such file system, and no full disk). Tenants send requests of all kinds (`tenants.py`), each with its own words for the
model to repeat; one tenant always has a batch running. After a calm part, another tenant sends hostile requests,
`--rate` a second; one in 50 has a field filled to its limit (`field_bodies.py`). A replica is killed every two minutes,
the batches process every five, and the file system is full for a minute at one third and at two thirds of the attack.

`--kill` kills the given kinds instead, one every two minutes, in turn; `--updates` ends each round with a failing and a
working update. With `--kill`, streams are stored if their kind allows it. When an ingress is killed, tenants resume
stored streams behind the last event (`gone_on`) and send other requests again (`sent_again`). `head` runs the service
on two hosts and keeps the state of Ray's head in Redis: like row R7 of `benchmarks.chaos`, with the same requirements.

Progress goes to stderr; the last line of stdout is one JSON object:

    tenants       outcomes by tenant. `right`: equal to the first answer of the same request, token for token; `leaked`:
                  with words of another request; `unexplained`: with cached tokens that no request of the same key and
                  salt explains. Also times in ms, calm and attacked; the slowest answers; the first findings in full
    searched      by kind, answers that were searched for words of other requests; `own`: answers with their own words
    sang          share of the complete greedy answers that are exactly their own words
    attack        answers by status; answers of 500 and above, except from the death of an ingress or HAProxy until
                  its replacement
    ledger        by tenant, tokens of prompts and outputs: in its answers, in the ledger, and the most that tries
                  without an answer can have used. `twice`: ledger above answers plus tries; `missing`: below answers
    memory_mib, open_files, threads   by process title: medians of the four quarters of the attack. A process that
                  started later counts from the age of one minute
    growth        memory of the last quarter over the second, by process title
    restarts      processes of the service that ended without being killed
    preemptions, resumes,
    fetched_tokens         counters of the run; fetched prefix tokens come from the folder or the other replica
    left          resources that are held at the end, when no request runs

Exits with 1 if an honest answer is wrong, late, lost, doubled or has words or tokens of another, on a server error or a
restart, if too few answers sang, if anything is left, if the ledger differs, or if growth exceeds `--max-growth`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import nlargest
from itertools import cycle
from pathlib import Path
from typing import Any

from app.text import Tokenizer
from app.usage import Used
from benchmarks.chaos.at_random import KINDS
from benchmarks.chaos.faults import LASTS_S, kill
from benchmarks.chaos.head import Head, why_no_head, with_head
from benchmarks.chaos.rolling_update import cut_off_model, deploy
from benchmarks.chaos.stage import Stage, stage
from benchmarks.chaos.traffic import MODEL_NAME, moment
from benchmarks.harness.command import BenchmarkError, command_parser, did_you_mean, positive, run_command, tell
from benchmarks.harness.disk import fill, small_disk
from benchmarks.harness.processes import family, resident_mib
from benchmarks.harness.random_adapter import projections_in, save_random_adapter
from benchmarks.harness.service import application, got, scraped, with_tools, write_keys
from benchmarks.service.field_bodies import field_bodies
from benchmarks.service.hostile_requests import HostileRequest, Tally, attack, hostile_requests, post
from benchmarks.service.tenants import BLOCK_SIZE, DOCUMENTS, FINE, TIMEOUT_S, Found, ItemResponse, Tenants

_HEAD, _UPDATES = "head", "updates"  # strikes besides the kills of KINDS
_CARRIERS = ("ingress", "HAProxy")  # processes that hold client connections
_SAMPLE_EVERY_S = 5.0
_TELL_EVERY_S = 60.0
_MIN_AGE_S = 60.0  # memory of a younger process does not count: it still grows into its work
_AFTER_KILL_S = 30.0  # a kill this long before a request may explain a slow answer
_LATE_MS = 20_000.0  # an honest answer takes about half a second
_PATIENCE_S = 300.0  # time for the last batch to end
_SETTLES_S = 5.0  # time until the proxy before a restarted ingress has settled
_LEDGER_LATE_S = 10.0  # the ledger finds the records of a killed process after some seconds
_MAX_HOSTILE_AT_ONCE = 128
_LARGE_EVERY, _LARGE_BYTES = 50, 2**20
_MIN_SANG = 0.95  # the model itself repeats 99 of 100
_NUM_ADAPTERS = 2
_TIER_GIB = 0.02  # small enough that blocks are deleted all the time


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    at_s: float
    pid: int
    title: str
    memory_mib: float
    open_files: int
    threads: int


@dataclass(slots=True)
class Watched:
    """Samples of the service's processes over time, and the processes killed by this benchmark."""

    samples: list[Sample] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    kills: list[tuple[float, str]] = field(default_factory=list)  # (time, kind)
    breaks: list[tuple[float, float]] = field(default_factory=list)  # spans in which connections might break
    full_s: float = 0.0

    @property
    def num_killed(self) -> dict[str, int]:
        return dict(Counter(what for _, what in self.kills))


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measured, arguments, is_bad=is_bad)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    _check(given.kill)
    keys = {name: f"sk-{name}-{secrets.token_hex(16)}" for name in (*_names(given.tenants), "attacker", "admin")}
    with (
        small_disk(given.disk_mib) as disk,
        with_tools(Path(given.model)) as model,
        tempfile.TemporaryDirectory() as folder,
    ):
        adapters = _adapters(model, Path(folder))
        keys_file = write_keys(Path(folder) / "keys.yaml", keys, admin="admin")
        args_of = partial(served, keys_file=keys_file, folder=disk, adapters=adapters, num_blocks=given.num_blocks)
        with _started(args_of(str(model)), given) as (running, head):
            models = [MODEL_NAME, *adapters]
            tenants = Tenants(
                running.target, {name: keys[name] for name in _names(given.tenants)}, Tokenizer.load(str(model)),
                models=models, pipelines={each["name"]: models for each in pipelines_of(models)}, seed=given.seed,
                keeps=bool(given.kill),
            )  # fmt: skip
            fails, works = args_of(cut_off_model(Path(folder), model)), partial(args_of, str(model))
            return asyncio.run(_Soak(running, head, tenants, keys, disk, given, fails=fails, works=works).run())


def _check(kinds: Sequence[str]) -> None:
    """Raise BenchmarkError if a kind of process is unknown, or if the head cannot be killed on this machine."""
    known = (*KINDS, _HEAD)
    for kind in kinds:
        if kind not in known:
            raise BenchmarkError(f"--kill: there is no process {kind!r}{did_you_mean(kind, known)}")
    if _HEAD in kinds and (reason := why_no_head()) is not None:
        raise BenchmarkError(f"--kill {_HEAD}: {reason}")


@contextlib.contextmanager
def _started(args: Mapping[str, Any], given: argparse.Namespace) -> Iterator[tuple[Stage, Head | None]]:
    """Start the service; yield it with Ray's head if `--kill` has the head, else with None."""
    if _HEAD in given.kill:
        with with_head(args) as (running, head):
            yield running, head
    else:
        with stage(args, with_dashboard=given.updates) as running:
            yield running, None


def _names(number: int) -> list[str]:
    return [f"tenant-{each}" for each in range(number)]


def _adapters(model: Path, folder: Path) -> dict[str, str]:
    """Save adapters and return their folders by name. Their weights are small: the model still repeats words."""
    paths = {f"adapter-{seed}": folder / f"adapter-{seed}" for seed in range(_NUM_ADAPTERS)}
    for seed, path in enumerate(paths.values()):
        save_random_adapter(path, projections_in(model), rank=8, seed=seed, scale=0.01)
    return {name: str(path) for name, path in paths.items()}


def pipelines_of(models: Sequence[str]) -> list[dict[str, Any]]:
    """Return pipelines with steps of all kinds over `models`, which has at least two."""
    first, second, *_ = models
    cases = [{"model": second, "max_prompt_tokens": 60}, {"model": "careful"}]
    ranking = [{"kind": "embed", "model": first, "top_n": 1}, {"kind": "generate", "model": "auto"}]
    return [
        {"name": "careful", "steps": [{"kind": "cascade", "small": second, "large": first, "min_mean_logprob": -0.01}]},
        {"name": "together", "steps": [{"kind": "ensemble", "models": [first, second]}]},
        {"name": "auto", "steps": [{"kind": "route", "cases": cases}]},
        {"name": DOCUMENTS, "steps": ranking},
    ]


def served(
    model: str, keys_file: Path, folder: Path, adapters: Mapping[str, str], *, num_blocks: int, **replicas: Any
) -> dict[str, Any]:
    """Return the application's `args`: two replicas with too little KV memory for their load, and a small KV tier."""
    engine = {
        "model": {"path": model, "batch_invariant": True},
        "cache": {
            "num_blocks": num_blocks,
            "block_size": BLOCK_SIZE,
            "tiers": [{"path": str(keys_file.parent / "kv"), "max_gib": _TIER_GIB}],
        },
        "scheduler": {"max_running": 32, "max_waiting": 256, "policy": "fair"},
        "speculation": {"method": "lookup"},
    }
    return application(
        MODEL_NAME, engine, {"num_replicas": 2, **replicas}, {"adapters": dict(adapters)},
        batches={"path": str(folder)}, pipelines=pipelines_of([MODEL_NAME, *adapters]),
        api={"keys_file": str(keys_file), "metrics_for": "public"},
    )  # fmt: skip


class _Soak:
    """One run of the benchmark, in one event loop."""

    def __init__(
        self,
        running: Stage,
        head: Head | None,
        tenants: Tenants,
        keys: Mapping[str, str],
        folder: Path,
        given: argparse.Namespace,
        *,
        fails: dict[str, Any],
        works: Callable[..., dict[str, Any]],
    ) -> None:
        """Updates deploy `fails`, then `works` with new replica settings each time."""
        self._running = running
        self._head = head
        self._tenants = tenants
        self._keys = keys
        self._folder = folder
        self._given = given
        self._fails = fails
        self._works = works
        self._over = asyncio.Event()
        self._striking = asyncio.Lock()
        self._watched = Watched()
        self._tally = Tally()
        self._source = random.Random(given.seed)

    async def run(self) -> dict[str, Any]:
        given, seconds, tenants = self._given, self._given.minutes * 60, self._tenants
        before = self._ours()
        async with asyncio.TaskGroup() as tasks:
            for name in tenants.found:
                for _ in range(given.clients):
                    tasks.create_task(tenants.keep_asking(name, pause_s=given.pause_s, until=self._over))
            tasks.create_task(tenants.keep_batching(_names(1)[0], given.items, until=self._over))
            began = time.monotonic()
            await asyncio.sleep(given.calm_s)
            attacked_s = time.monotonic()
            tell(f"calm for {attacked_s - began:.0f} s; now the attack")
            trouble = [asyncio.create_task(each) for each in self._trouble(attacked_s, seconds)]
            done, _ = await asyncio.wait(trouble, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            async with self._striking:  # wait for the end of a strike
                for task in trouble:
                    task.cancel()
                for result in await asyncio.gather(*trouble, return_exceptions=True):
                    if isinstance(result, Exception):
                        raise result
            self._over.set()
            tenants.patience_ends_s = time.monotonic() + _PATIENCE_S
        await self._running.is_whole()
        ended = set(before) - set(self._ours()) - self._watched.killed
        samples = await asyncio.to_thread(scraped, self._running.target)
        return (
            figures_of(tenants.found, began, attacked_s, self._watched.kills)
            | attack_figures(self._tally, self._watched.breaks)
            | ledger_figures(tenants.found, await self._charged())
            | process_figures(self._watched.samples, attacked_s, seconds)
            | {
                "killed": self._watched.num_killed,
                "disk_full_s": round(self._watched.full_s),
                "restarts": sorted(before[pid] for pid in ended),
                "preemptions": round(sum(n for name, _, n in samples if name == "carousel_engine_preemptions_total")),
                "resumes": round(sum(n for name, _, n in samples if name == "carousel_resumes_total")),
                "fetched_tokens": round(sum(n for name, _, n in samples if name == "carousel_tier_tokens_total")),
                "left": await self._running.left_over(),
                "max_growth": given.max_growth,
            }
        )

    def _trouble(self, began_s: float, seconds: float) -> Iterable[Coroutine[Any, Any, None]]:
        given = self._given
        yield self._watch()
        yield attack(
            self._running.target, self._hostile(self._large_bodies()), self._tally, rate=given.rate,
            at_once=_MAX_HOSTILE_AT_ONCE,
        )  # fmt: skip
        if given.kill or given.updates:
            yield self._strike_every(given.kill_every_s, [*given.kill, *[_UPDATES] * given.updates])
        if given.kill_replica_s and not given.kill:
            yield self._strike_every(given.kill_replica_s, ["replica"])
        if given.kill_batches_s and not given.kill:
            yield self._strike_every(given.kill_batches_s, ["batches"])
        if given.disk_mib:
            yield self._fill_disk(began_s, seconds)

    def _hostile(self, large: Iterator[HostileRequest]) -> Iterator[HostileRequest]:
        """Yield endless hostile requests with the attacker's key."""
        models = [each["id"] for each in self._read("/v1/models")["data"]]
        header = f"\r\nAuthorization: Bearer {self._keys['attacker']}\r\nConnection: close\r\n".encode()
        for number, case in enumerate(hostile_requests(self._given.seed, models)):
            chosen = next(large) if number % _LARGE_EVERY == 0 else case
            yield replace(chosen, data=chosen.data.replace(b"\r\nConnection: close\r\n", header, 1))

    def _large_bodies(self) -> Iterator[HostileRequest]:
        """Yield endless requests with a field filled to its limit."""
        document, models = self._read("/openapi.json"), self._read("/v1/models")
        max_model_len = models["data"][0]["max_model_len"]
        while True:
            for body in field_bodies(document, size=_LARGE_BYTES, max_model_len=max_model_len):
                yield HostileRequest("large", post(body.path, body.data()))

    def _read(self, path: str, key: str = "attacker") -> Any:
        headers = {"Authorization": f"Bearer {self._keys[key]}"}
        return json.loads(got(self._running.target, path, headers, TIMEOUT_S))

    async def _watch(self) -> None:
        told_s = time.monotonic()
        while True:
            self._watched.samples += await asyncio.to_thread(self._sampled)
            if time.monotonic() > told_s + _TELL_EVERY_S:
                told_s = time.monotonic()
                tell(f"{sum((each.outcomes for each in self._tenants.found.values()), Counter())}")
                tell(f"hostile: {dict(self._tally.outcomes)}, killed: {self._watched.num_killed}")
            await asyncio.sleep(_SAMPLE_EVERY_S)

    def _sampled(self) -> list[Sample]:
        now = time.monotonic()
        return [
            Sample(now, pid, process.title, resident_mib(pid), _entries(pid, "fd"), _entries(pid, "task"))
            for pid, process in self._running.processes().items()
        ]

    def _ours(self) -> dict[int, str]:
        return {
            pid: each.title for pid, each in self._running.processes().items() if each.title.startswith("ray::Serve")
        }

    async def _charged(self) -> dict[str, Used]:
        """Return the usage in the ledger, by key."""
        await asyncio.sleep(_LEDGER_LATE_S)
        entries = (await asyncio.to_thread(self._read, "/admin/usage?group_by=key", "admin"))["data"]
        return {
            each["key"]: Used(num_prompt_tokens=each["prompt_tokens"], num_output_tokens=each["output_tokens"])
            for each in entries
        }

    async def _strike_every(self, seconds: float, kinds: Sequence[str]) -> None:
        """Strike with each of `kinds` in turn, waiting `seconds` before each strike."""
        for kind in cycle(kinds):
            await asyncio.sleep(seconds)
            async with self._striking:
                tell(f"strikes: {kind}")
                await self._strike(kind)

    async def _strike(self, kind: str) -> None:
        struck_s, watched = time.monotonic(), self._watched
        if kind == _UPDATES:
            watched.kills.append((struck_s, kind))
            watched.killed |= {pid for pid, title in self._ours().items() if title.startswith("ray::ServeReplica")}
            works = self._works(place_timeout_s=30.0 + len(watched.kills))
            await asyncio.to_thread(deploy, self._running.running, self._fails, "DEPLOY_FAILED")
            await asyncio.to_thread(deploy, self._running.running, works, "RUNNING")
            await self._running.is_whole()
        elif kind == _HEAD:
            watched.kills.append((struck_s, kind))
            await self._lose_head()
        elif found := await asyncio.to_thread(KINDS[kind], self._running):
            pid = self._source.choice(found)
            self._tenants.may_break = kind in _CARRIERS
            watched.killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                kill([pid])
                watched.kills.append((struck_s, kind))
            if kind in _CARRIERS:
                await moment(lambda: bool(set(KINDS[kind](self._running)) - {pid}), look_s=0.5)
                await self._running.is_whole()
                await asyncio.sleep(_SETTLES_S)
                self._tenants.may_break = False
                watched.breaks.append((struck_s, time.monotonic()))

    async def _lose_head(self) -> None:
        """Kill all processes of the head, start a new head after LASTS_S, and wait for its controller."""
        assert self._head is not None, "_started yields a head if --kill has it"
        assert self._head.process is not None, "with_head has started it"
        self._watched.killed |= family(self._head.process.pid).keys()
        start_again = await asyncio.to_thread(self._head.lost)
        await asyncio.sleep(LASTS_S)
        start_again()
        await moment(lambda: bool(self._running.controllers()), look_s=0.5)

    async def _fill_disk(self, began_s: float, seconds: float) -> None:
        filler = self._folder / ".soak-fills-the-disk"
        for part in (1 / 3, 2 / 3):
            await asyncio.sleep(max(0.0, began_s + part * seconds - time.monotonic()))
            filled_s = time.monotonic()
            tell("the disk is full")
            self._watched.kills.append((filled_s, "full disk"))
            try:
                while time.monotonic() < filled_s + self._given.full_s:
                    await asyncio.to_thread(fill, filler)  # repeatedly: the service may free space
                    await asyncio.sleep(0.2)
            finally:
                filler.unlink(missing_ok=True)
                self._watched.full_s += time.monotonic() - filled_s
            tell("the disk has room")
        await asyncio.Event().wait()


def _entries(pid: int, folder: str) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/{folder}"))
    except OSError:
        return 0


def figures_of(
    tenants: Mapping[str, Found], began_s: float, attacked_s: float, kills: Sequence[tuple[float, str]]
) -> dict[str, Any]:
    """Return the figures of the honest tenants."""
    num_greedy = sum(each.num_greedy for each in tenants.values())
    return {
        "tenants": {
            name: {
                "outcomes": dict(sorted(found.outcomes.items())),
                "calm_ms": {f"p{p}": found.times_ms(p, began_s, attacked_s) for p in (50, 99)},
                "attacked_ms": {f"p{p}": found.times_ms(p, attacked_s) for p in (50, 99, 100)},
                "late": sum(1000 * each.took_s > _LATE_MS for each in found.answered),
                "slowest": [_told(each, kills) for each in nlargest(5, found.answered, key=lambda each: each.took_s)],
                "cached": found.num_cached,
                "findings": found.details,
            }
            for name, found in tenants.items()
        },
        "searched": dict(sum((each.answers for each in tenants.values()), Counter())),
        "own": dict(sum((each.own for each in tenants.values()), Counter())),
        "sang": round(sum(each.num_sang for each in tenants.values()) / num_greedy, 4) if num_greedy else None,
    }


def _told(answer: ItemResponse, kills: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """Describe a slow answer. Its `kills` are (kind, seconds after the first try), shortly before or during it."""
    asked_s = answer.at_s - answer.took_s
    return {
        "kind": answer.kind,
        "model": answer.model,
        "took_s": round(answer.took_s, 1),
        "tries": answer.num_tries,
        "kills": [
            (what, round(at_s - asked_s, 1)) for at_s, what in kills if asked_s - _AFTER_KILL_S <= at_s <= answer.at_s
        ],
    }


def attack_figures(tally: Tally, breaks: Sequence[tuple[float, float]] = ()) -> dict[str, Any]:
    """Return the figures of the attack. Server errors during `breaks` do not count."""
    outcomes = dict(sorted(tally.outcomes.items()))
    errors = [
        each for each in tally.server_errors if not any(from_s <= each["at_s"] <= to_s for from_s, to_s in breaks)
    ]
    return {"attack": {"cases": tally.by_kind.total(), "outcomes": outcomes, "server_errors": errors[:20]}}


def ledger_figures(tenants: Mapping[str, Found], charged: Mapping[str, Used]) -> dict[str, Any]:
    """Compare the usage of tenants in their answers and in the ledger, as (prompt tokens, output tokens)."""
    found = {}
    for name, tenant in tenants.items():
        sums = {"answers": tenant.used, "ledger": charged.get(name, Used()), "unknown": tenant.may_have_used}
        told, ours, unknown = tokens = [(used.num_prompt_tokens, used.num_output_tokens) for used in sums.values()]
        found[name] = dict(zip(sums, tokens, strict=True)) | {
            "twice": max(0, *(has - says - may for says, has, may in zip(told, ours, unknown, strict=True))),
            "missing": max(0, *(says - has for says, has in zip(told, ours, strict=True))),
        }
    return {"ledger": found}


def process_figures(samples: Sequence[Sample], began_s: float, seconds: float) -> dict[str, Any]:
    """Return, by process title, the median of each quarter, and the growth of memory from the second to the last.

    The samples of all processes with one title are pooled.
    """
    first_seen: dict[int, float] = {}
    by_title: defaultdict[str, list[list[Sample]]] = defaultdict(lambda: [[], [], [], []])
    for sample in samples:
        born_s = first_seen.setdefault(sample.pid, sample.at_s)
        was_there = born_s < began_s + 2 * _SAMPLE_EVERY_S
        if was_there or sample.at_s - born_s >= _MIN_AGE_S:
            by_title[sample.title][_quarter(sample.at_s, began_s, seconds)].append(sample)
    found: dict[str, Any] = {"memory_mib": {}, "open_files": {}, "threads": {}, "growth": {}}
    for title, quarters in sorted(by_title.items()):
        for what in ("memory_mib", "open_files", "threads"):
            found[what][title] = _medians([[getattr(each, what) for each in quarter] for quarter in quarters])
        _, second, _, last = found["memory_mib"][title]
        if second and last:
            found["growth"][title] = round(last / second, 3)
    return found


def _quarter(at_s: float, began_s: float, seconds: float) -> int:
    return min(3, max(0, int(4 * (at_s - began_s) / seconds)))


def _medians(quarters: Sequence[Sequence[float]]) -> list[float | None]:
    return [round(statistics.median(quarter), 1) if quarter else None for quarter in quarters]


def is_bad(figures: Mapping[str, Any]) -> bool:
    """Return whether a promise of the module docstring was broken."""
    tenants = figures["tenants"].values()
    outcomes = {outcome for tenant in tenants for outcome in tenant["outcomes"]}
    ours = [growth for title, growth in figures["growth"].items() if title.startswith("ray::ServeReplica:carousel:")]
    return bool(
        outcomes - FINE
        or (figures["sang"] is not None and figures["sang"] < _MIN_SANG)
        or any(tenant["late"] for tenant in tenants)
        or any(growth > figures["max_growth"] for growth in ours)
        or any(figures["left"].values())
        or figures["attack"]["server_errors"]
        or figures["restarts"]
        or any(each["twice"] or each["missing"] for each in figures["ledger"].values())
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("service.soak", __doc__)
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="duration of the attack")
    parser.add_argument("--calm-s", type=float, default=60.0, metavar="S", help="time before the attack")
    parser.add_argument("--model", default="models/demo", metavar="DIR")
    parser.add_argument("--rate", type=float, default=50.0, metavar="N", help="hostile requests a second")
    parser.add_argument("--tenants", type=positive, default=4, metavar="N", help="API keys")
    parser.add_argument("--clients", type=positive, default=2, metavar="N", help="clients of each tenant")
    parser.add_argument("--num-blocks", type=positive, default=400, metavar="N", help="KV blocks of a replica")
    parser.add_argument(
        "--pause-s", type=float, default=0.5, metavar="S", help="mean pause between a client's requests"
    )
    parser.add_argument("--items", type=positive, default=300, metavar="N", help="items of each batch")
    parser.add_argument("--kill-replica-s", type=float, default=120.0, metavar="S", help="without --kill; 0: never")
    parser.add_argument("--kill-batches-s", type=float, default=300.0, metavar="S", help="without --kill; 0: never")
    parser.add_argument(
        "--kill", type=lambda text: text.split(","), default=[], metavar="KINDS",
        help=f"kinds to kill in turn: {', '.join(KINDS)} and {_HEAD}",
    )  # fmt: skip
    parser.add_argument("--updates", action="store_true", help="end each round with a failing and a working update")
    parser.add_argument("--kill-every-s", type=float, default=120.0, metavar="S", help="time between two strikes")
    parser.add_argument("--full-s", type=float, default=60.0, metavar="S", help="how long the disk is full, twice")
    parser.add_argument("--disk-mib", type=int, default=2048, metavar="N", help="size of the file system; 0: none")
    parser.add_argument(
        "--max-growth", type=float, default=1.05, metavar="X", help="most memory of the last quarter over the second"
    )
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
