"""What a device is to this project: one frozen row of facts, each checked."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Form = Literal["in-place", "delta"]


@dataclass(frozen=True, slots=True)
class Device:
    """One row: which provider runs the graphs, in which form, and what it may not be given.

    `verify_cost` holds (width, time of that width / time of width 1), ascending from (1, 1.0): what the first choice of gamma
    rests on before anything was measured.
    """

    name: str
    provider: str
    form: Form
    static: bool
    mask_value: float
    accuracy_level: int  # of MatMulNBits: 4 computes with int8 activations, 1 with float32
    widest_block: int  # of weights per stored scale: a larger group's scale is repeated
    embeds: bool  # whether the host looks up the embedding's rows and feeds them instead of ids
    zero_points: bool  # whether MatMulNBits takes them; without, what they add is computed from sums of x over blocks
    prepares: bool  # whether weights are kept in the user's cache in the order the kernels read them
    one_call: bool  # whether a draft model drafts faster in one call than step by step; EAGLE heads do everywhere
    default_widths: tuple[int, ...]
    verify_cost: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if self.form == "in-place" and self.static:
            raise ValueError(f"{self.name}: the in-place form has a symbolic width, so static must be False")
        if self.prepares and self.static:
            raise ValueError(f"{self.name}: each static graph would keep its own file, so prepares must be False")
        if not -65504.0 <= self.mask_value < 0.0:
            raise ValueError(f"{self.name}: mask_value {self.mask_value} must be negative and finite in float16")
        widths = [width for width, _ in self.verify_cost]
        if self.verify_cost[:1] != ((1, 1.0),) or widths != sorted(set(widths)):
            raise ValueError(f"{self.name}: verify_cost must ascend from (1, 1.0), found {self.verify_cost}")

    def cost(self, width: int) -> float:
        """Time of a step of `width` tokens over one of width 1, read off the row: linear between its points and beyond."""
        points = self.verify_cost
        for (low, low_cost), (high, high_cost) in pairwise(points):
            if width <= high or (high, high_cost) == points[-1]:
                return low_cost + (high_cost - low_cost) * (width - low) / (high - low)
        return 1.0
