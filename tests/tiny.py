"""Tiny models whose right answer is known: genuine Hugging Face folders, made in well under a second, without network.

`f_rand` depends on everything (cache, positions, biases, norms), so a dropped term shows. `f_chain` is an exact bigram
model, so tokens, stops and acceptance can be scripted, but it ignores the cache.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

Array = npt.NDArray[Any]

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
FULL_TOKENIZER = len(SPECIAL_TOKENS) + 256
LOG_ZERO = -60.0
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def f_rand(
    folder: Path, *, seed: int = 0, save: bool = True, max_shard_size: str | None = None, **config_overrides: Any
) -> LlamaForCausalLM:
    """F-RAND: two layers, 4 heads over 2 KV heads, every weight redrawn; with `eos_token_id=None` it never stops."""
    settings: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": float(np.float32(1e-6)),  # as a GGUF file holds it: the same graph
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **config_overrides,
    }
    model = build_llama(settings)
    redraw(model, seed)
    if save:
        save_folder(model, folder, max_shard_size=max_shard_size)
    return model


def f_chain(
    folder: Path,
    transition: Array,  # [V, V], row i is the law of the token after i
    *,
    eos: int | list[int] | None = None,
    generation_eos: int | list[int] | None = None,
    tokenizer: Path | None = None,
    save: bool = True,
    **config_overrides: Any,
) -> LlamaForCausalLM:
    """F-CHAIN: softmax(logits) after token i is row i of `transition`, whatever came before.

    `eos` goes to config.json and, unless `generation_eos` says otherwise, to generation_config.json. The files of the
    folder `tokenizer` (see `f_tok`) are copied beside the weights. Overriding hidden_size or vocab_size breaks it.
    """
    vocab = len(transition)
    if transition.shape != (vocab, vocab) or not np.allclose(transition.sum(axis=1), 1.0) or vocab % 4:
        raise ValueError(f"expected a row-stochastic [V, V] with V divisible by 4 heads, found {transition.shape}")
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": vocab,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "bos_token_id": None if tokenizer is None else SPECIAL_TOKENS.index("<bos>"),
        "eos_token_id": eos,
        "tie_word_embeddings": False,
        **config_overrides,
    }
    model = build_llama(settings)
    redraw(model, seed=0)
    with np.errstate(divide="ignore"):
        log_law = np.maximum(np.log(transition.astype(np.float64)), LOG_ZERO)
    scale = vocab**0.5
    state = model.state_dict()
    for name, tensor in state.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    state["model.embed_tokens.weight"].copy_(scale * torch.eye(vocab))
    state["lm_head.weight"].copy_(torch.from_numpy(log_law.T / scale))
    if generation_eos is not None:
        model.generation_config.eos_token_id = generation_eos
    if save:
        save_folder(model, folder)
        if tokenizer is not None:
            for file in sorted(tokenizer.iterdir()):
                if "token" in file.name or file.name == "chat_template.jinja":
                    shutil.copy(file, folder / file.name)
    return model


def deterministic_chain(vocab: int, successor: Mapping[int, int] | Sequence[int]) -> Array:
    """P with P(successor[i] | i) = 1; a token without a successor is followed by its id plus one (the last by 0)."""
    following = dict(successor) if isinstance(successor, Mapping) else dict(enumerate(successor))
    transition = np.zeros((vocab, vocab))
    for token in range(vocab):
        transition[token, following.get(token, (token + 1) % vocab)] = 1.0
    return transition


def random_chain(vocab: int, seed: int, *, sharpness: float = 1.5) -> Array:
    """P = softmax of normal logits with standard deviation `sharpness`: every entry is positive."""
    logits = sharpness * np.random.default_rng(seed).standard_normal((vocab, vocab))
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    transition: Array = weights / weights.sum(axis=1, keepdims=True)
    return transition


def f_self(folder_target: Path, folder_draft: Path) -> None:
    """F-SELF: the draft is a byte copy of the target."""
    shutil.copytree(folder_target, folder_draft)


def noisy_lm_head(src: Path, dst: Path, sigma: float, seed: int = 0) -> LlamaForCausalLM:
    """The target of `src` with normal noise of size `sigma` on lm_head; 0.15 agrees half the time."""
    shutil.copytree(src, dst)
    tensors = load_file(dst / "model.safetensors")
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = head + sigma * torch.randn(head.shape, generator=torch.Generator().manual_seed(seed))
    save_file(tensors, dst / "model.safetensors", metadata={"format": "pt"})
    return load_hf(dst)


def byte_id(byte: int) -> int:
    """The token id of a byte in `f_tok`: space is 3, '!' is 4, ..., so a short tokenizer still reads ASCII."""
    return len(SPECIAL_TOKENS) + (byte - 32) % 256


def f_tok(
    folder: Path,
    *,
    size: int = FULL_TOKENIZER,
    extra_tokens: Sequence[str] = (),
    swap: tuple[int, int] | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """F-TOK: byte-level BPE without merges, <pad> 0, <bos> 1, <eos> 2, then bytes (`byte_id`).

    The first `size` entries exist, then `extra_tokens` as special ones (`["<|im_start|>", "<|im_end|>"]` for `CHATML`).
    `swap` exchanges the tokens of two ids: a vocabulary that differs at the same size.
    """
    if not len(SPECIAL_TOKENS) < size <= FULL_TOKENIZER:
        raise ValueError(f"size must be in {len(SPECIAL_TOKENS) + 1}..{FULL_TOKENIZER}, found {size}")
    byte_tokens = [letter for _, letter in sorted((byte_id(b), c) for b, c in byte_letters().items())]
    tokens = [*SPECIAL_TOKENS, *byte_tokens][:size]
    if swap is not None:
        tokens[swap[0]], tokens[swap[1]] = tokens[swap[1]], tokens[swap[0]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIAL_TOKENS, *extra_tokens)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    write_json(folder / "tokenizer_config.json", settings)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return tokenizer


def byte_letters() -> dict[int, str]:
    """The letter by which byte-level BPE spells each byte (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    odd = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + rank) for rank, byte in enumerate(odd)}


