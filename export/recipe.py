"""How the weights of one model are stored, as asked for."""

from dataclasses import dataclass
from typing import Literal

from specedge.errors import UsageError
from specedge.quant.rounding import Fit, absmax, clipped
from specedge.quant.scheme import Scheme

INT4 = Scheme(4, 32)
INT8 = Scheme(8, 32)
Form = Scheme | str
"""A scheme, or the name of a float type."""
Method = Literal["rtn", "clip", "gptq"]
FITS: dict[Method, Fit] = {"rtn": absmax, "clip": clipped, "gptq": clipped}


@dataclass(frozen=True, slots=True)
class Recipe:
    """`head` is the form of embedding and LM head, `body` of all other matrices.

    With `keep`, tensors the checkpoint holds on a grid of no more bits than their Scheme has stay on it, exactly; others are
    rounded by `method`. `rotation` is the seed of a rotation of the residual stream, `bits` the average number of bits per
    weight of the matrices that 8-bit ones among them may bring it to.
    """

    body: Form = INT4
    head: Form = INT8
    method: Method = "clip"
    keep: bool = True
    rotation: int | None = None
    bits: float | None = None

    def __post_init__(self) -> None:
        if "float16" in (self.body, self.head) and self.body != self.head:
            raise UsageError(
                f"weights {self.body} with head weights {self.head}: fp16 is a whole graph's type; use it for both"
            )
        quantised = isinstance(self.body, Scheme)
        for name, given in (("method gptq", self.method == "gptq"), ("bits", self.bits is not None)):
            if given and not quantised:
                raise UsageError(f"{name}: weights {self.body} are not quantised; use int4 or leave it out")
        if self.bits is not None and isinstance(self.body, Scheme) and self.body.bits == 8:
            raise UsageError("bits: all layers have 8 already; use weights int4 or leave it out")
        if self.keep and (self.method == "gptq" or self.bits is not None):
            raise UsageError("keep: calibration is for new grids, and these would be the checkpoint's; leave one of them out")
        if self.rotation is not None and self.keep and quantised:
            raise UsageError("rotation: rotated weights lie on no grid of the checkpoint; use --method rtn, clip or gptq")

    @property
    def dtype(self) -> str:
        """Type of the graph's activations, inputs, outputs and KV."""
        return "float16" if self.body == "float16" else "float32"

    @property
    def calibrated(self) -> bool:
        """Whether it needs text."""
        return self.method == "gptq" or self.bits is not None

    def form(self, name: str, shape: tuple[int, ...]) -> Form:
        """How the tensor of this canonical name is stored; rotations and vectors are in the graph's own type."""
        if len(shape) == 1 or name.startswith("rotation."):
            return self.dtype
        return self.head if name == "embed_tokens.weight" or name.endswith("lm_head.weight") else self.body
