"""PPO (proximal policy optimisation) for Gymnasium environments with vector observations.

    python ppo.py --env CartPole-v1                        # train, about half a minute
    python ppo.py --env Pendulum-v1 --gamma 0.9 --num-steps 256 --learning-rate 1e-3 --norm-reward
    python ppo.py --env Taxi-v4 --num-envs 16 --learning-rate 1e-3 --norm-reward  # action masks
    python ppo.py --eval runs/CartPole-v1__ppo__1__<time>  # evaluate what a run has learned
    tensorboard --logdir runs

How to read this file
    Is reinforcement learning new to you? Read "New to reinforcement learning" in README.md first:
    it explains the terms. Then skip the options. The algorithm follows: `train`, and below it
    everything that `train` calls, down to the network. Read `train`, `rollout`, `play`, `gae`,
    `make_batch`, `losses`, `minibatch_loss`, `update` in this order. The machinery starts at the
    section "speed": environments, worker processes, run folders, evaluation, the command line.
    Several processes can train one model together, started by torchrun. They are called ranks. In a
    single process RANK is 0 and NUM_RANKS is 1. Then `gathered`, `averaged`, `own_rows` and
    `average_gradients` change nothing, so a first reading can skip them.

The algorithm
    Each iteration plays T steps in N environments with the current policy, which is then called
    π_old, and makes K passes (epochs) of minibatch gradient steps over what was recorded:

    δ_t = r_t + γ V(s_{t+1}) (1 − terminated_t) − V(s_t)                         PPO, Eq. (12)
    Â_t = δ_t + γλ (1 − done_t) Â_{t+1}                        PPO, Eq. (11);  GAE, Eq. (16)
    R_t = Â_t + V(s_t)
    r_t(θ) = π_θ(a_t|s_t) / π_old(a_t|s_t)                                        PPO, Sec. 3
    L^CLIP(θ) = E[min(r_t(θ) Â_t, clip(r_t(θ), 1−ε, 1+ε) Â_t)]                   PPO, Eq. (7)
    loss = −L^CLIP(θ) + E[c_v ½ (V_θ(s_t) − R_t)² − c_e H(π_θ(·|s_t))]           PPO, Eq. (9)
           + β E[KL(π_old(·|s_t), π_θ(·|s_t))], only with --kl-coef               PPO, Eq. (8)

    The section "Notation and shapes" below has every symbol.

The ideas behind it
    V(s) is the value function. It predicts the discounted sum of the rewards that follow state s.
    The advantage Â_t says how much better the action a_t was than V expected.
    R_t is what V is fitted to; the code calls it `returns`.
    λ chooses how many rewards Â_t uses before it relies on V. λ = 0 relies on V after one reward:
    low variance, but V's errors enter. λ = 1 uses all rewards up to the end of the episode or of
    the rollout: noisy, but V's errors enter only where a time limit or the rollout's end cuts an
    episode.
    Environment steps are expensive, so each batch is reused for K epochs; the ratio r_t(θ)
    corrects for the policy having changed since. A ratio far from 1 gives a single row a large
    weight, and Â_t was measured for the old policy. So the ratio is clipped: once an action's
    probability has changed by a factor beyond 1 ± ε in the direction that Â_t asks for, this row's
    gradient is 0. The minimum keeps the gradient that moves the probability back.
    At r_t(θ) = 1 the gradient of −r_t(θ) Â_t is that of a cross-entropy loss whose label is the
    action a_t and whose weight is Â_t.
    The entropy H rewards a policy that keeps trying different actions.

Notation and shapes
    s_t state or observation, a_t action, r_t reward; r_t(θ) is a ratio of probabilities, and no
    reward. π_θ(a|s) is the probability of a in s with the weights θ, γ the discount per step.
    E[·] mean over the rows of a minibatch, KL(p, q) = E_p[log p − log q].
    T steps (--num-steps), N environments (--num-envs), K epochs, B minibatches of M rows.
    D observation entries, A action entries, n logits of a discrete policy, F features of the last
    hidden layer, H features of a recurrent policy's memory, S entries of its whole state.
    `pi` is the tensor that the policy's last layer, `model.head`, makes of an observation: the
    log-probabilities of the choices, or the mean of a Gaussian. The head draws actions from it, and
    has their log-probabilities and the entropy.
    `returns` in a batch are R_t. The return of an episode is the plain sum of its rewards.
    What is stored at index t belongs to the action at step t. `terminated` means that this action
    ended the task. `truncated` means that a time limit cut the episode short, so V(s_{t+1}) stands
    for the rewards that would have followed. done_t is 1 after either.

Papers, and departures from them
    "PPO" is Schulman et al. 2017 (arXiv 1707.06347), "GAE" is Schulman et al. 2016 (arXiv
    1506.02438). Huang et al. 2022, "The 37 implementation details of PPO", explains the details
    that neither paper has. Eq. (9) has no factor ½ before the squared error; this code has it.
"""

import argparse
import copy
import csv
import datetime
import functools
import io
import json
import math
import multiprocessing.connection
import numbers
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

# NumPy's own threads would take the cores that the worker processes need.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

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


def add_network_options(parser):
    """Add the options of the networks for vector observations."""
    add = parser.add_argument_group("network").add_argument
    width = integer(1, 10_000)
    names = sorted(ACTIVATIONS)
    add("--hidden", type=width, nargs="+", default=[64, 64], help="widths of the hidden layers")
    add("--activation", choices=names, default="tanh", help="activation of the hidden layers")
    add("--layer-norm", action=FLAG, default=False, help="LayerNorm before every activation")
    add("--shared-net", action=FLAG, default=False, help="policy and V share the hidden layers")
    add("--init-log-std", type=real(), default=0.0, help="initial log σ of a Gaussian (-3 to 0)")
    add("--full-covariance", action=FLAG, default=False, help="correlate a Gaussian's entries")
    add("--norm-obs", action=FLAG, default=False, help="observations as (s − μ) / σ, within ±10")
    add("--norm-value", action=FLAG, default=False, help="V's targets as (R − μ) / σ (PopArt)")


