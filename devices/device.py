"""What a device is to this project: one frozen row of facts, each checked."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from specedge.devices.operators import Operators

Form = Literal["in-place", "delta"]
Float = Literal["float32", "float16"]


Options = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Soc:
    """A system on a chip with an NPU, by its name and the numbers that its provider knows it by."""

    name: str
    model: int
    architecture: int
    source: str  # where the numbers are from


@dataclass(frozen=True, slots=True)
class Plugin:
    """An execution provider that comes in a package of its own, and the options it is opened with.

    `{folder}` in an option stands for a folder of files that are read once, `{model}` and `{architecture}` for the SoC's.
    """

    package: str  # its import name
    extra: str  # of this project's, which installs it
    options: Options = ()  # of every session
    sdk: str = ""  # where in it the version stands of what it is built on: module.attribute
    soc_options: Options = ()  # where it compiles for another machine than this one, or emulates it
    hardware_options: Options = ()  # on the device itself
    compile_options: Options = ()  # ahead of time
    diagnosis: Options = ()  # to learn why a node was not taken
    socs: tuple[Soc, ...] = ()  # what it compiles for; the first is emulated unless another is asked for

    def soc(self, name: str | None) -> Soc:
        """One by its name.

        Raises:
            KeyError: There is none.
        """
        return self.socs[0] if name is None else {soc.name: soc for soc in self.socs}[name]


@dataclass(frozen=True, slots=True)
class Catalog:
    """Providers that the system keeps and updates, found through a package of its own; the first of them that has a device.

    `kinds` are the hardware it is wanted for, in order, by onnxruntime's names.
    """

    package: str  # its import name
    extra: str  # of this project's, which installs it
    providers: tuple[str, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Package:
    """What a row runs instead of ONNX graphs: functions of a Core ML package, opened by Core ML, or evaluated op by op.

    `blocks` says whether a row of weights may have several scales, `evaluated` that it is not to be opened by Core ML even
    where that is here.
    """

    compute_units: str  # a name of coremltools.ComputeUnit
    target: str  # the oldest system that reads it, by its name among coremltools' targets
    macos: int  # and the oldest macOS
    widest: int | None  # the largest dimension of any tensor
    blocks: bool
    evaluated: bool = False

    def at_least(self, target: str) -> "Package":
        """The same for no older system than this one.

        Raises:
            ValueError: It is older than what the row needs, or unknown.
        """
        found = [(ios, macos) for ios, macos in _SYSTEMS if target in (ios, f"macOS{macos}")]
        if not found or found[0][1] < self.macos:
            known = ", ".join(f"{ios} (macOS{macos})" for ios, macos in _SYSTEMS if macos >= self.macos)
            raise ValueError(f"weights of 4 bits, and functions that share weights, need one of {known}")
        return replace(self, target=found[0][0])


_SYSTEMS = (("iOS15", 12), ("iOS16", 13), ("iOS17", 14), ("iOS18", 15), ("iOS26", 26))  # and the macOS of the same year


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
    dtype: Float  # of activations, inputs, outputs and KV; float32 rows compute fp16 weights' models in float16 all the same
    embeds: bool  # whether the host looks up the embedding's rows and feeds them instead of ids
    widest_output: int | None  # columns of logits in one output; more come out in pieces, logits_0, logits_1 ...
    ragged: bool  # whether MatMulNBits takes rows that end within a block; without, they are filled up with zeros
    pads: bool  # whether Pad can be relied on to do that; without, it is a product with zeros beside the identity
    zero_points: bool  # whether MatMulNBits takes them; without, what they add is computed from sums of x over blocks
    prepares: bool  # whether weights are kept in the user's cache in the order the kernels read them
    one_call: bool  # whether a draft model drafts faster in one call than step by step; EAGLE heads do everywhere
    default_widths: tuple[int, ...]
    verify_cost: tuple[tuple[int, float], ...]
    verified: str = "nothing"  # what of it was ever checked, and how
    whole: bool = True  # whether every node must run on the provider; one left to the CPU is an error
    contrib: bool = True  # whether it has onnxruntime's own operators: without, weights are floats
    operators: Operators | None = None  # what it takes; None where it takes all that a graph may have
    options: Options = ()  # of a provider that is part of onnxruntime; {cache} is a folder for these very graphs
    plugin: Plugin | None = None  # None: the provider is part of onnxruntime
    catalog: Catalog | None = None  # None: there is one provider, which has a name
    plans_memory: bool = True  # whether onnxruntime may plan a static graph's memory for it
    float32: bool = False  # whether a row of float16 computes in float32 as well, where weights are that
    package: Package | None = None  # None: the provider runs ONNX graphs

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

    @property
    def blocks(self) -> bool:
        """Whether a row of weights may have several scales."""
        return self.package is None or self.package.blocks

    @property
    def graph(self) -> str:
        """The form of its graphs."""
        if not self.static:
            return f"{self.form}, one of any width"
        package = "functions of one package, " if self.package else ""
        embeds = ", embeddings fed" if self.embeds else ""
        pieces = f", logits in pieces of {self.widest_output:,}" if self.widest_output else ""
        return f"{package}{self.form}, static widths{embeds}, {self.dtype}{pieces}"

    @property
    def int4(self) -> str:
        """How INT4 weights are computed with."""
        if not self.contrib:
            return "not at all"
        if self.package:
            reach = "block or channel, minima by block sums" if self.package.blocks else "channel"
            return f"{self.dtype} activations, scales per {reach}"
        activations = "int8" if self.accuracy_level == 4 else self.dtype
        return f"MatMulNBits, {activations} activations, minima by block sums" + (
            "" if self.zero_points else ", zero points too"
        )

    def cost(self, width: int) -> float:
        """Time of a step of `width` tokens over one of width 1, read off the row: linear between its points and beyond."""
        points = self.verify_cost
        for (low, low_cost), (high, high_cost) in pairwise(points):
            if width <= high or (high, high_cost) == points[-1]:
                return low_cost + (high_cost - low_cost) * (width - low) / (high - low)
        return 1.0
