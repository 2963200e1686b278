"""Drafting in one call: a chain or tree of drafts as one static graph, composed of traced steps.

The drafter reads the rows of text it has not seen yet, chooses the root's children, is fed with those that have children
themselves, chooses again, and so on, level by level. Choosing is an argmax over logits + noise: zeros for the drafter's best,
temperature x Gumbel for a draw from its law; the best k of them are k draws without replacement (Kool et al. 2019, arXiv
1903.06059).
"""

from collections.abc import Sequence

import onnx_ir as ir

from specedge.export.compose import FED_BACK, LOGITS, Body, Composer, Layout

Ranks = tuple[int, ...]


def levels_of(paths: Sequence[Ranks]) -> list[list[Ranks]]:
    """The nodes of every depth, in the order of node numbers: paths sorted by length, then rank by rank."""
    depths = sorted({len(path) for path in paths})
    return [sorted(path for path in paths if len(path) == depth) for depth in depths]


def expand(first: Body, following: Body, paths: Sequence[Ranks], layout: Layout) -> ir.Model:
    """The graph that drafts the tree of `paths`, siblings' ranks without gaps.

    `first` reads the text, `following` the drafts. Outputs: `draft_ids` int32 [1, nodes], ids of the target's vocabulary;
    `draft_logits` [parents, Vd] of the root and of every node with children, in node order; `new_*` with the columns of the
    text and then of every node with children. Its inputs are those of docs/contract.md.
    """
    levels = levels_of(paths)
    inner = [[path for path in level if any(other[:-1] == path for other in paths)] for level in levels]
    count = sum(map(len, inner))
    graph = Composer(layout, rows_more=count, parents=count + 1)
    kv = graph.past(first)
    read = graph.call(first, slice(0, -count or None), kv)
    last = graph.input("last_row", ir.DataType.INT32, [1])
    fed_back = graph.op("Gather", read[FED_BACK], last, axis=1) if FED_BACK in read else None
    columns = {name: [read[name]] for name in kv}
    logits = [graph.logits(graph.op("Gather", read[LOGITS], last, axis=1))]  # [parents of a level, Vd]
    parents: list[Ranks] = [()]
    done = 0
    drafted: list[ir.Value] = []
    for level, fed in zip(levels, inner, strict=True):
        scores = graph.op(
            "Add", graph.wide(logits[-1]), graph.take(graph.noise, range(done, done + len(parents)), count + 1, axis=0)
        )
        done += len(parents)
        ids = graph.choose(scores, [(parents.index(path[:-1]), path[-1]) for path in level])
        drafted.append(ids)
        if not fed:
            break
        places = [level.index(path) for path in fed]
        tokens = graph.op("Unsqueeze", graph.take(ids, places, len(level), axis=0), graph.ints(0))
        if fed_back is not None:
            fed_back = graph.take(fed_back, [parents.index(path[:-1]) for path in fed], len(parents), axis=1)
        start = sum(len(earlier) for earlier in inner[: levels.index(level)]) - count
        rows = slice(start, start + len(fed) or None)
        past = {name: graph.op("Concat", kv[name], *columns[name], axis=2) for name in kv}
        read = graph.call(following, rows, past, tokens, fed_back)
        fed_back = read.get(FED_BACK)
        for name in kv:
            columns[name].append(read[name])
        logits.append(graph.logits(read[LOGITS]))
        parents = fed
    graph.output("draft_ids", graph.op("Unsqueeze", graph.join(drafted, 0), graph.ints(0)), ir.DataType.INT32, [1, len(paths)])
    graph.output("draft_logits", graph.join(logits, 0), layout.dtype, [count + 1, layout.lm_head[1]])
    for name in kv:
        graph.new_columns(name, graph.join(columns[name], 2))
    return graph.model()
