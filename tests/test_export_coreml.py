"""Core ML packages, as far as any machine can tell: what was saved is what was asked for, and computes it."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

import tiny
from bundles import Models, files, make, stored
from checkpoints import any_blocks, rewrite_gguf
from specedge.bundle import Bundle, open_bundle
from specedge.devices.table import DEVICES, get_device
from specedge.errors import SpecedgeError, UsageError
from specedge.export.checkpoint import open_checkpoint
from specedge.export.report import mean_kl
from specedge.export.validate import validate
from specedge.export.weights import read_float32
from specedge.quant.scheme import Scheme
from specedge.runtime import load
from specedge.runtime.agreement import walk
from test_runtime_heads import random_heads

pytest.importorskip("coremltools", reason="Core ML packages need the extra: pip install -e '.[coreml]'")

from coremltools.converters.mil.mil import types  # once it is known to be there
from coremltools.models.utils import load_spec

from specedge.runtime.evaluator import open_program

IDS = [int(token) for token in np.random.default_rng(0).integers(3, 128, 30)]
FLOAT16: dict[str, Any] = {"body": "float16", "head": "float16"}
CHANNEL: dict[str, Any] = {"body": Scheme(4, None), "head": Scheme(8, None)}
UNEVEN: dict[str, Any] = {"body": Scheme(4, None, False), "head": Scheme(8, None, False)}
INT8: dict[str, Any] = {"body": Scheme(8, None), "head": Scheme(4, None)}
BLOCKS: dict[str, Any] = {"body": Scheme(4, 32), "head": Scheme(8, 32)}
FINE: dict[str, Any] = {"body": Scheme(4, 16, False), "head": Scheme(8, 16, False)}
FORMS = {
    **{f"ane {name}": ("coreml-ane", form) for name, form in (("float16", FLOAT16), ("int4", CHANNEL), ("uneven", UNEVEN))},
    "ane int8": ("coreml-ane", INT8),
    **{f"gpu {name}": ("coreml-gpu", form) for name, form in (("float16", FLOAT16), ("int4", BLOCKS), ("fine", FINE))},
}
PACKAGE = "target/model.mlpackage"
WEIGHT_FILE = f"{PACKAGE}/Data/com.apple.CoreML/weights/weight.bin"


def converted(models: Models, path: Path, name: str, **options: Any) -> Bundle:
    device, form = FORMS[name]
    return open_bundle(make(models()[0], path, device=device, **({"widths": (1, 4)} | form | options)))


def constants(bundle: Bundle, file: str = PACKAGE) -> Iterator[tuple[str, Any]]:
    """Every op of every function as it was saved, and the value of what it makes, where that is known before a run."""
    for function in open_program(bundle.file(file)).functions.values():
        for op in function.operations:
            value = op.materialized_val_inference() if op.op_type.startswith("constexpr_") else op.outputs[0].val
            yield op.op_type, value


# ---- weights


@pytest.mark.parametrize("name", FORMS)
def test_the_package_holds_the_weights_that_the_manifest_lists(models: Models, name: str, tmp_path: Path) -> None:
    """Read by coremltools from the package, and by ours from where the manifest says they lie in it."""
    bundle = converted(models, tmp_path / "bundle", name)
    program = open_program(bundle.file(PACKAGE))
    made = {op.outputs[0].name: op for op in program.functions["decode"].operations}
    listed = [weight for weight in bundle.role("target").weights if weight.name != "embed_tokens.weight"]
    assert listed and all(weight.file == WEIGHT_FILE for weight in listed)
    for weight in listed:
        op = made[weight.name.replace(".", "_")]
        own = read_float32(weight, bundle.file(weight.file))[0]
        theirs = op.outputs[0].val if op.op_type == "const" else op.materialized_val_inference()
        np.testing.assert_allclose(theirs[..., : own.shape[-1]], own, rtol=1e-3, atol=0)  # float16 products
        if "codes" in weight.parts:
            bits = Scheme.from_name(weight.scheme).bits
            assert types.builtin_to_string(op.data.dtype) in (f"int{bits}", f"uint{bits}")


@pytest.mark.parametrize("name", ["ane int4", "gpu int4"])
def test_linear_weights_are_in_4_bits_and_stored_once(models: Models, name: str, tmp_path: Path) -> None:  # B67
    whole = converted(models, tmp_path / "whole", name)
    one = converted(models, tmp_path / "one", name, widths=(1,), chunk=1)
    linear = [weight for weight in whole.role("target").weights if weight.scheme.startswith("int4")]
    assert sum(weight.stored_bytes for weight in linear) <= 0.3 * sum(2 * math.prod(weight.shape) for weight in linear)
    assert [len(load_spec(str(b.file(PACKAGE))).description.functions) for b in (whole, one)] == [3, 1]
    sizes = [b.manifest.files[WEIGHT_FILE].bytes for b in (whole, one)]
    assert sizes[0] == sizes[1] >= sum(weight.stored_bytes for weight in linear)


@pytest.mark.parametrize(("tied", "vocab"), [(True, 400), (False, 400), (False, 365)], ids=str)
def test_a_large_head_lies_in_pieces(
    models: Models, tied: bool, vocab: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No dimension above the row's; the pieces are the rows of the head; and the host reads a table of its own.

    The last of them may have as few scales (5) as coremltools writes into the program itself.
    """
    source, model = models(tie_word_embeddings=tied, vocab_size=vocab)
    row = get_device("coreml-ane")
    assert row.package is not None and row.package.widest == row.widest_output == 16384
    narrow = dataclasses.replace(row, widest_output=180, package=dataclasses.replace(row.package, widest=180))
    monkeypatch.setitem(DEVICES, row.name, narrow)
    bundle = open_bundle(make(source, tmp_path / "bundle", device=row.name, widths=(1, 4), **CHANNEL))
    assert [spec.shape[-1] for spec in bundle.role("target").graphs[0].pieces("logits")] == [180, 180, vocab - 360]
    assert all(max(value.shape, default=0) <= 180 for _, value in constants(bundle) if isinstance(value, np.ndarray))
    weights = {weight.name: weight for weight in bundle.role("target").weights}
    assert weights["embed_tokens.weight"].file == "target/weights.bin" and not weights["embed_tokens.weight"].pieces
    if not tied and vocab == 400:
        head = weights["lm_head.weight"]
        assert [parts["scales"].shape[0] for parts in head.pieces] == [180, 180, 40] and head.file == WEIGHT_FILE
        assert 400 * 64 < head.stored_bytes < 400 * 64 + 1000
    truth = tiny.hf_logits(stored(model, bundle), IDS)
    assert np.abs(walk(load(bundle.path).target, IDS, 4) - truth).max() <= 0.02 * np.abs(truth).max()
    assert validate(bundle.path, str(source), prompts=1, tokens=8).passed
    longer = models(vocab_size=400, max_position_embeddings=256)[0]
    with pytest.raises(SpecedgeError, match=r"decode: .* has shape .*, expected at most 5 dimensions of at most 180"):
        make(longer, tmp_path / "long", device=row.name, widths=(1, 4), context=190, **CHANNEL)


