"""The loss that drafters are trained by: cross-entropy against the target's own distribution over the draft vocabulary."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 256  # of logits at once: what they take stays in the processor's cache


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's LM head, its rows of the draft vocabulary only; `ids` [Vd] are theirs, ascending."""

    head: Tensor  # [Vd, H]
    ids: Tensor

    def laws(self, hidden: Tensor) -> Tensor:
        """The target's distribution [n, Vd] behind rows that feed its LM head, given that the token is one of `ids`.

        In float16: there are as many as a batch has rows. The logits are float32: bfloat16 would make ties of near-ties.
        """
        pieces = [torch.softmax(F.linear(rows, self.head), -1).to(torch.float16) for rows in hidden.split(_ROWS)]
        return torch.cat(pieces)


def distil(x: Tensor, head: Tensor, laws: Tensor, rows: Tensor, quick: torch.dtype) -> Tensor:
    """Mean cross-entropy of softmax(x head^T), x [n, H], against `laws[rows]`; matrices are multiplied in `quick`."""
    loss: Tensor = _Distil.apply(x, head, laws, rows, quick)  # type: ignore[no-untyped-call]  # torch's own
    return loss


class _Distil(torch.autograd.Function):
    """Some rows at a time, gradients with the loss: logits [n, Vd] are never held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, laws: Tensor, rows: Tensor, quick: torch.dtype) -> Tensor:
        weight = head.detach().to(quick)
        x_grad, head_grad = torch.empty_like(x), torch.zeros_like(head) if head.requires_grad else None
        loss = x.new_zeros(())
        for start in range(0, len(x), _ROWS):
            part = slice(start, start + _ROWS)
            given, wanted = x[part].detach().to(quick), laws[rows[part]].float()
            guess = torch.log_softmax(F.linear(given, weight).float(), -1)
            loss -= (wanted * guess).sum()
            slope = guess.exp_().sub_(wanted).to(quick)
            x_grad[part] = (slope @ weight).to(x.dtype)
            if head_grad is not None:
                head_grad += (slope.T @ given).to(head_grad.dtype)
        ctx.save_for_backward(x_grad / len(x), head_grad if head_grad is None else head_grad / len(x))
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, head_grad = ctx.saved_tensors
        return x_grad * grads[0], None if head_grad is None else head_grad * grads[0], None, None, None
