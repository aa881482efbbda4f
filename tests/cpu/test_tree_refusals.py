"""Everything that would ignore a tree, or compute it wrongly, refuses it; and nothing else is refused."""

import dataclasses

import pytest
import torch

from megatron.core.transformer.enums import AttnMaskType, CudaGraphModule
from megatron.core.transformer.tree_attention import TreeUnsupportedError, refusals, refuse_unsupported_model
from megatron.core.transformer.tree_metadata import TreeMetadata

METADATA = TreeMetadata.from_nodes([-1, 0, 0], [3, 2, 2])
CAUSAL = torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)[None, None]


def build(hybrid=False, **model):
    from tests.dist import small_gpt, tree_against_branches

    cfg = small_gpt.config(num_layers=2, **model)
    [chunk] = tree_against_branches.build_hybrid(cfg) if hybrid else small_gpt.build(cfg)
    return chunk


def forward(model, metadata=METADATA, **kwargs):
    params = metadata.packed_seq_params()
    size = metadata.padded_size
    return model(torch.zeros(1, size, dtype=torch.int64), None, None, packed_seq_params=params, **kwargs)


CONFIGURATION = {
    "attention_dropout": (
        dict(attention_dropout=0.1),
        r"attention_dropout=0.1 in training: set attention_dropout=0.0",
    ),
    "hidden_dropout": (dict(hidden_dropout=0.2), r"hidden_dropout=0.2 in training: set hidden_dropout=0.0"),
    "mtp": (dict(mtp_num_layers=1), r"multi-token prediction: set mtp_num_layers=None, or use linear"),
    "dsa": (
        dict(experimental_attention_variant="dsa"),
        r"experimental_attention_variant='dsa': train this model on linear micro-batches",
    ),
    "gdn": (
        dict(experimental_attention_variant="gated_delta_net"),
        r"experimental_attention_variant='gated_delta_net': train this model on linear",
    ),
    "context parallel": (
        dict(context_parallel_size=2),
        r"context parallelism \(context_parallel_size=2\): set context_parallel_size=1",
    ),
    "cuda graph of the iteration": (
        dict(cuda_graph_impl="full_iteration", cuda_graph_modules=[]),
        r"CUDA graphs that capture attention \(cuda_graph_impl='full_iteration'\): set cuda_graph_impl=",
    ),
    "cuda graph of whole layers": (
        dict(cuda_graph_impl="local", cuda_graph_modules=[]),
        r"CUDA graphs that capture attention \(cuda_graph_impl='local'\)",
    ),
    "cuda graph of attention": (
        dict(cuda_graph_impl="local", cuda_graph_modules=[CudaGraphModule.attn]),
        r"CUDA graphs that capture .* or cuda_graph_modules without 'attn' \(a graph replays one tree\)",
    ),
    "qk_clip": (dict(qk_clip=True), r"qk_clip=True: set qk_clip=False \(the backends do not report"),
    "largest logit": (
        dict(log_max_attention_logit=True),
        r"log_max_attention_logit=True: set log_max_attention_logit=False",
    ),
    "fused MLA rope": (
        dict(multi_latent_attention=True, apply_rope_fusion=True, num_attention_heads=6),
        r"upstream's fused rope of MLA and 6 heads on a rank: set apply_rope_fusion=False",
    ),
    "jitter": (
        dict(num_moe_experts=4, moe_input_jitter_eps=0.1),
        r"moe_input_jitter_eps=0.1: leave moe_input_jitter_eps unset \(branches would share the noise",
    ),
    "random routing": (
        dict(num_moe_experts=4, moe_router_force_load_balancing=True),
        r"moe_router_force_load_balancing=True: leave moe_router_force_load_balancing unset",
    ),
    "biased routing": (
        dict(num_moe_experts=4, moe_router_force_biased=-0.5),
        r"moe_router_force_biased=-0.5: leave moe_router_force_biased unset",
    ),
    "overlapped experts": (
        dict(num_moe_experts=4, overlap_moe_expert_parallel_comm=True),
        r"overlap_moe_expert_parallel_comm=True in training: set it to False \(its schedule calls routers",
    ),
    "batch invariance": (dict(batch_invariant_mode=True), r"batch_invariant_mode=True: set batch_inv"),
}


