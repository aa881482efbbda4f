"""The quickstart, shortened: the same loop and the same checks, in every layout it offers."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.quickstart.quiet import LOGGED, ON_CPU

ROOT = Path(__file__).resolve().parents[2]

KEYS = """steps reward_first reward_last tokens_linear tokens_packed tree_vs_linear_loss_abs_diff
tree_vs_linear_grad_rel_diff dense_bytes delta_bytes syncs fingerprints_equal max_logit_diff device world_size
seconds""".split()


def quickstart(out, *options, ranks=1):
    launch = [sys.executable, "-m", "examples.quickstart", f"--ranks={ranks}"]
    few = ["--steps=4", "--small-steps=2", "--groups=4", "--max-tokens=260", "--held-out=8"]
    done = subprocess.run(
        [*launch, *few, f"--out={out}", *options], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-6000:]
    report = json.loads((out / "report.json").read_text())
    assert set(KEYS) <= set(report)
    assert (out / "report.png").stat().st_size > 10_000
    if report["device"] == "cpu":
        assert not [text for text in (*LOGGED, *ON_CPU, "not installed") if text in done.stderr]
    return report, done.stdout


def check(report, ranks):
    assert report["world_size"] == ranks and report["steps"] == 6 and report["syncs"] == 7
    assert report["fingerprints_equal"] is True
    assert 0 <= report["tree_vs_linear_loss_abs_diff"] < 1e-6
    assert 0 < report["tree_vs_linear_grad_rel_diff"] < 1e-5
    assert 0 < report["max_logit_diff"] < 1e-4
    assert report["tokens_linear"] > 4 * report["tokens_packed"]
    train = [step for step in report["history"] if step["phase"] == "train"]
    small = [step for step in report["history"] if step["phase"] == "small"]
    assert all(0.2 < step["density"] <= 1 for step in train)  # at a large learning rate most weights change
    assert all(step["sent_bytes"] >= 0.99 * step["dense_bytes"] for step in train if step["density"] > 0.7)
    assert all(0 < step["density"] < 0.2 for step in small)
    assert all(step["sent_bytes"] < 0.7 * step["dense_bytes"] for step in small)


@pytest.mark.parametrize(
    "ranks, layout", [(1, []), (2, ["--tp=2"]), (2, ["--pp=2"]), (2, [])], ids=["one", "tp2", "pp2", "dp2"]
)
def test_loop(tmp_path, ranks, layout):
    report, printed = quickstart(tmp_path, *layout, ranks=ranks)
    check(report, ranks)
    assert "syncs, fingerprints equal" in printed and "7, all" in printed
    assert "solved exactly" in printed and "per sync at lr 1e-06" in printed
    backend = report["tree_attention_backend"]
    assert backend == "reference" or report["device"] != "cpu"
    assert re.search(rf"^  tree attention backend +{backend} \(chosen by auto\)$", printed, re.MULTILINE)


def test_given_trajectories(tmp_path):
    """Two groups of answers with rewards: the better answers become likelier, and nothing is sampled."""
    records = []
    for group, prompt in enumerate(([5, 6, 7, 8] * 8, [9, 10, 11] * 8)):
        for sample in range(8):
            response = [20 + sample % 2, 4 + sample, 1]
            records.append(
                {
                    "tokens": prompt + response,
                    "response_length": 3,
                    "loss_mask": [1, 1, 1],
                    "reward": float(sample % 2),
                    "rollout_log_probs": [-3.5, -3.5, -3.5],
                    "group_index": group,
                }
            )
    path = tmp_path / "given.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    report, printed = quickstart(tmp_path / "out", f"--trajectories={path}", "--small-steps=0")
    assert "solved" not in printed and report["solved_before"] is report["solved_after"] is None
    assert "per sync at lr" not in printed and report["bytes_per_sync_small_lr"] is None
    assert report["fingerprints_equal"] is True and report["reward_first"] == 0.5
    assert report["tokens_linear"] == 4 * sum(len(record["tokens"]) for record in records)
    assert report["tokens_packed"] < report["tokens_linear"] / 3
    losses = [step["loss"] for step in report["history"]]
    assert losses[3] < losses[0] - 0.1


def refused(*options):
    done = subprocess.run(
        [sys.executable, "-m", "examples.quickstart", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


def test_what_cannot_run_is_refused_with_the_way_out(tmp_path):
    path = tmp_path / "given.jsonl"
    path.write_text('{"tokens": [1, 2, 3], "response_length": 2, "loss_mask": [1, 1]}\n')
    assert refused(f"--trajectories={path}") == f"quickstart: --trajectories {path}: trajectory 0: no reward"
    assert refused("--ranks=3", "--tp=2").endswith(
        "--tp=2 --pp=1 takes a multiple of 2 ranks, there are 3: make quickstart NPROC=2 TP=2 PP=1"
    )


SPEAK = """
import logging, warnings
from examples.quickstart import quiet
quiet.hush(cuda={cuda})
for text in ("full scope is deprecated", "Apex is not installed. Falling back", "the norm is infinite"):
    warnings.warn(text)
for text in (*quiet.LOGGED, *quiet.ON_CPU, "the mask is lost"):
    logging.getLogger("megatron.core.x").warning("%s", text + " here")