def add_own_options(parser):
    """Add the options that only ppo.py has."""
    add = parser.add_argument_group("ppo.py").add_argument
    many = integer(1, 100_000)
    positive = real(1e-300)
    cells = ("gru", "lstm")
    add("--env", default="CartPole-v1", help="Gymnasium id, or module:id")
    add(
        "--num-steps",
        type=many,
        default=128,
        help="T, steps of each env per iteration (16 to 2048)",
    )
    add(
        "--norm-reward",
        action=FLAG,
        default=False,
        help="divide rewards by σ of their discounted sum so far",
    )
    add("--action-masks", action=FLAG, help="use the env's action masks; by default if it has them")
    add(
        "--time-limit-bootstrap",
        action=FLAG,
        default=True,
        help="add γ V(s_{t+1}) where a time limit ends an episode",
    )
    add("--baseline", action=FLAG, default=True, help="use V; without it Â_t = Σ_k (γλ)^k r_{t+k}")
    add(
        "--kl-coef",
        type=real(0),
        default=0.0,
        help="β, weight of a KL penalty in the loss (0.01 to 3)",
    )
    add(
        "--adaptive-lr",
        type=positive,
        help="no annealing: change the rate so that KL stays near this (0.01)",
    )
    add("--value-learning-rate", type=positive, help="rate of V alone, if not --learning-rate")
    add("--rnn", choices=cells, help="memory in front of the hidden layers; B must divide N")
    add("--rnn-size", type=integer(1, 10_000), default=64, help="H, width of the memory")


# ------------------------------------------------------------------------------------ train
def train(args):
    """Train with these options. Returns the `Run`.

    If a game fails, the run is saved, and GameError is raised.
    """
    # More threads only slow a small network down.
    torch.set_num_threads(1)
    # The weights are drawn from torch's global generator, noise and minibatches from another one.
    torch.manual_seed(args.seed)
    model = make_model(args)
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = make_optimizer(model, args)

    with Run(args, model, optimizer, generator) as run:
        run.begin()
        while run.goes_on():
            if not args.adaptive_lr:
                remaining = 1 - run.share_done() if args.anneal_lr else 1
                scale_learning_rates(optimizer, remaining)

            # Sample: T steps in each of N environments with the policy π_old.
            buffer, episodes = rollout(model, run.pool, args, generator)

            # Judge: was an action better than the value function expected?
            if args.norm_reward:
                normalise_rewards(model, buffer)
            batch = make_batch(buffer, model, args)
            row = {"explained_variance": explained_variance(batch)}
            if args.norm_value:
                normalise_values(model, batch, batch["returns"])

            # Learn: K epochs of minibatch steps towards the better actions.
            row |= update(model, optimizer, batch, args, generator)

            # Only now update the mean and σ of observations. They are part of the policy, so
            # before the update they would make r_t(θ) ≠ 1 at its start.
            if args.norm_obs:
                model.obs_norm.update(buffer["obs"].flatten(0, 1))

            run.end_iteration(row, episodes, global_step=args.num_envs * args.num_steps)
        run.finish()
    return run


def make_optimizer(model, args):
    """Return Adam. With --value-learning-rate V's own parameters are a second group."""
    value_parameters = set()
    if args.value_learning_rate:
        value_parameters |= set(model.value.parameters())
        value_parameters |= set(model.critic.parameters())
        # Shared layers are the policy's.
        value_parameters -= set(model.actor.parameters())

    policy = [p for p in model.parameters() if p not in value_parameters]
    groups = [{"params": policy, "lr": args.learning_rate}]
    if value_parameters:
        value = [p for p in model.parameters() if p in value_parameters]
        groups.append({"params": value, "lr": args.value_learning_rate})
    return torch.optim.Adam(groups, eps=1e-5, fused=True)


