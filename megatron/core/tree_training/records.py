"""Trajectories from records, in the field names that RL trainers already write.

Two conventions, told apart by their fields:

    tokens, response_length, loss_mask (covers the response only)
    prompt_ids, response_ids, response_mask

Both may carry per-token values of the response and anything about the trajectory as a whole.
"""

import json
from collections.abc import Iterable, Mapping
from operator import index

import numpy as np
import torch

from megatron.core.tree_training.trajectory import Trajectory, _array

RESPONSE_VALUES = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "advantages",
    "returns",
)
"""Fields that are per-token values of the response when they are lists."""


def trajectory_from_record(number, record, response_values=RESPONSE_VALUES):
    """One record as a Trajectory.

    A list, array or tensor under a name in `response_values` has one entry for each response token and is
    filled with zeros over the prompt; every other field is a value of the trajectory. A missing mask trains
    the whole response.

    Raises:
        ValueError: naming the trajectory, when fields are missing or lengths disagree.
    """

    def refuse(problem):
        raise ValueError(f"trajectory {number}: {problem}")

    def ids(name):
        try:
            found = _array(record[name])
        except ValueError as error:  # a ragged list
            refuse(f"{name} is no array of numbers: {error}")
        if found.ndim != 1:
            refuse(f"{name} must be a list of token ids, got shape {found.shape}")
        return found

    if "tokens" in record and "response_length" in record:
        tokens, response = ids("tokens"), record["response_length"]
        mask, used = record.get("loss_mask"), {"tokens", "response_length", "loss_mask"}
        mask_name = "loss_mask"
    elif "prompt_ids" in record and "response_ids" in record:
        prompt_ids, response_ids = ids("prompt_ids"), ids("response_ids")
        response = len(response_ids)
        # An empty list is an array of floats: it must not make floats of the tokens.
        tokens = np.concatenate([part for part in (prompt_ids, response_ids) if part.size] or [prompt_ids])
        mask, used = record.get("response_mask"), {"prompt_ids", "response_ids", "response_mask"}
        mask_name = "response_mask"
    else:
        refuse(
            "expected the fields tokens and response_length, or prompt_ids and response_ids, "
            f"got {sorted(record)}"
        )
    try:
        whole = None if isinstance(response, bool) else index(response)  # NumPy's and torch's integers too
    except TypeError:
        whole = None
    if whole is None or not 0 <= whole <= len(tokens):
        refuse(f"response_length must be an integer in [0, {len(tokens)}], got {response!r}")
    response = whole
    prompt = len(tokens) - response

    def over_response(name, value):
        # NumPy has no bfloat16.
        value = _array(value.float() if getattr(value, "dtype", None) == torch.bfloat16 else value)
        if value.shape[:1] != (response,):
            refuse(f"{name} must have {response} entries like the response, got shape {value.shape}")
        return np.concatenate([np.zeros((prompt, *value.shape[1:]), value.dtype), value])

    mask = over_response(mask_name, np.ones(response, np.int64) if mask is None else mask)
    values, others = {}, {}
    for name, value in record.items():
        if name in used:
            continue
        per_token = isinstance(value, (list, tuple, np.ndarray, torch.Tensor)) and getattr(value, "ndim", 1)
        if name in response_values and per_token:
            value = over_response(name, value)
            values[name] = value.astype(np.float32) if value.dtype == np.float64 else value
        else:
            others[name] = value
    return Trajectory(tokens, mask, values, others)


def trajectories_from_records(records: Iterable[Mapping], response_values=RESPONSE_VALUES):
    """Trajectories of an iterable of records, see `trajectory_from_record`."""
    return [trajectory_from_record(i, record, response_values) for i, record in enumerate(records)]


def read_jsonl(path, response_values=RESPONSE_VALUES):
    """Trajectories of a JSON-lines file with one record a line; empty lines are skipped.

    Raises:
        ValueError: naming the line, when it is no JSON object; otherwise as `trajectory_from_record`.
    """
    records = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.strip())
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}, column {error.colno}: {error.msg}") from error
            if not isinstance(record, dict):
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object, got {type(record).__name__}"
                )
            records.append(record)
    return trajectories_from_records(records, response_values)
