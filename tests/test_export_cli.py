"""The commands' promises: exit codes, errors in one line, JSON of the contract and nothing beside it (design.md §5)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gguf import GGMLQuantizationType

import tiny
from checkpoints import any_blocks, rewrite_gguf
from specedge.bundle import open_bundle
from specedge.errors import SpecedgeError
from specedge.export.cli import main

SHAPE = ("--weights", "fp32", "--context", 128, "--widths", "1,4", "--chunk", 8)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "f-rand"
    tiny.f_rand(folder)
    return folder


@pytest.fixture(scope="module")
def bundle(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "bundle"
    assert run("convert", source, "-o", path, *SHAPE).exit_code == 0
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(code: int, *arguments: object) -> str:
    """The one line of a command that fails; nothing on standard output."""
    result = run(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception  # anything else is a traceback
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert (result.exit_code, len(errors), result.stdout) == (code, 1, "")
    assert result.stderr.endswith(errors[0] + "\n")
    return errors[0]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--widths", "1,x"], ["--widths", "'1,x'"]),
        (["--widths", ""], ["--widths"]),
        (["--widths", "0,4"], ["(0, 4)"]),
        (["--widths", "1,4", "--gamma", 3], ["--widths", "--gamma"]),
        (["--gamma", 0], ["--gamma", "0"]),
        (["--gamma", 500], ["501", "128"]),
        (["--context", 129], ["129", "128"]),
        (["--context", 1], ["context 1"]),
        (["--context", "many"], ["--context", "'many'"]),
        (["--chunk", 0], ["chunk 0"]),
        (["--weights", "int5"], ["--weights", "'int5'"]),
        (["--group", "33"], ["group", "33", "16"]),
        (["--head-weights", "fp16"], ["float16"]),
        (["--weights", "fp16", "--head-weights", "int8"], ["float16", "int8/32"]),
        (["--method", "awq"], ["--method", "'awq'", "keep", "rtn", "clip", "gptq"]),
        (["--method", "keep", "--group", "64"], ["--method keep", "--group"]),
        (["--method", "keep", "--asymmetric"], ["--method keep", "--asymmetric"]),
        (["--weights", "fp32", "--group", "64"], ["--group", "--weights fp32"]),
        (["--weights", "fp16", "--asymmetric"], ["--asymmetric", "--weights fp16"]),
        (["--weights", "fp32", "--head-weights", "fp32", "--group", "64"], ["--group", "--weights fp32"]),
        (["--lookup", "--draft", "x"], ["--lookup", "--draft"]),
        (["--invented"], ["--invented"]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_a_request_without_sense_is_a_usage_error(source: Path, arguments: list[object], parts: list[str], tmp_path: Path):
    error = refused(2, "convert", source, "-o", tmp_path / "out", *arguments)
    assert all(part in error for part in parts), error
    assert not list(tmp_path.iterdir())


PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trees") / "tree.json"
    file.write_text(json.dumps(PATHS), encoding="utf-8")
    return file


@pytest.mark.parametrize("lookup", [[], ["--lookup"]])
def test_a_tree_needs_a_draft_model(source: Path, tree: Path, lookup: list[str], tmp_path: Path):
    error = refused(2, "convert", source, "-o", tmp_path / "out", *SHAPE, "--tree", tree, *lookup)
    assert "tree" in error and "--draft" in error
    assert not list(tmp_path.iterdir())


def test_a_tree_wider_than_the_context_is_refused(source: Path, tmp_path: Path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[rank] for rank in range(16)]))
    options = ["--draft", source, "--weights", "fp32", "--context", 16, "--widths", "1,4", "--chunk", 8]
    error = refused(2, "convert", source, "-o", tmp_path / "out", *options, "--tree", file)
    assert "17" in error and "16" in error
    assert [path.name for path in tmp_path.iterdir()] == ["tree.json"]


@pytest.mark.parametrize("content", [None, b"", b"[]", b"\xff", b"[[0, 0]]", b"[[0], [0]]", b"[[0.5]]", b"[[]]"])
def test_a_tree_that_cannot_be_read_is_named(source: Path, content: bytes | None, tmp_path: Path):
    file = tmp_path / "mine.json"
    if content is not None:
        file.write_bytes(content)
    error = refused(1, "convert", source, "-o", tmp_path / "out", *SHAPE, "--draft", source, "--tree", file)
    assert error.startswith(f"Error: {file}: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rank", [128, 10**40])
def test_a_tree_of_more_choices_than_ids_is_refused(source: Path, rank: int, tmp_path: Path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[0], [0, rank]]))
    error = refused(2, "convert", source, "-o", tmp_path / "out", *SHAPE, "--draft", source, "--tree", file)
    assert f"tree: rank {rank}, expected 0..127" in error
    assert [path.name for path in tmp_path.iterdir()] == ["tree.json"]


@pytest.mark.parametrize("device", ["cpu", "cpu-static"])
def test_a_tree_goes_into_the_bundle_and_is_drafted(source: Path, tree: Path, device: str, tmp_path: Path):
    path = tmp_path / "bundle"
    results = results_of("convert", source, "-o", path, *SHAPE, "--draft", source, "--tree", tree, "--device", device)
    manifest = open_bundle(path).manifest
    assert sorted(map(list, manifest.tree)) == sorted(PATHS)
    assert results["widths"] == list(manifest.widths) == [1, 4, len(PATHS) + 1]
    options = ["generate", path, "--ids", "3,14,15", "--max-new-tokens", 24]
    plain = results_of(*options, "--plain")
    drafted = results_of(*options)
    assert drafted["ids"] == plain["ids"]
    assert [len(row) for row in drafted["stats"]["accepted_by_rank"]] == [3, 2, 1]
    assert drafted["stats"]["accepted_by_position"][:3] == [1.0] * 3  # its own copy is right with its first choices
    chain = results_of(*options, "--gamma", 2)
    assert chain["ids"] == plain["ids"]
    assert [len(row) for row in chain["stats"]["accepted_by_rank"]] == [1, 1]


@pytest.mark.parametrize("arguments", [["convert", "x"], ["validate", "x"], ["inspect"], ["invented"]])
def test_an_incomplete_command_is_a_usage_error(arguments: list[str]):
    refused(2, *arguments)


def test_other_errors_have_code_1(source: Path, bundle: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    commands: list[tuple[list[object], str]] = [
        (["convert", tmp_path / "nowhere", "-o", tmp_path / "out"], "nowhere"),
        (["convert", tmp_path / "empty", "-o", tmp_path / "out"], "config.json"),
        (["convert", source, "-o", tmp_path / "out", "--draft", tmp_path / "nowhere"], "nowhere"),
        (["convert", source, "-o", bundle, *SHAPE], "--force"),
        (["convert", source, "-o", source, "--force", *SHAPE], "no bundle"),
        (["convert", source, "-o", tmp_path / "out", "--device", "gpu-9"], "gpu-9"),
        (["validate", tmp_path / "nowhere", "--reference", source], "manifest.json"),
        (["validate", bundle, "--reference", tmp_path / "nowhere"], "nowhere"),
        (["validate", bundle, "--reference", source, "--draft-reference", source], "draft"),
        (["validate", bundle, "--reference", source, "--device", "cpu-static"], "cpu-static"),
        (["inspect", source], "manifest.json"),
        (["inspect", bundle, "--json", tmp_path / "nowhere/x.json"], "x.json"),
    ]
    for arguments, part in commands[:-1]:
        assert part in refused(1, *arguments)
    result = run(*commands[-1][0])  # this one has shown the bundle by then
    assert result.exit_code == 1 and "x.json: cannot be written" in result.stderr and "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_debug_shows_the_traceback(tmp_path: Path):
    command = [sys.executable, "-m", "specedge.export", "--debug", "inspect", str(tmp_path / "nowhere")]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    command.remove("--debug")
    hidden = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (shown.returncode, hidden.returncode) == (1, 1)
    assert "Traceback (most recent call last)" in shown.stderr and "SpecedgeError" in shown.stderr
    assert hidden.stderr.splitlines() == [
        f"Error: {tmp_path}/nowhere/manifest.json: not found; expected a bundle made by spec-export convert"
    ]
    assert (shown.stdout, hidden.stdout) == ("", "")
    assert isinstance(run("--debug", "inspect", tmp_path / "nowhere").exception, SpecedgeError)


def results_of(*arguments: object) -> dict[str, Any]:
    """What a command writes as JSON, on standard output: there is nothing else."""
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    results: dict[str, Any] = json.loads(result.stdout, parse_constant=pytest.fail)
    assert result.stderr  # where people are spoken to meanwhile
    return results


def check_bundle_keys(results: dict[str, Any], path: Path) -> None:
    manifest = open_bundle(path).manifest
    assert (results["device"], results["widths"], results["context"]) == (manifest.device, [1, 4], 128)
    assert results["bytes"] == sum(file.bytes for file in manifest.files.values())
    assert [(graph["role"], graph["file"], graph["width"]) for graph in results["graphs"]] == [
        (role, graph.file, graph.width) for role, record in manifest.roles.items() for graph in record.all_graphs
    ]
    assert all(graph["ops"] and all(count > 0 for count in graph["ops"].values()) for graph in results["graphs"])
    assert sum(results["weights"].values()) == sum(role.stored_bytes for role in manifest.roles.values())


@pytest.mark.parametrize("device", ["cpu", "cpu-static"])
def test_convert_and_inspect_write_the_contract(source: Path, device: str, tmp_path: Path):
    path = tmp_path / "bundle"
    results = results_of("convert", source, "-o", path, *SHAPE, "--device", device)
    check_bundle_keys(results, path)
    assert results["weights"].keys() == {"float32"}
    assert {graph["width"] for graph in results["graphs"]} == ({None} if device == "cpu" else {1, 4, 8})
    assert results["seconds"] > 0 and results["peak_rss_bytes"] > 50e6
    inspected = results_of("inspect", path)
    check_bundle_keys(inspected, path)
    assert inspected.items() <= results.items()


def test_quantised_weights_are_counted_by_scheme(source: Path, tmp_path: Path):
    options = [*SHAPE[2:], "--weights", "int4", "--group", "channel", "--asymmetric", "--head-weights", "int8"]
    results = results_of("convert", source, "-o", tmp_path / "bundle", *options, "--draft", source)
    check_bundle_keys(results, tmp_path / "bundle")
    assert results["weights"].keys() == {"int4/channel/asymmetric", "int8/channel/asymmetric", "float32"}
    assert {graph["role"] for graph in results["graphs"]} == {"target", "draft"}
    assert "MatMulNBits" in results["graphs"][0]["ops"]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Matrices in Q4_1, tied embedding in Q8_0, v in Q6_K."""
    folder = tmp_path_factory.mktemp("gguf")
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 1, "tie_word_embeddings": True}
    tiny.f_rand(folder / "source", num_attention_heads=16, **shape)
    tiny.f_gguf(folder / "source", folder / "full.gguf", tied=True)
    modules = dict.fromkeys(("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), GGMLQuantizationType.Q4_1)
    others = {"token_embd": GGMLQuantizationType.Q8_0, "attn_v": GGMLQuantizationType.Q6_K}
    rewrite_gguf(folder / "full.gguf", folder / "model.gguf", {}, modules | others, any_blocks)
    return folder / "model.gguf"


KEPT = {
    ("embedding", "Q8_0", "int8/32", True, 1),
    ("attention", "Q4_1", "int4/32/minima", True, 3),
    ("attention", "Q6_K", "int4/32", False, 1),
    ("mlp", "Q4_1", "int4/32/minima", True, 3),
    ("norms", "F32", "float32", True, 3),
}
ROUNDED = {
    ("embedding", "Q8_0", "int8/32", False, 1),
    ("attention", "Q4_1", "int4/32", False, 3),
    ("attention", "Q6_K", "int4/32", False, 1),
    ("mlp", "Q4_1", "int4/32", False, 3),
    ("norms", "F32", "float32", True, 3),
}
REGROUPED = {
    ("embedding", "Q8_0", "int8/64/asymmetric", False, 1),
    ("attention", "Q4_1", "int4/64/asymmetric", False, 3),
    ("attention", "Q6_K", "int4/64/asymmetric", False, 1),
    ("mlp", "Q4_1", "int4/64/asymmetric", False, 3),
    ("norms", "F32", "float32", True, 3),
}
FLOAT = {
    ("embedding", "Q8_0", "float32", True, 1),
    ("attention", "Q4_1", "float32", True, 3),
    ("attention", "Q6_K", "float32", True, 1),
    ("mlp", "Q4_1", "float32", True, 3),
    ("norms", "F32", "float32", True, 3),
}


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ([], KEPT),
        (["--method", "keep"], KEPT),
        (["--method", "rtn"], ROUNDED),
        (["--group", "64", "--asymmetric"], REGROUPED),
        (["--method", "rtn", "--group", "64", "--asymmetric"], REGROUPED),
        (["--weights", "fp32"], FLOAT),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_the_method_decides_what_stays_exact(
    gguf_file: Path, options: list[object], groups: set[tuple[object, ...]], tmp_path: Path
):
    path = tmp_path / "bundle"
    results = results_of("convert", gguf_file, "-o", path, *SHAPE[2:], *options)
    check_bundle_keys(results, path)
    keys = ("part", "source", "scheme", "exact", "tensors")
    assert {tuple(group[key] for key in keys) for group in results["tensors"]} == groups
    assert len(results["tensors"]) == len(groups) and {group["role"] for group in results["tensors"]} == {"target"}
    assert sum(group["bytes"] for group in results["tensors"]) == sum(results["weights"].values())
    assert results_of("inspect", path)["tensors"] == results["tensors"]
    shown = run("inspect", path).stdout
    rows = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in shown.splitlines() if "target" in line]
    table = {(row[1], row[3], row[4], row[8] == "yes", int(row[2])) for row in rows if len(row) == 9}
    assert table == groups and {row[8] for row in rows if len(row) == 9} <= {"yes", "no"}
    lost = sorted({str(group[1]) for group in groups if not group[3]})
    expected = [f"{', '.join(lost)}: dequantised and stored anew"] if lost else []
    assert [line.strip() for line in shown.splitlines() if "stored anew" in line] == expected


def test_every_role_has_its_tensors(gguf_file: Path, tmp_path: Path):
    results = results_of("convert", gguf_file, "-o", tmp_path / "bundle", *SHAPE[2:], "--draft", gguf_file)
    found = [{key: value for key, value in group.items() if key != "role"} for group in results["tensors"]]
    assert [group["role"] for group in results["tensors"]] == ["draft"] * 5 + ["target"] * 5
    assert found[:5] == found[5:]


def test_a_kept_bundle_is_validated(gguf_file: Path, tmp_path: Path):
    assert run("convert", gguf_file, "-o", tmp_path / "bundle", *SHAPE[2:]).exit_code == 0
    results = results_of("validate", tmp_path / "bundle", "--reference", gguf_file, "--prompts", 1, "--tokens", 8)
    assert results["passed"] and results["width_agreement"] == 0.0


def test_json_goes_to_a_file(bundle: Path, tmp_path: Path):
    result = run("inspect", bundle, "--json", tmp_path / "out.json")
    assert result.exit_code == 0
    assert "bundle" in result.stdout  # people read standard output then
    check_bundle_keys(json.loads((tmp_path / "out.json").read_text()), bundle)


def test_a_path_is_shown_as_it_is_spelt(source: Path, tmp_path: Path):
    """Brackets and colons are markup to rich, not to us."""
    for name in ("[red]x", "out[/b]", "x:smile:"):
        result = run("convert", source, "-o", tmp_path / name, *SHAPE)
        assert result.exit_code == 0, result.exception
        assert name in result.stdout


def test_force_replaces(source: Path, bundle: Path):
    before = open_bundle(bundle).manifest
    assert run("convert", source, "-o", bundle, *SHAPE, "--force").exit_code == 0
    assert open_bundle(bundle).manifest == before


def test_gamma_is_short_for_widths(source: Path, tmp_path: Path):
    assert run("convert", source, "-o", tmp_path / "a", *SHAPE).exit_code == 0
    assert run("convert", source, "-o", tmp_path / "b", *SHAPE[:4], "--gamma", 3, *SHAPE[6:]).exit_code == 0
    assert open_bundle(tmp_path / "a").manifest == open_bundle(tmp_path / "b").manifest


def test_a_calibrated_bundle_is_made_judged_and_shown(source: Path, tmp_path: Path):
    path, text = tmp_path / "bundle", tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"ids": list(range(start, start + 40))}) for start in range(3, 80, 7)))
    recipe = ["--group", "channel", "--method", "gptq", "--bits", 7, "--calibration", text]
    draft = ["--draft", source, "--draft-group", 32, "--draft-method", "rtn"]
    results = results_of("convert", source, "-o", path, *SHAPE[2:], *recipe, *draft)
    stored = {(group["role"], group["scheme"], group["method"]) for group in results["tensors"] if group["method"]}
    assert {scheme for role, scheme, method in stored if (role, method) == ("target", "gptq")} == {
        "int4/channel",
        "int8/channel",
    }
    assert {(scheme, method) for role, scheme, method in stored if role == "draft"} == {("int4/32", "rtn"), ("int8/32", "rtn")}
    assert results["validated"] is None
    judged = results_of("validate", path, "--reference", source, "--held-out", 150, "--prompts", 1, "--tokens", 4)
    assert judged["passed"] and judged["tokens"] >= 150
    assert 0 < judged["kl_mean"] < 1 and 0 < judged["top1_agreement"] <= 1 and 0 < judged["overlap"] <= 1
    assert {group["method"] for group in judged["groups"]} == {"gptq", "rtn", ""}
    assert all(0 < group["relative_error"] < 0.5 for group in judged["groups"] if group["method"])
    assert results_of("inspect", path)["validated"] == judged
    assert f"validate passed; against float32 on {judged['tokens']} tokens" in " ".join(run("inspect", path).stdout.split())


