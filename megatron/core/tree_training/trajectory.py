"""Trajectories: what a trainer hands over, checked once."""

from collections.abc import Mapping
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
    experts, …"""

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
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _tensor(value):
    # A copy: a caller's array may change before a plan makes its batches.
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return torch.tensor(np.asarray(value))


def check(number, trajectory, vocab_size=None):
    """Check one trajectory.

    Raises ValueError, naming the trajectory's number, when a length disagrees, a token is no integer,
    negative or outside of `vocab_size`, a mask is not 0/1 or marks the first token, a value is NaN, or an
    identity has no row for each token.
    """

    def refuse(problem):
        raise ValueError(f"trajectory {number}: {problem}")

    def read(convert, name, value):
        try:
            return convert(value)
        except (TypeError, ValueError) as error:  # a ragged list, None, text
            refuse(f"{name} is no array of numbers: {error}")

    tokens = read(_array, "tokens", trajectory.tokens)
    if tokens.ndim != 1:
        refuse(f"tokens must have one dimension, got shape {tokens.shape}")
    if tokens.size == 0:
        refuse("tokens must not be empty")
    if tokens.dtype.kind not in "iu":
        refuse(f"tokens must be integers, got {tokens.dtype}")
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
            nan = torch.isnan(value).flatten(1).any(1) if value.dim() > 1 else torch.isnan(value)
            if nan.any():
                refuse(f"values[{name!r}] is NaN at position {int(nan.int().argmax())}")
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
            identity = np.ascontiguousarray(identity)
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


def check_all(trajectories, vocab_size=None):
    """Check every trajectory, and that they agree on value names, dtypes, row shapes and identity."""
    checked = [check(i, t, vocab_size) for i, t in enumerate(trajectories)]
    if not checked:
        return checked

    def kinds(t):
        return {name: (v.dtype, tuple(v.shape[1:])) for name, v in t.values.items()}

    names, first_kind = kinds(checked[0]), checked[0].identity_kind
    for i, t in enumerate(checked):
        if kinds(t) != names:
            raise ValueError(f"trajectory {i}: values must be {names} as in trajectory 0, got {kinds(t)}")
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
