"""Graphs composed of traced steps: a step with its LM head, or several steps with the choice of tokens between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from specedge.export.to_onnx import OPSET
from specedge.manifest import EMBEDDING, VOCABULARY

Size = int | str | ir.SymbolicDim | None
LOGITS, FED_BACK = "logits", "fed_back"


@dataclass(frozen=True, slots=True)
class Body:
    """A traced step without LM head, of symbolic width T and past P; weights are inputs by their canonical names.

    Inputs `input_ids` [1, T], which nothing reads but a Gather from EMBEDDING, `features` [1, T, F] where it reads any,
    `rope_cos`, `rope_sin` [1, 1, T, D / 2], `attention_bias` [1, 1, T, P + T], `past_*`; outputs [1, T, H] what it `gives`,
    LOGITS standing for what feeds the LM head, and the new columns of every past, `kv`, by names such as key_0.
    """

    name: str
    model: ir.Model
    gives: tuple[str, ...]
    kv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes a composed graph has: what the traced ones leave open. Width and slots None: symbolic."""

    width: int | None  # rows of text
    slots: int | None  # columns of the past that are read
    past: tuple[int, int, int]  # K, slots and head dimension of the KV buffers
    head_dim: int  # what the step makes of the last
    half: int  # D / 2 of the rotary tables
    features: tuple[str, int] | None  # the target's output that is read, and its size
    lm_head: tuple[str, int, int]  # the weight's name, Vd and H
    embeds: bool  # whether the embedding's rows are fed instead of ids
    mapped: bool  # whether the weight VOCABULARY [Vd] says which ids of the target the drafter's are
    dtype: ir.DataType

    def at(self, width: int | None) -> "Layout":
        """The same for so many rows of text."""
        return replace(self, width=width)


