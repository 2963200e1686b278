"""The options of `convert` that say how weights are stored, read into recipes."""

from dataclasses import dataclass
from pathlib import Path

from specedge.devices.device import Device
from specedge.errors import UsageError
from specedge.export.calibration_text import Calibration
from specedge.export.recipe import Form, Method, Recipe
from specedge.quant.scheme import Scheme

FLOATS = {"fp32": "float32", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class Options:
    """As given on the command line; `prefix` begins their names, `draft-` for the drafter's.

    `calibrates` says whether what they store can be calibrated: heads cannot.
    """

    prefix: str
    weights: str | None
    head_weights: str | None
    group: str | None
    asymmetric: bool
    method: str | None
    rotate: bool = False
    bits: float | None = None
    seed: int | None = None
    calibrates: bool = True

    @property
    def given(self) -> list[str]:
        """The options a person gave, by their names."""
        named = {
            "weights": self.weights,
            "group": self.group,
            "method": self.method,
            "head-weights": self.head_weights,
        }
        return [f"--{self.prefix}{name}" for name, value in named.items() if value is not None]

    def recipe(self, device: Device, default: str = "int4") -> Recipe:
        """The recipe for a device; `default` are the weights where none were named.

        With one scale per row, 4 bits are worth little unless they are calibrated.

        Raises:
            UsageError: Options contradict each other.
        """
        weights = self.weights or default
        head = self.head_weights or (weights if weights in FLOATS else "int8")
        new_grid = [f"--{self.prefix}{name}" for name, given in self._new_grid().items() if given]
        of_grids = [f"--{self.prefix}method"] * (self.method is not None) + [name for name in new_grid if name != "--rotate"]
        if of_grids and weights in FLOATS and head in FLOATS:
            raise UsageError(f"{of_grids[0]}: --{self.prefix}weights {weights} is not quantised; leave one of them out")
        if new_grid and self.method == "keep":
            raise UsageError(f"--{self.prefix}method keep: {new_grid[0]} asks for another grid; leave out one of them")
        calibrate = not device.blocks and weights == "int4" and self.calibrates
        by_default = "gptq" if calibrate else "clip" if new_grid else "keep"
        chosen = self.method or by_default
        keep = chosen == "keep"
        method: Method = "clip" if keep else chosen  # type: ignore[assignment]  # the choices of click
        rotation = (self.seed or 0) if self.rotate else None
        try:
            group = self.group or ("32" if device.blocks else "channel")
            body, lm_head = self._form(weights, group), self._form(head, group)
            return Recipe(body, lm_head, method, keep, rotation, self.bits, device.dtype)
        except UsageError as error:
            raise UsageError(f"{self.prefix.replace('-', ' ')}{error}") from None

    def _new_grid(self) -> dict[str, bool]:
        return {
            "group": self.group is not None,
            "asymmetric": self.asymmetric,
            "rotate": self.rotate,
            "bits": self.bits is not None,
        }

    def _form(self, name: str, group: str) -> Form:
        return FLOATS[name] if name in FLOATS else Scheme.parse(name, group, not self.asymmetric)


def calibration(file: Path | None, tokens: int | None, seed: int | None, *recipes: Recipe | None) -> Calibration:
    """The text that any of these recipes asks for.

    Raises:
        UsageError: None does, and yet some was given, or a seed that nothing reads.
    """
    if not any(recipe and recipe.calibrated for recipe in recipes):
        for name, given in (("calibration", file), ("calibration-tokens", tokens)):
            if given is not None:
                raise UsageError(f"--{name}: nothing is calibrated; give --method gptq or --bits, or leave it out")
        if seed is not None and not any(recipe and recipe.rotation is not None for recipe in recipes):
            raise UsageError("--seed: nothing is drawn by it; give --rotate, --method gptq or --bits, or leave it out")
    default = Calibration()
    return Calibration(file, tokens or default.tokens, seed or default.seed)
