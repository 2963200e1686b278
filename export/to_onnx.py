"""Decoder and heads as ONNX graphs: traced without weights, then written beside its weight file."""

import contextlib
import dataclasses
import functools
import io
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specedge.export.decoder import IN_PLACE_SPARE, KV, Decoder, feature_name, padded_head_dim
from specedge.export.eagle import Eagle, EagleConfig
from specedge.export.families import DecoderConfig
from specedge.export.medusa import Medusa, MedusaConfig
from specedge.manifest import Graph, TensorSpec

OPSET = 23  # the first with RMSNormalization
_ROWS, _PAST = 5, 9  # sizes of examples where the graph leaves them open
_MOST = 1 << 31  # rows and columns: no context is as long
_STEP_INPUTS = ("input_ids", "rope_cos", "rope_sin", "attention_bias")
_TYPES = {"float32": torch.float32, "float16": torch.float16}


def trace_in_place(config: DecoderConfig, context: int, dtype: str, taps: tuple[int, ...] = ()) -> ir.Model:
    """The step graph of symbolic width in the in-place form, its weights still inputs; a fresh copy each time.

    Traced on fake tensors, so a model of any size costs no memory.
    """
    model = _fresh(_trace_in_place(_traced(config), dtype, taps))
    kv = ir.Shape([1, config.kv_heads, context + IN_PLACE_SPARE, padded_head_dim(config, "in-place")])  # all it changes
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name and value.name.startswith(("past_", "present_")):
            value.shape = kv
    return model


def trace_delta(config: DecoderConfig, dtype: str, taps: tuple[int, ...] = ()) -> ir.Model:
    """A step of symbolic width and past in the delta form, without LM head: what `compose` makes graphs of."""
    model = _fresh(_trace_delta(dataclasses.replace(_traced(config), vocab_size=1, tied=False, drafted=None), dtype, taps))
    embedding = next(value for value in model.graph.inputs if value.name == "embed_tokens.weight")
    embedding.shape = ir.Shape([config.vocab_size, config.hidden])
    return model


def trace_eagle(config: EagleConfig, drafts: bool, dtype: str) -> ir.Model:
    """The same of an EAGLE head that reads the target's features, or with `drafts` what it fed back."""
    layer = _traced(config.decoder)  # and whose embedding or LM head it is, and how many rows that has, is no matter
    alike = dataclasses.replace(config, decoder=layer, draft_vocab_size=0, own_embedding=False, own_head=False)
    return _fresh(_trace_eagle(alike, drafts, dtype))


def trace_medusa(config: MedusaConfig, dtype: str) -> ir.Model:
    """The graph of all heads."""
    return _fresh(_trace_medusa(config, dtype))


def write(model: ir.Model, path: Path) -> None:
    """Write the graph; its weights stay in the external file they already point to."""
    path.write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def describe(model: ir.Model, file: str, width: int | None) -> Graph:
    """The graph as the manifest lists it."""
    ops = Counter(node.op_type for node in model.graph.all_nodes())
    return Graph(file, width, specs(model.graph.inputs), specs(model.graph.outputs), dict(sorted(ops.items())), None)


def specs(values: Iterable[ir.Value]) -> tuple[TensorSpec, ...]:
    """Graph inputs or outputs as the manifest lists them."""
    found = []
    for value in values:
        assert value.shape is not None and value.dtype is not None and value.name is not None
        shape = tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)
        found.append(TensorSpec(value.name, str(np.dtype(value.dtype.numpy())), shape))
    return tuple(found)


@functools.lru_cache(maxsize=64)
def _trace_in_place(config: DecoderConfig, dtype: str, taps: tuple[int, ...]) -> bytes:
    with FakeTensorMode(), _quiet():
        model = Decoder(config, "in-place", _TYPES[dtype], taps).eval()
        slots = _ROWS + 3
        kv_shape = (1, config.kv_heads, _PAST, padded_head_dim(config, "in-place"))  # whatever the context: see trace_in_place
        length = torch.empty(1, dtype=torch.int32)
        lengths = (length, length.clone(), torch.empty(2, dtype=torch.int64))
        rows, total = torch.export.Dim("T", min=1, max=_MOST), torch.export.Dim("total", min=1, max=_MOST)
        wanted = torch.export.Dim("R", min=0, max=_MOST)
        kv = _kv_names(config)
        program = _export(
            model,
            (*_example(config, kv_shape, slots, _TYPES[dtype]), lengths),
            [*_STEP_INPUTS, *(f"past_{name}" for name in kv), "seqlens_k", "total_sequence_length", "logits_rows"],
            ["logits", *[feature_name(taps)] * (taps != ()), *(f"present_{name}" for name in kv)],
            ({1: rows}, {2: rows}, {2: rows}, {2: rows, 3: total}, [({}, {})] * config.layers, ({}, {}, {0: wanted})),
        )
    return _finish(program, model, config.tied)


@functools.lru_cache(maxsize=64)
def _trace_delta(config: DecoderConfig, dtype: str, taps: tuple[int, ...]) -> bytes:
    with FakeTensorMode(), _quiet():
        model = Decoder(config, "delta", _TYPES[dtype], taps).eval()
        inputs = _example(config, _open_kv(config), _PAST + _ROWS, _TYPES[dtype])
        names = [*_STEP_INPUTS, *(f"past_{name}" for name in _kv_names(config))]
        program = _export(model, inputs, names, None, _open(config))
    return _finish(program, model)


