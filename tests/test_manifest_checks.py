"""A manifest that contradicts itself is refused, and the message names the key."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bundles
import eagles
import tiny
from specedge.bundle import MANIFEST, open_bundle
from specedge.errors import SpecedgeError
from test_runtime_heads import save

Json = dict[str, Any]
TREE = ((0,), (1,), (0, 0))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("checks")
    tiny.f_rand(place / "rand", num_hidden_layers=3)
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
}


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
