"""What minima cost: steps of an asymmetric INT4 model that is computed by block sums, over those of a symmetric one.

Usage: python benchmarks/block_sums.py MODEL [--device ROW ...] [--json FILE]
"""

import json
import tempfile
import time
from pathlib import Path
from statistics import median

import click
import numpy as np
import rich.console
import rich.table

from specedge.devices.table import get_device
from specedge.export.convert import convert
from specedge.export.recipe import Recipe
from specedge.export.request import Request
from specedge.quant.scheme import Scheme
from specedge.runtime import load
from specedge.runtime.probe import find_provider
from specedge.runtime.sequence import Sequence

PAST, WARM_UP, STEPS, TURNS = 128, 3, 20, 7


@click.command()
@click.argument("model")
@click.option("--device", "devices", multiple=True, default=("cpu", "cpu-static"), show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path))
def main(model: str, devices: tuple[str, ...], json_file: Path | None) -> None:
    """MODEL is one whose INT4 grids have minima, such as a Q4_1 GGUF; the symmetric one has blocks of 32 likewise."""
    table = rich.table.Table("device", "width", "symmetric", "block sums", "ratio", "bytes")
    results = []
    for device in devices:
        if find_provider(get_device(device)).emulated:
            raise click.UsageError(f"{device} is emulated here: its times say nothing")
        with tempfile.TemporaryDirectory() as folder:
            recipes = {"symmetric": Recipe(Scheme(4, 32), Scheme(8, 32), "clip", keep=False), "block sums": Recipe()}
            sequences = {}
            for name, recipe in recipes.items():
                place = Path(folder) / name
                convert(Request(model, place, device=device, widths=(1, 5), recipe=recipe))
                sequences[name] = load(place).target
            sizes = [sequence.role.stored_bytes for sequence in sequences.values()]
            for width in (1, 5):
                plain, sums = interleaved(list(sequences.values()), width)
                result = {"device": device, "width": width, "symmetric_ms": plain, "block_sums_ms": sums, "bytes": sizes}
                results.append(result)
                table.add_row(
                    device, str(width), f"{plain:.2f} ms", f"{sums:.2f} ms", f"{sums / plain:.3f}", f"{sizes[1] / sizes[0]:.3f}"
                )
    rich.console.Console().print(table)
    if json_file:
        json_file.write_text(json.dumps(results, indent=1))


def interleaved(sequences: list[Sequence], width: int) -> list[float]:
    """Medians over turns of the mean time of a step, in milliseconds; the models take turns in blocks of steps."""
    times: list[list[float]] = [[] for _ in sequences]
    ids = [int(token) for token in np.random.default_rng(0).integers(100, 1000, PAST + width)]
    for _ in range(TURNS):
        for sequence, found in zip(sequences, times, strict=True):
            sequence.truncate(0)
            sequence.prefill(ids[:PAST])
            for _ in range(WARM_UP):
                sequence.step(ids[PAST:])
            start = time.perf_counter()
            for _ in range(STEPS):
                sequence.step(ids[PAST:])
            found.append((time.perf_counter() - start) / STEPS * 1000)
    return [median(found) for found in times]


if __name__ == "__main__":
    main()
