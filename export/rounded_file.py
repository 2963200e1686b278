"""Rounded layers in a file of their own, so that a long calibration is done once."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specedge.cachedir import write_whole
from specedge.quant.pack import Quantized, pack_codes, unpack_codes
from specedge.quant.scheme import Scheme

Bytes = npt.NDArray[np.uint8]


def write_rounded(path: Path, layers: Mapping[str, Quantized]) -> None:
    """Write layers by their names, whole or not at all."""
    arrays: dict[str, Any] = {}
    for name, layer in layers.items():
        arrays[f"{name}|scheme"] = np.array(layer.scheme.name)
        arrays[f"{name}|shape"] = np.array(layer.shape)
        arrays[f"{name}|codes"] = _packed(layer.codes, layer.scheme.bits)
        for part in ("scales", "zero_points", "minima"):
            if (values := getattr(layer, part)) is not None:
                arrays[f"{name}|{part}"] = values
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    write_whole(path, file.getvalue())


def is_whole(path: Path) -> bool:
    """Whether the file is there, and its checksums say that it is what was written."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, RuntimeError, zipfile.BadZipFile):
        return False


def read_rounded(path: Path, *names: str) -> dict[str, Quantized]:
    """The layers of a file, or those named."""
    with np.load(path, allow_pickle=False) as arrays:
        wanted = names or tuple(dict.fromkeys(key.partition("|")[0] for key in arrays.files))
        return {name: _read(name, arrays) for name in wanted}


def _read(name: str, arrays: Mapping[str, Any]) -> Quantized:
    scheme = Scheme.from_name(str(arrays[f"{name}|scheme"]))
    rows, columns = (int(size) for size in arrays[f"{name}|shape"])
    shape = (rows, scheme.blocks(columns), scheme.block(columns))
    parts: dict[str, Any] = {part: arrays.get(f"{name}|{part}") for part in ("scales", "zero_points", "minima")}
    return Quantized(scheme, (rows, columns), _unpacked(arrays[f"{name}|codes"], scheme.bits, shape), **parts)


def _packed(codes: Bytes, bits: int) -> Bytes:
    flat = codes.reshape(-1)
    return pack_codes(np.pad(flat, (0, flat.size % 2)), bits)


def _unpacked(stored: Bytes, bits: int, shape: tuple[int, int, int]) -> Bytes:
    return unpack_codes(stored, bits)[: np.prod(shape)].reshape(shape)
