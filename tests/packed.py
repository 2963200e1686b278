"""Matrices packed as AutoGPTQ and AutoAWQ store them, bit by bit, from codes, zero points and scales that are known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import tiny
from tiny import Array

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # packing_utils.py of AutoAWQ: the column in each field of an integer


@dataclass(frozen=True)
class Kind:
    """How a checkpoint is packed: the settings of its quantization_config."""

    layout: str  # gptq, gptq_v2, awq
    bits: int
    group: int
    symmetric: bool

    def __str__(self) -> str:
        return f"{self.layout}-int{self.bits}-{self.group}-{'symmetric' if self.symmetric else 'asymmetric'}"

    @property
    def config(self) -> dict[str, Any]:
        shared = {"bits": self.bits, "group_size": self.group, "modules_to_not_convert": None}
        if self.layout == "awq":
            return shared | {"quant_method": "awq", "version": "gemm", "zero_point": not self.symmetric}
        return shared | {"quant_method": "gptq", "checkpoint_format": self.layout, "sym": self.symmetric, "desc_act": False}

    @property
    def stored_type(self) -> str:
        return f"{'AWQ' if self.layout == 'awq' else 'GPTQ'}{self.bits}"

    @property
    def scheme(self) -> str:
        name = f"int{self.bits}/{'channel' if self.group == -1 else self.group}"
        return name if self.symmetric else f"{name}/asymmetric"


@dataclass(frozen=True, eq=False)
class Truth:
    """What a packed matrix holds."""

    kind: Kind
    codes: Array  # [N, K]
    zeros: Array  # [N, groups]
    scales: Array  # [N, groups], float16
    groups: Array  # [K]

    @property
    def values(self) -> Array:
        """(code - zero) * scale, weight by weight, in float64."""
        values = np.empty(self.codes.shape)
        for row, column in np.ndindex(values.shape):
            group = self.groups[column]
            whole = int(self.codes[row, column]) - int(self.zeros[row, group])
            values[row, column] = whole * float(self.scales[row, group])
        return values

    def in_order(self, groups: Array) -> "Truth":
        """Other columns share the scales."""
        return replace(self, groups=groups)

    def pack(self) -> dict[str, Array]:
        """The tensors of the matrix, by the last part of their names."""
        bits, (rows, columns) = self.kind.bits, self.codes.shape
        scales = np.ascontiguousarray(self.scales.T)
        if self.kind.layout == "awq":
            return {
                "qweight": np.stack([pack_awq(self.codes[:, column]) for column in range(columns)]),
                "qzeros": np.stack([pack_awq(column) for column in self.zeros.T]),
                "scales": scales,
            }
        less = 0 if self.kind.layout == "gptq_v2" else 1
        return {
            "qweight": np.stack([pack_bits(self.codes[row], bits) for row in range(rows)], axis=1),
            "qzeros": np.stack([pack_bits(column - less, bits) for column in self.zeros.T]),
            "scales": scales,
            "g_idx": self.groups.astype(np.int32),
        }


def pack_bits(fields: Array, bits: int) -> Array:
    """Numbers one after the other into int32, the first in the lowest bits."""
    words = np.zeros(len(fields) * bits // 32, np.uint32)
    for index, field in enumerate(fields):
        for bit in range(bits):
            at = index * bits + bit
            words[at // 32] |= np.uint32((int(field) >> bit & 1) << at % 32)
    return words.view(np.int32)


def pack_awq(fields: Array) -> Array:
    """Eight 4-bit numbers into each int32, the even ones first."""
    return pack_bits(np.concatenate([[eight[column] for column in AWQ_ORDER] for eight in fields.reshape(-1, 8)]), 4)


def draw(kind: Kind, rows: int, columns: int, seed: int = 0) -> Truth:
    """Every code, zero point and sign of a scale may be there; weights are about 0.25 in size."""
    rng = np.random.default_rng(seed)
    group = columns if kind.group == -1 else kind.group
    shape = (rows, -(-columns // group))
    middle, top = 1 << kind.bits - 1, (1 << kind.bits) - 1
    zeros = rng.integers(1 if kind.layout == "gptq" else 0, top + 1, shape)
    scales = (rng.standard_normal(shape) / top).astype(np.float16)
    codes = rng.integers(0, top + 1, (rows, columns))
    return Truth(kind, codes, np.full(shape, middle) if kind.symmetric else zeros, scales, np.arange(columns) // group)


def write_packed(
    folder: Path,
    kind: Kind,
    plain: Sequence[str] = (),
    change: Callable[[str, Truth], Truth] = lambda _, truth: truth,
    **settings: Any,
) -> tuple[LlamaForCausalLM, dict[str, Truth]]:
    """F-RAND with packed linear layers, but for those whose name contains one of `plain`: the model, and what was packed."""
    model = tiny.f_rand(folder, **settings)
    tensors, packed = load_file(folder / "model.safetensors"), {}
    for seed, (name, weight) in enumerate(model.named_parameters()):
        if weight.ndim == 2 and not any(part in name for part in (*plain, "embed")):
            rows, columns = weight.shape
            truth = change(name, draw(kind, rows, columns, seed))
            with torch.no_grad():
                weight.copy_(torch.from_numpy(truth.values))
            del tensors[name]
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{part}": torch.from_numpy(array) for part, array in truth.pack().items()}
            packed[name] = truth
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tiny.edit_json(folder / "config.json", quantization_config=kind.config)
    return model, packed
