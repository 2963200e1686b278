"""What each way of rounding costs a model: KL, top-1, top-5 and perplexity on held-out text, bytes and minutes, side by side.

Usage: python benchmarks/quantisation.py MODEL [--recipes NAME,NAME ...] [--tokens N] [--folder DIR] [--json FILE]
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import rich.console
import rich.table

from specedge.export.calibration_text import Calibration
from specedge.export.checkpoint import load_quietly, open_checkpoint
from specedge.export.convert import convert
from specedge.export.quality import Judged, read_judged, reference_logits
from specedge.export.recipe import Recipe
from specedge.export.report import Meter, Quality
from specedge.export.request import Request
from specedge.export.sensitivity import mean_bits
from specedge.progress import Progress
from specedge.quant.scheme import Scheme
from specedge.runtime import Engine, load
from specedge.runtime.agreement import walk
from specedge.runtime.terminal import Output, peak_rss

BLOCK, ASYMMETRIC, CHANNEL = Scheme(4, 32), Scheme(4, 32, False), Scheme(4, None)
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
    """A recipe's result; `bits` a weight of its matrices as the scheme has them, `seconds` of the conversion."""

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
@click.option("--json", "json_file", type=click.Path(path_type=Path))
def main(
    model: str, recipes: str, tokens: int, calibration_tokens: int, device: str, folder: Path, json_file: Path | None
) -> None:
    """Convert MODEL by every recipe, then judge all bundles on the same text."""
    names = [name.replace("/", ", ") for name in recipes.split(",")]
    output = Output(None)
    seconds: dict[str, float] = {}
    with output.progress() as progress:
        engines: dict[str, Engine] = {}
        for name in names:
            start = time.perf_counter()
            calibration = Calibration(tokens=calibration_tokens)
            place = folder / name.replace(", ", "-").replace(" ", "-")
            request = Request(
                model, place, device=device, widths=(1,), recipe=RECIPES[name], calibration=calibration, force=True
            )
            convert(request, progress)
            seconds[name] = time.perf_counter() - start
            engines[name] = load(place)
        qualities = judge(model, engines, tokens, progress)
    rows = [
        Row(name, bits(engines[name]), engines[name].bundle.role("target").stored_bytes, seconds[name], qualities[name])
        for name in names
    ]
    show(rows)
    if json_file:
        json_file.write_text(json.dumps({"peak_rss_bytes": peak_rss(), "rows": [asdict(row) for row in rows]}, indent=1))


def judge(model: str, engines: dict[str, Engine], tokens: int, progress: Progress) -> dict[str, Quality]:
    """All bundles over the same documents; the reference reads each once."""
    checkpoint = open_checkpoint(model)
    first = next(iter(engines.values()))
    documents = read_judged(Judged(None, tokens), checkpoint, first, progress)
    reference, allowed = load_quietly(checkpoint), first.bundle.manifest.allowed_ids
    meters = {name: Meter() for name in engines}
    for done, document in enumerate(documents):
        progress("quality", done, len(documents))
        rows = range(document.prompt - 1, len(document.ids) - 1)
        truth = reference_logits(reference, document.ids, rows)[:, :allowed]
        for name, engine in engines.items():
            found = walk(engine.target, document.ids[:-1], engine.target.role.chunk)[rows.start :, :allowed]
            meters[name].add(truth, found, document.ids[document.prompt :])
    progress("quality", len(documents), len(documents))
    return {name: meter.quality() for name, meter in meters.items()}


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
