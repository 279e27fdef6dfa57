"""Does a response hold anything of another request? A search for the secrets of all requests in all responses.

    python -m benchmarks.service.canary --requests 20000

Starts the service as `make serve` does, with two replicas of the bundled model, two adapters, pipelines of these,
little KV memory, speculation, API keys and batches. Tenants send requests of all kinds (`canaries.py`), each with words
of its own that the model repeats; halfway, one replica is killed. Every answer is searched for the words of all other
requests, in its texts, its token ids and its log-probabilities. Progress goes to stderr; the last line of stdout is one
JSON object:

    answers             by kind: how many were searched; `own`: in how many their own secret was found
    statuses            of all answers; `left`: the client closed the connection, `cut_off`: the server did
    hits                answers with words of another request's secret: none should be
    sang                share of the whole greedy answers that say their own secret word by word
    differ_from_alone   greedy answers that do not, and that differ when asked once more without other requests
    cached              answers with `cached_tokens`; `own`: such as earlier requests of the same key and salt explain;
                        `unexplained`: none should be
    preemptions, resumes, killed   what has happened meanwhile
    times               area under the curve, with which the time of an answer tells whether its prompt's beginning was
                        cached: sent by `others` (0.5: not at all) and by the caller itself (`own`, 1: always)

Exits with 1 when there was a hit, something unexplained, a difference, a server error, or when too few sang.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from app.text import Tokenizer
from benchmarks.chaos.stage import Stage, stage
from benchmarks.chaos.traffic import MODEL_NAME
from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell
from benchmarks.harness.http_call import CutOff, EventStream, Target, call
from benchmarks.harness.random_adapter import projections_in, save_random_adapter
from benchmarks.harness.service import write_keys
from benchmarks.service.canaries import GREEDY_TEXT, KINDS, Heard, Json, Prefixes, Question, Secrets, heard, question

BLOCK_SIZE = 16
DOCUMENTS = "documents"  # the pipeline that chooses some of a request's
MIN_SANG = 0.95  # the model itself repeats 99 of 100
_TELL_EVERY_S = 10.0
_MAX_TOLD = 20  # of each kind of finding
_MAX_ALONE = 400  # asked once more
_SCALE = 0.01  # of the numbers of adapters
_MAX_TRIES, _RETRY_S = 40, 0.25  # of a background request
_PROBE_WORDS = 400  # of a prompt with a cached beginning that the time of a response could show


@dataclass(slots=True)
class Findings:
    """What came of everything so far."""

    answers: Counter[str] = field(default_factory=Counter)
    own: Counter[str] = field(default_factory=Counter)  # those of them in which the search found their own secret
    statuses: Counter[str] = field(default_factory=Counter)
    hits: list[Json] = field(default_factory=list)
    unexplained: list[Json] = field(default_factory=list)
    num_with_cached: int = 0
    num_greedy: int = 0
    mute: list[tuple[Question, str]] = field(default_factory=list)  # greedy ones that did not say their secret

    @property
    def sang(self) -> float:
        return 1 - len(self.mute) / self.num_greedy if self.num_greedy else 0.0


class Canary:
    """Asks, listens and searches. In one event loop."""

    def __init__(
        self,
        target: Target,
        keys: Sequence[str],
        tokenizer: Tokenizer,
        *,
        models: Sequence[str],
        pipelines: Mapping[str, Sequence[str]] = MappingProxyType({}),
        seed: int,
    ) -> None:
        """`keys` are the tenants' API keys, `models` and `pipelines` what requests ask for.

        Of each pipeline, the models that may compute.
        """
        self._target = target
        self._keys = keys
        self._tokenizer = tokenizer
        self._models = models
        self._pipelines = tuple(pipelines)
        self._source = random.Random(seed)
        self._secrets = Secrets(self._source)
        self._prefixes = Prefixes(BLOCK_SIZE, {**{each: (each,) for each in models}, **pipelines})
        self._earlier: dict[int, list[Question]] = {}  # by tenant; those that may be asked again
        self._num_owners = 0
        self.kinds: Sequence[str] = KINDS
        self.findings = Findings()

    async def ask_many(self, number: int, *, at_once: int, for_s: float = float("inf")) -> None:
        """Send so many requests of all kinds, none after `for_s` seconds, and search what comes."""
        left, told_at = iter(range(number)), time.monotonic()
        ends_at = told_at + for_s

        async def keep_asking() -> None:
            nonlocal told_at
            for _ in left:
                if time.monotonic() > ends_at:
                    return
                await self._ask(self._new_question())
                if time.monotonic() > told_at + _TELL_EVERY_S:
                    told_at = time.monotonic()
                    found = self.findings
                    tell(f"{found.answers.total():,} answers, {len(found.hits)} hits, sang {found.sang:.3f}")

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(keep_asking())

    async def differing_alone(self) -> list[Json]:
        """Send those greedy requests again, one by one, that were not answered with their secrets."""
        found = []
        for asked, text in self.findings.mute[:_MAX_ALONE]:
            alone = await self._answer(asked)
            if alone is None or alone.first.strip() != text:
                found.append({"kind": asked.kind, "then": text, "alone": alone and alone.first.strip()})
        return found

    async def seconds(self, tenant: int, prompt: str) -> float:
        """How long one token takes after this prompt."""
        body = {"model": self._models[0], "prompt": prompt, "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        answer = _Answer()
        await call(self._target, self._bytes("completions", body, tenant), answer)
        if answer.status != 200:
            raise BenchmarkError(f"the service answered {answer.status}: {answer.data[:200]!r}")
        return time.perf_counter() - began

    def _new_question(self) -> Question:
        kind, tenant = self._source.choice(self.kinds), self._source.randrange(len(self._keys))
        earlier = self._earlier.setdefault(tenant, [])
        if kind == "again" and earlier:
            return self._source.choice(earlier)
        self._num_owners += 1
        secrets = [self._secrets.new(self._num_owners) for _ in range(2 if kind == "batch" else 1)]
        # Half of them have a salt that no request has used: then nothing at all may be cached.
        salt = self._source.choice([None, "mine", f"{self._num_owners}", f"{self._num_owners}"])
        prompt_ids = self._tokenizer.encode_chat(secrets[0].messages)
        asked = question(
            kind, model=self._source.choice(self._names_for(kind)), tenant=tenant, salt=salt, secrets=secrets,
            prompt_ids=prompt_ids, source=self._source,
        )  # fmt: skip
        if kind == "again":
            earlier.append(asked)
        return asked

    def _names_for(self, kind: str) -> Sequence[str]:
        """What a request of a kind may ask for. One in the background may be sent again when a step of it has run."""
        if kind == "documents" and self._pipelines:
            return (DOCUMENTS,)
        if kind in ("ranking", "background"):
            return self._models
        return (*self._models, *(name for name in self._pipelines if name != DOCUMENTS))

    async def _ask(self, asked: Question) -> None:
        prompts = [self._tokenizer.encode_chat(each) for each in asked.conversations]
        self._prefixes.add(asked, prompts)
        answer = await self._answer(asked)
        for _ in range(_MAX_TRIES - 1 if asked.kind == "background" else 0):  # such are refused while all is taken
            if answer is None:
                await asyncio.sleep(_RETRY_S)
                answer = await self._answer(asked)
        if answer is None:
            return
        found = self.findings
        found.answers[asked.kind] += 1
        own = {each.owner for each in asked.secrets}
        texts = answer.texts + [self._tokenizer.decode(each) for each in answer.ids]
        owners = set().union(*map(self._secrets.owners_in, texts))
        others = owners - own
        found.own[asked.kind] += owners >= own
        if others:
            found.hits.append({"kind": asked.kind, "owners": sorted(others)[:5], "texts": texts[:3]})
        num_explained = max(self._prefixes.num_explained(asked, each) for each in prompts)
        if answer.cached_tokens:
            found.num_with_cached += 1
            if answer.cached_tokens > num_explained:
                told = {"kind": asked.kind, "cached": answer.cached_tokens, "explained": num_explained}
                found.unexplained.append(told | {"salt": asked.salt})
        if asked.kind in GREEDY_TEXT:
            found.num_greedy += 1
            if answer.first.strip() != asked.secrets[0].sentence:
                found.mute.append((asked, answer.first.strip()))

    async def _answer(self, asked: Question) -> Heard | None:
        """What was heard; None when it was no answer."""
        reader = _Answer(leaves_after=asked.leaves_after)
        sending = asyncio.create_task(call(self._target, self._bytes(asked.endpoint, asked.body, asked.tenant), reader))
        reader.on_enough = sending.cancel
        try:
            await sending
        except asyncio.CancelledError:
            if not reader.has_enough:
                raise
            self.findings.statuses["left"] += 1
        except CutOff:
            self.findings.statuses["cut_off"] += 1
        except OSError:
            self.findings.statuses["no connection"] += 1
            return None
        else:
            self.findings.statuses[str(reader.status)] += 1
        return heard(asked, reader.documents(is_stream=asked.is_stream)) if reader.status == 200 else None

    def _bytes(self, endpoint: str, body: Mapping[str, Any], tenant: int) -> bytes:
        headers = {"Authorization": f"Bearer {self._keys[tenant]}"}
        return self._target.request(endpoint, json.dumps(body).encode(), headers)


class _Answer:
    """Reads an answer, as far as its client stays."""

    def __init__(self, *, leaves_after: int | None = None) -> None:
        self.status = 0
        self.data = b""
        self.on_enough: Any = lambda: None
        self._leaves_after = leaves_after

    @property
    def has_enough(self) -> bool:
        return self._leaves_after is not None and len(self.data) >= self._leaves_after

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status

    def body(self, data: bytes, *, at_s: float) -> None:
        self.data += data
        if self.has_enough:
            self.on_enough()

    def documents(self, *, is_stream: bool) -> list[Json]:
        """What has come of it whole."""
        if not is_stream:
            try:
                return [json.loads(self.data)]
            except ValueError:
                return []
        return [json.loads(content) for content in EventStream().feed(self.data) if content.startswith(b"{")]


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measured, arguments, is_bad=_is_bad)


def measured(given: argparse.Namespace) -> Json:
    keys = [f"sk-tenant-{number}-{random.SystemRandom().getrandbits(128):x}" for number in range(given.tenants)]
    with tempfile.TemporaryDirectory(prefix="carousel-canary-") as folder:
        adapters = _adapters(Path(given.model), Path(folder), given.adapters)
        keys_file = write_keys(Path(folder, "keys.yaml"), {f"tenant-{n}": key for n, key in enumerate(keys)})
        args = application(given.model, keys_file, f"{folder}/batches", adapters, num_blocks=given.num_blocks)
        with stage(args) as running:
            models = [MODEL_NAME, *adapters]
            pipelines = dict.fromkeys([each["name"] for each in pipelines_of(models)], models)
            canary = Canary(
                running.target, keys, Tokenizer.load(given.model), models=models, pipelines=pipelines, seed=given.seed
            )
            return asyncio.run(_run(canary, running, given))


def _adapters(model: Path, folder: Path, number: int) -> dict[str, str]:
    """Folders by name. The model repeats words with them as well: their numbers are small."""
    paths = {f"adapter-{seed}": folder / f"adapter-{seed}" for seed in range(number)}
    for seed, path in enumerate(paths.values()):
        save_random_adapter(path, projections_in(model), rank=8, seed=seed, scale=_SCALE)
    return {name: str(path) for name, path in paths.items()}


def pipelines_of(models: Sequence[str]) -> list[Json]:
    """Steps of all kinds over these models; none without two, as a cascade needs them."""
    if len(models) < 2:
        return []
    first, second, *_ = models
    cases = [{"model": second, "max_prompt_tokens": 60}, {"model": "careful"}]
    return [
        {"name": "careful", "steps": [{"kind": "cascade", "small": second, "large": first, "min_mean_logprob": -0.01}]},
        {"name": "together", "steps": [{"kind": "ensemble", "models": [first, second]}]},
        {"name": "auto", "steps": [{"kind": "route", "by": "length", "cases": cases}]},
        {
            "name": DOCUMENTS,
            "steps": [{"kind": "embed", "model": first, "top_n": 1}, {"kind": "generate", "model": "auto"}],
        },
    ]


def application(model: str, keys_file: Path, folder: str, adapters: Mapping[str, str], *, num_blocks: int) -> Json:
    """The application's `args`: two replicas with too little KV memory for what they are sent."""
    return {
        "models": [
            {
                "name": MODEL_NAME,
                "adapters": dict(adapters),
                "engine": {
                    "model": {"path": model},
                    "cache": {"num_blocks": num_blocks, "block_size": BLOCK_SIZE},
                    "scheduler": {"max_running": 32, "max_waiting": 256},
                    "speculation": {"method": "lookup"},
                },
                "replicas": {"num_replicas": 2, "num_cpus": 0.1, "drain_timeout_s": 5},
            }
        ],
        "pipelines": pipelines_of([MODEL_NAME, *adapters]),
        "api": {"keys_file": str(keys_file), "metrics_for": "public"},
        "batches": {"path": folder},
    }


