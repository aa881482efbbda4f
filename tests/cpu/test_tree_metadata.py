"""TreeMetadata: what is built, refused and carried by copies, against naive walks of the tree."""

import copy
import dataclasses
import pickle
import random
import subprocess
import sys

import pytest
import torch

from megatron.core.transformer.tree_metadata import RouterStatistics, TreeMetadata

#       0: 3 tokens
#      / \
#   1: 2   4: 2      5: 2 (a second tree)
#   / \
# 2: 1 3: 2
PARENTS, LENGTHS = [-1, 0, 1, 1, 0, -1], [3, 2, 1, 2, 2, 2]


def random_tree(seed, nodes, longest=5):
    """Random preorder tree: each node hangs under some node of the current path, or starts a new root."""
    rng = random.Random(seed)
    parents, path = [], []
    for node in range(nodes):
        del path[rng.randint(0 if rng.random() < 0.1 else min(1, len(path)), len(path)) :]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents, [rng.randint(1, longest) for _ in range(nodes)]


def paths_of_tokens(parents, lengths, padding=0):
    """For each packed token the packed indices of its path, itself last: by walking up, without intervals."""
    starts = [sum(lengths[:node]) for node in range(len(lengths))]
    paths = []
    for node, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        above, up = [], parents[node]
        while up >= 0:
            above = [*range(starts[up], starts[up] + lengths[up]), *above]
            up = parents[up]
        paths += [above + list(range(start, start + n + 1)) for n in range(length)]
    real = sum(lengths)
    return paths + [list(range(real, real + n + 1)) for n in range(padding)]


def test_from_nodes_values():
    made = TreeMetadata.from_nodes(PARENTS, LENGTHS, padded_to=8)
    assert made.cu_node_lens.tolist() == [0, 3, 5, 6, 8, 10, 12, 16]
    assert made.node_parent.tolist() == PARENTS
    assert made.tree_position_ids.tolist() == [0, 1, 2, 3, 4, 5, 5, 6, 3, 4, 0, 1, 0, 0, 0, 0]
    assert (made.padded_size, made.total_tokens, made.num_nodes, made.max_position) == (16, 16, 6, 6)
    assert made.has_padding and made.precomputed is None
    assert [
        t.dtype for t in (made.cu_node_lens, made.node_parent, made.tree_position_ids, made.subtree_end)
    ] == [
        torch.int32,
        torch.int32,
        torch.int64,
        torch.int32,
    ]
    assert made.subtree_end.tolist() == [10] * 3 + [8] * 2 + [6] + [8] * 2 + [10] * 2 + [12] * 2 + [16] * 4


def test_field_order_is_the_contract():
    assert [f.name for f in dataclasses.fields(TreeMetadata) if f.init] == [
        "cu_node_lens",
        "node_parent",
        "tree_position_ids",
        "padded_size",
        "num_nodes",
        "precomputed",
        "max_position",
        "router_statistics",  # by keyword only
        "roots_only",  # by keyword only
    ]
    assert not any(f.kw_only for f in dataclasses.fields(TreeMetadata)[:7])


@pytest.mark.parametrize("seed", range(12))
def test_subtree_end_and_positions_against_walks(seed):
    parents, lengths = random_tree(seed, nodes=1 + 7 * seed)
    made = TreeMetadata.from_nodes(parents, lengths, padded_to=1 + seed % 3 * 8)
    paths = paths_of_tokens(parents, lengths, padding=made.padded_size - sum(lengths))
    end, ids = made.subtree_end.tolist(), made.tree_position_ids.tolist()
    for query, path in enumerate(paths):
        assert [key for key in range(len(paths)) if key <= query < end[key]] == path
    assert [ids[q] for q in range(sum(lengths))] == [len(paths[q]) - 1 for q in range(sum(lengths))]
    assert made.max_position == max(ids)


def test_roots_only_is_known_on_the_host_and_goes_along():
    roots, tree = (TreeMetadata.from_nodes(parents, [3, 4], padded_to=8) for parents in ([-1, -1], [-1, 0]))
    assert not tree.roots_only and not tree.to("meta").roots_only
    for same in (roots, roots.to("meta"), copy.deepcopy(roots), pickle.loads(pickle.dumps(roots))):
        assert same.roots_only is True
    assert not dataclasses.replace(roots, roots_only=False).validate().roots_only


