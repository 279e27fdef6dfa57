"""Constants of the attention kernels by architecture."""

from __future__ import annotations

import torch

from app.model.cuda.tuning import tuning_for, tuning_of


def test_an_architecture_that_is_not_known_gets_what_takes_least() -> None:
    known, unknown = tuning_of((9, 0)), tuning_of((13, 0))
    assert unknown == tuning_of((8, 9)) == tuning_of((12, 0))
    assert unknown.decode_stages < known.decode_stages
    assert unknown.max_outputs < known.max_outputs


def test_without_a_gpu_steps_are_sized_as_for_an_h100() -> None:
    assert tuning_for(torch.device("meta")) == tuning_of((9, 0))
