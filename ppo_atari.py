"""PPO for Atari games: pictures, a convolutional network, games played in worker processes.

    python ppo_atari.py --env Breakout                     # 10M steps, takes hours
    python ppo_atari.py --env Pong
    python ppo_atari.py --eval runs/Pong__ppo_atari__1__<time> --video
    tensorboard --logdir runs

This is `ppo.py` with a Game that makes pictures of an Atari game, a convolutional network and
shared memory for whole rollouts: the workers have the policy too, and nobody waits for anybody
between two steps. Then all cores, or a GPU, do the update, in bfloat16 where that is faster.

Papers: "PPO" is Schulman et al. 2017, Proximal policy optimization algorithms (arXiv 1707.06347);
"GAE" is Schulman et al. 2016 (arXiv 1506.02438); pictures and network are those of Mnih et al.
2015, Human-level control through deep reinforcement learning. Network, rollout and loss have the
constants of labml's first annotated version, but for Adam's ε (1e-5) and biases (0 at the start);
games are as in Gymnasium's AtariPreprocessing, with signs of rewards, FIRE and lives besides.

Each iteration runs the policy π_old for T steps in N games, then takes K epochs of minibatch steps:

    δ_t = r_t + γ V(s_{t+1}) (1 − terminated_t) − V(s_t)                             PPO, Eq. (12)
    Â_t = δ_t + γλ (1 − done_t) Â_{t+1},   R_t = Â_t + V(s_t)           PPO, Eq. (11); GAE, Eq. (16)
    r_t(θ) = π_θ(a_t|s_t) / π_old(a_t|s_t)                                           PPO, Sec. 3
    L^CLIP(θ) = E[min(r_t(θ) Â_t, clip(r_t(θ), 1−ε, 1+ε) Â_t)]                       PPO, Eq. (7)
    loss = E[−L^CLIP + c_v ½ (V_θ(s_t) − R_t)² − c_e H(π_θ(·|s_t))]      PPO, Eq. (9), but for the ½

r_t is the reward's sign, r_t(θ) the probability ratio. Shapes: T steps, N games, B minibatches of M
rows, n actions. What is stored at t, `terminated` and `truncated` too, is of the action at t.
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
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from pathlib import Path

import cv2
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from torch import nn


# ------------------------------------------------------------------------------------ options
def make_parser():
    """Return the parser of the command line; without usage, so that an error is one line."""
    style, about = argparse.ArgumentDefaultsHelpFormatter, __doc__.partition("\n")[0]
    options = {"usage": argparse.SUPPRESS, "formatter_class": style, "allow_abbrev": False}
    parser = argparse.ArgumentParser(Path(__file__).name, description=about, **options)
    add_common_options(parser)
    option = functools.partial(add_option, parser.add_argument_group("ppo_atari.py"))
    probability, precisions = number(float, 0, 1), ("auto", "fp32", "bf16")
    option("--env", game_name, "Breakout", "also as BreakoutNoFrameskip-v4 or ALE/Breakout-v5")
    option("--num-steps", number(int, 1, 100_000), 128, "T, steps per game and iteration")
    option("--frameskip", number(int, 1), 4, "frames that an action lasts; Gymnasium's v5: 4")
    option("--sticky-actions", probability, 0.0, "P(a frame repeats the last action); v5: 0.25")
    option("--full-action-space", bool, False, "all 18 actions, also those that the game ignores")
    option("--episodic-life", bool, True, "an episode ends with a life; Gymnasium: off")
    option("--noop-max", number(int, 0, 1000), 30, "a game begins with 1 to so many no-ops; v5: 0")
    option("--fire", bool, True, "an episode starts with FIRE if the game has it; Gymnasium: off")
    option("--anneal-clip", bool, True, "lower ε linearly to 0 over the run, as the learning rate")
    option("--precision", str, "auto", "auto: bf16 if that is faster", choices=precisions)
    option("--compile", bool, False, "torch.compile the loss, for GPUs; needs a C++ compiler")
    parser.set_defaults(num_workers=num_cores(), num_envs=8, clip_coef=0.1)
    return parser


def num_cores():
    """Return the number of cores that this process may use, its share if torchrun started it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def add_common_options(parser):
    """Add the options that all scripts of the family share, with the defaults of ppo.py."""
    natural, count, many = number(int, 0), number(int, 1), number(int, 1, 100_000)
    positive, coefficient, fraction = number(float, 1e-300), number(float, 0), number(float, 0, 1)
    option = functools.partial(add_option, parser.add_argument_group("run"))
    option("--seed", number(int, 0, 2**63 - 1), 1, "seed of all generators")
    option("--device", str, "auto", "auto, cpu, cuda or mps; auto is cpu, for Atari cuda if there")
    option("--num-workers", natural, 0, "processes that step the games; 0: step them in this one")
    option("--log-dir", os.path.abspath, "runs", "folder that receives the run's own folder")
    option("--run-name", str, None, "name of the run's folder, if not env__script__seed__time")
    option("--eval-every", natural, 0, "iterations between evaluations; 0: never")
    option("--eval-episodes", many, 16, "episodes of an evaluation")
    option("--save-every", natural, 50, "iterations between checkpoints; 0: only at the end")
    exclusive = functools.partial(add_option, parser.add_mutually_exclusive_group())
    exclusive("--resume", os.path.abspath, None, "go on with this folder's run, with its options")
    exclusive("--eval", os.path.abspath, None, "evaluate this folder's run, its policy's mode")
    option("--sample", None, False, "with --eval: sample actions instead of taking the mode")
    option("--video", None, False, "with --eval: also write video.mp4")
    option("--export-onnx", None, False, "with --eval: also write policy.onnx, from obs to action")
    option("--quiet", None, False, "print no status lines")
    option = functools.partial(add_option, parser.add_mutually_exclusive_group())
    option("--total-timesteps", count, None, "steps of all games; ppo.py 500000, Atari 10000000")
    option("--num-iterations", count, None, "length of the run in iterations")
    option = functools.partial(add_option, parser.add_argument_group("PPO"))
    option("--num-envs", many, 4, "N, games (actors) side by side; 4 to 64 usual")
    option("--learning-rate", positive, 2.5e-4, "Adam's step size; 1e-5 to 1e-3 usual")
    option("--anneal-lr", bool, True, "lower the learning rate linearly to 0 over the run")
    option("--gamma", fraction, 0.99, "γ, discount per step; 0.9 to 0.9997 usual")
    option("--gae-lambda", fraction, 0.95, "λ of GAE, 0: low variance, 1: no bias; 0.9 to 1 usual")
    option("--num-minibatches", count, 4, "B, minibatches per epoch; divides N · T rows")
    option("--update-epochs", count, 4, "K, passes over the rollout; 3 to 30 usual")
    option("--norm-adv", str, "minibatch", "normalise Â in", choices=("minibatch", "batch", "off"))
    option("--clip-coef", positive, 0.2, "ε, beyond 1 ± ε no ratio is pushed on; 0.1 to 0.3 usual")
    option("--clip-vloss", bool, True, "clip the change of V at ±ε too, in V's units")
    option("--ent-coef", coefficient, 0.01, "c_e, weight of the entropy bonus; 0 to 0.01 usual")
    option("--vf-coef", coefficient, 0.5, "c_v, weight of the value loss; 0.5 to 1 usual")
    option("--max-grad-norm", positive, 0.5, "clip the gradient to this global norm")
    option("--target-kl", positive, None, "end an update when KL(π_old, π) is above; 0.01 to 0.05")


