"""Stand-ins with the class names, attributes and parameter layouts of Transformer Engine's layers.

Transformer Engine needs a GPU; the layout reader needs only what such layers look like. A model of local
layers is converted in place, which keeps Megatron's own containers (attention, MLP, MoE, blocks) around them.
"""

from __future__ import annotations

import torch

from megatron.core.transformer.identity_op import IdentityOp


def _parameter(*shape, **attributes):
    parameter = torch.nn.Parameter(torch.full(shape, float("nan")))
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


class TELinear(torch.nn.Module):
    """Duplicated: every rank holds the whole weight."""

    def __init__(self, local):
        super().__init__()
        self._tp_group = local.tp_group
        rows = local.weight.shape[0] * local.tp_group.size()
        self.weight = _parameter(rows, local.weight.shape[1], parallel_mode="duplicated")


class _Sharded(torch.nn.Module):
    def __init__(self, local, norm=None):
        super().__init__()
        self._tp_group = local.tp_group
        self.weight = _parameter(*local.weight.shape)
        # Transformer Engine registers empty tensors where there is no bias
        bias = getattr(local, "bias", None)
        self.register_buffer("bias", torch.empty(0), persistent=False)
        if bias is not None:
            del self.bias
            self.bias = _parameter(*bias.shape)
        if norm is not None:
            self.layer_norm_weight = _parameter(*norm.weight.shape)


class TEColumnParallelLinear(_Sharded):
    pass


class TELayerNormColumnParallelLinear(_Sharded):
    pass


class TERowParallelLinear(_Sharded):
    pass


class _Grouped(torch.nn.Module):
    def __init__(self, locals_, single):
        super().__init__()
        self._tp_group = locals_[0].tp_group
        for kind in ("weight", "bias"):
            tensors = [getattr(local, kind, None) for local in locals_]
            if tensors[0] is None:
                continue
            if single:
                setattr(self, kind, _parameter(len(tensors), *tensors[0].shape))
            else:
                for i, tensor in enumerate(tensors):
                    # what upstream writes on them: no stride for gate and up, and dimension 1 for fc2
                    setattr(self, f"{kind}{i}", _parameter(*tensor.shape, partition_stride=1))


class TEColumnParallelGroupedLinear(_Grouped):
    pass


class TERowParallelGroupedLinear(_Grouped):
    pass


class TEGroupedMLP(torch.nn.Module):
    def __init__(self, experts, config, single):
        super().__init__()
        self.config = config
        self.linear_fc1 = TEColumnParallelGroupedLinear([e.linear_fc1 for e in experts.local_experts], single)
        self.linear_fc2 = TERowParallelGroupedLinear([e.linear_fc2 for e in experts.local_experts], single)


def as_transformer_engine(chunk, *, single_grouped=False, fused_down=False):
    """Replace a chunk's linear and grouped layers by stand-ins, norms fused where TE's spec fuses them."""
    layers = list(chunk.decoder.layers)
    if getattr(chunk, "mtp", None) is not None:
        layers += [layer.mtp_model_layer for layer in chunk.mtp.layers]
    for layer in layers:
        attention = layer.self_attention
        if hasattr(attention, "linear_qkv"):
            attention.linear_qkv = TELayerNormColumnParallelLinear(
                attention.linear_qkv, layer.input_layernorm
            )
            layer.input_layernorm = IdentityOp()
        else:
            _latent(attention, fused_down)
        attention.linear_proj = TERowParallelLinear(attention.linear_proj)
        mlp = layer.mlp
        if hasattr(mlp, "router"):
            mlp.experts = TEGroupedMLP(mlp.experts, mlp.config, single_grouped)
            shared = mlp.shared_experts
            if shared is not None:
                shared.linear_fc1 = TEColumnParallelLinear(shared.linear_fc1)
                shared.linear_fc2 = TERowParallelLinear(shared.linear_fc2)
        else:
            mlp.linear_fc1 = TELayerNormColumnParallelLinear(mlp.linear_fc1, layer.pre_mlp_layernorm)
            mlp.linear_fc2 = TERowParallelLinear(mlp.linear_fc2)
            layer.pre_mlp_layernorm = IdentityOp()


def _latent(attention, fused_down):
    attention.linear_q_up_proj = TELayerNormColumnParallelLinear(
        attention.linear_q_up_proj, attention.q_layernorm
    )
    attention.linear_kv_up_proj = TELayerNormColumnParallelLinear(
        attention.linear_kv_up_proj, attention.kv_layernorm
    )
    attention.q_layernorm = attention.kv_layernorm = IdentityOp()
    down = [TELinear(attention.linear_q_down_proj), TELinear(attention.linear_kv_down_proj)]
    if fused_down:
        attention.linear_qkv_down_proj = down[0]
        rows = sum(linear.weight.shape[0] for linear in down)
        down[0].weight = _parameter(rows, down[0].weight.shape[1])
        del attention.linear_q_down_proj, attention.linear_kv_down_proj
    else:
        attention.linear_q_down_proj, attention.linear_kv_down_proj = down


def mark(chunk, before):
    """Tensor-parallel attributes as upstream 0.19.2 sets them on Transformer Engine's parameters."""
    for name, parameter in chunk.named_parameters():
        if name in before:
            for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                if hasattr(before[name], attribute):
                    setattr(parameter, attribute, getattr(before[name], attribute))
        elif ".experts.linear_fc" in name:
            parameter.tensor_model_parallel = True
            parameter.partition_dim = 1 if "linear_fc2" in name else 0
