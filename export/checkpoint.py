"""A model to export, whatever it comes as: a Hugging Face folder, a hub id or a GGUF file."""

import contextlib
import io
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from specedge.errors import SpecedgeError
from specedge.export.families import DecoderConfig
from specedge.export.gguf_checkpoint import open_gguf
from specedge.export.hub import download, folder_name, is_hub_id
from specedge.export.safetensors_checkpoint import open_folder
from specedge.quant.pack import Quantized

_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "README.md")


class Checkpoint(Protocol):
    """An open checkpoint: checked, its tensors not read yet."""

    @property
    def name(self) -> str:
        """What a person calls the model: a folder's, file's or repository's own name."""
        ...

    @property
    def license(self) -> str | None:
        """As the model card or the metadata gives it."""
        ...

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Any of these ends a text; empty if the checkpoint names none."""
        ...

    @property
    def bos_id(self) -> int | None: ...

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """The values of a canonical name (`families.tensor_names`), [out, in] for a matrix, read now.

        Raises:
            SpecedgeError: A value is NaN or infinite.
        """
        ...

    def stored_type(self, name: str) -> str:
        """The type a tensor is stored in, by its own format's name: BF16, Q4_1, GPTQ4."""
        ...

    def grid(self, name: str) -> Quantized | None:
        """A matrix's own codes and scales, if it is stored on a grid that quant/ holds exactly."""
        ...

    def save_tokenizer(self, folder: Path) -> bool:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja (if any); False without a tokenizer."""
        ...

    def load_reference(self) -> PreTrainedModel:
        """The model in transformers, float32 and eager, which reads the tensors by its own code, but for GPTQ and AWQ."""
        ...


def open_checkpoint(model: str) -> Checkpoint:
    """Open a GGUF file, a Hugging Face folder or a hub id, and check it whole: headers, config, names and shapes.

    Loads no pickle and runs no code of the checkpoint.

    Raises:
        SpecedgeError: It is damaged, incomplete, not supported, or cannot be had.
    """
    path = Path(model)
    if path.is_dir():
        return open_folder(path, folder_name(path))
    if path.is_file():
        return open_gguf(path, path.name)
    if is_hub_id(model):
        return open_folder(download(model, _HUB_FILES), model.rpartition("/")[2])
    raise SpecedgeError(f"{model}: no such file or folder, and no hub id (OWNER/NAME)")


def load_quietly(checkpoint: Checkpoint) -> PreTrainedModel:
    """The reference, without the bars transformers draws between ours."""
    with contextlib.redirect_stderr(io.StringIO()):
        return checkpoint.load_reference()
