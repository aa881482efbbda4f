"""Trajectories read from the field names that trainers write."""

import json

import numpy as np
import pytest
import torch

from megatron.core.tree_training import TreeBatch, read_jsonl, trajectories_from_records


def write(tmp_path, *records):
    path = tmp_path / "trajectories.jsonl"
    path.write_text("\n\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return path


def test_both_conventions_give_the_same_trajectories(tmp_path):
    whole = {
        "tokens": [4, 5, 6, 7, 8],
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "reward": 0.5,
        "rollout_log_probs": [-0.1, -0.2, -0.3],
        "group_index": 2,
    }
    parts = {
        "prompt_ids": [4, 5],
        "response_ids": [6, 7, 8],
        "response_mask": [1, 0, 1],
        "reward": 0.5,
        "rollout_log_probs": [-0.1, -0.2, -0.3],
        "group_index": 2,
    }
    got = read_jsonl(write(tmp_path, whole, parts))
    batch = TreeBatch.from_trajectories(got)
    assert batch.packed_tokens == 5 and batch.num_loss_tokens == 4
    for i in range(2):
        assert batch.unpack(batch.tokens)[i].tolist() == [4, 5, 6, 7, 8]
        assert batch.loss_mask[i].tolist() == [False, False, True, False, True]
        torch.testing.assert_close(
            batch.values["rollout_log_probs"][i], torch.tensor([0, 0, -0.1, -0.2, -0.3])
        )
    assert batch.trajectory_values == {"reward": [0.5, 0.5], "group_index": [2, 2]}


def test_empty_parts_missing_masks_and_own_names():
    records = [
        {"tokens": [4, 5], "response_length": 0, "loss_mask": [], "advantages": 1.5},
        {"prompt_ids": [4], "response_ids": [6, 7], "advantages": -1.0},
        {"prompt_ids": [4, 5], "response_ids": [], "advantages": 0.0},
    ]
    got = trajectories_from_records(records)
    assert [t.tokens.tolist() for t in got] == [[4, 5], [4, 6, 7], [4, 5]]
    assert [t.loss_mask.tolist() for t in got] == [[0, 0], [0, 1, 1], [0, 0]]
    assert [t.trajectory_values["advantages"] for t in got] == [1.5, -1.0, 0.0]
    assert TreeBatch.from_trajectories(got).packed_tokens == 4
    (own,) = trajectories_from_records(
        [{"prompt_ids": [1], "response_ids": [2, 3], "kl": [[1, 2], [3, 4]]}], response_values=("kl",)
    )
    np.testing.assert_array_equal(own.values["kl"], [[0, 0], [1, 2], [3, 4]])


def test_arrays_and_tensors_are_taken_as_lists_are():
    import torch

    record = {"tokens": [1, 2, 3], "response_length": 2, "loss_mask": [1, 0], "advantages": [1.0, 2.0]}
    (wanted,) = trajectories_from_records([record])
    for convert in (np.array, torch.tensor, lambda v: tuple(v) if isinstance(v, list) else np.int64(v)):
        (got,) = trajectories_from_records([{name: convert(value) for name, value in record.items()}])
        assert got.tokens.tolist() == wanted.tokens.tolist() == [1, 2, 3]
        assert got.loss_mask.tolist() == [0, 1, 0]
        assert got.values["advantages"].tolist() == [0, 1, 2] and not got.trajectory_values
    record["advantages"] = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert trajectories_from_records([record])[0].values["advantages"].tolist() == [0, 1, 2]
    record["advantages"] = torch.tensor(0.5)  # of the whole trajectory
    assert trajectories_from_records([record])[0].trajectory_values == {"advantages": 0.5}


def test_fields_of_tokens_are_told_by_their_shape():
    """Whatever their names, if they are so in every record; the others belong to the trajectory."""
    records = [
        {"prompt_ids": [1], "response_ids": [2, 3], "kl": [5, 6], "turns": [0, 1], "tags": ["a", "b"]},
        {"prompt_ids": [1], "response_ids": [4], "kl": [7], "turns": [0, 1], "tags": ["a"]},
    ]
    first, second = trajectories_from_records(records)
    assert first.values["kl"].tolist() == [0, 5, 6] and second.values["kl"].tolist() == [0, 7]
    assert list(first.values) == ["kl"] and second.trajectory_values == {"turns": [0, 1], "tags": ["a"]}
    assert first.values["kl"].dtype == np.int64
    listed = {"prompt_ids": [1], "response_ids": [2, 3], "advantage": [0.5, -0.5]}
    assert trajectories_from_records([listed])[0].values["advantage"].tolist() == [0, 0.5, -0.5]
    with pytest.raises(ValueError, match=r"^trajectory 1: advantage must have 2 entries like the response"):
        trajectories_from_records([listed, {**listed, "advantage": [1]}])
    assert trajectories_from_records([{**listed, "advantage": 2}])[0].trajectory_values == {"advantage": 2}


def test_integers_among_floating_point_numbers(tmp_path):
    """JSON has 1 where it could have 1.0; and an empty list has no type."""
    lists = ([1, 0], [0.5], [], [2])
    path = write(
        tmp_path,
        *(
            {"prompt_ids": [9], "response_ids": [3] * len(v), "advantages": v, "experts": [[4, 5]] * len(v)}
            for v in lists
        ),
    )
    got = read_jsonl(path, ("experts", "advantages"))
    assert {t.values["advantages"].dtype for t in got} == {np.dtype(np.float32)}
    assert {t.values["experts"].dtype for t in got} == {np.dtype(np.int64)}
    batch = TreeBatch.from_trajectories(got)
    assert batch.values_L["advantages"].tolist() == [0, 1, 0, 0, 0.5, 0, 0, 2]
    assert batch.values["experts"][2].tolist() == [[0, 0]]


def test_a_whole_response_without_a_mask_trains_all_that_has_a_log_probability():
    (got,) = trajectories_from_records([{"tokens": [1, 2, 3], "response_length": 3}])
    assert got.loss_mask.tolist() == [0, 1, 1]


REFUSED = {
    "no record": ([1], r"expected a record, a mapping from names to fields, got list"),
    "first token": (
        {"prompt_ids": [], "response_ids": [2, 3], "response_mask": [1, 1]},
        r"response_mask must be 0 at entry 0: the response is the whole trajectory",
    ),
    "ragged mask": (
        {"tokens": [1, 2, 3], "response_length": 2, "loss_mask": [0, [1]]},
        r"loss_mask is no array of numbers: ",
    ),
    "text mask": (
        {"tokens": [1, 2], "response_length": 1, "loss_mask": ["1"]},
        r"loss_mask must be numbers, got text",
    ),
    "null": (
        {"tokens": [1, 2, 3], "response_length": 2, "returns": [0.5, None]},
        r"returns must be numbers, got objects, such as None",
    ),
    "NaN": (
        {"tokens": [1, 2, 3], "response_length": 2, "returns": [0.5, float("nan")]},
        r"returns must be finite, got nan at entry 1",
    ),
    "infinite": (
        {"tokens": [1, 2, 3], "response_length": 2, "returns": [float("-inf"), 0.5]},
        r"returns must be finite, got -inf at entry 0",
    ),
    "text": ({"prompt_ids": "ab", "response_ids": [1]}, r"prompt_ids must be a list of token ids, got shape"),
    "no tokens": ({"tokens": None, "response_length": 0}, r"tokens must be a list of token ids, got shape"),
    "ragged": ({"tokens": [1, [2]], "response_length": 0}, r"tokens is no array of numbers: "),
    "bool": (
        {"tokens": [1, 2], "response_length": True},
        r"response_length must be an integer in \[0, 2\], got True",
    ),
    "fields": ({"tokens": [1]}, r"expected the fields tokens and response_length, or .* got \['tokens'\]"),
    "length": (
        {"tokens": [1], "response_length": 2},
        r"response_length must be an integer in \[0, 1\], got 2",
    ),
    "mask": (
        {"tokens": [1, 2], "response_length": 1, "loss_mask": [0, 1]},
        r"loss_mask must have 1 entries like the response, got shape \(2,\)",
    ),
    "values": (
        {"prompt_ids": [1], "response_ids": [2], "old_log_probs": []},
        r"old_log_probs must have 1 entries like the response, got shape \(0,\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_trajectory(case):
    record, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"^trajectory 1: {message}"):
        trajectories_from_records([{"prompt_ids": [1], "response_ids": [2]}, record])


def test_refusals_name_the_line(tmp_path):
    good = {"prompt_ids": [1], "response_ids": [2]}
    with pytest.raises(ValueError, match=r"trajectories.jsonl, line 3, column 2: Expecting"):
        read_jsonl(write(tmp_path, good, "{"))
    assert len(read_jsonl(write(tmp_path, "\ufeff" + json.dumps(good)))) == 1  # a byte order mark
    with pytest.raises(ValueError, match=r"trajectories.jsonl, line 1: expected a JSON object, got list"):
        read_jsonl(write(tmp_path, "[1]"))
