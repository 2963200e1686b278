"""Laws of the KV cache: it holds the columns that were kept, in order, whatever was written, rejected or forgotten."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bundles
from specedge.bundle import open_bundle
from specedge.devices.table import get_device
from specedge.manifest import KVLayout
from specedge.runtime.cache import KVCache
from specedge.runtime.model import Model
from specedge.runtime.sequence import Sequence as ModelSequence
from specedge.runtime.tree import ROOT, TokenTree
from tiny import Array, f_rand, hf_logits

LAYOUT = KVLayout(layers=2, heads=3, slots=13, head_dim=2, dtype="float32")
CONTEXT = 12  # one slot to spare, as the in-place form has
NAMES = ["key_0", "value_0", "key_1", "value_1"]


def columns(tags: Sequence[int]) -> dict[str, Array]:
    """New KV [1, K, T, D] in which every number tells its column's tag, buffer, head and dimension."""
    tag = np.asarray(tags, np.float32)[None, None, :, None]
    place = np.arange(LAYOUT.heads * LAYOUT.head_dim, dtype=np.float32).reshape(1, LAYOUT.heads, 1, LAYOUT.head_dim)
    return {name: 100 * tag + 10 * index + place for index, name in enumerate(NAMES)}


def check(cache: KVCache, tags: Sequence[int]) -> None:
    """The cache holds just the columns of these tags."""
    assert cache.length == len(tags)
    expected = columns(tags)
    for name, buffer in cache.buffers():
        np.testing.assert_array_equal(buffer[:, :, : len(tags)], expected[name])


def write_behind(cache: KVCache, tags: Sequence[int]) -> None:
    """What a step of the in-place form does: its columns go into the buffers themselves, behind what is committed."""
    for name, buffer in cache.buffers():
        buffer[:, :, cache.length : cache.length + len(tags)] = columns(tags)[name]


def test_the_buffers_come_in_layer_order_and_start_as_zeros() -> None:
    cache = KVCache(LAYOUT, CONTEXT)
    assert [name for name, _ in cache.buffers()] == NAMES
    assert all(buffer.shape == (1, 3, 13, 2) and not buffer.any() for _, buffer in cache.buffers())


@pytest.mark.parametrize("length", [0, 1, 3])
def test_what_is_cut_off_is_zeros_again(length: int) -> None:
    """A static graph reads it, and a mask hides neither NaN nor a score larger than itself."""
    cache = KVCache(LAYOUT, CONTEXT)
    cache.append(columns([1, 2, 3]), range(3))
    cache.append({name: np.full((1, 3, 2, 2), np.nan, np.float32) for name in NAMES}, range(2))
    cache.truncate(length)
    check(cache, [1, 2, 3][:length])
    assert all(not buffer[:, :, length:].any() for _, buffer in cache.buffers())


# (tokens of the step, rows that are kept of it in path order, how far the cache is cut back afterwards)
steps = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=6, unique=True).map(sorted), st.integers(0, 3)),
    max_size=8,
)


@given(steps, st.booleans())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_it_holds_what_was_kept_in_order(steps: list[tuple[int, list[int], int]], in_place: bool) -> None:
    """Chains and trees alike: the rows kept of a tree are ascending, with gaps."""
    cache, text, tag = KVCache(LAYOUT, CONTEXT), list[int](), 0
    for width, rows, cut in steps:
        kept = [row for row in rows if row < width]
        if cache.length + width > CONTEXT:
            continue
        new = list(range(tag + 1, tag + width + 1))
        tag += width
        if in_place:
            write_behind(cache, new)
            cache.keep(kept)
        else:
            cache.append(columns(new), kept)
        text += [new[row] for row in kept]
        check(cache, text)
        text = text[: max(len(text) - cut, 0)]
        cache.truncate(len(text))
        check(cache, text)


def test_rejected_columns_are_never_copied() -> None:
    cache = KVCache(LAYOUT, CONTEXT)
    cache.append(columns([1, 2, 3, 4]), [0, 2])
    assert all(not buffer[:, :, 2:].any() for _, buffer in cache.buffers())


