"""The rollout engine: a Hugging Face Qwen3 that samples answers and is updated by payloads alone."""

from __future__ import annotations

import math

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from examples.quickstart import task
from megatron.core.tree_training import Trajectory


def model(shape, vocabulary: int, positions: int, device) -> torch.nn.Module:
    """A Qwen3 of the policy's shape, bf16, with weights that nobody has set yet."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(shape.rope_base)},
        tie_word_embeddings=False,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=task.END,
        pad_token_id=task.PAD,
    )
    # Not .to(bfloat16): that would round the rotary frequencies too, and the two models would drift apart.
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()


@torch.no_grad()
def answer(engine, problems, samples: int = 1, greedy: bool = False):
    """Sample ``samples`` answers to every problem.

    Returns:
        ``(responses, log_probs)``: a list of token lists, each up to and with its end mark, and a list of
        lists of the log-probabilities they were drawn with; the samples of one problem stand together.
    """
    prompts = torch.tensor([p.prompt_tokens for p in problems], device=engine.device)
    prompts = prompts.repeat_interleave(samples, 0)
    # top_k=0: the library's default of 50 would bend the distribution on a larger vocabulary.
    how = dict(do_sample=False) if greedy else dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    out = engine.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=task.RESPONSE,
        return_dict_in_generate=True,
        output_logits=True,
        **how,
    )
    tokens = out.sequences[:, task.PROMPT :]
    log_probs = torch.stack(out.logits, 1).float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    responses, kept = [], []
    for row, values in zip(tokens.tolist(), log_probs.tolist(), strict=True):
        length = row.index(task.END) + 1 if task.END in row else len(row)
        responses.append(row[:length])
        kept.append(values[:length])
    return responses, kept


def collect(engine, problems, group_size: int, entropy_bonus: float):
    """One batch of experience: ``group_size`` sampled answers to each problem, with advantages.

    The advantage of a token is its own hit against the group's mean at that position, in units of the group's
    spread, plus ``entropy_bonus`` times its surprise (the score-function gradient of the entropy; without it
    this policy collapses to one constant answer).

    Returns:
        ``(trajectories, mean reward, share solved)``
    """
    responses, log_probs = answer(engine, problems, group_size)
    hits = torch.zeros(len(responses), task.RESPONSE)
    rewards, solved = [], []
    for i, response in enumerate(responses):
        asked = problems[i // group_size]
        hits[i, : len(response)] = torch.tensor(task.hits(response, asked))
        rewards.append(task.reward(response, asked))
        solved.append(task.solved(response, asked))
    groups = hits.view(len(problems), group_size, task.RESPONSE)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    advantages = advantages.reshape(len(responses), task.RESPONSE)
    surprise = sum(-sum(values) for values in log_probs) / sum(map(len, log_probs))

    trajectories = []
    for i, (response, drawn) in enumerate(zip(responses, log_probs, strict=True)):
        asked = problems[i // group_size]
        drawn = torch.tensor(drawn)
        prompt = torch.zeros(task.PROMPT)
        trajectories.append(
            Trajectory(
                tokens=asked.prompt_tokens + response,
                loss_mask=[0] * task.PROMPT + [1] * len(response),
                values={
                    "advantage": torch.cat(
                        [prompt, advantages[i, : len(response)] + entropy_bonus * (-drawn - surprise)]
                    ),
                    "rollout_log_probs": torch.cat([prompt, drawn]),
                },
            )
        )
    return trajectories, sum(rewards) / len(rewards), sum(solved) / len(solved)


def given(trajectories):
    """Trajectories from a file, each with its advantage: its reward against its group's, in units of spread.

    Returns:
        ``(trajectories, mean reward)``

    Raises:
        ValueError: there is no trajectory, or one without a number as ``reward``.
    """
    if not trajectories:
        raise ValueError("there are no trajectories")
    for i, t in enumerate(trajectories):
        if "reward" not in t.trajectory_values:
            raise ValueError(f"trajectory {i}: no reward")
        reward = t.trajectory_values["reward"]
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise ValueError(f"trajectory {i}: reward must be a finite number, got {reward!r}")
    rewards = torch.tensor([float(t.trajectory_values["reward"]) for t in trajectories])
    groups: dict = {}
    for i, t in enumerate(trajectories):
        groups.setdefault(t.trajectory_values.get("group_index"), []).append(i)
    out = []
    for members in groups.values():
        spread = rewards[members].std() if len(members) > 1 else torch.tensor(0.0)
        for i in members:
            t = trajectories[i]
            advantage = (rewards[i] - rewards[members].mean()) / (spread + 1e-4)
            drawn = t.values.get("rollout_log_probs")
            values = {
                "advantage": torch.full((len(t.tokens),), float(advantage)),
                "rollout_log_probs": torch.zeros(len(t.tokens))
                if drawn is None
                else torch.as_tensor(drawn).float(),
            }
            out.append(Trajectory(tokens=t.tokens, loss_mask=t.loss_mask, values=values))
    return out, float(rewards.mean())
