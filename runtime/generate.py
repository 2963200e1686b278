"""Text in, text out: an engine over a bundle, its requests and their results."""

import operator
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specedge.bundle import Bundle, open_bundle
from specedge.devices.device import Device
from specedge.devices.table import get_device
from specedge.errors import SpecedgeError, UsageError
from specedge.runtime import accept
from specedge.runtime.control import Adaptive, Control, Fixed
from specedge.runtime.decode import Round, decode, prefill
from specedge.runtime.drafters import Drafter, DraftModel, LookupDrafter, NoDrafter
from specedge.runtime.model import Model
from specedge.runtime.results import FinishReason, Result, Stats, Token
from specedge.runtime.sample import Sampling
from specedge.runtime.text import Prompt, TextStream, Tokenizer

_DRAFTERS = ("draft", "lookup")


class Engine:
    """A bundle opened on a device. One request at a time: a second one while it runs is refused."""

    def __init__(
        self,
        bundle: Bundle,
        device: Device,
        draft_device: Device,
        drafter: str | None,
        threads: int | None,
        prepare: bool | None = None,
    ) -> None:
        manifest = bundle.manifest
        self.bundle = bundle
        self.device = device
        self.drafter_name = drafter or manifest.drafters[0]
        if self.drafter_name not in manifest.drafters:
            raise SpecedgeError(f"{bundle.path}: no drafter {drafter!r}; it holds {', '.join(manifest.drafters)}")
        if self.drafter_name not in _DRAFTERS:
            raise SpecedgeError(f"{bundle.path}: drafter {self.drafter_name!r}: this version runs {', '.join(_DRAFTERS)}")
        self.tokenizer = Tokenizer(bundle) if "tokenizer.json" in manifest.files else None
        models = [Model(bundle, "target", device, threads, prepare)]
        if self.drafter_name == "draft":
            models.append(Model(bundle, "draft", draft_device, threads, prepare))
        self.weight_files = sorted(set().union(*(model.weight_files for model in models)))
        self.target = models[0].sequence()
        self._draft = models[1].sequence() if models[1:] else None
        self._busy = threading.Lock()

    @property
    def graph_seconds(self) -> float:
        """Time spent inside the graphs of target and draft so far."""
        return self.target.graph_seconds + (self._draft.graph_seconds if self._draft else 0.0)

    @property
    def context(self) -> int:
        return self.bundle.manifest.context

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        gamma: int | None = None,
        speculate: bool = True,
    ) -> "Stream":
        """Tokens as they are accepted: an iterator with the result so far; `close` ends the request.

        Raises:
            SpecedgeError: The prompt does not fit the context, is empty or holds ids outside the vocabulary.
        """
        return Stream(_Request(self, prompt, sampling or Sampling(), max_new_tokens, stop, gamma, speculate))

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        gamma: int | None = None,
        speculate: bool = True,
    ) -> Result:
        """The whole answer. `gamma=None` lets control decide, an int drafts exactly that many whenever room allows.

        Raises:
            SpecedgeError: As `stream`.
        """
        stream = self.stream(prompt, sampling, max_new_tokens, stop, gamma, speculate)
        for _ in stream:
            pass
        return stream.result()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt in any of its three forms, checked."""
        ids = self._ids(prompt)
        if not ids:
            if self.bundle.manifest.bos_id is None:
                raise SpecedgeError("prompt: empty, and the model has no BOS token to start from; give at least one token")
            ids = [self.bundle.manifest.bos_id]
        allowed = self.bundle.manifest.allowed_ids  # rows beyond are padding, which a draft may lack
        for index, token in enumerate(ids):
            if not 0 <= token < allowed:
                raise SpecedgeError(f"prompt: id {token} at index {index}, expected 0..{allowed - 1}")
        if len(ids) >= self.context:
            raise SpecedgeError(
                f"prompt: {len(ids)} tokens leave no room in a context of {self.context}; shorten it or convert with a "
                f"larger --context"
            )
        return ids

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._need_tokenizer("text").encode(prompt) if prompt else []
        items: list[Any] = list(prompt)  # also what can be read only once
        if items and all(isinstance(item, Mapping) for item in items):
            return self._need_tokenizer("chat messages").encode_chat(items)
        return [operator.index(item) for item in items]

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise SpecedgeError(f"prompt: {what}, but {self.bundle.path} has no tokenizer; pass token ids")
        return self.tokenizer

    def new_drafter(self, sampling: Sampling, speculate: bool = True) -> Drafter:
        """The drafter of one request."""
        if not speculate:
            return NoDrafter()
        if self._draft is not None:
            return DraftModel(self._draft, sampling, self.bundle.manifest.allowed_ids)
        return LookupDrafter(self.context)

    def new_control(self, gamma: int | None) -> Control:
        """Who chooses gamma in one request."""
        widest = self.target.widest
        if gamma is not None:
            if not 0 <= gamma < widest:
                raise UsageError(f"gamma {gamma}: expected 0..{widest - 1}, the drafts this bundle can verify; or convert anew")
            return Fixed(gamma)
        return Adaptive(self._step_cost, self._draft_cost(), max(self.bundle.manifest.widths))

    def _step_cost(self, width: int) -> float:
        """Time of a step over one of width 1; static graphs are padded to the next width there is."""
        widths = [graph.width for graph in self.target.role.graphs if graph.width is not None and graph.width >= width]
        return self.device.cost(min(widths, default=width))

    def _draft_cost(self) -> float:
        if self._draft is None:
            return 0.0
        return self._draft.role.stored_bytes / self.target.role.stored_bytes

    def acquire(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise SpecedgeError("engine: busy with another request; finish or close its stream, or load a second engine")

    def release(self) -> None:
        self._busy.release()


class Stream(Iterator[Token]):
    """One request: checked when made, run by iterating. Dropping it ends the request, as `close` does."""

    def __init__(self, request: "_Request") -> None:
        self._request = request
        self._tokens = request.run()

    def __next__(self) -> Token:
        return next(self._tokens)

    def close(self) -> None:
        """End the request; the engine is free for the next one."""
        self._tokens.close()

    def result(self) -> Result:
        """What was emitted so far."""
        return self._request.result()


class _Request:
    """What a stream runs. It knows nothing of its stream: one that is dropped must not be kept alive by its own generator."""

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        sampling: Sampling,
        max_new_tokens: int | None,
        stop: Sequence[str],
        gamma: int | None,
        speculate: bool,
    ) -> None:
        if max_new_tokens is not None and max_new_tokens < 0:
            raise UsageError(f"max_new_tokens: {max_new_tokens}, expected 0 or more")
        self._engine, self._sampling = engine, sampling
        self._prompt = engine.encode(prompt)
        room = engine.context - len(self._prompt)
        self._limit = room if max_new_tokens is None else min(room, max_new_tokens)
        self._control = engine.new_control(gamma)
        self._drafter = engine.new_drafter(sampling, speculate)
        if stop and engine.tokenizer is None:
            raise UsageError("stop: stop strings need a tokenizer, which the bundle lacks")
        self._text = TextStream(engine.tokenizer, [stop] if isinstance(stop, str) else stop) if engine.tokenizer else None
        self._ids: list[int] = []
        self._stats = Stats(prompt_tokens=len(self._prompt))
        self._written: list[str] = []
        self._finish_reason: FinishReason = "length"

    def result(self) -> Result:
        return Result(list(self._ids), "".join(self._written), self._finish_reason, self._stats)

    def run(self) -> Generator[Token]:
        self._engine.acquire()
        try:
            rounds = self._rounds()
            before = self._engine.graph_seconds  # the prompt's is not the rounds'
            for index, round_ in enumerate(rounds):
                burst = self._cut(round_.tokens)
                self._stats.add(round_, len(burst))
                self._stats.graph_seconds = self._engine.graph_seconds - before
                for token, text in burst:
                    self._ids.append(token)
                    self._written.append(text)
                    self._stats.tokens += 1
                    yield Token(token, text, index)
                if self._finish_reason == "stop":
                    return
        finally:
            self._engine.release()

    def _rounds(self) -> Iterator[Round]:
        engine, sampling, manifest = self._engine, self._sampling, self._engine.bundle.manifest
        allowed = manifest.allowed_ids
        rule = accept.greedy(allowed) if sampling.greedy else accept.token(sampling, allowed)
        start = time.perf_counter()
        prefill(engine.target, self._drafter, self._prompt)
        self._stats.prefill_seconds = time.perf_counter() - start
        return decode(engine.target, self._drafter, self._control, rule, self._prompt, self._limit, manifest.eos_ids)

    def _cut(self, tokens: Sequence[int]) -> list[tuple[int, str]]:
        """(id, released text) of a burst, up to the token that ends the request."""
        burst: list[tuple[int, str]] = []
        for token in tokens:
            burst.append((token, self._text.push(token) if self._text else ""))
            if token in self._engine.bundle.manifest.eos_ids or (self._text is not None and self._text.stopped):
                self._finish_reason = "stop"
                break
        ended = self._finish_reason == "stop" or self._stats.tokens + len(burst) == self._limit
        if self._text and ended:
            token, text = burst[-1]
            burst[-1] = (token, text + self._text.finish())
        return burst


def load(
    path: str | Path,
    device: str | None = None,
    draft_device: str | None = None,
    drafter: str | None = None,
    threads: int | None = None,
    prepare: bool | None = None,
) -> Engine:
    """Open a bundle on a device (default: the one it was made for).

    `prepare=False` leaves the user's cache alone; by default the first load keeps there what later ones map
    (`runtime.prepared`), if the weights are worth it.

    Raises:
        SpecedgeError: The bundle is damaged, or the device cannot run it.
    """
    bundle = open_bundle(path)
    row = get_device(device or bundle.manifest.device)
    draft_row = get_device(draft_device) if draft_device else row
    return Engine(bundle, row, draft_row, drafter, threads, prepare)
