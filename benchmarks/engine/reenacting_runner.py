"""Model runners that repeat a step log: they fail where the recorded runner failed, and draw the recorded tokens.

A real runner inside computes the steps and draws its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import msgspec
from msgspec import structs

from app.engine.batch import ScheduledSequence, StepBatch, StepResult
from app.engine.matcher import TokenSet
from app.engine.model_runner import ModelRunner
from app.engine.request import Request
from app.engine.sequence import EngineSequence
from app.engine.speculation.drafter import Drafter, Take, one_by_one
from app.engine.trace.entries import (
    NOTHING,
    Entry,
    FailureKind,
    OutputHashes,
    RedactedArrival,
    StepRecord,
)


class RecordedFailure(Exception):
    """The step failed at this point when it was recorded."""


class ReenactingRunner(ModelRunner, Drafter):
    """Repeats recorded steps; `expect` sets the record of each step. `numbers` of requests come from the log."""

    def __init__(self, model: ModelRunner | None, stand_ins: StandIns | None, eos_token_ids: tuple[int, ...]) -> None:
        """Without a model, the recorded tokens or their stand-ins are drawn."""
        self._model = model
        self._stand_ins = stand_ins
        self._eos_token_ids = eos_token_ids
        self._record = self._after = StepRecord(0)
        # number → tokens, once the whole batch has been seen; one token per request, except in steps with drafts
        self._recorded: dict[int, list[int]] | None = None

    def expect(self, record: StepRecord, after: StepRecord | None) -> None:
        """Set the record of the next step and of the step after it."""
        self._record, self._after, self._recorded = record, after or StepRecord(0), None

    def run(self, batch: StepBatch) -> StepResult:
        """Compute a step, or a part of a step that failed."""
        is_whole, tokens = self._recorded is None, self._tokens_of(batch)
        for how, numbers in self._record.failures:
            if how is FailureKind.MATCHERS:
                _fail_matchers(batch, numbers)
            is_to_blame = any(sequence.arrival in numbers for sequence in batch.sequences)
            # If a step failed as a whole but no part of it failed, no request caused the failure.
            if how is FailureKind.DEVICE or (
                how is FailureKind.REQUESTS and (is_to_blame or (is_whole and not numbers))
            ):
                raise RecordedFailure
        return StepResult(tokens) if self._model is None else self._model.run(batch)

    def fill(self, item: ScheduledSequence) -> None:
        """Compute tokens with the model, if there is one, without drawing a token."""
        if self._model is not None:
            self._model.run(StepBatch((item,), (), num_scheduled_tokens=len(item.token_ids)))

    def _tokens_of(self, batch: StepBatch) -> list[int]:
        pairs = zip(batch.scheduled, batch.sequences, strict=True)
        sampled = [(item, sequence) for item, sequence in pairs if item.samples]
        if self._recorded is None:
            self._recorded = self._kept(self._record, [sequence.arrival for _, sequence in sampled])
        tokens: list[int] = []
        for item, sequence in sampled:
            # A request that the record did not sample has no token; the comparison reports the difference.
            kept = self._recorded.get(sequence.arrival) or [0]
            if self._stand_ins is not None:
                position = item.start + 1 if batch.has_drafts else item.end
                kept = self._stood_in(self._record, sequence, position, len(kept))
            num_draws = len(item.token_ids) if batch.has_drafts else 1
            tokens += [*kept, *[0] * num_draws][:num_draws]  # tokens drawn after the accepted ones are not known
        return tokens

    def _kept(self, record: StepRecord, numbers: Sequence[int]) -> dict[int, list[int]]:
        """Return the recorded tokens by request. For a log without prompts, return zeros instead."""
        counts = record.num_kept or [1] * len(numbers)
        tokens = iter(record.token_ids or [0] * (sum(counts) if self._stand_ins is not None else 0))
        return {number: list(islice(tokens, count)) for number, count in zip(numbers, counts, strict=False)}

    def _stood_in(self, record: StepRecord, sequence: EngineSequence, position: int, count: int) -> list[int]:
        """Return `count` stand-in tokens of a request, from a position on."""
        assert self._stand_ins is not None, "only a log without prompts needs stand-ins"
        number = sequence.arrival
        tokens = [self._stand_ins.token(number, at) for at in range(position, position + count)]
        if (number, "stop") in record.ended:
            tokens[-1] = (*sequence.request.sampling.stop_token_ids, *self._eos_token_ids)[0]
        return tokens

    # ------------------------------------------------------------------ as a `Drafter`

    def expects_drafts(self, sequences: Sequence[EngineSequence]) -> bool:
        return self._record.began_at is None  # the recorded step waited: nothing was scheduled

    def begin(self, num_sequences: int) -> bool:
        return True

    def draft(
        self, items: Sequence[ScheduledSequence], sequences: Sequence[EngineSequence], take: Take
    ) -> Iterator[tuple[int, Sequence[int]]]:
        return one_by_one(sequences, take, self._draft_of)

    def _draft_of(self, sequence: EngineSequence) -> list[int]:
        """Return as many drafts as were recorded: the tokens accepted then, followed by tokens that were not drawn."""
        scheduled = self._record.scheduled or NOTHING
        if not scheduled.counts or sequence.arrival not in scheduled.numbers:
            return []
        num_drafts = scheduled.counts[list(scheduled.numbers).index(sequence.arrival)] - 1
        drawn_in = self._record if self._record.num_kept else self._after  # the next record if steps are launched ahead
        kept = self._kept(drawn_in, scheduled.samplers).get(sequence.arrival) or [0]
        if self._stand_ins is not None:
            kept = self._stood_in(drawn_in, sequence, sequence.num_tokens, len(kept))
        return [*kept[:-1], *[abs(kept[-1] - 1)] * num_drafts][:num_drafts]

    def stepped(self, batch: StepBatch, result: StepResult, *, seconds: float) -> None:
        """Do nothing: the log says which tokens were drafted."""


class _Failed(TokenSet):
    """A matcher that failed to give the allowed tokens when the run was recorded."""

    failure = "it failed when it was recorded"


def _fail_matchers(batch: StepBatch, numbers: Sequence[int]) -> None:
    for sequence in batch.sequences:
        if sequence.arrival in numbers:
            sequence.matcher = _Failed((), vocab_size=0)


class ReenactingLauncher(ReenactingRunner):
    """A `ReenactingRunner` for an engine that launches ahead. A step is computed when its result is requested."""

    launches = True

    def __init__(self, model: ModelRunner | None, stand_ins: StandIns | None, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__(model, stand_ins, eos_token_ids)
        self._drawn: list[int] = []  # by the previous step

    def launch(self, batch: StepBatch) -> LaunchedStep:
        if self._has_failed(FailureKind.LAUNCH):
            raise RecordedFailure
        return LaunchedStep(self, batch)

    def compute(self, batch: StepBatch) -> StepResult:
        """Return the result of a launched step."""
        if self._has_failed(FailureKind.RESULT):
            raise RecordedFailure
        result = self.run(replace(batch, scheduled=tuple(map(self._known, batch.scheduled))))
        self._drawn = result.token_ids
        return result

    def _has_failed(self, how: FailureKind) -> bool:
        return any(failure.how is how for failure in self._record.failures)

    def _known(self, item: ScheduledSequence) -> ScheduledSequence:
        """Return the item with the token that the previous step drew."""
        first = item.token_ids[0]
        return item if first >= 0 else structs.replace(item, token_ids=(self._drawn[-1 - first],))


@dataclass(slots=True)
class LaunchedStep:
    runner: ReenactingLauncher
    batch: StepBatch

    def draw(self, batch: StepBatch) -> None:
        self.batch = batch

    def result(self) -> StepResult:
        return self.runner.compute(self.batch)


_FIRST = 1 << 32  # above the token ids of every model


class StandIns:
    """Stand-in tokens for all requests of one log, made from the hashes of their blocks."""

    def __init__(self, entries: Iterable[Entry], *, block_size: int) -> None:
        """Read all entries first, because the hashes of a request's output are recorded when the request ends."""
        self._block_size = block_size
        self._hashes: dict[int, list[str]] = {}  # by number, one for each full block that is known
        self._tokens: dict[tuple[str | int, int], int] = {}  # by offset in a hashed block, or by position in a request
        for entry in entries:
            if isinstance(entry, RedactedArrival):
                self._hashes[entry.number] = list(entry.request["block_hashes"])
            elif isinstance(entry, OutputHashes):
                self._hashes.setdefault(entry.number, []).extend(entry.block_hashes)

    def token(self, number: int, position: int) -> int:
        """Return the token at a position of a request; positions count through prompt and output."""
        block, offset = divmod(position, self._block_size)
        hashes = self._hashes.get(number, [])
        place = (hashes[block], offset) if block < len(hashes) else (number, position)
        return self._tokens.setdefault(place, _FIRST + len(self._tokens))

    def request(self, arrival: RedactedArrival) -> Request:
        """Return a request with the length of the request that arrived."""
        given = dict(arrival.request)
        num_prompt, num_generated = given.pop("num_prompt_tokens"), given.pop("num_generated_tokens", 0)
        del given["block_hashes"]
        tokens = tuple(self.token(arrival.number, position) for position in range(num_prompt + num_generated))
        given |= {"prompt_token_ids": tokens[:num_prompt], "generated_token_ids": tokens[num_prompt:]}
        return msgspec.convert(given, Request)
