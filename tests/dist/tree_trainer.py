"""One training step over trajectories, as a trainer makes it: plan, model, log-probabilities, its own loss,
gradients.

`step` runs on every rank of some layout; `reference` is the same step one trajectory at a time, in a linear
layout.
"""

from __future__ import annotations

import dataclasses

import torch

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.tree_training import (
    Trajectory,
    TreeBatch,
    log_probs_and_entropy,
    plan_micro_batches,
    replay_experts,
    trie,
)
from tests.dist import small_gpt
from tests.dist.world import parallel

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
CORE = dict(recompute_granularity="selective", recompute_modules=["core_attn"])


def trajectories(seed=0):
    """Groups that share prompts, a tree of turns, a duplicate, a prefix of another, an empty response, one
    token."""
    g = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(0, small_gpt.VOCAB, (n,), generator=g).tolist()

    sequences = []
    for _ in range(2):
        prompt = draw(5)
        sequences += [(prompt + draw(n), 5) for n in (4, 1, 6)]
    first, turn = draw(4), draw(3)
    sequences += [(first + turn + draw(2), 4), (first + turn + draw(5), 4), (first + draw(3), 4)]
    sequences += [sequences[0], (sequences[0][0][:7], 5), (first, 4), (draw(1), 1)]
    made = []
    for tokens, prompt in sequences:
        n = len(tokens)
        mask = (torch.rand(n, generator=g) < 0.7) & (torch.arange(n) >= prompt)
        values = {
            "old": -4.2 + 0.4 * torch.randn(n, generator=g, dtype=torch.float64),
            "advantage": torch.randn(n, generator=g, dtype=torch.float64),
        }
        made.append(Trajectory(tokens, mask, values, {"advantage": float(torch.randn(1, generator=g))}))
    return made


def answers(seed=0, length=12, prompt=5):
    """Three groups of answers, all of one length; only some of their tokens count."""
    g = torch.Generator().manual_seed(seed)
    given = [t for t in trajectories(seed) if len(t.tokens) >= prompt]
    made = []
    for i in range(8):
        tokens = torch.randint(0, small_gpt.VOCAB, (length,), generator=g).tolist()
        tokens[:prompt] = given[i // 3].tokens[:prompt]
        mask = (torch.rand(length, generator=g) < 0.5) & (torch.arange(length) >= prompt)
        values = {
            "old": -4.2 + 0.4 * torch.randn(length, generator=g, dtype=torch.float64),
            "advantage": torch.randn(length, generator=g, dtype=torch.float64),
        }
        made.append(Trajectory(tokens, mask, values, {"advantage": float(torch.randn(1, generator=g))}))
    return made


def nll(lp, entropy, batch, i):
    return -(lp * batch.loss_mask[i]).sum()


def ppo(lp, entropy, batch, i):
    """Clipped surrogate with per-token advantages and an entropy bonus."""
    ratio = (lp - batch.values["old"][i]).exp()
    advantage = batch.values["advantage"][i]
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -((surrogate + 0.01 * entropy) * batch.loss_mask[i]).sum()


def gspo(lp, entropy, batch, i):
    """Clipped surrogate of the geometric mean ratio of a sequence."""
    mask = batch.loss_mask[i]
    ratio = (((lp - batch.values["old"][i]) * mask).sum() / mask.sum().clamp(min=1)).exp()
    advantage = batch.trajectory_values["advantage"][i]
    return -torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage) * mask.any()


LOSSES = {"nll": (nll, "token"), "ppo": (ppo, "token"), "gspo": (gspo, "trajectory")}


def siblings_visible(batch):
    metadata = batch.tree_metadata
    metadata._cache["subtree_end"] = torch.full_like(metadata.subtree_end, metadata.padded_size)


def targets_from_the_packed_neighbour(batch):
    T = batch.padded_size
    batch.source_T = torch.arange(-1, T - 1)
    batch.target_M = torch.arange(1, T)
    batch.target_start_T = torch.arange(T + 1, dtype=torch.int32).clamp(max=T - 1)


def shared_tokens_weighted_once(batch):
    first = torch.zeros(batch.linear_tokens, dtype=torch.bool)
    seen = set()
    for i, place in enumerate(batch.index_L.tolist()):
        first[i] = place not in seen
        seen.add(place)
    unpack = batch.unpack_linear
    batch.unpack_linear = lambda values: torch.where(first, unpack(values), unpack(values).detach())


def denominators_of_the_packed_layout(batch):
    batch.totals = dataclasses.replace(batch.totals, loss_tokens=batch.packed_tokens)


def dummies_not_counted(batch):
    batch.totals = dataclasses.replace(batch.totals, num_microbatches=1)


def padding_reaches_the_router(batch):
    batch.tree_metadata.router_statistics.weights_T.clamp_(min=1)


def router_weighs_by_loss_tokens(batch):
    statistics = batch.tree_metadata.router_statistics
    batch.tree_metadata.router_statistics = statistics._replace(per_token_scale=batch.num_loss_tokens)


