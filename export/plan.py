"""How each tensor of a model is stored, settled before anything is written: its form, and layers rounded by calibration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specedge.cachedir import cache_dir
from specedge.errors import UsageError
from specedge.export.calibrate import calibrate
from specedge.export.checkpoint import Checkpoint
from specedge.export.families import DecoderConfig, tensor_names
from specedge.export.recipe import FITS, SCALES, Form, Recipe
from specedge.export.rotated import rotate
from specedge.export.rounded_file import read_rounded
from specedge.export.sensitivity import mean_bits, measure_sensitivity, widen
from specedge.export.tensors import Tensors, fingerprint
from specedge.progress import Progress
from specedge.quant.pack import Quantized
from specedge.quant.scheme import Scheme

_SENSITIVE = 8  # documents that sensitivity is measured on


@dataclass(frozen=True, slots=True)
class Plan:
    """Every tensor's form, by canonical name, in the order they are stored; and the files of calibrated blocks."""

    recipe: Recipe
    forms: Mapping[str, Form]
    blocks: Sequence[Path] = ()

    def calibrated(self, name: str) -> Quantized | None:
        """A layer that calibration rounded."""
        if not self.blocks or not isinstance(self.forms[name], Scheme) or not name.startswith("layers."):
            return None
        return read_rounded(self.blocks[int(name.split(".")[1])], name)[name]


def plan_head(shapes: Mapping[str, tuple[int, ...]], recipe: Recipe) -> Plan:
    """Of a draft head: it stays in the target's own basis, and is rounded without calibration."""
    recipe = replace(recipe, method="rtn" if recipe.method == "rtn" else "clip", rotation=None, bits=None)
    return Plan(recipe, {name: recipe.form(name, shape) for name, shape in shapes.items()})


def check_recipe(label: str, checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Refuse, before anything long begins, what a model cannot be stored by.

    Raises:
        UsageError: It cannot be rotated, or takes more bits than the recipe allows before any layer gets 8.
    """
    shapes = {name: shape for name, (_, shape) in tensor_names(checkpoint.config).items()}
    forms = {name: recipe.form(name, shape) for name, shape in shapes.items()}
    if recipe.bits is not None and recipe.bits <= (least := mean_bits(forms, shapes)):
        raise UsageError(
            f"bits {recipe.bits}: the {label} takes {least:.2f} a weight before any layer gets 8; give more, or a larger group"
        )
    if recipe.rotation is not None:
        rotate(checkpoint, checkpoint.config, recipe.rotation)


def plan_model(
    config: DecoderConfig,
    tensors: Tensors,
    shapes: Mapping[str, tuple[int, ...]],
    recipe: Recipe,
    documents: Sequence[Sequence[int]],
    label: str,
    progress: Progress,
) -> Plan:
    """Of a decoder: where the recipe says so, sensitivity decides which layers get 8 bits, and GPTQ rounds; on `documents`."""
    forms = {name: recipe.form(name, shape) for name, shape in shapes.items()}

    def layers() -> dict[str, Scheme]:
        return {name: form for name, form in forms.items() if name.startswith("layers.") and isinstance(form, Scheme)}

    if recipe.bits is not None:
        some = documents[:_SENSITIVE]
        found = measure_sensitivity(config, tensors.tensor, layers(), FITS[recipe.method], some, label, progress)
        forms = widen(forms, shapes, found, recipe.bits)
    if recipe.method != "gptq":
        return Plan(recipe, forms)
    key, scales = fingerprint(tensors, shapes), SCALES[recipe.dtype]
    return Plan(
        recipe, forms, calibrate(config, tensors.tensor, key, layers(), scales, documents, cache_dir(), label, progress)
    )
