from __future__ import annotations

import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path
from types import FrameType

import pytest

from app.build import build_sync_engine
from app.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, StepLogConfig
from app.engine.engine import Engine
from app.engine.request import FinishReason, Pooling
from app.errors import InvalidSetup
from app.model.simulated import SimulatedCosts, SimulatedModelRunner
from app.text import Tokenizer
from tests.kit.engine import EOS, FakeClock, build_fake_engine, make_request, run_to_end

TEXT = tuple(range(2, 50))


def simulated_engine(
    clock: FakeClock | None = None,
    *,
    costs: SimulatedCosts = SimulatedCosts(step_ms=0),  # noqa: B008
    num_blocks: int = 64,
    block_size: int = 4,
    text: tuple[int, ...] = TEXT,
    **settings: object,
) -> Engine:
    clock = clock or FakeClock()
    runner = SimulatedModelRunner(
        costs,
        text_token_ids=text,
        eos_token_ids=(EOS,),
        num_blocks=num_blocks,
        block_size=block_size,
        clock=clock,
        sleep=clock.advance,
    )
    return build_fake_engine(num_blocks=num_blocks, block_size=block_size, runner=runner, clock=clock, **settings)  # type: ignore[arg-type]


def prompt(start: int, length: int) -> tuple[int, ...]:
    return tuple(2 + (start + position * 7) % 48 for position in range(length))


def test_a_step_takes_what_the_cost_model_says() -> None:
    clock = FakeClock()
    engine = simulated_engine(clock, costs=SimulatedCosts(step_ms=10, per_token_ms=0.5))
    engine.add(make_request(prompt(0, 20), max_tokens=3))
    taken_ms = []
    while engine.has_work:
        began = clock.at
        engine.step()
        taken_ms.append((clock.at - began) * 1000)
    # Chunks of 16 and 4 prompt tokens, then single tokens.
    assert taken_ms == pytest.approx([10 + 8, 10 + 2, 10 + 0.5, 10 + 0.5])


def test_what_the_step_itself_computes_is_part_of_its_time() -> None:
    slow = FakeClock()

    def clock() -> float:
        slow.advance(0.003)  # every look at the clock finds it later
        return slow.at

    slept: list[float] = []
    runner = SimulatedModelRunner(
        SimulatedCosts(step_ms=10), text_token_ids=TEXT, eos_token_ids=(), num_blocks=64, block_size=4,
        clock=clock, sleep=slept.append,
    )  # fmt: skip
    run_to_end(build_fake_engine(runner=runner), make_request(max_tokens=1))
    assert slept == pytest.approx([0.007])


def test_a_step_sleeps_on_the_real_clock() -> None:
    runner = SimulatedModelRunner(
        SimulatedCosts(step_ms=5), text_token_ids=TEXT, eos_token_ids=(), num_blocks=64, block_size=4
    )
    began, cpu_began = time.monotonic(), time.thread_time()
    run_to_end(build_fake_engine(runner=runner), make_request(max_tokens=20))
    assert time.monotonic() - began >= 0.1
    assert time.thread_time() - cpu_began < 0.05


def test_the_same_request_has_the_same_tokens_beside_any_others() -> None:
    requests = [
        make_request(prompt(3 * number, 5 + number), request_id=str(number), max_tokens=9 + number, temperature=1.0)
        for number in range(6)
    ]
    together = run_to_end(simulated_engine(), *requests).token_ids
    for request in requests:
        assert run_to_end(simulated_engine(), request).token_ids[request.request_id] == together[request.request_id]
    assert len({tuple(token_ids[:5]) for token_ids in together.values()}) == 6


def test_a_prefix_hit_gives_the_same_tokens() -> None:
    engine, shared = simulated_engine(), prompt(5, 16)
    requests = [make_request((*shared, 40 + number), request_id=str(number), max_tokens=12) for number in range(2)]
    found = {}
    for request in requests:
        found |= run_to_end(engine, request).token_ids
    assert engine.stats().total_cached_tokens == 16
    for request in requests:
        assert run_to_end(simulated_engine(), request).token_ids[request.request_id] == found[request.request_id]


@pytest.mark.parametrize("block", [0, 2])
def test_a_wrong_block_changes_the_tokens(block: int) -> None:
    request = make_request(prompt(1, 14), max_tokens=12)
    expected = run_to_end(simulated_engine(), request).token_ids
    engine = simulated_engine()
    engine.add(request)
    engine.step()
    sequence = engine._scheduler._sequences[request.request_id]
    sequence.block_ids = [60 if at == block else number for at, number in enumerate(sequence.block_ids)]
    assert run_to_end(engine).token_ids[request.request_id] != expected[request.request_id][1:]


