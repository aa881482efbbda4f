"""Checkpoint folders: what is written is what ``from_pretrained`` reads, and both ways round."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from tests.dist.export_references import reference
from tests.dist.world import parallel


def rewrite(groups, fields, source, target, file_bytes):
    from megatron.core.param_export import build_plan
    from megatron.core.param_export.checkpoint import load_checkpoint, save_checkpoint
    from tests.dist import export_models

    hf = SimpleNamespace(**fields)
    with parallel(**groups):
        plan = build_plan(export_models.build(hf), hf).prove()
        load_checkpoint(plan, source)
        save_checkpoint(plan, target, file_bytes=file_bytes, bucket_bytes=30_000)


@pytest.mark.parametrize(
    "case, size, groups, file_bytes",
    [
        ("qwen3", 2, dict(tp=2), 10**9),
        ("qwen3_moe", 2, dict(ep=2), 60_000),
        ("gpt_oss", 2, dict(pp=2), 60_000),
        ("qwen3-tied", 2, dict(pp=2), 60_000),
    ],
)
def test_from_pretrained_reads_what_was_written(world, tmp_path, case, size, groups, file_bytes):
    from transformers import AutoModelForCausalLM

    fields, path, tokens, want = reference(case)
    (tmp_path / "model-00009-of-00009.safetensors").write_bytes(b"left by an earlier save")
    world(size, rewrite, groups, fields, str(Path(path).parent), str(tmp_path), file_bytes)
    files = sorted(file.name for file in tmp_path.iterdir())
    if file_bytes == 10**9:
        assert files == ["config.json", "model.safetensors"]
    else:
        assert files[-1] == "model.safetensors.index.json" and len(files) > 3
        assert all(file.stat().st_size < file_bytes + 5_000 for file in tmp_path.glob("*.safetensors"))
        where = json.loads((tmp_path / files[-1]).read_text())["weight_map"]
        found = {}
        for file in tmp_path.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                found.update(dict.fromkeys(opened.keys(), file.name))
        with safe_open(path, "pt") as opened:
            assert where == found and where.keys() == set(opened.keys())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float().eval()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, want)


def missing(fields, folder):
    from megatron.core.param_export import build_plan
    from megatron.core.param_export.checkpoint import load_checkpoint
    from tests.dist import export_models

    hf = SimpleNamespace(**fields)
    with parallel():
        plan = build_plan(export_models.build(hf), hf).prove()
        with pytest.raises(
            FileNotFoundError, match=r"has neither model.safetensors nor model.safetensors.index"
        ):
            load_checkpoint(plan, Path(folder).parent)
        with pytest.raises(KeyError, match=r"lacks 2 tensors, first lm_head.weight"):
            load_checkpoint(plan, folder)


def test_an_incomplete_checkpoint_is_refused(world, tmp_path):
    from safetensors.torch import load_file, save_file

    fields, path, _, _ = reference("qwen3")
    state = load_file(path)
    del state["lm_head.weight"], state["model.layers.3.mlp.up_proj.weight"]
    (tmp_path / "inner").mkdir()
    save_file(state, tmp_path / "inner/model.safetensors")
    world(1, missing, fields, str(tmp_path / "inner"))
