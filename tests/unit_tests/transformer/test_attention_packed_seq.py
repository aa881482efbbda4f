"""PackedSeqParams.tree_metadata on its way to Transformer Engine. Downstream quotes these node ids."""

import copy
import dataclasses
import inspect
import pickle

import pytest
import torch

from megatron.core.extensions import transformer_engine as extension
from megatron.core.packed_seq_params import PackedSeqParams

KEPT = {"qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "tree_metadata"}


def packed(tree_metadata=None):
    cu_seqlens = torch.tensor([0, 11], dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=7,
        max_seqlen_kv=5,
        total_tokens=11,
        tree_metadata=tree_metadata,
    )


@pytest.mark.parametrize("supported", [False, True])
def test_packed_seq_kwargs_omit_empty_tree_metadata(supported):
    params = packed()
    kwargs = extension._packed_seq_kwargs_for_te(params, KEPT, supports_tree_metadata=supported)
    assert kwargs.keys() == KEPT - {"tree_metadata"}
    assert all(kwargs[name] is getattr(params, name) for name in kwargs)


def test_packed_seq_kwargs_reject_tree_metadata_without_te_support():
    with pytest.raises(RuntimeError, match=r"^tree_metadata requires TransformerEngine"):
        extension._packed_seq_kwargs_for_te(packed(object()), KEPT, supports_tree_metadata=False)


@pytest.mark.parametrize("kept", [KEPT, KEPT - {"tree_metadata"}], ids=["listed", "unlisted"])
def test_packed_seq_kwargs_pass_tree_metadata_when_te_supports_it(kept):
    metadata = object()
    kwargs = extension._packed_seq_kwargs_for_te(packed(metadata), kept, supports_tree_metadata=True)
    assert kwargs["tree_metadata"] is metadata
    assert kwargs.keys() == KEPT


def test_packed_seq_kwargs_without_packed_params():
    assert extension._packed_seq_kwargs_for_te(None, KEPT, supports_tree_metadata=True) == {}


def test_tree_metadata_is_the_last_field_and_survives_copies():
    assert dataclasses.fields(PackedSeqParams)[-1].name == "tree_metadata"
    assert PackedSeqParams().tree_metadata is None
    params = packed({"num_nodes": 3})
    for copied in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert copied.tree_metadata == {"num_nodes": 3}
        assert torch.equal(copied.seq_idx, torch.zeros(1, 11, dtype=torch.int32))


needs_te = pytest.mark.skipif(not extension.HAVE_TE, reason="transformer-engine is not installed")


def te_attention(monkeypatch):
    """A real TEDotProductAttention; building one asks for a device, what is tested here does not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, attention_dropout=0.0, bf16=True
    )
    groups = ProcessGroupCollection(tp=None, cp=None)
    return extension.TEDotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)


@needs_te
def test_real_te_takes_every_field_that_is_passed(monkeypatch):
    te_forward = inspect.signature(extension.te.pytorch.DotProductAttention.forward)
    assert all(p.kind is not p.VAR_KEYWORD for p in te_forward.parameters.values())
    assert extension._TE_SUPPORTS_TREE_METADATA == ("tree_metadata" in te_forward.parameters)
    attention = te_attention(monkeypatch)
    attention.kept_packed_seq_params -= {"cp_group", "local_cp_size"}  # forward does so before it asks
    kwargs = extension._packed_seq_kwargs_for_te(
        packed(), attention.kept_packed_seq_params, extension._TE_SUPPORTS_TREE_METADATA
    )
    assert kwargs.keys() <= te_forward.parameters.keys()
    assert "tree_metadata" not in kwargs


@needs_te
def test_real_te_without_tree_support_is_never_called_with_a_tree(monkeypatch):
    if extension._TE_SUPPORTS_TREE_METADATA:
        pytest.skip("this transformer-engine takes tree_metadata")
    from megatron.core.transformer.enums import AttnMaskType

    q = torch.zeros(11, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"^tree_metadata requires TransformerEngine"):
        te_attention(monkeypatch)(q, q, q, None, AttnMaskType.causal, packed_seq_params=packed(object()))
