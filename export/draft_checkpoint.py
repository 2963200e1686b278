"""A draft model that is some layers, a norm and an LM head of fewer ids: what it lacks is its target's."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from specedge.errors import SpecedgeError
from specedge.export.checkpoint import Checkpoint, open_checkpoint
from specedge.export.eagle_names import NamedTensors
from specedge.export.eagle_vocabulary import mapped_ids
from specedge.export.families import DecoderConfig, tensor_names
from specedge.export.gguf_head import is_gguf_head
from specedge.export.head_files import HeadFiles, open_head
from specedge.export.hub import download, is_hub_id
from specedge.export.tensors import check_complete
from specedge.manifest import EMBEDDING
from specedge.quant.pack import Quantized

BORROWS = "borrows_from_target"
"""The key of config.json that lists what such a draft model lacks."""
_MAPS = ("d2t", "t2d")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "model.gguf", "tokenizer.model", "README.md")
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """See `checkpoint.Checkpoint`; everything but its own tensors is the target's."""

    target: Checkpoint
    files: HeadFiles
    config: DecoderConfig
    names: Mapping[str, str]
    """Canonical names of its own tensors -> those in the file."""
    vocabulary: npt.NDArray[np.int32] | None
    """[Vd] the target's ids of its own, strictly ascending; None: they are the same."""

    @property
    def name(self) -> str:
        return self.files.name

    @property
    def license(self) -> str | None:
        return self.files.license

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.target.eos_ids

    @property
    def bos_id(self) -> int | None:
        return self.target.bos_id

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        return self.files.read(self.names[name]) if name in self.names else self.target.tensor(name)

    def stored_type(self, name: str) -> str:
        return self.files.tensors[self.names[name]].dtype if name in self.names else self.target.stored_type(name)

    def grid(self, name: str) -> Quantized | None:
        return self.files.grid(self.names[name]) if name in self.names else self.target.grid(name)

    def save_tokenizer(self, folder: Path) -> bool:
        return self.target.save_tokenizer(folder)

    @torch.no_grad()
    def load_reference(self) -> PreTrainedModel:
        """The target's own code with these layers; logits are of the draft's ids."""
        model = self.target.load_reference()
        model.model.layers = model.model.layers[: self.config.layers]
        model.config.num_hidden_layers = self.config.layers
        head = torch.nn.Linear(self.config.hidden, self.config.head_rows, bias=False)
        model.set_output_embeddings(head)
        for name, (key, _) in tensor_names(self.config).items():
            model.get_parameter(key).copy_(torch.from_numpy(self.tensor(name)))
        return model


def open_draft(source: str, target: Checkpoint) -> Checkpoint:
    """Open a draft model: any checkpoint, or one whose config says what it borrows from this target.

    Raises:
        SpecedgeError: It is damaged, incomplete, or was not made of a target of these sizes.
    """
    path = Path(source)
    if not path.exists() and is_hub_id(source):
        path = download(source, _HUB_FILES)
    if not _borrows(path):
        return open_checkpoint(source)
    files = open_head(str(path))
    names = {name.removeprefix("model."): name for name in files.tensors if name not in _MAPS}
    layers = 1 + max((int(match[1]) for name in names if (match := _LAYER.match(name))), default=-1)
    said = files.settings.get("num_hidden_layers", layers)
    if said != layers or not layers:
        raise SpecedgeError(f"{files.path}: num_hidden_layers: {said!r}, but it holds {layers} layers; download it again")
    maps = NamedTensors(files, {name: name for name in _MAPS if name in files.tensors})
    vocabulary = mapped_ids(maps, target.config.vocab_size) if "d2t" in maps else None
    rows = None if vocabulary is None else len(vocabulary)
    config = replace(target.config, layers=layers, tied=False, drafted=rows)
    own = {name: (names.get(name, name), shape) for name, (_, shape) in tensor_names(config).items() if name != EMBEDDING}
    check_complete(str(files.path), config, own, {name: files.tensors[name].shape for name in names.values()})
    return DraftCheckpoint(target, files, config, {name: key for name, (key, _) in own.items()}, vocabulary)


def _borrows(path: Path) -> bool:
    """Whether this is a draft that lacks what its target has."""
    if path.suffix == ".gguf":
        return path.is_file() and is_gguf_head(path)
    if not (path / "config.json").is_file():
        return (path / "model.gguf").is_file() and is_gguf_head(path / "model.gguf")
    return f'"{BORROWS}"' in (path / "config.json").read_text(encoding="utf-8", errors="replace")
