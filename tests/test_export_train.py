"""Drafters trained here: losses are what they claim to be, a seed decides, a kill costs nothing, and what comes out works."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bundles
import tiny
from specedge.cachedir import cache_dir
from specedge.errors import SpecedgeError, UsageError
from specedge.export import students
from specedge.export.checkpoint import open_checkpoint
from specedge.export.distil import Teacher, distil
from specedge.export.draft_checkpoint import DraftCheckpoint, open_draft
from specedge.export.eagle import EagleConfig
from specedge.export.eagle_checkpoint import open_eagle
from specedge.export.families import DecoderConfig
from specedge.export.lessons import Batch, Lessons, batches
from specedge.export.medusa import MedusaConfig, open_medusa
from specedge.export.recipe import INT4, INT8
from specedge.export.self_text import Document
from specedge.export.train import Training, train
from specedge.export.training import Schedule
from specedge.export.validate import validate
from specedge.runtime import Sampling, load
from specedge.runtime.shape import TreeShape

CHAIN, KINDS = 64, ("medusa", "eagle", "draft")
LAYER = DecoderConfig("llama", 1, 32, 48, 4, 2, 8, CHAIN, 128, 1e-5, False, False, False, (1.0, 0.5, 0.25, 0.1), 1.0)


def eagle_config(drafted: int = 16) -> EagleConfig:
    flags = dict.fromkeys(("fc_bias", "output_bias", "input_norm", "tap_norms", "norm_before_residual"), False)
    return EagleConfig(3, LAYER, 32, (0, 1, 2), drafted, feeds_back_normed=False, own_embedding=False, own_head=True, **flags)


def drawn(student: students.Student) -> None:
    for parameter in student.module.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3)


def batch_of(taps: tuple[int, ...], rows: int = 12) -> Batch:
    answers = torch.zeros(2, rows, dtype=torch.bool)
    answers[0, 3 : rows - 1] = answers[1, 5 : rows - 2] = True
    return Batch(torch.randint(0, CHAIN, (2, rows)), {tap: torch.randn(2, rows, 32) for tap in taps}, answers)


def test_an_eagle_head_is_trained_on_what_it_will_draft() -> None:
    torch.manual_seed(0)
    student = students.EagleStudent(eagle_config(), torch.randn(CHAIN, 32), 4, torch.float32)
    drawn(student)
    batch = batch_of((0, 1, 2, -1))
    rows = batch.ids.shape[1]
    drafts, eagle = student.draft(batch), student.module
    angles = torch.outer(torch.arange(rows), torch.tensor(LAYER.inv_freq))
    cos, sin = angles.cos()[None, None], angles.sin()[None, None]
    compared = 0
    for text in range(2):
        for root in range(3, rows - 5):  # features are true up to here, then it draws on its own
            true = torch.cat([batch.streams[tap][text : text + 1, : root + 1] for tap in (0, 1, 2)], -1)
            bias = torch.full((1, 1, root + 1, root + 1), -30000.0).triu(1)
            nothing = torch.zeros(1, 2, 0, 8)
            places = slice(0, root + 1)
            ids = batch.ids[text : text + 1]
            x, fed_back, past = eagle(
                ids[:, 1 : root + 2], eagle.fuse(true), cos[:, :, places], sin[:, :, places], bias, (nothing, nothing)
            )
            for ahead in range(4):
                row = root + ahead
                which = (drafts[ahead].places[0] == text) & (drafts[ahead].places[1] == row + 2)
                if which.any():
                    torch.testing.assert_close(drafts[ahead].x[which][0], x[0, -1], atol=1e-5, rtol=1e-5)
                    compared += 1
                here = slice(row + 1, row + 2)
                bias = torch.zeros(1, 1, 1, past[0].shape[2] + 1)
                x, fed_back, new = eagle(
                    ids[:, row + 2 : row + 3], fed_back[:, -1:], cos[:, :, here], sin[:, :, here], bias, past
                )
                past = torch.cat((past[0], new[0]), 2), torch.cat((past[1], new[1]), 2)
    assert compared >= 30


class Oracle:
    """Drafts where another student does, knowing what the target has there."""

    def __init__(self, student: students.Student, lm_head: Tensor) -> None:
        self.module, self.taps, self.lm_head, self._student = student.module, (-1,), lm_head, student

    def head(self) -> Tensor:
        return self.lm_head

    def draft(self, batch: Batch) -> list[students.Drafted]:
        places = [drafted.places for drafted in self._student.draft(batch)]
        return [students.Drafted(batch.streams[-1][text, place - 1], (text, place)) for text, place in places]


def test_every_draft_is_judged_by_what_the_target_says_there() -> None:
    """The loss of a student that knows the target's own hidden states is the target's entropy, place by place."""
    torch.manual_seed(0)
    batch = batch_of((0, 1, 2, -1))
    made: list[students.Student] = [
        students.EagleStudent(eagle_config(), torch.randn(CHAIN, 32), 3, torch.float32),
        students.MedusaStudent(MedusaConfig(3, 1, 32, CHAIN, True, False), torch.randn(16, 32), torch.float32),
        students.DraftStudent(dataclasses.replace(LAYER, drafted=16), torch.randn(CHAIN, 32), torch.float32),
    ]
    for student in made:
        drawn(student)
        for drafted in student.draft(batch):
            text, place = drafted.places
            assert len(text) and batch.answers[text, place - 1].all()
        oracle = Oracle(student, torch.randn(16, 32))
        teacher = Teacher(oracle.lm_head, torch.arange(16))
        entropies = []
        for drafted in oracle.draft(batch):
            log_law = torch.log_softmax(drafted.x @ oracle.lm_head.T, -1)
            entropies.append(-(log_law.exp() * log_law).sum(-1).mean())
        weights = [0.8**ahead for ahead in range(len(entropies))]
        expected = sum(weight * one for weight, one in zip(weights, entropies, strict=True)) / sum(weights)
        torch.testing.assert_close(students.loss_of(oracle, batch, teacher, torch.float32), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("rows", [1, 255, 700])
def test_the_loss_is_the_cross_entropy_and_so_are_its_gradients(rows: int) -> None:
    torch.manual_seed(rows)
    teacher = Teacher(torch.randn(24, 8), torch.arange(24))
    hidden, x, head = torch.randn(rows, 8), torch.randn(rows, 8, requires_grad=True), torch.randn(24, 8, requires_grad=True)

    def gradients(loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, (x, head))

    rows_of = torch.randperm(rows)
    laws = torch.softmax(hidden @ teacher.head.T, -1)[rows_of]
    expected = -(laws * torch.log_softmax(x @ head.T, -1)).sum(-1).mean()
    found = distil(x, head, teacher.laws(hidden), rows_of, torch.float32)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)  # laws are held in float16
    for one, other in zip(gradients(found), gradients(expected), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-2)


def test_no_prompt_is_on_both_sides_and_every_document_has_its_turn(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 99, 5).tolist()) for _ in range(300)]
    documents = tuple(Document((*prompt, *range(n % 17 + 1)), 5) for n in range(3) for prompt in prompts)
    lessons = Lessons(documents, (tmp_path,), (-1,), 8)
    train_on, held = lessons.split()
    assert sorted(train_on + held) == list(range(900)) and 3 <= len(held) <= 90

    def of(indices: list[int]) -> set[tuple[int, ...]]:
        return {documents[index].ids[:5] for index in indices}

    assert not of(train_on) & of(held)
    for seed in (0, 1):
        found = batches(lessons, train_on, 64, seed)
        assert sorted(index for together in found for index in together) == train_on
        assert all(len(each) == 1 or len(each) * max(len(documents[one].ids) for one in each) <= 64 for each in found)
    assert batches(lessons, train_on, 64, 0) != found


def test_the_rate_warms_up_and_falls() -> None:
    plan = Schedule(100, 64, 1.0, 0)
    rates = [plan.rate_at(step) for step in range(100)]
    assert max(rates) == rates[3] == 1.0 and rates[0] < 0.5 and rates[99] < 0.03
    assert all(before > after for before, after in pairwise(rates[4:]))


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bigram model that never ends, of ids alone."""
    folder = tmp_path_factory.mktemp("chain") / "model"
    tiny.f_chain(folder, tiny.random_chain(CHAIN, seed=3, sharpness=4.0))
    return folder


