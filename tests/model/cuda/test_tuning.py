"""Constants of the attention kernels by architecture."""

from __future__ import annotations

import pytest
import torch

from app.model.cuda.tuning import tuning_for, tuning_of


@pytest.mark.parametrize(
    ("capability", "of_128", "of_256"), [((8, 0), 128, 64), ((9, 0), 128, 128), ((10, 0), 128, 128)]
)
def test_wide_heads_have_fewer_rows_where_registers_do_not_suffice(
    capability: tuple[int, int], of_128: int, of_256: int
) -> None:
    tuning = tuning_of(capability)
    assert (tuning.rows(64), tuning.rows(128), tuning.rows(256)) == (128, of_128, of_256)


def test_masks_of_padded_heads_take_registers() -> None:
    assert tuning_of((8, 0)).rows(128, is_padded=True) == 64
    assert tuning_of((9, 0)).rows(128, is_padded=True) == 128


def test_an_architecture_that_is_not_known_gets_what_takes_least() -> None:
    known, unknown = tuning_of((9, 0)), tuning_of((13, 0))
    assert unknown == tuning_of((8, 9)) == tuning_of((12, 0))
    assert unknown.decode_stages < known.decode_stages
    assert unknown.max_outputs < known.max_outputs


def test_without_a_gpu_steps_are_sized_as_for_an_h100() -> None:
    assert tuning_for(torch.device("meta")) == tuning_of((9, 0))