def test_the_seed_matters_only_where_tokens_are_drawn_at_random() -> None:
    def tokens(**sampling: object) -> list[int]:
        request = make_request(request_id="one", max_tokens=12, **sampling)
        return run_to_end(simulated_engine(), request).token_ids["one"]

    assert tokens(temperature=0.0, seed=1) == tokens(temperature=0.0, seed=2)
    assert tokens(temperature=1.0, seed=1) == tokens(temperature=1.0, seed=1)
    assert tokens(temperature=1.0, seed=1) != tokens(temperature=1.0, seed=2)


def test_an_end_token_comes_with_the_probability_asked_for() -> None:
    costs = SimulatedCosts(step_ms=0, end_probability=0.1)
    requests = [make_request(prompt(n, 5), request_id=str(n), max_tokens=200) for n in range(48)]
    outcome = run_to_end(simulated_engine(costs=costs, num_blocks=3000), *requests)
    lengths = [len(found) for found in outcome.token_ids.values()]
    assert set(outcome.reasons.values()) == {FinishReason.STOP}
    assert 6 < sum(lengths) / len(lengths) < 15
    assert lengths == [
        len(found) for found in run_to_end(simulated_engine(costs=costs, num_blocks=3000), *requests).token_ids.values()
    ]


def test_banned_tokens_are_never_drawn() -> None:
    ends_at_once = SimulatedCosts(step_ms=0, end_probability=1.0)
    request = make_request(request_id="end", max_tokens=20, min_tokens=8)
    found = run_to_end(simulated_engine(costs=ends_at_once), request).token_ids["end"]
    assert found.index(EOS) == 8  # not among the first eight
    request = make_request(request_id="stop", max_tokens=40, min_tokens=20, stop_token_ids=(7,))
    found = run_to_end(simulated_engine(text=(7, 8, 9)), request).token_ids["stop"]
    assert found.index(7) >= 20


def test_a_step_of_256_sequences_takes_a_dozen_calls_for_each() -> None:
    """Well under a millisecond. Counted, as CPU time depends on what else runs."""
    engine = simulated_engine(
        num_blocks=8192, block_size=16, max_running=256, max_step_tokens=4096, max_model_len=2000, max_waiting=256
    )
    for number in range(256):
        engine.add(make_request(prompt(number, 16), request_id=str(number), max_tokens=60))
    for _ in range(40):
        engine.step()
    batch = engine._scheduler.schedule(0.0)
    assert len(batch.sampled) == 256
    num_calls = 0

    def count_calls(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count_calls)
    try:
        engine.runner.run(batch)
    finally:
        sys.setprofile(None)
    assert 256 <= num_calls < 256 * 12  # 9 of them, some written in C


def demo_config(demo_path: Path, **model: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=str(demo_path), simulated={"step_ms": 0}, **model),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_running=4),
    )


def test_the_folder_says_what_is_served_and_answers_are_text(demo_path: Path) -> None:
    engine = build_sync_engine(demo_config(demo_path))
    assert (engine.model_info.max_model_len, engine.model_info.vocab_size, engine.model_info.eos_token_ids) == (
        2048,
        763,
        (4,),
    )
    assert engine.stats().num_blocks == 4 * 2048 // 16
    tokenizer = Tokenizer.load(str(demo_path))
    request = make_request(tokenizer.encode("Count to three.", add_special_tokens=False), max_tokens=300)
    [found] = run_to_end(engine, request).token_ids.values()
    assert not tokenizer.special_token_ids & set(found)
    text = tokenizer.decode(found, skip_special_tokens=False)
    assert len(text) > 300
    assert "\N{REPLACEMENT CHARACTER}" not in text


def test_sizes_are_as_configured(demo_path: Path) -> None:
    config = demo_config(demo_path, max_model_len=512).model_copy(update={"cache": CacheConfig(num_blocks=40)})
    engine = build_sync_engine(config)
    assert (engine.model_info.max_model_len, engine.stats().num_blocks) == (512, 40)