RAGGED: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 101, "head_dim": 10}


@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, {}) for name in FORMS), *((name, RAGGED) for name in ("ane int4", "ane uneven", "gpu int4", "gpu fine"))],
)
def test_the_evaluator_computes_what_is_stored(models: Models, name: str, shape: dict[str, Any], tmp_path: Path) -> None:
    """Rows that end within a block, and of an odd number of weights, too (B17)."""
    (source, model), (device, form) = models(**shape), FORMS[name]
    bundle = open_bundle(make(source, tmp_path / "bundle", device=device, widths=(1, 4), **form))
    truth, engine = tiny.hf_logits(stored(model, bundle), IDS), load(bundle.path)
    assert engine.emulated == (device,) and engine.nodes == {}
    for width in (1, 4, 8):
        found = walk(engine.target, IDS, width)
        assert np.abs(found - truth).max() <= 0.02 * np.abs(truth).max()  # float16
        assert mean_kl(truth, found) <= 1e-4


def test_the_grid_of_a_gguf_file_is_kept(tmp_path: Path) -> None:
    """Scales and minima as they are; where a row may have one scale only, on another grid."""
    tiny.f_rand(tmp_path / "plain", intermediate_size=96, eos_token_id=None)
    tiny.f_gguf(tmp_path / "plain", tmp_path / "plain.gguf")
    source = tmp_path / "model.gguf"
    rewrite_gguf(tmp_path / "plain.gguf", source, {}, GGMLQuantizationType.Q4_1, any_blocks)
    bundle = open_bundle(make(source, tmp_path / "gpu", device="coreml-gpu", widths=(1, 4), **BLOCKS))
    weights, checkpoint = bundle.role("target").weights, open_checkpoint(str(source))
    matrices = [weight for weight in weights if len(weight.shape) == 2]
    assert all(weight.exact and weight.scheme == "int4/32/minima" for weight in matrices)
    for weight in matrices:
        np.testing.assert_array_equal(read_float32(weight, bundle.file(weight.file))[0], checkpoint.tensor(weight.name))
    assert validate(bundle.path, str(source), prompts=1, tokens=8).passed
    rows = open_bundle(make(source, tmp_path / "ane", device="coreml-ane", widths=(1, 4), keep=True, **CHANNEL))
    assert {weight.scheme for weight in rows.role("target").weights} == {"int4/channel", "int8/channel", "float16"}


# ---- the saved program


@pytest.mark.parametrize("name", ["ane float16", "ane int4", "gpu int4"])
def test_nothing_saved_is_beyond_float16_or_five_dimensions(models: Models, name: str, tmp_path: Path) -> None:  # B16
    bundle = converted(models, tmp_path / "bundle", name)
    for _, value in constants(bundle):
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind == "f":
            assert np.abs(value.astype(np.float64)).max(initial=0) <= 65504  # and so no infinity, no NaN
    for function in open_program(bundle.file(PACKAGE)).functions.values():
        for op in function.operations:
            for var in op.outputs:
                assert len(var.shape) <= 5
                assert not types.is_float(var.dtype) or var.dtype == types.fp16
    assert -65504 <= bundle.role("target").mask_value < 0


