"""A manifest comes back as it was written, and every kind of damage is one line that names the file or key."""

import dataclasses
import getpass
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from bundles import make
from specedge.bundle import MANIFEST, changed_files, open_bundle, sha256
from specedge.errors import SpecedgeError
from specedge.export.recipe import INT4, INT8
from specedge.manifest import SCHEMA
from specedge.runtime import load

Damage = Callable[[Any], object]
TREE = ((0,), (1,), (0, 0))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with every kind of record: two roles, a tree, quantised and float weights, a tokenizer."""
    source = tmp_path_factory.mktemp("source") / "f-rand"
    tiny.f_rand(source)
    tiny.f_tok(source, size=120, chat_template=tiny.CHATML)
    place = tmp_path_factory.mktemp("bundles") / "bundle"
    return make(source, place, draft=str(source), body=INT4, head=INT8, context=128, widths=(1, 4), tree=TREE)


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "bundle"))


def refuse(bundle: Path, *parts: str) -> None:
    """Opening fails with one line that has all the parts."""
    with pytest.raises(SpecedgeError) as caught:
        open_bundle(bundle)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message


def edit(bundle: Path, change: Damage) -> None:
    manifest = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    change(manifest)
    tiny.write_json(bundle / MANIFEST, manifest)


def add_file(name: str) -> Damage:
    return lambda manifest: manifest["files"].update({name: {"bytes": 1, "sha256": ""}})


def test_a_manifest_comes_back_as_it_was_written(original: Path, bundle: Path):
    manifest = open_bundle(original).manifest
    text = manifest.to_json()
    assert text == (original / MANIFEST).read_text(encoding="utf-8")
    assert manifest.tree == TREE and manifest.widths == (1, len(TREE) + 1)
    assert list(manifest.roles) == ["draft", "target"] and manifest.roles["target"].graphs[0].width is None
    assert {weight.scheme for weight in manifest.roles["target"].weights} == {"int4/32", "int8/32", "float32"}
    other = dataclasses.replace(manifest, eos_ids=(7, 2), bos_id=None, tree=())
    (bundle / MANIFEST).write_text(other.to_json(), encoding="utf-8")
    assert open_bundle(bundle).manifest == other != manifest


def test_a_manifest_lists_every_file_with_its_hash(original: Path):
    bundle = open_bundle(original)
    found = {path.relative_to(original).as_posix() for path in original.rglob("*") if path.is_file()}
    assert found == {*bundle.manifest.files, MANIFEST}
    assert {"target/step.onnx", "target/weights.bin", "draft/step.onnx", "draft/weights.bin"} < found
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} < found
    for name, record in bundle.manifest.files.items():
        assert (record.bytes, record.sha256) == ((original / name).stat().st_size, sha256(original / name))
    assert changed_files(bundle) == []


def test_a_manifest_tells_nothing_of_the_machine_that_wrote_it(original: Path):
    text = (original / MANIFEST).read_text(encoding="utf-8")
    json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    strings = re.findall(r'"((?:[^"\\]|\\.)*)"', text)
    assert not [string for string in strings if string.startswith(("/", "~")) or ":\\" in string or str(Path.cwd()) in string]
    assert not [string for string in strings if re.search(r"\b20\d\d-\d\d-\d\d|\d\d:\d\d:\d\d", string)]
    for graph in original.rglob("*.onnx"):
        content = graph.read_bytes()
        assert not any(part.encode() in content for part in (str(original.parent), str(Path.cwd()), "/usr/", ".py"))
    told = {socket.gethostname(), os.environ.get("USER", ""), getpass.getuser()} - {"", "root"}
    assert not told & set(strings)


def test_a_bundle_with_a_tree_opens_and_drafts_it(original: Path):
    engine = load(original, threads=1)
    expected = engine.generate([3, 4, 5], max_new_tokens=20, speculate=False).ids
    result = engine.generate([3, 4, 5], max_new_tokens=20)
    assert result.ids == expected
    assert result.stats.per_round[0][0] == len(TREE) and result.stats.accepted > 0
    chain = engine.generate([3, 4, 5], max_new_tokens=20, gamma=2)
    assert chain.ids == expected and chain.stats.per_round[0][0] == 2


def test_unknown_keys_are_ignored(bundle: Path):
    manifest = open_bundle(bundle).manifest
    edit(bundle, lambda manifest: manifest.update(invented={"a": 1}))
    edit(bundle, lambda manifest: manifest["roles"]["target"]["kv"].update(invented=None))
    assert open_bundle(bundle).manifest == manifest


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda m: m.pop("schema"), ["schema None", f"expected {SCHEMA}"]),
        (lambda m: m.update(schema=SCHEMA + 1), [f"schema {SCHEMA + 1}", f"expected {SCHEMA}"]),
        (lambda m: m.update(schema=2), ["schema 2", f"expected {SCHEMA}", "convert the model with this version"]),
        (lambda m: (m.update(schema=2), m.pop("tree")), ["schema 2", f"expected {SCHEMA}"]),  # as the last version wrote it
        (lambda m: m.pop("tree"), ["'tree' is missing"]),
        (lambda m: m.update(tree=None), ["tree", "None"]),
        (lambda m: m.update(tree=[0]), ["tree[0]", "found 0"]),
        (lambda m: m.update(tree=[[0], [0, "a"]]), ["tree[1][1]", "'a'", "expected int"]),
        (lambda m: m.update(tree=[[0], [True]]), ["tree[1][0]", "True", "expected int"]),
        (lambda m: m.update(schema=str(SCHEMA)), [f"schema '{SCHEMA}'"]),
        (lambda m: m.update(schema=True), ["schema", "True"]),
        (lambda m: m.pop("roles"), ["'roles' is missing"]),
        (lambda m: m["roles"]["target"].pop("rope"), ["roles.target", "'rope' is missing"]),
        (lambda m: m["roles"]["draft"]["graphs"][0].pop("file"), ["roles.draft", "graphs[0]", "'file' is missing"]),
        (lambda m: m["files"]["target/weights.bin"].pop("bytes"), ["target/weights.bin", "'bytes' is missing"]),
        (lambda m: m.update(context="128"), ["context", "'128'", "expected int"]),
        (lambda m: m.update(context=True), ["context", "True", "expected int"]),
        (lambda m: m.update(context=None), ["context", "None", "expected int"]),
        (lambda m: m.update(bos_id=1.5), ["bos_id", "1.5"]),
        (lambda m: m.update(eos_ids=2), ["eos_ids", "found 2"]),
        (lambda m: m.update(eos_ids=[2, "3"]), ["eos_ids[1]", "'3'", "expected int"]),
        (lambda m: m.update(roles=[]), ["roles", "found []"]),
        (lambda m: m["roles"].update(target=None), ["roles.target", "None"]),
        (
            lambda m: m["roles"]["target"]["rope"].update(inv_freq=[1.0, None]),
            ["rope", "inv_freq[1]", "None", "expected float"],
        ),
        (lambda m: m["roles"]["target"]["graphs"][0].update(width="any"), ["graphs[0]", "width", "'any'"]),
        (lambda m: m["roles"]["target"]["graphs"][0]["inputs"][0].update(shape=[1, None]), ["inputs[0]", "shape[1]", "None"]),
        (lambda m: m["sources"]["target"].update(license=3), ["sources.target", "license", "found 3"]),
    ],
)
def test_a_damaged_key_is_named(bundle: Path, change: Damage, parts: list[str]):
    edit(bundle, change)
    refuse(bundle, str(bundle / MANIFEST), *parts)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["roles"]["target"]["kv"].update(slots=10**12),
        lambda m: m["roles"]["target"]["kv"].update(heads=-1),
        lambda m: m["roles"]["target"]["kv"].update(layers=3),
        lambda m: m["roles"]["target"]["kv"].update(layers=1),
        lambda m: m["roles"]["target"]["kv"].update(dtype="float16"),
        lambda m: m["roles"]["target"]["rope"].update(inv_freq=[1.0]),
        lambda m: m["roles"]["target"].update(vocab_size=200),
        lambda m: m["roles"]["target"].update(graphs=[]),
        lambda m: m["roles"]["target"].update(chunk=0),
        lambda m: m["roles"]["target"]["graphs"][0]["inputs"].pop(),
        lambda m: m["roles"]["target"]["graphs"][0]["inputs"][0].update(shape=[1, 5]),
        lambda m: m["roles"]["target"]["graphs"][0].update(width=3),
        lambda m: m["roles"]["target"]["graphs"][0].update(file="target/weights.bin"),
        lambda m: m["roles"]["target"]["graphs"][0].update(file="target/nothing.onnx"),
        lambda m: m["roles"]["draft"].update(context=0),
        lambda m: m["roles"]["draft"].update(context=129),
        lambda m: m.update(context=1000),
        lambda m: m.update(widths=[]),
        lambda m: m.update(widths=[0, 4]),
        lambda m: m.update(allowed_ids=0),
        lambda m: m.update(allowed_ids=1000),
        lambda m: m.update(drafters=[]),
        lambda m: m["roles"].pop("draft"),
        lambda m: m["roles"].pop("target"),
    ],
)
def test_a_manifest_that_contradicts_its_graphs_is_refused(bundle: Path, change: Damage):
    """Before anything runs: when it is opened, or at the latest when its graphs are."""
    edit(bundle, change)
    with pytest.raises(SpecedgeError) as caught:
        load(bundle, threads=1)
    assert str(bundle) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("tree", [[[0, 0]], [[0], [0]], [[-1]], [[]]], ids=str)
def test_paths_that_are_no_tree_are_refused(bundle: Path, tree: list[list[int]]):
    edit(bundle, lambda manifest: manifest.update(tree=tree))
    with pytest.raises(SpecedgeError, match="tree") as caught:
        load(bundle, threads=1)
    assert str(bundle) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("rank", [120, 1000, 10**40])
def test_a_choice_among_more_ids_than_there_are_is_refused(bundle: Path, rank: int):
    """The tokenizer knows 120 of the model's 128 rows."""
    edit(bundle, lambda manifest: manifest.update(tree=[[0], [rank]]))
    refuse(bundle, "tree (allowed_ids)")
    edit(bundle, lambda manifest: manifest.update(tree=[[0], [119]]))
    assert load(bundle, threads=1).generate([3, 14, 15], max_new_tokens=4).stats.rounds


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"text"', "3", "\xff", "[" * 100_000], ids=lambda text: text[:6])
def test_what_is_no_manifest_is_refused(bundle: Path, text: str):
    (bundle / MANIFEST).write_bytes(text.encode("latin-1"))
    refuse(bundle, str(bundle / MANIFEST))


