"""Compiles the graphs of one role in a process of its own: what a provider shares between sessions ends with it.

    python -m specedge.runtime.compiler DEVICE SOC < {"graph.onnx": "context.onnx", ...}

A line of JSON for every graph that is done, or one with the error.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from specedge.devices.device import Device
from specedge.devices.table import get_device
from specedge.errors import SpecedgeError
from specedge.runtime.probe import find_provider
from specedge.runtime.session import write_contexts


def compile_graphs(paths: Mapping[Path, Path], device: Device, soc: str) -> Iterator[None]:
    """Compile graphs into the files they are mapped to, with one file of weights beside the first; a step for each.

    Raises:
        SpecedgeError: One cannot be compiled, or not as a whole.
    """
    asked = json.dumps({str(source): str(context) for source, context in paths.items()})
    command = [sys.executable, "-m", "specedge.runtime.compiler", device.name, soc]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdin and child.stdout and child.stderr
        child.stdin.write(asked)
        child.stdin.close()
        for line in child.stdout:
            if line.startswith("{"):  # the rest is what libraries print
                if error := json.loads(line).get("error"):
                    raise SpecedgeError(error)
                yield
        said = child.stderr.read().strip().splitlines()
    if child.returncode:
        why = said[-1] if said else f"exit code {child.returncode}"
        raise SpecedgeError(f"device {device.name!r}: the compiler ended without a result ({why:.300})")


def main() -> None:
    device, soc = sys.argv[1:]
    paths = {Path(source): Path(context) for source, context in json.load(sys.stdin).items()}
    try:
        for path in write_contexts(paths, find_provider(get_device(device), soc)):
            print(json.dumps({"done": str(path)}), flush=True)
    except SpecedgeError as error:
        print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
