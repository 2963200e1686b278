"""The loop that trains a drafter: the same weights for a seed, whatever interrupts it."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specedge.errors import SpecedgeError
from specedge.export.batched import quick_type
from specedge.export.distil import Teacher
from specedge.export.lessons import Batch, Lessons, batches
from specedge.export.students import Student, loss_of

_WARM_UP = 0.03  # of the steps
_LEAST = 0.02  # of the learning rate, at the end
_CHECKS = 20  # validations in all
_JUDGED = 4096  # tokens of validation at once
_TIMED = 4  # steps that are tried to see how long one takes


@dataclass(frozen=True, slots=True)
class Schedule:
    """How much is trained: steps of about `rows` tokens each."""

    steps: int
    rows: int
    rate: float
    seed: int

    def rate_at(self, step: int) -> float:
        """A linear warm-up, then half a cosine."""
        warm = max(1, round(_WARM_UP * self.steps))
        if step < warm:
            return self.rate * (step + 1) / warm
        return self.rate * (_LEAST + (1 - _LEAST) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm))))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What rounds accept of greedy texts: as they would run, since an accepted draft is the text's own token."""

    by_position: tuple[float, ...]
    """Of drafts at this place whose predecessors were all right."""
    rounds: int

    @property
    def tokens_per_round(self) -> float:
        """1 + the mean number of drafts that a round accepts."""
        return 1.0 + sum(math.prod(self.by_position[: place + 1]) for place in range(len(self.by_position)))


@dataclass(frozen=True, slots=True)
class Record:
    """What was seen after some steps."""

    step: int
    seconds: float
    loss: float
    acceptance: Acceptance


def rounds_of(right: npt.NDArray[np.bool_], start: int, end: int) -> npt.NDArray[np.int64]:
    """How many rounds accepted 0, 1 ... gamma drafts of a text whose tokens `start` to `end` (exclusive) are emitted.

    `right` [gamma, T]: whether the token at a place is what is drafted there so many places ahead. Rounds that the end of the
    text cuts short are left out.
    """
    gamma = len(right)
    lengths = np.zeros(gamma + 1, np.int64)
    while start + gamma < end:
        missed = [ahead for ahead in range(gamma) if not right[ahead, start + ahead]]
        accepted = missed[0] if missed else gamma
        lengths[accepted] += 1
        start += accepted + 1
    return lengths


