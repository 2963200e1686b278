"""A scheme is checked in one place and has one name."""

import itertools

import pytest

from specedge.errors import SpecedgeError
from specedge.quant.scheme import Scheme

KINDS = ((True, False), (False, False), (False, True))  # symmetric, with minima
GRID = itertools.product((4, 8), (16, 32, 64, 128, None), KINDS)
SCHEMES = [Scheme(bits, group, symmetric, minima) for bits, group, (symmetric, minima) in GRID]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_name_leads_back(scheme: Scheme) -> None:
    assert Scheme.from_name(scheme.name) == scheme


def test_no_two_schemes_share_a_name() -> None:
    assert len({scheme.name for scheme in SCHEMES}) == len(set(SCHEMES)) == len(SCHEMES) == 30


def test_names() -> None:
    assert str(Scheme.parse("int4")) == "int4/32"
    assert str(Scheme.parse("int4", "32", symmetric=False)) == "int4/32/asymmetric"
    assert str(Scheme.parse("int8", "channel")) == "int8/channel"
    assert str(Scheme(4, 32, symmetric=False, minima=True)) == "int4/32/minima"


@pytest.mark.parametrize(
    ("weights", "group", "message"),
    [
        ("int4", "512", "group 512: not supported; use 16, 32, 64, 128 or channel"),
        ("int4", "", "group : not supported"),
        ("int3", "32", "weights int3: not supported; use int4 or int8"),
    ],
)
def test_a_person_is_told_what_to_use(weights: str, group: str, message: str) -> None:
    with pytest.raises(SpecedgeError, match=message):
        Scheme.parse(weights, group)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "int4",
        "int4/512",
        "int4/32/symmetric",
        "int4/32/asymmetric/x",
        "int4/32/asymmetric/minima",
        "int4/32/minima/x",
        "int4/minima",
        "int4/512/minima",
        "fp16/32",
    ],
)
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(SpecedgeError):
        Scheme.from_name(name)


@pytest.mark.parametrize(("bits", "group"), [(3, 32), (16, 32), (4, 512), (4, 0), (4, 33)])
def test_a_programmer_is_refused(bits: int, group: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        Scheme(bits, group)


def test_a_symmetric_scheme_has_no_minima() -> None:
    with pytest.raises(ValueError, match="minima"):
        Scheme(4, 32, minima=True)


def test_blocks() -> None:
    assert (Scheme(4, 32).block(40), Scheme(4, 32).blocks(40)) == (32, 2)
    assert (Scheme(4, 16).block(100), Scheme(4, 16).blocks(100)) == (16, 7)
    assert (Scheme(4, None).block(40), Scheme(4, None).blocks(40)) == (40, 1)