def test_what_is_no_bundle_is_refused(bundle: Path, tmp_path: Path):
    refuse(tmp_path / "nothing", "nothing", MANIFEST, "not found")
    refuse(tmp_path, str(tmp_path / MANIFEST), "not found")
    refuse(bundle / MANIFEST, MANIFEST, "cannot be read")
    (bundle / MANIFEST).unlink()
    (bundle / MANIFEST).mkdir()
    refuse(bundle, MANIFEST, "cannot be read")


def test_a_missing_file_is_named(bundle: Path):
    for name in list(open_bundle(bundle).manifest.files):
        content = (bundle / name).read_bytes()
        (bundle / name).unlink()
        refuse(bundle, str(bundle / name), "missing")
        (bundle / name).mkdir()
        refuse(bundle, str(bundle / name))
        (bundle / name).rmdir()
        (bundle / name).write_bytes(content)
    open_bundle(bundle)


def test_a_file_of_another_size_is_named(bundle: Path):
    weights = bundle / "target/weights.bin"
    size = weights.stat().st_size
    for change in (-1, 1, -size):
        content = weights.read_bytes()
        weights.write_bytes((content + b"x")[: size + change])
        refuse(bundle, str(weights), f"{size + change} bytes", f"expected {size}")
        weights.write_bytes(content)


