"""The quickstart, shortened: the same loop and the same checks, in every layout it offers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

KEYS = """steps reward_first reward_last tokens_linear tokens_packed tree_vs_linear_loss_abs_diff
tree_vs_linear_grad_rel_diff dense_bytes delta_bytes syncs fingerprints_equal max_logit_diff device world_size
seconds""".split()


def quickstart(out, *options, ranks=1):
    launch = [sys.executable, "-m", "examples.quickstart"]
    if ranks > 1:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launch += ["-m", "examples.quickstart"]
    few = ["--steps=4", "--small-steps=2", "--groups=4", "--max-tokens=260", "--held-out=8"]
    done = subprocess.run(
        [*launch, *few, f"--out={out}", *options], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-6000:]
    report = json.loads((out / "report.json").read_text())
    assert set(KEYS) <= set(report)
    assert (out / "report.png").stat().st_size > 10_000
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
    assert all(step["sent_bytes"] >= 0.99 * step["dense_bytes"] for step in train if step["density"] > 0.5)
    assert all(0 < step["density"] < 0.2 for step in small)
    assert all(step["sent_bytes"] < 0.7 * step["dense_bytes"] for step in small)


@pytest.mark.parametrize(
    "ranks, layout", [(1, []), (2, ["--tp=2"]), (2, ["--pp=2"]), (2, [])], ids=["one", "tp2", "pp2", "dp2"]
)
def test_loop(tmp_path, ranks, layout):
    report, printed = quickstart(tmp_path, *layout, ranks=ranks)
    check(report, ranks)
    assert "syncs, fingerprints equal" in printed and "7, all" in printed


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
    report, _ = quickstart(tmp_path / "out", f"--trajectories={path}")
    assert report["fingerprints_equal"] is True and report["reward_first"] == 0.5
    assert report["tokens_linear"] == 6 * sum(len(record["tokens"]) for record in records)
    assert report["tokens_packed"] < report["tokens_linear"] / 3
    losses = [step["loss"] for step in report["history"]]
    assert losses[3] < losses[0] - 0.1


def test_a_file_without_rewards_is_refused(tmp_path):
    path = tmp_path / "given.jsonl"
    path.write_text('{"tokens": [1, 2, 3], "response_length": 2, "loss_mask": [1, 1]}\n')
    with pytest.raises(AssertionError, match="ValueError: trajectory 0: no reward"):
        quickstart(tmp_path / "out", f"--trajectories={path}")
