"""Router statistics of packed trees: auxiliary losses, z-loss, expert bias and token counts of the linear
layout.

Auxiliary losses are sums over tokens, so a packed token stands for all trajectories that run through it: with
its number of branches as weight w_t, and 0 for padding,

    f_e = Σ_t w_t [t goes to e],   P_e = Σ_t w_t score_te,   N = Σ_t w_t,   loss = c E / (k N²) · Σ_e f_e P_e

is that of one linear micro-batch of the same trajectories, one after another. They are quadratic in a
micro-batch, so that is the reference, not the trajectories one by one.

How it travels: every MoE layer, on every pipeline stage, calls `router_weights` with the tree metadata, and
hands the result to its router as `padding_mask`. That argument is the only one that upstream carries from the
layer to the router, also into what is recomputed; a mask is boolean with two dimensions, token weights have
three. `tree_routing` takes them up.

Scale, averaged over micro-batches: an auxiliary loss weighs 1 / (real micro-batches of the step), while
upstream divides by num_microbatches · data_parallel_size, dummies included. Per token: N / (the loss
function's count of the step), as upstream weighs it in the linear layout, which is more than
1 / (micro-batches) where prompts are masked, and depends on `loss_per`, too.

seq_aux_loss takes a whole pack as one sequence, as upstream does with any packed (THD) micro-batch.
"""

import weakref

import torch

from megatron.core.transformer.tree_metadata import RouterStatistics


def _statistics(metadata):
    """Those of the micro-batch; where nobody gave any, every real token once and upstream's scales."""
    if metadata.router_statistics is not None:
        return metadata.router_statistics
    end = metadata.cu_node_lens[metadata.num_nodes]
    weights_T = (torch.arange(metadata.padded_size, device=end.device) < end).float()
    return RouterStatistics(weights_T, 1.0, weights_T.sum())


