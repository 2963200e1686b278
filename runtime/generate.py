"""Text in, text out: an engine over a bundle."""

import operator
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from specedge.bundle import Bundle, open_bundle
from specedge.devices.device import Device
from specedge.devices.table import CPU, get_device
from specedge.errors import SpecedgeError, UsageError
from specedge.runtime.constraint import Constraint
from specedge.runtime.control import Adaptive, Control, Costs, Fixed
from specedge.runtime.drafters import Drafter, DraftModel, LookupDrafter, NoDrafter
from specedge.runtime.eagle import EagleHead
from specedge.runtime.head_drafters import EagleDrafter, MedusaDrafter
from specedge.runtime.heads import MedusaHeads
from specedge.runtime.kept_profile import read_profile
from specedge.runtime.law import Ids
from specedge.runtime.model import Model
from specedge.runtime.probe import find_provider
from specedge.runtime.request import Options, Request, Stream
from specedge.runtime.results import Result
from specedge.runtime.rules import Rule
from specedge.runtime.sample import Sampling
from specedge.runtime.self_check import check_model
from specedge.runtime.shape import TreeShape
from specedge.runtime.unrolled import Expansion
from specedge.runtime.vocabulary import DraftVocabulary
from specedge.tokenizer import Prompt, Tokenizer