logging.getLogger("megatron").info("building")
"""


@pytest.mark.parametrize("cuda", [False, True])
def test_warnings_reach_the_user_and_named_chatter_does_not(cuda):
    done = subprocess.run(
        [sys.executable, "-c", SPEAK.format(cuda=cuda)], cwd=ROOT, capture_output=True, text=True
    )
    shown = [line for line in done.stderr.splitlines() if not line.startswith(" ")]
    expected = ["<string>:6: UserWarning: the norm is infinite"]
    if cuda:
        expected += [f"WARNING megatron.core.x: {text} here" for text in ON_CPU]
    assert shown == [*expected, "WARNING megatron.core.x: the mask is lost here"]


def too_few_gpus():
    import torch

    from examples.quickstart import options

    told = []
    for started in (False, True):  # by `--ranks`, or by a launcher
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "device_count", lambda: 1)
            for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                patch.setenv(name, "2") if started else patch.delenv(name, raising=False)
            patch.setattr(sys, "argv", ["quickstart", *([] if started else ["--ranks=2"])])
            options.check_arguments(options.parser("").parse_args(), told.append)
    return told


def test_more_ranks_than_gpus_are_refused(world):
    message = "2 ranks take a GPU each, there are 1; CUDA_VISIBLE_DEVICES= runs them on the CPU"
    assert world(2, too_few_gpus) == [[message] * 2] * 2


REFUSED = {
    "--ranks=0": "--ranks: expected at least 1, got 0",
    "--group-size=1": "--group-size: expected at least 2, got 1",
    "--groups=0": "--groups: expected at least 1, got 0",
    "--steps=0 --small-steps=0": "--steps and --small-steps are both 0: nothing would be trained",
    "--tp=3": "--tp must divide 2 (key/value heads) and --pp 2 (layers), got --tp=3 --pp=1",
}

GIVEN = {
    "": "there are no trajectories",
    '{"reward": "high", "tokens": [1, 2], "response_length": 1}': (
        "trajectory 0: reward must be a finite number, got 'high'"
    ),
    '{"reward": NaN, "tokens": [1, 2], "response_length": 1}': (
        "trajectory 0: reward must be a finite number, got nan"
    ),
    '{"reward": 1, "tokens": [1, 2.5], "response_length": 1}': (
        "trajectory 0: tokens must be integers, got float64"
    ),
    '{"reward": 1, "tokens": [1, 2], "response_length": 1, "loss_mask": [0]}': (
        "no token is trained: every loss_mask is 0"
    ),
    '{"reward": 1, "tokens": [1, 999999], "response_length": 1}': (
        "token 999999: this model's vocabulary ends where the file's largest token does, and has at most "
        "262,144 entries"
    ),
}


def refusals(path):
    import argparse

    from examples.quickstart import options

    if os.environ["RANK"] != "0":
        return None  # the ranks would write the same file

    def refuse(parser, message):
        raise SystemExit(message)

    argparse.ArgumentParser.error, error = refuse, argparse.ArgumentParser.error
    argv, told = sys.argv, []
    try:
        for line in REFUSED:
            sys.argv = ["quickstart", *line.split()]
            with pytest.raises(SystemExit) as found:
                options.arguments("")
            told.append(str(found.value))
    finally:
        sys.argv, argparse.ArgumentParser.error = argv, error
    for text in GIVEN:
        path.write_text(text)
        with pytest.raises(SystemExit) as found:
            options.read_given(path)
        told.append(str(found.value))
    return told


def test_options_and_files_are_refused(world, tmp_path):
    """Before anything is started, with one line: in a world, because the options need megatron.core."""
    path = tmp_path / "given.jsonl"
    wanted = [*REFUSED.values(), *(f"quickstart: --trajectories {path}: {text}" for text in GIVEN.values())]
    assert world(2, refusals, path=path)[0] == wanted


def asked_case(shape):
    """The policy's step asks the dispatcher for exactly the case that the report names a backend for."""
    import torch

    from examples.quickstart import policy
    from megatron.core.transformer.tree_attention import select_backend
    from megatron.core.tree_training import Trajectory, TreeBatch
    from tests.dist.world import parallel

    with parallel(tp=2):
        shape = policy.Shape(**shape)
        trainer = policy.Policy(shape, 32, 64, 1e-3, "cpu")
        values = {"advantage": torch.ones(3), "rollout_log_probs": torch.zeros(3)}
        batch = TreeBatch.from_trajectories([Trajectory([5, 6, 7], [0, 1, 1], values)], pad_to_multiple_of=4)
        select_backend.cache_clear()
        trainer.step([batch])
        before = select_backend.cache_info().misses
        chosen = policy.attention_backend(shape, torch.device("cpu"))
        return chosen, before, select_backend.cache_info().misses


def test_the_reported_backend_is_that_of_the_step(world):
    shape = dict(layers=1, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48)
    assert world(2, asked_case, shape=shape) == [("reference", 1, 1)] * 2


def test_nan_is_the_worst():
    from examples.quickstart.report import worst

    nan = float("nan")
    assert worst(1.0, 2.0) == 2.0
    assert all(math.isnan(worst(*pair)) for pair in ((nan, 1.0), (1.0, nan)))