def test_another_content_is_found_by_its_hash(bundle: Path):
    with (bundle / "draft/weights.bin").open("r+b") as file:
        file.write(b"\xff")
    assert changed_files(open_bundle(bundle)) == ["draft/weights.bin"]


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../../x", "..", "target/../../x", "/etc/hostname", "a\\b", "..\\x", "C:/x", "C:x", "\\\\host\\share"],
)
def test_names_that_lead_outside_are_refused(bundle: Path, name: str):  # B58
    edit(bundle, add_file(name))
    refuse(bundle, str(bundle / MANIFEST), repr(name), "outside")
    edit(bundle, lambda manifest: manifest["files"].pop(name))
    with pytest.raises(SpecedgeError, match="outside"):  # wherever else the runtime reads it
        open_bundle(bundle).file(name)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "\ud800", ""], ids=["nul", "long", "surrogate", "empty"])
def test_impossible_names_are_refused(bundle: Path, name: str):
    edit(bundle, add_file(name))
    refuse(bundle)


def test_links_must_stay_inside(bundle: Path, original: Path):  # B58
    weights = bundle / "target/weights.bin"
    weights.rename(bundle / "target/data")
    weights.symlink_to("data")
    assert load(bundle, threads=1).generate([3, 4], max_new_tokens=2).ids
    weights.unlink()
    weights.symlink_to(original / "target/weights.bin")
    refuse(bundle, str(weights), "outside")
    weights.unlink()
    weights.symlink_to("/etc/hostname")
    refuse(bundle, str(weights), "outside")
    weights.unlink()
    for nowhere in ("nowhere", "weights.bin"):
        weights.symlink_to(nowhere)
        refuse(bundle, str(weights), "missing")
        weights.unlink()


