"""Prefix trie of trajectories, in NumPy: sorting and longest common prefixes, nothing per token in Python.

Sorted lexicographically, every trajectory shares its longest known prefix with its neighbour before it, so
the trie is two arrays: the sorted order and, per sorted trajectory, the number of leading tokens that it
shares with the one before. Written one after another, what each sorted trajectory adds is the trie in
depth-first preorder.

n trajectories, L tokens of all of them (linear), T tokens of the trie (packed), N nodes.
"""

from dataclasses import dataclass

import numpy as np


def _record_bytes(tokens_L, identity_L):
    """One trajectory as bytes whose order is the tokens' order, and whose prefixes are its prefixes."""
    big_endian = tokens_L.astype(">u4")
    if identity_L is None:
        return big_endian.tobytes()
    return np.concatenate([big_endian.view(np.uint8).reshape(-1, 4), identity_L], axis=1).tobytes()


def _common_prefix(a, b, identity_a, identity_b):
    m = min(a.size, b.size)
    # The first block decides most neighbours: do not compare 32k tokens to find that the first differs.
    for low, high in ((0, min(m, 64)), (min(m, 64), m)):
        differs = a[low:high] != b[low:high]
        if identity_a is not None:
            differs |= (identity_a[low:high] != identity_b[low:high]).any(axis=1)
        first = int(differs.argmax()) if high > low else 0
        if high > low and differs[first]:
            return low + first
    return m


@dataclass(frozen=True)
class PrefixOrder:
    """Trajectories in trie order.

    order: int64 [n], trajectory numbers in packing order.
    lengths: int64 [n], tokens of each, in packing order.
    shared: int64 [n], leading tokens in common with the previous one in packing order; 0 for the first.
    """

    order: np.ndarray
    lengths: np.ndarray
    shared: np.ndarray

    @classmethod
    def of(cls, tokens, identities=None, share_prefixes=True):
        """Sort trajectories and measure what neighbours share.

        tokens: list of 1-D integer arrays with values in [0, 2**32), none empty.
        identities: None, or one uint8 [length, k] array for each: tokens are equal where these bytes are
            equal too.
        share_prefixes: False keeps the given order and shares nothing: the linear layout as one-root chains.
        """
        n = len(tokens)
        lengths = np.fromiter((t.size for t in tokens), np.int64, n)
        shared = np.zeros(n, np.int64)
        if not share_prefixes:
            return cls(np.arange(n), lengths, shared)
        identities = identities or [None] * n
        keys = [_record_bytes(t, i) for t, i in zip(tokens, identities, strict=True)]
        order = sorted(range(n), key=keys.__getitem__)
        del keys
        for i in range(1, n):
            a, b = order[i - 1], order[i]
            shared[i] = _common_prefix(tokens[a], tokens[b], identities[a], identities[b])
        order = np.asarray(order, np.int64)
        return cls(order, lengths[order], shared)

    def subset(self, places):
        """The order of some of the trajectories; `places` are increasing positions in packing order."""
        places = np.asarray(places, np.int64)
        if places.size == 0:
            return PrefixOrder(places, places, places)
        shared = np.zeros(places.size, np.int64)
        if places.size > 1:
            # What two sorted trajectories share is the least that any neighbours between them share.
            # reduceat's segments run from one index to the next, so begin each just after its trajectory.
            shared[1:] = np.minimum.reduceat(self.shared[: places[-1] + 1], places[:-1] + 1)
        return PrefixOrder(self.order[places], self.lengths[places], shared)

    def largest_first(self):
        """The same trie with the child of most packed tokens first among siblings; roots stay in place.

        A child that follows its parent directly shares the parent's last block of tokens, in which attention
        then needs a mask for the others only. On the agentic shape of benchmarks/shapes.py this leaves 13 %
        of the 128 x 128 blocks that attention visits partly masked, where the other way round leaves 19 %.
        """
        if not self.shared.any():
            return self
        # [depth, packed tokens below it, children or the trajectory that ends there]. The stack is the path
        # to the last trajectory; what leaves it is complete.
        stack = [[0, 0, []]]

        def attach(above, child):
            weight = child[0] - above[0] + child[1]
            above[1] += weight
            above[2].append((weight, child))

        def back_to(depth):
            done = None
            while stack[-1][0] > depth or not isinstance(stack[-1][2], list):
                left = stack.pop()
                if done is not None:
                    attach(left, done)
                done = left
            if stack[-1][0] < depth:
                stack.append([depth, 0, []])
            if done is not None:
                attach(stack[-1], done)

        for place in range(self.order.size):
            back_to(int(self.shared[place]))
            stack.append([int(self.lengths[place]), 0, place])
        back_to(0)
        places, shared, todo = [], [], [(0, stack[0])]
        while todo:
            common, (depth, _, below) = todo.pop()
            if not isinstance(below, list):
                places.append(below)
                shared.append(common)
                continue
            if depth:
                below = sorted(below, key=lambda child: -child[0])
            # The first child shares with the trajectory before it what all of this entry does.
            todo += [(depth, child) for _, child in reversed(below[1:])] + [(common, below[0][1])]
        return PrefixOrder(self.order[places], self.lengths[places], np.asarray(shared, np.int64))

    @property
    def packed_tokens(self):
        return int(self.lengths.sum() - self.shared.sum())

    @property
    def linear_tokens(self):
        return int(self.lengths.sum())


