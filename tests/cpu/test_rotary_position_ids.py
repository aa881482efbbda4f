"""Rotary embeddings of explicit position ids: the gather, where the ids come from, and how rows are applied.

Shapes: T packed tokens, B batch, S sequence length, D rotary dimension.
"""

import copy
import inspect
import math
from types import SimpleNamespace

import pytest
import torch

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings import rotary_position_ids as rpi
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.tree_attention import TreeUnsupportedError

pytestmark = pytest.mark.usefixtures("single")

# A root of 3 tokens, two branches of 2 and 4, a second root of 2, and two tokens of tail padding.
TREE_IDS_T = torch.tensor([0, 1, 2, 3, 4, 3, 4, 5, 6, 0, 1, 0, 0])


def config(**overrides):
    fields = dict(num_layers=2, hidden_size=24, num_attention_heads=3, kv_channels=10)
    return TransformerConfig(**{**fields, **overrides})


def embedding(kind):
    """(embedding, dimension of its table)."""
    if kind == "yarn":
        return YarnRotaryEmbedding(10, scaling_factor=4.0, original_max_position_embeddings=8, mscale=0.7), 10
    options = {
        "plain": {},
        "partial": dict(rotary_percent=0.4),
        "interleaved": dict(rotary_interleaved=True),
        "llama3": dict(rope_scaling=True, rope_scaling_factor=4.0, rotary_base=500000),
        "interpolated": dict(seq_len_interpolation_factor=2.5),
    }[kind]
    return RotaryEmbedding(10, **{"rotary_percent": 1.0, **options}), 4 if kind == "partial" else 10


KINDS = ["plain", "partial", "interleaved", "llama3", "interpolated", "yarn"]


