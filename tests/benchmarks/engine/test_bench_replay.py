"""Recorded runs lived through again: random ones, mutated ones, and real ones through the command line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule
from transformers import AutoModelForCausalLM

from app.build import build_matchers, build_sync_engine
from app.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from app.engine.batch import StepBatch, StepResult
from app.engine.engine import Engine
from app.engine.model_runner import ModelRunner
from app.engine.request import Adapter, Grammar, GrammarKind, ModelInfo, Pooling
from app.engine.trace.entries import Entry, Header, Limited, StepRecord, parse, to_line
from app.engine.trace.recorder import StepRecorder
from app.engine.trace.redaction import Redactor
from app.model.adapter_files import adapter_digest
from benchmarks.engine.divergence import Comparison
from benchmarks.engine.reenacting_runner import StandIns
from benchmarks.engine.reenactment import Reenactment
from benchmarks.engine.replay import Found, main, reenact
from tests.engine.test_combinations import STRATEGIES, workload
from tests.engine.test_invariants import EngineMachine
from tests.engine.test_matcher import LateMatchedRunner
from tests.engine.test_steps_in_flight import LateRunner, OverlappedMachine
from tests.kit.engine import (
    EOS,
    POLICIES,
    VOCAB_SIZE,
    CountingRunner,
    FakeClock,
    MadeMatchers,
    MatchedRunner,
    SlotStore,
    TimedRunner,
    build_fake_engine,
    make_request,
    run_to_end,
)  # fmt: skip
from tests.lora import save_adapter
from tests.tiny_encoders import save_tiny_encoder

pytestmark = pytest.mark.usefixtures("small_lengths")

SETTINGS: dict[str, Any] = {
    "max_running": 6, "max_waiting": 100, "max_step_tokens": 32, "prefill_chunk_tokens": 16
}  # fmt: skip


def header_of(
    runner: ModelRunner,
    scheduler: SchedulerConfig | None = None,
    *,
    num_blocks: int = 64,
    cache: CacheConfig | None = None,
    model_info: ModelInfo | None = None,
) -> Header:
    """Of a fake engine with this runner."""
    cache, scheduler = cache or CacheConfig(block_size=4), scheduler or SchedulerConfig(**SETTINGS)
    model_info = model_info or ModelInfo(max_model_len=1000, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    return Header(
        run="test", began="2026-11-20T12:00:00", launches_ahead=runner.launches,
        num_blocks=num_blocks, facts=asdict(model_info),
        config=EngineConfig(cache=cache, scheduler=scheduler).model_dump(mode="json"), versions={}, commit=None,
    )  # fmt: skip


class Recorded:
    """The log of one run, as the lines that a file of it has."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.recorder = StepRecorder(self._put)

    def _put(self, entry: Entry) -> bool:
        self.entries.append(entry)
        return True

    @property
    def lines(self) -> list[str]:
        return [to_line(entry) for entry in self.entries]

    def redacted_lines(self, block_size: int) -> list[str]:
        redactor = Redactor(block_size)
        return [to_line(hidden) for entry in self.entries for hidden in redactor.redacted(entry)]


class Replay:
    """One replay of lines without a model."""

    def __init__(self, header: Header, lines: Iterable[str], *, hides: bool = False, **differently: Any) -> None:
        config = EngineConfig.model_validate(header.config)
        scheduler = SchedulerConfig.model_validate(config.scheduler.model_dump() | differently)
        entries = [parse(line) for line in lines]
        self.made: list[str] = []
        reenactment = _Noting(
            header, scheduler=scheduler, cache=config.cache,
            stand_ins=StandIns(entries, block_size=config.cache.block_size) if hides else None,
        )  # fmt: skip
        reenactment.made = self.made
        comparison = Comparison(
            reenactment.request_ids, computes=False, hides_tokens=hides,
            differences=[f"scheduler.{name}" for name in differently],
        )  # fmt: skip
        self.found: Found = reenact(entries, reenactment, comparison)


def assert_replayed(header: Header, recorded: Recorded) -> Replay:
    """With its prompts and without."""
    replay = Replay(header, recorded.lines)
    for each in (replay, Replay(header, recorded.redacted_lines(header.config["cache"]["block_size"]), hides=True)):
        num_steps = sum(isinstance(entry, StepRecord) for entry in recorded.entries)
        assert each.found == Found(num_steps), str(each.found.divergence)
    return replay


class _Noting(Reenactment):
    made: list[str]

    def step(self, record: StepRecord, after: StepRecord | None) -> StepRecord:
        made = super().step(record, after)
        self.made.append(to_line(made))
        return made


