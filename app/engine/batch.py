"""The batch of one step, the builder that fills it up to its token budget, and the result of the step.

Model runners must not change a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from app.config import SchedulerConfig
from app.engine.logit_adjustments import LogitAdjustments
from app.engine.matcher import Matcher, allowed_after_bans
from app.engine.request import Pooling, SamplingParams, TokenLogprobs
from app.engine.sequence import EngineSequence
from app.engine.state_pool import StatePath


class ScheduledSequence(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The part of a sequence that a step computes: `token_ids` at positions `start`, `start + 1`, …

    If `samples` is true, the tokens reach the end of the sequence and the step draws the next token. A negative token
    id -1 - n stands for the token that the previous step draws for its `sampled[n]`. Only runners that launch steps get
    negative ids. A step may create a thousand of these objects. A struct takes a third of the time of a dataclass to
    create, and the garbage collector does not track it.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: list[int]  # in token order, for at least start + len(token_ids) tokens
    samples: bool
    sampling: SamplingParams
    banned_token_ids: tuple[int, ...] = ()  # may not be drawn: end tokens before `min_tokens`, last tokens of bad words
    adjustments: LogitAdjustments | None = None  # penalties and biases at this step; None if the request has none
    matcher: Matcher | None = None  # decides which tokens may be drawn; None allows all tokens
    # Whether the draw depends on a token that is still being drawn (`SamplingParams.needs_output_history`). Once this
    # token is known, `Scheduler.with_history` sets the penalties, bans and matcher.
    lacks_history: bool = False
    # Consecutive prompt tokens whose log-probabilities are requested, and the position of the first one. This step
    # computes the token before each target, because it predicts the target.
    targets: tuple[int, ...] = ()
    first_target: int = 0
    # The requested hidden states: the last token's, or the sum over all tokens.
    pooling: Pooling | None = None
    adapter: object = None  # the object that the model runner's `load_adapter` returned
    window_ids: tuple[list[int], ...] = ()  # `block_ids` of each window group; those before the window may be reused
    states: StatePath | None = None  # set for a model with recurrent layers
    second_text_at: int = 0  # see `Request.second_text_at`
    # Copies of this item that end at each of its tokens. Set if it has drafts and its draws depend on earlier tokens.
    draws: tuple[ScheduledSequence, ...] = ()

    def ids_of(self, group: int) -> list[int]:
        """Return the block ids of a group. Group 0 has full attention, and the other groups a sliding window."""
        return self.window_ids[group - 1] if group else self.block_ids

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the drawn token or of prompt tokens are requested."""
        return bool(self.targets) or (self.samples and self.sampling.logprobs is not None)

    @property
    def end(self) -> int:
        """Number of tokens in the KV cache after this step, which is also the drawn token's position."""
        return self.start + len(self.token_ids)

    @property
    def takes_all_logits(self) -> bool:
        """Whether the sampler uses the model's logits unchanged."""
        return self.adjustments is None and self.matcher is None and not self.banned_token_ids

    def allowed(self) -> bytes:
        """Return the tokens that the matcher allows, except banned tokens, as bits (see `Matcher.allowed`)."""
        assert self.matcher is not None, "without a matcher, all tokens may be drawn"
        if not self.banned_token_ids:
            return self.matcher.allowed()
        return allowed_after_bans(self.matcher, self.banned_token_ids)


class WaitReason(StrEnum):
    """Why the first waiting sequence did not join a step."""

    SLOTS = "slots"  # `max_running` sequences are running
    BLOCKS = "blocks"  # too few blocks of KV memory or too few state slots are free
    BUDGET = "budget"  # the step has no budget left for prefill or for prompt log-probabilities
    STRATEGY = "strategy"  # the strategy is waiting for a timer, the running batch, or prompts of similar length
    RESULT = "result"  # the sequence was preempted, and its last token is still being drawn


