"""Two checks on fp32 copies of the policy: tree against linear layout, and policy against rollout model."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

from examples.quickstart import policy
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tree_training import TreeBatch


class Twin:
    """An fp32 copy of the policy on every rank, refreshed from the bf16 weights before each check."""

    def __init__(self, source, shape, vocabulary, positions, device):
        self.source = source
        self.model = policy.gpt(shape, vocabulary, positions, torch.float32, device)

    def _refresh(self):
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), self.source.parameters(), strict=True):
                mine.copy_(theirs)
                mine.grad = None

    def tree_against_linear(self, trajectories) -> tuple[float, float]:
        """Loss and gradients of the same trajectories with shared prefixes and without.

        Returns:
            ``(|loss difference|, relative gradient difference)``, the latter as the norm of the difference
            over the norm, both over all parameters of all ranks.
        """
        device = next(self.model.parameters()).device
        results = []
        for share in (True, False):
            self._refresh()
            batch = TreeBatch.from_trajectories(trajectories, share_prefixes=share, device=device)
            result = policy.forward_backward(self.model, [batch])
            loss = result[0] if result else 0.0
            results.append((loss, [p.grad.detach().clone() for p in self.model.parameters()]))
        (tree_loss, tree), (linear_loss, linear) = results
        sums = torch.tensor(
            [
                float(sum((a - b).square().sum() for a, b in zip(tree, linear, strict=True))),
                float(sum(b.square().sum() for b in linear)),
                abs(tree_loss - linear_loss),
            ],
            dtype=torch.float64,
            device=device,
        )
        if dist.get_world_size() > 1:
            dist.all_reduce(sums[:2])
            dist.all_reduce(sums[2:], op=dist.ReduceOp.MAX)
        difference, norm = sums[0].sqrt(), sums[1].sqrt()
        return float(sums[2]), float(difference if norm == 0 else difference / norm)

    @torch.no_grad()
    def logits_against(self, engine, trajectories) -> float | None:
        """Largest difference of any logit between this policy and the rollout model (fp32 copies of both).

        The policy computes them on a tree, the rollout model on each trajectory alone. None on ranks without
        ``engine``.
        """
        self._refresh()
        device = next(self.model.parameters()).device
        batch = TreeBatch.from_trajectories(trajectories, device=device)
        found = []

        def forward_step(iterator, stage):
            logits = stage(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params)

            def keep(logits):
                found.append(tensor_parallel.gather_from_tensor_model_parallel_region(logits)[0])
                return logits.sum(), {}

            return logits, keep

        policy.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([batch]),
            model=self.model,
            num_microbatches=1,
            seq_length=batch.padded_size,
            micro_batch_size=1,
            forward_only=True,
        )
        logits = self._to_engine_rank(found, batch, device)
        if engine is None:
            return None
        wide = copy.deepcopy(engine).float()
        worst = 0.0
        for trajectory, ours in zip(trajectories, batch.unpack(logits), strict=True):
            theirs = wide(torch.as_tensor(trajectory.tokens, device=device)[None]).logits[0]
            worst = max(worst, float((ours - theirs).abs().max()))
        return worst

    def _to_engine_rank(self, found, batch, device):
        """The logits from a last-stage rank on rank 0, which holds the rollout model."""
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return found[0]
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        columns = torch.tensor([found[0].shape[-1] if found else 0], device=device)
        dist.broadcast(columns, src=source, group=parallel_state.get_pipeline_model_parallel_group())
        logits = (
            found[0].contiguous() if found else torch.empty(batch.padded_size, int(columns), device=device)
        )
        dist.broadcast(logits, src=source, group=parallel_state.get_pipeline_model_parallel_group())
        return logits
