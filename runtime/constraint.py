"""What an answer may be: which tokens may follow any beginning of it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]


class Constraint(Protocol):
    """Asked about beginnings of one answer, drafted ones too, in no particular order.

    The law of an answer under it is the model's with all other tokens left out and the rest normalised, token by token: the
    masked target, which every rule keeps exactly. Some token must be allowed after every beginning that can arise; an answer
    ends by an end-of-text token, so that has to be allowed where it may end. Nothing is asked behind it.
    """

    def allowed(self, answer: Sequence[int]) -> Mask:
        """[n] whether a token may follow `answer`, whose tokens were all allowed; ids from n on may not."""
