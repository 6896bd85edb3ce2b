"""PPO for Atari games: pictures, a convolutional network, games played in worker processes.

    python ppo_atari.py --env Breakout                     # 10M steps, takes hours
    python ppo_atari.py --env Pong
    python ppo_atari.py --eval runs/Pong__ppo_atari__1__<time> --video
    tensorboard --logdir runs

How to read this file
    This is `ppo.py` for Atari games, with the functions in the same order. GAE, `losses` and most
    of the machinery are those of ppo.py. What is new: `Game` makes pictures of an Atari game,
    `Model` is a convolutional network, `rollout` computes values of pictures in pieces, and the
    layers compute in bfloat16 where that is faster. All cores, or a GPU, do the update. What only
    vectors need is not here: masks, memory, normalisers and other kinds of actions.
    Read `train`, `rollout`, `Player.play`, `Game` and `Model`. `train` opens a `Run`, which logs,
    evaluates, saves and stops. It has a `WorkerPool`: one `Player` in each worker process, or one
    in this process. A player has its share of the games. All players fill the same rows,
    `pool.rows`, since pictures are too large to be sent. In a single process, not started by
    torchrun, `gathered`, `averaged`, `own_rows` and `average_gradients` change nothing.

The algorithm
    Each iteration plays T steps in N games with the current policy, which is then called π_old, and
    makes K passes (epochs) of minibatch gradient steps over what was recorded:

    δ_t = r_t + γ V(s_{t+1}) (1 − terminated_t) − V(s_t)                         PPO, Eq. (12)
    Â_t = δ_t + γλ (1 − done_t) Â_{t+1}                        PPO, Eq. (11);  GAE, Eq. (16)
    R_t = Â_t + V(s_t)
    ratio_t = π_θ(a_t|s_t) / π_old(a_t|s_t)                              r_t(θ) in PPO, Sec. 3
    L^CLIP(θ) = E[min(ratio_t Â_t, clip(ratio_t, 1−ε, 1+ε) Â_t)]                 PPO, Eq. (7)
    loss = −L^CLIP(θ) + E[c_v ½ (V_θ(s_t) − R_t)² − c_e H(π_θ(·|s_t))]           PPO, Eq. (9)

    The reward r_t is the sign of the change of the score. ppo.py explains the equations.

Notation and shapes
    T steps (--num-steps), N games (--num-envs), K epochs, B minibatches of M rows, n actions. What
    is stored at index t, `terminated` and `truncated` too, belongs to the action at step t. done_t
    is 1 after either. All other symbols are those of ppo.py.

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
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import traceback
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from pathlib import Path

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

gym.register_envs(ale_py)
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner

# ------------------------------------------------------------------------------------ options
# The options of the algorithm. The section "command line" has those of running: folders, workers,
# evaluation, resuming.

FLAG = argparse.BooleanOptionalAction  # --x and --no-x


def add_ppo_options(parser):
    """Add the options of PPO."""
    add = parser.add_argument_group("PPO", "Usual ranges stand in brackets.").add_argument
    add("--num-envs", type=int, default=8, help="N, games played at once (8 to 64)")
    add(
        "--num-steps", type=int, default=128, help="T, steps of each env per iteration (16 to 2048)"
    )
    add("--learning-rate", type=float, default=2.5e-4, help="Adam's step size (1e-5 to 1e-3)")
    add("--anneal-lr", action=FLAG, default=True, help="lower the rate linearly to 0 over the run")
    add("--gamma", type=float, default=0.99, help="γ, discount per step (0.9 to 0.9997)")
    add("--gae-lambda", type=float, default=0.95, help="λ, 0: low variance, 1: little bias (0.95)")
    add("--num-minibatches", type=int, default=4, help="B, minibatches per epoch; divides N · T")
    add("--update-epochs", type=int, default=4, help="K, passes over a rollout (3 to 30)")
    add("--norm-adv", action=FLAG, default=True, help="normalise the advantages of a minibatch")
    add("--clip-coef", type=float, default=0.1, help="ε, clip the ratio at 1 ± ε (0.1 to 0.3)")
    add("--clip-vloss", action=FLAG, default=True, help="clip V's change, too, at ±ε (absolute)")
    add("--ent-coef", type=float, default=0.01, help="c_e, weight of entropy (0 to 0.01)")
    add("--vf-coef", type=float, default=0.5, help="c_v, weight of the value loss (0.5, 1)")
    add("--max-grad-norm", type=float, default=0.5, help="clip the gradient to this global norm")
    add(
        "--target-kl",
        type=float,
        default=0.0,
        help="stop an update above this KL(π_old, π) (0.01 to 0.05); 0: never",
    )


def add_own_options(parser):
    """Add the options that only ppo_atari.py has."""
    add = parser.add_argument_group("ppo_atari.py").add_argument
    precisions = ("auto", "fp32", "bf16")
    add(
        "--env",
        type=game_name,
        default="Breakout",
        help="game, also as BreakoutNoFrameskip-v4 or ALE/Breakout-v5",
    )
    add("--frameskip", type=int, default=4, help="frames that an action lasts; Gymnasium's v5: 4")
    add(
        "--sticky-actions",
        type=float,
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
    add("--noop-max", type=int, default=30, help="a game begins with 1 to so many no-ops; v5: 0")
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
    seed_generators(args.seed)
    model = make_model(args)
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)

    with Run(args, model, optimizer, generator) as run:
        torch.set_num_threads(num_threads)
        run.begin()
        while run.goes_on():
            remaining = 1 - run.share_done()
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate = args.learning_rate * remaining
            optimizer.param_groups[0]["lr"] = learning_rate
            clip_coef = args.clip_coef
            if args.anneal_clip:
                clip_coef = args.clip_coef * remaining

            # Play: T steps in each of N games with the policy π_old.
            buffer = rollout(model, run.pool, args, generator)

            # Judge: was an action better than the value function expected?
            batch = make_batch(buffer, model, args)
            row = {"explained_variance": explained_variance(batch)}

            # Learn: K epochs of minibatch steps towards the better actions.
            row |= update(model, optimizer, batch, args, clip_coef, generator)
            run.end_iteration(row, finished_episodes(buffer), args.num_envs * args.num_steps)
    return run


# ------------------------------------------------------------------------------------ rollout
def rollout(model, pool, args, generator):
    """Play T steps in all N games with the current policy.

    Returns the buffer, tensors (T, N, ...): obs, actions, logprobs, values, next_values, rewards,
    terminated, truncated, and what else `make_rows` names but `next_obs`. Those pictures stay in
    `pool.rows`. On a CPU the next rollout overwrites the buffer: clone what you keep.
    """
    # An action is drawn by adding noise: argmax(log π + Gumbel noise) is a sample of a categorical
    # distribution (the Gumbel-max trick). The noise of all T · N actions is drawn first, in this
    # process, so they do not depend on the number of workers.
    noise = model.head.noise(args.num_steps * args.num_envs, generator)
    noise = noise.view(args.num_steps, args.num_envs, -1)
    pool.load(model)
    pool.call("play", noise.numpy())

    # Few of the pictures `next_obs` are needed, so they stay where they are.
    next_obs = pool.rows["next_obs"]
    columns = {name: rows for name, rows in pool.rows.items() if name != "next_obs"}
    # The last picture is that of the next rollout's first step.
    columns["obs"] = columns["obs"][:-1]
    buffer = {name: column.to(model.device) for name, column in columns.items()}
    add_values(model, buffer, next_obs)
    return gathered(buffer)


@torch.no_grad()
def add_values(model, buffer, next_obs):
    """Add values V(s_t), next_values V(s_{t+1}) and logprobs log π_old(a_t|s_t) to the buffer.

    Passes over all steps give them, since no weight has changed while they were played. The workers
    may round otherwise. Computed here, as in the update, log π_old makes the first ratios 1.
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
    # Only these pictures need a pass of their own.
    separate = buffer["truncated"].clone()
    separate[-1] = True
    pictures = next_obs[separate.cpu()].to(model.device)
    next_values[separate] = model(pictures)[1]
    buffer["next_values"] = next_values


