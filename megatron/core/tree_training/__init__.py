"""Trajectories that share prefixes, trained as one packed tree with the gradients of the linear layout."""

from megatron.core.tree_training.batch import StepTotals, TreeBatch
from megatron.core.tree_training.estimate import ModelCost, SharingEstimate, share_or_not
from megatron.core.tree_training.log_probs import entropy, log_probs, log_probs_and_entropy
from megatron.core.tree_training.plan import MicroBatchPlan, plan_micro_batches
from megatron.core.tree_training.records import read_jsonl, trajectories_from_records
from megatron.core.tree_training.routing_replay import replay_experts
from megatron.core.tree_training.trajectory import Trajectory

__all__ = [
    "MicroBatchPlan",
    "ModelCost",
    "SharingEstimate",
    "StepTotals",
    "Trajectory",
    "TreeBatch",
    "entropy",
    "log_probs",
    "log_probs_and_entropy",
    "plan_micro_batches",
    "read_jsonl",
    "replay_experts",
    "share_or_not",
    "trajectories_from_records",
]
