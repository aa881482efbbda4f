"""Trees on which tree-training figures are quoted.

A tree is a list of (parent, length) in depth-first preorder: lengths in tokens, parent -1 for a root. `stats`
counts what sharing saves, in tokens and in attended (query, key) pairs, packed against linear; `token_paths`
gives every leaf's tokens.
"""

import random

import numpy as np


def chain(length=16384):
    """One trajectory, no branch: what tree attention costs when there is nothing to share."""
    return [(-1, length)]


def grpo(prompt=4096, samples=16, response=1024):
    """One prompt, `samples` responses."""
    return [(-1, prompt)] + [(0, response)] * samples


def agentic(total=32768, system=2048, mean=256, p_branch=0.35, seed=0):
    """Multi-turn search: each next turn continues a random turn on the current path."""
    rng = random.Random(seed)
    nodes, path, used = [(-1, system)], [0], system
    while used < total:
        if rng.random() < p_branch and len(path) > 1:
            path = path[: rng.randint(1, len(path) - 1)]
        length = min(total - used, max(16, int(rng.expovariate(1 / mean))))
        nodes.append((path[-1], length))
        path.append(len(nodes) - 1)
        used += length
    return nodes


def caterpillar(turns=20, user=128, think=512, response=256):
    """Reasoning dropped from history: every turn's thinking is a leaf beside the spine."""
    nodes, spine = [], -1
    for _ in range(turns):
        nodes.append((spine, user))
        spine = len(nodes) - 1
        nodes.append((spine, think + response))
        nodes.append((spine, response))
        spine = len(nodes) - 1
    return nodes


def tau2(samples=8, system=4800, turns=8, turn=220, seed=1):
    """Tool-use dialogue: long shared system prompt, samples that part at random turns."""
    rng = random.Random(seed)
    nodes = [(-1, system)]
    spine = [0]
    for _ in range(turns):
        nodes.append((spine[-1], turn))
        spine.append(len(nodes) - 1)
    # every further sample leaves the first one's path at a random turn; deepest departures first keep
    # preorder
    for leave in sorted((rng.randrange(turns) for _ in range(samples - 1)), reverse=True):
        parent = spine[leave]
        for _ in range(turns - leave):
            nodes.append((parent, turn))
            parent = len(nodes) - 1
    return nodes


def deep(turns=64, turn=400, fork_every=8, fork=800):
    """Long software-engineering run: deep, low fan-out."""
    nodes, spine = [(-1, 1500)], 0
    forks = []
    for t in range(turns):
        nodes.append((spine, turn))
        spine = len(nodes) - 1
        if t % fork_every == fork_every - 1:
            forks.append(spine)
    for parent in reversed(forks):
        nodes.append((parent, fork))
    return nodes


def largest_first(nodes):
    """The same tree with the child of the largest subtree first among siblings, and so on downwards.

    A child that follows its parent directly shares the parent's last block of tokens; best if that is the
    one that most tokens go through.
    """
    children, size = {-1: []}, [length for _, length in nodes]
    for node in reversed(range(len(nodes))):
        parent = nodes[node][0]
        children.setdefault(parent, []).append(node)
        if parent >= 0:
            size[parent] += size[node]
    ordered, todo = [], [(node, -1) for node in sorted(children[-1], key=lambda n: size[n])]
    while todo:
        node, parent = todo.pop()
        ordered.append((parent, nodes[node][1]))
        place = len(ordered) - 1
        todo += [(child, place) for child in sorted(children.get(node, []), key=lambda n: size[n])]
    return ordered


SHAPES = {
    "chain16k": chain(),
    "grpo 4k+16x1k": grpo(),
    "agentic 32k": agentic(),
    "caterpillar": caterpillar(),
    "tau2 n=8": tau2(),
    "deep 64 turns": deep(),
}


def stats(nodes):
    depth, children = [], [0] * len(nodes)
    pairs = 0
    for parent, length in nodes:
        above = 0 if parent < 0 else depth[parent] + nodes[parent][1]
        depth.append(above)
        pairs += length * above + length * (length + 1) // 2
        if parent >= 0:
            children[parent] += 1
    leaves = [depth[i] + nodes[i][1] for i in range(len(nodes)) if not children[i]]
    packed, linear = sum(n for _, n in nodes), sum(leaves)
    linear_pairs = sum(n * (n + 1) // 2 for n in leaves)
    return {
        "nodes": len(nodes),
        "leaves": len(leaves),
        "packed tokens": packed,
        "linear tokens": linear,
        "pairs": pairs,
        "token ratio": linear / packed,
        "pair ratio": linear_pairs / pairs,
        "max depth": max(leaves),
    }


def token_paths(nodes, vocabulary=151936, seed=0):
    """Random tokens, int64, of every path from a root to a leaf: trajectories whose trie is this tree."""
    rng = np.random.default_rng(seed)
    paths, used = [], {}
    for parent, length in nodes:
        tokens = rng.integers(0, vocabulary, length)
        siblings = used.setdefault(parent, set())
        while int(tokens[0]) in siblings:  # siblings part at their first token
            tokens[0] = rng.integers(0, vocabulary)
        siblings.add(int(tokens[0]))
        paths.append(tokens if parent < 0 else np.concatenate([paths[parent], tokens]))
    inner = {parent for parent, _ in nodes}
    return [path for i, path in enumerate(paths) if i not in inner]


def is_preorder(nodes):
    path = []
    for i, (parent, _) in enumerate(nodes):
        while path and path[-1] != parent:
            path.pop()
        if parent >= 0 and not path:
            return False
        path.append(i)
    return True


if __name__ == "__main__":
    for name, nodes in SHAPES.items():
        row = stats(nodes)
        print(
            f"{name:16s} preorder={is_preorder(nodes)} "
            + "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        )