@dataclass
class Composer:
    """A graph in the making: inputs, weights among them, and constants are made once.

    Rows of the step inputs are counted from the end, where their number is known: T may be symbolic.
    """

    layout: Layout
    rows_more: int = 0
    parents: int | None = None
    inputs: dict[str, ir.Value] = field(default_factory=dict)
    nodes: list[ir.Node] = field(default_factory=list)
    outputs: list[ir.Value] = field(default_factory=list)
    constants: dict[str, ir.Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout, half = self.layout, self.layout.half
        self.width: int | str = "T" if layout.width is None else layout.width
        rows = f"T+{self.rows_more}" if layout.width is None and self.rows_more else self.width
        if layout.width is not None:
            rows = layout.width + self.rows_more
        slots = "total" if layout.slots is None or isinstance(rows, str) else layout.slots + rows
        if layout.embeds:
            self.text = self.input("input_embeds", layout.dtype, [1, self.width, layout.lm_head[2]])
        else:
            self.text = self.input("input_ids", ir.DataType.INT32, [1, self.width])
        self.features = None
        if layout.features:
            name, size = layout.features
            self.features = self.input(name, layout.dtype, [1, self.width, size])
        self.cos, self.sin = (self.input(f"rope_{name}", layout.dtype, [1, 1, rows, half]) for name in ("cos", "sin"))
        self.bias = self.input("attention_bias", layout.dtype, [1, 1, rows, slots])
        if self.parents is not None:
            self.noise = self.input("noise", ir.DataType.FLOAT, [self.parents, layout.lm_head[1]])

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[Size]) -> ir.Value:
        if name not in self.inputs:
            self.inputs[name] = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        return self.inputs[name]

    def output(self, name: str, value: ir.Value, dtype: ir.DataType, shape: Sequence[Size]) -> None:
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
        self.outputs.append(value)

    def op(self, op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        node = ir.node(op_type, inputs, attributes)
        self.nodes.append(node)
        return node.outputs[0]

    def ints(self, *numbers: int) -> ir.Value:
        name = "ints_" + "_".join(map(str, numbers))
        return self._constant(name, ir.tensor(np.array(numbers, np.int64), name=name))

    def past(self, body: Body) -> dict[str, ir.Value]:
        """The columns of every past buffer that are in use, as the traced steps take them, by names such as key_0."""
        layout = self.layout
        found = {}
        for name in body.kv:
            heads, slots, head_dim = layout.past
            value = self.input(f"past_{name}", layout.dtype, [1, heads, slots, head_dim])
            if layout.slots != slots:
                value = self.op("Slice", value, self.ints(0), self._length(), self.ints(2))
            if layout.head_dim != head_dim:
                value = self.op("Slice", value, self.ints(0), self.ints(layout.head_dim), self.ints(3))
            found[name] = value
        return found

    def new_columns(self, name: str, value: ir.Value) -> None:
        """The output of a past buffer's new columns, heads filled up with zeros where the buffers are."""
        heads, _, head_dim = self.layout.past
        if head_dim != self.layout.head_dim:
            value = self.op("Pad", value, self.ints(0, 0, 0, 0, 0, 0, 0, head_dim - self.layout.head_dim))
        rows = self.inputs["rope_cos"].shape
        assert rows is not None
        self.output(f"new_{name}", value, self.layout.dtype, [1, heads, rows[2], head_dim])

    def call(
        self,
        body: Body,
        rows: slice,
        past: Mapping[str, ir.Value],
        ids: ir.Value | None = None,
        features: ir.Value | None = None,
    ) -> dict[str, ir.Value]:
        """The nodes of a traced step over some rows of the inputs: its outputs by what they are.

        `ids` are other tokens than those of the text, which only graphs with an embedding take.
        """
        text = self.text if ids is None else ids
        given = {
            "input_ids": text,
            "rope_cos": self._between(self.cos, rows, 2),
            "rope_sin": self._between(self.sin, rows, 2),
            "attention_bias": self._between(self._between(self.bias, rows, 2), slice(0, rows.stop), 3),
        }
        given |= {f"past_{name}": value for name, value in past.items()}
        if read := features or self.features:
            given["features"] = read
        values: dict[ir.Value | None, ir.Value | None] = {None: None}
        for value in body.model.graph.inputs:
            assert value.name and value.dtype and value.shape is not None
            if self.layout.embeds and value.name == EMBEDDING:
                continue
            values[value] = given.get(value.name) or self.input(value.name, value.dtype, list(value.shape))
        for name, value in body.model.graph.initializers.items():
            assert value.const_value is not None
            values[value] = self._constant(f"{body.name}.{name}", value.const_value)
        for node in body.model.graph:
            if node.inputs[0] not in values:  # the rows of an embedding that is left out
                values[node.outputs[0]] = text
                continue
            copy = ir.Node(
                node.domain,
                node.op_type,
                [values[value] for value in node.inputs],
                list(node.attributes.values()),
                num_outputs=len(node.outputs),
            )
            self.nodes.append(copy)
            values |= dict(zip(node.outputs, copy.outputs, strict=True))
        found = zip((*body.gives, *body.kv), body.model.graph.outputs, strict=True)
        return {what: made for what, output in found if (made := values[output]) is not None}

    def logits(self, x: ir.Value) -> ir.Value:
        """[n, Vd] of [1, n, H], in the form that lowering knows as a linear layer."""
        name, rows, columns = self.layout.lm_head
        transposed = self.op("Transpose", self.input(name, self.layout.dtype, [rows, columns]))
        return self.op("Squeeze", self.op("MatMul", x, transposed), self.ints(0))

    def wide(self, logits: ir.Value) -> ir.Value:
        """As float32: float16 would round noise and logits to another law than theirs."""
        return logits if self.layout.dtype == ir.DataType.FLOAT else self.op("Cast", logits, to=ir.DataType.FLOAT)

    def choose(self, scores: ir.Value, children: Sequence[tuple[int, int]]) -> ir.Value:
        """Target ids int32 [n] of `children`, each the parent's row of `scores` and its rank among the best there."""
        most = 1 + max(rank for _, rank in children)
        if most == 1:
            ids = self.take(self.op("ArgMax", scores, axis=-1, keepdims=0), [row for row, _ in children], None, axis=0)
        else:
            best = ir.node("TopK", [scores, self.ints(most)], num_outputs=2)
            self.nodes.append(best)
            flat = self.op("Reshape", best.outputs[1], self.ints(-1))
            ids = self.take(flat, [row * most + rank for row, rank in children], None, axis=0)
        if self.layout.mapped:
            vocabulary = self.input(VOCABULARY, ir.DataType.INT32, [self.layout.lm_head[1]])
            return self.op("Gather", vocabulary, ids)
        return self.op("Cast", ids, to=ir.DataType.INT32)

    def take(self, value: ir.Value, places: Sequence[int], of: int | None, axis: int) -> ir.Value:
        """`places` along an axis; all `of` them are the value itself."""
        if of is not None and list(places) == list(range(of)):
            return value
        return self.op("Gather", value, self.ints(*places), axis=axis)

    def join(self, values: Sequence[ir.Value], axis: int) -> ir.Value:
        return values[0] if len(values) == 1 else self.op("Concat", *values, axis=axis)

    def model(self) -> ir.Model:
        graph = ir.Graph(
            list(self.inputs.values()),
            self.outputs,
            nodes=self.nodes,
            initializers=list(self.constants.values()),
            opset_imports={"": OPSET},
            name="main_graph",
        )
        return ir.Model(graph, ir_version=10, producer_name="specedge")

    def _between(self, value: ir.Value, rows: slice, axis: int) -> ir.Value:
        if rows == slice(0, None):
            return value
        end = np.iinfo(np.int64).max if rows.stop is None else rows.stop
        return self.op("Slice", value, self.ints(rows.start), self.ints(end), self.ints(axis))

    def _length(self) -> ir.Value:
        """Columns of the past that are read."""
        if self.layout.slots is not None:
            return self.ints(self.layout.slots)
        shape = self.op("Shape", self.bias)
        return self.op("Sub", self.op("Gather", shape, self.ints(3)), self.op("Gather", shape, self.ints(2)))

    def _constant(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        if name not in self.constants:
            shape = ir.Shape(list(tensor.shape.numpy()))
            self.constants[name] = ir.Value(name=name, const_value=tensor, shape=shape, type=ir.TensorType(tensor.dtype))
        return self.constants[name]


def step(body: Body, layout: Layout, last_only: bool = False) -> ir.Model:
    """A step with its LM head: `logits`, what else the body gives, and `new_*`.

    All rows of them, or with `last_only` the one that `last_row` names: what only reads the text needs no more.
    """
    graph = Composer(layout)
    kv = graph.past(body)
    read = graph.call(body, slice(0, None), kv)
    rows, last = (1, graph.input("last_row", ir.DataType.INT32, [1])) if last_only else (graph.width, None)
    for name, given in zip(body.gives, body.model.graph.outputs, strict=False):
        value = graph.op("Gather", read[name], last, axis=1) if last else read[name]
        size: Size = layout.lm_head[1]
        if name == LOGITS:
            value = graph.op("Unsqueeze", graph.logits(value), graph.ints(0))
        else:
            value = graph.op("Identity", value)
            assert given.shape is not None
            size = given.shape[-1]
        graph.output(name, value, layout.dtype, [1, rows, size])
    for name in body.kv:
        graph.new_columns(name, read[name])
    return graph.model()
