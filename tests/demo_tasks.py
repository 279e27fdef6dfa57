"""The kinds of question the bundled model answers, each with its one right answer. No torch here.

The model was trained on these, its card reports accuracy on them, and the tests ask them over HTTP, so that "the
service works" can be judged by meaning and not by shape.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

EXACT_KINDS = ("count", "add", "spell", "reverse", "repeat")

FALLBACK = "I can count, add, spell, reverse, repeat words and tell stories."

PLACES = (
    "lighthouse garden castle forest river bridge harbor island mountain village market tower desert library "
    "meadow cave windmill farm palace school station temple valley volcano museum orchard beach jungle lake"
).split()

# Every word is spelled in single letters, so these are about 60 to 290 tokens long.
_STORIES = (
    "Once {a} lived near {b}. Every night the {x} looked at the stars and smiled.",
    "One morning {a} found {b}. The door was open and there was warm bread inside. "
    "The {x} ate it all and went to sleep.",
    "There once was {a} who wanted to see {b}. It walked for three days in the rain. "
    "When it came to the {y} the sun came out, and the {x} danced until night.",
    "Long ago {a} was lost in the snow. It saw a light far away and followed it to {b}. "
    "An old woman opened the door. Come in, she said, the soup is hot. "
    "The {x} stayed all winter.",
    "In a quiet land {a} kept a secret. Under {b} there was a box of gold. One night a thief came with a shovel. "
    "The {x} made a noise like thunder, and the thief ran away. Now the {x} sleeps on the box, "
    "and nobody comes near the {y}.",
    "Everyone said that {a} could never cross the sea. But the {x} built a small boat and sailed to {b}. "
    "The waves were tall and the wind was cold. On the third day it heard a bell. The people of the {y} "
    "waved and sang. They gave the {x} a blue hat and a bowl of fish, and it told them about home until the moon rose.",
)


@dataclass(frozen=True, slots=True)
class Question:
    """One question with the answer a right model gives greedily."""

    kind: str
    prompt: str
    answer: str


def load_words() -> list[str]:
    """The common English words of 3 to 8 letters that questions are made of."""
    return (Path(__file__).parent / "demo_words.txt").read_text().split()


def count(first: int, last: int) -> Question:
    numbers = " ".join(str(n) for n in range(first, last + 1))
    return Question("count", f"Count from {first} to {last}.", f"{numbers}.")


def add(left: int, right: int) -> Question:
    return Question("add", f"What is {left} plus {right}?", f"{left} plus {right} is {left + right}.")


def spell(word: str) -> Question:
    return Question("spell", f"Spell the word {word}.", " ".join(word) + ".")


def reverse(word: str) -> Question:
    return Question("reverse", f"Reverse the word {word}.", word[::-1] + ".")


def repeat(words: list[str]) -> Question:
    return Question("repeat", f"Repeat these words: {' '.join(words)}.", " ".join(words) + ".")


def story(character: str, place: str) -> Question:
    """The first letter of the character decides which story is told."""
    template = _STORIES[(ord(character[0]) - ord("a")) % len(_STORIES)]
    told = template.format(a=_article(character), b=_article(place), x=character, y=place)
    return Question("story", f"Tell me a story about {_article(character)} and {_article(place)}.", told)


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def random_question(rng: random.Random, words: list[str], kind: str) -> Question:
    """A question of one exact kind or a story, uniform over what that kind allows."""
    return _MAKERS[kind](rng, words)


def _random_count(rng: random.Random, _: list[str]) -> Question:
    first = rng.randint(1, 99)
    return count(first, rng.randint(first + 1, min(100, first + 39)))


def _random_add(rng: random.Random, _: list[str]) -> Question:
    return add(rng.randint(0, 20), rng.randint(0, 20))


def _random_repeat(rng: random.Random, words: list[str]) -> Question:
    return repeat(rng.sample(words, k=rng.randint(2, 12)))


def _random_story(rng: random.Random, words: list[str]) -> Question:
    return story(rng.choice(words), rng.choice(PLACES))


_MAKERS: dict[str, Callable[[random.Random, list[str]], Question]] = {
    "count": _random_count,
    "add": _random_add,
    "spell": lambda rng, words: spell(rng.choice(words)),
    "reverse": lambda rng, words: reverse(rng.choice(words)),
    "repeat": _random_repeat,
    "story": _random_story,
}


def mixed_questions(num_questions: int, seed: int = 0, kinds: tuple[str, ...] = EXACT_KINDS) -> list[Question]:
    """Questions of the given kinds in turn, over the whole word list, the same for the same seed."""
    rng, words = random.Random(f"questions-{seed}"), load_words()
    return [random_question(rng, words, kinds[i % len(kinds)]) for i in range(num_questions)]
