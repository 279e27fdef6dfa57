"""Replay without a GPU: the same work done again on the same tensors, with everything a graph asks for around it."""

from __future__ import annotations

import gc
import logging
import re
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.build import assemble, build_sync_engine
from app.config import CacheConfig, SchedulerConfig
from app.engine.batch import DeviceLost, ScheduledSequence, StepBatch
from app.engine.engine import Engine
from app.engine.request import Request
from app.engine.speculation.drafter import Drafter
from app.model.cuda import graph_runner
from app.model.cuda.captured_inputs import graph_sizes
from app.model.cuda.graph_runner import GraphModelRunner, HostCopy
from app.model.cuda.launched_step import LaunchedStep
from app.model.implementations.loaded_model import LoadedModel
from app.model.implementations.transformers_code import TransformersModel
from app.model.sampler import Sampler
from tests.kit import models as kit
from tests.kit.engine import POOLINGS_OF_DECODERS, make_request, run_to_end
from tests.kit.models import DEVICE, config_of, scheduled
from tests.model.test_speculation import RecallingDrafter
from tests.tiny_models import build_tiny_model

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.model.cuda.attention import TritonAttention
from app.model.cuda.graph_capture import CudaCapture
from app.model.cuda.sampler import TritonSampler

HAS_CUDA = torch.cuda.is_available()
NUM_BLOCKS = 8
LIMITS = SchedulerConfig(max_running=6, max_step_tokens=16, prefill_chunk_tokens=7)


