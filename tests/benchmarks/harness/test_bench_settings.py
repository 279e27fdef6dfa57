"""`--set`: any setting by its path, and what is said of one that is wrong."""

from __future__ import annotations

import pytest

from app.config import FairConfig, StaticConfig
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.settings import engine_config, parse_assignments


def test_settings_of_every_branch_can_be_set_and_choices_by_name_in_any_order() -> None:
    texts = ["cache.prefix_caching=false", "cache.num_blocks=none", "model.dtype=bfloat16", "scheduler.policy=fair"]
    strategy = ["scheduler.strategy=static", "scheduler.strategy.batch_size=3"]
    for ordered in (strategy, strategy[::-1]):
        config = engine_config({"model.num_threads": 2}, parse_assignments([*texts, *ordered]))
        assert (config.model.num_threads, config.model.dtype) == (2, "bfloat16")
        assert (config.cache.prefix_caching, config.cache.num_blocks) == (False, None)
        assert (config.scheduler.strategy, config.scheduler.policy) == (StaticConfig(batch_size=3), FairConfig())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheduler.max_running", "write it as path=value"),
        ("scheduler.max_running=0", r"scheduler\.max_running: got '?0'?; must be greater than or equal to 1"),
        ("scheduler.max_runing=3", "there is no setting 'scheduler.max_runing'; did you mean scheduler.max_running"),
        ("model.dtype=float16", r"model\.dtype: got 'float16'; must be "),
        ("scheduler.strategy.batch_size=3", "without a name; must be one of static"),
        ("scheduler.max_step_tokens=8", "max_step_tokens=8 is below max_running=32"),
    ],
)
def test_a_wrong_value_is_told_with_what_the_setting_takes(text: str, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        engine_config({}, parse_assignments([text]))
