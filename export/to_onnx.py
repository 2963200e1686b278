"""Decoder and heads as ONNX graphs: traced without weights, then written beside its weight file."""

import contextlib
import dataclasses
import functools
import io
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specedge.bundle import Graph, TensorSpec
from specedge.devices.device import Form
from specedge.export.decoder import IN_PLACE_SPARE, KV, Body, Decoder, feature_name, padded_head_dim
from specedge.export.eagle import Eagle, EagleConfig
from specedge.export.families import DecoderConfig
from specedge.export.medusa import Medusa, MedusaConfig

OPSET = 23  # the first with RMSNormalization
_ROWS, _PAST = 5, 9  # sizes of examples where the graph leaves them open
_TYPES = {"float32": torch.float32, "float16": torch.float16}


@functools.lru_cache(maxsize=64)
def _trace(config: DecoderConfig, form: Form, width: int | None, context: int, dtype: str, taps: tuple[int, ...]) -> bytes:
    """Serialised step graph whose weights are still graph inputs, named as in the checkpoint.

    Traced on fake tensors, so a model of any size costs no memory; the cache serves a draft shaped like its target.
    """
    with FakeTensorMode(), _quiet():
        model = Decoder(config, form, _TYPES[dtype], taps).eval()
        inputs, symbols = _example(config, form, width, context, _TYPES[dtype])
        kv = [f"{kind}_{layer}" for layer in range(config.layers) for kind in ("key", "value")]
        past, new = "past_", "present_" if form == "in-place" else "new_"
        lengths = ["seqlens_k", "total_sequence_length", "logits_rows"] if form == "in-place" else []
        program = torch.onnx.export(
            model,
            inputs,
            input_names=[
                "input_ids",
                "rope_cos",
                "rope_sin",
                "attention_bias",
                *(past + name for name in kv),
                *lengths,
            ],
            output_names=["logits", *[feature_name(taps)] * (taps != ()), *(new + name for name in kv)],
            dynamic_shapes=symbols,
            opset_version=OPSET,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    return _finish(program, model, config.tied)


@functools.lru_cache(maxsize=8)
def _trace_medusa(config: MedusaConfig, dtype: str) -> bytes:
    with FakeTensorMode(), _quiet():
        model = Medusa(config, _TYPES[dtype]).eval()
        program = torch.onnx.export(
            model,
            (torch.empty(1, 1, config.hidden, dtype=_TYPES[dtype]),),
            input_names=["hidden"],
            output_names=["head_logits"],
            opset_version=OPSET,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    return _finish(program, model, tied=False)


class _Reads(Eagle):
    """Reads the target's features."""

    def forward(self, input_ids: Tensor, features: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, past: list[KV]) -> Any:  # type: ignore[override]
        return super().forward(input_ids, self.fuse(features), cos, sin, bias, past[0])


class _Drafts(Eagle):
    """Reads what it fed back."""

    def forward(self, input_ids: Tensor, features: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, past: list[KV]) -> Any:  # type: ignore[override]
        return super().forward(input_ids, features, cos, sin, bias, past[0])


@functools.lru_cache(maxsize=16)
def _trace_open(config: DecoderConfig | EagleConfig, drafts: bool, dtype: str) -> bytes:
    """A step of symbolic width and past in the delta form, without LM head."""
    layer = config.decoder if isinstance(config, EagleConfig) else config
    with FakeTensorMode(), _quiet():
        model: torch.nn.Module
        if isinstance(config, EagleConfig):
            model = (_Drafts if drafts else _Reads)(config, _TYPES[dtype]).eval()
            size = layer.hidden if drafts else config.features
            features = [torch.empty(1, _ROWS, size, dtype=_TYPES[dtype])]
        else:
            model, features = Body(config, _TYPES[dtype]).eval(), []
        kv_shape = (1, layer.kv_heads, _PAST, layer.head_dim)
        past = [tuple(torch.empty(kv_shape, dtype=_TYPES[dtype]) for _ in range(2)) for _ in range(layer.layers)]
        rope = torch.empty(1, 1, _ROWS, layer.head_dim // 2, dtype=_TYPES[dtype])
        bias = torch.empty(1, 1, _ROWS, _PAST + _ROWS, dtype=_TYPES[dtype])
        vary = torch.export.Dim.AUTO
        kv = [f"{kind}_{index}" for index in range(layer.layers) for kind in ("key", "value")]
        program = torch.onnx.export(
            model,
            (torch.empty(1, _ROWS, dtype=torch.int32), *features, rope, rope.clone(), bias, past),
            input_names=[
                "input_ids",
                *["features"] * len(features),
                "rope_cos",
                "rope_sin",
                "attention_bias",
                *(f"past_{name}" for name in kv),
            ],
            dynamic_shapes=(
                *({1: vary} for _ in range(1 + len(features))),
                *({2: vary} for _ in range(2)),
                {2: vary, 3: vary},
                [({2: vary}, {2: vary}) for _ in past],
            ),
            opset_version=OPSET,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    return _finish(program, model, tied=False)


def _finish(program: torch.onnx.ONNXProgram | None, model: torch.nn.Module, tied: bool) -> bytes:
    """The graph of a traced model, its weights turned into inputs."""
    assert program is not None
    graph = program.model
    _weights_to_inputs(graph, {name for name, _ in model.named_parameters(remove_duplicate=False)}, tied)
    onnxscript.optimizer.optimize_ir(graph)
    graph.producer_name, graph.producer_version = "specedge", ""
    _strip(graph)
    serialised: bytes = ir.to_proto(graph).SerializeToString()
    return serialised


def trace(
    config: DecoderConfig, form: Form, width: int | None, context: int, dtype: str, taps: tuple[int, ...] = ()
) -> ir.Model:
    """The step graph of `width` (None: symbolic) as IR, its weights still inputs; a fresh copy each time."""
    return ir.from_proto(onnx.load(io.BytesIO(_trace(_without_rope(config), form, width, context, dtype, taps))))


def trace_open(config: DecoderConfig | EagleConfig, drafts: bool, dtype: str) -> ir.Model:
    """A step of symbolic width and past without LM head, for `unroll` to compose graphs of."""
    if isinstance(config, DecoderConfig):
        config = _without_rope(config)
    else:  # nor is the LM head part of it, or whose the embedding is
        config = dataclasses.replace(
            config, decoder=_without_rope(config.decoder), draft_vocab_size=0, own_embedding=True, own_head=True
        )
    return ir.from_proto(onnx.load(io.BytesIO(_trace_open(config, drafts, dtype))))


def trace_medusa(config: MedusaConfig, dtype: str) -> ir.Model:
    """The graph of all heads, likewise."""
    return ir.from_proto(onnx.load(io.BytesIO(_trace_medusa(config, dtype))))


def _without_rope(config: DecoderConfig) -> DecoderConfig:
    """Rotary frequencies are the host's matter: models that differ in nothing else have the same graph."""
    return dataclasses.replace(config, inv_freq=(0.0,) * len(config.inv_freq), rope_scaling=1.0)


def write(model: ir.Model, path: Path) -> None:
    """Write the graph; its weights stay in the external file they already point to."""
    path.write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def describe(model: ir.Model, file: str, width: int | None) -> Graph:
    """The graph as the manifest lists it."""
    ops = Counter(node.op_type for node in model.graph.all_nodes())
    return Graph(file, width, _specs(model.graph.inputs), _specs(model.graph.outputs), dict(sorted(ops.items())))


def _specs(values: Iterable[ir.Value]) -> tuple[TensorSpec, ...]:
    specs = []
    for value in values:
        assert value.shape is not None and value.dtype is not None and value.name is not None
        shape = tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)
        specs.append(TensorSpec(value.name, str(np.dtype(value.dtype.numpy())), shape))
    return tuple(specs)


def _example(
    config: DecoderConfig, form: Form, width: int | None, context: int, dtype: torch.dtype
) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Example inputs of one step and, for a symbolic width, which of their dimensions vary."""
    rows = width or _ROWS
    slots = rows + (context if form == "delta" else 3)
    half = config.head_dim // 2
    slots_kept = context + (IN_PLACE_SPARE if form == "in-place" else 0)
    kv_shape = (1, config.kv_heads, slots_kept, padded_head_dim(config, form))
    past = [(torch.empty(kv_shape, dtype=dtype), torch.empty(kv_shape, dtype=dtype)) for _ in range(config.layers)]
    length = torch.empty(1, dtype=torch.int32)
    lengths = (length, length.clone(), torch.empty(2, dtype=torch.int64)) if form == "in-place" else ()
    inputs = (
        torch.empty(1, rows, dtype=torch.int32),
        torch.empty(1, 1, rows, half, dtype=dtype),
        torch.empty(1, 1, rows, half, dtype=dtype),
        torch.empty(1, 1, rows, slots, dtype=dtype),
        past,
        lengths,
    )
    vary: tuple[dict[int, object], ...] = ({}, {}, {}, {})
    rows_vary: tuple[dict[int, object], ...] = ({},) * len(lengths)
    if width is None:
        most = max(context, slots)  # the example must fit
        step, total = torch.export.Dim("T", min=1, max=most), torch.export.Dim("total", min=1, max=most)
        vary = ({1: step}, {2: step}, {2: step}, {2: step, 3: total})
        rows_vary = ({}, {}, {0: torch.export.Dim("R", min=0, max=most)})
    return inputs, (*vary, [({}, {})] * config.layers, rows_vary)


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
