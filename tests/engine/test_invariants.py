"""Random workloads against the engine: what must hold after every step, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from app.engine.batch import Batch
from app.engine.engine import StepError
from app.engine.request import FinishReason, Request
from tests.fakes import CountingRunner, Outcome, build_fake_engine, expected_tokens, make_request


class FailingOnDemand(CountingRunner):
    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.fails_next = False

    def run(self, batch: Batch) -> list[int]:
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("asked to fail")
        return super().run(batch)


class EngineMachine(RuleBasedStateMachine):
    """Requests come, go and fail at random on a pool that is too small for them."""

    requests = Bundle("requests")
    runner_class: type[FailingOnDemand] = FailingOnDemand

    @initialize(
        num_blocks=st.integers(6, 14),
        block_size=st.integers(1, 4),
        max_running=st.integers(1, 6),
        spare_tokens=st.integers(0, 12),
        chunk=st.integers(1, 9),
        prefix_caching=st.booleans(),
    )
    def build(
        self, num_blocks: int, block_size: int, max_running: int, spare_tokens: int, chunk: int, prefix_caching: bool
    ) -> None:
        self.max_step_tokens = max_running + spare_tokens
        self.max_running = max_running
        self.num_slots = num_blocks * block_size
        self.runner = self.runner_class(block_size)
        self.engine = build_fake_engine(
            num_blocks=num_blocks, block_size=block_size, runner=self.runner, prefix_caching=prefix_caching,
            max_running=max_running, max_step_tokens=self.max_step_tokens, prefill_chunk_tokens=chunk,
        )  # fmt: skip
        self.outcome = Outcome()
        self.sent: dict[str, Request] = {}
        self.ended_otherwise: set[str] = set()

    @rule(
        target=requests,
        data=st.data(),
        salt=st.sampled_from(["", "other"]),
        stop_token_ids=st.sampled_from([(), (7, 20, 33)]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    )
    def add(self, data: st.DataObject, salt: str, stop_token_ids: tuple[int, ...], presence_penalty: float) -> str:
        # Few different tokens, so that prefixes are shared.
        length = data.draw(st.integers(1, self.num_slots - 1))
        prompt = tuple(data.draw(st.lists(st.sampled_from([5, 6]), min_size=length, max_size=length)))
        max_tokens = data.draw(st.integers(1, min(12, self.num_slots - length)))
        request = make_request(
            prompt, max_tokens=max_tokens, cache_salt=salt, stop_token_ids=stop_token_ids,
            presence_penalty=presence_penalty,
        )  # fmt: skip
        self.engine.add(request)
        self.sent[request.request_id] = request
        return request.request_id

    @rule(request_id=consumes(requests))
    def abort(self, request_id: str) -> None:
        delta = self.engine.abort(request_id)
        if delta is not None:
            assert delta.finish_reason is FinishReason.ABORT
            self.ended_otherwise.add(request_id)

    @precondition(lambda self: self.engine.has_work)
    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.engine.has_work:
                self.outcome.book(self.engine.step())

    @precondition(lambda self: self.engine.has_work)
    @rule()
    def fail_a_step(self) -> None:
        self.runner.fails_next = True
        with pytest.raises(StepError) as failed:
            self.engine.step()
        assert failed.value.request_ids
        self.ended_otherwise.update(failed.value.request_ids)

    @invariant()
    def every_block_has_its_owners_and_no_others(self) -> None:
        scheduler = self.engine._scheduler
        pool = scheduler._pool
        owned: dict[int, int] = {}
        for sequence in scheduler._running:
            assert [block.block_id for block in sequence.blocks] == sequence.block_ids
            assert len(set(sequence.block_ids)) == len(sequence.block_ids)
            for block in sequence.blocks:
                owned[block.block_id] = block.num_owners
        assert pool.num_free + len(owned) == pool.num_blocks
        counted = [block_id for sequence in scheduler._running for block_id in sequence.block_ids]
        assert owned == {block_id: counted.count(block_id) for block_id in set(counted)}

    @invariant()
    def no_step_exceeds_its_budget(self) -> None:
        if self.runner.batches:
            batch = self.runner.batches[-1]
            assert 0 < batch.num_tokens <= self.max_step_tokens
            assert len(batch.scheduled) <= self.max_running

    @invariant()
    def whoever_has_not_ended_is_waiting_or_running(self) -> None:
        stats = self.engine.stats()
        open_requests = self.sent.keys() - self.outcome.reasons.keys() - self.ended_otherwise
        assert stats.num_running + stats.num_waiting == len(open_requests)
        assert not self.ended_otherwise & self.outcome.reasons.keys()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.outcome.book(self.engine.step())
        assert not self.engine.has_work, "some request never ends"
        assert self.engine.stats().num_free_blocks == self.engine.stats().num_blocks
        for request_id, request in self.sent.items():
            if request_id in self.ended_otherwise:
                continue
            expected = expected_tokens(
                request.prompt_token_ids, request.sampling.max_tokens, stop_token_ids=request.sampling.stop_token_ids
            )
            assert self.outcome.token_ids[request_id] == expected


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