def f_gguf(
    folder_of_f_rand: Path,
    path: Path,
    *,
    permuted: bool = True,
    rope_freqs: Sequence[float] | None = None,
    tied: bool = False,
    architecture: str = "llama",
) -> None:
    """Write a one-file Llama folder as F32 GGUF, as llama.cpp's converter lays it out.

    `permuted` interleaves the rows of q and k per head, as llama.cpp does for `llama` (and not for `qwen2`).
    `rope_freqs` divide the inverse frequencies. `tied` leaves `output.weight` out.
    """
    config = json.loads((folder_of_f_rand / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("f-rand")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_gguf_tokenizer(writer, folder_of_f_rand, config["vocab_size"])
    for name, tensor in load_file(folder_of_f_rand / "model.safetensors").items():
        if name == "lm_head.weight" and tied:
            continue
        array = tensor.numpy()
        if permuted and ".q_proj." in name:
            array = interleave_rows(array, heads)
        elif permuted and ".k_proj." in name:
            array = interleave_rows(array, kv_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array, dtype=np.float32))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, dtype=np.float32))
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave_rows(array: Array, heads: int) -> Array:
    """llama.cpp's `permute`: halves of a head's rows become neighbours, so that its rotary pairs are (2i, 2i + 1)."""
    split = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
    rows: Array = split.swapaxes(1, 2).reshape(array.shape)
    return rows


def gguf_name(name: str) -> str:
    stem, _, suffix = name.removeprefix("model.").rpartition(".")
    stem = stem.replace("layers.", "blk.").replace("self_attn.", "").replace("mlp.", "")
    parts = {
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
    }
    prefix, dot, last = stem.rpartition(".")
    return f"{prefix}{dot}{parts[last]}.{suffix}"


def add_gguf_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab: int) -> None:
    """Copy a tokenizer of `f_tok`, filled up with unused entries to the rows of the model, as llama.cpp does."""
    if not (folder / "tokenizer.json").exists():
        return
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    if size >= vocab:
        raise ValueError(f"a GGUF tokenizer needs a spare row of the vocabulary, found {size} entries for {vocab} rows")
    control = tokenizer.get_added_tokens_decoder()
    tokens = [tokenizer.id_to_token(index) or f"[PAD{index}]" for index in range(vocab)]
    tokens[size] = "<eos><pad>"  # readers want at least one merge: this one never applies, its halves are no bytes
    kinds = [gguf.TokenType.CONTROL if index in control else gguf.TokenType.NORMAL for index in range(size)]
    kinds += [gguf.TokenType.UNUSED] * (vocab - size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["<eos> <pad>"])
    writer.add_pad_token_id(SPECIAL_TOKENS.index("<pad>"))
    writer.add_bos_token_id(SPECIAL_TOKENS.index("<bos>"))
    writer.add_eos_token_id(SPECIAL_TOKENS.index("<eos>"))


def build_llama(settings: Mapping[str, Any]) -> LlamaForCausalLM:
    model = LlamaForCausalLM._from_config(LlamaConfig(**settings), attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def redraw(model: PreTrainedModel, seed: int) -> None:
    """Redraw every parameter, so that none is neutral: with N standard normal, matrices become 0.25 N, embeddings N,
    norm weights 1 + 0.3 N, biases 0.5 N.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied head comes once, as the embedding
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(".bias"):
                parameter.copy_(0.5 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(1.0 + 0.3 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(0.25 * noise)


def save_folder(model: PreTrainedModel, folder: Path, *, max_shard_size: str | None = None) -> None:
    if max_shard_size is None:
        model.save_pretrained(folder)
    else:
        model.save_pretrained(folder, max_shard_size=max_shard_size)


def load_hf(folder: Path) -> LlamaForCausalLM:
    """The reference: the folder in transformers, float32, eager attention."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def hf_logits(model: PreTrainedModel, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits after each of `ids`, [T, V], in one pass without a cache."""
    logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits.to(torch.float32).numpy()


def hf_greedy(model: PreTrainedModel, ids: Sequence[int], n: int) -> list[int]:
    """The next `n` greedy ids, each by a whole new pass; EOS does not stop it."""
    sequence = list(ids)
    for _ in range(n):
        sequence.append(int(hf_logits(model, sequence)[-1].argmax()))
    return sequence[len(ids) :]


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file in place (`None` stays as null): for tests that bend a config."""
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | changes)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