def test_a_folder_that_is_a_link_outside_is_refused(bundle: Path, tmp_path: Path):
    (bundle / "draft").rename(tmp_path / "elsewhere")
    (bundle / "draft").symlink_to(tmp_path / "elsewhere")
    refuse(bundle, str(bundle / "draft"), "outside")


def hub_cache(bundle: Path, repository: Path) -> Path:
    """The bundle as a hub cache keeps it: snapshots/<revision> holds links into blobs/."""
    snapshot = repository / "snapshots/0123abcd"
    (repository / "blobs").mkdir(parents=True)
    for path in [path for path in bundle.rglob("*") if path.is_file()]:
        blob, link = repository / "blobs" / sha256(path), snapshot / path.relative_to(bundle)
        shutil.copy(path, blob)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_a_hub_cache_is_a_bundle(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # B58
    snapshot = hub_cache(original, tmp_path / "models--owner--bundle")
    expected = load(original, threads=1).generate([3, 4, 5], max_new_tokens=6).ids
    assert load(snapshot, threads=1).generate([3, 4, 5], max_new_tokens=6).ids == expected
    assert changed_files(open_bundle(snapshot)) == []
    monkeypatch.chdir(snapshot.parent)
    assert load(snapshot.name, threads=1).generate([3, 4, 5], max_new_tokens=6).ids == expected


def test_a_hub_cache_links_into_its_own_blobs_only(original: Path, tmp_path: Path):  # B58
    snapshot = hub_cache(original, tmp_path / "models--owner--bundle")
    hub_cache(original, tmp_path / "models--other--bundle")
    link = snapshot / "target/weights.bin"
    blob = link.readlink().name
    link.unlink()
    link.symlink_to(tmp_path / "models--other--bundle/blobs" / blob)
    refuse(snapshot, "target/weights.bin", "outside")
    link.unlink()
    link.symlink_to(tmp_path / "models--owner--bundle/blobs" / blob)
    open_bundle(snapshot)


def test_a_role_that_is_not_there_is_named(original: Path):
    with pytest.raises(SpecedgeError, match=r"no 'medusa'; it holds draft, target"):
        open_bundle(original).role("medusa")
