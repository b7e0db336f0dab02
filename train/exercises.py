"""Short questions with predictable answers: what a tiny target learns where no text is given.

Made from a seed, so that nothing has to be shipped, and easy enough that a model of half a million weights
answers correctly after a minute. Long stretches of an answer follow from its beginning, as in real text.
"""

from __future__ import annotations

import random
from collections.abc import Callable

_NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_COLOURS = ("red", "brown", "grey", "black", "white", "yellow", "green", "blue")
_ANIMALS = ("fox", "bear", "cat", "dog", "horse", "owl", "frog", "mouse", "rabbit", "goose")
_PLACES = ("the forest", "the garden", "the river", "the mountains", "a quiet village", "the old barn")
_FOODS = ("apples", "bread", "cheese", "carrots", "berries", "seeds")
_THINGS = ("lamp", "chair", "river", "garden", "window", "bottle", "market", "pencil", "bridge", "candle")

Exercise = tuple[str, str]


def _count(draw: random.Random) -> Exercise:
    first = draw.randrange(0, 14)
    last = draw.randrange(first + 3, 21)
    return f"Count from {_NUMBERS[first]} to {_NUMBERS[last]}.", f"{', '.join(_NUMBERS[first : last + 1])}."


def _days(draw: random.Random) -> Exercise:
    first, count = draw.randrange(7), draw.randrange(2, 7)
    names = [_DAYS[(first + i) % 7] for i in range(1, count + 1)]
    asked = f"Which {_NUMBERS[count]} days come after {_DAYS[first]}?"
    return asked, f"After {_DAYS[first]} come {', '.join(names[:-1])} and {names[-1]}."


def _animal(draw: random.Random) -> Exercise:
    colour, animal = draw.choice(_COLOURS), draw.choice(_ANIMALS)
    place, food = draw.choice(_PLACES), draw.choice(_FOODS)
    return (
        f"Tell me about a {colour} {animal} that lives in {place} and likes {food}.",
        f"Once there was a {colour} {animal}. The {animal} lived in {place} and looked for {food} every day.",
    )


def _spell(draw: random.Random) -> Exercise:
    word = draw.choice(_THINGS + _ANIMALS + _FOODS)
    return f"Spell the word {word}.", f"The word {word} is spelled {'-'.join(word)}."


def _repeat(draw: random.Random) -> Exercise:
    word, times = draw.choice(_THINGS), draw.randrange(2, 9)
    return f"Say {word} {_NUMBERS[times]} times.", f"{', '.join([word] * times)}."


def _sum(draw: random.Random) -> Exercise:
    a, b = draw.randrange(0, 11), draw.randrange(0, 10)
    answer = _NUMBERS[a + b]
    return (
        f"What is {_NUMBERS[a]} plus {_NUMBERS[b]}?",
        f"{_NUMBERS[a]} plus {_NUMBERS[b]} is {answer}, so the answer is {answer}.",
    )


_KINDS: tuple[Callable[[random.Random], Exercise], ...] = (_count, _days, _animal, _spell, _repeat, _sum)


def exercises(count: int, seed: int) -> list[Exercise]:
    """`count` pairs of question and answer, all kinds equally often; some occur twice."""
    draw = random.Random(seed)
    return [_KINDS[i % len(_KINDS)](draw) for i in range(count)]