async def _run(canary: Canary, running: Stage, given: argparse.Namespace) -> Json:
    began = time.perf_counter()
    asking = asyncio.create_task(canary.ask_many(given.requests, at_once=given.at_once, for_s=given.seconds))
    killed = 0
    while given.kill and not killed and not asking.done():
        await asyncio.sleep(0.05)
        is_late = time.perf_counter() - began > given.seconds / 2
        if is_late or canary.findings.answers.total() >= given.requests // 2:
            os.kill(running.replicas()[0], signal.SIGKILL)
            killed = 1
    await asking
    seconds = time.perf_counter() - began
    await running.is_whole()
    return figures_of(canary.findings) | {
        "seconds": round(seconds, 1),
        "differ_from_alone": await canary.differing_alone(),
        "preemptions": _counted(running.target, "carousel_engine_preemptions_total"),
        "resumes": _counted(running.target, "carousel_resumes_total"),
        "killed": killed,
        "times": await times(canary, given.probes, random.Random(given.seed)),
    }


async def times(canary: Canary, number: int, source: random.Random) -> dict[str, float | None]:
    """Whether the time of a response shows that its prompt was sent before: by another tenant, or by the same one."""
    found: dict[str, list[float]] = {"new": [], "others": [], "own": []}
    for _ in range(number):
        for sender, kind in ((None, "new"), (1, "others"), (0, "own")):
            prompt = " ".join(str(source.randrange(200)) for _ in range(_PROBE_WORDS))
            for _ in range(6 if sender is not None else 0):  # so often that both replicas should have it
                await canary.seconds(sender or 0, prompt)
            found[kind].append(await canary.seconds(0, prompt))
    return {kind: _area(found[kind], found["new"]) for kind in ("others", "own")}


