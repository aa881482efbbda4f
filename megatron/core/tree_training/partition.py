"""Trajectories cut into micro-batches under a token budget, with few tokens computed twice.

A micro-batch is a set of whole trajectories; it costs the tokens of their trie. A tree that does not fit one
micro-batch is split into subtrees whose common path is repeated. Minimising the repeated tokens is bin
packing, so two heuristics run and the better result is kept:

    bottom up   at every branch, deepest first, the pieces of its subtrees fill micro-batches best-fit;
    contiguous  cut the depth-first order where the least is shared: optimal for that order. Better where a
                subtree should be split although it would fit, to fill up micro-batches that hold its
                siblings.

A place is a trajectory's position in the depth-first order of `trie.PrefixOrder`.
"""

import itertools
from bisect import bisect_left, insort
from collections import deque

import numpy as np


def contiguous(order, max_tokens, max_trajectories):
    """Bounds [0, …, n] of segments of consecutive places that repeat the fewest tokens, then of the fewest
    segments.

    With C the running sum of added tokens, the segment [i, j) packs into shared[i] + C[j] - C[i] tokens, of
    which shared[i] are repeated. It grows with j and shrinks with i, so what fits is a sliding window.
    """
    shared = order.shared.tolist()
    running = np.concatenate([[0], np.cumsum(order.lengths - order.shared)]).tolist()
    n = len(shared)
    cost, previous = [(0, 0)] + [None] * n, [0] * (n + 1)
    window, low = deque(), 0
    for end in range(1, n + 1):
        new = end - 1
        through = (cost[new][0] + shared[new], cost[new][1] + 1)
        while window and window[-1][0] >= through:
            window.pop()
        window.append((through, new))
        while shared[low] + running[end] - running[low] > max_tokens or end - low > max_trajectories:
            low += 1
        while window[0][1] < low:
            window.popleft()
        cost[end], previous[end] = window[0]
    bounds = [n]
    while bounds[-1]:
        bounds.append(previous[bounds[-1]])
    return bounds[::-1]


def best_fit(items, max_tokens, max_trajectories):
    """Items (tokens, places) united best-fit, largest first; tokens of united items add up."""
    united, room = [], []  # room: sorted (free tokens, number in united)
    for tokens, places in sorted(items, key=lambda item: (-item[0], item[1][0])):
        at = bisect_left(room, (tokens, -1))
        while at < len(room) and len(united[room[at][1]][1]) + len(places) > max_trajectories:
            at += 1
        if at < len(room):
            free, number = room.pop(at)
            united[number] = (united[number][0] + tokens, united[number][1] + places)
        else:
            free, number = max_tokens, len(united)
            united.append((tokens, places))
        insort(room, (free - tokens, number))
    return united


def _climb(order, leaf, close):
    """Visit the trie's branching depths bottom-up and return what the roots give.

    Items hang below a path of some depth; their first entry counts tokens beyond it. leaf(place) gives the
    item of one trajectory at its own end. close(depth, above, items) unites items below a path of `depth`
    tokens and returns items below its first `above` tokens, where the next branch is.
    """
    stack = [(0, [])]

    def close_to(depth):
        while stack[-1][0] > depth:
            below, items = stack.pop()
            above = max(depth, stack[-1][0])
            if stack[-1][0] < above:
                stack.append((above, []))
            stack[-1][1].extend(close(below, above, items))

    for place, (length, shared) in enumerate(zip(order.lengths.tolist(), order.shared.tolist(), strict=True)):
        close_to(shared)
        if stack[-1][0] < length:
            stack.append((length, []))
        stack[-1][1].append(leaf(place))
    close_to(0)
    return close(0, 0, stack[0][1])


def bottom_up(order, max_tokens, max_trajectories):
    """Sets of places: pieces united best-fit at every branch, deepest first."""

    def close(depth, above, items):
        items = best_fit(items, max_tokens - depth, max_trajectories) if len(items) > 1 else items
        return [(tokens + depth - above, places) for tokens, places in items]

    return [sorted(places) for _, places in _climb(order, lambda place: (0, [place]), close)]


