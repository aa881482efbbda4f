"""README's blocks, run as written: a training step as one by one, and weights to the rollout."""

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.dist import small_gpt
from tests.dist.tree_trainer import _sharding, difference
from tests.dist.world import parallel

README = Path(__file__).resolve().parents[2] / "README.md"


def blocks(marker):
    """README's Python code blocks that contain ``marker``."""
    return [b for b in re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S) if marker in b]


def rollouts(count):
    """(tokens, loss mask, advantage) of two groups with a prompt each."""
    g = torch.Generator().manual_seed(3)
    prompts = torch.randint(0, small_gpt.VOCAB, (2, 7), generator=g)
    made = []
    for i in range(count):
        n = 3 + 2 * i
        tokens = torch.cat([prompts[i % 2], torch.randint(0, small_gpt.VOCAB, (n,), generator=g)])
        mask = torch.arange(7 + n) >= 7 + i % 3
        made.append((tokens, mask, torch.randn(7 + n, generator=g, dtype=torch.float64)))
    return made


class NoStep:
    """An optimizer that leaves the gradients."""

    steps = 0

    def step(self):
        self.steps += 1


def my_terms(log_prob, advantage):
    return -log_prob.exp() * advantage


def step(groups, count, options, loss_per, config):
    """README's block on this rank: (gradients by global name, None, trajectories in each micro-batch)."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    (text,) = blocks("plan_micro_batches")
    text = text.replace("vocab_size=vocab_size", "vocab_size=vocab_size, **options")
    if loss_per == "trajectory":  # as the text below the block says
        text = text.replace("(terms * batch.loss_mask_L).sum()", "batch.trajectory_means(terms).sum()")
        options = {**options, "loss_per": "trajectory"}
    if loss_per == "summed":
        text = text.replace("return batch.averaged_loss(", "return *batch.summed_loss(")
        config = {**config, "calculate_per_token_loss": True}
    with parallel(**groups):
        cfg = small_gpt.config(**{"params_dtype": torch.float64, "num_layers": 2, **config})
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=False)
        model_chunks = [DistributedDataParallel(cfg, ddp, chunk) for chunk in small_gpt.build(cfg)]
        cfg.finalize_model_grads_func, cfg.grad_scale_func = finalize_model_grads, None
        given = {
            "model_chunks": model_chunks,
            "optimizer": NoStep(),
            "rollouts": rollouts(count),
            "my_terms": my_terms,
            "max_tokens": 32,
            "vocab_size": small_gpt.VOCAB,
            "dp_size": parallel_state.get_data_parallel_world_size(),
            "dp_rank": parallel_state.get_data_parallel_rank(),
            "device": "cpu",
            "options": options,
        }
        exec(compile(text, str(README), "exec"), given)
        assert given["optimizer"].steps == 1
        gradients = {}
        for chunk in model_chunks:
            for name, parameter in small_gpt.global_names(chunk.module).items():
                gradients[name] = (parameter.main_grad.clone(), *_sharding(parameter))
        return gradients, 1.0, given["step"].trajectory_ids


def one_by_one(count, loss_per, layers):
    """The same gradients in plain torch: upstream's layout, a trajectory at a time, nothing of ours."""
    with parallel():
        (model,) = small_gpt.build(small_gpt.config(params_dtype=torch.float64, num_layers=layers))
        sums = []
        for tokens, mask, advantage in rollouts(count):
            n = len(tokens)
            hidden = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)[None, None]
            log_p = model(tokens[None], torch.arange(n)[None], hidden)[0].log_softmax(-1)
            drawn = log_p[:-1].gather(1, tokens[1:, None])[:, 0][mask[1:]]
            terms = my_terms(drawn, advantage[mask])
            sums.append(terms.mean() if loss_per == "trajectory" else terms.sum())
        trained = sum(int(mask.sum()) for _, mask, _ in rollouts(count))
        (sum(sums) / (count if loss_per == "trajectory" else trained)).backward()
        named = small_gpt.global_names(model)
        return {name: (p.grad.clone(), *_sharding(p)) for name, p in named.items()}, 1.0, None


