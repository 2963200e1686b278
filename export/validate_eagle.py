"""Does a bundle's EAGLE head still compute what its checkpoint says, from what its target says?"""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from specedge.bundle import Bundle
from specedge.errors import SpecedgeError
from specedge.export.checkpoint import Checkpoint
from specedge.export.decoder import NORMED
from specedge.export.eagle import Eagle
from specedge.export.eagle_checkpoint import EagleCheckpoint, open_eagle
from specedge.export.heads import eagle_tensors
from specedge.export.report import ACTIVATION_KL_LIMIT, LOGITS_LIMIT, Check, mean_kl
from specedge.export.validate_weights import Comparison, compare_weights
from specedge.export.weights import read_float32
from specedge.manifest import VOCABULARY
from specedge.runtime.generate import Engine
from specedge.runtime.rope import rope_tables

Shapes = Mapping[str, tuple[int, ...]]

_ROWS = 32
_FEATURES_LIMIT, _QUANTISED_FEATURES_LIMIT = 1e-3, 0.1  # of their norm; a neighbouring tap is off by 0.3 and more


def check_eagle(
    engine: Engine, reference: str, checkpoint: Checkpoint, target: PreTrainedModel, text: list[int]
) -> tuple[Comparison, tuple[str, ...]]:
    """Stored weights and draft ids against the checkpoint's, features of the bundle's target against transformers, logits.

    Those are the head's against torch, fed with those features.
    A quantised head is held to its own stored weights, as KL. `target` has the weights it is to be compared by. What the
    checkpoint's settings leave open or contradict is said beside the checks.

    Raises:
        SpecedgeError: `reference` is not what the bundle's head was made from.
    """
    role, head = engine.bundle.role("eagle"), engine.eagle
    assert head is not None
    opened = open_eagle(reference, checkpoint.config, role.taps if role.taps != (NORMED,) else None)
    tensors = eagle_tensors(opened, checkpoint)
    own = [weight for weight in role.weights if weight.name != VOCABULARY]
    _check_same_head(engine.bundle, opened, {weight.name: weight.shape for weight in own}, tensors.shapes)
    compared = compare_weights("eagle", own, engine.bundle, tensors)
    checks = compared.checks
    ids = np.arange(role.vocab_size) if opened.vocabulary is None else opened.vocabulary
    checks.append(Check("draft_ids_differ", "eagle", float((ids != head.vocabulary.ids).sum()), 0.0))
    quantised = role.quantised or engine.target.role.quantised
    model, lm_head = _eagle_reference(engine.bundle, opened, checkpoint, target, quantised)
    rows = text[:_ROWS]
    features, found, expected = [], [], []
    engine.target.truncate(0)
    head.cache.truncate(0)
    past = tuple(torch.zeros(1, role.kv.heads, 0, role.kv.head_dim) for _ in range(2))
    tables = rope_tables(role).astype(np.float32)
    for position, (token, following) in enumerate(pairwise(rows)):
        engine.target.step([token])
        features.append(engine.target.hidden(0))
        engine.target.commit([0])
        found.append(head.read([following], features[-1][None])[0][head.vocabulary.ids])
        cos, sin = torch.from_numpy(tables[:, None, None, position : position + 1])
        with torch.no_grad():
            inputs = model.fuse(torch.from_numpy(features[-1])[None, None])
            bias = torch.zeros(1, 1, 1, position + 1)
            out, _, columns = model(torch.tensor([[following]], dtype=torch.int32), inputs, cos, sin, bias, past)
            past = tuple(torch.cat(pair, 2) for pair in zip(past, columns, strict=True))
            expected.append((out[0, 0] @ lm_head.T).numpy())
    truth = _features(target, rows[:-1], role.taps)
    off = np.linalg.norm(np.stack(features) - truth, axis=1) / np.linalg.norm(truth, axis=1)
    limit = _QUANTISED_FEATURES_LIMIT if engine.target.role.quantised else _FEATURES_LIMIT
    checks.append(Check("features_relative_error", "target", float(off.max()), limit))
    one, other = np.stack(found), np.stack(expected)
    if quantised:
        checks.append(Check("head_kl_to_stored_weights", "eagle", mean_kl(other, one), ACTIVATION_KL_LIMIT))
    else:
        worst = float(np.abs(one - other).max())
        checks.append(Check("head_logits_max_abs", "eagle", worst, LOGITS_LIMIT[engine.target.role.kv.dtype]))
    return Comparison(checks, compared.groups), opened.notes


@torch.no_grad()
def _features(model: PreTrainedModel, ids: list[int], taps: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """[T, taps H] from transformers: its hidden states enter block 0, 1, ...; the last one has passed the final norm."""
    streams: list[torch.Tensor] = []
    last = list(model.get_submodule("model.layers").children())[-1]
    hook = last.register_forward_hook(lambda _, __, out: streams.append(out))
    try:
        states = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
    finally:
        hook.remove()
    by_tap = {**dict(enumerate(states[:-1])), len(states) - 1: streams[0], NORMED: states[-1]}
    found: npt.NDArray[np.float32] = torch.cat([by_tap[tap][0] for tap in taps], -1).float().numpy()
    return found


def _check_same_head(bundle: Bundle, opened: EagleCheckpoint, stored: Shapes, expected: Shapes) -> None:
    """Refuse a checkpoint of a head of other tensors, ids or attention heads."""
    role, other = bundle.role("eagle"), opened.files.path
    if unlike := [name for name in {**expected, **stored} if stored.get(name) != expected.get(name)]:
        name = unlike[0]
        raise SpecedgeError(
            f"{bundle.path}: its head has {name} of shape {stored.get(name)}, that of {other} has {expected.get(name)}; "
            "name its own checkpoint"
        )
    if (role.kv.heads, role.vocab_size) != (opened.config.decoder.kv_heads, opened.config.draft_vocab_size):
        raise SpecedgeError(
            f"{bundle.path}: its head has {role.kv.heads} heads of keys and {role.vocab_size} ids, that of {other} "
            f"{opened.config.decoder.kv_heads} and {opened.config.draft_vocab_size}; name its own checkpoint"
        )


def _eagle_reference(
    bundle: Bundle, opened: EagleCheckpoint, checkpoint: Checkpoint, target: PreTrainedModel, stored: bool
) -> tuple[Eagle, torch.Tensor]:
    """The head in torch, float32, and its LM head [Vd, H], with the checkpoint's values or those the bundle holds."""
    role = bundle.role("eagle")
    weights = {weight.name: weight for weight in role.weights}
    embedding, lm_head = (
        module.get_parameter("weight").detach() for module in (target.get_input_embeddings(), target.get_output_embeddings())
    )
    state = {
        "embed_tokens.weight": embedding,
        "lm_head.weight": lm_head if opened.vocabulary is None else lm_head[opened.vocabulary],
    }
    for name in opened.shapes:
        if not stored:
            state[name] = torch.from_numpy(np.array(opened.tensor(name)))
        elif name in weights:  # else it is the target's
            state[name] = torch.from_numpy(np.array(read_float32(weights[name], bundle.file(weights[name].file))[0]))
    if stored and "lm_head.weight" in weights:
        state["lm_head.weight"] = torch.from_numpy(
            np.array(read_float32(weights["lm_head.weight"], bundle.file(weights["lm_head.weight"].file))[0])
        )
    head = state.pop("lm_head.weight")
    model = Eagle(opened.config).eval()
    model.load_state_dict(state)
    return model, head
