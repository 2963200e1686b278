"""A damaged safetensors file is named with its size and the likely cause, before any tensor is read."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
from checkpoints import WEIGHTS, refuse


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """F-RAND, fp32, one file."""
    tiny.f_rand(tmp_path / "model")
    return tmp_path / "model"


def overlap(content: bytes) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    one, other = [name for name in header if name.endswith("layernorm.weight")][:2]
    header[other]["data_offsets"] = header[one]["data_offsets"]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


@pytest.mark.parametrize(
    ("damage", "cause"),
    [  # B55
        (lambda content: content[: len(content) // 2], "interrupted download"),
        (lambda content: content[:100], "interrupted download"),
        (lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (lambda content: b"", "too short"),
        (lambda content: b"\0", "too short"),
        (lambda content: struct.pack("<Q", 2**63) + content[8:], "no safetensors header"),
        (lambda content: content + b"0123456789", "10 bytes after the last tensor"),
        (overlap, "overlaps"),
        (lambda content: b"<!DOCTYPE html><html>not found</html>", "another kind of file"),
        (lambda content: content[:8] + content[8:].replace(b'"shape"', b'"sharp"', 1), "header is not valid"),
        (lambda content: content.replace(b'"F32"', b'"I32"', 1), "dtype I32 is not supported"),
        (lambda content: content.replace(b'"shape":[128,64]', b'"shape":[128,32]', 1), "takes 16384 bytes"),
    ],
)
def test_a_damaged_file_is_named_with_its_likely_cause(folder: Path, damage: Callable[[bytes], bytes], cause: str):
    path = folder / WEIGHTS
    content = damage(path.read_bytes())
    path.write_bytes(content)
    size = () if "dtype" in cause or "takes" in cause else (f"{len(content)} bytes",)
    refuse(folder, str(path), cause, *size)
