"""Which of the target's residual streams an EAGLE-3 head reads; published ids count them in two ways.

A tap k is the residual stream entering block k, n after the last one. The same ids mean that to some projects and the output
of block k (k + 1 here) to others, and the file does not say which: docs/head_layouts.md, section 4.
"""

from specedge.errors import SpecedgeError
from specedge.export.eagle_settings import EagleSettings
from specedge.export.tensors import first_of

_AFTER_LAYER = "aux_hidden_states_layer_ids"  # AngelSlim's key
_KEYS = ("eagle_aux_hidden_state_layer_ids", "layer_ids", _AFTER_LAYER)
_OPTION = "--eagle-taps"


def read_taps(settings: EagleSettings, layers: int, count: int, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    """The taps a head reads side by side, `count` of them, of a target of `layers` layers.

    Raises:
        SpecedgeError: They cannot be known without being told.
    """
    if chosen is not None:
        return _checked(_OPTION, chosen, layers, count)
    if (given := given_ids(settings)) is None:
        default = default_taps(layers)
        if count != len(default) or list(default) != sorted(set(default)):
            raise SpecedgeError(
                f"{settings.path}: {_KEYS[0]}: missing, and {count} taps of a target of {layers} layers have no default; give "
                f"the residual streams that the head reads, e.g. {_OPTION} 2,5,8: those entering blocks 2, 5 and 8"
            )
        return default
    source = f"{settings.path}: {first_of(settings.said(*_KEYS))}"
    ids = _checked(source, given, layers, count)
    entering, behind = _evidence(settings, ids, layers)
    after = tuple(layer + 1 for layer in ids)
    if entering == behind:
        raise SpecedgeError(
            f"{source}: {_listed(ids)} can mean the residual streams entering these blocks ({_OPTION} {_listed(ids)}) or those "
            f"behind them ({_OPTION} {_listed(after)}), and nothing in this file says which; find out how the head was "
            "trained, or try both: the wrong one only lowers acceptance"
        )
    return ids if entering else _checked(source, after, layers, count)


def taps_notes(settings: EagleSettings, layers: int, taps: tuple[int, ...], chosen: tuple[int, ...] | None) -> list[str]:
    """What a person should know of the choice: that a default was taken, or that the file says otherwise than the option."""
    if given_ids(settings) is None:
        return [] if chosen else [f"{settings.path}: names no taps, the default {taps} assumed"]
    try:
        said = read_taps(settings, layers, len(taps), None)
    except SpecedgeError:  # it says nothing that could be known
        return []
    return [] if said == taps else [f"{settings.path}: its ids mean {_listed(said)}; {_OPTION} {_listed(taps)} is taken"]


def default_taps(layers: int) -> tuple[int, ...]:
    """What every project trains on unless told otherwise."""
    return 2, layers // 2, layers - 3


def given_ids(settings: EagleSettings) -> list[int] | None:
    """The ids in the settings; an empty list says nothing."""
    ids = settings.one(*_KEYS)
    if ids and (not isinstance(ids, list) or any(type(layer) is not int for layer in ids)):
        raise SpecedgeError(f"{settings.path}: {first_of(settings.said(*_KEYS))}: expected a list of integers, found {ids!r}")
    return ids or None


def _evidence(settings: EagleSettings, ids: tuple[int, ...], layers: int) -> tuple[bool, bool]:
    """Whether something says that these are streams entering blocks, and whether something says behind them."""
    default = default_taps(layers)
    entering = settings.speculators or ids == default or ids[-1] == layers
    behind = bool(settings.said(_AFTER_LAYER)) or ids == tuple(tap - 1 for tap in default)
    return entering, behind


def _checked(source: str, ids: tuple[int, ...] | list[int], layers: int, count: int) -> tuple[int, ...]:
    taps = tuple(ids)
    if len(taps) != count:
        raise SpecedgeError(
            f"{source}: expected {count} taps, as fc.weight takes {count} times the target's hidden size, found {_listed(taps)}"
        )
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > layers:
        raise SpecedgeError(
            f"{source}: expected ascending numbers from 0 to {layers}, the target's layers, found {_listed(taps)}"
        )
    return taps


def _listed(taps: tuple[int, ...]) -> str:
    return ",".join(map(str, taps))
