"""The fixtures are what the other tests believe them to be."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file
from scipy.special import softmax
from transformers import AutoTokenizer, LlamaForCausalLM

from tiny import (
    CHATML,
    Array,
    byte_id,
    deterministic_chain,
    f_chain,
    f_gguf,
    f_rand,
    f_self,
    f_tok,
    hf_greedy,
    hf_logits,
    load_hf,
    noisy_lm_head,
    random_chain,
)


def chain_law(model: LlamaForCausalLM, vocab: int) -> Array:
    """The law after every token, read behind a context that must not matter."""
    return np.stack([softmax(hf_logits(model, [5, 3, token])[-1].astype(np.float64)) for token in range(vocab)])


def sparse_chain(vocab: int) -> Array:
    law = random_chain(vocab, seed=2)
    law[:, ::3] = 0.0
    return law / law.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    "law",
    [random_chain(64, 1), random_chain(264, 1), sparse_chain(64), deterministic_chain(64, {8: 5})],
    ids=["random", "text-sized", "with zeros", "deterministic"],
)
def test_a_chain_follows_its_matrix(law: Array, tmp_path: Path) -> None:
    f_chain(tmp_path, law)
    assert np.abs(chain_law(load_hf(tmp_path), len(law)) - law).max() < 1e-6


def test_a_deterministic_chain_is_a_script(tmp_path: Path) -> None:
    model = f_chain(tmp_path, deterministic_chain(64, {8: 5}), save=False)
    assert hf_greedy(model, [5], 6) == [6, 7, 8, 5, 6, 7]


def test_a_chain_states_its_eos_where_asked(tmp_path: Path) -> None:
    f_chain(tmp_path / "a", random_chain(64, 0), eos=60, generation_eos=[60, 8])
    f_chain(tmp_path / "b", random_chain(64, 0))
    eos = [
        json.loads((tmp_path / folder / file).read_text()).get("eos_token_id")
        for folder in "ab"
        for file in ("config.json", "generation_config.json")
    ]
    assert eos == [60, [60, 8], None, None]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True, "vocab_size": 4096},
        {"attention_bias": True, "mlp_bias": True},
        {"hidden_size": 40, "intermediate_size": 100, "head_dim": 10},
        {"eos_token_id": None},
    ],
    ids=["plain", "tied", "biases", "ragged", "no eos"],
)
def test_f_rand_survives_its_folder(overrides: dict[str, Any], tmp_path: Path) -> None:
    model = f_rand(tmp_path, **overrides)
    tensors = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in tensors) != bool(overrides.get("tie_word_embeddings"))
    assert sum(name.endswith(".bias") for name in tensors) == (14 if "mlp_bias" in overrides else 0)
    assert all(float(tensor.std()) > 0.1 for tensor in tensors.values())  # nothing is neutral
    ids = [3, 14, 15, 9, 26, 5]
    assert np.array_equal(hf_logits(load_hf(tmp_path), ids), hf_logits(model, ids))


def test_f_rand_feels_order_position_and_seed(tmp_path: Path) -> None:
    model = f_rand(tmp_path)
    last = hf_logits(model, [3, 14, 15, 9])[-1]
    assert np.abs(last - hf_logits(model, [14, 3, 15, 9])[-1]).max() > 0.1
    assert np.abs(last - hf_logits(f_rand(tmp_path, seed=1, save=False), [3, 14, 15, 9])[-1]).max() > 0.1
    assert len(set(hf_greedy(model, [3, 14, 15, 9], 24))) > 6  # not a short loop


def test_f_rand_can_be_sharded(tmp_path: Path) -> None:
    model = f_rand(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert np.array_equal(hf_logits(load_hf(tmp_path), [3, 14]), hf_logits(model, [3, 14]))


def test_f_self_is_a_byte_copy(tmp_path: Path) -> None:
    f_rand(tmp_path / "target")
    f_self(tmp_path / "target", tmp_path / "draft")
    for file in (tmp_path / "target").iterdir():
        assert file.read_bytes() == (tmp_path / "draft" / file.name).read_bytes()


def test_a_noisy_head_agrees_about_half_the_time(tmp_path: Path) -> None:
    target = f_rand(tmp_path / "target")
    draft = noisy_lm_head(tmp_path / "target", tmp_path / "draft", sigma=0.15)
    sequence = [3, 14, *hf_greedy(target, [3, 14], 100)]
    agreement = np.mean(hf_logits(target, sequence).argmax(1) == hf_logits(draft, sequence).argmax(1))
    assert 0.3 < agreement < 0.8
    ours, theirs = load_file(tmp_path / "draft/model.safetensors"), load_file(tmp_path / "target/model.safetensors")
    assert [name for name in ours if not ours[name].equal(theirs[name])] == ["lm_head.weight"]


def test_f_tok_spells_every_byte(tmp_path: Path) -> None:
    f_tok(tmp_path, extra_tokens=["<|im_start|>", "<|im_end|>"], chat_template=CHATML)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "naïve 中文 <tag>\n\x00 \U0001f600"
    assert tokenizer.encode(text) == [byte_id(byte) for byte in text.encode()]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2, 261)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode("<|im_end|>") == [260]


def test_a_short_f_tok_reads_ascii_and_can_be_swapped(tmp_path: Path) -> None:
    assert f_tok(tmp_path / "a", size=120).get_vocab_size() == 120
    assert f_tok(tmp_path / "a", size=120).encode("~ hello").ids == [byte_id(byte) for byte in b"~ hello"]
    swapped = f_tok(tmp_path / "b", size=120, swap=(byte_id(ord("a")), byte_id(ord("b"))))
    assert swapped.encode("ab").ids == [byte_id(ord("b")), byte_id(ord("a"))]


def test_a_chain_carries_its_tokenizer(tmp_path: Path) -> None:
    f_tok(tmp_path / "tokenizer", chat_template=CHATML)
    f_chain(tmp_path / "model", random_chain(264, 0), tokenizer=tmp_path / "tokenizer")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").encode("Hi") == [byte_id(byte) for byte in b"Hi"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_is_the_same_model_to_transformers(tied: bool, tmp_path: Path) -> None:
    model = f_rand(tmp_path, tie_word_embeddings=tied)  # no biases: transformers drops them when it reads a llama GGUF
    f_tok(tmp_path, size=120)
    f_gguf(tmp_path, tmp_path / "model.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert tokenizer.encode("hi <eos>") == [byte_id(ord("h")), byte_id(ord("i")), byte_id(ord(" ")), 2]
    read = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    ids = [3, 14, 15, 9, 26, 5]
    assert np.abs(hf_logits(read, ids) - hf_logits(model, ids)).max() < 1e-4


def gguf_tensors(path: Path) -> dict[str, Array]:
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


def test_gguf_variants(tmp_path: Path) -> None:
    state = {name: tensor.numpy() for name, tensor in f_rand(tmp_path, attention_bias=True).state_dict().items()}
    query, bias = (state[f"model.layers.0.self_attn.q_proj.{part}"] for part in ("weight", "bias"))
    f_gguf(tmp_path, tmp_path / "plain.gguf", permuted=False, tied=True, architecture="qwen2")
    f_gguf(tmp_path, tmp_path / "permuted.gguf", rope_freqs=[1, 1, 2, 4, 8, 8, 8, 8])
    plain, permuted = gguf_tensors(tmp_path / "plain.gguf"), gguf_tensors(tmp_path / "permuted.gguf")
    assert "output.weight" in permuted and "output.weight" not in plain
    assert permuted["rope_freqs.weight"].tolist() == [1, 1, 2, 4, 8, 8, 8, 8] and "rope_freqs.weight" not in plain
    assert np.array_equal(plain["blk.0.attn_q.weight"], query)
    alternate = [0, 8, 1, 9, 2, 10]  # head_dim 16: the halves of a head become neighbours
    assert np.array_equal(permuted["blk.0.attn_q.weight"][:6], query[alternate])
    assert np.array_equal(permuted["blk.0.attn_q.bias"][:6], bias[alternate])
