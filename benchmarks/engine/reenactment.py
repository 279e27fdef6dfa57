"""An engine that repeats a recorded run: the same arrivals before the same steps, at the recorded times."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice

from app.build import assemble
from app.config import CacheConfig, SchedulerConfig, TargetsConfig
from app.engine.adapter_store import AdapterStore, HeldAdapter
from app.engine.batch import ScheduledSequence
from app.engine.block_store import BlockStore, Fetch
from app.engine.engine import StepError
from app.engine.matcher import Matchers
from app.engine.model_runner import ModelRunner
from app.engine.prefix import Prefix
from app.engine.request import ModelInfo, Request
from app.engine.state_pool import NO_STATE, StatePath
from app.engine.stats import StoreStats
from app.engine.trace.entries import (
    NOTHING,
    Abort,
    Arrival,
    Asleep,
    CacheCleared,
    Entry,
    Header,
    Limited,
    Reconfigured,
    RedactedArrival,
    StepRecord,
)
from app.engine.trace.recorder import StepRecorder
from benchmarks.engine.reenacting_runner import ReenactingLauncher, ReenactingRunner, StandIns


class RecordedClock:
    """Returns the clock times that were read in the recorded run, one after the other."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self._last = 0.0

    def expect(self, *times: float | None) -> None:
        """Set the clock readings of the next step. None means that the clock was not read."""
        self._times = deque(at for at in times if at is not None)

    def __call__(self) -> float:
        if self._times:  # the engine may read the clock more often than in the log; the comparison reports this
            self._last = self._times.popleft()
        return self._last


class RecordedStore(BlockStore):
    """Has the blocks that the recorded store had for each request, and delivers them before the recorded steps."""

    namespace = b""

    def __init__(self, compute: Callable[[Fetch, int], None]) -> None:
        """compute: computes the first `num_blocks` blocks of a fetch and the snapshot after them."""
        self._compute = compute
        self._wanted: dict[str, int] = {}  # number of blocks in the next step, by request id
        # By request id. A request that slept may start a second fetch while the first fetch still fills its blocks.
        self._under_way: defaultdict[str, deque[Fetch]] = defaultdict(deque)

    def expect(self, record: StepRecord, request_ids: Mapping[int, str]) -> None:
        """Deliver the fetches of the next step."""
        for number, num_filled in record.fetched:
            if fetches := self._under_way[request_ids.get(number, "")]:
                fetch = fetches.popleft()
                if fetch.slot is not None and num_filled:
                    self._compute(fetch, num_filled)
                fetch.num_filled = fetch.num_covered_by_snapshot = num_filled
                fetch.is_done = True
        self._wanted = {request_ids.get(number, ""): num_blocks for number, num_blocks in record.fetching}

    def lookup(self, names: Iterable[bytes], request: Request, *, num_before: int) -> int:
        return sum(1 for _ in islice(names, self._wanted.get(request.request_id, 0)))

    def expected_s(self, num_blocks: int, request: Request) -> float:
        return 0.0

    def begin(self, fetch: Fetch) -> None:
        self._under_way[fetch.request.request_id].append(fetch)
        if fetch.slot is None:  # else the number of blocks before the snapshot is not yet known
            self._compute(fetch, len(fetch.blocks))

    def offer(self, prefix: Prefix) -> None:
        """Do nothing: this store holds no blocks."""

    def stats(self) -> StoreStats:
        return StoreStats()

    def settle(self, timeout_s: float) -> None:
        """Return at once: only the log says which fetches are in progress."""

    def close(self) -> None:
        """Do nothing."""


