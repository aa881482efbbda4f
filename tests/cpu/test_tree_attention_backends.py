"""The reference backend against attention written token by token; selection of backends; optional imports."""

import dataclasses
import math
import os
import subprocess
import sys

import pytest
import torch

from megatron.core.transformer.tree_attention import (
    BACKENDS,
    TreeAttentionCase,
    TreeUnsupportedError,
    dispatch,
    select_backend,
    tree_attention,
)
from megatron.core.transformer.tree_metadata import TreeMetadata
from tests.cpu.test_tree_metadata import paths_of_tokens, random_tree


def naive(q, k, v, paths, scale, window=None, sink=None, softcap=None):
    """One query at a time over the keys of its own path; no mask anywhere."""
    out = []
    group = q.shape[1] // k.shape[1]
    for query, path in enumerate(paths):
        if window is not None:
            path = path[-(window + 1) :]
        heads = []
        for head in range(q.shape[1]):
            logits = (k[path, head // group] @ q[query, head]) * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            top = logits.detach().max()
            weights = torch.exp(logits - top)
            denominator = weights.sum() + (torch.exp(sink[head] - top) if sink is not None else 0)
            heads.append((weights / denominator) @ v[path, head // group])
        out.append(torch.stack(heads))
    return torch.stack(out)


def tensors(seed, tokens, heads=4, kv_heads=2, qk_dim=5, v_dim=3, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, qk_dim), (tokens, kv_heads, qk_dim), (tokens, kv_heads, v_dim), (heads,)]
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


OPTIONS = {
    "plain": {},
    "scale": dict(softmax_scale=0.7),
    "window": dict(window=3),
    "sink": dict(sink=True),
    "softcap": dict(softcap=2.0),
    "all": dict(softmax_scale=1.3, window=2, sink=True, softcap=1.5),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (3, 1), (3, 3)])
def test_reference_outputs_and_gradients(option, heads, kv_heads):
    parents, lengths = random_tree(len(option) + heads, nodes=9, longest=4)
    metadata = TreeMetadata.from_nodes(parents, lengths, padded_to=7)
    padding = metadata.padded_size - sum(lengths)
    paths = paths_of_tokens(parents, lengths, padding)
    q, k, v, sink = tensors(heads, metadata.padded_size, heads, kv_heads)
    options = dict(OPTIONS[option])
    sink = sink if options.pop("sink", False) else None
    inputs = [t for t in (q, k, v, sink) if t is not None]
    # Padding has position 0 throughout, so a window does not cut it: leave it out of the loss.
    torch.manual_seed(1)
    weight = torch.randn(metadata.padded_size, heads, 3, dtype=torch.float64)
    weight[sum(lengths) :] = 0
    got = tree_attention(q, k, v, metadata, sink=sink, backend="reference", **options)
    scale = options.pop("softmax_scale", 1 / math.sqrt(5))
    want = naive(q, k, v, paths, scale, sink=sink, **options)
    torch.testing.assert_close(got[: sum(lengths)], want[: sum(lengths)], rtol=1e-12, atol=1e-13)
    for a, b in zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((want * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "dtype, noise", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)]
)
def test_reference_in_low_precision_is_near_float64(dtype, noise):
    metadata = TreeMetadata.from_nodes(*random_tree(5, nodes=12))
    low = tensors(3, metadata.padded_size, dtype=dtype)[:3]
    got = tree_attention(*low, metadata, backend="reference")
    assert got.dtype == dtype
    want = tree_attention(*(t.double() for t in low), metadata, backend="reference")
    assert (got.double() - want).abs().max() < noise * want.abs().max()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("option", ["plain", "all"])
@pytest.mark.parametrize("name", "qkv")
def test_a_branch_is_invisible_to_its_siblings_whatever_it_holds(name, option, poison):
    """Outputs and gradients of everything but the poisoned tokens' subtree and path, to the last bit of a
    clean run or, where the reference leaves pairs out, to rounding."""
    # prefix 0-1, branch 2-4, branch 5-6, padding 7
    metadata = TreeMetadata.from_nodes([-1, 0, 0], [2, 3, 2], padded_to=4)
    options = dict(OPTIONS[option])
    if options.pop("sink", False):
        options["sink"] = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64)

    def run(**poisoned):
        inputs = dict(zip("qkv", tensors(0, 8)[:3], strict=True))
        with torch.no_grad():
            for which, value in poisoned.items():
                inputs[which][3] = value
        out = tree_attention(*inputs.values(), metadata, **options)
        assert out[:3].isfinite().all()
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return out, torch.autograd.grad((out * weight).sum(), list(inputs.values()))

    clean, clean_grads = run()
    out, grads = run(**{name: poison})
    others = [0, 1, 2, 5, 6, 7]
    torch.testing.assert_close(out[others], clean[others], rtol=1e-13, atol=1e-14)
    assert not torch.equal(out[3], clean[3])
    for got, want in zip(grads, clean_grads, strict=True):
        torch.testing.assert_close(got[5:], want[5:], rtol=1e-12, atol=1e-13)


