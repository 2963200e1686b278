"""One role of a bundle, ready to step: token ids in, logits out, the graph's form hidden."""

from collections import Counter
from pathlib import Path

import numpy as np

from specedge.bundle import Bundle
from specedge.devices.device import Device
from specedge.errors import SpecedgeError, UsageError
from specedge.manifest import Graph, Role
from specedge.runtime import prepared
from specedge.runtime.binding import OpenGraph
from specedge.runtime.compiled import open_graph
from specedge.runtime.delta import DeltaSequence
from specedge.runtime.embedding import Embedding
from specedge.runtime.in_place import InPlaceSequence
from specedge.runtime.rope import rope_tables
from specedge.runtime.sequence import Sequence
from specedge.runtime.unrolled import Unrolling


class Model:
    """The opened graphs of one role; any number of sequences share them.

    `prepare` says whether weights are mapped in this machine's own order (`runtime.prepared`), which is made on first use:
    None does so where the device row has such a form and the weights are worth it.
    """

    def __init__(
        self,
        bundle: Bundle,
        role_name: str,
        device: Device,
        threads: int | None = None,
        prepare: bool | None = None,
    ) -> None:
        self.role = bundle.role(role_name)
        self.device = device
        self._bundle, self._threads = bundle, threads
        if self.role.form != device.form:
            raise SpecedgeError(
                f"device {device.name!r}: runs the {device.form} form, {bundle.path} holds {role_name} in the "
                f"{self.role.form} form; convert with --device {device.name}"
            )
        _check(self.role, f"{bundle.path}: {role_name}")
        self.tables = rope_tables(self.role)
        self._embedding = Embedding.needed(bundle, role_name)
        if prepare and not device.prepares:
            raise UsageError(f"prepare: device {device.name!r} has no prepared form of its graphs; leave it to the default")
        if prepare is None:
            prepare = device.prepares and self.role.stored_bytes >= prepared.WORTH_IT
        self.sessions: dict[int | None, OpenGraph] = {}
        self.weight_files: set[Path] = set()
        for graph in self.role.graphs:
            if prepare:
                opened = prepared.open_prepared(bundle, self.role, graph, device, threads, self._same)
            else:
                opened = prepared.open_plain(bundle, self.role, graph, device, threads)
            self.sessions[graph.width] = opened.session
            self.weight_files.update(opened.weight_files)

    @property
    def nodes(self) -> dict[str, int]:
        """How many nodes which provider took, of plug-ins."""
        return dict(sum((Counter(session.nodes) for session in self.sessions.values()), Counter[str]()))

    def sequence(self) -> Sequence:
        """A fresh, empty sequence with buffers of its own."""
        return self._sequence(self.sessions)

    def unrolling(self, sequence: Sequence) -> Unrolling:
        """What can be drafted in one call behind the text of `sequence`."""

        def session(graph: Graph) -> OpenGraph:
            return open_graph(self._bundle, graph, self.device, self._threads)

        return Unrolling(self.role, sequence.cache, self.tables, session)

    def _sequence(self, sessions: dict[int | None, OpenGraph]) -> Sequence:
        if self.role.form == "in-place":
            return InPlaceSequence(self.role, self.tables, sessions)
        return DeltaSequence(self.role, self.tables, sessions, self._embedding)

    def _same(self, first: OpenGraph, second: OpenGraph) -> bool:
        """Whether two sessions of symbolic width give the same logits, bit for bit."""
        ids = np.arange(min(4, self.role.widest, self.role.context, self.role.vocab_size))
        one, other = (self._sequence({None: session}).step(ids.tolist()) for session in (first, second))
        return np.array_equal(one, other, equal_nan=True)


def _check(role: Role, where: str) -> None:
    """What the manifest says of a role against what it says of the role's graphs, which `OpenGraph` compares with the files."""
    kv = role.kv
    names = [f"past_{kind}_{layer}" for layer in range(kv.layers) for kind in ("key", "value")]
    expected = dict.fromkeys(names, ((1, kv.heads, kv.slots, kv.head_dim), kv.dtype))
    widths = [graph.width for graph in role.graphs]
    if not (widths == [None] if role.form == "in-place" else widths and None not in widths):
        raise SpecedgeError(f"{where}: graphs of widths {widths} are no {role.form} form; convert again")
    for graph in role.graphs:
        specs = {spec.name: spec for spec in graph.inputs}
        found = {name: (spec.shape, spec.dtype) for name, spec in specs.items() if name.startswith("past_")}
        if found != expected:
            raise SpecedgeError(f"{where}: kv says {kv}, the KV inputs of {graph.file} differ; convert again")
        for name, spec, size in (
            ("logits", graph.output("logits"), role.vocab_size),
            ("rope_cos", specs.get("rope_cos"), len(role.rope.inv_freq)),
        ):
            if spec is None or spec.shape[-1] != size:
                raise SpecedgeError(f"{where}: {name} of {graph.file}: expected last dimension {size}; convert again")
