"""Tries and packed batches against a naive trie of tuples."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.core.tree_training import Trajectory, TreeBatch, plan_micro_batches, trie

PROMPT = [5, 1, 2, 6]


def made(sequences, **options):
    trajectories = [
        Trajectory(tokens=s, loss_mask=[0] + [1] * (len(s) - 1), values={"place": np.arange(len(s))})
        for s in sequences
    ]
    return TreeBatch.from_trajectories(trajectories, **options)


def check_structure(batch, sequences, shared=True):
    """Everything the batch says, against every trajectory token by token."""
    batch.tree_metadata.validate()
    tokens, positions = batch.tokens[0].tolist(), batch.position_ids[0].tolist()
    source = batch.source_T.tolist()
    prefixes = {}
    index = batch.split(batch.index_L)
    assert len(index) == len(sequences)
    for number, (sequence, places) in enumerate(zip(sequences, index, strict=True)):
        places = places.tolist()
        assert [tokens[p] for p in places] == list(sequence)
        assert [positions[p] for p in places] == list(range(len(sequence)))
        assert [source[p] for p in places] == [-1, *places[:-1]]
        for j, place in enumerate(places):
            key = tuple(sequence[: j + 1]) if shared else (number, j)
            assert prefixes.setdefault(key, place) == place
    assert sorted(prefixes.values()) == list(range(batch.packed_tokens))
    assert source[batch.packed_tokens :] == [-1] * (batch.padded_size - batch.packed_tokens)
    counts = np.bincount(batch.index_L.numpy(), minlength=batch.padded_size)
    assert batch.branches_T.tolist() == counts.tolist()
    starts = batch.target_start_T.tolist()
    for s in range(batch.padded_size):
        targets = batch.target_M[starts[s] : starts[s + 1]].tolist()
        assert targets == [t for t in range(batch.padded_size) if source[t] == s]
    # No node could be longer: it ends because its last token has no successor, or several, or another root
    # follows.
    bounds = batch.tree_metadata.cu_node_lens.tolist()
    for end in bounds[1 : batch.tree_metadata.num_nodes + 1]:
        successors = starts[end] - starts[end - 1]
        assert successors != 1


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=14)


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, st.sampled_from([1, 4, 7]), st.booleans())
@example([[0]], 1, True)
@example([[0], [0], [0]], 1, True)
@example([[1, 2, 0], [1, 2], [1]], 4, True)
@example([], 7, True)
@example([[0, 1], [2, 1], [1, 1]], 1, True)
def test_structure_equals_naive_trie(sequences, multiple, share):
    batch = made(sequences, pad_to_multiple_of=multiple, share_prefixes=share)
    assert batch.padded_size % multiple == 0 and batch.padded_size > 0
    check_structure(batch, sequences, share)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=6),
        min_size=1,
        max_size=10,
    )
)
@example([[(0, 1)], [(0, 0)], [(0, 1)]])
def test_identity_is_part_of_the_token(pairs):
    trajectories = [
        Trajectory([t for t, _ in s], [0] * len(s), identity=np.array([[7, k] for _, k in s], np.int16))
        for s in pairs
    ]
    batch = TreeBatch.from_trajectories(trajectories)
    batch.tree_metadata.validate()
    assert batch.packed_tokens == len({tuple(s[: j + 1]) for s in pairs for j in range(len(s))})
    assert [t.tolist() for t in batch.unpack(batch.tokens)] == [[t for t, _ in s] for s in pairs]
    rows = list(
        zip(batch.source_T[batch.target_M].tolist(), batch.tokens[0][batch.target_M].tolist(), strict=True)
    )
    assert batch.distinct_targets == (len(set(rows)) == len(rows))


def test_thousands_of_roots():
    sequences = [[i, 1, 2] for i in range(3000)]
    batch = made(sequences)
    assert batch.tree_metadata.num_nodes == 3000 and batch.packed_tokens == 9000
    assert batch.tree_metadata.max_position == 2
    assert (batch.source_T.view(-1, 3) == torch.arange(9000).view(-1, 3) - 1)[:, 1:].all()
    assert (batch.source_T.view(-1, 3)[:, 0] == -1).all()


@pytest.mark.parametrize("count, length", [(32, 4096), (128, 2048)])
def test_memory_is_a_small_multiple_of_the_tokens(count, length):
    """Peak bytes for each token, which is 8 bytes itself, whatever the number of trajectories."""
    rng = np.random.default_rng(count)
    prompts = rng.integers(0, 151936, (count // 8, length // 8))
    given = [
        Trajectory(
            np.r_[prompts[i // 8], rng.integers(0, 151936, length - length // 8)], np.arange(length) > 99
        )
        for i in range(count)
    ]

    def peak(run):
        tracemalloc.start()
        run()
        found = tracemalloc.get_traced_memory()[1] / (count * length)
        tracemalloc.stop()
        return found

    assert peak(lambda: trie.PrefixOrder.of([t.tokens for t in given])) < 6
    assert peak(lambda: plan_micro_batches(given, 4 * length)) < 16
    # One micro-batch of everything; a plan makes its micro-batches one by one.
    assert peak(lambda: TreeBatch.from_trajectories(given)) < 125


def test_known_tree():
    batch = made([[*PROMPT, 7, 8], [*PROMPT, 9], PROMPT[:2], [*PROMPT, 7]], pad_to_multiple_of=8)
    assert batch.tokens.tolist() == [[5, 1, 2, 6, 7, 8, 9, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 4, 0]]
    assert batch.source_T.tolist() == [-1, 0, 1, 2, 3, 4, 3, -1]
    assert batch.target_M.tolist() == [1, 2, 3, 4, 6, 5]
    assert batch.branches_T.tolist() == [4, 4, 3, 3, 2, 1, 1, 0]
    metadata = batch.tree_metadata
    assert metadata.cu_node_lens.tolist() == [0, 4, 6, 7, 8]
    assert metadata.node_parent.tolist() == [-1, 0, 0] and metadata.num_nodes == 3
    assert metadata.padded_size == 8 and metadata.max_position == 5
    params = batch.packed_seq_params
    assert params.qkv_format == "thd" and params.max_seqlen_q == params.max_seqlen_kv == 6
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 8]
    assert params.cu_seqlens_q.dtype == torch.int32
    assert [b.tolist() for b in batch.unpack(torch.arange(8))] == [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 6],
        [0, 1],
        [0, 1, 2, 3, 4],
    ]
    assert batch.linear_tokens == 18 and batch.packed_tokens == 7 and batch.num_loss_tokens == 14


def test_unpack_sums_gradients_and_keeps_rows():
    batch = made([[*PROMPT, 7, 8], [*PROMPT, 9]])
    values = torch.randn(batch.padded_size, 3, dtype=torch.float64, requires_grad=True)
    first, second = batch.unpack(values)
    assert first.shape == (6, 3) and torch.equal(second[:4], first[:4])
    (first.sum() + 10 * second.sum()).backward()
    assert values.grad[:, 0].tolist() == [11.0] * 4 + [1.0] * 2 + [10.0]
    assert torch.equal(batch.unpack(batch.tokens)[1], torch.tensor([*PROMPT, 9]))
    with pytest.raises(ValueError, match=r"packed values with 7 rows, got shape \(6, 3\)"):
        batch.unpack(values[1:])


def test_plain_varlen_parameters():
    sequences = [[*PROMPT, 7, 8], [*PROMPT, 9], [5]]
    linear = made(sequences, pad_to_multiple_of=8, share_prefixes=False)
    assert linear.tree_metadata.validate().roots_only
    params = linear.varlen_packed_seq_params()
    assert params.tree_metadata is None and params.cu_seqlens_q.tolist() == [0, 6, 11, 12, 16]
    assert params.max_seqlen_q == params.max_seqlen_kv == 6 and params.cu_seqlens_kv is params.cu_seqlens_q
    with pytest.raises(
        ValueError, match=r"3 trajectories of 12 tokens are packed as 3 nodes of 7: .*share_prefixes"
    ):
        made(sequences).varlen_packed_seq_params()


def test_pack_values_inverts_unpack():
    batch = made([[*PROMPT, 7, 8], [*PROMPT, 9], PROMPT[:2]], pad_to_multiple_of=8)
    packed = torch.randn(8, 2)
    packed[batch.packed_tokens :] = 0
    assert torch.equal(batch.pack_values(batch.unpack(packed)), packed)
    assert torch.equal(batch.pack_values(batch.unpack_linear(packed)), packed)
    values = [torch.zeros(6), torch.zeros(5), torch.zeros(2)]
    values[1][4] = 3  # its own token: free to differ
    assert batch.pack_values(values).tolist() == [0, 0, 0, 0, 0, 0, 3, 0]
    values[1][2] = 5  # shared with trajectory 0
    with pytest.raises(
        ValueError, match=r"trajectories 0 and 1 share the token at position 2, .* there are 0.0 and 5.0"
    ):
        batch.pack_values(values)
    holes = [torch.full((6,), float("nan")), torch.full((5,), float("nan")), torch.zeros(2)]
    with pytest.raises(ValueError, match=r"0 and 2 share the token at position 0, .* nan and 0.0"):
        batch.pack_values(holes)
    holes[2] += float("nan")  # no value, on all of them alike
    assert batch.pack_values(holes).isnan().tolist() == [True] * 7 + [False]
    with pytest.raises(ValueError, match=r"values for 13 linear tokens, got \(11,\)"):
        batch.pack_values(values[:2])
    assert made([], pad_to_multiple_of=4).pack_values([]).tolist() == [0] * 4


def test_values_of_any_type_keep_the_given_order():
    trajectories = [
        Trajectory(
            tokens=torch.tensor([3, n, 1]),
            loss_mask=np.array([False, True, n % 2 == 0]),
            values={
                "old": torch.full((3,), n, dtype=torch.bfloat16),
                "experts": np.full((3, 2), n, np.int16),
                "list": [n, n + 0.5, n],
            },
            trajectory_values={"reward": n / 7, "name": f"t{n}"},
        )
        for n in (9, 4, 7, 4)
    ]
    batch = TreeBatch.from_trajectories(trajectories)
    assert [v[1].item() for v in batch.values["old"]] == [9, 4, 7, 4] and batch.values["old"][
        0
    ].dtype == torch.bfloat16
    assert (
        batch.values["experts"][2].tolist() == [[7, 7]] * 3
        and batch.values["experts"][2].dtype == torch.int16
    )
    assert batch.values["list"][1].tolist() == [4, 4.5, 4]
    assert batch.trajectory_values == {"reward": [9 / 7, 4 / 7, 1.0, 4 / 7], "name": ["t9", "t4", "t7", "t4"]}
    assert [m.tolist() for m in batch.loss_mask] == [[False, True, n % 2 == 0] for n in (9, 4, 7, 4)]
    assert batch.packed_tokens == 7
    moved = batch.to("meta")
    assert moved.tokens.device.type == moved.values_L["old"].device.type == "meta"
    assert (
        moved.tree_metadata.cu_node_lens.device.type
        == moved.packed_seq_params.cu_seqlens_q.device.type
        == "meta"
    )
    assert moved.trajectory_values == batch.trajectory_values and moved.lengths == batch.lengths


def test_pinned_memory(monkeypatch):
    """Every tensor of the batch, here without a device to pin for."""
    batch = made([[1, 2, 3], [1, 2, 4]], pad_to_multiple_of=4)
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: pinned.append(t) or t.clone())
    got = batch.pin_memory()
    assert batch == batch and batch != got  # by identity
    metadata, params = got.tree_metadata, got.packed_seq_params
    tensors = [v for v in vars(got).values() if isinstance(v, torch.Tensor)] + [got.values_L["place"]]
    tensors += [metadata.cu_node_lens, metadata.node_parent, metadata.router_statistics.weights_T]
    before = {t.data_ptr() for t in pinned}
    assert len(pinned) == 13 and not before & {t.data_ptr() for t in tensors}
    assert torch.equal(got.index_L, batch.index_L) and params.qkv_format == "thd"
    assert metadata.validate().num_nodes == batch.tree_metadata.num_nodes
    assert torch.equal(metadata.router_statistics.weights_T, batch.tree_metadata.router_statistics.weights_T)


@pytest.mark.parametrize("as_torch", [False, True])
def test_identity_splits_equal_tokens(as_torch):
    def one(key, dtype=np.float32):
        key = np.array(key, dtype)
        return Trajectory([4, 4, 4], [0, 1, 1], identity=torch.tensor(key) if as_torch else key)

    same = TreeBatch.from_trajectories([one([1, 2, 3]), one([1, 2, 3])])
    assert same.packed_tokens == 3
    last = TreeBatch.from_trajectories([one([1, 2, 3]), one([1, 2, 4]), one([1, 9, 3])])
    assert last.packed_tokens == 6 and last.branches_T.tolist().count(3) == 1
    check = [v.tolist() for v in last.unpack(last.tokens)]
    assert check == [[4, 4, 4]] * 3
    wide = TreeBatch.from_trajectories([one([[1, 2], [3, 4], [5, 6]]), one([[1, 2], [3, 0], [5, 6]])])
    assert wide.packed_tokens == 5
    # Bit for bit: minus zero is another key than zero.
    assert TreeBatch.from_trajectories([one([0.0, 1, 1]), one([-0.0, 1, 1])]).packed_tokens == 6
    with pytest.raises(
        ValueError, match=r"trajectory 1: identity must have 3 rows like tokens, got shape \(2,\)"
    ):
        TreeBatch.from_trajectories([one([1, 2, 3]), one([1, 2])])
    with pytest.raises(ValueError, match=r"trajectory 1: identity must be .*float32.* got .*int32"):
        TreeBatch.from_trajectories([one([1, 2, 3]), one([1, 2, 3], np.int32)])


REFUSED = {
    "mask length": (dict(loss_mask=[0, 1]), r"loss_mask must have shape \(3,\) like tokens, got \(2,\)"),
    "mask value": (dict(loss_mask=[0, 0.5, 1]), r"loss_mask must be 0 or 1, got 0.5 at position 1"),
    "first token": (dict(loss_mask=[1, 1, 1]), r"loss_mask must be 0 at position 0"),
    "negative": (dict(tokens=[1, -2, 3]), r"tokens must lie in \[0, 50\), got -2 at position 1"),
    "vocabulary": (dict(tokens=[1, 2, 50]), r"tokens must lie in \[0, 50\), got 50 at position 2"),
    "floats": (dict(tokens=[1.0, 2.0, 3.0]), r"tokens must be integers, got float64"),
    "empty": (dict(tokens=np.zeros(0, int), loss_mask=[]), r"tokens must not be empty"),
    "two dimensions": (dict(tokens=[[1, 2, 3]]), r"tokens must have one dimension, got shape \(1, 3\)"),
    "None in values": (dict(values={"a": [0.0, None, 1.0]}), r"values\['a'\] is no array of numbers: "),
    "no values": (dict(values={"a": None}), r"values\['a'\] is no array of numbers: "),
    "ragged": (dict(tokens=[[1], [2, 3]]), r"tokens is no array of numbers: "),
    "NaN": (dict(values={"a": [0.0, 1.0, float("nan")]}), r"values\['a'\] is NaN at position 2"),
    "-inf": (dict(values={"a": [0.0, 1.0, -np.inf]}), r"values\['a'\] is infinite at position 2"),
    "inf row": (
        dict(values={"a": torch.tensor([[0.0, 0], [1, np.inf], [0, 1]])}),
        r"values\['a'\] is infinite at position 1",
    ),
    "complex": (dict(values={"a": [0, 1j, np.inf * 1j]}), r"values\['a'\] is (NaN|infinite) at position 2"),
    "value type": (
        dict(values={"a": [0, 1, 2]}),
        r"values\['a'\] must be float64 as in trajectory 0, got int64",
    ),
    "row shape": (
        dict(values={"a": np.zeros((3, 2), np.float32)}),
        r"values\['a'\] must be float64 as in trajectory 0, got float32 rows of shape \(2,\)",
    ),
    "text mask": (dict(loss_mask=["0", "1", "1"]), r"loss_mask must be numbers or booleans, got text"),
    "None in mask": (dict(loss_mask=[0, None, 1]), r"loss_mask must be .*, got objects, such as None"),
    "ragged mask": (dict(loss_mask=[0, [1], 1]), r"loss_mask is no array of numbers: "),
    "bf16 mask": (
        dict(loss_mask=torch.tensor([0, 0.5, 1], dtype=torch.bfloat16)),
        r"loss_mask must be 0 or 1, got 0.5 at position 1",
    ),
    "bf16 tokens": (
        dict(tokens=torch.tensor([1.0, 2, 3], dtype=torch.bfloat16)),
        r"tokens must be integers, got bfloat16",
    ),
    "None tokens": (dict(tokens=[1, None, 3]), r"tokens must be integers, got objects, such as None"),
    "ragged identity": (dict(identity=[[1], [2, 3], [4]]), r"identity is no array of numbers: "),
    "NaN row": (dict(values={"a": np.full((3, 2), np.nan)}), r"values\['a'\] is NaN at position 0"),
    "value rows": (
        dict(values={"a": [0.0, 1.0]}),
        r"values\['a'\] must have 3 rows like tokens, got shape \(2,\)",
    ),
    "value names": (
        dict(values={"b": [0.0, 1.0, 2.0]}),
        r"values must be \['a'\] as in trajectory 0, got \['b'\]",
    ),
    "trajectory names": (
        dict(trajectory_values={"x": 1}),
        r"trajectory_values must be \['r'\] as in trajectory 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_trajectory(case):
    fields, message = REFUSED[case]
    good = dict(
        tokens=[1, 2, 3], loss_mask=[0, 1, 1], values={"a": [0.0, 1.0, 2.0]}, trajectory_values={"r": 1}
    )
    with pytest.raises(ValueError, match=rf"^trajectory 1: {message}"):
        TreeBatch.from_trajectories([Trajectory(**good), Trajectory(**{**good, **fields})], vocab_size=50)
    with pytest.raises(ValueError, match="pad_to_multiple_of must be at least 1, got 0"):
        TreeBatch.from_trajectories([Trajectory(**good)], pad_to_multiple_of=0)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"tokens": [1]}, "expected a Trajectory, got dict; trajectories_from_records takes records"),
        (None, "expected a Trajectory, got NoneType; "),
        (Trajectory([1], [0], None), "values must be a mapping from names to values, got NoneType"),
        (Trajectory([1], [0], [0.5]), "values must be a mapping from names to values, got list"),
        (Trajectory([1], [0], {}, None), "trajectory_values must be a mapping .*, got NoneType"),
    ],
)
def test_what_is_no_trajectory_is_refused(wrong, message):
    with pytest.raises(TypeError, match=f"^trajectory 1: {message}"):
        TreeBatch.from_trajectories([Trajectory([1], [0]), wrong])


@pytest.mark.parametrize("wrong", [None, Trajectory([1], [0]), {"tokens": [1]}])
def test_what_is_no_list_of_trajectories_is_refused(wrong):
    message = rf"^trajectories: expected a list of Trajectory objects, got {type(wrong).__name__}"
    for make in (TreeBatch.from_trajectories, lambda given: plan_micro_batches(given, 8)):
        with pytest.raises(TypeError, match=message):
            make(wrong)


def test_a_bf16_mask_is_a_mask():
    mask = torch.tensor([0, 1, 0], dtype=torch.bfloat16)
    batch = TreeBatch.from_trajectories([Trajectory([1, 2, 3], mask)])
    assert batch.loss_mask_L.tolist() == [False, True, False]
