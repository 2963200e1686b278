"""From traced graph to device graph: weights attached, matrix products in the device's own form."""

from collections.abc import Mapping

import onnx_ir as ir

from specedge.bundle import Extent, Weight
from specedge.export.weights import block_size
from specedge.quant.scheme import Scheme

_CONTRIB = "com.microsoft"


def attach_weights(model: ir.Model, weights: Mapping[str, Weight], location: str, accuracy_level: int) -> None:
    """Turn every weight input of a traced graph into initialisers in the file `location`, and its readers into kernels.

    A linear layer arrives as MatMul(x, Transpose(W)) and leaves as MatMulNBits or FusedMatMul; an embedding arrives as
    Gather(W, ids) and leaves as GatherBlockQuantized over the very bytes the head reads. `accuracy_level` is MatMulNBits'.
    """
    graph = model.graph
    for value in list(graph.inputs):
        weight = weights.get(value.name or "")
        if weight is None:
            continue
        graph.inputs.remove(value)
        if "values" in weight.parts:
            _attach_float(graph, value, weight, location)
        else:
            _attach_quantized(graph, value, weight, location, accuracy_level)
    model.opset_imports.setdefault(_CONTRIB, 1)


def _attach_float(graph: ir.Graph, value: ir.Value, weight: Weight, location: str) -> None:
    extent = weight.parts["values"]
    value.const_value = _external(weight.name, extent, extent.shape, location)
    graph.initializers.add(value)
    for transpose in [node for node in value.consumers() if node.op_type == "Transpose"]:
        for product in list(transpose.outputs[0].consumers()):
            _replace(graph, product, "FusedMatMul", [product.inputs[0], value], {"transB": 1})
        graph.remove(transpose, safe=True)


def _attach_quantized(graph: ir.Graph, value: ir.Value, weight: Weight, location: str, accuracy_level: int) -> None:
    scheme, block = Scheme.from_name(weight.scheme), block_size(weight)
    rows, columns = weight.shape
    codes = weight.parts["codes"]

    def initializer(part: str, shape: tuple[int, ...], view: str = "") -> ir.Value:
        name = f"{weight.name}.{part}{view}"
        if name not in graph.initializers:
            tensor = _external(name, weight.parts[part], shape, location)
            graph.initializers.add(
                ir.Value(name=name, const_value=tensor, shape=tensor.shape, type=ir.TensorType(tensor.dtype))
            )
        return graph.initializers[name]

    scales = initializer("scales", weight.parts["scales"].shape)
    has_zero = "zero_points" in weight.parts
    zero_points = [initializer("zero_points", weight.parts["zero_points"].shape)] if has_zero else []
    for node in list(value.consumers()):
        if node.op_type == "Gather":
            data = initializer("codes", (rows, codes.shape[1] * codes.shape[2]), ".rows")
            layout = {"bits": scheme.bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
            new = _replace(graph, node, "GatherBlockQuantized", [data, node.inputs[1], scales, *zero_points], layout)
            _cut_columns(graph, new, columns, codes.shape[1] * block)
            continue
        assert node.op_type == "Transpose", f"{weight.name}: read by {node.op_type}"
        data = initializer("codes", codes.shape)
        attributes = {
            "bits": scheme.bits,
            "block_size": block,
            "K": columns,
            "N": rows,
            "accuracy_level": accuracy_level,
        }
        for product in list(node.outputs[0].consumers()):
            _replace(graph, product, "MatMulNBits", [product.inputs[0], data, scales, *zero_points], attributes)
        graph.remove(node, safe=True)


def _cut_columns(graph: ir.Graph, node: ir.Node, columns: int, stored: int) -> None:
    """Drop the padding of a ragged last block from gathered rows."""
    if columns == stored:
        return
    output = node.outputs[0]
    bounds = [
        graph.initializers.setdefault(name, ir.Value(name=name, const_value=ir.tensor([number], ir.DataType.INT64, name=name)))
        for name, number in (("cut_start", 0), ("cut_end", columns), ("cut_axis", -1))
    ]
    cut = ir.node("Slice", [output, *bounds])
    cut.outputs[0].name = f"{output.name}_cut"
    cut.outputs[0].type, cut.outputs[0].shape = output.type, output.shape
    output.shape = None
    graph.insert_after(node, cut)
    for consumer, index in list(output.uses()):
        if consumer is not cut:
            consumer.replace_input_with(index, cut.outputs[0])


def _replace(graph: ir.Graph, old: ir.Node, op_type: str, inputs: list[ir.Value | None], attributes: dict[str, int]) -> ir.Node:
    """Put a contrib node in the place of `old`, whose output keeps its name, type and readers."""
    new = ir.node(op_type, inputs, attributes, domain=_CONTRIB)
    before, after = old.outputs[0], new.outputs[0]
    after.name, after.type, after.shape = before.name, before.type, before.shape
    graph.insert_after(old, new)
    ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
    graph.remove(old, safe=True)
    return new


def _external(name: str, extent: Extent, shape: tuple[int, ...], location: str) -> ir.ExternalTensor:
    dtype = {"uint8": ir.DataType.UINT8, "float16": ir.DataType.FLOAT16, "float32": ir.DataType.FLOAT}[extent.dtype]
    return ir.ExternalTensor(location, extent.offset, extent.bytes, dtype, shape=ir.Shape(shape), name=name)
