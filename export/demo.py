"""The main job in one command: a real model with every drafter that comes with it, side by side."""

from dataclasses import dataclass
from pathlib import Path

from specedge.bundle import Bundle
from specedge.export.convert import convert
from specedge.export.fetch import fetch
from specedge.export.in_the_box import tree_in_the_box
from specedge.export.report import Report
from specedge.export.request import Request
from specedge.export.validate import validate
from specedge.progress import Progress
from specedge.runtime.compare import Row, Way, compare
from specedge.runtime.generate import Engine, load
from specedge.runtime.prompts import CHAT
from specedge.runtime.shape import TreeShape, read_shape

MODEL = "smollm2-135m"
DRAFTERS = ("draft", "medusa", "eagle")
_TREE = "eagle-tree"
GAMMAS = (2, 4)
_TOKENS = 48  # of every answer


@dataclass(frozen=True, slots=True)
class Demo:
    """Bundles by their drafter, what was measured of them, and the best one, validated."""

    bundles: dict[str, Bundle]
    rows: tuple[Row, ...]
    best: str
    report: Report


def demo(output: Path, progress: Progress) -> Demo:
    """Fetch SmolLM2-135M-Instruct, convert it with every drafter to `output`/NAME, compare them, validate the best.

    Raises:
        SpecedgeError: The model cannot be had, or `output` cannot be written.
    """
    model = str(fetch(MODEL, progress))
    bundles = {}
    tree = read_shape(tree_in_the_box("eagle", MODEL)).paths
    for name in DRAFTERS:
        bundles[name] = convert(Request(model, output / name, **{name: MODEL}, force=True), progress)  # type: ignore[arg-type]
    bundles[_TREE] = convert(Request(model, output / _TREE, eagle=MODEL, tree=tree, force=True), progress)
    engines = {name: load(bundle.path, reuse=False, profile=False) for name, bundle in bundles.items()}
    prompts = [engines["eagle"].encode([{"role": "user", "content": text}]) for text in CHAT]
    rows = compare(_ways(engines), prompts, _TOKENS, progress)
    drafted = [row for row in rows if row.extra_bytes]
    best = max(drafted, key=lambda row: row.measured).name.split()[0]
    report = validate(bundles[best].path, model, MODEL, progress=progress)
    return Demo(bundles, rows, best, report)


def _ways(engines: dict[str, Engine]) -> list[Way]:
    lookup = load(engines["eagle"].bundle.path, drafter="lookup", reuse=False, profile=False)
    ways = [Way(f"lookup gamma {gamma}", lookup, TreeShape.chain(gamma)) for gamma in GAMMAS]
    for name in DRAFTERS:
        ways += [Way(f"{name} gamma {gamma}", engines[name], TreeShape.chain(gamma)) for gamma in GAMMAS]
    tree = engines[_TREE].default_tree
    assert tree is not None
    return [*ways, Way(_TREE, engines[_TREE], tree)]