def test_reference_leaves_out_pairs_like_the_dense_mask_does():
    """Both of its ways on one random tree, with NaN in the padding only."""
    parents, lengths = random_tree(4, nodes=17)
    metadata = TreeMetadata.from_nodes(parents, lengths, padded_size=sum(lengths) + 1)
    for options in OPTIONS.values():
        q, k, v, sink = tensors(2, metadata.padded_size)
        options = {**options, "sink": sink if "sink" in options else None}
        found = []
        for last in (1.0, float("nan")):
            with torch.no_grad():
                v[-1] = last
            out = tree_attention(q, k, v, metadata, **options)[:-1]
            found.append([out, *(g[:-1] for g in torch.autograd.grad(out.square().sum(), (q, k, v)))])
        for dense, paths in zip(*found, strict=True):
            torch.testing.assert_close(paths, dense, rtol=1e-12, atol=1e-13)


def case(**fields):
    base = dict(
        device_type="cpu", capability=None, dtype=torch.float32, heads=4, kv_heads=2, qk_dim=8, v_dim=8
    )
    return TreeAttentionCase(**{**base, **fields})


def test_auto_on_cpu_is_reference_and_says_so_once(caplog):
    dispatch._log_choice.cache_clear()
    select_backend.cache_clear()
    with caplog.at_level("INFO", logger=dispatch.__name__):
        for needs_grad in (True, False, True):
            assert select_backend("auto", case(heads=12, needs_grad=needs_grad)) == "reference"
    texts = [r.getMessage() for r in caplog.records]
    assert texts == [
        "tree attention: auto chose backend 'reference' for cpu, float32, 12 heads over 2, head size 8"
    ]


@pytest.mark.parametrize("problem", ["flash-attn-4 is not installed (pip ...)", None])
def test_auto_warns_where_a_package_away_from_flash(monkeypatch, caplog, problem):
    from megatron.core.transformer.tree_attention import flash

    monkeypatch.setattr(flash, "package_problem", lambda: problem)
    dispatch._log_choice.cache_clear()
    select_backend.cache_clear()
    on_gpu = dict(device_type="cuda", capability=(9, 0), heads=13, kv_heads=13, qk_dim=64, v_dim=64)
    with caplog.at_level("INFO", logger=dispatch.__name__):
        chosen = [select_backend("auto", case(**on_gpu, dtype=t)) for t in (torch.bfloat16, torch.float32)]
    select_backend.cache_clear()
    assert chosen == ["flex" if problem else "flash", "flex"]
    assert [r.levelname for r in caplog.records] == ["WARNING" if problem else "INFO", "INFO"]
    if problem:
        assert caplog.records[0].getMessage().endswith(f"; flash would be faster, but {problem}")


def test_auto_on_an_accelerator_does_not_fall_back_to_the_dense_mask(monkeypatch):
    on_gpu = case(device_type="cuda", capability=(9, 0), dtype=torch.float64, heads=11, kv_heads=11)
    monkeypatch.setattr(
        dispatch, "_supports", lambda name, _: None if name == "reference" else f"{name} cannot"
    )
    with pytest.raises(TreeUnsupportedError) as caught:
        select_backend("auto", on_gpu)
    for part in (
        "cuda sm90, float64, 11 heads over 11",
        "flash: flash cannot",
        "te: te cannot",
        "O(T^2) memory",
    ):
        assert part in str(caught.value)
    assert select_backend("reference", on_gpu) == "reference"


