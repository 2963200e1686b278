"""Do a bundle's draft heads still compute what their checkpoint says, and its one-call graphs what single steps do?"""

import numpy as np
import torch
from transformers import PreTrainedModel

from specedge.bundle import Bundle
from specedge.errors import SpecedgeError
from specedge.export.checkpoint import Checkpoint
from specedge.export.heads import HeadTensors, medusa_tensors
from specedge.export.medusa import Medusa, MedusaCheckpoint, open_medusa
from specedge.export.report import ACTIVATION_KL_LIMIT, LOGITS_LIMIT, Check, mean_kl
from specedge.export.validate_weights import Comparison, compare_weights
from specedge.export.weights import read_float32
from specedge.manifest import VOCABULARY
from specedge.runtime.generate import Engine
from specedge.runtime.heads import MedusaHeads
from specedge.runtime.unrolled_agreement import unrolled_agreement
from specedge.runtime.vocabulary import DraftVocabulary

_ROWS = 32
_Q_LIMIT, _QUANTISED_Q_LIMIT = 1e-4, 0.05
_TEXTS = (2, 7, 16, 31)  # lengths after which one call is compared with single steps


def check_medusa(
    engine: Engine, reference: str, checkpoint: Checkpoint, target: PreTrainedModel, text: list[int]
) -> Comparison:
    """Stored weights against the checkpoint's, and logits of every head against torch.

    Those are fed with the same hidden states of the bundle's target.
    Quantised heads are held to their own stored weights, as KL. `target` has the LM head that heads without one share, with the
    weights it is to be compared by.

    Raises:
        SpecedgeError: `reference` is not what the bundle's heads were made from.
    """
    bundle, head = engine.bundle, engine.bundle.manifest.heads["medusa"]
    heads = open_medusa(reference, head.hidden, checkpoint.config.vocab_size)
    tensors = medusa_tensors(heads, checkpoint)
    quantised = head.quantised or engine.target.role.quantised  # the target's, whose LM head may be shared
    model = _reference(bundle, heads, tensors, target, quantised)
    own = [weight for weight in head.weights if weight.name != VOCABULARY]
    compared = compare_weights("medusa", own, bundle, tensors)
    vocabulary = DraftVocabulary.of(bundle, head)
    ids = np.arange(head.vocab_size) if heads.vocabulary is None else heads.vocabulary
    compared.checks.append(Check("draft_ids_differ", "medusa", float(not np.array_equal(ids, vocabulary.ids)), 0.0))
    opened = MedusaHeads(bundle, head, engine.draft_device)
    engine.target.truncate(0)
    found, expected = [], []
    for token in text[:_ROWS]:
        engine.target.step([token])
        hidden = engine.target.hidden(0)
        engine.target.commit([0])
        found.append(opened.logits(hidden)[:, vocabulary.ids])
        with torch.no_grad():
            expected.append(model(torch.from_numpy(hidden)[None, None]).numpy())
    one, other = np.concatenate(found), np.concatenate(expected)
    check = Check("head_kl_to_stored_weights", "medusa", mean_kl(other, one), ACTIVATION_KL_LIMIT)
    if not quantised:
        worst = float(np.abs(one - other).max())
        check = Check("head_logits_max_abs", "medusa", worst, LOGITS_LIMIT[engine.target.role.kv.dtype])
    return Comparison([*compared.checks, check], compared.groups)


def check_unrolled(engine: Engine, text: list[int]) -> list[Check]:
    """What one call drafts against single steps, with the same noise: the tokens, unless the graphs are quantised, and q."""
    checks = []
    name = engine.drafter_name
    quantised = any(role.quantised for role in engine.bundle.manifest.roles.values())
    texts = [text[:length] for length in _TEXTS if length + 1 < engine.draft_context]
    for shape in engine.expansions:
        found = unrolled_agreement(engine, texts, shape)
        graph = f"{name} chain {shape.depth}" if shape.is_chain else f"{name} tree"
        if not quantised:  # a last bit may turn a choice there, which the target judges all the same
            checks.append(Check("unrolled_ids_differ", graph, float(found.different), 0.0))
        checks.append(Check("unrolled_q_max_abs", graph, found.q_max_abs, _QUANTISED_Q_LIMIT if quantised else _Q_LIMIT))
    return checks


def _reference(bundle: Bundle, heads: MedusaCheckpoint, tensors: HeadTensors, target: PreTrainedModel, stored: bool) -> Medusa:
    """The heads in torch, float32, with the checkpoint's values or those the bundle holds."""
    head = bundle.manifest.heads["medusa"]
    weights = {weight.name: weight for weight in head.weights if weight.name != VOCABULARY}
    if weights.keys() != tensors.shapes.keys():
        other = heads.files.path
        raise SpecedgeError(f"{bundle.path}: its heads have other tensors than {other}; name their own checkpoint")
    model = Medusa(heads.config).eval()
    state = {}
    for name in tensors.shapes:
        values = read_float32(weights[name], bundle.file(weights[name].file))[0] if stored else tensors.tensor(name)
        state[name] = torch.from_numpy(np.array(values))
    if model.lm_head is not None and "lm_head.weight" not in state:
        state["lm_head.weight"] = target.get_output_embeddings().weight.detach()
    model.load_state_dict(state)
    return model