@pytest.mark.parametrize("hybrid", [False, True], ids=["gpt", "hybrid"])
@pytest.mark.parametrize("name", CONFIGURATION)
def test_configuration_is_refused_by_the_model(single, name, hybrid):
    """Set after the model is built: several of these cannot be built without a GPU."""
    fields, message = CONFIGURATION[name]
    model = build(hybrid)
    for field, value in fields.items():
        assert hasattr(model.config, field)
        setattr(model.config, field, value)
    entered = []
    model.decoder.register_forward_pre_hook(lambda *args: entered.append(1))
    with pytest.raises(TreeUnsupportedError, match="tree_metadata is not supported with " + message):
        forward(model)
    assert not entered  # before any layer, and any communication, runs


@pytest.mark.parametrize("name", CONFIGURATION)
def test_configuration_is_refused_by_the_attention_layer(single, name):
    """For models that are neither GPTModel nor HybridModel."""
    fields, message = CONFIGURATION[name]
    attention = build().decoder.layers[0].self_attention
    for field, value in fields.items():
        setattr(attention.config, field, value)
    q, kv = torch.zeros(7, 4, 8), torch.zeros(7, 2, 8)
    with pytest.raises(TreeUnsupportedError, match=message):
        attention._run_core_attention(q, kv, kv, None, packed_seq_params=METADATA.packed_seq_params())


def test_context_parallelism_of_one_pack_is_refused(single):
    params = METADATA.packed_seq_params()
    params.local_cp_size = 2
    with pytest.raises(TreeUnsupportedError, match=r"\(local_cp_size=2\): set local_cp_size=1"):
        refuse_unsupported_model(build(), params)


def test_something_else_than_metadata_is_refused_by_the_model(single):
    params = METADATA.packed_seq_params()
    params.tree_metadata = {"cu_node_lens": None}
    with pytest.raises(TypeError, match=r"tree_metadata: expected a TreeMetadata .*, got dict"):
        refuse_unsupported_model(build(), params)


def test_refusals_are_of_one_kind():
    """Caught as what a caller did, like a malformed pack, or as a missing capability."""
    assert issubclass(TreeUnsupportedError, ValueError) and issubclass(TreeUnsupportedError, RuntimeError)


def test_what_is_not_refused(single):
    """Dropout outside training, and CUDA graphs that leave attention out."""
    model = build()
    model.config.attention_dropout = model.config.hidden_dropout = 0.1
    model.config.cuda_graph_impl = "transformer_engine"
    model.config.cuda_graph_modules = [CudaGraphModule.moe_router]
    model.config.overlap_moe_expert_parallel_comm = True  # a schedule of training
    model.config.num_moe_experts = 4
    refuse_unsupported_model(model.eval(), METADATA.packed_seq_params())


def test_without_tree_metadata_nothing_is_looked_at(single):
    refuse_unsupported_model(None, None)
    linear = dataclasses.replace(METADATA.packed_seq_params(), tree_metadata=None)
    refuse_unsupported_model(None, linear, object())


@pytest.mark.parametrize("hybrid", [False, True], ids=["gpt", "hybrid"])
def test_labels_of_a_tree_are_refused(single, hybrid):
    """A token where branches part has several targets; in a pack of roots the caller's labels are right."""
    model = build(hybrid)
    entered = []
    model.decoder.register_forward_pre_hook(lambda *args: entered.append(1))
    given = {"labels": torch.zeros(1, 7, dtype=torch.int64), "loss_mask": torch.ones(1, 7)}
    for name, value in given.items():
        message = rf"{name} passed to the model: leave {name} out and take .*log_probs\(logits, batch\)"
        with pytest.raises(TreeUnsupportedError, match=message):
            forward(model, **{name: value})
    assert not entered
    roots = TreeMetadata.from_nodes([-1, -1], [4, 3])
    labels = torch.arange(7)[None]
    logits = forward(model, roots)
    want = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="none")
    torch.testing.assert_close(forward(model, roots, labels=labels, loss_mask=given["loss_mask"])[0], want)
    tokens = torch.zeros(1, 7, dtype=torch.int64)
    assert model(tokens, labels, CAUSAL, labels=labels).shape == (1, 7)  # no tree at all


