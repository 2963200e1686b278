"""Rotary positions, which are the host's: tables of cos and sin, a row per position."""

import numpy as np
import numpy.typing as npt

from specedge.manifest import Role

Array = npt.NDArray[np.generic]


def rope_tables(role: Role) -> Array:
    """cos and sin [2, C, D / 2] of every position, computed in float32 as transformers does."""
    positions = np.arange(role.context, dtype=np.float32)[:, None]
    angles = positions * np.asarray(role.rope.inv_freq, np.float32)
    tables: Array = (np.stack((np.cos(angles), np.sin(angles))) * np.float32(role.rope.scaling)).astype(role.kv.dtype)
    return tables