_DRAFTERS = ("draft", "medusa", "eagle", "lookup")


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
        reuse: bool = True,
        profile: bool = True,
        self_check: bool | None = None,
    ) -> None:
        manifest = bundle.manifest
        self.bundle, self.reuse = bundle, reuse
        self.device, self.draft_device = device, draft_device
        self.drafter_name = drafter or manifest.drafters[0]
        if self.drafter_name not in manifest.drafters:
            raise SpecedgeError(f"{bundle.path}: no drafter {drafter!r}; it holds {', '.join(manifest.drafters)}")
        if self.drafter_name not in _DRAFTERS:
            raise SpecedgeError(f"{bundle.path}: drafter {self.drafter_name!r}: this version runs {', '.join(_DRAFTERS)}")
        self.tokenizer = Tokenizer.of(bundle) if "tokenizer.json" in manifest.files else None
        self._models = models = [Model(bundle, "target", device, threads, prepare)]
        if self._drafts("draft"):
            models.append(Model(bundle, "draft", draft_device, threads, prepare))
        self.eagle = EagleHead(bundle, draft_device, threads) if self._drafts("eagle") else None
        self._heads = MedusaHeads(bundle, manifest.heads["medusa"], draft_device, threads) if self._drafts("medusa") else None
        self.weight_files = sorted(set().union(*(model.weight_files for model in models)))
        self.target = models[0].sequence()
        self._draft = models[1].sequence() if models[1:] else None
        self._unrolling = models[1].unrolling(self._draft) if self._draft else None
        self._vocabulary = DraftVocabulary.of(bundle, self._draft.role) if self._draft else None
        self._busy = threading.Lock()
        for role, model, sequence in zip(("target", "draft"), models, (self.target, self._draft), strict=False):
            row = model.device
            if sequence and (self_check or (self_check is None and row.provider != CPU and not find_provider(row).emulated)):
                check_model(bundle, role, model, sequence)
        self.profile = read_profile(bundle, self.rows, self.drafter_name, threads) if profile else None
        """What was measured here (`profile.measure`); control rests on it instead of the device rows."""

    @property
    def graph_seconds(self) -> float:
        """Time spent inside the graphs of target and drafter so far."""
        drafting = sum(drafter.graph_seconds for drafter in (self._draft, self._heads, self.eagle) if drafter)
        return self.target.graph_seconds + drafting + (self._unrolling.seconds if self._unrolling else 0.0)

    @property
    def rows(self) -> dict[str, Device]:
        """The rows of target and drafter."""
        return {"target": self.device, "draft": self.draft_device}

    @cached_property
    def emulated(self) -> tuple[str, ...]:
        """The rows in use whose NPU is emulated here: numbers are right, times mean nothing."""
        rows = [self.device] if self._drafts("lookup") else [self.device, self.draft_device]
        return tuple(dict.fromkeys(row.name for row in rows if find_provider(row).emulated))

    @property
    def nodes(self) -> dict[str, int]:
        """How many nodes which provider took, of plug-ins; of the graphs opened so far."""
        heads = [head.nodes for head in (self._heads, self.eagle) if head]
        return dict(sum(map(Counter, [*(model.nodes for model in self._models), *heads]), Counter[str]()))

    def _drafts(self, name: str) -> bool:
        return self.drafter_name == name

    @property
    def context(self) -> int:
        return self.bundle.manifest.context

    @property
    def draft_context(self) -> int:
        """Length of text up to which the drafter drafts: a draft model's context may be shorter."""
        return self._draft.role.context if self._draft else self.context

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        gamma: int | None = None,
        speculate: bool = True,
        *,
        tree: TreeShape | None = None,
        rule: str | None = None,
        log_probabilities: bool = False,
        constraint: Constraint | None = None,
    ) -> "Stream":
        """Tokens as they are accepted: an iterator with the result so far; `close` ends the request.

        `gamma=None` lets control decide, an int drafts exactly that many whenever room allows; `tree` drafts that tree
        instead (default: the bundle's, if it has one). `rule` names how sampled drafts are judged (`rules.RULES`).
        `log_probabilities` asks for those of the tokens; `constraint` says which may follow (`constraint.Constraint`).

        Raises:
            SpecedgeError: The prompt does not fit the context, is empty or holds ids outside the vocabulary.
            UsageError: The request contradicts itself or what the bundle can do.
        """
        options = Options(max_new_tokens, stop, gamma, speculate, tree, rule, log_probabilities, constraint)
        return Stream(Request(self, prompt, sampling or Sampling(), options))

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        gamma: int | None = None,
        speculate: bool = True,
        *,
        tree: TreeShape | None = None,
        rule: str | None = None,
        log_probabilities: bool = False,
        constraint: Constraint | None = None,
    ) -> Result:
        """The whole answer; arguments and errors are those of `stream`."""
        stream = self.stream(
            prompt,
            sampling,
            max_new_tokens,
            stop,
            gamma,
            speculate,
            tree=tree,
            rule=rule,
            log_probabilities=log_probabilities,
            constraint=constraint,
        )
        for _ in stream:
            pass
        return stream.result()

    @cached_property
    def default_tree(self) -> TreeShape | None:
        """What is drafted unless a request says otherwise: the bundle's tree, if its drafter can draft one."""
        paths = self.bundle.manifest.tree
        return TreeShape.from_paths(paths) if paths and self._branches else None

    def expansion(self, shape: TreeShape) -> Expansion | None:
        """The graph that drafts `shape` in one call, if there is one."""
        unrolling = self.eagle.unrolling if self.eagle else self._unrolling
        return unrolling.covering(shape) if unrolling else None

    @property
    def expansions(self) -> tuple[TreeShape, ...]:
        """The chains and trees that are drafted in one call."""
        unrolling = self.eagle.unrolling if self.eagle else self._unrolling
        return unrolling.shapes if unrolling else ()

    @property
    def draft_ids(self) -> Ids:
        """[Vd] which ids of the target a draft model's or head's own are."""
        vocabulary = self.eagle.vocabulary if self.eagle else self._vocabulary
        return vocabulary.ids if vocabulary else np.arange(0)

    @property
    def _branches(self) -> bool:
        """Whether the drafter can draft more than a chain."""
        return not self._drafts("lookup")

    @property
    def deepest(self) -> int:
        """Most tokens in a row that can be drafted and verified."""
        verified = self.target.widest - 1
        return min(self._heads.head.depth, verified) if self._heads else verified

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

    def new_drafter(self, rule: Rule, speculate: bool = True) -> Drafter:
        """The drafter of one request."""
        if not speculate:
            return NoDrafter()
        if self._draft is not None:
            return DraftModel(self._draft, rule, self._unrolling, self._vocabulary)
        if self._heads is not None:
            return MedusaDrafter(self._heads, rule)
        if self.eagle is not None:
            return EagleDrafter(self.eagle, rule)
        return LookupDrafter(self.context)

    def new_control(self, rule: Rule, gamma: int | None = None, tree: TreeShape | None = None) -> Control:
        """Who chooses what one request drafts."""
        widest, deepest = self.target.widest, self.deepest
        if tree is not None and not isinstance(tree, TreeShape):
            raise TypeError(f"tree: expected a TreeShape (TreeShape.from_paths makes one of paths), found {tree!r:.60}")
        if gamma is not None and tree is not None:
            raise UsageError("tree and gamma: a tree says what is drafted; give one of them")
        if gamma is not None:
            if not 0 <= gamma <= deepest:
                what = "verify" if deepest == widest - 1 else "make"
                raise UsageError(f"gamma {gamma}: expected 0..{deepest}, the drafts this bundle can {what}; or convert anew")
            return Fixed(TreeShape.chain(gamma))
        if tree is not None and not self._branches and not tree.is_chain:
            raise UsageError(
                f"tree: drafter {self.drafter_name!r} drafts chains only; leave it out or convert with --draft, --medusa or "
                "--eagle"
            )
        stored = self.default_tree
        if tree is None and stored is not None and (stored.is_chain or not rule.chain):
            tree = stored
        if tree is None:
            found = self.profile.acceptance if self.profile and not self._drafts("lookup") else ()
            return Adaptive(self.costs, found, stepwise=not (self._drafts("lookup") or (rule.in_graph and self.expansions)))
        if rule.chain and not tree.is_chain:
            raise UsageError(f"rule {rule.name!r}: judges chains only, [[0], [0, 0], ...]; use recursive for this tree")
        allowed = self.bundle.manifest.allowed_ids
        if (rank := max(tree.ranks, default=0)) >= allowed:
            raise UsageError(f"tree: rank {rank!s:.60}, expected 0..{allowed - 1}, choices among the ids this model can emit")
        if len(tree.parents) >= widest:
            raise UsageError(
                f"tree: {len(tree.parents)} nodes, expected at most {widest - 1}, the drafts this bundle can verify"
            )
        if tree.depth > deepest:
            raise UsageError(f"tree: {tree.depth} deep, expected at most {deepest}, the drafts this bundle can make in a row")
        return Fixed(tree)

    @cached_property
    def costs(self) -> Costs:
        """What control rests on: measured here, if a profile was, or else read off the rows."""
        known = max(self.profile.gammas) if self.profile else self.deepest  # behind these nothing was measured
        gammas = range(min(max(self.bundle.manifest.widths), self.deepest + 1, known + 1))
        draft = tuple(self._draft_cost(gamma) if gamma else 0.0 for gamma in gammas)
        return Costs(draft, tuple(self._step_cost(gamma + 1) for gamma in gammas))

    def _step_cost(self, width: int) -> float:
        """Time of a step over one of width 1; static graphs are padded to the next width there is."""
        widths = [graph.width for graph in self.target.role.graphs if graph.width is not None and graph.width >= width]
        cost = self.profile.step_cost if self.profile else self.device.cost
        return cost(min(widths, default=width))

    def _draft_cost(self, gamma: int) -> float:
        """Time of drafting a chain over a step of width 1: as measured, or as far as the bytes tell that both read."""
        if self.profile and not self._drafts("lookup"):
            return self.profile.draft_cost(gamma)
        target = self.target.role.stored_bytes
        if self._heads is not None:
            return self._heads.head.stored_bytes / target
        if self.eagle is None and self._draft is None:
            return 0.0
        expansion = self.expansion(TreeShape.chain(gamma))
        steps = expansion.shape.depth if expansion else gamma  # a longer chain is drafted whole
        step_bytes = self.eagle.step_bytes if self.eagle else self._draft.role.stored_bytes if self._draft else 0
        return steps * step_bytes / target

    def forget(self) -> None:
        """Empty the caches: after an error nobody knows what they hold, and a NaN reaches what was read beside it."""
        for cache in (self.target, self._draft, self.eagle):
            if cache is not None:
                cache.truncate(0)

    def acquire(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise SpecedgeError("engine: busy with another request; finish or close its stream, or load a second engine")

    def release(self) -> None:
        self._busy.release()


def load(
    path: str | Path,
    device: str | None = None,
    draft_device: str | None = None,
    drafter: str | None = None,
    threads: int | None = None,
    prepare: bool | None = None,
    allow_cpu_nodes: bool = False,
    reuse: bool = True,
    profile: bool = True,
    self_check: bool | None = None,
) -> Engine:
    """Open a bundle on a device and its drafter on another; the default are those it was made for.

    A drafter that was made for the target's device follows `device`.

    `prepare=False` leaves the user's cache alone; by default the first load keeps there what later ones map
    (`runtime.prepared`), if the weights are worth it. A node that a device's provider leaves to the CPU is an error, unless
    `allow_cpu_nodes`. With `reuse` a request reads only what its prompt has behind the beginning that it shares with the text
    of the one before, answer included: the next turn of a conversation. With `profile` adaptive requests rest on what was
    measured here, if anything was; without, on the device rows alone, which are the same everywhere.

    A device that is not the CPU is first asked whether it computes what the bundle's self-check holds; what passed on this
    hardware and driver is not asked again. `self_check=True` asks emulators too, `False` nobody.

    Raises:
        SpecedgeError: The bundle is damaged, the device cannot run it, or computes something else.
    """
    bundle = open_bundle(path)
    row, draft_row = rows_of(bundle, device, draft_device)
    if allow_cpu_nodes:
        row, draft_row = (replace(one, whole=False) for one in (row, draft_row))
    return Engine(bundle, row, draft_row, drafter, threads, prepare, reuse, profile, self_check)


def rows_of(bundle: Bundle, device: str | None, draft_device: str | None) -> tuple[Device, Device]:
    """The rows that run target and drafter: those named, or those they were made for.

    A drafter that was made for the target's device follows `device`.
    """
    made = bundle.manifest
    row = get_device(device or made.device)
    if draft_device is None and made.draft_device == made.device:
        return row, row
    return row, get_device(draft_device or made.draft_device)
