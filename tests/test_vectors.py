"""The code gives every golden vector, read from its file, and the script that writes them still writes the same."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from make_vectors import FILES, FOLDER, Case, main, role_of, text_of
from specedge.manifest import KVLayout
from specedge.runtime.cache import KVCache
from specedge.runtime.law import Law
from specedge.runtime.philox import Purpose, philox4x32, uniform, uniforms
from specedge.runtime.rope import rope_tables
from specedge.runtime.rules import RULES, make_rule
from specedge.runtime.sample import Logits, Sampling
from specedge.runtime.sampler import Sampler
from specedge.runtime.shape import TreeShape, best_shape, tokens_per_round
from specedge.runtime.tree import ROOT, Proposal, TokenTree

ROPE_TOLERANCE = 3e-7  # float32 cosines of different libraries


def close(found: Any, expected: Any, tolerance: float = 1e-9) -> bool:
    """The same values in the same places; numbers that are no integers within a share."""
    if isinstance(expected, list):
        return (
            isinstance(found, list)
            and len(found) == len(expected)
            and all(close(one, other, tolerance) for one, other in zip(found, expected, strict=True))
        )
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(close(found[name], expected[name], tolerance) for name in expected)
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
    return type(found) is type(expected) and bool(found == expected)


def logits_of(row: list[float | None], dtype: type = np.float32) -> Logits:
    return np.array([-math.inf if logit is None else logit for logit in row], dtype)


def log(p: list[float]) -> Logits:
    with np.errstate(divide="ignore"):
        return np.log(np.array(p))


# One function per file: the answers of a case, by name, from everything else in it.


def random_numbers(case: Case) -> Case:
    counter, key = tuple(case["counter"]), tuple(case["key"])
    answers: Case = {"words": list(philox4x32(counter, key))}
    if "seed" in case:
        seed, purpose = int(case["seed"]), Purpose[case["purpose"].upper()]
        assert key == (seed % 2**32, seed // 2**32) and counter == (case["position"], int(purpose), case["index"], 0)
        answers["u"] = uniform(seed, case["position"], purpose, case["index"])
        assert uniforms(seed, case["position"], purpose, np.array([case["index"]])).tolist() == [case["u"]]
    return answers


def filters(case: Case) -> Case:
    sampling = Sampling(case["temperature"], case["top_k"], case["top_p"], min_p=case["min_p"])
    law = Sampler(sampling, len(case["logits"]), 0).law(logits_of(case["logits"]), [])
    kept = np.flatnonzero(law.p > 0.0)
    return {"ids": law.ids[kept].tolist(), "p": law.p[kept].tolist()}


def penalties(case: Case) -> Case:
    names = {"repetition_penalty", "frequency_penalty", "presence_penalty", "banned_ids"} & case.keys()
    bias = {int(token): value for token, value in case.get("logit_bias", {}).items()}
    sampling = Sampling(**{name: case[name] for name in names}, logit_bias=bias)
    sampler = Sampler(sampling, case["allowed"], len(case["prompt"]))
    scores = sampler.scores(logits_of(case["logits"]), [*case["prompt"], *case["answer"]], case["path"])
    assert scores.dtype == np.float32
    assert close(scores.tolist(), [-math.inf if score is None else score for score in case["scores"]], 0.0)
    return {"scores": [None if score == -math.inf else float(score) for score in scores]}


def draws(case: Case) -> Case:
    sparse, dense = Law(np.array(case["ids"]), np.array(case["p"])), np.zeros(1000)
    dense[case["ids"]] = case["p"]
    tokens = [sparse.draw(u) for u in case["u"]]
    assert tokens == [Law.of(dense).draw(u) for u in case["u"]]
    return {"tokens": tokens}


def rules(case: Case) -> Case:
    """Through the rule by its name, from logits; make_vectors calls the functions on laws."""
    tree = TokenTree(tuple(case["tokens"]), tuple(case["parents"]))
    if case["rule"] == "greedy":
        sampler, rows = Sampler(Sampling(), 5, 0), [np.eye(5)[token] for token in case["best"]]
    else:
        sampler, rows = Sampler(Sampling(1.0, seed=case["seed"]), 5, 0), [log(p) for p in case["p"]]
    laws = {row - 1: Law.of(q) for row, q in enumerate(case.get("q", ())) if q is not None}
    rule = make_rule(case["rule"] if case["rule"] in RULES else None, sampler)
    assert rule.name == case["rule"]
    accepted = rule.judge(Proposal(tree, laws.__getitem__ if laws else None), rows, [0] * (case["root"] + 1))
    return {"nodes": list(accepted.nodes), "token": accepted.token}


def children(case: Case) -> Case:
    if case["rule"] == "greedy":
        choose = make_rule(None, Sampler(Sampling(), len(case["logits"]), 0)).choose
        return {"tokens": list(choose(logits_of(case["logits"]), [5], [], 0, case["ranks"]).tokens)}
    choose = make_rule(case["rule"], Sampler(Sampling(1.0, seed=case["seed"]), len(case["q"]), 0)).choose
    text = [0] * (case["root"] + 1)
    chosen = choose(log(case["q"]), text, [0] * case["depth"], case["first"], range(case["count"]))
    return {"tokens": list(chosen.tokens)}


def masks(case: Case) -> Case:
    tree = TokenTree(tuple(range(len(case["parents"]))), tuple(case["parents"]))
    visible = ["".join("1" if sees else "0" for sees in row) for row in tree.visible]
    return {"depths": list(tree.depths), "positions": (case["root"] + np.array(tree.depths)).tolist(), "visible": visible}


def trees(case: Case) -> Case:
    if "paths" in case:
        shape = TreeShape.from_paths(case["paths"])
        return {"parents": list(shape.parents), "ranks": list(shape.ranks)}
    shape = best_shape(case["acceptance"], case["nodes"])
    assert TreeShape.from_paths(case["best"]) == shape
    return {"best": [list(path) for path in shape.paths], "tokens_per_round": tokens_per_round(shape, case["acceptance"])}


def rope(case: Case) -> Case:
    cos, sin = rope_tables(role_of(case["inv_freq"], case["scaling"]))[:, case["positions"]]
    assert cos.dtype == np.float32
    return {"cos": cos.tolist(), "sin": sin.tolist()}


def commits(case: Case) -> Case:
    """From a cache whose columns hold numbers of their own: 0, 1, ... the text, 1000, 1001, ... the step's rows."""
    length, rows, width = (
        case["length"],
        [0, *(node + 1 for node in case["nodes"])][: case["emitted"]],
        len(case["parents"]) + 1,
    )
    layout = KVLayout(layers=1, heads=1, slots=64, head_dim=1, dtype="float32")
    ends = []
    for in_place in (True, False):
        cache = KVCache(layout, 64)
        text, new = (np.arange(start, start + count, dtype=np.float32) for start, count in ((0, length), (1000, width)))
        cache.append({name: text.reshape(1, 1, -1, 1) for name, _ in cache.buffers()}, range(length))
        if in_place:
            for _, buffer in cache.buffers():
                buffer[0, 0, length : length + width, 0] = new
            cache.keep(rows)
        else:
            cache.append({name: new.reshape(1, 1, -1, 1) for name, _ in cache.buffers()}, rows)
        columns = [int(column) for _, buffer in cache.buffers() for column in buffer[0, 0, : cache.length, 0]]
        assert columns == [*range(length), *(1000 + row for row in rows)] * 2
        ends.append(cache.length)
    assert ends[0] == ends[1]
    behind = [column - 1000 for column in columns[length : ends[0]]]
    return {
        "rows": behind,
        "in_place": [[length + row, length + at] for at, row in enumerate(behind)],
        "delta": [[row, length + at] for at, row in enumerate(behind)],
        "length_after": ends[0],
    }


