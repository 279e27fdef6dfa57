"""LoRA adapters of a model that is divided among ranks, in Triton's interpreter and through gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.build import assemble
from app.config import CacheConfig
from app.engine.adapter_store import AdapterStore
from app.engine.engine import Engine
from app.engine.request import Adapter
from app.errors import Failure
from app.model.adapter_files import adapter_at, folder_of_adapter
from app.model.adapters import LowRankUpdate, is_divided_by_inputs, part_of_rank
from app.model.cuda.attention import TritonAttention
from app.model.parallel import ranks as ranks_module
from app.model.parallel.ranks import Ranks
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import generate_plainly
from tests.lora import ALL_LINEARS, merge, save_adapter
from tests.model.cuda.test_graph_runner import LIMITS
from tests.model.parallel.cuda_rank import NUM_PROBE_TOKENS
from tests.model.parallel.fake_rank import ForkedRank
from tests.model.parallel.graph_rank import main, model_and_runner
from tests.tiny_models import build_tiny_model

RANKS = {"first": 5, "second": 16}
NUM_SLOTS = 2

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks need two GPUs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, adapters, and the base with each of them merged in."""
    folder = tmp_path_factory.mktemp("adapters")
    model = partial(build_tiny_model, "llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    model().save_pretrained(folder / "base")
    for name, rank in RANKS.items():
        save_adapter(folder / name, model(), rank=rank, seed=rank, size=0.1)
        merge(model(), folder / name, 8 / rank).save_pretrained(folder / f"merged-{name}")
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    """Of two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonAttention, "fits", staticmethod(lambda device: device.type != "meta"))
        patch.setattr("app.model.verification.NUM_TOKENS", NUM_PROBE_TOKENS)
        ranks = Ranks(
            size=2, device=torch.device("cpu"), settings={}, step_timeout_s=60,
            start=partial(ForkedRank, partial(main, folder / "base", None, NUM_SLOTS)),
        )  # fmt: skip
        with ranks.loading():
            model, runner = model_and_runner(folder / "base", ranks.group, max_adapters=NUM_SLOTS)
    runner.lead(ranks)

    def load(adapter: Adapter, make_room: Callable[[], None]) -> object:
        return runner.load_adapter(folder_of_adapter(adapter), make_room)

    store = AdapterStore(load, unload=runner.unload_adapter, max_loaded=NUM_SLOTS)
    built = assemble(
        LIMITS, CacheConfig(block_size=4), num_blocks=16, runner=runner, model_info=model.model_info, adapters=store
    )  # fmt: skip
    with closing(built):
        yield built


def test_the_parts_of_an_adapter_add_what_the_whole_adds() -> None:
    torch.manual_seed(0)
    x, size = torch.randn(3, 24), 4
    whole = {name: LowRankUpdate(torch.randn(5, 24), torch.randn(12, 5)) for name in ALL_LINEARS}
    parts = [part_of_rank(whole, rank, size) for rank in range(size)]
    for name, update in whole.items():
        inputs = x.chunk(size, 1) if is_divided_by_inputs(name) else [x] * size
        added = [own @ part[name].down.T @ part[name].up.T for own, part in zip(inputs, parts, strict=True)]
        found = sum(added) if is_divided_by_inputs(name) else torch.cat(added, 1)
        torch.testing.assert_close(found, x @ update.down.T @ update.up.T)


def test_tokens_of_two_ranks_are_those_of_merged_weights(engine: Engine, folder: Path) -> None:
    """Prompts and decoding, adapters and the base in one step, by graphs and without."""
    request = make_request((5, 6, 7), max_tokens=4, ignore_eos=True)
    adapters = {f"merged-{name}": adapter_at(name, str(folder / name)) for name in RANKS}
    wave = {name: replace(request, request_id=name, adapter=adapters.get(name)) for name in ("base", *adapters)}
    found = run_to_end(engine, *wave.values()).token_ids
    alone = run_to_end(engine, replace(wave["merged-first"], request_id="alone")).token_ids
    expected = {name: generate_plainly(folder / name, [request])[request.request_id] for name in wave}
    assert found == expected
    assert alone["alone"] == expected["merged-first"]
    assert len({tuple(tokens) for tokens in expected.values()}) == 3, "adapters that change nothing test nothing"


def test_an_adapter_that_another_rank_cannot_read_keeps_no_slot_and_ends_no_rank(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.adapters is not None
    request = make_request((5, 6, 7), max_tokens=2, ignore_eos=True)
    again = [adapter_at(f"again-{name}", str(folder / name)) for name in RANKS]
    others = [replace(each, digest=f"another {n}") for n, each in enumerate(again)]
    with monkeypatch.context() as patch:
        patch.setattr(ranks_module, "save_part", lambda path, _part: path.write_bytes(b"no tensors"))
        for adapter in others:
            with pytest.raises(Failure, match="a rank cannot load the adapter"):
                engine.adapters.hold(adapter)
    for adapter in others:
        held = engine.adapters.hold(adapter)
        held.release()
    assert len(run_to_end(engine, request).token_ids[request.request_id]) == 2
