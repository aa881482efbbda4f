"""Trajectories: what a trainer hands over, checked once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any

import numpy as np
import torch


@dataclass(eq=False, repr=False)
class Trajectory:
    """One sampled sequence of tokens, from the first prompt token to the last response token.

    Arrays may be NumPy arrays, torch tensors on any device, or lists.
    """

    tokens: Any
    """Token ids, integers [length]."""

    loss_mask: Any
    """[length], 1 or True where a token's log-probability enters the loss; 0 for the first token, which has
    none."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Per-token values by name, any dtype, [length, ...]: advantages, old log-probabilities, recorded
    experts, … Finite, also where the mask is 0: infinity times 0 is NaN."""

    trajectory_values: Mapping[str, Any] = field(default_factory=dict)
    """Per-trajectory values by name, anything: reward, group, …"""

    identity: Any | None = None
    """[length, ...] or None. Two trajectories share a token only where, besides the token ids, these values
    are equal bit for bit on the whole prefix: recorded MoE routing, content of image tokens."""

    def __repr__(self):
        names = [*self.values, *self.trajectory_values]
        return f"Trajectory({len(self.tokens)} tokens, with {', '.join(names) or 'no values'})"


@dataclass(frozen=True)
class CheckedTrajectory:
    """A trajectory after the checks: tokens int64 NumPy, identity as bytes, the rest torch on the CPU."""

    tokens: np.ndarray
    loss_mask: torch.Tensor
    values: Mapping[str, torch.Tensor]
    trajectory_values: Mapping[str, Any]
    identity: np.ndarray | None
    identity_kind: tuple | None


def at_least_one(name, value):
    """Refuse a count that is no integer or below 1."""
    try:
        number = 0 if isinstance(value, bool) else index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _array(value):
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        # NumPy has no bfloat16.
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return np.asarray(value)


def _tensor(value):
    # A copy: a caller's array may change before a plan makes its batches.
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return torch.tensor(np.asarray(value))


def check(number, trajectory, vocab_size=None):
    """Check one trajectory.

    Raises ValueError, naming the trajectory's number, when a length disagrees, a token is no integer,
    negative or outside of `vocab_size`, a mask is not 0/1 or marks the first token, a value is NaN or
    infinite, or an identity has no row for each token; TypeError when it is no Trajectory or its values are
    no mappings.
    """

    def refuse(problem, kind=ValueError):
        raise kind(f"trajectory {number}: {problem}")

    def read(convert, name, value):
        try:
            return convert(value)
        except (TypeError, ValueError) as error:  # a ragged list, None, text
            refuse(f"{name} is no array of numbers: {error}")

    if not hasattr(trajectory, "tokens") or not hasattr(trajectory, "loss_mask"):
        got = type(trajectory).__name__
        refuse(f"expected a Trajectory, got {got}; trajectories_from_records takes records", TypeError)
    for name in ("values", "trajectory_values"):
        if not isinstance(getattr(trajectory, name), Mapping):
            got = type(getattr(trajectory, name)).__name__
            refuse(f"{name} must be a mapping from names to values, got {got}", TypeError)
    tokens = read(_array, "tokens", trajectory.tokens)
    if tokens.ndim != 1:
        refuse(f"tokens must have one dimension, got shape {tokens.shape}")
    if tokens.size == 0:
        refuse("tokens must not be empty")
    if tokens.dtype.kind not in "iu":
        refuse(f"tokens must be integers, got {_kind(trajectory.tokens, tokens)}")
    length = tokens.size
    low, high = int(tokens.min()), int(tokens.max())
    limit = 2**31 if vocab_size is None else vocab_size
    if low < 0 or high >= limit:
        wrong = low if low < 0 else high
        where = int((tokens == wrong).argmax())
        refuse(f"tokens must lie in [0, {limit}), got {wrong} at position {where}")

    mask = read(_array, "loss_mask", trajectory.loss_mask)
    if mask.shape != (length,):
        refuse(f"loss_mask must have shape ({length},) like tokens, got {mask.shape}")
    if mask.dtype.kind not in "biuf":
        refuse(f"loss_mask must be numbers or booleans, got {_kind(trajectory.loss_mask, mask)}")
    if not ((mask == 0) | (mask == 1)).all():
        where = int((~((mask == 0) | (mask == 1))).argmax())
        refuse(f"loss_mask must be 0 or 1, got {mask[where]} at position {where}")
    if mask[0]:
        refuse("loss_mask must be 0 at position 0: nothing precedes a first token, it has no log-probability")

    values = {}
    for name, value in trajectory.values.items():
        value = read(_tensor, f"values[{name!r}]", value)
        if value.dim() == 0 or value.shape[0] != length:
            refuse(f"values[{name!r}] must have {length} rows like tokens, got shape {tuple(value.shape)}")
        if value.is_floating_point() or value.is_complex():
            wrong = ~torch.isfinite(value)
            if wrong.any():
                where = int(wrong.reshape(length, -1).any(1).int().argmax())
                found = "NaN" if torch.isnan(value[where]).any() else "infinite"
                refuse(f"values[{name!r}] is {found} at position {where}")
        values[name] = value

    identity = kind = None
    if trajectory.identity is not None:
        identity = trajectory.identity
        if isinstance(identity, torch.Tensor):
            identity = identity.detach().cpu()
            kind = (str(identity.dtype), tuple(identity.shape[1:]))
            # NumPy has no bfloat16: its bytes are all that is compared.
            identity = identity.contiguous()
            shape = tuple(identity.shape)
            identity = (
                identity.view(torch.uint8).numpy() if identity.dim() and identity.numel() else np.empty(shape)
            )
        else:
            identity = read(np.ascontiguousarray, "identity", identity)
            kind = (f"torch.{identity.dtype}", identity.shape[1:])
            shape = identity.shape
            if identity.dtype.kind not in "biufc":
                refuse(f"identity must be numbers, got {identity.dtype}")
        if not shape or shape[0] != length:
            refuse(f"identity must have {length} rows like tokens, got shape {shape}")
        identity = identity.reshape(length, identity.size // length).view(np.uint8)
    return CheckedTrajectory(
        tokens=tokens.astype(np.int64),  # a copy, as above
        loss_mask=torch.tensor(mask.astype(bool)),
        values=values,
        trajectory_values=dict(trajectory.trajectory_values),
        identity=identity,
        identity_kind=kind,
    )


def _kind(given, array):
    """What to call the elements of something given as an array."""
    if isinstance(given, torch.Tensor):
        return str(given.dtype).removeprefix("torch.")
    return {"U": "text", "S": "bytes", "O": "objects, such as None"}.get(array.dtype.kind, str(array.dtype))


def check_all(trajectories, vocab_size=None):
    """Check every trajectory, and that they agree on value names, dtypes, row shapes and identity."""
    if not isinstance(trajectories, Iterable) or isinstance(trajectories, Mapping):
        got = type(trajectories).__name__
        raise TypeError(f"trajectories: expected a list of Trajectory objects, got {got}")
    checked = [check(i, t, vocab_size) for i, t in enumerate(trajectories)]
    if not checked:
        return checked

    def kind(value):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} rows of shape {tuple(value.shape[1:])}" if value.dim() > 1 else dtype

    first, first_kind = checked[0].values, checked[0].identity_kind
    for i, t in enumerate(checked):
        if t.values.keys() != first.keys():
            raise ValueError(
                f"trajectory {i}: values must be {sorted(first)} as in trajectory 0, got {sorted(t.values)}"
            )
        for name, value in t.values.items():
            wanted = first[name]
            if (value.dtype, value.shape[1:]) != (wanted.dtype, wanted.shape[1:]):
                raise ValueError(
                    f"trajectory {i}: values[{name!r}] must be {kind(wanted)} as in trajectory 0, "
                    f"got {kind(value)}"
                )
        if t.trajectory_values.keys() != checked[0].trajectory_values.keys():
            raise ValueError(
                f"trajectory {i}: trajectory_values must be {sorted(checked[0].trajectory_values)} as in "
                f"trajectory 0, got {sorted(t.trajectory_values)}"
            )
        if t.identity_kind != first_kind:
            raise ValueError(
                f"trajectory {i}: identity must be {first_kind} as in trajectory 0, got {t.identity_kind}"
            )
    return checked
