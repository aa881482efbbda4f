"""The task: name the distinct digits of a long string, in rising order.

    question  64 digits drawn from 4 to 8 distinct ones, then '='
    answer    those digits in rising order, then an end mark
    reward    the share of the answer's positions that are right

The prompt is long beside the answer, so a group of answers to one question shares most of its tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

DIGITS = "0123456789"
TOKEN = {character: number for number, character in enumerate("_$=;" + DIGITS)}
PAD, END = TOKEN["_"], TOKEN["$"]
VOCABULARY = 32
QUESTION = 64
PROMPT = QUESTION + 1  # with '='
FEWEST, MOST = 4, 8
RESPONSE = MOST + 1  # with the end mark


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str

    @property
    def prompt_tokens(self) -> list[int]:
        return [TOKEN[character] for character in self.question + "="]

    @property
    def answer_tokens(self) -> list[int]:
        return [TOKEN[character] for character in self.answer] + [END]


def problem(rng: random.Random) -> Problem:
    digits = rng.sample(DIGITS, rng.randint(FEWEST, MOST))
    question = digits + rng.choices(digits, k=QUESTION - len(digits))
    rng.shuffle(question)
    return Problem("".join(question), "".join(sorted(digits)))


def hits(response: list[int], task: Problem) -> list[float]:
    """1.0 for every position of ``response`` that agrees with the answer, else 0.0."""
    wanted = task.answer_tokens
    return [float(i < len(wanted) and token == wanted[i]) for i, token in enumerate(response)]


def reward(response: list[int], task: Problem) -> float:
    """Between 0 and 1: the share of the answer's positions that ``response`` gets right."""
    return sum(hits(response, task)) / len(task.answer_tokens)


def solved(response: list[int], task: Problem) -> bool:
    return list(response[: len(task.answer_tokens)]) == task.answer_tokens