def test_auto_takes_the_fastest_that_can(monkeypatch):
    can = {"flex", "reference"}
    monkeypatch.setattr(dispatch, "_supports", lambda name, _: None if name in can else "no")
    assert select_backend("auto", case(device_type="cuda", capability=(9, 0), heads=13, kv_heads=1)) == "flex"
    assert BACKENDS == ("te", "flash", "flex", "reference")


def test_explicit_choice_that_cannot_serve_says_why_and_who_can(monkeypatch):
    monkeypatch.setattr(
        dispatch, "_supports", lambda name, _: None if name == "reference" else "it needs a warp drive"
    )
    with pytest.raises(TreeUnsupportedError) as caught:
        select_backend("flash", case(heads=14))
    assert str(caught.value) == (
        "tree attention backend 'flash' cannot serve cpu, float32, 14 heads over 2, head size 8: it needs "
        "a warp drive. Backends that can: reference."
    )


def test_te_needs_a_te_layer():
    with pytest.raises(TreeUnsupportedError, match="core attention is not Transformer Engine's"):
        select_backend("te", case(heads=16))


def test_unknown_backend():
    with pytest.raises(ValueError, match="tree_attention_backend: expected auto or one of te, flash, flex, "):
        select_backend("fast", case())


BAD_TENSORS = {
    "tokens": (
        lambda q, k, v: (q, k[:-1], v),
        r"expected 7 tokens \(tree_metadata.padded_size\), got 7, 6, 7",
    ),
    "dims": (lambda q, k, v: (q[None], k, v), r"expected \[T, heads, size\], got \[1, 7, 4, 5\]"),
    "heads": (lambda q, k, v: (q[:, :3], k, v), r"expected a head count that divides 3 \(of q\), got 2, 2"),
    "kv": (lambda q, k, v: (q, k, v[:, :1]), r"expected a head count that divides 4 \(of q\), got 2, 1"),
    "size": (lambda q, k, v: (q, k[..., :3], v), r"k: expected head size 5 of q, got 3"),
    "dtype": (
        lambda q, k, v: (q, k, v.float()),
        r"k, v: expected dtype torch.float64 of q, got torch.float64, ",
    ),
    "device": (
        lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta")),
        r"tree_metadata: expected device meta of the query, got cpu; move it once per micro-batch",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_inputs_that_do_not_fit(name):
    change, message = BAD_TENSORS[name]
    metadata = TreeMetadata.from_nodes([-1, 0], [3, 4])
    with pytest.raises(ValueError, match=message):
        tree_attention(*change(*tensors(0, 7)[:3]), metadata)


def test_sink_of_the_wrong_shape():
    metadata = TreeMetadata.from_nodes([-1, 0], [3, 4])
    q, k, v, _ = tensors(0, 7)
    for sink, got in ((torch.zeros(3), r"\[3\]"), (0.0, "float")):
        with pytest.raises(ValueError, match=r"sink: expected a tensor of shape \[4\], got " + got):
            tree_attention(q, k, v, metadata, sink=sink)
    with pytest.raises(ValueError, match=r"got \[7, 2, 4, 5\], .* is one sequence: tokens of shape \[1, T\]"):
        tree_attention(q[:, None].expand(7, 2, 4, -1), k, v, metadata)


def test_options_and_devices_that_do_not_fit():
    metadata = TreeMetadata.from_nodes([-1, 0], [3, 4])
    q, k, v, _ = tensors(0, 7)
    for window in (-1, 1.5, (3, 0)):
        with pytest.raises(ValueError, match=r"window: expected an int >= 0, or None for no limit, got "):
            tree_attention(q, k, v, metadata, window=window)
    for softcap in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"softcap: expected a positive number, or None for no cap"):
            tree_attention(q, k, v, metadata, softcap=softcap)
    with pytest.raises(ValueError, match=r"k, v: expected device cpu of q, got cpu, meta"):
        tree_attention(q, k, v.to("meta"), metadata)


def test_metadata_on_the_cpu_is_validated_by_its_first_use(monkeypatch):
    q, k, v, _ = tensors(0, 7)
    bad = dataclasses.replace(TreeMetadata.from_nodes([-1, 0], [3, 4]), tree_position_ids=torch.arange(7) % 3)
    with pytest.raises(ValueError, match=r"tree_position_ids: expected 3..6 for node 1 \(parent 0\), got "):
        tree_attention(q, k, v, bad)
    good, seen = dataclasses.replace(TreeMetadata.from_nodes([-1, 0], [3, 4])), []
    validate = TreeMetadata.validate
    monkeypatch.setattr(TreeMetadata, "validate", lambda self: seen.append(self) or validate(self))
    for _ in range(2):
        tree_attention(q, k, v, good)
    assert seen == [good]


def test_scored_in_inference_mode_and_trained_on_afterwards():
    """What is kept from scoring may be saved for a backward pass."""
    q, k, v, _ = tensors(0, 7)
    scored, trained = (TreeMetadata.from_nodes([-1, 0, 0], [3, 2, 2]) for _ in range(2))
    with torch.inference_mode():
        tree_attention(q, k, v, scored, backend="flex")
        tree_attention(q, k, v, scored)
    kept = [value for value in scored._cache.values() if isinstance(value, torch.Tensor)]
    assert kept and not any(value.is_inference() for value in kept)
    outputs = []
    for metadata in (scored, trained):
        leaf = q.detach().clone().requires_grad_()
        out = tree_attention(leaf, k, v, metadata)
        outputs += [out, *torch.autograd.grad(out.square().sum(), leaf)]
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])