def test_a_range_is_as_good_as_a_list() -> None:
    one, other = KVCache(LAYOUT, CONTEXT), KVCache(LAYOUT, CONTEXT)
    one.append(columns([1, 2, 3]), range(2))
    write_behind(other, [1, 2, 3])
    other.keep(range(2))
    check(one, [1, 2])
    check(other, [1, 2])


def test_more_than_the_context_is_refused_and_changes_nothing() -> None:
    cache = KVCache(LAYOUT, CONTEXT)
    cache.append(columns(range(1, 11)), range(10))
    for full in (lambda: cache.append(columns([7, 8, 9]), range(3)), lambda: cache.keep(range(3))):
        with pytest.raises(ValueError, match="3 more columns after 10 do not fit a context of 12"):
            full()
    check(cache, range(1, 11))
    cache.append(columns([11, 12]), range(2))
    check(cache, range(1, 13))


@pytest.mark.parametrize("length", [-1, 4])
def test_only_what_is_there_can_be_forgotten(length: int) -> None:
    cache = KVCache(LAYOUT, CONTEXT)
    cache.append(columns([1, 2, 3]), range(3))
    with pytest.raises(ValueError, match=f"cache of 3 columns to {length}"):
        cache.truncate(length)
    check(cache, [1, 2, 3])


texts = st.lists(st.integers(1, 99), max_size=CONTEXT)


