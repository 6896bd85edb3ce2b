"""PPO (proximal policy optimisation) for Gymnasium environments, observations seen as vectors.

    python ppo.py --env CartPole-v1                        # train, about half a minute
    python ppo.py --env Pendulum-v1 --gamma 0.9 --num-steps 256 --learning-rate 1e-3 --norm-reward
    python ppo.py --env Taxi-v4 --num-envs 16 --learning-rate 1e-3 --norm-reward  # action masks
    python ppo.py --eval runs/CartPole-v1__ppo__1__<time>  # evaluate what a run has learned
    tensorboard --logdir runs

Papers: "PPO" is Schulman et al. 2017 (arXiv 1707.06347), "GAE" is Schulman et al. 2016 (arXiv
1506.02438). See also Huang et al. 2022, The 37 implementation details of PPO.

Each iteration runs the policy π_old for T steps in N games, then takes K epochs of minibatch steps:

    δ_t = r_t + γ V(s_{t+1}) (1 − terminated_t) − V(s_t)                             PPO, Eq. (12)
    Â_t = δ_t + γλ (1 − done_t) Â_{t+1},   R_t = Â_t + V(s_t)           PPO, Eq. (11); GAE, Eq. (16)
    r_t(θ) = π_θ(a_t|s_t) / π_old(a_t|s_t)                                           PPO, Sec. 3
    L^CLIP(θ) = E[min(r_t(θ) Â_t, clip(r_t(θ), 1−ε, 1+ε) Â_t)]                       PPO, Eq. (7)
    loss = E[−L^CLIP + c_v ½ (V_θ(s_t) − R_t)² − c_e H(π_θ(·|s_t))]      PPO, Eq. (9), but for the ½
           + β E[KL(π_old(·|s_t), π_θ(·|s_t))], with --kl-coef                       PPO, Eq. (8)

V(s) predicts the discounted sum of rewards r_t from s on, the advantage Â_t how much better a_t is,
judged by k rewards, then V: k = 1 if λ = 0 (V's errors), all if λ = 1 (noise), or a mean over k.
Games are dear, so K epochs learn from π_old's actions by the ratio r_t(θ); far from 1 it is mostly
noise, so it is clipped. At 1, −r_t(θ) Â_t has the gradient of cross-entropy, a_t the label, Â_t the
weight. The entropy H keeps actions varied. What has index t is of the action at t: `terminated`, it
ended the task; `truncated`, a time limit cut that short, so V counts for the rest; done_t: either.
Shapes: T steps (--num-steps), N games (--num-envs), B minibatches of M rows, D observation entries,
A action entries, n logits; H memory entries of a recurrent policy, S entries of its whole state.

The algorithm comes first: `train` and what it calls, down to the network. From the section "speed"
on all is machinery. In one process `mine`, `gathered` and `averaged` do nothing: read past them.
"""

