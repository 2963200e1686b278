"""Logits in pieces: outputs of fewer columns each, for devices that take no matrix product as wide as a vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from specedge.export.products import find_product
from specedge.export.rewriting import remove_unused
from specedge.manifest import PIECED, Extent, Weight

_BY_ROW = ("Squeeze", "Unsqueeze", "Gather", "Identity")  # of these the columns of a result are those of the first input


Weights = Mapping[str, Weight]


def split_outputs(graph: ir.Graph, weights: Weights, widest: int) -> Weights:
    """Give every output of logits as `name_0`, `name_1` ... of at most `widest` columns.

    Such an output is made of linear layers by nothing but choosing and joining rows. Returns the weights with the pieces
    that are inputs of the graph now.
    """
    cutter = _Cutter(graph, dict(weights))
    for output in [value for value in graph.outputs if value.name in PIECED]:
        assert output.shape is not None
        *rows, columns = output.shape
        assert isinstance(columns, int)
        if columns <= widest:
            continue
        pieces = []
        for index, start in enumerate(range(0, columns, widest)):
            end = min(start + widest, columns)
            piece = cutter.columns(output, slice(start, end))
            piece.name, piece.type, piece.shape = f"{output.name}_{index}", output.type, ir.Shape([*rows, end - start])
            pieces.append(piece)
        place = list(graph.outputs).index(output)
        graph.outputs[place : place + 1] = pieces
    remove_unused(graph)
    return cutter.weights


@dataclass(slots=True)
class _Cutter:
    """Computes some columns of values of a graph anew."""

    graph: ir.Graph
    weights: dict[str, Weight]

    def columns(self, value: ir.Value, part: slice) -> ir.Value:
        node = value.producer()
        assert node is not None
        if product := find_product(value, self.weights):
            transpose = node.inputs[1].producer() if node.inputs[1] else None
            assert transpose is not None and transpose.inputs[0] is not None
            matrix = self._rows(transpose.inputs[0], product.weight, part)
            transposed = self._insert(node, ir.node("Transpose", [matrix]))
            return self._insert(node, ir.node("MatMul", [product.x, transposed]))
        if node.op_type not in (*_BY_ROW, "Concat"):
            raise ValueError(f"{value.name}: made by {node.op_type}, which is not known to keep columns apart")
        cut = len(node.inputs) if node.op_type == "Concat" else 1
        inputs = [self.columns(one, part) for one in node.inputs[:cut] if one is not None]
        return self._insert(node, ir.node(node.op_type, [*inputs, *node.inputs[cut:]], attributes=node.attributes))

    def _rows(self, matrix: ir.Value, weight: Weight, part: slice) -> ir.Value:
        """Some rows of a weight, as a weight input of the graph."""
        key, name = f"{matrix.name}.{part.start}", f"{weight.name}.{part.start}"
        if key in self.weights:
            return next(value for value in self.graph.inputs if value.name == key)
        parts = {kind: _cut(extent, part) for kind, extent in weight.parts.items()}
        self.weights[key] = replace(weight, name=name, shape=(part.stop - part.start, *weight.shape[1:]), parts=parts)
        value = ir.Value(name=key, type=matrix.type, shape=ir.Shape(self.weights[key].shape))
        self.graph.inputs.append(value)
        return value

    def _insert(self, before: ir.Node, node: ir.Node) -> ir.Value:
        self.graph.insert_before(before, node)
        return node.outputs[0]


def _cut(extent: Extent, part: slice) -> Extent:
    row, rows = extent.bytes // extent.shape[0], part.stop - part.start
    return replace(extent, offset=extent.offset + part.start * row, bytes=rows * row, shape=(rows, *extent.shape[1:]))