def finished_episodes(buffer):
    """Return the list of (return, length) of the games that have ended in a rollout."""
    ended = buffer["ended"]
    returns = buffer["episode_return"][ended]
    lengths = buffer["episode_length"][ended]
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

    # GAE, Eq. (16), from the last step to the first: Â_t = δ_t + γλ (1 − done_t) Â_{t+1}. At the
    # last step Â is δ_t, where V(s_{t+1}) stands for all later rewards.
    advantage = torch.zeros_like(values[0])
    advantages = []
    for delta_t, decay_t in zip(delta.flip(0), decay.flip(0)):
        advantage = delta_t + decay_t * advantage
        advantages.append(advantage)
    return torch.stack(advantages).flip(0)


def make_batch(buffer, model, args):
    """Add advantages and returns and flatten (T, N, ...) to (T · N, ...)."""
    names = ("rewards", "values", "next_values", "terminated", "truncated")
    columns = [buffer[name] for name in names]
    advantages = gae(*columns, args.gamma, args.gae_lambda)
    batch = {name: buffer[name] for name in (*model.inputs, "actions", "logprobs", "values")}
    batch["advantages"] = advantages
    # V's target in PPO, Eq. (9): R_t = Â_t + V(s_t), what V expected plus how much better it went
    batch["returns"] = advantages + buffer["values"]
    return {name: column.flatten(0, 1) for name, column in batch.items()}


def explained_variance(batch):
    """1 − Var(R − V) / Var(R): how well V predicts R. 0 is no better than a constant.

    R contains V of later states, so a number near 1 does not prove that V is right.
    """
    variance = batch["returns"].var()
    unexplained = (batch["returns"] - batch["values"]).var()
    return float(1 - unexplained / variance) if variance > 0 else math.nan


# ------------------------------------------------------------------------------------ losses
def losses(model, mb, clip_coef, clip_vloss):
    """PPO's loss terms, row by row.

    `mb` holds obs (M, ...) and the model's other inputs, actions (M, ...), and (M,): logprobs of
    π_old, values of V before the update, advantages, returns. Those of a recurrent policy
    (ppo.py's --rnn) are (T, M, ...).
    Returns pg_loss, v_loss, entropy and logratio = log ratio_t, each (M,).
    """
    pi, values = model(**{name: mb[name] for name in model.inputs})
    logprobs = model.head.log_prob(pi, mb["actions"])
    logratio = logprobs - mb["logprobs"]
    advantages = mb["advantages"]
    returns = mb["returns"]
    assert logratio.shape == values.shape == advantages.shape == returns.shape

    # PPO, Eq. (7): −min(ratio_t Â_t, clip(ratio_t, 1−ε, 1+ε) Â_t)
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    pg_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)

    # PPO, Eq. (9), second term, here with ½: ½ (V_θ(s_t) − R_t)²
    v_loss = (values - returns).square()
    if clip_vloss:
        # Not in the paper: (V_old + clip(V_θ − V_old, −ε, ε) − R_t)², where that is larger. So V
        # gains nothing by moving away from V_old by more than ε in one update. How tight that is
        # depends on the scale of rewards. CleanRL has it; with Stable-Baselines3 it is off.
        change = (values - mb["values"]).clamp(-clip_coef, clip_coef)
        v_loss = torch.max(v_loss, (mb["values"] + change - returns).square())
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

    # PPO, Eq. (9): loss = −L^CLIP + E[c_v ½ (V_θ − R)² − c_e H]
    loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy
    row = {"policy_loss": pg_loss, "value_loss": v_loss, "entropy": entropy}
    row |= {"approx_kl": approx_kl, "clipfrac": clipfrac}
    return loss, row


