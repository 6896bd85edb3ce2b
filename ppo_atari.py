"""PPO for Atari games: pictures, a convolutional network, games played in worker processes.

    python ppo_atari.py --env Breakout                     # 10M steps, takes hours
    python ppo_atari.py --env Pong
    python ppo_atari.py --eval runs/Pong__ppo_atari__1__<time> --video
    tensorboard --logdir runs

How to read this file
    This is `ppo.py` for Atari games, with the functions in the same order. GAE, the losses and the
    machinery are those of ppo.py. What is new: `Game` makes pictures of an Atari game, `Model` is a
    convolutional network, `rollout` computes values of pictures in pieces, and the layers compute
    in bfloat16 where that is faster. All cores, or a GPU, do the update. What only vectors need is
    not here: masks, memory, normalisers and other kinds of actions.

The algorithm
    Each iteration plays T steps in N games with the current policy, which is then called π_old, and
    makes K passes (epochs) of minibatch gradient steps over what was recorded:

    δ_t = r_t + γ V(s_{t+1}) (1 − terminated_t) − V(s_t)                         PPO, Eq. (12)
    Â_t = δ_t + γλ (1 − done_t) Â_{t+1}                        PPO, Eq. (11);  GAE, Eq. (16)
    R_t = Â_t + V(s_t)
    r_t(θ) = π_θ(a_t|s_t) / π_old(a_t|s_t)                                        PPO, Sec. 3
    L^CLIP(θ) = E[min(r_t(θ) Â_t, clip(r_t(θ), 1−ε, 1+ε) Â_t)]                   PPO, Eq. (7)
    loss = E[−L^CLIP + c_v ½ (V_θ(s_t) − R_t)² − c_e H(π_θ(·|s_t))]              PPO, Eq. (9)

    The reward r_t is the sign of the change of the score; r_t(θ) is the probability ratio.

Notation and shapes
    T steps (--num-steps), N games (--num-envs), K epochs, B minibatches of M rows, n actions. What
    is stored at index t, `terminated` and `truncated` too, belongs to the action at step t.

Papers, and departures from them
    "PPO" is Schulman et al. 2017, Proximal policy optimization algorithms (arXiv 1707.06347). "GAE"
    is Schulman et al. 2016 (arXiv 1506.02438). Pictures and network are those of Mnih et al. 2015,
    Human-level control through deep reinforcement learning. Network, rollout and loss have the
    constants of labml's first annotated version, but for Adam's ε (1e-5) and biases (0 at first).
    Games are as in Gymnasium's AtariPreprocessing, with signs of rewards, FIRE and lives besides.
    Eq. (9) has no factor ½ before the squared error; this code has it.
"""

import argparse
import copy
import csv
import ctypes
import datetime
import functools
import io
import json
import math
import multiprocessing.connection
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path

import cv2
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

# ------------------------------------------------------------------------------------ options
# The options of the algorithm. The section "command line" has those of running: folders, workers,
# evaluation, resuming.


def add_ppo_options(parser):
    """Add the options of PPO that all scripts share. `make_parser` may set other defaults."""
    add = parser.add_argument_group("PPO", "Usual ranges stand in brackets.").add_argument
    count = integer(1)
    positive = real(1e-300)
    not_negative = real(0)
    fraction = real(0, 1)
    modes = ("minibatch", "batch", "off")
    add("--num-envs", type=integer(1, 100_000), default=4, help="N, environments (4 to 64)")
    add("--learning-rate", type=positive, default=2.5e-4, help="Adam's step size (1e-5 to 1e-3)")
    add("--anneal-lr", action=FLAG, default=True, help="lower the rate linearly to 0 over the run")
    add("--gamma", type=fraction, default=0.99, help="γ, discount per step (0.9 to 0.9997)")
    add("--gae-lambda", type=fraction, default=0.95, help="λ, 0: low variance, 1: no bias (0.95)")
    add("--num-minibatches", type=count, default=4, help="B, minibatches per epoch; divides N · T")
    add("--update-epochs", type=count, default=4, help="K, passes over a rollout (3 to 30)")
    add("--norm-adv", choices=modes, default="minibatch", help="over what to normalise advantages")
    add("--clip-coef", type=positive, default=0.2, help="ε, clip r_t(θ) at 1 ± ε (0.1 to 0.3)")
    add("--clip-vloss", action=FLAG, default=True, help="clip V's change, too, at ±ε (absolute)")
    add("--ent-coef", type=not_negative, default=0.01, help="c_e, weight of entropy (0 to 0.01)")
    add("--vf-coef", type=not_negative, default=0.5, help="c_v, weight of the value loss (0.5, 1)")
    add("--max-grad-norm", type=positive, default=0.5, help="clip the gradient to this global norm")
    add(
        "--target-kl",
        type=not_negative,
        default=0.0,
        help="stop an update above this KL(π_old, π) (0.01 to 0.05); 0: never",
    )


def add_own_options(parser):
    """Add the options that only ppo_atari.py has."""
    add = parser.add_argument_group("ppo_atari.py").add_argument
    count = integer(1)
    probability = real(0, 1)
    precisions = ("auto", "fp32", "bf16")
    add(
        "--env",
        type=game_name,
        default="Breakout",
        help="game, also as BreakoutNoFrameskip-v4 or ALE/Breakout-v5",
    )
    add("--num-steps", type=integer(1, 100_000), default=128, help="T, steps per game and rollout")
    add("--frameskip", type=count, default=4, help="frames that an action lasts; Gymnasium's v5: 4")
    add(
        "--sticky-actions",
        type=probability,
        default=0.0,
        help="probability that a frame repeats the last action; v5: 0.25",
    )
    add(
        "--full-action-space",
        action=FLAG,
        default=False,
        help="use all 18 actions, also those that the game ignores",
    )
    add(
        "--episodic-life",
        action=FLAG,
        default=True,
        help="an episode ends with a life; Gymnasium: off",
    )
    add(
        "--noop-max",
        type=integer(0, 1000),
        default=30,
        help="a game begins with 1 to so many no-ops; v5: 0",
    )
    add(
        "--fire",
        action=FLAG,
        default=True,
        help="an episode starts with FIRE if the game has it; Gymnasium: off",
    )
    add(
        "--anneal-clip",
        action=FLAG,
        default=True,
        help="lower ε linearly to 0 over the run, as the learning rate",
    )
    add("--precision", choices=precisions, default="auto", help="auto: bf16 if that is faster")
    add(
        "--compile",
        action=FLAG,
        default=False,
        help="torch.compile the loss, for GPUs; it needs a C++ compiler",
    )


# ------------------------------------------------------------------------------------ train
def train(args):
    """Train with these options. Returns the `Run`.

    If a game fails, the run is saved, and GameError is raised.
    """
    num_threads = torch.get_num_threads()
    # A worker that is forked off must not find several threads.
    torch.set_num_threads(1)
    # The weights are drawn from torch's global generator, noise and minibatches from another one.
    torch.manual_seed(args.seed)
    model = make_model(args)
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = make_optimizer(model, args)

    with AtariRun(args, model, optimizer, generator) as run:
        torch.set_num_threads(num_threads)
        if RANK == 0 and not args.quiet:
            print(settings(args, model), flush=True)
        run.begin()
        while run.goes_on():
            remaining = 1 - run.share_done()
            if args.anneal_lr:
                scale_learning_rates(optimizer, remaining)
            clip_coef = args.clip_coef
            if args.anneal_clip:
                clip_coef = args.clip_coef * remaining

            # Sample: T steps in each of N games with the policy π_old.
            buffer, episodes = rollout(model, run.pool, args, generator)

            # Judge: was an action better than the value function expected?
            batch = make_batch(buffer, model, args)
            row = {"explained_variance": explained_variance(batch)}

            # Learn: K epochs of minibatch steps towards the better actions.
            row |= update(model, optimizer, batch, args, clip_coef, generator)
            run.end_iteration(row, episodes, global_step=args.num_envs * args.num_steps)
        run.finish()
    return run


def make_optimizer(model, args):
    """Return Adam over all parameters."""
    return torch.optim.Adam(model.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)


