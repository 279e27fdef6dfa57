"""What one step computes. A model runner reads it and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

from app.engine.matcher import Matcher, allowed_after_bans
from app.engine.request import SamplingParams
from app.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory:
    """The tokens that penalties look at."""

    prompt: tuple[int, ...]
    generated: tuple[int, ...]


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's share of a step: `token_ids` at positions `start`, `start + 1`, … are computed.

    When `samples` is true, they reach the end of the sequence and the step draws the token after them. A negative token
    id -1 - n is the token that the step before draws for `sampled[n]`; only runners that launch steps see any.
    Read-only, like all of a batch; not declared frozen because a thousand are made in every step, and a frozen
    dataclass takes seven times as long to make.
    """

    request_id: Final[str]
    token_ids: Final[tuple[int, ...]]
    start: Final[int]
    block_ids: Final[list[int]]  # in token order; covers at least start + len(token_ids) tokens
    samples: Final[bool]
    sampling: Final[SamplingParams]
    banned_token_ids: Final[tuple[int, ...]] = ()  # may not be drawn: end tokens before min_tokens, ends of bad words
    history: Final[TokenHistory | None] = None  # only where the sampling parameters have penalties
    matcher: Final[Matcher | None] = None  # says which tokens may be drawn; None: all
    looks_back: Final[bool] = False  # what is drawn depends on the tokens drawn before, see `SamplingParams`

    @property
    def end(self) -> int:
        """Tokens in the KV cache after this step; also the position of the token that is drawn."""
        return self.start + len(self.token_ids)

    def allowed(self) -> bytes:
        """The tokens that its matcher lets it draw, as bits (see `Matcher.allowed`), without those that are banned."""
        assert self.matcher is not None, "without a matcher all tokens may be drawn"
        if not self.banned_token_ids:
            return self.matcher.allowed()
        return allowed_after_bans(self.matcher, self.banned_token_ids)


class HoldUp(StrEnum):
    """Why the first of those who wait did not join a step."""

    SLOTS = "slots"  # as many run as may
    BLOCKS = "blocks"  # memory is short
    BUDGET = "budget"  # the step has no tokens left for prefill
    STRATEGY = "strategy"  # it waits for its timer, for the batch that runs, or for others of its length
    RESULT = "result"  # it was preempted, and its last token is still being drawn


@dataclass(frozen=True)
class Batch:
    """One step's work, in order of precedence."""

    scheduled: tuple[ScheduledSequence, ...]
    sequences: tuple[Sequence, ...]  # the scheduler's own records, one for each of `scheduled`
    began_at: float = 0.0  # when it was scheduled, in seconds of the engine's clock
    num_scheduled_tokens: int = 0  # `num_tokens`, counted while it was made: adding up a thousand takes its time
    joined: tuple[Sequence, ...] = ()  # who began to run with this step
    preempted: tuple[Sequence, ...] = ()  # who had to wait again since the step before was scheduled
    hold_up: HoldUp | None = None  # why the first of those who wait still does; None when nobody waits
    num_waiting: int = 0  # once this step was made
    num_free_blocks: int = 0

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.scheduled)

    @cached_property
    def sampled(self) -> tuple[ScheduledSequence, ...]:
        """Those for which a token is drawn; a model runner returns one token id for each, in this order."""
        return tuple([item for item in self.scheduled if item.samples])

    @cached_property
    def needs_history(self) -> bool:
        """Whether a token of this step was drawn by looking at the tokens before it, so that the next one will be."""
        return any(item.looks_back for item in self.sampled)

    def __bool__(self) -> bool:
        return bool(self.scheduled)