@pytest.mark.parametrize("hybrid", [False, True], ids=["gpt", "hybrid"])
def test_inference_is_refused(single, hybrid):
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.utils import InferenceMode

    model = build(hybrid).eval()
    with pytest.raises(TreeUnsupportedError, match="an inference context: generate from linear sequences"):
        forward(model, inference_context=StaticInferenceContext(1, 32))
    attention = model.decoder.layers[0].self_attention
    q, kv = torch.zeros(7, 4, 8), torch.zeros(7, 2, 8)
    with InferenceMode.active(), pytest.raises(TreeUnsupportedError, match="inference mode: generate from"):
        attention._run_core_attention(q, kv, kv, None, packed_seq_params=METADATA.packed_seq_params())


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("M*-", r"Mamba layers \(hybrid_layer_pattern 'M\*-'\): train this model on linear micro-batches"),
        ("*-|G-", r"gated delta net layers \(hybrid_layer_pattern"),
        ("D-*-", r"DSA layers \(hybrid_layer_pattern"),
        ("*-*-/*-", r"multi-token prediction: set mtp_num_layers=None"),
    ],
)
def test_hybrid_patterns_are_refused_on_every_stage(single, pattern, message):
    """From the whole pattern, so that the stages without such a layer raise too and do not wait."""
    model = build(hybrid=True)
    model.hybrid_layer_pattern = pattern
    with pytest.raises(TreeUnsupportedError, match=message):
        forward(model)


class SomeMixer(torch.nn.Module):
    def forward(self, x, *args, **kwargs):
        return x


@pytest.mark.parametrize("hybrid", [False, True], ids=["gpt", "hybrid"])
def test_layers_that_mix_tokens_otherwise_are_refused(single, hybrid):
    """Whatever the config says: a positive list of layers, not a list of the ones known to be wrong."""
    model = build(hybrid)
    model.decoder.layers[0].self_attention = SomeMixer()
    with pytest.raises(TreeUnsupportedError, match="SomeMixer layers: train this model on linear"):
        forward(model)

    class MambaLayer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = SomeMixer()

    model = build(hybrid)
    model.decoder.layers[1] = MambaLayer()
    with pytest.raises(TreeUnsupportedError, match="SomeMixer layers"):
        forward(model)