class RecordedMachine(EngineMachine):
    """Random workloads, with everything that may come from outside; replayed when they have ended."""

    can_die = False  # a log is of one process

    def new_recorder(self) -> StepRecorder:
        self.recorded = Recorded()
        # The scheduler's settings will change.
        self.first_settings = SchedulerConfig(**self.settings)
        return self.recorded.recorder

    @rule()
    def clear_the_prefix_cache(self) -> None:
        self.engine.clear_prefix_cache()

    def run_to_the_end(self) -> None:
        super().run_to_the_end()
        pool = self.engine._scheduler.pool
        cache = CacheConfig(block_size=pool.block_size)
        header = header_of(
            self.runner, self.first_settings, num_blocks=pool.num_blocks, cache=cache, model_info=self.engine.model_info
        )  # fmt: skip
        assert assert_replayed(header, self.recorded).made == Replay(header, self.recorded.lines).made


class RecordedOverlappedMachine(RecordedMachine, OverlappedMachine):
    """The same on an engine that launches ahead."""

    runner_class = LateRunner


_SETTINGS = settings(
    max_examples=20, stateful_step_count=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
TestRecordedMachine = RecordedMachine.TestCase
TestRecordedMachine.settings = _SETTINGS
TestRecordedOverlappedMachine = RecordedOverlappedMachine.TestCase
TestRecordedOverlappedMachine.settings = _SETTINGS


def test_a_prefix_that_is_fetched_anew_after_a_sleep_is_replayed() -> None:
    """The first fetch is done when the second has begun."""
    clock, recorded = FakeClock(), Recorded()
    runner = TimedRunner(clock, block_size=4)
    store = SlotStore(runner)
    engine = build_fake_engine(
        runner=runner, clock=clock, num_blocks=64, recorder=recorded.recorder, store=store, **SETTINGS
    )
    engine.add(replace(make_request(tuple(range(5, 14)), max_tokens=4), generated_token_ids=(7,)))
    engine.step()
    engine.sleep()
    engine.wake()
    engine.step()
    assert [fetch.is_wanted for fetch in store.fetches] == [False, True]
    while store.fetches:
        store.move(1)
        engine.step()
    run_to_end(engine, clock=clock)
    assert_replayed(header_of(runner), recorded)


def recorded_run(
    strategy: Any = "continuous", policy: Any = "fcfs", *, is_ahead: bool = False
) -> tuple[Header, Recorded]:
    """64 requests in four waves on a pool that is too small, some aborted, reconfigured in the middle."""
    clock, recorded, draw = FakeClock(), Recorded(), random.Random(3)
    runner = LateRunner(clock) if is_ahead else TimedRunner(clock)
    engine = build_fake_engine(
        runner=runner, clock=clock, num_blocks=14, recorder=recorded.recorder, strategy=strategy, policy=policy,
        **SETTINGS,
    )  # fmt: skip
    scheduler = SchedulerConfig(strategy=strategy, policy=policy, **SETTINGS)
    requests = workload()
    for start in range(0, len(requests), 16):
        for request in requests[start : start + 16]:
            engine.add(request)
        for _ in range(10):
            clock.advance(engine.idle_s or 0.0)
            engine.step()
        engine.abort(draw.choice(requests[: start + 16]).request_id)
        engine.abort(requests[start + 15].request_id)
        if start == 16:
            engine.reconfigure(SchedulerConfig(**SETTINGS | {"max_running": 4}, strategy=strategy, policy=policy))
    run_to_end(engine, clock=clock)
    assert engine.stats().total_preemptions > 0
    assert engine.stats().total_aborted > 0
    return header_of(runner, scheduler, num_blocks=14), recorded


class SlowRunner(CountingRunner):
    """Each token of a step takes 10 ms of a clock."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def run(self, batch: StepBatch) -> StepResult:
        self._clock.advance(0.01 * batch.num_tokens)
        return super().run(batch)


def test_limits_that_the_tuner_chose_are_entries_and_a_replay_takes_them_from_there() -> None:
    recorded, clock = Recorded(), FakeClock()
    runner = SlowRunner(clock)
    given = SETTINGS | {"max_step_tokens": 32, "targets": {"itl_p99_ms": 250}}
    engine = build_fake_engine(num_blocks=200, runner=runner, clock=clock, recorder=recorded.recorder, **given)
    for number in range(40):
        engine.add(make_request((5 + number, *(5,) * 30), max_tokens=3))
    run_to_end(engine)
    limited = [entry for entry in recorded.entries if isinstance(entry, Limited)]
    assert limited
    assert limited[-1].limits.max_step_tokens < 28
    header = header_of(runner, SchedulerConfig.model_validate(given), num_blocks=200)
    assert_replayed(header, recorded)
    without = [line for line in recorded.lines if not line.startswith('{"limits"')]
    assert Replay(header, without).found.divergence is not None


@pytest.mark.parametrize("runner_class", [MatchedRunner, LateMatchedRunner])
@pytest.mark.parametrize("num_free", [0, 3])
def test_grammars_are_replayed_without_being_compiled_and_fail_where_they_failed(
    runner_class: type[ModelRunner], num_free: int
) -> None:
    recorded, clock, runner = Recorded(), FakeClock(), runner_class()
    engine = build_fake_engine(runner=runner, clock=clock, recorder=recorded.recorder, **SETTINGS)
    requests = [make_request(max_tokens=9, grammar=Grammar(GrammarKind.REGEX, text)) for text in ("3 4", "5 6 7!")]
    for request in (*requests, *(make_request(max_tokens=9) for _ in range(num_free))):
        engine.add(request, matcher=MadeMatchers().matcher_of(request).result())
    run_to_end(engine)
    assert engine.stats().total_failed == 1
    assert_replayed(header_of(runner), recorded)


@pytest.mark.parametrize(
    ("strategy", "policy"),
    [
        *((strategy, "fcfs") for strategy in STRATEGIES),
        *(("continuous", policy) for policy in POLICIES[1:]),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_ahead", [False, True], ids=["in-turn", "ahead"])
def test_a_run_of_every_strategy_and_policy_is_replayed_step_by_step(
    strategy: Any, policy: str, is_ahead: bool
) -> None:
    header, recorded = recorded_run(strategy, policy, is_ahead=is_ahead)
    found = Replay(header, recorded.lines).found
    assert found.divergence is None, str(found.divergence)
    assert found.num_steps > 60


# ---------------------------------------------------------------------- divergence


def mutated(lines: list[str], change: Callable[[dict[str, Any]], bool | None], *, skip: int = 0) -> list[str]:
    """With the first entry changed that `change` says True of, after `skip` others."""
    changed, skipped = [], count()
    is_done = False
    for line in lines:
        entry = json.loads(line)
        if not is_done and change(entry) and next(skipped) >= skip:
            is_done = True
            line = json.dumps(entry)
        changed.append(line)
    assert is_done, "nothing was changed"
    return changed


def another(*path: str | int, by: Any = None) -> Callable[[dict[str, Any]], bool]:
    """Changes an entry that has something there: adds one to a number, or puts another value."""

    def change(entry: Any) -> bool:
        try:
            for name in path[:-1]:
                entry = entry[name]
            old = entry[path[-1]]
        except (KeyError, IndexError, TypeError):
            return False
        if old is None or old == by:
            return False
        entry[path[-1]] = old + 1 if by is None else by
        return True

    return change


another_token = another("token_ids", 0)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (another("scheduled", "starts", -1), "requests computed"),
        (another("num_free_blocks"), "free blocks"),
        (another("blocks", 0, 0), "blocks of the requests that joined"),
        (another("num_waiting"), "number of waiting requests"),
        (another("wait_reason", by="strategy"), "reason why the first request waits"),
        (another("ended", 0, 1, by="stop"), "requests ended"),
    ],
)
def test_a_step_that_was_changed_is_found_and_explained(change: Callable[[Any], bool], what: str) -> None:
    header, recorded = recorded_run()
    changed = mutated(recorded.lines, change, skip=4)
    at = next(
        json.loads(line)["step"] for before, line in zip(recorded.lines, changed, strict=True)
        if json.loads(before) != json.loads(line)
    )  # fmt: skip
    divergence = Replay(header, changed).found.divergence
    assert divergence is not None
    assert divergence.step == at
    assert divergence.what.startswith(what)
    assert divergence.expected != divergence.got


def test_a_drawn_token_that_was_changed_shows_when_it_is_looked_at() -> None:
    """Tokens are the log's own in a replay without a model: the change shows where blocks are compared by them."""
    clock, recorded = FakeClock(), Recorded()
    engine = build_fake_engine(runner=TimedRunner(clock), clock=clock, recorder=recorded.recorder, **SETTINGS)
    outcome = run_to_end(engine, make_request((5, 6, 7, 8, 9), request_id="first", max_tokens=9))
    run_to_end(engine, make_request((5, 6, 7, 8, 9, *outcome.token_ids["first"]), max_tokens=2))
    header = header_of(TimedRunner(clock))
    assert Replay(header, recorded.lines).found.divergence is None
    divergence = Replay(header, mutated(recorded.lines, another_token)).found.divergence
    assert divergence is not None
    assert "requests computed" in divergence.what
    assert "computes tokens 12 to 13" in divergence.expected
    assert "computes tokens 4 to 13" in divergence.got


def test_a_missing_arrival_and_other_settings_are_explained_and_a_replay_ends_at_a_hole() -> None:
    header, recorded = recorded_run()
    without = [line for line in recorded.lines if not line.startswith('{"arrival":15,')]
    divergence = Replay(header, without).found.divergence
    assert divergence is not None
    assert "number of waiting requests" in divergence.what
    assert int(divergence.expected) == int(divergence.got) + 1
    divergence = Replay(header, recorded.lines, max_running=5).found.divergence
    assert divergence is not None
    assert divergence.likely.startswith("the set-up of the replay differs (scheduler.max_running)")
    lines = recorded.lines
    lines[30:40] = ['{"lost":10}']
    found = Replay(header, lines).found
    assert (found.divergence, found.num_lost, 0 < found.num_steps < 30) == (None, 10, True)


# ---------------------------------------------------------------------- the command line


@pytest.fixture(scope="module")
def log_folders(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Logs of the bundled model, with prompts and without."""
    folders = {}
    for has_prompts in (True, False):
        folders[has_prompts] = folder = tmp_path_factory.mktemp("log")
        config = EngineConfig.model_validate({
            "model": {"path": str(demo_path), "device": "cpu"},
            "cache": {"num_blocks": 12, "block_size": 4},
            "scheduler": {"max_running": 4, "max_step_tokens": 16},
            "step_log": {"path": str(folder), "record_prompts": has_prompts},
        })  # fmt: skip
        engine = build_sync_engine(config)
        requests = [
            make_request(
                (3, *range(20, 24 + 3 * number)), max_tokens=8 + number, temperature=float(number % 2), ignore_eos=True
            )
            for number in range(6)
        ]
        run_to_end(engine, *requests)
        assert engine.stats().total_preemptions > 0
        engine.close()
    return folders


@pytest.mark.parametrize("options", [(), ("--simulated",)], ids=["model", "simulated"])
def test_a_real_log_is_replayed(
    options: tuple[str, ...], log_folders: dict[bool, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(log_folders[True]), *options, "--json", str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out.startswith("the same: ")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["divergence"] is None
    assert found["num_requests"] == 6
    assert found["num_steps"] > 15


def _engine(folder: Path, **branches: Any) -> Engine:
    return build_sync_engine(EngineConfig.model_validate(branches | {"step_log": {"path": str(folder / "log")}}))


def _drafting(demo_path: Path, folder: Path) -> Engine:
    engine = _engine(
        folder, model={"path": str(demo_path), "device": "cpu"}, cache={"num_blocks": 6},
        scheduler={"max_running": 4, "max_step_tokens": 32},
        speculation={"method": "draft_model", "model": str(demo_path)},
    )  # fmt: skip
    run_to_end(engine, *[
        make_request((3, *range(20, 24 + number)), max_tokens=20, temperature=float(number % 2), ignore_eos=True)
        for number in range(6)
    ])  # fmt: skip
    assert engine.stats().total_preemptions > 0
    assert engine.stats().total_drafted_tokens > 0
    return engine


def _encoding(demo_path: Path, folder: Path) -> Engine:
    save_tiny_encoder("bert", folder / "model")
    limits = {"max_step_tokens": 30, "max_running": 8}
    engine = _engine(folder, model={"path": str(folder / "model"), "device": "cpu"}, scheduler=limits)
    run_to_end(engine, *[make_request((5,) * (9 * n), pooling=Pooling.CLS, max_tokens=0) for n in range(1, 6)])
    return engine


def _matching(demo_path: Path, folder: Path) -> Engine:
    engine = _engine(folder, model={"path": str(demo_path)})
    matchers = build_matchers(EngineConfig(model=ModelConfig(path=str(demo_path))), engine.model_info)
    for number in range(3):
        grammar = Grammar(GrammarKind.REGEX, "[a-z]{9,20}" + "!" * number)
        request = make_request((20, 21, 22), max_tokens=40, temperature=1.0, seed=number, grammar=grammar)
        engine.add(request, matcher=matchers.matcher_of(request).result())
    run_to_end(engine)
    matchers.close()
    return engine


@pytest.mark.parametrize("run", [_drafting, _encoding, _matching], ids=["draft-model", "encoder", "grammars"])
def test_a_real_log_of_every_kind_is_replayed(
    run: Callable[[Path, Path], Engine], demo_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(demo_path, tmp_path).close()
    for options in ((), ("--simulated",)):
        assert main([str(tmp_path / "log"), *options]) == 0
        assert capsys.readouterr().out.startswith("the same: ")


@pytest.fixture(scope="module")
def adapter(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    """Of the bundled model."""
    model = AutoModelForCausalLM.from_pretrained(demo_path)
    return save_adapter(tmp_path_factory.mktemp("adapters") / "support", model, rank=8, size=0.2)


def test_a_real_log_with_adapters_is_replayed_with_the_files_that_it_names(
    adapter: Adapter, demo_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = _engine(tmp_path, model={"path": str(demo_path), "device": "cpu"})
    outcome = run_to_end(
        engine, *[make_request((20, 21, 22), adapter=each, max_tokens=20, ignore_eos=True) for each in (adapter, None)]
    )
    engine.close()
    log = str(tmp_path / "log")
    adapted, plain = outcome.token_ids.values()
    assert adapted != plain
    for options in ((), ("--simulated",)):
        assert main([log, *options]) == 0
        assert capsys.readouterr().out.startswith("the same: ")

    kept, weights = Path(adapter.path), Path(adapter.path) / "adapter_config.json"
    content = weights.read_text()
    weights.write_text(content.replace('"lora_alpha": 8', '"lora_alpha": 4'))
    assert main([log]) == 2
    assert f"is {adapter_digest(kept)} here and {adapter.digest} in the log" in capsys.readouterr().err
    weights.write_text(content)
    kept.rename(kept.with_name("moved"))
    assert main([log]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the log has requests with the adapter support: the adapter '/"), error
    assert "is not a folder here" in error
    assert main([log, "--simulated"]) == 0


def test_a_log_without_prompts_is_replayed_without_a_model_only(
    log_folders: dict[bool, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(log_folders[False])]) == 2
    assert "replay it with --simulated" in capsys.readouterr().err
    assert main([str(log_folders[False]), "--simulated"]) == 0
    (file,) = log_folders[False].iterdir()
    entries = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert not any(entry.get("token_ids") or "prompt_token_ids" in entry.get("request", ()) for entry in entries)


def test_another_token_of_the_model_is_explained(
    log_folders: dict[bool, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = log_folders[True].iterdir()
    header, *lines = file.read_text().splitlines()
    changed = tmp_path / file.name
    changed.write_text("\n".join([header, *mutated(lines, another_token, skip=5)]) + "\n")
    assert main([str(changed), "--json", str(tmp_path / "out.json")]) == 1
    out = capsys.readouterr().out
    assert "of request " in out
    assert "all inputs of this token were the same" in out
    divergence = json.loads((tmp_path / "out.json").read_text())["divergence"]
    assert divergence["what"].startswith("token ")
    assert int(divergence["expected"]) == int(divergence["got"]) + 1


def test_what_if_it_had_been_set_up_otherwise(
    log_folders: dict[bool, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["scheduler.strategy=static", "scheduler.max_running=2", "scheduler.policy=sjf"]
    assert main([str(log_folders[True]), "--simulated", "--set", *settings]) == 1
    out = capsys.readouterr().out
    assert "scheduler.strategy.name: continuous in the log, static here; scheduler.policy.name" in out
    assert "step 1 differs: requests computed" in out


def test_a_cut_last_line_is_left_out(
    log_folders: dict[bool, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = log_folders[True].iterdir()
    cut = tmp_path / file.name
    cut.write_bytes(file.read_bytes()[:-30])
    assert main([str(cut), "--simulated"]) == 0
    assert "the last line is cut" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds 0 runs"),
        ({"steps-a-00001.jsonl": ""}, "this is not a step log"),
        ({"steps-a-00001.jsonl": '{"step_log":99}\n'}, "the log has format 99; this version reads format 2"),
        ({"steps-a-00001.jsonl": "header\nnonsense\n"}, ":2: this is no entry of a step log"),
        ({"steps-a-00001.jsonl": 'header\n{"step":1,"nonsense":2}\n'}, ":2: this is no entry of a step log"),
        ({"steps-a-00002.jsonl": "second\n"}, "part 1 is not there"),
        ({"steps-a-00001.jsonl": "header\n", "steps-b-00001.jsonl": "header\n"}, "holds 2 runs"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_sentence(
    files: dict[str, str],
    message: str,
    log_folders: dict[bool, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (real,) = log_folders[True].iterdir()
    header = real.read_text().splitlines()[0]
    for name, content in files.items():
        second = json.dumps(json.loads(header) | {"part": 2})
        (tmp_path / name).write_text(content.replace("header", header).replace("second", second))
    assert main([str(tmp_path), "--simulated"]) == 2
    assert message in capsys.readouterr().err