def test_what_the_model_does_not_allow_is_refused(demo_path: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetup, match=r"max_model_len is 4,096; .* accepts at most 2,048 tokens"):
        build_sync_engine(demo_config(demo_path, max_model_len=4096))
    with pytest.raises(InvalidSetup, match=r"there is no config.json at"):
        build_sync_engine(demo_config(tmp_path))


def test_a_simulated_replica_writes_the_configured_step_log(demo_path: Path, tmp_path: Path) -> None:
    config = demo_config(demo_path).model_copy(update={"step_log": StepLogConfig(path=str(tmp_path))})
    engine = build_sync_engine(config)
    run_to_end(engine, make_request((5, 6, 7), request_id="told", max_tokens=3))
    engine.close()
    [log] = tmp_path.iterdir()
    assert '"told"' in log.read_text()


PROGRAM = """
import sys
from app.build import build_engine
from app.config import EngineConfig, ModelConfig
engine = build_engine(EngineConfig(model=ModelConfig(path=sys.argv[1], simulated={"step_ms": 1})))
engine.shutdown()
assert "torch" not in sys.modules
"""


def test_a_simulated_replica_starts_without_torch(demo_path: Path) -> None:
    project = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", PROGRAM, str(demo_path)], check=True, cwd=project)


def test_a_crash_token_kills_the_process_that_computes_it_and_no_other() -> None:
    code = (
        "from app.model.simulated import SimulatedCosts, SimulatedModelRunner\n"
        "from tests.kit.engine import build_fake_engine, make_request, run_to_end\n"
        "runner = SimulatedModelRunner(SimulatedCosts(step_ms=0, crash_token_id=7), text_token_ids=(2, 3),\n"
        "                              eos_token_ids=(), num_blocks=64, block_size=4)\n"
        "engine = build_fake_engine(runner=runner)\n"
        "run_to_end(engine, make_request((5, 6), max_tokens=2))\n"
        "print('lives', flush=True)\n"
        "run_to_end(engine, make_request((5, 7), max_tokens=2))\n"
        "print('still lives', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "lives\n"), done.stderr


def test_tokens_and_logprobs_follow_from_the_tokens_before_whatever_happens_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [
        make_request(prompt(n, 20), max_tokens=16, temperature=0.5, seed=n, logprobs=2, prompt_logprobs=n % 2)
        for n in range(4)
    ]
    roomy = run_to_end(simulated_engine(), *requests)
    monkeypatch.setattr("app.engine.batch.MAX_SCORED_TOKENS", 3)
    engine = simulated_engine(num_blocks=16)
    cramped = run_to_end(engine, *requests)
    assert engine.stats().total_preemptions > 0
    assert cramped.token_ids == roomy.token_ids
    assert (cramped.logprobs, cramped.prompt_logprobs) == (roomy.logprobs, roomy.prompt_logprobs)
    for request in requests:
        assert len(roomy.logprobs[request.request_id]) == 16
        assert len(roomy.prompt_logprobs[request.request_id]) == 19
        for found in roomy.logprobs[request.request_id]:
            assert (found.rank == 1) == (found.logprob == found.top_logprobs[0])


def test_a_greedy_simulation_draws_what_it_calls_the_likeliest() -> None:
    outcome = run_to_end(simulated_engine(), make_request(prompt(3, 9), max_tokens=8, logprobs=1, ignore_eos=True))
    [(tokens, found)] = zip(outcome.token_ids.values(), outcome.logprobs.values(), strict=True)
    assert [(each.rank, each.top_token_ids) for each in found] == [(1, (token,)) for token in tokens]


def test_only_what_a_matcher_allows_is_drawn() -> None:
    engine = simulated_engine()
    request = make_request(prompt(0, 9), max_tokens=30, allowed_token_ids=(7, 8, 9), temperature=1.0)
    drawn = run_to_end(engine, request).token_ids[request.request_id]
    assert set(drawn) == {7, 8, 9}


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_a_text_becomes_a_vector_of_the_size_that_is_asked_for(pooling: Pooling) -> None:
    def pooled(size: int, token_ids: tuple[int, ...]) -> list[float]:
        engine = simulated_engine(costs=SimulatedCosts(step_ms=0, embedding_size=size))
        [embedding] = run_to_end(engine, make_request(token_ids, max_tokens=0, pooling=pooling)).embeddings.values()
        return array("f", embedding).tolist()

    one, other = pooled(20, prompt(0, 30)), pooled(20, prompt(1, 30))
    assert len(one) == len(other) == 20
    assert one != other
    assert pooled(20, prompt(0, 30)) == one