BREAKS = {
    "router weighs by loss tokens": router_weighs_by_loss_tokens,
    "padding reaches the router": padding_reaches_the_router,
    "siblings visible": siblings_visible,
    "targets from the packed neighbour": targets_from_the_packed_neighbour,
    "shared tokens weighted once": shared_tokens_weighted_once,
    "denominators of the packed layout": denominators_of_the_packed_layout,
    "dummies not counted": dummies_not_counted,
}


def step(
    groups,
    model,
    loss="ppo",
    *,
    alter=None,
    seed=0,
    plain=False,
    linear=False,
    upstream=None,
    attributes=None,
    options=None,
    per_token_loss=False,
    **plan,
):
    """One step on this rank: (gradients by global name, loss of the step or None, number of micro-batches).

    plain: unpacked upstream layout, a causal mask and no tree metadata. alter: a name in BREAKS.
    linear: the same trajectories in every micro-batch, unshared.
    upstream: "rows" or "end to end", what `linear` runs then: upstream's attention without tree metadata, and
    no dummies. Rows, [b, s], have one length: the trajectories are those of `answers`.
    attributes: set on the config once it is made.
    plan: options of plan_micro_batches.
    """
    with parallel(**groups):
        model = {"params_dtype": torch.float64, "num_layers": 2, **model}
        if upstream == "end to end" and linear:
            model["rotary_use_position_ids"] = True
        cfg = small_gpt.config(**{"calculate_per_token_loss": per_token_loss, **model})
        for name, value in (attributes or {}).items():
            setattr(cfg, name, value)
        chunks = small_gpt.build(cfg, **(options or {}))
        planned = plan_micro_batches(
            answers(seed) if upstream == "rows" else trajectories(seed),
            plan.pop("max_tokens", 40),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            vocab_size=small_gpt.VOCAB,
            loss_per=LOSSES[loss][1],
            **{"pad_to_multiple_of": 2 * groups.get("tp", 1), **plan},
        )
        if linear:
            planned = _linear(planned)
        batches = list(planned.micro_batches(parallel_state.get_data_parallel_rank()))
        for batch in batches if alter else ():
            BREAKS[alter](batch)
        if upstream and linear:
            plain, batches = upstream, [batch for batch in batches if batch.num_trajectories]
            for batch in batches:
                batch.totals = dataclasses.replace(batch.totals, num_microbatches=len(batches))
        return run(cfg, chunks, batches, LOSSES[loss][0], plain, per_token_loss)


def _linear(plan):
    order = trie.PrefixOrder.of([t.tokens for t in plan._checked], share_prefixes=False)
    return dataclasses.replace(plan, _order=order, _place_of={i: i for i in range(order.order.size)})


def run(cfg, chunks, batches, terms, plain=False, per_token_loss=False):
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=cfg.bf16, use_distributed_optimizer=False)
    wrapped = [DistributedDataParallel(cfg, ddp, chunk) for chunk in chunks]
    cfg.finalize_model_grads_func, cfg.grad_scale_func = finalize_model_grads, None
    destroy_moe_metrics_tracker()  # its size is that of the last model
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    tp_group = parallel_state.get_tensor_model_parallel_group()

    def forward_step(iterator, chunk):
        batch = next(iterator)
        first = parallel_state.is_pipeline_first_stage()
        params, mask = batch.packed_seq_params, None
        if plain:
            size = batch.padded_size
            params, mask = None, torch.triu(torch.ones(size, size, dtype=torch.bool), 1)[None, None]
        rows = batch.num_trajectories if plain == "rows" else 1
        if plain == "rows":
            mask = mask[:, :, : size // rows, : size // rows]
        elif plain == "end to end":
            assert size == batch.linear_tokens  # padding would count
            mask = mask | ~torch.block_diag(*(torch.ones(n, n) for n in batch.lengths)).bool()
        output = chunk(
            batch.tokens.view(rows, -1) if first else None,  # as upstream's schedules: no ids on later stages
            batch.position_ids.view(rows, -1) if first else None,
            mask,
            packed_seq_params=params,
        )

        def loss_func(logits):
            logits = logits.reshape(1, batch.padded_size, -1)
            lp, entropy = log_probs_and_entropy(logits, batch, tp_group)
            lps, entropies = batch.unpack(lp), batch.unpack(entropy)
            # A dummy has no trajectory: start from a zero that hangs on the logits.
            total = 0 * lp.sum()
            for i in range(batch.num_trajectories):
                total = total + terms(lps[i], entropies[i], batch, i)
            if per_token_loss:
                summed, count = batch.summed_loss(total)
                return summed, count, {"sum": float(total.detach())}
            return batch.averaged_loss(total), {"sum": float(total.detach())}

        return output, loss_func

    virtual = len(wrapped) > 1
    reported = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in wrapped] if virtual else iter(batches),
        model=wrapped if virtual else wrapped[0],
        num_microbatches=len(batches),
        seq_length=max(b.padded_size for b in batches),
        micro_batch_size=1,
        forward_only=False,
    )
    gradients = {}
    for chunk in wrapped:
        for name, parameter in small_gpt.global_names(chunk.module).items():
            gradients[name] = (parameter.main_grad.clone(), *_sharding(parameter))
        for name, buffer in chunk.named_buffers():
            if name.endswith("expert_bias"):
                gradients[name] = (buffer.clone(), 1, 0, -1, 1)
    total = None
    if reported:
        totals = batches[0].totals
        total = torch.tensor([sum(r["sum"] for r in reported)], dtype=torch.float64)
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        total = total.item() / totals.count
    return gradients, total, len(batches)


