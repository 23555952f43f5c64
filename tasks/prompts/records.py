"""Tasks of exact texts: fill a JSON schema, copy an identifier, follow a chain of sums."""

from __future__ import annotations

import json
import random
from itertools import pairwise

from tasks.prompts.retrieval import sentence
from tasks.prompts.task import Draft, Filler, adjectives, nouns, uuids

STEPS = 6  # sums of a chain
IDENTIFIERS = 6


def schema(chance: random.Random) -> Draft:
    """Describe orders in sentences, and ask for one of them as an object of JSON."""
    goods, numbers = chance.sample(nouns(), IDENTIFIERS), chance.sample(range(1000, 10_000), IDENTIFIERS)
    orders = [
        {
            "order": f"{chance.choice('ABCDEFGH')}-{number}",
            "item": f"{chance.choice(adjectives())} {item}",
            "amount": chance.randint(2, 99),
            "paid": chance.random() < 0.5,
        }
        for item, number in zip(goods, numbers, strict=True)
    ]
    told = [
        (
            chance.random(),
            f"Order {order['order']} is for {order['amount']} pieces of {order['item']} "
            f"and is {'paid' if order['paid'] else 'not paid'}.",
        )
        for order in orders
    ]
    wanted = chance.choice(orders)
    units = Filler(lambda: sentence(chance))

    def write(count: int) -> str:
        context = "\n".join(units.around(count, told))
        return (
            f"{context}\n\nWrite the order {wanted['order']} as one line of JSON with the fields order (a string), "
            "item (a string), amount (a number) and paid (true or false).\nJSON:"
        )

    return Draft(write, json.dumps(wanted))


def copying(chance: random.Random) -> Draft:
    """Name long identifiers in a text, and ask for one, letter by letter."""
    owners, identifiers = chance.sample(nouns(), IDENTIFIERS), uuids(chance, IDENTIFIERS)
    told = [
        (chance.random(), f"The identifier of the {owner} is {identifier}.")
        for owner, identifier in zip(owners, identifiers, strict=True)
    ]
    wanted = chance.randrange(IDENTIFIERS)
    units = Filler(lambda: sentence(chance))

    def write(count: int) -> str:
        context = "\n".join(units.around(count, told))
        return f"{context}\n\nCopy the identifier of the {owners[wanted]} exactly.\nIdentifier:"

    return Draft(write, identifiers[wanted])


def arithmetic(chance: random.Random) -> Draft:
    """Give boxes more stones, or fewer, than the box before, and ask how many are in the last."""
    names = chance.sample(nouns(), STEPS + 1)
    count = chance.randint(10, 99)
    told = [f"The {names[0]} box holds {count} stones."]
    for before, name in pairwise(names):
        change = chance.randint(1, 9) * chance.choice((1, -1))
        count += change
        told.append(f"The {name} box holds {abs(change)} {'more' if change > 0 else 'fewer'} than the {before} box.")
    depths = sorted(chance.random() for _ in told)
    units = Filler(lambda: sentence(chance))

    def write(filler: int) -> str:
        context = "\n".join(units.around(filler, list(zip(depths, told, strict=True))))
        return f"{context}\n\nHow many stones does the {names[-1]} box hold?\nAnswer:"

    return Draft(write, str(count))