def scale_learning_rates(optimizer, factor):
    """Set the rate of each parameter group to its initial rate times a factor."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * factor


# ------------------------------------------------------------------------------------ rollout
def rollout(model, pool, args, generator):
    """Play T steps in all N environments with the current policy.

    The `pool` has the environments, in this process or in workers. Each of these processes calls
    `play`, below, with its part of them. `pool.buffer` receives what they record, NumPy arrays
    (T, N, ...).

    Returns the buffer and the list of (return, length) of the episodes that ended. The buffer holds
    tensors (T, N, ...): obs, actions, logprobs, values, next_values, rewards, terminated,
    truncated, next_obs, and `discounted`, the discounted sum of rewards since the episode began.
    """
    # Noise makes the sample: an action is `head.sample(pi, noise)`. Draw the noise of all T · N
    # actions first, in this process, and give every worker the part of its games. The actions do
    # not depend on how many workers there are, but for rounding.
    noise = model.head.noise(args.num_steps * args.num_envs, generator)
    noise = noise.view(args.num_steps, args.num_envs, -1)
    noise = noise.chunk(NUM_RANKS, dim=1)[RANK]  # (T, N / ranks, ·), this rank's games
    pool.buffer["noise"][:] = noise
    pool.play(model, args.num_steps)

    names = model.stored + RESULTS
    buffer = {name: torch.tensor(pool.buffer[name]) for name in names}  # copies, (T, N, ...)
    check_finite(buffer)
    buffer = {name: column.to(model.device) for name, column in buffer.items()}
    add_values(model, buffer, noise.to(model.device))
    buffer = gathered(buffer)
    # This takes the columns on ended episodes out of the buffer.
    episodes = finished_episodes(buffer)
    return buffer, episodes


# What a step leads to, as the games write it and the buffer keeps it. To record another number,
# name it here, give its type in `make_pool`, and write it in `Game`.
RESULTS = ["next_obs", "rewards", "terminated", "truncated", "discounted"]
RESULTS += ["ended", "episode_return", "episode_length"]


def play(games, num_steps, sample=True, until_finished=False):
    """Play the games of one process: act, step, record, `num_steps` times.

    A game is an environment that starts its next episode by itself. `games.arrays` (N, ...) hold
    what the games show and do now, `games.buffer` (T, N, ...) what is recorded.

    Rollouts and evaluations take all their steps here, in workers or in the main process. The only
    other steps are those that a resumed run replays. The policy samples its actions from the
    buffer's noise, or takes its mode. With `until_finished` the playing stops when every game has
    finished an episode since it was started.
    """
    arrays = games.arrays  # what the games show now, (N, ...)
    buffer = games.buffer  # what is recorded, (T, N, ...)
    act = fast_act(games.model)

    for t in range(num_steps):
        noise = buffer["noise"][t] if sample else None
        act(arrays, noise)  # writes the actions into the arrays
        for name in games.model.stored:  # what the policy saw and did
            buffer[name][t] = arrays[name]

        games.step()
        for name in RESULTS:  # what came of it
            buffer[name][t] = arrays[name]

        if until_finished and arrays["finished"].all():
            break


# float32 must be able to hold squares of numbers, and sums of squares.
LARGEST = 1e15


def check_finite(buffer, who="game"):
    """Raise GameError at the first NaN, infinity, or number of 1e15 or more."""
    for name in ("next_obs", "rewards", "obs"):
        # NaN < LARGEST is False, so NaN is wrong, too.
        wrong = ~(buffer[name].abs() < LARGEST)
        if wrong.any():
            t, n, *entry = wrong.nonzero()[0].tolist()
            place = f"{name}{entry}" if entry else name
            raise GameError(f"NaN or over 1e15 in {place} of {who} {n}, step {t}")


@torch.no_grad()
def add_values(model, buffer, noise):
    """Add values V(s_t), next_values V(s_{t+1}) and logprobs log π_old(a_t|s_t) to the buffer.

    One forward pass over all steps gives them, since no weight has changed while they were played.
    """
    pi, values = model(**{name: buffer[name] for name in model.inputs})
    check_actions(model.head.sample(pi, noise), buffer["actions"])
    buffer["logprobs"] = model.head.log_prob(pi, buffer["actions"])

    # V(s_{t+1}) is of the state that the step led to, not of the next episode's first state.
    # Shape (1, T · N, ...): for a recurrent policy each of these states is a sequence of one step.
    after = {"obs": buffer["next_obs"].flatten(0, 1).unsqueeze(0)}
    if model.memory is not None:
        after["state"] = buffer["next_state"].flatten(0, 1).unsqueeze(0)
    _, next_values = model(**after)
    next_values = next_values.view(values.shape)

    if model.value_norm is not None:
        values = model.value_norm.restored(values)
        next_values = model.value_norm.restored(next_values)
    buffer["values"] = values
    buffer["next_values"] = next_values


def check_actions(expected, actions):
    """Check that the policy which acted is the one that learns.

    Rounding may lead to another choice now and then: in 1 % of the actions, or in two of a few.
    """
    wrong = ~expected.isclose(actions, rtol=1e-3, atol=1e-3)
    assert wrong.sum() < 3 + wrong.numel() / 99, (
        "The actions differ from head.sample(pi, noise). "
        "If you changed the policy, change fast_act too."
    )


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
    """Add advantages and returns and flatten (T, N, ...) to (T · N, ...).

    A recurrent policy keeps (T, N, ...), since it needs each environment's steps as a sequence.
    """
    terminated = buffer["terminated"]
    if not args.time_limit_bootstrap:
        terminated = terminated | buffer["truncated"]

    values = buffer["values"]
    next_values = buffer["next_values"]
    if not args.baseline:
        # With V = 0, GAE is the sum of rewards, discounted by γλ.
        values = torch.zeros_like(values)
        next_values = torch.zeros_like(next_values)

    truncated = buffer["truncated"]
    rewards = buffer["rewards"]
    advantages = gae(
        rewards, values, next_values, terminated, truncated, args.gamma, args.gae_lambda
    )
    batch = {name: buffer[name] for name in (*model.inputs, "actions", "logprobs")}
    batch["values"] = values
    batch["advantages"] = advantages
    # V's target in PPO, Eq. (9): R_t = Â_t + V(s_t), V's estimate plus the advantage
    batch["returns"] = advantages + values
    if model.memory is not None:
        # `forward` reads only the state before step 0.
        batch["state"] = batch["state"][:1]
        return batch
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


def minibatch_loss(model, mb, args):
    """Return the loss of a minibatch, and a dict of the numbers to log, all scalar tensors."""
    pg_loss, v_loss, entropy, logratio = losses(model, mb, args.clip_coef, args.clip_vloss)
    pg_loss = pg_loss.mean()
    v_loss = v_loss.mean()
    entropy = entropy.mean()
    approx_kl, clipfrac = policy_change(logratio, args.clip_coef)

    # PPO, Eq. (9): loss = E[−L^CLIP + c_v ½ (V_θ − R)² − c_e H]
    value_coef = args.vf_coef if args.baseline else 0.0
    loss = pg_loss + value_coef * v_loss - args.ent_coef * entropy
    # PPO, Eq. (8): + β KL(π_old, π_θ)
    if args.kl_coef:
        loss = loss + args.kl_coef * approx_kl

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
def update(model, optimizer, batch, args, generator):
    """Take K epochs of minibatch steps on the rows of `batch`. Returns the means of the losses."""
    if args.norm_adv == "batch":
        batch = batch | {"advantages": normalised(batch["advantages"])}

    logged = []
    for _ in range(args.update_epochs):
        epoch, completed = run_epoch(model, optimizer, batch, args, generator)
        logged += epoch
        if args.adaptive_lr:
            adapt_learning_rates(optimizer, mean_row(epoch)["approx_kl"], args.adaptive_lr)
        if not completed:
            break
    return mean_row(logged)


def run_epoch(model, optimizer, batch, args, generator):
    """Take one gradient step for each minibatch, unless the policy moves beyond --target-kl.

    Returns the list of the minibatches' numbers, and whether the epoch was completed.
    """
    logged = []
    for mb in minibatches(batch, args, generator):
        loss, row = minibatch_loss(model, mb, args)
        logged.append({name: averaged(value.detach()) for name, value in row.items()})
        if args.target_kl and logged[-1]["approx_kl"] > args.target_kl:
            return logged, False
        gradient_step(model, optimizer, loss, args.max_grad_norm)
    return logged, True


def minibatches(batch, args, generator):
    """Shuffle the rows and cut them into the B minibatches of an epoch, dicts of (M, ...).

    The rows of a recurrent policy's batch (T, N, ...) are its N sequences. With several ranks each
    gets its share of every minibatch, normalised by the whole minibatch.
    """
    axis = batch["advantages"].dim() - 1  # 0, or 1 for sequences
    num_rows = batch["advantages"].shape[axis]
    order = torch.randperm(num_rows, generator=generator).to(batch["advantages"].device)
    # Gather once per epoch: minibatches are then slices of the shuffled rows.
    shuffled = {name: column.index_select(axis, order) for name, column in batch.items()}
    size = num_rows // args.num_minibatches

    for start in range(0, num_rows, size):
        mb = {name: column.narrow(axis, start, size) for name, column in shuffled.items()}
        if args.norm_adv == "minibatch":
            mb["advantages"] = normalised(mb["advantages"])
        yield own_rows(mb, axis)


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


def adapt_learning_rates(optimizer, kl, target):
    """Lower the rates if an epoch's KL was over twice the target, raise them if it was below half.

    This is the rule of skrl's KLAdaptiveLR, which moves rates no further than to 1e-6 and 1e-2.
    """
    for group in optimizer.param_groups:
        rate = group["lr"]
        if kl > 2 * target:
            group["lr"] = min(rate, max(rate / 1.5, 1e-6))
        elif kl < target / 2:
            group["lr"] = max(rate, min(rate * 1.5, 1e-2))


def mean_row(rows):
    """Return the means of a list of dicts of scalar tensors, as a dict of numbers."""
    means = {}
    for name in rows[0]:
        means[name] = float(torch.stack([row[name] for row in rows]).mean())
    return means


# ------------------------------------------------------------------------------------ model
def make_model(args):
    """Return the Model for the env's spaces, its weights drawn from torch's global generator."""
    with closing(make_env(args.env)) as env:
        model = Model(env.observation_space.shape[0], env.action_space, args)
    device = "cpu" if args.device == "auto" else args.device
    # An env's library may have set another default type.
    model = model.to(device, torch.float32)
    # float32 rounds large numbers, such as Unix times, too coarsely.
    model.obs_norm.double()
    return model


class Model(nn.Module):
    """Policy and value function: hidden layers and a head for each.

    With --rnn the hidden layers see a GRU's or LSTM's memory of the episode instead of s_t. The
    inputs are time-major then, (T, M, ...): obs, starts (is obs the first of an episode?) and state
    (of the memory before the step, read at t = 0 only).
    """

    def __init__(self, obs_dim, action_space, args):
        super().__init__()
        self.obs_dim = obs_dim
        self.action_space = action_space

        self.inputs = ["obs"]  # what `forward` takes
        if args.rnn:
            self.inputs += ["starts", "state"]
        if args.action_masks:
            self.inputs += ["action_mask"]
        self.stored = self.inputs + ["actions"]  # what a rollout records of the policy
        if args.rnn:
            self.stored += ["next_state"]

        self.obs_norm = RunningNorm((obs_dim,), limit=10) if args.norm_obs else nn.Identity()
        self.value_norm = RunningNorm() if args.norm_value else None
        self.reward_norm = RunningNorm() if args.norm_reward else None

        width = args.rnn_size if args.rnn else obs_dim
        self.actor = hidden_layers(width, args)
        self.critic = self.actor if args.shared_net else hidden_layers(width, args)
        self.head = make_head(action_space, args)
        self.value = layer_init(nn.Linear(args.hidden[-1], 1), gain=1.0)
        # With --norm-value V is 0 at first, so that the first σ is that of the rewards' sums.
        if args.norm_value:
            nn.init.zeros_(self.value.weight)
        self.memory = Memory(obs_dim, args) if args.rnn else None

    @property
    def device(self):
        """The device that the model computes on."""
        return self.value.weight.device

    def forward(self, obs, starts=None, state=None, action_mask=None):
        """Return the policy's parameters pi (..., ·) and the values (...) of observations (..., D).

        pi holds the log-probabilities of a Categorical head or the means of a Gaussian one. With
        --norm-value the values are normalised. action_mask (..., n) flags the allowed choices.
        """
        x = self.obs_norm(obs)
        if self.memory is not None:
            x, _ = self.memory(x, starts, state[0])  # (T, M, H)
        h = self.actor(x)
        h_value = h if self.critic is self.actor else self.critic(x)
        return self.head(h, action_mask), self.value(h_value).squeeze(-1)

    @torch.no_grad()
    def policy(self, obs, starts=None, state=None, action_mask=None, noise=None):
        """Return actions (M, ...) for observations (M, D), and the memory's next state or None.

        The actions are samples made from noise (M, ·), or the policy's mode without it.
        """
        x = self.obs_norm(obs)
        if self.memory is not None:
            starts = None if starts is None else starts[None]
            x, state = self.memory(x[None], starts, state)  # one step: (1, M, H)
            x = x[0]
        return self.head.sample(self.head(self.actor(x), action_mask), noise), state

    def act(self, arrays, noise=None):
        """Set the actions for what the games show: samples from noise (N, ·), or the mode.

        `arrays` holds NumPy arrays (N, ...), and noise is one too.
        """
        # A memory begins anew where an episode starts.
        if self.memory is not None:
            arrays["starts"][:] = arrays["ended"]
            arrays["state"][:] = arrays["next_state"]

        inputs = {name: torch.from_numpy(arrays[name]).to(self.device) for name in self.inputs}
        if noise is not None:
            noise = torch.from_numpy(noise).to(self.device)
        actions, state = self.policy(**inputs, noise=noise)

        arrays["actions"][:] = actions.cpu().numpy()
        if self.memory is not None:
            arrays["next_state"][:] = state.cpu().numpy()


# ------------------------------------------------------------------------ heads and normalisers
def hidden_layers(width, args):
    """Return layers of widths `args.hidden` over an input of `width` entries."""
    layers = []
    for features in args.hidden:
        layers.append(layer_init(nn.Linear(width, features)))
        if args.layer_norm:
            layers.append(nn.LayerNorm(features))
        layers.append(ACTIVATIONS[args.activation]())
        width = features
    return nn.Sequential(*layers)


ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}


def layer_init(layer, gain=2**0.5):
    """Initialise a linear or convolutional layer: orthogonal weight times `gain`, zero bias.

    √2 keeps the scale of features through hidden layers. A policy's last layer has 0.01, so that
    its first actions are nearly uniform, or have means near 0.
    """
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def make_head(action_space, args):
    """Return the policy's last layer for an action space.

    A head draws an action from `head.n` random numbers, which `head.noise` draws beforehand.
    """
    choices = num_choices(action_space)
    if choices:
        return Categorical(args.hidden[-1], choices, action_space.shape)
    return Gaussian(args.hidden[-1], action_space.shape, args)


class Categorical(nn.Module):
    """Policy head for Discrete, MultiDiscrete and MultiBinary: independent categorical entries.

    `choices` lists the number of choices of each entry, [n] for Discrete(n). The logits of all
    entries lie in a row, n in all. `shape` is the shape of an action.
    """

    def __init__(self, features, choices, shape=()):
        super().__init__()
        self.choices = choices
        self.shape = shape
        self.n = sum(choices)
        self.logits = layer_init(nn.Linear(features, self.n), gain=0.01)
        offsets = torch.tensor([0, *choices[:-1]]).cumsum(0)  # where each entry's logits begin
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, h, action_mask=None):
        """Return log-probabilities (M, n) for features (M, F) and flags (M, n) or None."""
        logits = self.logits(h)
        if action_mask is not None:
            # With −1e8 the probability is exactly 0. With −∞ the entropy's π log π would be NaN.
            logits = logits.where(action_mask, -1e8)
        # Without split and cat an update of CartPole's takes 6 % less.
        if len(self.choices) == 1:
            return logits.log_softmax(-1)
        parts = logits.split(self.choices, dim=-1)
        return torch.cat([part.log_softmax(-1) for part in parts], dim=-1)

    def noise(self, batch, generator):
        """Return standard Gumbel noise, (batch, n): −log of exponential noise."""
        exponential = torch.empty(batch, self.n, dtype=torch.float32)
        return -exponential.exponential_(generator=generator).log()

    def sample(self, logp, noise=None):
        """Return actions (M, ...). Without noise they are the mode, the most likely ones.

        argmax(log π + Gumbel noise) is a sample of π (the Gumbel-max trick).
        """
        scores = logp if noise is None else logp + noise
        parts = scores.split(self.choices, dim=-1)
        actions = torch.stack([part.argmax(-1) for part in parts], dim=-1)
        return actions.view(*logp.shape[:-1], *self.shape)

    def log_prob(self, logp, action):
        """Return log π(a|s), summed over the entries, (M,)."""
        columns = action.reshape(*logp.shape[:-1], -1) + self.offsets
        return logp.gather(-1, columns).sum(dim=-1)

    def entropy(self, logp, logprobs=None):
        """Return H = −Σ π log π, (M,). A head without a closed form would use `logprobs` (M,)."""
        return -(logp.exp() * logp).sum(dim=-1)


class Gaussian(nn.Module):
    """Policy head for Box: the mean from the features, and one free log σ per action entry.

    With --full-covariance the covariance is L Lᵀ: L is lower triangular with σ on its diagonal.
    """

    def __init__(self, features, shape, args):
        super().__init__()
        self.shape = shape
        self.n = math.prod(shape)
        self.mean = layer_init(nn.Linear(features, self.n), gain=0.01)
        self.log_std = nn.Parameter(torch.full((self.n,), args.init_log_std))
        self.lower = nn.Parameter(torch.zeros(self.n, self.n)) if args.full_covariance else None

    @property
    def factor(self):
        """L, the lower triangular factor of the covariance, (A, A)."""
        return self.lower.tril(-1) + self.log_std.exp().diag()

    def forward(self, h, action_mask=None):
        """Return the means (M, A) for features (M, F)."""
        return self.mean(h)

    def noise(self, batch, generator):
        """Return standard normal noise ε, (batch, A)."""
        return torch.randn(batch, self.n, generator=generator, dtype=torch.float32)

    def sample(self, mean, noise=None):
        """Return actions (M, ...): μ + σ ε or μ + L ε. Without noise the mode, μ."""
        actions = mean
        if noise is not None and self.lower is None:
            actions = mean + self.log_std.exp() * noise
        elif noise is not None:
            actions = mean + noise @ self.factor.T
        return actions.view(*mean.shape[:-1], *self.shape)

    def log_prob(self, mean, action):
        """Return log π(a|s) = −½ |z|² − Σ log σ − (A/2) log 2π, (M,).

        z = (a − μ) / σ, or L⁻¹ (a − μ) with --full-covariance.
        """
        z = action.reshape(mean.shape) - mean
        if self.lower is None:
            z = z * torch.exp(-self.log_std)
        else:
            z = torch.linalg.solve_triangular(self.factor.T, z, upper=True, left=False)
        constant = self.log_std.sum() + 0.5 * self.n * math.log(2 * math.pi)
        return -0.5 * z.square().sum(dim=-1) - constant

    def entropy(self, mean, logprobs=None):
        """Return H = Σ log σ + (A/2) log 2πe, (M,). `logprobs` is not needed."""
        constant = 0.5 * self.n * math.log(2 * math.pi * math.e)
        return (self.log_std.sum() + constant).expand(mean.shape[:-1])


class Memory(nn.Module):
    """A GRU or LSTM that begins anew with each episode: orthogonal weights, zero biases."""

    def __init__(self, width, args):
        super().__init__()
        cells = {"gru": nn.GRU, "lstm": nn.LSTM}
        self.rnn = cells[args.rnn](width, args.rnn_size)
        self.size = args.rnn_size  # S, entries of the state
        # An LSTM's state is h and c.
        if args.rnn == "lstm":
            self.size = 2 * args.rnn_size
        for name, parameter in self.rnn.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.orthogonal_(parameter)

    def forward(self, x, starts, state):
        """Return the memories (T, M, H) after each step, and the last state (M, S).

        x (T, M, D) are the inputs, starts (T, M) flags of episodes' first steps or None, and state
        (M, S) is the state before the first step.
        """
        if starts is None:
            starts = torch.zeros_like(x[..., 0], dtype=torch.bool)

        # One call covers all steps until some environment starts an episode: its state is 0 there.
        begins = [0, *(starts[1:].any(dim=1).nonzero().flatten() + 1).tolist()]
        ends = [*begins[1:], len(x)]
        memories = []
        for begin, end in zip(begins, ends, strict=True):
            state = state * ~starts[begin].unsqueeze(-1)
            h, state = self.run(x[begin:end], state)
            memories.append(h)
        return torch.cat(memories), state

    def run(self, x, state):
        """Return memories and last state of steps (t, M, D) in which no episode starts."""
        state = state.unsqueeze(0)  # (1, M, S)
        if isinstance(self.rnn, nn.LSTM):
            h, c = state.chunk(2, dim=-1)
            memories, (h, c) = self.rnn(x, (h.contiguous(), c.contiguous()))
            state = torch.cat([h, c], dim=-1)
        else:
            memories, state = self.rnn(x, state)
        return memories, state[0]


class RunningNorm(nn.Module):
    """(x − μ) / σ with the mean and standard deviation of all rows seen; saved with the model.

    An entry that varies by no more than the rounding of its mean has σ = 1: it is only shifted.
    """

    def __init__(self, shape=(), limit=math.inf):
        super().__init__()
        self.limit = limit
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))

    @property
    def std(self):
        """σ, or 1 if the rows were all the same but for rounding."""
        std = self.var.sqrt()
        rounding = torch.finfo(std.dtype).eps * self.mean.abs()
        return torch.where(std > 10 * rounding, std, 1.0)

    def update(self, rows):
        """Add rows (M, ...): the moments of two sets are combined as in Chan et al. 1983."""
        self.count += len(rows)
        share = len(rows) / self.count
        delta = rows.mean(dim=0) - self.mean
        within = self.var * (1 - share) + rows.var(dim=0, correction=0) * share
        between = delta.square() * share * (1 - share)
        self.var.copy_(within + between)
        self.mean += delta * share

    def forward(self, x):
        """Return (x − μ) / σ, clipped at ±limit, as float32."""
        x = (x - self.mean) / self.std
        return x.clamp(-self.limit, self.limit).float()

    def restored(self, x):
        """Return μ + σ x, the inverse of `forward` without its clipping."""
        return self.mean + self.std * x


def normalise_rewards(model, buffer):
    """Divide a rollout's rewards by the σ of all discounted sums so far, Σ_k γ^k r_{t−k}.

    The sums look back, so they are known at step t, and vary about as much as R_t (Engstrom et al.
    2020, arXiv 2005.12729). The mean stays: without it the sign of a reward would change. A clip to
    ±10 bounds rare large ones.
    """
    model.reward_norm.update(buffer["discounted"].flatten())
    buffer["rewards"] = (buffer["rewards"] / model.reward_norm.std).clamp(-10, 10)


@torch.no_grad()
def normalise_values(model, batch, returns):
    """Update the returns' running mean and σ, and normalise the batch's values and returns by them.

    The value function's last layer is rescaled so that V(s) stays what it was: PopArt, van Hasselt
    et al. 2016 (arXiv 1602.07714).
    """
    norm = model.value_norm
    layer = model.value
    old_mean = norm.mean.clone()
    old_std = norm.std
    norm.update(returns.flatten())

    layer.weight.mul_(old_std / norm.std)
    layer.bias.copy_((old_std * layer.bias + old_mean - norm.mean) / norm.std)
    batch["values"] = norm(batch["values"])
    batch["returns"] = norm(batch["returns"])


# ------------------------------------------------------------------------------------ speed
def fast_act(model):
    """Return `model.act`, or the same in NumPy for a plain policy on the CPU.

    Torch spends most of its time on overhead when there are few rows: with this function CartPole
    trains at 2.19 instead of 1.70 times the speed of Stable-Baselines3.
    """
    if not is_plain(model):
        return model.act

    layers = [*model.actor, *model.head.children()]
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    # Weights, biases and mean are views of the model's tensors, sigma and std are copies. All are
    # current, because `play` calls `fast_act` anew for each rollout.
    weights = [layer.weight.detach().numpy().T for layer in linear]
    biases = [layer.bias.detach().numpy() for layer in linear]
    discrete = isinstance(model.head, Categorical)
    sigma = None if discrete else model.head.log_std.detach().exp().numpy()
    norm = model.obs_norm
    normalising = isinstance(norm, RunningNorm)
    if normalising:
        mean = norm.mean.numpy()
        std = norm.std.numpy()

    def act(arrays, noise=None):
        h = arrays["obs"]
        if normalising:
            h = ((h - mean) / std).clip(-norm.limit, norm.limit).astype(np.float32)
        for W, b in zip(weights[:-1], biases[:-1]):
            h = np.tanh(h @ W + b)
        actions = h @ weights[-1] + biases[-1]  # logits, or means
        if noise is not None:
            actions = actions + noise if discrete else actions + sigma * noise
        if discrete:
            actions = actions.argmax(axis=-1)
        arrays["actions"][:] = actions.reshape(arrays["actions"].shape)

    return act


def is_plain(model):
    """Whether `fast_act` knows the policy: tanh layers, one choice or a diagonal Gaussian, no more.

    The types are compared exactly, since a subclass may do something else.
    """
    own_act = type(model) is Model
    on_cpu = model.device.type == "cpu"
    sees_obs_only = model.inputs == ["obs"]  # no memory, no masks
    one_choice = type(model.head) is Categorical and len(model.head.choices) == 1
    diagonal = type(model.head) is Gaussian and model.head.lower is None
    if not (own_act and on_cpu and sees_obs_only and type(model.actor) is nn.Sequential):
        return False
    layers = [type(layer) for layer in model.actor]
    tanh_layers = layers == [nn.Linear, nn.Tanh] * (len(layers) // 2)
    return tanh_layers and (one_choice or diagonal)


# ------------------------------------------------------------------------------------ games
def make_env(env_id, **options):
    """Return the env, observations as vectors; ValueError if its observations cannot be."""
    if "ALE/" in env_id:
        raise ValueError("argument --env: Atari games are for ppo_atari.py")
    if ".py:" in env_id:
        raise ValueError(f"argument --env: {env_id} should be module:id, without .py")
    env = gym.make(env_id, **options)
    space = env.observation_space
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    if not isinstance(env.observation_space, gym.spaces.Box):
        raise ValueError(f"not supported: observation space {env.observation_space}")
    return env


def num_choices(space):
    """Return the number of choices of each action entry, [] for a Box of floats.

    Raises ValueError for any other action space.
    """
    if isinstance(space, gym.spaces.Box) and space.dtype.kind == "f":
        return []
    if isinstance(space, gym.spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, gym.spaces.MultiDiscrete):
        return space.nvec.ravel().tolist()
    if isinstance(space, gym.spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    raise ValueError(f"not supported: action space {space}")


def to_env(action, space, as_array=np.asarray):
    """Return an action as the env takes it: clipped to a Box's bounds, counted from `start`.

    The policy's log π is of the action before clipping. `as_array` is torch.as_tensor for tensors.
    """
    if isinstance(space, gym.spaces.Box):
        return action.clip(as_array(space.low), as_array(space.high))
    return action + as_array(np.int64(getattr(space, "start", 0)))


def action_mask(env, info, is_first=False):
    """Return flags of the allowed choices, entry after entry, from `info` or the env's method.

    Raises EnvError if there is no mask, if it is not as many flags as there are choices, or if an
    entry has no allowed choice. The first mask of a game must be flags beyond doubt.
    """
    if "action_mask" in info:
        given = info["action_mask"]
    else:
        method = env.has_wrapper_attr("action_masks") and env.get_wrapper_attr("action_masks")
        if not callable(method):
            raise EnvError(MASK_NEEDED)
        given = method()

    mask = flat(given)
    choices = num_choices(env.action_space)
    begins = np.cumsum([0, *choices[:-1]])
    are_flags = ((mask == 0) | (mask == 1)).all()
    if len(mask) != sum(choices) or not are_flags or not np.logical_or.reduceat(mask, begins).all():
        raise EnvError(f"action mask {mask}: not {sum(choices)} flags, or no action is allowed")
    if is_first:
        check_first_mask(given)
    return mask.astype(bool)


MASK_NEEDED = (
    "an action_mask must be in the info of reset and of every step, or returned by a method "
    "action_masks(); --no-action-masks ignores it"
)


def check_first_mask(mask):
    """Raise EnvError if a mask may be flags or the numbers of the allowed choices.

    The list [0, 1, 1] may be either. Bools, arrays and lists that are not sorted are flags.
    """
    has_ints = isinstance(mask, (tuple, list)) and all(type(entry) is int for entry in mask)
    if has_ints and set(mask) == {0, 1} and list(mask) == sorted(mask):
        line = "are these flags, or numbers of choices? Give flags as bools or as an array"
        raise EnvError(f"action mask {mask}: {line}")


def flat(mask):
    """Return a mask, an array or a tuple or list of parts for each entry, as a vector."""
    is_list = isinstance(mask, (tuple, list))
    if is_list and any(isinstance(part, (tuple, list, np.ndarray)) for part in mask):
        return np.concatenate([flat(part) for part in mask])
    return np.ravel(mask)


class Game:
    """One env that starts its next episode by itself. It is row n of the arrays of all games.

    A step leads from the action in `actions` to `next_obs`. `obs` is what to act on next: the same,
    or the first observation of the next episode if the step `ended` one. `episode_return` and
    `episode_length` are those of the episode so far. `finished` says that an episode has ended
    since `start`, and `first_return` is the return of the first one.
    """

    MAX_REPLAY = 100_000  # steps; a longer episode is not replayed when a run is resumed

    def __init__(self, args, n, seed, arrays, video=None, **options):
        self.name = args.env
        self.n = n
        self.seed = seed
        self.gamma = args.gamma
        self.arrays = arrays
        self.env = make_env(args.env, **options)
        if video:
            self.env = first_episode_video(self.env, video)
        self.space = self.env.action_space
        self.expects_no_masks = args.action_masks is None  # there was none after the first reset

        # What `get_state` saves: the actions so far, and the state that the env's random generator
        # had before the episode's reset, or None if the reset was by the game's seed.
        self.actions = []
        self.random_state = None
        self.episode = 0  # how many have begun since the game was started

    def start(self):
        """Start the first episode of the game's seed."""
        self.episode = 0
        self.arrays["finished"][self.n] = False
        self.begin_episode(self.seed)

    def resume(self, state):
        """Take up the episode of a saved state, or start a new one if that is not possible.

        Returns None, or a line that says why the episode is a new one.
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

    def begin_episode(self, seed=None):
        """Reset the env, to its next episode or to the first one of a seed."""
        self.random_state = None
        if seed is None:
            self.random_state = random_state(self.env)
        self.actions = []
        self.episode += 1
        # Until the next step `ended` says that `obs` is the first observation of an episode.
        self.arrays["ended"][self.n] = True
        obs, info = reset_env(self.env, seed)
        self.show("obs", obs, info)

    def step(self):
        """Take one step, and start the next episode if this one has ended."""
        a = self.arrays
        n = self.n
        action = to_env(a["actions"][n], self.space).astype(self.space.dtype, copy=False)
        if len(self.actions) <= self.MAX_REPLAY:
            # An env may change the array that it gets.
            self.actions.append(action.copy())
        obs, reward, terminated, truncated, info = step_env(self.env, action)
        check_step(reward, terminated, truncated)

        # If the step before ended an episode, this one begins another.
        if a["ended"][n]:
            a["episode_return"][n] = 0
            a["episode_length"][n] = 0
            a["discounted"][n] = 0
        a["episode_return"][n] += reward
        a["episode_length"][n] += 1
        a["discounted"][n] = reward + self.gamma * a["discounted"][n]  # Σ_k γ^k r_{t−k}
        ended = terminated or truncated
        a["rewards"][n] = reward
        a["terminated"][n] = terminated
        a["truncated"][n] = truncated and not terminated
        a["ended"][n] = ended

        self.show("next_obs", obs, info)
        if not ended:
            self.show("obs", obs, info)
            return
        if not a["finished"][n]:
            a["finished"][n] = True
            a["first_return"][n] = a["episode_return"][n]
        self.begin_episode()

    def show(self, name, obs, info):
        """Write an observation, and with `obs` the flags of the actions allowed there."""
        shape = self.arrays[name].shape[1:]
        # NumPy would stretch an observation of another shape.
        if np.shape(obs) != shape:
            raise EnvError(f"an observation has shape {np.shape(obs)}, its space {shape}")
        self.arrays[name][self.n] = obs
        if name == "obs" and "action_mask" in self.arrays:
            is_first = self.episode == 1 and not self.actions
            self.arrays["action_mask"][self.n] = action_mask(self.env, info, is_first)
        elif name == "obs" and self.expects_no_masks and "action_mask" in info:
            raise EnvError(MASK_NEEDED)

    def place(self):
        """Return where the game is, as text: its seed, the episode since then, the steps in it."""
        ended = self.arrays["ended"][self.n]
        steps = 0 if ended else self.arrays["episode_length"][self.n]
        return f"seed {self.seed}, episode {self.episode}, after {steps} steps"

    def get_state(self):
        """Return, as bytes, what `resume` needs to take up this episode, or None if nothing helps.

        That is the env's own state, if it has get_state and set_state, or else how the episode
        began and its actions: playing them again leads to the same place.
        """
        state = {"seed": self.seed, "random_state": self.random_state, "actions": self.actions}
        state["episode"] = self.episode
        try:
            keeper = state_keeper(self.env)
            if keeper is not None:
                state["env"] = keeper.get_state()
            elif len(self.actions) > self.MAX_REPLAY:
                return None
            return pickle.dumps(state)
        except Exception:
            # An env may raise anything, or hold what cannot be pickled.
            return None

    def set_state(self, state):
        """Take up the episode of a saved state; ValueError if the env does not get there."""
        obs, info = self.env.reset(seed=state["seed"])
        if "env" in state:
            state_keeper(self.env).set_state(state["env"])
        else:
            obs = self.replay(obs, state)
            shown = self.arrays["obs"][self.n]
            if not np.array_equal(np.asarray(obs, shown.dtype), shown, equal_nan=True):
                raise ValueError("playing its actions again led elsewhere")
        self.seed = state["seed"]
        self.random_state = state["random_state"]
        self.actions = state["actions"]
        self.episode = state["episode"]

    def replay(self, obs, state):
        """Play an episode's actions again, after reset(seed). Returns the last observation."""
        # A later episode of the seed began with a reset without one.
        if state["random_state"] is not None:
            self.env.unwrapped.np_random.bit_generator.state = state["random_state"]
            obs, _ = self.env.reset()
        for action in state["actions"]:
            obs, _, terminated, truncated, _ = self.env.step(action)
            if terminated or truncated:
                raise ValueError("playing its actions again ended the episode early")
        return obs

    def close(self):
        """Close the env."""
        self.env.close()


