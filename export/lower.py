"""From traced graph to device graph: weights attached, matrix products and norms in the device's own kernels."""

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

import numpy as np
import onnx_ir as ir

from specedge.devices.device import Device
from specedge.export.pieces import split_outputs
from specedge.export.plain import spell_out
from specedge.export.products import Product, find_product
from specedge.export.rewriting import remove_unused, take_place
from specedge.export.weights import block_size, side_by_side
from specedge.manifest import Extent, Weight
from specedge.quant.scheme import Scheme

_CONTRIB = "com.microsoft"


def lower(
    model: ir.Model,
    weights: Mapping[str, Weight],
    device: Device,
    file: str,
) -> None:
    """Turn every weight input of a traced graph into initialisers in its weight's file, and its readers into kernels.

    `file` is the bundle's name for the graph, which those of weights are seen from.

    A linear layer arrives as MatMul(x, Transpose(W)) and leaves as MatMulNBits or FusedMatMul, layers joined by a Concat
    as one of them where their weights lie side by side; an embedding arrives as Gather(W, ids) and leaves as
    GatherBlockQuantized over the very bytes the head reads.
    """
    graph = model.graph
    if device.widest_output is not None:
        weights = split_outputs(graph, weights, device.widest_output)
    inputs = {value.name or "": value for value in graph.inputs}
    names = [name for name in inputs if name in weights]
    for name in names:
        graph.inputs.remove(inputs[name])
    attach = _Attach(graph, device, str(PurePosixPath(file).parent))
    for product in list(_products(graph, weights)) if device.contrib else []:
        attach.product(product)
    remove_unused(graph)
    for name in names:
        attach.rest(inputs[name], weights[name])
    if device.form == "in-place":
        _fuse_norms(graph)
    if device.operators:
        spell_out(graph, device.operators)
        model.opset_imports[""] = min(device.operators.opset, model.opset_imports[""])
    if device.contrib:
        model.opset_imports.setdefault(_CONTRIB, 1)


def _products(graph: ir.Graph, weights: Mapping[str, Weight]) -> Iterator[Product]:
    """All linear layers, those first that one kernel can take together."""
    done: set[ir.Value | None] = set()
    for node in graph:
        if node.op_type != "Concat":
            continue
        parts = [part for value in node.inputs if (part := find_product(value, weights))]
        together = side_by_side([part.weight for part in parts])
        if together and len(parts) == len(node.inputs) and len({part.x for part in parts}) == 1:
            done.update(node.inputs)
            yield Product(node.outputs[0], parts[0].x, together)
    for node in graph:
        if node.outputs[0] not in done and (product := find_product(node.outputs[0], weights)):
            yield product


