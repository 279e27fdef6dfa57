"""A request's progress inside the engine."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from enum import Enum, auto

from app.engine.adapter_store import HeldAdapter
from app.engine.block_pool import Block, Prefix
from app.engine.logit_adjustments import LogitAdjustments
from app.engine.matcher import Matcher
from app.engine.request import Request
from app.engine.speculation.prompt_lookup import SequenceDrafts
from app.engine.state_pool import SequenceStates


class SequenceStatus(Enum):
    WAITING = auto()
    FETCHING = auto()  # its prefix is on its way from a store
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler's mutable record of one request.

    There is no prefill state and no decode state, only two counters: a step brings `num_computed_tokens` (tokens with
    KV in the cache) closer to `num_tokens` (prompt and generated so far).

        prompt ................ generated .....
        |-- computed --|-- uncomputed --------|   num_tokens

    The prompt stays in the request and is not copied, so a waiting sequence weighs little more than its request.
    """

    request: Request
    arrival: int  # order of arrival, unique
    arrived_at: float = 0.0  # seconds of the engine's clock
    end_token_ids: frozenset[int] = frozenset()  # generation ends at any of these
    num_predicted_tokens: int = 0  # of its output, as predicted when it arrived
    order_key: tuple[float, ...] = ()  # its place in the scheduling policy's order, lowest first
    matcher: Matcher | None = None  # where not every token may be drawn; advanced past all processed tokens
    adapter: HeldAdapter | None = None  # of its request; released when it ends
    generated_token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = field(init=False)
    needs_output_history: bool = field(init=False)  # see `SamplingParams`
    # Without penalties, biases and bans at any step: only logits and matcher matter.
    has_plain_sampling: bool = field(init=False)
    wants_logprobs: bool = field(init=False)  # of what it draws
    num_scored_tokens: int = field(init=False)  # prompt tokens, after the first, with known log-probabilities
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when it first joined
    num_preemptions: int = 0
    has_fetched: bool = False  # since it was last preempted, see `PrefixFetches`
    num_fetched_tokens: int = 0  # that came from a store
    fetch_s: float = 0.0  # that it has waited for them
    blocks: list[Block] = field(default_factory=list)  # in token order
    block_ids: list[int] = field(default_factory=list)  # their ids; replaced, never shortened, so batches may keep it
    # By window group, as `blocks` and `block_ids`. A block that is given back is None; its id stays in its place.
    window_blocks: tuple[list[Block | None], ...] = ()
    window_ids: tuple[list[int], ...] = ()
    num_given_back: int = 0  # of each window group, from the start
    prefixes: list[Prefix] = field(default_factory=list)  # of its full, computed blocks
    states: SequenceStates | None = None  # while it runs, of a model with recurrent layers
    adjustments: LogitAdjustments | None = None  # while it runs and has penalties or biases; see `current_adjustments`
    pooled: list[float] | None = None  # of the computed tokens: the hidden states that its embedding is made of
    drafts: SequenceDrafts | None = None  # while it runs and has been drafted for by lookup
    num_draft_computed_tokens: int = 0  # known tokens with KV in the draft model's memory, in the same blocks

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
        """When it expires, in seconds of the engine's clock."""
        deadline_s = self.request.deadline_s
        return None if deadline_s is None else self.arrived_at + deadline_s

    @property
    def estimated_work(self) -> int:
        """Tokens to compute from its arrival to its end, as predicted when it arrives."""
        return self.num_prompt_tokens + self.num_predicted_tokens

    @property
    def remaining_work(self) -> int:
        """Tokens still to compute: of its prompt, and of its predicted output."""
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
        """Whether one token is uncomputed, the last that was generated."""
        return 0 < len(self.generated_token_ids) == self.num_computed_tokens - self.num_prompt_tokens + 1

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted that are not known yet."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and self.num_scored_tokens < self.num_prompt_tokens - 1

    @property
    def has_started(self) -> bool:
        """Whether any step has computed tokens of it, or the next will."""
        return self.status in (SequenceStatus.RUNNING, SequenceStatus.FINISHED) or self.num_preemptions > 0

    @property
    def has_unknown_token(self) -> bool:
        """Whether its last token is being drawn by a step that still runs (`Scheduler.commit_ahead`)."""
        generated = self.generated_token_ids
        return bool(generated) and generated[-1] < 0

    @property
    def lacks_history(self) -> bool:
        """Whether its next draw depends on its last token, which is not known."""
        return self.needs_output_history and self.has_unknown_token

    @property
    def is_running(self) -> bool:
        return self.status is SequenceStatus.RUNNING

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """The known tokens at positions start to end, of prompt and output together."""
        num_prompt = self.num_prompt_tokens
        if end <= num_prompt:
            return self.request.prompt_token_ids[start:end]
        if start >= num_prompt:
            return tuple(self.generated_token_ids[start - num_prompt : end - num_prompt])
        return (*self.request.prompt_token_ids[start:], *self.generated_token_ids[: end - num_prompt])

    def current_adjustments(self) -> LogitAdjustments | None:
        """What its penalties and biases do to the next token's logits; penalties need every token before it."""
        sampling = self.request.sampling
        if self.adjustments is None and sampling.adjusts_logits:
            self.adjustments = LogitAdjustments(sampling, self.request.prompt_token_ids)
        if self.adjustments is not None and sampling.has_penalties:
            self.adjustments.follow(self.generated_token_ids)
        return self.adjustments

    def have_window_groups(self, number: int) -> None:
        """Before it has any block: a table for each."""
        self.window_blocks = tuple([] for _ in range(number))
        self.window_ids = tuple([] for _ in range(number))
        self.num_given_back = 0

    def extend_blocks(self, blocks: list[Block], *in_windows: Several[Block | None]) -> None:
        """in_windows: by window group, as many."""
        self.blocks.extend(blocks)
        self.block_ids.extend(block.block_id for block in blocks)
        if in_windows:
            for own, ids, new in zip(self.window_blocks, self.window_ids, in_windows, strict=True):
                own.extend(new)
                ids.extend(0 if block is None else block.block_id for block in new)

    def give_back_before(self, first: int) -> list[Block]:
        """Give up the blocks of window groups before the `first`; the caller frees them."""
        given: list[Block] = []
        for own in self.window_blocks:
            given += [block for block in own[self.num_given_back : first] if block is not None]
            own[self.num_given_back : first] = [None] * max(0, first - self.num_given_back)
        self.num_given_back = max(self.num_given_back, first)
        return given

    def all_blocks(self) -> list[Block]:
        """Of all groups, in token order."""
        if not self.window_blocks:
            return self.blocks
        return [block for of_all in zip(self.blocks, *self.window_blocks, strict=True) for block in of_all if block]

    def take_blocks(self) -> list[Block]:
        """Give up all blocks and with them all computed tokens; the caller frees them.

        The adjustments and drafts go, too, so that only running sequences hold memory for them.
        """
        blocks = self.all_blocks()
        self.blocks, self.block_ids, self.prefixes = [], [], []
        self.have_window_groups(len(self.window_ids))
        self.num_computed_tokens = self.num_draft_computed_tokens = 0
        self.pooled = None
        self.adjustments = self.drafts = None
        return blocks
