"""Laws of `spec-export tree`: the best tree of what was measured, and one line for whatever is no measurement."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specedge.export.cli import main
from specedge.runtime.shape import TreeShape, best_shape, tokens_per_round

TABLE = [[0.6, 0.2], [0.5, 0.1]]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["tree", *map(str, arguments)], catch_exceptions=False)


def measured(table: object, sets: tuple[str, ...] = ("chat",), drafters: tuple[str, ...] = ("draft",)) -> dict[str, Any]:
    """What bench --json writes, as far as it matters here."""
    return {
        "environment": {},
        "sets": {name: {d: {"speculative": {"accepted_by_rank": table}} for d in drafters} for name in sets},
    }


def write(file: Path, content: object, encoding: str = "utf-8") -> Path:
    file.write_text(json.dumps(content), encoding=encoding)
    return file


def refused(code: int, *arguments: object) -> str:
    """The one line that it ends with."""
    result = run(*arguments, "--nodes", 4)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    return result.stderr.removeprefix("Error: ")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("content", [TABLE, measured(TABLE)], ids=["table", "bench"])
def test_the_best_tree_of_what_was_measured(tmp_path: Path, content: object, encoding: str) -> None:
    file = write(tmp_path / "measured.json", content, encoding)
    result = run(file, "--nodes", 4, "--json", "-", "-o", tmp_path / "tree.json")
    assert result.exit_code == 0, result.output
    found, best = json.loads(result.stdout), best_shape(TABLE, 4)
    assert TreeShape.from_paths(found["paths"]) == best and found["depth"] == best.depth
    assert found["expected_tokens"] == pytest.approx(tokens_per_round(best, TABLE))
    assert json.loads((tmp_path / "tree.json").read_text()) == found["paths"]


def test_one_of_several_measurements_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "m.json", measured(TABLE, ("chat", "copy"), ("draft", "medusa")))
    assert "holds chat, copy; add --prompts chat" in refused(2, file)
    assert "holds draft, medusa; add --drafter draft" in refused(2, file, "--prompts", "copy")
    assert refused(2, file, "--prompts", "code").startswith(f"--prompts code: {file} holds chat, copy")
    assert run(file, "--nodes", 4, "--prompts", "copy", "--drafter", "medusa").exit_code == 0


@pytest.mark.parametrize("option", ["--prompts", "--drafter"])
def test_a_bare_table_has_no_names_to_choose(tmp_path: Path, option: str) -> None:
    assert refused(2, write(tmp_path / "t.json", TABLE), option, "chat").startswith(f"{option}: ")


@pytest.mark.parametrize("paths", [[[0], [1], [0, 0]], [[0, 0], [0]], [[1], [0]], [[0], [0, 0], [0, 0, 0]]])
def test_a_tree_is_named_as_such(tmp_path: Path, paths: list[list[int]]) -> None:
    file = write(tmp_path / "tree.json", paths)
    assert refused(1, file).startswith(f"{file}: is a list of paths, a tree already; expected what bench --json writes")


def test_a_folder_and_a_missing_file_are_named_with_the_reason(tmp_path: Path) -> None:
    assert refused(1, tmp_path) == f"{tmp_path}: cannot be read (Is a directory)\n"
    assert refused(1, tmp_path / "no") == f"{tmp_path / 'no'}: cannot be read (No such file or directory)\n"


LONG = [0.1] * 5000


@pytest.mark.parametrize(
    ("code", "content"),
    [
        (1, [LONG]),
        (1, measured([LONG])),
        (2, measured(TABLE, tuple(f"set {number}" for number in range(500)))),
        (2, measured(TABLE, drafters=("x" * 5000, "y"))),
        (1, {"sets": "x" * 5000}),
        (1, ["x" * 5000]),
        (1, [[10**4000, 0.5]]),
    ],
    ids=range(7),
)
def test_a_line_stays_a_line_whatever_the_file_holds(tmp_path: Path, code: int, content: object) -> None:
    file = write(tmp_path / "m.json", content)
    error = refused(code, file)
    assert str(file) in error and len(error) < len(str(file)) + 700


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null", b"3", b"{}", b'[[0.5, "a"]]', b"[[null]]"]
)
def test_what_is_no_measurement_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.json"
    file.write_bytes(content)
    assert refused(1, file).startswith(f"{file}: ")


def test_nothing_accepted_is_no_tree(tmp_path: Path) -> None:
    assert "nothing was ever accepted" in refused(1, write(tmp_path / "m.json", [[0.0, 0.0]]))
