from __future__ import annotations

import pytest

from app.engine.request import FinishReason, TokenDelta
from app.text import GeneratedText, TextDelta, Tokenizer


def delta(*token_ids: int, reason: FinishReason | None = None, stop: int | None = None) -> TokenDelta:
    return TokenDelta(request_id="r", token_ids=token_ids, finish_reason=reason, stop_token_id=stop)


def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_text_and_count_of_plain_deltas(tokenizer: Tokenizer) -> None:
    text = GeneratedText(tokenizer)
    ids = encode(tokenizer, "3 4 5.")
    assert text.push(delta(*ids[:2])) == TextDelta(text="3 4", num_tokens=2)
    assert text.push(delta(*ids[2:], reason=FinishReason.LENGTH)) == TextDelta(
        text=" 5.", num_tokens=2, finish_reason=FinishReason.LENGTH
    )


def test_an_unfinished_character_at_the_end_is_shown_as_decode_shows_it(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "é")[:1]
    last = GeneratedText(tokenizer).push(delta(*ids, reason=FinishReason.LENGTH))
    assert last.text == tokenizer.decode(ids) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_stop_token_counts_but_is_not_shown(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    text = GeneratedText(tokenizer, stop=stop)
    ids = encode(tokenizer, "3 4")
    assert text.push(delta(*ids, reason=FinishReason.STOP, stop=ids[-1])) == TextDelta(
        text="3", num_tokens=2, finish_reason=FinishReason.STOP
    )


def test_tokens_count_up_to_the_one_that_completed_the_stop_string(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "3 4 5 6 7")
    together = GeneratedText(tokenizer, stop=["4 5"]).push(delta(*ids))
    assert together == TextDelta(text="3 ", num_tokens=3, finish_reason=FinishReason.STOP, stop_string="4 5")

    one_by_one = GeneratedText(tokenizer, stop=["4 5"])
    heard = [one_by_one.push(delta(token_id)) for token_id in ids[:3]]
    assert "".join(added.text for added in heard) == "3 "
    assert [added.finish_reason for added in heard] == [None, None, FinishReason.STOP]


def test_what_was_held_for_a_stop_string_comes_with_the_last_delta(tokenizer: Tokenizer) -> None:
    text = GeneratedText(tokenizer, stop=["4 6"])
    ids = encode(tokenizer, "3 4")
    assert text.push(delta(*ids)).text == "3 "
    assert text.push(delta(reason=FinishReason.LENGTH)).text == "4"


def test_a_stop_string_that_the_flushed_text_completes_is_found(tokenizer: Tokenizer) -> None:
    text = GeneratedText(tokenizer, stop=["\N{REPLACEMENT CHARACTER}"])
    ids = encode(tokenizer, "3é")[:2]
    last = text.push(delta(*ids, reason=FinishReason.LENGTH))
    assert (last.text, last.finish_reason) == ("3", FinishReason.STOP)


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    text = GeneratedText(tokenizer, stop=[" 5"], min_tokens=3)
    last = text.push(delta(*encode(tokenizer, "3 4 5 6 5 7")))
    assert (last.text, last.num_tokens) == ("3 4 5 6", 5)
