"""What rewrites of a graph have in common."""

import onnx_ir as ir


def take_place(graph: ir.Graph, old: ir.Node, new: ir.Value) -> None:
    """Give the readers of `old`'s only output `new` instead, under the old name."""
    before = old.outputs[0]
    new.name, new.type, new.shape = before.name, before.type, before.shape
    ir.convenience.replace_all_uses_with(before, new, replace_graph_outputs=True)
    graph.remove(old, safe=True)


def remove_unused(graph: ir.Graph) -> None:
    """Drop the nodes that nothing reads any more."""
    outputs = set(graph.outputs)
    for node in reversed(list(graph)):
        if not any(value.uses() or value in outputs for value in node.outputs):
            graph.remove(node, safe=True)
