"""`rotary_use_position_ids`, ids per sample: tensor, sequence and pipeline parallel equal one rank."""

import pytest
import torch

from tests.dist.world import parallel


def logits(groups, options, ids_BS, flag=True):
    """[B, S, V] of the small GPT on the last pipeline stage, else None."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
    from tests.dist.small_gpt import VOCAB, build, config

    with parallel(**groups):
        cfg = config(params_dtype=torch.float64, rotary_use_position_ids=flag, **options)
        (model,) = build(cfg)
        tokens = torch.randint(0, VOCAB, ids_BS.shape, generator=torch.Generator().manual_seed(5))
        mask = torch.triu(torch.ones(2 * ids_BS.shape[1:], dtype=torch.bool), 1)[None, None]
        found = []

        def forward_step(iterator, model):
            def keep(out):
                found.append(gather_from_tensor_model_parallel_region(out).detach())
                return out.sum(), {}

            return model(tokens, ids_BS, mask), keep  # the same ids on every stage

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(()),
            model=model,
            num_microbatches=1,
            seq_length=ids_BS.size(1),
            micro_batch_size=ids_BS.size(0),
            forward_only=True,
        )
        return found[0] if parallel_state.is_pipeline_last_stage() else None


def compare(groups, options):
    ids_BS = torch.stack([torch.randperm(12, generator=torch.Generator().manual_seed(i)) for i in range(3)])
    spread = logits(groups, options, ids_BS)
    alone, sequential = logits({}, {}, ids_BS), logits({}, {}, ids_BS, flag=False)
    if spread is None:
        return None
    return float((spread - alone).abs().max()), float((alone - sequential).abs().max())


@pytest.mark.parametrize(
    "groups, options",
    [(dict(tp=2), {}), (dict(tp=2), dict(sequence_parallel=True)), (dict(pp=2), {})],
    ids=["tp2", "tp2-sp", "pp2"],
)
def test_ids_of_each_sample(world, groups, options):
    ranks = [found for found in world(2, compare, groups, options) if found]
    assert ranks
    for difference, effect in ranks:
        assert difference < 1e-12
        assert effect > 1e-4
