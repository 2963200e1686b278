"""`validate` passes a bundle that computes what its checkpoint says, and fails every other, with exit code 1."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner, Result
from onnx import numpy_helper

import eagles
import tiny
from bundles import make
from specedge.bundle import MANIFEST, open_bundle, sha256
from specedge.export.cli import main
from specedge.export.recipe import INT4, INT8
from specedge.export.report import Check
from test_runtime_heads import save
from tiny import Array

DEVICES = ("cpu", "cpu-static")
devices = pytest.mark.parametrize("device", DEVICES)
SHAPE: dict[str, Any] = {"context": 128, "widths": (1, 4), "chunk": 8}
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"body": "float16", "head": "float16"},
    "int4": {"body": INT4, "head": INT8},
}
KEYS = {
    "passed",
    "checks",
    "logits_max_abs",
    "kl_mean",
    "top1_agreement",
    "near_ties",
    "greedy_match",
    "width_agreement",
    "perplexity",
}

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "f-rand"
    tiny.f_rand(folder)
    return folder


@pytest.fixture
def bundle(source: Path, tmp_path: Path) -> Make:
    """A new bundle of the source, to damage."""
    return lambda device, weights, **options: make(
        source, tmp_path / "bundle", device=device, **SHAPE, **WEIGHTS[weights], **options
    )


def validate(path: Path, reference: Path, *options: object) -> Result:
    command = ["validate", path, "--reference", reference, "--prompts", 2, "--tokens", 12, *options]
    return CliRunner().invoke(main, [str(part) for part in command])


def report(path: Path, reference: Path, *options: object) -> dict[str, Any]:
    """The JSON of a validation; verdict, exit code and JSON agree."""
    result = validate(path, reference, "--json", "-", *options)
    assert result.exit_code in (0, 1) and isinstance(result.exception, SystemExit | None), result.exception
    found: dict[str, Any] = json.loads(result.stdout, parse_constant=pytest.fail)
    assert found["passed"] == (result.exit_code == 0) == all(check["passed"] for check in found["checks"])
    assert result.stderr.splitlines()[-1] == ("PASS" if found["passed"] else "FAIL")
    return found


def failed(found: dict[str, Any]) -> set[tuple[str, str]]:
    return {(check["name"], check["graph"]) for check in found["checks"] if not check["passed"]}


def patch(path: Path, name: str, part: str, change: Callable[[Array], object], role: str = "target") -> None:
    """Change a stored tensor in the weight file."""
    record = open_bundle(path).role(role)
    weight = next(weight for weight in record.weights if weight.name == name)
    extent = weight.parts[part]
    tensor = np.memmap(path / weight.file, extent.dtype, "r+", extent.offset, extent.shape)
    change(tensor)
    tensor.flush()


def scale_attention(path: Path, file: str) -> None:
    """Scale the attention scores of one graph: the weights stay right, what is computed with them does not."""
    model = onnx.load(path / file, load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "GroupQueryAttention" and attribute.name == "scale":
                attribute.f *= 3
    for item in model.graph.initializer:
        if not item.external_data and item.data_type == onnx.TensorProto.FLOAT and list(item.dims) == []:
            item.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(item) * np.float32(3), item.name))
    (path / file).write_bytes(model.SerializeToString())


def hash_again(path: Path) -> None:
    """Let the manifest agree with the files: from now on only the numbers can tell."""
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"] = {
        name: {"bytes": (path / name).stat().st_size, "sha256": sha256(path / name)} for name in manifest["files"]
    }
    tiny.write_json(path / MANIFEST, manifest)


@devices
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_good_bundle_passes(source: Path, bundle: Make, device: str, weights: str):
    found = report(bundle(device, weights), source)
    assert found["passed"] and found.keys() >= KEYS
    for check in found["checks"]:
        assert check.keys() == {"name", "graph", "value", "limit", "passed"} and check["value"] <= check["limit"]
    compared = {check["graph"] for check in found["checks"] if check["name"] in ("logits_max_abs", "kl_to_stored_weights")}
    assert compared == {"target width 1", "target width 4", "target width 8"}  # every graph, the chunk's too
    assert ("greedy_speculative_differs", "lookup gamma 3") in {(check["name"], check["graph"]) for check in found["checks"]}
    assert (found["greedy_match"], found["near_ties"]) == (1.0, 0)
    if weights == "float32":
        assert found["logits_max_abs"] <= 1e-3 and found["kl_mean"] < 1e-6 and found["top1_agreement"] == 1.0
    if weights == "int4":
        assert found["logits_max_abs"] > 1e-3 and found["kl_mean"] > 0 and 0.1 < found["top1_agreement"] < 1.0
    if device == "cpu":
        assert found["width_agreement"] == 0.0  # the same bits at every width
    else:
        assert 0 < found["width_agreement"] <= 0.1
    assert math.isfinite(found["perplexity"]) and found["perplexity"] > 1


@devices
@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "lm_head.weight", "embed_tokens.weight"])
def test_a_scale_that_is_nan_fails(source: Path, bundle: Make, device: str, name: str):  # B22
    path = bundle(device, "int4")
    patch(path, name, "scales", lambda scales: scales.__setitem__((3, 1), np.nan))
    stale = report(path, source)
    assert {("files_changed", ""), ("weight_error", "target")} <= failed(stale)
    hash_again(path)
    found = report(path, source)
    assert ("files_changed", "") not in failed(found)
    assert {("weight_error", "target"), ("kl_to_stored_weights", "target width 1")} <= failed(found)
    assert next(check["value"] for check in found["checks"] if check["name"] == "weight_error") is None  # NaN is no JSON


@devices
@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_a_scaled_head_fails(source: Path, bundle: Make, device: str, weights: str):  # B22
    """Greedy ids cannot see it."""
    path = bundle(device, weights)
    patch(path, "lm_head.weight", "values" if weights == "float32" else "scales", lambda part: part.__imul__(np.float32(1.5)))
    assert failed(report(path, source)) >= {("files_changed", ""), ("weight_error", "target")}
    hash_again(path)
    found = report(path, source)
    assert ("weight_error", "target") in failed(found) and ("files_changed", "") not in failed(found)
    if weights == "float32":
        assert failed(found) >= {("logits_max_abs", f"target width {width}") for width in (1, 4, 8)}


def test_a_graph_that_computes_something_else_fails(source: Path, bundle: Make):
    path = bundle("cpu", "float32")
    scale_attention(path, "target/step.onnx")
    hash_again(path)
    found = report(path, source)
    assert {name for name, _ in failed(found)} == {"logits_max_abs", "greedy_unlike_reference"}


@pytest.mark.parametrize("weights", ["float32", "int4"])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_every_static_graph_is_looked_at(source: Path, bundle: Make, width: int, weights: str):
    path = bundle("cpu-static", weights)
    scale_attention(path, f"target/step_{width}.onnx")
    hash_again(path)
    found = report(path, source)
    kind = "logits_max_abs" if weights == "float32" else "kl_to_stored_weights"
    assert (kind, f"target width {width}") in failed(found)  # and others, where it serves their prefill or their tail
    assert ("width_agreement", f"target width {max(width, 4)}") in failed(found)
    assert ("weight_error", "target") not in failed(found)


@devices
def test_a_draft_is_proved_by_its_own_reference(source: Path, bundle: Make, device: str, tmp_path: Path):
    tiny.noisy_lm_head(source, tmp_path / "draft", sigma=0.15)
    path = bundle(device, "float32", draft=str(tmp_path / "draft"))
    found = report(path, source, "--draft-reference", tmp_path / "draft")
    assert found["passed"] and found["notes"] == []
    assert {f"draft width {width}" for width in (1, 4, 8)} <= {check["graph"] for check in found["checks"]}
    assert {"draft gamma 3", "lookup gamma 3"} <= {check["graph"] for check in found["checks"]}
    silent = report(path, source)
    assert silent["passed"] and "--draft-reference" in silent["notes"][0]
    wrong = failed(report(path, source, "--draft-reference", source))  # the target is not the draft's checkpoint
    assert wrong == {("weight_error", "draft"), ("exact_weights_changed", "draft")} | {
        ("logits_max_abs", check["graph"]) for check in found["checks"] if check["graph"].startswith("draft width")
    }


@devices
@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_a_bundle_with_a_tree_passes(source: Path, bundle: Make, device: str, weights: str, tmp_path: Path):
    tiny.noisy_lm_head(source, tmp_path / "draft", sigma=0.15)
    found = report(bundle(device, weights, draft=str(tmp_path / "draft"), tree=((0,), (1,), (0, 0), (1, 0))), source)
    assert found["passed"] and (found["greedy_match"], found["near_ties"]) == (1.0, 0)
    compared = {check["graph"] for check in found["checks"] if check["name"] == "greedy_speculative_differs"}
    assert "draft tree" in compared and "lookup tree" not in compared
    assert {check["name"] for check in found["checks"] if check["graph"] == "target tree"} == {
        "tree_agreement" if weights == "float32" else "tree_kl"
    }


@pytest.mark.parametrize("width", [1, 2, 8])
def test_every_static_draft_graph_is_looked_at(source: Path, bundle: Make, width: int):
    path = bundle("cpu-static", "float32", draft=str(source))
    scale_attention(path, f"draft/step_{width}.onnx")
    hash_again(path)
    assert ("logits_max_abs", f"draft width {width}") in failed(report(path, source, "--draft-reference", source))


def test_another_checkpoint_is_no_reference(source: Path, bundle: Make, tmp_path: Path):
    path = bundle("cpu", "float32")
    tiny.f_rand(tmp_path / "narrow", intermediate_size=128)
    tiny.f_rand(tmp_path / "biased", mlp_bias=True)
    for name in ("narrow", "biased"):
        result = validate(path, tmp_path / name)
        assert result.exit_code == 1
        assert result.stderr.splitlines()[-1].startswith(f"Error: {path}: target has other tensors or shapes than {name}")
        assert "Traceback" not in result.output and result.stdout == ""
    tiny.f_rand(tmp_path / "other seed", seed=1)
    assert ("weight_error", "target") in failed(report(path, tmp_path / "other seed"))


def test_a_tokenizer_does_not_change_the_verdict(tmp_path: Path):
    """Prose and chat messages instead of arbitrary ids, padding rows masked."""
    tiny.f_rand(tmp_path / "source")
    tiny.f_tok(tmp_path / "source", size=120, extra_tokens=["<|im_start|>", "<|im_end|>"], chat_template=tiny.CHATML)
    found = report(make(tmp_path / "source", tmp_path / "bundle", **SHAPE), tmp_path / "source")
    assert found["passed"] and found["perplexity"] > 1
    shutil.rmtree(tmp_path / "bundle")
    path = make(tmp_path / "source", tmp_path / "bundle", **SHAPE)
    patch(path, "lm_head.weight", "values", lambda head: head[122:].__imul__(np.float32(9)))  # rows that no token has
    hash_again(path)
    assert failed(report(path, tmp_path / "source")) == {("weight_error", "target"), ("exact_weights_changed", "target")}


@pytest.mark.parametrize("options", [{}, {"tree": ((0,), (1,), (0, 0), (1, 0), (0, 0, 0))}], ids=["chains", "tree"])
def test_a_context_shorter_than_the_prompts_is_no_obstacle(options: dict[str, Any], tmp_path: Path):
    tiny.f_rand(tmp_path / "source")
    tiny.f_tok(tmp_path / "source", size=120)
    draft = {"draft": str(tmp_path / "source")} if options else {}
    path = make(tmp_path / "source", tmp_path / "bundle", context=16, widths=(1, 4), chunk=8, **draft, **options)
    assert report(path, tmp_path / "source")["passed"]


@pytest.mark.parametrize(("value", "passed"), [(0.0, True), (1.0, True), (1.5, False), (math.nan, False), (math.inf, False)])
def test_nan_never_passes_a_check(value: float, passed: bool):
    assert Check("name", "graph", value, limit=1.0).passed == passed


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of 8 layers and an EAGLE-3 head for it."""
    place = tmp_path_factory.mktemp("eagle")
    sizes: dict[str, Any] = {"hidden_size": eagles.HIDDEN, "vocab_size": eagles.VOCAB, "num_hidden_layers": eagles.LAYERS}
    tiny.f_rand(place / "target", intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, **sizes)
    return place / "target", eagles.save(place / "head", eagles.eagle3().tensors, eagles.plain())


