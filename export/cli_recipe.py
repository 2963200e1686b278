"""The options of `convert` that say how weights are stored, read into recipes."""

from dataclasses import dataclass
from pathlib import Path

from specedge.devices.device import Float
from specedge.errors import UsageError
from specedge.export.calibration_text import Calibration
from specedge.export.recipe import Form, Method, Recipe
from specedge.quant.scheme import Scheme

FLOATS = {"fp32": "float32", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class Options:
    """As given on the command line; `prefix` begins their names, `draft-` for the drafter's."""

    prefix: str
    weights: str | None
    head_weights: str | None
    group: str | None
    asymmetric: bool
    method: str | None
    rotate: bool = False
    bits: float | None = None
    seed: int | None = None

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

    def recipe(self, default: str = "int4", floats: Float = "float32") -> Recipe:
        """The recipe; `default` are the weights where none were named, `floats` what the device computes in.

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
        keep = not new_grid and self.method in (None, "keep")
        method: Method = self.method if self.method in ("rtn", "clip", "gptq") else "clip"  # type: ignore[assignment]
        rotation = (self.seed or 0) if self.rotate else None
        try:
            return Recipe(self._form(weights), self._form(head), method, keep, rotation, self.bits, floats)
        except UsageError as error:
            raise UsageError(f"{self.prefix.replace('-', ' ')}{error}") from None

    def _new_grid(self) -> dict[str, bool]:
        return {
            "group": self.group is not None,
            "asymmetric": self.asymmetric,
            "rotate": self.rotate,
            "bits": self.bits is not None,
        }

    def _form(self, name: str) -> Form:
        return FLOATS[name] if name in FLOATS else Scheme.parse(name, self.group or "32", not self.asymmetric)


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