class SchedulingDecision(NamedTuple):
    """The scheduler's decisions about a step, for the trace."""

    joined: Sequence[EngineSequence] = ()  # sequences that start running with this step
    preempted: Sequence[EngineSequence] = ()  # sequences that were preempted since the previous step was scheduled
    wait_reason: WaitReason | None = None  # why the first waiting sequence did not join; None if no sequence waits
    num_waiting: int = 0  # waiting sequences after this step was scheduled
    num_free_blocks: int = 0  # free blocks after this step was scheduled
    # The fetches from a store that began with this step, as pairs of a sequence's arrival number and the number of
    # requested blocks, and those that finished since the previous step, with the number of usable blocks.
    fetching: Sequence[tuple[int, int]] = ()
    fetched: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class StepBatch:
    """The work of one step, in order of precedence."""

    scheduled: tuple[ScheduledSequence, ...]
    sequences: tuple[EngineSequence, ...]  # the scheduler's own records, one for each of `scheduled`
    began_at: float = 0.0  # when the step was scheduled, in seconds of the engine's clock
    epoch: int = 0  # `RunningSequences.epoch` when the step was scheduled
    decision: SchedulingDecision = field(default_factory=SchedulingDecision)
    num_scheduled_tokens: int = 0  # `num_tokens`, counted by the builder because summing over a thousand items is slow
    has_logprobs: bool = False  # whether any log-probabilities are requested
    has_pooling: bool = False  # whether any hidden states are requested
    has_preempted: bool = False  # whether sequences were preempted to free blocks for this batch
    # Whether the batch contains drafts. Every sequence is then decoding, its tokens after the first are drafts, and the
    # step also draws a token after each draft (see `kept_tokens`).
    has_drafts: bool = False
    # Whether no other step was in flight when this step was scheduled, in an engine that launches ahead.
    launched_alone: bool = False

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.scheduled)

    @cached_property
    def has_targets(self) -> bool:
        """Whether log-probabilities of prompt tokens are requested for any sequence."""
        return self.has_logprobs and any(item.targets for item in self.scheduled)

    @cached_property
    def sampled(self) -> tuple[ScheduledSequence, ...]:
        """The items for which the step draws a token, in the order of `StepResult.token_ids`.

        In a batch with drafts, a sequence has one item for each of its tokens, which ends with this token.
        """
        if self.has_drafts:
            return tuple([each for item in self.scheduled for each in _items_by_draw(item)])
        return tuple([item for item in self.scheduled if item.samples])

    @cached_property
    def has_adapters(self) -> bool:
        return any(item.adapter is not None for item in self.scheduled)

    @cached_property
    def matchers(self) -> tuple[Matcher, ...]:
        """The matchers of the items for which the step draws a token."""
        items = self.sampled if self.has_drafts else self.scheduled
        return tuple([item.matcher for item in items if item.matcher is not None])

    @cached_property
    def lacks_history(self) -> bool:
        """Whether any draw depends on a token that is still being drawn."""
        return any(item.lacks_history for item in self.scheduled)

    def part(self, which: slice) -> StepBatch:
        """Return a batch that contains only some of the sequences."""
        scheduled = self.scheduled[which]
        return replace(
            self,
            scheduled=scheduled,
            sequences=self.sequences[which],
            num_scheduled_tokens=sum(len(item.token_ids) for item in scheduled),
            has_logprobs=any(item.wants_logprobs for item in scheduled),
            has_pooling=any(item.pooling is not None for item in scheduled),
        )

    def __bool__(self) -> bool:
        return bool(self.scheduled)


EMPTY_BATCH = StepBatch((), ())


def _items_by_draw(item: ScheduledSequence) -> Sequence[ScheduledSequence]:
    """Return copies of an item that end at each of its tokens."""
    if item.draws:
        return item.draws
    shorter = [structs.replace(item, token_ids=item.token_ids[:end]) for end in range(1, len(item.token_ids))]
    return [*shorter, item]


