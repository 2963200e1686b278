"""What each way of rounding costs a model: KL, top-1, top-5 and perplexity on held-out text, bytes and minutes, side by side.

Usage: python benchmarks/quantisation.py MODEL [--recipes NAME,NAME ...] [--tokens N] --folder DIR --json FILE
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import rich.console
import rich.table

from specedge.export.calibration_text import Calibration, read_calibration
from specedge.export.checkpoint import load_quietly, open_checkpoint
from specedge.export.convert import convert
from specedge.export.quality import Judged, measure_quality, read_judged
from specedge.export.recipe import Recipe
from specedge.export.report import Quality
from specedge.export.request import Request
from specedge.export.self_text import writer_of
from specedge.export.sensitivity import mean_bits
from specedge.export.vocabulary import token_count
from specedge.quant.scheme import Scheme
from specedge.runtime import Engine, load
from specedge.runtime.terminal import Output, peak_rss
from specedge.tokenizer import Tokenizer

BLOCK, ASYMMETRIC, CHANNEL = Scheme(4, 32), Scheme(4, 32, False), Scheme(4, None)
CONTEXT = 512
INT8, INT8_CHANNEL = Scheme(8, 32), Scheme(8, None)
RECIPES = {
    "exact grid": Recipe(),
    "block 32, rtn": Recipe(BLOCK, INT8, "rtn", keep=False),
    "block 32, clip": Recipe(BLOCK, INT8, "clip", keep=False),
    "block 32, gptq": Recipe(BLOCK, INT8, "gptq", keep=False),
    "block 32, rotated, gptq": Recipe(BLOCK, INT8, "gptq", keep=False, rotation=0),
    "block 32 asymmetric, rtn": Recipe(ASYMMETRIC, INT8, "rtn", keep=False),
    "block 32 asymmetric, gptq": Recipe(ASYMMETRIC, INT8, "gptq", keep=False),
    "channel, rtn": Recipe(CHANNEL, INT8_CHANNEL, "rtn", keep=False),
    "channel, clip": Recipe(CHANNEL, INT8_CHANNEL, "clip", keep=False),
    "channel, gptq": Recipe(CHANNEL, INT8_CHANNEL, "gptq", keep=False),
    "channel, rotated, gptq": Recipe(CHANNEL, INT8_CHANNEL, "gptq", keep=False, rotation=0),
    "channel, gptq, 5.0 bits": Recipe(CHANNEL, INT8_CHANNEL, "gptq", keep=False, bits=5.0),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A recipe's result; `bits` a weight of its matrices as the scheme has them, `seconds` of the conversion without text."""

    recipe: str
    bits: float
    bytes: int
    seconds: float
    quality: Quality


@click.command()
@click.argument("model")
@click.option("--recipes", default=",".join(RECIPES).replace(", ", "/"), help="Names of the table, / for comma and space.")
@click.option("--tokens", default=20000, show_default=True, help="Held-out tokens.")
@click.option("--calibration-tokens", default=32768, show_default=True)
@click.option("--device", default="cpu-static", show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Where bundles are made, and kept.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), required=True, help="Rows found there are not made anew.")
def main(model: str, recipes: str, tokens: int, calibration_tokens: int, device: str, folder: Path, json_file: Path) -> None:
    """Convert MODEL by every recipe and judge each bundle on the same text, one after the other."""
    names = [name.replace("/", ", ") for name in recipes.split(",")]
    calibration = Calibration(tokens=calibration_tokens)
    checkpoint = open_checkpoint(model)
    folder.mkdir(parents=True, exist_ok=True)
    rows = read_rows(json_file)
    with Output(None).progress() as progress:
        checkpoint.save_tokenizer(folder)
        tokenizer, allowed = Tokenizer.in_folder(folder), token_count(folder / "tokenizer.json")
        read_calibration(calibration, writer_of(checkpoint, tokenizer, allowed, CONTEXT), progress)
        reference = load_quietly(checkpoint)
        for name in [name for name in names if name not in rows]:
            place = folder / name.replace(", ", "-").replace(" ", "-")
            request = Request(
                model,
                place,
                device=device,
                widths=(1,),
                context=CONTEXT,
                chunk=CONTEXT // 2,  # wide steps: their matrices are read from memory fewer times
                recipe=RECIPES[name],
                calibration=calibration,
                force=True,
            )
            start = time.perf_counter()
            convert(request, progress)
            seconds = time.perf_counter() - start
            engine = load(place)
            documents = read_judged(Judged(None, tokens), checkpoint, engine, progress)
            quality = measure_quality(reference, engine.target, documents, allowed, progress)
            rows[name] = Row(name, bits(engine), engine.bundle.role("target").stored_bytes, seconds, quality)
            found = {"peak_rss_bytes": peak_rss(), "rows": [asdict(row) for row in rows.values()]}
            json_file.write_text(json.dumps(found, indent=1))
    show([rows[name] for name in names])


def read_rows(json_file: Path) -> dict[str, Row]:
    """Results of an earlier run, by recipe."""
    if not json_file.exists():
        return {}
    found = json.loads(json_file.read_text())["rows"]
    return {row["recipe"]: Row(**row | {"quality": Quality(**row["quality"])}) for row in found}


def bits(engine: Engine) -> float:
    """Bits a weight of the target's matrices takes: codes, scales and what zero needs, as its scheme has them."""
    weights = engine.bundle.role("target").weights
    forms = {weight.name: Scheme.from_name(weight.scheme) if weight.method else weight.scheme for weight in weights}
    return mean_bits(forms, {weight.name: weight.shape for weight in weights})


def show(rows: Sequence[Row]) -> None:
    table = rich.table.Table("recipe", "bits", "minutes", "KL", "top-1", "top-5", "accepted", "perplexity")
    for row in rows:
        quality = row.quality
        numbers = (f"{row.bits:.2f}", f"{row.seconds / 60:.1f}", f"{quality.kl_mean:.4f}")
        shares = (
            f"{quality.top1_agreement:.1%}",
            f"{quality.top5_agreement:.1%}",
            f"{quality.overlap:.1%}",
            f"{quality.perplexity:.3f}",
        )
        table.add_row(row.recipe, *numbers, *shares)
    console = rich.console.Console()
    console.print(table)
    console.print(f"{rows[0].quality.tokens} held-out tokens; perplexity in float32 {rows[0].quality.reference_perplexity:.3f}")


if __name__ == "__main__":
    main()
