"""Writes the golden vectors in tests/vectors, the same on every machine: `python tests/make_vectors.py`.

Inputs are short decimals and binary fractions, made from the project's own random numbers. No choice hangs on the last bits
of a number.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.manifest import KVLayout, Role, Rope
from specedge.runtime import accept
from specedge.runtime.accept import Accepted
from specedge.runtime.law import Law
from specedge.runtime.philox import WORD, Numbers, Purpose, philox4x32, uniform
from specedge.runtime.rope import rope_tables
from specedge.runtime.rules import make_rule
from specedge.runtime.sample import Sampling, filtered
from specedge.runtime.sampler import Sampler
from specedge.runtime.shape import TreeShape, best_shape, tokens_per_round
from specedge.runtime.tree import ROOT, TokenTree

FOLDER = Path(__file__).parent / "vectors"
LAST = math.nextafter(1.0, 0.0)

Case = dict[str, Any]  # names and values of a JSON object
Row = list[float]


class Source:
    """Numbers to make inputs from."""

    def __init__(self, seed: int) -> None:
        self._seed, self._asked = seed, 0

    def below(self, end: int) -> int:
        self._asked += 1
        return int(uniform(self._seed, self._asked, Purpose.TOKEN) * end)

    def logits(self, count: int) -> Row:
        return [(self.below(81) - 40) / 16 for _ in range(count)]

    def law(self, count: int) -> Row:
        """Probabilities of 64ths that sum to 1, some of them 0."""
        cuts = sorted(self.below(65) for _ in range(count - 1))
        return [(end - start) / 64 for start, end in zip([0, *cuts], [*cuts, 64], strict=True)]


# ---- numbers and laws


def random_numbers() -> list[Case]:
    def words(counter: list[int], key: list[int]) -> Case:
        found = philox4x32(tuple(counter), tuple(key))  # type: ignore[arg-type]  # four and two words
        return {"counter": counter, "key": key, "words": list(found)}

    pi = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0
    cases = [words([0] * 4, [0] * 2), words([WORD] * 4, [WORD] * 2), words([*pi[:4]], [*pi[4:]])]
    keys = [(0, 0, 0), (1, 1, 0), (42, 17, 3), (2**32, 100_000, 151_935), (2**63 + 7, 2047, 62), (2**64 - 1, WORD, WORD)]
    for (seed, position, index), purpose in product(keys, Purpose):
        named = {"seed": str(seed), "position": position, "purpose": purpose.name.lower(), "index": index}
        made = words([position, int(purpose), index, 0], [seed & WORD, seed >> 32])
        cases.append({**named, **made, "u": uniform(seed, position, purpose, index)})
    return cases


# temperature, top_k, top_p, min_p
FILTERS = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.3, 0, 1.0, 0.0), (2.5, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0)]
FILTERS += [(1.0, 0, 0.6, 0.0), (0.8, 0, 0.95, 0.0), (1.0, 0, 1.0, 0.07), (1.4, 5, 0.7, 0.0), (1.4, 5, 1.0, 0.3)]
FILTERS += [(1.7, 0, 0.93, 0.17), (0.9, 6, 0.9, 0.05)]


def filters() -> list[Case]:
    source, cases = Source(2), list[Case]()
    rows: list[list[float | None]] = [[*source.logits(8)], [*source.logits(10)], [None, 0.25, None, 3.0, 2.5, 1.0]]
    rows.append([1.5, 1.5, -0.5, 2.0, 2.0, 2.0, -0.5, 1.5])  # of equals the lower id stays
    for row, options in product(rows, FILTERS):
        temperature, top_k, top_p, min_p = options
        logits = np.array([-np.inf if logit is None else logit for logit in row], np.float32)
        law = filtered(logits, Sampling(temperature, top_k, top_p, min_p=min_p))
        kept = law.p > 0.0
        if not _near_a_line(logits, *options):
            case = {"logits": row, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
            cases.append({**case, "ids": law.ids[kept].tolist(), "p": law.p[kept].tolist()})
    return cases


def _near_a_line(logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether top-p or min-p would be decided by less than a thousandth."""
    weights = np.sort(np.exp((logits.astype(np.float64) - logits.max()) / max(temperature, 1e-4)))[::-1]
    left = weights[: top_k or len(weights)]
    lines = [*(left.cumsum() / left.sum() - top_p if top_p < 1.0 else ()), *(weights - min_p if min_p else ())]
    return bool(np.abs(lines).min(initial=1.0) < 1e-3)


