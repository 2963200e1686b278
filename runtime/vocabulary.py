"""What a drafter's ids are among the target's: it may know the most frequent tokens only."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from specedge.bundle import Bundle
from specedge.errors import SpecedgeError
from specedge.manifest import VOCABULARY, Head, Role
from specedge.runtime.law import Ids
from specedge.runtime.sample import Logits


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """`ids` [Vd] are the target's for a drafter's own, ascending; `rows` of logits the target has, None: as many."""

    ids: Ids
    rows: int | None

    @classmethod
    def whole(cls, size: int) -> Self:
        """The same ids."""
        return cls(np.arange(size), None)

    @classmethod
    def of(cls, bundle: Bundle, drafter: Role | Head) -> Self:
        """A drafter's in a bundle."""
        stored = next((weight for weight in drafter.weights if weight.name == VOCABULARY), None)
        if stored is None:
            return cls.whole(drafter.vocab_size)
        extent, path, rows = stored.parts["values"], bundle.file(stored.file), bundle.role("target").vocab_size
        ids = np.fromfile(path, extent.dtype, extent.shape[0], offset=extent.offset).astype(np.intp)
        if ids[0] < 0 or ids[-1] >= rows or (np.diff(ids) <= 0).any():
            raise SpecedgeError(f"{path}: {VOCABULARY}: expected ascending ids from 0 to {rows - 1}; copy the bundle again")
        return cls(ids, rows)

    def widen(self, logits: npt.NDArray[Any]) -> Logits:
        """A row [Vd], or rows, as ones of the target's ids [V]: those that cannot be drafted have no probability."""
        if self.rows is None:
            return logits.astype(np.float32, copy=False)
        rows = np.full((*logits.shape[:-1], self.rows), -np.inf, np.float32)
        rows[..., self.ids] = logits
        return rows