def policy_change(logratio, clip_coef):
    """Return an estimate of KL(π_old, π) and the share of the ratios beyond 1 ± ε.

    With the ratios x and actions of π_old the KL is E[−log x]. E[x − 1] is 0, so E[x − 1 − log x]
    is the same, but no term of it is below 0: http://joschu.net/blog/kl-approx.html
    """
    ratio = logratio.exp()
    approx_kl = (ratio - 1 - logratio).mean()
    clipfrac = ((ratio - 1).abs() > clip_coef).float().mean()
    return approx_kl, clipfrac


# ------------------------------------------------------------------------------------ update
def update(model, optimizer, batch, args, clip_coef, generator):
    """Take K epochs of minibatch steps, unless the policy moves beyond --target-kl.

    Returns the means of what the minibatches log.
    """
    # With --compile a float would be a constant: each new ε would compile the loss again.
    clip_coef = torch.tensor(clip_coef, device=model.device)
    logged = []
    for _ in range(args.update_epochs):
        for mb in minibatches(batch, args, generator):
            loss, row = minibatch_loss(model, mb, args, clip_coef)
            logged.append({name: averaged(value.detach()) for name, value in row.items()})
            if args.target_kl and logged[-1]["approx_kl"] > args.target_kl:
                return mean_row(logged)
            gradient_step(model, optimizer, loss, args.max_grad_norm)
    return mean_row(logged)


def minibatches(batch, args, generator):
    """Shuffle the rows and cut them into the B minibatches of an epoch, dicts of (M, ...).

    With several ranks each gets its share of every minibatch, normalised by the whole minibatch.
    """
    order = torch.randperm(len(batch["obs"]), generator=generator).to(batch["obs"].device)
    for rows in order.chunk(args.num_minibatches):
        # Gather for each minibatch: all pictures in a new order would take much memory.
        mb = {name: column.index_select(0, rows) for name, column in batch.items()}
        if args.norm_adv:
            mb["advantages"] = normalised(mb["advantages"])
        yield own_rows(mb)


def normalised(advantages):
    """Return advantages with mean 0 and σ 1: one learning rate then suits rewards of any scale.

    "Better" then means better than the mean of these advantages, not than V expected. So an action
    may become less likely although it was a little better than V expected.
    """
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
    """Return the means of a list of dicts of scalar tensors, as a dict of numbers.

    A row may lack names of the first one.
    """
    means = {}
    for name in rows[0]:
        means[name] = float(torch.stack([row[name] for row in rows if name in row]).mean())
    return means


# ------------------------------------------------------------------------------------ model
def make_model(args):
    """Return the Model for the game, its weights drawn from torch's global generator."""
    with closing(make_env(args)) as env:
        model = Model(env.action_space, args.precision)
    device = args.device
    # Take cuda if there is a GPU for each rank of this machine.
    if device == "auto":
        enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        device = "cuda" if enough else "cpu"
    # Each rank has a GPU of its own.
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    # A library may have set another default type.
    return model.to(device, torch.float32)


@functools.cache
def has_bf16(device_type):
    """Return whether a device computes in bfloat16 faster than in float32."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return False
    able = torch.cpu.get_capabilities()
    # Intel's processors with AVX512-BF16 but without AMX are slower in bfloat16.
    is_fast_without_amx = able.get("avx512_bf16") and not able.get("avx512_fp16")
    return bool(able.get("amx_bf16") or is_fast_without_amx)


class Model(nn.Module):
    """Policy and value function: three convolutions, 512 features, a head for each.

    The layers under the heads may compute in bfloat16. Weights and heads are float32.
    """

    inputs = ["obs"]  # what `forward` takes

    def __init__(self, action_space, precision):
        super().__init__()
        self.action_space = action_space
        self.precision = precision
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
        self.head = Categorical(512, int(action_space.n))
        layer_init(self.head.output, gain=0.1)  # in place of 0.01
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
            dtype = torch.bfloat16 if self.bf16 else torch.float32
            x = x.to(dtype)
            h = self.actor(x.div_(255))
        return h.float().view(*obs.shape[:-3], -1)

    @property
    def bf16(self):
        """Whether layers compute in bfloat16: --precision, or whether the device is good at it."""
        if self.precision == "auto":
            return has_bf16(self.device.type)
        return self.precision == "bf16"

    def autocast(self, enabled=True):
        """Return the context in which layers compute in bfloat16, if they do."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled and self.bf16)

    @torch.no_grad()
    def act(self, obs, noise=None):
        """Return actions (M,) for pictures (M, 84, 84, 4): samples from noise (M, n), or the mode.

        All are arrays.
        """
        h = self.features(torch.from_numpy(obs))
        # The head computes in float32, in `play` too.
        with self.autocast(enabled=False):
            return self.head.sample(self.head.output(h).numpy(), noise)