PENALTIES: list[Case] = [
    {"repetition_penalty": 1.25},
    {"repetition_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.75},
    {"logit_bias": {"3": 1.5, "7": -2.25}},
    {"banned_ids": [0, 5]},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1, "logit_bias": {"4": 0.7}, "banned_ids": [2]},
    {"repetition_penalty": 1.1, "frequency_penalty": -0.3, "logit_bias": {"6": 90.0}, "banned_ids": [6]},
]


def penalties() -> list[Case]:
    source, cases = Source(3), list[Case]()
    for options, (prompt, answer, path) in product(PENALTIES, [([1, 2, 2], [3, 3, 4], []), ([7, 1], [4], [3, 5, 3])]):
        logits = source.logits((8, 10, 6)[source.below(3)])  # also padded rows, and those of a draft with fewer ids
        bias = {int(token): value for token, value in options.get("logit_bias", {}).items()}
        sampler = Sampler(Sampling(**{**options, "logit_bias": bias}), 8, len(prompt))
        scores = sampler.scores(np.array(logits, np.float32), [*prompt, *answer], path).tolist()
        case = {"allowed": 8, "prompt": prompt, "answer": answer, "path": path, "logits": logits, **options}
        cases.append({**case, "scores": [None if score == -math.inf else score for score in scores]})
    return cases


def draws() -> list[Case]:
    source, ends = Source(4), [0.0, 0.2499, 0.25, 0.7499, 0.75, LAST]
    given: list[tuple[list[int], Row, Row]] = [
        ([0, 1, 2, 3, 4], [0.25, 0.0, 0.5, 0.25, 0.0], ends),  # an end belongs to the token behind it
        ([3, 70, 71], [0.25, 0.5, 0.25], ends),
        ([3, 70, 71], [2.0, 4.0, 2.0], ends),  # shares of the sum, whatever it is
        ([9], [0.125], [0.0, 0.5, LAST]),
        ([2, 5, 9], [0.0, 1e-300, 0.0], [0.0, 0.5, LAST]),
    ]
    for count in (4, 7, 12):
        ids = sorted({source.below(1000) for _ in range(count)})
        given.append((ids, source.law(len(ids)), [uniform(5, count, Purpose.TOKEN, n) for n in range(8)]))
    return [
        {"ids": ids, "p": p, "u": us, "tokens": [Law(np.array(ids), np.array(p)).draw(u) for u in us]} for ids, p, us in given
    ]


# ---- rounds

CHAIN = [[0] * depth for depth in range(1, 5)]
TREE = [[0], [1], [2], [0, 0], [1, 0], [1, 1], [1, 0, 0]]
RULES = dict.fromkeys(("token", "block"), CHAIN)
RULES |= dict.fromkeys(("greedy", "point-mass", "recursive", "coupled"), TREE)
RULES |= {"lossy-typical": [[0], [1], [0, 0], [1, 0], [1, 0, 0]]}  # of equally long paths the first


def rules() -> list[Case]:
    """For every rule an empty tree, and trees of which more or fewer nodes stay, on one branch or another."""
    cases: list[Case] = []
    for rule, paths in RULES.items():
        found: dict[tuple[int, ...], Case] = {}
        for seed in range(140):
            case = round_of(rule, TreeShape.from_paths(paths if seed else []), seed, 5 + 7 * seed)
            if len({_judged(case, shift) for shift in (0.0, 1e-6, -1e-6)}) == 1:
                found.setdefault((seed > 0, len(case["nodes"]), *case["nodes"][:1]), case)
        cases += found.values()
    return cases


