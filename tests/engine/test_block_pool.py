from __future__ import annotations

from app.engine.block_pool import BlockPool, NoBlocks
from app.engine.prefix import Block, Prefix, digests_of


def pool(num_blocks: int = 4) -> BlockPool:
    return BlockPool(num_blocks=num_blocks, block_size=2)


def cache_full_block(blocks: BlockPool, owned: list[Block], token_ids: list[int], salt: str = "") -> None:
    parent: Prefix | str = salt
    for index, block in enumerate(owned):
        parent = blocks.cache_full_block(block, token_ids[2 * index : 2 * index + 2], parent=parent)


def test_allocated_blocks_are_distinct_and_come_back() -> None:
    blocks = pool()
    owned = blocks.allocate(4)
    assert sorted(block.block_id for block in owned) == [0, 1, 2, 3]
    assert not blocks.can_allocate(1)
    blocks.free(owned)
    assert blocks.num_free == 4


def test_a_prefix_is_found_by_its_tokens_after_its_owner_has_left() -> None:
    blocks = pool()
    owned = blocks.allocate(2)
    cache_full_block(blocks, owned, [1, 2, 3, 4])
    blocks.free(owned)
    assert blocks.match([1, 2, 3, 4, 5], salt="") == owned
    assert blocks.match([1, 2, 3, 9, 5], salt="") == owned[:1]
    assert blocks.match([9, 2, 3, 4, 5], salt="") == []


def test_a_match_goes_on_behind_what_was_found_before() -> None:
    blocks = pool()
    owned, tokens = blocks.allocate(4), [1, 2, 3, 4, 5, 6, 7, 8]
    cache_full_block(blocks, owned, tokens)
    for number in range(4):
        assert blocks.match([*tokens, 9], salt="", known=owned[:number]) == owned


def test_whoever_asks_hears_which_prefixes_can_be_found_by_digests_that_are_the_same_in_every_process() -> None:
    blocks = pool(num_blocks=2)
    owned, tokens = blocks.allocate(2), [1, 2, 3, 4]
    blocks.cache_full_block(owned[0], tokens[:2], parent="salt", tenant="a")
    heard: list[tuple[int, bool]] = []
    blocks.on_prefixes(lambda prefix, is_held: heard.append((prefix.digest, is_held)))
    first, second = digests_of([*tokens, 5], salt="salt", block_size=2)
    assert heard == [(first, True)]
    prefixes = blocks.find(tokens, "salt")
    blocks.cache_full_block(owned[1], tokens[2:], parent=prefixes[0])
    assert heard[1:] == [(second, True)]
    assert blocks.find([*tokens, 5], "salt")[:1] == prefixes
    assert blocks.find(tokens, "salt")[1].digest == second
    assert blocks.find(tokens, "") == []
    assert (prefixes[0].tenant, prefixes[0].block, prefixes[0].is_held) == ("a", owned[0], True)
    blocks.free(owned)
    blocks.allocate(1)
    assert heard[2:] == [(second, False)], "the end goes first"
    blocks.clear_cache()
    assert heard[3:] == [(first, False)]
    assert not prefixes[0].is_held
    assert first not in digests_of(tokens, salt="", block_size=2)


def test_a_full_hit_leaves_one_token_to_compute() -> None:
    blocks = pool()
    owned = blocks.allocate(2)
    cache_full_block(blocks, owned, [1, 2, 3, 4])
    assert blocks.match([1, 2, 3, 4], salt="") == owned[:1]


def test_the_same_block_content_after_another_prefix_is_not_a_hit() -> None:
    blocks = pool()
    first, second = blocks.allocate(2), blocks.allocate(2)
    cache_full_block(blocks, first, [1, 2, 3, 4])
    cache_full_block(blocks, second, [7, 8, 3, 4])
    assert blocks.match([7, 8, 3, 4, 0], salt="") == second


def test_prefixes_of_another_salt_are_never_found() -> None:
    blocks = pool()
    owned = blocks.allocate(1)
    cache_full_block(blocks, owned, [1, 2], salt="tenant a")
    assert blocks.match([1, 2, 3], salt="tenant b") == []
    assert blocks.match([1, 2, 3], salt="tenant a") == owned


def test_shared_blocks_are_freed_with_their_last_owner() -> None:
    blocks = pool()
    owned = blocks.allocate(2)
    cache_full_block(blocks, owned, [1, 2, 3, 4])
    blocks.share(owned)
    blocks.free(owned)
    assert blocks.num_free == 2
    blocks.free(owned)
    assert blocks.num_free == 4


def test_the_longest_unused_prefix_is_evicted_first_and_from_its_end() -> None:
    blocks = pool(num_blocks=3)
    old = blocks.allocate(2)
    cache_full_block(blocks, old, [1, 2, 3, 4])
    blocks.free(old)
    new = blocks.allocate(1)
    cache_full_block(blocks, new, [5, 6])
    blocks.free(new)
    blocks.allocate(1)
    assert blocks.match([1, 2, 3, 4, 0], salt="") == old[:1]
    assert blocks.match([5, 6, 0], salt="") == new


