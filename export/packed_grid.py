"""Matrices that AutoGPTQ and AutoAWQ store in parts: packed codes, zero points and scales, kept exactly."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specedge.errors import SpecedgeError
from specedge.export.packing import WORD, Packing
from specedge.export.safetensors_file import StoredTensor, require_floats
from specedge.export.tensors import check_finite, first_of
from specedge.quant.pack import Bytes, Quantized, Scales, unpack_codes
from specedge.quant.scheme import Scheme

Float32 = npt.NDArray[np.float32]
Integers = npt.NDArray[np.integer]

_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [N, K] in parts: weight[n, k] = (code[n, k] - zero[n, group of k]) * scale[n, group of k].

    The layouts are those of QuantLinear.pack in AutoGPTQ's qlinear_cuda_old.py, and of WQLinear_GEMM and packing_utils.py
    in AutoAWQ; `gptq_v2`, which stores zero points as they are, is GPTQModel's. Checked as far as headers say.
    """

    name: str
    packing: Packing
    qweight: StoredTensor  # I32, [K / codes of an integer, N] where it packs inputs, else [K, N / codes of an integer]
    qzeros: StoredTensor  # I32, [groups, N / codes of an integer]
    scales: StoredTensor  # [groups, N]
    g_idx: StoredTensor | None  # I32, [K]; where there is none, groups are consecutive columns

    def __post_init__(self) -> None:
        if len(self.qweight.shape) != 2:
            raise _misshapen(self.qweight, "two dimensions")
        rows, columns = self.shape
        scheme = self.packing.scheme
        per_integer = WORD // scheme.bits
        groups = scheme.blocks(columns) if columns else 0
        wanted: list[tuple[StoredTensor, tuple[str, ...], tuple[int, ...]]] = [
            (self.qweight, ("I32",), self.qweight.shape),
            (self.qzeros, ("I32",), (groups, -(-rows // per_integer))),
            (self.scales, _FLOATS, (groups, rows)),
        ]
        if self.g_idx is not None:
            wanted.append((self.g_idx, ("I32",), (columns,)))
        for part, dtypes, shape in wanted:
            if part.dtype not in dtypes or part.shape != shape:
                raise _misshapen(part, f"{' or '.join(dtypes)} {shape} for {rows} x {columns} weights in {scheme.name}")

    @property
    def path(self) -> Path:
        return self.qweight.path

    @property
    def dtype(self) -> str:
        return self.packing.name

    @property
    def shape(self) -> tuple[int, int]:
        first, second = self.qweight.shape
        per_integer = WORD // self.packing.scheme.bits
        return (second, first * per_integer) if self.packing.packs_inputs else (second * per_integer, first)

    def read(self) -> Float32:
        """The weights as float32; raises SpecedgeError where a part holds what it cannot."""
        groups = self._read_groups()
        values = np.subtract(self._read_codes(), self._read_zeros()[:, groups], dtype=np.float32)
        values *= self._read_scales()[:, groups]
        return values

    def grid(self) -> Quantized | None:
        """The same weights as codes; None where columns that share a scale do not lie together (activation order)."""
        (rows, columns), scheme = self.shape, self.packing.scheme
        groups, block = self._read_groups(), self.packing.scheme.block(columns)
        chosen = groups[::block]
        if not np.array_equal(groups, np.repeat(chosen, block)[:columns]):
            return None
        zeros, scales = self._read_zeros()[:, chosen], self._read_scales()[:, chosen]
        codes = np.empty((rows, len(chosen), block), np.uint8)
        codes[:] = zeros[:, :, None]  # the filling of a last block that is not whole
        codes.reshape(rows, -1)[:, :columns] = self._read_codes()
        if (zeros == scheme.middle_code).all():
            return Quantized(Scheme(scheme.bits, scheme.group), self.shape, codes, scales)
        return Quantized(scheme, self.shape, codes, scales, zeros)

    def _read_codes(self) -> Bytes:  # [N, K]
        words = self.qweight.read_integers()
        if self.packing.packs_inputs:
            return _unpack(words.T, self.packing)
        return np.ascontiguousarray(_unpack(words, self.packing).T)

    def _read_scales(self) -> Scales:  # [N, groups], in float16 where they are stored so
        scales = self.scales.read()
        check_finite(str(self.scales.path), self.scales.name, scales)
        return np.ascontiguousarray(scales.T, np.float16 if self.scales.dtype == "F16" else np.float32)

    def _read_zeros(self) -> Bytes:  # [N, groups]
        packing, scheme = self.packing, self.packing.scheme
        stored = _unpack(self.qzeros.read_integers(), packing).T[: self.shape[0]]
        if packing.zero_offset and (stored == scheme.top_code).any():
            raise SpecedgeError(
                f"{self.qzeros.path}: {self.qzeros.name}: found a stored zero point of {scheme.top_code}, expected less: with "
                f"checkpoint_format gptq, which stores one less, some programs read {scheme.top_code + 1} and some 0; "
                "write the checkpoint as gptq_v2"
            )
        zeros = np.ascontiguousarray(stored + np.uint8(packing.zero_offset))
        if packing.centred and (zeros != scheme.middle_code).any():
            found = int(zeros[zeros != scheme.middle_code][0])
            raise SpecedgeError(
                f"{self.qzeros.path}: {self.qzeros.name}: found a zero point of {found}, expected {scheme.middle_code} by "
                f"{packing.centred}; correct that, or the format (gptq stores one less, gptq_v2 does not), in config.json"
            )
        return zeros

    def _read_groups(self) -> Integers:  # [K]
        columns, scheme = self.shape[1], self.packing.scheme
        if self.g_idx is None:
            return np.arange(columns) // scheme.block(columns)
        groups = self.g_idx.read_integers()
        wrong = groups[(groups < 0) | (groups >= scheme.blocks(columns))]
        if wrong.size:
            raise SpecedgeError(
                f"{self.g_idx.path}: {self.g_idx.name}: found group {wrong[0]}, expected 0 to {scheme.blocks(columns) - 1}; "
                "the checkpoint is damaged, download it again"
            )
        return groups


Tensor = StoredTensor | PackedMatrix


def join_parts(tensors: Mapping[str, StoredTensor], packing: Packing) -> dict[str, Tensor]:
    """All tensors by name, every matrix in parts as one by the name it would have if it were not quantised."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part in packing.parts:
            modules.setdefault(module, {})[part] = tensor
        else:
            require_floats(tensor)
            plain[name] = tensor
    for module, found in modules.items():
        name, path = f"{module}.weight", next(iter(found.values())).path
        if missing := [f"{module}.{part}" for part in packing.parts if part not in found]:
            raise SpecedgeError(
                f"{path}: missing tensor: {first_of(missing)}, a part of {name} in {packing.name}; download it again"
            )
        if name in plain:
            raise SpecedgeError(f"{path}: {name}: there twice, in parts ({packing.name}) and whole; remove one of them")
        plain[name] = PackedMatrix(name, packing, found["qweight"], found["qzeros"], found["scales"], found.get("g_idx"))
    return plain


def empty_biases(tensors: Mapping[str, Tensor], used: Collection[str]) -> set[str]:
    """Biases of nothing but zeros, which AutoGPTQ (make_quant) gave every layer it packed, where the model has none."""
    return {
        name
        for name, tensor in tensors.items()
        if name.endswith(".bias")
        and name not in used
        and isinstance(tensors.get(f"{name.removesuffix('.bias')}.weight"), PackedMatrix)
        and not tensor.read().any()
    }


def _unpack(words: Integers, packing: Packing) -> Bytes:
    """Integers [rows, n] to what is packed in them, [rows, n * 32 / bits]; fields count from the lowest bits."""
    fields = unpack_codes(np.ascontiguousarray(words, "<i4").view(np.uint8), packing.scheme.bits)
    if packing.order is None:
        return fields
    by_integer = fields.reshape(len(words), -1, len(packing.order))
    return by_integer[..., np.argsort(packing.order)].reshape(fields.shape)


def _misshapen(part: StoredTensor, expected: str) -> SpecedgeError:
    return SpecedgeError(
        f"{part.path}: {part.name}: found {part.dtype} {part.shape}, expected {expected}; "
        "correct bits and group_size in config.json or download the checkpoint again"
    )