class _Reads(Eagle):
    """Reads the target's features."""

    def forward(self, input_ids: Tensor, features: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, past: list[KV]) -> Any:  # type: ignore[override]
        return super().forward(input_ids, self.fuse(features), cos, sin, bias, past[0])


class _Drafts(Eagle):
    """Reads what it fed back."""

    def forward(self, input_ids: Tensor, features: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, past: list[KV]) -> Any:  # type: ignore[override]
        return super().forward(input_ids, features, cos, sin, bias, past[0])


@functools.lru_cache(maxsize=16)
def _trace_eagle(config: EagleConfig, drafts: bool, dtype: str) -> bytes:
    layer = config.decoder
    with FakeTensorMode(), _quiet():
        model = (_Drafts if drafts else _Reads)(config, _TYPES[dtype]).eval()
        ids, *others = _example(layer, _open_kv(layer), _PAST + _ROWS, _TYPES[dtype])
        features = torch.empty(1, _ROWS, layer.hidden if drafts else config.features, dtype=_TYPES[dtype])
        names = [_STEP_INPUTS[0], "features", *_STEP_INPUTS[1:], *(f"past_{name}" for name in _kv_names(layer))]
        open_ids, *open_others = _open(layer)
        program = _export(model, (ids, features, *others), names, None, (open_ids, open_ids, *open_others))
    return _finish(program, model)


@functools.lru_cache(maxsize=8)
def _trace_medusa(config: MedusaConfig, dtype: str) -> bytes:
    with FakeTensorMode(), _quiet():
        model = Medusa(config, _TYPES[dtype]).eval()
        hidden = torch.empty(1, 1, config.hidden, dtype=_TYPES[dtype])
        program = _export(model, (hidden,), ["hidden"], ["head_logits"])
    return _finish(program, model)


def _example(config: DecoderConfig, kv_shape: tuple[int, ...], slots: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Example inputs of one step: ids, rotary tables, bias and past."""
    rope = torch.empty(1, 1, _ROWS, config.head_dim // 2, dtype=dtype)
    past = [(torch.empty(kv_shape, dtype=dtype), torch.empty(kv_shape, dtype=dtype)) for _ in range(config.layers)]
    bias = torch.empty(1, 1, _ROWS, slots, dtype=dtype)
    return torch.empty(1, _ROWS, dtype=torch.int32), rope, rope.clone(), bias, past


def _open(config: DecoderConfig) -> tuple[Any, ...]:
    """Which dimensions of these vary where width and past are open."""
    auto = torch.export.Dim.AUTO
    return {1: auto}, {2: auto}, {2: auto}, {2: auto, 3: auto}, [({2: auto}, {2: auto})] * config.layers


def _open_kv(config: DecoderConfig) -> tuple[int, ...]:
    return 1, config.kv_heads, _PAST, config.head_dim


def _kv_names(config: DecoderConfig) -> list[str]:
    return [f"{kind}_{layer}" for layer in range(config.layers) for kind in ("key", "value")]


def _export(
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    input_names: Sequence[str],
    output_names: Sequence[str] | None,
    dynamic_shapes: tuple[Any, ...] | None = None,
) -> torch.onnx.ONNXProgram:
    program = torch.onnx.export(
        model,
        inputs,
        input_names=input_names,
        output_names=output_names,
        dynamic_shapes=dynamic_shapes,
        opset_version=OPSET,
        dynamo=True,
        optimize=False,
        verbose=False,
    )
    assert program is not None
    return program


def _fresh(traced: bytes) -> ir.Model:
    return ir.from_proto(onnx.load(io.BytesIO(traced)))


def _traced(config: DecoderConfig) -> DecoderConfig:
    """Rotary frequencies and lengths are the host's matter: models that differ in nothing else have the same graph."""
    return dataclasses.replace(config, inv_freq=(0.0,) * len(config.inv_freq), rope_scaling=1.0, max_positions=1)


def _finish(program: torch.onnx.ONNXProgram, model: torch.nn.Module, tied: bool = False) -> bytes:
    """The graph of a traced model, its weights turned into inputs."""
    graph = program.model
    _weights_to_inputs(graph, {name for name, _ in model.named_parameters(remove_duplicate=False)}, tied)
    onnxscript.optimizer.optimize_ir(graph)
    graph.producer_name, graph.producer_version = "specedge", ""
    _strip(graph)
    serialised: bytes = ir.to_proto(graph).SerializeToString()
    return serialised


def _weights_to_inputs(model: ir.Model, names: set[str], tied: bool) -> None:
    graph = model.graph
    if tied and "lm_head.weight" in graph.initializers:  # the exporter keeps one of the two names
        graph.initializers["lm_head.weight"].name = "embed_tokens.weight"
    for name in [name for name in graph.initializers if name in names]:
        value = graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)


def _strip(model: ir.Model) -> None:
    """Drop what the exporter notes about this machine (source paths, stack traces): same model, same bytes."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.doc_string = None
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns about torchvision, shared axis names and its own deprecations: nothing a user can act on."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
