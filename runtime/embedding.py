"""Rows of an embedding, read from the mapped weight file: for graphs that take `input_embeds` instead of ids."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specedge.bundle import Bundle
from specedge.errors import SpecedgeError
from specedge.manifest import EMBEDDING, Extent

Array = npt.NDArray[np.generic]


INPUT = "input_embeds"


class Embedding:
    """A role's embedding, or the target's where a draft head has none; quantised rows are dequantised as they are read."""

    def __init__(self, bundle: Bundle, role_name: str) -> None:
        role = bundle.role(role_name)
        target = bundle.role("target")
        found = [(weight, owner) for owner in (role, target) for weight in owner.weights if weight.name == EMBEDDING]
        if not found:
            raise SpecedgeError(f"{bundle.path}: {role_name} has no {EMBEDDING} to feed its graphs with; convert again")
        weight, owner = found[0]
        fed = next((spec.shape[-1] for spec in role.graphs[0].inputs if spec.name == INPUT), weight.shape[-1])
        self.size = int(fed)
        self._bits, self._dtype = 4 if weight.scheme.startswith("int4") else 8, role.kv.dtype
        self._parts = {name: _map(bundle, weight.file, extent) for name, extent in weight.parts.items()}
        wanted = (target.vocab_size if role_name == "eagle" else owner.vocab_size, self.size)
        if weight.shape != wanted or not self._fits(*wanted):
            raise SpecedgeError(
                f"{bundle.path}: {EMBEDDING} is stored as {weight.shape} {weight.scheme}, expected {wanted}; convert again"
            )

    def _fits(self, rows: int, columns: int) -> bool:
        """Whether the parts are those of such a matrix."""
        shapes = {name: part.shape for name, part in self._parts.items()}
        if "values" in shapes:
            return shapes["values"] == (rows, columns)
        codes = shapes.get("codes", ())
        if len(codes) != 3 or codes[2] == 0:
            return False
        block, per_block = codes[2] * 8 // self._bits, (rows, codes[1])
        known = {"codes": (rows, *codes[1:]), "zero_points": (rows, -(-codes[1] * self._bits // 8))}
        known |= dict.fromkeys(("scales", "offsets", "minima"), per_block)
        fits = all(known.get(name) == shape for name, shape in shapes.items())
        return fits and "scales" in shapes and codes[1] == -(-columns // block)

    @classmethod
    def needed(cls, bundle: Bundle, role_name: str) -> "Embedding | None":
        """The embedding, if the role's graphs do not look ids up themselves."""
        graphs = bundle.role(role_name).graphs
        return cls(bundle, role_name) if any(spec.name == INPUT for spec in graphs[0].inputs) else None

    def rows(self, ids: Sequence[int]) -> Array:
        """[len(ids), H] in the type that the role's graphs compute in."""
        part = {name: array[np.asarray(ids, np.intp)] for name, array in self._parts.items()}
        if "values" in part:
            return part["values"].astype(self._dtype, copy=False)
        codes = _unpack(part["codes"], self._bits)  # [n, blocks, block]
        blocks, middle = codes.shape[1], np.float32(1 << (self._bits - 1))
        own_zero = "zero_points" in part and "offsets" not in part
        zero = _unpack(part["zero_points"], self._bits)[:, :blocks, None] if own_zero else middle
        values = (codes - zero) * np.asarray(part["scales"], np.float32)[:, :, None]
        if "offsets" in part:
            values += np.asarray(part["offsets"], np.float32)[:, :, None]
        rows: Array = values.reshape(len(ids), -1)[:, : self.size].astype(self._dtype)
        return rows


def _map(bundle: Bundle, file: str, extent: Extent) -> Array:
    return np.memmap(bundle.file(file), extent.dtype, "r", extent.offset, extent.shape)


def _unpack(packed: Array, bits: int) -> npt.NDArray[np.float32]:
    """Codes of the last dimension, the earlier of two 4-bit ones in the low half of a byte."""
    codes = np.asarray(packed, np.uint8)
    if bits == 4:
        codes = np.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:-1], -1)
    return codes.astype(np.float32)