# ------------------------------------------------------------------------ heads and normalisers
def layer_init(layer, gain=2**0.5):
    """Initialise a linear or convolutional layer: orthogonal weight times `gain`, zero bias.

    √2 keeps the scale of features through layers with ReLU, and is usual with tanh, too. A policy's
    last layer has 0.01, so that its first actions are nearly uniform, or have means near 0.
    """
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Categorical(nn.Module):
    """Policy head for n actions."""

    def __init__(self, features, n):
        super().__init__()
        self.n = n
        self.output = layer_init(nn.Linear(features, n), gain=0.01)

    def forward(self, h):
        """Return log-probabilities (M, n) for features (M, F)."""
        return self.output(h).log_softmax(-1)

    def noise(self, batch, generator):
        """Return standard Gumbel noise, (batch, n): −log of exponential noise."""
        exponential = torch.empty(batch, self.n, dtype=torch.float32)
        return -exponential.exponential_(generator=generator).log()

    def sample(self, logits, noise=None):
        """Return actions (M,) for logits (M, n). All are arrays.

        argmax(log π + Gumbel noise) is a sample of π, the Gumbel-max trick. Logits are log π plus a
        constant, which changes no argmax. Without noise the actions are the mode, the most likely
        ones.
        """
        scores = logits if noise is None else logits + noise
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
    game = re.sub(r"^(ale_py:)?ALE/|(NoFrameskip|Deterministic)?-v\d+$", "", name)
    for known in gym.registry:
        match = re.fullmatch(r"ALE/(.*)-v5", known)
        if match and match[1].lower() == game.lower():
            return match[1]
    return game


def make_env(args, video=None):
    """Return the Gymnasium env of a game, one frame per step.

    It films its first episode if `video` is a folder.
    """
    render_mode = "rgb_array" if video else None
    env = gym.make(
        f"ALE/{game_name(args.env)}-v5",
        frameskip=1,
        repeat_action_probability=args.sticky_actions,
        full_action_space=args.full_action_space,
        render_mode=render_mode,
        obs_type="ram",  # it is small: `Game` looks at the screen itself, not at every frame
        disable_env_checker=True,
    )
    if video:
        env.metadata = env.metadata | {"render_fps": 60}
        env = gym.wrappers.RecordVideo(env, video, episode_trigger=lambda k: k == 0)
    return env


class GameError(RuntimeError):
    """A game or a worker failed: a line that says which and how, then the traceback."""


class AtWork(AbstractContextManager):
    """The context in which an env is called: any error becomes a GameError that says where.

    A class takes a third of the time of a function with `contextmanager`, 4 % of a cheap step.
    """

    def __init__(self, game, doing):
        self.game = game
        self.doing = doing

    def __exit__(self, kind, error, _):
        """Raise GameError for an error. Only Ctrl-C passes."""
        if not isinstance(error, (Exception, SystemExit)):
            return
        line = f"{self.game.place()} failed in {self.doing}: {kind.__name__}: {error}"
        raise GameError(f"{line}\n{traceback.format_exc()}") from None


class Game:
    """An Atari game as the policy sees it (Mnih et al. 2015). It writes column n of rows.

    An action lasts `frameskip` frames. A picture is the maximum of the last two frames, grey,
    shrunk to 84 × 84. The last four pictures are the observation, (84, 84, 4). A reward is the sign
    of the change of the score.

    An episode ends with a life, and the next one goes on with the same game unless that is over.
    `ended`, the return (the true score) and the length (in steps) are of whole games, not of lives.

    Row t has what the policy saw and did at step t, and what came of it. What the policy sees next,
    of the same episode or of another one, is in row t + 1.
    """

    def __init__(self, args, rows, n, video=None):
        self.args = args
        self.rows = rows
        self.n = n
        self.env = make_env(args, video)
        self.ale = self.env.unwrapped.ale

        actions = self.env.unwrapped.get_action_meanings()
        self.noop_max = args.noop_max if actions[0] == "NOOP" else 0  # in Backgammon it is FIRE
        self.fire = actions.index("FIRE") if args.fire and "FIRE" in actions else None

        self.obs = np.zeros((84, 84, 4), np.uint8)
        self.screens = np.zeros((2, *self.ale.getScreenDims()), np.uint8)  # the last, one before
        self.game_over = True
        self.lives = 0
        self.score = 0.0
        self.length = 0
        self.last_game = None  # score and length of the game that the last step ended, if it did
        self.seed = None  # the seed of the last start

    def start(self, seed, t):
        """Start the first game of a seed in row t."""
        self.seed = seed
        self.first_return = None  # the score of the first game, when it has ended
        with AtWork(self, "reset"):
            self.reset(seed)
        self.rows["obs"][t, self.n] = self.obs

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

    def step(self, t, action):
        """Take an action in row t. If it ends an episode the next one starts in row t + 1."""
        rows = self.rows
        n = self.n
        self.last_game = None
        with AtWork(self, "step"):
            score, terminated, truncated = self.press(int(action))
            self.length += 1
            self.obs[..., :-1] = self.obs[..., 1:]
            self.obs[..., -1] = self.picture()
            rows["next_obs"][t, n] = self.obs
            if terminated or truncated:
                self.reset()

        rows["obs"][t + 1, n] = self.obs
        rows["rewards"][t, n] = np.sign(score)
        rows["terminated"][t, n] = terminated
        rows["truncated"][t, n] = truncated and not terminated
        ended = self.last_game is not None  # `new_game` has set it
        rows["ended"][t, n] = ended
        if ended:
            rows["episode_return"][t, n], rows["episode_length"][t, n] = self.last_game
            if self.first_return is None:
                self.first_return = self.last_game[0]

    def place(self):
        """Return where the game is, as text: its seed, and the steps of this game."""
        return f"{self.args.env} (seed {self.seed}, after {self.length} steps)"