class RunAgain:
    """Stands for a CUDA graph: like one it writes every result to where the first one was."""

    def __init__(self) -> None:
        self.replayed: list[int] = []  # rows of each replay

    def __call__(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        output = function()

        def replay() -> torch.Tensor:
            self.replayed.append(output.shape[0])
            return output.copy_(function())

        return replay


def load(path: Path) -> LoadedModel:
    return kit.load(path, device=DEVICE.type, backend="torch")


def attention_for(
    model: LoadedModel, *, batch_invariant: bool = False, max_rows: int = 6, num_blocks: int = NUM_BLOCKS
) -> TritonAttention:
    return TritonAttention(
        model.layers, num_blocks=num_blocks, block_size=4, max_rows=max_rows, max_blocks=num_blocks, dtype=model.dtype,
        device=model.device, batch_invariant=batch_invariant,
    )  # fmt: skip


def share(start: int, block_ids: list[int], *token_ids: int, **model_info: Any) -> ScheduledSequence:
    return scheduled(token_ids, start, block_ids, temperature=0.0, **model_info)


def engine_with(
    model: LoadedModel,
    capture: Callable[..., Callable[[], torch.Tensor]],
    *,
    has_kernels: bool = False,
    drafter: Drafter | None = None,
) -> Engine:
    """has_kernels: draws and log-probabilities are those that serve; slow in Triton's interpreter."""
    runner = GraphModelRunner(
        model, attention_for(model), max_rows=6, max_tokens=LIMITS.max_step_tokens, capture=capture,
        sampler=TritonSampler(model.device) if has_kernels else None,
    )  # fmt: skip
    return assemble(
        LIMITS,
        CacheConfig(block_size=4),
        num_blocks=NUM_BLOCKS,
        runner=runner,
        model_info=model.model_info,
        drafter=drafter,
    )


def plain_engine(path: Path) -> Engine:
    cache, settings = {"block_size": 4, "num_blocks": 200}, {"device": DEVICE.type, "dtype": "float32"}
    config = config_of(path, cache=cache, scheduler=LIMITS.model_dump(), backend="torch", **settings)
    return build_sync_engine(config)


def some_requests() -> list[Request]:
    """So many that one is preempted; one of them samples."""
    return [
        make_request((5, 6, 7, n), max_tokens=tokens, ignore_eos=True, seed=n, temperature=0.8 * (n == 11))
        for n, tokens in ((10, 6), (11, 9), (12, 3), (13, 6))
    ]


@cache
def eager_tokens(path: Path) -> list[list[int]]:
    """Of `some_requests`, in their order."""
    requests = some_requests()
    found = run_to_end(plain_engine(path), *requests).token_ids
    return [found[each.request_id] for each in requests]


def has_tokens_of_eager_steps(engine: Engine, path: Path, num_requests: int = 4) -> None:
    requests = some_requests()[:num_requests]
    found = run_to_end(engine, *requests).token_ids
    assert [found[each.request_id] for each in requests] == eager_tokens(path)[:num_requests]


def test_a_model_that_was_off_the_device_has_the_same_tokens_again(small_path: Path) -> None:
    """On a CPU the capture is done again on tensors at other addresses, as it is on a GPU."""
    model = load(small_path)
    assert isinstance(model, TransformersModel)
    for each in (*model.module.parameters(), *model.module.buffers()):
        each.data = each.data.clone()  # on a CPU they are mapped from their file
    engine = engine_with(model, RunAgain())
    engine.prepare()
    has_tokens_of_eager_steps(engine, small_path, 2)
    engine.sleep()
    assert {each.untyped_storage().nbytes() for each in model.tensors() if each.numel()} == {0}
    engine.wake()
    has_tokens_of_eager_steps(engine, small_path, 2)


class OnCard:
    """Stands for a tensor in a card's memory, and for its storage."""

    device = torch.device("cuda")

    def __init__(self, size: int) -> None:
        self.own = torch.arange(size, dtype=torch.uint8).untyped_storage()

    def untyped_storage(self) -> OnCard:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def test_sleep_pins_as_many_bytes_of_the_host_as_the_weights_have_and_gives_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: dict[int, int] = {}
    monkeypatch.setattr(graph_runner, "pin_memory", pinned.__setitem__)
    monkeypatch.setattr(graph_runner, "unpin_memory", pinned.pop)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bytes_of = graph_runner._bytes
    monkeypatch.setattr(graph_runner, "_bytes", lambda storage: bytes_of(storage.own))
    weights = [OnCard(size) for size in (129, 200, 65)]
    away = HostCopy(weights, ())  # type: ignore[arg-type]
    assert [each.own.nbytes() for each in weights] == [0, 0, 0]
    assert sum(pinned.values()) == 129 + 200 + 65
    away.resume()
    assert not pinned
    assert [each.own.tolist() for each in weights] == [list(range(size)) for size in (129, 200, 65)]


@pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU")
def test_a_gpus_memory_is_free_in_sleep(small_path: Path) -> None:
    model = load(small_path)
    engine = engine_with(model, CudaCapture(model.device))
    engine.prepare()
    awake = torch.cuda.memory_reserved()
    engine.sleep()
    assert torch.cuda.memory_reserved() < awake
    engine.wake()
    has_tokens_of_eager_steps(engine, small_path)


def test_replayed_steps_give_the_tokens_of_eager_ones(tmp_path: Path) -> None:
    build_tiny_model("llama", num_attention_heads=2, num_key_value_heads=1).save_pretrained(tmp_path)
    capture = RunAgain()
    engine = engine_with(load(tmp_path), capture)
    has_tokens_of_eager_steps(engine, tmp_path)
    assert engine.runner.launches
    assert engine.stats().total_preemptions > 0
    assert {1, 2, 4, 6} <= set(capture.replayed)  # 6: of steps with prompts
    assert 3 not in capture.replayed
    assert len(capture.replayed) == engine.stats().total_steps
    assert engine.measurements().num_steps_without_graph == 0


@given(data=st.data())
@settings(max_examples=6, deadline=None)  # Triton's interpreter takes seconds for each
def test_padded_steps_of_any_mix_give_the_tokens_of_eager_ones_and_write_to_the_same_slots(
    mixed_pair: tuple[RunAgain, GraphModelRunner, GraphModelRunner], data: st.DataObject
) -> None:
    capture, padded, eager = mixed_pair
    num_before = len(capture.replayed)
    computed = [0, 0, 0]
    for _ in range(3):
        shares = data.draw(st.tuples(*[st.integers(0, 5)] * 3), label="tokens of each sequence")
        items = [
            share(
                computed[which], TABLES[which], *data.draw(st.tuples(*[st.integers(3, 90)] * size)),
                request_id=str(which), samples=data.draw(st.booleans()),
            )
            for which, size in enumerate(shares) if size
        ]  # fmt: skip
        if not items:
            continue
        before = [kv.clone() for kv in own_blocks(padded)]
        assert padded.run(StepBatch(tuple(items), ())) == eager.run(StepBatch(tuple(items), ()))
        written = [each.block_ids[at // 4] * 4 + at % 4 for each in items for at in range(each.start, each.end)]
        for old, new, right in zip(before, own_blocks(padded), own_blocks(eager), strict=True):
            torch.testing.assert_close(new, right)
            new[written] = old[written]
            assert torch.equal(new, old), "a slot changed that is of no token in this step"
            new[written] = right[written]
        computed = [start + size for start, size in zip(computed, shares, strict=True)]
    assert len(capture.replayed) > num_before or not any(computed)


TABLES = ([7, 2, 5, 0], [3, 1, 6, 4], [8, 10, 9, 11])


def own_blocks(runner: GraphModelRunner) -> list[torch.Tensor]:
    """Keys and values of all blocks that sequences may own: [num_slots, num_kv_heads, dim] each."""
    cache = runner._attention.cache
    return [kv.flatten(0, 1)[: 12 * 4] for kv in cache.layer(0)]


@pytest.fixture(scope="module")
def mixed_pair(small_path: Path) -> tuple[RunAgain, GraphModelRunner, GraphModelRunner]:
    """A runner with graphs of few tokens, and one without any."""
    model, capture = load(small_path), RunAgain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.model.cuda.captured_inputs._MIN_TOKENS", 3)
        runners = [
            GraphModelRunner(model, attention_for(model, num_blocks=12), max_rows=3, max_tokens=15, capture=how)
            for how in (capture, None)
        ]
    runners[0].prepare()
    assert [size.num_tokens for size in runners[0]._mixed_sizes] == [3, 6, 9, 12, 15]
    return capture, *runners


def test_penalties_and_grammars_are_applied_to_steps_that_were_launched_before_their_tokens_were_known(
    small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = RunAgain()
    changes: list[dict[str, object]] = [
        {"presence_penalty": 1.5}, {"frequency_penalty": 0.5, "repetition_penalty": 1.3, "logit_bias": ((9, 3.0),)},
        {"bad_words": ((40, 41),)}, {"logprobs": 1},
    ]  # fmt: skip
    requests = [
        replace(request, sampling=replace(request.sampling, **change))  # type: ignore[arg-type]
        for request, change in zip(some_requests(), changes, strict=True)
    ]
    late: list[StepBatch] = []
    draw = LaunchedStep.draw
    monkeypatch.setattr(LaunchedStep, "draw", lambda step, batch: (late.append(batch), draw(step, batch)))
    monkeypatch.setattr(GraphModelRunner, "launch", _noting_what_is_late(late))
    engine = engine_with(load(small_path), capture, has_kernels=True)
    outcome = run_to_end(engine, *requests)
    assert outcome.token_ids == run_to_end(plain_engine(small_path), *requests).token_ids
    assert engine.stats().total_preemptions > 0
    assert capture.replayed
    assert late


def test_drafts_are_rows_of_replayed_steps_and_change_nothing(small_path: Path) -> None:
    """Among them rows that are sampled, penalised, banned, biased, and with log-probabilities."""
    changes: list[dict[str, object]] = [
        {"presence_penalty": 1.5}, {"logit_bias": ((9, 3.0),), "logprobs": 2}, {"bad_words": ((40, 41),)}, {},
    ]  # fmt: skip
    requests = [
        replace(request, sampling=replace(request.sampling, max_tokens=12, **change))  # type: ignore[arg-type]
        for request, change in zip(some_requests(), changes, strict=True)
    ]
    expected, capture = run_to_end(plain_engine(small_path), *requests), RunAgain()
    drafter = RecallingDrafter(expected.token_ids)
    engine = engine_with(load(small_path), capture, has_kernels=True, drafter=drafter)
    outcome, stats = run_to_end(engine, *requests), engine.stats()
    assert outcome.token_ids == expected.token_ids
    for request_id, values in outcome.logprobs.items():
        wanted = expected.logprobs[request_id]
        assert [each.logprob for each in values] == pytest.approx([each.logprob for each in wanted], abs=1e-4)
    assert stats.total_preemptions > 0
    assert stats.total_drafted_tokens > stats.total_accepted_tokens > 0
    assert len(capture.replayed) == stats.total_steps
    assert engine.measurements().num_steps_without_graph == 0


def _noting_what_is_late(late: list[StepBatch]) -> Callable[..., LaunchedStep]:
    """A launch after which `late` has only batches of which the tokens are drawn after it."""
    launch = GraphModelRunner.launch

    def launches(runner: GraphModelRunner, batch: StepBatch) -> LaunchedStep:
        before = len(late)
        step = launch(runner, batch)
        del late[before:]
        return step

    return launches


def test_embeddings_beside_replayed_steps(small_path: Path) -> None:
    prompts = ((5, 6, 7, 8, 9, 10, 11, 12, 13), (14, 5))
    requests = [
        *some_requests(),
        *(
            make_request(prompt, pooling=pooling, max_tokens=0)
            for prompt in prompts
            for pooling in POOLINGS_OF_DECODERS
        ),
    ]
    engine, plain = engine_with(load(small_path), RunAgain()), plain_engine(small_path)
    outcome, expected = run_to_end(engine, *requests), run_to_end(plain, *requests)
    assert engine.stats().total_preemptions > 0
    assert outcome.token_ids == expected.token_ids
    assert len(expected.embeddings) == 4
    for request_id, embedding in expected.embeddings.items():
        assert array("f", outcome.embeddings[request_id]) == pytest.approx(array("f", embedding), abs=1e-4)


def test_logprobs_of_replayed_and_eager_steps(small_path: Path) -> None:
    """A step launched ahead overwrites the graph's logits: those of the step before must have been read by then."""
    capture = RunAgain()
    requests = [
        replace(
            request,
            sampling=replace(request.sampling, logprobs=(None, 3, 0)[n % 3], prompt_logprobs=(None, 1)[n % 2]),
        )
        for n, request in enumerate(some_requests())
    ]
    engine = engine_with(load(small_path), capture, has_kernels=True)
    outcome, expected = run_to_end(engine, *requests), run_to_end(plain_engine(small_path), *requests)
    assert outcome.token_ids == expected.token_ids
    assert engine.stats().total_preemptions > 0
    assert capture.replayed
    for found, wanted in ((outcome.logprobs, expected.logprobs), (outcome.prompt_logprobs, expected.prompt_logprobs)):
        assert {each: len(values) for each, values in found.items()} == {each: len(v) for each, v in wanted.items()}
        for request_id, values in found.items():
            assert [each.logprob for each in values] == pytest.approx(
                [each.logprob for each in wanted[request_id]], abs=1e-4
            )
            assert [each.top_token_ids for each in values] == [each.top_token_ids for each in wanted[request_id]]


def test_a_model_that_cannot_be_captured_runs_eagerly_and_says_why(
    small_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    engine = engine_with(load(small_path), fails)
    with caplog.at_level(logging.WARNING):
        engine.prepare()
    assert "(RuntimeError: operation not permitted when stream is capturing … and more)" in caplog.text
    has_tokens_of_eager_steps(engine, small_path, 1)
    assert engine.measurements().num_steps_without_graph == engine.stats().total_steps > 0


class RunsOutAt:
    """A capture on a device that has memory for so many graphs; it computes nothing before the first replay."""

    def __init__(self, num_graphs: int, error: type[RuntimeError] = torch.OutOfMemoryError) -> None:
        self._num_left, self._error = num_graphs, error

    def __call__(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        if not self._num_left:
            raise self._error("CUDA out of memory. Tried to allocate 20.00 MiB\nand more")
        self._num_left -= 1
        return function


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])  # of torch's allocator; of the driver
def test_where_memory_ends_during_capture_fewer_sizes_are_used(
    small_path: Path, caplog: pytest.LogCaptureFixture, error: type[RuntimeError]
) -> None:
    model = load(small_path)
    with caplog.at_level(logging.WARNING):
        runner = GraphModelRunner(model, attention_for(model, max_rows=30), max_rows=30, capture=RunsOutAt(6, error))
        runner.prepare()
    assert "only 6 of 7 CUDA graphs for decode steps fit into the GPU's memory" in caplog.text
    assert (
        "padded to the next size of 1, 2, 4, 8, 16, 30 sequences, and steps with prompts have no graphs" in caplog.text
    )
    engine = assemble(
        LIMITS, CacheConfig(block_size=4), num_blocks=NUM_BLOCKS, runner=runner, model_info=model.model_info
    )
    has_tokens_of_eager_steps(engine, small_path, 2)


def test_where_memory_ends_after_decode_steps_those_with_prompts_run_eagerly(
    small_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(small_path)
    with caplog.at_level(logging.WARNING):
        engine = engine_with(model, RunsOutAt(len(graph_sizes(6))))
        engine.prepare()
    assert (
        "steps of 16 tokens with prompts run without a CUDA graph, which is slower (OutOfMemoryError: CUDA out of"
        in caplog.text
    )
    assert "Lower cache.gpu_memory_fraction to make room" in caplog.text
    has_tokens_of_eager_steps(engine, small_path, 2)
    assert 0 < engine.measurements().num_steps_without_graph < engine.stats().total_steps


def test_a_replica_without_memory_for_the_sizes_that_it_needs_runs_eagerly_and_says_the_numbers(
    small_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_with(load(small_path), RunsOutAt(2))
    gc.enable()
    with caplog.at_level(logging.WARNING):
        engine.prepare()
    assert gc.isenabled()
    assert re.search(r"only 2 of the 4 CUDA .* \(for 6, 4, 2, 1 sequences\) .*; it ran out at 2", caplog.text)
    has_tokens_of_eager_steps(engine, small_path, 2)
    assert engine.measurements().num_steps_without_graph == engine.stats().total_steps


def test_the_padding_of_a_divided_step_is_that_of_its_parts(small_path: Path) -> None:
    model = load(small_path)
    runner = GraphModelRunner(model, attention_for(model), max_rows=6, capture=RunAgain())
    whole = StepBatch(tuple(share(0, [at], 5 + at) for at in range(5)), (None,) * 5, num_scheduled_tokens=5)  # type: ignore[arg-type]
    for part, padding in ((whole.part(slice(3)), 1), (whole.part(slice(3, 5)), 0)):
        before = runner.num_padding_tokens
        runner.run(part)
        assert runner.num_padding_tokens - before == padding


def test_a_step_launched_before_the_last_is_known_computes_its_tokens(small_path: Path) -> None:
    """In an order of its own, eagerly and by replay, beside a sequence with a known token."""
    model = load(small_path)

    def batch(*items: ScheduledSequence) -> StepBatch:
        return StepBatch(items, ())

    for beside, max_tokens in ((share(1, [2], 9), 0), (share(1, [2], 9, 10), 0), (share(1, [2], 9, 10), 5)):
        runner = GraphModelRunner(model, attention_for(model), max_rows=3, max_tokens=max_tokens, capture=RunAgain())
        first = runner.run(batch(share(0, [0], 5, 6), share(0, [1], 7, 8), share(0, [2], 9)))
        known = runner.run(batch(share(2, [1], first.token_ids[1]), beside, share(2, [0], first.token_ids[0])))
        runner.run(batch(share(0, [0], 5, 6), share(0, [1], 7, 8), share(0, [2], 9)))
        assert runner.launch(batch(share(2, [1], -2), beside, share(2, [0], -1))).result() == known


def test_the_likeliest_tokens_of_a_replayed_step_are_found_inside_of_it(
    small_path: Path,
) -> None:
    """Greedy sequences then need no launch after it."""
    model, launched, known = load(small_path), [], []

    class Spy(TritonSampler):
        def sample(self, logits: torch.Tensor, items: Any, *, likeliest: torch.Tensor | None = None) -> torch.Tensor:
            assert likeliest is None or torch.equal(likeliest, logits.argmax(-1))
            known.append(likeliest is not None)
            return super().sample(logits, items, likeliest=likeliest)

        def _draw(self, *_given: Any) -> None:
            launched.append(1)

    capture = RunAgain()
    runner = GraphModelRunner(model, attention_for(model), max_rows=4, capture=capture, sampler=Spy(model.device))

    def step(*token_ids: int) -> StepBatch:
        return StepBatch(tuple(share(0, [at], each) for at, each in enumerate(token_ids)), ())

    first = runner.launch(step(5, 6, 7))
    second = runner.launch(step(-1, -3, 9))  # the tokens of the first are read before they are overwritten
    tokens = first.result().token_ids
    assert second.result() == runner.launch(step(tokens[0], tokens[2], 9)).result()
    assert (launched, known, len(capture.replayed)) == ([], [True] * 3, 3)


@pytest.mark.usefixtures("equal_rows")
def test_batch_invariant_logits_are_the_same_in_every_bit_whatever_shares_the_step(
    small_path: Path,
) -> None:
    """One sequence alone and whole; beside others, its prompt in pieces, some of one token."""
    model = load(small_path)
    seen: list[torch.Tensor] = []

    class Spy(Sampler):
        def sample(self, logits: torch.Tensor, items: Any, *, likeliest: torch.Tensor | None = None) -> torch.Tensor:
            seen.extend(row.clone() for row, item in zip(logits, items, strict=True) if item.request_id == "watched")
            return super().sample(logits, items, likeliest=likeliest)

    tokens = (5, 6, 7, 8, 9, 10)

    def run(sizes: tuple[int, ...], *, beside: int, max_tokens: int = 0) -> list[torch.Tensor]:
        attention = attention_for(model, batch_invariant=True)
        runner = GraphModelRunner(
            model, attention, max_rows=2, max_tokens=max_tokens, capture=RunAgain(), sampler=Spy()
        )
        seen.clear()
        at = 0
        for size in sizes:
            is_last = at + size >= 5
            watched = share(at, [3, 1], *tokens[at : at + size], request_id="watched", samples=is_last)
            other = share(at, [4, 0], *(12,) * beside, samples=is_last)
            runner.run(StepBatch((other, watched) if beside else (watched,), ()))
            at += size
        return list(seen)

    alone, among = run((5, 1), beside=0), run((1, 3, 1, 1), beside=1)
    padded = run((2, 3, 1), beside=1, max_tokens=11)
    assert len(alone) == len(among) == len(padded) == 2
    for one, other, third in zip(alone, among, padded, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


def test_graphs_are_captured_once_and_by_the_thread_that_launches(small_path: Path) -> None:
    captured: list[int] = []

    def capture(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        captured.append(threading.get_ident())
        assert not gc.isenabled(), "a collection may destroy what a capture must not touch"
        return RunAgain()(function)

    engine = engine_with(load(small_path), capture)
    assert captured == []
    gc.enable()
    thread = threading.Thread(target=engine.prepare)
    thread.start()
    thread.join()
    num_graphs = len(graph_sizes(6)) + 1  # and one of mixed steps
    assert captured == [thread.ident] * num_graphs
    assert gc.isenabled()
    run_to_end(engine, *some_requests()[:1])
    assert len(captured) == num_graphs


def test_all_warm_ups_and_captures_of_a_model_run_on_one_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    captures = [CudaCapture(torch.device("cuda")) for _ in range(2)]
    for capture in captures:
        for rows in (4, 2):
            capture(lambda rows=rows: cuda.compute(rows))  # type: ignore[misc]
    first, second = (capture._stream for capture in captures)
    assert first is not second
    assert cuda.num_streams == 2
    work = [(rows, "capture" if n % 3 == 2 else "warm-up") for rows in (4, 2) for n in range(3)]
    assert cuda.work == [(stream, rows, how) for stream in (first, second) for rows, how in work]
    assert cuda.current == ["default"]


class FakeCuda:
    """Stands for torch's streams and graphs; notes on which stream work is done, and whether it is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work: list[tuple[object, int, str]] = []
        self.current: list[object] = ["default"]
        self.num_streams = 0
        self._is_capturing = False
        for name, replacement in {
            "Stream": lambda device: self._new_stream(),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph_pool_handle": lambda: (0, 1),
            "current_stream": lambda device=None: SimpleNamespace(wait_stream=lambda other: None, on=self.current[-1]),
            "device": lambda device: nullcontext(),
            "stream": self._on,
            "graph": self._capturing,
        }.items():
            monkeypatch.setattr(torch.cuda, name, replacement)

    def compute(self, rows: int) -> torch.Tensor:
        self.work.append((self.current[-1], rows, "capture" if self._is_capturing else "warm-up"))
        return torch.empty(rows)

    def _new_stream(self) -> object:
        self.num_streams += 1
        return SimpleNamespace(wait_stream=lambda other: None, number=self.num_streams)

    @contextmanager
    def _on(self, stream: object) -> Iterator[None]:
        self.current.append(getattr(stream, "on", stream))
        yield
        self.current.pop()

    @contextmanager
    def _capturing(self, graph: object, *, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert pool == (0, 1)
        with self._on(stream):
            self._is_capturing = True
            yield
            self._is_capturing = False


@pytest.mark.parametrize("fails_at", ["launch", "result"])
@pytest.mark.parametrize("is_lost", [True, False])
def test_only_an_error_after_which_the_device_is_silent_is_its_loss(
    small_path: Path, monkeypatch: pytest.MonkeyPatch, *, fails_at: str, is_lost: bool
) -> None:
    def synchronize() -> None:
        if is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fails(*_: object, **_options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    model = load(small_path)
    runner = GraphModelRunner(model, attention_for(model), max_rows=6, capture=None, synchronize=synchronize)
    item = share(0, [0], 5, 6)
    assert len(runner.run(StepBatch((item,), ())).token_ids) == 1
    if fails_at == "launch":
        monkeypatch.setattr(runner._sampler, "sample", fails)
        launched = partial(runner.launch, StepBatch((item,), ()))
    else:
        step = runner.launch(StepBatch((item,), ()))
        assert step._drawn is not None
        step._drawn.copied = SimpleNamespace(synchronize=fails)
        launched = step.result
    with pytest.raises(DeviceLost if is_lost else torch.OutOfMemoryError):
        launched()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="captures real CUDA graphs: needs a CUDA device")
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gpt2"])
def test_captured_steps_give_the_tokens_of_eager_ones(
    architecture: str, tiny_model_path: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_model_path(architecture)
    with caplog.at_level(logging.INFO):
        engine = engine_with(load(path), CudaCapture(torch.device("cuda")))
        engine.prepare()
    assert "steps run from 5 CUDA graphs" in caplog.text
    has_tokens_of_eager_steps(engine, path)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="a capture that fails needs a CUDA device")
def test_after_a_failed_capture_the_device_is_usable() -> None:
    numbers = torch.ones(3, device="cuda")

    def reads_from_the_device() -> torch.Tensor:
        return numbers * float(numbers.sum())

    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        CudaCapture(torch.device("cuda"))(reads_from_the_device)
    assert torch.cuda.current_stream() == before
    assert (numbers + 1).tolist() == [2, 2, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="bits of real kernels: needs a CUDA device")
def test_batch_invariant_steps_are_captured(tiny_model_path: Callable[[str], Path]) -> None:
    model = load(tiny_model_path("llama"))
    attention = attention_for(model, batch_invariant=True)
    runner = GraphModelRunner(model, attention, max_rows=6, capture=CudaCapture(torch.device("cuda")))
    runner.prepare()
    assert runner._graphs
