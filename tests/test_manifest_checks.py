"""A manifest that contradicts itself is refused, and the message names the key."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bundles
import eagles
import tiny
from specedge.bundle import MANIFEST, open_bundle
from specedge.errors import SpecedgeError
from specedge.runtime import Sampling, load
from test_runtime_heads import save

Json = dict[str, Any]
TREE = ((0,), (1,), (0, 0))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("checks")
    tiny.f_rand(place / "rand")
    heads = place / "heads"
    noise = torch.Generator().manual_seed(0)
    save(heads, {f"{head}.0.linear.weight": torch.randn(64, 64, generator=noise) for head in range(3)})
    made = {"medusa": bundles.make(place / "rand", place / "medusa", medusa=str(heads), tree=TREE)}
    sizes: Json = {"hidden_size": eagles.HIDDEN, "vocab_size": eagles.VOCAB, "num_hidden_layers": 3, "intermediate_size": 32}
    tiny.f_rand(place / "small", num_attention_heads=2, num_key_value_heads=2, **sizes)
    saved = eagles.save(place / "eagle-3", eagles.eagle3().tensors, eagles.plain())
    options: Json = {"eagle": str(saved), "eagle_taps": (0, 1, 3), "tree": TREE}
    made["eagle"] = bundles.make(place / "small", place / "eagle", **options)
    return made


def head(manifest: Json) -> Json:
    found: Json = manifest["heads"]["medusa"]
    return found


def eagle(manifest: Json) -> Json:
    found: Json = manifest["roles"]["eagle"]
    return found


CASES: dict[str, tuple[str, Callable[[Json], object], str]] = {
    "other kind": ("medusa", lambda m: head(m).update(kind="hydra"), "heads.medusa.kind"),
    "no inputs": ("medusa", lambda m: head(m)["graph"].update(inputs=[]), "heads.medusa.graph"),
    "input type": ("medusa", lambda m: head(m)["graph"]["inputs"][0].update(dtype="float16"), "heads.medusa.graph (hidden)"),
    "hidden": ("medusa", lambda m: head(m).update(hidden=32), "heads.medusa.hidden"),
    "depth": ("medusa", lambda m: head(m).update(depth=2), "heads.medusa.depth"),
    "vocabulary": ("medusa", lambda m: head(m).update(vocab_size=64), "heads.medusa.vocab_size"),
    "weights": ("medusa", lambda m: first_part(head(m)).update(offset=1 << 40), "heads.medusa.weights"),
    "deep tree": ("medusa", lambda m: m.update(tree=[[0] * depth for depth in (1, 2, 3, 4)]), "tree (heads.medusa.depth)"),
    "no heads": ("medusa", lambda m: m.update(heads={}), "drafters"),
    "no eagle": ("eagle", lambda m: m["roles"].pop("eagle"), "drafters"),
    "other taps": ("eagle", lambda m: eagle(m).update(taps=[1, 2, 3]), "roles.eagle.taps"),
    "in place": ("eagle", lambda m: eagle(m).update(form="in-place"), "roles.eagle.form"),
    "nothing first": ("eagle", lambda m: eagle(m).update(first=[]), "roles.eagle.first"),
    "other cache": ("eagle", lambda m: eagle(m)["kv"].update(heads=1), "roles.eagle"),
    "draft ids": ("eagle", lambda m: eagle(m).update(vocab_size=31), "roles.eagle"),
    "draft paths": ("eagle", lambda m: eagle(m)["unrolled"][0].update(paths=[[0]]), "roles.eagle.unrolled"),
    "no draft paths": ("eagle", lambda m: eagle(m)["unrolled"][0].update(paths=[[1, 0]]), "roles.eagle.unrolled"),
    "lost graph": ("eagle", lambda m: m["files"].pop("eagle_next.onnx"), "roles.eagle.graphs"),
    "layers": ("eagle", lambda m: eagle(m)["kv"].update(layers=1 << 60), "roles.eagle.kv.layers"),
    "chunk": ("eagle", lambda m: eagle(m).update(chunk=1 << 40), "roles.eagle.chunk"),
    "mask": ("eagle", lambda m: eagle(m).update(mask_value=float("nan")), "roles.eagle.mask_value"),
    "rotary": ("eagle", lambda m: eagle(m)["rope"]["inv_freq"].pop(), "roles.eagle"),
    "rows": ("eagle", lambda m: eagle(m)["unrolled"][0]["graph"].update(width=2), "roles.eagle.unrolled"),
    "ids": ("eagle", lambda m: vocabulary(m).update(parts={}), "roles.eagle.weights"),
    "number of ids": (
        "eagle",
        lambda m: vocabulary(m)["parts"]["values"].update(shape=[3]),
        "roles.eagle.weights",
    ),
    "type of ids": ("eagle", lambda m: vocabulary(m)["parts"]["values"].update(dtype="x"), "roles.eagle.weights"),
    "before the file": ("eagle", lambda m: first_part(eagle(m)).update(offset=-4), "roles.eagle.weights"),
    "rotation": ("eagle", lambda m: m["roles"]["target"].update(rotation=0), "roles.target.rotation"),
    "hidden of no shape": ("eagle", lambda m: features(m).update(shape=[]), "roles.target.graphs (hidden)"),
}


def vocabulary(manifest: Json) -> Json:
    found: Json = next(weight for weight in eagle(manifest)["weights"] if weight["name"] == "vocabulary")
    return found


def features(manifest: Json) -> Json:
    found: Json = next(spec for spec in manifest["roles"]["target"]["graphs"][0]["outputs"] if spec["name"] == "features")
    return found


def first_part(record: Json) -> Json:
    found: Json = next(iter(record["weights"][0]["parts"].values()))
    return found


@pytest.mark.parametrize(("name", "change", "key"), CASES.values(), ids=CASES)
def test_a_contradiction_is_refused_by_its_key(
    paths: dict[str, Path], name: str, change: Callable[[Json], object], key: str
) -> None:
    path = paths[name] / MANIFEST
    good = path.read_text("utf-8")
    manifest = json.loads(good)
    change(manifest)
    try:
        path.write_text(json.dumps(manifest), encoding="utf-8")
        with pytest.raises(SpecedgeError, match="contradicts the rest of the manifest") as error:
            open_bundle(paths[name])
    finally:
        path.write_text(good, encoding="utf-8")
    assert f"{MANIFEST}: {key}" in str(error.value)
    assert open_bundle(paths[name]).manifest.drafters[0] == name


@pytest.mark.parametrize("output", ["logits", "fed_back"])
def test_an_output_of_another_type_than_the_graph_gives_is_refused(paths: dict[str, Path], output: str) -> None:
    path = paths["eagle"] / MANIFEST
    good = path.read_text("utf-8")
    manifest = json.loads(good)
    next(spec for spec in eagle(manifest)["first"][0]["outputs"] if spec["name"] == output).update(dtype="float64")
    try:
        path.write_text(json.dumps(manifest), encoding="utf-8")
        with pytest.raises(SpecedgeError, match=f"output {output}: manifest says 'float64', graph has tensor.float"):
            load(paths["eagle"], threads=1).generate([3, 4, 5], Sampling(repetition_penalty=1.1), 8, gamma=2)
    finally:
        path.write_text(good, encoding="utf-8")


@pytest.mark.parametrize("ids", [[31, 4, 8, 12, 16, 20, 24, 28], [0, 4, 8, 12, 16, 20, 24, 32], [-1, 4, 8, 12, 16, 20, 24, 28]])
def test_draft_ids_that_are_not_ascending_ids_of_the_target_are_refused(paths: dict[str, Path], ids: list[int]) -> None:
    extent = vocabulary(json.loads((paths["eagle"] / MANIFEST).read_text("utf-8")))["parts"]["values"]
    path = paths["eagle"] / "eagle" / "weights.bin"
    good = path.read_bytes()
    values = np.array(ids, np.int32).tobytes()
    try:
        path.write_bytes(good[: extent["offset"]] + values + good[extent["offset"] + len(values) :])
        with pytest.raises(SpecedgeError, match="vocabulary: expected ascending ids from 0 to 31"):
            load(paths["eagle"], threads=1)
    finally:
        path.write_bytes(good)


def test_a_head_none_of_whose_ids_may_come_out_drafts_nothing(paths: dict[str, Path]) -> None:
    engine = load(paths["eagle"], threads=1)
    banned = engine.draft_ids.tolist()
    for sampling in (Sampling(banned_ids=banned), Sampling(banned_ids=banned, repetition_penalty=1.1)):
        plain = engine.generate([3, 5, 7], sampling, 12, speculate=False)
        for drafted in (engine.generate([3, 5, 7], sampling, 12, gamma=gamma) for gamma in (2, 3, 5)):
            assert (drafted.ids, drafted.stats.drafted) == (plain.ids, 0)
    assert engine.generate([3, 5, 7], Sampling(0.8, banned_ids=banned, seed=1), 12, gamma=2).stats.drafted == 0
    assert engine.generate([3, 5, 7], Sampling(banned_ids=banned[1:]), 12, gamma=2).stats.drafted > 0
