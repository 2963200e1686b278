"""The commands about devices: which there are, and compiling for one."""

from dataclasses import asdict
from pathlib import Path

import click
import rich.table

from specedge.bundle import open_bundle
from specedge.devices.device import Device
from specedge.devices.table import DEVICES, get_device
from specedge.runtime.cli_options import BUNDLE
from specedge.runtime.compiled import compile_bundle
from specedge.runtime.probe import Provider, probe
from specedge.runtime.terminal import Command, Output, json_option, size


@click.command("devices", cls=Command)
@click.option("--markdown", is_flag=True, help="Print what is true of every machine, as the table of the README.")
@json_option
def devices_command(markdown: bool, json_file: str | None) -> None:
    """Which rows of the device table this machine can run, and why not the others."""
    if markdown:
        click.echo(markdown_table())
        return
    output = Output(json_file)
    rows = {name: describe(device, probe(device)) for name, device in DEVICES.items()}
    table = rich.table.Table("row", "here", "provider", "version", "graph", "INT4", "widths", "can be verified here")
    for name, row in rows.items():
        here = "yes" if row["available"] else f"no: {row['reason']}"
        widths = ", ".join(map(str, DEVICES[name].default_widths))
        cells = (row["provider"], row["version"] or "-", row["graph"], row["int4"], widths, row["verifiable"])
        table.add_row(name, f"emulated: {row['emulated']}" if row["emulated"] else here, *map(str, cells))
    output.console.print(table)
    output.json(rows)


def markdown_table() -> str:
    """The rows as the README shows them: what does not depend on the machine."""
    lines = ["| row | provider | graph | INT4 | widths | verified how |", "|---|---|---|---|---|---|"]
    for name, device in DEVICES.items():
        own = device.plugin or device.catalog
        extra = own.extra if own else "coreml" if device.package else None
        needs = f" (`pip install '.[{extra}]'`)" if extra else ""
        widths = ", ".join(map(str, device.default_widths))
        cells = (f"`{name}`", device.provider + needs, device.graph, device.int4, widths, device.verified)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def describe(device: Device, found: Provider | str) -> dict[str, object]:
    """The keys of the JSON contract (docs/contract.md) for one row; `emulated` says what is, if anything."""
    provider = None if isinstance(found, str) else found
    emulated = provider.soc.name if provider and provider.soc else "op by op" if provider and provider.evaluated else None
    return {
        "available": provider is not None,
        "reason": found if isinstance(found, str) else None,
        "provider": device.provider,
        "version": provider.version if provider else None,
        "hardware": provider.hardware if provider else None,
        "form": device.form,
        "graph": device.graph,
        "int4": device.int4,
        "widths": list(device.default_widths),
        "emulated": emulated,
        "verifiable": _verifiable(device, provider),
        "verified_by": device.verified,
    }


def _verifiable(device: Device, provider: Provider | None) -> str:
    """What of a row this machine can verify."""
    if provider:
        return "numbers" if provider.emulated else "numbers and times"
    return "structure" if device.package else "structure, and numbers of its graphs on the CPU"


@click.command("compile", cls=Command)
@BUNDLE
@click.option("--device", required=True, help="Row of the device table.")
@click.option("--soc", help="What to compile for, by its name (default: the first that the row knows).")
@json_option
def compile_command(bundle: Path, device: str, soc: str | None, json_file: str | None) -> None:
    """Compile the graphs of a BUNDLE ahead of time for an NPU; what is there and fresh stays as it is."""
    output = Output(json_file)
    row = get_device(device)
    with output.progress() as progress:
        compiled = compile_bundle(open_bundle(bundle), row, soc, progress)
    key = compiled.key
    place = f"{bundle}/compiled/{key.device}/{key.soc}"
    total = sum(file.bytes for file in compiled.files.values())
    output.console.print(f"{place}: {len(compiled.graphs)} graphs, {size(total)}, {row.provider} {key.provider} on {key.sdk}")
    output.json(asdict(compiled) | {"bytes": total})
