"""What the quickstart is told: options and given trajectories, refused before anything is started."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from examples.quickstart import policy, rollout
from megatron.core.tree_training import TreeBatch, read_jsonl

SMALL_LR = 1e-6
LARGEST_VOCABULARY = 1 << 18
"""Of given trajectories: larger than today's tokenizers. The model has no more rows than the file needs."""


def parser(text: str) -> argparse.ArgumentParser:
    """The options; ``text`` describes the program."""
    p = argparse.ArgumentParser(
        "quickstart",
        "make quickstart [NPROC=n] [TP=n] [PP=n] [ARGS='--option=value …'], options as of ARGS=--help",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--ranks", type=int, default=1, help="processes to start, unless a launcher did")
    p.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    p.add_argument("--pp", type=int, default=1, help="pipeline stages")
    p.add_argument("--steps", type=int, default=350, help="training steps")
    p.add_argument(
        "--small-steps", type=int, default=10, help=f"further steps at a learning rate of {SMALL_LR}"
    )
    p.add_argument(
        "--seconds", type=float, default=240, help="stop the training phase after this time at the latest"
    )
    p.add_argument("--groups", type=int, default=16, help="problems per step")
    p.add_argument("--group-size", type=int, default=8, help="sampled answers per problem")
    p.add_argument("--max-tokens", type=int, default=480, help="packed tokens in one micro-batch")
    p.add_argument("--lr", type=float, default=8e-4)
    p.add_argument(
        "--entropy-bonus",
        type=float,
        default=0.1,
        help="advantage per nat of a token's surprise; with less, a digit that early answers leave out "
        "may never be tried again",
    )
    p.add_argument("--held-out", type=int, default=128, help="problems of the evaluation")
    p.add_argument("--trajectories", type=Path, help="train on this JSON-lines file instead of sampling")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--out", type=Path, default=Path("build/quickstart"))
    return p


def arguments(text: str):
    """The command line, refused where it cannot run."""
    p = parser(text)
    args = p.parse_args()
    check_arguments(args, p.error)
    return args


def check_arguments(args, refuse) -> None:
    """Call ``refuse`` with what is wrong, before anything is started."""
    least = dict.fromkeys(("ranks", "tp", "pp", "groups", "held_out", "max_tokens"), 1)
    least |= {"steps": 0, "small_steps": 0, "group_size": 2}  # an advantage is against the rest of its group
    for name, bound in least.items():
        if (value := getattr(args, name)) < bound:
            refuse(f"--{name.replace('_', '-')}: expected at least {bound}, got {value}")
    if args.steps + args.small_steps == 0:
        refuse("--steps and --small-steps are both 0: nothing would be trained")
    shape, ranks = policy.Shape(), args.tp * args.pp
    world = int(os.environ.get("WORLD_SIZE", args.ranks))
    if shape.kv_heads % args.tp or shape.layers % args.pp:
        refuse(
            f"--tp must divide {shape.kv_heads} (key/value heads) and --pp {shape.layers} (layers), "
            f"got --tp={args.tp} --pp={args.pp}"
        )
    if world % ranks:
        refuse(
            f"--tp={args.tp} --pp={args.pp} takes a multiple of {ranks} ranks, there are {world}: "
            f"make quickstart NPROC={ranks} TP={args.tp} PP={args.pp}"
        )
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks)), torch.cuda.device_count()
    if torch.cuda.is_available() and here > gpus:
        refuse(f"{here} ranks take a GPU each, there are {gpus}; CUDA_VISIBLE_DEVICES= runs them on the CPU")


def read_given(path: Path):
    """Trajectories of a file, what they earned, the vocabulary they use and the longest of them."""
    try:
        trajectories, reward = rollout.given(read_jsonl(path))
        batch = TreeBatch.from_trajectories(trajectories)
        if not batch.num_loss_tokens:
            raise ValueError("no token is trained: every loss_mask is 0")
        if batch.max_token >= LARGEST_VOCABULARY:
            raise ValueError(
                f"token {batch.max_token}: this model's vocabulary ends where the file's largest token does, "
                f"and has at most {LARGEST_VOCABULARY:,} entries"
            )
    except (OSError, ValueError) as error:
        sys.exit(f"quickstart: --trajectories {path}: {error}")
    return trajectories, reward, batch.max_token + 1, max(batch.lengths)