_EMPTY: Mapping[str, Any] = MappingProxyType({})


class StepResult(NamedTuple):
    """The result of a step. Mappings are by request id, and contain only the requests that asked for the values."""

    token_ids: list[int]  # one for each item in `StepBatch.sampled`, in the same order
    logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = _EMPTY  # for the drawn tokens
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = _EMPTY  # one for each of a sequence's `targets`
    pooled: Mapping[str, list[float]] = _EMPTY  # hidden states after the final norm: the last token's, or a sum
    num_kept: Sequence[int] = ()  # set by `kept_tokens`: how many of each sequence's draws remain in `token_ids`


def by_request(logprobs: Iterable[tuple[str, TokenLogprobs]]) -> dict[str, tuple[TokenLogprobs, ...]]:
    """Group the log-probabilities of drawn tokens by request id, for `StepResult.logprobs`."""
    found: dict[str, tuple[TokenLogprobs, ...]] = {}
    for request_id, each in logprobs:
        found[request_id] = (*found[request_id], each) if request_id in found else (each,)
    return found


class DeviceLost(Exception):
    """The device is unusable for the rest of this process. No request is at fault, and no further step is run."""


# ---------------------------------------------------------------------- building


class StepLimits(NamedTuple):
    """The limits of a step, which the tuner adjusts. `max_running` never exceeds `max_step_tokens`."""

    max_step_tokens: int
    prefill_chunk_tokens: int
    max_running: int

    @classmethod
    def of(cls, config: SchedulerConfig) -> StepLimits:
        """Return the configured limits. Memory, graphs and workspaces are sized for these upper bounds."""
        return cls(config.max_step_tokens, config.prefill_chunk_tokens, config.max_running)


# Maximum number of prompt tokens that get log-probabilities in one step. Each needs a row of logits, which is 300 MB
# in total for a vocabulary of 150,000 tokens. A longer prompt takes more steps.
MAX_SCORED_TOKENS = 512
# Maximum number of sequences with more than one token (prompts or drafts) in a step that a GPU replays from a graph.
# Each may need an extra kernel program in every replay.
MAX_MULTI_TOKEN_SEQUENCES = 64


