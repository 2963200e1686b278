"""Every test runs offline, on one thread, with a cache of its own."""

import os
from collections.abc import Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported, which reads it once
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

torch.set_num_threads(1)  # the models are tiny: threads only cost, and pytest-xdist has the cores


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECEDGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