@pytest.mark.parametrize("device", ["coreml-ane", "coreml-gpu"])
def test_padding_rows_are_numbers_too(models: Models, device: str, tmp_path: Path) -> None:  # B16
    """Prompts that leave 3, 0 and 7 of a chunk's 8 rows, and 20 tokens after them without a near-tie."""
    source, model = models()
    target = load(make(source, tmp_path / "bundle", device=device, widths=(1, 4), **FLOAT16))
    other = [int(token) for token in np.random.default_rng(1).integers(3, 128, 8)]
    for prompt in (other[:5], other, IDS[:1]):
        assert target.generate(prompt, max_new_tokens=20).ids == tiny.hf_greedy(model, prompt, 20)
        for _, buffer in target.target.cache.buffers():
            assert np.isfinite(buffer).all()
        walk(target.target, prompt, 8)
        assert all(np.isfinite(step.logits).all() for step in target.target._steps.values())  # type: ignore[attr-defined]


def test_a_residual_stream_may_hold_what_no_square_can(models: Models, tmp_path: Path) -> None:
    """Values whose squares overflow in float16, and rows of zeros: norms are those of float32."""
    model = models(seed=5)[1]
    state = model.state_dict()
    state["model.embed_tokens.weight"][:, 7] *= 2000  # as real models have in a column or two
    state["model.embed_tokens.weight"][40] = 0
    tiny.save_folder(model, tmp_path / "loud")
    text = [40, *IDS[:12]]
    truth = tiny.hf_logits(model, text)
    engine = load(make(tmp_path / "loud", tmp_path / "bundle", device="coreml-ane", widths=(1, 4), **FLOAT16))
    assert np.abs(walk(engine.target, text, 4) - truth).max() <= 0.02 * np.abs(truth).max()


def test_the_same_request_gives_the_same_bytes(models: Models, tmp_path: Path) -> None:
    for folder in ("one", "other"):
        converted(models, tmp_path / folder, "ane int4")
    assert files(tmp_path / "one") == files(tmp_path / "other")
    assert {name for name in files(tmp_path / "one") if name.startswith("target/")} == {
        "target/weights.bin",
        WEIGHT_FILE,
        f"{PACKAGE}/Data/com.apple.CoreML/model.mlmodel",
        f"{PACKAGE}/Manifest.json",
    }


def test_functions_are_named_by_what_they_are_for(models: Models, tmp_path: Path) -> None:
    heads = str(random_heads(tmp_path / "heads", False, 128))
    bundle = converted(models, tmp_path / "bundle", "ane int4", widths=(1, 4, 6), medusa=heads)
    description = load_spec(str(bundle.file(PACKAGE))).description
    assert {one.name for one in description.functions} == {"decode", "verify_4", "verify_6", "prefill", "medusa"}
    assert description.defaultFunctionName == "decode"
    assert [graph.function for graph in bundle.role("target").graphs] == ["decode", "verify_4", "verify_6", "prefill"]
    assert bundle.manifest.heads["medusa"].graph.file == PACKAGE
    files_of = {weight.file for weight in bundle.manifest.heads["medusa"].weights}
    assert files_of == {WEIGHT_FILE} and not (bundle.path / "medusa/weights.bin").exists()


# ---- what is refused


@pytest.mark.parametrize("system", ["iOS17", "macOS14", "iOS13", "Windows"])
def test_systems_that_cannot_read_4_bits_are_refused_by_name(models: Models, system: str, tmp_path: Path) -> None:  # B67
    with pytest.raises(UsageError, match=rf"--min-target {system}: .* one of iOS18 \(macOS15\), iOS26 \(macOS26\); give that"):
        converted(models, tmp_path / "bundle", "ane int4", min_target=system)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(("system", "version"), [(None, 9), ("macOS15", 9), ("iOS26", 10)])
def test_newer_systems_are_not(models: Models, system: str | None, version: int, tmp_path: Path) -> None:
    bundle = converted(models, tmp_path / "bundle", "ane int4", min_target=system)
    assert load_spec(str(bundle.file(PACKAGE))).specificationVersion == version
    assert load(bundle.path).generate(IDS[:4], max_new_tokens=4).ids


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "coreml-ane", **BLOCKS}, "group 32: device 'coreml-ane' takes one scale per row only"),
        ({"device": "cpu", "min_target": "iOS18"}, "--min-target: says what a Core ML package runs on"),
        ({"device": "coreml-gpu", "draft_device": "cpu", **FLOAT16}, "heads lie in one package with the target"),
        ({"device": "coreml-ane", "body": "float32", "head": "float32"}, "graphs compute in float16 here"),
    ],
)
def test_what_a_package_cannot_hold_is_refused(models: Models, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    heads = {"medusa": str(random_heads(tmp_path / "heads", False, 128))} if "draft_device" in options else {}
    with pytest.raises(UsageError, match=said):
        make(models()[0], tmp_path / "bundle", widths=(1, 4), **options, **heads)
