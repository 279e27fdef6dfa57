"""Runs steps on a GPU. Launches do not wait for the device, and most steps replay CUDA graphs.

An eager step needs hundreds of launches from Python; a replayed graph needs one. Steps differ only in their inputs and
sizes, so a step is padded to the next of a few captured sizes (`captured_inputs.py`), its inputs are copied to tensors
at fixed addresses, and the captured work is replayed. Decode steps are captured, and so are steps with prompts up to a
certain size. Larger steps, and steps that score prompts or compute embeddings, run eagerly.

All work runs on one stream, in order. A step may therefore be launched while the previous step is still running. It
reads the tokens that the previous step draws on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from app.engine.batch import ScheduledSequence, StepBatch, StepResult
from app.model.adapters import AdapterWeights, LinearUpdates, SlottedAdapter, read_adapter
from app.model.attention import PagedAttention
from app.model.crash_notes import ending_hangs
from app.model.cuda.adapters import AdaptedRows
from app.model.cuda.attention import TritonAttention
from app.model.cuda.batch_invariant import BatchInvariantMode
from app.model.cuda.captured_inputs import (
    CapturedInputs,
    StepSize,
    coarse_sizes,
    decode_size,
    graph_sizes,
    mixed_sizes,
    smallest_fitting,
)
from app.model.cuda.device_blocks import DeviceBlocks
from app.model.cuda.graph_capture import Capture, CudaCapture, without_collections
from app.model.cuda.launched_step import DeviceLossGuard, DrawnOnHost, LaunchedStep
from app.model.forward import Prediction, SequentialForward, TransformersForward
from app.model.gpu_backends import Ladder, cause_of
from app.model.inputs import build_inputs
from app.model.memory import is_out_of_memory
from app.model.parallel.ranks import Ranks
from app.model.pooling import PooledStates
from app.model.recurrent_layers import StatefulAttention
from app.model.runner import LeadingRunner, draw_tokens
from app.model.sampler import Sampler
from app.model.verification import MAX_DIFFERENCES, TrialBlocks, difference_above
from app.progress import report_step

if TYPE_CHECKING:
    from app.model.implementations.loaded_model import LoadedModel

logger = logging.getLogger(__name__)


class GraphModelRunner(LeadingRunner):
    """Launches the batches of one model. Batches that fit into a captured size are replayed; others run eagerly."""

    can_sleep = True

    def __init__(
        self,
        model: LoadedModel,
        attention: PagedAttention,
        *,
        stateful: StatefulAttention | None = None,
        max_rows: int,
        max_tokens: int = 0,
        capture: Capture | None,
        synchronize: Callable[[], None] = lambda: None,
        sampler: Sampler | None = None,
        may_adapt: bool = False,
    ) -> None:
        """`prepare` captures every size up to `max_rows` sequences. Without `capture`, all steps run eagerly.

        stateful: the attention with recurrent states. With states, a step is launched only after the previous one ends.
        max_tokens: the most tokens of a captured step with prompts; 0 to capture no such steps.
        synchronize: waits for the device and raises its error. The default never finds a device lost.
        may_adapt: whether transformers' code may apply adapters, in eager steps. Our decoder's adapters do not need it.
        """
        super().__init__()
        self._model = model
        self._sampler = sampler or Sampler()
        self._forward = model.device_forward(attention)
        self.adapting: LinearUpdates | None = None
        if may_adapt and model.group is None and isinstance(self._forward, TransformersForward):
            self.adapting = self._forward.adapting  # not on ranks, because it needs whole linear layers
        self.adapts = model.adapters is not None or self.adapting is not None
        self._attention = attention
        # A step's slots for recurrent states are known only when the previous step has ended.
        self.launches = stateful is None and not isinstance(self._forward, SequentialForward)
        self._steps = stateful or attention
        self._states = () if stateful is None else tuple(stateful.states)
        self._arithmetic: Callable[[], AbstractContextManager[Any]] = (
            BatchInvariantMode if isinstance(attention, TritonAttention) and attention.batch_invariant else nullcontext
        )
        self._drawn: torch.Tensor | None = None  # [num_sampled], the tokens of the last launched step
        self._logits: torch.Tensor | None = None  # [most rows of a size, vocab_size], overwritten by each replay
        self._argmax: torch.Tensor | None = None  # [most rows of a size] int64, the argmax of `_logits`
        self._graphs: dict[StepSize, _Graph] = {}
        self._decode_sizes = tuple(decode_size(num_rows) for num_rows in graph_sizes(max_rows))  # ascending
        self._mixed_sizes: tuple[StepSize, ...] = ()  # captured sizes only, ascending
        self._wanted_mixed_sizes = mixed_sizes(max_rows=max_rows, max_tokens=max_tokens)
        self.num_padding_tokens = 0  # spare tokens computed by replays so far
        self._capture = capture  # None after `prepare`
        self._captured_by = capture
        self._ladder: Ladder | None = None
        self._away: HostCopy | None = None  # stores the weights while this runner sleeps
        self._blocks: DeviceBlocks | None = None  # created by the first call of `kv_memory`
        self._finding_loss = DeviceLossGuard(synchronize)

    def report(self, ladder: Ladder, backend: str) -> None:
        """Report this backend as running. From now on, a loss of the device is recorded in `ladder`."""
        self._ladder, self.backend = ladder, ladder.taken(backend)
        self._finding_loss.note = ladder.note_loss

    def prepare(self) -> None:
        """Capture the CUDA graphs, which takes seconds. Graphs are tied to the calling thread's cuBLAS workspaces.

        If memory runs out, graphs of steps with prompts are omitted first, then some sizes of decode steps. If even
        the graphs of `coarse_sizes` do not fit, or the model cannot be captured, all steps run eagerly.

        Raises:
            InvalidSetup: `model.backend` is `graphs`, but no graphs could be captured.
            DeviceLost: this process can no longer use the device.
        """
        if self._capture is None:
            return
        report_step("capturing CUDA graphs")
        with self._ranks.preparing(), without_collections(), ending_hangs():
            self._capture_all(self._capture)
        self._capture = None
        if self._graphs and self._ladder is not None:
            self.backend = self._ladder.with_graphs()

    def _leave_graphs(self, error: Exception, reason: str) -> None:
        """Run all steps eagerly from now on. Raises the errors that `prepare` raises."""
        self._finding_loss.check(error)
        logger.warning("steps run without CUDA graphs, which is slower: %s", reason)
        self._graphs.clear()
        self._logits = self._argmax = None
        if self._ladder is not None:
            self.backend = self._ladder.without_graphs(reason)

    @torch.inference_mode()
    def load_adapter(self, folder: Path, make_room: Callable[[], None] = lambda: None) -> object:
        """Read an adapter, call `make_room`, and load the adapter. Also works while the runner sleeps."""
        if self.adapting is not None:
            update = read_adapter(folder, self.adapting.sizes)
            make_room()
            return self.adapting.prepare(update)
        assert self._model.adapters is not None, "this runner supports no adapters"
        weights = read_adapter(folder, self._model.adapters.sizes)
        make_room()
        loaded = self._model.adapters.load(weights)
        try:
            self._ranks.load_adapter(loaded.slot, weights)
        except BaseException:
            self._model.adapters.free(loaded)
            raise
        return loaded

    @torch.inference_mode()
    def follow_adapter(self, slot: int, part: AdapterWeights) -> None:
        assert self._model.adapters is not None, "all ranks have the same settings"
        self._model.adapters.write(slot, part)

    def unload_adapter(self, adapter: object) -> None:
        if self.adapting is not None:  # the adapter's tensors are freed when the last step that uses them has ended
            return
        assert self._model.adapters is not None, "this runner supports no adapters"
        assert isinstance(adapter, SlottedAdapter), "the adapter was not loaded by this runner"
        self._model.adapters.free(adapter)

    def kv_memory(self) -> DeviceBlocks | None:
        if isinstance(self._ranks, Ranks) or self._states:  # blocks are useless without states, which cannot be copied
            return None
        if not isinstance(self._attention, TritonAttention):  # blocks are copied by a Triton kernel
            return None
        if self._blocks is None:
            self._blocks = DeviceBlocks(self._attention.kv_tensors)
        return self._blocks if self._blocks.is_there else None

    @torch.inference_mode()
    def sleep(self) -> None:
        """Wait for running steps, move the weights to host memory, and free the memory of KV, states and graphs."""
        device = self._model.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._graphs.clear()
        self._drawn = self._logits = self._argmax = None
        if self._blocks is not None:
            self._blocks.suspend()
        if (adapters := self._model.adapters or self.adapting) is not None:
            adapters.suspend_device()
        self._away = HostCopy(self._model.tensors(), (*self._attention.kv_tensors, *self._states))
        if device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def wake(self) -> None:
        """Move the weights back, and recapture all graphs, because the weights' addresses have changed."""
        assert self._away is not None, "this runner does not sleep"
        self._away.resume()
        self._away = None
        if self._blocks is not None:
            self._blocks.resume()
        if (adapters := self._model.adapters or self.adapting) is not None:
            adapters.resume()
        if isinstance(self._captured_by, CudaCapture):
            self._captured_by.renew()
        self._capture = self._captured_by
        self.prepare()

    def run(self, batch: StepBatch) -> StepResult:
        return self.launch(batch).result()

    def launch(self, batch: StepBatch) -> LaunchedStep:
        """Queue a step. A token id of -1 - n means the n-th token that the previously launched step draws.

        Raises DeviceLost, like `LaunchedStep.result`, if this process can no longer use the device.
        """
        self.prepare()
        with self._finding_loss, self._ranks.watched():
            return self._launch(batch)

    @torch.inference_mode()
    def follow(self, batch: StepBatch) -> None:
        """Run this rank's part of rank 0's step. If the next step needs the drawn tokens, rank 0 broadcasts them."""
        with self._finding_loss:
            self._predict(batch)
        self._drawn = torch.empty(len(batch.sampled), dtype=torch.long, device=self._model.device)

    def _predict(self, batch: StepBatch) -> Prediction:
        graph = self._graph_for(batch)
        self.num_steps_without_graph += graph is None
        return self._eagerly(batch) if graph is None else self._replayed(graph, batch)

    @torch.inference_mode()
    def _launch(self, batch: StepBatch) -> LaunchedStep:
        with self._ranks.step(batch):
            prediction = self._predict(batch)
        pooled = None if prediction.hidden is None else PooledStates(batch, prediction.hidden)
        step = LaunchedStep(partial(self._draw, prediction), self._finding_loss, pooled, ranks=self._ranks)
        if not batch.lacks_history:
            step.draw(batch)
        return step

    @torch.inference_mode()
    def _draw(self, prediction: Prediction, batch: StepBatch) -> DrawnOnHost:
        drawn = draw_tokens(batch, prediction, self._sampler)
        self._drawn = drawn.token_ids
        return DrawnOnHost(drawn)

    def _eagerly(self, batch: StepBatch) -> Prediction:
        inputs = build_inputs(batch, block_size=self._attention.block_size, device=self._model.device)
        if isinstance(self._forward, SequentialForward):
            return self._forward.predict(batch, inputs)
        adapting = nullcontext() if self.adapting is None else self.adapting.of(batch)
        with self._arithmetic(), adapting:
            return self._forward.compute(
                self._known(inputs.token_ids, batch.scheduled),
                inputs.positions,
                self._steps.begin_step(batch, inputs),
                logits_indices=inputs.logits_indices,
                hidden_indices=inputs.hidden_indices,
                adapted=self._adapted_rows(batch),
            )

    def _adapted_rows(self, batch: StepBatch) -> AdaptedRows | None:
        if self._model.adapters is None or not batch.has_adapters:
            return None
        return self._model.adapters.rows(batch)

    def _replayed(self, graph: _Graph, batch: StepBatch) -> Prediction:
        """Replay a graph. The returned logits are valid only until the next replay, which overwrites them."""
        inputs = graph.inputs
        self.num_padding_tokens += inputs.size.num_tokens - batch.num_scheduled_tokens
        inputs.fill(batch)
        known = self._known(inputs.token_ids, batch.scheduled)
        if known is not inputs.token_ids:
            inputs.token_ids.copy_(known)
        logits = graph.replay()[: len(batch.sampled)]
        return Prediction(logits, None if self._argmax is None else self._argmax[: len(logits)])

    def _known(self, token_ids: torch.Tensor, items: Sequence[ScheduledSequence]) -> torch.Tensor:
        """Return the token ids with placeholders replaced by the tokens of the previous step, on the device."""
        if self._drawn is None or all(item.token_ids[-1] >= 0 for item in items):
            return token_ids
        if self._group is not None:
            self._group.broadcast(self._drawn)
        return torch.where(token_ids < 0, self._drawn[(-1 - token_ids).clamp(min=0)], token_ids)

    def _graph_for(self, batch: StepBatch) -> _Graph | None:
        if not self._graphs:
            return None
        size = smallest_fitting(batch, decode=self._decode_sizes, mixed=self._mixed_sizes)
        if size is None or not batch.has_adapters:
            return None if size is None else self._graphs[size]
        return self._graphs.get(replace(size, has_adapters=True))

    @torch.inference_mode()
    def _capture_all(self, capture: Capture) -> None:
        """Capture all sizes and compare replays with eager steps. Steps with prompts are the first to be omitted."""
        has_room = self._capture_decode(capture)
        if not self._graphs:
            self._mixed_sizes = ()
            return
        self._decode_sizes = tuple(size for size in self._decode_sizes if size in self._graphs)
        self._mixed_sizes = self._capture_mixed(capture) if has_room else ()
        if self._group is None:  # not on ranks, which would have to agree on the result
            try:
                reason = self._difference_of_replays()
            except Exception as error:
                self._leave_graphs(error, f"replays fail ({cause_of(error)})")
                return
            if reason is not None:
                self._leave_graphs(RuntimeError(reason), reason)
                return
        if self._model.adapters is not None:
            self._capture_adapted(capture)
        logger.info(
            "steps run from %d CUDA graphs: decode steps of up to %d sequences, steps with prompts of up to %d tokens",
            len(self._graphs), self._decode_sizes[-1].num_rows,
            self._mixed_sizes[-1].num_tokens if self._mixed_sizes else 0,
        )  # fmt: skip

    def _difference_of_replays(self) -> str | None:
        """Describe how replays of the largest sizes differ from eager steps. Returns None if only by rounding."""
        before, decode = self.num_padding_tokens, self._decode_sizes[-1]
        tries = [(decode, decode.num_rows), (decode, -(-decode.num_rows // 2))]  # without padding, and half padded
        tries += [(size, size.num_rows) for size in self._mixed_sizes[-1:]]
        for size, num_rows in tries:
            batch = self._batch_to_try(size, num_rows)
            eager, replayed = self._eagerly(batch).logits, self._replayed(self._graphs[size], batch).logits
            is_padded = size.num_tokens > batch.num_tokens  # libraries may round a padded step differently
            difference = difference_above(MAX_DIFFERENCES[eager.dtype][is_padded], replayed, eager)
            if difference is not None:
                kind = "prompts" if size.is_mixed else "single tokens"
                return f"a replay of {size.num_tokens} tokens with {kind} differs by {difference}"
        self.num_padding_tokens = before
        return None

    def _batch_to_try(self, size: StepSize, num_rows: int) -> StepBatch:
        """Return a batch in which each sequence has one token in its last block. A mixed batch starts with a prompt."""
        assert isinstance(self._attention, TritonAttention), "only steps with this attention are captured"
        num_groups, block_size = self._attention.groups.num_groups, self._attention.block_size
        num_blocks = max(1, (self._attention.cache.num_blocks - 1) // num_groups)
        of_one = min(2, num_blocks, self._attention.tables.tensor.shape[1])  # blocks of one sequence
        num_places = num_blocks // of_one
        blocks = TrialBlocks(block_size=block_size, num_blocks=num_blocks, max_blocks=of_one, num_groups=num_groups)
        start, vocab_size = of_one * block_size - 1, self._model.model_info.vocab_size
        pieces = []
        for row in range(num_rows):
            place = row % num_places  # sequences that share blocks must write the same token to them
            pieces.append(blocks.piece(f"{row}", [place % vocab_size], start, first_block=of_one * place))
        if size.is_mixed:
            tokens = range(min(of_one * block_size, size.num_tokens - num_rows + 1, vocab_size))
            pieces[:num_places] = [blocks.piece("prompt", tokens, 0), *pieces[1:num_places]]
            pieces[num_places:] = []  # later sequences would share the prompt's blocks
        return StepBatch(tuple(pieces), ())

    def _capture_decode(self, capture: Capture) -> bool:
        """Capture the decode steps and return whether all sizes fit. On failure, `_leave_graphs` drops all graphs."""
        sizes = [size.num_rows for size in self._decode_sizes]
        coarse = coarse_sizes(sizes)
        finer = sorted(set(sizes).difference(coarse), reverse=True)
        for num_rows in (*coarse, *finer):
            try:
                self._graphs[decode_size(num_rows)] = self._captured(decode_size(num_rows), capture)
            except Exception as error:
                reason = cause_of(error)
                if not is_out_of_memory(error):
                    self._leave_graphs(error, f"this model cannot be captured ({reason})")
                    return False
                if num_rows in coarse:
                    self._leave_graphs(error, _too_little_for_graphs(len(self._graphs), coarse, num_rows, reason))
                    return False
                logger.warning(
                    "only %d of %d CUDA graphs for decode steps fit into the GPU's memory; decode steps are padded to "
                    "the next size of %s sequences, and steps with prompts have no graphs. Lower "
                    "cache.gpu_memory_fraction to make room for all graphs (%s)",
                    len(self._graphs), len(sizes), ", ".join(str(size.num_rows) for size in self._graphs_ascending()),
                    reason,
                )  # fmt: skip
                return False
        return True

    def _graphs_ascending(self) -> list[StepSize]:
        return sorted(self._graphs, key=lambda size: size.num_tokens)

    def _capture_mixed(self, capture: Capture) -> tuple[StepSize, ...]:
        """Capture the steps with prompts and return the sizes that fit, ascending.

        The largest size is captured first, because smaller sizes reuse its memory.
        """
        captured: list[StepSize] = []
        for size in reversed(self._wanted_mixed_sizes):
            try:
                self._graphs[size] = self._captured(size, capture)
                captured.insert(0, size)
            except Exception as error:
                self._finding_loss.check(error)
                logger.warning(
                    "steps of %d tokens with prompts run without a CUDA graph, which is slower (%s)%s",
                    size.num_tokens, cause_of(error),
                    ". Lower cache.gpu_memory_fraction to make room" if is_out_of_memory(error) else "",
                )  # fmt: skip
                if not is_out_of_memory(error):
                    break
        return tuple(captured)

    def _capture_adapted(self, capture: Capture) -> None:
        """Capture all sizes again with adapter kernels. The graphs without adapters keep other steps fast."""
        for size in reversed(self._graphs_ascending()):
            adapted = replace(size, has_adapters=True)
            try:
                self._graphs[adapted] = self._captured(adapted, capture)
            except Exception as error:
                self._finding_loss.check(error)
                logger.warning(
                    "steps of %d tokens and fewer with adapters run without CUDA graphs, which is slower (%s)%s",
                    size.num_tokens, cause_of(error),
                    ". Lower cache.gpu_memory_fraction to make room" if is_out_of_memory(error) else "",
                )  # fmt: skip
                return

    def _captured(self, size: StepSize, capture: Capture) -> _Graph:
        """Capture one size, on all ranks together. If one rank fails, all ranks raise RuntimeError."""
        group = self._group
        if group is None:
            inputs = self._inputs_of(size)
            return _Graph(inputs, capture(lambda: self._static_logits(inputs)))

        def tried() -> CapturedInputs:
            """Run the step without exchanges first, so that no rank waits for one that runs out of memory."""
            inputs = self._inputs_of(size)
            with group.alone():
                self._static_logits(inputs)
            return inputs

        def captured() -> _Graph:
            with group.capturing():
                return _Graph(inputs, capture(lambda: self._static_logits(inputs)))

        inputs = group.together(tried)
        return group.together(captured)

    def _inputs_of(self, size: StepSize) -> CapturedInputs:
        assert isinstance(self._attention, TritonAttention), "other attention code reads lengths on the host"
        return CapturedInputs(size, self._attention, self._model.adapters)

    @torch.inference_mode()
    def compute_padding(self, size: StepSize) -> torch.Tensor:
        """Run a graph's work once, on padding alone, to measure its memory. Returns logits, [num_rows, vocab_size]."""
        return self._static_logits(self._inputs_of(size))

    def _static_logits(self, inputs: CapturedInputs) -> torch.Tensor:
        """Run the work to capture, from inputs on the device to `_logits` and `_argmax` on the device."""
        with self._arithmetic():
            logits = self._forward.compute(
                inputs.token_ids[None],
                inputs.positions[None],
                inputs.begin(),
                logits_indices=inputs.logits_indices if inputs.size.is_mixed else None,
                adapted=inputs.adapted,
            ).logits
        num_rows = logits.shape[0]
        if self._logits is None or self._argmax is None:
            self._logits = torch.empty_like(logits)
            self._argmax = torch.empty(num_rows, dtype=torch.long, device=logits.device)
        # Capture the argmax as well, so that greedy sequences need no launch after the replay.
        torch.argmax(logits, dim=-1, out=self._argmax[:num_rows])
        # All sizes share one result tensor: separate tensors would need vocab_size numbers for each row of each size.
        return self._logits[:num_rows].copy_(logits)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured graph of one size, and the tensors that it reads."""

    inputs: CapturedInputs
    replay: Callable[[], torch.Tensor]  # returns the logits, [num_rows of the size, vocab_size]


def _too_little_for_graphs(num_captured: int, needed: Sequence[int], size: int, reason: str) -> str:
    return (
        f"only {num_captured} of the {len(needed)} CUDA graphs that decode steps need (for "
        f"{', '.join(map(str, needed))} sequences) fit into the GPU's memory; it ran out at {size} ({reason}). Lower "
        f"scheduler.max_running, or lower cache.gpu_memory_fraction to leave more memory for the graphs"
    )


class HostCopy:
    """Moves weights to host memory and back. The content of scratch memory is dropped.

    Storages are emptied and refilled in place, as FSDP does with parameters, so tensors need not be replaced. Their
    addresses change, however, so graphs that were captured before cannot be replayed.
    """

    def __init__(self, weights: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor]) -> None:
        """Copy the weights to the host and empty the storages, except mapped files. No running work may read them."""
        storages = _storages(weights)
        sizes = [storage.nbytes() for storage in storages]
        # Pin one allocation in place: torch's allocator rounds pinned memory up to powers of two and never frees it.
        self._host = torch.empty(sum(sizes), dtype=torch.uint8)
        self._is_pinned = any(storage.device.type == "cuda" for storage in storages)
        if self._is_pinned:
            pin_memory(self._host.data_ptr(), self._host.nbytes)
        self._weights = list(zip(storages, torch.split(self._host, sizes), strict=True))
        for storage, host in self._weights:
            host.copy_(_bytes(storage))
        self._scratch = [(storage, storage.nbytes()) for storage in _storages(scratch)]
        for storage, _ in (*self._weights, *self._scratch):
            storage.resize_(0)

    def resume(self) -> None:
        """Restore the weights, and fill the scratch memory with zeros. Raises torch's OutOfMemoryError."""
        for storage, host in self._weights:
            storage.resize_(len(host))
            _bytes(storage).copy_(host, non_blocking=True)
        for storage, num_bytes in self._scratch:
            storage.resize_(num_bytes)
            _bytes(storage).zero_()
        if self._is_pinned:
            torch.cuda.synchronize()
            unpin_memory(self._host.data_ptr())  # the host memory itself is freed with this object


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the resizable storages of the tensors, each once even if tied weights or views share it."""
    found = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return [storage for storage in found.values() if storage.nbytes() and storage.resizable()]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of all bytes of a storage: [num_bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
