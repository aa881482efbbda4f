"""Parameters of odd sizes under a real Megatron optimizer, stepped with seeded gradients: no forward."""

import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import (
    LayerWiseDistributedOptimizer,
    tag_params_for_buffer_routing,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule


class Weights(MegatronModule):
    """bf16 (or `dtype`) matrices and a vector; `fp32` adds an fp32 vector, `experts` expert parameters."""

    def __init__(self, config, dtype=torch.bfloat16, fp32=True, experts=0, frozen=True):
        super().__init__(config)
        for name, shape in (("first", (7, 13)), ("second", (65, 33)), ("bias", (41,)), ("last", (3, 5, 7))):
            setattr(self, name, torch.nn.Parameter(torch.randn(shape).to(dtype)))
        if fp32:
            self.scale = torch.nn.Parameter(torch.randn(19))
        if frozen:
            self.fixed = torch.nn.Parameter(torch.randn(11).to(dtype), requires_grad=False)
        for index in range(experts):
            expert = torch.nn.Parameter(torch.randn(9, 11).to(dtype))
            expert.allreduce = False
            setattr(self, f"expert{index}", expert)
        self.register_buffer("counts", torch.zeros(5))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)

    def forward(self, x):
        return x


def build(
    dtype=torch.bfloat16,
    distributed=True,
    bucket_size=None,
    lr=1e-3,
    config=(),
    ddp=(),
    forced=(),
    layer_wise_layout=False,
    **weights,
):
    """`(chunk, optimizer)`: DDP over `Weights`, and the optimizer of `get_megatron_optimizer`.

    `config` and `ddp` are fields of the configurations, `forced` ones set past their validation.
    `layer_wise_layout` lays buffers out so that each matrix is whole on one rank.
    """
    transformer = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, bucket_size=bucket_size, grad_reduce_in_fp32=True, **dict(ddp)
    )
    module, layout = Weights(transformer, dtype, **weights).cuda(), None  # the CPU, under cpu_runtime
    if layer_wise_layout:
        tag_params_for_buffer_routing([module])
        trained = [param for param in module.parameters() if param.requires_grad]
        layout = LayerWiseDistributedOptimizer.compute_full_param_layout(
            trained, bucket_size, torch.distributed.get_world_size(), ddp_config
        )
    chunk = DistributedDataParallel(transformer, ddp_config, module, full_param_layout=layout)
    chunk.broadcast_params()
    half = {torch.bfloat16: {"bf16": True}, torch.float16: {"fp16": True}}.get(dtype, {})
    fields = dict(optimizer="adam", lr=lr, weight_decay=0.01, clip_grad=0.0, params_dtype=dtype)
    fields.update(use_distributed_optimizer=distributed, **half)
    optimizer_config = OptimizerConfig(**{**fields, **dict(config)})
    for name, value in dict(forced).items():
        setattr(optimizer_config, name, value)
    optimizer = get_megatron_optimizer(optimizer_config, [chunk])
    return chunk, optimizer


def step(chunk, optimizer, seed, density=1.0, scale=1.0):
    """One optimizer step; gradients are the same on all data-parallel ranks, `density` of them nonzero."""
    gen = torch.Generator().manual_seed(seed)
    chunk.zero_grad_buffer()
    for param in chunk.parameters():
        if param.requires_grad:
            grad = torch.randn(param.shape, generator=gen) * scale
            param.main_grad.copy_(grad * (torch.rand(param.shape, generator=gen) < density))
    return optimizer.step()


def snapshot(chunk):
    """Copies of all parameters and buffers by name."""
    return {name: t.detach().clone() for name, t in [*chunk.named_parameters(), *chunk.named_buffers()]}


def bits(tensor):
    """The flat bit pattern, as integers."""
    return tensor.detach().contiguous().view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def changed_since(before, tensor):
    """Flat indices of elements whose bits differ, by comparing whole copies."""
    return (bits(before) != bits(tensor)).nonzero().view(-1)