def other_head(folder: Path, **changes: Any) -> Path:
    """The same head with other tensors; `__` stands for a dot."""
    return eagles.save(folder, eagles.changed(**changes)(eagles.eagle3().tensors), eagles.plain())


@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_another_eagle_head_is_no_reference(eagle: tuple[Path, Path], tmp_path: Path, weights: str):
    target, head = eagle
    path = make(target, tmp_path / "bundle", **{**SHAPE, **WEIGHTS[weights]}, eagle=str(head))
    assert report(path, target, "--draft-reference", head)["passed"]
    noise = other_head(tmp_path / "noise", fc__weight=eagles.draw({"fc.weight": (16, 48)}, seed=1)["fc.weight"])
    assert ("weight_error", "eagle") in failed(report(path, target, "--draft-reference", noise))
    ids = eagles.save(tmp_path / "ids", eagles.eagle3().tensors | eagles.maps(torch.arange(8) * 4 + 1), eagles.plain())
    assert failed(report(path, target, "--draft-reference", ids)) == {("draft_ids_differ", "eagle")}
    more = eagles.save(tmp_path / "more", eagles.eagle3(drafts=16).tensors, eagles.plain())
    biased = eagles.save(tmp_path / "biased", eagles.eagle3(fc_bias=True).tensors, eagles.plain())
    for other, name in ((more, "lm_head.weight"), (biased, "fc.bias")):
        result = validate(path, target, "--draft-reference", other)
        assert result.exit_code == 1
        assert result.stderr.splitlines()[-1].startswith(f"Error: {path}: its head has {name} of shape")
        assert "Traceback" not in result.output and result.stdout == ""


@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_other_medusa_heads_are_no_reference(source: Path, bundle: Make, tmp_path: Path, weights: str):
    for seed in (0, 1):
        noise = torch.Generator().manual_seed(seed)
        save(tmp_path / f"heads {seed}", {f"{head}.0.linear.weight": torch.randn(64, 64, generator=noise) for head in range(2)})
    path = bundle("cpu", weights, medusa=str(tmp_path / "heads 0"))
    assert report(path, source, "--draft-reference", tmp_path / "heads 0")["passed"]
    assert ("weight_error", "medusa") in failed(report(path, source, "--draft-reference", tmp_path / "heads 1"))