PIPELINE = dict(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
CASES = {
    "one": (1, {}, {}, {}),
    "dp2": (2, {}, {}, {}),
    "dp4 with dummies": (4, {}, {}, {}),
    "tp2 sequence parallel": (2, dict(tp=2), dict(pad_to_multiple_of=2), dict(sequence_parallel=True)),
    "pp2": (2, dict(pp=2), {}, PIPELINE),
    "pp2 of one length": (2, dict(pp=2), dict(pad_to_multiple_of=32), {}),
    "pp2 vpp2": (2, dict(pp=2, vpp=2), dict(micro_batch_multiple=2), {**PIPELINE, "num_layers": 4}),
}


@pytest.mark.parametrize("layout, loss_per", [(name, "token") for name in CASES] + [
    ("dp4 with dummies", "trajectory"), ("dp4 with dummies", "summed"), ("one", "summed"),
])  # fmt: skip
def test_the_training_step_runs_as_written(world, layout, loss_per):
    size, groups, options, config = CASES[layout]
    ranks = world(size, step, groups, 3, options, loss_per, config)
    linear = world(1, one_by_one, 3, loss_per, config.get("num_layers", 2))
    assert any(not ids for rank in ranks for dealt in rank[2] for ids in dealt) == ("dummies" in layout)
    error, where = difference(ranks, linear)
    assert error < (1e-7 if loss_per == "summed" else 1e-10), where  # upstream's reciprocal is fp32


def checked(what, everywhere):
    """What `check` says on this rank, of a plan whose ranks differ in ``what``."""
    import torch.distributed as dist

    from megatron.core.tree_training import Trajectory, plan_micro_batches

    mine = dist.get_rank() if everywhere else int(dist.get_rank() == 2)
    sequences = [[1, 2, 3, 4], [1, 2, 5]]
    if what == "numbers of trajectories":
        sequences += [[1, 2]] * mine
    if what == "numbers of tokens":
        sequences[0] += [7] * mine
    if what == "digests of the tokens":
        sequences[1][1] += mine
    trained = {i: 1 for i in range(9)}
    if what == "digests of the loss masks":
        trained[2 + mine % 2] = 0
    masks = [[0] + [trained[i] for i in range(1, len(s))] for s in sequences]
    values = [{"a": [mine] * len(s)} for s in sequences]
    given = list(map(Trajectory, sequences, masks, values))
    options = {"max_tokens": 8 + 4 * mine, "pad_to_multiple_of": 4} if what == "plans" else {"max_tokens": 9}
    options["data_parallel_size"] = 1 + mine if what == "plans" else 2
    try:
        plan_micro_batches(given, **options).check()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("what", ["numbers of trajectories", "numbers of tokens", "digests of the tokens",
                                  "digests of the loss masks", "plans"])  # fmt: skip
def test_ranks_with_plans_of_their_own_are_refused_on_every_rank(world, what):
    (told,) = set(world(4, checked, what, False))
    assert re.match(rf"{what} differ between ranks of the group: .* on rank 0, .* on rank 2\. ", told)
    assert "trajectories of all data-parallel ranks, the same list in the same order on every rank" in told
    if what.startswith("numbers"):
        assert set(world(4, checked, what, True)) != {None}


def test_the_same_plan_on_every_rank_passes(world):
    """Values may differ: they are rounded on every rank."""
    assert world(4, checked, "values", True) == [None] * 4


def run(marker, given, address):
    (text,) = blocks(marker)
    assert "HOST:PORT" in text or marker == "publisher.publish("
    exec(compile(text.replace("tcp://HOST:PORT", address), str(README), "exec"), given)


def shape():
    from examples.quickstart import policy

    return policy.Shape(layers=1, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48)


def rollout_job(address):
    """README's rollout process: what it holds in the end."""
    from examples.quickstart import rollout

    module = rollout.model(shape(), 32, 64, "cpu")
    run("serve_forever", {"hf_model": module}, address)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def trainer_job(address):
    """README's trainers: what they held when they last synced, and the reports."""
    import torch.distributed as dist

    from examples.quickstart import policy, rollout
    from megatron.core.param_export import export
    from megatron.core.tree_training import Trajectory, TreeBatch
    from megatron.weight_sync import ModuleReceiver

    module, main = rollout.model(shape(), 32, 64, "cpu"), dist.get_rank() == 0
    with parallel(tp=2):
        trained = policy.Policy(shape(), 32, 64, 1e-3, "cpu")
        given = {"model_chunks": [trained.ddp], "optimizer": trained.optimizer, "hf_config": module.config}
        run("publisher.sync(", given, address)
        reports, publisher = [given["report"]], given["publisher"]
        for _ in range(2):
            trained.set_lr(1e-6)
            values = {"advantage": [1.0] * 5, "rollout_log_probs": [0.0] * 5}
            tree = TreeBatch.from_trajectories([Trajectory([5, 6, 7, 8, 9], [0, 0, 1, 1, 1], values)])
            trained.step([tree])
            reports.append(publisher.sync())
        if main:
            given["transport"].close()
        held = dict(export(given["plan"], receivers=[0]))
        publisher.register("engine")
        given["receivers"] = {"engine": ModuleReceiver(module)}
        run("publisher.publish(", given, address)
        if main:
            assert all(torch.equal(held[name], tensor) for name, tensor in module.state_dict().items())
            assert publisher.sender.state("engine") == "synced"
        return held, [(report.version, report.dense_bytes > 0, report.delta_bytes > 0) for report in reports]


def test_weights_go_to_the_rollout_as_written(world):
    """Two jobs with a world each: two trainers, and a rollout process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with ThreadPoolExecutor(1) as pool:
        rollout = pool.submit(world, 1, rollout_job, address, timeout=60)
        (held, reports), (_, others) = world(2, trainer_job, address, timeout=60)
        (arrived,) = rollout.result()
    assert reports == others == [(1, True, False), (2, False, True), (3, False, True)]
    assert set(arrived) == set(held)
    assert all(torch.equal(held[name], tensor) for name, tensor in arrived.items())


def files_job(hf_folder, new_folder):
    """README's loading and saving, as written; then a step, of what the optimizer took to be the weights."""
    from safetensors.torch import load_file

    from examples.quickstart import policy, rollout
    from megatron.core.param_export import export
    from megatron.core.tree_training import Trajectory, TreeBatch

    (text,) = blocks("load_checkpoint(")
    text, exported = text.replace("    ...\n", "    exported[name] = tensor.clone()\n"), {}
    with parallel(tp=2):
        trained = policy.Policy(shape(), 32, 64, 1e-6, "cpu")
        given = {"model_chunks": [trained.ddp], "optimizer": trained.optimizer, "exported": exported}
        given |= {"hf_config": rollout.model(shape(), 32, 64, "cpu").config}
        given |= {"hf_folder": hf_folder, "new_folder": new_folder}
        exec(compile(text, str(README), "exec"), given)
        values = {"advantage": [1.0] * 5, "rollout_log_probs": [0.0] * 5}
        tree = TreeBatch.from_trajectories([Trajectory([5, 6, 7, 8, 9], [0, 0, 1, 1, 1], values)])
        trained.step([tree])
        after = dict(export(given["plan"]))
    loaded, saved = (load_file(f"{folder}/model.safetensors") for folder in (hf_folder, new_folder))
    assert set(saved) == set(loaded) == set(after)
    assert all(torch.equal(saved[name], tensor) for name, tensor in loaded.items())
    assert all((after[name] - tensor).abs().max() < 1e-4 for name, tensor in loaded.items())
    return {name: torch.equal(tensor, loaded[name]) for name, tensor in exported.items()}


def test_weights_go_to_and_from_files_as_written(world, tmp_path):
    from examples.quickstart import rollout

    torch.manual_seed(8)
    module = rollout.model(shape(), 32, 64, "cpu")
    module.save_pretrained(tmp_path / "hf")
    first, second = world(2, files_job, str(tmp_path / "hf"), str(tmp_path / "new"))
    assert set(first) == set(module.state_dict()) and all(first.values()) and not second