import argparse
import csv
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

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads keep cores from workers

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
    option = functools.partial(add_option, parser.add_argument_group("network"))
    option("--hidden", number(int, 1, 10_000), [64, 64], "widths of the hidden layers", nargs="+")
    option("--activation", str, "tanh", "of the hidden layers", choices=sorted(ACTIVATIONS))
    option("--layer-norm", bool, False, "LayerNorm before every activation")
    option("--shared-net", bool, False, "policy and value function share the hidden layers")
    option("--init-log-std", number(float), 0.0, "log σ of a Gaussian policy at first; -3 to 0")
    option("--full-covariance", bool, False, "Gaussian policy with correlated action entries")
    option("--norm-obs", bool, False, "observations become (s − μ) / σ, running, cut at ±10")
    option("--norm-value", bool, False, "value targets become (R − μ) / σ, running (PopArt)")
    option = functools.partial(add_option, parser.add_argument_group("ppo.py"))
    positive = number(float, 1e-300)
    option("--env", str, "CartPole-v1", "Gymnasium id, or module:id")
    option("--num-steps", number(int, 1, 100_000), 128, "T, steps a game per iteration; 16 to 2048")
    option("--norm-reward", bool, False, "divide rewards by the return's deviation, cut at ±10")
    option("--action-masks", bool, None, "use the env's action masks; by default if it has them")
    option("--time-limit-bootstrap", bool, True, "after a time limit V of the last state counts")
    option("--baseline", bool, True, "off: Â_t = Σ_k (γλ)^k r_{t+k}, no value loss")
    option("--kl-coef", number(float, 0), 0.0, "β of a KL penalty beside clipping; 0.01 to 3 usual")
    option("--adaptive-lr", positive, None, "adapt the rate, at most 0.01, to this KL; 0.01 usual")
    option("--value-learning-rate", positive, None, "of V, if not --learning-rate")
    option("--rnn", str, None, "memory in front of the hidden layers", choices=("gru", "lstm"))
    option("--rnn-size", number(int, 1, 10_000), 64, "width of the memory; with --rnn B divides N")
    return parser


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
    torch.set_num_threads(1)  # more threads only slow a small network down
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = make_model(args)
    optimizer = make_optimizer(model, split=bool(args.value_learning_rate))
    with Run(args, model, optimizer, generator) as run:
        while run.goes_on():
            remaining = 1 - run.iteration / args.num_iterations if args.anneal_lr else 1
            rates = args.learning_rate, args.value_learning_rate or args.learning_rate
            for group, rate in zip(optimizer.param_groups, rates):  # one group, or policy's and V's
                if not args.adaptive_lr or run.iteration == 0:  # else `update` adapts it
                    group["lr"] = rate * remaining
            # Sample: T steps in each of N games with the policy π_old.
            buffer, episodes = rollout(model, run.pool, args, generator)
            # Judge: was an action better than the value function expected?
            batch = make_batch(buffer, model, args)
            row = {"explained_variance": explained_variance(batch)}
            if args.norm_value:
                normalise_values(model, batch, batch["returns"])
            # Learn: K epochs of minibatch steps towards the better actions.
            row |= update(model, optimizer, batch, args, generator)
            if args.norm_obs:  # after the update: within it, π_old is the policy that sampled
                model.obs_norm.update(buffer["obs"].flatten(0, 1))
            run.end_iteration(row, episodes, global_step=args.num_envs * args.num_steps)
    return run


# ------------------------------------------------------------------------------------ rollout
@torch.no_grad()
def rollout(model, pool, args, generator):
    """Take T steps in all N games with the current policy. Returns the buffer, tensors (T, N, ...):
    obs, actions, logprobs, values, next_values, rewards, their discounted sums, terminated,
    truncated; and the (return, length) of the episodes that ended."""
    arrays, T, act = pool.arrays, args.num_steps, fast_act(model)
    ends = ("ended", "episode_return", "episode_length")
    results = ("next_obs", "rewards", "terminated", "truncated", "discounted", *ends)
    buffer = {k: np.empty((T, *arrays[k].shape), arrays[k].dtype) for k in model.stored + results}
    noise = model.head.noise(T * args.num_envs, generator).view(T, args.num_envs, -1)
    noise = noise.chunk(NUM_RANKS, 1)[RANK].to(model.device)  # of this rank's games
    for t, noise_t in enumerate(noise):
        act(arrays, noise_t)
        for name in model.stored:  # what the policy saw and did
            buffer[name][t] = arrays[name]
        pool.call("step")  # plays `actions`; `obs` is then the next one, or a new episode's first
        for name in results:  # what came of it
            buffer[name][t] = arrays[name]
    for name in ("next_obs", "rewards", "obs"):  # whose squares must fit into float32
        for t, n, *entry in np.argwhere(~(abs(buffer[name]) < 1e15)).tolist():  # NaN < x is False
            raise GameError(f"NaN or over 1e15 in {name}{entry or ''} of game {n}, step {t}")
    ended, returns, lengths = gathered({k: torch.tensor(buffer.pop(k)) for k in ends}).values()
    episodes = [*zip(returns[ended].tolist(), lengths[ended].tolist())]
    buffer = {name: torch.from_numpy(a).to(model.device) for name, a in buffer.items()}
    # One pass over all steps: no weight has changed since, so this is log π_old and V_old.
    pi, values = model(**{name: buffer[name] for name in model.inputs})
    wrong = ~model.head.sample(pi, noise).isclose(buffer["actions"], 1e-3, 1e-3)  # a few: rounding
    assert wrong.sum() < 3 + wrong.numel() / 99, "acted unlike head.sample(pi, noise): fast_act?"
    # V(s_{t+1}) of where each step led, not of the next episode's start; (1, T·N, ...): for --rnn.
    after = {k[5:]: buffer[k].flatten(0, 1)[None] for k in buffer if k.startswith("next_")}
    values = torch.stack([values, model(**after)[1].view(values.shape)])
    if model.value_norm is not None:
        values = model.value_norm.mean + model.value_norm.std * values
    buffer |= {"values": values[0], "next_values": values[1]}
    buffer["logprobs"] = model.head.log_prob(pi, buffer["actions"])
    return gathered(buffer), episodes


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