def test_core_attention_that_is_not_softmax_attention_is_refused(single):
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class OtherAttention(DotProductAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = build()
    model.decoder.layers[1].self_attention.core_attention.__class__ = OtherAttention
    with pytest.raises(TreeUnsupportedError, match="core attention OtherAttention: use DotProductAtt"):
        forward(model)
    OtherAttention.plain_softmax_attention = True
    assert forward(model).shape == (1, 7, 64)
    model.config.softmax_type = "learnable"
    with pytest.raises(TreeUnsupportedError, match=r"'learnable': core attention .* has no softmax_offset"):
        forward(model)


def test_absorbed_mla_is_refused(single):
    from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention

    model = build(mla=True)
    model.decoder.layers[0].self_attention.__class__ = AbsorbedMLASelfAttention
    with pytest.raises(TreeUnsupportedError, match="absorbed MLA: use MLASelfAttention in the layer spec"):
        forward(model)


def test_calls_that_the_backends_do_not_know_are_refused(single):
    attention = build().decoder.layers[0].self_attention
    q, kv = torch.zeros(7, 4, 8), torch.zeros(7, 2, 8)

    def run(**kwargs):
        return attention._run_core_attention(
            q, kv, kv, None, packed_seq_params=METADATA.packed_seq_params(), **kwargs
        )

    assert run().shape == (7, 32)
    with pytest.raises(TreeUnsupportedError, match="attention_bias passed to the attention layer: leave"):
        run(attention_bias=torch.zeros(1))
    with pytest.raises(TreeUnsupportedError, match="qr passed to the attention layer: leave qr out"):
        run(qr=torch.zeros(1))
    attention.attn_mask_type = AttnMaskType.no_mask
    with pytest.raises(TreeUnsupportedError, match=r"attn_mask_type no_mask: a tree is causal"):
        run()
    attention.attention_type = "cross"
    with pytest.raises(TreeUnsupportedError, match="cross attention: use trees with self-attention only"):
        run()


def test_fp8_attention_is_refused(single):
    attention = build().decoder.layers[0].self_attention
    attention.config.fp8_dot_product_attention = True
    q, kv = torch.zeros(7, 4, 8), torch.zeros(7, 2, 8)
    with pytest.raises(TreeUnsupportedError, match="fp8_dot_product_attention and backend 'reference'"):
        attention._run_core_attention(q, kv, kv, None, packed_seq_params=METADATA.packed_seq_params())


def test_a_model_is_walked_once(single, monkeypatch):
    model = build()
    forward(model)
    monkeypatch.setattr(refusals, "_refuse_layer", lambda layer: pytest.fail("walked again"))
    forward(model)


def test_lengths_that_disagree_name_the_pipelines_remedies(single):
    """Without variable_seq_lengths, a later stage receives as many tokens as seq_length says."""
    message = (
        r"On a later pipeline stage: .*variable_seq_lengths=True \(with moe_token_dispatcher_type="
        r"'alltoall'\), or give them one length by plan_micro_batches\(\.\.\., "
        r"pad_to_multiple_of=max_tokens\)"
    )
    for mla, tokens in ((False, 8), (False, 6), (True, 6)):
        model = build(mla=mla)
        model.pre_process = model.decoder.pre_process = False
        model.set_input_tensor(torch.zeros(tokens, 1, 32))
        with pytest.raises(ValueError, match=rf"for {tokens} packed tokens: .*" + message):
            forward(model)
        layer = model.decoder.layers[0].self_attention
        q, kv = torch.zeros(tokens, 4, 8), torch.zeros(tokens, 2, 8)
        with pytest.raises(ValueError, match=rf"expected 7 tokens .*got {tokens}, {tokens}, .*" + message):
            layer._run_core_attention(q, kv, kv, None, packed_seq_params=METADATA.packed_seq_params())


def test_backend_of_the_configuration(single):
    with pytest.raises(ValueError, match="tree_attention_backend: expected auto or one of te, flash"):
        build(tree_attention_backend="quick")
    with pytest.raises(TreeUnsupportedError, match="tree attention backend 'te' cannot serve cpu, float32"):
        forward(build(tree_attention_backend="te"))
    model = build()
    assert model.config.tree_attention_backend == "auto"
    want = forward(model)
    model.config.tree_attention_backend = "reference"
    assert torch.equal(forward(model), want)


def test_a_te_that_takes_the_metadata_gets_it(single, monkeypatch):
    """Then the layer's own module runs, with the packed parameters as they are, on both paths and in MLA."""
    from megatron.core.transformer.tree_attention import dispatch

    monkeypatch.setattr(dispatch, "select_backend", lambda backend, case: "te")
    for model in (build(), build(mla=True)):
        given = []

        class Recorder(torch.nn.Module):
            plain_softmax_attention = True

            def forward(self, query, key, value, mask, packed_seq_params=None, **kwargs):
                given.append(packed_seq_params)  # noqa: B023
                return torch.zeros(query.shape[0], query.shape[1] * value.shape[2])

        params = METADATA.packed_seq_params()
        for layer in model.decoder.layers:
            layer.self_attention.core_attention = Recorder()
        model(torch.zeros(1, 7, dtype=torch.int64), None, None, packed_seq_params=params)
        assert len(given) == 2 and all(p is params and p.tree_metadata is METADATA for p in given)
