"""What a GGUF file holds on a grid of its own is what the bundle holds and computes with, bit for bit; the rest is said."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

import tiny
from bundles import compute_in_float, engine, graphs, locations, make, names, stored
from checkpoints import any_blocks, refuse, rewrite_gguf
from specedge.bundle import Bundle, open_bundle
from specedge.errors import SpecedgeError
from specedge.export.checkpoint import open_checkpoint
from specedge.export.recipe import INT4, INT8
from specedge.export.weights import read_float32
from specedge.manifest import Weight
from specedge.quant.scheme import Scheme
from specedge.runtime import load
from specedge.runtime.agreement import walk, width_agreement
from tiny import Array

Q4_0, Q4_1, Q8_0, Q4_K, Q6_K = (GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"))
Kinds = GGMLQuantizationType | Mapping[str, GGMLQuantizationType]
SCHEMES = {"Q4_0": "int4/32", "Q4_1": "int4/32/minima", "Q8_0": "int8/32", "F32": "float32"}
MODULES = ("token_embd", "output", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
# Rows of every matrix are whole blocks of 32.
BASE: dict[str, Any] = {"intermediate_size": 96, "num_hidden_layers": 1, "eos_token_id": None}
# And these whole blocks of 256.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 16,
}
TEXT = [int(token) for token in np.random.default_rng(0).integers(0, 33, 40)]
devices = pytest.mark.parametrize("device", ["cpu", "cpu-static"])


@dataclass(frozen=True)
class Case:
    """A GGUF file: the types of its matrices, and the model's settings."""

    kinds: Kinds
    settings: dict[str, Any] = field(default_factory=dict)
    pack: Callable[[Array, GGMLQuantizationType], Array] = any_blocks


def each(default: GGMLQuantizationType, **others: GGMLQuantizationType) -> dict[str, GGMLQuantizationType]:
    return dict.fromkeys(MODULES, default) | others


def all_equal(values: Array, kind: GGMLQuantizationType) -> Array:
    """Blocks that hold one number each, as llama.cpp rounds them: scale 0 in Q4_1."""
    return gguf.quantize(values if values.ndim == 1 else np.repeat(values[:, ::32], 32, axis=1), kind)


def heads(count: int, kv: int, head_dim: int) -> dict[str, Any]:
    return {"num_attention_heads": count, "num_key_value_heads": kv, "head_dim": head_dim}


CASES = {
    "Q4_0": Case(Q4_0),
    "Q4_1": Case(Q4_1),
    "Q8_0": Case(Q8_0),
    "Q4_1 tied": Case(Q4_1, {"tie_word_embeddings": True, "num_hidden_layers": 2}),
    "Q4_0 tied": Case(each(Q4_1, token_embd=Q4_0), {"tie_word_embeddings": True}),
    "v apart": Case(each(Q4_1, attn_v=Q8_0, ffn_up=Q4_0, token_embd=Q8_0)),
    "k apart": Case(each(Q8_0, attn_k=Q4_1, ffn_down=Q4_1, token_embd=Q4_1, output=Q4_0)),
    "biases": Case(Q4_1, {"attention_bias": True, "mlp_bias": True}),
    "biases, v apart": Case(each(Q4_0, attn_v=Q4_1), {"attention_bias": True, "mlp_bias": True}),
    "one KV head": Case(Q4_1, {"num_key_value_heads": 1}),
    "heads of 10": Case(Q4_1, heads(16, 2, 10)),
    "heads of 20": Case(each(Q4_1, attn_v=Q4_0), heads(8, 4, 20)),
    "heads of 24": Case(Q4_1, heads(4, 2, 24)),
    "heads of 32": Case(Q4_1, heads(2, 1, 32)),
    "one block": Case(Q4_1, {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 33} | heads(2, 1, 16)),
    "equal blocks": Case(Q4_1, {}, all_equal),
}
STATIC = ("Q4_1", "Q4_1 tied", "v apart", "biases", "one block")  # the kernels are the same
RUNS = [*((name, "cpu") for name in CASES), *((name, "cpu-static") for name in STATIC)]


