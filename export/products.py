"""Linear layers of a traced graph: what lowering turns into kernels."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from specedge.manifest import Weight


@dataclass(frozen=True, slots=True)
class Product:
    """`output` = `x` times the transposed weight."""

    output: ir.Value
    x: ir.Value
    weight: Weight


def find_product(value: ir.Value | None, weights: Mapping[str, Weight]) -> Product | None:
    """The linear layer that makes `value`, if one does."""
    node = value.producer() if value else None
    if value is None or node is None or node.op_type != "MatMul":
        return None
    x, transposed = node.inputs
    transpose = transposed.producer() if transposed else None
    matrix = transpose.inputs[0] if transpose and transpose.op_type == "Transpose" else None
    weight = weights.get(matrix.name or "") if matrix else None
    return Product(value, x, weight) if x and weight else None