def test_a_chain_and_a_wide_tree_end_where_they_should():
    chain = TreeMetadata.from_nodes([-1, *range(32)], [1] * 33)
    assert chain.subtree_end.tolist() == [33] * 33
    wide = TreeMetadata.from_nodes([-1] + [0] * 40, [2] + [1] * 40)
    assert wide.subtree_end.tolist() == [42, 42, *range(3, 43)]


def test_all_padding_pack():
    made = TreeMetadata.from_nodes([], [], padded_size=5)
    assert (made.num_nodes, made.max_position, made.has_padding) == (0, 0, True)
    assert made.tree_position_ids.tolist() == [0] * 5 and made.subtree_end.tolist() == [5] * 5


def test_packed_seq_params():
    made = TreeMetadata.from_nodes(PARENTS, LENGTHS, padded_to=8)
    params = made.packed_seq_params()
    assert params.qkv_format == "thd" and params.tree_metadata is made
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 16]
    assert params.cu_seqlens_q.dtype == torch.int32
    assert params.max_seqlen_q == params.max_seqlen_kv == 7
    with pytest.raises(
        ValueError, match=r"max_position: expected the largest position id as an int, got None"
    ):
        dataclasses.replace(made, max_position=None).packed_seq_params()


def test_cache_is_filled_once_and_not_carried():
    made = TreeMetadata.from_nodes(PARENTS, LENGTHS)
    made.precomputed = {"te": torch.ones(2)}
    end = made.subtree_end
    assert made.subtree_end is end
    built = []
    assert made.cached("k", lambda m: built.append(m) or 7) == made.cached("k", lambda m: 1 / 0) == 7
    assert built == [made]
    for other in (
        copy.copy(made),
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        dataclasses.replace(made),
        made.to("meta"),
    ):
        assert other is not made and other != made
        assert other._cache == {} and other._cache is not made._cache
        assert (other.padded_size, other.num_nodes, other.max_position) == (12, 6, 6)
        assert list(other.precomputed) == ["te"]
    assert copy.copy(made).node_parent is made.node_parent
    assert copy.deepcopy(made).node_parent is not made.node_parent
    assert torch.equal(copy.deepcopy(made).subtree_end, end)
    assert set(made._cache) == {"validated", "subtree_end", "k"}


def test_to_moves_tensors_and_leaves_precomputed():
    made = TreeMetadata.from_nodes(PARENTS, LENGTHS)
    assert made.to("cpu") is made
    moved = made.to("meta")
    assert moved.device.type == moved.tree_position_ids.device.type == moved.node_parent.device.type == "meta"
    assert moved.max_position == 6
    beside = dataclasses.replace(moved, node_parent=made.node_parent).to("meta")
    assert beside.node_parent.device.type == "meta"
    for wrong in (torch.float16, None):
        with pytest.raises(TypeError, match=f"^device: expected a torch.device or its name, got {wrong}"):
            made.to(wrong)


def replaced(**fields):
    return dataclasses.replace(TreeMetadata.from_nodes(PARENTS, LENGTHS, padded_to=8), **fields)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


