"""Calibration: streams see what transformers sees, broken runs go on, and rounding by it costs a model less."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

import tiny
from bundles import SHAPE, Models, make
from specedge.bundle import open_bundle
from specedge.errors import UsageError
from specedge.export import calibrate as calibrating
from specedge.export.calibrate import calibrate
from specedge.export.calibration_text import Calibration
from specedge.export.checkpoint import Checkpoint, open_checkpoint
from specedge.export.families import tensor_names
from specedge.export.recipe import Recipe
from specedge.export.rotated import Rotated, rotate
from specedge.export.rounded_file import is_whole, read_rounded, write_rounded
from specedge.export.sensitivity import measure_sensitivity, stored_bits, widen
from specedge.export.streams import STAGES, Stream, load_block, run_block
from specedge.export.validate import validate
from specedge.quant.gptq import gptq
from specedge.quant.pack import Quantized
from specedge.quant.rounding import clipped, round_to_nearest
from specedge.quant.scheme import Scheme
from tiny import Array

INT4, CHANNEL = Scheme(4, 32), Scheme(4, None)
DOCUMENTS = [[int(token) for token in np.random.default_rng(seed).integers(3, 128, 20 + seed)] for seed in range(12)]


@pytest.fixture(scope="module")
def biased(models: Models) -> tuple[Checkpoint, PreTrainedModel]:
    folder, model = models(attention_bias=True, mlp_bias=True)
    return open_checkpoint(str(folder)), model


def layers(checkpoint: Checkpoint, scheme: Scheme) -> dict[str, Scheme]:
    names = tensor_names(checkpoint.config)
    return {name: scheme for name, (_, shape) in names.items() if name.startswith("layers.") and len(shape) == 2}


def logits(checkpoint: Checkpoint, stream: Stream) -> Array:
    norm, head = (torch.from_numpy(checkpoint.tensor(name)) for name in ("norm.weight", "lm_head.weight"))
    rows: Array = (F.rms_norm(stream.hidden, norm.shape, norm, checkpoint.config.rms_eps) @ head.T).numpy()
    return rows


def test_a_stream_computes_the_model(biased: tuple[Checkpoint, PreTrainedModel]) -> None:
    checkpoint, model = biased
    stream = Stream(checkpoint.config, DOCUMENTS, checkpoint.tensor)
    for layer in range(checkpoint.config.layers):
        run_block(stream, load_block(checkpoint.config, layer, checkpoint.tensor))
    truth = np.concatenate([tiny.hf_logits(model, document) for document in DOCUMENTS])
    np.testing.assert_allclose(logits(checkpoint, stream), truth, atol=1e-4)


def test_a_stage_reads_what_its_layers_read_in_transformers(biased: tuple[Checkpoint, PreTrainedModel]) -> None:
    checkpoint, model = biased
    read: dict[str, list[torch.Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, inputs: read.setdefault(name, []).append(inputs[0][0])

    modules = [(f"layers.1.{name}", stage) for stage, names in enumerate(STAGES) for name in names]
    hooks = [model.model.get_submodule(name).register_forward_pre_hook(note(name)) for name, _ in modules]
    for document in DOCUMENTS:
        tiny.hf_logits(model, document)
    for hook in hooks:
        hook.remove()
    stream = Stream(checkpoint.config, DOCUMENTS, checkpoint.tensor)
    run_block(stream, load_block(checkpoint.config, 0, checkpoint.tensor))
    block = load_block(checkpoint.config, 1, checkpoint.tensor)
    for stage in range(len(STAGES)):
        found = torch.cat(list(stream.inputs(block, stage)))
        for name in (name for name, where in modules if where == stage):
            np.testing.assert_allclose(found, torch.cat(read[name]), atol=1e-4, err_msg=name)
        stream.run(block, stage)


def calibrated(checkpoint: Checkpoint, scheme: Scheme, cache: Path) -> dict[str, Quantized]:
    files = calibrate(
        checkpoint.config, checkpoint.tensor, "x", layers(checkpoint, scheme), np.float32, DOCUMENTS, cache, "", lambda *_: None
    )
    return {name: layer for file in files for name, layer in read_rounded(file).items()}


@pytest.mark.parametrize("scheme", [INT4, CHANNEL, Scheme(4, 32, False)], ids=str)
def test_the_first_stage_is_gptq_of_what_it_reads(
    biased: tuple[Checkpoint, PreTrainedModel], scheme: Scheme, tmp_path: Path
) -> None:
    checkpoint, _ = biased
    found = calibrated(checkpoint, scheme, tmp_path)
    assert found.keys() == layers(checkpoint, scheme).keys()
    stream = Stream(checkpoint.config, DOCUMENTS, checkpoint.tensor)
    x = torch.cat(list(stream.inputs(load_block(checkpoint.config, 0, checkpoint.tensor), 0))).double().numpy()
    for name in ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.v_proj.weight"):
        expected = gptq(checkpoint.tensor(name), x.T @ x, scheme)
        assert (found[name].codes == expected.codes).mean() > 0.99
        np.testing.assert_allclose(found[name].scales, expected.scales, rtol=1e-5)


@pytest.mark.parametrize("scheme", [INT4, CHANNEL], ids=str)
def test_a_calibrated_model_is_nearer_than_a_rounded_one(
    biased: tuple[Checkpoint, PreTrainedModel], scheme: Scheme, tmp_path: Path
) -> None:
    """On the text it was calibrated on: what is left after all layers."""
    checkpoint, model = biased
    truth = np.concatenate([tiny.hf_logits(model, document) for document in DOCUMENTS])
    nearest = {name: round_to_nearest(checkpoint.tensor(name), scheme).dequantize() for name in layers(checkpoint, scheme)}
    by_method = {}
    for method, weights in (
        ("clip", nearest),
        ("gptq", {name: layer.dequantize() for name, layer in calibrated(checkpoint, scheme, tmp_path).items()}),
    ):

        def tensor(name: str, weights: dict[str, Array] = weights) -> Array:
            return weights[name] if name in weights else checkpoint.tensor(name)

        stream = Stream(checkpoint.config, DOCUMENTS, tensor)
        for layer in range(checkpoint.config.layers):
            run_block(stream, load_block(checkpoint.config, layer, tensor))
        by_method[method] = np.square(logits(checkpoint, stream) - truth).mean()
    assert by_method["gptq"] < 0.6 * by_method["clip"]


def test_a_broken_run_goes_on_where_it_was(
    biased: tuple[Checkpoint, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, _ = biased
    whole = calibrated(checkpoint, INT4, tmp_path / "whole")
    calls: list[Path] = []

    def fail_second(path: Path, rounded: dict[str, Quantized]) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write_rounded(path, rounded)

    with monkeypatch.context() as patch:
        patch.setattr(calibrating, "write_rounded", fail_second)
        with pytest.raises(KeyboardInterrupt):
            calibrated(checkpoint, INT4, tmp_path / "broken")
    assert [is_whole(path) for path in calls] == [True, False]
    before = calls[0].stat().st_mtime_ns
    again = calibrated(checkpoint, INT4, tmp_path / "broken")
    assert calls[0].stat().st_mtime_ns == before
    for name, layer in whole.items():
        assert np.array_equal(layer.codes, again[name].codes) and np.array_equal(layer.scales, again[name].scales)


def test_a_damaged_entry_is_made_again(biased: tuple[Checkpoint, PreTrainedModel], tmp_path: Path) -> None:
    checkpoint, _ = biased
    first = calibrated(checkpoint, INT4, tmp_path)
    file = next(tmp_path.rglob("block_1.npz"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert not is_whole(file)
    again = calibrated(checkpoint, INT4, tmp_path)
    assert is_whole(file) and all(np.array_equal(first[name].codes, again[name].codes) for name in first)


@pytest.mark.parametrize(
    ("scheme", "shape"), [(INT4, (7, 40)), (CHANNEL, (3, 33)), (Scheme(8, 32), (4, 64)), (Scheme(4, 16, False), (5, 50))]
)
def test_a_file_gives_layers_back(scheme: Scheme, shape: tuple[int, int], tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    layer = round_to_nearest(weight, scheme)
    write_rounded(tmp_path / "a" / "b.npz", {"one": layer, "two": layer})
    found = read_rounded(tmp_path / "a" / "b.npz", "two")
    assert found.keys() == {"two"} and found["two"].scheme == scheme and found["two"].shape == shape
    assert np.array_equal(found["two"].dequantize(), layer.dequantize())


def test_rotation_changes_no_logit(biased: tuple[Checkpoint, PreTrainedModel]) -> None:
    checkpoint, model = biased
    turned = rotate(checkpoint, checkpoint.config, 1)
    stream = Stream(turned.config, DOCUMENTS, turned.tensor)
    for layer in range(turned.config.layers):
        run_block(stream, load_block(turned.config, layer, turned.tensor))
    stream.hidden = torch.from_numpy(turned.residual.turn_back(stream.hidden.numpy()))
    truth = np.concatenate([tiny.hf_logits(model, document) for document in DOCUMENTS])
    np.testing.assert_allclose(logits(checkpoint, stream), truth, atol=1e-4)


def test_what_is_rotated_turns_back(biased: tuple[Checkpoint, PreTrainedModel]) -> None:
    checkpoint, _ = biased
    turned: Rotated = rotate(checkpoint, checkpoint.config, 1)
    gains = {"q_proj": "input_layernorm", "v_proj": "input_layernorm", "up_proj": "post_attention_layernorm"}
    for name in tensor_names(checkpoint.config):
        if not name.startswith("layers.1.") or "layernorm" in name:
            continue
        values = checkpoint.tensor(name)
        norm = gains.get(name.split(".")[3])
        expected = values * checkpoint.tensor(f"layers.1.{norm}.weight") if norm and values.ndim == 2 else values
        if norm or name.split(".")[3] in ("o_proj", "down_proj"):
            np.testing.assert_allclose(turned.turned_back(name, turned.tensor(name)), expected, atol=1e-5, err_msg=name)


def test_norms_behind_sublayers_and_unknown_sizes_are_refused_by_name(biased: tuple[Checkpoint, PreTrainedModel]) -> None:
    checkpoint, _ = biased
    for changes, said in (({"model_type": "gemma2"}, "'gemma2'"), ({"hidden": 66}, "hidden_size 66")):
        with pytest.raises(UsageError, match=said):
            rotate(checkpoint, dataclasses.replace(checkpoint.config, **changes), 0)


def test_the_layer_that_hurts_most_is_found_and_gets_more_bits(biased: tuple[Checkpoint, PreTrainedModel]) -> None:
    checkpoint, _ = biased
    schemes = layers(checkpoint, CHANNEL)
    bad = "layers.1.mlp.down_proj.weight"

    def tensor(name: str) -> Array:
        values = checkpoint.tensor(name)
        if name == bad:  # one outlier in each row takes all the range
            values = values.copy()
            values[:, 5] *= 50
        return values

    found = measure_sensitivity(checkpoint.config, tensor, schemes, clipped, DOCUMENTS[:4], "", lambda *_: None)
    assert {name for unit in found for name in unit} == schemes.keys()
    assert max(found, key=lambda unit: found[unit]) == (bad,)
    assert all(value >= 0 for value in found.values())
    shapes = {name: shape for name, (_, shape) in tensor_names(checkpoint.config).items()}
    recipe = Recipe(CHANNEL, Scheme(8, None), keep=False)
    forms = {name: recipe.form(name, shape) for name, shape in shapes.items()}
    size = sum(rows * columns for rows, columns in (shape for shape in shapes.values() if len(shape) == 2))

    def bits(chosen: dict[str, Scheme | str]) -> float:
        return sum(stored_bits(chosen[name], shape) for name, shape in shapes.items() if len(shape) == 2) / size

    least = bits(forms)
    for budget in (least, least + 0.5, least + 1.5):
        chosen = widen(forms, shapes, found, budget)
        wide = {name for name in schemes if chosen[name] == Scheme(8, None)}
        assert bits(chosen) <= budget and (bad in wide) == (budget > least)
    assert all(chosen[name] == forms[name] for name in forms if name not in schemes)


@pytest.mark.parametrize("device", ["cpu", "cpu-static"])
@pytest.mark.parametrize(
    "options",
    [
        {"body": "float32", "head": "float32", "rotation": 3},
        {"body": INT4, "head": Scheme(8, 32), "method": "clip", "rotation": 3},
        {"body": CHANNEL, "head": Scheme(8, None), "method": "gptq", "bits": 7.0},
        {"body": Scheme(4, 32, False), "head": Scheme(8, 32), "method": "gptq", "rotation": 0},
    ],
    ids=["fp32 rotated", "clip rotated", "gptq mixed", "gptq asymmetric rotated"],
)
def test_bundles_of_every_recipe_pass_validation(
    models: Models, options: dict[str, object], device: str, tmp_path: Path
) -> None:
    folder, _ = models()
    calibration = Calibration(tokens=256)
    path = make(folder, tmp_path / "bundle", **SHAPE, device=device, keep=False, calibration=calibration, **options)
    report = validate(path, str(folder), prompts=2, tokens=8)
    assert report.passed, [check for check in report.checks if not check.passed]
    role = open_bundle(path).role("target")
    assert role.rotation == options.get("rotation")
    if options["body"] == "float32":
        assert report.quality.logits_max_abs <= 1e-3
    else:
        of_layers = {weight.method for weight in role.weights if weight.name.startswith("layers.") and len(weight.shape) == 2}
        assert of_layers == {options["method"]}
        assert {group.method for group in report.groups} == of_layers | {"rtn", ""}
    assert ("rotation.signs" in {weight.name for weight in role.weights}) == (role.rotation is not None)
