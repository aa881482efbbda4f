"""Trajectories that share prefixes, trained as one packed tree with the gradients of the linear layout."""

from megatron.core.tree_training.batch import TreeBatch
from megatron.core.tree_training.log_probs import entropy, log_probs, log_probs_and_entropy
from megatron.core.tree_training.records import read_jsonl, trajectories_from_records
from megatron.core.tree_training.trajectory import Trajectory

__all__ = [
    "Trajectory",
    "TreeBatch",
    "entropy",
    "log_probs",
    "log_probs_and_entropy",
    "read_jsonl",
    "trajectories_from_records",
]