# ------------------------------------------------------------------------------------ train
def train(args):
    """Train as `args` say. Returns the `Run`. Saves, then raises GameError, when a game fails."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a worker that is forked off must not find several
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = make_model(args)
    optimizer = make_optimizer(model)
    model.share_memory()  # on a CPU workers see every update
    with Run(args, model, optimizer, generator) as run:
        torch.set_num_threads(num_threads)
        args.quiet or RANK or print(settings(args, model), flush=True)
        while run.goes_on():
            remaining = 1 - run.iteration / args.num_iterations
            rate = args.learning_rate * (remaining if args.anneal_lr else 1)
            optimizer.param_groups[0]["lr"] = rate
            clip_coef = args.clip_coef * (remaining if args.anneal_clip else 1)
            # Sample: T steps in each of N games with the policy π_old.
            buffer, episodes = rollout(model, run.pool, args, generator)
            # Judge: was an action better than the value function expected?
            batch = make_batch(buffer, model.inputs, args)
            row = {"explained_variance": explained_variance(batch)}
            # Learn: K epochs of minibatch steps towards the better actions.
            row |= update(model, optimizer, batch, args, clip_coef, generator)
            run.end_iteration(row, episodes, global_step=args.num_envs * args.num_steps)
            if "eval_return" in row:  # `log` adds it; a picture of where its last game ended
                arrays = run.eval_pool.arrays
                picture = arrays["next_obs"][arrays["ended"].argmax(), ..., -1]
                run.events.add_image("eval/end", picture, row["global_step"], dataformats="HW")
    return run


def settings(args, model):
    """Return the line that a run starts with: what is played, and how."""
    names = "frameskip sticky_actions full_action_space episodic_life noop_max fire num_workers"
    shown = ", ".join(f"{name} {getattr(args, name)}" for name in names.split())
    return f"{args.env}: {shown}, precision {'bf16' if model.bf16 else 'fp32'}"


# ------------------------------------------------------------------------------------ rollout
STEP_RESULTS = "next_obs rewards terminated truncated ended episode_return episode_length".split()


@torch.no_grad()
def rollout(model, pool, args, generator):
    """Take T steps in all N games with the current policy. Returns the buffer, tensors (T, N, ...):
    obs, actions, logprobs, values, next_values, rewards, terminated, truncated; and the (return,
    length) of the games that ended, both of all ranks. On a CPU the next rollout overwrites the
    buffer. Values and logprobs come from passes over all steps, with the update's own arithmetic
    (but for --compile): its first ratios are 1, whatever the workers' rounding."""
    buffer, T, N = shared_buffer(pool.arrays), args.num_steps, args.num_envs
    noise = model.head.noise(T * N, generator).view(T, N, -1)
    buffer["noise"][:] = noise.chunk(NUM_RANKS, 1)[RANK]  # of this rank's games
    pool.player.load_state_dict(model.state_dict())  # on a CPU they are the same
    pool.call("rollout")
    ends = ("ended", "episode_return", "episode_length")
    ended, returns, lengths = gathered({k: torch.tensor(buffer[k]) for k in ends}).values()
    episodes = [*zip(returns[ended].tolist(), lengths[ended].tolist())]
    next_obs = torch.from_numpy(buffer["next_obs"])
    names = ("obs", "actions", "rewards", "terminated", "truncated")
    buffer = {name: torch.from_numpy(buffer[name]).to(model.device) for name in names}
    # In pieces: on a CPU that is faster than 1,000 pictures at once.
    pieces = [model(obs) for obs in buffer["obs"].split(32)]
    pi, values = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    # V(s_{t+1}) is the next row's, but for a time limit's end and the end of the rollout; where the
    # step `terminated`, gae ignores it.
    next_values, apart = values.roll(-1, 0), buffer["truncated"].clone()
    apart[-1] = True
    next_values[apart] = model(next_obs[apart.cpu()].to(model.device))[1]
    buffer |= {"values": values, "next_values": next_values}
    buffer["logprobs"] = model.head.log_prob(pi, buffer["actions"])
    return gathered(buffer), episodes


@torch.no_grad()
def play_steps(games):
    """Fill the games' part of the buffer: their model acts in them for T steps."""
    model, arrays, buffer = games.model, games.arrays, games.buffer
    with model.autocast():
        for t, noise in enumerate(torch.from_numpy(buffer["noise"])):
            model.act(arrays, noise)
            for name in model.stored:  # what the policy saw and did
                buffer[name][t] = arrays[name]
            games.call("step")
            for name in STEP_RESULTS:  # what came of it
                buffer[name][t] = arrays[name]


