"""What each ingress hears of the prompts of the others."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from app.fleet.uncomputed_prompts import MIN_NEWS_TOKENS, PromptShare, UncomputedPrompts


class Ingress:
    """Takes a report whenever there is news, and at other times."""

    def __init__(self, prompts: UncomputedPrompts) -> None:
        self.told = 0
        self.share: PromptShare = prompts.open(self.take)

    def take(self) -> None:
        self.told = self.share.take()


@pytest.mark.parametrize("seed", range(20))
def test_an_ingress_always_knows_the_prompts_of_the_others_but_for_less_than_would_be_news(seed: int) -> None:
    rng, prompts = random.Random(seed), UncomputedPrompts()
    ingresses = [Ingress(prompts) for _ in range(4)]
    open_now: dict[Ingress, Counter[str]] = {each: Counter() for each in ingresses}
    for number in range(400):
        ingress = rng.choice(ingresses)
        requests = open_now[ingress]
        match rng.randrange(8):
            case 0 | 1 | 2:
                requests[f"{number}"] = rng.choice([0, 1, 100, 300, 5000])
                ingress.share.add(f"{number}", requests[f"{number}"])
            case 3 | 4 | 5 if requests:
                request_id = rng.choice(list(requests))
                del requests[request_id]
                for _ in range(2):  # its first token, and its end
                    ingress.share.end(request_id)
            case 6:
                ingress.share.end("of another ingress")
            case 7 if rng.random() < 0.2:
                ingress.share.close()
                del open_now[ingress]
                ingresses[ingresses.index(ingress)] = new = Ingress(prompts)
                open_now[new] = Counter()
                new.take()
        for each in ingresses:
            expected = sum(of_it.total() for other, of_it in open_now.items() if other is not each)
            assert each.share.num_of_others == expected
            assert abs(each.told - expected) < MIN_NEWS_TOKENS
    for each in ingresses:
        each.share.close()
    assert (prompts.num_tokens, prompts.shares) == (0, {})


def test_an_ingress_hears_nothing_of_its_own_prompts() -> None:
    prompts = UncomputedPrompts()
    heard: list[str] = []
    share = prompts.open(lambda: heard.append("the first"))
    prompts.open(lambda: heard.append("the second"))
    share.add("a", 5000)
    assert heard == ["the second"]
