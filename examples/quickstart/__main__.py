"""A reinforcement-learning loop from trajectories to a rollout model that provably holds the same weights.

    make quickstart                  one process
    make quickstart NPROC=2 TP=2     tensor parallel
    make quickstart NPROC=2 PP=2     two pipeline stages

Each step: the rollout model (Hugging Face transformers, rank 0) samples answers; they are packed as trees;
the policy (patched Megatron-Core) takes one policy-gradient step on them; the changed weights travel as a
payload; both sides compare fingerprints. Runs on CPU with gloo, and on GPUs with NCCL where there are any.
"""

from __future__ import annotations

import functools
import math
import os
import random
import sys
import time

import torch
import torch.distributed as dist

from examples.quickstart.quiet import hush

hush(torch.cuda.is_available())
if not torch.cuda.is_available():
    import megatron.cpu_runtime

    megatron.cpu_runtime.install()  # before megatron.core

from tqdm import tqdm  # noqa: E402

from examples.quickstart import options, policy, report, rollout, task, twin  # noqa: E402
from examples.quickstart.options import SMALL_LR  # noqa: E402
from examples.quickstart.report import worst  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.optimizer.sparse_diff import attach  # noqa: E402
from megatron.core.param_export import build_plan  # noqa: E402
from megatron.core.param_export.publisher import Publisher  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.tree_training import plan_micro_batches  # noqa: E402
from megatron.weight_sync import LocalTransport, ModuleReceiver  # noqa: E402


def launch(args) -> torch.device:
    """Process groups and random states; this rank's device."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    store = {} if world > 1 else dict(store=dist.HashStore(), rank=rank, world_size=world)
    dist.init_process_group("nccl" if cuda else "gloo", **store)
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)
    return device


def share(value):
    """Rank 0's object on every rank."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


