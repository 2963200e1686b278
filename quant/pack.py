"""The one store of quantised weights, and its packing into the bytes of ONNX Runtime's MatMulNBits."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specedge.quant.scheme import Scheme

Bytes = npt.NDArray[np.uint8]
Scales = npt.NDArray[np.float32 | np.float16]


@dataclass(frozen=True, slots=True, eq=False)  # eq: arrays have no single truth
class Quantized:
    """A matrix [N, K] in codes: weight = (code - zero point) * scale, per block of a row.

    Codes are unpacked; the last block of a row is filled up with the code of zero. Scales may be negative. Raises
    ValueError when the parts do not belong together.
    """

    scheme: Scheme
    shape: tuple[int, int]
    codes: Bytes  # [N, blocks, block]
    scales: Scales  # [N, blocks]
    zero_points: Bytes | None  # [N, blocks]; None: the scheme's middle code

    def __post_init__(self) -> None:
        rows, columns = self.shape
        per_block = (rows, self.scheme.blocks(columns))
        codes_shape = (*per_block, self.scheme.block(columns))
        if self.codes.shape != codes_shape or self.codes.dtype != np.uint8:
            raise ValueError(f"codes: expected uint8 {codes_shape}, found {self.codes.dtype} {self.codes.shape}")
        if self.scales.shape != per_block or self.scales.dtype not in (np.float32, np.float16):
            raise ValueError(f"scales: expected floats {per_block}, found {self.scales.dtype} {self.scales.shape}")
        if (self.zero_points is None) != self.scheme.symmetric:
            raise ValueError(f"zero points: {self.scheme} has them if and only if it is asymmetric")
        zero_points = self.scales if self.zero_points is None else self.zero_points
        if zero_points.shape != per_block:
            raise ValueError(f"zero points: expected {per_block}, found {zero_points.shape}")
        if self.codes.size and self.codes.max() > self.scheme.top_code:
            raise ValueError(f"codes: expected at most {self.scheme.top_code}, found {self.codes.max()}")

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The weights the codes stand for, [N, K]."""
        rows, columns = self.shape
        weight = np.subtract(self.codes, self._zero_codes(), dtype=np.float32)
        weight *= self.scales[:, :, None]
        return weight.reshape(rows, -1)[:, :columns]

    def regroup(self, group: int) -> "Quantized":
        """The same weights in blocks of `group`, with scales repeated: for kernels that know no larger block.

        Raises ValueError where a block of `group` columns would straddle two scales.
        """
        rows, columns = self.shape
        scheme = Scheme(self.scheme.bits, group, self.scheme.symmetric)
        if self.scheme.group is not None and self.scheme.group % group:
            raise ValueError(f"{self.scheme} cannot be regrouped to {group}: blocks would straddle its scales")
        blocks = scheme.blocks(columns)
        source = np.arange(blocks) * group // self.scheme.block(columns)  # the old block of each new one
        codes = np.empty((rows, blocks, group), np.uint8)
        codes[:] = self._zero_codes()[:, source] if self.zero_points is not None else scheme.middle_code
        codes.reshape(rows, -1)[:, :columns] = self.codes.reshape(rows, -1)[:, :columns]
        zero_points = None if self.zero_points is None else self.zero_points[:, source]
        return Quantized(scheme, self.shape, codes, self.scales[:, source], zero_points)

    def _zero_codes(self) -> Bytes:  # [N, blocks, 1] or one number
        if self.zero_points is None:
            return np.asarray(self.scheme.middle_code, np.uint8)
        return self.zero_points[:, :, None]


def pack_codes(codes: Bytes, bits: int) -> Bytes:
    """Codes [..., block] to bytes [..., block * bits / 8], the earlier 4-bit code in the low half."""
    if bits == 8:
        return codes
    if codes.shape[-1] % 2:
        raise ValueError(f"an odd block of {codes.shape[-1]} 4-bit codes fills no whole bytes; regroup it first")
    return np.bitwise_or(codes[..., 0::2], np.left_shift(codes[..., 1::2], 4, dtype=np.uint8))


def unpack_codes(packed: Bytes, bits: int) -> Bytes:
    """Exact inverse of `pack_codes`."""
    if bits == 8:
        return packed
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 0x0F, out=codes[..., 0::2])
    np.right_shift(packed, 4, out=codes[..., 1::2])
    return codes


def pack_zero_points(zero_points: Bytes, bits: int) -> Bytes:
    """Zero points [N, blocks] to bytes [N, ceil(blocks * bits / 8)]: every row starts on a byte of its own."""
    if bits == 4 and zero_points.shape[1] % 2:
        zero_points = np.pad(zero_points, ((0, 0), (0, 1)))
    return pack_codes(zero_points, bits)


def unpack_zero_points(packed: Bytes, bits: int, blocks: int) -> Bytes:
    """Exact inverse of `pack_zero_points`."""
    return unpack_codes(packed, bits)[:, :blocks]
