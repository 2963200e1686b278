"""A decoder run block by block over calibration text: what each of its linear layers reads."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specedge.export.decoder import Block, Step, delta_step
from specedge.export.families import DecoderConfig
from specedge.quant.rotate import Rotation

Floats = npt.NDArray[np.float32]

STAGES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The linear layers of a block in the order they run: those of a stage read the same."""
_TOGETHER = 8  # documents whose rows are handed out at once
_MASKED = -30000.0


def load_block(config: DecoderConfig, layer: int, tensor: Callable[[str], Floats]) -> Block:
    """A block of the decoder with its tensors, which `tensor` gives by their canonical names."""
    with torch.device("meta"):
        block = Block(config, "delta", torch.float32).eval().requires_grad_(False)
    state = {name: torch.from_numpy(tensor(f"layers.{layer}.{name}")) for name in block.state_dict()}
    block.load_state_dict(state, assign=True)
    return block


def set_weight(block: Block, name: str, weight: Floats) -> None:
    """Give a linear layer of a block another weight, by its canonical name."""
    _, _, module = name.removesuffix(".weight").split(".", 2)
    layer = block.get_submodule(module)
    layer.weight = torch.nn.Parameter(torch.from_numpy(weight), requires_grad=False)


def run_block(stream: "Stream", block: Block) -> None:
    """Run all stages of a block."""
    for stage in range(len(STAGES)):
        stream.run(block, stage)


def turned(config: DecoderConfig, tensor: Callable[[str], Floats], rows: Floats, back: bool = False) -> Floats:
    """Rows of the residual stream in the basis of the layers' weights, or `back` in the model's own."""
    if config.rotation is None:
        return rows
    rotation = Rotation(*(tensor(f"rotation.{part}") for part in ("signs", "left", "right")))
    return rotation.turn_back(rows) if back else rotation.turn(rows)


@dataclass(frozen=True, slots=True)
class _Document:
    rows: slice
    step: Step


class Stream:
    """The hidden states of documents: what enters a block, and while its stages run, what has left the earlier ones.

    Memory is (H + N D) float32 a token, a mask [G T, T] for every length T of a document, and what `_TOGETHER` documents take
    inside a stage.
    """

    def __init__(self, config: DecoderConfig, documents: Sequence[Sequence[int]], tensor: Callable[[str], Floats]) -> None:
        self._documents = list(_place(config, documents))
        ids = [token for document in documents for token in document]
        self._past = (torch.empty(1, config.kv_heads, 0, config.head_dim),) * 2
        self.hidden = torch.from_numpy(turned(config, tensor, tensor("embed_tokens.weight")[ids]))  # [tokens, H]
        self._mixed = torch.empty(len(ids), config.heads * config.head_dim)

    def fork(self, apart: bool) -> "Stream":
        """Another one that is where this is; not while a block's stages run.

        Unless they stand `apart`, only one of them may be inside a block at a time.
        """
        other = copy.copy(self)
        other.hidden = self.hidden.clone()
        if apart:
            other._mixed = torch.empty_like(self._mixed)
        return other

    @torch.no_grad()
    def inputs(self, block: Block, stage: int) -> Iterator[Tensor]:
        """What the linear layers of a stage read, [rows, K] at a time."""
        for start in range(0, len(self._documents), _TOGETHER):
            together = self._documents[start : start + _TOGETHER]
            yield self._input(block, stage, slice(together[0].rows.start, together[-1].rows.stop))

    @torch.no_grad()
    def run(self, block: Block, stage: int) -> None:
        """Go on behind a stage, whose linear layers are in place."""
        for document in self._documents:
            rows = document.rows
            match stage:
                case 0:
                    mixed, _ = block.self_attn.mix(self._input(block, stage, rows)[None], document.step, self._past)
                    self._mixed[rows] = mixed[0]
                case 1:
                    self.hidden[rows] += block.self_attn.o_proj(self._mixed[rows])
                case 3:
                    self.hidden[rows] += block.mlp.down_proj(self._input(block, stage, rows))

    def _input(self, block: Block, stage: int, rows: slice) -> Tensor:
        found: Tensor
        match stage:
            case 0:
                found = block.input_layernorm(self.hidden[rows])
            case 1:
                found = self._mixed[rows]
            case 2:
                found = block.post_attention_layernorm(self.hidden[rows])
            case _:
                found = block.mlp.gate(block.post_attention_layernorm(self.hidden[rows]))
        return found


def _place(config: DecoderConfig, documents: Sequence[Sequence[int]]) -> Iterator[_Document]:
    """Rows of every document, and the step that reads it whole; documents of one length share one."""
    steps: dict[int, Step] = {}
    ends = np.cumsum([0, *map(len, documents)]).tolist()
    for start, end in pairwise(ends):
        length = end - start
        if length not in steps:
            angles = torch.outer(torch.arange(length, dtype=torch.float32), torch.tensor(config.inv_freq))
            cos, sin = (table[None, None] * config.rope_scaling for table in (angles.cos(), angles.sin()))
            bias = torch.full((1, 1, length, length), _MASKED).triu(1)
            steps[length] = delta_step(Step(cos, sin, bias), config)
        yield _Document(slice(start, end), steps[length])
