"""What the tests of checkpoints share: the same as the model, or refused in one line."""

from collections.abc import Mapping
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


def rewrite_gguf(source: Path, target: Path, metadata: Mapping[str, Any], matrices: GGMLQuantizationType = F32) -> None:
    """Copy a GGUF file; `metadata` replaces or adds keys (None drops one), matrices may take another type."""
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
        kind = matrices if tensor.data.ndim == 2 else F32
        writer.add_tensor(tensor.name, gguf.quantize(np.array(tensor.data), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
