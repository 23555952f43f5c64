"""Pareto fronts: what nothing else beats in two numbers at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def pareto(items: Iterable[Item], point: Callable[[Item], tuple[float, float]]) -> list[Item]:
    """Return those that no other beats, by their first number; smaller is better, and of equal ones the first is kept.

    Args:
        items: What is compared.
        point: The two numbers of one, e.g. bytes and KL.
    """
    front: list[Item] = []
    for one in sorted(items, key=point):
        if not front or point(one)[1] < point(front[-1])[1]:
            front.append(one)
    return front
