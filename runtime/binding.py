"""What runs a graph looks like to those that feed it, whoever runs it."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


class Binding(Protocol):
    """Inputs and outputs tied to the caller's contiguous arrays: a run reads the ones and writes the others."""

    def input(self, name: str, array: Array) -> None: ...

    def output(self, name: str, array: Array) -> None: ...

    def run(self) -> None: ...


class OpenGraph(Protocol):
    """A graph opened on a device."""

    @property
    def nodes(self) -> dict[str, int]:
        """How many nodes which provider took, where several may."""

    def bind(self) -> Binding:
        """Fresh bindings of its inputs and outputs."""