@given(texts, st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_what_is_left_of_a_compacted_cache_is_as_if_nothing_else_had_ever_come(text: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    rows = sorted(data.draw(st.sets(st.integers(0, max(len(text) - start - 1, 0)), max_size=len(text) - start)))
    cache, other = KVCache(LAYOUT, CONTEXT), KVCache(LAYOUT, CONTEXT)
    cache.append(columns(text), range(len(text)))
    cache.compact(start, rows)
    kept = text[:start] + [text[start + row] for row in rows]
    check(cache, kept)
    other.append(columns(kept), range(len(kept)))
    for grown in (cache, other):
        grown.append(columns(range(50, 50 + CONTEXT - len(kept))), range(CONTEXT - len(kept)))
    for (_, one), (_, two) in zip(cache.buffers(), other.buffers(), strict=True):
        np.testing.assert_array_equal(one[:, :, :CONTEXT], two[:, :, :CONTEXT])


def test_compacting_moves_together_what_is_kept() -> None:
    cache = KVCache(LAYOUT, CONTEXT)
    cache.append(columns(range(1, 9)), range(8))
    cache.compact(2, [1, 3, 4])
    check(cache, [1, 2, 4, 6, 7])
    cache.compact(5, [])
    check(cache, [1, 2, 4, 6, 7])
    cache.compact(1, range(3))
    check(cache, [1, 2, 4, 6])
    cache.compact(3, [])
    check(cache, [1, 2, 4])
    cache.compact(0, [2])
    check(cache, [4])
    cache.compact(0, [])
    check(cache, [])


@pytest.mark.parametrize(
    ("start", "rows"), [(-1, []), (5, []), (5, [0]), (0, [4]), (2, [0, 2]), (4, [0]), (1, [-1, 0]), (0, [0, 1, 2, 3, 4])]
)
def test_columns_that_are_not_there_cannot_be_kept(start: int, rows: list[int]) -> None:
    cache = KVCache(LAYOUT, CONTEXT)
    cache.append(columns([1, 2, 3, 4]), range(4))
    with pytest.raises(ValueError, match=f"cannot keep columns .* behind {start} of a cache of 4"):
        cache.compact(start, rows)
    check(cache, [1, 2, 3, 4])


def test_a_forgotten_text_leaves_no_nan_for_the_next() -> None:
    """A mask hides a column by adding to its score; 0 x NaN is NaN all the same."""
    cache = KVCache(LAYOUT, CONTEXT)
    cache.append({name: np.full_like(new, np.nan) for name, new in columns([1, 2, 3]).items()}, range(3))
    cache.compact(0, [])
    assert all(not buffer.any() for _, buffer in cache.buffers())


# ---- a sequence over real graphs

TEXT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
TREE = TokenTree((43, 38, 32, 79, 50, 28), (ROOT, ROOT, 0, 0, 1, 3))
PATH = (0, 3, 5)  # 43, 79, 28


@pytest.fixture(scope="module", params=["cpu", "cpu-static"])
def sequence(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSequence:
    place = tmp_path_factory.mktemp("cache")
    f_rand(place / "model", eos_token_id=None)
    path = bundles.make(place / "model", place / "bundle", device=request.param, widths=(1, 4), context=128)
    return Model(open_bundle(path), "target", get_device(request.param), 1).sequence()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], Array]:
    """transformers' logits after a text, for every branch of the tree."""
    model = f_rand(Path(), save=False, eos_token_id=None)
    texts = [tuple(TEXT)]
    for token, parent in zip(TREE.tokens, TREE.parents, strict=True):
        texts.append((*texts[parent + 1], token))
    return {text: hf_logits(model, text)[-1] for text in texts}


def test_a_tree_is_all_its_branches_at_once(sequence: ModelSequence, reference: dict[tuple[int, ...], Array]) -> None:
    sequence.truncate(0)
    sequence.prefill(TEXT[:-1])
    rows = sequence.step([TEXT[-1], *TREE.tokens], TREE)
    np.testing.assert_allclose(rows, list(reference.values()), atol=1e-4)
    assert sequence.length == len(TEXT) - 1


def test_after_a_tree_the_text_is_the_path_that_was_kept(sequence: ModelSequence) -> None:
    model = f_rand(Path(), save=False, eos_token_id=None)
    sequence.truncate(0)
    sequence.prefill(TEXT[:-1])
    sequence.step([TEXT[-1], *TREE.tokens], TREE)
    sequence.commit([0, *(node + 1 for node in PATH)])
    kept = [*TEXT, *(TREE.tokens[node] for node in PATH)]
    assert sequence.length == len(kept)
    for token in (5, 6, 7):  # and it goes on from there
        kept.append(token)
        row = sequence.step([token])[0]
        sequence.commit([0])
        np.testing.assert_allclose(row, hf_logits(model, kept)[-1], atol=1e-4)


def test_a_tree_fed_piece_by_piece_is_the_tree_fed_at_once(
    sequence: ModelSequence, reference: dict[tuple[int, ...], Array]
) -> None:
    """Nodes that are in the cache already are masked like those of the step; afterwards a path of them stays as text."""
    sequence.truncate(0)
    row, expected = sequence.prefill(TEXT), list(reference.values())
    assert row is not None
    np.testing.assert_allclose(row, expected[0], atol=1e-4)
    for piece in ((0, 1), (2, 3, 4), (5,)):
        rows = [node + 1 for node in piece]
        positions = [len(TEXT) - 1 + TREE.depths[row] for row in rows]
        sees = TREE.visible[np.ix_(rows, range(1, rows[-1] + 1))]
        logits = sequence.grow([TREE.tokens[node] for node in piece], positions, sees)
        np.testing.assert_allclose(logits, [expected[row] for row in rows], atol=1e-4)
    assert sequence.text == TEXT and sequence.length == len(TEXT) + 6
    sequence.keep(len(TEXT), PATH, [TREE.tokens[node] for node in PATH])
    assert sequence.length == len(TEXT) + len(PATH) == len(sequence.text)
    kept = [*TEXT, *(TREE.tokens[node] for node in PATH), 5]
    model = f_rand(Path(), save=False, eos_token_id=None)
    np.testing.assert_allclose(sequence.step([5])[0], hf_logits(model, kept)[-1], atol=1e-4)


def test_a_step_commits_nothing_by_itself(sequence: ModelSequence) -> None:
    sequence.truncate(0)
    sequence.prefill(TEXT)
    first = sequence.step([5, 6, 7]).copy()
    sequence.step([9, 9, 9])
    assert sequence.length == len(TEXT)
    np.testing.assert_array_equal(sequence.step([5, 6, 7]), first)


def test_steps_that_do_not_fit_are_refused(sequence: ModelSequence) -> None:
    sequence.truncate(0)
    with pytest.raises(ValueError, match="wider than the widest graph, 8"):
        sequence.step([3] * 9)
    with pytest.raises(ValueError, match="a step of 0 tokens"):
        sequence.step([])
    sequence.prefill([index % 100 for index in range(126)])
    assert sequence.step([3, 4]).shape == (2, 128)
    with pytest.raises(ValueError, match="a step of 3 tokens after 126 does not fit a context of 128"):
        sequence.step([3, 4, 5])