# ------------------------------------------------------------------------------------ GAE
def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimation; all tensors are (T, N). `next_values[t]` is V of where step
    t led: nothing if it `terminated` the episode. Both kinds of end stop the sum over steps."""
    assert all(x.shape == rewards.shape for x in (values, next_values, terminated, truncated))
    # PPO, Eq. (12): δ_t = r_t + γ V(s_{t+1}) (1 − terminated_t) − V(s_t); Â_t is δ_t at first
    advantages = rewards + gamma * next_values * ~terminated - values
    decay = gamma * gae_lambda * ~(terminated | truncated)  # γλ (1 − done_t)
    A, decay = advantages.unbind(), decay.unbind()  # views of each step's row, (N,)
    for t in reversed(range(len(A) - 1)):  # the last step's Â_t remains its δ_t: V for the rest
        # GAE, Eq. (16): Â_t = δ_t + γλ (1 − done_t) Â_{t+1}
        A[t].addcmul_(decay[t], A[t + 1])  # in place: adds the product
    return advantages


def make_batch(buffer, inputs, args):
    """Add advantages and returns to a buffer and flatten it: (T, N, ...) → (T·N, ...)."""
    names = ("rewards", "values", "next_values", "terminated", "truncated")
    advantages = gae(*(buffer[name] for name in names), args.gamma, args.gae_lambda)
    batch = {name: buffer[name] for name in (*inputs, "actions", "logprobs", "values")}
    batch |= {"advantages": advantages, "returns": advantages + buffer["values"]}
    return {name: column.flatten(0, 1) for name, column in batch.items()}


def explained_variance(batch):
    """1 − Var(R − V) / Var(R): 1 is a perfect value function, 0 no better than a constant."""
    unexplained, variance = (batch["returns"] - batch["values"]).var(), batch["returns"].var()
    return float(1 - unexplained / variance) if variance > 0 else math.nan


# ------------------------------------------------------------------------------------ losses
def losses(model, batch, clip_coef, clip_vloss):
    """PPO's loss terms, row by row. `batch` holds obs (M, ...) and the model's other inputs,
    actions (M, ...), logprobs and values of π_old, advantages, returns (M,). Returns pg_loss,
    v_loss, entropy, logratio = log r_t(θ), (M,); or (T, M) with a recurrent policy of `ppo.py`."""
    pi, values = model(**{name: batch[name] for name in model.inputs})
    logratio = model.head.log_prob(pi, batch["actions"]) - batch["logprobs"]
    advantages, returns = batch["advantages"], batch["returns"]
    assert logratio.shape == values.shape == advantages.shape == returns.shape
    # PPO, Eq. (7): −min(r_t(θ) Â_t, clip(r_t(θ), 1−ε, 1+ε) Â_t); min: the way back has a gradient
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    pg_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)
    # PPO, Eq. (9), second term: (V_θ(s_t) − R_t)²; halved at the end
    v_loss = (values - returns).square()
    if clip_vloss:  # or, if larger, (V_old + clip(V_θ − V_old, −ε, ε) − R_t)²: not in the paper
        change = (values - batch["values"]).clamp(-clip_coef, clip_coef)
        v_loss = torch.max(v_loss, (batch["values"] + change - returns).square())
    return pg_loss, 0.5 * v_loss, model.head.entropy(pi), logratio


# ------------------------------------------------------------------------------------ update
def update(model, optimizer, batch, args, clip_coef, generator):
    """Take K epochs of minibatch steps on the rows of `batch`. Return the means of the losses."""
    assert all(p.grad._base is model.gradient for p in model.parameters()), "see make_optimizer"
    seen, B, mine = [], args.num_minibatches, slice(RANK, None, NUM_RANKS)  # rows of this rank
    loss_terms = torch.compile(losses, mode="reduce-overhead") if args.compile else losses
    clip_coef = torch.tensor(clip_coef, device=model.device)  # a float would be compiled in
    if args.norm_adv == "batch":
        batch = batch | {"advantages": normalised(batch["advantages"])}
    for _ in range(args.update_epochs):
        rows = torch.randperm(len(batch["obs"]), generator=generator).to(batch["obs"].device)
        for mb_rows in rows.chunk(B):
            mb = {name: column.index_select(0, mb_rows) for name, column in batch.items()}
            if args.norm_adv == "minibatch":
                mb["advantages"] = normalised(mb["advantages"])
            mb = {name: column[mine] for name, column in mb.items()}
            *terms, logratio = loss_terms(model, mb, clip_coef, args.clip_vloss)
            pg_loss, v_loss, entropy = [term.mean() for term in terms]
            ratio = logratio.exp()
            approx_kl = (ratio - 1 - logratio).mean()  # estimates KL(π_old, π) without bias, ≥ 0
            clipfrac = ((ratio - 1).abs() > clip_coef).float().mean()
            # PPO, Eq. (9): loss = E[−L^CLIP + c_v ½ (V_θ − R)² − c_e H]
            loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy
            row = averaged(torch.stack([pg_loss, v_loss, entropy, approx_kl, clipfrac]).detach())
            seen.append(row)
            stop = args.target_kl is not None and row[LOSSES.index("approx_kl")] > args.target_kl
            if stop:
                break
            model.gradient.zero_()  # the parameters' gradients are views of it: `make_optimizer`
            loss.backward()
            norm = float(averaged(model.gradient).norm())
            if not math.isfinite(norm):  # before it reaches the weights
                raise FloatingPointError("no finite gradient: lower --learning-rate?")
            model.gradient.mul_(min(1, args.max_grad_norm / (norm + 1e-6)))  # as clip_grad_norm_
            optimizer.step()
        if stop:
            break
    return dict(zip(LOSSES, torch.stack(seen).mean(dim=0).tolist(), strict=True))


def normalised(advantages):
    """Return advantages with mean 0, deviation 1: one learning rate for rewards of any scale."""
    std, mean = torch.std_mean(advantages)
    return (advantages - mean) / (std + 1e-8)


# ------------------------------------------------------------------------------------ model
def make_model(args):
    """Return the Model for the game, its weights drawn from torch's global generator."""
    with closing(make_env(args.env, full_action_space=args.full_action_space)) as env:
        action_space = env.action_space
    device = args.device
    if device == "auto":  # cuda if there is one for each rank of this machine
        enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if enough else "cpu"
    device = torch.device(device)
    bf16 = args.precision == "bf16" or args.precision == "auto" and has_bf16(device)
    return Model(action_space, bf16).to(device)


def has_bf16(device):
    """Return whether a device computes in bfloat16 faster than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    able = getattr(torch.cpu, "get_capabilities", dict)() if device.type == "cpu" else {}
    without_amx = able.get("avx512_bf16") and not able.get("avx512_fp16")  # slower on Intel's
    return bool(able.get("amx_bf16") or without_amx)


class Model(nn.Module):
    """Policy and value function: three convolutions, 512 features, a head for each. The layers
    under the heads compute in bfloat16 if `bf16`; weights and heads are float32."""

    inputs, stored = ("obs",), ("obs", "actions")  # of `forward`, by a rollout
    device = property(lambda model: model.value.weight.device)  # where it computes

    def __init__(self, action_space, bf16=False):
        super().__init__()
        self.action_space, self.bf16 = action_space, bf16
        self.actor = self.critic = nn.Sequential(
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
        self.head = Categorical(512, [int(action_space.n)])
        layer_init(self.head.logits, 0.1)  # labml's √0.01; Categorical's own gain is 0.01
        self.value = layer_init(nn.Linear(512, 1), 1.0)

    def forward(self, obs):
        """Pictures (..., 84, 84, 4) in uint8 → log-probabilities pi (..., n), values (...)."""
        h = self.features(obs)
        return self.head(h), self.value(h).squeeze(-1)

    def features(self, obs):
        """Pictures (..., 84, 84, 4) in uint8 → what the heads see, of `policy` too, (..., 512)."""
        assert obs.shape[-3:] == (84, 84, 4) and obs.dtype == torch.uint8
        x = obs.flatten(0, -4).permute(0, 3, 1, 2)  # (M, 4, 84, 84), in memory channels last
        with self.autocast():
            h = self.actor(x.to(torch.bfloat16 if self.bf16 else torch.float32).div_(255))
        return h.float().view(*obs.shape[:-3], -1)

    def autocast(self, enabled=True):
        """Return the context in which layers compute in bfloat16, if so; it casts weights once."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled and self.bf16)

    def policy(self, obs, noise=None):
        """Pictures (M, 84, 84, 4) → actions (M,): samples from noise (M, n), else the mode. Also
        returns None, for the memory that policies of `ppo.py` may have."""
        if torch.onnx.is_in_onnx_export():  # other runtimes may not have bfloat16
            self.bf16 = False
        h = self.features(obs)
        with self.autocast(enabled=False):  # float32 for the head, in `play_steps` too
            return self.head.sample(self.head(h), noise), None

    def act(self, arrays, noise=None):
        """Set actions for what the games show: samples from noise (N, n), else the mode."""
        actions, _ = self.policy(torch.from_numpy(arrays["obs"]).to(self.device), noise)
        arrays["actions"][:] = actions.cpu().numpy()


