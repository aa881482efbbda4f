"""FlexAttention compiled, on the CPU: how often, and what the compiled graph computes, gradients included.

Traced and run without code generation (``aot_eager``): the same graphs as on a GPU, plain torch inside.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# The other tests' runtime switches the compiler off, so the cases run in a process of their own.
COMPILED = os.environ.get("TREE_ATTENTION_COMPILED") == "1"
compiled = pytest.mark.skipif(not COMPILED, reason="runs in the process that test_compiled starts")


@pytest.mark.skipif(COMPILED, reason="the outer process")
def test_compiled():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            "--noconftest",
            __file__,
        ],
        env={
            **{n: v for n, v in os.environ.items() if n != "TORCHDYNAMO_DISABLE"},
            "TREE_ATTENTION_COMPILED": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        },
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout + done.stderr


@pytest.fixture
def attend(monkeypatch):
    """flex.attend as on a GPU: compiled, and with gradients, which torch refuses on CPU without reason."""
    from torch.nn.attention import flex_attention

    from megatron.core.transformer.tree_attention import flex

    compile, function = torch.compile, flex._function
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend="aot_eager", **options))
    monkeypatch.setattr(flex, "_function", lambda device_type, *rest: function("cuda", *rest))
    monkeypatch.setattr(flex, "_detached", lambda *tensors: tensors)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    function.cache_clear()
    return flex.attend


def graphs():
    return torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)


def check(attend, tree, heads=4, kv_heads=2, qk=16, v=16, padded_to=1, sink=False, **options):
    from megatron.core.transformer.tree_attention import reference
    from megatron.core.transformer.tree_metadata import TreeMetadata

    metadata = TreeMetadata.from_nodes(*tree, padded_to=padded_to)
    g = torch.Generator().manual_seed(metadata.padded_size)
    sizes = ((heads, qk), (kv_heads, qk), (kv_heads, v), (heads, v))
    *inputs, upstream = (torch.randn(metadata.padded_size, *s, generator=g) for s in sizes)
    if sink:
        inputs.append(torch.randn(heads, generator=g))
    results = []
    for module, dtype in ((attend, torch.float32), (reference.attend, torch.float64)):
        cast = [t.to(dtype).requires_grad_(torch.is_grad_enabled()) for t in inputs]
        out = module(
            *cast[:3], metadata, softmax_scale=1 / math.sqrt(qk), sink=cast[3] if sink else None, **options
        )
        grads = torch.autograd.grad(out, cast, upstream.to(dtype)) if torch.is_grad_enabled() else ()
        results.append([out, *grads])
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)


TREES = [
    (([-1], [1000]), 1),
    (([-1], [1]), 1),
    (([-1, 0, 0], [130, 70, 61]), 1),
    (([-1, *[0] * 20], [200] + [37] * 20), 128),
    (([-1, 0, -1, -1, 3], [128, 128, 1, 127, 3]), 128),
    (([-1] * 30, [1 + 13 * i % 29 for i in range(30)]), 7),
]


@compiled
def test_one_graph_for_all_lengths(attend):
    for tree, padded_to in TREES:
        before = graphs()
        check(attend, tree, padded_to=padded_to)
        assert graphs() - before == (tree is TREES[0][0])


@compiled
def test_one_more_without_gradients_and_none_after(attend):
    check(attend, TREES[2][0])
    before = graphs()
    with torch.no_grad():
        for tree, padded_to in TREES:
            check(attend, tree, padded_to=padded_to)
    assert graphs() - before == 1
    for tree, padded_to in TREES:
        check(attend, tree, padded_to=padded_to)
    assert graphs() - before == 1


@compiled
def test_many_configurations_do_not_count_against_each_other(attend):
    """More of them than torch would recompile one function for; every one compiles once."""
    before = graphs()
    configurations = [dict(qk=24), dict(qk=32), dict(heads=2)]
    with torch._dynamo.config.patch(recompile_limit=1):
        for configuration in configurations:
            for tree, padded_to in (TREES[2], TREES[5]):
                check(attend, tree, padded_to=padded_to, **configuration)
    assert graphs() - before == len(configurations)


@compiled
@pytest.mark.parametrize(
    "options",
    [dict(window=50, softcap=5.0), dict(window=0, sink=True, kv_heads=4, v=32)],
    ids=["window, softcap", "window, sink"],
)
def test_options(attend, options):
    before = graphs()
    for tree, padded_to in (TREES[2], TREES[5]):
        check(attend, tree, padded_to=padded_to, **options)
    assert graphs() - before == 1
