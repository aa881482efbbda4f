"""A packed trie gets the queries, keys and hidden states of its branches run one by one, for every rope.

The trie has repeated positions, two roots and tail padding. fp64 throughout; rotary angles are fp32 on both
sides, so differences are those of matrix products over other shapes.

Shapes: T packed tokens, S tokens of one path, B batch, H heads, D head size.
"""

from functools import partial

import pytest
import torch

from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer import multi_latent_attention as mla_module
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.tree_metadata import TreeMetadata

pytestmark = pytest.mark.usefixtures("single")
close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-12)

# Nodes in preorder: a root with a chain and two leaves, and a second root; 3 tokens of padding at the end.
PARENTS, LENGTHS, PADDED = [-1, 0, 1, 1, 0, -1], [3, 2, 4, 1, 5, 3], 21
BRANCHES = [[0, 1, 2], [0, 1, 3], [0, 4], [5]]  # nodes on each path


def tree():
    return TreeMetadata.from_nodes(PARENTS, LENGTHS, padded_size=PADDED)


def branch_indices():
    """Packed indices [S] of every path."""
    starts = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    node = [torch.arange(s, s + n) for s, n in zip(starts.tolist(), LENGTHS, strict=True)]
    return [torch.cat([node[i] for i in path]) for path in BRANCHES]


