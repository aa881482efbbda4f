"""Trajectories from records, in the field names that RL trainers already write.

Two conventions, told apart by their fields:

    tokens, response_length, loss_mask (covers the response only)
    prompt_ids, response_ids, response_mask

Both may carry per-token values of the response and anything about the trajectory as a whole. Which is which
is decided by shape, see `trajectories_from_records`.
"""

import json
from collections.abc import Iterable, Mapping
from operator import index

import numpy as np
import torch

from megatron.core.tree_training.trajectory import Trajectory, _array, _kind

RESPONSE_VALUES = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "advantages",
    "advantage",
    "returns",
)
"""Fields that must have one entry for each response token when they are lists."""


def trajectory_from_record(number, record, response_values=RESPONSE_VALUES):
    """One record as a Trajectory.

    A list, array or tensor under a name in `response_values` has one entry for each response token and is
    filled with zeros over the prompt; every other field is a value of the trajectory. A missing mask trains
    the whole response, but for a first token that nothing precedes.

    Raises:
        ValueError: naming the trajectory and the field, when fields are missing, lengths disagree, or entries
            are no finite numbers.
    """

    def refuse(problem):
        raise ValueError(f"trajectory {number}: {problem}")

    def read(name, value):
        try:
            return _array(value)
        except (TypeError, ValueError) as error:  # a ragged list
            refuse(f"{name} is no array of numbers: {error}")

    if not isinstance(record, Mapping):
        refuse(f"expected a record, a mapping from names to fields, got {type(record).__name__}")

    def ids(name):
        found = read(name, record[name])
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
        given, value = value, read(name, value)
        if value.shape[:1] != (response,):
            refuse(f"{name} must have {response} entries like the response, got shape {value.shape}")
        if value.dtype.kind not in "biufc":
            refuse(f"{name} must be numbers, got {_kind(given, value)}")
        wrong = ~np.isfinite(value.reshape(response, -1)).all(1) if value.size else np.zeros(0, bool)
        if wrong.any():
            where = int(wrong.argmax())
            refuse(f"{name} must be finite, got {value[where].tolist()} at entry {where}")
        return np.concatenate([np.zeros((prompt, *value.shape[1:]), value.dtype), value])

    if mask is None:
        mask = np.ones(response, np.int64)
        mask[: int(prompt == 0)] = 0
    mask = over_response(mask_name, mask)
    if prompt == 0 and mask.size and mask[0]:
        refuse(
            f"{mask_name} must be 0 at entry 0: the response is the whole trajectory, nothing precedes its "
            "first token"
        )
    values, others = {}, {}
    for name, value in record.items():
        if name in used:
            continue
        if name in response_values and _is_list(value):
            value = over_response(name, value)
            values[name] = value.astype(np.float32) if value.dtype == np.float64 else value
        else:
            others[name] = value
    return Trajectory(tokens, mask, values, others)


def _is_list(value):
    return isinstance(value, (list, tuple, np.ndarray, torch.Tensor)) and bool(getattr(value, "ndim", 1))


def trajectories_from_records(records: Iterable[Mapping], response_values=RESPONSE_VALUES):
    """Trajectories of an iterable of records, see `trajectory_from_record`.

    A field is of tokens, whatever its name, if in every record it is a list of numbers as long as the
    response; names in `response_values` must be, where they are lists. A field of integers here and floating
    point numbers there, as JSON writes 1 and 0.5, is float32 everywhere.
    """
    records = list(records)
    names = (*response_values, *_of_tokens(records, response_values))
    made = [trajectory_from_record(i, record, names) for i, record in enumerate(records)]
    for name in {name for t in made for name in t.values}:
        having = [(r[name], t) for r, t in zip(records, made, strict=True) if name in t.values]
        typed = [t for given, t in having if len(given)]
        kinds = {t.values[name].dtype.kind for t in typed}
        if kinds > {"f"} and kinds <= set("iuf"):
            for t in typed:
                t.values[name] = t.values[name].astype(np.float32)
        for given, t in having:
            if typed and not len(given):  # an empty list says nothing about its type
                like = typed[0].values[name]
                t.values[name] = np.zeros((len(t.tokens), *like.shape[1:]), like.dtype)
    return made


def _of_tokens(records, known):
    """Names, beside those known, of fields that in every record are a list of numbers for the response."""

    def fits(record, name):
        value = record.get(name)
        if not _is_list(value):
            return False
        try:
            response = record["response_length"] if "tokens" in record else len(record["response_ids"])
            value = _array(value)
        except (KeyError, TypeError, ValueError):  # refused later, with its number
            return False
        return value.dtype.kind in "biuf" and value.shape[:1] == (response,)

    if not all(isinstance(record, Mapping) for record in records):
        return []
    known = {*known, "tokens", "response_length", "loss_mask", "prompt_ids", "response_ids", "response_mask"}
    names = [name for name in (records[0] if records else ()) if name not in known]
    return [name for name in names if all(fits(record, name) for record in records)]


def read_jsonl(path, response_values=RESPONSE_VALUES):
    """Trajectories of a JSON-lines file with one record a line; empty lines are skipped.

    Raises:
        ValueError: naming the line, when it is no JSON object; otherwise as `trajectory_from_record`.
    """
    records = []
    with open(path, encoding="utf-8-sig") as lines:
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
