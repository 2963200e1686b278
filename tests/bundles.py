"""Bundles of tiny models for the tests, float32 and small unless a test says otherwise, and what is inside them."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import tiny
from specedge.bundle import Bundle
from specedge.export.convert import convert
from specedge.export.recipe import Recipe
from specedge.export.request import Request
from specedge.export.weights import read_float32
from specedge.manifest import Role
from specedge.runtime import Engine, load
from specedge.runtime.control import Costs
from tiny import Array

# One shape for all tests of the plain F-RAND: a graph is traced once per process.
SHAPE: dict[str, Any] = {"context": 128, "widths": (1, 4), "chunk": 8}


_RECIPE = {field.name for field in dataclasses.fields(Recipe)}


def make(source: Path, output: Path, **options: Any) -> Path:
    """Convert `source` with the options of `Request` and `Recipe`.

    In float32, widths 1, 4 and 6, context 64, chunk 8 by default.
    """
    given = {name: options.pop(name) for name in [*options] if name in _RECIPE}
    settings: dict[str, Any] = {
        "recipe": Recipe(**{"body": "float32", "head": "float32", **given}),
        "widths": (1, 4, 6),
        "context": 64,
        "chunk": 8,
        "force": True,
        **options,
    }
    return convert(Request(str(source), output, **settings)).path


def engine(source: Path, output: Path, **options: Any) -> Engine:
    """The engine over a bundle made as `make` does; drafts with the draft model where there is one."""
    return load(make(source, output, **options), threads=1)


@contextmanager
def cheap_drafts(engine: Engine) -> Iterator[None]:
    """As if drafts cost little, so that control makes some: those of tiny models take as long as the target's own steps."""
    real, count = engine.costs, len(engine.costs.verify)
    engine.costs = Costs(tuple(0.01 * gamma for gamma in range(count)), tuple(1 + 0.01 * gamma for gamma in range(count)))
    yield
    engine.costs = real


class Models:
    """F-RAND by its settings: the folder and the model, each made once."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._made: dict[str, tuple[Path, LlamaForCausalLM]] = {}

    def __call__(self, **overrides: Any) -> tuple[Path, LlamaForCausalLM]:
        key = str(sorted(overrides.items()))
        if key not in self._made:
            folder = self._folders.mktemp("models") / "f-rand"
            self._made[key] = folder, tiny.f_rand(folder, **overrides)
        return self._made[key]


def stored(model: PreTrainedModel, bundle: Bundle, role: str = "target") -> PreTrainedModel:
    """The model with the weights that the bundle holds, dequantised: what is left is the graph's doing."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in bundle.role(role).weights:
            name = weight.name if weight.name.startswith("lm_head") else f"model.{weight.name}"
            model.get_parameter(name).copy_(torch.from_numpy(read_float32(weight, bundle.file(weight.file))[0]))
    return model


def graphs(bundle: Bundle, role: str = "target") -> dict[str, onnx.ModelProto]:
    return {graph.file: onnx.load(bundle.file(graph.file), load_external_data=False) for graph in bundle.role(role).graphs}


def compute_in_float(bundle: Bundle) -> Bundle:
    """Make every MatMulNBits compute in float32: only the layout of the weights counts then."""
    for file, model in graphs(bundle).items():
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = 0
        size = bundle.file(file).stat().st_size
        bundle.file(file).write_bytes(model.SerializeToString())
        assert bundle.file(file).stat().st_size == size  # or the manifest would have to say so
    return bundle


def feed(
    role: Role, ids: Sequence[int], width: int, past: Callable[..., Array] = np.zeros, length: int = 0
) -> dict[str, Array]:
    """The inputs of a step behind `length` tokens of `past`, made by hand as design.md §4.1 tells a host in any language."""
    dtype, kv_shape = np.dtype(role.kv.dtype), (1, role.kv.heads, role.kv.slots, role.kv.head_dim)
    positions = np.arange(length, length + width, dtype=np.float32)
    angles = np.outer(positions, np.asarray(role.rope.inv_freq, np.float32))
    new = np.tri(width, dtype=bool)
    new[len(ids) :] = np.eye(width, dtype=bool)[len(ids) :]  # padding rows see themselves
    old = np.tile(np.arange(role.context if role.form == "delta" else length) < length, (width, 1))
    old[len(ids) :] = False
    inputs: dict[str, Array] = {
        "input_ids": np.asarray([[*ids, *[0] * (width - len(ids))]], np.int32),
        "rope_cos": np.cos(angles)[None, None].astype(dtype),
        "rope_sin": np.sin(angles)[None, None].astype(dtype),
        "attention_bias": np.where(np.hstack([old, new]), 0, role.mask_value)[None, None].astype(dtype),
    }
    if role.form == "in-place":
        inputs["seqlens_k"] = np.asarray([length + width - 1], np.int32)
        inputs["total_sequence_length"] = np.asarray([length + width], np.int32)
        inputs["logits_rows"] = np.arange(width)
    names = [f"past_{kind}_{layer}" for layer in range(role.kv.layers) for kind in ("key", "value")]
    return inputs | {name: past(kv_shape).astype(dtype) for name in names}


def run(path: Path, inputs: dict[str, Array], level: Any = ort.GraphOptimizationLevel.ORT_ENABLE_ALL) -> dict[str, Array]:
    """The outputs of one graph, at ONNX Runtime's default optimisation unless told otherwise."""
    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level, options.intra_op_num_threads = level, 3, 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, inputs), strict=True))


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def external(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    return {item.name: tuple(item.dims) for item in model.graph.initializer if item.external_data}


def locations(model: onnx.ModelProto) -> dict[str, tuple[int, int]]:
    """Offset and length of every initialiser in the weight file."""
    found = {}
    for item in model.graph.initializer:
        if item.external_data:
            record = {entry.key: entry.value for entry in item.external_data}
            assert record["location"] == "weights.bin"
            found[item.name] = int(record["offset"]), int(record["length"])
    return found


def both_levels(path: Path, inputs: dict[str, Array]) -> list[Array]:
    levels = (ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    return [run(path, inputs, level)["logits"][0] for level in levels]