# What Gymnasium wants. The API of Gym before 0.26 is another one.
API = "reset must return (obs, info), step (obs, reward, terminated, truncated, info)"


class EnvError(ValueError):
    """An env has returned what cannot be used. The message says all; no traceback is needed."""


def reset_env(env, seed=None):
    """Return (obs, info) of env.reset; EnvError if the env has another API."""
    try:
        returned = env.reset(seed=seed)
    except ValueError as error:
        if is_of_a_wrapper(error):
            raise EnvError(API) from error
        raise
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not is_pair or not isinstance(returned[1], dict):
        raise EnvError(API)
    return returned


def step_env(env, action):
    """Return (obs, reward, terminated, truncated, info) of env.step; EnvError as `reset_env`."""
    try:
        returned = env.step(action)
    except ValueError as error:
        if is_of_a_wrapper(error):
            raise EnvError(API) from error
        raise
    if not isinstance(returned, tuple) or len(returned) != 5:
        raise EnvError(API)
    return returned


def is_of_a_wrapper(error):
    """Whether a wrapper of Gymnasium's could not unpack what an env had returned."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_in = frame.f_globals["__name__"]
    return raised_in.startswith("gymnasium.") and "unpack (expected" in str(error)


def check_step(reward, terminated, truncated):
    """Raise EnvError unless a step returned a number and two flags; arrays are neither."""
    is_number = isinstance(reward, numbers.Real) or getattr(reward, "shape", None) == ()
    if not is_number or not is_flag(terminated) or not is_flag(truncated):
        raise EnvError(f"not a number and two flags: {(reward, terminated, truncated)}")


def is_flag(value):
    """Whether a value is true or false, and no array."""
    return getattr(value, "shape", ()) == () and value in (True, False)


def random_state(env):
    """Return the state of the env's random generator, or None if it is of another kind."""
    generator = getattr(env.unwrapped.np_random, "bit_generator", None)
    return None if generator is None else generator.state