class BatchBuilder:
    """Builds a batch from sequences, which are added in order of precedence and charged to the token budget."""

    def __init__(
        self,
        *,
        budget: int,
        max_prefill_tokens: int | None,
        max_background_tokens: int | None,
        chunk_tokens: int,
        eos_token_ids: frozenset[int],
        computes_whole_prompts: bool = False,
    ) -> None:
        """All prompts together may use `max_prefill_tokens` of the budget, and all background prompts together
        `max_background_tokens`. A single prompt may use `chunk_tokens`.

        If `computes_whole_prompts`, prompts are not divided, and a prompt above a limit gets its own step.
        """
        self._budget = budget
        self.num_tokens_left = budget
        self._num_prefill_tokens_left = budget if max_prefill_tokens is None else max_prefill_tokens
        self._num_background_tokens_left = budget if max_background_tokens is None else max_background_tokens
        self._chunk_tokens = chunk_tokens
        self._computes_whole_prompts = computes_whole_prompts
        self._num_scored_tokens_left = MAX_SCORED_TOKENS
        self._has_logprobs = False
        self._has_pooling = False
        self._eos_token_ids = eos_token_ids
        self._has_drafts = False
        self.has_preempted = False
        self.scheduled: list[ScheduledSequence] = []
        self.sequences: list[EngineSequence] = []  # one for each of `scheduled`

    def has_room_for_prefill(self, sequence: EngineSequence) -> bool:
        """Whether the step has room for a token of the sequence's prompt, or for all if prompts are not divided."""
        if self._computes_whole_prompts:
            return self._has_room_for_all(sequence)
        return self.num_tokens_left > 0 and self._num_prompt_tokens_left(sequence) > 0

    @property
    def has_single_tokens(self) -> bool:
        """Whether the batch is not empty, each sequence has exactly one token, and the budget is not used up."""
        return 0 < len(self.sequences) == self._budget - self.num_tokens_left < self._budget

    @property
    def has_room_for_scores(self) -> bool:
        return self._num_scored_tokens_left > 0

    def chunk(self, sequence: EngineSequence, *, num_reserved: int = 0) -> int:
        """Return how many tokens of a prompt fit into the step, leaving `num_reserved` tokens of the budget unused."""
        if self._computes_whole_prompts:
            return sequence.num_uncomputed_tokens if self._has_room_for_all(sequence) else 0
        num_tokens = min(
            sequence.num_uncomputed_tokens,
            self._chunk_tokens,
            self.num_tokens_left - num_reserved,
            self._num_prompt_tokens_left(sequence),
        )
        return min(num_tokens, self._num_scorable(sequence)) if sequence.is_scoring else num_tokens

    def _has_room_for_all(self, sequence: EngineSequence) -> bool:
        num_left = min(self.num_tokens_left, self._num_prompt_tokens_left(sequence))
        return sequence.num_uncomputed_tokens <= num_left or not self.scheduled

    def _num_scorable(self, sequence: EngineSequence) -> int:
        """Return how many tokens the step may compute without exceeding `MAX_SCORED_TOKENS`."""
        start = sequence.num_computed_tokens
        end = max(start, sequence.num_scored_tokens) + self._num_scored_tokens_left
        return sequence.num_uncomputed_tokens if end >= sequence.num_prompt_tokens - 1 else end - start

    def _num_prompt_tokens_left(self, sequence: EngineSequence) -> int:
        if sequence.request.is_background:
            return min(self._num_prefill_tokens_left, self._num_background_tokens_left)
        return self._num_prefill_tokens_left

    def give_states(self, path_of: Callable[[EngineSequence, int], StatePath]) -> None:
        """Set every sequence's state slots. Called only for a model with recurrent layers."""
        self.scheduled = [
            structs.replace(item, states=path_of(sequence, len(item.token_ids)))
            for item, sequence in zip(self.scheduled, self.sequences, strict=True)
        ]

    def add_decoding(self, sequence: EngineSequence) -> None:
        """Add a sequence's last token. The token's block must be allocated."""
        if sequence.has_plain_sampling:  # the common case; equal to `_scheduled_sequence`, but faster
            request = sequence.request
            scheduled = ScheduledSequence(  # positional arguments, because keyword arguments are slower
                request.request_id,
                (sequence.generated_token_ids[-1],),
                sequence.num_computed_tokens,
                sequence.block_ids,
                True,
                request.sampling,
                (),
                None,
                sequence.matcher,
                sequence.lacks_history,
                (),
                0,
                None,
                None if sequence.adapter is None else sequence.adapter.weights,
                () if sequence.windows is None else sequence.windows.ids,
            )
        else:
            scheduled = self._scheduled_sequence(sequence, 1)
        if sequence.wants_logprobs:
            self._has_logprobs = True
        self.scheduled.append(scheduled)
        self.sequences.append(sequence)
        self.num_tokens_left -= 1

    def add_prefill(self, sequence: EngineSequence, num_tokens: int) -> None:
        """Add the next tokens of a prompt. Their blocks must be allocated."""
        self.scheduled.append(self._scheduled_sequence(sequence, num_tokens))
        self.sequences.append(sequence)
        self.num_tokens_left -= num_tokens
        self._num_prefill_tokens_left -= num_tokens
        self._num_background_tokens_left -= num_tokens if sequence.request.is_background else 0

    def add_drafts(self, place: int, drafts: Sequence[int]) -> None:
        """Add drafts to the item at `place`. All sequences must be decoding, and the drafts' blocks allocated."""
        item, sequence = self.scheduled[place], self.sequences[place]
        is_simple = sequence.has_plain_sampling and item.matcher is None
        draws = () if is_simple else expand_drafts(item, sequence, drafts, self._eos_token_ids)
        self.scheduled[place] = structs.replace(item, token_ids=(*item.token_ids, *drafts), draws=draws)
        self.num_tokens_left -= len(drafts)
        self._has_drafts = True

    def build(self, decision: SchedulingDecision, *, began_at: float, epoch: int, launched_alone: bool) -> StepBatch:
        return StepBatch(
            tuple(self.scheduled),
            tuple(self.sequences),
            began_at=began_at,
            epoch=epoch,
            decision=decision,
            num_scheduled_tokens=self._budget - self.num_tokens_left,
            has_logprobs=self._has_logprobs,
            has_pooling=self._has_pooling,
            has_preempted=self.has_preempted,
            has_drafts=self._has_drafts,
            launched_alone=launched_alone,
        )

    def _scheduled_sequence(self, sequence: EngineSequence, num_tokens: int) -> ScheduledSequence:
        start = sequence.num_computed_tokens
        sampling = sequence.request.sampling
        samples = num_tokens == sequence.num_uncomputed_tokens and sampling.max_tokens > 0
        knows_all = samples and not sequence.lacks_history
        first_target, targets = self._targets(sequence, start + num_tokens) if sequence.is_scoring else (0, ())
        scheduled = ScheduledSequence(
            sequence.request.request_id,
            sequence.token_ids(start, start + num_tokens),
            start,
            sequence.block_ids,
            samples,
            sampling,
            banned_token_ids=_banned(sequence, self._eos_token_ids) if knows_all else (),
            adjustments=sequence.current_adjustments() if knows_all else None,
            targets=targets,
            first_target=first_target,
            pooling=_pooling(sequence, start + num_tokens),
            second_text_at=sequence.request.second_text_at,
            matcher=sequence.matcher if samples else None,
            lacks_history=samples and sequence.lacks_history,
            adapter=None if sequence.adapter is None else sequence.adapter.weights,
            window_ids=() if sequence.windows is None else sequence.windows.ids,
        )
        if scheduled.wants_logprobs:
            self._has_logprobs = True
        if scheduled.pooling is not None:
            self._has_pooling = True
        return scheduled

    def _targets(self, sequence: EngineSequence, end: int) -> tuple[int, tuple[int, ...]]:
        """Return the first target's position and all targets, for a step that computes tokens up to `end`."""
        first = max(sequence.num_computed_tokens, sequence.num_scored_tokens) + 1
        targets = sequence.request.prompt_token_ids[first : end + 1]
        self._num_scored_tokens_left -= len(targets)
        return first, targets


