"""The block formats of llama.cpp that quant/ holds exactly: their bytes become codes, scales and minima, bit for bit."""

import numpy as np
import numpy.typing as npt

from specedge.quant.pack import Quantized, Scales
from specedge.quant.scheme import Scheme

Bytes = npt.NDArray[np.uint8]

# Name of the GGUF type -> what it is here; float16 scales (and minima) come before the codes of every block.
GRIDS = {
    "Q4_0": Scheme(4, 32),
    "Q4_1": Scheme(4, 32, symmetric=False, minima=True),
    "Q8_0": Scheme(8, 32),
}


def read_grid(kind: str, stored: Bytes) -> Quantized:
    """A tensor of one of `GRIDS` from its bytes [N, bytes of a row].

    The layouts are those of block_q4_0, block_q4_1 and block_q8_0 in ggml's ggml-common.h.
    """
    scheme = GRIDS[kind]
    block = scheme.group or 1
    header = 4 if scheme.minima else 2
    block_bytes = header + block * scheme.bits // 8
    blocks = stored.reshape(len(stored), -1, block_bytes)  # [N, blocks, bytes]
    parts: Scales = np.ascontiguousarray(blocks[..., :header]).view("<f2")
    shape = (len(stored), blocks.shape[1] * block)
    codes = _unpack(blocks[..., header:], scheme.bits)
    minima = np.ascontiguousarray(parts[..., 1]) if scheme.minima else None
    return Quantized(scheme, shape, codes, np.ascontiguousarray(parts[..., 0]), minima=minima)


def write_grid(values: Quantized) -> Bytes:
    """Exact inverse of `read_grid`: [N, bytes of a row], scales and minima of float16 precision."""
    parts = [values.scales] if values.minima is None else [values.scales, values.minima]
    header = np.stack(parts, -1).astype("<f2").view(np.uint8).reshape(*values.scales.shape, -1)
    codes, half = values.codes, values.codes.shape[-1] // 2
    packed = codes ^ np.uint8(128) if values.scheme.bits == 8 else codes[..., :half] | codes[..., half:] << np.uint8(4)
    return np.concatenate((header, packed), -1).reshape(len(codes), -1)


def _unpack(packed: Bytes, bits: int) -> Bytes:
    if bits == 8:
        return packed + np.uint8(128)  # signed to unsigned, modulo 256
    return np.concatenate((packed & 0x0F, packed >> 4), axis=-1)  # the first half of a block is in the low halves
