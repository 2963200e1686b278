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
from specedge.export.safetensors_file import LFS_POINTER
from specedge.export.tensors import check_complete, check_finite
from specedge.export.tokenizer_files import TokenizerFiles

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
    "layers": "blk",
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
        values = np.array(gguf.dequantize(stored.data, stored.tensor_type), dtype=np.float32)
        check_finite(str(self.path), stored.name, values)
        if ".q_proj." in name:
            return _split_halves(values, self.config.heads)
        if ".k_proj." in name:
            return _split_halves(values, self.config.kv_heads)
        return values

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
            rotary = model.get_submodule("model.rotary_emb")
            factors = torch.from_numpy(self.rope_factors)
            rotary.inv_freq, rotary.original_inv_freq = rotary.inv_freq / factors, rotary.original_inv_freq / factors
        return model.eval()


def open_gguf(path: Path, name: str) -> GgufCheckpoint:
    """Check a file without reading its weights."""
    reader = _open(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _check_types(path, tensors)
    settings = _read_settings(path, metadata, tensors)
    try:
        reference_config = LlamaConfig(**settings)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise SpecedgeError(f"{path}: {' '.join(str(error).split())}") from error
    stored_factors = tensors.pop(_ROPE_FACTORS, None)
    factors = None if stored_factors is None else _dequantize(stored_factors)
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
