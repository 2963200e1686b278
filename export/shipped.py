"""The target's weights as a device will have them: what its drafters learn from."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specedge.bundle import Bundle
from specedge.errors import SpecedgeError
from specedge.export.checkpoint import Checkpoint
from specedge.export.families import tensor_names
from specedge.export.plan import Plan, plan_model
from specedge.export.recipe import Recipe
from specedge.export.rotated import Rotated
from specedge.export.store import store
from specedge.export.tensors import Tensors
from specedge.export.validate_weights import stored_basis
from specedge.export.weights import read_float32
from specedge.manifest import Weight
from specedge.progress import silent
from specedge.quant.pack import Quantized


@dataclass(frozen=True, slots=True)
class Shipped:
    """A checkpoint's tensors after they were stored, dequantised: in a bundle, or as a plan would store them."""

    tensors: Tensors
    plan: Plan | None = None
    bundle: Bundle | None = None
    weights: dict[str, Weight] = field(default_factory=dict)

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        if self.bundle is not None:
            weight = self.weights[name]
            values = read_float32(weight, self.bundle.file(weight.file))[0]
            turned = isinstance(self.tensors, Rotated) and name.startswith("layers.") and "layernorm" not in name
            return self.tensors.turned_back(name, values) if turned and isinstance(self.tensors, Rotated) else values
        assert self.plan is not None
        stored = store(name, self.tensors, self.plan).values
        return stored.dequantize() if isinstance(stored, Quantized) else np.asarray(stored, np.float32)

    def stored_type(self, name: str) -> str:
        return self.tensors.stored_type(name)

    def grid(self, name: str) -> Quantized | None:
        return self.tensors.grid(name)


def shipped(checkpoint: Checkpoint, bundle: Bundle | None) -> Shipped:
    """The target of this bundle, or what `convert` stores by itself on a device that takes blocks: INT4.

    Raises:
        SpecedgeError: The bundle's target is another model.
    """
    shapes = {name: shape for name, (_, shape) in tensor_names(checkpoint.config).items()}
    if bundle is None:
        return Shipped(checkpoint, plan_model(checkpoint.config, checkpoint, shapes, Recipe(), (), "target", silent))
    weights = {weight.name: weight for weight in bundle.role("target").weights}
    if {name: weight.shape for name, weight in weights.items() if not name.startswith("rotation.")} != shapes:
        raise SpecedgeError(f"{bundle.path}: its target has other tensors than {checkpoint.name}; name its own checkpoint")
    return Shipped(stored_basis(bundle, "target", checkpoint), None, bundle, weights)
