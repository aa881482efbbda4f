"""What building a plan refuses, and that all ranks hear of it when one of them cannot go on."""

from types import SimpleNamespace

import pytest
import torch

from tests.dist.export_references import reference
from tests.dist.world import parallel


def other_sizes(fields, others, padded=None):
    """What the proof says of a model of ``fields`` under a configuration with other sizes."""
    from megatron.core.param_export import LayoutError, build_plan
    from tests.dist import export_models

    hf = SimpleNamespace(**fields)
    with parallel():
        chunks = export_models.build(hf)
        options = {} if padded is None else {"padded_vocab_size": padded}
        plan = build_plan(chunks, SimpleNamespace(**{**fields, **others}), **options)
        try:
            plan.prove()
        except LayoutError as error:
            return str(error)


@pytest.mark.parametrize("case, others, messages", [
    ("llama", dict(num_attention_heads=3, num_key_value_heads=1, head_dim=20),
     ["6 attention heads in the model, 3 in the", "2 key-value heads in the model, 1 in the",
      "10 elements of a head in the model, 20 in the"]),
    ("qwen2", dict(num_attention_heads=12, num_key_value_heads=4, head_dim=3),
     ["6 attention heads in the model, 12 in the"]),
    ("mixtral", dict(num_attention_heads=3, num_key_value_heads=1, head_dim=20),
     ["decoder.layers.0.self_attention: 6 attention heads in the model, 3 in the"]),
    # These follow from shapes; if they no longer did, the tiling would let them through.
    ("deepseek_v3", dict(num_attention_heads=3, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
                         kv_lora_rank=12), ["kv_a_layernorm.weight: .*gap|written|shape"]),
    ("qwen3_moe", dict(num_local_experts=2, moe_intermediate_size=40), ["moe.router.weight has shape"]),
    ("gpt_oss", dict(num_local_experts=2, intermediate_size=40), ["moe.router.weight has shape"]),
])  # fmt: skip
def test_other_counts_with_equal_products_are_refused(world, case, others, messages):
    import re

    fields, _, _, _ = reference(case)
    (told,) = world(1, other_sizes, fields, others)
    for message in messages:
        assert told is not None and re.search(message, told), told


def test_only_padding_is_cut_from_the_vocabulary(world):
    fields, _, _, _ = reference("qwen3-tied")
    tell = lambda vocabulary, padded=None: world(  # noqa: E731
        1, with_rows, 192, fields, dict(vocab_size=vocabulary), padded
    )[0]
    assert tell(65) is None and tell(64, 192) is None and tell(192) is None
    for part in (
        "word_embeddings.weight: 192 rows in the model, vocab_size of the configuration is 64: padding to a",
        "multiple of 128 adds less. If all the others are padding, say so: build_plan(..., padded_vocab_size",
    ):
        assert part in tell(64)
    assert "word_embeddings.weight: 192 rows in the model, padded_vocab_size is 200" in tell(64, 200)


def with_rows(rows, *args):
    from unittest import mock

    from tests.dist import export_models

    with mock.patch.object(export_models, "PADDED_VOCABULARY", rows):
        return other_sizes(*args)


class Wrapper(torch.nn.Module):
    """Some trainer's, that the export does not know."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class OptimizedModule(torch.nn.Module):
    """What ``torch.compile`` returns; the tests' runtime switches compilation off."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def misuse(fields):
    from megatron.core.param_export import build_plan
    from tests.dist import export_models

    hf = SimpleNamespace(**fields)
    expected = r"model: expected a GPTModel or its chunks, which may be in DistributedDataParallel, .*; got "
    with parallel():
        chunks = export_models.build(hf)
        for model, got in (
            ([], "an empty list"),
            ([None], "list of NoneType$"),
            (hf, "SimpleNamespace$"),
            (torch.nn.Linear(1, 1), "Linear: if it is a wrapper, pass the model inside"),
            (Wrapper(chunks[0]), "Wrapper: if it is a wrapper, pass the model inside"),
            (iter([Wrapper(chunks[0])]), "list_iterator of Wrapper: if it is a wrapper, pass the"),
        ):
            with pytest.raises(TypeError, match=expected + got):
                build_plan(model, hf)
        with pytest.raises(ValueError, match=r"expected a Hugging Face configuration, .* got list"):
            build_plan(chunks, chunks)
        with pytest.raises(ValueError, match=r"hf_config: .* no attribute 'num_key_value_heads'"):
            build_plan(chunks, SimpleNamespace(**{k: v for k, v in fields.items() if "key_value" not in k}))
        compiled = OptimizedModule(chunks[0])
        for model in (chunks[0], torch.nn.ModuleList(chunks), tuple(chunks), iter(chunks), compiled):
            build_plan(model, hf).prove()
        del chunks[0].pg_collection
        with pytest.raises(ValueError, match="model: GPTModel has no pg_collection, the process groups"):
            build_plan(chunks, hf)