REFUSED = {
    "dtype": (
        dict(cu_node_lens=torch.arange(8)),
        r"cu_node_lens: expected a 1-D int32 tensor, got int64 of shape \[8\]",
    ),
    "not a tensor": (dict(node_parent=[-1, 0]), r"node_parent: expected a 1-D int32 tensor, got list"),
    "ids dtype": (
        dict(tree_position_ids=int32(0)),
        r"tree_position_ids: expected a 1-D int64 tensor, got int32",
    ),
    "start": (
        dict(cu_node_lens=int32(1, 3, 5, 6, 8, 10, 12, 16)),
        r"cu_node_lens: expected to start at 0, got 1",
    ),
    "not monotone": (
        dict(cu_node_lens=int32(0, 3, 6, 5, 8, 10, 12, 16)),
        r"cu_node_lens: expected strictly increasing, got 6 then 5 at node 2",
    ),
    "node count": (dict(num_nodes=5), r"node_parent: expected 5 entries \(num_nodes\), got 6"),
    "not an int": (dict(padded_size=16.0), r"padded_size: expected an int, got float"),
    "two paddings": (
        dict(cu_node_lens=int32(0, 3, 5, 6, 8, 10, 12, 14, 16)),
        r"cu_node_lens: expected 7 entries \(num_nodes \+ 1\), or one more for padding, got 9",
    ),
    "padded_size": (dict(padded_size=12), r"padded_size: expected 16 \(cu_node_lens\[-1\]\), got 12"),
    "ids count": (
        dict(tree_position_ids=torch.arange(12)),
        r"tree_position_ids: expected 16 entries \(padded_size\), got 12",
    ),
    "parent after child": (
        dict(node_parent=int32(-1, 2, 1, 1, 0, -1)),
        r"node_parent: expected -1 or an earlier node for node 1, got 2",
    ),
    "not depth first": (
        dict(node_parent=int32(-1, 0, 1, 0, 1, -1)),
        r"node_parent: expected depth-first preorder, got node 4 with parent 1, whose subtree had already",
    ),
    "sequential ids": (
        dict(tree_position_ids=torch.arange(16)),
        r"tree_position_ids: expected 5..6 for node 3 \(parent 1\), got \[6, 7\]",
    ),
    "max_position": (dict(max_position=7), r"max_position: expected 6, got 7"),
    "padding ids": (
        dict(tree_position_ids=torch.tensor([0, 1, 2, 3, 4, 5, 5, 6, 3, 4, 0, 1, 6, 7, 8, 9])),
        r"tree_position_ids: expected 0..6 for padding \(0 when built by from_nodes\), got \[6, 7, 8, 9\]",
    ),
    "not only roots": (dict(roots_only=True), r"roots_only: expected False, for not every node_parent is -1"),
    "router weights": (
        dict(router_statistics=RouterStatistics(torch.ones(12), 1.0, 12.0)),
        r"router_statistics.weights_T: expected 16 entries \(padded_size\) on cpu, got 12 on cpu",
    ),
    "router weights' type": (
        dict(router_statistics=RouterStatistics(int32(*range(16)), 1.0, 16.0)),
        r"router_statistics.weights_T: expected a 1-D float32 tensor, got int32",
    ),
    "devices": (
        dict(node_parent=int32(*PARENTS).to("meta")),
        r"node_parent, tree_position_ids: expected cpu \(of cu_node_lens\), got meta, cpu",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_validate_refuses(name):
    fields, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        replaced(**fields).validate()


def test_validate_accepts_what_from_nodes_builds_and_returns_it():
    made = TreeMetadata.from_nodes(*random_tree(3, 25), padded_to=16)
    assert made.validate() is made


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(parents=[-1, 0], lengths=[1]), r"lengths: expected one per parent, 2, got 1"),
        (
            dict(parents=[-1, 0], lengths=[1, 0]),
            r"lengths: expected at least 1 token per node, got 0 for node 1",
        ),
        (
            dict(parents=[-1, 1], lengths=[1, 1]),
            r"node_parent: expected -1 or an earlier node for node 1, got 1",
        ),
        (dict(parents=[-1], lengths=[1], padded_to=0), r"padded_to: expected at least 1, got 0"),
        (
            dict(parents=[-1], lengths=[9], padded_size=8),
            r"padded_size: expected a multiple of 1 that holds 9 tokens, got 8",
        ),
        (dict(parents=[], lengths=[]), r"padded_size: expected at least one token, got an empty pack"),
        (dict(parents=[-1], lengths=[2.5]), r"lengths: expected integers, got \[2.5\]"),
        (dict(parents=[None], lengths=[2]), r"parents: expected integers, got \[None\]"),
        (dict(parents=[-1], lengths=[2], padded_to=4.0), r"padded_to: expected integers, got \[4.0\]"),
    ],
)
def test_from_nodes_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        TreeMetadata.from_nodes(**kwargs)


def test_from_nodes_takes_arrays_and_tensors():
    import numpy as np

    wanted = TreeMetadata.from_nodes([-1, 0, 0], [2, 1, 3])
    for convert in (np.array, torch.tensor, lambda v: [np.int32(x) for x in v]):
        made = TreeMetadata.from_nodes(convert([-1, 0, 0]), convert([2, 1, 3]))
        assert made.tree_position_ids.equal(wanted.tree_position_ids)
        assert (type(made.padded_size), type(made.max_position)) == (int, int)
    padded = TreeMetadata.from_nodes([-1], [3], padded_size=np.int64(8), padded_to=np.int32(4))
    assert (padded.padded_size, type(padded.padded_size)) == (8, int)


def test_module_does_not_import_torch_by_itself():
    import megatron.core.transformer.tree_metadata as module

    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('tree_metadata', {module.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['tree_metadata'] = module\n"
        "spec.loader.exec_module(module)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