def angles(rope, kind, positions):
    """Angles [..., D] of positions straight from the definition, in the precision of the table (fp32)."""
    factor = rope.seq_len_interpolation_factor or 1
    if kind == "yarn":  # the ramp between the two frequency bands, by its formula
        exponents = torch.arange(0, 10, 2, dtype=torch.float32) / 10
        extra = 1.0 / 10000.0**exponents
        inter = 1.0 / (4.0 * 10000.0**exponents)
        low, high = (10 * math.log(8 / (n * 2 * math.pi)) / (2 * math.log(10000.0)) for n in (32, 1))
        low, high = max(math.floor(low), 0), min(math.ceil(high), 9)
        keep = 1 - ((torch.arange(5, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        inv_freq = inter * (1 - keep) + extra * keep
    else:
        inv_freq = rope.inv_freq
    half = (positions.to(torch.float32) * (1 / factor))[..., None] * inv_freq
    return half.repeat_interleave(2, -1) if kind == "interleaved" else torch.cat((half, half), -1)


def rotate(t_THD, angles_TD, interleaved=False, mscale=1.0):
    """Rotation of every (a, b) pair by its angle, the rest of the head passed on."""
    dim = angles_TD.size(-1)
    cos, sin = (f(angles_TD).mul(mscale).to(t_THD.dtype).unsqueeze(-2) for f in (torch.cos, torch.sin))
    turned, rest = t_THD[..., :dim], t_THD[..., dim:]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        cos, sin = cos[..., ::2], sin[..., ::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        cos, sin = cos[..., : dim // 2], sin[..., : dim // 2]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned, rest), -1)


class TestGather:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", ["T", "1T", "BS"])
    def test_rows_are_those_of_the_table_and_of_the_formula(self, kind, shape):
        rope, dim = embedding(kind)
        ids = torch.randint(0, 23, {"T": (17,), "1T": (1, 17), "BS": (3, 7)}[shape])
        out = rope(23, packed_seq=True, position_ids=ids)
        table = rope(23, packed_seq=True)
        if kind == "yarn":
            (out, scale), (table, table_scale) = out, table
            assert scale == table_scale != 1.0
        columns = ids.t() if shape == "BS" else ids.reshape(-1, 1)
        assert out.shape == (*columns.shape, 1, dim)
        assert out.is_contiguous()
        assert torch.equal(out[:, :, 0], table[columns, 0, 0])
        assert torch.equal(out[:, :, 0], angles(rope, kind, columns))

    @pytest.mark.parametrize("kind", ["plain", "yarn"])
    def test_no_ids_is_the_cached_table_itself(self, kind):
        rope, _ = embedding(kind)
        first, second = rope(19), rope(19)
        assert (first[0] if kind == "yarn" else first) is (second[0] if kind == "yarn" else second)

    @pytest.mark.parametrize("kind", ["plain", "yarn"])
    def test_ids_stay_out_of_the_cache(self, kind):
        rope, _ = embedding(kind)
        type(rope).forward.cache_clear()
        for _ in range(5):
            rope(19, position_ids=torch.arange(6))
        info = type(rope).forward.cache_info()
        assert (info.currsize, info.misses, info.hits) == (1, 1, 4)

    def test_int32_ids(self):
        rope, _ = embedding("plain")
        assert torch.equal(rope(9, position_ids=TREE_IDS_T.int()), rope(9, position_ids=TREE_IDS_T))

    def test_signature_shows_position_ids(self):
        for cls in (RotaryEmbedding, YarnRotaryEmbedding):
            assert list(inspect.signature(cls.forward).parameters)[-1] == "position_ids"

    @pytest.mark.parametrize("bad", [[0, 1, 9], [0, -1, 3]])
    def test_position_outside_the_table(self, bad):
        rope, _ = embedding("plain")
        with pytest.raises(ValueError, match=r"position ids must lie in 0\.\.8, got .*table has 9 rows"):
            rope(9, position_ids=torch.tensor(bad))

    def test_bad_dtype_and_rank(self):
        rope, _ = embedding("plain")
        with pytest.raises(TypeError, match="int64 or int32, got torch"):
            rope(9, position_ids=torch.zeros(3))
        with pytest.raises(ValueError, match=r"must be \[T\], \[1, T\] or \[b, s\], got \[3, 1, 4\]"):
            rope(9, position_ids=torch.zeros(3, 1, 4, dtype=torch.int64))

    def test_context_parallelism_is_refused(self):
        rope, _ = embedding("plain")
        with pytest.raises(ValueError, match="do not support context parallelism, got a group of 2 ranks"):
            rope(9, position_ids=TREE_IDS_T, cp_group=SimpleNamespace(size=lambda: 2))


class TestApply:
    """`apply_rotary_pos_emb` on packed tokens with one row each."""

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("kind", KINDS)
    def test_packed_rows_equal_the_formula(self, kind, dtype):
        rope, _ = embedding(kind)
        mscale = 1.0
        rows = rope(7, packed_seq=True, position_ids=TREE_IDS_T)
        if kind == "yarn":
            rows, mscale = rows
        t_THD = torch.randn(TREE_IDS_T.numel(), 3, 10, dtype=dtype)
        interleaved = kind == "interleaved"
        out = apply_rotary_pos_emb(t_THD, rows, config(rotary_interleaved=interleaved), mscale=mscale)
        assert out.shape == t_THD.shape
        expected = rotate(t_THD, angles(rope, kind, TREE_IDS_T), interleaved, mscale)
        torch.testing.assert_close(out, expected, rtol=1e-13 if dtype == torch.float64 else 0.02, atol=1e-13)

    def test_mla_interleaving(self):
        rope, _ = embedding("plain")
        t_THD = torch.randn(TREE_IDS_T.numel(), 3, 10, dtype=torch.float64)
        rows = rope(7, position_ids=TREE_IDS_T)
        out = apply_rotary_pos_emb(t_THD, rows, config(), mla_rotary_interleaved=True)
        paired = torch.cat((t_THD[..., ::2], t_THD[..., 1::2]), -1)
        expected = rotate(paired, angles(rope, "plain", TREE_IDS_T))
        torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)

    def test_row_count_must_be_the_token_count(self):
        rope, _ = embedding("plain")
        with pytest.raises(ValueError, match="rotary embeddings have 13 rows for 12 packed tokens"):
            apply_rotary_pos_emb(torch.randn(12, 3, 10), rope(7, position_ids=TREE_IDS_T), config())

    def test_fused_rope_takes_the_batch_kernel(self, monkeypatch):
        """The fused THD kernel ignores gathered rows, so it must not be called."""
        calls = []

        def batch_kernel(t, freqs, interleaved=False):
            calls.append(tuple(t.shape))
            assert t.dim() == freqs.dim() == 4 and freqs.shape[1:3] == (1, 1) and freqs.size(0) >= t.size(0)
            return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)

        monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", batch_kernel)
        monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", None)
        rope, _ = embedding("plain")
        cfg = config()
        cfg.apply_rope_fusion = True
        t_THD = torch.randn(TREE_IDS_T.numel(), 3, 10, dtype=torch.float64)
        out = apply_rotary_pos_emb(t_THD, rope(7, position_ids=TREE_IDS_T), cfg)
        assert calls == [(13, 1, 3, 10)]
        expected = rotate(t_THD, angles(rope, "plain", TREE_IDS_T))
        torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)

    def test_one_row_per_sample_in_the_batch_layout(self):
        rope, _ = embedding("plain")
        ids_BS = torch.randint(0, 11, (3, 7))
        t_SBHD = torch.randn(7, 3, 2, 10, dtype=torch.float64)
        out = apply_rotary_pos_emb(t_SBHD, rope(11, position_ids=ids_BS), config())
        for sample in range(3):
            expected = rotate(t_SBHD[:, sample], angles(rope, "plain", ids_BS[sample]))
            torch.testing.assert_close(out[:, sample], expected, rtol=1e-13, atol=1e-13)


def pack(ids=TREE_IDS_T, **overrides):
    metadata = SimpleNamespace(tree_position_ids=ids, max_position=6)
    fields = dict(qkv_format="thd", max_seqlen_q=7, max_seqlen_kv=7, tree_metadata=metadata)
    fields["cu_seqlens_q"] = fields["cu_seqlens_kv"] = torch.tensor([0, 13], dtype=torch.int32)
    return PackedSeqParams(**{**fields, **overrides})


def model(cfg, **overrides):
    fields = dict(config=cfg, position_embedding_type="rope", pre_process=True)
    fields["decoder"] = SimpleNamespace(input_tensor=None)
    return SimpleNamespace(**{**fields, **overrides})


HIDDEN = torch.zeros(13, 1, 24)


class TestSource:
    """Where position ids come from."""

    def test_tree_ids_on_every_stage_and_before_the_models_own(self):
        for flag in (False, True):
            cfg = config(rotary_use_position_ids=flag)
            for stage in (dict(pre_process=True), dict(pre_process=False)):
                for given in (None, torch.arange(13)[None]):
                    assert rpi.model_position_ids(model(cfg, **stage), given, pack(), None) is TREE_IDS_T

    def test_off_means_upstreams_positions(self):
        plain = pack(tree_metadata=None)
        for params in (None, plain):
            assert rpi.model_position_ids(model(config()), torch.arange(13)[None], params, HIDDEN) is None
            assert not rpi.rows_per_token(config(), params)

    def test_flag_uses_the_models_ids(self):
        cfg = config(rotary_use_position_ids=True)
        plain, ids = pack(tree_metadata=None), TREE_IDS_T[None]
        assert rpi.model_position_ids(model(cfg), ids, plain, HIDDEN) is ids
        assert rpi.model_position_ids(model(cfg), ids, None, HIDDEN) is ids
        later = model(cfg, pre_process=False, decoder=SimpleNamespace(input_tensor=HIDDEN))
        assert rpi.model_position_ids(later, ids, plain, None) is ids
        many = torch.randint(0, 13, (3, 13))
        assert rpi.model_position_ids(model(cfg), many, None, torch.zeros(13, 3, 24)) is many
        assert rpi.rows_per_token(cfg, plain) and not rpi.rows_per_token(cfg, None)

    def test_flag_without_ids_is_sequential(self):
        cfg = config(rotary_use_position_ids=True)
        assert rpi.model_position_ids(model(cfg), None, None, HIDDEN) is None
        bounds = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
        expected = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0, 0, 0]])
        for names in (("cu_seqlens_q",), ("cu_seqlens_q", "cu_seqlens_q_padded")):
            other = torch.tensor([0, 2, 3, 5], dtype=torch.int32)
            params = pack(tree_metadata=None, **{"cu_seqlens_q": other, names[-1]: bounds})
            assert torch.equal(rpi.model_position_ids(model(cfg), None, params, HIDDEN), expected)

    def test_sequence_parallel_input_is_a_share(self):
        cfg = config(rotary_use_position_ids=True)
        cfg.sequence_parallel, cfg.tensor_model_parallel_size = True, 2
        ids = torch.arange(26)[None]
        assert rpi.model_position_ids(model(cfg), ids, None, HIDDEN) is ids
        with pytest.raises(ValueError, match=r"must be \[b, 26\], got \[1, 13\]"):
            rpi.model_position_ids(model(cfg), ids[:, :13], None, HIDDEN)

    def test_an_inference_context_keeps_its_own_positions(self):
        cfg, context = config(rotary_use_position_ids=True), object()
        assert rpi.model_position_ids(model(cfg), TREE_IDS_T[None], None, HIDDEN, context) is None
        assert not rpi.rows_per_token(cfg, pack(tree_metadata=None), context)
        with pytest.raises(TreeUnsupportedError, match="with an inference context: generate from linear"):
            rpi.model_position_ids(model(cfg), None, pack(), HIDDEN, context)

    def test_models_without_rope_are_left_alone(self):
        for kind in ("learned_absolute", "mrope", "none"):
            other = model(config(), position_embedding_type=kind)
            assert rpi.model_position_ids(other, None, pack(ids=None), HIDDEN) is None

    @pytest.mark.parametrize(
        "broken, message",
        [
            (dict(ids=None), "tree_position_ids is None: rotary positions of a tree cannot be derived"),
            (dict(ids=TREE_IDS_T[None]), r"tree_position_ids must be \[T\], got \[1, 13\]"),
            (dict(qkv_format="sbhd"), "tree_metadata needs qkv_format='thd', got 'sbhd'"),
            (dict(max_seqlen_q=None), "needs max_seqlen_q and max_seqlen_kv .* got None and 7"),
            (
                dict(max_seqlen_q=6, max_seqlen_kv=6),
                "max_position is 6, but max_seqlen_q=6 and max_seqlen_kv=6 give a rotary table of 6 rows",
            ),
        ],
    )
    def test_broken_tree_packs(self, broken, message):
        with pytest.raises(ValueError, match=message):
            rpi.model_position_ids(model(config()), None, pack(**broken), HIDDEN)
        with pytest.raises(ValueError, match=message):
            rpi.layer_position_ids(config(), pack(**broken), HIDDEN)

    def test_tree_and_context_parallelism(self):
        cfg = copy.copy(config())
        cfg.context_parallel_size = 2
        with pytest.raises(TreeUnsupportedError, match=r"context_parallel_size=2\): set context_parallel"):
            rpi.model_position_ids(model(cfg), None, pack(), HIDDEN)
        with pytest.raises(TreeUnsupportedError, match=r"not supported with context parallelism \("):
            rpi.layer_position_ids(cfg, pack(), HIDDEN)  # the layers of MLA

    def test_layer_ids_cover_the_pack(self):
        assert rpi.layer_position_ids(config(), pack(), HIDDEN) is TREE_IDS_T
        assert rpi.layer_position_ids(config(), pack(tree_metadata=None), HIDDEN) is None
        assert rpi.layer_position_ids(config(), None, HIDDEN) is None
        with pytest.raises(ValueError, match="13 rows for 12 packed tokens"):
            rpi.layer_position_ids(config(), pack(), HIDDEN[:12])

    def test_flag_refuses_ids_lost_on_a_later_stage(self):
        cfg = config(rotary_use_position_ids=True)
        for params in (None, pack(tree_metadata=None)):
            with pytest.raises(ValueError, match="position_ids is None on a pipeline stage after the first"):
                rpi.model_position_ids(model(cfg, pre_process=False), None, params, None)

    def test_flag_refuses_wrong_shapes(self):
        cfg, plain = config(rotary_use_position_ids=True), pack(tree_metadata=None)
        for ids, params, expected in [
            (torch.zeros(1, 12, dtype=torch.int64), plain, r"\[1, 13\], got \[1, 12\]"),
            (torch.zeros(2, 13, dtype=torch.int64), plain, r"\[1, 13\], got \[2, 13\]"),
            (torch.zeros(13, dtype=torch.int64), plain, r"\[1, 13\], got \[13\]"),
            (torch.zeros(3, 1, 13, dtype=torch.int64), None, r"\[b, 13\], got \[3, 1, 13\]"),
        ]:
            with pytest.raises(ValueError, match="rotary_use_position_ids: position_ids must be " + expected):
                rpi.model_position_ids(model(cfg), ids, params, HIDDEN)

    @pytest.mark.parametrize("fusion", ["apply_rope_fusion", "fused_single_qkv_rope"])
    def test_fused_rope_refuses_ids_per_sample(self, fusion):
        cfg = config(rotary_use_position_ids=True)
        setattr(cfg, fusion, True)
        hidden, ids = torch.zeros(13, 2, 24), torch.arange(13).expand(2, -1)
        with pytest.raises(ValueError, match=r"fused rope applies one table .* got position_ids \[2, 13\]"):
            rpi.model_position_ids(model(cfg), ids, None, hidden)
        assert rpi.model_position_ids(model(cfg), ids[:1], None, hidden).shape == (1, 13)

    def test_config_refuses_what_cannot_be_honoured(self):
        with pytest.raises(ValueError, match="does not work with multi_latent_attention"):
            MLATransformerConfig(
                num_layers=2,
                hidden_size=24,
                num_attention_heads=3,
                rope_type="rope",
                rotary_use_position_ids=True,
                multi_latent_attention=True,
            )
        with pytest.raises(ValueError, match="no meaning with mrope_section"):
            config(rotary_use_position_ids=True, mrope_section=[2, 2, 1])
        with pytest.raises(ValueError, match="not support context parallelism, got context_parallel_size=2"):
            config(rotary_use_position_ids=True, context_parallel_size=2)
        for options in (dict(cuda_graph_impl="local"), dict(enable_cuda_graph=True)):
            with pytest.raises(ValueError, match="not work with CUDA graphs, got cuda_graph_impl='local'"):
                config(rotary_use_position_ids=True, **options)

    def test_one_sequence(self):
        bounds = rpi.one_sequence(TREE_IDS_T)
        assert bounds.dtype == torch.int32 and bounds.tolist() == [0, 13]