def scale_learning_rates(optimizer, factor):
    """Set the rate of each parameter group to its initial rate times a factor."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * factor


def settings(args, model):
    """Return the line that a run starts with: what is played, and how."""
    names = ["frameskip", "sticky_actions", "full_action_space", "episodic_life", "noop_max"]
    names += ["fire", "num_workers"]
    shown = ", ".join(f"{name} {getattr(args, name)}" for name in names)
    precision = "bf16" if model.bf16 else "fp32"
    return f"{args.env}: {shown}, precision {precision}"


# ------------------------------------------------------------------------------------ rollout
def rollout(model, pool, args, generator):
    """Play T steps in all N games with the current policy.

    Returns the buffer and the list of (return, length) of the games that ended, of all ranks. The
    buffer holds tensors (T, N, ...): obs, actions, logprobs, values, next_values, rewards,
    terminated, truncated. On a CPU the next rollout overwrites its pictures.
    """
    # Draw the noise of all T · N actions first, in this process, and give every worker the part of
    # its games. The actions do not depend on how many workers there are, but for rounding.
    noise = model.head.noise(args.num_steps * args.num_envs, generator)
    noise = noise.view(args.num_steps, args.num_envs, -1)
    pool.buffer["noise"][:] = noise.chunk(NUM_RANKS, dim=1)[RANK]  # this rank's games
    pool.play(model, args.num_steps)

    buffer = {}
    for name in model.stored + RESULTS:
        recorded = torch.from_numpy(pool.buffer[name])
        if name == "next_obs":
            # Few of these pictures are needed, so they stay where they are.
            next_obs = recorded
        else:
            buffer[name] = recorded.to(model.device)
    add_values(model, buffer, next_obs)
    buffer = gathered(buffer)
    # This takes the columns on ended episodes out of the buffer.
    episodes = finished_episodes(buffer)
    return buffer, episodes


# What a step leads to, as the games write it and the buffer keeps it. To record another number,
# name it here, give its type in `make_pool`, and write it in `Game`.
RESULTS = ["next_obs", "rewards", "terminated", "truncated"]
RESULTS += ["ended", "episode_return", "episode_length"]


def play(games, num_steps, sample=True, until_finished=False):
    """Play the games of one process: act, step, record, `num_steps` times.

    Every step in this script is taken here: in rollouts and evaluations, in workers and in the main
    process. The policy samples its actions from the buffer's noise, or takes its mode. With
    `until_finished` it stops when every game has ended once since it was started.
    """
    arrays = games.arrays  # what the games show now, (N, ...)
    buffer = games.buffer  # what is recorded, (T, N, ...)

    # Here autocast casts the weights once, not in each step.
    with games.model.autocast():
        for t in range(num_steps):
            noise = buffer["noise"][t] if sample else None
            games.model.act(arrays, noise)
            for name in games.model.stored:  # what the policy saw and did
                buffer[name][t] = arrays[name]

            games.step()
            for name in RESULTS:  # what came of it
                buffer[name][t] = arrays[name]

            if until_finished and arrays["finished"].all():
                break


@torch.no_grad()
def add_values(model, buffer, next_obs):
    """Add values V(s_t), next_values V(s_{t+1}) and logprobs log π_old(a_t|s_t) to the buffer.

    Passes over all steps give them, since no weight has changed while they were played. They have
    the update's own arithmetic (but for --compile), so its first ratios are 1, however the workers
    round.
    """
    # In pieces of 32 steps: on a CPU that is faster than a thousand pictures at once.
    pieces = [model(obs) for obs in buffer["obs"].split(32)]
    pi = torch.cat([piece[0] for piece in pieces])
    values = torch.cat([piece[1] for piece in pieces])
    buffer["values"] = values
    buffer["logprobs"] = model.head.log_prob(pi, buffer["actions"])

    # V(s_{t+1}) is the next row's value, but for a time limit's end and the rollout's last step.
    # Where a step `terminated` the episode, gae ignores it.
    next_values = values.roll(-1, dims=0)
    apart = buffer["truncated"].clone()
    apart[-1] = True
    pictures = next_obs[apart.cpu()].to(model.device)
    next_values[apart] = model(pictures)[1]
    buffer["next_values"] = next_values


def finished_episodes(buffer):
    """Take the ends of episodes out of the buffer. Returns a list of (return, length)."""
    ended = buffer.pop("ended")
    returns = buffer.pop("episode_return")[ended]
    lengths = buffer.pop("episode_length")[ended]
    return list(zip(returns.tolist(), lengths.tolist()))


# ------------------------------------------------------------------------------------ GAE
def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimation. All tensors are (T, N), and so are the advantages.

    `next_values[t]` is V of the state that step t led to. It counts for nothing if the step
    `terminated` the episode. Both kinds of end stop the sum over later steps.
    """
    assert all(x.shape == rewards.shape for x in (values, next_values, terminated, truncated))
    # PPO, Eq. (12): δ_t = r_t + γ V(s_{t+1}) (1 − terminated_t) − V(s_t)
    delta = rewards + gamma * next_values * ~terminated - values
    # γλ (1 − done_t)
    decay = gamma * gae_lambda * ~(terminated | truncated)

    # GAE, Eq. (16): Â_t = δ_t + γλ (1 − done_t) Â_{t+1}. At the last step it is δ_t, where
    # V(s_{t+1}) stands for all later rewards.
    # Lists of the steps' rows, (N,), are faster to index than tensors.
    delta = list(delta)
    decay = list(decay)
    A = list(delta)
    for t in reversed(range(len(A) - 1)):
        A[t] = delta[t] + decay[t] * A[t + 1]
    return torch.stack(A)


def make_batch(buffer, model, args):
    """Add advantages and returns and flatten (T, N, ...) to (T · N, ...)."""
    names = ("rewards", "values", "next_values", "terminated", "truncated")
    columns = [buffer[name] for name in names]
    advantages = gae(*columns, args.gamma, args.gae_lambda)
    batch = {name: buffer[name] for name in (*model.inputs, "actions", "logprobs", "values")}
    batch["advantages"] = advantages
    # V's target in PPO, Eq. (9): R_t = Â_t + V(s_t), V's estimate plus the advantage
    batch["returns"] = advantages + buffer["values"]
    return {name: column.flatten(0, 1) for name, column in batch.items()}


def explained_variance(batch):
    """1 − Var(R − V) / Var(R): 1 is a perfect value function, 0 no better than a constant."""
    variance = batch["returns"].var()
    unexplained = (batch["returns"] - batch["values"]).var()
    return float(1 - unexplained / variance) if variance > 0 else math.nan


# ------------------------------------------------------------------------------------ losses
def losses(model, batch, clip_coef, clip_vloss):
    """PPO's loss terms, row by row.

    `batch` holds obs (M, ...) and the model's other inputs, actions (M, ...), and (M,): logprobs of
    π_old, values of V before the update, advantages, returns. A recurrent policy's are (T, M, ...).
    Returns pg_loss, v_loss, entropy and logratio = log r_t(θ), each (M,).
    """
    pi, values = model(**{name: batch[name] for name in model.inputs})
    logprobs = model.head.log_prob(pi, batch["actions"])
    logratio = logprobs - batch["logprobs"]
    advantages = batch["advantages"]
    returns = batch["returns"]
    assert logratio.shape == values.shape == advantages.shape == returns.shape

    # PPO, Eq. (7): −min(r_t(θ) Â_t, clip(r_t(θ), 1−ε, 1+ε) Â_t)
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    pg_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)

    # PPO, Eq. (9), second term: ½ (V_θ(s_t) − R_t)²
    v_loss = (values - returns).square()
    if clip_vloss:
        # Not in the paper: (V_old + clip(V_θ − V_old, −ε, ε) − R_t)², where that is larger. So V
        # gains nothing by moving away from V_old by more than ε in one update.
        change = (values - batch["values"]).clamp(-clip_coef, clip_coef)
        v_loss = torch.max(v_loss, (batch["values"] + change - returns).square())
    v_loss = 0.5 * v_loss

    return pg_loss, v_loss, model.head.entropy(pi, logprobs), logratio


def minibatch_loss(model, mb, args, clip_coef):
    """Return the loss of a minibatch, and a dict of the numbers to log, all scalar tensors."""
    loss_terms = compiled_losses() if args.compile else losses
    pg_loss, v_loss, entropy, logratio = loss_terms(model, mb, clip_coef, args.clip_vloss)
    pg_loss = pg_loss.mean()
    v_loss = v_loss.mean()
    entropy = entropy.mean()
    approx_kl, clipfrac = policy_change(logratio, clip_coef)

    # PPO, Eq. (9): loss = E[−L^CLIP + c_v ½ (V_θ − R)² − c_e H]
    loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy
    row = {"policy_loss": pg_loss, "value_loss": v_loss, "entropy": entropy}
    row |= {"approx_kl": approx_kl, "clipfrac": clipfrac}
    return loss, row


def policy_change(logratio, clip_coef):
    """Return an estimate of KL(π_old, π) and the share of the ratios beyond 1 ± ε.

    The estimate is E[x − 1 − log x] ≥ 0 with the ratios x = r_t(θ). It is unbiased, as E[x] = 1 for
    actions of π_old: http://joschu.net/blog/kl-approx.html
    """
    ratio = logratio.exp()
    approx_kl = (ratio - 1 - logratio).mean()
    clipfrac = ((ratio - 1).abs() > clip_coef).float().mean()
    return approx_kl, clipfrac


# ------------------------------------------------------------------------------------ update
def update(model, optimizer, batch, args, clip_coef, generator):
    """Take K epochs of minibatch steps on the rows of `batch`. Returns the means of the losses."""
    if args.norm_adv == "batch":
        batch = batch | {"advantages": normalised(batch["advantages"])}
    # A float would be compiled in.
    clip_coef = torch.tensor(clip_coef, device=model.device)

    logged = []
    for _ in range(args.update_epochs):
        epoch, completed = run_epoch(model, optimizer, batch, args, clip_coef, generator)
        logged += epoch
        if not completed:
            break
    return mean_row(logged)


def run_epoch(model, optimizer, batch, args, clip_coef, generator):
    """Take one gradient step for each minibatch, unless the policy moves beyond --target-kl.

    Returns the list of the minibatches' numbers, and whether the epoch was completed.
    """
    logged = []
    for mb in minibatches(batch, args, generator):
        loss, row = minibatch_loss(model, mb, args, clip_coef)
        logged.append({name: averaged(value.detach()) for name, value in row.items()})
        if args.target_kl and logged[-1]["approx_kl"] > args.target_kl:
            return logged, False
        gradient_step(model, optimizer, loss, args.max_grad_norm)
    return logged, True


