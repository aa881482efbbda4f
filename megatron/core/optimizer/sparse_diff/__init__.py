"""Exact sparse diffs of model parameters, recorded while the optimizer copies its results to them.

    from megatron.core.optimizer.sparse_diff import attach

    diff = attach(optimizer)                    # the weights of this moment are the base
    ...                                         # any number of optimizer steps
    diff.gather_changed()                       # collective over data-parallel ranks; not needed on one
    for name, param in model.named_parameters():
        indices, values = diff.changed(param)   # int64, ascending, into the flat local tensor; values there
        ...
    diff.clear(version)                         # only after every receiver has acknowledged `version`

Where other weights are swapped into the live parameters (a reference model, a teacher), do it inside
`with diff.weights_role("reference"):`. Weights that are replaced by `load_state_dict` or followed by
`reload_model_params` are noticed, and anything else is `diff.invalidate(reason)`: the next sync carries
everything. `mode` (or SPARSERL_STATE) adds a check of every sync against a full comparison, or a record of
the densities (see `observe`).

One bit is kept per element of this rank's shard, set by the copy from main weights to the model; steps are
OR-ed, so the result is the exact union. Comparison is of bit patterns. A sync that is never acknowledged is
part of the next. Tensors whose writes the copy does not see (fp32 parameters, buffers, …) take other
routes, which `diff.report()` lists; paths that no route sees exactly are refused by `attach`.

Optimizers call `init_sparse_manager` and `sparse_diff_context`; other managers plug in through
`register_manager_factory` or the environment (SPARSERL_STATE, SPARSERL_MANAGER), see `context`.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .context import (
    SparseManager,
    SparseState,
    copy_with_sparse_diff,
    init_sparse_manager,
    note_model_reload,
    register_manager_factory,
    sparse_diff_context,
    sparse_state,
)
from .shards import copies_together

if TYPE_CHECKING:
    from .diff import SparseDiff

__all__ = [
    "SparseManager",
    "SparseState",
    "attach",
    "copies_together",
    "copy_with_sparse_diff",
    "init_sparse_manager",
    "note_model_reload",
    "register_manager_factory",
    "sparse_diff_context",
    "sparse_state",
]


def attach(
    optimizer: Any,
    mode: str | None = None,
    model_chunks: Sequence[torch.nn.Module] | None = None,
    observe_dir: str | os.PathLike | None = None,
    unhooked: str = "shadow",
) -> "SparseDiff":
    """Record which elements of the optimizer's model change from now on; see `diff.attach`."""
    from .diff import attach  # not loaded by optimizers, which need only the hook

    return attach(optimizer, mode, model_chunks, observe_dir, unhooked)