class Trainer:
    """Trains a student on lessons; its state lies in `state`, a file that is replaced whole, until the training is over."""

    def __init__(
        self,
        student: Student,
        teacher: Teacher,
        lessons: Lessons,
        device: torch.device,
        gamma: int,
        state: Path,
    ) -> None:
        self._student, self._teacher, self._lessons, self._device = student, teacher, lessons, device
        self._train, self._held = lessons.split()
        if not self._train:
            raise SpecedgeError("data: no text is left to train on; give more of it")
        self._gamma, self._state, self._quick = gamma, state, quick_type(device)
        student.module.to(device)
        self._learns = [parameter for parameter in student.module.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._learns, betas=(0.9, 0.95), weight_decay=0.0)
        self.records: list[Record] = []
        self._losses: list[float] = []  # since the last record

    def time_step(self, rows: int) -> float:
        """Seconds that a step takes; nothing is learnt."""
        times = []
        for together in batches(self._lessons, self._train, rows, 0)[:_TIMED]:
            start = time.perf_counter()
            self._loss(together).backward()
            times.append(time.perf_counter() - start)
        for parameter in self._learns:
            parameter.grad = None
        return float(np.median(times))

    def run(self, schedule: Callable[[], Schedule], every: float, told: Callable[[int, int], None]) -> Schedule:
        """Train to the end of a schedule, which is asked for once; where a broken run left off, if there is one.

        `every` is how many seconds may be lost. `told` hears how many steps are done, of how many.
        """
        plan, done = self._resume() or (schedule(), 0)
        if not done:
            self._save(plan, 0)
        losses = self._losses
        told(done, plan.steps)
        start = saved = time.perf_counter()
        before = self.records[-1].seconds if self.records else 0.0
        checks = {round(plan.steps * part / _CHECKS) for part in range(1, _CHECKS + 1)}
        for step, together in enumerate(self._order(plan, done), done):
            loss = self._step(together, plan.rate_at(step))
            losses.append(loss)
            if step + 1 in checks:
                seconds = before + time.perf_counter() - start
                self.records.append(Record(step + 1, seconds, float(np.mean(losses)), self.validate()))
                losses.clear()
            if step + 1 in checks or time.perf_counter() - saved > every:
                self._save(plan, step + 1)
                saved = time.perf_counter()
            told(step + 1, plan.steps)
        if not self.records:
            self.records.append(Record(0, 0.0, math.nan, self.validate()))
        return plan

    def _order(self, plan: Schedule, done: int) -> Iterator[list[int]]:
        """The batches of the steps from `done` on."""
        step = epoch = 0
        while step < plan.steps:
            for together in batches(self._lessons, self._train, plan.rows, (plan.seed << 20) + epoch):
                if done <= step < plan.steps:
                    yield together
                step += 1
            epoch += 1

    def _step(self, together: Sequence[int], rate: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss = self._loss(together)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._learns, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise SpecedgeError(f"training: the loss is {value}; use a lower --rate")
        return value

    def _loss(self, together: Sequence[int]) -> Tensor:
        batch = self._lessons.batch(together, self._device)
        return loss_of(self._student, batch, self._teacher, self._quick)

    @torch.no_grad()
    def validate(self) -> Acceptance:
        """On the greedy texts that were held back: rounds of `gamma` drafts from the beginning of each answer to its end."""
        lengths = np.zeros(self._gamma + 1, np.int64)  # of accepted beginnings
        greedy = [index for index in self._held if self._lessons.documents[index].greedy]
        for together in batches(self._lessons, greedy, _JUDGED, 0) if greedy else []:
            batch = self._lessons.batch(together, self._device)
            hits = self._hits(batch).cpu().numpy()
            for right, answers in zip(hits.swapaxes(0, 1), batch.answers.cpu().numpy(), strict=True):
                lengths += rounds_of(right, *(np.flatnonzero(answers)[[0, -1]] + 1))
        reached = lengths[::-1].cumsum()[::-1]
        shares = reached[1:] / np.maximum(reached[:-1], 1)
        return Acceptance(tuple(shares.tolist()), int(lengths.sum()))

    def _hits(self, batch: Batch) -> Tensor:
        """[gamma, B, T] whether the token at each place is what is drafted there so many places ahead."""
        drafts, head = self._student.draft(batch), self._student.head()
        hits = torch.zeros(len(drafts), *batch.ids.shape, dtype=torch.bool, device=self._device)
        for ahead, drafted in enumerate(drafts):
            best = torch.cat([(rows @ head.T).argmax(-1) for rows in drafted.x.split(_JUDGED)])
            hits[ahead, *drafted.places] = self._teacher.ids[best] == batch.ids[drafted.places]
        return hits[[min(ahead, len(drafts) - 1) for ahead in range(self._gamma)]]

    def _resume(self) -> tuple[Schedule, int] | None:
        if not self._state.is_file():
            return None
        try:
            found: dict[str, Any] = torch.load(self._state, map_location="cpu", weights_only=True)
            self._student.module.load_state_dict(found["module"], strict=False)
            self._optimizer.load_state_dict(found["optimizer"])
            self.records = [
                Record(**(record | {"acceptance": Acceptance(**record["acceptance"])})) for record in found["records"]
            ]
            self._losses = found["losses"]
            return Schedule(**found["schedule"]), found["done"]
        except Exception as error:
            raise SpecedgeError(f"{self._state}: cannot be read ({error}); delete it to begin anew") from error

    def _save(self, schedule: Schedule, done: int) -> None:
        learnt = {name: value.detach().cpu() for name, value in self._student.module.named_parameters() if value.requires_grad}
        self._state.parent.mkdir(parents=True, exist_ok=True)
        partial = self._state.with_suffix(f".{os.getpid()}.partial")
        state = {
            "module": learnt,
            "optimizer": self._optimizer.state_dict(),
            "schedule": asdict(schedule),
            "records": [asdict(record) for record in self.records],
            "losses": self._losses,
            "done": done,
        }
        torch.save(state, partial)
        os.replace(partial, self._state)