def round_of(rule: str, shape: TreeShape, seed: int, root: int) -> Case:
    """A round whose drafts were made as the rule wants them, p somewhere between q and another law."""
    source, rows = Source(100 + seed), range(len(shape.parents) + 1)
    q = [source.law(5) for _ in rows]
    share = 0.0 if rule == "lossy-typical" else 0.5  # where p is too like q it finds all drafts typical
    p = [[a * share + b * (1.0 - share) for a, b in zip(row, source.law(5), strict=True)] for row in q]
    tree, drafted = TokenTree((), ()), {ROOT: ROOT}  # node of the shape -> node of the tree
    for node in rows:
        at = node - 1
        if at in drafted and shape.children(at):
            path, first = tree.path(drafted[at]), len(tree.tokens)
            tokens = _chosen(rule, q[drafted[at] + 1], seed, root, len(path), first, len(shape.children(at)))
            drafted |= zip(shape.children(at), range(first, first + len(tokens)), strict=False)
            tree = TokenTree((*tree.tokens, *tokens), (*tree.parents, *[drafted[at]] * len(tokens)))
    used = rows[: len(tree.tokens) + 1]
    case: Case = {"rule": rule, "seed": seed, "root": root, "tokens": list(tree.tokens), "parents": list(tree.parents)}
    case |= {"best": [int(np.argmax(p[row])) for row in used]} if rule == "greedy" else {"p": [p[row] for row in used]}
    if rule in ("token", "block", "recursive"):
        case["q"] = [q[row] if row - 1 in tree.parents else None for row in used]
    stays = _judged(case)
    return {**case, "nodes": list(stays.nodes), "token": stays.token}


def _chosen(rule: str, q: Row, seed: int, root: int, depth: int, first: int, count: int) -> list[int]:
    """What a drafter with the law q chooses to follow a node."""
    sampling = Sampling(0.0 if rule in ("greedy", "point-mass") else 1.0, seed=seed)
    choose = make_rule("coupled" if rule == "coupled" else "recursive", Sampler(sampling, len(q), 0)).choose
    with np.errstate(divide="ignore"):
        return list(choose(np.log(np.array(q)), [0] * (root + 1), [0] * depth, first, range(count)).tokens)


def _judged(case: Case, shift: float = 0.0) -> Accepted:
    """What stays of a round; `shift` moves some probabilities up and the others down by this share."""

    def laws(name: str, node: int) -> Law:
        row = np.array(case[name][node + 1])
        return Law.of(row * (1.0 + shift * np.resize([1, -1, -1], len(row))))

    tree, numbers = TokenTree(tuple(case["tokens"]), tuple(case["parents"])), Numbers(case["seed"], case["root"])
    p, q = partial(laws, "p"), partial(laws, "q")
    match case["rule"]:
        case "greedy":
            return accept.accept_greedy(tree, lambda node: int(case["best"][node + 1]))
        case "point-mass":
            return accept.accept_point_mass(tree, p, numbers)
        case "coupled":
            return accept.accept_coupled(tree, p, numbers)
        case "lossy-typical":
            return accept.accept_typical(tree, p, numbers)
    by_q = {"token": accept.accept_token, "block": accept.accept_block, "recursive": accept.accept_recursive}
    return by_q[case["rule"]](tree, p, q, numbers)


def children() -> list[Case]:
    source, cases = Source(6), list[Case]()
    places = [(1, 4, 0, 0, 1), (2, 9, 0, 0, 3), (3, 20, 1, 3, 2), (4, 33, 2, 7, 4), (5, 40, 0, 0, 6)]
    for rule, (seed, root, depth, first, count) in product(("recursive", "coupled"), places):
        q = source.law(6)
        case = {"rule": rule, "q": q, "seed": seed, "root": root, "depth": depth, "first": first, "count": count}
        cases.append({**case, "tokens": _chosen(rule, q, seed, root, depth, first, count)})
    for logits, ranks in ((source.logits(8), [0, 1, 2]), ([1.0, 2.0, 2.0, 1.0, 2.0], [0, 1, 3]), (source.logits(8), [1, 4])):
        choose = make_rule(None, Sampler(Sampling(), len(logits), 0)).choose
        chosen = choose(np.array(logits, np.float32), [0], [], 0, ranks)
        cases.append({"rule": "greedy", "logits": logits, "ranks": ranks, "tokens": list(chosen.tokens)})
    return cases


# ---- trees and steps