def make_rows(args, num_games):
    """Return {name: tensor} for a rollout of some games, in memory that processes can share.

    They are (T, N, ...). `obs` has T + 1 rows: the next rollout starts with the last one. To record
    another number, name it here and write it in `Game.step`: it is in the buffer then.
    """
    T = args.num_steps

    def zeros(count, shape=(), dtype=torch.float32):
        return torch.zeros(count, num_games, *shape, dtype=dtype).share_memory_()

    # Return and length stand where a game has ended.
    return {
        "obs": zeros(T + 1, (84, 84, 4), torch.uint8),
        "next_obs": zeros(T, (84, 84, 4), torch.uint8),
        "actions": zeros(T, (), torch.int64),
        "rewards": zeros(T),
        "terminated": zeros(T, (), torch.bool),
        "truncated": zeros(T, (), torch.bool),
        "ended": zeros(T, (), torch.bool),
        "episode_return": zeros(T, (), torch.float64),
        "episode_length": zeros(T, (), torch.int64),
    }


class Player:
    """One process's share of the games, the model that plays them, and the rows that they fill.

    `rows` (T, N, ...) are those of all games of this rank, from game number `first` on.
    """

    def __init__(self, args, rows, first, model, index=0, count=1, video=None):
        # A worker has one core.
        if multiprocessing.parent_process():
            cv2.setNumThreads(1)
        self.model = model
        self.frameskip = args.frameskip
        self.index = index  # this process's number
        self.count = count  # the number of processes
        own = self.share(range(args.num_envs)) - first
        columns = slice(own[0], own[-1] + 1)
        self.rows = {name: tensor.numpy()[:, columns] for name, tensor in rows.items()}
        self.games = [Game(args, self.rows, n, video) for n in range(len(own))]

    def share(self, rows, axis=0):
        """Return this process's share of what is there for all N games."""
        return np.array_split(rows, self.count, axis)[self.index]

    def start(self, seeds):
        """Start all games from seeds (N,), in the last row: there the next rollout begins."""
        for game, seed in zip(self.games, self.share(seeds)):
            game.start(int(seed), -1)

    def play(self, noise):
        """Act, step, record, T times, with noise (T, N, n)."""
        self.carry(-1)
        # Here autocast casts the weights once, not in each step.
        with self.model.autocast():
            for t, noise_of_step in enumerate(self.share(noise, axis=1)):
                self.take_step(t, noise_of_step)

    def carry(self, t):
        """Go on in row 0 with what the policy sees in row t."""
        self.rows["obs"][0] = self.rows["obs"][t]

    def take_step(self, t, noise=None):
        """Act in row t, and step the games. Without noise the policy's mode acts."""
        actions = self.model.act(self.rows["obs"][t], noise)
        self.rows["actions"][t] = actions
        for game, action in zip(self.games, actions):
            game.step(t, action)

    def play_episodes(self, seeds):
        """Play a whole game of every game with the policy's mode. Returns their scores (N,).

        Raises GameError if one takes more than MOST_FRAMES frames.
        """
        self.start(seeds)
        self.carry(-1)
        with self.model.autocast():
            for _ in range(MOST_FRAMES // self.frameskip + 1):
                self.take_step(0)
                self.carry(1)
                returns = [game.first_return for game in self.games]
                if None not in returns:
                    return np.array(returns)
        raise GameError(f"{self.games[0].place()}: a game takes over {MOST_FRAMES:,} frames")

    def close(self):
        """Close all envs."""
        for game in self.games:
            game.env.close()


def make_pool(args, model):
    """Return the pool of the players of all N games. Pictures are too large for pipes.

    So all processes of this rank write into the same rows, `pool.rows`.
    """
    keep_freed_memory()
    P = num_processes(args)
    shares = np.array_split(range(args.num_envs), P * NUM_RANKS)
    own = np.concatenate(shares[P * RANK : P * RANK + P])  # this rank's games
    rows = make_rows(args, len(own))
    pool = WorkerPool(args, model, functools.partial(Player, args, rows, own[0]))
    pool.rows = rows
    return pool


def seed_generators(seed):
    """Seed the generators of `random`, NumPy and torch: an environment may draw from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def draw_seeds(count, *entropy):
    """Return seeds (count,) below 2³¹: environments written in C can take them."""
    return np.random.SeedSequence(entropy).generate_state(count) % 2**31


# ------------------------------------------------------------------------------------ worker pool
def num_cores():
    """Return the number of cores that this process may use, its share if torchrun started it."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def num_processes(args):
    """Return the number of processes of each rank that play: no more than there are games."""
    return max(1, min(args.num_workers, args.num_envs // NUM_RANKS))


class WorkerPool:
    """Players in `--num-workers` processes of each rank, or one in this process if that is 0.

    `make_player(model, index, count)` makes the player of process `index`, of `count` in all ranks.
    """

    patience = 30  # after so many seconds without an answer a line says so, once

    def __init__(self, args, model, make_player):
        # The copy of the model that plays is in memory that all processes of this rank share.
        self.model = copy.deepcopy(model).cpu().share_memory()
        self.player = None
        self.workers = []
        if args.num_workers == 0:
            seed_generators(draw_seeds(1, args.seed, RANK).item())
            self.player = make_player(self.model, RANK, NUM_RANKS)
            return

        # A fork shares the memory of all imported libraries, but it is safe on Linux only.
        start_method = "fork" if sys.platform == "linux" else "spawn"
        context = multiprocessing.get_context(start_method)
        P = num_processes(args)
        for i in range(P):
            pipe, end = context.Pipe()
            # A fork has copies of this process's ends of all pipes, which it must close.
            copies = [other for other, _ in self.workers] + [pipe]
            place = (RANK * P + i, NUM_RANKS * P)
            arguments = (end, copies, args.seed, make_player, self.model, *place)
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            end.close()
            self.workers.append((pipe, process))

    def load(self, model):
        """Let all players play with the weights of a model from now on."""
        self.model.load_state_dict(model.state_dict())

    def call(self, command, *arguments):
        """Have the players of all ranks carry out a command. Returns the list of their answers.

        Raises GameError if a game has failed, or a worker has died.
        """
        if self.player:
            answers = [answer(self.player, command, arguments)]
        else:
            answers = self.ask_workers((command, arguments))
        answers = sum(gathered_objects(answers), [])
        for failure in answers:
            if isinstance(failure, GameError):
                raise failure
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
                if not pipe.poll(self.patience):
                    report(
                        f"worker {i} has not answered for {self.patience} seconds, as is normal "
                        "for slow steps. If it hangs, try --num-workers 0: threads that were "
                        "started before the fork are missing in it"
                    )
                    self.patience = None
                answers.append(pipe.recv())
            except (EOFError, OSError):
                process.join()
                line = f"worker {i} died with exit code {process.exitcode}; try --num-workers 0"
                answers.append(GameError(line))
        return answers

    def close(self):
        """End the processes: idle ones close their games, busy ones are killed after 8 seconds."""
        if self.player:
            self.player.close()
        for pipe, _ in self.workers:
            pipe.close()
        end = time.monotonic() + 8
        try:
            for _, process in self.workers:
                process.join(max(0, end - time.monotonic()))
        finally:
            # A signal may have ended the waiting.
            for _, process in self.workers:
                process.kill()
                process.join()


def answer(player, command, arguments):
    """Return a player's answer to a command, or the GameError that it fails with."""
    try:
        return getattr(player, command)(*arguments)
    except GameError as error:
        return error
    except Exception as error:
        return GameError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


def work(pipe, copies, seed, make_player, model, index, count):
    """Be a worker: make a player, and have it carry out one command after the other."""
    # A pipe is closed when no process has its other end any more.
    for other_end in copies:
        other_end.close()
    # Both signals are the main process's to handle. Programs that a game starts inherit SIG_IGN: a
    # Ctrl-C should not end them, but SIGTERM should.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    # A worker has one core, and torch's threads do not survive a fork.
    torch.set_num_threads(1)
    seed_generators(draw_seeds(1, seed, index).item())

    with closing(make_player(model, index, count)) as player, suppress(EOFError, OSError):
        # The pool has closed its end of the pipe, or the main process has died: both end this.
        while True:
            pipe.send(answer(player, *pipe.recv()))


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
            # In one piece: several workers may print at once.
            sys.stderr.write(f"{message}\n")
            sys.stderr.flush()


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
            raise GameError(f"rank {RANK} has lost another one: {error}") from None
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
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # they stop a run
COUNTERS = {"iteration": 0, "global_step": 0, "wall_seconds": 0.0}
CHARTS = ["iteration_return", "episodic_return", "episodic_length", "eval_return", "learning_rate"]
LOSSES = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance"]
# TensorBoard shows these under CleanRL's names, where it has them. Any other number has its own
# name. Ours are means, of an iteration's minibatches and of the last 100 episodes. CleanRL's are
# not, so curves may differ in level.
TAGS = {"sps": "charts/SPS"}
TAGS |= {name: f"charts/{name}" for name in CHARTS}
TAGS |= {name: f"losses/{name}" for name in LOSSES}
SHOWN = ["sps", "episodic_return", "eval_return"]  # in the status line


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
        self.history = []
        self.signal = None
        self.asked = None  # when a signal asked the run to stop
        if args.resume:
            self.restore()
        # The stack closes what is open if this block fails.
        with ExitStack() as self.stack:
            self.open()
            # All is open, and stays so until `__exit__`.
            self.stack = self.stack.pop_all()

    def open(self):
        """Make the games and open the files."""
        for signum in SIGNALS:
            self.stack.callback(signal.signal, signum, signal.getsignal(signum))
            # Until the first iteration a signal stops the run at once.
            signal.signal(signum, signal.default_int_handler)
        if NUM_RANKS > 1:
            backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backends, timeout=datetime.timedelta(days=1))
            self.stack.callback(dist.destroy_process_group)
        self.pool = self.stack.enter_context(closing(make_pool(self.args, self.model)))
        if RANK == 0:
            logger = Logger(self.run_dir, self.args, self.history)
            self.logger = self.stack.enter_context(closing(logger))

    @property
    def iteration(self):
        """How many iterations are complete."""
        return self.counters["iteration"]

    def share_done(self):
        """Return which share of the run's length is complete."""
        return self.iteration / self.args.num_iterations

    def stop(self, signum, _):
        """Note a signal. A repeat within a second is ignored, one after that stops at once."""
        if self.asked is None:
            self.signal = signum
            self.asked = time.monotonic()
            report("stopping after this iteration; Ctrl-C or SIGTERM once more to stop now")
        elif time.monotonic() > self.asked + 1:
            report("stopped at once; iterations since the last checkpoint are lost")
            raise KeyboardInterrupt

    def begin(self):
        """Start the games, and log an evaluation before the first iteration."""
        if self.share_done() >= 1:
            report(
                f"the run is complete: to resume it, give --num-iterations above {self.iteration}"
            )
        elif self.args.resume and RANK == 0:
            write_config(self.run_dir, self.args)
        self.start_games()
        if self.args.eval_every and not self.history:
            self.log({})

    def start_games(self):
        """Start new episodes in all games. Their seeds depend on the iteration."""
        self.pool.call("start", draw_seeds(self.args.num_envs, self.args.seed, self.iteration))

    def goes_on(self):
        """Whether another iteration is due: the run is not complete, and no rank is to stop.

        The ranks tell each other of signals here, and the clock of the iteration starts.
        """
        self.began = time.perf_counter()
        # A library of the games may have caught signals itself.
        for signum in SIGNALS:
            signal.signal(signum, self.stop)
        # A signal that one rank has received stops all ranks.
        agreed = max(gathered_objects(self.signal or 0))
        self.signal = agreed or self.signal
        return self.share_done() < 1 and not agreed

    def end_iteration(self, row, episodes, num_steps):
        """Count an iteration and its steps, log the row and the episodes, save at times."""
        seconds = time.perf_counter() - self.began
        self.counters["iteration"] += 1
        self.counters["global_step"] += num_steps
        self.counters["wall_seconds"] += seconds

        if episodes:
            row["iteration_return"], _ = np.mean(episodes, axis=0)
        self.recent = (self.recent + episodes)[-100:]
        if self.recent:
            mean_return, mean_length = np.mean(self.recent, axis=0)
            row |= {"episodic_return": mean_return, "episodic_length": mean_length}
        row["sps"] = round(num_steps / seconds)
        row["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        self.log(row)
        if self.args.save_every and self.iteration % self.args.save_every == 0:
            self.save()

    def log(self, row):
        """Evaluate if it is due, and write the row."""
        if RANK > 0:
            return
        row |= self.counters
        # A checkpoint must hold plain numbers: those of NumPy and torch become Python's.
        for name, value in row.items():
            if hasattr(value, "item"):
                row[name] = value.item()
        self.history.append(row)
        every = self.args.eval_every
        if every and (self.iteration % every == 0 or self.share_done() >= 1):
            row["eval_return"] = float(evaluate(self.model, self.args).mean())
        self.logger.write(row, self.share_done())

    def save(self):
        """Write the checkpoint. If this fails, by a full disk say, the old file stays."""
        if RANK > 0:
            return
        # A checkpoint must not be ahead of TensorBoard's file.
        self.logger.events.flush()
        file = io.BytesIO()
        torch.save(self.state(), file)
        write_file(self.run_dir / "checkpoint.pt", file.getvalue())

    def state(self):
        """Return all that a resumed run needs: tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "counters": self.counters,
            "history": self.history,
            "recent": self.recent,
        }

    def restore(self):
        """Go on from the checkpoint. The games start new episodes."""
        state = read_checkpoint(self.run_dir)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.counters = state["counters"]
        self.history = state["history"]
        self.recent = state["recent"]

    def __exit__(self, kind, *_):
        """Close everything. First save, unless the code has failed or a signal stops at once."""
        with self.stack:
            if kind is None or issubclass(kind, (GameError, OSError)):
                self.save()
            if kind is None:
                # Barrier: no rank may exit before rank 0 has saved, or torchrun would kill it.
                gathered_objects(None)


class Logger:
    """Writes a run's rows to progress.csv, TensorBoard and the terminal."""

    def __init__(self, run_dir, args, history):
        # TensorBoard is slow to import, and only training needs it.
        from torch.utils.tensorboard import SummaryWriter

        self.run_dir = run_dir
        self.args = args
        self.history = history
        self.columns = list(COUNTERS | TAGS)  # progress.csv has these, and one for any new key
        run_dir.mkdir(parents=True, exist_ok=bool(args.resume))
        if not args.resume:
            write_config(run_dir, args)
        self.file = (run_dir / "progress.csv").open("w", buffering=1, newline="")  # line by line
        self.rewrite()
        # TensorBoard drops what a stopped run had logged beyond its last checkpoint.
        steps = history[-1]["global_step"] if history else 0
        self.events = SummaryWriter(str(run_dir), purge_step=steps + 1)

    def write(self, row, share_done):
        """Write the newest row of the history, logged when that share of the run is complete."""
        if set(row) <= set(self.columns):
            self.csv.writerow(row)
        else:
            self.rewrite()
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
        line = f"iteration {row['iteration']} ({share_done:.0%})  steps {row['global_step']:,}"
        for name in SHOWN:
            if name in row:
                line += f"  {name} {row[name]:,.6g}"
        if share_done > 0.01:
            left = row["wall_seconds"] * max(0, 1 / share_done - 1)
            line += f"  ETA {datetime.timedelta(seconds=round(left))}"
        return line

    def close(self):
        """Close the files, and say where they are."""
        self.file.close()
        self.events.close()
        if not self.args.quiet:
            print(f"run folder: {self.run_dir}")


def run_path(args):
    """Return the path of a new run's folder, with an underscore for what may not be in a name."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    script = Path(__file__).stem
    name = args.run_name or f"{Path(args.env).name[-100:]}__{script}__{args.seed}__{stamp}"
    return Path(args.log_dir) / re.sub(r"[^\w.=,+-]+", "_", name)


# These options are not kept in config.json. It has --num-iterations in place of the last one.
NOT_KEPT = ["resume", "eval", "video", "quiet", "total_timesteps"]


def write_config(run_dir, args):
    """Write config.json, the options, and a copy of this script.

    The options are the defaults when the run is resumed.
    """
    script = Path(__file__)
    write_file(run_dir / script.name, script.read_bytes())
    options = {name: value for name, value in vars(args).items() if name not in NOT_KEPT}
    write_file(run_dir / "config.json", json.dumps(options, indent=2).encode())


def write_file(path, content):
    """Write bytes to a file atomically: if this fails, by a full disk say, the old file stays."""
    with path.with_suffix(".partial").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def read_checkpoint(run_dir):
    """Return a run's state: tensors and plain values, so that no code of the file is run."""
    return torch.load(Path(run_dir) / "checkpoint.pt", map_location="cpu", weights_only=True)


# ------------------------------------------------------------------------------------ evaluation
EVAL_SEED = 10_000  # evaluation games have their own seeds, the same in every run
MOST_FRAMES = 108_000  # a game of an evaluation takes no more frames: this is ALE's own limit


def evaluate(model, args, video=None):
    """Play the games of an evaluation with the policy's mode. Returns their scores, (E,)."""
    games = argparse.Namespace(**vars(args) | {"num_envs": args.eval_episodes, "num_steps": 1})
    rows = make_rows(games, args.eval_episodes)
    with closing(Player(games, rows, 0, copy.deepcopy(model).cpu(), video=video)) as player:
        return player.play_episodes(EVAL_SEED + np.arange(args.eval_episodes))


def evaluate_run(args):
    """Evaluate the policy of --eval, and film an episode of it. Returns the returns, (E,)."""
    seed_generators(args.seed)
    model = make_model(args)
    model.load_state_dict(read_checkpoint(args.eval)["model"])
    returns = evaluate(model, args)
    what = f"{len(returns)} episodes of {Path(args.env).name}"
    print(f"return {returns.mean():.4f} ± {returns.std():.4f} over {what}")
    if args.video:
        args.eval_episodes = 1
        evaluate(model, args, video=f"{args.eval}/video")
        print(f"video: {args.eval}/video/rl-video-episode-0.mp4")
    return returns


# ------------------------------------------------------------------------------------ command line
EXAMPLES = """
examples:
  python ppo_atari.py --env Breakout                           train, for hours
  python ppo_atari.py --env Pong --total-timesteps 3000000     train, for less
  python ppo_atari.py --resume RUN_DIR --num-workers 8         resume, with more processes
  python ppo_atari.py --eval RUN_DIR --video                   evaluate, and film a game
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
    return parser


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the examples as they are."""


def add_run_options(parser):
    """Add the options of running."""
    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--seed", type=int, default=1, help="seed of all generators")
    add("--device", default="auto", help="auto, cpu or cuda; auto: cuda if it is there")
    add("--num-workers", type=int, default=num_cores(), help="processes that play; 0: this one")
    add("--log-dir", type=os.path.abspath, default="runs", help="folder of the runs' folders")
    add("--run-name", help="name of the run's folder, if not env__script__seed__time")
    add("--eval-every", type=int, default=0, help="iterations between evaluations; 0: never")
    add("--eval-episodes", type=int, default=16, help="episodes of an evaluation")
    add("--save-every", type=int, default=50, help="iterations between checkpoints; 0: at end")
    add("--video", action="store_true", help="with --eval: also film an episode")
    add("--quiet", action="store_true", help="print no status lines")

    add = group.add_mutually_exclusive_group().add_argument
    add("--resume", type=os.path.abspath, help="folder of a run to resume, with its options")
    add("--eval", type=os.path.abspath, help="folder of a run whose policy's mode is evaluated")

    add = group.add_mutually_exclusive_group().add_argument
    add("--total-timesteps", type=int, help="length of the run in steps of all envs (10 million)")
    add("--num-iterations", type=int, help="length of the run in iterations")


def parse_args(argv=None):
    """Parse and check the command line (default: the program's).

    With --resume or --eval the options of that run are the defaults.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    run_dir = args.resume or args.eval
    if run_dir:
        parser.set_defaults(**json.loads((Path(run_dir) / "config.json").read_text()))
        args = parser.parse_args(argv)

    # This is an error if there is no such game.
    make_env(args).close()
    if args.total_timesteps or not args.num_iterations:
        steps = args.total_timesteps or 10_000_000
        args.num_iterations = max(1, steps // (args.num_envs * args.num_steps))
    check_options(parser, args)
    if run_dir:
        check_weights(parser, args, run_dir)
    return args


def check_options(parser, args):
    """Refuse options that do not go together, in one line."""
    rows = args.num_envs * args.num_steps
    parts = args.num_minibatches * NUM_RANKS
    has_device = args.device != "cuda" or torch.cuda.is_available()
    is_new = not args.resume and not args.eval
    folder = run_path(args)
    wishes = [
        (rows % parts == 0, "num-minibatches", f"{parts}, over all ranks, must divide N · T"),
        (rows > parts or not args.norm_adv, "num-minibatches", "--norm-adv needs two rows"),
        (has_device, "device", "torch finds no GPU; give cpu"),
        (not is_new or not folder.exists(), "run-name", f"{folder} is there already"),
    ]
    for is_right, option, wish in wishes:
        if not is_right:
            parser.error(f"argument --{option}: {wish}")


def check_weights(parser, args, run_dir):
    """Refuse a run whose checkpoint does not fit the options."""
    try:
        make_model(args).load_state_dict(read_checkpoint(run_dir)["model"])
    except Exception as error:
        # A file may be of anything.
        line = " ".join(str(error).split())
        parser.error(f"cannot use the run in {run_dir}: {line}")


def main():
    """Run the command line. Returns the exit code: 1 for failures, 2 for wrong options or files."""
    sys.stdout.reconfigure(errors="replace")  # not all of Windows's code pages have a γ
    args = None
    try:
        args = parse_args()
        if args.eval:
            evaluate_run(args)
            return 0
        run = train(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (
        GameError,
        FloatingPointError,
        OSError,
        ImportError,
        ValueError,
        gym.error.Error,
    ) as error:
        # Once the options are read these are mistakes in code: the traceback is needed.
        if args and isinstance(error, (ImportError, ValueError)):
            raise
        print(f"{Path(__file__).name}: error: {error}".rstrip(), file=sys.stderr)
        return 1 if args else 2
    return 128 + run.signal if run.signal else 0


if __name__ == "__main__":
    sys.exit(main())