# ------------------------------------------------------------------------ heads and normalisers
def layer_init(layer, gain=2**0.5):
    """Initialise a linear or convolutional layer: orthogonal weight times `gain`, zero bias."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Categorical(nn.Module):
    """Policy head for Discrete, MultiDiscrete, MultiBinary: independent choices, logits in a row.
    `options` are the choices' numbers of options, [n] for Discrete(n); `shape` is an action's."""

    def __init__(self, features, options, shape=()):
        super().__init__()
        self.options, self.shape, self.n = options, shape, sum(options)
        self.logits = layer_init(nn.Linear(features, self.n), 0.01)
        offsets = torch.tensor([0, *options[:-1]]).cumsum(0)  # of each choice's logits
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, h, action_mask=None):
        """Features (M, F), flags of allowed options (M, n) or None → log-probabilities (M, n)."""
        logits = self.logits(h)
        if action_mask is not None:  # −1e8: π is exactly 0, but π log π is no NaN, as it is with −∞
            logits = logits.where(action_mask, -1e8)
        if len(self.options) == 1:  # an update of CartPole's takes 6 % less without split and cat
            return logits.log_softmax(-1)
        return torch.cat([part.log_softmax(-1) for part in logits.split(self.options, -1)], -1)

    def noise(self, batch, generator):
        """Standard Gumbel noise, (batch, n)."""
        return -torch.empty(batch, self.n).exponential_(generator=generator).log()

    def sample(self, logp, noise=None):
        """Actions (M, ...): argmax(log π + Gumbel noise) has the law of π; no noise: the mode."""
        parts = (logp if noise is None else logp + noise).split(self.options, -1)
        actions = torch.stack([part.argmax(-1) for part in parts], -1)
        return actions.view(*logp.shape[:-1], *self.shape)

    def log_prob(self, logp, action):
        """log π(a|s), the sum over the choices, (M,)."""
        columns = action.reshape(*logp.shape[:-1], -1) + self.offsets
        return logp.gather(-1, columns).sum(dim=-1)

    def entropy(self, logp):
        """H = −Σ π log π, (M,)."""
        return -(logp.exp() * logp).sum(dim=-1)


# ------------------------------------------------------------------------------------ speed
def make_optimizer(model):
    """Return Adam for one vector of all parameters: faster than for many small tensors. The
    parameters become views of it, their gradients views of `model.gradient`."""
    parameters, sizes = [*model.parameters()], [p.numel() for p in model.parameters()]
    vector = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach())
    vector.grad = model.gradient = torch.zeros_like(vector)
    parts = vector.detach().split(sizes), vector.grad.split(sizes)
    for parameter, values, gradient in zip(parameters, *parts, strict=True):
        parameter.data, parameter.grad = values.view_as(parameter), gradient.view_as(parameter)
    optimizer = torch.optim.Adam([vector], eps=1e-5, fused=True)
    optimizer.zero_grad = lambda set_to_none=False: model.gradient.zero_()  # None would cut them
    return optimizer


def keep_freed_memory():
    """Have glibc keep what is freed: new pages for every array cost up to a quarter of the time."""
    with suppress(AttributeError, TypeError):  # another C library
        mallopt, M_TRIM_THRESHOLD, M_MMAP_MAX = ctypes.CDLL(None).mallopt, -1, -4
        mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


# ------------------------------------------------------------------------------------ games
def game_name(name):
    """Return a game's short name: `BreakoutNoFrameskip-v4`, `ALE/Breakout-v5` → `Breakout`."""
    import ale_py

    gym.register_envs(ale_py)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
    games = [id[4:-3] for id in gym.registry if re.fullmatch(r"ALE/.*-v5", id)]
    game = re.sub(r"^ALE/|(NoFrameskip|Deterministic)?-v\d+$", "", name)
    return next((known for known in games if known.lower() == game.lower()), game)


def make_env(env_id, sticky_actions=0.0, full_action_space=False, render_mode=None):
    """Return the Gymnasium env of a game, one frame per step."""
    options = {"frameskip": 1, "repeat_action_probability": sticky_actions}
    options |= {"full_action_space": full_action_space, "render_mode": render_mode}
    options["obs_type"] = "ram"  # small: `Game` looks at the screen itself, not at every frame
    env = gym.make(f"ALE/{game_name(env_id)}-v5", disable_env_checker=True, **options)
    env.metadata = env.metadata | {"render_fps": 60}
    return env


class Game:
    """An Atari game as the policy sees it (Mnih et al. 2015): row n of the arrays that all share.
    An action lasts `frameskip` frames. The maximum of the last two, grey, shrunk to 84 × 84, is a
    picture; the last four pictures are the observation, (84, 84, 4). An episode ends with a life,
    the next one goes on with the same game unless that is over. Rewards are the score's sign;
    `ended`, the return (the true score) and the length (in steps) are of whole games, not lives."""

    def __init__(self, args, n, seed, arrays, **options):
        self.name, self.n, self.seed, self.args, self.arrays = args.env, n, seed, args, arrays
        self.env = make_env(args.env, args.sticky_actions, args.full_action_space, **options)
        self.close = self.env.close
        self.ale, self.obs = self.env.unwrapped.ale, arrays["obs"][n]
        actions = self.env.unwrapped.get_action_meanings()
        self.noop_max = args.noop_max if actions[0] == "NOOP" else 0  # in Backgammon it is FIRE
        self.fire = actions.index("FIRE") if args.fire and "FIRE" in actions else None
        self.screens = np.zeros((2, *self.ale.getScreenDims()), np.uint8)  # last, the one before
        self.game_over, self.score, self.length = True, 0.0, 0

    def start(self, states=None):
        """Start from the game's seed, or go on from its state among those of all N games."""
        if states and states[self.n]:
            try:
                return self.set_state(states[self.n])
            except Exception as error:  # of any kind, if the env's packages are others than then
                report(f"{self.name} starts a new episode: {one_line(error)}")
        self.reset(self.seed)

    def reset(self, seed=None):
        """Start an episode: with the next life, or a new game if it is over or with a seed."""
        if self.game_over or seed is not None:
            self.new_game(seed)
        else:
            self.press(0)
        if self.fire is not None and not self.game_over:
            self.press(self.fire)
        if self.game_over:  # these presses have ended it
            self.reset()
        else:
            self.obs[:] = self.picture()[..., None]

    def new_game(self, seed):
        """Start a new game; return and length of the one before stay in `last_game`."""
        self.last_game, self.score, self.length = (self.score, self.length), 0.0, 0
        self.env.reset(seed=seed)
        noops = self.env.unwrapped.np_random.integers(self.noop_max) + 1 if self.noop_max else 0
        for _ in range(noops):
            _, reward, terminated, truncated, _ = self.env.step(0)
            self.score += reward
            if terminated or truncated:
                self.score = 0.0
                self.env.reset()
        self.game_over, self.lives = False, self.ale.lives()
        self.ale.getScreenGrayscale(self.screens[0])
        self.screens[1] = 0

    def press(self, action):
        """Hold an action for `frameskip` frames. Returns score, whether terminated, truncated."""
        score = 0.0
        for frames_left in reversed(range(self.args.frameskip)):
            _, reward, terminated, truncated, info = self.env.step(action)
            score += reward
            self.game_over = terminated or truncated
            terminated |= self.args.episodic_life and info["lives"] < self.lives
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
        """Take one step, start the next episode if this one ended: then `next_obs` is its last
        observation, and `obs` the next one's first."""
        arrays, n = self.arrays, self.n
        score, terminated, truncated = self.press(int(arrays["actions"][n]))
        self.length, self.last_game = self.length + 1, None  # unless `new_game` sets it below
        # The four pictures are the four bytes of a number: a shift is much faster than np.roll.
        pictures = self.obs.view("<u4")[..., 0]
        pictures >>= 8
        pictures |= self.picture().astype("<u4") << 24
        arrays["next_obs"][n], arrays["rewards"][n] = self.obs, np.sign(score)
        arrays["terminated"][n], arrays["truncated"][n] = terminated, truncated and not terminated
        if terminated or truncated:
            self.reset()
        game = self.last_game or (self.score, self.length)
        arrays["ended"][n] = self.last_game is not None
        arrays["episode_return"][n], arrays["episode_length"][n] = game

    def get_state(self):
        """Return what `set_state` needs beside the arrays to go on as if nothing had happened, but
        for a sticky action, which ALE does not tell, and Qbert and Tetris: it keeps less."""
        kept = {k: getattr(self, k) for k in "seed screens game_over score length lives".split()}
        return kept, self.ale.cloneState(include_rng=True), self.env.unwrapped.np_random

    def set_state(self, state):
        """Go on from the state of a game like this one."""
        self.env.reset()
        kept, ale_state, self.env.unwrapped.np_random = state
        vars(self).update(kept)
        self.ale.restoreState(ale_state)