def masks() -> list[Case]:
    shapes = [[], CHAIN, [[0], [1], [2]], TREE, [[0], [0, 0], [0, 1], [0, 0, 0], [0, 1, 0], [0, 1, 1]]]
    cases = []
    for root, paths in enumerate(shapes, start=17):
        parents = TreeShape.from_paths(paths).parents
        tree = TokenTree(tuple(range(len(parents))), parents)
        places = {"depths": list(tree.depths), "positions": [root + depth for depth in tree.depths]}
        visible = ["".join("01"[bit] for bit in row) for row in tree.visible.astype(int)]
        cases.append({"parents": list(parents), "root": root, **places, "visible": visible})
    return cases


TABLES = [[[0.8]] * 5, [[0.6, 0.2, 0.05]] * 3]
TABLES += [[[0.5, 0.23, 0.11], [0.43, 0.17, 0.07], [0.37, 0.13]], [[0.2, 0.45, 0.1], [0.7, 0.15]]]


def trees() -> list[Case]:
    cases: list[Case] = []
    for paths in ([], CHAIN, [[0, 0], [1], [0]], [[0], [0, 2], [3], [0, 0], [3, 1], [0, 2, 0]], TREE[::-1]):
        shape = TreeShape.from_paths(paths)
        cases.append({"paths": paths, "parents": list(shape.parents), "ranks": list(shape.ranks)})
    for table, nodes in product(TABLES, (1, 3, 6, 8)):
        shape = best_shape(table, nodes)
        if all(best_shape(_nudged(table, shift), nodes) == shape for shift in (1e-6, -1e-6)):
            best = {"best": [list(path) for path in shape.paths], "tokens_per_round": tokens_per_round(shape, table)}
            cases.append({"acceptance": table, "nodes": nodes, **best})
    return cases


def _nudged(table: Sequence[Row], shift: float) -> list[Row]:
    return [[chance * (1 - shift * rank * (depth + 1)) for rank, chance in enumerate(row)] for depth, row in enumerate(table)]


def rope() -> list[Case]:
    positions, cases = [0, 1, 2, 17, 100, 1023, 4095], list[Case]()
    for base, half, scaling in ((10_000.0, 4, 1.0), (500_000.0, 3, 1.25)):
        inv_freq = [_float32(base ** (-index / half)) for index in range(half)]
        tables = rope_tables(role_of(inv_freq, scaling))[:, positions]
        cos, sin = ([[_float32(number) for number in row] for row in table] for table in tables)
        cases.append({"inv_freq": inv_freq, "scaling": scaling, "positions": positions, "cos": cos, "sin": sin})
    return cases


def role_of(inv_freq: Row, scaling: float) -> Role:
    """As much of a role as its rotary tables need."""
    kv = KVLayout(layers=1, heads=1, slots=4096, head_dim=2 * len(inv_freq), dtype="float32")
    return Role("llama", "delta", 4096, 8, 32, -1e4, Rope(tuple(inv_freq), scaling), kv, (), None, (), (), (), ())


def _float32(number: float) -> float:
    return float(f"{number:.9g}")  # as many digits as tell two of them apart


def commits() -> list[Case]:
    parents, cases = list(TreeShape.from_paths(TREE).parents), list[Case]()
    for length, nodes, cut in ((12, [], 0), (12, [0, 3], 0), (40, [1, 5], 0), (5, [1, 4, 6], 2), (0, [0], 1)):
        rows = [0, *(node + 1 for node in nodes)][: len(nodes) + 1 - cut]
        case: Case = {"length": length, "parents": parents, "nodes": nodes, "emitted": len(rows), "rows": rows}
        case["in_place"] = [[length + row, length + at] for at, row in enumerate(rows)]
        case["delta"] = [[row, length + at] for at, row in enumerate(rows)]
        cases.append({**case, "length_after": length + len(rows)})
    return cases


MAKERS = (random_numbers, filters, penalties, draws, rules, children, masks, trees, rope, commits)
FILES: dict[str, Callable[[], list[Case]]] = {f"{maker.__name__}.json": maker for maker in MAKERS}


def text_of(cases: list[Case]) -> str:
    """JSON with a name and its value per line."""
    blocks = (",\n  ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in case.items()) for case in cases)
    return "[\n" + ",\n".join(f" {{{block}}}" for block in blocks) + "\n]\n"


def main(folder: Path = FOLDER) -> None:
    for name, make in FILES.items():
        (folder / name).write_text(text_of(make()), encoding="utf-8")


if __name__ == "__main__":
    main()
