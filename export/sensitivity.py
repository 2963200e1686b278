"""Which layers a model can least do with few bits, measured; and which of them get more within a budget."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch
import torch.nn.functional as F

from specedge.export.families import DecoderConfig, joined_layers
from specedge.export.recipe import Form
from specedge.export.streams import Floats, Stream, load_block, run_block, set_weight, turned
from specedge.progress import Progress
from specedge.quant.rounding import Fit, round_to_nearest
from specedge.quant.scheme import Scheme

Unit = tuple[str, ...]  # names of weights that are stored alike
_EVERY = 4  # of the rows of text are compared


@torch.no_grad()
def measure_sensitivity(
    config: DecoderConfig,
    tensor: Callable[[str], Floats],
    schemes: Mapping[str, Scheme],  # of every linear layer's weight
    fit: Fit,
    documents: Sequence[Sequence[int]],
    label: str,
    progress: Progress,
) -> dict[Unit, float]:
    """KL of the model's distribution to the one it has with one unit rounded, the mean over rows of `documents`.

    All of the model's variants go through a block together, so one block is held at a time, and for each unit the hidden
    states of the text.
    """
    exact = Stream(config, documents, tensor)
    variants: dict[Unit, Stream] = {}
    for layer in range(config.layers):
        progress(f"{label}: sensitivity", layer, config.layers)
        block = load_block(config, layer, tensor)
        units = [tuple(unit) for unit in joined_layers(name for name in schemes if name.startswith(f"layers.{layer}."))]
        new = {unit: exact.fork(apart=False) for unit in units}
        for stream in (exact, *variants.values()):
            run_block(stream, block)
        for unit, stream in new.items():
            for name in unit:
                set_weight(block, name, round_to_nearest(tensor(name), schemes[name], fit=fit).dequantize())
            run_block(stream, block)
            for name in unit:
                set_weight(block, name, tensor(name))
        variants |= new
    norm, head = (torch.from_numpy(tensor(name)) for name in ("norm.weight", _head(config)))

    def law(stream: Stream) -> torch.Tensor:
        rows = torch.from_numpy(turned(config, tensor, stream.hidden[::_EVERY].numpy(), back=True))
        return torch.log_softmax(F.rms_norm(rows, norm.shape, norm, config.rms_eps) @ head.T, -1)

    truth = law(exact)
    progress(f"{label}: sensitivity", config.layers, config.layers)
    return {
        unit: float(F.kl_div(law(stream), truth, reduction="batchmean", log_target=True)) for unit, stream in variants.items()
    }


def widen(
    forms: Mapping[str, Form],
    shapes: Mapping[str, tuple[int, ...]],
    sensitivity: Mapping[Unit, float],
    bits: float,
) -> dict[str, Form]:
    """Give the units that gain most per bit 8 bits, as far as `bits` a weight of the matrices reach.

    The gain is taken to be all of the KL that a unit costs: 8 bits cost a hundredth of it.
    """
    chosen = dict(forms)
    room = (bits - mean_bits(forms, shapes)) * sum(prod(shapes[name]) for name in _matrices(forms, shapes))

    def cost(unit: Unit) -> float:
        return sum(stored_bits(_wide(forms[name]), shapes[name]) - stored_bits(forms[name], shapes[name]) for name in unit)

    for unit in sorted(sensitivity, key=lambda unit: sensitivity[unit] / cost(unit), reverse=True):
        if cost(unit) <= room:
            room -= cost(unit)
            chosen |= {name: _wide(forms[name]) for name in unit}
    return chosen


def mean_bits(forms: Mapping[str, Form], shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Bits a weight of a model's matrices takes."""
    names = _matrices(forms, shapes)
    return sum(stored_bits(forms[name], shapes[name]) for name in names) / sum(prod(shapes[name]) for name in names)


def _matrices(forms: Mapping[str, Form], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [name for name in forms if len(shapes[name]) == 2 and not name.startswith("rotation.")]


def stored_bits(form: Form, shape: tuple[int, ...]) -> float:
    """Bits of a matrix [N, K] in a form: codes, and for each block a float32 scale and what else it has."""
    rows, columns = shape
    if not isinstance(form, Scheme):
        return rows * columns * np.dtype(form).itemsize * 8
    more = 0 if form.symmetric else 32 if form.minima else form.bits
    return rows * columns * form.bits + rows * form.blocks(columns) * (32 + more)


def _wide(form: Form) -> Scheme:
    assert isinstance(form, Scheme)
    return replace(form, bits=8)


def _head(config: DecoderConfig) -> str:
    return "embed_tokens.weight" if config.tied else "lm_head.weight"
