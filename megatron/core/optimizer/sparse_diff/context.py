"""The hook through which optimizer results reach model parameters.

Megatron's optimizers keep main weights and copy them to the model after each step. Every such copy is written

    with sparse_diff_context(shard_model_param, shard_main_param) as copy:
        copy()

so that what changes is known where it changes. Without a manager `copy()` is the plain ``copy_`` and nothing
is allocated. A manager is attached per model parameter as ``_sparse_manager``; shards of a parameter carry
the parameter as ``_sparse_owner``. It has one of two shapes:

* ``before_copy(shard_model)`` and ``after_copy(shard_model, shard_main)``, called around the plain copy;
* ``copy_captured(shard_model, shard_main, non_blocking)``, which performs the copy itself (one fused kernel).

Ours is of the second shape, and inside a method that is decorated with ``copies_together`` its copies on a
GPU happen together, in few launches.
"""

import importlib
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from .shards import copies_together

__all__ = [
    "BUILTIN",
    "SparseManager",
    "SparseState",
    "copy_with_sparse_diff",
    "init_sparse_manager",
    "note_model_reload",
    "register_manager_factory",
    "sparse_diff_context",
    "sparse_state",
]

STATE_VARIABLE = "SPARSERL_STATE"
MANAGER_VARIABLE = "SPARSERL_MANAGER"
PUBLIC_FACTORY = "sparse_update:init_sparse_manager"
BUILTIN = "builtin"
_DISABLED = ("", "none", "false", "off", "0", "disable", "disabled")
_MODES = (
    "observe",
    "update",
    "update_and_validate",
    "update_and_observe",
    "update_and_validate_and_observe",
)


class SparseState(NamedTuple):
    """What a manager is asked to do: `update` records changes, `validate` checks them against a full
    comparison at every sync, `observe` writes densities."""

    update: bool
    validate: bool
    observe: bool

    @classmethod
    def parse(cls, text: str | None, source: str = STATE_VARIABLE) -> "SparseState | None":
        """The state named by `text` in any case; None where it disables.

        Raises:
            ValueError: for any other text, naming `source` and the values that are known.
        """
        mode = (text or "").strip().lower()
        if mode in _DISABLED:
            return None
        if mode not in _MODES:
            raise ValueError(
                f"{source}={text!r}: expected one of {', '.join(_MODES)} (any case), or one of "
                f"unset, {', '.join(_DISABLED[1:])} to disable"
            )
        words = mode.split("_and_")
        return cls(*(word in words for word in cls._fields))

    def __str__(self) -> str:
        return "_and_".join(word for word, on in zip(self._fields, self, strict=True) if on)


def sparse_state() -> SparseState | None:
    """The state that the environment asks for (``SPARSERL_STATE``); None where sparse diff is off."""
    return SparseState.parse(os.environ.get(STATE_VARIABLE))


class SparseManager(Protocol):
    """The manager shape of SparseRL-Sync: called before and after each copy into a shard of one parameter."""

    def before_copy(self, shard_model_weight: torch.Tensor) -> None: ...

    def after_copy(self, shard_model_weight: torch.Tensor, shard_main_weight: torch.Tensor) -> None: ...


logger = logging.getLogger(__name__)

_registered: Callable[..., Any] | None = None
_warned = False