class Games:
    """The games of one worker, those in `rows` of all N, and the `model` that plays rollouts."""

    def __init__(self, args, model, seeds, rows, arrays, **options):
        if multiprocessing.parent_process():  # a worker has one core
            cv2.setNumThreads(1)
        own = slice(rows[0], rows[-1] + 1)
        self.arrays = {name: array[own] for name, array in arrays.items() if name[0] != "*"}
        self.model, self.buffer = model, shared_buffer(arrays, own)
        self.games = [Game(args, n, int(seeds[n]), arrays, **options) for n in rows]

    def call(self, command, *arguments):
        """Have one game after the other carry out a command. Returns their answers."""
        if command == "rollout":  # T steps of all of them
            return play_steps(self)
        answers = []
        try:
            for game in self.games:
                answers.append(getattr(game, command)(*arguments))
        except (Exception, SystemExit) as error:
            what = f"{game.name} (seed {game.seed}) failed in {command}: {one_line(error)}"
            raise GameError(f"{what}\n{traceback.format_exc()}") from None
        return answers


def shared_buffer(arrays, rows=slice(None)):
    """Return the rollout's buffer among the shared arrays, {name: (T, N, ...)}, for these games."""
    return {name[1:]: array[:, rows] for name, array in arrays.items() if name[0] == "*"}


def game_seeds(args, starts):
    """Return the seeds of this rank's games, (N,): others each time that games start anew."""
    seeds = np.random.SeedSequence([args.seed, starts]).generate_state(args.num_envs)
    return np.split(seeds, NUM_RANKS)[RANK]


def make_pool(args, model, seeds, num_workers, num_steps=None, **options):
    """Return the pool of one game per seed. Its workers play with its `player`, the model if on a
    CPU, else a copy. Arrays of the last step are (N, ...), the rollout's are (T, N, ...), *name."""
    keep_freed_memory()
    T, N, frames = args.num_steps if num_steps is None else num_steps, len(seeds), (84, 84, 4)
    arrays = {"obs": (frames, "uint8"), "next_obs": (frames, "uint8"), "rewards": ((), "float32")}
    arrays |= {name: ((), "bool") for name in ("terminated", "truncated", "ended")}
    arrays |= {"episode_return": ((), "float64"), "episode_length": ((), "int64")}
    arrays |= {"actions": ((), "int64"), "noise": ((model.head.n,), "float32")}
    layout = {name: ((N, *shape), dtype) for name, (shape, dtype) in arrays.items()}
    layout |= {f"*{name}": ((T, N, *shape), dtype) for name, (shape, dtype) in arrays.items()}
    player = model
    if T and model.device.type != "cpu":
        player = copy.deepcopy(model).cpu().share_memory()
        player.bf16, player.gradient = model.bf16 and has_bf16(player.device), None
    games = functools.partial(Games, args, player, seeds, **options)
    pool = WorkerPool(games, layout, N, num_workers)
    pool.player = player
    return pool


# ------------------------------------------------------------------------------------ worker pool
class GameError(RuntimeError):
    """A game or a worker failed: a line that says which and how, then the game's own traceback."""


class WorkerPool:
    """N games in `num_workers` processes, 0: in this one, made by `make_games(rows, arrays)`.
    What games and policy show each other is in `arrays`, which all processes share; only commands
    and answers go through pipes. Raises GameError when a game raises or a worker dies."""

    def __init__(self, make_games, layout, num_envs, num_workers, start_method=None):
        # A fork shares the memory of all imported libraries, but is safe on Linux only.
        start_method = start_method or ("fork" if sys.platform == "linux" else "spawn")
        context, shared, self.workers = multiprocessing.get_context(start_method), {}, []
        for name, (shape, dtype) in layout.items():
            # Multiples of 64 bytes align all arrays alike: torch's rounding may depend on that.
            size = math.prod(shape) * np.dtype(dtype).itemsize // 64 * 64 + 64
            shared[name] = shape, dtype, context.RawArray("b", size)
        self.arrays = {name: np.ndarray(*array) for name, array in shared.items()}
        self.games = None if num_workers else make_games(range(num_envs), self.arrays)
        for rows in np.array_split(range(num_envs), min(num_workers, num_envs) or 1)[:num_workers]:
            pipe, end = context.Pipe()
            child = context.Process(target=work, args=(end, make_games, rows, shared), daemon=True)
            child.start(), end.close()
            self.workers.append((pipe, child))

    def call(self, command, *arguments):
        """Have all games carry out a command. Returns the list of the workers' answers."""
        if self.games is not None:
            return [self.games.call(command, *arguments)]
        answers = []
        for pipe, _ in self.workers:
            with suppress(BrokenPipeError):  # a dead worker does not answer
                pipe.send((command, *arguments))
        for i, (pipe, process) in enumerate(self.workers):
            try:
                answers.append(pipe.recv())
            except (EOFError, OSError):
                process.join()
                raise GameError(f"worker {i} died with exit code {process.exitcode}") from None
            if isinstance(answers[i], GameError):
                raise answers[i]
        return answers

    def close(self):
        """Close the games and end the processes, after 30 seconds (Ctrl-C: 5) busy ones too."""
        self.games is None or self.games.call("close")
        end = time.monotonic() + (5 if sys.exc_info()[0] is KeyboardInterrupt else 30)
        with ExitStack() as stack:  # its end, reached by Ctrl-C too, kills whoever does not
            for pipe, process in self.workers:
                stack.callback(process.join)
                stack.callback(process.kill)
                with suppress(OSError):
                    pipe.send(("close",))
            for _, process in self.workers:
                process.join(max(0, end - time.monotonic()))
            any(p.is_alive() for _, p in self.workers) and report("killed: workers with busy games")


