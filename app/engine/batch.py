"""What one step computes, and its result. A model runner reads a batch and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from app.engine.logit_adjustments import LogitAdjustments
from app.engine.matcher import Matcher, allowed_after_bans
from app.engine.request import Pooling, SamplingParams, TokenLogprobs
from app.engine.sequence import Sequence


class ScheduledSequence(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What a step computes of one sequence: `token_ids` at positions `start`, `start + 1`, …

    When `samples` is true, they reach the end of the sequence and the step draws the token after them. A negative token
    id -1 - n is the token that the step before draws for `sampled[n]`; only runners that launch steps get any.
    A thousand are made in every step: a struct takes a third of the time of a dataclass, and none of the collector's.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: list[int]  # in token order; covers at least start + len(token_ids) tokens
    samples: bool
    sampling: SamplingParams
    banned_token_ids: tuple[int, ...] = ()  # may not be drawn: end tokens before min_tokens, ends of bad words
    adjustments: LogitAdjustments | None = None  # as of this step; only where there are penalties or biases
    matcher: Matcher | None = None  # says which tokens may be drawn; None: all
    # The draw depends on the token before it, which is still being drawn (`SamplingParams.needs_output_history`):
    # penalties, bans and matcher are brought up to date by `Scheduler.with_history`.
    lacks_history: bool = False
    # Consecutive prompt tokens for which log-probabilities are wanted, and the position of the first. The token before
    # each, which predicts it, is computed in this step.
    targets: tuple[int, ...] = ()
    first_target: int = 0
    # Which hidden states are wanted: the last token's, or the sum of all.
    pooling: Pooling | None = None
    adapter: object = None  # as the model runner has loaded it
    second_text_at: int = 0  # as the request has it
    # Where there are drafts and a draw depends on the tokens before it: the item up to each of its tokens.
    draws: tuple[ScheduledSequence, ...] = ()

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are wanted, of the drawn token or of prompt tokens."""
        return bool(self.targets) or (self.samples and self.sampling.logprobs is not None)

    @property
    def end(self) -> int:
        """Tokens in the KV cache after this step; also the position of the token that is drawn."""
        return self.start + len(self.token_ids)

    @property
    def takes_all_logits(self) -> bool:
        """Whether its logits stay as the model gives them."""
        return self.adjustments is None and self.matcher is None and not self.banned_token_ids

    def allowed(self) -> bytes:
        """The tokens that its matcher allows, as bits (see `Matcher.allowed`), without the banned ones."""
        assert self.matcher is not None, "without a matcher all tokens may be drawn"
        if not self.banned_token_ids:
            return self.matcher.allowed()
        return allowed_after_bans(self.matcher, self.banned_token_ids)


class WaitReason(StrEnum):
    """Why the first waiting sequence did not join a step."""

    SLOTS = "slots"  # `max_running` sequences run
    BLOCKS = "blocks"  # memory is short
    BUDGET = "budget"  # the step has no tokens left for prefill
    STRATEGY = "strategy"  # the strategy waits: for a timer, for the running batch, or for others of that length
    RESULT = "result"  # it was preempted, and its last token is still being drawn


class SchedulingDecision(NamedTuple):
    """What the scheduler decided about a step beside its batch; for the trace."""

    joined: Several[Sequence] = ()  # sequences that started to run with this step
    preempted: Several[Sequence] = ()  # sequences that were preempted since the step before was scheduled
    wait_reason: WaitReason | None = None  # why the first waiting sequence waits; None when none waits
    num_waiting: int = 0  # when this step was scheduled, as the next
    num_free_blocks: int = 0


@dataclass(frozen=True)
class StepBatch:
    """One step's work, in order of precedence."""

    scheduled: tuple[ScheduledSequence, ...]
    sequences: tuple[Sequence, ...]  # the scheduler's own records, one for each of `scheduled`
    began_at: float = 0.0  # when it was scheduled, in seconds of the engine's clock
    num_scheduled_tokens: int = 0  # `num_tokens`, counted by the builder: adding up a thousand takes time
    has_logprobs: bool = False  # any sequence wants log-probabilities, of the tokens that are drawn or of its prompt
    has_pooling: bool = False  # any sequence wants hidden states
    has_preempted: bool = False  # sequences were preempted so that these have the blocks that they need
    # Every sequence decodes, and the tokens after its first are drafts, not known to be its own: a token is drawn after
    # each of them. See `kept_tokens`.
    has_drafts: bool = False

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.scheduled)

    @cached_property
    def has_targets(self) -> bool:
        """Whether prompt tokens are scored."""
        return self.has_logprobs and any(item.targets for item in self.scheduled)

    @cached_property
    def sampled(self) -> tuple[ScheduledSequence, ...]:
        """The items for which a token is drawn: the step's result has one token id for each, in this order.

        With drafts, an item for each token of it, which ends with that token.
        """
        if self.has_drafts:
            return tuple([each for item in self.scheduled for each in _by_draw(item)])
        return tuple([item for item in self.scheduled if item.samples])

    @cached_property
    def has_adapters(self) -> bool:
        """Whether any sequence is computed with an adapter."""
        return any(item.adapter is not None for item in self.scheduled)

    @cached_property
    def matchers(self) -> tuple[Matcher, ...]:
        """The matchers of the items for which a token is drawn."""
        items = self.sampled if self.has_drafts else self.scheduled
        return tuple([item.matcher for item in items if item.matcher is not None])

    @cached_property
    def lacks_history(self) -> bool:
        """Whether a draw depends on a token that is not known yet."""
        return any(item.lacks_history for item in self.scheduled)

    def part(self, which: slice) -> StepBatch:
        """A batch of some of its sequences."""
        scheduled = self.scheduled[which]
        return StepBatch(
            scheduled,
            self.sequences[which],
            began_at=self.began_at,
            has_logprobs=any(item.wants_logprobs for item in scheduled),
            has_pooling=any(item.pooling is not None for item in scheduled),
            has_drafts=self.has_drafts,
        )

    def __bool__(self) -> bool:
        return bool(self.scheduled)


EMPTY_BATCH = StepBatch((), ())


def _by_draw(item: ScheduledSequence) -> Several[ScheduledSequence]:
    """The item up to each of its tokens."""
    if item.draws:
        return item.draws
    shorter = [structs.replace(item, token_ids=item.token_ids[:end]) for end in range(1, len(item.token_ids))]
    return [*shorter, item]


_EMPTY: Mapping[str, Any] = MappingProxyType({})


class StepResult(NamedTuple):
    """What a step gave. The mappings, by request id, hold only requests that want log-probabilities or embeddings."""

    token_ids: list[int]  # one for each of the batch's `sampled`, in that order
    logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = _EMPTY  # of the tokens that were drawn
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = _EMPTY  # one for each of a sequence's `targets`
    pooled: Mapping[str, list[float]] = _EMPTY  # behind the final norm: the last token's, or the sum of a share's
    # How many of the tokens are each sequence's, where there were drafts; then `token_ids` has only what was kept.
    num_kept: Several[int] = ()


def by_request(logprobs: Iterable[tuple[str, TokenLogprobs]]) -> dict[str, tuple[TokenLogprobs, ...]]:
    """Of drawn tokens, with the ids of their requests, as `StepResult` has them."""
    found: dict[str, tuple[TokenLogprobs, ...]] = {}
    for request_id, each in logprobs:
        found[request_id] = (*found[request_id], each) if request_id in found else (each,)
    return found


class DeviceLost(Exception):
    """The device can compute nothing more in this process. No request is at fault, and no other step is tried."""
