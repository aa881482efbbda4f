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


def described(fields, mtp, folder):
    """config.json of a bf16 model whose configuration says nothing of architectures and dtype."""
    from megatron.core.param_export import build_plan, export
    from megatron.core.param_export.checkpoint import load_checkpoint, save_checkpoint
    from tests.dist import export_models

    hf = SimpleNamespace(**{k: v for k, v in fields.items() if k not in ("architectures", "dtype")})
    with parallel():
        chunks = export_models.build(hf, mtp=mtp)
        for parameter in chunks[0].parameters():
            parameter.data = parameter.data.bfloat16()
        plan = build_plan(chunks, hf).prove()
        for entry in plan.entries:
            entry.tensor.data.normal_()
        kept = {name: tensor.clone() for name, tensor in export(plan)}
        save_checkpoint(plan, folder)
        export_models.poison(chunks)
        load_checkpoint(plan, folder)
        assert all(torch.equal(tensor, kept[name]) for name, tensor in export(plan))


@pytest.mark.parametrize("case, mtp", [("glm4_moe", 0), ("deepseek_v3", 1), ("llama", 0)])
def test_the_written_configuration_is_that_of_what_was_written(world, tmp_path, case, mtp):
    from transformers import AutoModelForCausalLM

    fields, _, _, _ = reference(case)
    assert case == "llama" or fields["num_nextn_predict_layers"] == 1
    world(1, described, fields, mtp, str(tmp_path))
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == fields["architectures"] and written["dtype"] == "bfloat16"
    assert written.get("num_nextn_predict_layers", 0) == mtp
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert any(name.startswith("model.layers.5.") for name in opened.keys()) == bool(mtp)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert model.dtype == torch.bfloat16 and not info["missing_keys"]


def failing(fields, source, folder, how):
    """Rank 0 cannot write; what every rank says."""
    from unittest import mock

    from megatron.core.param_export import build_plan, checkpoint
    from tests.dist import export_models

    hf = SimpleNamespace(**fields)
    with parallel(tp=2):
        plan = build_plan(export_models.build(hf), hf).prove()
        checkpoint.load_checkpoint(plan, source)
        kept, calls = checkpoint.save_file, []

        def full(tensors, path, **options):
            calls.append(path)
            if len(calls) == 2:
                raise OSError(28, "No space left on device")
            kept(tensors, path, **options)

        with mock.patch.object(checkpoint, "save_file", full if how == "full" else kept):
            try:
                checkpoint.save_checkpoint(plan, folder, file_bytes=60_000, bucket_bytes=30_000)
            except OSError as error:
                return type(error), str(error)


def test_a_save_that_fails_is_told_on_all_ranks_and_leaves_the_old_checkpoint(world, tmp_path):
    fields, path, _, _ = reference("qwen3")
    source, folder = str(Path(path).parent), tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"the old one")
    (folder / "part-7.tmp").write_bytes(b"left by a save that was killed")
    told = world(2, failing, fields, source, str(folder), "full", timeout=60)
    assert told == [(OSError, "rank 0: [Errno 28] No space left on device")] * 2
    assert [file.name for file in folder.iterdir()] == ["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"the old one"
    told = world(2, failing, fields, source, str(folder / "model.safetensors" / "inner"), None, timeout=60)
    assert told[0] == told[1] and "rank 0: [Errno 20] Not a directory" in told[0][1]
    assert world(2, failing, fields, source, str(folder), None, timeout=60) == [None, None]
    names = {file.name for file in folder.iterdir()}
    assert "model.safetensors" not in names and {"config.json", "model.safetensors.index.json"} < names
    assert not any(name.endswith(".tmp") for name in names)