def work(pipe, make_games, rows, shared):
    """Be a worker: make its games, have them carry out one command after the other, close them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # both signals are the main process's to handle;
    signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which a game's programs inherit
    parent, command = multiprocessing.parent_process().sentinel, None
    seeds = np.random.SeedSequence([torch.initial_seed(), RANK, int(rows[0])]).generate_state(2)
    np.random.seed(seeds[0]), torch.manual_seed(int(seeds[1]))  # else games of all forks draw alike
    torch.set_num_threads(1)  # a worker has one core; threads of before the fork would hang
    try:
        games = make_games(rows, {name: np.ndarray(*array) for name, array in shared.items()})
        while command != "close" and pipe in multiprocessing.connection.wait([pipe, parent]):
            command, *arguments = pipe.recv()
            pipe.send(games.call(command, *arguments))
    except BaseException as error:  # also what would end a process without a word
        with suppress(OSError):  # the parent is gone
            message = f"a worker failed: {one_line(error)}\n{traceback.format_exc()}"
            pipe.send(error if isinstance(error, GameError) else GameError(message))
    with suppress(Exception):  # there may be no games, or one that fails in this too
        command == "close" or games.call("close")


# ------------------------------------------------------------------------------------ ranks
# torchrun starts several processes, the ranks, to train one model. Each has its share of the games,
# gets the rows of all, takes its share of each minibatch; then the ranks average their gradients.

TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
RANK, NUM_RANKS = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE")) if TORCHRUN else (0, 1)


def report(message):
    """Print a message, once for all ranks; no error if nobody reads: `stop` is called anywhere."""
    with suppress(OSError):
        RANK or print(message, file=sys.stderr, flush=True)


def gathered(buffer):
    """Return a buffer, tensors (T, N, ...), with the games of all ranks side by side."""
    if NUM_RANKS == 1:
        return buffer
    parts = gathered_objects({name: column.cpu() for name, column in buffer.items()})
    return {n: torch.cat([p[n] for p in parts], 1).to(buffer[n].device) for n in buffer}


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
    """Return the mean of the ranks' tensors, which replaces this one."""
    if NUM_RANKS > 1:
        dist.all_reduce(tensor)
        tensor /= NUM_RANKS
    return tensor


# ------------------------------------------------------------------------------------ run folder
COUNTERS = {"iteration": 0, "global_step": 0, "wall_seconds": 0.0, "starts": 0}
CHARTS = "episodic_return episodic_length eval_return eval_cut learning_rate".split()
LOSSES = "policy_loss value_loss entropy approx_kl clipfrac".split()  # as `update` stacks them
TAGS = {"sps": "charts/SPS"} | {name: f"charts/{name}" for name in CHARTS}  # of TensorBoard
TAGS |= {n: f"losses/{n}" for n in (*LOSSES, "explained_variance")}
COLUMNS = [*(COUNTERS | TAGS)]  # of progress.csv