def make_batch(buffer, model, args):
    """Add advantages and returns; flatten to (T·N, ...), unless --rnn needs games as sequences."""
    if args.norm_reward:  # by the deviation of all Σ_k γ^k r_{t−k} so far (Engstrom et al. 2020)
        model.reward_norm.update(buffer["discounted"].flatten())
        buffer["rewards"] = (buffer["rewards"] / model.reward_norm.std).clamp(-10, 10)
    if not args.time_limit_bootstrap:
        buffer["terminated"] |= buffer["truncated"]
    if not args.baseline:  # V is 0, and GAE the sum of rewards, discounted by γλ
        buffer["values"] = buffer["next_values"] = torch.zeros_like(buffer["values"])
    names = ("rewards", "values", "next_values", "terminated", "truncated")
    advantages = gae(*(buffer[name] for name in names), args.gamma, args.gae_lambda)
    batch = {name: buffer[name] for name in (*model.inputs, "actions", "logprobs", "values")}
    # V^targ of PPO, Eq. (9): R_t = Â_t + V(s_t), what V expected and how much better it came
    batch |= {"advantages": advantages, "returns": advantages + buffer["values"]}
    return batch if model.memory else {k: c.flatten(0, 1) for k, c in batch.items()}


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
def update(model, optimizer, batch, args, generator):
    """Take K epochs of minibatch steps on the rows of `batch`. Return the means of the losses."""
    assert all(p.grad._base is model.gradient for p in model.parameters()), "see make_optimizer"
    seen, B = [], args.num_minibatches
    axis = batch["advantages"].dim() - 1  # of the rows: 0; 1 if each is a game's sequence (--rnn)
    mine = (slice(None),) * axis + (slice(RANK, None, NUM_RANKS),)  # rows of this rank
    if args.norm_adv == "batch":
        batch = batch | {"advantages": normalised(batch["advantages"])}
    for epoch in range(args.update_epochs):
        rows = torch.randperm(batch["advantages"].shape[axis], generator=generator).to(model.device)
        # One gather per epoch: minibatches are slices of the shuffled rows.
        shuffled = {name: c.index_select(axis, rows).chunk(B, axis) for name, c in batch.items()}
        if args.norm_adv == "minibatch":
            shuffled["advantages"] = [normalised(chunk) for chunk in shuffled["advantages"]]
        for i in range(B):
            mb = {name: chunks[i][mine] for name, chunks in shuffled.items()}
            *terms, logratio = losses(model, mb, args.clip_coef, args.clip_vloss)
            pg_loss, v_loss, entropy = [term.mean() for term in terms]
            ratio = logratio.exp()
            approx_kl = (ratio - 1 - logratio).mean()  # estimates KL(π_old, π) without bias, ≥ 0
            clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
            # PPO, Eq. (9): loss = E[−L^CLIP + c_v ½ (V_θ − R)² − c_e H]
            loss = pg_loss + args.vf_coef * args.baseline * v_loss - args.ent_coef * entropy
            if args.kl_coef:  # PPO, Eq. (8): + β KL(π_old, π_θ)
                loss += args.kl_coef * approx_kl
            row = averaged(torch.stack([pg_loss, v_loss, entropy, approx_kl, clipfrac]).detach())
            seen.append(row)
            stop = args.target_kl is not None and row[LOSSES.index("approx_kl")] > args.target_kl
            if stop:
                break
            model.gradient.zero_()  # the parameters' gradients are views of it: `make_optimizer`
            loss.backward()
            norm = float(averaged(model.gradient).norm())
            if not math.isfinite(norm):  # before it reaches the weights
                raise FloatingPointError("no finite gradient: lower --learning-rate? --norm-value?")
            model.gradient.mul_(min(1, args.max_grad_norm / (norm + 1e-6)))  # as clip_grad_norm_
            optimizer.step()
        if args.adaptive_lr:  # as in skrl's KLAdaptiveLR, by the epoch's mean approx_kl
            kl = torch.stack(seen[epoch * B :])[:, LOSSES.index("approx_kl")].mean()
            for group in optimizer.param_groups:
                if kl > 2 * args.adaptive_lr:
                    group["lr"] = max(group["lr"] / 1.5, 1e-6)
                elif kl < args.adaptive_lr / 2:
                    group["lr"] = min(group["lr"] * 1.5, 1e-2)
        if stop:
            break
    return dict(zip(LOSSES, torch.stack(seen).mean(dim=0).tolist(), strict=True))