def plain_core(core, query, key, value, attention_mask=None, packed_seq_params=None, **ignored):
    """Causal [S, B, H, D], or packed [T, H, D] by cu_seqlens, in plain torch. Trees pass it by."""
    packed = query.dim() == 3
    if packed:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
    key, value = (x.repeat_interleave(query.size(2) // x.size(2), 2) for x in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * core.softmax_scale
    index = torch.arange(query.size(0))
    hidden = index[:, None] < index
    if packed:
        sequence = torch.searchsorted(packed_seq_params.cu_seqlens_q.long(), index, right=True)
        hidden = hidden | (sequence[:, None] != sequence)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out = torch.einsum("bhqk,kbhd->qbhd", weights, value[..., : core.v_size]).flatten(2)
    return out.squeeze(1) if packed else out


def prepared(module):
    """The module in fp64, its core attention (which cannot do MLA or packs) replaced by `plain_core`."""
    for attention_layer in module.modules():
        core = getattr(attention_layer, "core_attention", None)
        if core is not None:
            core.v_size = getattr(attention_layer.config, "v_head_dim", None)
            core.forward = partial(plain_core, core)
    return module.double()


def config(mla=False, **overrides):
    fields = dict(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=4,
        ffn_hidden_size=20,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        params_dtype=torch.float64,
        init_method_std=0.4,
    )
    if mla:
        fields |= dict(q_lora_rank=10, kv_lora_rank=9, qk_head_dim=6, qk_pos_emb_head_dim=8, v_head_dim=5)
        fields |= dict(rope_type="rope", multi_latent_attention=True)
        fields |= dict(original_max_position_embeddings=8, rotary_scaling_factor=4, mscale=0.8)
        return MLATransformerConfig(**(fields | overrides))
    made = TransformerConfig(**(fields | dict(kv_channels=10, num_query_groups=2) | overrides))
    for name, value in dict(  # set on the object, as upstream's training does
        yarn_rotary_scaling_factor=4.0,
        yarn_original_max_position_embeddings=8,
        yarn_beta_fast=32.0,
        yarn_beta_slow=1.0,
        yarn_mscale=0.8,
        yarn_mscale_all_dim=0.0,
        yarn_correction_range_round_to_int=True,
    ).items():
        setattr(made, name, value)
    return made


class MlaCore(DotProductAttention):
    """Constructible with MLA's arguments, which upstream's local core attention is not."""

    def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
        super().__init__(*args, **kwargs)


def layer_spec(mla=False):
    spec = get_gpt_layer_local_spec(multi_latent_attention=mla, normalization="RMSNorm")
    if mla:
        spec.submodules.self_attention.submodules.core_attention = MlaCore
    return spec


def attention(cfg, mla=False):
    return prepared(build_module(layer_spec(mla).submodules.self_attention, config=cfg, layer_number=1))


def record_core_inputs(module):
    """Make the layer's core attention a recorder of (query, key) that returns the query."""
    recorded = []

    def run(query, key, value, *args, **kwargs):
        recorded.append((query.clone(), key.clone()))  # recomputation frees them
        return query.flatten(-2)

    module._run_core_attention = run
    return recorded


GQA_KINDS = {
    "plain": (RotaryEmbedding, {}, {}),
    "partial": (RotaryEmbedding, {}, dict(rotary_percent=0.4)),
    "interleaved": (RotaryEmbedding, dict(rotary_interleaved=True), dict(rotary_interleaved=True)),
    "llama3": (RotaryEmbedding, {}, dict(rope_scaling=True, rotary_base=500000)),
    "interpolated": (RotaryEmbedding, {}, dict(seq_len_interpolation_factor=2.5)),
    "yarn": (
        YarnRotaryEmbedding,
        {},
        dict(scaling_factor=4.0, original_max_position_embeddings=8, mscale=0.8),
    ),
}


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("kind", GQA_KINDS)
def test_queries_and_keys_of_self_attention(kind, fused, monkeypatch):
    cls, options, rope_options = GQA_KINDS[kind]
    cfg = config(**options)
    if kind != "yarn":
        cfg.yarn_mscale = cfg.yarn_mscale_all_dim = 0.0  # a concentration factor of 1
    rope = cls(10, **{"rotary_percent": 1.0, **rope_options})
    layer = attention(cfg)
    assert (layer._yarn_concentration_factor != 1.0) == (kind == "yarn")
    recorded = record_core_inputs(layer)

    def rows(length, ids=None):
        out = rope(length, packed_seq=ids is not None, position_ids=ids)
        return out[0] if kind == "yarn" else out

    meta, hidden = tree(), torch.randn(PADDED, 1, 24, dtype=torch.float64)
    params = meta.packed_seq_params()
    if fused:  # TE's batch kernel stood in for by the definition; its THD kernel must not be called
        cfg.apply_rope_fusion = True
        monkeypatch.setattr(
            rope_utils,
            "fused_apply_rotary_pos_emb",
            lambda t, freqs, interleaved: rope_utils._apply_rotary_pos_emb_bshd(t, freqs, interleaved),
        )
        monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", None)
    embeddings = rows(meta.max_position + 1, meta.tree_position_ids)
    layer(hidden, None, rotary_pos_emb=embeddings, packed_seq_params=params)
    query, key = recorded.pop()
    assert query.shape == (PADDED, 4, 10) and key.shape == (PADDED, 2, 10)
    cfg.apply_rope_fusion = False
    for index in branch_indices():
        layer(hidden[index], None, rotary_pos_emb=rows(len(index)))
        expected = recorded.pop()
        close(query[index], expected[0].squeeze(1))
        close(key[index], expected[1].squeeze(1))


def mla_kernels(monkeypatch):
    """Stand-ins for the fused MLA kernels: a token's cosine row is its index in its cu_seqlens sequence."""

    def rotate(t_THD, cos, sin, cu_seqlens):
        index = torch.arange(t_THD.size(0))
        start = cu_seqlens[torch.searchsorted(cu_seqlens.long(), index, right=True) - 1]
        c, s = cos[index - start].squeeze(1), sin[index - start].squeeze(1)
        half = t_THD.size(-1) // 2
        a, b = t_THD[..., ::2], t_THD[..., 1::2]
        left = a * c[..., :half] - b * s[..., :half]
        return torch.cat((left, b * c[..., half:] + a * s[..., half:]), -1)

    def for_q(q, cos, sin, qk_head_dim, emb_dim, cu_seqlens, cp_rank, cp_size):
        assert cos.is_contiguous() and sin.is_contiguous() and q.dim() == 3
        return torch.cat((q[..., :qk_head_dim], rotate(q[..., qk_head_dim:], cos, sin, cu_seqlens)), -1)

    def for_kv(kv, k_pos_emb, cos, sin, emb_dim, k_dim, v_dim, cu_seqlens, cp_rank, cp_size):
        k, v = kv.split([k_dim, v_dim], -1)
        turned = rotate(k_pos_emb, cos, sin, cu_seqlens).expand(-1, kv.size(1), -1)
        return torch.cat((k, turned), -1), v

    monkeypatch.setattr(mla_module, "fused_apply_mla_rope_for_q", for_q)
    monkeypatch.setattr(mla_module, "fused_apply_mla_rope_for_kv", for_kv)


@pytest.mark.parametrize(
    "rope_type, fused, options",
    [
        ("rope", False, {}),
        ("rope", False, dict(q_lora_rank=None)),
        ("yarn", False, {}),
        ("yarn", False, dict(recompute_granularity="selective", recompute_modules=["mla_up_proj"])),
        ("yarn", True, {}),
    ],
    ids=["rope", "no-q-lora", "yarn", "recomputed-up-projection", "yarn-fused"],
)
def test_queries_and_keys_of_mla(rope_type, fused, options, monkeypatch):
    cfg = config(mla=True, rope_type=rope_type, **options)
    layer = attention(cfg, mla=True)
    recorded = record_core_inputs(layer)
    layer.linear_proj.forward = lambda x: (x, None)  # the recorder returns queries, of another width
    meta, hidden = tree(), torch.randn(PADDED, 1, 24, dtype=torch.float64)
    params = meta.packed_seq_params()
    if fused:
        cfg.apply_rope_fusion = True
        mla_kernels(monkeypatch)
        # what a fused kernel reads besides the tree must not matter
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = torch.tensor([0, 9, 21], dtype=torch.int32)
    layer(hidden, None, packed_seq_params=params)
    query, key = recorded.pop()
    assert query.shape == key.shape == (PADDED, 4, 14)
    cfg.apply_rope_fusion = False
    for index in branch_indices():
        layer(hidden[index], None)
        expected = recorded.pop()
        close(query[index], expected[0].squeeze(1))
        close(key[index], expected[1].squeeze(1))


def test_positions_survive_recomputation_of_a_layer():
    """Recomputation hands the layer detached copies of the embeddings, which must still be taken for rows."""
    layer, rope, meta = attention(config()), RotaryEmbedding(10, 1.0), tree()
    rows = rope(meta.max_position + 1, packed_seq=True, position_ids=meta.tree_position_ids)
    params = meta.packed_seq_params()
    grads = []

    def run(x, embeddings):
        return layer(x, None, rotary_pos_emb=embeddings, packed_seq_params=params)[0]

    for recompute in (False, True):
        torch.manual_seed(3)
        hidden = torch.randn(PADDED, 1, 24, dtype=torch.float64, requires_grad=True)
        out = tensor_parallel.checkpoint(run, False, hidden, rows) if recompute else run(hidden, rows)
        out.square().sum().backward()
        grads.append((out.detach(), hidden.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


def gpt(cfg, mla=False, post_process=False, position_embedding_type="rope", **options):
    torch.manual_seed(11)
    model = GPTModel(
        cfg,
        layer_spec(mla),
        vocab_size=37,
        max_sequence_length=64,
        post_process=post_process,
        position_embedding_type=position_embedding_type,
        **options,
    )
    return prepared(model)


def hybrid(cfg, position_embedding_type="rope", **options):
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.mlp, spec.submodules.mlp_bda = IdentityOp, IdentityFuncOp
    stack = ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(attention_layer=spec))
    torch.manual_seed(11)
    model = HybridModel(
        cfg,
        stack,
        vocab_size=37,
        max_sequence_length=64,
        hybrid_layer_pattern="**",
        post_process=False,
        position_embedding_type=position_embedding_type,
        **options,
    )
    return prepared(model)


MODELS = {
    "gpt": lambda **k: gpt(config(**k)),
    "gpt-yarn": lambda **k: gpt(config(**k), position_embedding_type="yarn"),
    "gpt-llama3": lambda **k: gpt(config(**k), rope_scaling=True),
    "gpt-partial-interpolated": lambda **k: gpt(
        config(**k), rotary_percent=0.4, seq_len_interpolation_factor=1.5
    ),
    "gpt-interleaved": lambda **k: gpt(config(rotary_interleaved=True, **k)),
    "gpt-recomputed": lambda **k: gpt(
        config(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1, **k)
    ),
    "gpt-mla": lambda **k: gpt(config(mla=True, rope_type="yarn", **k), mla=True),
    "gpt-mla-recomputed": lambda **k: gpt(
        config(mla=True, recompute_granularity="selective", recompute_modules=["mla_up_proj"], **k), mla=True
    ),
    "hybrid": lambda **k: hybrid(config(**k)),
    "hybrid-yarn": lambda **k: hybrid(config(**k), position_embedding_type="yarn"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_hidden_states_and_gradients_of_a_model(kind):
    """Every branch's hidden states, and the gradients of a loss over all branches.

    No position ids are passed with the tree, as on a later pipeline stage.
    """
    model, meta = MODELS[kind](), tree()
    tokens = torch.randint(0, 37, (1, PADDED))
    out = model(tokens, None, None, packed_seq_params=meta.packed_seq_params())
    assert out.shape == (PADDED, 1, 24)
    weights = [torch.randn(len(index), 1, 24, dtype=torch.float64) for index in branch_indices()]
    sum((out[i] * w).sum() for i, w in zip(branch_indices(), weights, strict=True)).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for index, weight in zip(branch_indices(), weights, strict=True):
        alone = model(tokens[:, index], torch.arange(len(index))[None], None)
        close(out[index], alone)
        (alone * weight).sum().backward()
    for name, parameter in model.named_parameters():
        close(grads[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", ["gpt", "hybrid"])
def test_later_pipeline_stage(kind):
    """A stage without embedding: no position ids, hidden states from the stage before."""
    model = (gpt if kind == "gpt" else hybrid)(config(), pre_process=False)
    meta, hidden = tree(), torch.randn(PADDED, 1, 24, dtype=torch.float64)
    model.set_input_tensor(hidden)
    out = model(None, None, None, packed_seq_params=meta.packed_seq_params())
    for index in branch_indices():
        model.set_input_tensor(hidden[index])
        close(out[index], model(None, None, None))


def test_preprocess_stays_a_six_tuple():
    model, meta = gpt(config()), tree()
    tokens = torch.zeros(1, PADDED, dtype=torch.int64)
    out = model._preprocess(tokens, None, packed_seq_params=meta.packed_seq_params())
    assert len(out) == 6
    table = model.rotary_pos_emb(meta.max_position + 1)
    assert torch.equal(out[1], table[meta.tree_position_ids])
    assert table.size(0) == 9  # the deepest path, not the 21 packed tokens


class TestFlag:
    """`rotary_use_position_ids`: the model's own ids, without a tree."""

    @pytest.mark.parametrize("kind", ["gpt", "gpt-yarn", "hybrid"])
    def test_off_ignores_position_ids(self, kind):
        model, tokens = MODELS[kind](), torch.randint(0, 37, (2, 9))
        sequential = torch.arange(9).expand(2, -1)
        expected = model(tokens, sequential, None)
        for ids in (torch.randint(0, 9, (2, 9)), sequential.flip(1), None):
            assert torch.equal(model(tokens, ids, None), expected)
        params = packed([0, 4, 9])
        expected = model(tokens[:1], sequential[:1], None, packed_seq_params=params)
        for ids in (torch.randint(0, 9, (1, 9)), None):
            assert torch.equal(model(tokens[:1], ids, None, packed_seq_params=params), expected)

    @pytest.mark.parametrize("kind", ["gpt", "gpt-yarn", "hybrid"])
    def test_on_with_sequential_ids_or_none_changes_no_bit(self, kind):
        model, params = MODELS[kind](), packed([0, 4, 9])
        tokens, sequential = torch.randint(0, 37, (2, 9)), torch.arange(9).expand(2, -1)
        batch, pack = model(tokens, None, None), model(tokens[:1], None, None, packed_seq_params=params)
        model.config.rotary_use_position_ids = True
        for ids in (sequential, sequential[:1], None):
            assert torch.equal(model(tokens, ids, None), batch)
        for ids in (torch.cat((torch.arange(4), torch.arange(5)))[None], None):
            assert torch.equal(model(tokens[:1], ids, None, packed_seq_params=params), pack)

    @pytest.mark.parametrize("kind", ["gpt", "gpt-yarn", "hybrid"])
    def test_ids_per_sample(self, kind):
        """Each sample of a batch as it would be alone, with ids of its own; and they matter."""
        model = MODELS[kind](rotary_use_position_ids=True)
        tokens = torch.randint(0, 37, (3, 9))
        ids = torch.stack([torch.randperm(9) for _ in range(3)])
        out = model(tokens, ids, None)
        for sample in range(3):
            one = slice(sample, sample + 1)
            close(out[:, one], model(tokens[one], ids[one], None))
        assert (out - model(tokens, None, None)).abs().max() > 1e-3

    @pytest.mark.parametrize("kind", ["gpt", "gpt-yarn", "hybrid"])
    def test_packed_ids(self, kind):
        """A pack equals its sequences run alone with their own ids, also with tokens past the last one."""
        model = MODELS[kind](rotary_use_position_ids=True)
        tokens = torch.randint(0, 37, (1, 11))
        ids = torch.cat((torch.randperm(4), torch.randperm(5), torch.tensor([0, 0])))[None]
        out = model(tokens, ids, None, packed_seq_params=packed([0, 4, 9]))
        for span in (slice(0, 4), slice(4, 9)):
            close(out[span], model(tokens[:, span], ids[:, span], None))

    def test_position_past_the_sequence(self):
        model, tokens = MODELS["gpt"](rotary_use_position_ids=True), torch.zeros(1, 9, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"position ids must lie in 0\.\.8, got 1\.\.9"):
            model(tokens, torch.arange(1, 10)[None], None)

    def test_lost_on_a_later_stage(self):
        for make in (gpt, hybrid):
            model = make(config(rotary_use_position_ids=True), pre_process=False)
            model.set_input_tensor(torch.zeros(9, 1, 24, dtype=torch.float64))
            with pytest.raises(ValueError, match="position_ids is None on a pipeline stage after the first"):
                model(None, None, None)


def packed(bounds):
    """Sequences of a pack, without a tree."""
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    longest = int(cu_seqlens.diff().max())
    return PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)


def test_a_table_in_place_of_rows_is_refused():
    """A model that builds its own embeddings and does not gather them."""
    layer, meta = attention(config()), tree()
    table = RotaryEmbedding(10, 1.0)(meta.max_position + 1)
    with pytest.raises(ValueError, match="rotary embeddings have 9 rows for 21 packed tokens"):
        layer(
            torch.zeros(PADDED, 1, 24, dtype=torch.float64),
            None,
            rotary_pos_emb=table,
            packed_seq_params=meta.packed_seq_params(),
        )


def test_metadata_without_ids_is_refused():
    meta = tree()
    meta.tree_position_ids = None
    params = meta.packed_seq_params()
    for model in (gpt(config()), gpt(config(mla=True), mla=True), hybrid(config())):
        with pytest.raises(ValueError, match="tree_position_ids is None"):
            model(torch.zeros(1, PADDED, dtype=torch.int64), None, None, packed_seq_params=params)
