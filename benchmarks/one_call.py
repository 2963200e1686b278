"""Drafting in one call against the same steps through single calls, in turns.

    python benchmarks/one_call.py MODEL [--layers N] [--draft-vocab 8192] [--gammas 2,4,8] [--past 200] [--json FILE]

Drafts come from a random EAGLE-3 head of the model's own sizes, or with --layers from a random draft model of so many of its
layers: they are never right, which costs the same. Times are of a whole proposal: two new tokens are read, then gamma drafted.
"""

import dataclasses
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from statistics import median

import click
import numpy as np
import onnxruntime
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specedge.export.checkpoint import open_checkpoint
from specedge.export.convert import convert
from specedge.export.eagle import EagleConfig, eagle_shapes
from specedge.export.families import DecoderConfig
from specedge.export.request import Request
from specedge.runtime import Engine, Sampling, load
from specedge.runtime.decode import prefill
from specedge.runtime.drafters import Drafter
from specedge.runtime.prompts import PROSE
from specedge.runtime.rules import make_rule
from specedge.runtime.sampler import Sampler
from specedge.runtime.shape import TreeShape

_ROUNDS, _BLOCKS = 12, 5


def write_head(target: DecoderConfig, drafts: int, folder: Path) -> None:
    """A random EAGLE-3 head in SafeAILab's layout that drafts every n-th id."""
    flags = dict.fromkeys(("fc_bias", "output_bias", "input_norm", "tap_norms", "norm_before_residual"), False)
    layer = dataclasses.replace(target, layers=1, attention_bias=False, mlp_bias=False)
    config = EagleConfig(
        3, layer, target.hidden, _taps(target), drafts, feeds_back_normed=False, own_embedding=False, own_head=True, **flags
    )
    rng = np.random.default_rng(0)
    tensors = {
        name.replace("layer.", "midlayer."): (rng.normal(size=shape) * 0.04 + (len(shape) == 1)).astype(np.float32)
        for name, shape in eagle_shapes(config).items()
    }
    ids = np.arange(drafts) * (target.vocab_size // drafts)
    save_file(
        {**tensors, "d2t": ids - np.arange(drafts), "t2d": np.isin(np.arange(target.vocab_size), ids)},
        folder / "model.safetensors",
    )
    settings = {
        "hidden_size": target.hidden,
        "intermediate_size": target.intermediate,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": drafts,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_eps,
    }
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_draft(target: DecoderConfig, layers: int, folder: Path) -> None:
    """A random Llama of so many layers."""
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden,
        intermediate_size=target.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=target.heads,
        num_key_value_heads=target.kv_heads,
        max_position_embeddings=target.max_positions,
        tie_word_embeddings=target.tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _taps(target: DecoderConfig) -> tuple[int, ...]:
    return 2, target.layers // 2, target.layers - 3


def block(engine: Engine, drafter: Drafter, text: list[int], shape: TreeShape) -> float:
    """Median milliseconds of a proposal behind `text` and what came since."""
    history, times = list(text), []
    prefill(engine.target, drafter, history)
    drafter.propose(history, shape)
    for _ in range(_ROUNDS):
        engine.target.step([history[-1], text[0]])
        engine.target.commit([0, 1])
        drafter.learn(engine.target, [0, 1])
        history += [text[0], text[1]]
        start = time.perf_counter()
        drafter.propose(history, shape)
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


@click.command()
@click.argument("model")
@click.option("--layers", type=click.IntRange(min=1), help="Draft with a model of so many layers.")
@click.option("--draft-vocab", type=click.IntRange(min=1), default=8192, show_default=True)
@click.option("--gammas", default="2,4,8", show_default=True)
@click.option("--past", type=click.IntRange(min=2), default=200, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path))
def main(model: str, layers: int | None, draft_vocab: int, gammas: str, past: int, json_file: Path | None) -> None:
    """Print milliseconds of a proposal in one call, through single calls, and their ratio."""
    lengths = [int(gamma) for gamma in gammas.split(",")]
    results = []
    with tempfile.TemporaryDirectory() as place:
        checkpoint, source, widths = open_checkpoint(model), Path(place) / "drafter", (1, *(gamma + 1 for gamma in lengths))
        target = checkpoint.config
        source.mkdir()
        if layers is None:
            write_head(target, draft_vocab, source)
            request = Request(model, Path(place) / "bundle", eagle=str(source), eagle_taps=_taps(target), widths=widths)
        else:
            write_draft(target, layers, source)
            checkpoint.save_tokenizer(source)
            request = Request(model, Path(place) / "bundle", draft=str(source), one_call=True, widths=widths)
        engine = load(convert(request).path)
        text = engine.encode(PROSE)[:past]
        for name, sampling in (("greedy", Sampling()), ("temperature 0.8", Sampling(0.8, seed=1))):
            rule = make_rule(None, Sampler(sampling, engine.bundle.manifest.allowed_ids, past))
            ways = [engine.new_drafter(rule), engine.new_drafter(dataclasses.replace(rule, in_graph=None))]
            for gamma in lengths:
                shape = TreeShape.chain(gamma)
                for way in ways:
                    block(engine, way, text, shape)
                blocks = [[block(engine, way, text, shape) for way in ways] for _ in range(_BLOCKS)]
                one, single = (median(times) for times in zip(*blocks, strict=True))
                ratios = [a / b for a, b in blocks]
                found = {"sampling": name, "gamma": gamma, "one_call_ms": one, "single_ms": single, "ratio": median(ratios)}
                results.append(found | {"ratio_min": min(ratios), "ratio_max": max(ratios)})
                click.echo(
                    f"{name:>15}, gamma {gamma}: one call {one:.2f} ms, single calls {single:.2f} ms, "
                    f"ratio {median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                )
    if json_file is not None:
        environment = {"machine": platform.machine(), "cpus": os.cpu_count(), "onnxruntime": onnxruntime.__version__}
        settings = {"layers": layers, "draft_vocab": draft_vocab, "past": past}
        json_file.write_text(
            json.dumps({"environment": environment, "settings": settings, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