def normalised(advantages):
    """Return advantages with mean 0, deviation 1: one learning rate for rewards of any scale."""
    std, mean = torch.std_mean(advantages)
    return (advantages - mean) / (std + 1e-8)


# ------------------------------------------------------------------------------------ model
def make_model(args):
    """Return the Model for the env's spaces, its weights drawn from torch's global generator."""
    with closing(make_env(args.env)) as env:
        model = Model(env.observation_space.shape[0], env.action_space, args)
    return model.to("cpu" if args.device == "auto" else args.device)


class Model(nn.Module):
    """Policy and value function: hidden layers, orthogonal weights, a head for each. With --rnn the
    hidden layers see a GRU's or LSTM's memory of the episode, not s_t. Then inputs are time-major,
    (T, M, ...): obs, starts (is obs an episode's first?), state (memory before; read at t = 0)."""

    device = property(lambda model: model.value.weight.device)  # where it computes

    def __init__(self, obs_dim, action_space, args):
        super().__init__()
        self.obs_dim, self.action_space = obs_dim, action_space
        rnn, masks = bool(args.rnn), bool(args.action_masks)
        self.inputs = ("obs",) + ("starts", "state") * rnn + ("action_mask",) * masks  # of forward
        self.stored = self.inputs + ("actions",) + ("next_state",) * rnn  # by a rollout
        self.obs_norm = RunningNorm((obs_dim,), cut=10) if args.norm_obs else nn.Identity()
        self.value_norm = RunningNorm() if args.norm_value else None
        self.reward_norm = RunningNorm() if args.norm_reward else None
        width, features = args.rnn_size if args.rnn else obs_dim, args.hidden[-1]
        self.actor = hidden_layers(width, args)
        self.critic = self.actor if args.shared_net else hidden_layers(width, args)
        if options := num_options(action_space):
            self.head = Categorical(features, options, action_space.shape)
        else:
            self.head = Gaussian(features, action_space.shape, args)
        self.value = layer_init(nn.Linear(features, 1), 1.0)
        self.memory = Memory(obs_dim, args) if args.rnn else None

    def forward(self, obs, starts=None, state=None, action_mask=None):
        """Observations (..., D) → pi (..., ·), log-probabilities or means, and values (...), with
        --norm-value normalised ones. `action_mask` (..., n): flags of the allowed options."""
        x = self.obs_norm(obs)
        if self.memory is not None:
            x, _ = self.memory(x, starts, state[0])  # (T, M, H)
        h = self.actor(x)
        h_value = h if self.critic is self.actor else self.critic(x)
        return self.head(h, action_mask), self.value(h_value).squeeze(-1)

    def policy(self, obs, starts=None, state=None, action_mask=None, noise=None):
        """Observations (M, D) → actions (M, ...), samples from noise or the mode; next state."""
        x = self.obs_norm(obs)
        if self.memory is not None:
            (x,), state = self.memory(x[None], None if starts is None else starts[None], state)
        return self.head.sample(self.head(self.actor(x), action_mask), noise), state

    def act(self, arrays, noise=None):
        """Set actions for what the games show: samples from noise (N, ·), else the mode."""
        if self.memory is not None:  # which begins anew where an episode starts
            arrays["starts"][:], arrays["state"][:] = arrays["ended"], arrays["next_state"]
        inputs = {name: torch.from_numpy(arrays[name]).to(self.device) for name in self.inputs}
        actions, state = self.policy(**inputs, noise=noise)
        arrays["actions"][:] = actions.cpu().numpy()
        if self.memory is not None:
            arrays["next_state"][:] = state.cpu().numpy()


# ------------------------------------------------------------------------ heads and normalisers
def hidden_layers(width, args):
    """Return layers of widths `args.hidden` over an input of `width` entries."""
    layers = []
    for previous, following in zip([width, *args.hidden], args.hidden):
        norm, activation = [nn.LayerNorm(following)] * args.layer_norm, ACTIVATIONS[args.activation]
        layers += [layer_init(nn.Linear(previous, following)), *norm, activation()]
    return nn.Sequential(*layers)


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


