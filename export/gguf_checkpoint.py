"""A checkpoint in a GGUF file of llama.cpp: metadata instead of a config, tensors dequantised one at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from specedge.errors import SpecedgeError
from specedge.export import tokenizer_files
from specedge.export.families import MODEL_TYPES, DecoderConfig, read_config, tensor_names
from specedge.export.gguf_grid import GRIDS, read_grid
from specedge.export.safetensors_file import LFS_POINTER
from specedge.export.tensors import check_complete, check_finite
from specedge.export.tokenizer_files import TokenizerFiles
from specedge.quant.pack import Quantized

Float32 = npt.NDArray[np.float32]

# Metadata under "llama." and the setting it becomes.
_SETTINGS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Keys that are read with a default, or say nothing about what is computed; any other is refused rather than ignored.
_OPTIONAL = (
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "vocab_size",
    "expert_count",
    "expert_used_count",
    "tensor_data_layout",
)
_MODULES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, eq=False)
class GgufCheckpoint:
    """See `checkpoint.Checkpoint`."""

    name: str
    license: str | None
    config: DecoderConfig
    eos_ids: tuple[int, ...]
    bos_id: int | None
    path: Path
    stored: Mapping[str, gguf.ReaderTensor]  # by canonical name, mapped, not read
    rope_factors: Float32 | None  # [head_dim / 2], they divide the inverse frequencies
    tokenizer: TokenizerFiles | None
    reference_config: PretrainedConfig

    def tensor(self, name: str) -> Float32:
        stored = self.stored[name]
        values = dequantize(stored)
        check_finite(str(self.path), stored.name, values)
        return self._in_order(name, values)

    def stored_type(self, name: str) -> str:
        return self.stored[name].tensor_type.name

    def grid(self, name: str) -> Quantized | None:
        stored = self.stored[name]
        if stored.tensor_type.name not in GRIDS:
            return None
        return read_grid(stored.tensor_type.name, self._in_order(name, stored.data))

    def _in_order(self, name: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Rows [N, ...] as a Hugging Face checkpoint has them."""
        if ".q_proj." in name:
            return _split_halves(rows, self.config.heads)
        if ".k_proj." in name:
            return _split_halves(rows, self.config.kv_heads)
        return rows

    def save_tokenizer(self, folder: Path) -> bool:
        if self.tokenizer is not None:
            self.tokenizer.save(folder)
        return self.tokenizer is not None

    def load_reference(self) -> PreTrainedModel:
        # The config is ours: transformers reads neither biases nor RoPE scaling from a GGUF. The tensors are its own.
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self.path.parent,
            gguf_file=self.path.name,
            config=self.reference_config,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=False,
            local_files_only=True,
        )
        if self.rope_factors is not None:  # which transformers leaves out as well
            for buffer in ("inv_freq", "original_inv_freq"):
                model.get_buffer(f"model.rotary_emb.{buffer}").div_(torch.from_numpy(self.rope_factors))
        model.eval()
        return model


