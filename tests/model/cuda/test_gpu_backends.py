"""Where code for a GPU fails, a replica has the same tokens with another backend, and says why."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from app.build import build_sync_engine
from app.engine.batch import DeviceLost
from app.engine.engine import Engine
from app.engine.request import Request
from app.engine.stats import ChosenBackend
from app.errors import ExchangeFailed, Failure, InvalidSetup, TooLittleMemory, UnsupportedModel
from app.model import device
from app.model.crash_notes import HANGS_S
from app.model.gpu_backends import (
    BACKENDS,
    EAGER,
    EXCLUDED_S,
    FILE_NAME,
    GRAPHS,
    LIBRARY,
    MOST_LOSSES,
    TORCH,
    TRITON,
    BackendFailed,
    Ladder,
    LostDevices,
    cause_of,
    config_for,
)
from app.model.sampler import Sampler
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import config_of, generate_plainly
from tests.model.cuda.test_cuda_recurrent_layers import MODELS
from tests.tiny_models import ALL, save_random_model

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.model.cuda import sampler as triton_sampler
from app.model.cuda.attention import TritonAttention, TritonStep
from app.model.cuda.decoder import CudaDecoder
from app.model.cuda.graph_runner import GraphModelRunner
from app.model.cuda.recurrence import TritonRecurrence
from app.model.implementations import gpu

difference_of_replays = GraphModelRunner._difference_of_replays  # before fixtures replace it
CACHE = {"block_size": 4, "num_blocks": 24}
SCHEDULER = {"max_running": 3, "max_step_tokens": 16, "prefill_chunk_tokens": 7}
Break = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, triton_here: None) -> None:
    monkeypatch.setattr("app.model.gpu_backends.cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(GraphModelRunner, "_difference_of_replays", difference_of_replays)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)


def some_requests() -> list[Request]:
    return [
        make_request((5, 6, 7, 8, 9, n), max_tokens=4, ignore_eos=True, seed=n, temperature=0.8 * (n == 11))
        for n in (10, 11)
    ]


def tokens_of(engine: Engine) -> list[list[int]]:
    requests = some_requests()
    found = run_to_end(engine, *requests).token_ids
    return [found[each.request_id] for each in requests]


def engine_of(path: Path, *, cache: dict[str, Any] = CACHE, **model: Any) -> Engine:
    engine = build_sync_engine(config_of(path, cache=cache, scheduler=SCHEDULER, **({"dtype": "float32"} | model)))
    engine.prepare()
    return engine


@cache
def expected_tokens(path: Path) -> list[list[int]]:
    """By plain torch as on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonAttention, "fits", staticmethod(lambda device: False))
        return tokens_of(engine_of(path, backend="torch"))


def serves(path: Path, expected: str, /, **given: Any) -> ChosenBackend:
    """The backend of an engine that has the right tokens."""
    engine = engine_of(path, **given)
    assert tokens_of(engine) == expected_tokens(path)
    taken = engine.measurements().backend
    assert taken is not None
    assert taken.name == expected
    return taken


def raises(error: Exception) -> Callable[..., Any]:
    def fails(*_: object, **_options: object) -> None:
        raise error

    return fails


