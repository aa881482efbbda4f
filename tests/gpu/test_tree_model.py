"""A model on a GPU: trees through each attention backend against float64, and on Transformer Engine layers.

Needs one GPU; flash and flex are skipped, with the reason, where they cannot serve.
"""

import functools
import os
import sys

import pytest
import torch

if not torch.cuda.is_available() or "megatron.cpu_runtime" in sys.modules:
    pytest.skip("needs CUDA, in a process without the cpu runtime", allow_module_level=True)

import torch.distributed as dist

from megatron.core.transformer.tree_attention import TreeUnsupportedError
from tests.dist.world import parallel

pytestmark = pytest.mark.gpu

SIZES = dict(num_layers=2, hidden_size=256, num_attention_heads=4, num_query_groups=2, kv_channels=64)


@pytest.fixture(scope="module")
def process_group():
    torch.cuda.set_device(0)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def run(side_of, dtype, branches, backend="auto", mla=False, te=False, **options):
    """[gradients, logits] of one side as two float64 vectors; options go to the configuration."""
    from tests.dist import small_gpt
    from tests.dist import tree_against_branches as t

    with parallel():
        sizes = {k: v for k, v in SIZES.items() if not (mla and k == "num_query_groups")}
        if mla:
            sizes.update(qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)  # the pair that flash takes
        cfg = small_gpt.config(
            params_dtype=dtype, mla=mla, tree_attention_backend=backend, **sizes, **options
        )
        trees = t.make_trees(branches, count=2, multiple=8)
        chunks = [te_model(cfg)] if te else small_gpt.build(cfg)
        gradients, logits, _ = getattr(t, side_of)(t.Side(cfg, chunks), trees)
        return [torch.cat([v.double().flatten() for v in d.values()]) for d in (gradients, logits)]


@functools.cache
def exact(branches, mla):
    return run("run_branches", torch.float64, branches, mla=mla)


def noise(found, branches, mla=False):
    pairs = zip(found, exact(branches, mla), strict=True)
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


def te_model(cfg):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from tests.dist import small_gpt

    model = GPTModel(
        cfg,
        get_gpt_layer_with_transformer_engine_spec(),
        small_gpt.VOCAB,
        256,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    small_gpt.fill(model)
    return model.to(cfg.params_dtype)


@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
@pytest.mark.parametrize("branches", [2, 40])
def test_reference_in_float64_is_exact(process_group, branches, mla):
    assert max(noise(run("run_trees", torch.float64, branches, "reference", mla), branches, mla)) < 1e-10


@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
@pytest.mark.parametrize("branches", [5, 40])
@pytest.mark.parametrize("backend", ["reference", "flex", "flash"])
def test_bf16_is_no_further_from_float64_than_bf16_branches(process_group, backend, branches, mla):
    try:
        trees = noise(run("run_trees", torch.bfloat16, branches, backend, mla), branches, mla)
    except TreeUnsupportedError as error:
        pytest.skip(str(error))
    linear = noise(run("run_branches", torch.bfloat16, branches, mla=mla), branches, mla)
    print(f"{backend} gradients, logits: trees {trees}, branches {linear}")
    for a, b in zip(trees, linear, strict=True):
        assert 1e-4 < a < 1.25 * b < 0.1


RECOMPUTE = {
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "core_attn": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
}


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("backend", ["flex", "flash"])
def test_recompute_sees_the_same_metadata_and_computes_the_same(
    process_group, backend, recompute, monkeypatch
):
    from megatron.core.transformer.tree_attention import flash, flex, intervals

    module, seen, built = {"flex": flex, "flash": flash}[backend], [], []
    attend, build = module.attend, intervals._build

    def spied_attend(q, k, v, metadata, **options):
        seen.append(metadata)
        return attend(q, k, v, metadata, **options)

    def spied_build(metadata, *rest):
        built.append(metadata)
        return build(metadata, *rest)

    monkeypatch.setattr(module, "attend", spied_attend)
    monkeypatch.setattr(intervals, "_build", spied_build)
    try:
        plain = run("run_trees", torch.bfloat16, 5, backend)
    except TreeUnsupportedError as error:
        pytest.skip(str(error))
    layers, trees = SIZES["num_layers"], 2
    assert len(seen) == layers * trees and len({id(m) for m in seen}) == trees
    seen.clear(), built.clear()
    again = run("run_trees", torch.bfloat16, 5, backend, **RECOMPUTE[recompute])
    assert len(seen) == 2 * layers * trees and len({id(m) for m in seen}) == trees
    assert len(built) == 2 * trees  # one list forward, one backward, for all layers and both passes
    assert torch.equal(again[1], plain[1])
    # Not equal bits: flash adds gradients up in any order unless it is asked for a deterministic one.
    assert float((again[0] - plain[0]).norm() / plain[0].norm()) < 2e-3


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_transformer_engine_layers(process_group, backend):
    """TE's own attention serves the branches, ours the tree (unless TE takes the metadata)."""
    pytest.importorskip("transformer_engine.pytorch")
    try:
        trees = run("run_trees", torch.bfloat16, 5, backend, te=True)
    except TreeUnsupportedError as error:
        pytest.skip(str(error))
    branches = run("run_branches", torch.bfloat16, 5, te=True)
    found = [float((a - b).norm() / b.norm()) for a, b in zip(trees, branches, strict=True)]
    print(f"{backend} trees against branches on TE layers, gradients and logits: {found}")
    assert max(found) < 0.03  # two bf16 results, each about 1e-2 from float64
