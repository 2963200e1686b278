"""How weights are stored in few bits: the only place where bits, group and symmetry are checked."""

from dataclasses import dataclass, replace
from typing import Self

from specedge.errors import SpecedgeError

BITS = {"int4": 4, "int8": 8}
GROUPS: dict[str, int | None] = {"16": 16, "32": 32, "64": 64, "128": 128, "channel": None}


@dataclass(frozen=True, slots=True)
class Scheme:
    """Weights of a matrix [N, K] as unsigned codes, with one scale per `group` columns of a row (None: one per row).

    A symmetric scheme means a weight of zero by the middle code. Otherwise every scale has the code of zero beside it or,
    with `minima`, the weight that code 0 stands for.
    """

    bits: int
    group: int | None
    symmetric: bool = True
    minima: bool = False

    def __post_init__(self) -> None:
        if self.symmetric and self.minima:
            raise ValueError("a symmetric scheme has no minima")
        if self.bits not in BITS.values():
            raise ValueError(f"bits must be 4 or 8, found {self.bits}")
        if self.group not in GROUPS.values():
            raise ValueError(f"group must be 16, 32, 64, 128 or None, found {self.group}")

    @classmethod
    def parse(cls, weights: str, group: str = "32", symmetric: bool = True) -> Self:
        """Read what a person wrote (`int4`, `channel`); raises SpecedgeError."""
        if weights not in BITS:
            raise SpecedgeError(f"weights {weights}: not supported; use int4 or int8")
        if group not in GROUPS:
            raise SpecedgeError(f"group {group}: not supported; use 16, 32, 64, 128 or channel")
        return cls(BITS[weights], GROUPS[group], symmetric)

    @classmethod
    def from_name(cls, name: str) -> Self:
        """Inverse of `name`; raises SpecedgeError."""
        match name.split("/"):
            case [weights, group]:
                return cls.parse(weights, group)
            case [weights, group, "asymmetric"]:
                return cls.parse(weights, group, symmetric=False)
            case [weights, group, "minima"]:
                return replace(cls.parse(weights, group, symmetric=False), minima=True)
        raise SpecedgeError(f"scheme {name}: not understood; expected a name such as int4/32 or int4/32/minima")

    @property
    def name(self) -> str:
        """What the manifest stores: `int4/32`, `int8/channel`, `int4/32/asymmetric`, `int4/32/minima`."""
        group = "channel" if self.group is None else str(self.group)
        kind = "" if self.symmetric else "/minima" if self.minima else "/asymmetric"
        return f"int{self.bits}/{group}{kind}"

    def __str__(self) -> str:
        return self.name

    @property
    def top_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle_code(self) -> int:
        """The code of zero where the scheme is symmetric."""
        return 1 << (self.bits - 1)

    def block(self, columns: int) -> int:
        """Columns that share a scale."""
        return self.group or columns

    def blocks(self, columns: int) -> int:
        """Scales per row; the last block may be padded."""
        return -(-columns // self.block(columns))
