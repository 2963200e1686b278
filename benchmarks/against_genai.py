"""Plain decoding and prefill of a bundle beside onnxruntime-genai's, in turns, each in a process of its own."""

import inspect
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import click
import psutil
import rich.table
from genai_peer import RELEASE, make

from specedge.bundle import Bundle, open_bundle
from specedge.errors import SpecedgeError
from specedge.progress import Progress, silent
from specedge.runtime.prompts import PROSE
from specedge.runtime.terminal import Output, json_option
from specedge.tokenizer import Tokenizer

_PAUSE = 0.1  # seconds before a block: onnxruntime's threads spin for about 30 ms after a run

Measure = Callable[[list[int], int], tuple[int, float]]
"""(prompt, new tokens) -> (tokens made, seconds they took); for no new tokens the prompt's own, up to its last logits."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a block measures: so many new tokens after a prompt, or, with none, the prompt itself."""

    name: str
    prompt_tokens: int
    new_tokens: int


TASKS = (
    Task("decode, 32-token prompt", 32, 64),
    Task("decode, 256-token prompt", 256, 64),
    Task("prefill, 512 tokens", 512, 0),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds per token of both sides, round by round."""

    task: Task
    ours: list[float]
    genai: list[float]

    @property
    def unit(self) -> str:
        return "tokens/s" if self.task.new_tokens else "ms"

    @property
    def ratios(self) -> list[float]:
        """Throughput, ours over genai's: above 1 ours is faster."""
        return [genai / ours for ours, genai in zip(self.ours, self.genai, strict=True)]

    def in_unit(self, seconds_per_token: Sequence[float]) -> list[float]:
        if self.task.new_tokens:
            return [1 / seconds for seconds in seconds_per_token]
        return [1000 * seconds * self.task.prompt_tokens for seconds in seconds_per_token]

    def as_dict(self) -> dict[str, object]:
        sides = {"ours": self.in_unit(self.ours), "genai": self.in_unit(self.genai), "ratio": self.ratios}
        numbers = {
            name: {"median": median(values), "min": min(values), "max": max(values), "by_round": values}
            for name, values in sides.items()
        }
        return {"unit": self.unit, "prompt_tokens": self.task.prompt_tokens, "new_tokens": self.task.new_tokens, **numbers}


# The three functions that run in the workers. Their source is handed to the side's Python, so they import for themselves:
# genai's Python has no specedge, ours has no genai.


def _ours(bundle: str, threads: int) -> Measure:
    import time

    from specedge.runtime import Sampling, load

    engine = load(bundle, drafter="lookup", threads=threads)  # plain decoding drafts nothing: open no draft model

    def measure(ids: list[int], new_tokens: int) -> tuple[int, float]:
        if new_tokens:
            stats = engine.generate(ids, Sampling(), new_tokens, speculate=False).stats
            return stats.tokens, stats.decode_seconds
        engine.target.truncate(0)
        start = time.perf_counter()
        engine.target.prefill(ids)
        return len(ids), time.perf_counter() - start

    return measure


def _genai(folder: str, threads: int) -> Measure:
    import json
    import time

    import onnxruntime_genai as genai

    config = genai.Config(folder)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = genai.Model(config)

    def measure(ids: list[int], new_tokens: int) -> tuple[int, float]:
        params = genai.GeneratorParams(model)
        params.set_search_options(max_length=len(ids) + 1 + new_tokens, do_sample=False)
        generator = genai.Generator(model, params)
        start = time.perf_counter()
        generator.append_tokens(ids)  # computes: it returns when the last token's logits are there
        if not new_tokens:
            return len(ids), time.perf_counter() - start
        generator.generate_next_token()  # only picks from those logits; the next ones are a step each, as ours are
        made = generator.token_count()
        start = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        seconds = time.perf_counter() - start
        return generator.token_count() - made, seconds

    return measure


def _serve(measure: Measure) -> None:
    """Answer each line of standard input, after a short block to warm up."""
    import json
    import sys

    print("ready", flush=True)
    for line in sys.stdin:
        ids, new_tokens = json.loads(line)
        measure(ids, min(new_tokens, 8))
        print(json.dumps(measure(ids, new_tokens)), flush=True)


class Worker:
    """One side, opened in a process that lives as long as the benchmark and sleeps while the other side works."""

    def __init__(self, python: str, side: Callable[[str, int], Measure], model: Path, threads: int) -> None:
        call = f"_serve({side.__name__}({str(model)!r}, {threads}))"
        # the aliases in their annotations are names of this file
        program = "\n".join(("from __future__ import annotations", inspect.getsource(side), inspect.getsource(_serve), call))
        self._name = side.__name__.removeprefix("_")
        self._process = subprocess.Popen([python, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def seconds_per_token(self, ids: Sequence[int], new_tokens: int) -> float:
        time.sleep(_PAUSE)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([ids, new_tokens]) + "\n")
        self._process.stdin.flush()
        made, seconds = json.loads(self._read())
        if made < new_tokens:
            raise SpecedgeError(
                f"{self._name}: its text ended after {made} of {new_tokens} tokens; measure with another prompt"
            )
        return float(seconds / made)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SpecedgeError(f"{self._name}: its process ended with {self._process.wait()}; what it said is above")
        return line


def compare(
    bundle: Bundle, peer_python: Path, peer_model: Path, threads: int, rounds: int, progress: Progress = silent
) -> list[Comparison]:
    """Every task in every round on both sides; which side comes first alternates."""
    results = [Comparison(task, [], []) for task in TASKS]
    prose = _prose(bundle)
    with ExitStack() as stack:
        ours = stack.enter_context(Worker(sys.executable, _ours, bundle.path, threads))
        genai = stack.enter_context(Worker(str(peer_python), _genai, peer_model, threads))
        progress("against genai", 0, rounds)
        for index in range(rounds):
            for result in results:
                ids = prose[: result.task.prompt_tokens]
                turns = [(ours, result.ours), (genai, result.genai)]
                for worker, seconds in turns if index % 2 == 0 else reversed(turns):
                    seconds.append(worker.seconds_per_token(ids, result.task.new_tokens))
            progress("against genai", index + 1, rounds)
    return results


def _prose(bundle: Bundle) -> list[int]:
    """Token ids of the longest prompt; the shorter ones are its beginnings."""
    longest = max(task.prompt_tokens for task in TASKS)
    if bundle.manifest.context < longest:
        raise SpecedgeError(
            f"{bundle.path}: a context of {bundle.manifest.context}, expected at least {longest}; convert again"
        )
    tokenizer = Tokenizer.of(bundle)
    text = PROSE
    while len(ids := tokenizer.encode(text)) < longest:
        text = f"{text} {PROSE}"
    return ids[:longest]


def environment(bundle: Bundle, threads: int, rounds: int, others: float) -> dict[str, object]:
    """Where and with what the numbers were measured."""
    return {
        "cpu": _cpu(),
        "threads": threads,
        "cpu_percent_used_by_others": others,
        "rounds": rounds,
        "python": platform.python_version(),
        "onnxruntime": version("onnxruntime"),
        "peer": RELEASE,
        "bundle": str(bundle.path),
        "source": bundle.manifest.sources["target"].name,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _show(output: Output, facts: Mapping[str, object], results: Sequence[Comparison]) -> None:
    table = rich.table.Table("", "unit", "ours", "genai", "ours / genai\n(throughput)")
    for result in results:
        digits = 1 if result.task.new_tokens else 0
        ours, genai = (_spread(result.in_unit(side), digits) for side in (result.ours, result.genai))
        table.add_row(result.task.name, result.unit, ours, genai, _spread(result.ratios, 2))
    output.console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    output.console.print(table)


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Blocks of each side and task.")
@json_option
def main(bundle: Path, rounds: int, json_file: str | None) -> None:
    """Time plain decoding and prefill of a BUNDLE of smollm2-135m against onnxruntime-genai on the same checkpoint.

    The first run installs onnxruntime-genai into an environment of its own in the user's cache, as genai_peer.py does.
    """
    try:
        output = Output(json_file)
        opened, peer = open_bundle(bundle), make()
        threads = psutil.cpu_count(logical=False) or 1
        others = psutil.cpu_percent(interval=1)  # whoever computes here besides us spoils the numbers
        with output.progress() as progress:
            results = compare(opened, peer.python, peer.model, threads, rounds, progress)
        facts = environment(opened, threads, rounds, others)
        _show(output, facts, results)
        output.json({"environment": facts, "results": {result.task.name: result.as_dict() for result in results}})
    except SpecedgeError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