def lower_bound(order, max_tokens, max_trajectories=None):
    """Fewest packed tokens that any plan could reach.

    Below a path of d tokens hang c tokens, bounded from below themselves. Every micro-batch that touches them
    holds the path too and has room for max_tokens - d of them. So the path is packed at least ceil(c /
    (max_tokens - d)) times, and at least as often as the path to any of its branches.
    """
    limit = max_trajectories or max(order.order.size, 1)

    def close(depth, above, items):
        below, trajectories = sum(item[0] for item in items), sum(item[1] for item in items)
        times = max([item[2] for item in items] + [-(-trajectories // limit)])
        if below:
            times = max(times, -(-below // (max_tokens - depth)))
        return [(below + times * (depth - above), trajectories, times)]

    return _climb(order, lambda place: (0, 1, 1), close)[0][0] if order.order.size else 0


def fewest_tokens(order, max_tokens, max_trajectories=None):
    """The better of both heuristics: sets of places, each in increasing order."""
    n = order.order.size
    limit = max_trajectories or max(n, 1)
    bounds = contiguous(order, max_tokens, limit)
    plans = [bottom_up(order, max_tokens, limit) if n else []]
    plans.append([list(range(low, high)) for low, high in itertools.pairwise(bounds)])
    return min(plans, key=lambda sets: (sum(order.subset(s).packed_tokens for s in sets), len(sets)))


def attended_pairs(order):
    """(query, key) pairs that attention visits: every packed token sees its path up to itself."""
    ends = order.lengths * (order.lengths + 1) // 2
    return int((ends - order.shared * (order.shared + 1) // 2).sum())


def deal(costs, ranks, multiple=1):
    """Deal micro-batches to ranks: every rank equally many, a multiple of `multiple`, with even sums of
    costs.

    Returns [ranks][count] numbers of micro-batches, None for a dummy. Ranks run their k-th micro-batch at the
    same time (expert parallelism even waits for all of them in every layer), so those k-th ones have similar
    costs: the micro-batches are dealt in falling order of cost, each round giving more to the ranks that have
    less.
    """
    count = max(-(-len(costs) // ranks), 1)
    count = -(-count // multiple) * multiple
    falling = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    hands, sums = [[] for _ in range(ranks)], [0] * ranks
    for start in range(0, count * ranks, ranks):
        dealt = falling[start : start + ranks]
        poorest = sorted(range(ranks), key=lambda r: (sums[r], r))
        for rank, number in zip(poorest, dealt + [None] * (ranks - len(dealt)), strict=True):
            hands[rank].append(number)
            sums[rank] += 0 if number is None else costs[number]
    return hands


def balanced(order, max_tokens, max_trajectories, ranks, multiple, pair_cost):
    """Micro-batches and how they are dealt: (sets of places, hands), see `deal`.

    Fewest tokens is not fastest where that leaves ranks idle: smaller budgets, which repeat more tokens but
    spread them more evenly, are tried too, and the plan whose slowest rank finishes first is kept. The cost
    of a micro-batch is its packed tokens plus pair_cost for every attended pair.
    """

    def costs(sets):
        return [s.packed_tokens + pair_cost * attended_pairs(s) for s in map(order.subset, sets)]

    def judged(budget):
        sets = fewest_tokens(order, budget, max_trajectories)
        each = costs(sets)
        hands = deal(each, ranks, multiple)
        slowest = max(sum(each[i] for i in hand if i is not None) for hand in hands)
        return (slowest, sum(each)), sets, hands

    plans = [judged(max_tokens)]
    smallest = int(order.lengths.max()) if order.order.size else max_tokens
    group = ranks * multiple
    rounds = -(-len(plans[0][1]) // group) * group
    for wanted in (rounds, rounds + group) if group > 1 and order.order.size > 1 else ():
        # The smallest budget that still makes at most `wanted` micro-batches.
        low, high = smallest, min(max_tokens, order.packed_tokens)
        for _ in range(8):
            if high - low <= high // 64:
                break
            middle = (low + high) // 2
            plan = judged(middle)
            plans.append(plan)
            low, high = (low, middle) if len(plan[1]) <= wanted else (middle, high)
    _, sets, hands = min(plans, key=lambda plan: plan[0])
    return sets, hands
