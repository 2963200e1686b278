"""A model in a rotated basis: the same function, its outliers spread over all columns (QuaRot, Ashkboos et al. 2024)."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from specedge.errors import UsageError
from specedge.export.families import DecoderConfig
from specedge.export.tensors import Tensors
from specedge.quant.pack import Quantized
from specedge.quant.rotate import Rotation, is_hadamard_order, random_rotation

Floats = npt.NDArray[np.float32]

_PARTS = ("signs", "left", "right")
_READERS = {"q_proj": "input_layernorm", "k_proj": "input_layernorm", "v_proj": "input_layernorm"}
_READERS |= {"gate_proj": "post_attention_layernorm", "up_proj": "post_attention_layernorm"}
_WRITERS = ("o_proj", "down_proj")
_ROTATABLE = ("llama",)  # its norms stand before the sublayers, so their gains fold into what reads them


@dataclass(frozen=True, slots=True)
class Rotated:
    """The tensors of a checkpoint with the residual stream turned by R, and each head of v by a rotation of its own.

    Gains of the layers' norms are folded into the layers that read them, then their matrices become W R, those of o_proj and
    down_proj R^T W. Embedding, last norm and LM head stay as they are: the graph turns the embedding's rows, and turns back
    before the last norm and where a draft head reads (`decoder.Turn`). So a tied head stays tied, and `hidden` and
    `features` stay in the model's own basis. In exact arithmetic nothing changes.
    """

    base: Tensors
    config: DecoderConfig  # with its rotation
    residual: Rotation
    heads: Rotation | None  # None where no Hadamard matrix of the head dimension is known

    def tensor(self, name: str) -> Floats:
        module, _, kind = name.rpartition(".")
        part = module.rpartition(".")[2]
        if module == "rotation":
            parts: Floats = getattr(self.residual, kind)
            return parts
        if not name.startswith("layers."):
            return self.base.tensor(name)
        if part.endswith("layernorm"):
            return np.ones_like(self.base.tensor(name))
        values = self.base.tensor(name)
        if kind == "bias":
            return self._bias(part, values)
        if part in _READERS:
            block = module.rpartition(".")[0].rpartition(".")[0]
            values = self.residual.turn(values * self.base.tensor(f"{block}.{_READERS[part]}.weight"))
        if part == "v_proj":
            values = self._turn_heads(values.T, self.config.kv_heads).T
        if part == "o_proj":
            values = self._turn_heads(values, self.config.heads)
        return np.ascontiguousarray(self.residual.turn(values.T).T if part in _WRITERS else values)

    def stored_type(self, name: str) -> str:
        return "F32" if name.startswith("rotation.") else self.base.stored_type(name)

    def grid(self, name: str) -> Quantized | None:
        return None if name.startswith(("layers.", "rotation.")) else self.base.grid(name)

    def turned_back(self, name: str, values: Floats) -> Floats:
        """A matrix or bias of a layer in the model's own basis, its norm's gain still folded in."""
        module, _, kind = name.rpartition(".")
        part = module.rpartition(".")[2]
        if kind == "bias":
            return self._bias(part, values, back=True)
        if part in _READERS:
            values = self.residual.turn_back(values)
        if part in _WRITERS:
            values = self.residual.turn_back(values.T).T
        if part == "v_proj":
            values = self._turn_heads(values.T, self.config.kv_heads, back=True).T
        if part == "o_proj":
            values = self._turn_heads(values, self.config.heads, back=True)
        return values

    def _bias(self, part: str, values: Floats, back: bool = False) -> Floats:
        if part in _WRITERS:
            return self.residual.turn_back(values) if back else self.residual.turn(values)
        return self._turn_heads(values, self.config.kv_heads, back) if part == "v_proj" else values

    def _turn_heads(self, rows: Floats, heads: int, back: bool = False) -> Floats:
        """Rows [..., heads * D], every head turned."""
        if self.heads is None:
            return rows
        split = rows.reshape(*rows.shape[:-1], heads, -1)
        return (self.heads.turn_back(split) if back else self.heads.turn(split)).reshape(rows.shape)


def rotate(base: Tensors, config: DecoderConfig, seed: int) -> Rotated:
    """The model turned by the rotation of `seed`.

    Raises:
        UsageError: Norms of this family stand behind the sublayers, or no Hadamard matrix of its hidden size is known.
    """
    if config.model_type not in _ROTATABLE:
        raise UsageError(
            f"rotation: model_type {config.model_type!r} has norms behind its sublayers, which do not commute with a rotation; "
            f"leave it out (it works for {', '.join(_ROTATABLE)})"
        )
    try:
        residual = random_rotation(config.hidden, seed)
    except ValueError as error:
        raise UsageError(f"rotation: hidden_size {config.hidden}: {error}; leave it out") from error
    heads = random_rotation(config.head_dim, seed) if is_hadamard_order(config.head_dim) else None
    sizes = (len(residual.left), len(residual.right))
    return Rotated(base, replace(config, rotation=sizes), residual, heads)


def rotation_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of the rotation itself; none for a model that is not rotated."""
    if config.rotation is None:
        return {}
    left, right = config.rotation
    return {"rotation.signs": (left * right,), "rotation.left": (left, left), "rotation.right": (right, right)}