def register_manager_factory(factory: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Have `factory` called wherever an optimizer builds a shard, and return the factory registered before.

    `factory(model_param=, shard_model_weight=, shard_main_weight=, param_range=)` returns the manager of the
    parameter, or None for none. It wins over the environment; None withdraws it. Optimizers that already
    exist are left as they are.
    """
    global _registered
    previous, _registered = _registered, factory
    return previous


def _factory() -> Callable[..., Any] | None:
    if _registered is not None:
        return _registered
    state = sparse_state()
    if state is None:
        return None
    name = os.environ.get(MANAGER_VARIABLE, "").strip() or PUBLIC_FACTORY
    if name.lower() == BUILTIN:
        return None
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise RuntimeError(
            f"{STATE_VARIABLE}={state} asks for the sparse diff manager {name!r}, which cannot be imported "
            f"({type(error).__name__}: {error}). Put its package on PYTHONPATH, name another factory as "
            f"{MANAGER_VARIABLE}=module:function, set {MANAGER_VARIABLE}={BUILTIN} to use "
            f"megatron.core.optimizer.sparse_diff.attach, or unset {STATE_VARIABLE}."
        ) from error


def init_sparse_manager(
    model_param: torch.nn.Parameter,
    shard_model_weight: torch.Tensor | None,
    shard_main_weight: torch.Tensor | None,
    param_range: Any = None,
) -> Any | None:
    """Give `model_param` the manager of the registered factory; called by optimizers where shards are built.

    Args:
        model_param: the model's parameter, whole.
        shard_model_weight: this rank's flat view of it, in the model's dtype; None where no such view exists.
        shard_main_weight: the optimizer's main copy of that shard; None where the inner optimizer holds it.
            For fp32 parameters it is the same tensor as `shard_model_weight`.
        param_range: the shard's place in the flat parameter (`start`, `end`, `size`); None for all of it.

    Returns:
        The manager, or None where sparse diff is off; then nothing is touched.
    """
    factory = _factory()
    if factory is None:
        return None
    if param_range is None:
        from megatron.core.optimizer.distrib_optimizer import Range

        param_range = Range(0, model_param.numel())
    manager = factory(
        model_param=model_param,
        shard_model_weight=shard_model_weight,
        shard_main_weight=shard_main_weight,
        param_range=param_range,
    )
    if manager is not None:
        bind(manager, model_param, shard_model_weight, shard_main_weight)
        _warn_if_blind(shard_model_weight, shard_main_weight)
    return manager


def _warn_if_blind(shard_model: torch.Tensor | None, shard_main: torch.Tensor | None) -> None:
    global _warned
    if not _warned and (shard_main is None or shard_main is shard_model):
        _warned = True
        kind = "precision-aware" if shard_main is None else "fp32"
        logger.warning(
            "sparse diff: the inner optimizer writes %s parameters in place, so that a manager called around "
            "the copy sees no change of them (unless HybridDeviceOptimizer copies them from the host). "
            "megatron.core.optimizer.sparse_diff.attach compares such parameters at sync.",
            kind,
        )


def bind(manager: Any, model_param: torch.Tensor, *shards: torch.Tensor | None) -> None:
    """Attach `manager` to `model_param` and let its shards find it."""
    for shard in shards:
        if shard is not None:
            shard._sparse_owner = model_param
    model_param._sparse_manager = manager


def _manager_of(shard_model: torch.Tensor, shard_main: torch.Tensor) -> Any | None:
    # DistributedOptimizer views the bucket afresh for each copy: only the main shard knows the owner there;
    # HybridDeviceOptimizer copies from a host tensor that knows nothing, so there it is the model shard.
    owner = getattr(shard_main, "_sparse_owner", None)
    if owner is None:
        owner = getattr(shard_model, "_sparse_owner", None)
        if owner is None:
            return None
        if getattr(owner, "main_param", None) is shard_model:
            return None  # host to device main weights; the copy to the model's parameter is still to come
        if shard_model.dtype == torch.float32:
            shard_model._sparse_copied = True
    elif getattr(shard_main, "_sparse_copied", False):
        # An fp32 shard is its own main weight: its copy from the host has been seen, this one is onto itself.
        shard_main._sparse_copied = False
        return None
    return getattr(owner, "_sparse_manager", None)


class sparse_diff_context:
    """Context of one copy from `shard_main_param` (or its host copy) to `shard_model_param`; yields the copy.

    The copy must be called exactly once inside; it takes `non_blocking`. `after_copy` is not called when the
    copy raised.
    """

    __slots__ = ("_copies", "_main", "_manager", "_model")

    def __init__(self, shard_model_param: torch.Tensor, shard_main_param: torch.Tensor) -> None:
        self._model = shard_model_param
        self._main = shard_main_param

    def __enter__(self) -> Callable[..., None]:
        manager = _manager_of(self._model, self._main)
        self._manager = manager
        self._copies = 0
        if manager is None:
            return self._plain
        if hasattr(manager, "copy_captured"):
            return self._captured
        manager.before_copy(self._model)
        return self._plain

    def __exit__(self, exc_type, exc, traceback) -> None:
        if exc_type is not None:
            return
        if self._copies != 1:
            raise RuntimeError(
                f"sparse_diff_context: the copy was called {self._copies} times, expected once"
            )
        if self._manager is not None and not hasattr(self._manager, "copy_captured"):
            self._manager.after_copy(self._model, self._main)

    def _plain(self, non_blocking: bool = False) -> None:
        self._copies += 1
        self._model.data.copy_(self._main.data, non_blocking=non_blocking)

    def _captured(self, non_blocking: bool = False) -> None:
        self._copies += 1
        self._manager.copy_captured(self._model.data, self._main.data, non_blocking)


def note_model_reload(optimizer: Any) -> None:
    """Tell managers that can `invalidate` that main weights are taken from the model anew: its weights were
    replaced past the hook. Called by ``reload_model_params``."""
    for groups in ("model_float16_groups", "float16_groups"):
        for group in getattr(optimizer, groups, ()):
            for param in group:
                invalidate = getattr(getattr(param, "_sparse_manager", None), "invalidate", None)
                if invalidate is not None:
                    invalidate("reload_model_params")


@copies_together
def copy_with_sparse_diff(
    model_groups: Iterable[Iterable[torch.Tensor]], main_groups: Iterable[Iterable[torch.Tensor]]
) -> bool:
    """Copy groups of main weights to their model parameters through the hook if any of them has a manager.

    Returns:
        False, with nothing copied, where none has: the caller then uses its own multi-tensor copy.
    """
    if not any(hasattr(param, "_sparse_manager") for group in model_groups for param in group):
        return False
    for model_group, main_group in zip(model_groups, main_groups, strict=True):
        for model_param, main_param in zip(model_group, main_group, strict=True):
            with sparse_diff_context(model_param, main_param) as copy:
                copy()
    return True
