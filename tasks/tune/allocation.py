"""Allocation: the bits of each layer's keys and values that make the least error in so many bytes.

The error of a whole cache is taken for the sum of the errors of its parts, each measured alone, as in KVTuner
(arXiv:2502.04420). What is left is a multiple-choice knapsack: one option a slot, the smallest sum of errors, sizes within the
budget. It is small (two slots a layer, some options each), so it is solved exactly, as a mixed-integer program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix, vstack

SCALE = 1e6  # of the sum of all errors, so that the solver's absolute tolerance of 1e-6 is nothing beside it


class Option(NamedTuple):
    """One way to store a slot: its codes, its bytes, and what it does to the output."""

    bits: int
    rotated: bool
    size: int
    error: float


def allocate(slots: Sequence[Sequence[Option]], budget: float) -> list[Option]:
    """Return an option for each slot: of those whose sizes are ``budget`` at most together, the smallest sum of errors.

    Raises:
        ValueError: even the smallest options are larger.
    """
    sizes = np.array([option.size for slot in slots for option in slot], dtype=float)
    errors = np.array([option.error for slot in slots for option in slot])
    if (fewest := sum(min(option.size for option in slot) for slot in slots)) > budget:
        raise ValueError(f"budget={budget:g}: the smallest options take {fewest}")
    owner = np.repeat(np.arange(len(slots)), [len(slot) for slot in slots])
    one_each = csr_matrix((np.ones(len(owner)), (owner, np.arange(len(owner)))))
    limits = LinearConstraint(
        vstack([one_each, csr_matrix(sizes)]), [*np.ones(len(slots)), -np.inf], [*np.ones(len(slots)), budget]
    )
    total = errors.sum()
    found = milp(
        errors * (SCALE / total) if total else errors,
        integrality=np.ones(len(owner)),
        bounds=Bounds(0, 1),
        constraints=limits,
        options={"mip_rel_gap": 0},
    )
    chosen = np.flatnonzero(found.x > 0.5)
    options = [option for slot in slots for option in slot]
    return [options[index] for index in chosen]
