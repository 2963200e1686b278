"""Tensors of a checkpoint into a weight file, each in the form it was asked for."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specedge.devices.device import Device
from specedge.errors import SpecedgeError
from specedge.export.families import joined_layers
from specedge.export.request import Request
from specedge.export.weights import Stored, WeightWriter
from specedge.manifest import Weight
from specedge.progress import Progress
from specedge.quant.pack import Quantized
from specedge.quant.rounding import round_to_nearest
from specedge.quant.scheme import Scheme

WEIGHT_FILE = "weights.bin"


class Tensors(Protocol):
    """Tensors by their canonical names, read when they are asked for."""

    def tensor(self, name: str) -> npt.NDArray[np.float32]: ...
    def stored_type(self, name: str) -> str: ...
    def grid(self, name: str) -> Quantized | None: ...


def write_weights(
    label: str,
    tensors: Tensors,
    shapes: Mapping[str, tuple[int, ...]],
    path: Path,
    request: Request,
    device: Device,
    progress: Progress,
    more: Sequence[Stored] = (),
) -> list[Weight]:
    """Store every tensor of `shapes`, one in float32 at a time: matrices as asked for, vectors in the graph's own type.

    `more` is stored behind them as it is.
    """
    weights: list[Weight] = []
    progress(f"{label}: weights", 0, len(shapes))
    with WeightWriter(path, device.widest_block) as writer:
        for group in joined_layers(shapes):
            stored = []
            for name in group:
                stored.append(_store(name, tensors, _form(name, shapes[name], request), request.keep))
                progress(f"{label}: weights", len(weights) + len(stored), len(shapes))
            alike = len({tensor.scheme for tensor in stored}) == 1
            for together in [stored] if alike else [[tensor] for tensor in stored]:
                weights += writer.add(together)
        for tensor in more:
            weights += writer.add([tensor])
    return weights


def _store(name: str, tensors: Tensors, form: Scheme | str, keep: bool) -> Stored:
    """A tensor in the form it is stored in: on its own grid where that may be kept, else rounded."""
    values = tensors.tensor(name)
    stored: Quantized | npt.NDArray[np.generic]
    if isinstance(form, Scheme):
        own = tensors.grid(name) if keep else None
        stored = own if own and own.scheme.bits <= form.bits else round_to_nearest(values, form)
        exact = stored.equals(values)
    else:
        stored = _as_float(name, values, form)
        exact = np.array_equal(stored, values)
    return Stored(name, stored, tensors.stored_type(name), exact)


def _form(name: str, shape: tuple[int, ...], request: Request) -> Scheme | str:
    if len(shape) == 1:
        return request.dtype
    return request.head if name == "embed_tokens.weight" or name.endswith("lm_head.weight") else request.body


def _as_float(name: str, values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.generic]:
    largest = float(np.abs(values).max())
    if largest > float(np.finfo(dtype).max):
        raise SpecedgeError(f"{name}: holds {largest:g}, more than {dtype} can; use --weights fp32 or int8")
    return values.astype(dtype)