class Run(AbstractContextManager):
    """A run of `train`: its games (`pool`), counters, folder, logged rows (`history`), and the
    `signal` that stopped it, or None. Its end closes all and saves, after a game's failure too."""

    iteration = property(lambda run: run.counters["iteration"])  # how many are complete

    def __init__(self, args, model, optimizer, generator):
        self.args, self.model, self.optimizer, self.generator = args, model, optimizer, generator
        self.counters, self.history, self.recent, self.signal = dict(COUNTERS), [], [], None
        self.saved, self.again, self.run_dir = None, [], Path(args.resume or run_path(args))
        with ExitStack() as self.stack:  # which closes what is open if this block fails
            for signum in (signal.SIGINT, signal.SIGTERM):
                if threading.current_thread() is threading.main_thread():
                    self.stack.callback(signal.signal, signum, signal.signal(signum, self.stop))
            arrays, states = self.restore() if args.resume else ({}, None)
            if NUM_RANKS > 1:
                backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
                dist.init_process_group(backends, timeout=datetime.timedelta(days=1))
                self.stack.callback(dist.destroy_process_group)
            seeds = game_seeds(args, self.counters["starts"])
            pool = make_pool(args, model, seeds, args.num_workers)
            self.pool = self.stack.enter_context(closing(pool))
            if RANK == 0:
                self.open_files()
            for name, array in arrays.items():
                self.pool.arrays[name][:] = array
            self.stack, self.states, self.started = self.stack.pop_all(), states, None

    def __exit__(self, kind, _, trace):
        with self.stack:  # which closes all; first save, as a `break` out of train's loop has not
            # A second Ctrl-C saves too if games are busy: one may hang, but no update is half done.
            busy = any(f.f_code is WorkerPool.call.__code__ for f, _ in traceback.walk_tb(trace))
            new = (not kind or kind is KeyboardInterrupt and busy) and self.saved != self.iteration
            if new or kind in (GameError, BrokenPipeError):
                self.save(with_games=not kind or kind is BrokenPipeError and NUM_RANKS == 1)

    def stop(self, signum, _):
        """Note a signal. Another one within a second is the same, a later Ctrl-C stops at once."""
        if self.signal is None:
            self.signal, self.asked = signum, time.monotonic()
            report("stopping after this iteration; Ctrl-C once more to stop now")
        elif signum == signal.SIGINT and NUM_RANKS == 1 and time.monotonic() > self.asked + 1:
            report("stopped at once; iterations since the last checkpoint may be lost")
            raise KeyboardInterrupt

    def goes_on(self):
        """Start the games at first. Return whether another iteration begins now; if not, save."""
        if self.started is None:
            self.pool.call("start", vars(self).pop("states"))  # may be large
            for row in self.again:
                self.log(row)
        if self.args.eval_every and not (self.history or self.signal):
            self.log(dict(self.counters))
        self.started = time.perf_counter()
        agreed = max(gathered_objects(self.signal or 0))  # which any of the ranks has received
        self.signal = agreed or self.signal
        going = self.iteration < self.args.num_iterations and not agreed
        if not going and self.saved != self.iteration:
            self.save()
        return going

    def end_iteration(self, row, episodes, **counts):
        """Add up the `counts`, log the row and the episodes' (return, length), save at times."""
        seconds = time.perf_counter() - self.started
        for name, count in (counts | {"iteration": 1, "wall_seconds": seconds}).items():
            self.counters[name] += count
        self.recent = (self.recent + episodes)[-100:]
        means = np.mean(self.recent or [(math.nan, math.nan)], axis=0).tolist()
        row |= self.counters | dict(zip(("episodic_return", "episodic_length"), means))
        row["sps"] = round(counts["global_step"] / seconds)
        row["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        self.log(row)
        if self.args.save_every and self.iteration % self.args.save_every == 0:
            self.save()

    def log(self, row):
        """Evaluate if it is due, add that to the row, write and print the row."""
        args, done, total = self.args, self.iteration, self.args.num_iterations
        self.history.append(row)
        if RANK > 0:
            return
        if args.eval_every and (done % args.eval_every == 0 or done == total):
            row["eval_return"] = math.nan  # made again by --resume if it stays so
            # New games: what wrappers have learned of observations is gone, as it is for --eval.
            with closing(make_eval_pool(args, self.model)) as self.eval_pool:
                returns, cut = evaluate(self.model, self.eval_pool, run=self)
            if not self.signal:  # which has cut it short
                row |= {"eval_return": float(returns.mean())} | ({"eval_cut": cut} if cut else {})
        self.writer.writerow(row)
        shown = {TAGS.get(k, k): row[k] for k in row if k not in COUNTERS and math.isfinite(row[k])}
        values = [self.Summary.Value(tag=tag, simple_value=x) for tag, x in shown.items()]
        self.events.file_writer.add_summary(self.Summary(value=values), row["global_step"])
        line = f"update {done}/{total}  steps {row['global_step']:,}"
        for name in ("sps", "episodic_return", "eval_return", "eval_cut"):
            line += f"  {name} {row[name]:,.6g}" if name in row else ""
        left = round(min(row["wall_seconds"] / max(done, 1) * (total - done), 1e9))
        line += f"  ETA {datetime.timedelta(seconds=left)}" if done else ""
        args.quiet or print(line, flush=True)

    def open_files(self):
        """Write config.json, open progress.csv and TensorBoard's file."""
        from torch.utils.tensorboard import SummaryWriter, summary  # slow, and for training only

        self.run_dir.mkdir(parents=True, exist_ok=bool(self.args.resume))
        options = {name: value for name, value in vars(self.args).items() if name not in NOT_KEPT}
        versions = {module.__name__: module.__version__ for module in (torch, gym, np)}
        here = {"shell": True, "cwd": Path(__file__).resolve().parent}  # says nothing without git
        git = subprocess.run("git rev-parse HEAD", **here, capture_output=True, text=True)
        versions |= {"python": sys.version.split()[0], "git_commit": git.stdout.strip() or None}
        config = {"options": options, "command": sys.argv, "versions": versions}
        write_file(self.run_dir / "config.json", json.dumps(config, indent=2).encode())
        file = (self.run_dir / "progress.csv").open("w", buffering=1, newline="")  # line by line
        self.writer = csv.DictWriter(self.stack.enter_context(file), COLUMNS, extrasaction="ignore")
        self.writer.writeheader()
        self.writer.writerows(self.history)
        begin = self.counters["global_step"] + 1 - len(self.again)  # later events are dropped
        self.events = SummaryWriter(str(self.run_dir), purge_step=begin)
        self.stack.callback(self.events.close)
        self.Summary = summary.Summary  # one for all of an iteration's numbers: faster
        plain = {k: v if type(v) in (int, float) else str(v) for k, v in options.items()}
        self.events.file_writer.add_summary(summary.hparams(plain, {})[1])  # add_hparams: a new run
        self.args.quiet or self.stack.callback(print, f"run folder: {self.run_dir}")

    def save(self, with_games=True):
        """Write checkpoint.pt, games as bytes that only --resume unpickles; all ranks call this."""
        games, file = None, io.BytesIO()
        if with_games:
            arrays = {k: a for k, a in self.pool.arrays.items() if k[0] != "*"}  # *: Atari's buffer
            games = gathered_objects((arrays, sum(self.pool.call("get_state"), [])))
            games = torch.frombuffer(bytearray(pickle.dumps(games)), dtype=torch.uint8)
        if RANK == 0:
            self.events.flush()  # a checkpoint must not be ahead of TensorBoard's file
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            state |= {"generator": self.generator.get_state(), "counters": self.counters}
            history = json.loads(json.dumps(self.history, default=float))  # plain numbers
            state |= {"history": history, "recent": self.recent, "games": games}
            torch.save(state, file)
            write_file(self.run_dir / "checkpoint.pt", file.getvalue())
        self.saved = self.iteration
        if with_games:
            gathered_objects(None)  # nobody ends, which would end rank 0, before it has saved

    def restore(self):
        """Go on from the checkpoint. Returns the arrays of this rank's games, and their states."""
        state, parts = load_checkpoint(self.run_dir), []
        with suppress(Exception):  # if a game has failed, or if packages are others than then
            parts = pickle.loads(state["games"].numpy().tobytes())
        fits = len(parts) == NUM_RANKS
        if lost := sum(states.count(None) for _, states in parts) if fits else "all":
            report(f"{lost} games start new episodes: one had failed, or their state is not kept")
            state["counters"]["starts"] += 1
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.history, self.recent = state["history"], state["recent"]
        if self.history and math.isnan(self.history[-1].get("eval_return", 0)):
            self.again = [self.history.pop()]  # whose evaluation was not completed
        self.counters, self.saved = state["counters"], state["counters"]["iteration"]
        self.saved < self.args.num_iterations or report("run complete; longer: --num-iterations N")
        return parts[RANK] if fits else ({}, None)


def run_path(args):
    """Return the path of a new run's folder, with an underscore for what may not be in a name."""
    stamp, script = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f"), Path(__file__).stem
    name = args.run_name or f"{args.env[-100:]}__{script}__{args.seed}__{stamp}"
    return Path(args.log_dir) / re.sub(r"[^\w.=,+-]+", "_", name)


def write_file(path, content):
    """Write bytes to a file atomically: whoever dies here, or finds no room, leaves the old one."""
    with path.with_suffix(".partial").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def load_checkpoint(run_dir):
    """Read RUN_DIR/checkpoint.pt: tensors and plain values, no code runs from the file."""
    path = Path(run_dir) / "checkpoint.pt"
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not all(weights.isfinite().all() for weights in state["model"].values()):
        raise ValueError(f"{path} has NaN or infinity among its weights")
    return state


# ------------------------------------------------------------------------------------ evaluation
EVAL_SEED = 10_000  # evaluation games have their own seeds, the same in every run
EVAL_STEPS = 27_000  # an evaluation takes no more, to end always; ALE's own limit


def make_eval_pool(args, model, episodes=None, **options):
    """Return the pool of evaluation games."""
    seeds = EVAL_SEED + np.arange(episodes or args.eval_episodes)
    return make_pool(args, model, seeds, 0, num_steps=0, **options)


@torch.no_grad()
def evaluate(model, pool, generator=None, run=None):
    """Play an episode in every game with the policy's mode, or samples (generator). Returns the
    returns (E,), and how many were cut off: after EVAL_STEPS, or by a signal for the `run`."""
    arrays, E = pool.arrays, len(pool.arrays["obs"])
    pool.call("start")
    returns, going = np.zeros(E), np.ones(E, bool)
    for _ in range(EVAL_STEPS):
        model.act(arrays, generator and model.head.noise(E, generator).to(model.device))
        pool.call("step")
        returns[going] = arrays["episode_return"][going]
        going &= ~arrays["ended"]
        if not going.any() or run and run.signal:
            break
    return returns, int(going.sum())


def evaluate_run(args):
    """Evaluate the checkpoint of a run, as --eval says. Returns the returns, (E,)."""
    model, run_dir = make_model(args), Path(args.eval)
    model.load_state_dict(load_checkpoint(run_dir)["model"])
    generator = torch.Generator().manual_seed(EVAL_SEED) if args.sample else None
    with closing(make_eval_pool(args, model)) as pool:
        returns, cut = evaluate(model, pool, generator)
        inputs = {name: pool.arrays[name][:1] for name in model.inputs if name != "starts"}
    of = args.env + (f" level {args.eval_level}" if "eval_level" in args else "")
    of += f", {cut} cut off at {EVAL_STEPS:,} steps" * (cut > 0)
    print(f"return {returns.mean():.4f} ± {returns.std():.4f} over {len(returns)} episodes of {of}")
    if args.export_onnx:
        export_onnx(run_dir / "policy.onnx", model, inputs)
        print(f"policy: {run_dir / 'policy.onnx'}")
    if args.video:
        try:
            with closing(make_eval_pool(args, model, 1, render_mode="rgb_array")) as pool:
                (game,) = pool.games.games
                game.env = Camera(game.env)
                game.env.path = str(run_dir / "video.mp4")
                evaluate(model, pool, generator)
        except Exception as error:
            raise GameError(f"argument --video: no film, see README: {one_line(error)}") from None
        print(f"video: {run_dir / 'video.mp4'}")
    return returns


class Camera(gym.ObservationWrapper):
    """Films an env's first episode, its last state too, at the env's speed."""

    path, film, episode = None, None, 0

    def reset(self, **options):
        self.episode += 1
        return super().reset(**options)

    def observation(self, obs):
        """Add a picture of the env to the film, at every reset and step."""
        import cv2

        if self.episode == 1:
            picture = np.ascontiguousarray(self.env.render()[..., ::-1])  # OpenCV wants BGR
            fps, code = self.env.metadata.get("render_fps", 30), cv2.VideoWriter_fourcc(*"mp4v")
            self.film = self.film or cv2.VideoWriter(self.path, code, fps, picture.shape[1::-1])
            if not self.film.isOpened() or (picture.shape[2:], picture.dtype) != ((3,), np.uint8):
                raise OSError(f"{self.path} cannot be written, or render is not uint8 (H, W, 3)")
            self.film.write(picture)
        return obs


def export_onnx(path, model, inputs):
    """Write the policy's mode: from obs, action_mask, state (zeros at an episode's start), those of
    them in `inputs`, to action, as the env takes it, and next_state. Its `forward` is lost."""
    outputs = ["action", "next_state"] if "state" in inputs else ["action"]
    options = {"input_names": list(inputs), "output_names": outputs, "dynamo": False}
    options["dynamic_axes"] = {name: {0: "batch"} for name in (*inputs, *outputs)}

    def policy(*tensors):
        action, state = model.policy(**dict(zip(inputs, tensors, strict=True)))
        if isinstance(space := model.action_space, gym.spaces.Box):  # as in `to_env`
            action = action.clamp(torch.as_tensor(space.low), torch.as_tensor(space.high))
        action = action + torch.as_tensor(np.int64(getattr(space, "start", 0)))
        return action if state is None else (action, state)

    model.cpu().forward = policy  # which the exporter calls
    warnings.simplefilter("ignore")  # the exporter speaks of its successor
    torch.onnx.export(model, (*map(torch.from_numpy, inputs.values()),), str(path), **options)


# ------------------------------------------------------------------------------------ command line
# What may be another for a run that goes on or is evaluated; what config.json does not keep.
MAY_CHANGE = "device num_workers total_timesteps num_iterations eval_every eval_episodes save_every"
NOT_KEPT = {"resume", "eval", "sample", "video", "export_onnx", "quiet"}


def add_option(group, name, kind, default, text, **more):
    """Add an option to a parser's group; the kind is a type, bool for --x, --no-x, None for --x."""
    actions = {bool: argparse.BooleanOptionalAction, None: "store_true"}
    more |= {"action": actions[kind]} if kind in actions else {"type": kind}
    group.add_argument(name, default=default, help=text, **more)


def number(kind, low=-math.inf, high=math.inf):
    """Return an argparse type: a `kind` from low to high, within float32's range."""

    def parse(text):
        if low <= (value := kind(text)) <= high and abs(value) < 1e38:
            return value
        raise ValueError

    parse.__name__ = f"{kind.__name__} from {low} to {high}"  # argparse says "invalid int from"
    return parse


def parse_args(argv=None):
    """Parse and check the command line (default: the program's)."""
    parser = make_parser()
    args = parse_with_run(parser, argv)
    make_env(args.env).close()  # does it exist?
    check_rows(parser, args, rows := args.num_envs * args.num_steps)
    if args.total_timesteps or args.num_iterations is None:
        args.num_iterations = max(1, (args.total_timesteps or 10_000_000) // rows)
    if args.compile and not args.eval:
        torch.compile(lambda x: x + 1)(make_model(args).value.bias)  # needs a C++ compiler
    return args


def parse_with_run(parser, argv):
    """Parse argv; with --resume or --eval that run's options are the defaults, and most stay."""
    args = parser.parse_args(argv)
    if not args.eval and (args.sample or args.video or args.export_onnx):
        parser.error("argument --sample, --video, --export-onnx: only with --eval")
    args.eval and NUM_RANKS > 1 and parser.error("argument --eval: takes one process, not torchrun")
    args.export_onnx and __import__("onnx")  # torch needs it for that
    if run_dir := args.resume or args.eval:
        try:
            options = json.loads((Path(run_dir) / "config.json").read_text())["options"]
            if others := options.keys() ^ (vars(args).keys() - NOT_KEPT):
                raise ValueError(f"not a run of this script, see options {sorted(others)[:3]}")
            if args.total_timesteps or args.num_iterations:
                options |= {"total_timesteps": None, "num_iterations": None}
            parser.set_defaults(**options)
            own, args = parser.parse_args([]), parser.parse_args(argv)
            for name in sorted(options.keys() - MAY_CHANGE.split()):
                if (value := getattr(own, name)) != getattr(args, name):
                    name = name.replace("_", "-")
                    parser.error(f"argument --{name}: the run has {value}, which cannot change")
            make_model(args).load_state_dict(load_checkpoint(run_dir)["model"])
        except Exception as error:
            parser.error(f"cannot use the run in {run_dir}: {one_line(error)}")
    torch.zeros(1, device=None if args.device == "auto" else args.device).item()  # is it there?
    args.device == "cuda" and NUM_RANKS > 1 and torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if RANK == 0 and not run_dir:
        (path := run_path(args)).parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # it is free; another OSError: no folder can be called so
            path.stat() and parser.error(f"argument --run-name: {path} is there already")
    return args


def check_rows(parser, args, num_rows, rows="rows"):
    """Refuse minibatches and ranks that cannot share the rows equally, or get too few of them."""
    B, ranks = args.num_minibatches, NUM_RANKS
    if num_rows % (B * ranks) or args.num_envs % ranks:
        option = "envs" if args.num_envs % ranks else "minibatches"
        problem = f"{num_rows} {rows} are not {B} equal minibatches for {ranks} process(es)"
        parser.error(f"argument --num-{option}: {problem}")
    if rows == "rows" and num_rows == {"minibatch": B, "batch": 1}.get(args.norm_adv):
        parser.error(f"argument --num-minibatches: --norm-adv {args.norm_adv} needs 2 rows")


def one_line(error):
    """Return an exception as one line, with the place where it may not explain itself."""
    line = " ".join(f"{type(error).__name__}: {error}".partition("\nTraceback")[0].split())[:500]
    place = traceback.extract_tb(error.__traceback__)[-1]
    known = isinstance(error, (GameError, ValueError, OSError, ImportError, gym.error.Error))
    return line if known else f"{line} (in {place.name}, {place.filename}:{place.lineno})"


def main():
    """Run the command line. Returns the exit code: 1 for failures, 2 for wrong options or files."""
    sys.path.append(os.getcwd())  # where a module of --env may lie
    with suppress(AttributeError):  # a notebook's; not all of Windows's code pages have a γ
        sys.stdout.reconfigure(errors="replace")
    # Without a traceback from TensorBoard's writer thread: the Run meets the same error.
    threading.excepthook = lambda e: "AsyncWriter" in repr(e.thread) or threading.__excepthook__(e)
    args, told = None, (GameError, FloatingPointError, OSError, MemoryError, torch.OutOfMemoryError)
    told += (RuntimeError,) if NUM_RANKS > 1 else ()  # of torch, if another rank is gone
    try:
        args = parse_args()
        result = evaluate_run(args) if args.eval else train(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if args and not args.eval and not isinstance(error, told):
            raise
        line = error if isinstance(error, GameError) else one_line(error)
        print(f"{Path(__file__).name}: error: {line}", file=sys.stderr)
        return 1 if args else 2
    return 128 + result.signal if not args.eval and result.signal else 0


if __name__ == "__main__":
    sys.exit(main())