def test_deterministic_algorithms_that_only_warn_refuse_nothing():
    q, k, v, _ = tensors(0, 7)
    made = []
    for warn_only in (True, False):
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            made.append(dispatch._case(q, k, v, window=None, sink=None, softcap=None, deterministic=False))
        finally:
            torch.use_deterministic_algorithms(False)
    assert [found.deterministic for found in made] == [False, True]


def test_packed_seq_params_are_not_metadata():
    metadata = TreeMetadata.from_nodes([-1], [3])
    q = torch.zeros(3, 2, 4)
    with pytest.raises(
        TypeError,
        match=r"^tree_metadata: expected a TreeMetadata \(packed_seq_params.*\), got PackedSeqParams$",
    ):
        tree_attention(q, q, q, metadata.packed_seq_params())


def test_integers_are_refused_by_the_reference():
    with pytest.raises(
        TreeUnsupportedError, match=r"it computes float64, float32, bfloat16, float16, not torch.int64"
    ):
        select_backend("reference", case(dtype=torch.int64))


def test_optional_packages_stay_optional():
    """A fresh process asks every backend without loading an optional attention package."""
    code = (
        "import sys, torch\n"
        "from megatron.core.transformer import tree_attention as t\n"
        "case = t.TreeAttentionCase('cuda', (9, 0), torch.bfloat16, 8, 2, 128, 128)\n"
        "print([t.dispatch._supports(name, case) for name in t.BACKENDS])\n"
        "packages = ('flash_attn', 'cutlass', 'quack', 'tvm_ffi')\n"
        "heavy = [m for m in sys.modules if m.split('.')[0] in packages]\n"
        "assert not heavy, heavy\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=env, timeout=120)


def test_the_configuration_and_the_command_line_name_every_backend():
    import argparse
    import typing

    from megatron.core.transformer import TransformerConfig
    from megatron.training.argument_utils import ArgumentGroupFactory

    field = TransformerConfig.__dataclass_fields__["tree_attention_backend"]
    assert field.default == "auto" and set(typing.get_args(field.type)) == {"auto", *BACKENDS}
    parser = argparse.ArgumentParser()
    others = [name for name in TransformerConfig.__dataclass_fields__ if name != "tree_attention_backend"]
    ArgumentGroupFactory(TransformerConfig, exclude=others).build_group(parser, "transformer")
    assert parser.parse_args([]).tree_attention_backend == "auto"
    assert parser.parse_args(["--tree-attention-backend", "flex"]).tree_attention_backend == "flex"