def write(folder: Path, case: Case) -> Path:
    """The case's file in `folder`."""
    settings = BASE | case.settings
    tiny.f_rand(folder / "plain", **settings)
    tiny.f_gguf(folder / "plain", folder / "plain.gguf", tied=settings.get("tie_word_embeddings", False))
    rewrite_gguf(folder / "plain.gguf", folder / "model.gguf", {}, case.kinds, case.pack)
    return folder / "model.gguf"


def convert(source: Path, output: Path, **options: Any) -> Bundle:
    shape = {"context": 64, "widths": (1, 3, 4, 6), "chunk": 16, "body": INT8, "head": INT8}
    few = {"widths": (1, 4), "chunk": 4} if options.get("device") == "cpu-static" else {}
    return open_bundle(make(source, output, **{**shape, **few, **options}))


def weights(bundle: Bundle) -> dict[str, Weight]:
    return {weight.name: weight for weight in bundle.role("target").weights}


def values(bundle: Bundle, weight: Weight) -> Array:
    return read_float32(weight, bundle.file("target/weights.bin"))[0]


def in_the_file(source: Path) -> dict[str, tuple[str, Array]]:
    """Type and bits of every tensor as gguf-py dequantises it, by its name in the file."""
    tensors = gguf.GGUFReader(source).tensors
    return {
        tensor.name: (tensor.tensor_type.name, gguf.dequantize(tensor.data, tensor.tensor_type).view(np.uint32))
        for tensor in tensors
    }


def in_file_order(name: str, array: Array, case: Case) -> Array:
    """Rows of q and k as llama.cpp stores them."""
    count = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    setting = next((setting for module, setting in count.items() if module in name), None)
    default = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return array if setting is None else tiny.interleave_rows(array, (default | case.settings)[setting])


def check_kept(bundle: Bundle, source: Path, case: Case) -> None:
    truth = in_the_file(source)
    assert len(truth) == len(weights(bundle))
    for name, weight in weights(bundle).items():
        kind, bits = truth[tiny.gguf_name(f"model.{name}")]
        assert (weight.source, weight.scheme, weight.exact) == (kind, SCHEMES[kind], True), name
        found = in_file_order(name, values(bundle, weight), case)
        np.testing.assert_array_equal(found.view(np.uint32), bits, err_msg=name)


def check_logits(bundle: Bundle, truth: Array) -> None:
    target = load(compute_in_float(bundle).path, threads=1).target
    for width in {1, 4, target.widest}:
        assert np.abs(walk(target, TEXT, width) - truth).max() <= 1e-3


@pytest.mark.parametrize(("name", "device"), RUNS)
def test_a_kept_model_is_the_checkpoints(name: str, device: str, tmp_path: Path):  # B08, B05, B20
    """Weights bit for bit, in the rows transformers has them; logits of the graph; the same bits at every width in place."""
    case = CASES[name]
    source = write(tmp_path, case)
    bundle = convert(source, tmp_path / "bundle", device=device)
    check_kept(bundle, source, case)
    if device == "cpu":
        engine = load(bundle.path, threads=1)
        assert width_agreement(engine, TEXT) == {3: 0.0, 4: 0.0, 6: 0.0, 16: 0.0}  # accuracy_level 4
    check_logits(bundle, tiny.hf_logits(open_checkpoint(str(source)).load_reference(), TEXT))


