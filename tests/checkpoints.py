"""What the tests of checkpoints share: the same as the model, or refused in one line."""

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel

import tiny
from specedge.errors import SpecedgeError
from specedge.export.checkpoint import Checkpoint, open_checkpoint
from specedge.export.families import tensor_names
from tiny import Array

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
F32 = GGMLQuantizationType.F32
IDS = list(range(3, 40))


def check_same(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """The checkpoint's tensors are the model's, bit by bit, and so is its reference."""
    state = model.state_dict()
    for canonical, (name, shape) in tensor_names(checkpoint.config).items():
        values = checkpoint.tensor(canonical)
        assert values.dtype == np.float32
        assert values.shape == shape
        np.testing.assert_array_equal(values, state[name].float().numpy(), err_msg=name)
    reference = checkpoint.load_reference()
    assert (reference.dtype, reference.training, reference.config._attn_implementation) == (torch.float32, False, "eager")
    np.testing.assert_allclose(tiny.hf_logits(reference, IDS), tiny.hf_logits(model, IDS), atol=1e-5)


def refuse(model: Path | str, *parts: str) -> None:
    """Opening fails with one line that has all the parts."""
    with pytest.raises(SpecedgeError) as caught:
        open_checkpoint(str(model))
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message


def damaged(source: Path, folder: Path, value: float) -> Path:
    """A copy of an F-RAND folder with one bad number in the last layer."""
    model = tiny.load_hf(source)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[5, 7] = value
    tiny.save_folder(model, folder)
    return folder


def rewrite_gguf(
    source: Path,
    target: Path,
    metadata: Mapping[str, Any],
    matrices: GGMLQuantizationType | Mapping[str, GGMLQuantizationType] = F32,
    pack: Callable[[Array, GGMLQuantizationType], Array] = gguf.quantize,
) -> None:
    """Copy a GGUF file; `metadata` replaces or adds keys (None drops one).

    Matrices may take another type, all or by module (`attn_q`); `pack` makes the bytes.
    """
    reader = gguf.GGUFReader(source)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    writer = gguf.GGUFWriter(target, fields.pop("general.architecture").contents())
    for key, field in fields.items():
        if key not in metadata:
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    for key, value in metadata.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        chosen = matrices.get(tensor.name.split(".")[-2], F32) if isinstance(matrices, Mapping) else matrices
        kind = chosen if tensor.data.ndim == 2 else F32
        writer.add_tensor(tensor.name, pack(np.array(tensor.data), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Where the float16 numbers of a block stand, and a size for them that makes weights of about 0.3.
_HALVES = {
    GGMLQuantizationType.Q4_0: {0: 0.05},
    GGMLQuantizationType.Q4_1: {0: 0.03, 2: 0.2},
    GGMLQuantizationType.Q8_0: {0: 0.003},
    GGMLQuantizationType.Q4_K: {0: 4e-4, 2: 3e-3},
    GGMLQuantizationType.Q6_K: {208: 1e-4},
}


def any_blocks(values: Array, kind: GGMLQuantizationType) -> Array:
    """Random blocks instead of the `values`, for `rewrite_gguf`: every code, scales of both signs, minima of any size."""
    if kind not in _HALVES:
        return gguf.quantize(values, kind)
    rng = np.random.default_rng(zlib.crc32(values.tobytes()))
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (len(values), values.shape[1] // columns, size), np.uint8)
    for start, scale in _HALVES[kind].items():
        numbers = (scale * rng.standard_normal((*blocks.shape[:2], 1))).astype("<f2")
        blocks[..., start : start + 2] = numbers.view(np.uint8)
    return blocks.reshape(len(values), -1)
