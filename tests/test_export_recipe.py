"""How weights are to be stored: what the command line says, and what contradicts itself."""

from pathlib import Path
from typing import Any

import pytest

from specedge.devices.table import get_device
from specedge.errors import UsageError
from specedge.export.calibration_text import Calibration
from specedge.export.cli_recipe import Options, calibration
from specedge.export.recipe import Recipe
from specedge.export.request import Request
from specedge.quant.scheme import Scheme

GIVEN: dict[str, Any] = {"weights": "int4", "head_weights": None, "group": None, "asymmetric": False, "method": None}
CHANNEL = Scheme(4, None), Scheme(8, None)


def options(prefix: str = "", **changes: Any) -> Options:
    return Options(prefix, **{**GIVEN, **changes})


@pytest.mark.parametrize(
    ("changes", "recipe"),
    [
        ({}, Recipe()),
        ({"method": "keep"}, Recipe()),
        ({"method": "rtn"}, Recipe(method="rtn", keep=False)),
        ({"method": "gptq"}, Recipe(method="gptq", keep=False)),
        ({"group": "32"}, Recipe(keep=False)),
        ({"group": "channel", "method": "gptq", "bits": 5.0}, Recipe(*CHANNEL, "gptq", False, None, 5.0)),
        ({"rotate": True}, Recipe(keep=False, rotation=0)),
        ({"rotate": True, "seed": 7}, Recipe(keep=False, rotation=7)),
        ({"asymmetric": True}, Recipe(Scheme(4, 32, False), Scheme(8, 32, False), keep=False)),
        ({"weights": "fp16"}, Recipe("float16", "float16")),
        ({"weights": "fp32", "rotate": True}, Recipe("float32", "float32", keep=False, rotation=0)),
        ({"weights": "fp32", "head_weights": "int8"}, Recipe("float32", Scheme(8, 32))),
        ({"weights": "int8", "head_weights": "int4"}, Recipe(Scheme(8, 32), Scheme(4, 32))),
    ],
)
def test_options_become_a_recipe(changes: dict[str, Any], recipe: Recipe) -> None:
    assert options(**changes).recipe(get_device("cpu")) == recipe


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"group": "16", "method": "keep"}, "--method keep: --group asks for another grid"),
        ({"rotate": True, "method": "keep"}, "--method keep: --rotate"),
        ({"bits": 5.0, "method": "keep"}, "--method keep: --bits"),
        ({"weights": "fp32", "group": "16"}, "--group: --weights fp32 is not quantised"),
        ({"weights": "fp16", "method": "gptq"}, "--method: --weights fp16 is not quantised"),
        ({"weights": "fp32", "head_weights": "int8", "method": "gptq"}, "method gptq: weights float32 are not quantised"),
        ({"weights": "fp32", "head_weights": "int8", "bits": 5.0}, "bits: weights float32 are not quantised"),
        ({"weights": "int8", "bits": 9.0}, "bits: all layers have 8 already"),
        ({"weights": "fp16", "head_weights": "int8"}, "graphs compute in float16 here; use fp16"),
        ({"prefix": "draft-", "group": "16", "method": "keep"}, "--draft-method keep: --draft-group"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        options(**changes).recipe(get_device("cpu"))


def test_a_drafters_recipe_starts_from_the_targets_weights() -> None:
    drafted = options("draft-", weights=None, group="channel")
    assert drafted.given == ["--draft-group"]
    assert drafted.recipe(get_device("cpu")) == Recipe(*CHANNEL, keep=False)
    assert options("draft-", weights=None).given == []


def test_the_drafter_is_stored_as_the_target_unless_it_has_a_recipe() -> None:
    own = Recipe(*CHANNEL, keep=False)
    assert Request("m", Path("o"), draft="d", recipe=Recipe("float32", "float32")).drafter.body == "float32"
    assert Request("m", Path("o"), draft="d", draft_recipe=own).drafter == own


def test_floats_are_of_the_type_that_a_device_computes_in() -> None:
    assert Recipe().on(get_device("qnn")).dtype == "float16" == Recipe("float16", "float16").on(get_device("cpu")).dtype
    assert Recipe().on(get_device("cpu-static")).dtype == "float32"
    with pytest.raises(UsageError, match=r"weights float32 .* compute in float16 here; use fp16"):
        Recipe("float32", "float32").on(get_device("qnn"))
    assert options(weights="int4", head_weights="fp16").recipe(get_device("qnn")).head == "float16"
    with pytest.raises(UsageError, match="compute in float32 here; use fp32"):
        options(weights="int4", head_weights="fp16").recipe(get_device("cpu"))


def test_text_is_for_recipes_that_read_it() -> None:
    gptq = Recipe(method="gptq", keep=False)
    assert calibration(None, None, None, gptq) == Calibration()
    assert calibration(Path("t"), 100, 3, Recipe(), gptq) == Calibration(Path("t"), 100, 3)
    assert calibration(None, None, None, Recipe(), None) == Calibration()
    with pytest.raises(UsageError, match="--calibration: nothing is calibrated"):
        calibration(Path("t"), None, None, Recipe())
    with pytest.raises(UsageError, match="--calibration-tokens: nothing"):
        calibration(None, 5, None, Recipe(), None)
    with pytest.raises(UsageError, match="--seed: nothing is drawn by it"):
        calibration(None, None, 3, Recipe(), None)
    assert calibration(None, None, 3, Recipe(keep=False, rotation=3)).seed == 3


def test_kept_grids_cannot_be_rotated_nor_calibrated() -> None:
    with pytest.raises(UsageError, match="rotated weights lie on no grid"):
        Recipe(rotation=0)
    with pytest.raises(UsageError, match="calibration is for new grids"):
        Recipe(method="gptq")


def test_heads_are_not_calibrated() -> None:
    gptq = Recipe(method="gptq", keep=False)
    assert Request("m", Path("o"), draft="d", draft_recipe=gptq).drafter == gptq
    with pytest.raises(UsageError, match="heads are rounded without calibration"):
        Request("m", Path("o"), medusa="d", draft_recipe=gptq)
