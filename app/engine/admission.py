"""Who of those who wait joins a step: the strategy's door, the policy's order, slots, budget and memory."""

from __future__ import annotations

from app.engine.batch import HoldUp
from app.engine.blocks import BlockPool
from app.engine.policies.policy import SchedulingPolicy
from app.engine.running import Running
from app.engine.sequence import Sequence
from app.engine.step import Step
from app.engine.strategies.strategy import BatchingStrategy, StepPlan
from app.engine.totals import Totals
from app.engine.waiting import WaitingRoom


class Admission:
    """Lets waiting sequences run. Nobody overtakes the first in order, who waits until all of it finds room."""

    def __init__(
        self,
        *,
        max_running: int,
        policy: SchedulingPolicy,
        strategy: BatchingStrategy,
        waiting: WaitingRoom,
        running: Running,
        pool: BlockPool,
        totals: Totals,
    ) -> None:
        self._max_running = max_running
        self._policy = policy
        self._strategy = strategy
        self._waiting = waiting
        self._running = running
        self._pool = pool
        self._totals = totals

    def in_the_way(self) -> list[Sequence]:
        """The running sequences to preempt because waiting ones may take their places."""
        if not (len(self._waiting) and len(self._running) and self._strategy.joins_any_step):
            return []
        # The last in rank is a background request if any is: whatever the policy, others may take its place.
        if not (self._policy.preempts or self._running.last.request.is_background):
            return []
        first = self._waiting.peek()
        victims = self._running.in_the_way_of(
            first, may_preempt=self._policy.may_preempt, max_running=self._max_running
        )
        return victims if first.request.is_background else victims + self._in_the_way_of_others(victims)

    def _in_the_way_of_others(self, victims: list[Sequence]) -> list[Sequence]:
        """Background sequences, beside the victims, in whose slots the others may run: a burst comes in at once."""
        num_slots = self._max_running - len(self._running) + len(victims)
        num_missing = self._waiting.num_foreground - num_slots
        if num_slots <= 0 or num_missing <= 0:
            return []
        background = [each for each in self._running if each.request.is_background and each not in victims]
        return background[-num_missing:]

    def admit(self, step: Step, plan: StepPlan) -> HoldUp:
        """Let in as many as may join, and say why the next in order does not."""
        for _ in range(plan.num_admissible):
            sequence = self._waiting.peek(plan.bucket)
            if not step.has_room_for_prefill(sequence):
                return HoldUp.BUDGET
            if not self._strategy.admits(sequence):
                return HoldUp.STRATEGY
            if sequence.has_unknown_token:
                return HoldUp.RESULT
            if sequence.is_scoring and not step.has_room_for_scores:
                return HoldUp.BUDGET
            if not self._try_join(sequence, plan.bucket):
                return HoldUp.BLOCKS
            num_tokens = step.chunk(sequence)
            self._running.extend(sequence, num_tokens)
            step.joined.append(sequence)
            step.add_prefill(sequence, num_tokens)
        return HoldUp.SLOTS if len(self._running) >= self._max_running else HoldUp.STRATEGY

    def _try_join(self, sequence: Sequence, bucket: int) -> bool:
        """Let the first waiting sequence run if all of its known tokens find room, using cached prefixes."""
        cached, num_blocks = self._running.blocks_to_join(sequence)
        if not self._pool.can_allocate(num_blocks):
            return False
        self._running.share(sequence, cached)
        self._waiting.pop(bucket)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self._totals.prompt_tokens += sequence.num_prompt_tokens
            self._totals.cached_tokens += sequence.num_cached_tokens
        sequence.rank = self._policy.rank(sequence)
        self._running.add(sequence)
        self._policy.joined(sequence)
        self._strategy.joined(sequence)
        return True
