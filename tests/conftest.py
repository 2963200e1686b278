"""Every test runs offline, on one thread, with a cache of its own; a graph is traced once per run."""

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from bundles import Models
    from eagles import Chains

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported, which reads it once
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

torch.set_num_threads(1)  # the models are tiny: threads only cost, and pytest-xdist has the cores


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECEDGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> "Models":
    from bundles import Models  # imports the exporter, which not every run needs

    return Models(tmp_path_factory)


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> "Chains":
    from eagles import Chains

    return Chains(tmp_path_factory.mktemp("chains"))


@pytest.fixture(scope="session", autouse=True)
def shared_traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one worker of pytest-xdist has traced, the others read: tracing is most of what the tests cost."""
    exporter = sys.modules.get("specedge.export.to_onnx")  # absent where no test of the run converts: it is slow to import
    if exporter is None:
        yield
        return
    worker = "PYTEST_XDIST_WORKER" in os.environ
    folder = (tmp_path_factory.getbasetemp().parent if worker else tmp_path_factory.getbasetemp()) / "traces"
    folder.mkdir(exist_ok=True)  # new in every run, so that a change of the exporter shows
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_trace_in_place", "_trace_delta", "_trace_eagle", "_trace_medusa"):
            patch.setattr(exporter, name, functools.cache(shared(getattr(exporter, name), folder)))
        yield


def shared(trace: Callable[..., bytes], folder: Path) -> Callable[..., bytes]:
    @functools.wraps(trace)
    def found(*arguments: object) -> bytes:
        key = hashlib.sha256(repr((trace.__name__, arguments)).encode()).hexdigest()  # records of numbers and names
        path = folder / key
        if not path.exists():
            unfinished = folder / f"{key}.{os.getpid()}"
            unfinished.write_bytes(trace(*arguments))
            unfinished.rename(path)
        return path.read_bytes()

    return found