@dataclass(frozen=True)
class PackedTrie:
    """The trie laid out depth-first in T tokens.

    index_L: int64 [L], packed index of every token of every trajectory, trajectories in their given order.
    offsets: int64 [n + 1], where each trajectory begins in index_L.
    first_L: int64 [T], an index into the linear layout for every packed token (any trajectory through it).
    source_T: int64 [T], packed index of the token before on the same path; -1 for a root's first token.
    position_T: int64 [T], position on the path.
    branches_T: int64 [T], number of trajectories through the token.
    node_lens_N: int64 [N]; node_parent_N: int64 [N], -1 for a root, otherwise less than the node's own
    number.
    """

    index_L: np.ndarray
    offsets: np.ndarray
    first_L: np.ndarray
    source_T: np.ndarray
    position_T: np.ndarray
    branches_T: np.ndarray
    node_lens_N: np.ndarray
    node_parent_N: np.ndarray


def pack(prefix_order):
    """Lay trajectories out as a trie, largest children first; `order` must number them 0 … n-1."""
    prefix_order = prefix_order.largest_first()
    order, lengths, shared = prefix_order.order, prefix_order.lengths, prefix_order.shared
    n = order.size
    added = lengths - shared
    start = np.concatenate([[0], np.cumsum(added)])  # packed place of what each sorted trajectory adds
    num_packed = int(start[-1])

    offsets = np.zeros(n + 1, np.int64)
    offsets[1 + order] = lengths
    np.cumsum(offsets, out=offsets)
    index = np.empty(int(offsets[-1]), np.int64)
    source = np.arange(-1, num_packed - 1)
    for i in range(n):
        begin, common = offsets[order[i]], shared[i]
        if common:
            before = offsets[order[i - 1]]
            index[begin : begin + common] = index[before : before + common]
        index[begin + common : begin + lengths[i]] = np.arange(start[i], start[i + 1])
        if added[i]:
            source[start[i]] = index[begin + common - 1] if common else -1

    chunk = np.repeat(np.arange(n), added)
    within = np.arange(num_packed) - start[:-1][chunk]
    first = offsets[order][chunk] + shared[chunk] + within
    position = shared[chunk] + within
    branches = np.bincount(index, minlength=num_packed) if n else np.zeros(0, np.int64)

    # A node begins where a token does not simply continue the one before, or where that one has several
    # successors.
    continues = (source >= 0) & (source == np.arange(num_packed) - 1)
    successors = np.bincount(source[source >= 0], minlength=num_packed + 1)
    begins = ~continues | (successors[source] > 1)
    node_start = np.flatnonzero(begins)
    node_of = np.cumsum(begins) - 1
    parent_token = source[node_start]
    node_parent = (
        np.where(parent_token >= 0, node_of[parent_token], -1) if num_packed else np.zeros(0, np.int64)
    )
    return PackedTrie(
        index_L=index,
        offsets=offsets,
        first_L=first,
        source_T=source,
        position_T=position,
        branches_T=branches,
        node_lens_N=np.diff(np.append(node_start, num_packed)),
        node_parent_N=node_parent,
    )
