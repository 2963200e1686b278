"""Medusa checkpoints: recognised by their tensors in every published layout, or refused by name."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from specedge.errors import SpecedgeError
from specedge.export.head_files import open_head
from specedge.export.medusa import MedusaCheckpoint, open_medusa

HIDDEN, VOCAB, HEADS, LAYERS = 8, 12, 3, 2
Tensors = dict[str, torch.Tensor]
Layout = Callable[[Tensors], Tensors]


def heads(own_head: bool = True, bias: bool = True, layers: int = LAYERS) -> Tensors:
    """Random heads under the names of FasterDecoding/Medusa."""
    generator, made = torch.Generator().manual_seed(0), {}
    for head in range(HEADS):
        for layer in range(layers):
            made[f"{head}.{layer}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator)
            if bias:
                made[f"{head}.{layer}.linear.bias"] = torch.randn(HIDDEN, generator=generator)
        if own_head:
            made[f"{head}.{layers}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    return made


def prefixed(prefix: str) -> Layout:
    return lambda tensors: {prefix + name: value for name, value in tensors.items()}


def as_blocks(tensors: Tensors) -> Tensors:
    """The layout with `blocks` and `lm_heads`."""
    renamed = {}
    for name, value in tensors.items():
        head, layer, *rest = name.split(".")
        renamed[f"blocks.{head}.layers.{layer}.{rest[1]}" if rest[0] == "linear" else f"lm_heads.{head}.weight"] = value
    return renamed


def save(folder: Path, tensors: Mapping[str, Any], file: str = "medusa_lm_head.safetensors", **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    if file.endswith("safetensors"):
        save_file(dict(tensors), folder / file)
    else:
        torch.save(dict(tensors), folder / file)
    if settings:
        (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def read(path: Path) -> MedusaCheckpoint:
    return open_medusa(str(path), HIDDEN, VOCAB)


LAYOUTS = [prefixed(""), prefixed("medusa_head."), prefixed("medusa_heads."), as_blocks]


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "model.safetensors", "medusa_lm_head.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_heads(layout: Layout, file: str, tmp_path: Path) -> None:  # B49 a, b, d
    tensors = heads()
    found = read(save(tmp_path / "heads", layout(tensors), file))
    assert (found.config.heads, found.config.layers, found.config.own_head, found.config.bias) == (HEADS, LAYERS, True, True)
    assert found.notes == ()
    assert len(found.names) == len(tensors)
    for head in range(HEADS):
        for layer in range(LAYERS):
            for part in ("weight", "bias"):
                stored = tensors[f"{head}.{layer}.linear.{part}"].numpy()
                np.testing.assert_array_equal(found.tensor(f"heads.{head}.layers.{layer}.{part}"), stored)
        np.testing.assert_array_equal(found.tensor(f"heads.{head}.lm_head.weight"), tensors[f"{head}.{LAYERS}.weight"].numpy())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("own_head", [True, False])
def test_what_is_not_there_is_not_expected(own_head: bool, bias: bool, tmp_path: Path) -> None:  # B49 c
    found = read(save(tmp_path / "heads", heads(own_head, bias)))
    assert (found.config.own_head, found.config.bias) == (own_head, bias)


def test_a_file_is_as_good_as_its_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "heads", heads(), "odd name.safetensors", medusa_num_heads=HEADS)
    assert read(folder / "odd name.safetensors").config.heads == HEADS
    with pytest.raises(SpecedgeError, match=r"no draft head: expected one of medusa_lm_head\.safetensors"):
        read(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_half_precision_becomes_float32_exactly(dtype: torch.dtype, file: str, tmp_path: Path) -> None:
    tensors = {name: value.to(dtype) for name, value in heads().items()}
    found = read(save(tmp_path / "heads", tensors, file))
    np.testing.assert_array_equal(found.tensor("heads.1.layers.0.weight"), tensors["1.0.linear.weight"].float().numpy())
    assert found.stored_type("heads.1.layers.0.weight") == {torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]


def test_settings_that_promise_less_are_noted_and_all_heads_used(tmp_path: Path) -> None:
    found = read(save(tmp_path / "heads", heads(), medusa_num_heads=2, medusa_num_layers=1))
    assert (found.config.heads, found.config.layers) == (HEADS, LAYERS)
    assert [note.split(": ", 1)[1] for note in found.notes] == [
        "promises 2 heads, medusa_lm_head.safetensors holds 3: all are used",
        "promises 1 layers, medusa_lm_head.safetensors holds 2: all are used",
    ]


def dropped(*names: str) -> Layout:
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "settings", "named"),
    [
        (dropped(), {"medusa_num_heads": 4}, r"missing tensor: 3\.0\.linear\.weight"),  # B49 e
        (dropped(), {"medusa": {"num_medusa_heads": 4}}, r"missing tensor: 3\.0\.linear\.weight"),
        (dropped(), {"medusa_num_layers": 3}, r"missing tensor: 0\.2\.linear\.weight"),
        (dropped(), {"medusa_num_heads": "4"}, "medusa_num_heads: expected a positive integer, found '4'"),
        (dropped("1.2.weight"), {}, r"missing tensor: 1\.2\.weight"),
        (dropped("1.0.linear.bias"), {}, r"missing tensor: 1\.0\.linear\.bias"),
        (dropped("2.1.linear.weight"), {}, r"missing tensor: 2\.1\.linear\.weight"),
        (lambda t: {**t, "2.2.weight": torch.zeros(VOCAB - 1, HIDDEN)}, {}, r"2\.2\.weight: expected shape \(12, 8\)"),  # B49 f
        (lambda t: {**t, "0.0.linear.weight": torch.zeros(4, 4)}, {}, r"0\.0\.linear\.weight: expected shape \(8, 8\)"),
        (lambda t: {**t, "token_map": torch.zeros(3, dtype=torch.int64)}, {}, "unused tensor: token_map"),
        (lambda t: {**t, "model.norm.weight": torch.zeros(8)}, {}, r"unused tensor: model\.norm\.weight"),
        (lambda t: {**t, "medusa_head.0.0.linear.weight": torch.zeros(8, 8)}, {}, r"unused tensor: medusa_head\.0\.0"),
        (lambda t: {**t, **as_blocks(heads())}, {}, "the same tensor by two names"),
        (lambda t: {"fc.weight": torch.zeros(8, 16)}, {}, r"unused tensor: fc\.weight"),
        (lambda t: {"0.2.weight": t["0.2.weight"]}, {}, "no Medusa heads: expected tensors such as"),
    ],
)
def test_what_is_no_whole_set_of_heads_is_refused_by_name(
    change: Layout, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "heads", change(heads()), **settings)
    with pytest.raises(SpecedgeError, match=named) as caught:
        read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_nan_is_named_where_it_is_read(tmp_path: Path) -> None:
    tensors = heads()
    tensors["0.0.linear.weight"][1, 2] = torch.nan
    found = read(save(tmp_path / "heads", tensors))
    with pytest.raises(SpecedgeError, match=r"0\.0\.linear\.weight\[1, 2\]: expected finite numbers"):
        found.tensor("heads.0.layers.0.weight")


class Intruder:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "pytorch_model.bin"])
def test_a_pickle_that_runs_code_is_refused_and_its_code_never_runs(file: str, tmp_path: Path) -> None:  # B54
    path = save(tmp_path / "heads", {"0.0.linear.weight": Intruder(tmp_path / "marker")}, file)
    with pytest.raises(SpecedgeError, match="a pickle can run code") as caught:
        read(path)
    assert not (tmp_path / "marker").exists()
    assert file in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"state_dict": {"0.0.linear.weight": torch.zeros(8, 8)}}, "state_dict: expected tensors by name"),
        ([torch.zeros(3)], "expected tensors by name, found list"),
        ({}, "holds no tensors"),
        ({"0.0.linear.weight": torch.zeros(8, 8, dtype=torch.complex64)}, "dtype torch.complex64 is not supported"),
    ],
    ids=["nested", "list", "empty", "complex"],
)
def test_a_pickle_of_anything_else_is_refused(content: Any, named: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(SpecedgeError, match=named):
        open_head(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04garbage", b"version https://git-lfs.github.com/spec/v1\n"])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_a_damaged_file_is_refused_in_one_line(content: bytes, file: str, tmp_path: Path) -> None:  # B55
    (tmp_path / file).write_bytes(content)
    with pytest.raises(SpecedgeError, match=file) as caught:
        open_head(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_what_is_nowhere_is_said_to_be_nowhere(tmp_path: Path) -> None:
    with pytest.raises(SpecedgeError, match="no such file or folder"):
        open_head(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(SpecedgeError, match="no draft head"):
        open_head(str(tmp_path))
    save(tmp_path, heads())
    with pytest.raises(SpecedgeError, match=r"config\.json: expected a JSON object, found list"):
        open_head(str(tmp_path))
