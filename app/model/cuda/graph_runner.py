"""Steps on a GPU: launched without waiting, decode steps from graphs captured once.

A step is hundreds of launches from Python; a graph makes them one. Steps in which every sequence has one token differ
only in their inputs. These are copied into tensors at fixed addresses, padded to the next of a few captured sizes, and
the captured work is replayed. Padding rows belong to no sequence: they write to a scratch slot, and their tokens are
discarded. Every other step runs eagerly.

All work goes to one stream, in order: a step may be launched while the one before it runs, and reads that step's tokens
on the device.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from app.engine.batch import Batch, DeviceLost, ScheduledSequence, StepResult
from app.errors import InvalidSetup, described
from app.model.attention import AttentionStep
from app.model.cuda.attention import TritonAttention
from app.model.cuda.batch_invariant import BatchInvariantMode
from app.model.forward import Prediction
from app.model.inputs import build_inputs
from app.model.loader import LoadedModel
from app.model.logprobs import Logprobs, WantedLogprobs, compute_logprobs
from app.model.memory import is_out_of_memory
from app.model.pooling import LastHiddenStates, PooledStates
from app.model.sampler import Sample, sample

logger = logging.getLogger(__name__)

# Takes a function on tensors at fixed addresses; returns one that repeats the same work and leaves the result in the
# same tensor.
Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]

_NUM_WARM_UPS = 2  # they compile kernels and let cuBLAS choose and allocate; a first call cannot be captured
_LARGEST = 512  # beyond it a step takes so long that its launches do not matter


class GraphModelRunner:
    """Launches batches on one model: decode steps by replay, the others eagerly."""

    def __init__(
        self,
        model: LoadedModel,
        attention: TritonAttention,
        *,
        max_rows: int,
        capture: Capture | None,
        synchronize: Callable[[], None] | None = None,
        sample: Sample = sample,
    ) -> None:
        """Capture every size up to `max_rows` sequences before the first step. Without a capture steps run eagerly.

        synchronize: waits for the device and raises what is wrong with it; None where no device can be lost.
        """
        assert model.module is not None, "native code is for CPUs"
        self._model = model
        self._sample = sample
        self._module = model.module
        self._last_hidden = LastHiddenStates(model.module)
        self._attention = attention
        self._arithmetic: Callable[[], AbstractContextManager[Any]] = (
            BatchInvariantMode if attention.batch_invariant else nullcontext
        )
        self._drawn: torch.Tensor | None = None  # [num_sampled], by the step launched last
        self._logits: torch.Tensor | None = None  # [largest size, vocab_size], of the last replay
        self._graphs: dict[int, _Graph] = {}
        self._sizes = graph_sizes(max_rows)
        self._capture = capture  # None once it has been used
        self._finding_loss = FindingLoss(synchronize) if synchronize is not None else nullcontext()

    def prepare(self) -> None:
        """Capture what is to be captured; takes seconds. The work is bound to the workspaces of this thread.

        Raises InvalidSetup if the device's memory does not hold the `coarse_sizes`.
        """
        if self._capture is not None:
            self._capture_all(self._capture)
            self._capture = None

    def run(self, batch: Batch) -> StepResult:
        return self.launch(batch).result()

    def launch(self, batch: Batch) -> LaunchedStep:
        """Queue a step. A token id -1 - n in it is the n-th token of the step launched before.

        Raises:
            DeviceLost: as `LaunchedStep.result` does, too.
        """
        self.prepare()
        with self._finding_loss:
            return self._launch(batch)

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> LaunchedStep:
        graph = self._graph_for(batch)
        logits, _, hidden = self._eagerly(batch) if graph is None else Prediction(self._replayed_logits(graph, batch))
        pooled = None if hidden is None else PooledStates(batch, hidden)
        step = LaunchedStep(partial(self._draw, logits), self._finding_loss, pooled)
        if not batch.lacks_history:
            step.draw(batch)
        return step

    @torch.inference_mode()
    def _draw(self, logits: torch.Tensor, batch: Batch) -> _Drawn:
        if not batch.has_logprobs:
            self._drawn = self._sample(logits, batch.sampled)
            return _Drawn(self._drawn)
        wanted = WantedLogprobs(batch)
        self._drawn = self._sample(wanted.of_sampled(logits), batch.sampled)
        return _Drawn(self._drawn, wanted, wanted.compute(logits, self._drawn, compute_logprobs))

    def _eagerly(self, batch: Batch) -> Prediction:
        inputs = build_inputs(batch, block_size=self._attention.block_size, device=self._model.device)
        with self._last_hidden.kept(inputs.hidden_indices) as kept:
            logits = self._forward(
                self._known(inputs.token_ids, batch.scheduled),
                inputs.positions,
                logits_to_keep=inputs.logits_indices,
                paged=self._attention.begin_step(batch, inputs),
            )
        return Prediction(logits, hidden=kept.hidden)

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        logits_to_keep: torch.Tensor | int,
        paged: AttentionStep,
    ) -> torch.Tensor:
        """token_ids, positions: [1, num_tokens] → [num_kept, vocab_size]."""
        with self._arithmetic():
            logits: torch.Tensor = self._module(
                input_ids=token_ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=logits_to_keep,
                paged=paged,
            ).logits[0]
        return logits

    def _replayed_logits(self, graph: _Graph, batch: Batch) -> torch.Tensor:
        graph.fill(batch.scheduled, self._attention)
        known = self._known(graph.token_ids, batch.scheduled)
        if known is not graph.token_ids:
            graph.token_ids.copy_(known)
        return graph.replay()[: len(batch.scheduled)]

    def _known(self, token_ids: torch.Tensor, items: Sequence[ScheduledSequence]) -> torch.Tensor:
        """The token ids, with placeholders replaced by the tokens of the step before."""
        if self._drawn is None or all(item.token_ids[-1] >= 0 for item in items):
            return token_ids
        return torch.where(token_ids < 0, self._drawn[(-1 - token_ids).clamp(min=0)], token_ids)

    def _graph_for(self, batch: Batch) -> _Graph | None:
        num_rows = len(batch.scheduled)
        if not self._graphs or num_rows > self._sizes[-1]:
            return None
        if not all(len(item.token_ids) == 1 and item.samples for item in batch.scheduled):
            return None
        return self._graphs[self._sizes[bisect_left(self._sizes, num_rows)]]

    @torch.inference_mode()
    def _capture_all(self, capture: Capture) -> None:
        graphs: dict[int, _Graph] = {}
        coarse = coarse_sizes(self._sizes)
        finer = sorted(set(self._sizes).difference(coarse), reverse=True)
        for size in (*coarse, *finer):
            try:
                graphs[size] = self._captured(size, capture)
            except RuntimeError as error:
                reason = str(error).strip().split("\n", 1)[0]
                if not is_out_of_memory(error):
                    logger.warning(
                        "decode steps run without CUDA graphs, slower: this model cannot be captured (%s)", reason
                    )
                    return
                if size in coarse:
                    raise InvalidSetup(_too_little_for_graphs(len(graphs), coarse, size, reason)) from error
                logger.warning(
                    "%d of %d CUDA graphs fit into the GPU's memory; decode steps are padded to the next of %s "
                    "sequences. Lower cache.gpu_memory_fraction for the others (%s)",
                    len(graphs), len(self._sizes), ", ".join(map(str, sorted(graphs))), reason,
                )  # fmt: skip
                break
        self._graphs, self._sizes = graphs, tuple(sorted(graphs))
        logger.info("decode steps of up to %d sequences run from %d CUDA graphs", self._sizes[-1], len(graphs))

    def _captured(self, size: int, capture: Capture) -> _Graph:
        facts = self._padding(size)
        return _Graph(facts, capture(lambda: self._static_logits(facts)))

    @torch.inference_mode()
    def compute_padding(self, size: int) -> torch.Tensor:
        """Once the work that a graph of this size repeats, for its memory. Returns the logits, [size, vocab_size]."""
        return self._static_logits(self._padding(size))

    def _padding(self, size: int) -> torch.Tensor:
        """Inputs of a captured step in which no column is of a sequence: [6, size], rows as in `columns_of`."""
        columns = columns_of([], [], size=size, attention=self._attention)
        return torch.tensor(columns, dtype=torch.long, device=self._model.device)

    def _static_logits(self, facts: torch.Tensor) -> torch.Tensor:
        """The captured work: from inputs on the device to logits on the device."""
        token_ids, slots, segments = facts[0], facts[1], facts[2:]
        logits = self._forward(
            token_ids[None],
            segments[2][None],
            logits_to_keep=0,  # all of them
            paged=self._attention.begin_decode(slots, segments),
        )
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        # One result tensor for all sizes: separate ones would hold a vocabulary of numbers for every row of every size.
        return self._logits[: logits.shape[0]].copy_(logits)


class _Drawn:
    """The results of a step on their way to the host."""

    def __init__(
        self, token_ids: torch.Tensor, wanted: WantedLogprobs | None = None, logprobs: Logprobs | None = None
    ) -> None:
        """token_ids: [num_sampled]; `logprobs` are the `wanted` ones."""
        self._token_ids = _copy_to_host(token_ids)
        self._wanted = wanted
        self._logprobs = None if logprobs is None else Logprobs(*map(_copy_to_host, logprobs))
        self.copied = None
        if token_ids.is_cuda:
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record()

    def result(self) -> StepResult:
        token_ids: list[int] = self._token_ids.tolist()
        if self._wanted is None or self._logprobs is None:
            return StepResult(token_ids)
        return self._wanted.result(token_ids, self._logprobs)


class LaunchedStep:
    """A step that may still run."""

    def __init__(
        self,
        draw: Callable[[Batch], _Drawn],
        finding_loss: AbstractContextManager[None],
        pooled: PooledStates | None = None,
    ) -> None:
        """draw: queues the draws of a batch after its forward pass."""
        self._draw = draw
        self._finding_loss = finding_loss
        self._drawn: _Drawn | None = None
        self._pooled = pooled
        self._sums = None if pooled is None else _copy_to_host(pooled.sums)

    def draw(self, batch: Batch) -> None:
        with self._finding_loss:
            self._drawn = self._draw(batch)

    def result(self) -> StepResult:
        """Wait for this step, not for those launched after it."""
        assert self._drawn is not None, "its tokens were never drawn"
        if self._drawn.copied is not None:
            with self._finding_loss:
                self._drawn.copied.synchronize()
        result = self._drawn.result()
        if self._pooled is not None and self._sums is not None:
            result = result._replace(pooled=self._pooled.result(self._sums))
        return result


class FindingLoss:
    """Around work on a device: an error after which the device does not work any more becomes DeviceLost.

    An illegal address, a failed assertion in a kernel or a broken memory cell ends what a process can do on its device:
    every later call fails. A lack of memory or a refused launch does not.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, Exception):
            return
        try:
            self._synchronize()
        except RuntimeError as loss:
            raise DeviceLost(f"the device works no more in this process: {described(loss)}") from error


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The host's copy of a device tensor, complete once the work queued so far is done."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class _Graph:
    """Captured work of one size and its input tensor."""

    def __init__(self, facts: torch.Tensor, replay: Callable[[], torch.Tensor]) -> None:
        """facts: [6, size] int64, rows as in `columns_of`."""
        self._facts = facts
        self.token_ids = facts[0]
        self.replay = replay  # returns [size, vocab_size]

    def fill(self, items: Sequence[ScheduledSequence], attention: TritonAttention) -> None:
        """Copy a step's inputs to the tensor that the captured work reads: one copy, without waiting."""
        rows = attention.tables.update(items)
        columns = columns_of(items, rows, size=self._facts.shape[1], attention=attention)
        new = torch.tensor(columns, dtype=torch.long, pin_memory=self._facts.is_cuda)
        self._facts.copy_(new, non_blocking=True)


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """The sizes to capture: finely spaced where a padding row costs most."""
    largest = min(max_rows, _LARGEST)
    ladder = [1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST, 32)]
    return (*(size for size in ladder if size < largest), largest)


