"""Linear layers rounded with calibration, block by block, each block kept in the cache: a broken run goes on where it was."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from specedge.cachedir import keep
from specedge.errors import SpecedgeError
from specedge.export.decoder import Block
from specedge.export.families import DecoderConfig
from specedge.export.rounded_file import is_whole, read_rounded, write_rounded
from specedge.export.streams import STAGES, Floats, Stream, load_block, set_weight
from specedge.progress import Progress
from specedge.quant.gptq import Moments, compensate, gptq
from specedge.quant.pack import Quantized
from specedge.quant.rounding import ScaleType
from specedge.quant.scheme import Scheme

_VERSION = 1  # of what is computed here and in quant/: another one makes other cache entries
Read = Callable[[str], Floats]


def calibrate(
    config: DecoderConfig,
    tensor: Read,
    fingerprint: str,  # of all tensors
    schemes: Mapping[str, Scheme],  # of every linear layer's weight, by its canonical name
    scale_dtype: ScaleType,
    documents: Sequence[Sequence[int]],
    cache: Path,
    label: str,
    progress: Progress,
) -> list[Path]:
    """Round every linear layer of a decoder by GPTQ; the file of each block (`rounded_file`).

    True to the sequence (Frantar et al. 2022, section 4): a layer is calibrated on what the layers before it make once they
    are rounded. Two streams of hidden states run through the model, as it is and as it is stored, so memory is twice the
    text's hidden states, a block and the moments of a layer.
    """
    named = sorted((name, scheme.name) for name, scheme in schemes.items())
    said = (_VERSION, fingerprint, config, named, scale_dtype.__name__)
    text = hashlib.sha256(repr((said, [tuple(document) for document in documents])).encode())
    folder = cache / "calibrated" / text.hexdigest()[:32]
    keep(folder)
    files = [folder / f"block_{layer}.npz" for layer in range(config.layers)]
    known = next((layer for layer, file in enumerate(files) if not is_whole(file)), config.layers)
    progress(f"{label}: calibration", known, config.layers)
    if known < config.layers:
        streams = _Streams(config, tensor, schemes, scale_dtype, documents)
        for layer, file in enumerate(files):
            if layer < known:
                streams.take(layer, read_rounded(file))
            else:
                write_rounded(file, streams.round(layer))
                progress(f"{label}: calibration", layer + 1, config.layers)
    return files


class _Streams:
    """The model as it is and as it is stored, run side by side."""

    def __init__(
        self,
        config: DecoderConfig,
        tensor: Read,
        schemes: Mapping[str, Scheme],
        scale_dtype: ScaleType,
        documents: Sequence[Sequence[int]],
    ) -> None:
        self._config, self._tensor, self._schemes, self._scale_dtype = config, tensor, schemes, scale_dtype
        self._exact = Stream(config, documents, tensor)
        self._stored = self._exact.fork(apart=True)

    def take(self, layer: int, known: Mapping[str, Quantized]) -> None:
        """Go on behind a block that was rounded before."""
        exact, stored = (load_block(self._config, layer, self._tensor) for _ in range(2))
        for name, rounded in known.items():
            set_weight(stored, name, rounded.dequantize())
        for stage in range(len(STAGES)):
            self._run(exact, stored, stage)

    def round(self, layer: int) -> dict[str, Quantized]:
        """Round the linear layers of the next block, and go on behind it."""
        exact, stored = (load_block(self._config, layer, self._tensor) for _ in range(2))
        rounded: dict[str, Quantized] = {}
        for stage, modules in enumerate(STAGES):
            weights = {name: self._tensor(name) for name in (f"layers.{layer}.{module}.weight" for module in modules)}
            columns = next(iter(weights.values())).shape[1]
            found = _round(weights, self._schemes, self._scale_dtype, self._moments(exact, stored, stage, columns))
            for name, layer_weights in found.items():
                set_weight(stored, name, layer_weights.dequantize())
            rounded |= found
            self._run(exact, stored, stage)
        return rounded

    def _run(self, exact: Block, stored: Block, stage: int) -> None:
        self._exact.run(exact, stage)
        self._stored.run(stored, stage)

    def _moments(self, exact: Block, stored: Block, stage: int, columns: int) -> Moments:
        hessian, drift = np.zeros((columns, columns)), np.zeros((columns, columns))
        for y, x in zip(self._exact.inputs(exact, stage), self._stored.inputs(stored, stage), strict=True):
            hessian += (x.T @ x).numpy()
            drift += ((y - x).T @ x).numpy()
        if not (np.isfinite(hessian).all() and np.isfinite(drift).all()):
            raise SpecedgeError(f"{STAGES[stage][0]}: calibration text gives inputs that are not finite; use another --method")
        return Moments(hessian, drift)


def _round(
    weights: Mapping[str, Floats], schemes: Mapping[str, Scheme], scale_dtype: ScaleType, moments: Moments
) -> dict[str, Quantized]:
    """Layers that read the same, those of one scheme at once: rows do not know of each other."""
    rounded: dict[str, Quantized] = {}
    for scheme in dict.fromkeys(schemes[name] for name in weights):
        alike = [name for name in weights if schemes[name] == scheme]
        moved = compensate(np.concatenate([weights[name] for name in alike]), moments)
        whole = gptq(moved, moments.hessian, scheme, scale_dtype=scale_dtype)
        ends = np.cumsum([len(weights[name]) for name in alike])
        rounded |= {name: whole.rows(slice(end - len(weights[name]), end)) for name, end in zip(alike, ends, strict=True)}
    return rounded
