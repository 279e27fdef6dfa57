from __future__ import annotations

import ast
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from app.api import ServedModel
from app.build import build_sync_engine
from app.config import EngineConfig, ModelConfig
from app.engine.batch import StepBatch, StepResult
from app.engine.engine import Engine
from app.engine.request import Grammar, GrammarKind, Pooling, TokenLogprobs
from app.errors import EngineStopped, Failure, InvalidSetup
from app.jobs.job import ItemOutput
from app.text import Detokenizer, Tokenizer
from deployments.bulk.engine_worker import EngineWorker, PreparedItem
from tests.kit.engine import (
    BAD_GRAMMAR,
    CountingRunner,
    MadeMatchers,
    MatchedRunner,
    PoisonedRunner,
    build_fake_engine,
    expected_tokens,
    make_request,
)
from tests.tiny_encoders import save_tiny_encoder, tiny_tokenizer

ENOUGH_S = 20.0


@pytest.fixture
def tokenizer(model: ServedModel) -> Tokenizer:
    return model.tokenizer


class Room:
    """Generators that are closed at the end of a test."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._open: list[EngineWorker] = []

    def generator(self, engine: Engine | None = None) -> EngineWorker:
        self._open.append(EngineWorker(engine or build_fake_engine(), self._tokenizer, MadeMatchers()))
        return self._open[-1]

    def generator_of(self, row: PreparedItem) -> EngineWorker:
        """A generator on an engine of its own, with a row."""
        generator = self.generator(build_fake_engine(num_blocks=300))
        generator.add([row])
        return generator

    def close(self) -> None:
        for generator in self._open:
            generator.close()


@pytest.fixture
def room(tokenizer: Tokenizer) -> Iterator[Room]:
    room = Room(tokenizer)
    yield room
    room.close()


def row(number: int, *, stop: tuple[str, ...] = (), **sampling: Any) -> PreparedItem:
    request = make_request((5, 6, 7 + number), request_id=f"row-{number}", ignore_eos=True, **sampling)
    return PreparedItem(number=number, id=f"id-{number}", requests=(request,), stop=stop, skip_special_tokens=True)


def listed(numbers: Sequence[Sequence[float]]) -> str:
    """The text of the numbers of a row's requests. No number may be NaN."""
    if not all(map(math.isfinite, chain.from_iterable(numbers))):
        raise Failure("the model gave no numbers")
    return str([list(map(float, each)) for each in numbers])


def scored_row(number: int) -> PreparedItem:
    asked = make_request((1, *range(4, 6 + number), 2), request_id=f"row-{number}", pooling=Pooling.SCORE, max_tokens=0)
    return PreparedItem(
        number=number, id=f"id-{number}", requests=(asked,), stop=(), skip_special_tokens=True, text_of_numbers=listed
    )


def outputed(generator: EngineWorker, num_records: int) -> list[ItemOutput]:
    records: list[ItemOutput] = []
    while len(records) < num_records:
        records += generator.collect(at_least=num_records, within_s=ENOUGH_S).outputs
    return sorted(records, key=lambda record: record.number)


