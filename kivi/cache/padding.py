"""Padding: the columns of mlx-lm's batches, in which shorter sequences begin later."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


class Padding:
    """Which columns of a batch are tokens, row by row; the newest token of every row is in the last.

    mlx-lm pads sequences on the left. While it processes a prompt it may pad them on the right, and moves that padding to the
    left when the prompt has ended.

    Args:
        left: For each row, how many columns before its first token are padding.
    """

    def __init__(self, left: Sequence[int]) -> None:
        self.left = list(left)
        self.width = 0  # columns so far
        self.right = [0] * len(left)  # of the prompt that is being processed
        self.to_come: list[int] | None = None  # tokens of each row in that prompt
        self.unaligned: list[int] | None = None  # padding that each row of the last call ended with

    @property
    def offset(self) -> mx.array:
        """Position of the next token of each row, int32 ``[B]``; negative in left padding."""
        return mx.array([self.width - padding for padding in self.left], mx.int32)

    def announce(
        self, left: Sequence[int] | None, lengths: Sequence[int] | None, right: Sequence[int] | None, *, empty: bool
    ) -> None:
        """Take in what :meth:`kivi.cache.batch.BatchKIVICache.prepare` is told.

        Raises:
            ValueError: as said there.
        """
        for name, numbers in (("left_padding", left), ("lengths", lengths), ("right_padding", right)):
            if numbers is not None and len(numbers) != len(self.left):
                raise ValueError(f"{name} has {len(numbers)} numbers: this batch has {len(self.left)} rows")
        if left is not None:
            if not empty:
                raise ValueError("left padding can only be added to an empty BatchKIVICache")
            self.left = [old + new for old, new in zip(self.left, left, strict=True)]
        if right is not None and max(right) > 0:
            if lengths is None:
                raise ValueError("right_padding without lengths: which tokens are padding must be known")
            self.right, self.to_come = list(right), list(lengths)

    def take(self, columns: int) -> tuple[list[int], list[int]]:
        """Add the columns of a call; return for each row how many of them come before its tokens, and how many are tokens."""
        skipped = [min(columns, max(0, padding - self.width)) for padding in self.left]
        taken = [columns - skip for skip in skipped]
        if self.to_come is not None:
            taken = [min(count, left) for count, left in zip(taken, self.to_come, strict=True)]
            self.to_come = [left - count for left, count in zip(self.to_come, taken, strict=True)]
            self.unaligned = [columns - skip - count for skip, count in zip(skipped, taken, strict=True)]
        self.width += columns
        return skipped, taken

    def align(self) -> list[int] | None:
        """Return by how much each row's newest tokens must move right, and take them as moved; None if none must."""
        moves, self.unaligned = self.unaligned, None
        return moves if moves is not None and any(moves) else None

    def end_prompt(self) -> None:
        """Move a prompt's padding from the right to the left."""
        self.left = [left + right for left, right in zip(self.left, self.right, strict=True)]
        self.right = [0] * len(self.left)
        self.to_come = None

    def require_whole_prompt(self, what: str) -> None:
        """Refuse ``what`` in the middle of a prompt that is padded on the right.

        Raises:
            ValueError: a prompt has not ended.
        """
        if self.to_come is not None:
            raise ValueError(f"a batch in the middle of a padded prompt cannot be {what}: call finalize() first")

    def trim(self, n: int) -> None:
        """Forget the newest ``n`` columns; padding among them does not come again, padding that is to come still does."""
        before, self.width = self.width, self.width - n
        self.left = [left if left > before else min(left, self.width) for left in self.left]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep ``rows`` in this order, and no more padding than they need."""
        self.right = [self.right[row] for row in rows]
        self.left = [self.left[row] for row in rows]
        self.to_come = None if self.to_come is None else [self.to_come[row] for row in rows]
        common = max(0, min(self.width, *self.left))
        self.left = [padding - common for padding in self.left]
        self.width -= common

    def extend(self, others: Sequence[Padding]) -> None:
        """Add the rows of ``others`` after one's own, all as wide as the widest."""
        every = [self, *others]
        width = max(padding.width for padding in every)
        self.left = [width - padding.width + left for padding in every for left in padding.left]
        self.right = [0] * len(self.left)
        self.width = width