def wrong_in_one_head(step: TritonStep, attended: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
    output = attended(step, *given)
    output[:, 0] += output[:, 0].abs().mean() + 1
    return output


def breaks_kernels_at_import(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("app.model.cuda.attention.kernels_of", raises(ImportError("cannot import name 'constexpr'")))


def breaks_kernels_at_compile(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TritonStep, "_attended", raises(RuntimeError("PassManager::run failed")))


def breaks_one_head(patch: pytest.MonkeyPatch) -> None:
    attended = TritonStep._attended
    patch.setattr(TritonStep, "_attended", lambda step, *given: wrong_in_one_head(step, attended, *given))


def breaks_decoder(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaDecoder, "compute", raises(RuntimeError("out of resource: shared memory, Required: 300000")))


def breaks_decoders_numbers(patch: pytest.MonkeyPatch) -> None:
    compute = CudaDecoder.compute

    def wrong(*given: Any, **named: Any) -> Any:
        prediction = compute(*given, **named)
        return prediction._replace(logits=prediction.logits.flip(-1))

    patch.setattr(CudaDecoder, "compute", wrong)


def breaks_sampler(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(triton_sampler.TritonSampler, "_draw", raises(RuntimeError("PassManager::run failed")))


def breaks_draws(patch: pytest.MonkeyPatch) -> None:
    draw = triton_sampler.TritonSampler._draw

    def wrong(sampler: Any, logits: torch.Tensor, items: Any, tokens: torch.Tensor) -> None:
        draw(sampler, logits, items, tokens)
        tokens.fill_(3)

    patch.setattr(triton_sampler.TritonSampler, "_draw", wrong)


def breaks_capture(error: Exception) -> Break:
    def breaks(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(gpu, "CudaCapture", lambda device: raises(error))

    return breaks


def breaks_replays(patch: pytest.MonkeyPatch) -> None:
    """They give the logits of the capture again."""

    def capture(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        captured = function().clone()
        return lambda: captured

    patch.setattr(gpu, "CudaCapture", lambda device: capture)


def breaks_launch_of_replays(patch: pytest.MonkeyPatch) -> None:
    def capture(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        function()
        return raises(RuntimeError("invalid argument"))

    patch.setattr(gpu, "CudaCapture", lambda device: capture)


ALL_BUT_TORCH = {GRAPHS, EAGER, TRITON}


@pytest.mark.parametrize(
    ("breaks", "backend", "left"),
    [
        (breaks_kernels_at_import, TORCH, ALL_BUT_TORCH | {"decoder"}),
        (breaks_kernels_at_compile, TORCH, ALL_BUT_TORCH | {"decoder"}),
        (breaks_one_head, TORCH, ALL_BUT_TORCH | {"decoder"}),
        (breaks_decoder, GRAPHS, {"decoder"}),
        (breaks_decoders_numbers, GRAPHS, {"decoder"}),
        (breaks_sampler, GRAPHS, {"sampler"}),
        (breaks_draws, GRAPHS, {"sampler"}),
        (breaks_capture(torch.OutOfMemoryError("CUDA out of memory")), EAGER, {GRAPHS}),
        (breaks_capture(RuntimeError("operation not permitted when stream is capturing")), EAGER, {GRAPHS}),
        (breaks_capture(ValueError("at 12:4: a kernel does not compile")), EAGER, {GRAPHS}),
        (breaks_replays, EAGER, {GRAPHS}),
        (breaks_launch_of_replays, EAGER, {GRAPHS}),
    ],
)
def test_what_fails_is_left_for_what_works(
    small_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: Break, backend: str, left: set[str]
) -> None:
    breaks(monkeypatch)
    taken = serves(small_path, backend)
    assert set(taken.failed) == left
    assert all(taken.failed.values())


def test_nothing_is_left_where_all_works(small_path: Path) -> None:
    assert serves(small_path, GRAPHS).failed == {}


@pytest.mark.parametrize("backend", [GRAPHS, EAGER, TRITON, TORCH])
def test_the_settings_may_name_the_backend(small_path: Path, backend: str) -> None:
    assert serves(small_path, backend, backend=backend).failed == {}


@pytest.mark.parametrize(
    ("breaks", "named"), [(breaks_one_head, "triton"), (breaks_capture(RuntimeError("no")), "graphs")]
)
def test_a_replica_starts_with_no_other_backend_than_the_named_one(
    small_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: Break, named: str
) -> None:
    breaks(monkeypatch)
    with pytest.raises(InvalidSetup, match=rf"model\.backend is {named}, but .*{named}: .*remove model\.backend"):
        engine_of(small_path, backend=named)


def test_plain_torch_attends_in_parts_that_fit(small_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.model.attention.BYTES_AT_ONCE", 1)  # a row, or a token, at a time
    serves(small_path, TORCH, backend=TORCH)


def test_without_triton_plain_torch_serves(small_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.model.loader.why_no_triton", lambda device: "is not installed: pip install triton")
    assert serves(small_path, TORCH).failed == dict.fromkeys(
        (GRAPHS, EAGER, TRITON), "Triton is not installed: pip install triton"
    )


@pytest.mark.usefixtures("library_here")
def test_the_attention_of_a_library_comes_before_plain_torch(small_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.model.loader.why_no_triton", lambda device: "is not installed: pip install triton")
    assert set(serves(small_path, LIBRARY).failed) == {GRAPHS, EAGER, TRITON}
    with monkeypatch.context() as patch:
        patch.setattr("app.model.cuda.library_attention.varlen_attn", raises(RuntimeError("needs sm80 or newer")))
        failed = serves(small_path, TORCH).failed
        assert failed[LIBRARY] == "RuntimeError: needs sm80 or newer"
    with monkeypatch.context() as patch:
        patch.setattr("app.model.cuda.library_attention.varlen_attn", lambda query, *_, **__: query)
        assert "in steps with LibraryAttention" in serves(small_path, TORCH).failed[LIBRARY]


@pytest.mark.usefixtures("library_here")
def test_the_attention_of_a_library_may_be_named(small_path: Path) -> None:
    assert serves(small_path, LIBRARY, backend=LIBRARY).failed == {}


def test_keys_and_values_in_fp8_become_those_of_the_model_where_no_kernel_works(
    small_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    breaks_kernels_at_compile(monkeypatch)
    with caplog.at_level(logging.WARNING):
        serves(small_path, TORCH, cache=CACHE | {"dtype": "fp8"})
    assert "cache.dtype is fp8, which torch does not support" in caplog.text


def test_weights_in_fp8_become_bfloat16_without_our_decoder() -> None:
    config = config_of("m", device="auto", quantization="fp8")
    assert config_for(config, GRAPHS).model.quantization == config_for(config, EAGER).model.quantization == "fp8"
    assert config_for(config, TRITON).model.quantization == config_for(config, TORCH).model.quantization == "none"


def test_a_promise_that_plain_torch_does_not_keep_is_not_broken(
    small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks_kernels_at_compile(monkeypatch)
    with pytest.raises(UnsupportedModel, match=r"torch: model\.batch_invariant is set, but this backend's products"):
        engine_of(small_path, batch_invariant=True)


@pytest.mark.parametrize("architecture", [*ALL, "bloom"])
def test_what_a_cpu_serves_plain_torch_serves_on_a_gpu(
    architecture: str, tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Bloom attends by its own code."""
    path = save_random_model(tmp_path / "model", "bloom") if architecture == "bloom" else tiny_model_path(architecture)
    request = some_requests()[0]
    engine = engine_of(path, backend=TORCH, cache=CACHE | {"num_blocks": 48})
    assert run_to_end(engine, request).token_ids == generate_plainly(path, [request])


@pytest.mark.parametrize("architecture", ["lfm2", "qwen3_5_text"])
def test_recurrent_layers_are_computed_by_plain_torch_where_the_kernels_fail(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_random_model(tmp_path / "model", architecture, **MODELS[architecture])
    for name in ("short_convolution", "gated_delta_rule"):
        monkeypatch.setattr(TritonRecurrence, name, raises(RuntimeError("PassManager::run failed")))
    taken = serves(path, TORCH)
    assert set(taken.failed) == {EAGER, TRITON}
    assert "RuntimeError: PassManager::run failed" in taken.failed[EAGER]


def test_a_model_that_no_backend_computes_is_refused_with_all_reasons(
    small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "app.model.implementations.loaded_model.LoadedModel.difference_in_steps", lambda *_: "all is wrong"
    )
    with pytest.raises(UnsupportedModel, match=r"no backend can run .* here: graphs: .*all is wrong; eager: .*torch"):
        engine_of(small_path)


class TestLostDevices:
    def setup_method(self) -> None:
        self.now = 1000.0

    def file(self, folder: Path, setup: str = "a card") -> LostDevices:
        return LostDevices(folder / "deeper" / "lost.json", setup, clock=lambda: self.now)

    def test_a_backend_is_left_out_for_a_while_then_until_a_version_changes(self, tmp_path: Path) -> None:
        file = self.file(tmp_path)
        assert file.left_out() == {}
        for number in range(1, MOST_LOSSES):
            for _ in range(3):  # of processes that one fault ends, within a moment
                file.note([GRAPHS], "an illegal memory access")
            self.now += 60
            reason = file.left_out()[GRAPHS]
            assert "it ended a replica 1 minutes ago, an illegal memory access" in reason, number
            assert f"set model.backend: {GRAPHS} to try it now" in reason
            self.now += EXCLUDED_S
            assert file.left_out() == {}
        file.note([GRAPHS], "an illegal memory access")
        self.now += 10 * EXCLUDED_S
        assert f"it ended {MOST_LOSSES} replicas" in file.left_out()[GRAPHS]
        assert self.file(tmp_path, "another card").left_out() == {}
        file.path.unlink()
        assert file.left_out() == {}

    @pytest.mark.parametrize("content", ["", "[]", "{", '{"a card": 3}', '{"a card": {"graphs": [[], "why"]}}'])
    def test_a_file_that_is_broken_is_begun_again(self, tmp_path: Path, content: str) -> None:
        file = self.file(tmp_path)
        file.path.parent.mkdir()
        file.path.write_text(content)
        assert file.left_out() == {}
        file.note([EAGER], "why")
        assert set(file.left_out()) == {EAGER}

    def test_a_file_that_cannot_be_written_ends_nothing(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "deeper").write_text("a file")
        self.file(tmp_path).note([EAGER], "why")
        assert "cannot be written" in caplog.text


def ladder_of(path: Path, *, is_shared: bool = False, **model: Any) -> Ladder:
    return Ladder.of(config_of(path, **model), torch.device("cpu"), driver="1", why_no_triton=None, is_shared=is_shared)


def test_backends_that_lost_a_device_are_not_tried(small_path: Path) -> None:
    ladder = ladder_of(small_path)
    assert list_backends(ladder) == list(BACKENDS)
    ladder.lost.note([GRAPHS, EAGER], "why")
    assert list_backends(ladder_of(small_path)) == [TRITON, LIBRARY, TORCH]
    assert list_backends(ladder_of(small_path, backend=EAGER)) == [EAGER]  # nothing else is accepted
    ladder.lost.note([TRITON], "why")
    assert list_backends(ladder_of(small_path, batch_invariant=True)) == [GRAPHS, EAGER, TRITON]  # the others break it
    ladder.lost.path.unlink()
    ladder.lost.note([GRAPHS, EAGER], "why")
    ladder.lost.note([TORCH], "why")  # below it is nothing
    assert list_backends(ladder_of(small_path)) == [TRITON, LIBRARY, TORCH]


def list_backends(ladder: Ladder) -> list[str]:
    found: list[str] = []
    with suppress(InvalidSetup):
        for backend in ladder.backends():
            found.append(backend)
    return found


def test_an_error_that_is_not_of_the_backend_leaves_the_ladder(small_path: Path) -> None:
    ladder = ladder_of(small_path)
    for error in (InvalidSetup("a"), UnsupportedModel("b"), Failure("c"), MemoryError(), OSError()):
        with pytest.raises(type(error)), ladder.trying(GRAPHS):
            raise error
    assert ladder.failed == {}


def test_a_failure_is_one_of_all_backends_that_load_the_same_code(small_path: Path) -> None:
    for has_own_decoder, backend, failed in (
        (True, GRAPHS, {GRAPHS, EAGER}), (False, GRAPHS, {GRAPHS, EAGER, TRITON}), (True, TRITON, {TRITON})
    ):  # fmt: skip
        ladder = ladder_of(small_path)
        ladder.has_own_decoder = has_own_decoder
        with ladder.trying(backend):
            raise BackendFailed("why")
        assert ladder.failed == dict.fromkeys(failed, "why")


def test_too_little_memory_leaves_graphs_alone(small_path: Path) -> None:
    ladder = ladder_of(small_path)
    with ladder.trying(GRAPHS):
        raise TooLittleMemory("0.5 GiB are missing")
    assert ladder.failed == {GRAPHS: "0.5 GiB are missing"}
    with pytest.raises(TooLittleMemory), ladder.trying(EAGER):
        raise TooLittleMemory("0.2 GiB are missing")


@pytest.mark.parametrize(
    ("error", "raised", "is_noted"),
    [
        (TooLittleMemory("a"), TooLittleMemory, False),
        (ExchangeFailed("another rank has ended"), ExchangeFailed, False),
        (BackendFailed("b"), Failure, True),
        (ValueError("c"), Failure, True),
    ],
)
def test_what_fails_on_a_rank_ends_it_and_is_left_out_by_the_next_start(
    small_path: Path, error: Exception, raised: type[Exception], is_noted: bool
) -> None:
    ladder = ladder_of(small_path, is_shared=True)
    with pytest.raises(raised), ladder.trying(GRAPHS):
        raise error
    assert list_backends(ladder_of(small_path, is_shared=True))[0] == (TRITON if is_noted else GRAPHS)


def test_a_compiler_that_cannot_write_is_a_fault_of_the_backend_and_a_file_of_the_model_is_not(
    small_path: Path,
) -> None:
    ladder = ladder_of(small_path)
    with pytest.raises(PermissionError), ladder.trying(GRAPHS):
        raise PermissionError("model.safetensors")
    with ladder.trying(GRAPHS):
        ladder.has_weights = True
        raise PermissionError("the folder of compiled kernels")
    assert list_backends(ladder) == [TRITON, LIBRARY, TORCH]


def test_ranks_begin_with_a_backend_that_none_of_them_leaves_out(small_path: Path) -> None:
    ladders = [ladder_of(small_path, is_shared=True) for _ in range(2)]
    ladders[0].failed |= {GRAPHS: "why", EAGER: "why"}
    ladders[1].failed |= {TRITON: "why"}
    said = iter([0, 0, 0, 1, 1] * 2)  # the least of both, by backend
    for ladder in ladders:
        ladder.agree(lambda number: min(number, next(said)))
        assert list_backends(ladder) == [LIBRARY, TORCH]
    assert next(said, None) is None
    assert ladders[1].failed == {TRITON: "why"} | dict.fromkeys((GRAPHS, EAGER), "another rank excludes it")


def test_a_reason_has_the_end_of_what_a_compiler_says() -> None:
    error = ValueError("at 12:4:\n    x = tl.dot(a, b)\n        ^\nInput shapes should have K >= 16")
    assert cause_of(error) == "ValueError: at 12:4: … Input shapes should have K >= 16"
    assert cause_of(ImportError("cannot import name 'x'")) == "ImportError: cannot import name 'x'"
    assert cause_of(KeyError()) == "KeyError: no message"


def test_graphs_that_are_captured_after_a_sleep_are_reported(small_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[Callable[..., Any]] = [
        raises(torch.OutOfMemoryError("CUDA out of memory")),
        lambda function: function,
    ]
    monkeypatch.setattr(gpu, "CudaCapture", lambda device: lambda function: captures[0](function))
    engine = engine_of(small_path)
    assert engine.measurements().backend == ChosenBackend(EAGER, engine.measurements().backend.failed)  # type: ignore[union-attr]
    del captures[0]
    engine.sleep()
    engine.wake()
    assert engine.measurements().backend == ChosenBackend(GRAPHS)
    assert tokens_of(engine) == expected_tokens(small_path)


def test_a_device_that_is_lost_while_a_backend_loads_is_noted(
    small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "synchronize", raises(RuntimeError("CUDA error: an illegal memory access")))
    gpu_device = torch.device("cuda")
    ladder = Ladder.of(config_of(small_path), gpu_device, driver="1", why_no_triton=None, is_shared=False)
    with (
        pytest.raises(
            Failure, match=r"backend graphs does not work: the device is lost .*access\. A restart tries another"
        ),
        ladder.trying(GRAPHS),
    ):
        raise RuntimeError("CUDA error: an illegal memory access")
    [losses] = json.loads(ladder.lost.path.read_text()).values()
    assert list(losses) == [GRAPHS, EAGER]


@dataclass
class BreakingDevice:
    """Raises in every call while it is lost."""

    is_lost: bool = False

    def synchronize(self, *_: object) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: unspecified launch failure")

    def end(self, engine: Engine, patch: pytest.MonkeyPatch) -> str:
        """A step of the engine raises, and ends it. Returns the backend."""
        taken = engine.measurements().backend
        assert taken is not None
        self.is_lost = True
        engine.add(some_requests()[0])
        patch.setattr(Sampler, "sample", raises(RuntimeError("CUDA error: unspecified launch failure")))
        patch.setattr(triton_sampler.TritonSampler, "sample", Sampler.sample)
        with pytest.raises(DeviceLost):
            engine.step()
        self.is_lost = False
        return taken.name


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> BreakingDevice:
    found = BreakingDevice()
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    return found


def test_the_replica_behind_one_that_lost_its_device_takes_another_backend(
    small_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaking: BreakingDevice
) -> None:
    """A CUDA error in a step ends the engine; the next one has the same tokens."""
    for backend, after in ((GRAPHS, EAGER), (EAGER, TRITON)):
        with monkeypatch.context() as patch:
            assert breaking.end(engine_of(small_path), patch) == backend
        reason = serves(small_path, after).failed[backend]
        assert "ago, in a step, RuntimeError: CUDA error: unspecified launch failure." in reason
    [losses] = json.loads((tmp_path / "cache" / FILE_NAME).read_text()).values()
    assert list(losses) == [GRAPHS, EAGER]


def ends_in_child(path: Path) -> int:
    """The status of a process that builds an engine: an exit code, or a signal as a negative number."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)  # seconds, of a child that waits for a lock of another thread
        try:
            torch.set_num_threads(1)  # those of the parent are not here
            engine_of(path)
            os._exit(0)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def sleeps(*_: object, **_options: object) -> None:
    time.sleep(1000)


@pytest.mark.parametrize(
    ("ends", "limit_s", "status", "reason"),
    [
        (lambda *_, **_options: os.abort(), HANGS_S, -signal.SIGABRT, "Fatal Python error: Aborted"),
        (sleeps, 1.0, 1, "Timeout (0:00:01)!"),
    ],
)
def test_a_crash_or_a_hang_ends_the_process_and_the_next_one_takes_another_backend(
    small_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: Callable[..., None],
    limit_s: float,
    status: int,
    reason: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CudaDecoder, "compute", ends)
        patch.setattr("app.model.crash_notes.HANGS_S", limit_s)
        assert ends_in_child(small_path) == status
        patch.setattr("app.model.crash_notes.HANGS_S", HANGS_S)
        failed = serves(small_path, TRITON).failed  # without our decoder
    assert set(failed) == {GRAPHS, EAGER}
    assert f"ago, while loading, {reason}" in failed[GRAPHS]
    assert "set model.backend: graphs to try it now" in failed[GRAPHS]


def test_a_process_that_ends_otherwise_is_not_taken_for_a_crash(small_path: Path, tmp_path: Path) -> None:
    assert ends_in_child(small_path) == 0
    [note] = (tmp_path / "cache").glob("crash-*")
    assert serves(small_path, GRAPHS).failed == {}
    assert not note.exists()
    assert serves(small_path, GRAPHS).failed == {}, "the note of a process that lives says nothing"


@pytest.mark.parametrize(("breaks", "after"), [(lambda _: None, TRITON), (breaks_decoder, TORCH)])
def test_a_backend_that_lost_its_device_is_not_taken_because_a_capture_fails(
    small_path: Path, monkeypatch: pytest.MonkeyPatch, breaking: BreakingDevice, breaks: Break, after: str
) -> None:
    breaks_capture(RuntimeError("operation not permitted when stream is capturing"))(monkeypatch)
    breaks(monkeypatch)
    with monkeypatch.context() as patch:
        assert breaking.end(engine_of(small_path), patch) == EAGER
    serves(small_path, after)


def test_a_cpu_has_no_backends_of_gpus(small_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonAttention, "fits", staticmethod(lambda device: False))
    for backend in ("eager", "triton", "graphs"):
        with pytest.raises(InvalidSetup, match=r"needs a GPU, but .* runs on a CPU"):
            engine_of(small_path, backend=backend)
    assert device.why_no_triton(torch.device("cpu")) is None
