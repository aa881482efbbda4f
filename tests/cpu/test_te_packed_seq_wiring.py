"""TEDotProductAttention hands tree_metadata to TE only where TE's signature names it (TE is a stand-in)."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# A stand-in: every class is an empty module except DotProductAttention, whose forward takes the fields that
# transformer-engine 2.x takes and nothing else.
STAND_IN = """
    import importlib.abc, importlib.machinery, sys, types
    import torch

    __version__ = "2.20.2"
    calls = []

    class DotProductAttention(torch.nn.Module):
        def __init__(self, **kwargs):
            super().__init__()

        def forward(self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None,
                    cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
                    cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type=None,
                    pad_between_seqs=None{extra}):
            calls.append(dict(locals()))
            return query_layer

    class Anything(types.ModuleType):
        DotProductAttention = DotProductAttention
        __path__ = []

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            if name in ("recipe", "distributed"):
                return Anything(name)
            return type(name, (torch.nn.Module,), {{}})

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path, target=None):
            if name.startswith(__name__ + "."):
                return importlib.machinery.ModuleSpec(name, self, is_package=True)

        def create_module(self, spec):
            return Anything(spec.name)

        def exec_module(self, module):
            pass

    sys.meta_path.insert(0, Finder())
    pytorch, common = Anything("pytorch"), Anything("common")
"""

PROGRAM = """
    import torch, transformer_engine
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2)
    attention = TEDotProductAttention(config, 1, AttnMaskType.causal, "self",
                                      pg_collection=ProcessGroupCollection(tp=None, cp=None))
    ends, q = torch.tensor([0, 11], dtype=torch.int32), torch.zeros(11, 2, 16)
    plain = dict(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=11, max_seqlen_kv=11,
                 total_tokens=11)
    for metadata in (None, "the tree", None):
        params = PackedSeqParams(**plain, tree_metadata=metadata)
        try:
            attention(q, q, q, None, AttnMaskType.causal, packed_seq_params=params)
        except RuntimeError as error:
            print(error)
        else:
            call = transformer_engine.calls.pop()
            print(call["attn_mask_type"], call["max_seqlen_q"], call.get("tree_metadata", "no such argument"))
"""


@pytest.mark.parametrize("supported", [False, True])
def test_tree_metadata_reaches_te_only_when_its_signature_names_it(tmp_path, supported):
    package = tmp_path / "transformer_engine" / "__init__.py"
    package.parent.mkdir()
    extra = ", tree_metadata='absent'" if supported else ""
    package.write_text(textwrap.dedent(STAND_IN).format(extra=extra))
    import megatron.core

    tree = Path(megatron.core.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM)],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{tree}"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    without, with_tree, after = done.stdout.splitlines()
    if supported:
        assert with_tree == "padding_causal 11 the tree"
        assert without == after == "padding_causal 11 absent"
    else:
        assert with_tree.startswith("tree_metadata requires TransformerEngine")
        assert "2.20.2" in with_tree
        assert without == after == "padding_causal 11 no such argument"