def state_keeper(env):
    """Return the env or wrapper that has get_state and set_state, or None if there is none.

    There is also none if it lies inside a wrapper that may keep a state of its own, such as a time
    limit. Both methods are needed: MuJoCo's set_state alone does something else.
    """
    stateless = (gym.wrappers.PassiveEnvChecker, gym.wrappers.OrderEnforcing)
    stateless += (gym.wrappers.FlattenObservation, gym.wrappers.RescaleAction)
    stateless += (gym.wrappers.ClipAction,)
    while not (hasattr(env, "get_state") and hasattr(env, "set_state")):
        if type(env) not in stateless:
            return None
        env = env.env
    return env


def first_episode_video(env, folder):
    """Return the env with a wrapper that films its first episode, a file .mp4 in the folder."""
    return gym.wrappers.RecordVideo(
        env, folder, episode_trigger=lambda episode: episode == 0, disable_logger=True
    )


class Games:
    """The games of one process, those in `rows` of all N, and the model that plays them."""

    def __init__(self, args, model, seeds, rows, arrays, buffer, **options):
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
            what = f"{game.name} ({game.place()}) failed in {doing}: {one_line(error)}"
            if not isinstance(error, EnvError):
                what += f"\n{traceback.format_exc()}"
            raise GameError(what) from None

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
    obs_shape = (model.obs_dim,)
    action_shape = model.head.shape
    state_shape = (model.memory.size,) if model.memory else ()
    obs_type = "float64" if args.norm_obs else "float32"
    action_type = "int64" if num_choices(model.action_space) else "float32"

    # Shape and type of what one game shows and does.
    entries = {
        "obs": (obs_shape, obs_type),
        "next_obs": (obs_shape, obs_type),
        "actions": (action_shape, action_type),
    }
    for name in ("rewards", "discounted"):
        entries[name] = ((), "float32")
    for name in ("terminated", "truncated", "ended", "finished", "starts"):
        entries[name] = ((), "bool")
    for name in ("episode_return", "first_return"):
        entries[name] = ((), "float64")
    entries["episode_length"] = ((), "int64")
    for name in ("state", "next_state"):
        entries[name] = (state_shape, "float32")
    entries["action_mask"] = ((model.head.n,), "bool")
    entries["noise"] = ((model.head.n,), "float32")

    shown = set(entries) - {"noise"}
    if not args.action_masks:
        shown -= {"action_mask"}
    recorded = [*model.stored, *RESULTS, "noise"]
    T = num_steps or args.num_steps
    arrays = layout(entries, sorted(shown), (len(seeds),))
    buffer = layout(entries, recorded, (T, len(seeds)))

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
        model = copy.deepcopy(model).cpu()
    return model.share_memory()