def minibatches(batch, args, generator):
    """Shuffle the rows and cut them into the B minibatches of an epoch, dicts of (M, ...).

    With several ranks each gets its share of every minibatch, normalised by the whole minibatch.
    """
    order = torch.randperm(len(batch["obs"]), generator=generator).to(batch["obs"].device)
    for rows in order.chunk(args.num_minibatches):
        # Gather for each minibatch: all pictures in a new order would take much memory.
        mb = {name: column.index_select(0, rows) for name, column in batch.items()}
        if args.norm_adv == "minibatch":
            mb["advantages"] = normalised(mb["advantages"])
        yield own_rows(mb)


def normalised(advantages):
    """Return advantages with mean 0 and σ 1: one learning rate then suits rewards of any scale."""
    std, mean = torch.std_mean(advantages)
    return (advantages - mean) / (std + 1e-8)


def gradient_step(model, optimizer, loss, max_grad_norm):
    """Take one step of the optimizer down the loss, with the gradient's norm clipped."""
    optimizer.zero_grad()
    loss.backward()
    average_gradients(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    # A step along a gradient that is not finite would destroy the weights.
    if not math.isfinite(norm):
        raise FloatingPointError("no finite gradient: lower --learning-rate?")
    optimizer.step()


def mean_row(rows):
    """Return the means of a list of dicts of scalar tensors, as a dict of numbers."""
    means = {}
    for name in rows[0]:
        means[name] = float(torch.stack([row[name] for row in rows]).mean())
    return means


# ------------------------------------------------------------------------------------ model
def make_model(args):
    """Return the Model for the game, its weights drawn from torch's global generator."""
    with closing(make_env(args.env, full_action_space=args.full_action_space)) as env:
        action_space = env.action_space
    device = args.device
    # Take cuda if there is a GPU for each rank of this machine.
    if device == "auto":
        enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if enough else "cpu"
    device = torch.device(device)
    bf16 = args.precision == "bf16"
    if args.precision == "auto":
        bf16 = has_bf16(device)
    # A library may have set another default type.
    return Model(action_space, bf16).to(device, torch.float32)


def has_bf16(device):
    """Return whether a device computes in bfloat16 faster than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return False
    able = torch.cpu.get_capabilities()
    # Intel's processors with AVX512-BF16 but without AMX are slower in bfloat16.
    is_fast_without_amx = able.get("avx512_bf16") and not able.get("avx512_fp16")
    return bool(able.get("amx_bf16") or is_fast_without_amx)


class Model(nn.Module):
    """Policy and value function: three convolutions, 512 features, a head for each.

    The layers under the heads compute in bfloat16 if `bf16`; weights and heads are float32.
    """

    inputs = ["obs"]  # what `forward` takes
    stored = ["obs", "actions"]  # what a rollout records of the policy

    def __init__(self, action_space, bf16=False):
        super().__init__()
        self.action_space = action_space
        self.bf16 = bf16
        self.actor = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),  # (M, 32, 20, 20)
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),  # (M, 64, 9, 9)
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3)),  # (M, 64, 7, 7)
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.critic = self.actor  # both heads see the same features
        self.head = Categorical(512, int(action_space.n))
        layer_init(self.head.logits, gain=0.1)  # labml's √0.01 in place of 0.01
        self.value = layer_init(nn.Linear(512, 1), gain=1.0)

    @property
    def device(self):
        """The device that the model computes on."""
        return self.value.weight.device

    def forward(self, obs):
        """Return log-probabilities pi (..., n) and values (...) of pictures (..., 84, 84, 4)."""
        h = self.features(obs)
        return self.head(h), self.value(h).squeeze(-1)

    def features(self, obs):
        """Return what the heads see, (..., 512), of pictures (..., 84, 84, 4) in uint8."""
        assert obs.shape[-3:] == (84, 84, 4) and obs.dtype == torch.uint8
        x = obs.flatten(0, -4).permute(0, 3, 1, 2)  # (M, 4, 84, 84), in memory channels last
        with self.autocast():
            dtype = torch.bfloat16 if self.uses_bf16() else torch.float32
            x = x.to(dtype)
            h = self.actor(x.div_(255))
        return h.float().view(*obs.shape[:-3], -1)

    def uses_bf16(self):
        """Whether layers compute in bfloat16; not for ONNX, whose runtimes may not have it."""
        return self.bf16 and not torch.onnx.is_in_onnx_export()

    def autocast(self, enabled=True):
        """Return the context in which layers compute in bfloat16, if they do."""
        enabled = enabled and self.uses_bf16()
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    @torch.no_grad()
    def policy(self, obs, noise=None):
        """Return actions (M,) for pictures (M, 84, 84, 4), and None for a memory that is not there.

        The actions are samples made from noise (M, n), or the policy's mode without it.
        """
        h = self.features(obs)
        # The head computes in float32, in `play` too.
        with self.autocast(enabled=False):
            return self.head.sample(self.head(h), noise), None

    def act(self, arrays, noise=None):
        """Set the actions for what the games show: samples from noise (N, n), or the mode.

        `arrays` holds NumPy arrays (N, ...), and noise is one too.
        """
        obs = torch.from_numpy(arrays["obs"]).to(self.device)
        if noise is not None:
            noise = torch.from_numpy(noise).to(self.device)
        actions, _ = self.policy(obs, noise)
        arrays["actions"][:] = actions.cpu().numpy()


# ------------------------------------------------------------------------ heads and normalisers
def layer_init(layer, gain=2**0.5):
    """Initialise a linear or convolutional layer: orthogonal weight times `gain`, zero bias.

    √2 keeps the scale of features through hidden layers. A policy's last layer has 0.01, so that
    its first actions are nearly uniform, or have means near 0.
    """
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Categorical(nn.Module):
    """Policy head for n actions."""

    def __init__(self, features, n):
        super().__init__()
        self.n = n
        self.logits = layer_init(nn.Linear(features, n), gain=0.01)

    def forward(self, h):
        """Return log-probabilities (M, n) for features (M, F)."""
        return self.logits(h).log_softmax(-1)

    def noise(self, batch, generator):
        """Return standard Gumbel noise, (batch, n): −log of exponential noise."""
        exponential = torch.empty(batch, self.n, dtype=torch.float32)
        return -exponential.exponential_(generator=generator).log()

    def sample(self, logp, noise=None):
        """Return actions (M,): argmax(log π + Gumbel noise) is a sample of π.

        Without noise it is the mode, the most likely action.
        """
        scores = logp if noise is None else logp + noise
        return scores.argmax(-1)

    def log_prob(self, logp, action):
        """Return log π(a|s), (M,)."""
        return logp.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self, logp, logprobs=None):
        """Return H = −Σ π log π, (M,). `logprobs` is not needed."""
        return -(logp.exp() * logp).sum(dim=-1)


# ------------------------------------------------------------------------------------ speed
@functools.cache
def compiled_losses():
    """Return `losses` compiled into CUDA graphs. On a GPU that halves an update."""
    return torch.compile(losses, mode="reduce-overhead")


def keep_freed_memory():
    """Have glibc keep the memory that is freed.

    New pages for every large array cost up to a quarter of the time.
    """
    M_TRIM_THRESHOLD = -1
    M_MMAP_MAX = -4
    with suppress(AttributeError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


# ------------------------------------------------------------------------------------ games
def game_name(name):
    """Return a game's short name: `BreakoutNoFrameskip-v4`, `ALE/Breakout-v5` → `Breakout`."""
    import ale_py

    gym.register_envs(ale_py)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
    game = re.sub(r"^(ale_py:)?ALE/|(NoFrameskip|Deterministic)?-v\d+$", "", name)
    for known in gym.registry:
        match = re.fullmatch(r"ALE/(.*)-v5", known)
        if match and match[1].lower() == game.lower():
            return match[1]
    return game


def make_env(env_id, sticky_actions=0.0, full_action_space=False, render_mode=None):
    """Return the Gymnasium env of a game, one frame per step."""
    env = gym.make(
        f"ALE/{game_name(env_id)}-v5",
        frameskip=1,
        repeat_action_probability=sticky_actions,
        full_action_space=full_action_space,
        render_mode=render_mode,
        obs_type="ram",  # it is small: `Game` looks at the screen itself, not at every frame
        disable_env_checker=True,
    )
    env.metadata = env.metadata | {"render_fps": 60}
    return env


def to_env(action, space, as_array=np.asarray):
    """Return an action as the env takes it: clipped to a Box's bounds, counted from `start`.

    The policy's log π is of the action before clipping. `as_array` is torch.as_tensor for tensors.
    """
    if isinstance(space, gym.spaces.Box):
        return action.clip(as_array(space.low), as_array(space.high))
    return action + as_array(np.int64(getattr(space, "start", 0)))


class Game:
    """An Atari game as the policy sees it (Mnih et al. 2015). It is row n of the arrays of all.

    An action lasts `frameskip` frames. A picture is the maximum of the last two frames, grey,
    shrunk to 84 × 84. The last four pictures are the observation, (84, 84, 4). Rewards are the sign
    of the score.

    An episode ends with a life, and the next one goes on with the same game unless that is over.
    `ended`, the return (the true score) and the length (in steps) are of whole games, not of lives.
    `finished` says that a game has ended since `start`, and `first_return` is its score.
    """

    def __init__(self, args, n, seed, arrays, video=None, **options):
        self.name = args.env
        self.n = n
        self.seed = seed
        self.args = args
        self.arrays = arrays
        self.env = make_env(args.env, args.sticky_actions, args.full_action_space, **options)
        if video:
            self.env = first_episode_video(self.env, video)
        self.ale = self.env.unwrapped.ale
        self.obs = arrays["obs"][n]  # (84, 84, 4)

        actions = self.env.unwrapped.get_action_meanings()
        self.noop_max = args.noop_max if actions[0] == "NOOP" else 0  # in Backgammon it is FIRE
        self.fire = actions.index("FIRE") if args.fire and "FIRE" in actions else None

        self.screens = np.zeros((2, *self.ale.getScreenDims()), np.uint8)  # the last, one before
        self.game_over = True
        self.lives = 0
        self.score = 0.0
        self.length = 0
        self.last_game = None  # score and length of the game that the last step ended, if it did

    def start(self):
        """Start the first game of the seed."""
        self.arrays["finished"][self.n] = False
        self.reset(self.seed)

    def resume(self, state):
        """Take up the game of a saved state, or start a new one if that is not possible.

        Returns None, or a line that says why the game is a new one.
        """
        if state is None:
            self.start()
            return "its state was not saved"
        try:
            self.set_state(pickle.loads(state))
            return None
        except Exception as error:
            # The env's packages may have changed, so it may be any error.
            self.start()
            return one_line(error)

    def reset(self, seed=None):
        """Start an episode: with the next life, or a new game if it is over or with a seed."""
        if self.game_over or seed is not None:
            self.new_game(seed)
        else:
            self.press(0)
        if self.fire is not None and not self.game_over:
            self.press(self.fire)
        # The presses may have ended it.
        if self.game_over:
            self.reset()
        else:
            self.obs[:] = self.picture()[..., np.newaxis]

    def new_game(self, seed):
        """Start a new game; score and length of the one before stay in `last_game`."""
        self.last_game = (self.score, self.length)
        self.score = 0.0
        self.length = 0
        self.env.reset(seed=seed)
        noops = 0
        if self.noop_max:
            noops = self.env.unwrapped.np_random.integers(self.noop_max) + 1
        for _ in range(noops):
            _, reward, terminated, truncated, _ = self.env.step(0)
            self.score += reward
            if terminated or truncated:
                self.score = 0.0
                self.env.reset()

        self.game_over = False
        self.lives = self.ale.lives()
        self.ale.getScreenGrayscale(self.screens[0])
        self.screens[1] = 0

    def press(self, action):
        """Hold an action for `frameskip` frames. Returns score, whether terminated, truncated."""
        score = 0.0
        for frames_left in reversed(range(self.args.frameskip)):
            _, reward, terminated, truncated, info = self.env.step(action)
            score += reward
            self.game_over = terminated or truncated
            if self.args.episodic_life and info["lives"] < self.lives:
                terminated = True
            self.lives = info["lives"]
            if terminated or truncated:
                break
            if frames_left < 2:
                self.ale.getScreenGrayscale(self.screens[frames_left])
        self.score += score
        return score, terminated, truncated

    def picture(self):
        """Return what the last two frames show, (84, 84)."""
        np.maximum(*self.screens, out=self.screens[0])
        return cv2.resize(self.screens[0], (84, 84), interpolation=cv2.INTER_AREA)

    def step(self):
        """Take one step, and start the next episode if this one has ended.

        `next_obs` is then the ended one's last observation, and `obs` the next one's first.
        """
        a = self.arrays
        n = self.n
        self.last_game = None
        score, terminated, truncated = self.press(int(a["actions"][n]))
        self.length += 1
        self.obs[..., :-1] = self.obs[..., 1:]
        self.obs[..., -1] = self.picture()
        a["next_obs"][n] = self.obs
        a["rewards"][n] = np.sign(score)
        a["terminated"][n] = terminated
        a["truncated"][n] = truncated and not terminated

        if terminated or truncated:
            self.reset()
        ended = self.last_game is not None  # `new_game` has set it
        game = self.last_game if ended else (self.score, self.length)
        a["ended"][n] = ended
        a["episode_return"][n], a["episode_length"][n] = game
        if ended and not a["finished"][n]:
            a["finished"][n] = True
            a["first_return"][n] = a["episode_return"][n]

    def get_state(self):
        """Return, as bytes, what `set_state` needs beside the arrays to go on with this game.

        ALE does not tell a sticky action, and of Qbert and Tetris it keeps less than it needs.
        """
        state = {
            "seed": self.seed,
            "screens": self.screens,
            "game_over": self.game_over,
            "lives": self.lives,
            "score": self.score,
            "length": self.length,
            "ale": self.ale.cloneState(include_rng=True),
            "np_random": self.env.unwrapped.np_random,
        }
        return pickle.dumps(state)

    def set_state(self, state):
        """Go on from the state of a game like this one."""
        self.env.reset()
        self.env.unwrapped.np_random = state["np_random"]
        self.ale.restoreState(state["ale"])
        self.seed = state["seed"]
        self.screens = state["screens"]
        self.game_over = state["game_over"]
        self.lives = state["lives"]
        self.score = state["score"]
        self.length = state["length"]

    def close(self):
        """Close the env."""
        self.env.close()


def first_episode_video(env, folder):
    """Return the env with a wrapper that films its first episode, a file .mp4 in the folder."""
    return gym.wrappers.RecordVideo(
        env, folder, episode_trigger=lambda episode: episode == 0, disable_logger=True
    )


class Games:
    """The games of one process, those in `rows` of all N, and the model that plays them."""

    def __init__(self, args, model, seeds, rows, arrays, buffer, **options):
        # A worker has one core.
        if multiprocessing.parent_process():
            cv2.setNumThreads(1)
        own = slice(rows[0], rows[-1] + 1)
        self.first_row = rows[0]
        self.seed(int(seeds[0]))
        self.model = model
        self.arrays = {name: array[own] for name, array in arrays.items()}
        self.buffer = {name: array[:, own] for name, array in buffer.items()}
        self.at_work = None  # the game that is at work, and what it does
        self.games = [Game(args, n, int(seeds[n]), arrays, **options) for n in rows]

    def call(self, command, *arguments, **options):
        """Carry out a command. If a game fails, GameError says which one, and in what."""
        try:
            return getattr(self, command)(*arguments, **options)
        except (Exception, SystemExit) as error:
            # Without a game at work the failure is not a game's.
            if self.at_work is None:
                raise
            game, doing = self.at_work
            what = f"{game.name} (seed {game.seed}) failed in {doing}: {one_line(error)}"
            raise GameError(f"{what}\n{traceback.format_exc()}") from None

    def start(self, states=None):
        """Start all games, or resume them from the N saved `states`.

        Returns a line for each game whose saved state was of no use.
        """
        problems = []
        for game in self.games:
            self.at_work = (game, "reset")
            if states is None:
                game.start()
            else:
                problems.append(game.resume(states[game.n]))
        self.at_work = None
        return [problem for problem in problems if problem]

    def step(self):
        """Step one game after the other."""
        for game in self.games:
            self.at_work = (game, "step")
            game.step()
        self.at_work = None

    def seed(self, seed):
        """Seed this process's generators, which the games may draw from."""
        seed_generators(seed, RANK, self.first_row)

    def play(self, num_steps, **how):
        """Play a number of steps, see the function `play`."""
        play(self, num_steps, **how)

    def get_state(self):
        """Return the list of the games' states."""
        return [game.get_state() for game in self.games]

    def close(self):
        """Close all games, also after one that fails in it."""
        failure = None
        for game in self.games:
            try:
                game.close()
            except (Exception, SystemExit) as error:
                self.at_work = (game, "close")
                failure = error
        if failure:
            raise failure


def seed_generators(*entropy):
    """Seed the generators of `random`, NumPy and torch: an environment may draw from them."""
    drawn = np.random.SeedSequence(entropy).generate_state(3).tolist()
    random.seed(drawn[0])
    np.random.seed(drawn[1])
    torch.manual_seed(drawn[2])


@contextmanager
def kept_generators():
    """Leave the generators of this process as they were before the block."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def draw_seeds(count, *entropy):
    """Return seeds (count,) below 2³¹, which an environment in C can take, too."""
    return np.random.SeedSequence(entropy).generate_state(count) % 2**31


def game_seeds(args, num_starts):
    """Return the seeds of this rank's games, (N,): other ones each time that games start anew."""
    seeds = draw_seeds(args.num_envs, args.seed, num_starts)
    return np.split(seeds, NUM_RANKS)[RANK]


def make_pool(args, model, seeds, num_workers, num_steps=None, **options):
    """Return the pool of one game per seed, with a buffer for `num_steps` steps (default: T)."""
    keep_freed_memory()
    frames = (84, 84, 4)

    # Shape and type of what one game shows and does.
    entries = {"obs": (frames, "uint8"), "next_obs": (frames, "uint8"), "actions": ((), "int64")}
    entries["rewards"] = ((), "float32")
    for name in ("terminated", "truncated", "ended", "finished"):
        entries[name] = ((), "bool")
    for name in ("episode_return", "first_return"):
        entries[name] = ((), "float64")
    entries["episode_length"] = ((), "int64")
    entries["noise"] = ((model.head.n,), "float32")

    T = num_steps or args.num_steps
    shown = sorted(set(entries) - {"noise"})
    arrays = layout(entries, shown, (len(seeds),))
    buffer = layout(entries, [*model.stored, *RESULTS, "noise"], (T, len(seeds)))

    player = model_of_workers(model) if num_workers else model
    make_games = functools.partial(Games, args, player, seeds, **options)
    return WorkerPool(make_games, arrays, buffer, len(seeds), num_workers, player)


def layout(entries, names, leading):
    """Return {name: (shape, type)} of the arrays `names`: leading axes, then an entry's own."""
    found = {}
    for name in names:
        shape, dtype = entries[name]
        found[name] = (leading + shape, dtype)
    return found


def model_of_workers(model):
    """Return the model that workers play with, in shared memory, where they see every update.

    A model on a GPU stays there, and a copy for the CPU plays: `WorkerPool.play` keeps it current.
    """
    if model.device.type != "cpu":
        bf16 = model.bf16
        model = copy.deepcopy(model).cpu()
        model.bf16 = bf16 and has_bf16(model.device)
    return model.share_memory()


# ------------------------------------------------------------------------------------ worker pool
class GameError(RuntimeError):
    """A game or a worker failed: a line that says which and how, then the game's own traceback."""


def num_cores():
    """Return the number of cores that this process may use, its share if torchrun started it."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


class WorkerPool:
    """N games in `num_workers` processes, or in this one if that is 0.

    `make_games(rows, arrays, buffer)` makes the games in `rows`. What games and policy show each
    other lies in `arrays`, the recorded steps in `buffer`. All processes share both; only commands
    and answers go through pipes. `player` is the model that plays the games. Raises GameError when
    a game raises or a worker dies.
    """

    def __init__(
        self, make_games, arrays, buffer, num_envs, num_workers, player, start_method=None
    ):
        if start_method is None:
            # A fork shares the memory of all imported libraries, but it is safe on Linux only.
            start_method = "fork" if sys.platform == "linux" else "spawn"
        context = multiprocessing.get_context(start_method)
        shared = [shared_memory(context, names) for names in (arrays, buffer)]
        self.arrays, self.buffer = [as_arrays(memory) for memory in shared]
        self.player = player
        self.games = None
        self.workers = []
        self.rows = []  # the games of each worker
        self.busy = False  # whether a command was sent and not answered

        if num_workers == 0:
            self.games = make_games(range(num_envs), self.arrays, self.buffer)
            return
        for rows in np.array_split(range(num_envs), min(num_workers, num_envs)):
            pipe, end = context.Pipe()
            child = context.Process(target=work, args=(end, make_games, rows, shared), daemon=True)
            child.start()
            end.close()
            self.workers.append((pipe, child))
            self.rows.append(rows)

    def play(self, model, num_steps, **how):
        """Have the model play all games for a number of steps, see the function `play`."""
        if self.player is not model:
            self.player.load_state_dict(model.state_dict())
        self.call("play", num_steps, **how)

    def call(self, command, *arguments, **options):
        """Have all games carry out a command. Returns the list of the workers' answers."""
        self.busy = True
        if self.games is not None:
            answers = [self.games.call(command, *arguments, **options)]
        else:
            answers = self.ask_workers((command, arguments, options))
        self.busy = False
        return answers

    def ask_workers(self, message):
        """Send a message to all workers. Returns the list of their answers."""
        for pipe, _ in self.workers:
            # A dead worker takes no message.
            with suppress(BrokenPipeError):
                pipe.send(message)

        answers = []
        for i, (pipe, process) in enumerate(self.workers):
            try:
                answer = pipe.recv()
            except (EOFError, OSError):
                process.join()
                games = f"games {self.rows[i][0]} to {self.rows[i][-1]}"
                line = f"worker {i} with {games} died with exit code {process.exitcode}"
                raise GameError(line) from None
            if isinstance(answer, GameError):
                raise answer
            answers.append(answer)
        return answers

    def close(self):
        """Close the games and end the processes, after 30 seconds (Ctrl-C: 5) busy ones too."""
        if self.games is not None:
            self.games.call("close")
            return
        patience = 5 if sys.exc_info()[0] is KeyboardInterrupt else 30
        end = time.monotonic() + patience
        # At the block's end, whatever happens, all processes that are left are killed.
        with ExitStack() as stack:
            for pipe, process in self.workers:
                stack.callback(process.join)
                stack.callback(process.kill)
                with suppress(OSError):
                    pipe.send(("close", (), {}))
            for _, process in self.workers:
                process.join(max(0, end - time.monotonic()))
            if any(process.is_alive() for _, process in self.workers):
                report("killed: workers with busy games")


def shared_memory(context, names):
    """Return {name: (shape, type, memory)} for arrays {name: (shape, type)}."""
    shared = {}
    for name, (shape, dtype) in names.items():
        # All arrays have multiples of 64 bytes, and are aligned alike: rounding may depend on it.
        size = math.prod(shape) * np.dtype(dtype).itemsize // 64 * 64 + 64
        shared[name] = (shape, dtype, context.RawArray("b", size))
    return shared


def as_arrays(shared):
    """Return {name: array} over shared memory."""
    return {name: np.ndarray(*array) for name, array in shared.items()}


def work(pipe, make_games, rows, shared):
    """Be a worker: make its games, have them carry out one command after the other, close them."""
    # Both signals are the main process's to handle. SIGTERM is not ignored by SIG_IGN, which
    # programs that a game starts would inherit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    # A worker has one core, and torch's threads do not survive a fork.
    torch.set_num_threads(1)

    parent = multiprocessing.parent_process().sentinel
    games = None
    command = None
    try:
        games = make_games(rows, *[as_arrays(memory) for memory in shared])
        while command != "close" and pipe in multiprocessing.connection.wait([pipe, parent]):
            command, arguments, options = pipe.recv()
            pipe.send(games.call(command, *arguments, **options))
    # SystemExit and KeyboardInterrupt, too, would end the process without a message.
    except BaseException as error:
        if not isinstance(error, GameError):
            what = f"a worker failed: {one_line(error)}"
            error = GameError(f"{what}\n{traceback.format_exc()}")
        with suppress(OSError):
            # The parent may be gone.
            pipe.send(error)
    if games is not None and command != "close":
        with suppress(Exception):
            # A game may fail in this, too.
            games.call("close")


# ------------------------------------------------------------------------------------ ranks
# torchrun starts several processes, the ranks, that train one model. Each rank has its share of the
# games, receives the rows of all ranks and takes its share of every minibatch. Then the ranks
# average their gradients.

TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
RANK = int(os.environ["RANK"]) if TORCHRUN else 0
NUM_RANKS = int(os.environ["WORLD_SIZE"]) if TORCHRUN else 1


def report(message):
    """Print a message, once for all ranks. It is lost if the output is closed."""
    if RANK == 0:
        with suppress(OSError):
            print(message, file=sys.stderr, flush=True)


def own_rows(mb):
    """Return this rank's share of a minibatch."""
    if NUM_RANKS == 1:
        return mb
    return {name: column[RANK::NUM_RANKS] for name, column in mb.items()}


def gathered(buffer):
    """Return a buffer, tensors (T, N, ...), with the games of all ranks side by side."""
    if NUM_RANKS == 1:
        return buffer
    parts = gathered_objects({name: column.cpu() for name, column in buffer.items()})
    whole = {}
    for name, column in buffer.items():
        whole[name] = torch.cat([part[name] for part in parts], dim=1).to(column.device)
    return whole


def gathered_objects(value):
    """Return the list of the ranks' values."""
    values = [value] * NUM_RANKS
    if NUM_RANKS > 1:
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error:
            raise GameError(f"rank {RANK} has lost another one: {one_line(error)}") from None
    return values


def averaged(tensor):
    """Return the mean of the ranks' tensors."""
    if NUM_RANKS > 1:
        # `all_reduce` writes into its tensor.
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        tensor /= NUM_RANKS
    return tensor


def average_gradients(model):
    """Replace the gradients by the means of the ranks' gradients."""
    if NUM_RANKS > 1:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        vector = nn.utils.parameters_to_vector(gradients)
        nn.utils.vector_to_parameters(averaged(vector), gradients)


# ------------------------------------------------------------------------------------ run folder
COUNTERS = {"iteration": 0, "global_step": 0, "wall_seconds": 0.0}
CHARTS = ["episodic_return", "episodic_length", "eval_return", "eval_cut", "learning_rate"]
LOSSES = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance"]
# TensorBoard shows these under CleanRL's names, where it has them. Any other number has its own
# name. Ours are means, of an iteration's minibatches and of the last 100 episodes. CleanRL's are
# not, so curves may differ in level.
TAGS = {"sps": "charts/SPS"}
TAGS |= {name: f"charts/{name}" for name in CHARTS}
TAGS |= {name: f"losses/{name}" for name in LOSSES}
SHOWN = ["sps", "episodic_return", "eval_return", "eval_cut"]  # in the status line


class Run(AbstractContextManager):
    """The life of a training run: it opens, counts, stops when asked to, saves and closes.

    `pool` has the games, `run_dir` is the folder, `history` the list of all logged rows, `counters`
    say what is complete, and `signal` is the number of the signal that stopped the run, or None.
    """

    def __init__(self, args, model, optimizer, generator):
        self.args = args
        self.model = model
        self.optimizer = optimizer
        self.generator = generator
        self.run_dir = Path(args.resume or run_path(args))

        self.counters = dict(COUNTERS)
        self.recent = []  # (return, length) of the last 100 episodes
        self.num_starts = 0  # how often games have started, which their seeds depend on
        self.signal = None
        self.saved = None  # the iteration of the last checkpoint
        self.began = None  # when the current iteration began
        self.asked = None  # when a signal asked the run to stop
        self.pool = None  # the games of training
        self.eval_pool = None  # the games of the last evaluation
        self.saved_games = None  # those of a run that is resumed

        self.logger = Logger(self.run_dir, args)
        # The stack closes what is open if this block fails.
        with ExitStack() as self.stack:
            self.open()
            self.stack = self.stack.pop_all()

    @property
    def iteration(self):
        """How many iterations are complete."""
        return self.counters["iteration"]

    @property
    def history(self):
        """The list of all logged rows, dicts."""
        return self.logger.history

    def share_done(self):
        """Return which share of the run's length is complete."""
        return self.iteration / self.args.num_iterations

    def open(self):
        """Catch signals, restore a run that is resumed, make the games and open the files."""
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(signum, self.stop)
                self.stack.callback(signal.signal, signum, before)

        if self.args.resume:
            self.saved_games = self.restore()
        if NUM_RANKS > 1:
            backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backends, timeout=datetime.timedelta(days=1))
            self.stack.callback(dist.destroy_process_group)

        seeds = game_seeds(self.args, self.num_starts)
        pool = make_pool(self.args, self.model, seeds, self.args.num_workers)
        self.pool = self.stack.enter_context(closing(pool))
        if RANK == 0:
            self.logger.open(self.stack, self.counters["global_step"] + 1)

    def start_games(self):
        """Start the games, or take up the saved ones of a run that is resumed."""
        if not self.args.resume:
            self.pool.call("start")
            return
        if self.saved_games is None:
            self.pool.call("start")
            report("all games start new episodes: the interrupted ones were not saved")
            return

        arrays, states = self.saved_games
        # The saved games may be large.
        self.saved_games = None
        for name, array in arrays.items():
            self.pool.arrays[name][:] = array
        problems = sum(self.pool.call("start", states), [])
        if problems:
            report(f"{len(problems)} of {len(states)} games start new episodes: {problems[0]}")

    def stop(self, signum, _):
        """Note a signal. A repeat within a second is ignored, a Ctrl-C after that stops at once."""
        if self.signal is None:
            self.signal = signum
            self.asked = time.monotonic()
            report("stopping after this iteration; Ctrl-C once more to stop now")
        elif signum == signal.SIGINT and NUM_RANKS == 1 and time.monotonic() > self.asked + 1:
            report("stopped at once; iterations since the last checkpoint may be lost")
            raise KeyboardInterrupt

    def begin(self):
        """Start the games, and log an evaluation before the first iteration."""
        self.start_games()
        for row in self.logger.take_unfinished():
            self.log(row)
        if self.args.eval_every and not self.history and not self.signal:
            self.log(dict(self.counters))

    def goes_on(self):
        """Whether another iteration is due: the run is not complete, and no rank is to stop.

        The ranks tell each other of signals here, and the clock of the iteration starts.
        """
        self.began = time.perf_counter()
        # A signal that one rank has received stops all ranks.
        agreed = max(gathered_objects(self.signal or 0))
        self.signal = agreed or self.signal
        return self.share_done() < 1 and not agreed

    def finish(self):
        """Save the last iteration, unless a checkpoint has it."""
        if self.saved != self.iteration:
            self.save()

    def end_iteration(self, row, episodes, **counts):
        """Add up the `counts`, log the row and the episodes' (return, length), save at times."""
        seconds = time.perf_counter() - self.began
        counts |= {"iteration": 1, "wall_seconds": seconds}
        for name, count in counts.items():
            self.counters[name] += count

        self.recent = (self.recent + episodes)[-100:]
        mean_return, mean_length = np.mean(self.recent or [(math.nan, math.nan)], axis=0).tolist()
        row |= self.counters
        row |= {"episodic_return": mean_return, "episodic_length": mean_length}
        row["sps"] = round(counts["global_step"] / seconds)
        row["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        self.log(row)
        if self.args.save_every and self.iteration % self.args.save_every == 0:
            self.save()

    def log(self, row):
        """Evaluate if it is due, and write the row."""
        self.history.append(row)
        if RANK > 0:
            return
        every = self.args.eval_every
        if every and (self.iteration % every == 0 or self.share_done() >= 1):
            # If it stays NaN, --resume evaluates again.
            row["eval_return"] = math.nan
            self.evaluate(row)
        self.logger.write(row, self.share_done())

    def evaluate(self, row):
        """Add an evaluation to the row, unless a signal cuts it short."""
        # The games are new each time, so that wrappers have not seen more than they do in --eval.
        with kept_generators(), closing(make_eval_pool(self.args, self.model)) as self.eval_pool:
            returns, cut = evaluate(self.model, self.eval_pool, run=self)
        if self.signal:
            return
        row["eval_return"] = float(returns.mean())
        if cut:
            row["eval_cut"] = cut

    def save(self, with_games=True):
        """Write the checkpoint; all ranks call this."""
        games = self.games_to_save() if with_games else None
        if RANK == 0:
            # A checkpoint must not be ahead of TensorBoard's file.
            self.logger.flush()
            Checkpoint(self.run_dir).save(self.state(), games)
        self.saved = self.iteration
        if with_games:
            # Barrier: no rank may exit before rank 0 has saved, or torchrun would kill it.
            gathered_objects(None)

    def state(self):
        """Return all that a resumed run needs but for the games: tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "counters": self.counters,
            "starts": self.num_starts,
            "history": json.loads(json.dumps(self.history, default=float)),  # plain numbers
            "recent": self.recent,
        }

    def restore(self):
        """Take over what the checkpoint has. Returns (arrays, states) of the games, or None."""
        state, games = Checkpoint(self.run_dir).load()
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.counters = state["counters"]
        self.num_starts = state["starts"] + 1
        self.recent = state["recent"]
        self.logger.restore(state["history"])
        self.saved = self.iteration
        if self.share_done() >= 1:
            report("run complete; longer: --num-iterations N")
        return games

    def games_to_save(self):
        """Return (arrays, states) of every rank's games."""
        states = sum(self.pool.call("get_state"), [])
        return gathered_objects((self.pool.arrays, states))

    def __exit__(self, kind, _, trace):
        """Close everything. First save if `train` is done, or if its failure allows it."""
        with self.stack:
            # After a second Ctrl-C the state is whole if games were at work: no update had begun.
            pools = [pool for pool in (self.pool, self.eval_pool) if pool]
            in_games = kind is KeyboardInterrupt and any(pool.busy for pool in pools)
            unsaved = self.saved != self.iteration
            state_is_whole = kind is None or in_games
            failed_outside = kind in (GameError, BrokenPipeError)
            if failed_outside or (unsaved and state_is_whole):
                nobody_reads_the_status = kind is BrokenPipeError and NUM_RANKS == 1
                self.save(with_games=kind is None or nobody_reads_the_status)


class AtariRun(Run):
    """A run whose evaluations show in TensorBoard where the last game has ended."""

    def evaluate(self, row):
        """Add an evaluation to the row, unless a signal cuts it short."""
        super().evaluate(row)
        arrays = self.eval_pool.arrays
        last = arrays["ended"].argmax()
        picture = arrays["next_obs"][last, ..., -1]
        self.logger.events.add_image("eval/end", picture, row["global_step"], dataformats="HW")


class Logger:
    """Writes a run's rows to progress.csv, TensorBoard and the terminal, and keeps them."""

    def __init__(self, run_dir, args):
        self.run_dir = run_dir
        self.args = args
        self.history = []
        self.columns = list(COUNTERS | TAGS)  # progress.csv has these, and one for any new key
        self.unfinished = []

    def take_unfinished(self):
        """Return the rows whose evaluation a stop had cut short. They are to be logged again."""
        rows = self.unfinished
        self.unfinished = []
        return rows

    def restore(self, history):
        """Take over the rows of a run that is resumed."""
        self.history = history
        if history and math.isnan(history[-1].get("eval_return", 0)):
            self.unfinished = [history.pop()]

    def open(self, stack, first_step):
        """Write config.json, open progress.csv and TensorBoard's file; the stack closes them."""
        # TensorBoard is slow to import, and only training needs it.
        from torch.utils.tensorboard import SummaryWriter

        self.run_dir.mkdir(parents=True, exist_ok=bool(self.args.resume))
        options = write_config(self.run_dir, self.args)
        file = (self.run_dir / "progress.csv").open("w", buffering=1, newline="")  # line by line
        self.file = stack.enter_context(file)
        self.rewrite()

        # TensorBoard drops what a stopped run had logged beyond its last checkpoint.
        purge_step = first_step - len(self.unfinished)
        self.events = SummaryWriter(str(self.run_dir), purge_step=purge_step)
        stack.callback(self.events.close)
        self.events.file_writer.add_summary(hparams_summary(options))
        if not self.args.quiet:
            stack.callback(print, f"run folder: {self.run_dir}")

    def write(self, row, share_done):
        """Write the newest row of the history, logged when that share of the run is complete."""
        new = [name for name in row if name not in self.columns]
        if new:
            self.columns += new
            self.rewrite()
        else:
            self.csv.writerow(row)

        for name, value in row.items():
            known_by_step = name in COUNTERS and name not in TAGS
            if not known_by_step and math.isfinite(value):
                self.events.add_scalar(TAGS.get(name, name), value, row["global_step"])
        if not self.args.quiet:
            print(self.status(row, share_done), flush=True)

    def rewrite(self):
        """Write progress.csv anew, with a column for every key of the history's rows."""
        for row in self.history:
            self.columns += [name for name in row if name not in self.columns]
        self.file.seek(0)
        self.file.truncate()
        self.csv = csv.DictWriter(self.file, self.columns)
        self.csv.writeheader()
        self.csv.writerows(self.history)

    def status(self, row, share_done):
        """Return the status line of a row."""
        done = row["iteration"]
        total = self.args.num_iterations
        line = f"update {done}/{total}" if total else f"update {done}  {share_done:.0%}"
        line += f"  steps {row['global_step']:,}"
        for name in SHOWN:
            if name in row:
                line += f"  {name} {row[name]:,.6g}"
        # A run without a fixed number of iterations may begin with short ones, which say little
        # about the rest.
        if done and (total or share_done > 0.1):
            left = row["wall_seconds"] * max(0, 1 / share_done - 1)
            line += f"  ETA {datetime.timedelta(seconds=round(min(left, 1e9)))}"
        return line

    def flush(self):
        """Write what TensorBoard's writer holds back."""
        self.events.flush()


# An older version of this script, whose runs cannot be resumed, has no such entry in a checkpoint.
NEWEST_ENTRY = "starts"


class Checkpoint:
    """The file checkpoint.pt of a run's folder: tensors, plain values, and games as bytes.

    The games are pickled. Only --resume unpickles them, so --eval runs no code from the file.
    """

    def __init__(self, run_dir):
        self.path = Path(run_dir) / "checkpoint.pt"

    def save(self, state, games):
        """Write a run's state. `games` holds (arrays, states) of every rank's games, or is None."""
        if games is not None:
            games = torch.frombuffer(bytearray(pickle.dumps(games)), dtype=torch.uint8)
        file = io.BytesIO()
        torch.save(state | {"games": games}, file)
        write_file(self.path, file.getvalue())

    def read(self):
        """Return a run's state, its games as bytes; ValueError if its weights are not finite."""
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        if not all(weights.isfinite().all() for weights in state["model"].values()):
            raise ValueError(f"{self.path} has NaN or infinity among its weights")
        return state

    def load(self):
        """Return a run's state, and (arrays, states) of this rank's games.

        The second is None if a game had failed, if the run had another number of ranks, or if
        packages have changed so that the games cannot be unpickled.
        """
        state = self.read()
        try:
            ranks = pickle.loads(state["games"].numpy().tobytes())
        except Exception:
            # What is unpickled may raise anything.
            return state, None
        games = ranks[RANK] if len(ranks) == NUM_RANKS else None
        return state, games


def run_path(args):
    """Return the path of a new run's folder, with an underscore for what may not be in a name."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    script = Path(__file__).stem
    name = args.run_name or f"{Path(args.env).name[-100:]}__{script}__{args.seed}__{stamp}"
    return Path(args.log_dir) / re.sub(r"[^\w.=,+-]+", "_", name)


def write_config(run_dir, args):
    """Write config.json: options, command, versions, folder. Returns the options that it keeps."""
    options = {name: value for name, value in vars(args).items() if name not in NOT_KEPT}
    here = Path(__file__).resolve().parent
    # Where git is missing its output is empty.
    git = subprocess.run("git rev-parse HEAD", shell=True, cwd=here, capture_output=True, text=True)
    versions = {module.__name__: module.__version__ for module in (torch, gym, np)}
    versions["python"] = sys.version.split()[0]
    versions["git_commit"] = git.stdout.strip() or None
    config = {"options": options, "command": sys.argv, "versions": versions}
    config["folder"] = os.getcwd()
    write_file(run_dir / "config.json", json.dumps(config, indent=2).encode())
    return options


def hparams_summary(options):
    """Return TensorBoard's table of the options. SummaryWriter.add_hparams would make a new run."""
    from torch.utils.tensorboard import summary

    plain = {}
    for name, value in options.items():
        # A flag is an int, too, so `isinstance` would take it for a number.
        is_number = type(value) in (int, float)
        plain[name] = value if is_number else str(value)
    return summary.hparams(plain, {})[1]


def write_file(path, content):
    """Write bytes to a file atomically: if this fails, by a full disk say, the old file stays."""
    with path.with_suffix(".partial").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


# ------------------------------------------------------------------------------------ evaluation
EVAL_SEED = 10_000  # evaluation games have their own seeds, the same in every run
EVAL_STEPS = 27_000  # an evaluation takes no more steps, so that it always ends; ALE's own limit
EVAL_CHUNK = 50  # steps between two looks at whether the run was asked to stop


def make_eval_pool(args, model, episodes=None, **options):
    """Return the pool of evaluation games."""
    seeds = EVAL_SEED + np.arange(episodes or args.eval_episodes)
    return make_pool(args, model, seeds, 0, EVAL_CHUNK, **options)


def evaluate(model, pool, generator=None, run=None):
    """Play an episode in every game with the policy's mode, or with samples from a generator.

    Returns the returns (E,), and how many episodes were cut off: after EVAL_STEPS, or because the
    `run` was asked to stop.
    """
    arrays = pool.arrays
    sample = generator is not None
    pool.call("seed", EVAL_SEED)
    pool.call("start")
    for done in range(0, EVAL_STEPS, EVAL_CHUNK):
        if run is not None and run.signal:
            break
        if sample:
            noise = model.head.noise(EVAL_CHUNK * len(arrays["obs"]), generator)
            pool.buffer["noise"][:] = noise.view(pool.buffer["noise"].shape)
        num_steps = min(EVAL_CHUNK, EVAL_STEPS - done)
        pool.play(model, num_steps, sample=sample, until_finished=True)
        if arrays["finished"].all():
            break

    return first_returns(arrays), int((~arrays["finished"]).sum())


def first_returns(arrays):
    """Return the returns of the games' first episodes since their start, so far if cut off."""
    return np.where(arrays["finished"], arrays["first_return"], arrays["episode_return"])


def evaluate_run(args):
    """Evaluate the checkpoint of a run, as --eval says. Returns the returns, (E,)."""
    run_dir = Path(args.eval)
    model = make_model(args)
    model.load_state_dict(Checkpoint(run_dir).read()["model"])
    generator = torch.Generator().manual_seed(EVAL_SEED) if args.sample else None

    with closing(make_eval_pool(args, model)) as pool:
        returns, cut = evaluate(model, pool, generator)
        inputs = {name: pool.arrays[name][:1] for name in model.inputs if name != "starts"}
    what = f"{len(returns)} episodes of {Path(args.env).name}"
    if cut:
        what += f", {cut} cut off at {EVAL_STEPS:,} steps"
    print(f"return {returns.mean():.4f} ± {returns.std():.4f} over {what}")

    if args.export_onnx:
        export_onnx(run_dir / "policy.onnx", model, inputs)
        print(f"policy: {run_dir / 'policy.onnx'}")
    if args.video:
        film(run_dir / "video.mp4", args, model, generator)
        print(f"video: {run_dir / 'video.mp4'}")
    return returns


def film(path, args, model, generator):
    """Write a film of one evaluation episode; GameError if the env gives no pictures for one."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        options = {"render_mode": "rgb_array", "video": f"{folder}/video"}
        try:
            with closing(make_eval_pool(args, model, episodes=1, **options)) as pool:
                evaluate(model, pool, generator)
            (found,) = Path(folder).glob("video/*.mp4")
            os.replace(found, path)
        except Exception as error:
            needed = "render should return uint8 pictures (H, W, 3)"
            line = f"argument --video: no film, see README: {needed}; {one_line(error)}"
            raise GameError(line) from None


class ExportedPolicy(nn.Module):
    """The policy's mode as a function of tensors: what `torch.onnx.export` writes."""

    def __init__(self, model, inputs):
        super().__init__()
        self.model = model
        self.inputs = inputs

    def forward(self, *tensors):
        """Return the action as the env takes it, and with a memory its next state."""
        action, state = self.model.policy(**dict(zip(self.inputs, tensors, strict=True)))
        space = self.model.action_space
        # Clip in the Box's precision, as in rollouts.
        if isinstance(space, gym.spaces.Box):
            action = action.to(torch.as_tensor(space.low).dtype)
        action = to_env(action, space, torch.as_tensor)
        return action if state is None else (action, state)


def export_onnx(path, model, inputs):
    """Write the policy as ONNX. Its inputs are those of `inputs`, arrays (1, ...), by their names.

    They are obs, action_mask and state (zeros at an episode's start), as far as the model has them;
    the outputs are action and next_state. The first axis of each is the batch.
    """
    outputs = ["action", "next_state"] if "state" in inputs else ["action"]
    tensors = tuple(torch.from_numpy(array) for array in inputs.values())
    policy = ExportedPolicy(model.cpu(), list(inputs))
    with warnings.catch_warnings():
        # The exporter warns that it has a successor.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            policy,
            tensors,
            str(path),
            input_names=list(inputs),
            output_names=outputs,
            dynamic_axes={name: {0: "batch"} for name in (*inputs, *outputs)},
            dynamo=False,
        )


