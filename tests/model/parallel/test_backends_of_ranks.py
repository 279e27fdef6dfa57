"""Ranks take one backend, and another one at the next start where the first does not work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from app.build import assemble
from app.config import EngineConfig
from app.engine.engine import Engine
from app.errors import Failure
from app.model.gpu_backends import EAGER, GRAPHS, TORCH, TRITON
from app.model.loader import load_runner
from app.model.parallel.ranks import Ranks
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import config_of, generate_plainly
from tests.model.parallel.fake_rank import ForkedRank

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.model.cuda.attention import TritonStep
from tests.model.cuda.conftest import _short_probe, triton_here
from tests.model.parallel.backend_rank import main

__all__ = ["_short_probe", "triton_here"]


def engine_of(config: EngineConfig) -> Engine:
    ranks = Ranks(
        size=2, device=torch.device("cpu"), settings={}, step_timeout_s=60,
        start=partial(ForkedRank, partial(main, config)),
    )  # fmt: skip
    with ranks.loading():
        loaded = load_runner(config, group=ranks.group)
    loaded.runner.lead(ranks)
    return assemble(
        config.scheduler, config.cache, num_blocks=loaded.num_blocks, runner=loaded.runner,
        model_info=loaded.model.model_info,
    )  # fmt: skip


def raises(*_: Any) -> None:
    raise RuntimeError("PassManager::run failed")


@pytest.mark.usefixtures("triton_here")
def test_ranks_go_on_to_the_next_backend_when_they_start_again(
    tiny_model_path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model_path("llama")
    monkeypatch.setattr("app.model.gpu_backends.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(TritonStep, "_attended", raises)
    config = config_of(path, dtype="float32", num_threads=1, cache={"block_size": 4, "num_blocks": 12},
                       scheduler={"max_running": 2, "max_step_tokens": 8})  # fmt: skip
    for backend in (GRAPHS, TRITON):  # graphs and eager load the same code
        with pytest.raises(Failure, match=rf"backend {backend} does not work: .*PassManager::run failed.* A restart"):
            engine_of(config)
    asked = [make_request((5, 6, 7, 8, number), max_tokens=4, ignore_eos=True) for number in range(9, 12)]
    with closing(engine_of(config)) as engine:
        assert run_to_end(engine, *asked).token_ids == generate_plainly(path, asked)
        taken = engine.measurements().backend
        assert taken is not None
        assert taken.name == TORCH
        assert set(taken.failed) == {GRAPHS, EAGER, TRITON}
