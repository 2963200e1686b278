"""The peer to measure against: onnxruntime-genai in an environment of its own, with a model its own builder made."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click

from specedge.cachedir import cache_dir
from specedge.errors import SpecedgeError
from specedge.folders import new_folder

RELEASE = "onnxruntime-genai==0.18.0"
_BUILDER_NEEDS = ("onnx", "onnx-ir", "torch", "transformers")  # at the versions of constraints.txt
_CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class Peer:
    """Where the peer lives: its Python and the folder of its model."""

    python: Path
    model: Path


def make() -> Peer:
    """The peer in the user's cache; what is finished there is reused, what was left half-made is made again.

    Raises:
        SpecedgeError: pip or the builder failed; what they said went to standard error.
    """
    home = cache_dir() / "peers" / RELEASE.replace("==", "-")
    environment, model = home / "venv", home / f"{_MODEL}-int4"
    if not environment.exists():
        with new_folder(environment, force=False) as partial:  # moves well: nothing but its python is ever called
            _run([sys.executable, "-m", "venv", str(partial)])
            _run([str(_python(partial)), "-m", "pip", "install", "-c", str(_CONSTRAINTS), RELEASE, *_BUILDER_NEEDS])
    if not model.exists():
        with new_folder(model, force=False) as partial, tempfile.TemporaryDirectory(dir=partial) as scratch:
            checkpoint, downloads = Path(scratch) / "checkpoint", Path(scratch) / "downloads"
            _write_checkpoint(checkpoint)
            options = ["-i", str(checkpoint), "-o", str(partial), "-c", str(downloads), "-p", "int4", "-e", "cpu"]
            options += ["--extra_options", "int4_accuracy_level=4"]  # its default on CPUs, said for the reader
            _run([str(_python(environment)), "-m", "onnxruntime_genai.models.builder", *options])
    return Peer(_python(environment), model)


def _python(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def _write_checkpoint(folder: Path) -> None:
    """The float32 reference that bundles are made from and held to, as a Hugging Face folder."""
    # Here: they load torch and transformers, which a finished peer does not need.
    from specedge.export.checkpoint import open_checkpoint
    from specedge.export.fetch import fetch

    checkpoint = open_checkpoint(str(fetch(_MODEL)))
    model = checkpoint.load_reference()
    del model.hf_quantizer  # transformers still calls the dequantised tensors a GGUF's and would not save them
    del model.config.quantization_config
    model.save_pretrained(folder)
    checkpoint.save_tokenizer(folder)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        click.echo(done.stdout, err=True)
        raise SpecedgeError(f"{' '.join(command)}: ended with {done.returncode}; what it said is above")


@click.command()
def main() -> None:
    """Install onnxruntime-genai into the user's cache, make its INT4 model of smollm2-135m there, print the model's path."""
    try:
        click.echo(make().model)
    except SpecedgeError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