def test_misuse_of_build_plan_is_told(world):
    fields, _, _, _ = reference("qwen3")
    world(1, misuse, fields)


def one_rank_fails(how, fields):
    """What rank 1's mistake makes every rank say."""
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.core.param_export import build_plan, export_changed
    from tests.dist import export_models

    hf, one, group = SimpleNamespace(**fields), dist.get_rank() == 1, None
    with parallel(**({} if how == "group" else dict(tp=2))):
        chunks = model = export_models.build(hf)
        final = chunks[0].decoder.final_layernorm.weight
        index, value, receiver = torch.tensor([3]), torch.ones(1), 0
        if one and how == "family":
            hf.model_type = "mistral"
        elif one and how == "field":
            del hf.num_key_value_heads
        elif one and how == "wrapper":
            model = [Wrapper(chunks[0])]
        elif one and how == "process groups":
            del chunks[0].pg_collection
        elif how == "group":
            group = parallel_state.get_model_parallel_group()
        elif one and how == "dtype":
            value = value.double()
        elif one and how == "unknown":
            final = torch.zeros(36)
        elif one and how == "index":
            final, index = chunks[0].decoder.layers[0].mlp.linear_fc2.weight, torch.tensor([36 * 22])
        elif one and how == "negative":
            final, index = chunks[0].decoder.layers[0].mlp.linear_fc2.weight, torch.tensor([-1])
        elif how == "receiver":
            receiver = 5
        elif how == "receivers":
            receiver = dist.get_rank()

        def changed():
            yield chunks[0].decoder.layers[0].input_layernorm.weight, torch.tensor([5]), torch.ones(1)
            if one and how == "source":
                raise RuntimeError("backup lost")
            yield final, index, value

        try:
            plan = build_plan(model, hf, group).prove()
            list(export_changed(plan, changed(), receiver))
        except Exception as error:
            told = type(error).__name__, str(error.args[0])
        everyone = [None] * 2
        dist.all_gather_object(everyone, how)  # no rank is left behind
        return told


@pytest.mark.parametrize("how, kind, message", [
    ("family", "ValueError", "rank 1: no export family for model_type 'mistral'; known: deepseek_v3"),
    ("field", "ValueError", "rank 1: hf_config: 'types.SimpleNamespace' object has no attribute 'num_"),
    ("wrapper", "TypeError", "rank 1: model: expected a GPTModel or its chunks, which may be in Distributed"
     "DataParallel, Float16Module, OptimizedModule; got list of Wrapper: if it is a wrapper"),
    ("process groups", "ValueError", "rank 1: model: GPTModel has no pg_collection"),
    ("group", "LayoutError", "the dp_cp group has ranks outside of the plan's group: [1]; a plan's group has "
     "all ranks of the model and of its replicas (without group=, the whole world)"),
    ("dtype", "ValueError", "rank 1: decoder.final_layernorm.weight: values are torch.float64, the"),
    ("unknown", "KeyError", "rank 1: a tensor of shape [36] is not in this plan"),
    ("index", "ValueError", "rank 1: decoder.layers.0.mlp.linear_fc2.weight: index 792 is not in [0, 792)"),
    ("negative", "ValueError", "rank 1: decoder.layers.0.mlp.linear_fc2.weight: index -1 is not in [0, 792)"),
    ("source", "RuntimeError", "rank 1: RuntimeError: backup lost"),
    ("receiver", "ValueError", "receiver: a rank of 0..1, got 5"),
    ("receivers", "ValueError", "receiver: the ranks say [0, 1]"),
])  # fmt: skip
def test_one_ranks_error_is_raised_on_all(world, how, kind, message):
    fields, _, _, _ = reference("qwen3")
    for rank, (found, told) in enumerate(world(2, one_rank_fails, how, fields, timeout=60)):
        if how == "group":  # there is no plan over both ranks
            message = message.replace("[1]", f"[{1 - rank}]")
        assert found == kind and message in told, told


def agreeing(said):
    import torch.distributed as dist

    from megatron.core.param_export.agreement import agree

    error = said[dist.get_rank()]
    try:
        agree(error)
    except Exception as raised:
        assert error is None or raised is error or raised.__cause__ is error
        return type(raised), str(raised)


def test_agreement(world):
    missing = FileNotFoundError(2, "No such file")
    assert world(2, agreeing, [None, None]) == [None, None]
    assert world(2, agreeing, [ValueError("a"), ValueError("a")]) == [(ValueError, "a")] * 2
    assert world(2, agreeing, [None, missing]) == [(OSError, "rank 1: [Errno 2] No such file")] * 2
    assert world(2, agreeing, [MemoryError("b"), KeyError("c")]) == [
        (RuntimeError, "rank 0: MemoryError: b; rank 1: c")
    ] * 2
