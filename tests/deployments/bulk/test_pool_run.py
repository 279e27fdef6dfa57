from __future__ import annotations

from collections.abc import Generator

import pytest
from ray.exceptions import RayTaskError

from app.errors import InvalidSetup
from app.jobs.runner import ReadingBroke
from deployments.bulk.pool_run import _until_it_breaks


def pieces_that_break(cause: Exception, *, after: int = 0) -> Generator[list[object], None, None]:
    yield from ([] for _ in range(after))
    raise RayTaskError(
        "prepare", "Traceback\nTo change retry attempts, configure Ray Data", cause
    ).as_instanceof_cause()


def test_a_mistake_in_the_settings_that_is_found_while_rows_are_read_ends_the_run_in_words() -> None:
    mistake = InvalidSetup("pooling: got cls")
    with pytest.raises(InvalidSetup) as raised:
        list(_until_it_breaks(pieces_that_break(mistake)))  # type: ignore[arg-type]
    assert str(raised.value) == str(mistake)


def test_such_a_mistake_after_the_first_rows_may_pass_so_the_rows_are_read_again() -> None:
    with pytest.raises(ReadingBroke, match=r"^no tokenizer could be loaded$"):
        list(_until_it_breaks(pieces_that_break(InvalidSetup("no tokenizer could be loaded"), after=1)))  # type: ignore[arg-type]


def test_rows_are_read_again_after_any_other_error_whose_own_words_are_logged() -> None:
    with pytest.raises(ReadingBroke, match=r"^the disk is gone$"):
        list(_until_it_breaks(pieces_that_break(OSError("the disk is gone"))))  # type: ignore[arg-type]
