"""A draft head in a GGUF file: tensors by the names they are published by, on llama.cpp's grids; its settings as metadata."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from specedge.errors import SpecedgeError
from specedge.export.gguf_checkpoint import check_types, dequantize, open_reader
from specedge.export.gguf_grid import GRIDS, read_grid, write_grid
from specedge.quant.pack import Quantized

_ARCHITECTURE = "draft-head"  # no model that llama.cpp runs
_SETTINGS = f"{_ARCHITECTURE}.config"
_INTEGERS = ("I32", "I64")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file, mapped."""

    stored: gguf.ReaderTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self.stored.shape))

    @property
    def dtype(self) -> str:
        return self.stored.tensor_type.name

    def read(self) -> npt.NDArray[np.float32]:
        values = self.stored.data if self.dtype in _INTEGERS else dequantize(self.stored)
        return np.array(values, np.float32).reshape(self.shape)

    def grid(self) -> Quantized | None:
        """Its own codes and scales, where it has some."""
        return read_grid(self.dtype, self.stored.data) if self.dtype in GRIDS else None


@dataclass(frozen=True, slots=True)
class GgufHead:
    """What a file holds."""

    settings: dict[str, Any]
    license: str | None
    tensors: dict[str, GgufTensor]


def read_gguf_head(path: Path) -> GgufHead:
    """Open a file without reading its tensors.

    Raises:
        SpecedgeError: It is damaged, or no draft head.
    """
    reader = open_reader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    if (found := metadata.get("general.architecture")) != _ARCHITECTURE:
        raise SpecedgeError(f"{path}: general.architecture {found!r}: no draft head, expected {_ARCHITECTURE!r}; see --draft")
    try:
        settings = json.loads(metadata[_SETTINGS])
    except (KeyError, TypeError, ValueError) as error:
        raise SpecedgeError(f"{path}: {_SETTINGS}: no JSON that can be read ({error}); download it again") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    check_types(path, {name: tensor for name, tensor in tensors.items() if tensor.tensor_type.name not in _INTEGERS})
    if not isinstance(settings, dict):
        raise SpecedgeError(f"{path}: {_SETTINGS}: expected a JSON object, found {type(settings).__name__}")
    return GgufHead(settings, metadata.get("general.license"), {name: GgufTensor(one) for name, one in tensors.items()})


def is_gguf_head(path: Path) -> bool:
    """Whether a GGUF file is a draft head's, not a model's."""
    field = open_reader(path).fields.get("general.architecture")
    return field is not None and field.contents() == _ARCHITECTURE


def write_gguf_head(
    path: Path,
    tensors: Mapping[str, Quantized | npt.NDArray[np.float32] | npt.NDArray[np.int32]],
    settings: Mapping[str, Any],
    license_name: str | None,
) -> None:
    """Write a file; floats in float32, `Quantized` on the grid of GGUF that its scheme is."""
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    writer.add_string(_SETTINGS, json.dumps(settings, sort_keys=True))
    if license_name:
        writer.add_license(license_name)
    for name, tensor in tensors.items():
        if isinstance(tensor, Quantized):
            kind = next(kind for kind, scheme in GRIDS.items() if scheme == tensor.scheme)
            writer.add_tensor(name, write_grid(tensor), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