def with_history(item: ScheduledSequence, sequence: EngineSequence, eos_token_ids: frozenset[int]) -> ScheduledSequence:
    """Complete an item that lacked history, now that the token before its draw is known.

    If this token ended the sequence, the draw will be discarded and needs no bans, adjustments or matcher.
    """
    if sequence.is_finished:
        return structs.replace(item, lacks_history=False, matcher=None)
    return structs.replace(
        item,
        lacks_history=False,
        banned_token_ids=_banned(sequence, eos_token_ids),
        adjustments=sequence.current_adjustments(),
    )


def expand_drafts(
    item: ScheduledSequence, sequence: EngineSequence, drafts: Sequence[int], eos_token_ids: frozenset[int]
) -> tuple[ScheduledSequence, ...]:
    """Return an item with one token, and one copy for each draft that is extended up to this draft.

    Each copy has the penalties, bans and matcher that apply after its last token.
    """
    draws, generated = [item], list(sequence.generated_token_ids)
    for draft in drafts:
        generated.append(draft)
        draws.append(after_draft(draws[-1], generated, eos_token_ids))
    return tuple(draws)


def after_draft(item: ScheduledSequence, generated: list[int], eos_token_ids: frozenset[int]) -> ScheduledSequence:
    """Return a copy of the item that is extended by a draft, the last of the `generated` tokens."""
    draft = generated[-1]
    return structs.replace(
        item,
        token_ids=(*item.token_ids, draft),
        banned_token_ids=banned_token_ids(item.sampling, generated, eos_token_ids),
        adjustments=None if item.adjustments is None else item.adjustments.after(draft),
        matcher=None if item.matcher is None else item.matcher.after(draft),
    )


