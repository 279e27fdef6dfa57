"""What a step log without prompts tells, and what it does not."""

from __future__ import annotations

import msgspec

from app.engine.request import Grammar, GrammarKind, SamplingParams
from app.engine.trace.entries import (
    Arrival,
    Entry,
    OutputHashes,
    RedactedArrival,
    ScheduledTokens,
    StepRecord,
    parse,
    to_line,
)  # fmt: skip
from app.engine.trace.redaction import Redactor
from tests.kit.engine import make_request

PROMPT = (41, 42, 43, 44, 45, 46)


def redacted(*entries: Entry) -> list[Entry]:
    redactor = Redactor(block_size=2)
    return [hidden for entry in entries for hidden in redactor.redacted(entry)]


def hashes_of(entry: Entry) -> list[str]:
    assert isinstance(entry, RedactedArrival)
    return list(entry.request["block_hashes"])


def test_neither_prompts_nor_outputs_nor_names_are_written() -> None:
    request = make_request(PROMPT, request_id="r", cache_salt="secret", tenant="alice", max_tokens=3)
    hidden = redacted(Arrival(0, 1.0, request), StepRecord(1, scheduled=ScheduledTokens([0], [0], [6]), token_ids=[47]))
    arrival, step = hidden
    assert isinstance(arrival, RedactedArrival)
    told = {"request_id", "sampling", "num_prompt_tokens", "block_hashes", "cache_salt", "tenant"}
    assert arrival.request.keys() == told
    assert arrival.request["num_prompt_tokens"] == 6
    assert len(arrival.request["block_hashes"]) == 3
    assert not {"secret", "alice"} & {arrival.request["cache_salt"], arrival.request["tenant"]}
    assert step == StepRecord(1, scheduled=ScheduledTokens([0], [0], [6]))


def test_the_text_of_a_grammar_is_not_written_but_that_there_is_one() -> None:
    grammar = Grammar(GrammarKind.REGEX, "my secret")
    request = make_request(PROMPT, grammar=grammar, bad_words=((41, 42), (43,)))
    [arrival] = redacted(Arrival(0, 1.0, request))
    line = to_line(arrival)
    assert "secret" not in line
    again = parse(line)
    assert isinstance(again, RedactedArrival)
    sampling = msgspec.convert(again.request["sampling"], SamplingParams)
    assert sampling.needs_output_history
    assert sampling.grammar is not None
    assert sampling.grammar.kind is GrammarKind.REGEX
    assert sampling.bad_words == ((0, 0), (0,))


def test_equal_blocks_are_equal_within_a_log_and_not_between_two() -> None:
    arrivals = [Arrival(number, 1.0, make_request((*PROMPT[:4], number))) for number in range(2)]
    first, second = map(hashes_of, redacted(*arrivals))
    assert first == second
    assert len(first) == 2
    assert first[0] != first[1]
    (other,) = map(hashes_of, redacted(arrivals[0]))
    assert other != first


def test_hashes_of_generated_blocks_are_written_when_a_request_ends() -> None:
    """It equals the blocks of a prompt that goes on with it, as the prefix cache sees them."""
    answered = Arrival(0, 1.0, make_request(PROMPT[:3]))
    steps = [
        StepRecord(1, scheduled=ScheduledTokens([0], [0], [3]), token_ids=[44]),
        StepRecord(2, token_ids=[45]),
        StepRecord(3, token_ids=[46], ended=[(0, "length")]),
    ]
    *_, content, follow_up = redacted(answered, *steps, Arrival(1, 2.0, make_request(PROMPT)))
    assert content == OutputHashes(0, hashes_of(follow_up)[1:])


def test_late_tokens_belong_to_the_step_before() -> None:
    answered = Arrival(0, 1.0, make_request(PROMPT[:3]))
    other = Arrival(1, 1.0, make_request((7, 8)))
    steps = [
        StepRecord(1, scheduled=ScheduledTokens([0], [0], [3])),
        StepRecord(2, scheduled=ScheduledTokens([1], [0], [2]), token_ids=[44], is_late=True, ended=[(0, "length")]),
    ]
    *_, content, follow_up = redacted(answered, other, *steps, Arrival(2, 2.0, make_request(PROMPT[:4])))
    assert content == OutputHashes(0, hashes_of(follow_up)[1:])
