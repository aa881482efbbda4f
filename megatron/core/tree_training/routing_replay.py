"""Recorded expert choices of the trajectories, for the routers of a model that runs their tree."""

import torch


def replay_experts(model, batch, experts, layer_of=None):
    """Give recorded routing to the routers of one model chunk, before its forward pass on `batch`.

    Use it with moe_enable_routing_replay=True and RouterReplay's action REPLAY_FORWARD. Pass the recording as
    `identity` of the trajectories too, so that tokens are shared only where they were routed alike.

    Args:
        model: the model chunk; MoE layers of other pipeline stages are elsewhere.
        batch: a TreeBatch.
        experts: integer [T, layers, topk] packed, or a list of [length, layers, topk] for each trajectory.
        layer_of: function from a 1-based layer number to an index of the second dimension; layer_number - 1
            if None.

    Raises:
        ValueError: a shape does not fit, trajectories that share a token disagree, or no router replays.
    """
    if not isinstance(experts, torch.Tensor):
        experts = batch.pack_values(experts)
    if experts.dim() != 3 or experts.shape[0] != batch.padded_size or experts.is_floating_point():
        raise ValueError(
            f"experts must be integers [{batch.padded_size}, layers, topk], got {experts.dtype} "
            f"{tuple(experts.shape)}"
        )
    routers = [m for m in model.modules() if getattr(m, "router_replay", None) is not None]
    if not routers:
        raise ValueError("no router replays: set moe_enable_routing_replay=True in the model's config")
    # Padding needs topk different experts like every token.
    padding = torch.arange(experts.shape[2], device=experts.device).expand(experts.shape[0], -1)
    is_padding = (batch.branches_T == 0)[:, None]
    for router in routers:
        layer = router.layer_number - 1 if layer_of is None else layer_of(router.layer_number)
        if not 0 <= layer < experts.shape[1] or experts.shape[2] != router.topk:
            raise ValueError(
                f"layer {router.layer_number} needs experts[:, {layer}] with {router.topk} experts, "
                f"got shape {tuple(experts.shape)}"
            )
        chosen = torch.where(is_padding, padding, experts[:, layer].long())
        if router.config.sequence_parallel:
            chosen = chosen.chunk(router.tp_group.size())[router.tp_group.rank()]
        router.router_replay.set_target_indices(chosen)