class Gaussian(nn.Module):
    """Policy head for Box: mean from the features, one free log σ per action entry. With
    --full-covariance the covariance is L Lᵀ: L is lower triangular, with σ on its diagonal."""

    factor = property(lambda head: head.lower.tril(-1) + head.log_std.exp().diag())  # L, (A, A)

    def __init__(self, features, shape, args):
        super().__init__()
        self.shape, self.n = shape, math.prod(shape)
        self.mean = layer_init(nn.Linear(features, self.n), 0.01)
        self.log_std = nn.Parameter(torch.full((self.n,), args.init_log_std))
        self.lower = nn.Parameter(torch.zeros(self.n, self.n)) if args.full_covariance else None

    def forward(self, h, action_mask=None):
        """Features (M, F) → mean (M, A)."""
        return self.mean(h)

    def noise(self, batch, generator):
        """Standard normal noise, (batch, A)."""
        return torch.randn(batch, self.n, generator=generator)

    def sample(self, mean, noise=None):
        """Actions (M, ...): μ + σ ε, or μ + L ε; no noise: the mode, μ."""
        if noise is not None:
            full = self.lower is not None
            mean = mean + (noise @ self.factor.T if full else self.log_std.exp() * noise)
        return mean.view(*mean.shape[:-1], *self.shape)

    def log_prob(self, mean, action):
        """log π(a|s) = −½ |z|² − Σ log σ − (A/2) log 2π, z = (a − μ)/σ or L⁻¹ (a − μ), (M,)."""
        z = action.reshape(mean.shape) - mean
        if self.lower is None:
            z = z * torch.exp(-self.log_std)
        else:
            z = torch.linalg.solve_triangular(self.factor.T, z, upper=True, left=False)
        constant = self.log_std.sum() + 0.5 * self.n * math.log(2 * math.pi)
        return -0.5 * z.square().sum(dim=-1) - constant

    def entropy(self, mean):
        """H = Σ log σ + (A/2) log 2πe, (M,)."""
        constant = 0.5 * self.n * math.log(2 * math.pi * math.e)
        return (self.log_std.sum() + constant).expand(mean.shape[:-1])


class Memory(nn.Module):
    """A GRU or LSTM that begins anew with each episode: orthogonal weights, zero biases."""

    def __init__(self, width, args):
        super().__init__()
        self.rnn = {"gru": nn.GRU, "lstm": nn.LSTM}[args.rnn](width, args.rnn_size)
        self.size = args.rnn_size * (2 if args.rnn == "lstm" else 1)  # S: an LSTM's h and c
        for name, parameter in self.rnn.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)

    def forward(self, x, starts, state):
        """Inputs (T, M, D), flags of episodes' first steps (T, M) or None, state before (M, S).
        Returns the memories (T, M, H) after each of the steps, and the last state (M, S)."""
        starts = torch.zeros_like(x[..., 0], dtype=torch.bool) if starts is None else starts
        # One call for all steps until some game starts an episode: there its state is set to 0.
        cuts, memories = (starts[1:].any(dim=1).nonzero().flatten() + 1).tolist(), []
        for begin, end in zip([0, *cuts], [*cuts, len(x)], strict=True):
            state = (state * ~starts[begin].unsqueeze(-1)).unsqueeze(0)  # (1, M, S)
            if isinstance(self.rnn, nn.LSTM):  # its state is a pair, h and c
                state = tuple(part.contiguous() for part in state.chunk(2, -1))
            h, state = self.rnn(x[begin:end], state)
            state = (torch.cat(state, -1) if isinstance(state, tuple) else state)[0]
            memories.append(h)
        return torch.cat(memories), state


class RunningNorm(nn.Module):
    """(x − μ) / σ with the mean and deviation of all rows seen; saved with the model."""

    std = property(lambda norm: (norm.var + 1e-8).sqrt())  # σ, at least 1e-4

    def __init__(self, shape=(), cut=math.inf):
        super().__init__()
        self.cut = cut
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))

    def update(self, rows):
        """Take in rows (M, ...): two sets' moments are combined as in Chan et al. 1983."""
        self.count += len(rows)
        share, delta = len(rows) / self.count, rows.mean(dim=0) - self.mean
        within = self.var * (1 - share) + rows.var(dim=0, correction=0) * share
        self.var.copy_(within + delta.square() * share * (1 - share))
        self.mean += delta * share

    def forward(self, x):
        """(x − μ) / σ, cut at ±cut."""
        return ((x - self.mean) / self.std).clamp(-self.cut, self.cut)


@torch.no_grad()
def normalise_values(model, batch, returns):
    """Update the returns' running mean and deviation, and normalise the batch's values by them. The
    last layer is rescaled so that V(s) stays what it was: PopArt, van Hasselt et al. 2016."""
    norm, layer = model.value_norm, model.value
    mean, std = norm.mean.clone(), norm.std
    norm.update(returns.flatten())
    layer.weight.mul_(std / norm.std)
    layer.bias.copy_((std * layer.bias + mean - norm.mean) / norm.std)
    batch |= {name: norm(batch[name]) for name in ("values", "returns")}


