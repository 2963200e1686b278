"""Laws of the commands a plain install has: what goes where, which keys JSON has, and how a mistake ends."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import bundles
from specedge.export.cli import main
from specedge.runtime import load
from tiny import byte_id, deterministic_chain, f_chain, f_rand, f_self, f_tok

SPELLED = "bc STOPxyz0123456789"  # what follows "a"
EXTRA_LINE = "#de"


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


def test_no_tokens_are_no_text(bundle: Path) -> None:
    found = results("generate", bundle, "-p", "a", "--max-new-tokens", 0)
    assert (found["ids"], found["text"], found["finish_reason"]) == ([], "", "length")


# ---- mistakes


@pytest.mark.parametrize("value", ["nan", "-1", "inf", "abc", "-0.5"])
@pytest.mark.parametrize("name", ["temperature", "top-k", "top-p", "seed", "gamma", "max-new-tokens", "threads"])
def test_an_illegal_value_is_refused_by_name(bundle: Path, name: str, value: str) -> None:  # B47
    result = run("generate", bundle, "-p", "a", f"--{name}={value}")
    assert result.exit_code == 2
    assert name.replace("-", "_") in result.stderr.replace("-", "_") and value in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("options", "part"),
    [
        pytest.param([], "-p TEXT or --ids", id="no prompt"),
        pytest.param(["-p", "a", "--ids", "1"], "-p TEXT or --ids", id="two prompts"),
        pytest.param(["--ids", "1,x"], "--ids '1,x'", id="ids"),
        pytest.param(["-p", "a", "--gamma", "99"], "gamma 99", id="gamma"),
        pytest.param(["-p", "a", "--top-p", "1.5"], "top_p", id="top-p"),
        pytest.param(["-p", "a", "--nonsense"], "--nonsense", id="option"),
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
    assert wrong.stderr.startswith("Error: gamma -1") and wrong.stderr.count("\n") == 1
    right = subprocess.run([*program, "-p", "a", "--json", "-"], capture_output=True, text=True, check=True)
    assert json.loads(right.stdout)["text"] == SPELLED


# ---- bench, inspect, plan

SIDES: Mapping[str, set[str]] = {
    "plain": {"tokens_per_s"},
    "speculative": {"tokens_per_s", "tokens_per_round", "acceptance", "accepted_by_position", "host_fraction"},
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


@pytest.mark.parametrize(
    ("name", "value"),
    [("alpha", "1.5"), ("alpha", "nan"), ("gamma", "-1"), ("draft-cost", "-1"), ("verify-cost", "0"), ("host-cost", "nan")],
)
def test_plan_refuses_impossible_numbers_by_name(name: str, value: str) -> None:
    options = {"alpha": "0.8", "gamma": "3"} | {name: value}
    result = run("plan", *(f"--{key}={text}" for key, text in options.items()))
    assert result.exit_code == 2 and f"--{name}" in result.stderr
