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


@pytest.mark.parametrize(
    ("stop", "shown", "included", "num_tokens"),
    [
        ("<|user|>", "3 4", "3 4<|user|>", 3),
        ("4<|user|>", "3 ", "3 4<|user|>", 3),
        ("<|user|> 5", "3 4", "3 4<|user|> 5", 4),
        ("<|user|>5", "3 4 5 6", "3 4 5 6", 6),
        ("<|end|>", "3 4 5", "3 4 5<|end|>", 5),
        ("user", "3 4 5 6", "3 4 5 6", 6),
    ],
)
@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("size", [1, 6])
def test_a_hidden_special_token_completes_a_stop_string(
    tokenizer: Tokenizer, stop: str, shown: str, included: str, num_tokens: int, include_stop: bool, size: int
) -> None:
    ids = encode(tokenizer, "3 4<|user|> 5<|end|> 6")
    stop_tokens = tokenizer.special_tokens_in([stop, "never"])
    text = GeneratedText(tokenizer, stop=[stop, "never"], stop_tokens=stop_tokens, include_stop=include_stop)
    added = [text.push(delta(*ids[at : at + size])) for at in range(0, len(ids), size)]
    if added[-1].finish_reason is None:
        added.append(text.push(delta(reason=FinishReason.LENGTH)))
    until_end = next(at for at, each in enumerate(added, 1) if each.finish_reason is not None)
    assert "".join(each.text for each in added[:until_end]) == (included if include_stop else shown)
    assert sum(each.num_tokens for each in added[:until_end]) == num_tokens
    assert added[until_end - 1].stop_string == (stop if num_tokens < 6 else None)


def test_a_special_token_that_no_stop_string_ends_at_stays_hidden(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "3<|user|> 4 5")
    stop = ["<|user|> 5", " 5"]
    text = GeneratedText(tokenizer, stop=stop, stop_tokens=tokenizer.special_tokens_in(stop), min_tokens=2)
    added = text.push(delta(*ids))
    assert (added.text, added.stop_string) == ("3 4", " 5")


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    text = GeneratedText(tokenizer, stop=[" 5"], min_tokens=3)
    last = text.push(delta(*encode(tokenizer, "3 4 5 6 5 7")))
    assert (last.text, last.num_tokens) == ("3 4 5 6", 5)