@devices
def test_a_graph_reads_offsets_and_leaves_minima_to_the_host(device: str, tmp_path: Path):  # B01
    """Embedding and head are one matrix; every byte that is not a minimum is read, and no other."""
    bundle = convert(write(tmp_path, CASES["Q4_1 tied"]), tmp_path / "bundle", device=device)
    assert "lm_head.weight" not in weights(bundle)
    wanted = np.zeros(bundle.manifest.files["target/weights.bin"].bytes, bool)
    for weight in weights(bundle).values():
        for name, part in weight.parts.items():
            wanted[part.offset : part.offset + part.bytes] = name != "minima"
    for model in graphs(bundle).values():
        read = np.zeros_like(wanted)
        for offset, size in locations(model).values():
            read[offset : offset + size] = True
        np.testing.assert_array_equal(read, wanted)
        assert all(np.prod(item.dims) < 1000 for item in model.graph.initializer if not item.external_data)


@pytest.mark.parametrize("kind", [Q4_0, Q4_1], ids=str)
def test_what_is_not_kept_is_rounded(kind: GGMLQuantizationType, tmp_path: Path):
    source = write(tmp_path, Case(kind))
    kept = convert(source, tmp_path / "kept", body=INT4, head=INT4)
    rounded = convert(source, tmp_path / "rounded", body=INT4, head=INT4, method="rtn", keep=False)
    for name, weight in weights(rounded).items():
        before, after = values(kept, weights(kept)[name]), values(rounded, weight)
        assert (weight.exact, np.array_equal(before, after)) == ((True,) * 2 if len(weight.shape) == 1 else (False,) * 2)
        if len(weight.shape) == 2:
            assert (weight.source, weight.scheme) == (kind.name, "int4/32")


@pytest.mark.parametrize(
    ("kind", "body", "scheme", "exact"),
    [
        (Q8_0, INT4, "int4/32", False),
        (Q8_0, INT8, "int8/32", True),
        (Q4_1, INT8, "int4/32/minima", True),
        (Q4_1, Scheme(4, 64), "int4/32/minima", True),
        (Q4_0, INT8, "int4/32", True),
        (Q4_0, Scheme(8, None, False), "int4/32", True),
        (Q4_1, "float32", "float32", True),
        (Q4_0, "float16", "float16", False),
        (Q6_K, INT4, "int4/32", False),
        (Q6_K, INT8, "int8/32", False),
        (Q4_K, Scheme(4, 16, False), "int4/16/asymmetric", False),
        (Q4_K, "float32", "float32", True),
    ],
    ids=str,
)
def test_a_grid_is_kept_where_it_has_no_more_bits(
    kind: GGMLQuantizationType, body: Scheme | str, scheme: str, exact: bool, tmp_path: Path
):
    """Asked for fewer bits, or where there is no such grid here (Q4_K, Q6_K): dequantised, stored anew, and said."""
    source = write(tmp_path, Case(kind, WIDE))
    bundle = convert(source, tmp_path / "bundle", body=body, head=body)
    truth = in_the_file(source)
    for name, weight in weights(bundle).items():
        if len(weight.shape) == 2:
            assert (weight.source, weight.scheme, weight.exact) == (kind.name, scheme, exact)
            found, step = read_float32(weight, bundle.file("target/weights.bin"))
            right = truth[tiny.gguf_name(f"model.{name}")][1].view(np.float32)
            wrong = np.abs(in_file_order(name, found, Case(kind, WIDE)) - right)
            same = not wrong.any()
            assert same == exact
            if step is not None:
                assert (wrong <= 1.001 * in_file_order(name, step, Case(kind, WIDE))).all()


