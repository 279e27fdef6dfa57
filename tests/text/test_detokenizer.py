from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from app.text import Detokenizer, Tokenizer
from app.text.detokenizer import MAX_WINDOW_TOKENS
from tests.text.small_tokenizers import AWKWARD

NUM_AWKWARD_IDS = 256 + len(AWKWARD) + 1  # bytes, awkward tokens, the end token; two of them are duplicates


def groups(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """Cut `ids` into groups of these sizes, the rest as the last."""
    cut = []
    for size in sizes:
        cut.append(ids[:size])
        ids = ids[size:]
    return [*cut, ids]


def pieces(tokenizer: Tokenizer, grouped: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(group) for group in grouped), detokenizer.flush()]


class WatchedTokenizer(Tokenizer):
    """Notes how many ids were decoded at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer._pretrained)
        self.most_ids = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.most_ids = max(self.most_ids, len(token_ids))
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_the_pieces_of_any_ids_are_the_text_of_all(awkward_tokenizer: Tokenizer) -> None:
    utf8_like = st.sampled_from([*range(256, NUM_AWKWARD_IDS), 0x41, 0x80, 0xA9, 0xC3, 0xE2, 0x82, 0xF0, 0x9F, 0xFF])
    ids = st.lists(st.integers(0, NUM_AWKWARD_IDS) | utf8_like, max_size=60)

    @settings(max_examples=500)
    @given(ids, st.lists(st.integers(0, 5)), st.booleans())
    def check(ids: list[int], sizes: list[int], skip: bool) -> None:
        expected = awkward_tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(pieces(awkward_tokenizer, groups(ids, sizes), skip_special_tokens=skip)) == expected

    check()


def test_only_whole_characters_come_out(tokenizer: Tokenizer) -> None:
    @given(st.text(alphabet="aé€😀 漢", min_size=1))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        out = pieces(tokenizer, [[token_id] for token_id in ids])
        assert "".join(out) == text
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(out)
        assert out[-1] == "", "valid text leaves nothing to flush"

    check()


def test_each_character_comes_out_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é😀", add_special_tokens=False)
    assert len(ids) == 6
    assert pieces(tokenizer, [[token_id] for token_id in ids]) == ["", "é", "", "", "", "😀", ""]


def test_byte_fallback_with_its_stripped_space_comes_out_whole(fallback_tokenizer: Tokenizer) -> None:
    words = st.sampled_from([[0], [1], [2], [3], [4], [5], [6]])
    rare = st.sampled_from("😀漢ñ\n").map(lambda character: [7 + byte for byte in character.encode()])

    @settings(max_examples=300)
    @given(st.lists(words | rare, max_size=30))
    def check(parts: list[list[int]]) -> None:
        ids = [token_id for part in parts for token_id in part]
        out = pieces(fallback_tokenizer, [[token_id] for token_id in ids])
        assert "".join(out) == fallback_tokenizer.decode(ids)

    check()


def test_work_per_token_is_bounded_whatever_comes(awkward_tokenizer: Tokenizer, fallback_tokenizer: Tokenizer) -> None:
    end = next(iter(awkward_tokenizer.special_token_ids))
    endless = {
        "invalid bytes": [0xFF],
        "unfinished characters": [0xE2, 0x82],
        "continuations": [0x80],
        "no boundary between tokens": [256, 257],
        "hidden tokens": [end],
        "no such token": [100_000],
        "replacement characters": [0xEF, 0xBF, 0xBD],
    }
    for name, ids in endless.items():
        watched = WatchedTokenizer(awkward_tokenizer)
        out = pieces(watched, [[token_id] for token_id in ids * 300])
        assert watched.most_ids <= MAX_WINDOW_TOKENS + 1, name
        assert "".join(out) == awkward_tokenizer.decode(ids * 300), name
        assert len(out[-1]) <= 3, f"{name}: text was held back for long"
    watched = WatchedTokenizer(fallback_tokenizer)
    out = pieces(watched, [[7 + 0xFF] for _ in range(300)])
    assert watched.most_ids <= MAX_WINDOW_TOKENS + 1
    assert len("".join(out)) == 300


def test_hidden_tokens_do_not_eat_the_space_after_them(fallback_tokenizer: Tokenizer) -> None:
    end = next(iter(fallback_tokenizer.special_token_ids))
    ids = [1, *[end] * 30, 1, 2]
    assert "".join(pieces(fallback_tokenizer, [[token_id] for token_id in ids])) == "hello hello a"