def coarse_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Of the sizes to capture those that every replica needs, in the order in which they are captured.

    Doublings pad a step to at most twice its sequences. The largest is the first: the others fit into its memory.
    """
    return tuple(sorted({sizes[-1], *(size for size in sizes if size.bit_count() == 1)}, reverse=True))


def _too_little_for_graphs(num_captured: int, needed: Sequence[int], size: int, reason: str) -> str:
    return (
        f"the GPU's memory holds {num_captured} of the {len(needed)} CUDA graphs that decode steps need at least (of "
        f"{', '.join(map(str, needed))} sequences); it ran out at {size} ({reason}). Lower cache.gpu_memory_fraction, "
        f"which leaves more beside the KV memory, or scheduler.max_running; or set model.backend: torch, which does "
        f"without graphs and is slower"
    )


def columns_of(
    items: Sequence[ScheduledSequence], rows: Sequence[int], *, size: int, attention: TritonAttention
) -> list[list[int]]:
    """A step of single tokens, one column for each, padded to `size` with columns of no sequence.

    rows: of the block tables, one for each item. Returns [6, size]: token id, slot, and the four rows of a segment
    (`kernels.py`): place in the packed row, number of tokens, position, row of the block table.
    """
    block_size, spare = attention.block_size, size - len(items)
    slots = [item.block_ids[item.start // block_size] * block_size + item.start % block_size for item in items]
    return [
        [item.token_ids[0] for item in items] + [0] * spare,
        slots + [attention.scratch_slot] * spare,
        list(range(size)),
        [1] * size,
        [item.start for item in items] + [0] * spare,
        list(rows) + [attention.tables.scratch_row] * spare,
    ]


class CudaCapture:
    """Captures functions into graphs that share one pool of memory, because they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all warm-ups and captures, and no other work: cuBLAS keeps a workspace of some 32 MiB for each
        # stream, and where a graph of another owner on the same stream is destroyed, torch frees it under the others
        # (pytorch issue 193402).
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Record the work of `function` on the device; the result replays it and returns its output tensor.

        The function may neither wait for the device nor read anything from it.

        Raises:
            RuntimeError: it does.
        """
        stream = torch.cuda.current_stream(self._device)
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(stream),
        ):  # a failed capture leaves its own stream behind
            self._warm_up(function, stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile: another engine's, or Ray's.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                output = function()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    def _warm_up(self, function: Callable[[], torch.Tensor], current: torch.cuda.Stream) -> None:
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_NUM_WARM_UPS):
                function()
        current.wait_stream(self._stream)