def _sharding(parameter):
    """(size, rank, dim, stride) of this rank's shard, or a size of 1."""
    if getattr(parameter, "allreduce", True):
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
    else:
        size = parallel_state.get_expert_tensor_parallel_world_size()
        rank = parallel_state.get_expert_tensor_parallel_rank()
    if not getattr(parameter, "tensor_model_parallel", False):
        size = 1
    return size, rank, getattr(parameter, "partition_dim", -1), getattr(parameter, "partition_stride", 1)


def difference(ranks, reference):
    """Largest difference between ranks' gradients and whole ones, relative to the largest entry of each
    parameter.

    Returns (relative difference, name), and checks that every parameter of the reference was seen.
    """
    whole, seen, worst = reference[0][0], set(), (0.0, "")
    top = max(float(value[0].abs().max()) for value in whole.values())
    for gradients, _, _ in ranks:
        for name, (got, size, rank, dim, stride) in gradients.items():
            if name not in whole:  # a tied output layer on a later stage
                name = name.replace("output_layer", "embedding.word_embeddings")
            want = whole[name][0]
            if size > 1:
                want = torch.cat([part.chunk(size, dim)[rank] for part in want.chunk(stride, dim)], dim)
            assert torch.isfinite(got).all(), name
            scale = max(float(want.abs().max()), 1e-6 * top)
            worst = max(worst, (float((got - want).abs().max()) / scale, name))
            seen.add(name)
    assert seen == whole.keys() and top > 1e-3
    losses = {loss for _, loss, _ in ranks if loss is not None}
    for loss in losses:
        worst = max(worst, (abs(loss - reference[0][1]) / abs(reference[0][1]), "loss"))
    assert losses
    return worst


def difference_by_rank(ranks, others):
    """The same for two runs in one layout, rank by rank."""
    worst = (0.0, "")
    for (gradients, loss, _), (want, want_loss, _) in zip(ranks, others, strict=True):
        assert gradients.keys() == want.keys() and (loss is None) == (want_loss is None)
        top = max(float(value[0].abs().max()) for value in want.values())
        for name, (value, *_) in want.items():
            assert torch.isfinite(value).all() and top > 1e-3, name
            error = (gradients[name][0] - value).abs().max() / max(float(value.abs().max()), 1e-4 * top)
            worst = max(worst, (float(error), name))
        if loss is not None:
            worst = max(worst, (abs(loss - want_loss) / abs(want_loss), "loss"))
    return worst


ONE_BY_ONE = dict(share_prefixes=False, max_trajectories=1)


def replay(groups, model):
    """Record the routing of linear sequences, change the routers, replay it: on the tree, on the sequences,
    not at all.

    Returns the logits of every trajectory, end to end, for the three.
    """
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    with parallel(**groups):
        RouterReplay.clear_global_router_replay_instances()
        cfg = small_gpt.config(num_layers=2, moe_enable_routing_replay=True, **model)
        (chunk,) = small_gpt.build(cfg)
        routers = [m for m in chunk.modules() if getattr(m, "router_replay", None) is not None]
        multiple = 2 * groups.get("tp", 1)

        @torch.no_grad()
        def logits(batch):
            out = chunk(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params)
            return batch.unpack_linear(gather_from_tensor_model_parallel_region(out)[0])

        given = trajectories()
        chains = TreeBatch.from_trajectories(given, share_prefixes=False, pad_to_multiple_of=multiple)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        logits(chains)
        recorded = torch.stack([_whole(i, cfg) for i in RouterReplay.get_recorded_data()], dim=1)
        experts = chains.unpack(recorded)
        with torch.no_grad():
            for number, router in enumerate(routers):
                router.weight.copy_(
                    torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(number))
                )
        tree = TreeBatch.from_trajectories(
            [dataclasses.replace(t, identity=e) for t, e in zip(given, experts, strict=True)],
            pad_to_multiple_of=multiple,
        )
        assert tree.packed_tokens < chains.packed_tokens
        results = []
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        for batch in (tree, chains):
            replay_experts(chunk, batch, experts)
            results.append(logits(batch))
        RouterReplay.clear_global_router_replay_action()
        results.append(logits(chains))
        RouterReplay.clear_global_router_replay_instances()
        return results


def _whole(indices, cfg):
    """Recorded indices of all tokens, which sequence parallelism has spread over the ranks."""
    group = parallel_state.get_tensor_model_parallel_group()
    if not cfg.sequence_parallel:
        return indices
    parts = [torch.empty_like(indices) for _ in range(group.size())]
    torch.distributed.all_gather(parts, indices, group=group)
    return torch.cat(parts)
