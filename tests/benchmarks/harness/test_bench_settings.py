"""`--set`: any setting by its path, and what is said of one that is wrong."""

from __future__ import annotations

import pytest

from app.config import FairConfig, StaticConfig
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.settings import engine_config, parse_assignments


def test_settings_of_every_branch_can_be_set() -> None:
    config = engine_config(
        {"model.path": "somewhere", "model.num_threads": 2},
        parse_assignments(
            [
                "scheduler.max_step_tokens=1024",
                "cache.prefix_caching=false",
                "cache.memory_gib=1.5",
                "model.dtype=bfloat16",
            ]
        ),
    )
    assert config.model.path == "somewhere"
    assert config.model.num_threads == 2
    assert config.model.dtype == "bfloat16"
    assert config.scheduler.max_step_tokens == 1024
    assert config.cache.prefix_caching is False
    assert config.cache.memory_gib == 1.5


@pytest.mark.parametrize(
    "texts",
    [
        ["scheduler.strategy=static", "scheduler.strategy.batch_size=3"],
        ["scheduler.strategy.batch_size=3", "scheduler.strategy=static"],
    ],
)
def test_a_strategy_is_chosen_by_name_and_its_parameters_set_one_by_one(texts: list[str]) -> None:
    config = engine_config({}, parse_assignments([*texts, "scheduler.policy=fair"]))
    assert config.scheduler.strategy == StaticConfig(batch_size=3)
    assert config.scheduler.policy == FairConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheduler.max_running=many", r"scheduler\.max_running=many: .*integer.*\(requests computed in one step"),
        ("scheduler.max_running=0", r"scheduler\.max_running=0: .*greater than or equal to 1"),
        ("cache.num_blocks=few", r"cache\.num_blocks=few: .*integer"),
        ("model.dtype=float16", r"model\.dtype=float16; did you mean (bfloat16|float32)"),
        (
            "scheduler.strategy=magic",
            r"scheduler\.strategy: got 'magic'; must be one of static, dynamic, bucketed, sorted, adaptive, "
            r"continuous, hybrid",
        ),
        ("scheduler.strategy.batch_size=3", r"without a name; must be one of static"),
        ("scheduler.max_step_tokens=8", r"max_step_tokens=8 is below max_running=32"),
    ],
)
def test_a_wrong_value_is_told_with_what_the_setting_takes(text: str, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        engine_config({}, parse_assignments([text]))