class Loop:
    """The policy, the rollout model on rank 0, and the stream of weights between them."""

    def __init__(self, args):
        self.args = args
        self.device = launch(args)
        self.main = dist.get_rank() == 0
        self.rng = random.Random(args.seed)
        shape = policy.Shape()
        self.given = None
        vocabulary, positions = task.VOCABULARY, task.PROMPT + task.RESPONSE
        if args.trajectories:
            self.given, self.given_reward, used, positions = options.read_given(args.trajectories)
            vocabulary = -(-used // (16 * args.tp)) * 16 * args.tp
        self.positions = positions
        self.policy = policy.Policy(shape, vocabulary, positions, args.lr, self.device)
        self.twin = twin.Twin(self.policy.core, shape, vocabulary, positions, self.device)
        engine = rollout.model(shape, vocabulary, positions, self.device if self.main else "meta")
        self.engine = engine if self.main else None
        self.receiver = ModuleReceiver(engine) if self.main else None
        plan = build_plan(self.policy.ddp, engine.config).prove()
        self.diff = attach(self.policy.optimizer)
        transport = LocalTransport({"rollout": self.receiver}) if self.main else None
        self.publisher = Publisher(plan, self.diff, transport)
        self.publisher.register("rollout")
        self.fingerprints_equal, self.syncs = True, 0
        self.history: list[dict] = []
        self.worst_loss = self.worst_gradient = 0.0
        self.attention_backend = policy.attention_backend(shape, self.device)
        self.parameters = sum(p.numel() for p in self.policy.core.parameters())

    def sync(self) -> dict:
        """Bring the rollout model to the policy's weights and compare fingerprints over the live weights."""
        report = self.publisher.sync()
        ours = self.publisher.fingerprint()
        self.syncs += 1
        if not self.main:
            return {}
        self.fingerprints_equal &= ours == self.receiver.live_fingerprint()
        dense = sum(t.numel() * t.element_size() for t in self.engine.state_dict().values())
        sent = report.dense_bytes + report.delta_bytes
        return {"dense_bytes": dense, "sent_bytes": sent, "density": report.density}

    def experience(self):
        """Trajectories and what they earned; the same on every rank."""
        if self.given is not None:
            return self.given, self.given_reward, None
        found = None
        if self.main:
            problems = [task.problem(self.rng) for _ in range(self.args.groups)]
            found = rollout.collect(self.engine, problems, self.args.group_size, self.args.entropy_bonus)
        return share(found)

    def step(self, lr: float, phase: str, check: bool) -> dict:
        trajectories, reward, solved = self.experience()
        if check:
            few = trajectories[: 4 * self.args.group_size]
            loss, gradient = self.twin.tree_against_linear(few)
            self.worst_loss = worst(self.worst_loss, loss)
            self.worst_gradient = worst(self.worst_gradient, gradient)
        plan = plan_micro_batches(
            trajectories,
            max(self.args.max_tokens, -(-self.positions // 8) * 8),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            pad_to_multiple_of=8,
        )
        plan.check()
        batches = list(plan.micro_batches(parallel_state.get_data_parallel_rank(), self.device))
        self.policy.set_lr(lr)
        loss, drift = self.policy.step(batches) or (0.0, 0.0)
        if parallel_state.get_tensor_model_parallel_rank() > 0:
            loss = 0.0  # each loss counts once in the sum over ranks
        entry = {
            "step": len(self.history) + 1,
            "phase": phase,
            "lr": lr,
            "reward": reward,
            "solved": solved,
            "loss": self.over_ranks(loss, dist.ReduceOp.SUM),
            "log_prob_drift": self.over_ranks(drift, dist.ReduceOp.MAX),
            "tokens_linear": plan.tokens.linear,
            "tokens_packed": plan.tokens.packed,
        }
        entry.update(self.sync())
        self.history.append(entry)
        return entry

    def over_ranks(self, value: float, op) -> float:
        """The ranks' values reduced, on every rank."""
        box = torch.tensor(value, device=self.device)
        dist.all_reduce(box, op=op)
        return float(box)

    def held_out(self) -> float | None:
        """The share of held-out problems that greedy answers solve exactly; None where nobody asks any."""
        if self.given is not None or not self.main:
            return None
        rng = random.Random(10_000)
        problems = [task.problem(rng) for _ in range(self.args.held_out)]
        responses, _ = rollout.answer(self.engine, problems, greedy=True)
        right = [task.solved(r, p) for r, p in zip(responses, problems, strict=True)]
        return sum(right) / len(right)

    def run(self) -> dict:
        args, start = self.args, time.time()
        first = self.sync()
        before = self.held_out()
        total = args.steps + args.small_steps
        pace = 0.5 if sys.stderr.isatty() else 15
        bar = tqdm(total=total, disable=not self.main, mininterval=pace, ncols=100, unit="step")
        for number in range(args.steps):
            progress = share(max(number / args.steps, (time.time() - start) / args.seconds))
            if number and progress >= 1:
                break
            lr = args.lr * min(1, (number + 1) / 5) * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
            entry = self.step(lr, "train", check=number in (0, args.steps - 1))
            bar.set_postfix_str(f"reward {entry['reward']:.3f}", refresh=False)
            bar.update()
        for _ in range(args.small_steps):
            entry = self.step(SMALL_LR, "small", check=False)
            bar.set_postfix_str(f"reward {entry['reward']:.3f} lr {SMALL_LR:.0e}", refresh=False)
            bar.update()
        bar.close()
        trajectories, _, _ = self.experience()
        logit_difference = self.twin.logits_against(self.engine, trajectories[: 2 * args.group_size])
        if not self.main:
            return {}
        return self.summary(before, self.held_out(), logit_difference, first, time.time() - start)

    def summary(self, before, after, logit_difference, first, seconds) -> dict:
        train = [e for e in self.history if e["phase"] == "train"]
        small = [e for e in self.history if e["phase"] == "small"]
        edge = max(1, min(10, len(train) // 4))

        def mean(entries, key):
            return sum(e[key] for e in entries) / len(entries) if entries else 0.0

        return {
            "steps": len(self.history),
            "reward_first": mean(train[:edge], "reward"),
            "reward_last": mean(train[-edge:], "reward"),
            "solved_before": before,
            "solved_after": after,
            "tokens_linear": sum(e["tokens_linear"] for e in self.history),
            "tokens_packed": sum(e["tokens_packed"] for e in self.history),
            "tree_vs_linear_loss_abs_diff": self.worst_loss,
            "tree_vs_linear_grad_rel_diff": self.worst_gradient,
            "dense_bytes": first["dense_bytes"] * self.syncs,
            "delta_bytes": first["sent_bytes"] + sum(e["sent_bytes"] for e in self.history),
            "bytes_per_sync_training": mean(train, "sent_bytes"),
            "bytes_per_sync_small_lr": mean(small, "sent_bytes") if small else None,
            "density_training": mean(train, "density"),
            "density_small_lr": mean(small, "density") if small else None,
            "small_lr": SMALL_LR,
            "syncs": self.syncs,
            "fingerprints_equal": self.fingerprints_equal,
            "max_logit_diff": logit_difference,
            "log_prob_drift": functools.reduce(worst, (e["log_prob_drift"] for e in self.history)),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "tree_attention_backend": self.attention_backend,
            "world_size": dist.get_world_size(),
            "tensor_parallel": self.args.tp,
            "pipeline_parallel": self.args.pp,
            "parameters": self.parameters,
            "seconds": seconds,
        }


def main():
    args = options.arguments(__doc__)
    if args.ranks > 1 and "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.ranks)))
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        program = ["-m", "examples.quickstart", *sys.argv[1:]]
        os.execv(sys.executable, [sys.executable, *launcher, *program])
    loop = Loop(args)
    summary = loop.run()
    if loop.main:
        report.write(args.out, summary, loop.history)
        print(f"\n{report.table(summary)}\n\n  {args.out}/report.json, {args.out}/report.png")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