ANSWERS: dict[str, Callable[[Case], Case]] = {
    f"{answer.__name__}.json": answer
    for answer in (random_numbers, filters, penalties, draws, rules, children, masks, trees, rope, commits)
}


def read(name: str) -> list[Case]:
    cases: list[Case] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return cases


CASES = [(name, index) for name in FILES for index in range(len(read(name)))]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_the_code_gives_the_answers_of_the_vectors(name: str, index: int) -> None:
    case = read(name)[index]
    answers = ANSWERS[name](case)
    expected = {answer: case[answer] for answer in answers}
    assert close(answers, expected, ROPE_TOLERANCE if name == "rope.json" else 1e-9), (answers, expected)


def test_the_vectors_are_those_that_the_script_writes(tmp_path: Path) -> None:
    main(tmp_path)
    for name in FILES:
        written, kept = (json.loads((folder / name).read_text(encoding="utf-8")) for folder in (tmp_path, FOLDER))
        assert close(written, kept, ROPE_TOLERANCE if name == "rope.json" else 1e-9), name
        assert text_of(kept) == (FOLDER / name).read_text(encoding="utf-8"), name  # and written as it writes


def test_the_folder_holds_nothing_else_and_says_what_it_holds() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {*FILES, "README.md"}
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in FILES if f"**{name}**" not in text] == []
    assert all((FOLDER / name).stat().st_size < 30_000 for name in FILES)


@pytest.mark.parametrize("rule", ["greedy", *RULES])
def test_every_rule_is_shown_with_nothing_drafted_nothing_kept_and_a_whole_branch_kept(rule: str) -> None:
    cases = [case for case in read("rules.json") if case["rule"] == rule]
    assert any(not case["tokens"] for case in cases)
    assert any(case["tokens"] and not case["nodes"] for case in cases)
    assert any(case["nodes"] and case["nodes"][-1] not in case["parents"] for case in cases)
    if rule not in ("token", "block"):
        assert any(node != 0 and case["parents"][node] == ROOT for case in cases for node in case["nodes"])  # a later child
