"""One request to an engine: its stream of tokens and its result."""

import logging
import math
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specedge.errors import UsageError
from specedge.runtime.constraint import Constraint
from specedge.runtime.decode import Round, decode, prefill
from specedge.runtime.results import FinishReason, Result, Stats, Token
from specedge.runtime.rules import make_rule
from specedge.runtime.sample import Sampling
from specedge.runtime.sampler import Sampler
from specedge.runtime.shape import TreeShape
from specedge.runtime.text import TextStream
from specedge.tokenizer import Prompt

if TYPE_CHECKING:
    from specedge.runtime.generate import Engine

_log = logging.getLogger(__name__)
_VAIN = 64  # rounds without one accepted draft, after which a request says so


class Stream(Iterator[Token]):
    """One request: checked when made, run by iterating. Dropping it ends the request, as `close` does."""

    def __init__(self, request: "Request") -> None:
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


@dataclass(frozen=True, slots=True)
class Options:
    """What a request asks for besides prompt and sampling (`Engine.stream`)."""

    max_new_tokens: int | None
    stop: Sequence[str]
    gamma: int | None
    speculate: bool
    tree: TreeShape | None
    rule: str | None
    log_probabilities: bool
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise UsageError(f"max_new_tokens: {self.max_new_tokens}, expected 0 or more")
        if self.tree is not None and not self.speculate:
            raise ValueError("tree: says what is drafted, speculate=False that nothing is; give one of them")


class Request:
    """What a stream runs. It knows nothing of its stream: one that is dropped must not be kept alive by its own generator."""

    def __init__(self, engine: "Engine", prompt: Prompt, sampling: Sampling, options: Options) -> None:
        self._engine = engine
        self._prompt = engine.encode(prompt)
        room = engine.context - len(self._prompt)
        self._limit = room if options.max_new_tokens is None else min(room, options.max_new_tokens)
        made = engine.bundle.manifest
        self._sampler = Sampler(sampling, made.allowed_ids, len(self._prompt), options.constraint, made.eos_ids)
        self._scored = options.log_probabilities
        self._rule = make_rule(options.rule, self._sampler)
        self._control = engine.new_control(self._rule, options.gamma, options.tree)
        ids = engine.draft_ids
        silent = len(sampling.banned_ids) and len(ids) and not self._sampler.may_emit(ids)  # not one id it could draft
        self._drafter = engine.new_drafter(self._rule, options.speculate and not silent)
        stop = [options.stop] if isinstance(options.stop, str) else options.stop
        if stop and engine.tokenizer is None:
            raise UsageError("stop: stop strings need a tokenizer, which the bundle lacks")
        self._text = TextStream(engine.tokenizer, stop) if engine.tokenizer else None
        self._ids: list[int] = []
        self._log_probabilities: list[float] = []
        self._stats = Stats(prompt_tokens=len(self._prompt))  # of rounds whose tokens all came out
        self._begun: Round | None = None  # the one whose tokens are coming out, or were when the stream was closed
        self._written: list[str] = []
        self._vain = 0.0  # rounds that drafted for nothing, until one did not
        self._stopped = False
        self._finish_reason: FinishReason = "length"

    def result(self) -> Result:
        stats = self._stats.copy()
        if self._begun is not None:
            stats.add(self._begun, len(self._ids) - stats.tokens, whole=False)
        scores = list(self._log_probabilities) if self._scored else None
        return Result(list(self._ids), "".join(self._written), self._finish_reason, stats, scores)

    def run(self) -> Generator[Token]:
        self._engine.acquire()
        try:
            rounds = self._rounds()
            before = self._engine.graph_seconds  # the prompt's is not the rounds'
            for index, round_ in enumerate(rounds):
                burst = self._cut(round_.tokens)
                self._begun = round_
                self._stats.graph_seconds = self._engine.graph_seconds - before
                for place, (token, text) in enumerate(burst):
                    self._ids.append(token)
                    self._written.append(text)
                    score = round_.log_probabilities[place] if self._scored else None
                    self._log_probabilities += [] if score is None else [score]
                    if self._stopped and place + 1 == len(burst):
                        self._finish_reason = "stop"
                    yield Token(token, text, index, score, place < len(round_.nodes))
                self._stats.add(round_, len(burst))
                self._begun = None
                self._look_after(round_)
                if self._stopped:
                    return
        except GeneratorExit:  # closed: what the caches hold is a text
            raise
        except BaseException:
            self._engine.forget()
            raise
        finally:
            self._engine.release()

    def _look_after(self, round_: Round) -> None:
        """Say once that drafts are for nothing: a drafter of another model, or one that was damaged, looks like that."""
        name, drafted = self._engine.drafter_name, len(round_.tree.tokens)
        self._vain = -math.inf if round_.nodes else self._vain + (drafted > 0)
        if self._vain == _VAIN and drafted and name != "lookup":
            _log.warning("%s: not one draft of the first %d rounds was accepted; is it a drafter for this model?", name, _VAIN)

    def _rounds(self) -> Iterator[Round]:
        engine = self._engine
        start = time.perf_counter()
        self._stats.reused_tokens = prefill(engine.target, self._drafter, self._prompt, engine.reuse)
        self._stats.prefill_seconds = time.perf_counter() - start
        return decode(
            engine.target,
            self._drafter,
            self._control,
            self._rule.judge,
            self._prompt,
            self._limit,
            engine.bundle.manifest.eos_ids,
            self._sampler.log_probability if self._scored else None,
        )

    def _cut(self, tokens: Sequence[int]) -> list[tuple[int, str]]:
        """(id, released text) of a burst, up to the token that ends the request."""
        burst: list[tuple[int, str]] = []
        for token in tokens:
            burst.append((token, self._text.push(token) if self._text else ""))
            if token in self._engine.bundle.manifest.eos_ids or (self._text is not None and self._text.stopped):
                self._stopped = True
                break
        ended = self._stopped or self._stats.tokens + len(burst) == self._limit
        if self._text and ended:
            token, text = burst[-1]
            burst[-1] = (token, text + self._text.finish())
        return burst
