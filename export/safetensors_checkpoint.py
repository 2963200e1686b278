"""A checkpoint in a Hugging Face folder: config.json and safetensors, in one file or in shards."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from optimum.exporters.tasks import TasksManager
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from specedge.errors import SpecedgeError
from specedge.export import tokenizer_files
from specedge.export.families import DecoderConfig, read_config, require_supported, tensor_names
from specedge.export.packed_grid import PackedMatrix, Tensor, empty_biases, join_parts
from specedge.export.packing import read_packing
from specedge.export.safetensors_file import StoredTensor, read_header, same_values
from specedge.export.tensors import check_complete, check_finite, first_of
from specedge.export.tokenizer_files import TokenizerFiles
from specedge.quant.pack import Quantized

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True)
class SafetensorsCheckpoint:
    """See `checkpoint.Checkpoint`."""

    name: str
    license: str | None
    config: DecoderConfig
    eos_ids: tuple[int, ...]
    bos_id: int | None
    folder: Path
    weights: str  # the file in `folder` that transformers loads: the index where there is one
    stored: Mapping[str, Tensor]  # by canonical name
    tokenizer: TokenizerFiles | None

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        stored = self.stored[name]
        values = stored.read()
        check_finite(str(stored.path), stored.name, values)
        return values

    def stored_type(self, name: str) -> str:
        return self.stored[name].dtype

    def grid(self, name: str) -> Quantized | None:
        stored = self.stored[name]
        return stored.grid() if isinstance(stored, PackedMatrix) else None

    def save_tokenizer(self, folder: Path) -> bool:
        if self.tokenizer is not None:
            self.tokenizer.save(folder)
        return self.tokenizer is not None

    def load_reference(self) -> PreTrainedModel:
        """Packed matrices come dequantised by our own code: transformers itself needs GPTQModel or AutoAWQ for them."""
        config = _load_config(self.folder)
        settings: dict[str, Any] = {
            "config": config,
            "dtype": torch.float32,
            "attn_implementation": "eager",
            "use_safetensors": True,
            "trust_remote_code": False,
            "local_files_only": True,
        }
        model: PreTrainedModel
        if any(isinstance(stored, PackedMatrix) for stored in self.stored.values()):
            del config.quantization_config
            names = tensor_names(self.config)
            state = {key: torch.from_numpy(self.tensor(name)) for name, (key, _) in names.items()}
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # the Auto class takes no None
            model = model_class.from_pretrained(None, state_dict=state, **settings)
        else:
            config.transformers_weights = self.weights  # by itself it prefers a stray model.safetensors to the index
            model = AutoModelForCausalLM.from_pretrained(self.folder, **settings)
        model.eval()
        return model


def open_folder(folder: Path, name: str) -> SafetensorsCheckpoint:
    """Check a folder without reading its weights."""
    _check_settings(folder)
    source = folder / "config.json"
    packing = read_packing(_read_json(source), str(source))
    config = read_config(_load_config(folder), str(source))
    weights, stored = _read_tensors(folder, integers=packing is not None)
    tensors: Mapping[str, Tensor] = stored if packing is None else join_parts(stored, packing)
    expected = tensor_names(config)
    ignored = _ignored(folder, config, tensors) | empty_biases(tensors, {key for key, _ in expected.values()})
    shapes = {key: tensor.shape for key, tensor in tensors.items() if key not in ignored}
    check_complete(str(folder), config, expected, shapes)
    tokenizer = tokenizer_files.read_folder(folder)
    bos_ids = tokenizer.special_ids("bos_token") if tokenizer else ()
    return SafetensorsCheckpoint(
        name=name,
        license=read_license(folder / "README.md"),
        config=config,
        eos_ids=_chosen_ids(folder, "eos_token_id") or (tokenizer.special_ids("eos_token") if tokenizer else ()),
        bos_id=next(iter(bos_ids or _chosen_ids(folder, "bos_token_id")), None),
        folder=folder,
        weights=weights,
        stored={canonical: tensors[key] for canonical, (key, _) in expected.items()},
        tokenizer=tokenizer,
    )


def _check_settings(folder: Path) -> None:
    """Refuse what is no plain text-generating decoder of a supported type."""
    source = folder / "config.json"
    settings = _read_json(source)
    require_supported(settings.get("model_type"), str(source), remote_code="auto_map" in settings)
    if (folder / "adapter_config.json").is_file():
        raise SpecedgeError(f"{folder}: adapter_config.json: a PEFT adapter; merge it into its base model first")
    for architecture in settings.get("architectures") or ():
        task = _task_of(architecture)
        if task != "text-generation":
            raise SpecedgeError(
                f"{source}: architectures: {architecture} is a model for {task or 'an unknown task'}, expected one for "
                "text-generation such as LlamaForCausalLM"
            )


def _task_of(architecture: str) -> str | None:
    try:
        return str(TasksManager.infer_task_from_model(getattr(transformers, architecture)))
    except (AttributeError, TypeError, ValueError):  # not a class of transformers, or one without a task
        return None


def _load_config(folder: Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (StrictDataclassError, ArithmeticError, AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise SpecedgeError(f"{folder / 'config.json'}: transformers refuses it: {' '.join(str(error).split())}") from error
    return config


def _read_tensors(folder: Path, integers: bool) -> tuple[str, dict[str, StoredTensor]]:
    """The file that names the weights, and every tensor by its name in the checkpoint; only headers are read."""
    if (folder / _INDEX).is_file():
        return _INDEX, _read_shards(folder, integers)
    if (folder / _SINGLE).is_file():
        return _SINGLE, read_header(folder / _SINGLE, integers)
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        raise SpecedgeError(
            f"{folder}: {first_of(pickles)}: pickled weights can run code, so specedge never loads them; "
            "use the safetensors form of this model"
        )
    raise SpecedgeError(f"{folder}: neither {_SINGLE} nor {_INDEX}: no weights as safetensors; download them")


def _read_shards(folder: Path, integers: bool) -> dict[str, StoredTensor]:
    index = folder / _INDEX
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise SpecedgeError(f"{index}: weight_map: expected a tensor's name and its shard's, found {type(places).__name__}")
    shards = sorted(set(places.values()))
    if strange := [shard for shard in shards if Path(shard).name != shard]:
        raise SpecedgeError(f"{index}: weight_map: {strange[0]!r} is not the name of a file in this folder")
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise SpecedgeError(f"{folder}: missing {', '.join(missing)}, named in {_INDEX}; download the checkpoint again")
    headers = {shard: read_header(folder / shard, integers) for shard in shards}
    if absent := [name for name, shard in places.items() if name not in headers[shard]]:
        raise SpecedgeError(f"{folder / places[absent[0]]}: missing tensor: {first_of(absent)}, named in {_INDEX}")
    unlisted = [(name, shard) for shard in shards for name in headers[shard] if places.get(name) != shard]
    if unlisted:
        names = first_of(name for name, _ in unlisted)
        raise SpecedgeError(f"{index}: weight_map does not list {names}, which {unlisted[0][1]} holds; the index is damaged")
    return {name: headers[shard][name] for name, shard in places.items()}


def _ignored(folder: Path, config: DecoderConfig, tensors: Mapping[str, Tensor]) -> set[str]:
    """Known tensors that carry nothing: rotary tables, and a second copy of a tied embedding, which must be equal."""
    ignored = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    head, embedding = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if config.tied and head and embedding:
        if isinstance(head, PackedMatrix) or isinstance(embedding, PackedMatrix) or not same_values(head, embedding):
            raise SpecedgeError(
                f"{folder}: lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings=True says "
                "they are one; set tie_word_embeddings to false in config.json, or remove lm_head.weight"
            )
        ignored.add(head.name)
    return ignored


def _chosen_ids(folder: Path, key: str) -> tuple[int, ...]:
    """The token ids under a key that may hold one, a list or nothing; generation_config.json wins over config.json."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        value = _read_json(path).get(key) if path.is_file() else None
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise SpecedgeError(f"{path}: {key}: expected a token id or a list of them, found {value!r}")
        if ids:
            return tuple(ids)
    return ()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise SpecedgeError(f"{path}: missing, so {path.parent} is no Hugging Face checkpoint")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpecedgeError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise SpecedgeError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def read_license(readme: Path) -> str | None:
    """The `license:` line of a model card's front matter."""
    if not readme.is_file():
        return None
    front = re.match(r"---\s*\n(.*?)\n---", readme.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    line = re.search(r"^license:\s*(\S+)", front[1], re.MULTILINE) if front else None
    return line[1].strip("\"'") if line else None