def test_a_second_block_with_the_same_prefix_is_not_findable_and_leaves_nothing_behind() -> None:
    blocks = pool()
    first, second = blocks.allocate(1), blocks.allocate(1)
    cache_full_block(blocks, first, [1, 2])
    cache_full_block(blocks, second, [1, 2])
    blocks.free(second)
    assert blocks.match([1, 2, 3], salt="") == first
    blocks.free(first)
    blocks.allocate(4)
    assert blocks.match([1, 2, 3], salt="") == []


def test_a_cleared_cache_finds_nothing_and_keeps_owners() -> None:
    blocks = pool()
    kept, left = blocks.allocate(1), blocks.allocate(1)
    cache_full_block(blocks, kept, [1, 2])
    cache_full_block(blocks, left, [3, 4])
    blocks.free(left)
    blocks.clear_cache()
    assert blocks.match([1, 2, 3], salt="") == blocks.match([3, 4, 5], salt="") == []
    assert blocks.num_free == 3
    blocks.free(kept)
    assert blocks.num_free == 4


def test_blocks_whose_content_was_forgotten_can_be_handed_out_again() -> None:
    """Those of a sequence that outlives the content too: it frees them later, and they have nothing to share."""
    blocks = pool(num_blocks=2)
    owned = blocks.allocate(2)
    cache_full_block(blocks, owned, [1, 2, 3, 4])
    blocks.clear_cache()
    blocks.free(owned)
    assert blocks.num_evictable == 0
    again = blocks.allocate(2)
    cache_full_block(blocks, again, [5, 6, 7, 8])
    assert blocks.match([5, 6, 7, 8, 9], salt="") == again


def test_a_pool_without_blocks_holds_a_prompt_of_any_length() -> None:
    blocks = NoBlocks(max_model_len=8)
    assert blocks.can_allocate(blocks.num_blocks_for(8))
    assert blocks.allocate(blocks.num_blocks_for(8)) == []
    assert blocks.match(range(8), salt="") == []
    assert (blocks.num_blocks, blocks.block_size) == (0, 9), "no sequence fills a block, so none is ever shared"


def windowed(num_blocks: int, *, num_window_groups: int = 2, window_tokens: int = 4) -> BlockPool:
    return BlockPool(
        num_blocks=num_blocks, block_size=2, num_window_groups=num_window_groups, window_tokens=window_tokens,
        max_chunk_tokens=6,
    )  # fmt: skip


def test_a_prefix_is_found_up_to_where_each_window_group_has_what_it_keeps() -> None:
    blocks = windowed(30)
    tokens = list(range(14))
    owned = blocks.allocate(7)
    cache_full_block(blocks, owned, tokens)
    in_windows = [blocks.allocate(7), blocks.allocate(7)]
    for at, of_all in enumerate(owned):
        assert of_all.prefix is not None
        in_each = [None if (group, at) in ((0, 6), (1, 2)) else own[at] for group, own in enumerate(in_windows)]
        blocks.cache_in_windows(in_each, of_all.prefix)
    cached = blocks.match([*tokens, 99], salt="")
    assert cached == owned
    # The token behind 12 sees tokens 9 to 11, in blocks 4 and 5; the token behind 8 would see blocks 2 and 3.
    assert blocks.with_windows(cached) == owned[:6]
    assert blocks.found_in_windows(owned[:6]) == [own[4:6] for own in in_windows]
    assert blocks.with_windows(owned[:5]) == owned[:5]
    assert blocks.with_windows(owned[:4]) == owned[:2]
    assert blocks.found_in_windows([]) == [[], []]
    for own in (owned, *in_windows):
        blocks.free(own)
    assert blocks.num_free == 30
    blocks.allocate(13)  # 11 had nothing to find; of the others the end of the prefix is evicted first
    assert blocks.match([*tokens, 99], salt="") == owned[:5]


def test_blocks_of_a_window_group_are_handed_out_like_all_others_and_forgotten() -> None:
    blocks = windowed(2, num_window_groups=1)
    first, second = blocks.allocate(2)
    prefix = blocks.cache_full_block(first, [1, 2], parent="")
    blocks.cache_in_windows([second], prefix)
    assert blocks.with_windows([first]) == [first]
    blocks.free([second])
    assert blocks.num_evictable == 1
    assert blocks.with_windows([first]) == [first], "it has its content still"
    assert blocks.allocate(1) == [second]
    assert second.window_of is None
    assert blocks.with_windows([first]) == []
    blocks.cache_in_windows([second], prefix)
    blocks.free([first, second])
    blocks.clear_cache()
    assert (first.prefix, second.window_of, blocks.num_evictable, blocks.num_free) == (None, None, 0, 2)


def test_a_sequence_alone_has_blocks_for_all_its_tokens_and_for_its_windows() -> None:
    assert BlockPool(num_blocks=9, block_size=2).max_sequence_tokens == 18
    assert windowed(9).max_sequence_tokens == 6  # three blocks in each of three groups
    # A window group has 10 blocks at most: for 4 tokens and two steps of 6, two more as these lie among blocks.
    assert windowed(30).max_sequence_tokens == 20
    blocks = windowed(42)
    assert blocks.max_sequence_tokens == 44
    assert blocks.num_blocks_after([], 44) == 22 + 2 * 10
    cached = blocks.allocate(4)
    assert blocks.num_blocks_after(cached, 44) == 18 + 2 * 8, "each group has two of those that are cached"
    assert blocks.num_blocks_after(cached, 14) == 3 + 2 * 3