@pytest.mark.parametrize(
    ("options", "part"),
    [(["--bits", 5], "bits 5.0: the target takes 5."), (["--seed", 1 << 31], "--seed"), (["--bits", 4], "--bits")],
    ids=str,
)
def test_what_cannot_be_is_refused_before_text_is_written(source: Path, options: list[object], part: str, tmp_path: Path):
    assert part in refused(2, "convert", source, "-o", tmp_path / "bundle", *options)
    assert not (tmp_path / "bundle").exists()


def test_a_text_with_nothing_to_judge_by_is_refused(source: Path, bundle: Path, tmp_path: Path):
    (tmp_path / "text.jsonl").write_text('{"ids": [5]}\n{"ids": [6]}\n')
    said = refused(1, "validate", bundle, "--reference", source, "--text", tmp_path / "text.jsonl")
    assert "nothing to judge by" in said


def test_a_report_of_another_manifest_is_not_shown(source: Path, bundle: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    run("validate", copy, "--reference", source, "--prompts", 1, "--tokens", 4)
    assert results_of("inspect", copy)["validated"]["passed"]
    (copy / "manifest.json").write_text((copy / "manifest.json").read_text() + " ")
    assert results_of("inspect", copy)["validated"] is None


def test_a_drafters_recipe_needs_a_drafter(source: Path, tmp_path: Path):
    assert "--draft-group" in refused(2, "convert", source, "-o", tmp_path / "bundle", "--draft-group", 32)
