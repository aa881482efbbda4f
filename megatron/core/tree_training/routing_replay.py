"""Recorded expert choices of the trajectories, for the routers of a model that runs their tree."""

import torch

from megatron.core.transformer.moe.tree_router import mark_targets


def replay_experts(model, batch, experts, layer_of=None):
    """Give recorded routing to the routers of one model chunk, before its forward pass on `batch`.

    Use it with moe_enable_routing_replay=True and RouterReplay's action REPLAY_FORWARD. Pass the recording as
    `identity` of the trajectories too, so that tokens are shared only where they were routed alike.

    Args:
        model: the model chunk; MoE layers of other pipeline stages are elsewhere.
        batch: a TreeBatch.
        experts: integer [T, layers, topk] packed, or a list of [length, layers, topk] for each trajectory;
            tensors or NumPy arrays. Read back once, if they lie on a GPU.
        layer_of: function from a 1-based layer number to an index of the second dimension; layer_number - 1
            if None.

    Raises:
        ValueError: a shape does not fit, a token has an expert that the layer has not, or twice the same,
            trajectories that share a token disagree, or no router replays. The forward pass raises it where
            the routers hold experts of another batch.
    """
    if isinstance(experts, (list, tuple)):
        experts = batch.pack_values([_integers(e, batch.index_L.device) for e in experts])
    experts = _integers(experts, batch.index_L.device)
    integer = not (experts.is_floating_point() or experts.is_complex() or experts.dtype == torch.bool)
    if experts.dim() != 3 or experts.shape[0] != batch.padded_size or not integer:
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
        _check(chosen, router, batch)
        if router.config.sequence_parallel:
            chosen = chosen.chunk(router.tp_group.size())[router.tp_group.rank()]
        mark_targets(chosen, batch.tree_metadata)
        router.router_replay.set_target_indices(chosen)


def _integers(experts, device):
    """As a tensor on the batch's device; torch hardly computes with unsigned types of two bytes or more."""
    experts = torch.as_tensor(experts).to(device)
    return experts.long() if experts.dtype in (torch.uint16, torch.uint32, torch.uint64) else experts


def _check(chosen_TK, router, batch):
    count = router.config.num_moe_experts
    ordered = chosen_TK.sort(dim=1).values
    wrong_T = (ordered[:, 0] < 0) | (ordered[:, -1] >= count) | (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if not wrong_T.any():
        return
    linear = int(wrong_T[batch.index_L].int().argmax())
    place, trajectory = linear, 0
    while place >= batch.lengths[trajectory]:
        place, trajectory = place - batch.lengths[trajectory], trajectory + 1
    raise ValueError(
        f"trajectory {trajectory}: the token at position {place} has experts "
        f"{chosen_TK[batch.index_L[linear]].tolist()} in layer {router.layer_number}, expected {router.topk} "
        f"different ones of 0..{count - 1}; were they recorded from this model, and is layer_of right?"
    )