# ------------------------------------------------------------------------------------ speed
class NumpyTanh(torch.autograd.Function):
    """tanh by NumPy, its gradient 1 − tanh²: on some processors torch's takes ten times as long."""

    backward = staticmethod(lambda ctx, g: torch.ops.aten.tanh_backward(g, *ctx.saved_tensors))

    @staticmethod
    def forward(ctx, x):
        np.tanh(x.numpy(), out=(y := torch.empty_like(x)).numpy())  # into torch's aligned memory
        ctx.save_for_backward(y)
        return y


class Tanh(nn.Tanh):
    def forward(self, x):
        """tanh(x), a new tensor; by torch where NumPy cannot be: on a GPU, in `export_onnx`."""
        return NumpyTanh.apply(x) if x.is_cpu and not torch.jit.is_tracing() else x.tanh()


ACTIVATIONS = {"tanh": Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}


def fast_act(model):
    """Return `model.act`, or the same in NumPy if the policy is plain (one choice or a diagonal
    Gaussian, tanh, CPU): torch is mostly overhead for few rows (tests/benchmarks/speed_ppo.py)."""
    norm, head, discrete = model.obs_norm, model.head, type(model.head) is Categorical
    layers = [*model.actor.children(), *head.children()]
    plain = len(head.options) == 1 if discrete else type(head) is Gaussian and head.lower is None
    plain &= [*model.inputs, model.device.type, type(model.actor)] == ["obs", "cpu", nn.Sequential]
    if not plain or [type(x) for x in layers[:-1]] != [nn.Linear, Tanh] * (len(layers) // 2):
        return model.act
    *hidden, last = [(x.weight.detach().numpy().T, x.bias.detach().numpy()) for x in layers[::2]]
    sigma = None if discrete else head.log_std.detach().exp().numpy()
    moments = isinstance(norm, RunningNorm) and (norm.mean.numpy(), norm.std.numpy())

    def act(arrays, noise):
        h, noise = arrays["obs"], noise.numpy()
        if moments:
            h = ((h - moments[0]) / moments[1]).clip(-norm.cut, norm.cut)
        for W, b in hidden:
            h = np.tanh(h @ W + b)
        pi = h @ last[0] + last[1]
        actions = (pi + noise).argmax(axis=-1) if discrete else pi + sigma * noise
        arrays["actions"][:] = actions.reshape(arrays["actions"].shape)

    return act


def make_optimizer(model, split=False):
    """Return Adam for one vector of all parameters: faster than for many small tensors. The
    parameters become views of it, their gradients views of `model.gradient`. With `split` Adam has
    the parameters themselves, in two groups: the policy's, the value function's."""
    parameters, sizes = [*model.parameters()], [p.numel() for p in model.parameters()]
    vector = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach())
    vector.grad = model.gradient = torch.zeros_like(vector)
    parts = vector.detach().split(sizes), vector.grad.split(sizes)
    for parameter, values, gradient in zip(parameters, *parts, strict=True):
        parameter.data, parameter.grad = values.view_as(parameter), gradient.view_as(parameter)
    groups = [[vector]]
    if split:
        V = {*model.value.parameters(), *model.critic.parameters()} - {*model.actor.parameters()}
        groups = [[p for p in parameters if p not in V], [p for p in parameters if p in V]]
    optimizer = torch.optim.Adam([{"params": group} for group in groups], eps=1e-5, fused=True)
    optimizer.zero_grad = lambda set_to_none=False: model.gradient.zero_()  # None would cut them
    return optimizer