def open_gguf(path: Path, name: str) -> GgufCheckpoint:
    """Check a file without reading its weights."""
    reader = open_reader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    check_types(path, tensors)
    settings = _read_settings(path, metadata, tensors)
    try:
        reference_config = LlamaConfig(**settings)
    except (StrictDataclassError, ValueError, TypeError, ArithmeticError) as error:
        raise SpecedgeError(f"{path}: transformers refuses its settings: {' '.join(str(error).split())}") from error
    stored_factors = tensors.pop(_ROPE_FACTORS, None)
    factors = None if stored_factors is None else dequantize(stored_factors)
    config = read_config(reference_config, str(path), None if factors is None else factors.tolist())
    expected = {canonical: (gguf_name(canonical), shape) for canonical, (_, shape) in tensor_names(config).items()}
    shapes = {key: tuple(int(size) for size in reversed(tensor.shape)) for key, tensor in tensors.items()}
    check_complete(str(path), config, expected, shapes)
    eos = [_token_id(path, metadata, f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot")]
    return GgufCheckpoint(
        name=name,
        license=metadata.get("general.license"),
        config=config,
        eos_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        bos_id=_token_id(path, metadata, "tokenizer.ggml.bos_token_id"),
        path=path,
        stored={canonical: tensors[key] for canonical, (key, _) in expected.items()},
        rope_factors=factors,
        tokenizer=tokenizer_files.read_gguf(path, metadata),
        reference_config=reference_config,
    )


def gguf_name(name: str) -> str:
    """The name llama.cpp gives a canonical tensor."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{_MODULES[module]}.{kind}"
    _, layer, module = module.split(".", 2)
    return f"blk.{layer}.{_MODULES[module]}.{kind}"


def open_reader(path: Path) -> gguf.GGUFReader:
    """A file whose header and tensors fit it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(LFS_POINTER):
        raise SpecedgeError(f"{path}: {size} bytes: a Git LFS pointer, not weights; run `git lfs pull`")
    if not start.startswith(b"GGUF"):
        raise SpecedgeError(
            f"{path}: {size} bytes: starts with {start[:4]!r}, expected b'GGUF'; give a GGUF file or a Hugging Face folder"
        )
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, ArithmeticError) as error:
        raise SpecedgeError(
            f"{path}: {size} bytes: its header or tensors do not fit the file ({error}); likely an interrupted "
            "download: download it again"
        ) from error


def check_types(path: Path, tensors: Mapping[str, gguf.ReaderTensor]) -> None:
    """Refuse a type whose values cannot be had."""
    for kind, name in {tensor.tensor_type: tensor.name for tensor in tensors.values()}.items():
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError as error:
            raise SpecedgeError(f"{path}: {name}: type {kind.name} cannot be dequantised; use another quantisation") from error


def _read_settings(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, gguf.ReaderTensor]) -> dict[str, Any]:
    """The arguments of a `LlamaConfig`; llama.cpp's defaults where the file may leave a key out."""
    architecture = metadata.get("general.architecture")
    if architecture not in MODEL_TYPES:
        raise SpecedgeError(
            f"{path}: general.architecture {architecture!r} is not supported; supported: {', '.join(MODEL_TYPES)}"
        )
    if (parts := metadata.get("split.count", 1)) > 1:
        raise SpecedgeError(f"{path}: split.count {parts}: one part of several; merge them with llama-gguf-split --merge")
    own = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items() if key.startswith(f"{architecture}.")}
    _check_keys(path, architecture, own)
    heads = own["attention.head_count"]
    return {setting: own[key] for key, setting in _SETTINGS.items()} | {
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": own.get("attention.key_length", own["embedding_length"] // heads),
        "vocab_size": own.get("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        "rope_parameters": _rope_parameters(own),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


def _check_keys(path: Path, architecture: str, own: Mapping[str, Any]) -> None:
    """Refuse settings that would be ignored: unknown keys, and known ones at values that are not supported."""
    if missing := [key for key in _SETTINGS if not own.get(key)]:
        raise SpecedgeError(f"{path}: {architecture}.{missing[0]}: missing or zero; download the file again")
    for key, value in own.items():
        if key not in (*_SETTINGS, *_OPTIONAL):
            raise SpecedgeError(f"{path}: {architecture}.{key}={value!r}: a setting specedge does not know")
        if isinstance(value, list):
            raise SpecedgeError(f"{path}: {architecture}.{key}={value!r}: expected one value for all layers")
    if own.get("expert_count", 0):
        raise SpecedgeError(f"{path}: {architecture}.expert_count={own['expert_count']}: experts are not supported")
    head_dim = own.get("attention.key_length", own["embedding_length"] // own["attention.head_count"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise SpecedgeError(f"{path}: {architecture}.{key}={own[key]}: expected the head dimension, {head_dim}")


def _rope_parameters(own: Mapping[str, Any]) -> dict[str, Any]:
    factor = own.get("rope.scaling.factor", 0.0)
    kind = own.get("rope.scaling.type", "linear")
    base = {"rope_theta": own.get("rope.freq_base", 10000.0)}
    if kind == "none" or (kind == "linear" and not factor):
        return base | {"rope_type": "default"}
    return base | {"rope_type": kind, "factor": factor}


def _token_id(path: Path, metadata: Mapping[str, Any], key: str) -> int | None:
    token = metadata.get(key)
    if token is not None and (type(token) is not int or token < 0):
        raise SpecedgeError(f"{path}: {key}: expected a token id, found {token!r}")
    return token


def dequantize(stored: gguf.ReaderTensor) -> Float32:
    """Its values."""
    with np.errstate(invalid="ignore"):  # infinite scales are found by check_finite
        values: Float32 = gguf.dequantize(stored.data, stored.tensor_type)
    return np.array(values) if stored.tensor_type == gguf.GGMLQuantizationType.F32 else values  # F32 is the map itself


def _split_halves(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Undo llama.cpp's interleaving of q and k: a head's rows (2i, 2i + 1) become rows i and i + head_dim / 2."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
