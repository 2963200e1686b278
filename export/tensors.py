"""What every checkpoint's tensors must pass: all there, of the right shape, all used, all finite."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specedge.errors import SpecedgeError
from specedge.export.families import DecoderConfig, shape_origin
from specedge.quant.pack import Quantized

Shape = tuple[int, ...]


class Tensors(Protocol):
    """Tensors by their canonical names, read when they are asked for."""

    def tensor(self, name: str) -> npt.NDArray[np.float32]: ...
    def stored_type(self, name: str) -> str: ...
    def grid(self, name: str) -> Quantized | None: ...


def check_complete(
    source: str, config: DecoderConfig, expected: Mapping[str, tuple[str, Shape]], found: Mapping[str, Shape]
) -> None:
    """Compare the shapes `found` in a checkpoint with those `expected` (as `families.tensor_names` gives them)."""
    settings = (
        f"num_hidden_layers={config.layers}, attention_bias={config.attention_bias}, mlp_bias={config.mlp_bias}, "
        f"tie_word_embeddings={config.tied}"
    )
    if missing := [name for name, _ in expected.values() if name not in found]:
        raise SpecedgeError(
            f"{source}: missing tensor: {first_of(missing)}, expected from {settings}; "
            "correct the config or download the checkpoint again"
        )
    for canonical, (name, shape) in expected.items():
        if found[name] != shape:
            raise SpecedgeError(
                f"{source}: {name}: expected shape {shape} from {shape_origin(config, canonical)}, "
                f"found {found[name]}; correct the config or download the checkpoint again"
            )
    used = {name for name, _ in expected.values()}
    if unused := [name for name in found if name not in used]:
        raise SpecedgeError(
            f"{source}: unused tensor: {first_of(unused)}; a {config.model_type} with {settings} has no place for it, "
            "so the export would not compute what this checkpoint does"
        )


def check_finite(source: str, name: str, values: npt.NDArray[np.float32]) -> None:
    """Refuse NaN and infinity, naming the first one."""
    finite = np.isfinite(values)
    if not finite.all():
        first = np.unravel_index(int(finite.argmin()), values.shape)
        index = ", ".join(str(int(position)) for position in first)
        raise SpecedgeError(
            f"{source}: {name}[{index}]: expected finite numbers, found {values[first]} "
            f"({finite.size - int(finite.sum())} such values); the checkpoint is damaged, download it again"
        )


def first_of(names: Iterable[str]) -> str:
    """The first name and how many more there are."""
    first, *others = names
    return f"{first} and {len(others)} more" if others else first


def fingerprint(tensors: Tensors, names: Iterable[str]) -> str:
    """Of a model's tensors, values and names."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensors.tensor(name)).data)
    return digest.hexdigest()[:32]