# ------------------------------------------------------------------------------------ worker pool
class GameError(RuntimeError):
    """A game or a worker failed: a line that says which and how, then the game's own traceback."""


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


def own_rows(mb, axis=0):
    """Return this rank's share of a minibatch, rows along an axis."""
    if NUM_RANKS == 1:
        return mb
    rows = torch.arange(RANK, mb["advantages"].shape[axis], NUM_RANKS)
    return {name: column.index_select(axis, rows.to(column.device)) for name, column in mb.items()}


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
EVAL_STEPS = 10_000  # an evaluation takes no more steps, so that it always ends
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
  python ppo.py --env CartPole-v1                           train
  python ppo.py --env Hopper-v5 --norm-obs --norm-reward    train with normalised inputs
  python ppo.py --resume RUN_DIR --num-iterations 2000      resume, for longer
  python ppo.py --eval RUN_DIR --video                      evaluate, and film an episode
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
    add_network_options(parser)
    add_run_options(parser)
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
    with closing(make_env(args.env)) as env:
        args.action_masks = uses_masks(parser, args, env)
        hint = hint_of_actions(args, env.action_space)
    if hint and not (args.resume or args.eval):
        report(hint)

    if args.rnn:
        check_rows(parser, args, args.num_envs, "games (--num-envs), each a sequence,")
    rows = args.num_envs * args.num_steps
    check_rows(parser, args, rows)
    check_normalised(parser, args, rows)
    check_norm_obs(parser, args)
    if args.total_timesteps or args.num_iterations is None:
        args.num_iterations = max(1, (args.total_timesteps or 500_000) // rows)
    return args


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


def uses_masks(parser, args, env):
    """Return whether the policy uses action masks: by default if the env has them.

    None: the env has none so far, and no option says that masks should be ignored.
    """
    if args.action_masks is False:
        return False
    if args.action_masks is None and not num_choices(env.action_space):
        return False
    has_masks = False
    if num_choices(env.action_space):
        has_masks = env.has_wrapper_attr("action_masks") or "action_mask" in reset_env(env)[1]
    if not has_masks and env.has_wrapper_attr("action_mask"):
        parser.error(f"argument --action-masks: {MASK_NEEDED}")
    if not has_masks and args.action_masks:
        parser.error(f"argument --action-masks: {args.env} has none")
    return has_masks or None


def hint_of_actions(args, space):
    """Return a line if a Box is far wider or narrower than a Gaussian's first actions, or apart.

    Actions outside of a Box are only clipped, so such a policy learns slowly or not at all. Returns
    None if they fit, or are choices.
    """
    if num_choices(space):
        return None
    sigma = np.exp(args.init_log_std)
    low = np.float64(space.low)
    high = np.float64(space.high)
    half_width = high / 2 - low / 2
    unbounded = half_width > 5e29
    too_narrow = half_width < sigma / 20
    too_wide = (half_width > 12.5 * sigma) & ~unbounded
    elsewhere = np.maximum(low, -high) > sigma  # the distance from 0 to the Box
    if not (too_narrow | too_wide | elsewhere).any():
        return None
    line = f"actions are 0 ± {sigma:.3g} at first, the Box is {low.min():g} to {high.max():g}: "
    return line + "gymnasium.wrappers.RescaleAction? (--init-log-std changes only their σ)"


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


def check_norm_obs(parser, args):
    """Refuse to normalise observations on a device that has no float64."""
    if args.norm_obs and args.device.startswith("mps"):
        parser.error("argument --norm-obs: needs float64, which mps lacks; use --device cpu")


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