def asked(model: Path, kind: str, output: Path, **changes: Any) -> Training:
    settings = {"tokens": 12000, "steps": 50, "rows": 512, "draft_vocab": 48, "gamma": 3, "rate": 3e-3, "layers": None}
    return Training(model=str(model), kind=kind, output=output, **(settings | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained(chain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("trained")
    return {kind: train(asked(chain, kind, place / kind, layers=1 if kind == "draft" else None)).path for kind in KINDS}


def weights_of(folder: Path) -> bytes:
    return next(iter(folder.glob("*.safetensors"))).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_of_a_seed_give_the_same_file_twice(
    kind: str, chain: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    layers = 1 if kind == "draft" else None
    again = train(asked(chain, kind, tmp_path / "again", layers=layers)).path
    assert weights_of(again) == weights_of(trained[kind])
    other = train(asked(chain, kind, tmp_path / "other", layers=layers, seed=1, steps=2)).path
    assert weights_of(other) != weights_of(trained[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_drafts_and_changes_no_text(kind: str, chain: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    engine = bundles.engine(chain, tmp_path / "bundle", **{kind: str(trained[kind])}, widths=(1, 4))
    assert engine.drafter_name == kind
    tree = TreeShape.from_paths(((0,), (1,), (0, 0)))
    tokens = rounds = 0
    for first in range(0, 40, 4):
        plain = engine.generate([first], Sampling(), 40, speculate=False)
        for how in ({"gamma": 3}, {"tree": tree}, {}):
            assert engine.generate([first], Sampling(), 40, **how).ids == plain.ids
        stats = engine.generate([first], Sampling(), 40, gamma=3).stats
        tokens, rounds = tokens + stats.tokens, rounds + stats.rounds
        seeded = engine.generate([first], Sampling(1.0, seed=first), 20, gamma=3)
        assert seeded.ids == engine.generate([first], Sampling(1.0, seed=first), 20, gamma=3).ids
    assert tokens / rounds > 1.5  # of 4; random drafts get 1.0
    report = validate(tmp_path / "bundle", str(chain), draft_reference=str(trained[kind]), prompts=2, tokens=8)
    assert report.passed, [check for check in report.checks if not check.passed]
    names = {check.name for check in report.checks if kind in check.graph}
    assert names & {"head_logits_max_abs", "logits_max_abs"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampled_text_has_the_targets_law(kind: str, chain: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    """A draft vocabulary of three quarters: what it lacks must come out all the same."""
    engine = bundles.engine(chain, tmp_path / "bundle", **{kind: str(trained[kind])}, widths=(1, 4))
    law = tiny.random_chain(CHAIN, seed=3, sharpness=4.0)
    expected, found = np.zeros(CHAIN), np.zeros(CHAIN)
    for seed in range(30):
        ids = [5, *engine.generate([5], Sampling(1.0, seed=seed), 60, gamma=3).ids]
        for before, after in pairwise(ids):
            expected += law[before]
            found[after] += 1
    likely = expected > 10
    assert (np.abs(found - expected)[likely] / np.sqrt(expected[likely])).max() < 5
    lacking = np.setdiff1d(np.arange(CHAIN), engine.draft_ids) if kind != "medusa" else np.array([], int)
    assert kind == "medusa" or (len(lacking) == 16 and found[lacking].sum() > 0)


@pytest.mark.parametrize("store", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_on_a_grid_stays_on_it(kind: str, store: str, chain: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    layers = 1 if kind == "draft" else None
    gridded = train(asked(chain, kind, tmp_path / "gridded", layers=layers, store=store)).path
    bits = 8 if store == "int8" else 4
    smaller = sum(path.stat().st_size for path in gridded.glob("model.*")) / len(weights_of(trained[kind]))
    assert smaller < (0.75 if store == "int8" else 0.5)
    manifest = bundles.engine(
        chain, tmp_path / "bundle", **{kind: str(gridded)}, body=INT4, head=INT8, widths=(1, 4)
    ).bundle.manifest
    stored = manifest.heads[kind].weights if kind == "medusa" else manifest.roles[kind].weights
    kept = {weight.name: (weight.source, weight.exact, weight.scheme) for weight in stored if len(weight.shape) == 2}
    own = {name: value for name, value in kept.items() if kind != "medusa" or "heads" in name}
    assert own and all(
        source == ("Q8_0" if bits == 8 else "Q4_0") and (exact or (bits == 8 and "int4" in scheme))
        for source, exact, scheme in own.values()
    )


def _is_held(prompt: list[int]) -> bool:
    _, held = Lessons((Document((*prompt, 0), len(prompt)),), (), (-1,), 8).split()
    return bool(held)


_KILLED = """
import sys
from pathlib import Path
from specedge.export.train import Training, train
train(Training(model=sys.argv[1], kind="eagle", output=Path(sys.argv[2]), tokens=12000, steps=50, rows=512, draft_vocab=48,
               gamma=3, rate=3e-3))
"""


def test_kill_9_costs_nothing(chain: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    """Killed in the middle, twice: the rerun ends with the same file, and nothing else is left."""
    command = [sys.executable, "-c", _KILLED, str(chain), str(tmp_path / "killed")]
    states = cache_dir() / "training"
    for seen in (1, 6):
        process = subprocess.Popen(command, env=os.environ | {"SPECEDGE_CACHE": str(cache_dir())})
        deadline = time.monotonic() + 120
        while _records(states) < seen and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (tmp_path / "killed").exists()
    assert _records(states) >= 6
    finished = train(asked(chain, "eagle", tmp_path / "killed"))
    assert weights_of(finished.path) == weights_of(trained["eagle"])
    assert [record.step for record in finished.facts.curve] == sorted({round(50 * part / 20) for part in range(1, 21)})
    assert not list(states.glob("*/*.pt"))
    assert [path.name for path in tmp_path.iterdir()] == ["killed"]


def _records(states: Path) -> int:
    """How many validations the state on disk has seen."""
    found = [len(torch.load(path, weights_only=True)["records"]) for path in states.glob("*/state.pt")]
    return max(found, default=0)


def test_training_goes_on_from_a_drafter(chain: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    for kind in KINDS:
        more = train(asked(chain, kind, tmp_path / kind, start=str(trained[kind]), steps=20))
        first = json.loads((trained[kind] / "config.json").read_text())
        assert json.loads((more.path / "config.json").read_text()) == first
        assert more.facts.curve[0].loss < 4.0  # at random it begins at log 48 = 3.9 and more
        assert more.facts.started_from == kind


def test_the_card_says_how_it_was_made(trained: dict[str, Path]) -> None:
    for kind in KINDS:
        card = (trained[kind] / "README.md").read_text()
        for part in ("50 steps", "seed 0", "48 ids", "tokens a round", "written by the target itself", f"--{kind}", "| 3 |"):
            assert part in card, part


def test_files_are_those_that_the_importers_know(chain: Path, trained: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(str(chain))
    target = checkpoint.config
    eagle = open_eagle(str(trained["eagle"]), target)
    assert not eagle.notes and eagle.config.draft_vocab_size == 48 and eagle.vocabulary is not None
    medusa = open_medusa(str(trained["medusa"]), target.hidden, target.vocab_size)
    assert not medusa.notes and medusa.config.heads == 3 and medusa.vocabulary is not None
    draft = open_draft(str(trained["draft"]), checkpoint)
    assert isinstance(draft, DraftCheckpoint) and draft.config.layers == 1 and draft.config.head_rows == 48
    assert np.array_equal(eagle.vocabulary, medusa.vocabulary)
    assert draft.vocabulary is not None and np.array_equal(eagle.vocabulary, draft.vocabulary)


def test_a_file_of_text_is_data_too(chain: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    lines = [
        {"ids": rng.integers(0, CHAIN, 30).tolist(), "prompt_length": 4, "sampling": "greedy" if n % 2 else "sampled"}
        for n in range(80)
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    found = train(asked(chain, "medusa", tmp_path / "heads", data=path, steps=3)).facts
    assert found.data == "data.jsonl" and found.prompts == 80 and found.tokens == 80 * 26


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "eagle", "layers": 2}, "layers: an EAGLE head has one"),
        ({"kind": "draft", "layers": 5}, "layers 5: the target has 1"),
        ({"kind": "draft", "start": "MODEL"}, "goes on from drafts that it made"),
        ({"kind": "eagle", "start": "MODEL"}, "missing tensor"),
        ({"kind": "medusa", "start": "HEADS", "gamma": 2}, "holds 3 heads; give that many"),
        ({"kind": "medusa", "data": "ONE"}, "no text is left to train on"),
        ({"kind": "medusa", "data": "EMPTY"}, "holds no answers to train on"),
        ({"kind": "medusa", "data": "STRANGE"}, "id 64: expected 0..63"),
        ({"kind": "medusa", "data": "PROMPT"}, "prompt_length: expected a positive number, found 'x'"),
        ({"kind": "medusa", "rate": 2.0}, "rate 2.0: expected at most 1"),
        ({"kind": "medusa", "gamma": 0}, "gamma 0: expected a positive number"),
        ({"kind": "nonsense"}, "kind 'nonsense': expected one of"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    changes: dict[str, Any], message: str, chain: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    one = next(ids for ids in ([n, 1] for n in range(CHAIN)) if _is_held([ids[0]]))
    files = {
        "ONE": json.dumps({"ids": one}),
        "EMPTY": "",
        "STRANGE": json.dumps({"ids": [1, 64]}),
        "PROMPT": json.dumps({"ids": [1, 2], "prompt_length": "x"}),
    }
    for name, content in files.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
    if "data" in changes:
        changes = changes | {"data": tmp_path / f"{changes['data']}.jsonl"}
    if "start" in changes:
        changes = changes | {"start": str(chain if changes["start"] == "MODEL" else trained["medusa"])}
    with pytest.raises((SpecedgeError, UsageError)) as caught:
        train(asked(chain, changes.pop("kind"), tmp_path / "out" / "drafter", **changes))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


def test_a_drafter_that_is_there_stays_without_force(chain: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    before = weights_of(trained["medusa"])
    with pytest.raises(SpecedgeError, match="exists already"):
        train(asked(chain, "medusa", trained["medusa"]))
    assert weights_of(trained["medusa"]) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("mine")
    (tmp_path / "mine" / "README.md").write_bytes((trained["medusa"] / "README.md").read_bytes())  # beside a card too
    with pytest.raises(SpecedgeError, match="is no drafter; --force replaces drafters only"):
        train(asked(chain, "medusa", tmp_path / "mine", force=True))
    assert (tmp_path / "mine" / "letter.txt").read_text() == "mine"


def test_a_bundles_own_weights_teach(chain: Path, tmp_path: Path) -> None:
    bundle = bundles.make(chain, tmp_path / "bundle")
    one = train(asked(chain, "medusa", tmp_path / "one", bundle=bundle, steps=3))
    other = train(asked(chain, "medusa", tmp_path / "other", steps=3))  # as INT4, which a chain's weights do not survive
    assert weights_of(one.path) != weights_of(other.path)
    foreign = tmp_path / "foreign"
    tiny.f_rand(foreign)
    with pytest.raises(SpecedgeError, match="has other tensors than foreign"):
        train(asked(foreign, "medusa", tmp_path / "wrong", bundle=bundle, steps=3))


def test_load_is_what_ships(trained: dict[str, Path], chain: Path, tmp_path: Path) -> None:
    """A bundle made of a trained draft has no embedding of its own, and maps the target's."""
    path = bundles.make(chain, tmp_path / "bundle", draft=str(trained["draft"]), widths=(1, 4))
    role = load(path).bundle.role("draft")
    assert {weight.name for weight in role.weights} >= {"lm_head.weight", "vocabulary"}
    assert "embed_tokens.weight" not in {weight.name for weight in role.weights}
    assert role.vocab_size == 48
