"""The decoder over many texts at once: how text is written and hidden states are read on the machine that trains."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from specedge.export.decoder import KV, Block, Linear, RMSNorm, Step, delta_step
from specedge.export.families import DecoderConfig
from specedge.export.streams import load_block

Floats = npt.NDArray[np.float32]
_MASKED = -30000.0


def quick_type(device: torch.device) -> torch.dtype:
    """What matrices are multiplied in: bfloat16 where the processor has it, several times as fast."""
    has = torch.cpu.get_capabilities()
    return torch.bfloat16 if device.type != "cpu" or has.get("amx_bf16") or has.get("avx512_bf16") else torch.float32


class BatchedDecoder:
    """A target with the tensors that `tensor` gives by their canonical names, in the delta form.

    Matrices are multiplied in `quick_type`, everything else is float32.
    """

    def __init__(self, config: DecoderConfig, tensor: Callable[[str], Floats], device: torch.device) -> None:
        self.config, self.device, self._quick = config, device, quick_type(device)
        self._blocks = [self._load(layer, tensor) for layer in range(config.layers)]
        self._embedding = torch.from_numpy(tensor("embed_tokens.weight")).to(device)
        self._norm = RMSNorm(config.hidden, config.rms_eps, torch.float32).requires_grad_(False)
        self._norm.weight.copy_(torch.from_numpy(tensor("norm.weight")))
        self._norm.to(device)
        head = self._embedding if config.tied else torch.from_numpy(tensor("lm_head.weight"))
        self._head = head.to(device)
        self._frequencies = torch.tensor(config.inv_freq, device=device)

    def _load(self, layer: int, tensor: Callable[[str], Floats]) -> Block:
        block = load_block(self.config, layer, tensor)
        for module in block.modules():
            if isinstance(module, Linear):
                module.weight.data, module.compute = module.weight.data.to(self._quick), self._quick
        return block.to(self.device)

    def new_cache(self, batch: int, slots: int) -> list[KV]:
        """KV buffers of so many texts, [B, K, slots, D] each."""
        shape = batch, self.config.kv_heads, slots, self.config.head_dim
        return [(torch.zeros(shape, device=self.device), torch.zeros(shape, device=self.device)) for _ in self._blocks]

    @torch.no_grad()
    def read(self, ids: Tensor) -> list[Tensor]:
        """The residual streams [B, T, H] of whole texts: entering each block, after the last, and after the final norm.

        Shorter texts are filled up behind their end.
        """
        rows = ids.shape[1]
        bias = torch.full((1, 1, rows, rows), _MASKED, device=self.device).triu(1)
        cos, sin = self._rope(torch.arange(rows, device=self.device)[None])
        nothing = torch.zeros(len(ids), self.config.kv_heads, 0, self.config.head_dim, device=self.device)
        step = delta_step(Step(cos, sin, bias), self.config)
        streams = self._run(ids, step, [(nothing, nothing)] * len(self._blocks))
        return [*streams, self._norm(streams[-1])]

    @torch.no_grad()
    def extend(self, ids: Tensor, seen: Tensor, cache: list[KV]) -> Tensor:
        """Feed the newest `ids` [B, T] of texts that are `seen` [B, L + T] but for their padding; hidden [B, H] of the last."""
        rows, length = ids.shape[1], seen.shape[1]
        positions = (seen.long().cumsum(1) - 1).clamp(min=0)[:, -rows:]
        cos, sin = self._rope(positions)
        visible = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()[-rows:] & seen[:, None].bool()
        own = torch.eye(length, dtype=torch.bool, device=self.device)[-rows:]  # padding too sees at least itself
        bias = torch.where(visible | own, 0.0, _MASKED)[:, None]

        def attend(query: Tensor, past: KV, new: KV, bias: Tensor) -> Tensor:
            for buffer, columns in zip(past, new, strict=True):
                buffer[:, :, length - rows : length] = columns
            keys, values = (buffer[:, :, :length] for buffer in past)
            return torch.softmax(query @ keys.transpose(2, 3) + bias, -1) @ values

        step = delta_step(Step(cos, sin, bias, attend=attend), self.config)
        hidden: Tensor = self._norm(self._run(ids, step, cache)[-1][:, -1])
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the whole vocabulary; in float32, as bfloat16 makes ties of near-ties."""
        return F.linear(hidden, self._head)

    def _run(self, ids: Tensor, step: Step, past: Sequence[KV]) -> list[Tensor]:
        streams = [self._embedding[ids]]
        for block, columns in zip(self._blocks, past, strict=True):
            streams.append(block(streams[-1], step, columns)[0])
        return streams

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, :, None] * self._frequencies
        return angles.cos() * self.config.rope_scaling, angles.sin() * self.config.rope_scaling
