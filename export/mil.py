"""A traced graph as a function of a Core ML program, op by op: static shapes, weights as constants of their own names."""

import logging
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specedge.export.plain import NORM_FLOOR
from specedge.export.products import find_product
from specedge.manifest import Weight

logging.getLogger("coremltools").setLevel(logging.ERROR)  # it warns of libraries that only a Mac has, and of versions
import coremltools as ct  # noqa: E402  # its logger had to be told first
from coremltools.converters.mil.mil import Builder as mb  # noqa: E402, N813  # the name every program of its uses
from coremltools.converters.mil.mil import Function, types  # noqa: E402

Array = npt.NDArray[Any]
Var = Any  # coremltools has no annotations

_TYPES = {"float16": types.fp16, "float32": types.fp32, "int32": types.int32}
_TURNED = [0, 1, 3, 2]  # the transposition that a product does by itself


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A weight as a program holds it: `values`; or `codes` of so many bits, less `zeros`, times `scales`, plus `minima`.

    Codes [rows, K] and zeros are of a type that coremltools knows as that of so many bits, signed or not; all but codes are
    [rows, 1] or [rows, blocks].
    """

    values: Array | None = None
    bits: int = 0
    codes: Array | None = None
    scales: Array | None = None
    zeros: Array | None = None
    minima: Array | None = None

    @property
    def parts(self) -> dict[str, Array]:
        """Its arrays, by the names that a manifest gives them."""
        named = {"values": self.values, "codes": self.codes, "scales": self.scales}
        named |= {"zero_points": self.zeros, "minima": self.minima}
        return {name: array for name, array in named.items() if array is not None}


Matrices = Callable[[Weight], Matrix]


def mil_name(name: str) -> str:
    """A tensor's name as a program can have it."""
    return re.sub(r"\W", "_", name)


def translate(model: ir.Model, weights: Mapping[str, Weight], matrices: Matrices, target: str) -> Function:
    """The function of a graph whose weights are inputs; its other inputs, and its outputs, keep their names."""
    inputs = {}
    for value in model.graph.inputs:
        if value.name not in weights:
            assert value.shape is not None and value.dtype is not None
            inputs[value.name] = mb.placeholder(value.shape.numpy(), dtype=_TYPES[str(np.dtype(value.dtype.numpy()))])
    with Function(inputs, opset_version=getattr(ct.target, target)) as function:
        translator = _Translator(model.graph, weights, matrices, function.inputs)
        function.set_outputs(translator.outputs())
    _number(function, translator.named.keys() | {output.name for output in function.outputs})
    return function


def _number(function: Function, kept: Set[str]) -> None:
    """Name ops by their place: coremltools counts on from one program to the next, and the same graph gives the same bytes."""
    for place, op in enumerate(function.operations):
        for index, var in enumerate(op.outputs):
            if var.name not in kept:
                var.name = f"{op.op_type}_{place}" + (f"_{index}" if index else "")
        op.name = op.outputs[0].name