def router_weights(layer, padding_mask, packed_seq_params):
    """Weight, scale and N of the tokens that this rank holds, [1, s, 3], in the place of `padding_mask`.

    That comes back as it is when the pack is no tree, or the layer has no experts.

    Raises:
        TreeUnsupportedError: the layer's routing depends on which tokens share a micro-batch, or drops the
            mask.
    """
    metadata = getattr(packed_seq_params, "tree_metadata", None)
    if metadata is None or not layer.is_moe_layer:
        return padding_mask
    config = layer.config
    _refuse(layer, config, padding_mask)
    _check_targets(layer, metadata)
    tp = layer.pg_collection.tp if config.sequence_parallel else None
    size, rank = (1, 0) if tp is None else (tp.size(), tp.rank())

    def build(metadata):
        statistics = _statistics(metadata)
        scale = statistics.per_token_scale if config.calculate_per_token_loss else statistics.averaged_scale
        weights = statistics.weights_T
        constant = weights.new_ones(weights.numel() // size)
        return torch.stack([weights.chunk(size)[rank], constant * scale, constant * weights.sum()], dim=-1)[
            None
        ]

    return metadata.cached(("router weights", size, rank, config.calculate_per_token_loss), build)


def mark_targets(target_indices, metadata):
    """Say that a router's recorded experts, a tensor, are those of this tree: `router_weights` checks it."""
    target_indices.of_tree = weakref.ref(metadata)


def _check_targets(layer, metadata):
    """Recorded experts of another micro-batch would be replayed, silently where it is as long.

    Raises:
        ValueError: there are none, or they are of another tree. Those that others than `replay_experts` set
            are not looked at.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    replay = getattr(layer.mlp.router, "router_replay", None)
    if replay is None or replay.router_replay_action != RouterReplayAction.REPLAY_FORWARD:
        return
    targets = replay.target_topk_idx
    of_tree = getattr(targets, "of_tree", None)
    if targets is None or (of_tree is not None and of_tree() is not metadata):
        raise ValueError(
            f"layer {layer.mlp.router.layer_number} is to replay recorded experts, and has "
            f"{'none' if targets is None else 'those of another batch'}: call replay_experts(model, batch, "
            "experts) before every forward pass, with the very batch that the model gets (after batch.to), "
            "and where pipelines recompute a layer, set the action REPLAY_BACKWARD for backward passes"
        )


def _refuse(layer, config, padding_mask):
    from megatron.core.transformer.tree_attention import TreeUnsupportedError

    def unsupported(cause, way_out):
        return TreeUnsupportedError(f"tree_metadata is not supported with {cause}: {way_out}")

    if padding_mask is not None:
        raise unsupported("a padding_mask", "leave it out, the tree knows its padding")
    for kind in ("sinkhorn", "quantile_balancing"):
        if config.moe_router_load_balancing_type == kind:
            raise unsupported(
                f"moe_router_load_balancing_type={kind!r}",
                "use auxiliary losses or an expert bias (it routes a token by all others of its micro-batch)",
            )
    if config.moe_expert_capacity_factor is not None:
        raise unsupported(
            "moe_expert_capacity_factor",
            "set it to None (which tokens are dropped depends on the micro-batch)",
        )
    if config.mlp_chunks_for_training > 1:
        raise unsupported("mlp_chunks_for_training > 1 and experts", "set mlp_chunks_for_training=1")
    if getattr(layer, "use_partial_cudagraphs", False):
        raise unsupported(
            "CUDA graphs that capture the router",
            "take moe_router and moe_preprocess out of cuda_graph_modules",
        )


def tree_routing(router, logits, weights):
    """What TopKRouter.routing does, with weighted statistics.

    Args:
        router: a TopKRouter.
        logits: [s, 1, E].
        weights: [s, 1, 3] from `router_weights`.

    Returns:
        probs and routing_map, [s, E] each; padding is routed as well, it only counts for nothing.
    """
    from megatron.core.transformer.moe.moe_utils import (
        compute_routing_scores_for_aux_loss,
        topk_routing_with_score_function,
    )

    config = router.config
    logits = logits.view(-1, config.num_moe_experts)
    w, scale, total = weights.reshape(-1, 3).unbind(-1)
    scale, total = scale[0], total[0].clamp(min=1)
    learning = router.training and torch.is_grad_enabled()
    if learning and config.moe_z_loss_coeff is not None:
        logits = _z_loss(router, logits, w, scale, total)
    probs, routing_map = topk_routing_with_score_function(
        logits,
        router.topk,
        use_pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=router.score_function,
        expert_bias=router.expert_bias,
        fused=config.moe_router_fusion,
        router_replay=router.router_replay,
    )
    if learning and router.is_aux_loss_enabled():
        chosen, scores = compute_routing_scores_for_aux_loss(logits, router.topk, router.score_function)
        probs = _auxiliary_losses(router, probs, chosen * w[:, None], scores * w[:, None], scale)
    if router.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            router.local_tokens_per_expert += (routing_map * w[:, None]).sum(0)
    return probs, routing_map


def _auxiliary_losses(router, probs, counts_TE, scores_TE, scale):
    """Attach every load-balancing loss that is switched on; both arguments are weighted already."""
    from megatron.core.transformer.moe.moe_utils import (
        get_tokens_per_expert_and_token_count,
        switch_load_balancing_loss_func,
    )

    kinds = {
        "aux_loss": ("load_balancing_loss", router.tp_cp_group),
        "seq_aux_loss": ("seq_load_balancing_loss", router.tp_cp_group),
        "global_aux_loss": ("global_load_balancing_loss", router.tp_dp_cp_group),
    }
    for kind, (name, group) in kinds.items():
        coefficient = router.get_aux_loss_coeff(kind)
        if coefficient == 0:
            continue
        tokens_per_expert, _, total = get_tokens_per_expert_and_token_count(
            counts_TE, group, router.topk, with_padding_mask=True
        )
        if kind == "global_aux_loss":
            router.global_tokens_per_expert += tokens_per_expert
            router.ga_steps += tokens_per_expert.sum() > 0  # a step of dummies on all ranks is none
            tokens_per_expert = router.global_tokens_per_expert / router.ga_steps.clamp(min=1)
        loss = switch_load_balancing_loss_func(
            probs=scores_TE,
            tokens_per_expert=tokens_per_expert,
            total_num_tokens=total.clamp(min=1),
            topk=router.topk,
            num_experts=router.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
        )
        per_token = router.calculate_per_token_loss
        probs = router.attach_and_log_load_balancing_loss(
            probs,
            coefficient,
            loss if per_token else loss * scale,
            name,
            group,
            needs_dp_avg=kind != "global_aux_loss",
            # Per token, the loss is multiplied by this count and by the group's size.
            valid_token_count=scale / router.tp_cp_group.size() if per_token else None,
        )
    return probs


def _z_loss(router, logits, w, scale, total):
    """The mean over all ranks' tokens of the squared log-sum-exp: each rank adds its part."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    loss = (w * torch.logsumexp(logits, dim=-1).square()).sum() / total
    get_moe_metrics_tracker().record(
        "z_loss",
        loss.detach() * router.tp_cp_group.size(),
        router.layer_number,
        router.config.num_layers,
        avg_group=router.tp_dp_cp_group,
    )
    return MoEAuxLossAutoScaler.apply(logits, loss * (router.config.moe_z_loss_coeff * scale))
