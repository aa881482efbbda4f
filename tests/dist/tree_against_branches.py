"""Train a small model on packs of trees and on their branches one by one, and compare every number.

Both sides run the same schedule in the same process groups. The linear side is upstream's ordinary unpacked
layout: [branches, S] tokens, sequential positions, a causal mask. The loss is a weighted sum of next-token
negative log-likelihoods of every branch, in the dtype of the model (Megatron's own cross entropy is fp32).
"""

from __future__ import annotations

import dataclasses
import random

import torch

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.tree_metadata import TreeMetadata
from tests.dist import small_gpt


@dataclasses.dataclass
class Tree:
    """One micro-batch of the tree side, and its branches."""

    metadata: TreeMetadata
    tokens: torch.Tensor  # [T]
    paths: list[list[int]]  # per branch, the packed index of each of its tokens
    weights: list[torch.Tensor]  # per branch, one per token but the last


def grow(seed, branches):
    """A random tree with this many leaves: parents and lengths in preorder, paths by walking up."""
    rng = random.Random(seed)
    parents, lengths, path, leaves = [-1], [rng.randint(2, 4)], [0], 0
    while True:
        if len(path) < 2 or (len(path) < 5 and rng.random() < 0.55):  # go down
            parents.append(path[-1])
            path.append(len(parents) - 1)
            lengths.append(rng.randint(1, 3))
            continue
        leaves += 1
        if leaves == branches:
            break
        path = path[: rng.randint(1, len(path) - 1)]  # back up, then a sibling
        parents.append(path[-1])
        path.append(len(parents) - 1)
        lengths.append(rng.randint(1, 3))
    starts = [sum(lengths[:node]) for node in range(len(lengths))]
    paths = []
    for leaf in set(range(len(parents))) - set(parents):
        path, node = [], leaf
        while node >= 0:
            path = [*range(starts[node], starts[node] + lengths[node]), *path]
            node = parents[node]
        paths.append(path)
    assert len(paths) == branches
    return parents, lengths, paths


def here():
    """This rank's GPU, or the CPU under the cpu runtime."""
    device = torch.cuda.current_device()
    return device if isinstance(device, torch.device) else torch.device("cuda", device)


def make_trees(branches, count, multiple=1, seed=0):
    """``count`` trees, padded to one length that has at least three padding tokens."""
    grown = [grow(100 * branches + 10 * seed + i, branches) for i in range(count)]
    size = max(sum(lengths) for _, lengths, _ in grown) + 3
    size += -size % multiple
    generator = torch.Generator().manual_seed(seed)
    trees = []
    for parents, lengths, paths in grown:
        tokens = torch.randint(0, small_gpt.VOCAB, (size,), generator=generator)
        weights = [torch.rand(len(p) - 1, generator=generator, dtype=torch.float64) for p in paths]
        metadata = TreeMetadata.from_nodes(parents, lengths, padded_size=size, device=here())
        trees.append(Tree(metadata, tokens.to(here()), paths, [w.to(here()) for w in weights]))
    return trees


def build_hybrid(cfg, pattern="*-*-", tied=False, position_embedding_type="rope"):
    """HybridModel with attention and MLP layers only, on local modules."""
    assert cfg.virtual_pipeline_model_parallel_size is None
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    bda = small_gpt.get_gpt_decoder_block_spec(cfg, use_transformer_engine=False).layer_specs[0].submodules
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    from functools import partial

    stack = HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm, self_attention=attention, self_attn_bda=bda.self_attn_bda
            ),
        ),
        mlp_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                self_attention=IdentityOp,
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
                mlp_bda=bda.mlp_bda,
            ),
        ),
    )
    model = HybridModel(
        cfg,
        ModuleSpec(module=HybridStack, submodules=stack, params={"post_layer_norm": False}),
        small_gpt.VOCAB,
        256,
        hybrid_layer_pattern=pattern,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
        position_embedding_type=position_embedding_type,
    )
    small_gpt.fill(model)
    return [model.to(cfg.params_dtype)]


def logits_of(output_1TV):
    """[n, T, V] from the vocabulary shards of the tensor-parallel group."""
    return gather_from_tensor_model_parallel_region(output_1TV)


