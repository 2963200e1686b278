"""Are a bundle's stored weights those of its checkpoint?"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from specedge.bundle import Bundle
from specedge.errors import SpecedgeError
from specedge.export.checkpoint import Checkpoint
from specedge.export.draft_checkpoint import DraftCheckpoint
from specedge.export.families import tensor_names
from specedge.export.report import Check, GroupError
from specedge.export.rotated import Rotated, rotate, rotation_shapes
from specedge.export.tensors import Tensors
from specedge.export.weights import read_float32
from specedge.manifest import EMBEDDING, VOCABULARY, Weight
from specedge.runtime.inspect import part_of
from specedge.runtime.vocabulary import DraftVocabulary

_ROUNDING = 1e-3  # float error allowed beyond one quantisation step, in steps
_TURNED = {"float32": 1e-6, "float16": 1e-3}  # of a rotated tensor's largest weight
_CALIBRATED = 0.5  # |stored - exact| / |exact|, Frobenius norms: calibration moves weights by several steps, but not anywhere


@dataclass(frozen=True, slots=True)
class Comparison:
    """Stored weights against a checkpoint's."""

    checks: list[Check]
    groups: list[GroupError]


def compare_model(bundle: Bundle, role: str, checkpoint: Checkpoint) -> Comparison:
    """The role's stored weights against its own checkpoint.

    Raises:
        SpecedgeError: It is another model's.
    """
    tensors, config = stored_basis(bundle, role, checkpoint), checkpoint.config
    shapes = {name: shape for name, (_, shape) in tensor_names(config).items()}
    if isinstance(tensors, Rotated):
        shapes |= rotation_shapes(tensors.config)
    checks, own = [], [weight for weight in bundle.role(role).weights if weight.name != VOCABULARY]
    if isinstance(checkpoint, DraftCheckpoint):
        del shapes[EMBEDDING]
        stored, ids = DraftVocabulary.of(bundle, bundle.role(role)).ids, checkpoint.vocabulary
        expected = np.arange(checkpoint.config.head_rows) if ids is None else ids
        checks.append(Check("draft_ids_differ", role, float(not np.array_equal(stored, expected)), 0.0))
    if {weight.name: weight.shape for weight in own} != shapes:
        raise SpecedgeError(
            f"{bundle.path}: {role} has other tensors or shapes than {checkpoint.name}; name its own checkpoint"
        )
    compared = compare_weights(role, own, bundle, tensors)
    return Comparison(compared.checks + checks, compared.groups)


def stored_basis(bundle: Bundle, role: str, checkpoint: Checkpoint) -> Tensors:
    """The checkpoint's tensors in the basis that the role's weights are stored in."""
    rotation = bundle.role(role).rotation
    return checkpoint if rotation is None else rotate(checkpoint, checkpoint.config, rotation)


def compare_weights(label: str, weights: Iterable[Weight], bundle: Bundle, tensors: Tensors) -> Comparison:
    """How many tensors changed that the manifest calls exact, and the largest difference of a stored weight.

    That is counted in quantisation steps, or from the nearest float of its type. Tensors rounded by calibration are held to
    their own as a whole, as weights are moved there to make up for others.
    """
    worst, distances, changed, quantised = [0.0], [0.0], 0, False
    sums: dict[tuple[str, str, str], npt.NDArray[np.float64]] = {}
    for weight in weights:
        values, steps = read_float32(weight, bundle.file(weight.file))
        exact = tensors.tensor(weight.name)
        changed += weight.exact and not np.array_equal(values, exact)
        lost, norm = (float(np.square(array, dtype=np.float64).sum()) for array in (values - exact, exact))
        total = sums.setdefault((part_of(weight.name), weight.scheme, weight.method), np.zeros(5))
        total += (1, 8 * weight.stored_bytes, exact.size, lost, norm)
        if weight.method == "gptq":
            distances.append(_share(lost, norm))
        elif steps is None:
            difference = np.abs(values - exact.astype(weight.scheme).astype(np.float32))
            # a rotation is multiplied out anew, and another machine's sums may go in another order
            turned = np.abs(exact).max() * _TURNED[weight.scheme] if isinstance(tensors, Rotated) else 0
            worst.append(np.maximum(difference - turned, 0).max())
        else:
            quantised = True
            unit = np.where(steps > 0, steps, np.maximum(np.abs(exact), 1e-30))  # a block of scale 0 may lose itself
            worst.append((np.abs(values - exact) / unit).max())
    limit = 1.0 + _ROUNDING if quantised else 0.0
    checks = [
        Check("exact_weights_changed", label, float(changed), 0.0),
        Check("weight_error", label, float(np.max(worst)), limit),
    ]
    calibrated = [Check("calibrated_weights_error", label, float(np.max(distances)), _CALIBRATED)]
    groups = [
        GroupError(label, *key, int(tensors), bits / size, _share(lost, norm))
        for key, (tensors, bits, size, lost, norm) in sums.items()
    ]
    return Comparison(checks + calibrated * (len(distances) > 1), groups)


def _share(lost: float, norm: float) -> float:
    """The root of squared error over squared values; of zeros, 0 if they are kept."""
    return math.sqrt(lost / norm) if norm else float(lost != 0)


@torch.no_grad()
def load_stored(model: PreTrainedModel, bundle: Bundle, role: str, checkpoint: Checkpoint) -> None:
    """Give the reference the bundle's own weights, dequantised and turned back: what is left is the graph's doing."""
    tensors = stored_basis(bundle, role, checkpoint)
    borrowed = [weight for weight in bundle.role("target").weights if weight.name == EMBEDDING]
    for weight in (*(borrowed if isinstance(checkpoint, DraftCheckpoint) else ()), *bundle.role(role).weights):
        if weight.name.startswith("rotation.") or weight.name == VOCABULARY:
            continue
        values = read_float32(weight, bundle.file(weight.file))[0]
        if isinstance(tensors, Rotated) and weight.name.startswith("layers.") and "layernorm" not in weight.name:
            values = tensors.turned_back(weight.name, values)
        name = weight.name if weight.name == "lm_head.weight" else f"model.{weight.name}"
        model.get_parameter(name).copy_(torch.from_numpy(np.ascontiguousarray(values)))
