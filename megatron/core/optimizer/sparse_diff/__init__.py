"""Exact sparse diffs of model parameters, recorded while the optimizer copies its results to them."""

from .context import (
    SparseManager,
    SparseState,
    copy_with_sparse_diff,
    init_sparse_manager,
    register_manager_factory,
    sparse_diff_context,
    sparse_state,
)

__all__ = [
    "SparseManager",
    "SparseState",
    "copy_with_sparse_diff",
    "init_sparse_manager",
    "register_manager_factory",
    "sparse_diff_context",
    "sparse_state",
]
