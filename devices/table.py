"""The rows: every device a bundle can be made for, each oddity with its reason."""

from specedge.devices.device import Device
from specedge.errors import SpecedgeError

# INT4 MatMulNBits (block 32, accuracy_level 4) on two cores with AVX512-VNNI, 256 tokens of past.
_CPU_VERIFY_COST = ((1, 1.0), (2, 1.3), (4, 1.8), (5, 2.1), (8, 2.7), (12, 3.3), (16, 4.1))

# Large enough that exp() of a masked score is 0 beside any real one, small enough that score + mask stays finite in float16.
_CPU_MASK = -30000.0

_ROWS = (
    # GroupQueryAttention writes into shared past/present buffers: nothing is copied, one graph serves every width.
    Device("cpu", "CPUExecutionProvider", "in-place", static=False, mask_value=_CPU_MASK, verify_cost=_CPU_VERIFY_COST),
    # The graph form of every NPU, on the provider every machine has: what it computes can be checked anywhere.
    Device("cpu-static", "CPUExecutionProvider", "delta", static=True, mask_value=_CPU_MASK, verify_cost=_CPU_VERIFY_COST),
)

DEVICES = {row.name: row for row in _ROWS}


def get_device(name: str) -> Device:
    """The row called `name`; an unknown name is refused with the names there are."""
    if name not in DEVICES:
        raise SpecedgeError(f"device {name!r}: this version has no such row; use one of {', '.join(DEVICES)}")
    return DEVICES[name]
