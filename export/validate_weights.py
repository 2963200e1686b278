"""Are a bundle's stored weights those of its checkpoint?"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from specedge.export.report import Check
from specedge.export.store import Tensors
from specedge.export.weights import read_float32
from specedge.manifest import Weight

_ROUNDING = 1e-3  # float error allowed beyond one quantisation step, in steps


def check_weights(label: str, weights: Iterable[Weight], path: Path, tensors: Tensors) -> list[Check]:
    """How many tensors changed that the manifest calls exact, and the largest difference of a stored weight.

    That is counted in quantisation steps, or from the nearest float of its type.
    """
    worst, changed, quantised = [], 0, False
    for weight in weights:
        values, steps = read_float32(weight, path)
        exact = tensors.tensor(weight.name)
        changed += weight.exact and not np.array_equal(values, exact)
        if steps is None:
            worst.append(np.abs(values - exact.astype(weight.scheme).astype(np.float32)).max())
        else:
            quantised = True
            unit = np.where(steps > 0, steps, np.maximum(np.abs(exact), 1e-30))  # a block of scale 0 may lose itself
            worst.append((np.abs(values - exact) / unit).max())
    limit = 1.0 + _ROUNDING if quantised else 0.0
    return [
        Check("exact_weights_changed", label, float(changed), 0.0),
        Check("weight_error", label, float(np.max(worst)), limit),
    ]
