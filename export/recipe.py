"""How the weights of one model are stored, as asked for."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from specedge.devices.device import Device, Float
from specedge.errors import UsageError
from specedge.quant.rounding import Fit, ScaleType, absmax, clipped
from specedge.quant.scheme import Scheme

INT4 = Scheme(4, 32)
INT8 = Scheme(8, 32)
Form = Scheme | str
"""A scheme, or the name of a float type."""
Method = Literal["rtn", "clip", "gptq"]
SCALES: dict[Float, ScaleType] = {"float32": np.float32, "float16": np.float16}
_SHORT: dict[Float, str] = {"float32": "fp32", "float16": "fp16"}
FITS: dict[Method, Fit] = {"rtn": absmax, "clip": clipped, "gptq": clipped}


@dataclass(frozen=True, slots=True)
class Recipe:
    """`head` is the form of embedding and LM head, `body` of all other matrices.

    With `keep`, tensors the checkpoint holds on a grid of no more bits than their Scheme has stay on it, exactly; others are
    rounded by `method`. `rotation` is the seed of a rotation of the residual stream, `bits` the average number of bits per
    weight of the matrices that 8-bit ones among them may bring it to. `floats` is what the device's graphs compute in, which
    float16 weights make float16 on every device; `blocks` whether they take several scales for a row.
    """

    body: Form = INT4
    head: Form = INT8
    method: Method = "clip"
    keep: bool = True
    rotation: int | None = None
    bits: float | None = None
    floats: Float = "float32"
    blocks: bool = True

    def __post_init__(self) -> None:
        for form in (self.body, self.head):
            if form not in (self.dtype, *self._schemes):
                raise UsageError(
                    f"weights {self.body} with head weights {self.head}: graphs compute in {self.dtype} here; use "
                    f"{_SHORT[self.dtype]} for floats"
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
    def dtype(self) -> Float:
        """Type of the graph's activations, inputs, outputs and KV, and of scales."""
        return "float16" if self.body == "float16" else self.floats

    @property
    def _schemes(self) -> tuple[Form, ...]:
        """The forms that are no floats; beside float16 layers there are none."""
        return tuple(form for form in (self.body, self.head) if isinstance(form, Scheme) and self.body != "float16")

    def on(self, device: Device) -> "Recipe":
        """The same for the graphs of a device.

        Raises:
            UsageError: They compute in another float type than the recipe's, take one scale per row of weights, or floats only.
        """
        for form in (self.body, self.head):
            if isinstance(form, Scheme) and not device.contrib:
                raise UsageError(f"weights {form.name}: device {device.name!r} runs floats only; use fp16 or fp32")
            if isinstance(form, Scheme) and form.group is not None and not device.blocks:
                raise UsageError(f"group {form.group}: device {device.name!r} takes one scale per row only; use channel")
        floats = "float32" if device.float32 and self.body == "float32" else device.dtype
        return replace(self, floats=floats, blocks=device.blocks)

    @property
    def calibrated(self) -> bool:
        """Whether it needs text."""
        return self.method == "gptq" or self.bits is not None

    def form(self, name: str, shape: tuple[int, ...]) -> Form:
        """How the tensor of this canonical name is stored; rotations and vectors are in the graph's own type."""
        if len(shape) == 1 or name.startswith("rotation."):
            return self.dtype
        return self.head if name == "embed_tokens.weight" or name.endswith("lm_head.weight") else self.body