def _area(shorter: Sequence[float], longer: Sequence[float]) -> float | None:
    """How often a time of the first is below one of the second: the area under the ROC curve."""
    pairs = [(a < b) + 0.5 * (a == b) for a in shorter for b in longer]
    return round(sum(pairs) / len(pairs), 3) if pairs else None


def figures_of(found: Findings) -> Json:
    """What the answers say."""
    return {
        "requests": found.statuses.total(),
        "searched": found.answers.total(),
        "answers": dict(sorted(found.answers.items())),
        "own": dict(sorted(found.own.items())),
        "statuses": dict(sorted(found.statuses.items())),
        "hits": len(found.hits),
        "some_hits": found.hits[:_MAX_TOLD],
        "sang": round(found.sang, 4),
        "greedy": found.num_greedy,
        "cached": {
            "own": found.num_with_cached - len(found.unexplained),
            "unexplained": len(found.unexplained),
            "some": found.unexplained[:_MAX_TOLD],
        },
    }


def _is_bad(figures: Mapping[str, Any]) -> bool:
    has_server_errors = any(status.startswith("5") for status in figures["statuses"])
    leaks = figures["hits"] or figures["cached"]["unexplained"] or figures["differ_from_alone"]
    return bool(leaks or has_server_errors or figures["sang"] < MIN_SANG)


def _counted(target: Target, name: str) -> int:
    with urllib.request.urlopen(f"http://{target.host}:{target.port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return round(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("service.canary", (__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="models/demo", metavar="DIR", help="one that repeats words as it is asked to"
    )
    parser.add_argument(
        "--adapters", type=int, default=2, metavar="N", help="that requests ask for, as for the base (2)"
    )
    parser.add_argument("--requests", type=positive, default=20_000, metavar="N", help="requests of all kinds")
    parser.add_argument("--seconds", type=float, default=3600.0, metavar="S", help="none is sent after so long")
    parser.add_argument("--at-once", type=positive, default=96, metavar="N", help="of them under way")
    parser.add_argument("--tenants", type=positive, default=12, metavar="N", help="API keys")
    parser.add_argument("--num-blocks", type=positive, default=200, metavar="N", help="KV memory of one replica")
    parser.add_argument("--probes", type=int, default=40, metavar="N", help="prompts of each kind that are timed")
    parser.add_argument("--kill", action=argparse.BooleanOptionalAction, default=True, help="kill a replica halfway")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another one asks other questions")
    return parser


if __name__ == "__main__":
    sys.exit(main())
