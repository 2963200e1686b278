"""Medusa heads opened on a device: the target's hidden state in, logits of every head out, in one call."""

import time

import numpy as np
import numpy.typing as npt

from specedge.bundle import Bundle
from specedge.devices.device import Device
from specedge.manifest import Head
from specedge.runtime.compiled import open_graph
from specedge.runtime.pieces import Pieces
from specedge.runtime.vocabulary import DraftVocabulary


class MedusaHeads:
    """The graph of all heads, and the buffers it reads and writes."""

    def __init__(self, bundle: Bundle, head: Head, device: Device, threads: int | None = None) -> None:
        self.head = head
        self._vocabulary = DraftVocabulary.of(bundle, head)
        dtype = head.graph.inputs[0].dtype
        self._hidden = np.zeros((1, 1, head.hidden), dtype)
        self._logits = np.zeros((head.depth, head.vocab_size), dtype)
        session = open_graph(bundle, head.graph, device, threads)
        self.nodes = session.nodes
        """How many nodes which provider took, of plug-ins."""
        self._binding = session.bind()
        self._binding.input("hidden", self._hidden)
        self._pieces = Pieces(self._binding, head.graph, "head_logits", self._logits)
        self.graph_seconds = 0.0
        """Time spent inside the graph so far."""

    def logits(self, hidden: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """[depth, V] from the hidden state [H] that the root was predicted from: row d drafts d + 1 places behind the root."""
        self._hidden[0, 0] = hidden
        start = time.perf_counter()
        self._binding.run()
        self.graph_seconds += time.perf_counter() - start
        return self._vocabulary.widen(self._pieces.join())