class _Attach:
    """Writes kernels into a graph; initialisers, and what is made of an input for all of its readers, are made once."""

    def __init__(self, graph: ir.Graph, device: Device, folder: str) -> None:
        self._graph, self._device, self._folder = graph, device, folder
        self._sums: dict[tuple[ir.Value, int], ir.Value] = {}
        self._filled: dict[tuple[ir.Value, int], ir.Value] = {}

    def product(self, product: Product) -> None:
        """Replace a linear layer by the kernel for its weight's scheme."""
        old, x, weight = product.output.producer(), product.x, product.weight
        assert old is not None
        if "values" in weight.parts:
            result = self._float(old, x, self._initializer(weight, "values", weight.parts["values"].shape))
        else:
            result = self._quantised(old, x, weight)
        take_place(self._graph, old, result)

    def _float(self, old: ir.Node, x: ir.Value, matrix: ir.Value) -> ir.Value:
        return self._node(old, "FusedMatMul", [x, matrix], {"transB": 1}, _CONTRIB)

    def _quantised(self, old: ir.Node, x: ir.Value, weight: Weight) -> ir.Value:
        rows, columns = weight.shape
        codes, block = weight.parts["codes"], block_size(weight)
        if not self._device.ragged:
            x, columns = self._whole(old, x, columns, block), codes.shape[1] * block
        attributes = {
            "bits": Scheme.from_name(weight.scheme).bits,
            "block_size": block,
            "K": columns,
            "N": rows,
            "accuracy_level": self._device.accuracy_level,
        }
        inputs = [x, self._initializer(weight, "codes", codes.shape), *self._grid(weight)]
        result = self._node(old, "MatMulNBits", inputs, attributes, _CONTRIB)
        if "offsets" not in weight.parts:
            return result
        offsets = self._initializer(weight, "offsets", weight.parts["offsets"].shape)
        rest = self._float(old, self._block_sums(old, x, columns, block), offsets)
        return self._node(old, "Add", [result, rest])

    def _block_sums(self, before: ir.Node, x: ir.Value, columns: int, block: int) -> ir.Value:
        """Sums of x [1, T, K] over every block, [1, T, blocks]."""
        if (x, block) not in self._sums:
            whole = self._whole(before, x, columns, block)
            split = self._node(before, "Reshape", [whole, self._shape(0, 0, -(-columns // block), block)])
            self._sums[x, block] = self._node(before, "ReduceSum", [split, self._shape(-1)], {"keepdims": 0})
        return self._sums[x, block]

    def _whole(self, before: ir.Node, x: ir.Value, columns: int, block: int) -> ir.Value:
        """x [1, T, K] filled up with zeros to whole blocks."""
        missing = -columns % block
        if not missing:
            return x
        if (x, block) not in self._filled:
            if self._device.pads:
                filled = self._node(before, "Pad", [x, self._shape(0, 0, 0, 0, 0, missing)])
            else:
                filled = self._node(before, "MatMul", [x, self._widening(columns, columns + missing)])
            self._filled[x, block] = filled
        return self._filled[x, block]

    def rest(self, value: ir.Value, weight: Weight) -> None:
        """What is not a linear layer: gathered rows of a matrix, or a vector read as it is."""
        for node in list(value.consumers()):
            if node.op_type == "Gather" and "codes" in weight.parts:
                take_place(self._graph, node, self._rows(node, weight))
        if "values" in weight.parts and value.uses():
            own = self._initializer(weight, "values", weight.parts["values"].shape)
            ir.convenience.replace_all_uses_with(value, own)

    def _rows(self, old: ir.Node, weight: Weight) -> ir.Value:
        """Dequantised rows of an embedding."""
        rows, columns = weight.shape
        codes, block, ids = weight.parts["codes"], block_size(weight), old.inputs[1]
        stored = codes.shape[1] * block
        data = self._initializer(weight, "codes", (rows, codes.shape[1] * codes.shape[2]), ".rows")
        attributes = {
            "bits": Scheme.from_name(weight.scheme).bits,
            "block_size": block,
            "gather_axis": 0,
            "quantize_axis": 1,
        }
        result = self._node(old, "GatherBlockQuantized", [data, ids, *self._grid(weight)], attributes, _CONTRIB)
        if "offsets" in weight.parts:
            offsets = self._initializer(weight, "offsets", weight.parts["offsets"].shape)
            offset = self._node(old, "Gather", [offsets, ids], {"axis": 0})
            blocks = self._node(old, "Reshape", [result, self._shape(0, 0, stored // block, block)])
            whole = self._node(old, "Add", [blocks, self._node(old, "Unsqueeze", [offset, self._shape(-1)])])
            result = self._node(old, "Reshape", [whole, self._shape(0, 0, stored)])
        if columns == stored:
            return result
        cut = [self._shape(number) for number in (0, columns, -1)]  # the padding of a ragged last block
        return self._node(old, "Slice", [result, *cut])

    def _grid(self, weight: Weight) -> list[ir.Value]:
        """Scales, and zero points where nothing stands for them."""
        names = ["scales"] if "offsets" in weight.parts else ["scales", "zero_points"]
        names = [name for name in names if name in weight.parts]
        return [self._initializer(weight, name, weight.parts[name].shape) for name in names]

    def _initializer(self, weight: Weight, part: str, shape: tuple[int, ...], view: str = "") -> ir.Value:
        name = weight.name if part == "values" else f"{weight.name}.{part}{view}"
        location = posixpath.relpath(weight.file, self._folder)
        return self._constant(name, _external(name, weight.parts[part], shape, location))

    def _widening(self, rows: int, columns: int) -> ir.Value:
        """The identity, and columns of zeros behind it."""
        name = f"widening_{rows}_{columns}"
        return self._constant(name, ir.tensor(np.eye(rows, columns, dtype=self._device.dtype), name=name))

    def _shape(self, *numbers: int) -> ir.Value:
        """A constant vector of int64."""
        name = "ints_" + "_".join(str(number) for number in numbers)
        return self._constant(name, ir.tensor(list(numbers), ir.DataType.INT64, name=name))

    def _constant(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        shape = ir.Shape(list(tensor.shape.numpy()))
        value = ir.Value(name=name, const_value=tensor, shape=shape, type=ir.TensorType(tensor.dtype))
        return self._graph.initializers.setdefault(name, value)

    def _node(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, int] | None = None,
        domain: str = "",
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, domain=domain)
        self._graph.insert_before(before, node)
        return node.outputs[0]


def _fuse_norms(graph: ir.Graph) -> None:
    """Add and the RMSNormalization behind it become one SkipSimplifiedLayerNormalization."""
    for node in list(graph):
        total = node.inputs[0] if node.op_type == "RMSNormalization" else None
        add = total.producer() if total else None
        if add is None or total is None or add.op_type != "Add":
            continue
        epsilon = node.attributes["epsilon"].as_float()
        fused = ir.node(
            "SkipSimplifiedLayerNormalization",
            [*add.inputs, node.inputs[1]],
            {"epsilon": epsilon},
            domain=_CONTRIB,
            num_outputs=4,
        )
        graph.insert_before(node, fused)
        fused.outputs[1].name = fused.outputs[2].name = ""
        take_place(graph, node, fused.outputs[0])
        take_place(graph, add, fused.outputs[3])


def _external(name: str, extent: Extent, shape: tuple[int, ...], location: str) -> ir.ExternalTensor:
    dtype = ir.DataType.from_numpy(np.dtype(extent.dtype))
    return ir.ExternalTensor(location, extent.offset, extent.bytes, dtype, shape=ir.Shape(shape), name=name)
