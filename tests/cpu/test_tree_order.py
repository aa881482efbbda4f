"""The order of siblings in a pack: largest subtree first, the same trie, nothing lost."""

import itertools
import random

import numpy as np
import pytest

from benchmarks import shapes
from megatron.core.transformer.tree_attention.intervals import visible_blocks
from megatron.core.transformer.tree_metadata import TreeMetadata
from megatron.core.tree_training import trie


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def below(sequences, prefix):
    """Packed tokens under every continuation of a prefix, by its first token."""
    under = [s for s in sequences if s[: len(prefix)] == prefix]
    tails = {tuple(s[: n + 1]) for s in under for n in range(len(prefix), len(s))}
    return {t: sum(x[len(prefix)] == t for x in tails) for t in {x[len(prefix)] for x in tails}}


@pytest.mark.parametrize("letters", [1, 2, 3])
def test_random_tries(letters):
    """Prefixes of one another, equal ones and single ones among them."""
    rng = random.Random(letters)
    for _ in range(200):
        sequences = [
            [rng.randrange(letters + 1) for _ in range(rng.randint(1, 8))] for _ in range(rng.randint(1, 9))
        ]
        given = trie.PrefixOrder.of([np.array(s) for s in sequences])
        order = given.largest_first()
        placed = [sequences[i] for i in order.order]
        assert sorted(order.order.tolist()) == list(range(len(sequences)))
        assert order.lengths.tolist() == [len(s) for s in placed]
        assert order.shared.tolist() == [0, *(common(a, b) for a, b in itertools.pairwise(placed))]
        prefixes = {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}
        assert order.packed_tokens == given.packed_tokens == len(prefixes)
        for prefix in {tuple(s[:n]) for s in sequences for n in range(1, len(s))}:
            prefix = list(prefix)
            heads = [s[len(prefix)] for s in placed if s[: len(prefix)] == prefix and len(s) > len(prefix)]
            sizes = [below(sequences, prefix)[head] for head in dict.fromkeys(heads)]
            assert sizes == sorted(sizes, reverse=True)


def test_the_linear_layout_keeps_its_order():
    sequences = [np.array(s) for s in ([5, 5], [1], [5, 5, 5, 5])]
    order = trie.PrefixOrder.of(sequences, share_prefixes=False)
    assert order.largest_first() is order


@pytest.mark.parametrize(
    "shape, visited, partial",
    [("agentic 32k", 1.0706, 0.132), ("deep 64 turns", 1.0095, 0.021), ("tau2 n=8", 1.0401, 0.078)],
)
def test_blocks_that_attention_visits(shape, visited, partial):
    packed = trie.pack(trie.PrefixOrder.of(shapes.token_paths(shapes.SHAPES[shape])))
    nodes = packed.node_parent_N.tolist(), packed.node_lens_N.tolist()
    some, every = visible_blocks(TreeMetadata.from_nodes(*nodes, padded_to=128), 128, 128)
    pairs = shapes.stats(shapes.SHAPES[shape])["pairs"]
    assert float(some.sum()) * 128 * 128 / pairs == pytest.approx(visited, abs=1e-4)
    assert float((some & ~every).sum() / some.sum()) == pytest.approx(partial, abs=1e-3)