@devices
def test_tensors_of_q_k_and_v_may_be_stored_each_in_their_way(device: str, tmp_path: Path):
    """Q4_1 beside Q6_K, which becomes int4/32 or int8/32; Q4_0 beside it may share a product with it."""
    for q, v, body, product in ((Q4_1, Q6_K, INT8, False), (Q4_0, Q6_K, INT4, True), (Q4_1, Q6_K, INT4, False)):
        folder = tmp_path / f"{q.name}-{body.bits}"
        folder.mkdir()
        source = write(folder, Case(each(q, attn_v=v), WIDE))
        bundle = convert(source, folder / "bundle", body=body, device=device)
        assert weights(bundle)["layers.0.self_attn.v_proj.weight"].scheme == body.name
        exact = {name: weight.exact for name, weight in weights(bundle).items()}
        assert [name for name, kept in exact.items() if not kept] == ["layers.0.self_attn.v_proj.weight"]
        products = bundle.role("target").graphs[0].ops["MatMulNBits"]
        assert products == (6 if product else 8)  # o, gate, up, down and the head; q, k and v together or apart
        model = open_checkpoint(str(source)).load_reference()
        check_logits(bundle, tiny.hf_logits(stored(model, bundle), TEXT))


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0], ids=str)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.filterwarnings("error")
def test_a_scale_that_is_not_finite_is_named(kind: GGMLQuantizationType, number: float, tmp_path: Path):  # B22
    def bad(values: Array, kind: GGMLQuantizationType) -> Array:
        blocks = any_blocks(values, kind)
        if values.shape == (64, 96):  # down
            at = gguf.GGML_QUANT_SIZES[kind][1] + (2 if kind is Q4_1 else 0)  # a minimum where there are minima
            blocks[5, at : at + 2] = np.array([number], "<f2").view(np.uint8)
        return blocks

    source = write(tmp_path, Case(kind, {}, bad))
    (tmp_path / "out").mkdir()
    for keep in (True, False):
        with pytest.raises(SpecedgeError, match=r"model\.gguf: blk\.0\.ffn_down\.weight\[5, \d+\]: .*finite") as caught:
            convert(source, tmp_path / "out/bundle", keep=keep)
        assert "\n" not in str(caught.value)
        assert names(tmp_path / "out") == set()


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0, Q6_K], ids=str)
def test_a_cut_tensor_is_refused(kind: GGMLQuantizationType, tmp_path: Path):
    source = write(tmp_path, Case(kind, WIDE))
    content = source.read_bytes()
    for missing in (1, 17, 2000):
        source.write_bytes(content[: len(content) - missing - 31])  # beyond the padding behind the last tensor
        refuse(source, str(source), "interrupted download")


def largest(values: Array, kind: GGMLQuantizationType) -> Array:
    """Every scale and minimum of Q4_1 the largest float16 or its negative."""
    blocks = any_blocks(values, kind)
    numbers = np.where(blocks.reshape(len(values), -1, 20)[..., :4].view("<f2") > 0, 65504, -65504)
    blocks.reshape(len(values), -1, 20)[..., :4] = numbers.astype("<f2").view(np.uint8)
    return blocks


def test_the_largest_scales_and_minima_are_kept(tmp_path: Path):
    case = Case(each(Q4_1, token_embd=GGMLQuantizationType.F32), {}, lambda x, kind: largest(x, kind) if kind is Q4_1 else x)
    source = write(tmp_path, case)
    bundle = convert(source, tmp_path / "bundle", body=INT8, head=INT8)
    kept = [weight for weight in weights(bundle).values() if weight.source == "Q4_1"]
    truth = in_the_file(source)
    assert len(kept) == 8 and all(weight.exact for weight in kept)
    for weight in kept:
        bits = truth[tiny.gguf_name(f"model.{weight.name}")][1]
        np.testing.assert_array_equal(in_file_order(weight.name, values(bundle, weight), case).view(np.uint32), bits)
    assert np.isfinite(walk(load(bundle.path, threads=1).target, TEXT, 4)).all()


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("group", ["16", "32", "64", "128", "channel"])
def test_every_width_gives_the_same_bits(tmp_path: Path, group: str, symmetric: bool):
    """On cpu, whose int8 activations would make 0.1 and more of a logit of the last bit of a sum."""
    tiny.f_rand(tmp_path / "source", hidden_size=256, num_attention_heads=8, num_hidden_layers=1)
    form = Scheme.parse("int4", group, symmetric)
    made = engine(tmp_path / "source", tmp_path / "bundle", body=form, head=Scheme.parse("int8", group, symmetric))
    assert set(width_agreement(made, list(range(40))).values()) == {0.0}
