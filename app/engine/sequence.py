"""A request's progress inside the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import repeat

from app.engine.adapter_store import HeldAdapter
from app.engine.logit_adjustments import LogitAdjustments
from app.engine.matcher import Matcher
from app.engine.prefix import Block, Prefix
from app.engine.request import Request
from app.engine.speculation.prompt_lookup import SequenceDrafts
from app.engine.state_pool import SequenceStates


class SequenceStatus(Enum):
    WAITING = auto()
    FETCHING = auto()  # its prefix is being fetched from a store
    RUNNING = auto()
    FINISHED = auto()


class Windows:
    """A sequence's blocks in the window groups: for each group, a list like `EngineSequence.blocks`.

    A block that leaves its window is freed and replaced by None in `blocks`. Its id stays in `ids`.
    """

    def __init__(self, num_released: int, found: Sequence[list[Block]]) -> None:
        """found: the cached blocks that the sequence starts with, after `num_released` blocks that it never needs."""
        self.num_released = num_released  # number of leading blocks that are before the window in each group
        self.blocks = tuple([*repeat(None, num_released), *blocks] for blocks in found)
        self.ids = tuple([*repeat(0, num_released), *(block.block_id for block in blocks)] for blocks in found)

    def extend(self, groups: Iterable[list[Block]]) -> None:
        for own, ids, new in zip(self.blocks, self.ids, groups, strict=True):
            own.extend(new)
            ids.extend(block.block_id for block in new)

    def release_before(self, first: int) -> list[Block]:
        """Remove and return the blocks before index `first`. The caller must free them."""
        given: list[Block] = []
        for own in self.blocks:
            given += [block for block in own[self.num_released : first] if block is not None]
            own[self.num_released : first] = [None] * max(0, first - self.num_released)
        self.num_released = max(self.num_released, first)
        return given


@dataclass(slots=True, eq=False)
class EngineSequence:
    """The scheduler's mutable record of one request.

    A sequence has no prefill or decode state, only two counters: each step brings `num_computed_tokens` (tokens with
    KV in the cache) closer to `num_tokens` (prompt and generated tokens so far).

        prompt ................ generated .....
        |-- computed --|-- uncomputed --------|   num_tokens

    The prompt is not copied from the request, so a waiting sequence takes little more memory than its request.
    """

    request: Request
    arrival: int  # order of arrival, unique
    arrived_at: float = 0.0  # seconds of the engine's clock
    end_token_ids: frozenset[int] = frozenset()  # any of these tokens ends generation
    num_predicted_tokens: int = 0  # the length of its output, as predicted when it arrived
    order_key: tuple[float, ...] = ()  # its rank in the scheduling policy's order, lowest first
    matcher: Matcher | None = None  # set if only some tokens may be drawn; already advanced past all processed tokens
    adapter: HeldAdapter | None = None  # its request's adapter; released when the sequence ends
    generated_token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = field(init=False)
    needs_output_history: bool = field(init=False)  # see `SamplingParams`
    # Whether no step has penalties, biases or bans, so that draws depend only on the logits and the matcher.
    has_plain_sampling: bool = field(init=False)
    wants_logprobs: bool = field(init=False)  # whether log-probabilities of generated tokens are requested
    num_scored_tokens: int = field(init=False)  # prompt tokens, after the first, with known log-probabilities
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when it first joined
    num_preemptions: int = 0
    # `RunningSequences.epoch` when its blocks were last released. A step from an earlier epoch wrote its KV to the old
    # blocks, which may have new owners, so the tokens of this step do not count as computed.
    epoch: int = 0
    fetch_epoch: int = -1  # its epoch when a fetch was last considered (see `PrefixFetches`)
    num_fetched_tokens: int = 0  # tokens whose KV was fetched from a store
    fetch_s: float = 0.0  # seconds spent waiting for fetches
    blocks: list[Block] = field(default_factory=list)  # in token order
    block_ids: list[int] = field(default_factory=list)  # ids of `blocks`; never shortened in place: steps read it
    windows: Windows | None = None  # set while it runs, for a model with window groups
    prefixes: list[Prefix] = field(default_factory=list)  # the prefixes that end with its full, computed blocks
    states: SequenceStates | None = None  # set while it runs, for a model with recurrent layers
    adjustments: LogitAdjustments | None = None  # set while it runs, for penalties or biases (`current_adjustments`)
    pooled: list[float] | None = None  # hidden states of the computed tokens, pooled for the embedding
    drafts: SequenceDrafts | None = None  # set while it runs, once drafts were looked up

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.generated_token_ids.extend(self.request.generated_token_ids)
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.needs_output_history = sampling.needs_output_history
        has_bans = sampling.min_tokens > 0 or sampling.bad_words or (sampling.ignore_eos and self.needs_output_history)
        self.has_plain_sampling = not (sampling.adjusts_logits or has_bans)
        self.wants_logprobs = sampling.logprobs is not None
        self.num_scored_tokens = self.request.num_scored_tokens

    @property
    def deadline_at(self) -> float | None:
        """When the sequence expires, in seconds of the engine's clock, or None without a deadline."""
        deadline_s = self.request.deadline_s
        return None if deadline_s is None else self.arrived_at + deadline_s

    @property
    def estimated_work(self) -> int:
        """Number of prompt and output tokens to compute in total, as predicted when the sequence arrived."""
        return self.num_prompt_tokens + self.num_predicted_tokens

    @property
    def remaining_work(self) -> int:
        """Number of prompt and predicted output tokens that remain to be computed."""
        num_prompt_tokens = max(0, self.num_prompt_tokens - self.num_computed_tokens)
        return num_prompt_tokens + max(0, self.num_predicted_tokens - len(self.generated_token_ids))

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.generated_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.generated_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.generated_token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether the only uncomputed token is the last generated token."""
        return 0 < len(self.generated_token_ids) == self.num_computed_tokens - self.num_prompt_tokens + 1

    @property
    def is_scoring(self) -> bool:
        """Whether requested log-probabilities of prompt tokens are still unknown."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and self.num_scored_tokens < self.num_prompt_tokens - 1

    @property
    def has_started(self) -> bool:
        """Whether a step has computed tokens of the sequence, or the next step will."""
        return self.status in (SequenceStatus.RUNNING, SequenceStatus.FINISHED) or self.num_preemptions > 0

    @property
    def has_unknown_token(self) -> bool:
        """Whether the last token is still being drawn by a step in flight (see `InFlight.commit`)."""
        generated = self.generated_token_ids
        return bool(generated) and generated[-1] < 0

    @property
    def lacks_history(self) -> bool:
        """Whether the next draw depends on the last token, but this token is still unknown."""
        return self.needs_output_history and self.has_unknown_token

    @property
    def is_running(self) -> bool:
        return self.status is SequenceStatus.RUNNING

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the known tokens at positions [start, end), counted over prompt and output."""
        num_prompt = self.num_prompt_tokens
        if end <= num_prompt:
            return self.request.prompt_token_ids[start:end]
        if start >= num_prompt:
            return tuple(self.generated_token_ids[start - num_prompt : end - num_prompt])
        return (*self.request.prompt_token_ids[start:], *self.generated_token_ids[: end - num_prompt])

    def current_adjustments(self) -> LogitAdjustments | None:
        """Return the changes that penalties and biases make to the next logits.

        With penalties, all tokens must be known.
        """
        sampling = self.request.sampling
        if self.adjustments is None and sampling.adjusts_logits:
            self.adjustments = LogitAdjustments(sampling, self.request.prompt_token_ids)
        if self.adjustments is not None and sampling.has_penalties:
            self.adjustments.follow(self.generated_token_ids)
        return self.adjustments

    def extend_blocks(self, blocks: list[Block]) -> None:
        """Append blocks of the first group. The window groups must be extended equally (see `Windows.extend`)."""
        self.blocks.extend(blocks)
        self.block_ids.extend(block.block_id for block in blocks)

    def all_blocks(self) -> list[Block]:
        """Return all groups' blocks, in token order."""
        if self.windows is None:
            return self.blocks
        return [block for of_all in zip(self.blocks, *self.windows.blocks, strict=True) for block in of_all if block]

    def take_blocks(self) -> list[Block]:
        """Remove and return all blocks, so that no token counts as computed. The caller must free the blocks.

        Adjustments and drafts are dropped, because only running sequences may use memory for them.
        """
        blocks = self.all_blocks()
        self.blocks, self.block_ids, self.prefixes = [], [], []
        self.num_computed_tokens = 0
        self.windows = self.pooled = self.adjustments = self.drafts = None
        return blocks
