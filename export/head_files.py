"""The files of a draft head's checkpoint: its settings and tensors, from safetensors, GGUF, or a pickle of nothing else."""

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from specedge.errors import SpecedgeError
from specedge.export.gguf_head import GgufTensor, read_gguf_head
from specedge.export.hub import download, folder_name, is_hub_id
from specedge.export.safetensors_checkpoint import read_license
from specedge.export.safetensors_file import read_header
from specedge.export.tensors import check_finite, first_of
from specedge.quant.pack import Quantized

# In the order they are looked for: what the projects that publish heads write, safetensors first.
_NAMES = ("medusa_lm_head.safetensors", "model.safetensors", "model.gguf", "medusa_lm_head.pt", "pytorch_model.bin")
_PICKLES = (".pt", ".pth", ".bin", ".ckpt")
_HUB_FILES = (*_NAMES, "config.json", "README.md")


class HeadTensor(Protocol):
    """A tensor that is read when it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str:
        """By the names of safetensors: F32, BF16, I64."""
        ...

    def read(self) -> npt.NDArray[np.float32]:
        """The values as float32: exact for integers below 2^24."""
        ...


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """An open checkpoint of a head: nothing but headers read, or a pickle's tensors mapped."""

    path: Path
    name: str
    license: str | None
    settings: Mapping[str, Any]
    tensors: Mapping[str, HeadTensor]

    def grid(self, name: str) -> Quantized | None:
        """A matrix's own codes and scales, where the file has some."""
        tensor = self.tensors[name]
        return tensor.grid() if isinstance(tensor, GgufTensor) else None

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor's values, which must be finite."""
        values = self.tensors[name].read()
        check_finite(str(self.path), name, values)
        return values


def open_head(source: str) -> HeadFiles:
    """Open a head's folder, hub id or file of tensors. A pickle is loaded only if it holds tensors alone.

    Raises:
        SpecedgeError: It is damaged, no head's files are there, or a pickle holds more than tensors.
    """
    path = Path(source)
    if path.is_file():
        return _open(path, path.stem)
    if path.is_dir():
        return _open_folder(path, folder_name(path))
    if is_hub_id(source):
        return _open_folder(download(source, _HUB_FILES), source.rpartition("/")[2])
    raise SpecedgeError(f"{source}: no such file or folder, and no hub id (OWNER/NAME)")


def _open_folder(folder: Path, name: str) -> HeadFiles:
    found = [folder / file for file in _NAMES if (folder / file).is_file()]
    if not found:
        raise SpecedgeError(f"{folder}: no draft head: expected one of {', '.join(_NAMES)}")
    return _open(found[0], name)


def _open(path: Path, name: str) -> HeadFiles:
    if path.suffix == ".gguf":
        head = read_gguf_head(path)
        return HeadFiles(path, name, head.license, head.settings, head.tensors)
    folder = path.parent
    tensors = _read_pickle(path) if path.suffix in _PICKLES else read_header(path, integers=True)
    if not tensors:
        raise SpecedgeError(f"{path}: holds no tensors; download the head again")
    return HeadFiles(path, name, read_license(folder / "README.md"), _read_settings(folder / "config.json"), tensors)


def _read_settings(path: Path) -> dict[str, Any]:
    """config.json; empty without one, as early heads came alone."""
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpecedgeError(f"{path}: not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise SpecedgeError(f"{path}: expected a JSON object, found {type(settings).__name__}")
    return settings


@dataclass(frozen=True, slots=True)
class _Pickled:
    """A tensor of a pickle, mapped."""

    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def dtype(self) -> str:
        return _DTYPES[self.values.dtype]

    def read(self) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = self.values.to(torch.float32).numpy()
        return values


_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


def _read_pickle(path: Path) -> dict[str, HeadTensor]:
    """The tensors of a torch pickle, which may hold nothing but tensors by name: code in it never runs."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SpecedgeError(
            f"{path}: no pickle of tensors alone ({reason}); a pickle can run code, so nothing else is loaded: use the "
            "safetensors form of this head"
        ) from None
    if not isinstance(content, dict):
        raise SpecedgeError(f"{path}: expected tensors by name, found {type(content).__name__}")
    if strange := [str(name) for name, value in content.items() if not isinstance(value, torch.Tensor)]:
        raise SpecedgeError(f"{path}: {first_of(strange)}: expected tensors by name, nothing nested")
    for name, value in content.items():
        if value.dtype not in _DTYPES:
            raise SpecedgeError(f"{path}: {name}: dtype {value.dtype} is not supported, expected {', '.join(_DTYPES.values())}")
    return {str(name): _Pickled(value) for name, value in content.items()}
