"""The metadata that a recomputed layer sees in backward is the object of its forward, cache included."""

import pytest
import torch

from megatron.core.transformer.tree_attention import reference
from megatron.core.transformer.tree_metadata import TreeMetadata

RECOMPUTE = {
    "off": {},
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "core_attn": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
}


@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_one_mask_per_micro_batch(single, monkeypatch, recompute, mla):
    from tests.dist import small_gpt

    [model] = small_gpt.build(small_gpt.config(num_layers=3, mla=mla, **RECOMPUTE[recompute]))
    built, attended = [], []
    visible, attend = reference.visible, reference.attend
    monkeypatch.setattr(reference, "visible", lambda m, w: built.append(m) or visible(m, w))
    monkeypatch.setattr(reference, "attend", lambda *a, **k: attended.append(a[3]) or attend(*a, **k))
    packs = [TreeMetadata.from_nodes([-1, 0, 0], [2, 3, n]) for n in (1, 2)]
    outputs = [
        model(
            torch.arange(pack.padded_size)[None],
            pack.tree_position_ids[None],
            None,
            packed_seq_params=pack.packed_seq_params(),
        )
        for pack in packs  # two micro-batches in flight
    ]
    assert len(attended) == 6
    for output in reversed(outputs):
        output.square().sum().backward()
    assert [id(m) for m in built] == [id(m) for m in packs]
    again = [] if recompute == "off" else [packs[1]] * 3 + [packs[0]] * 3
    assert [id(m) for m in attended] == [id(m) for m in [packs[0]] * 3 + [packs[1]] * 3 + again]
