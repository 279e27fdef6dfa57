"""Pairs of texts are encoded as transformers encodes them, and cut where they are too long."""

from __future__ import annotations

import pytest

from app.text import Tokenizer
from tests.memory import peak_of_memory
from tests.tiny_encoders import CLS, SEP, tiny_tokenizer

QUERY, DOCUMENTS = "w5 w6 w7", ["w8 w9", "w10", "", "w11 w12 w13 w14 w15"]


@pytest.fixture(params=[False, True], ids=["bert", "roberta"])
def is_roberta(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_pairs_are_those_of_transformers(is_roberta: bool) -> None:
    theirs, ours = tiny_tokenizer(is_roberta=is_roberta), Tokenizer(tiny_tokenizer(is_roberta=is_roberta))
    pairs = ours.pairs([QUERY], DOCUMENTS)
    encoded = pairs.encoded()
    expected = theirs([QUERY] * len(DOCUMENTS), DOCUMENTS)
    assert [list(pair.token_ids) for pair in encoded] == expected["input_ids"]
    if not is_roberta:
        types = [[0] * pair.second_at + [1] * (len(pair.token_ids) - pair.second_at) for pair in encoded]
        assert types == expected["token_type_ids"]
    else:
        assert {pair.second_at for pair in encoded} == {0}
    assert pairs.num_tokens == sum(len(pair.token_ids) for pair in encoded)


def test_each_text_may_have_its_own_other() -> None:
    pairs = Tokenizer(tiny_tokenizer()).pairs(["w5", "w6"], ["w7", "w8"]).encoded()
    assert [pair.token_ids for pair in pairs] == [(CLS, 5, SEP, 7, SEP), (CLS, 6, SEP, 8, SEP)]


def test_the_second_text_is_cut_to_a_number_and_to_what_there_is_room_for() -> None:
    tokenizer = Tokenizer(tiny_tokenizer())
    [short, *_, long] = tokenizer.pairs([QUERY], DOCUMENTS, max_second=2, longest=100).encoded()
    assert short.token_ids == (CLS, 5, 6, 7, SEP, 8, 9, SEP)
    assert long.token_ids == (CLS, 5, 6, 7, SEP, 11, 12, SEP)
    [*_, long] = tokenizer.pairs([QUERY], DOCUMENTS, max_second=50, longest=9).encoded()
    assert long.token_ids == (CLS, 5, 6, 7, SEP, 11, 12, 13, SEP)
    [text] = tokenizer.texts(["w4 w5 w6"], max_tokens=50, longest=4).encoded()
    assert text == ((CLS, 4, 5, SEP), 0)
    [text] = tokenizer.texts(["w4 w5 w6"], max_tokens=1, longest=4).encoded()
    assert text == ((CLS, 4, SEP), 0)


def test_a_tokenizer_may_leave_types_out() -> None:
    plain = tiny_tokenizer()
    plain.init_kwargs["model_input_names"] = ["input_ids", "attention_mask"]
    [pair] = Tokenizer(plain).pairs([QUERY], ["w8"]).encoded()
    assert pair == ((CLS, 5, 6, 7, SEP, 8, SEP), 0)


def test_texts_alone_are_those_of_encode() -> None:
    tokenizer = Tokenizer(tiny_tokenizer())
    texts = tokenizer.texts(DOCUMENTS)
    for encoded, text in zip(texts.encoded(), DOCUMENTS, strict=True):
        assert encoded.token_ids == tokenizer.encode(text, add_special_tokens=True)
    assert texts.num_tokens == sum(len(each.token_ids) for each in texts.encoded())


@pytest.mark.parametrize("texts", [(" ", "w5"), ("w5", " "), (" ", " ")])
def test_a_text_without_tokens_changes_nothing_of_those_around_it(is_roberta: bool, texts: tuple[str, str]) -> None:
    theirs, ours = tiny_tokenizer(is_roberta=is_roberta), Tokenizer(tiny_tokenizer(is_roberta=is_roberta))
    for _ in range(2):  # the first time it is learned
        [pair] = ours.pairs([texts[0]], [texts[1]]).encoded()
        assert list(pair.token_ids) == theirs(*texts)["input_ids"]
        [text] = ours.texts([texts[0]]).encoded()
        assert list(text.token_ids) == theirs(texts[0])["input_ids"]


def test_a_tokenizer_that_puts_nothing_around_texts(tokenizer: Tokenizer) -> None:
    [text] = tokenizer.texts(["3 4"]).encoded()
    assert text == (tokenizer.encode("3 4", add_special_tokens=True), 0)
    [pair] = tokenizer.pairs(["3 4"], ["5"]).encoded()
    assert list(pair.token_ids) == tokenizer._pretrained("3 4", "5")["input_ids"]


@pytest.mark.parametrize("max_tokens", [None, 1])
@pytest.mark.parametrize("are_pairs", [False, True])
def test_many_texts_take_little_memory_however_short_they_are_cut(
    tokenizer: Tokenizer, max_tokens: int | None, are_pairs: bool
) -> None:
    """What the tokenizer makes of them has a hundred bytes a token, and a thousand for each that is cut off."""
    texts = ["abc de " * 550] * 300  # 825,000 tokens
    with peak_of_memory() as peak:
        encoded = (
            tokenizer.pairs(["a"], texts, max_second=max_tokens, longest=8000)
            if are_pairs
            else tokenizer.texts(texts, max_tokens=max_tokens, longest=8000)
        )
        assert encoded.num_tokens >= 300 * (max_tokens or 2000)
    assert peak.grown_bytes < 40 * 2**20
