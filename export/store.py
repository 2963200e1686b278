"""Tensors of a checkpoint into a weight file, each in the form it was asked for."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specedge.devices.device import Device
from specedge.errors import SpecedgeError
from specedge.export.families import joined_layers
from specedge.export.plan import Plan
from specedge.export.recipe import FITS, SCALES, Recipe
from specedge.export.tensors import Tensors
from specedge.export.weights import Stored, StoredAt, WeightWriter, place_of
from specedge.manifest import EMBEDDING, VOCABULARY, Weight
from specedge.progress import Progress
from specedge.quant.pack import Quantized
from specedge.quant.rounding import round_to_nearest
from specedge.quant.scheme import Scheme

_FILE = "weights.bin"


def write_weights(
    label: str,
    tensors: Tensors,
    plan: Plan,
    folder: Path,
    device: Device,
    progress: Progress,
    more: Sequence[Stored] = (),
) -> list[Weight]:
    """Store every tensor of the plan in `folder`/`label`, one in float32 at a time; `more` is stored behind them as it is."""
    file = f"{label}/{_FILE}"
    (folder / label).mkdir()
    weights: list[Weight] = []
    progress(f"{label}: weights", 0, len(plan.forms))
    with WeightWriter(folder / file, file, device.widest_block, device.zero_points, plan.recipe.dtype) as writer:
        for group in joined_layers(plan.forms):
            stored = []
            for name in group:
                stored.append(store(name, tensors, plan))
                progress(f"{label}: weights", len(weights) + len(stored), len(plan.forms))
            alike = len({tensor.scheme for tensor in stored}) == 1
            for together in [stored] if alike else [[tensor] for tensor in stored]:
                weights += writer.add(together)
        for tensor in more:
            weights += writer.add([tensor])
    return weights


def settle(folder: Path, label: str, weights: Sequence[Weight], packed: Mapping[StoredAt, Weight]) -> tuple[Weight, ...]:
    """The weights of a model once a package holds them; of its own file, what a host reads and what the package lacks is kept.

    `packed` are packages' weights, or pieces of them, by where they were; a model that none of them holds stays as it is.
    """
    if not {weight.file for weight in weights} & {file for file, _, _ in packed}:
        return tuple(weights)
    settled, kept = [], []
    for weight in weights:
        place, pieces = place_of(weight), _pieces(weight, packed)
        if weight.name in (EMBEDDING, VOCABULARY) or not (place in packed or pieces):
            kept.append(weight)
        elif place in packed:
            weight = replace(packed[place], name=weight.name)
        else:
            weight = replace(weight, parts={}, file=pieces[0].file, pieces=tuple(piece.parts for piece in pieces))
        settled.append(weight)
    path = folder / label / _FILE
    partial = path.with_suffix(".partial")
    with WeightWriter(partial, f"{label}/{_FILE}") as writer:
        copies = {weight.name: writer.copy(weight, path) for weight in kept}
    os.replace(partial, path)
    if not kept:
        path.unlink()
        with contextlib.suppress(OSError):  # a package lies in the folder
            path.parent.rmdir()
    return tuple(copies.get(weight.name, weight) for weight in settled)


def _pieces(weight: Weight, packed: Mapping[StoredAt, Weight]) -> list[Weight]:
    """The pieces that a package holds of a weight, in the order of its rows; none unless it holds all rows."""
    first = min(weight.parts.values(), key=lambda extent: extent.offset)
    inside = [
        (place[1], piece)
        for place, piece in packed.items()
        if place[0] == weight.file and place[2] != weight.shape and first.offset <= place[1] < first.offset + first.bytes
    ]
    pieces = [piece for _, piece in sorted(inside, key=lambda one: one[0])]
    return pieces if sum(piece.shape[0] for piece in pieces) == weight.shape[0] else []


def store(name: str, tensors: Tensors, plan: Plan) -> Stored:
    """A tensor in its form: on its own grid where that may be kept, else as calibration or the recipe's method rounds it."""
    values, form, recipe = tensors.tensor(name), plan.forms[name], plan.recipe
    if not isinstance(form, Scheme):
        plain = _as_float(name, values, form)
        return Stored(
            name, plain, tensors.stored_type(name), "", np.array_equal(plain, values) and not _is_turned(name, recipe)
        )
    method, rounded = "kept", tensors.grid(name) if recipe.keep else None
    if rounded is not None and rounded.scheme.group is not None and not recipe.blocks:
        rounded = None
    rounded = rounded and _in_type(rounded, recipe.dtype)
    if rounded is None or rounded.scheme.bits > form.bits:
        method, rounded = "gptq", plan.calibrated(name)
    if rounded is None:
        method = "rtn" if recipe.method == "rtn" or form.bits == 8 else "clip"
        rounded = round_to_nearest(values, form, SCALES[recipe.dtype], FITS[recipe.method])
    return Stored(name, rounded, tensors.stored_type(name), method, rounded.equals(values) and not _is_turned(name, recipe))


def _in_type(grid: Quantized, dtype: str) -> Quantized | None:
    """The same codes with scales of the graph's type; None where one of them vanishes in it or does not fit."""
    with np.errstate(over="ignore"):
        scales = grid.scales.astype(dtype)
    if not np.isfinite(scales).all() or ((scales == 0) & (grid.scales != 0)).any():
        return None
    return replace(grid, scales=scales)


def _is_turned(name: str, recipe: Recipe) -> bool:
    """Whether it is not the checkpoint's tensor that is stored, but a rotated one."""
    return recipe.rotation is not None and name.startswith("layers.")


def _as_float(name: str, values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.generic]:
    largest = float(np.abs(values).max())
    if largest > float(np.finfo(dtype).max):
        raise SpecedgeError(f"{name}: holds {largest:g}, more than {dtype} can; use --weights fp32 or int8")
    return values.astype(dtype)