class _Translator:
    """Nodes into ops, in order; a Transpose of a weight, and what a wider op takes over, is left out."""

    def __init__(self, graph: ir.Graph, weights: Mapping[str, Weight], matrices: Matrices, inputs: Mapping[str, Var]) -> None:
        self._graph, self._weights, self._matrices = graph, weights, matrices
        self._made: dict[ir.Value, Var] = {value: inputs[value.name or ""] for value in graph.inputs if value.name in inputs}
        self.named: dict[str, Var] = {}
        """Constants that are stored once, by the names they have in every function."""
        self._wide: dict[tuple[ir.Value, int], Var] = {}
        self._sums: dict[tuple[str, int], Var] = {}

    def outputs(self) -> list[Var]:
        for node in self._graph:
            if node.op_type not in _OPS:
                raise ValueError(f"{node.op_type}: has no translation to Core ML")
            if not self._is_taken_over(node):
                made = _OPS[node.op_type](self, node)
                made = made if isinstance(made, (list, tuple)) else [made]
                self._made |= zip(node.outputs, made, strict=True)
        found = []
        for output in self._graph.outputs:
            var = self._made[output]
            if var.name in self._names():  # an input, or another output as well
                var = mb.identity(x=var)
            var.name = output.name
            found.append(var)
        return found

    def _names(self) -> set[str]:
        return {value.name or "" for value in (*self._graph.inputs, *self._graph.outputs)}

    # ---- what nodes read

    def _x(self, node: ir.Node, index: int = 0) -> Var:
        value = node.inputs[index]
        assert value is not None
        if value.const_value is not None:
            return value.const_value.numpy()
        if value.name and value.name in self._weights:
            return self._weight(self._weights[value.name])
        return self._made[value]

    def _numbers(self, node: ir.Node, index: int) -> list[int]:
        value = node.inputs[index]
        assert value is not None and value.const_value is not None
        return [int(number) for number in value.const_value.numpy().ravel()]

    def _weight(self, weight: Weight) -> Var:
        """A weight as a constant, quantised or not."""
        name = mil_name(weight.name)
        if name not in self.named:
            matrix = self._matrices(weight)
            self.named[name] = self._quantised(name, matrix) if matrix.values is None else self._constant(name, matrix.values)
        return self.named[name]

    def _quantised(self, name: str, matrix: Matrix) -> Var:
        assert matrix.codes is not None
        parts = {"data": matrix.codes, "scale": matrix.scales}
        if matrix.zeros is not None:
            parts["offset"] = matrix.zeros
        made = {part: self._constant(f"{name}_{part}", array) for part, array in parts.items()}
        return mb.constexpr_blockwise_shift_scale(**made, name=name)

    def _constant(self, name: str, array: Array | None) -> Var:
        """A constant that is stored once, whichever functions read it by this name."""
        if name not in self.named:
            self.named[name] = mb.const(val=array, name=name)
            self.named[name].op.weight_id = name
        return self.named[name]

    # ---- ops

    def _is_taken_over(self, node: ir.Node) -> bool:
        readers = [user.node for user in node.outputs[0].uses()]
        if node.op_type == "Sigmoid":
            return bool(readers) and all(_silu_of(reader) is node.inputs[0] for reader in readers)
        if node.op_type != "Transpose" or not readers:
            return False
        return all(self._reads_turned(reader, node) for reader in readers)

    def _reads_turned(self, reader: ir.Node, transpose: ir.Node) -> bool:
        """Whether a product takes what a Transpose reads instead of what it makes."""
        if reader.op_type != "MatMul" or reader.inputs[1] is not transpose.outputs[0]:
            return False
        return find_product(reader.outputs[0], self._weights) is not None or _order(transpose) == _TURNED

    def matmul(self, node: ir.Node) -> Var:
        product = find_product(node.outputs[0], self._weights)
        if product is None:
            transpose = node.inputs[1].producer() if node.inputs[1] else None
            if transpose is not None and transpose.op_type == "Transpose" and _order(transpose) == _TURNED:
                return mb.matmul(x=self._x(node), y=self._x(transpose), transpose_y=True)
            return mb.matmul(x=self._x(node), y=self._x(node, 1))
        weight = self._weight(product.weight)
        x = self._filled(product.x, weight.shape[1])
        result = mb.linear(x=x, weight=weight, bias=self._zeros(weight))
        matrix = self._matrices(product.weight)
        if matrix.minima is None:
            return result
        minima = self._constant(f"{mil_name(product.weight.name)}_minima", matrix.minima)
        sums = self._block_sums(x, minima.shape[1])
        return mb.add(x=result, y=mb.linear(x=sums, weight=minima, bias=self._zeros(minima)))

    def _zeros(self, weight: Var) -> Var:
        """The bias of a linear layer without one, stored once for all of its size: left out, each would get its own."""
        rows = weight.shape[0]
        return self._constant(f"zeros_{rows}", np.zeros(rows, types.nptype_from_builtin(weight.dtype)))

    def _filled(self, value: ir.Value, columns: int) -> Var:
        """x [1, T, K] with so many columns, zeros behind its own."""
        x = self._made[value]
        if (missing := columns - x.shape[-1]) and (value, columns) not in self._wide:
            zero = types.nptype_from_builtin(x.dtype)(0)
            self._wide[value, columns] = mb.pad(x=x, pad=[0, 0] * (x.rank - 1) + [0, missing], constant_val=zero)
        return self._wide[value, columns] if missing else x

    def _block_sums(self, x: Var, blocks: int) -> Var:
        """Sums of x [1, T, K] over every block, [1, T, blocks]."""
        if (x.name, blocks) not in self._sums:
            split = mb.reshape(x=x, shape=[*x.shape[:-1], blocks, x.shape[-1] // blocks])
            self._sums[x.name, blocks] = mb.reduce_sum(x=split, axes=[-1], keep_dims=False)
        return self._sums[x.name, blocks]

    def rms_norm(self, node: ir.Node) -> Var:
        """Rows are divided by their largest value first: squares of what a residual stream holds overflow in float16."""
        x, epsilon = self._x(node), node.attributes["epsilon"].as_float()
        real = types.nptype_from_builtin(x.dtype)
        largest = mb.maximum(x=mb.reduce_max(x=mb.abs(x=x), axes=[-1], keep_dims=True), y=real(NORM_FLOOR))
        scaled = mb.real_div(x=x, y=largest)
        mean = mb.reduce_mean(x=mb.mul(x=scaled, y=scaled), axes=[-1], keep_dims=True)
        least = mb.real_div(x=real(epsilon**0.5), y=largest)
        root = mb.sqrt(x=mb.add(x=mean, y=mb.mul(x=least, y=least)))
        return mb.mul(x=mb.real_div(x=scaled, y=root), y=self._x(node, 1))

    def mul(self, node: ir.Node) -> Var:
        if (value := _silu_of(node)) is not None:
            return mb.silu(x=self._made[value])
        return mb.mul(x=self._x(node), y=self._x(node, 1))

    def transpose(self, node: ir.Node) -> Var:
        x = self._x(node)
        return mb.transpose(x=x, perm=_order(node) or list(reversed(range(x.rank))))

    def reshape(self, node: ir.Node) -> Var:
        return mb.reshape(x=self._x(node), shape=self._numbers(node, 1))

    def concat(self, node: ir.Node) -> Var:
        values = [self._x(node, index) for index in range(len(node.inputs))]
        return mb.concat(values=values, axis=node.attributes["axis"].as_int())

    def split(self, node: ir.Node) -> Var:
        return mb.split(x=self._x(node), split_sizes=self._numbers(node, 1), axis=node.attributes["axis"].as_int())

    def slice(self, node: ir.Node) -> Var:
        x = self._x(node)
        begin, end = [0] * x.rank, list(x.shape)
        starts, ends, axes = (self._numbers(node, index) for index in (1, 2, 3))
        if len(node.inputs) > 4 and set(self._numbers(node, 4)) != {1}:
            raise ValueError(f"{node.name}: a Slice with steps has no translation to Core ML")
        for start, stop, axis in zip(starts, ends, axes, strict=True):
            begin[axis], end[axis], _ = slice(start, stop).indices(x.shape[axis])
        return mb.slice_by_index(x=x, begin=begin, end=end)

    def repeat(self, node: ir.Node) -> Var:
        """Tile, and Expand to whole multiples."""
        x, numbers = self._x(node), self._numbers(node, 1)
        if node.op_type == "Expand":
            numbers = [size // of for size, of in zip(np.broadcast_shapes(x.shape, numbers), x.shape, strict=True)]
        return x if set(numbers) == {1} else mb.tile(x=x, reps=numbers)

    def gather(self, node: ir.Node) -> Var:
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
        indices = self._x(node, 1)
        indices = indices.astype(np.int32) if isinstance(indices, np.ndarray) else indices
        return mb.gather(x=self._x(node), indices=indices, axis=axis, validate_indices=False)


def _order(transpose: ir.Node) -> list[int]:
    return list(transpose.attributes["perm"].as_ints()) if "perm" in transpose.attributes else []


def _silu_of(node: ir.Node) -> ir.Value | None:
    """x, where a node is x times sigmoid(x)."""
    if node.op_type != "Mul":
        return None
    for x, other in (node.inputs, reversed(node.inputs)):
        made = other.producer() if other else None
        if made is not None and made.op_type == "Sigmoid" and made.inputs[0] is x:
            return x
    return None


_OPS: dict[str, Callable[[_Translator, ir.Node], Any]] = {
    "Add": lambda made, node: mb.add(x=made._x(node), y=made._x(node, 1)),
    "Concat": _Translator.concat,
    "Expand": _Translator.repeat,
    "Gather": _Translator.gather,
    "Identity": lambda made, node: made._x(node),
    "MatMul": _Translator.matmul,
    "Mul": _Translator.mul,
    "RMSNormalization": _Translator.rms_norm,
    "Reshape": _Translator.reshape,
    "Sigmoid": lambda made, node: mb.sigmoid(x=made._x(node)),
    "Slice": _Translator.slice,
    "Softmax": lambda made, node: mb.softmax(x=made._x(node), axis=node.attributes["axis"].as_int()),
    "Split": _Translator.split,
    "Squeeze": lambda made, node: mb.squeeze(x=made._x(node), axes=made._numbers(node, 1)),
    "Sub": lambda made, node: mb.sub(x=made._x(node), y=made._x(node, 1)),
    "Tile": _Translator.repeat,
    "Transpose": _Translator.transpose,
    "Unsqueeze": lambda made, node: mb.expand_dims(x=made._x(node), axes=made._numbers(node, 1)),
}
