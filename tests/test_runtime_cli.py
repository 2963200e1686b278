"""Laws of the commands a plain install has: what goes where, which keys JSON has, and how a mistake ends."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import bundles
from specedge.devices.table import DEVICES
from specedge.export.cli import main
from specedge.runtime import Sampling, load
from specedge.runtime.bench import Comparison
from specedge.runtime.cli_bench import prompt_sets, show_bench
from specedge.runtime.rules import RULES
from specedge.runtime.shape import TreeShape
from specedge.runtime.terminal import Output
from tiny import byte_id, deterministic_chain, f_chain, f_rand, f_self, f_tok, noisy_lm_head, write_json

SPELLED = "bc STOPxyz0123456789"  # what follows "a"


def run(*arguments: object) -> Result:
    """A command, run to its end; a Python exception would come through."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def succeed(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def results(*arguments: object) -> dict[str, Any]:
    """JSON from standard output, where nothing else may stand."""
    content: dict[str, Any] = json.loads(succeed(*arguments, "--json", "-").stdout)
    return content


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain that spells SPELLED after "a", with its own copy as the draft and a chat template that adds nothing."""
    place = tmp_path_factory.mktemp("text")
    f_tok(place / "tokenizer", chat_template="{{ messages[0].content }}")
    ids = [byte_id(byte) for byte in b"a" + SPELLED.encode()]
    chain = deterministic_chain(264, dict(zip(ids, [*ids[1:], 2], strict=True)))
    f_chain(place / "target", chain, tokenizer=place / "tokenizer")
    f_self(place / "target", place / "draft")
    return bundles.make(place / "target", place / "bundle", draft=str(place / "draft"), widths=(1, 4), chunk=13)


@pytest.fixture(scope="module")
def ids_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ids")
    f_rand(place / "target", eos_token_id=None)
    return bundles.make(place / "target", place / "bundle", widths=(1, 4), context=128)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """F-RAND without EOS and a draft that agrees half the time."""
    place = tmp_path_factory.mktemp("drafted")
    f_rand(place / "target", eos_token_id=None)
    noisy_lm_head(place / "target", place / "draft", sigma=0.15)
    return bundles.make(place / "target", place / "bundle", draft=str(place / "draft"), widths=(1, 4), context=128)


PATHS = [[0], [1], [0, 0], [1, 0], [0, 0, 0]]
TREE = TreeShape.from_paths(PATHS)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trees") / "tree.json"
    file.write_text(json.dumps(PATHS[::-1]), encoding="utf-8")  # in any order
    return file


# ---- generate


def test_the_text_goes_to_standard_output(bundle: Path) -> None:
    result = succeed("generate", bundle, "-p", "a", "--gamma", 3)
    assert result.stdout == SPELLED + "\n"
    assert result.stderr == ""


def test_ids_are_a_prompt_too(bundle: Path, ids_only: Path) -> None:
    for ids in (f"{byte_id(97)}", f"3, {byte_id(97)}", f"3 {byte_id(97)}"):
        assert succeed("generate", bundle, "--ids", ids, "--max-new-tokens", 2).stdout == "bc\n"
    expected = load(ids_only).generate([3, 14, 15], max_new_tokens=5).ids
    assert succeed("generate", ids_only, "--ids", "3,14,15", "--max-new-tokens", 5).stdout.split() == [*map(str, expected)]


def test_chat_goes_through_the_template(bundle: Path) -> None:
    assert succeed("generate", bundle, "-p", "a", "--chat", "--max-new-tokens", 4).stdout == "bc S\n"


def test_stop_ends_before_its_text_and_may_come_twice(bundle: Path) -> None:
    assert succeed("generate", bundle, "-p", "a", "--stop", "OPx", "--stop", "zzz").stdout == "bc ST\n"
    assert succeed("generate", bundle, "-p", "a", "--stop", "OPx", "--stop", "c S").stdout == "b\n"


GENERATED = {"ids", "text", "finish_reason", "stats"}


def test_json_says_what_was_generated(bundle: Path) -> None:
    found = results("generate", bundle, "-p", "a", "--max-new-tokens", 9, "--gamma", 3)
    assert found.keys() >= GENERATED
    assert found["text"] == SPELLED[:9] and found["finish_reason"] == "length"
    assert found["ids"] == [byte_id(byte) for byte in SPELLED[:9].encode()]
    stats = found["stats"]
    assert (stats["tokens"], stats["rounds"], stats["drafted"], stats["accepted"]) == (9, 3, 6, 6)
    assert stats["tokens_per_round"] == 3 and stats["accepted_by_position"] == [1.0] * 3
    assert results("generate", bundle, "-p", "a", "--stop", "STOP")["finish_reason"] == "stop"


def test_with_json_on_standard_output_the_text_goes_to_standard_error(bundle: Path) -> None:
    result = succeed("generate", bundle, "-p", "a", "--json", "-", "--stats")
    assert json.loads(result.stdout)["text"] == SPELLED
    assert result.stderr.startswith(SPELLED + "\n") and "tokens/s" in result.stderr


def test_json_in_a_file_leaves_standard_output_to_the_text(bundle: Path, tmp_path: Path) -> None:
    result = succeed("generate", bundle, "-p", "a", "--json", tmp_path / "out.json")
    assert result.stdout == SPELLED + "\n"
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["text"] == SPELLED


def test_plain_and_the_drafters_say_the_same(bundle: Path) -> None:
    for options, drafted in (
        (["--plain"], False),
        (["--drafter", "lookup"], False),
        (["--drafter", "draft", "--gamma", 3], True),
    ):
        found = results("generate", bundle, "-p", "a", *options)
        assert found["text"] == SPELLED
        assert (found["stats"]["drafted"] > 0) == drafted  # nothing to look up: no byte comes twice


def test_sampling_options_arrive(ids_only: Path) -> None:
    sampled = ["generate", ids_only, "--ids", "3,14", "--max-new-tokens", 20, "--temperature", 1.5]
    one, two = (results(*sampled, "--seed", seed)["ids"] for seed in (1, 2))
    assert one != two and one == results(*sampled, "--seed", 1)["ids"]
    greedy = results(*sampled[:-2])["ids"]
    assert greedy not in (one, two)
    for option, value in (("--top-k", 1), ("--top-p", 0.0)):
        assert results(*sampled, option, value)["ids"] == greedy


def test_a_tree_in_a_file_is_drafted(bundle: Path, drafted: Path, tree: Path) -> None:
    found = results("generate", bundle, "-p", "a", "--tree", tree, "--max-new-tokens", 16)
    assert found["text"] == SPELLED[:16]
    assert (found["stats"]["rounds"], found["stats"]["accepted_by_position"]) == (4, [1.0] * 3)  # F-SELF: its first choices
    assert found["stats"]["accepted_by_rank"] == [[1.0, 0.0], [1.0], [1.0]]
    options = ["generate", drafted, "--ids", "3,14", "--max-new-tokens", 40]
    found = results(*options, "--tree", tree)
    assert found["ids"] == results(*options, "--plain")["ids"]
    assert max(share for row in found["stats"]["accepted_by_rank"] for share in row[1:]) > 0


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_by_its_name_is_the_engines(drafted: Path, tree: Path, rule: str) -> None:
    sampling: dict[str, Any] = {"temperature": 1.3, "seed": 4}
    shape = TreeShape.chain(3) if rule in ("token", "block") else TREE
    draft = ["--gamma", 3] if shape.is_chain else ["--tree", tree]
    options = ["--ids", "3,14", "--max-new-tokens", 20, "--temperature", 1.3, "--seed", 4, "--rule", rule, *draft]
    expected = load(drafted, threads=1).generate([3, 14], Sampling(**sampling), 20, tree=shape, rule=rule)
    assert results("generate", drafted, *options)["ids"] == expected.ids


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (["--min-p", 0.2], {"min_p": 0.2}),
        (["--repetition-penalty", 1.5], {"repetition_penalty": 1.5}),
        (["--presence-penalty", 3], {"presence_penalty": 3.0}),
        (["--frequency-penalty", -2.5], {"frequency_penalty": -2.5}),
        (["--logit-bias", "42=9", "--logit-bias", "7=-1.5"], {"logit_bias": {42: 9.0, 7: -1.5}}),
        (["--ban", 3, "--ban", 77], {"banned_ids": [3, 77]}),
    ],
)
def test_every_option_of_sampling_arrives(drafted: Path, options: list[Any], settings: dict[str, Any]) -> None:
    request = ["generate", drafted, "--ids", "3,14", "--max-new-tokens", 30, "--gamma", 3, "--temperature", 1.5]
    expected = load(drafted, threads=1).generate([3, 14], Sampling(1.5, **settings), 30, gamma=3).ids
    assert results(*request, *options)["ids"] == expected != results(*request)["ids"]


def test_log_probabilities_stand_in_the_json_if_asked_for(bundle: Path, drafted: Path, tree: Path, tmp_path: Path) -> None:
    options = ["generate", drafted, "--ids", "3,14", "--max-new-tokens", 25, "--tree", tree, "--temperature", 0.8]
    found = results(*options, "--logprobs")
    expected = load(drafted, threads=1).generate([3, 14], Sampling(0.8), 25, tree=TREE, log_probabilities=True)
    assert len(found["logprobs"]) == len(found["ids"]) == 25
    assert found["logprobs"] == pytest.approx(expected.log_probabilities, abs=1e-6)
    assert "logprobs" not in results(*options)
    cut = results("generate", bundle, "-p", "a", "--gamma", 3, "--stop", "OPx", "--logprobs")  # in the middle of a burst
    assert cut["logprobs"] == pytest.approx([0.0] * len(cut["ids"]), abs=1e-3)  # a chain is certain
    succeed(*options, "--logprobs", "--json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["logprobs"] == found["logprobs"]


def test_a_rule_of_chains_says_that_the_bundle_s_tree_is_left_out(drafted: Path, tree: Path, tmp_path: Path) -> None:
    stored = shutil.copytree(drafted, tmp_path / "stored")
    manifest = json.loads((stored / "manifest.json").read_text())
    request = ["generate", stored, "--ids", "3,14", "--max-new-tokens", 8]
    for paths, noted in (([[0], [1]], True), ([[0], [0, 0]], False)):
        write_json(stored / "manifest.json", manifest | {"tree": paths})
        for rule in ("token", "block"):
            result = succeed(*request, "--temperature", 1, "--rule", rule, "--json", "-")
            assert (f"note: --rule {rule} judges chains only; the bundle's tree" in result.stderr) == noted
            assert noted or json.loads(result.stdout)["stats"]["drafted"] > 0  # a stored chain is drafted
        for options in (["--rule", "recursive"], ["--rule", "token", "--gamma", 2], ["--rule", "token", "--plain"]):
            assert "note" not in succeed(*request, "--temperature", 1, *options).stderr


def test_no_tokens_are_no_text(bundle: Path) -> None:
    found = results("generate", bundle, "-p", "a", "--max-new-tokens", 0)
    assert (found["ids"], found["text"], found["finish_reason"]) == ([], "", "length")


# ---- mistakes


@pytest.mark.parametrize("value", ["nan", "-1", "inf", "abc", "-0.5"])
@pytest.mark.parametrize("name", ["temperature", "top-k", "top-p", "seed", "gamma", "max-new-tokens", "threads"])
def test_an_illegal_value_is_refused_by_name(bundle: Path, name: str, value: str) -> None:  # B47
    result = run("generate", bundle, "-p", "a", f"--{name}={value}")
    assert result.exit_code == 2
    assert f"--{name}" in result.stderr and value in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("value", ["nan", "inf", "abc", "1e9"])
@pytest.mark.parametrize("name", ["min-p", "repetition-penalty", "presence-penalty", "frequency-penalty"])
def test_an_illegal_penalty_is_refused_by_name(bundle: Path, name: str, value: str) -> None:  # B47
    result = run("generate", bundle, "-p", "a", f"--{name}={value}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"--{name}" in result.stderr


@pytest.mark.parametrize(
    ("options", "part"),
    [
        pytest.param(["--tree", "TREE", "--gamma", "2"], "--tree and --gamma: ", id="tree and gamma"),
        pytest.param(["--tree", "TREE", "--drafter", "lookup"], "--tree: drafter 'lookup'", id="lookup"),
        pytest.param(["--tree", "TREE", "--plain"], "--plain", id="plain tree"),
        pytest.param(["--tree", "WIDE"], "--tree: 13 nodes, expected at most 12", id="wide"),
        pytest.param(["--tree", "TREE", "--rule", "token", "--temperature", "1"], "--rule 'token': ", id="token"),
        pytest.param(["--tree", "TREE", "--rule", "block", "--temperature", "1"], "rule 'block'", id="block"),
        pytest.param(["--logit-bias", "264=1"], "--logit-bias: id 264, expected 0..", id="bias id"),
        pytest.param(["--logit-bias", "5"], "--logit-bias '5'", id="bias without a number"),
        pytest.param(["--logit-bias", "x=1"], "--logit-bias 'x=1'", id="bias of no id"),
        pytest.param(["--logit-bias", "5=nan"], "--logit-bias: ", id="bias nan"),
        pytest.param(["--logit-bias", "-5=1"], "--logit-bias: ", id="bias of a negative id"),
        pytest.param(["--ban", "264"], "--ban: id 264, expected 0..", id="ban id"),
        pytest.param(["--ban=-1"], "--ban: ", id="ban a negative id"),
        pytest.param(["--logprobs"], "--logprobs", id="log-probabilities without JSON"),
    ],
)
def test_what_cannot_be_asked_for_is_one_line_and_exit_code_2(
    bundle: Path, tree: Path, options: list[str], part: str, tmp_path: Path
) -> None:
    (tmp_path / "wide.json").write_text(json.dumps([[rank] for rank in range(13)]))
    files = {"TREE": str(tree), "WIDE": str(tmp_path / "wide.json")}
    result = run("generate", bundle, "-p", "a", *(files.get(option, option) for option in options))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert part in result.stderr


TREES = {
    "missing": None,
    "empty": b"",
    "no paths": b"[]",
    "no list": b'{"0": 1}',
    "no JSON": b"[[0],\n [",
    "no text": b"\xff\xfe",
    "no prefix": b"[[0], [1, 0]]",
    "twice": b"[[0], [0]]",
    "negative": b"[[-1]]",
    "the root": b"[[]]",
    "fractions": b"[[0.5]]",
    "words": b'[["a\nb"]]',
    "nested too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("command", ["generate", "bench"])
@pytest.mark.parametrize("name", TREES)
def test_a_tree_that_cannot_be_read_is_named(drafted: Path, command: str, name: str, tmp_path: Path) -> None:
    file, content = tmp_path / "mine.json", TREES[name]
    if content is not None:
        file.write_bytes(content)
    prompt = ["--ids", "3,14"] if command == "generate" else []
    result = run(command, drafted, *prompt, "--tree", file)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"Error: {file}: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "part"),
    [
        pytest.param([], "-p TEXT or --ids", id="no prompt"),
        pytest.param(["-p", "a", "--ids", "1"], "-p TEXT or --ids", id="two prompts"),
        pytest.param(["--ids", "1,x"], "--ids '1,x'", id="ids"),
        pytest.param(["-p", "a", "--gamma", "99"], "--gamma 99", id="gamma"),
        pytest.param(["-p", "a", "--top-p", "1.5"], "--top-p: ", id="top-p"),
        pytest.param(["-p", "a", "--nonsense"], "--nonsense", id="option"),
        pytest.param(["-p", "a", "--rule", "typical"], "'lossy-typical'", id="rule"),
        pytest.param(["-p", "a", "--ban", "x"], "--ban", id="ban"),
    ],
)
def test_a_request_that_makes_no_sense_is_a_usage_error(bundle: Path, options: list[str], part: str) -> None:
    result = run("generate", bundle, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert part in result.stderr


@pytest.mark.parametrize(
    ("options", "part"),
    [
        pytest.param(["-p", "a" * 64], "64 tokens", id="long prompt"),
        pytest.param(["--ids", "3,999"], "id 999 at index 1", id="id"),
        pytest.param(["--ids", "-3"], "id -3 at index 0", id="negative id"),
        pytest.param(["-p", "a", "--device", "nonsense"], "device 'nonsense'", id="device"),
        pytest.param(["-p", "a", "--device", "cpu-static"], "--device cpu-static", id="other form"),
        pytest.param(["-p", "a", "--drafter", "medusa"], "no drafter 'medusa'", id="drafter"),
        pytest.param(["-p", "a", "--json", "/no/such/folder/out.json"], "/no/such/folder/out.json", id="json file"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_1(bundle: Path, options: list[str], part: str) -> None:
    result = run("generate", bundle, *options)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert part in result.stderr


def test_what_is_no_bundle_is_named(tmp_path: Path, ids_only: Path) -> None:
    for command in (["generate", "-p", "a"], ["bench"], ["inspect"]):
        result = run(command[0], tmp_path / "none", *command[1:])
        assert result.exit_code == 1 and "manifest.json: not found" in result.stderr
    result = run("generate", ids_only, "-p", "a")
    assert result.exit_code == 1 and "no tokenizer" in result.stderr


def test_debug_shows_where(bundle: Path) -> None:
    with pytest.raises(Exception, match="id 999"):
        run("--debug", "generate", bundle, "--ids", "999")


def test_the_real_command_ends_the_same_way(bundle: Path) -> None:
    """Everything in a process of its own: exit code, one line, no traceback."""
    program = [sys.executable, "-c", "from specedge.export.cli import main; main()", "generate", str(bundle)]
    wrong = subprocess.run([*program, "-p", "a", "--gamma", "-1"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("Error: --gamma -1") and wrong.stderr.count("\n") == 1
    right = subprocess.run([*program, "-p", "a", "--json", "-"], capture_output=True, text=True, check=True)
    assert json.loads(right.stdout)["text"] == SPELLED


# ---- bench, inspect, plan

SIDES: Mapping[str, set[str]] = {
    "plain": {"tokens_per_s"},
    "speculative": {
        "tokens_per_s",
        "tokens_per_round",
        "acceptance",
        "accepted_by_position",
        "accepted_by_rank",
        "host_fraction",
    },
}


def check_bench(found: dict[str, Any], prompt_set: str, drafter: str) -> dict[str, Any]:
    """The keys of design.md §5; returns the record of one prompt set and drafter."""
    assert found["environment"].keys() >= {"cpus", "onnxruntime", "device"}
    record: dict[str, Any] = found["sets"][prompt_set][drafter]
    assert record.keys() >= {"plain", "speculative", "speedup", "identical_greedy"}
    assert all(record[side].keys() >= keys for side, keys in SIDES.items())
    assert record["plain"]["tokens_per_s"] > 0 and record["speculative"]["tokens_per_s"] > 0
    assert record["identical_greedy"] is True
    low, high = record["speedup_range"]
    assert 0 < low <= record["speedup"] <= high
    assert 0 <= record["speculative"]["host_fraction"] <= 1
    return record


def test_bench_compares_on_the_prompts_of_a_file(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("a\n\n#a\n", encoding="utf-8")
    options = ["bench", bundle, "--prompts", file, "--max-new-tokens", 12, "--repeats", 1, "--gamma", 3, "--threads", 1]
    result = succeed(*options, "--json", "-")
    record = check_bench(json.loads(result.stdout), "mine", "draft")["speculative"]
    assert record["acceptance"] == 1.0 and record["accepted_by_position"] == [1.0] * 3  # F-SELF
    assert record["tokens_per_round"] == 4.0 and record["drafted"] == 2 * 9
    assert "mine" in result.stderr  # the table


def test_bench_of_a_bundle_without_a_tokenizer_brings_its_own_ids(ids_only: Path) -> None:
    result = succeed("bench", ids_only, "--max-new-tokens", 20, "--repeats", 2, "--gamma", 3, "--json", "-")
    assert check_bench(json.loads(result.stdout), "ids", "lookup")["speculative"]["drafted"] > 0


def test_bench_drafts_a_tree(drafted: Path, tree: Path, tmp_path: Path) -> None:
    options = ["bench", drafted, "--max-new-tokens", 30, "--repeats", 1, "--threads", 1]
    record = check_bench(results(*options, "--tree", tree), "ids", "draft")["speculative"]
    shares = record["accepted_by_rank"]
    assert [len(row) for row in shares] == [2, 1, 1]  # most children of a node, by depth
    assert all(0 <= share <= 1 for row in shares for share in row) and all(sum(row) <= 1 for row in shares)
    assert shares[0][0] > shares[0][1] > 0
    assert record["accepted_by_position"][0] == pytest.approx(sum(shares[0]))  # the root is reached in every round
    write_json(tmp_path / "chain.json", [[0], [0, 0]])  # type: ignore[arg-type]  # a list is JSON too
    chain = check_bench(results(*options, "--tree", tmp_path / "chain.json"), "ids", "draft")["speculative"]
    assert chain["accepted_by_rank"] == [[share] for share in chain["accepted_by_rank"][0] + chain["accepted_by_rank"][1]]


def test_bench_says_near_ties_instead_of_yes(capsys: pytest.CaptureFixture[str]) -> None:
    made = Comparison(9.0, 9.0, 1.0, 0.5, 9, [], [], 0.1, 1.0, (1.0, 1.0), True, 0)
    for found, said in (
        (made, "yes"),
        (replace(made, near_ties=12), "near-ties: 12"),
        (replace(made, identical_greedy=False), "NO"),
    ):
        show_bench(Output(None), "draft", {"set": found})
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("│ set"))
        assert row.split("│")[-2].strip() == said


def test_bench_refuses_a_tree_with_gaps(drafted: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "gap.json", [[0], [3]])  # type: ignore[arg-type]  # a list is JSON too
    result = run("bench", drafted, "--tree", tmp_path / "gap.json", "--max-new-tokens", 4)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: --tree: lacks path [1] ") and result.stderr.count("\n") == 1


def test_prompts_may_begin_with_a_byte_order_mark(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "bom.txt").write_text("a\n", encoding="utf-8-sig")
    assert prompt_sets(load(bundle, threads=1), tmp_path / "bom.txt") == {"bom": [[byte_id(97)]]}


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_a_tree_is_read_before_the_bundle(command: str, tmp_path: Path) -> None:
    result = run(command, tmp_path / "no bundle", *["--ids", "3"] * (command == "generate"), "--tree", tmp_path / "no tree")
    assert result.stderr.startswith(f"Error: {tmp_path / 'no tree'}: cannot be read")


def test_bench_without_prompts_says_so(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n", encoding="utf-8")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    for name in ("empty.txt", "bytes.txt", "none.txt"):
        result = run("bench", bundle, "--prompts", tmp_path / name)
        assert result.exit_code == 1 and name in result.stderr and result.stderr.count("\n") == 1


def test_inspect_says_what_a_bundle_holds(bundle: Path) -> None:
    found = results("inspect", bundle)
    assert found.keys() >= {"device", "widths", "context", "bytes", "graphs", "weights"}
    assert (found["device"], found["widths"], found["context"]) == ("cpu", [1, 4], 64)
    assert found["drafters"] == ["draft", "lookup"]
    assert {graph["role"] for graph in found["graphs"]} == {"target", "draft"}
    assert all(graph.keys() >= {"role", "width", "file", "ops"} for graph in found["graphs"])
    assert all((bundle / graph["file"]).is_file() for graph in found["graphs"])
    assert found["bytes"] == sum(f.stat().st_size for f in bundle.rglob("*") if f.is_file() and f.name != "manifest.json")
    assert 0 < sum(found["weights"].values()) <= found["bytes"]
    assert "widths [1, 4], context 64" in succeed("inspect", bundle).stdout


def test_plan_answers_from_numbers_alone() -> None:
    found = results("plan", "--alpha", 0.8, "--gamma", 5)
    assert found["expected_tokens"] == pytest.approx(3.69, abs=0.005)
    assert "3.69 tokens per round" in succeed("plan", "--alpha", 0.8, "--gamma", 5).stdout
    losing = ["plan", "--alpha", 0.6, "--gamma", 2, "--draft-cost", 0.3, "--verify-cost", 1.7]
    assert results(*losing)["speedup"] == pytest.approx(0.85, abs=0.005)
    assert results(*losing)["break_even"] == pytest.approx(0.744, abs=0.005)
    assert results("plan", "--alpha", 0.5, "--gamma", 1, "--verify-cost", 3)["break_even"] is None
    assert "never pays" in succeed("plan", "--alpha", 0.5, "--gamma", 1, "--verify-cost", 3).stdout


def test_plan_says_what_it_takes_for_granted() -> None:
    free = succeed("plan", "--alpha", 0.8, "--gamma", 5).stdout
    assert "a draft 0, a verify step 1, host work 0" in free and "upper bound" in free
    paid = succeed("plan", "--alpha", 0.8, "--gamma", 5, "--draft-cost", 0.1).stdout
    assert "a draft 0.1, a verify step 1, host work 0" in paid and "upper bound" not in paid


@pytest.mark.parametrize(
    ("name", "value"),
    [("alpha", "1.5"), ("alpha", "nan"), ("gamma", "-1"), ("draft-cost", "-1"), ("verify-cost", "0"), ("host-cost", "nan")],
)
def test_plan_refuses_impossible_numbers_by_name(name: str, value: str) -> None:
    options = {"alpha": "0.8", "gamma": "3"} | {name: value}
    result = run("plan", *(f"--{key}={text}" for key, text in options.items()))
    assert result.exit_code == 2 and f"--{name}" in result.stderr


# ---- devices


def test_the_readmes_table_is_the_device_tables() -> None:
    table = run("devices", "--markdown").output
    assert table.strip() in (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in table for name in DEVICES)


def test_every_row_says_what_it_is_and_what_can_be_verified_here() -> None:
    found = json.loads(run("devices", "--json", "-").stdout)
    assert found.keys() == DEVICES.keys()
    for name, row in found.items():
        assert (row["reason"] is None) == row["available"] == (row["version"] is not None)
        assert row["widths"] == list(DEVICES[name].default_widths) and row["form"] in row["graph"]
        assert row["verifiable"].startswith("numbers" if row["available"] else "structure")
    assert found["cpu"]["verifiable"] == "numbers and times" and found["cpu"]["hardware"]