def branch_loss(logits_LV, tokens_L, weights):
    """Weighted sum of next-token negative log-likelihoods of one branch."""
    log_p = logits_LV[:-1].log_softmax(-1).gather(-1, tokens_L[1:, None])[:, 0]
    return -(log_p * weights.to(log_p.dtype)).sum()


class Side:
    """One way to run the same branches; collects the branch logits and the loss on the last stage."""

    def __init__(self, cfg, chunks):
        self.cfg = cfg
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=False, use_distributed_optimizer=False)
        self.chunks = [DistributedDataParallel(cfg, ddp, chunk.to(here())) for chunk in chunks]
        cfg.finalize_model_grads_func = finalize_model_grads
        cfg.grad_scale_func = None
        self.logits, self.loss = {}, 0.0

    def run(self, forward_step, batches, length, rows):
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.logits, self.loss = {}, 0.0
        virtual = len(self.chunks) > 1
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self.chunks] if virtual else iter(batches),
            model=self.chunks if virtual else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=False,
        )
        gradients = {}
        for chunk in self.chunks:
            for name, parameter in small_gpt.global_names(chunk.module).items():
                gradients[name] = parameter.main_grad.clone()
        return gradients, self.logits, self.loss

    def loss_func(self, key, branches, count):
        """``branches(logits [n, T, V])`` yields (logits [L, V], tokens, weights) per branch."""

        def loss_func(output):
            total = 0.0
            for i, (logits_LV, tokens, weights) in enumerate(branches(logits_of(output))):
                self.logits[key, i] = logits_LV.detach()
                total = total + branch_loss(logits_LV, tokens, weights)
            self.loss += float(total.detach())
            return total * count, {}  # the schedule divides by the number of micro-batches

        return loss_func


def rope_positions(cfg, positions_bT):
    """What the model takes; M-RoPE three axes, here with three meanings: [3, b, T]."""
    if cfg.mrope_section is None:
        return positions_bT
    return torch.stack([positions_bT, positions_bT // 2, 3 * positions_bT % 7])


def run_trees(side, trees, alter=None):
    """``alter(metadata) -> metadata`` breaks something on purpose."""

    def forward_step(iterator, model):
        index, tree = next(iterator)
        metadata = alter(tree.metadata) if alter else dataclasses.replace(tree.metadata)
        first = parallel_state.is_pipeline_first_stage()
        output = model(
            tree.tokens[None] if first else None,  # as upstream's schedules: no ids on later stages
            rope_positions(side.cfg, tree.metadata.tree_position_ids[None]) if first else None,
            None,
            packed_seq_params=metadata.packed_seq_params(),
        )

        def branches(logits):
            for path, weights in zip(tree.paths, tree.weights, strict=True):
                yield logits[0, path], tree.tokens[path], weights

        return output, side.loss_func(index, branches, len(trees))

    return side.run(forward_step, list(enumerate(trees)), trees[0].metadata.padded_size, 1)


def run_branches(side, trees, multiple=1):
    length = max(len(path) for tree in trees for path in tree.paths)
    length += -length % multiple
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=here()), 1)[None, None]
    positions = torch.arange(length, device=here())[None]

    def forward_step(iterator, model):
        index, tree = next(iterator)
        tokens = torch.zeros(len(tree.paths), length, dtype=torch.int64, device=here())
        for row, path in enumerate(tree.paths):
            tokens[row, : len(path)] = tree.tokens[path]
        output = model(tokens, rope_positions(side.cfg, positions.expand(len(tokens), -1)), mask)

        def branches(logits):
            for row, (path, weights) in enumerate(zip(tree.paths, tree.weights, strict=True)):
                yield logits[row, : len(path)], tree.tokens[path], weights

        return output, side.loss_func(index, branches, len(trees))

    return side.run(forward_step, list(enumerate(trees)), length, len(trees[0].paths))


def difference(got, want):
    """Largest difference of two dictionaries of tensors, relative to the largest value under each name."""
    assert got.keys() == want.keys()
    top = max((float(t.abs().max()) for t in want.values()), default=0.0)
    worst = ("", 0.0)
    for name, value in want.items():
        assert not got[name].isnan().any(), name
        scale = max(float(value.abs().max()), 1e-6 * top)
        error = float((got[name] - value).abs().max()) / scale
        worst = max(worst, (name, error), key=lambda pair: pair[1])
    return worst
