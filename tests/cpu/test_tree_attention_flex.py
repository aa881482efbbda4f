"""FlexAttention uncompiled against the reference, forward: every option, awkward trees, partial blocks."""

import pytest
import torch

from megatron.core.transformer.tree_attention import TreeUnsupportedError, flash, tree_attention
from megatron.core.transformer.tree_attention.case import TreeAttentionCase
from megatron.core.transformer.tree_metadata import TreeMetadata
from tests.cpu.test_tree_attention_backends import OPTIONS, tensors
from tests.cpu.test_tree_metadata import random_tree

TREES = {
    "chain": ([-1], [301]),
    "one token": ([-1], [1]),
    "partial last block": ([-1, 0, 0], [130, 70, 61]),
    "single-token nodes": ([-1, *range(40)], [1] * 41),
    "fan-out": ([-1, *[0] * 64], [9] + [5] * 64),
    "forest": ([-1, 0, -1, -1, 3], [128, 128, 1, 127, 3]),
    "random": random_tree(11, nodes=60, longest=9),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("tree", TREES)
@torch.no_grad()
def test_flex_equals_reference(tree, option):
    metadata = TreeMetadata.from_nodes(*TREES[tree], padded_to=3)
    q, k, v, sink = tensors(len(tree) + len(option), metadata.padded_size, qk_dim=16, v_dim=16)
    options = dict(OPTIONS[option])
    sink = sink if options.pop("sink", False) else None
    out = tree_attention(q, k, v, metadata, sink=sink, backend="flex", **options)
    want = tree_attention(q, k, v, metadata, sink=sink, backend="reference", **options)
    # FlexAttention adds its log-sum-exp up in float32 somewhere: float32 noise is what it promises.
    torch.testing.assert_close(out, want, rtol=2e-6, atol=2e-6)


def test_flex_refuses_backward_on_cpu():
    metadata = TreeMetadata.from_nodes([-1], [5])
    q, k, v, _ = tensors(0, 5, qk_dim=16, v_dim=16)
    with pytest.raises(
        TreeUnsupportedError, match=r"FlexAttention has no backward on CPU\. Backends that can: r"
    ):
        tree_attention(q, k, v, metadata, backend="flex")


def on_gpu(**fields):
    base = dict(
        device_type="cuda",
        capability=(9, 0),
        dtype=torch.bfloat16,
        heads=8,
        kv_heads=2,
        qk_dim=128,
        v_dim=128,
    )
    return TreeAttentionCase(**{**base, **fields})


@pytest.mark.parametrize(
    "fields, reason",
    [
        (dict(device_type="cpu", capability=None), "it runs on CUDA devices, not on cpu"),
        (dict(capability=(8, 0)), "it needs compute capability 9.x or 10.x, not 8.0"),
        (dict(dtype=torch.float32), "it computes bfloat16 and float16, not float32"),
        (dict(qk_dim=264, v_dim=264), "it takes query/key head sizes from 8 to 256 in steps of 8, not 264"),
        (dict(qk_dim=100, v_dim=100), "it takes query/key head sizes from 8 to 256 in steps of 8, not 100"),
        (
            dict(qk_dim=128, v_dim=64),
            "of unequal query/key and value head sizes it takes 192/128, not 128/64",
        ),
        (
            dict(capability=(10, 0), qk_dim=256, v_dim=256),
            "on compute capability 10.x it takes head sizes up to 128, and 192/128, not 256",
        ),
        (dict(softcap=True), "its softcap has no tested backward together with a mask"),
        # Also without gradients: the first pass of a recomputed layer must take the backend of the second.
        (
            dict(deterministic=True, needs_grad=False),
            "its backward over block lists adds gradients up in any order",
        ),
    ],
)
def test_what_flash_refuses(fields, reason):
    assert flash.supports(on_gpu(**fields)) == reason


@pytest.mark.parametrize(
    "installed, reason",
    [
        (None, "flash-attn-4 is not installed (pip install 'megatron-core[flash]')"),
        ("4.0.0b25", "it needs flash-attn-4 >= 4.0.0b26, older ones have a race; installed is 4.0.0b25"),
        ("4.0.0b26", None),
        ("4.0.0", None),
    ],
)
def test_which_flash_attn_is_taken(monkeypatch, installed, reason):
    def version(name):
        if installed is None:
            raise flash.importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(flash.importlib.metadata, "version", version)
    flash.package_problem.cache_clear()
    assert flash.supports(on_gpu()) == reason
    flash.package_problem.cache_clear()
