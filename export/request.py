"""What `spec-export convert` is asked for."""

from dataclasses import dataclass, field
from pathlib import Path

from specedge.errors import UsageError
from specedge.export.calibration_text import Calibration
from specedge.export.recipe import Recipe
from specedge.manifest import is_tree


@dataclass(frozen=True, slots=True)
class Request:
    """What `spec-export convert` was asked for."""

    model: str
    output: Path
    draft: str | None = None
    medusa: str | None = None
    eagle: str | None = None
    eagle_taps: tuple[int, ...] | None = None  # where an EAGLE-3 head's file leaves open what it reads
    device: str = "cpu"
    draft_device: str | None = None  # the target's
    widths: tuple[int, ...] | None = None  # the device's own
    context: int | None = None  # 1024, or fewer where a model was made for fewer
    chunk: int = 64
    one_call: bool | None = None  # whether a draft model drafts in one call; None: as the device row says
    tree: tuple[tuple[int, ...], ...] = ()  # paths of the draft tree (docs/contract.md); none: chains
    recipe: Recipe = field(default_factory=Recipe)
    draft_recipe: Recipe | None = None  # None: the drafter is stored as the target is
    calibration: Calibration = field(default_factory=Calibration)
    min_target: str | None = None  # the oldest system that runs a Core ML package; None: as the device row says
    allow_cpu_nodes: bool = False  # whether a provider may leave some to the CPU, where that is known beforehand
    force: bool = False

    def __post_init__(self) -> None:
        if self.context is not None and self.context < 2:
            raise UsageError(f"context {self.context}: expected at least 2, a prompt token and an emitted one")
        if self.chunk < 1:
            raise UsageError(f"chunk {self.chunk}: expected a positive number of tokens")
        if self.widths is not None and min(self.widths, default=0) < 1:
            raise UsageError(f"widths {self.widths}: expected positive numbers")
        if not is_tree(self.tree):
            raise UsageError(f"tree: {self.tree} is no list of different paths of ranks, each one's beginning among them")
        named = [name for name in ("draft", "medusa", "eagle") if getattr(self, name)]
        if len(named) > 1:
            raise UsageError(
                f"{named[1]}: a bundle has one drafter beside prompt lookup; leave out --{named[0]} or --{named[1]}"
            )
        if self.tree and not named:
            raise UsageError("tree: prompt lookup drafts chains only; give --draft, --medusa or --eagle or leave the tree out")
        if self.one_call is not None and not self.draft:
            raise UsageError("one_call: only a draft model has that choice; give --draft or leave it out")
        if self.eagle_taps is not None and not self.eagle:
            raise UsageError("eagle_taps: say what an EAGLE head reads; give --eagle or leave them out")
        if self.draft_recipe and self.draft_recipe.calibrated and not self.draft:
            raise UsageError("draft method gptq: heads are rounded without calibration; use rtn or clip")

    @property
    def drafter(self) -> Recipe:
        """How a draft model's or head's weights are stored."""
        return self.draft_recipe or self.recipe