# ------------------------------------------------------------------------------------ games
def make_env(env_id, **options):
    """Return the env, observations as vectors; ValueError if its observations cannot be."""
    env, Box = gym.make(env_id, **options), gym.spaces.Box
    if not isinstance(env.observation_space, Box) or len(env.observation_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    if not isinstance(env.observation_space, Box):
        raise ValueError(f"not supported: observation space {env.observation_space}")
    return env


def num_options(space):
    """Return each choice's number of options, [] for a Box of floats; ValueError for another."""
    if isinstance(space, gym.spaces.Box) and space.dtype.kind == "f":
        return []
    if isinstance(space, gym.spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, gym.spaces.MultiDiscrete):
        return space.nvec.ravel().tolist()
    if isinstance(space, gym.spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    raise ValueError(f"not supported: action space {space}")


def to_env(action, space):
    """Return the action as the env takes it: cut to a Box's bounds; log π is of the uncut one."""
    if isinstance(space, gym.spaces.Box):
        return np.asarray(action.clip(space.low, space.high), space.dtype)
    return (action + getattr(space, "start", 0)).astype(space.dtype)


def action_mask(env, info):
    """Return the flags of allowed options, choice after choice; ValueError if a choice has none."""
    mask = info["action_mask"] if "action_mask" in info else env.get_wrapper_attr("action_masks")()
    options, mask = num_options(env.action_space), flat(mask).astype(bool)
    choices = np.cumsum([0, *options[:-1]])
    if len(mask) != sum(options) or not np.logical_or.reduceat(mask, choices).all():
        raise ValueError(f"action mask {mask}: not {sum(options)} flags, or no action is allowed")
    return mask


def flat(mask):
    """Return a mask, an array or nested tuples of arrays, as a vector."""
    return np.concatenate([*map(flat, mask)]) if isinstance(mask, tuple) else np.ravel(mask)


class Game:
    """One env that starts its next episode by itself: row n of the arrays that all games share. A
    step leads from the action there to `next_obs`; `obs` is what to act on next, an episode's
    first if the step `ended` one. Return and length are those of the episode so far."""

    def __init__(self, args, n, seed, arrays, **options):
        self.name, self.n, self.seed, self.arrays = args.env, n, seed, arrays
        self.env, self.gamma = make_env(args.env, **options), args.gamma
        self.close, self.space = self.env.close, self.env.action_space

    def start(self, states=None):
        """Start from the game's seed, or go on from its state among those of all N games."""
        if states and states[self.n]:
            try:
                return self.set_state(states[self.n])
            except Exception as error:  # of any kind, if the env's packages are others than then
                report(f"{self.name} starts a new episode: {one_line(error)}")
        self.arrays["ended"][self.n] = True
        self.show("obs", *self.env.reset(seed=self.seed))

    def step(self):
        """Take one step, and start the next episode if it ended this one."""
        a, n, flags = self.arrays, self.n, (True, False)
        action = to_env(a["actions"][n], self.space)
        obs, reward, terminated, truncated, info = self.env.step(action)
        shapes = [getattr(x, "shape", ()) for x in (reward, terminated, truncated)]
        if any(shapes) or terminated not in flags or truncated not in flags:
            raise ValueError(f"not a number and two flags: {(reward, terminated, truncated)}")
        self.show("next_obs", obs, info)
        if a["ended"][n]:  # by the step before
            a["episode_return"][n] = a["episode_length"][n] = a["discounted"][n] = 0
        a["episode_return"][n] += reward
        a["episode_length"][n] += 1
        # Σ_k γ^k r_{t−k} since the episode began, for --norm-reward
        a["discounted"][n] = reward + self.gamma * a["discounted"][n]
        a["rewards"][n], a["ended"][n] = reward, terminated or truncated
        a["terminated"][n], a["truncated"][n] = terminated, truncated and not terminated
        self.show("obs", *(self.env.reset() if a["ended"][n] else (obs, info)))

    def show(self, name, obs, info):
        """Write an observation, and which actions are allowed there."""
        if np.shape(obs) != (shape := self.arrays[name].shape[1:]):  # NumPy would stretch it
            raise ValueError(f"an observation has shape {np.shape(obs)}, its space {shape}")
        self.arrays[name][self.n] = obs
        if name == "obs" and "action_mask" in self.arrays:
            self.arrays["action_mask"][self.n] = action_mask(self.env, info)

    def get_state(self):
        """Return what `set_state` needs to go on as if nothing had happened, or None."""
        with suppress(Exception):  # whatever an env and its attributes raise
            states = [x.get_state() if kept is None else kept for x, kept in layers(self.env)]
            numbers, seen = {id(x): i for i, (x, _) in enumerate(layers(self.env))}, []
            pickler = pickle.Pickler(file := io.BytesIO())  # a link to a layer becomes its number
            pickler.persistent_id = lambda x: seen.append(x) or numbers.get(id(x))
            pickler.dump([self.seed, *states])
            # EzPickle keeps how an env was made, not where it is; arrays lose what they share.
            arrays = {id(x): x for x in seen if isinstance(x, np.ndarray)}.values()
            pairs = ((x, y) for x in arrays if x.base is not None for y in arrays if y is not x)
            lost = b"_ezpickle_args" in file.getvalue() or any(np.shares_memory(*p) for p in pairs)
            return None if lost else file.getvalue()

    def set_state(self, state):
        """Go on from the state of a game like this one."""
        envs, unpickler = layers(self.env), pickle.Unpickler(io.BytesIO(state))
        unpickler.persistent_load = lambda number: envs[number][0]
        self.seed, *states = unpickler.load()
        for (layer, kept), state in zip(envs, states, strict=True):
            layer.set_state(state) if kept is None else vars(layer).update(state)


def layers(env):
    """Return wrappers, outermost first, and env, each with its state: a dict of attributes, or None
    if it has get_state and set_state (both: MuJoCo's set_state alone does something else)."""
    wrapped, methods = isinstance(env, gym.Wrapper), ("get_state", "set_state")
    others = "env func _cached_spec _saved_kwargs" if wrapped else "_ezpickle_args _ezpickle_kwargs"
    kept = {k: value for k, value in vars(env).items() if k not in ["spec", *others.split()]}
    kept = None if all(hasattr(env, name) for name in methods) else kept
    return [(env, kept), *(layers(env.env) if wrapped else [])]


class Games:
    """The games of one worker, those in `rows` of all N."""

    def __init__(self, args, seeds, rows, arrays, **options):
        self.games = [Game(args, n, int(seeds[n]), arrays, **options) for n in rows]

    def call(self, command, *arguments):
        """Have one game after the other carry out a command. Returns their answers."""
        answers = []
        try:
            for game in self.games:
                answers.append(getattr(game, command)(*arguments))
        except (Exception, SystemExit) as error:
            what = f"{game.name} (seed {game.seed}) failed in {command}: {one_line(error)}"
            raise GameError(f"{what}\n{traceback.format_exc()}") from None
        return answers


def game_seeds(args, starts):
    """Return the seeds of this rank's games, (N,): others each time that games start anew."""
    seeds = np.random.SeedSequence([args.seed, starts]).generate_state(args.num_envs)
    return np.split(seeds, NUM_RANKS)[RANK]


def make_pool(args, model, seeds, num_workers, **options):
    """Return the pool of one game per seed, with arrays for what the model sees and does."""
    D, A, S = (model.obs_dim,), model.head.shape, (model.memory.size,) if model.memory else ()
    floats = {"obs": D, "next_obs": D, "state": S, "next_state": S, "rewards": (), "discounted": ()}
    layout = {name: (shape, "float32") for name, shape in floats.items()}
    layout |= {"actions": (A, "int64" if num_options(model.action_space) else "float32")}
    layout |= {name: ((), "bool") for name in ("terminated", "truncated", "ended", "starts")}
    layout |= {"episode_return": ((), "float64"), "episode_length": ((), "int64")}
    layout |= {"action_mask": ((model.head.n,), "bool")} if args.action_masks else {}
    layout = {name: ((len(seeds), *shape), dtype) for name, (shape, dtype) in layout.items()}
    make_games = functools.partial(Games, args, seeds, **options)
    return WorkerPool(make_games, layout, len(seeds), num_workers)


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
EVAL_STEPS = 10_000  # an evaluation takes no more, to end always


def make_eval_pool(args, model, episodes=None, **options):
    """Return the pool of evaluation games."""
    seeds = EVAL_SEED + np.arange(episodes or args.eval_episodes)
    return make_pool(args, model, seeds, 0, **options)


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
    with closing(make_env(args.env)) as env:
        discrete, method = num_options(env.action_space) != [], env.has_wrapper_attr("action_masks")
        has_masks = discrete and (method or "action_mask" in env.reset()[1])
        if args.action_masks and not has_masks:
            parser.error(f"argument --action-masks: {args.env} has none")
        args.action_masks = has_masks if args.action_masks is None else args.action_masks
        args.resume or args.eval or discrete or warn_of_scale(args, env.action_space)
    args.rnn and check_rows(parser, args, args.num_envs, "games (--num-envs), each a sequence,")
    check_rows(parser, args, rows := args.num_envs * args.num_steps)
    if args.total_timesteps or args.num_iterations is None:
        args.num_iterations = max(1, (args.total_timesteps or 500_000) // rows)
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


def warn_of_scale(args, space):
    """Report a Box of another scale than a Gaussian policy's first actions, which are only cut."""
    sigma, (low, high) = np.exp(args.init_log_std), np.float64([space.low, space.high])
    half, off = high / 2 - low / 2, np.maximum(low, -high)  # half width (no bounds: huge), gap to 0
    if ((half < sigma / 20) | (half > 12.5 * sigma) & (half < 5e29) | (off > sigma)).any():
        found = f"0 ± {sigma:.3g} at first, the Box is {low.min():g} to {high.max():g}"
        report(f"actions are {found}: gymnasium.wrappers.RescaleAction, or --init-log-std?")


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