def _banned(sequence: EngineSequence, eos_token_ids: frozenset[int]) -> tuple[int, ...]:
    """Return the tokens that a sequence may not draw next. All of its tokens must be known."""
    return banned_token_ids(sequence.request.sampling, sequence.generated_token_ids, eos_token_ids)


def banned_token_ids(sampling: SamplingParams, generated: list[int], eos_token_ids: frozenset[int]) -> tuple[int, ...]:
    """Return the tokens that may not be drawn after the `generated` tokens."""
    banned = _ends_of_bad_words(sampling.bad_words, generated) if sampling.bad_words else ()
    if len(generated) < sampling.min_tokens:
        return (*banned, *eos_token_ids, *sampling.stop_token_ids)
    if sampling.ignore_eos and sampling.grammar is not None:  # has no effect once the grammar allows no other token
        return (*banned, *eos_token_ids)
    return banned


def _ends_of_bad_words(bad_words: tuple[tuple[int, ...], ...], generated: list[int]) -> tuple[int, ...]:
    """Return the tokens that would complete a bad word after the `generated` tokens."""
    last = generated[-1] if generated else None
    return tuple([word[-1] for word in bad_words if len(word) == 1 or (word[-2] == last and _ends(generated, word))])


def _ends(generated: list[int], word: tuple[int, ...]) -> bool:
    """Whether the `generated` tokens end with all but the last token of the word."""
    return tuple(generated[1 - len(word) :]) == word[:-1]


def _pooling(sequence: EngineSequence, end: int) -> Pooling | None:
    """Return which hidden states the embedding needs from a step that computes tokens up to `end`."""
    pooling = sequence.request.pooling
    return None if pooling == Pooling.LAST and end < sequence.num_prompt_tokens else pooling


# ---------------------------------------------------------------------- drafts


def kept_tokens(batch: StepBatch, result: StepResult) -> StepResult:
    """Return the result of a batch with drafts, without the draws that follow a wrong draft.

    A draft is wrong if it differs from the token drawn in its place. A draw only depends on the request, the position
    and the previous tokens, so the kept tokens are those that steps without drafts would have drawn, both with greedy
    decoding and with sampling. (Leviathan et al., 2023, accept by a ratio of probabilities: their draws are random.)
    """
    token_ids: list[int] = []
    num_kept: list[int] = []
    logprobs = dict(result.logprobs)
    start = 0
    for item, sequence in zip(batch.scheduled, batch.sequences, strict=True):
        draws = result.token_ids[start : start + len(item.token_ids)]
        number = _num_kept(draws, item, sequence.end_token_ids)
        if item.request_id in logprobs:
            logprobs[item.request_id] = logprobs[item.request_id][:number]
        token_ids += draws[:number]
        num_kept.append(number)
        start += len(draws)
    return result._replace(token_ids=token_ids, logprobs=logprobs, num_kept=num_kept)


def _num_kept(draws: Sequence[int], item: ScheduledSequence, end_token_ids: Collection[int]) -> int:
    """Return how many draws are kept. Draws after the first are kept until a draft is wrong or is an end token.

    A later draw is not kept if its matcher failed. If it fails again as the first draw of a step, the request ends.
    """
    number = 1
    for drawn, draft in zip(draws, item.token_ids[1:], strict=False):
        matcher = item.draws[number].matcher if item.draws else None
        if drawn != draft or drawn in end_token_ids or (matcher is not None and matcher.failure is not None):
            break
        number += 1
    return number
