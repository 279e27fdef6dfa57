from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._C import _distributed_c10d

from app.model.cuda.captured_inputs import StepSize, decode_size
from app.model.implementations.gpu import with_one_block
from app.model.parallel import sums
from app.model.parallel.group import RankGroup
from app.model.parallel.split_plan import SizesOfRank
from app.model.parallel.sums import SumMethod, SymmetricSums, sum_method
from app.model.planned_memory import planned_gpu_model
from tests.kit.models import config_of
from tests.model.parallel.test_split_plan import on_ranks


def exchanged(group: RankGroup) -> list[torch.Tensor]:
    """What a rank has after one exchange of each kind."""
    own = torch.arange(12, dtype=torch.float32).view(3, 4) * (group.rank + 1)
    total, from_first = own.clone(), own.clone()
    group.all_reduce(total)
    group.broadcast(from_first)
    rounded = torch.full((5,), 1.0 + group.rank / 256, dtype=torch.bfloat16)
    group.all_reduce(rounded)
    joined, at_first = group.gather_columns(own[:, :2]), group.gather_at_first(own[:, :2])
    assert torch.equal(at_first, joined if group.rank == 0 else own[:, :2])
    return [total, from_first, rounded, joined, torch.tensor(group.minimum(7 - group.rank))]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_exchange_tensors(size: int, tmp_path: Path) -> None:
    """In threads; tests of engines have processes."""
    first, *others = on_ranks(size, tmp_path, exchanged)
    total, from_first, rounded, columns, least = first
    numbers = torch.arange(12, dtype=torch.float32).view(3, 4)
    factors = range(1, size + 1)
    assert torch.equal(total, numbers * sum(factors))
    assert torch.equal(from_first, numbers)
    exact = sum(1.0 + rank / 256 for rank in range(size))
    assert rounded.dtype is torch.bfloat16
    assert torch.allclose(rounded.float(), torch.tensor(exact), rtol=2**-8)
    assert torch.equal(columns, torch.cat([numbers[:, :2] * factor for factor in factors], dim=-1))
    assert least == 8 - size
    for other in others:
        assert all(map(torch.equal, other, first))


def test_a_number_has_the_same_bits_wherever_it_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tensor that each rank adds whole, and in one of which each adds a part."""
    monkeypatch.setattr(sums, "_MOST_READ_BYTES", 1024)
    numbers = torch.randn(4, 96, generator=torch.Generator().manual_seed(1)).bfloat16()

    def both(group: RankGroup) -> list[torch.Tensor]:
        own = numbers * (group.rank + 1.1)
        small, large = own.flatten()[-96:].clone(), own.clone()
        assert sum_method(small, 3) is SumMethod.WHOLE
        assert sum_method(large, 3) is SumMethod.IN_PARTS
        group.all_reduce(small)
        group.all_reduce(large)
        return [large, small]

    (large, small), *others = on_ranks(3, tmp_path, both)
    exact = sum((numbers * (rank + 1.1)).float() for rank in range(3))
    assert torch.equal(large, exact.bfloat16())
    assert torch.equal(small, large[-1])
    assert all(torch.equal(large, other) and torch.equal(small, also) for other, also in others)


class CountedExchanges(SizesOfRank):
    """On the meta device."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.sums: Counter[tuple[int, SumMethod]] = Counter()  # by bytes and how they are added
        self.gathered: list[int] = []  # bytes of this rank's columns

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.sums[tensor.nbytes, sum_method(tensor, self.size)] += 1

    def gather_at_first(self, tensor: torch.Tensor) -> torch.Tensor:
        self.gathered.append(tensor.nbytes)
        return super().gather_at_first(tensor)


def test_what_eight_ranks_exchange_in_a_step_of_70_billion_weights(tmp_path: Path) -> None:
    """One that draws 64 tokens, and one with 2,048 tokens of prompts."""
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
        "max_position_embeddings": 8192, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = config_of(tmp_path, scheduler={"max_running": 64, "max_step_tokens": 2048})
    model = planned_gpu_model(config, dtype=torch.bfloat16, num_ranks=8)
    embedding, of_rank = 128256 * 8192, sum(each.numel() for each in model.tensors())
    assert of_rank == pytest.approx(embedding + (70.55e9 - embedding) / 8, rel=0.01)
    exchanges = CountedExchanges(8)
    runner = with_one_block(config, replace(model, group=exchanges))
    for size in (decode_size(64), StepSize(2048, 64, 64)):
        runner.compute_padding(size)
    mib = 2**20
    assert exchanges.sums == {(1 * mib, SumMethod.WHOLE): 160, (32 * mib, SumMethod.IN_PARTS): 160}
    assert exchanges.gathered == [64 * 128256 // 8 * 2] * 2


def test_how_ranks_add_follows_from_bytes_and_ranks() -> None:
    decode, prompt = (torch.empty(n, 8192, dtype=torch.bfloat16, device="meta") for n in (64, 2048))
    assert [sum_method(decode, size) for size in (2, 4, 8)] == [SumMethod.ANY_ORDER, SumMethod.WHOLE, SumMethod.WHOLE]
    assert [sum_method(prompt, size) for size in (2, 4, 8)] == [
        SumMethod.ANY_ORDER,
        SumMethod.IN_PARTS,
        SumMethod.IN_PARTS,
    ]
    assert sum_method(torch.empty(2**23 + 1, device="meta"), 4) is SumMethod.WHOLE, "it has no equal parts"


def test_what_fails_on_one_rank_fails_on_all_and_nobody_waits_in_it(tmp_path: Path) -> None:
    """The worst of what happens is what all see: memory that ended is made do with."""

    def outcomes(group: RankGroup) -> list[str]:
        def work(error: Exception | None) -> int:
            with group.alone():
                if error is not None and group.rank == 1:
                    raise error
                group.all_reduce(torch.ones(4))
            return 5

        found = []
        for error in (None, torch.OutOfMemoryError("no room"), RuntimeError("not captured")):
            try:
                found.append(str(group.together(partial(work, error))))
            except RuntimeError as raised:
                found.append(f"{type(raised).__name__}: {raised}")
        return found

    first, second = on_ranks(2, tmp_path, outcomes)
    assert first == ["5", "ExchangeFailed: out of memory on another rank", "ExchangeFailed: failed on another rank"]
    assert second == ["5", "OutOfMemoryError: no room", "RuntimeError: not captured"]


def test_torch_has_the_operators_of_symmetric_sums() -> None:
    """No GPU runs them here."""
    operators = torch.ops.symm_mem
    names = [[each.name for each in operator.default._schema.arguments]
             for operator in (operators.one_shot_all_reduce_copy_out, operators.two_shot_all_reduce_)]  # fmt: skip
    assert names == [
        ["symm_buffer", "local_input", "reduce_op", "group_name", "out"],
        ["input", "reduce_op", "group_name"],
    ]
    assert hasattr(_distributed_c10d, "_register_process_group")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="nvlink is not available"):
            SymmetricSums(_distributed_c10d.HashStore(), 0, 2, torch.device("cpu"))


def test_a_rank_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
        RankGroup(0, 2, store=tmp_path / "store", device=torch.device("cpu"), timeout_s=0.2)