# ------------------------------------------------------------------------------------ command line
# These options may change when a run is resumed or evaluated.
MAY_CHANGE = ["device", "num_workers", "total_timesteps", "num_iterations"]
MAY_CHANGE += ["eval_every", "eval_episodes", "save_every"]
# These options are not kept in config.json.
NOT_KEPT = ["resume", "eval", "sample", "video", "export_onnx", "quiet"]
FLAG = argparse.BooleanOptionalAction  # --x and --no-x

EXAMPLES = """
examples:
  python ppo_atari.py --env Breakout                       train, for hours
  python ppo_atari.py --env Pong --total-timesteps 3000000     train, for less
  python ppo_atari.py --resume RUN_DIR --num-workers 8     go on, with more processes
  python ppo_atari.py --eval RUN_DIR --video               evaluate, and film a game
"""


def make_parser():
    """Return the parser of the command line; without usage, so that an error is one line."""
    parser = argparse.ArgumentParser(
        Path(__file__).name,
        usage=argparse.SUPPRESS,
        description=__doc__.partition("\n")[0],
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add_own_options(parser)
    add_ppo_options(parser)
    add_run_options(parser)
    parser.set_defaults(num_workers=num_cores(), num_envs=8, clip_coef=0.1)
    return parser


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the examples as they are."""


def add_run_options(parser):
    """Add the options of running that all scripts of the family share."""
    group = parser.add_argument_group("run")
    add = group.add_argument
    count = integer(1)
    natural = integer(0)
    many = integer(1, 100_000)
    add("--seed", type=integer(0, 2**63 - 1), default=1, help="seed of all generators")
    add("--device", default="auto", help="auto, cpu, cuda or mps; auto: cpu, or cuda for Atari")
    add("--num-workers", type=natural, default=0, help="processes that play; 0: this one plays")
    add("--log-dir", type=os.path.abspath, default="runs", help="folder of the runs' folders")
    add("--run-name", help="name of the run's folder, if not env__script__seed__time")
    add("--eval-every", type=natural, default=0, help="iterations between evaluations; 0: never")
    add("--eval-episodes", type=many, default=16, help="episodes of an evaluation")
    add("--save-every", type=natural, default=50, help="iterations between checkpoints; 0: at end")
    add("--sample", action="store_true", help="with --eval: sample actions, not the policy's mode")
    add("--video", action="store_true", help="with --eval: also write video.mp4")
    add("--export-onnx", action="store_true", help="with --eval: also write policy.onnx")
    add("--quiet", action="store_true", help="print no status lines")

    add = group.add_mutually_exclusive_group().add_argument
    add("--resume", type=os.path.abspath, help="folder of a run to resume, with its own options")
    add("--eval", type=os.path.abspath, help="folder of a run whose policy's mode is evaluated")

    add = group.add_mutually_exclusive_group().add_argument
    add("--total-timesteps", type=count, help="steps of all envs (ppo.py: 500,000, Atari: 10M)")
    add("--num-iterations", type=count, help="length of the run in iterations")


def integer(low, high=math.inf):
    """Return an argparse type: an integer from low to high."""
    return number(int, low, high)


def real(low=-math.inf, high=math.inf):
    """Return an argparse type: a number from low to high, within float32's range."""
    return number(float, low, high)


def number(kind, low, high):
    """Return an argparse type: a `kind` from low to high, below 1e38."""

    def parse(text):
        value = kind(text)
        if low <= value <= high and abs(value) < 1e38:
            return value
        raise ValueError

    parse.__name__ = f"{kind.__name__} from {low} to {high}"  # argparse says "invalid int from"
    return parse


def parse_args(argv=None):
    """Parse and check the command line (default: the program's)."""
    parser = make_parser()
    args = parse_with_run(parser, argv)
    # This is an error if there is no such game.
    make_env(args.env).close()
    rows = args.num_envs * args.num_steps
    check_rows(parser, args, rows)
    check_normalised(parser, args, rows)
    if args.total_timesteps or args.num_iterations is None:
        args.num_iterations = max(1, (args.total_timesteps or 10_000_000) // rows)
    if args.compile and not args.eval:
        check_compiler(args)
    return args


def check_compiler(args):
    """Raise torch's own error if there is no C++ compiler."""
    bias = make_model(args).value.bias
    torch.compile(lambda x: x + 1)(bias)


def parse_with_run(parser, argv):
    """Parse argv; with --resume or --eval that run's options are the defaults, and most stay."""
    args = parser.parse_args(argv)
    check_eval_options(parser, args)
    run_dir = args.resume or args.eval
    if run_dir:
        args = options_of_run(parser, argv, args, run_dir, MAY_CHANGE)
    check_device(args)
    if RANK == 0 and not run_dir:
        check_run_name(parser, args)
    return args


def check_eval_options(parser, args):
    """Refuse what makes sense only with --eval, and several ranks with it."""
    if not args.eval and (args.sample or args.video or args.export_onnx):
        parser.error("argument --sample, --video, --export-onnx: only with --eval")
    if args.eval and NUM_RANKS > 1:
        parser.error("argument --eval: takes one process, not torchrun")
    if args.export_onnx:
        import onnx  # noqa: F401, torch needs it, and says so late
    if args.video:
        import moviepy  # noqa: F401, Gymnasium needs it


def options_of_run(parser, argv, args, run_dir, may_change):
    """Return the options of a run, with those of argv that may change; refuse others."""
    config = {}
    try:
        config |= json.loads((Path(run_dir) / "config.json").read_text())
        options = config["options"]
        if "env" not in options:
            raise ValueError("config.json names no env")
        known = set(vars(args)) - set(NOT_KEPT)
        missing = known - set(options)
        unknown = set(options) - known
        options = {name: value for name, value in options.items() if name in known}
        # Another length replaces the run's.
        if any(getattr(args, name) for name in LENGTHS):
            options |= dict.fromkeys(LENGTHS)
        parser.set_defaults(**options)
        own = parser.parse_args([])
        args = parser.parse_args(argv)
        for name in sorted(set(options) - set(may_change)):
            value = getattr(own, name)
            if getattr(args, name) != value:
                name = name.replace("_", "-")
                parser.error(f"argument --{name}: the run has {value}, which cannot change")
        state = Checkpoint(run_dir).read()
        make_model(args).load_state_dict(state["model"])
        if args.resume and NEWEST_ENTRY not in state:
            raise ValueError("it is of an older version of this script, which only --eval can use")
    except Exception as error:
        where = started_in(config, error)
        parser.error(f"cannot use the run in {run_dir}: {one_line(error)}{where}")
    tell_of_other_options(missing, unknown)
    return args


LENGTHS = ["num_iterations", "total_timesteps"]  # the options that say how long a run is


def started_in(config, error):
    """Return the folder that a run was started in, as text, if its env was not found here."""
    folder = config.get("folder")
    if not isinstance(error, ImportError) or folder in (None, os.getcwd()):
        return ""
    module = config["options"]["env"].partition(":")[0]
    return f"; the run was started in {folder}" if f"'{module}'" in str(error) else ""


def tell_of_other_options(missing, unknown):
    """Say which options a run does not have, and which of its options this script does not have."""
    if missing:
        report(f"the run has no {', '.join(sorted(missing))}: the defaults are used")
    if unknown:
        report(f"this script has no {', '.join(sorted(unknown))}: ignored")


def check_device(args):
    """Raise torch's own error if the device is not there; give each rank its GPU."""
    if args.device == "auto":
        return
    if args.device == "cuda" and NUM_RANKS > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.zeros(1, device=args.device).item()


def check_run_name(parser, args):
    """Create --log-dir, and refuse the name of a folder in it that exists.

    Raises OSError if no folder can have this name.
    """
    path = run_path(args)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.stat()
    except FileNotFoundError:
        return
    parser.error(f"argument --run-name: {path} is there already")


def check_rows(parser, args, num_rows, rows="rows"):
    """Refuse minibatches and ranks that cannot share the rows equally."""
    option = None
    if args.num_envs % NUM_RANKS:
        option = "num-envs"
    elif num_rows % (args.num_minibatches * NUM_RANKS):
        option = "num-minibatches"
    if option:
        parts = f"{args.num_minibatches} equal minibatches for {NUM_RANKS} process(es)"
        parser.error(f"argument --{option}: {num_rows} {rows} are not {parts}")


def check_normalised(parser, args, num_rows):
    """Refuse to normalise advantages over a single row."""
    parts = {"minibatch": args.num_minibatches, "batch": 1, "off": 0}
    if num_rows == parts[args.norm_adv]:
        parser.error(f"argument --num-minibatches: --norm-adv {args.norm_adv} needs 2 rows")


def one_line(error):
    """Return an exception as one line, with the place where it may not explain itself."""
    text = f"{type(error).__name__}: {error}".partition("\nTraceback")[0]
    line = " ".join(text.split())[:500]
    if isinstance(error, (GameError, ValueError, OSError, ImportError, gym.error.Error)):
        return line
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{line} (in {place.name}, {place.filename}:{place.lineno})"


def quiet_writer_threads():
    """Have TensorBoard's writer thread print no traceback: the run meets the same error itself."""

    def hook(failure):
        if "AsyncWriter" not in repr(failure.thread):
            threading.__excepthook__(failure)

    threading.excepthook = hook


def explains_itself(error):
    """Whether one line tells the user what went wrong in training."""
    known = (GameError, FloatingPointError, OSError, MemoryError, torch.OutOfMemoryError)
    lost_rank = NUM_RANKS > 1 and isinstance(error, RuntimeError)
    return isinstance(error, known) or lost_rank


def main():
    """Run the command line. Returns the exit code: 1 for failures, 2 for wrong options or files."""
    sys.path.append(os.getcwd())  # where a module of --env may lie
    # A notebook's output has no such method.
    with suppress(AttributeError):
        # Not all of Windows's code pages have a γ.
        sys.stdout.reconfigure(errors="replace")
    quiet_writer_threads()

    args = None
    try:
        args = parse_args()
        if args.eval:
            evaluate_run(args)
            return 0
        run = train(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if args and not args.eval and not explains_itself(error):
            raise
        line = error if isinstance(error, GameError) else one_line(error)
        print(f"{Path(__file__).name}: error: {line}", file=sys.stderr)
        return 1 if args else 2
    return 128 + run.signal if run.signal else 0


if __name__ == "__main__":
    sys.exit(main())
