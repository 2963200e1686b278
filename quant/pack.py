"""The one store of quantised weights, and its packing into the bytes of ONNX Runtime's MatMulNBits."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from specedge.quant.scheme import Scheme

Bytes = npt.NDArray[np.uint8]
Scales = npt.NDArray[np.float32 | np.float16]

_COMPARED = 1 << 22  # weights dequantised at a time to compare them


@dataclass(frozen=True, slots=True, eq=False)  # eq: arrays have no single truth
class Quantized:
    """A matrix [N, K] in codes: weight = (code - zero point) * scale, or code * scale + minimum, per block of a row.

    Codes are unpacked; the last block of a row is filled up with the code of zero (with minima, which code is of no
    concern). Scales may be negative. Raises ValueError when the parts do not belong together.
    """

    scheme: Scheme
    shape: tuple[int, int]
    codes: Bytes  # [N, blocks, block]
    scales: Scales  # [N, blocks]
    zero_points: Bytes | None = None  # [N, blocks] where the scheme is asymmetric
    minima: Scales | None = None  # [N, blocks] where the scheme has them

    def __post_init__(self) -> None:
        rows, columns = self.shape
        per_block = (rows, self.scheme.blocks(columns))
        codes_shape = (*per_block, self.scheme.block(columns))
        if self.codes.shape != codes_shape or self.codes.dtype != np.uint8:
            raise ValueError(f"codes: expected uint8 {codes_shape}, found {self.codes.dtype} {self.codes.shape}")
        floats = (np.float32, np.float16)
        has_zero_points = not self.scheme.symmetric and not self.scheme.minima
        for name, part, wanted, types in (
            ("scales", self.scales, True, floats),
            ("zero points", self.zero_points, has_zero_points, (np.uint8,)),
            ("minima", self.minima, self.scheme.minima, floats),
        ):
            if (part is not None) != wanted:
                raise ValueError(f"{name}: {self.scheme} {'needs' if wanted else 'has none of'} them")
            if part is not None and (part.shape != per_block or part.dtype not in types):
                raise ValueError(f"{name}: expected {types[0].__name__} {per_block}, found {part.dtype} {part.shape}")
        if self.codes.size and self.codes.max() > self.scheme.top_code:
            raise ValueError(f"codes: expected at most {self.scheme.top_code}, found {self.codes.max()}")

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The weights the codes stand for, [N, K]."""
        rows, columns = self.shape
        weight = np.subtract(self.codes, self._zero_codes(), dtype=np.float32)
        weight *= self.scales[:, :, None]
        if self.minima is not None:
            weight += self.minima[:, :, None]
        return weight.reshape(rows, -1)[:, :columns]

    def equals(self, weight: npt.NDArray[np.float32]) -> bool:
        """Whether the codes stand for exactly these weights [N, K]."""
        step = max(1, _COMPARED // max(1, self.shape[1]))
        parts = (slice(start, start + step) for start in range(0, self.shape[0], step))
        return all(np.array_equal(self.rows(part).dequantize(), weight[part]) for part in parts)

    def rows(self, part: slice | npt.NDArray[np.integer]) -> "Quantized":
        """These rows of the matrix."""
        codes, scales = self.codes[part], self.scales[part]
        zero_points = None if self.zero_points is None else self.zero_points[part]
        minima = None if self.minima is None else self.minima[part]
        return Quantized(self.scheme, (len(codes), self.shape[1]), codes, scales, zero_points, minima)

    def offsets(self) -> npt.NDArray[np.float32]:
        """What each block adds to the weights of a symmetric matrix of the same codes and scales, [N, blocks].

        Kernels that know only symmetric codes compute x W^T as x (symmetric W)^T + (sums of x over each block) offsets^T,
        which is exact. Raises ValueError for a symmetric scheme, which needs none.
        """
        middle = self.scheme.middle_code * self.scales.astype(np.float32)
        if self.minima is not None:
            return self.minima + middle
        if self.zero_points is None:
            raise ValueError(f"{self.scheme} is symmetric: it has no offsets")
        return middle - self.zero_points * self.scales.astype(np.float32)

    def regroup(self, group: int) -> "Quantized":
        """The same weights in blocks of `group`, with scales repeated: for kernels that know no larger block.

        Raises ValueError where a block of `group` columns would straddle two scales.
        """
        rows, columns = self.shape
        scheme = replace(self.scheme, group=group)
        if self.scheme.group is not None and self.scheme.group % group:
            raise ValueError(f"{self.scheme} cannot be regrouped to {group}: blocks would straddle its scales")
        blocks = scheme.blocks(columns)
        source = np.arange(blocks) * group // self.scheme.block(columns)  # the old block of each new one
        codes = np.empty((rows, blocks, group), np.uint8)
        codes[:] = self._zero_codes()[:, source] if self.zero_points is not None else self._zero_codes()
        codes.reshape(rows, -1)[:, :columns] = self.codes.reshape(rows, -1)[:, :columns]
        zero_points = None if self.zero_points is None else self.zero_points[:, source]
        minima = None if self.minima is None else self.minima[:, source]
        return Quantized(scheme, self.shape, codes, self.scales[:, source], zero_points, minima)

    def _zero_codes(self) -> Bytes:  # what is subtracted from the codes: [N, blocks, 1] or one number
        if self.zero_points is None:
            return np.asarray(0 if self.scheme.minima else self.scheme.middle_code, np.uint8)
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
