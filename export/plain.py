"""Graphs for providers that take few operators: others spelled out in these, and what is left to the CPU all the same."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specedge.devices.operators import Operators
from specedge.export.rewriting import take_place

NORM_FLOOR = 2.0**-6
"""Least of the number that a row is divided by before it is squared, in an RMSNorm: its largest value, or this."""


def spell_out(graph: ir.Graph, operators: Operators) -> None:
    """Replace what a provider does not take and others can stand for: RMSNormalization, and an idle Expand."""
    writer = _Writer(graph)
    for node in list(graph):
        if operators.takes(_name(node)):
            continue
        if node.op_type == "RMSNormalization":
            take_place(graph, node, writer.rms_norm(node))
        elif node.op_type == "Expand" and node.inputs[0] and _is_idle(node):
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
            graph.remove(node, safe=True)


@dataclass(frozen=True, slots=True)
class Preflight:
    """What a provider is going to take of a graph: `left` are the operators it leaves to the CPU, with their numbers.

    `partitions` are the pieces it takes that hang together, at least so many.
    """

    nodes: int
    left: dict[str, int]
    partitions: int

    def __str__(self) -> str:
        left = ", ".join(f"{op} ({count})" for op, count in sorted(self.left.items()))
        taken = self.nodes - sum(self.left.values())
        return f"takes {taken} of {self.nodes} nodes, in {self.partitions} parts, and leaves {left}"


def preflight(graph: ir.Graph, operators: Operators) -> Preflight:
    """A graph against what a provider is documented to take.

    What is computed of constants alone is not counted: onnxruntime does that once, before it asks a provider.
    """
    fixed: set[ir.Value | None] = {None, *graph.initializers.values()}
    nodes = []
    for node in graph:
        if all(value in fixed for value in node.inputs):
            fixed.update(node.outputs)
        else:
            nodes.append(node)
    types = _types(graph)
    reasons = {node: _why_left(node, operators, types) for node in nodes}
    taken = [node for node, reason in reasons.items() if reason is None]
    return Preflight(len(nodes), dict(Counter(reason for reason in reasons.values() if reason)), _parts(taken))


def _types(graph: ir.Graph) -> dict[ir.Value, str]:
    """Of every value: what a rewrite put in has none of its own, and that of what it was made of."""
    known: dict[ir.Value, str] = {}
    for value in (*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)):
        made_by = value.producer()
        if value.dtype is not None:
            known[value] = str(value.dtype.numpy())
        elif made_by and (dtype := _type_of_result(made_by, known)):
            known[value] = dtype
    return known


def _type_of_result(node: ir.Node, known: dict[ir.Value, str]) -> str | None:
    if node.op_type == "Cast":
        return str(ir.DataType(node.attributes["to"].as_int()).numpy())
    if node.op_type in _FIXED_TYPES:
        return _FIXED_TYPES[node.op_type]
    first = node.inputs[node.op_type == "Where"] if len(node.inputs) > (node.op_type == "Where") else None
    return known.get(first) if first is not None else None


_FIXED_TYPES = dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not"), "bool")
_FIXED_TYPES |= dict.fromkeys(("ArgMax", "ArgMin", "NonZero", "Shape", "Size"), "int64")


def _why_left(node: ir.Node, operators: Operators, types: dict[ir.Value, str]) -> str | None:
    """What of a node a provider does not take: its operator, a type of it, or all of this opset; None if it takes it."""
    opset = node.graph.opset_imports.get("", 0) if isinstance(node.graph, ir.Graph) else 0
    if opset > operators.opset:
        return f"opset {opset}"
    name, first = _name(node), node.inputs[0] if node.inputs else None
    if not operators.takes(name):
        return name
    dtype = types.get(first) if first is not None else None
    return None if dtype is None or operators.takes_type(name, dtype) else f"{name} of {dtype}"


def _name(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _parts(nodes: list[ir.Node]) -> int:
    """How many pieces nodes make that no value joins."""
    group = {node: index for index, node in enumerate(nodes)}
    parents = list(range(len(nodes)))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    for node in nodes:
        for value in node.inputs:
            made_by = value.producer() if value else None
            if made_by in group:
                parents[root(group[node])] = root(group[made_by])
    return len({root(index) for index in range(len(nodes))})


def _is_idle(expand: ir.Node) -> bool:
    x, shape = expand.inputs
    if x is None or x.shape is None or shape is None or shape.const_value is None:
        return False
    return np.broadcast_shapes(x.shape.numpy(), tuple(shape.const_value.numpy())) == x.shape.numpy()


class _Writer:
    """Nodes before others; constants are made once."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph

    def rms_norm(self, norm: ir.Node) -> ir.Value:
        """Rows are divided by their largest value first: squares of what a residual stream holds overflow in float16."""
        x, weight = norm.inputs
        assert x is not None and weight is not None and weight.dtype is not None
        real = np.dtype(weight.dtype.numpy())
        last, epsilon = self._constant("last_axis", np.array([-1])), norm.attributes["epsilon"].as_float()
        minus = self._node(norm, "Mul", x, self._number(-1.0, real))
        largest = self._node(norm, "ReduceMax", self._node(norm, "Max", x, minus), last)
        divisor = self._node(norm, "Max", largest, self._number(NORM_FLOOR, real))
        scaled = self._node(norm, "Div", x, divisor)
        mean = self._node(norm, "ReduceMean", self._node(norm, "Mul", scaled, scaled), last)
        least = self._node(norm, "Div", self._number(epsilon**0.5, real), divisor)
        root = self._node(norm, "Sqrt", self._node(norm, "Add", mean, self._node(norm, "Mul", least, least)))
        return self._node(norm, "Mul", self._node(norm, "Div", scaled, root), weight)

    def _node(self, before: ir.Node, op_type: str, *inputs: ir.Value) -> ir.Value:
        node = ir.node(op_type, inputs)
        self._graph.insert_before(before, node)
        return node.outputs[0]

    def _number(self, number: float, dtype: np.dtype[Any]) -> ir.Value:
        return self._constant(f"number_{number}", np.array(number, dtype))

    def _constant(self, name: str, array: npt.NDArray[Any]) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
        return self._graph.initializers.setdefault(name, value)