def plain_text(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return detokenizer.push(token_ids) + detokenizer.flush()


def test_each_row_comes_back_once_with_its_text_and_counts(room: Room, tokenizer: Tokenizer) -> None:
    generator = room.generator()
    generator.add([row(number, max_tokens=3 + number) for number in range(12)])
    records = outputed(generator, 12)
    assert [record.number for record in records] == list(range(12))
    for record in records:
        token_ids = expected_tokens((5, 6, 7 + record.number), 3 + record.number)
        assert record.text == plain_text(tokenizer, token_ids)
        assert (record.id, record.finish_reason, record.error) == (f"id-{record.number}", "length", None)
        assert (record.prompt_tokens, record.completion_tokens) == (3, 3 + record.number)


def test_the_text_of_a_row_may_be_made_of_its_named_tokens(room: Room) -> None:
    generator = room.generator()
    asked = row(0, max_tokens=1, logprobs=2)
    generator.add([replace(asked, text_of_numbers=listed)])
    [record] = outputed(generator, 1)
    assert (record.text, record.finish_reason, record.error) == ("[[-1.0, -2.0]]", "stop", None)


def test_named_tokens_without_a_probability_fail_their_row(room: Room) -> None:
    class NotANumber(CountingRunner):
        def run(self, batch: StepBatch) -> StepResult:
            result = super().run(batch)
            lost = TokenLogprobs(-math.inf, 1, (5, 6), (-math.inf, math.nan))
            return result._replace(logprobs=dict.fromkeys(result.logprobs, (lost,)))

    generator = room.generator(build_fake_engine(runner=NotANumber()))
    generator.add([replace(row(0, max_tokens=1, logprobs=2), text_of_numbers=listed)])
    [record] = outputed(generator, 1)
    assert (record.text, record.error) == (None, "the model gave no numbers")


def test_the_text_of_a_row_may_be_made_of_the_scores_of_its_labels(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    save_tiny_encoder("bert", tmp_path, num_labels=3)
    config = EngineConfig(model=ModelConfig(path=str(tmp_path), dtype="float32", device="cpu"))
    worker = EngineWorker(build_sync_engine(config), Tokenizer(tiny_tokenizer()), MadeMatchers())
    request.addfinalizer(worker.close)
    worker.add([scored_row(number) for number in range(5)])
    for record in outputed(worker, 5):
        [scores] = ast.literal_eval(str(record.text))
        assert (len(scores), sum(scores)) == (3, pytest.approx(1.0))
        assert (record.finish_reason, record.prompt_tokens, record.completion_tokens) == ("stop", 4 + record.number, 0)


def test_scores_that_are_no_numbers_fail_their_row(room: Room) -> None:
    class NotANumber(CountingRunner):
        def run(self, batch: StepBatch) -> StepResult:
            return StepResult([], pooled={item.request_id: [0.5, math.nan] for item in batch.scheduled})

    generator = room.generator(build_fake_engine(runner=NotANumber(), labels=("a", "b")))
    generator.add([scored_row(0)])
    [record] = outputed(generator, 1)
    assert (record.text, record.error) == (None, "the model gave no numbers")


def two_requests(number: int, second: tuple[int, ...] = (5, 6), **sampling: Any) -> PreparedItem:
    whole = row(number, max_tokens=1, logprobs=2)
    more = make_request(second, request_id=f"row-{number}-1", max_tokens=1, logprobs=2, ignore_eos=True, **sampling)
    return replace(whole, requests=(*whole.requests, more), text_of_numbers=listed)


def test_a_row_of_several_requests_ends_when_all_of_them_have_ended(room: Room) -> None:
    generator = room.generator()
    generator.add([two_requests(number) for number in range(5)])
    for record in outputed(generator, 5):
        assert record.text == "[[-1.0, -2.0], [-1.0, -2.0]]"
        assert (record.finish_reason, record.prompt_tokens, record.completion_tokens) == ("stop", 5, 2)


def test_a_request_that_is_refused_or_fails_ends_its_row_and_frees_the_others(room: Room) -> None:
    engine = build_fake_engine(runner=PoisonedRunner("row-1-1"), max_model_len=20)
    generator = room.generator(engine)
    generator.add([two_requests(0, tuple(range(5, 40))), two_requests(1), two_requests(2)])
    refused, failed, answered = outputed(generator, 3)
    assert "this model accepts 20 tokens in total" in str(refused.error)
    assert failed.error is not None
    assert answered.text == "[[-1.0, -2.0], [-1.0, -2.0]]"
    generator.close()
    assert not engine.has_work


def test_a_short_row_does_not_wait_for_a_long_one(room: Room) -> None:
    generator = room.generator(build_fake_engine(runner=SlowRunner(), num_blocks=300))
    generator.add([row(0, max_tokens=900), row(1, max_tokens=1)])
    first = generator.collect(at_least=1, within_s=ENOUGH_S)
    assert [record.number for record in first.outputs] == [1]


def test_what_is_worth_taking_is_counted_in_requests(room: Room) -> None:
    generator = room.generator(build_fake_engine(runner=SlowRunner(), num_blocks=300))
    generator.add([row(0, max_tokens=900), two_requests(1)])
    first = generator.collect(at_least=2, within_s=ENOUGH_S)
    assert [record.number for record in first.outputs] == [1], "one row of two requests"


def test_a_output_tells_which_rows_began_and_how_many_tokens_came(room: Room) -> None:
    generator = room.generator()
    generator.add([row(0, max_tokens=5), row(1, max_tokens=5)])
    output = generator.collect(at_least=2, within_s=ENOUGH_S)
    assert sorted(output.begun) == [0, 1]
    assert output.num_tokens == 10


def test_outputs_tell_the_tokens_of_rows_that_go_on(room: Room) -> None:
    generator = room.generator(build_fake_engine(runner=SlowRunner(), num_blocks=300))
    generator.add([row(0, max_tokens=900)])
    token_ids: list[int] = []
    while len(token_ids) < 20:
        token_ids += generator.collect(at_least=1, within_s=0.005).token_ids.get(0, ())
    assert token_ids == expected_tokens((5, 6, 7), 900)[: len(token_ids)]


@pytest.mark.parametrize("with_stop", [False, True])
def test_a_row_goes_on_after_the_tokens_of_another_engine_wherever_that_was(
    room: Room, tokenizer: Tokenizer, with_stop: bool
) -> None:
    """Text, counts and stop strings are those of an item that was not interrupted."""
    token_ids = expected_tokens((5, 6, 7), 40)
    whole = row(0, stop=(plain_text(tokenizer, token_ids)[10:12],) if with_stop else (), max_tokens=40)
    [expected] = outputed(room.generator_of(whole), 1)
    for num_known in range(1, expected.completion_tokens):
        item = whole.continued_after(tuple(token_ids[:num_known]))
        output = room.generator_of(item).collect(at_least=1, within_s=ENOUGH_S)
        assert output.outputs == (expected,)
        assert output.num_tokens >= expected.completion_tokens - num_known


def test_a_output_returns_in_time_without_a_record(room: Room) -> None:
    generator = room.generator(build_fake_engine(runner=SlowRunner(), num_blocks=300))
    generator.add([row(0, max_tokens=900)])
    assert generator.collect(at_least=1, within_s=0.05).outputs == ()


def test_a_stop_string_ends_a_row_and_frees_its_place(room: Room, tokenizer: Tokenizer) -> None:
    whole = plain_text(tokenizer, expected_tokens((5, 6, 7), 40))
    stop = whole[10:12]
    engine = build_fake_engine()
    generator = room.generator(engine)
    generator.add([row(0, stop=(stop,), max_tokens=40)])
    [record] = outputed(generator, 1)
    assert record.text == whole[: whole.index(stop)]
    assert record.finish_reason == "stop"
    assert record.completion_tokens < 40
    generator.close()
    assert not engine.has_work


def test_a_row_that_the_engine_refuses_is_a_record_with_the_reason(room: Room) -> None:
    generator = room.generator(build_fake_engine(max_model_len=20))
    generator.add([row(0, max_tokens=50), row(1, max_tokens=2)])
    refused, answered = outputed(generator, 2)
    assert "this model accepts 20 tokens in total" in str(refused.error)
    assert refused.text is None
    assert answered.error is None


class SlowRunner(CountingRunner):
    """Steps of a millisecond."""

    def run(self, batch: StepBatch) -> StepResult:
        time.sleep(0.001)
        return super().run(batch)


def test_a_row_that_makes_its_step_fail_fails_alone(room: Room) -> None:
    generator = room.generator(build_fake_engine(runner=PoisonedRunner("row-1")))
    generator.add([row(number) for number in range(4)])
    records = outputed(generator, 4)
    assert [record.number for record in records if record.error] == [1]


def test_a_device_that_fails_on_everything_is_told_and_no_row_is_blamed(room: Room) -> None:
    generator = room.generator(build_fake_engine(runner=PoisonedRunner("")))
    generator.add([row(0), two_requests(1)])
    with pytest.raises(EngineStopped, match="the engine failed with 2 items"):
        generator.collect(at_least=1, within_s=ENOUGH_S)


def test_an_engine_that_cannot_be_prepared_says_why(room: Room) -> None:
    class UnpreparedEngine(Engine):
        def prepare(self) -> None:
            raise InvalidSetup("no memory for graphs")

    engine = build_fake_engine()
    engine.__class__ = UnpreparedEngine
    generator = room.generator(engine)
    generator.add([row(0)])
    with pytest.raises(EngineStopped, match="no memory for graphs"):
        generator.collect(at_least=1, within_s=ENOUGH_S)


def test_a_row_with_a_grammar_keeps_to_it_and_one_whose_grammar_is_no_use_fails_alone(room: Room) -> None:
    generator = room.generator(build_fake_engine(runner=MatchedRunner()))
    grammars = {0: "3 5 7", 1: BAD_GRAMMAR, 2: "8"}
    rows = [row(n, max_tokens=6, grammar=Grammar(GrammarKind.REGEX, text)) for n, text in grammars.items()]
    generator.add([*rows, row(3, max_tokens=6)])
    records = {record.number: record for record in generator.collect(at_least=4, within_s=ENOUGH_S).outputs}
    assert records[1].error == "this grammar is no use"
    assert {number: record.completion_tokens for number, record in records.items()} == {0: 6, 1: 0, 2: 6, 3: 6}