class Reenactment:
    """Takes the entries of a log in their order and returns the replayed record of each step."""

    def __init__(
        self,
        header: Header,
        *,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        model: ModelRunner | None = None,
        matchers: Matchers | None = None,
        adapters: AdapterStore | None = None,
        stand_ins: StandIns | None = None,
    ) -> None:
        """Without a model, the tokens come from the log, or from `stand_ins` for a log without prompts.

        A model needs its store of adapters. A model also needs the grammar matchers; tokens from the log need none.
        """
        model_info = facts_of(header)
        kind = ReenactingLauncher if header.launches_ahead else ReenactingRunner
        self._runner = kind(model, stand_ins, model_info.eos_token_ids)
        self._stand_ins = stand_ins
        self._matchers = matchers
        self._clock = RecordedClock()
        self._entries: list[Entry] = []
        self._shares = Shares()
        self.request_ids: dict[int, str] = {}  # by number
        self._store = RecordedStore(self._computed)
        self._engine = assemble(
            _without_tuner(scheduler),
            cache,
            num_blocks=cache.num_blocks or header.num_blocks,
            runner=self._runner,
            model_info=model_info,
            clock=self._clock,
            recorder=StepRecorder(self._take, stopwatch_ns=lambda: 0),
            drafter=self._runner,
            adapters=adapters,
            store=self._store,
        )

    def _computed(self, fetch: Fetch, num_blocks: int) -> None:
        """Compute with the model the blocks that came from a store.

        A state is computed from the first token, because the snapshot from the start of the fetch may be gone.
        """
        block_ids = [block.block_id for block in (*fetch.before, *fetch.blocks)]
        adapter = self._adapter_of(fetch.request)
        size, num_before = len(fetch.token_ids[0]), len(fetch.before)
        first, end = size * num_before, size * (num_before + num_blocks)
        token_ids = (*fetch.request.prompt_token_ids, *fetch.request.generated_token_ids)
        pieces = range(first, end, size) if fetch.slot is None else [0]
        for start in pieces:
            piece = token_ids[start : start + size if fetch.slot is None else end]
            self._runner.fill(
                ScheduledSequence(
                    request_id=fetch.request.request_id,
                    token_ids=piece,
                    start=start,
                    block_ids=block_ids,
                    samples=False,
                    sampling=fetch.request.sampling,
                    adapter=None if adapter is None else adapter.weights,
                    states=None if fetch.slot is None else StatePath(NO_STATE, ((len(piece), fetch.slot),)),
                )
            )
        if adapter is not None:
            adapter.release()

    def step(self, record: StepRecord, after: StepRecord | None) -> StepRecord:
        """Repeat a recorded step; `after` is the next record. The result has its scheduled tokens in full."""
        self._runner.expect(record, after)
        self._store.expect(record, self.request_ids)
        self._clock.expect(record.began_at, record.ended_at)
        self._entries.clear()
        with suppress(StepError):  # a recorded failure, or the comparison reports the difference
            self._engine.step()
        (made,) = self._entries
        assert isinstance(made, StepRecord), "a step makes one entry"
        return self._shares.in_full(made)

    def _adapter_of(self, request: Request) -> HeldAdapter | None:
        """Return the adapter of a request. If no model computes, the adapter has no weights."""
        if request.adapter is None:
            return None
        store = self._engine.adapters
        return HeldAdapter(None, lambda: None) if store is None else store.hold(request.adapter)

    def outside(self, entry: Entry) -> None:
        """Apply an entry that came from outside between two steps."""
        match entry:
            case Arrival():
                self.request_ids[entry.number] = entry.request.request_id
                matcher = None if self._matchers is None else self._matchers.matcher_of(entry.request).result()
                self._engine.add_checked(
                    entry.request, arrived_at=entry.at, matcher=matcher, adapter=self._adapter_of(entry.request)
                )
            case RedactedArrival():
                assert self._stand_ins is not None, "a log without prompts needs tokens that stand for them"
                request = self._stand_ins.request(entry)
                self.request_ids[entry.number] = request.request_id
                self._engine.add_checked(request, arrived_at=entry.at)
            case Abort():
                self._engine.abort(self.request_ids.get(entry.number, ""))
            case Reconfigured():
                self._engine.reconfigure(_without_tuner(entry.config))
            case Limited():
                self._engine.limit(entry.limits)
            case CacheCleared():
                self._engine.clear_prefix_cache()
            case Asleep():
                self._engine.sleep() if entry.is_asleep else self._engine.wake()

    def _take(self, entry: Entry) -> bool:
        self._entries.append(entry)
        return True


def _without_tuner(config: SchedulerConfig) -> SchedulerConfig:
    """Return the config without targets: the limits that the tuner chose are entries of the log."""
    return config.model_copy(update={"targets": TargetsConfig()})


def facts_of(header: Header) -> ModelInfo:
    """Return the model info that the recorded engine had."""
    return ModelInfo.of_json(header.facts)


class Shares:
    """Restores full shares from a record that only says that a step repeats the previous step."""

    def __init__(self) -> None:
        self._last = NOTHING

    def in_full(self, record: StepRecord) -> StepRecord:
        self._last = self._last.next_decode_step() if record.scheduled is None else record.scheduled
        return record._replace(scheduled=self._last)
