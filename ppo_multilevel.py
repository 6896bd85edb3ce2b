"""Multilevel PPO: policy optimisation for expensive simulations that exist on several levels.

    python ppo_multilevel.py --env ResSim-v1               # wells of a reservoir, 2 minutes
    python ppo_multilevel.py --env ResSim-v1 --levels 5    # finest grid only: PPO
    python ppo_multilevel.py --env ResSim-v1 --schedule together          # the paper's schedule
    python ppo_multilevel.py --env my_simulation.py:Rod --levels 1 2 3   # yours, see README

How to read this file
    This is `ppo.py` for a simulation that exists on L levels (grids, time steps), coarse to fine.
    GAE, the losses, the network and the machinery are those of ppo.py. What is new stands in
    `train`, `rollout`, `update` and in the section "levels". Two schedules choose the levels.
    Masks and recurrent policies, of which shared functions speak, are only in ppo.py. Options that
    both scripts have may have other defaults here: `make_parser` and `set_defaults_of_case` set
    them.

The schedule adaptive, the default
    Each iteration is PPO on one level, the one with the largest trust · ρ² / seconds. ρ is the
    correlation of a level's returns with those of the finest level. Trust says whether training on
    the level has helped on the finest one lately. Seconds are those of a row: a step on the level,
    and its share of an update.
    For a first reading take `train` and `Adaptive`, and skip partners, weights and coupling, which
    only the other schedule uses. Without partners all weights are 1, and an update is that of
    ppo.py. A run on a single level needs no choice. It has the other schedule, and is plain PPO.

The schedule together, the paper's
    In each iteration N actors take many steps, T^1, on the coarsest level and few, T^L, on the
    finest. It is multilevel Monte Carlo in the loss, see `Together`.
    On a level l > 1 each actor has a partner, which plays the same simulation on level l − 1 with
    the same noise. The losses of the two differ little, so that few samples tell by how much. The
    coarsest level's loss plus the differences is the finest level's loss:

    L_a = −min(r_t(θ) Â_t, clip(r_t(θ), 1−ε, 1+ε) Â_t)                           PPO, Eq. (7)
    ℓ = L_a + c_v ½ (V_θ(s_t) − R_t)² − c_e H(π_θ(·|s_t))                        PPO, Eq. (9)
    loss = Σ_l mean[ℓ^l − ℓ̃^{l−1}],  ℓ̃^0 = 0                               D&E, Algorithm 4

    This is PPO whose rows carry a signed weight. A row of a level's own simulation weighs +1/M^l,
    a row of a partner (ℓ̃) −1/M^l, times control weights β, see `Together`. One forward pass over
    all rows of a minibatch gives the loss. With one level, this schedule and the same options the
    script is ppo.py, bit for bit.

What a simulation is
    A class or function `make(level, evaluation=False, validation=False)` that returns Gymnasium
    environments. Spaces are the same on all levels, and so is the meaning of rewards: take means
    over cells, not sums. The last two arguments, if the function has them, ask for starts that
    training never sees: `evaluation` for those of the results that are reported, `validation` for
    those of the checks by which the best parameters are chosen.
    Pairs of levels use two more methods, if they are there: `psi()` returns the observation of the
    state, and `map_from(other)` takes over another level's state. Without them a common seed starts
    both. A static method `step_batch(envs, actions)` steps many simulations at once. It returns
    arrays of observations, rewards, terminated and truncated.

Notation and shapes
    L levels, T^l steps on level l (--num-steps), N actors (--num-envs), B minibatches of M^l rows
    of level l, S rows in all. D observation entries, A action entries, as in ppo.py.
    `level` is an index from 0. `number`, which is `args.levels[level]`, is what a simulation knows
    the level by: 1, 2, 3 and so on.
    A game is one simulation. An actor has its own game on each level and, with --schedule
    together, a partner on each level but the first: a game one level below. Own game and partner
    are a pair, in which the own game is the fine one. OWN and PARTNER are their roles.

Papers, and departures from them
    "D&E" is the multilevel PPO of Dixit & ElSheikh (arXiv 2210.08400), with the algorithms of A.
    Dixit's "Implementation of multilevel PPO in Stable Baselines 3". "PPO", Â_t, R_t and r_t(θ) are
    those of ppo.py. With --coupling step a partner is mapped before each step and takes the action
    of the fine game. By default it is mapped only when an episode starts, and then acts itself,
    with the same noise. PPO's Eq. (9) has no factor ½; this code has it. What Dixit's text prints
    otherwise: Algorithm 3 has L_a without its minus sign and the entropy term as −C_e L_now.
    Algorithm 4 prints N T^l ≤ M^l where ≥ is meant. Algorithm 5 has map_from after the fine step,
    and assigns ã twice.
"""

import argparse
import copy
import csv
import ctypes
import datetime
import functools
import gc
import importlib.util
import inspect
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
from typing import NamedTuple

# NumPy's own threads would take the cores that the worker processes need.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from scipy import sparse
from scipy.sparse.linalg import splu
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
    """Add the options that only ppo_multilevel.py has."""
    add = parser.add_argument_group("ppo_multilevel.py").add_argument
    count = integer(1)
    positive = real(1e-300)
    add(
        "--env",
        type=env_name,
        default="ResSim-v1",
        help="ResSim-v1 to -v4 (they set --init-log-std -2.9), file.py:make, module:make",
    )
    add(
        "--schedule",
        choices=("adaptive", "together"),
        help="adaptive: one level at a time, the one that teaches most per second; together: all "
        "levels in each iteration, which sets --learning-rate 3e-5, --update-epochs 10 and 200 "
        "iterations unless they are given; None: adaptive if there are several levels",
    )
    add(
        "--levels",
        type=count,
        nargs="+",
        default=[],
        help="levels, coarse to fine; []: the case's own (two of them if together)",
    )
    add(
        "--num-steps",
        type=integer(1, 100_000),
        nargs="+",
        default=[50],
        help="T^l, steps per actor and iteration: one number per level, or one for all levels. "
        "together: the sum of levels is unbiased if all are whole episodes",
    )
    add(
        "--control",
        type=or_auto(real(0, 1)),
        default="auto",
        help="β, weight of partners' rows with --schedule together; 1: as in the paper; auto: "
        "measured",
    )
    add(
        "--total-cost",
        type=positive,
        help="length of the run in steps of the finest level, with updates at what they cost; "
        "None: by --env, or as long as 100 iterations on the finest level",
    )
    add(
        "--hours",
        type=positive,
        help="length of the run in hours of simulation and updates; they are converted once, by "
        "--level-costs, to --total-cost",
    )
    add(
        "--level-costs",
        type=positive,
        nargs="+",
        help="seconds of a step on each level, divided by the number of workers, and seconds of an "
        "update with the rows of the coarsest; None: measured",
    )
    add(
        "--check-episodes",
        type=integer(2, 100_000),
        default=16,
        help="episodes of each check on the finest level, with --schedule adaptive",
    )
    add(
        "--baseline",
        type=env_name,
        help="file.py:function or module:function, obs → action: your own controller, played once "
        "in the episodes of an evaluation, to compare the policy with (in ppo.py it is another "
        "option)",
    )
    add(
        "--failed-reward",
        type=real(),
        help="reward of a step that raises an exception or returns NaN, which ends its episode; "
        "None: it ends the run",
    )
    add(
        "--analyse",
        nargs="?",
        const="",
        metavar="RUN_DIR",
        help="do not train: print what each level costs and how well it agrees with the finest, "
        "for this run's policy or the initial one",
    )
    add(
        "--check",
        action="store_true",
        help="do not train: play two episodes on each level, and print what they cost, what is "
        "wrong, and which options to set",
    )
    add("--eval-level", type=count, help="level of evaluations, if not the last")
    add(
        "--coupling",
        choices=("step", "noise"),
        default="noise",
        help="a partner takes over the fine state when an episode starts (noise) or in each step "
        "(step: biased)",
    )
    add(
        "--correction",
        choices=("literal", "bounded"),
        default="bounded",
        help="literal: Algorithm 4, whose loss is unbounded; bounded: clip by the signed Â, and "
        "fit values to own rows only",
    )


# ------------------------------------------------------------------------------------ train
def train(args, rule=None):
    """Train with these options. Returns the `Run`.

    The `rule` chooses each iteration's levels, see `Adaptive`. Saves, then raises GameError, when a
    game fails.
    """
    # More threads only slow a small network down.
    torch.set_num_threads(1)
    # The weights are drawn from torch's global generator, noise and minibatches from another one.
    torch.manual_seed(args.seed)
    model = make_model(args)
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = make_optimizer(model, args)
    rule = rule or make_rule(args)

    with Run(args, model, optimizer, generator, rule) as run:
        run.begin()
        while run.goes_on():
            remaining = 1 - run.share_done() if args.anneal_lr else 1
            scale_learning_rates(optimizer, remaining)

            # Sample: T^l steps on each level of the plan. This is one level if adaptive, all if
            # together. In the latter actors above the coarsest level play in pairs.
            plan = rule.plan()
            buffers = []  # what each level has recorded: [own], or [own, partners']
            episodes = {}
            for level, num_steps in zip(plan.levels, plan.num_steps):
                roles, ended = rollout(model, run.pool, level, num_steps, args, generator)
                buffers.append(roles)
                episodes[level] = ended

            # Judge: was an action better than the value function expected?
            own = [make_batch(roles[OWN], model, args) for roles in buffers]
            paired = [roles for roles in buffers if len(roles) > 1]  # all levels but the first
            partners = [make_batch(roles[PARTNER], model, args) for roles in paired]
            batch = joined(own, partners)
            row = {"explained_variance": explained_variance(own[0])}  # on the plan's first level
            row["learning_rate"] = optimizer.param_groups[0]["lr"]
            if args.norm_value:
                normalise_values(model, batch, own[0]["returns"])
            if plan.refit:
                refit_values(model, batch)

            # Learn: K epochs of minibatch steps towards the better actions. Several levels have one
            # loss, their telescoping sum.
            row |= update(model, optimizer, batch, plan, args, generator)

            # Only now update the mean and σ of observations. They are part of the policy, so
            # before the update they would make r_t(θ) ≠ 1 at its start.
            if args.norm_obs:
                model.obs_norm.update(torch.cat([rows["obs"] for rows in own]))

            # Count what it cost. The rule may then check the policy, and choose another level.
            run.charge(run.pool)
            run.count_iteration(len(batch["obs"]))
            row |= rule.review(run, own, partners, episodes)
            run.end_iteration(row, episodes, len(batch["obs"]))
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


# ------------------------------------------------------------------------------------ rollout
# The roles of an actor on a level: it has its own simulation of the level and, with --schedule
# together, a partner one level below. The role is the first axis: arrays of games are
# (2, L, N, ...), and a recorded rollout is (2, T, N, ...).
OWN = 0
PARTNER = 1


def rollout(model, pool, level, num_steps, args, generator):
    """Take T^l steps with all N actors on a level (D&E, Algorithm 5).

    Returns the buffers, [own] or [own, partner's], and the list of (return, length) of the level's
    own episodes that ended. A buffer holds tensors (T, N, ...): obs, actions, logprobs, values,
    next_values, rewards, terminated, truncated, next_obs.
    """
    coupling = args.coupling if level > 0 and is_paired(args) else None
    # Draw the noise of all actions first, in this process, and give every worker the part of its
    # actors. The actions do not depend on how many workers there are, but for rounding.
    noise = model.head.noise(num_steps * args.num_envs, generator)
    noise = noise.view(num_steps, args.num_envs, -1)
    noise = noise.chunk(NUM_RANKS, dim=1)[RANK]  # (T, N / ranks, ·), for both members of a pair
    pool.buffer["noise"][:num_steps] = noise
    pool.play(model, num_steps, level=level, coupling=coupling)

    buffers = []
    roles = [OWN, PARTNER] if coupling else [OWN]
    for role in roles:
        buffer = recorded(model, pool, role, num_steps)
        simulated = level - 1 if role == PARTNER else level
        check_finite(buffer, f"level {args.levels[simulated]}, actor")
        buffer = {name: column.to(model.device) for name, column in buffer.items()}
        # With --coupling step a partner's actions are not those of the noise.
        copies_actions = role == PARTNER and coupling == "step"
        noise_of_actions = None if copies_actions else noise.to(model.device)
        add_values(model, buffer, noise_of_actions)
        buffers.append(gathered(buffer))
    # This takes the columns on ended episodes out of the buffer.
    episodes = finished_episodes(buffers[OWN])
    return buffers, episodes


# What a step leads to, as the games write it and the buffer keeps it. To record another number,
# name it here, give its type in `make_pool`, and write it in `Game`.
RESULTS = ["next_obs", "rewards", "terminated", "truncated"]
RESULTS += ["ended", "episode_return", "episode_length"]


def recorded(model, pool, role, num_steps):
    """Return what a role has recorded in the last rollout: copies (T, N, ...)."""
    names = model.stored + RESULTS
    return {name: torch.tensor(pool.buffer[name][role, :num_steps]) for name in names}


def play(games, num_steps, level=0, coupling=None, sample=True, until_finished=False):
    """Play the games of one process on a level: act, step, record, `num_steps` times.

    Rollouts, checks, evaluations and analyses take all their steps here, in workers or in the main
    process. The only other steps are those that a resumed run replays. The policy samples its
    actions from the buffer's noise, or takes its mode. With `until_finished` the playing stops when
    every game has finished an episode since it was started.

    `coupling` says what partners do. None: they do not play. "noise": they act themselves, with the
    same noise, and take over the fine game's state when its episode ends (`Games.follow`). "step":
    they take the fine game's actions, and its state in each step.
    """
    own = view(games.arrays, OWN, level)  # what the games show now, (N, ...)
    partner = view(games.arrays, PARTNER, level)
    act = fast_act(games.model)

    for t in range(num_steps):
        noise = games.noise[t] if sample else None
        act(own, noise)
        if coupling == "step":
            partner["actions"][:] = own["actions"]
        elif coupling == "noise":
            act(partner, noise)
        for name in games.model.stored:  # what the policy saw and did
            games.buffer[name][:, t] = games.arrays[name][:, level]

        games.step(level, coupling)
        for name in RESULTS:  # what came of it
            games.buffer[name][:, t] = games.arrays[name][:, level]

        if until_finished and own["finished"].all():
            break


def view(arrays, role, level):
    """Return {name: (N, ...)}, the part of arrays (2, L, N, ...) of a role on a level."""
    return {name: array[role, level] for name, array in arrays.items()}


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
def add_values(model, buffer, noise=None):
    """Add values V(s_t), next_values V(s_{t+1}) and logprobs log π_old(a_t|s_t) to the buffer.

    One forward pass over all steps gives them, since no weight has changed while they were played.
    The actions should be those of the noise, if there is one.
    """
    pi, values = model(buffer["obs"])
    if noise is not None:
        check_actions(model.head.sample(pi, noise), buffer["actions"])
    buffer["logprobs"] = model.head.log_prob(pi, buffer["actions"])

    # V(s_{t+1}) is of the state that the step led to, not of the next episode's first state.
    _, next_values = model(buffer["next_obs"])
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
    """Add advantages and returns and flatten (T, N, ...) to (T · N, ...)."""
    names = ("rewards", "values", "next_values", "terminated", "truncated")
    columns = [buffer[name] for name in names]
    advantages = gae(*columns, args.gamma, args.gae_lambda)
    batch = {name: buffer[name] for name in (*model.inputs, "actions", "logprobs", "values")}
    batch["advantages"] = advantages
    # V's target in PPO, Eq. (9): R_t = Â_t + V(s_t), V's estimate plus the advantage
    batch["returns"] = advantages + buffer["values"]
    return {name: column.flatten(0, 1) for name, column in batch.items()}


def joined(own, partners):
    """Return one batch of all rows, in the order own¹, partners², own², partners³, own³, ..."""
    parts = [own[0]]
    for partner_rows, own_rows_above in zip(partners, own[1:]):
        parts += [partner_rows, own_rows_above]
    batch = {}
    for name in own[0]:
        batch[name] = torch.cat([part[name] for part in parts])
    return batch


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
    """Return the loss of a minibatch, and a dict of the numbers to log, all scalar tensors.

    Without partners all weights are 1, and this is plain PPO.
    --correction literal is the paper's: a partner's policy loss is +min(r Ã, clip(r) Ã), with the
    ratio r = r_t(θ). It goes to −∞ with r if Ã < 0. --correction bounded takes the signed advantage
    into the minimum, −min(−r Ã, −clip(r) Ã). This is bounded from below, and has the same gradient
    at π_old. V is then fitted to own rows only, since −(V − R)² has no minimum.
    """
    weights = mb["weights"]
    policy_weights = weights
    value_weights = weights
    if args.correction == "bounded":
        mb = mb | {"advantages": weights * mb["advantages"]}
        # The advantages carry the weights.
        policy_weights = 1
        value_weights = weights.clamp(min=0)

    pg_loss, v_loss, entropy, logratio = losses(model, mb, args.clip_coef, args.clip_vloss)
    # D&E, Algorithm 4: Σ_l mean[ℓ^l − ℓ̃^{l−1}], a weighted mean over all rows
    pg_loss = (policy_weights * pg_loss).mean()
    v_loss = (value_weights * v_loss).mean()
    entropy = (weights * entropy).mean()
    # PPO, Eq. (9): loss = E[−L^CLIP + c_v ½ (V_θ − R)² − c_e H]
    loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy

    approx_kl, clipfrac = policy_change(logratio[weights > 0], args.clip_coef)
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
def update(model, optimizer, batch, plan, args, generator):
    """Take K epochs of minibatch steps on the rows of `batch`. Returns the means of the losses."""
    if args.norm_adv == "batch":
        num_first_rows = args.num_envs * plan.num_steps[0]
        batch = batch | {"advantages": normalised(batch["advantages"], num_first_rows)}

    logged = []
    for _ in range(args.update_epochs):
        epoch, completed = run_epoch(model, optimizer, batch, plan, args, generator)
        logged += epoch
        if not completed:
            break
    return mean_row(logged)


def run_epoch(model, optimizer, batch, plan, args, generator):
    """Take one gradient step for each minibatch, unless the policy moves beyond --target-kl.

    Returns the list of the minibatches' numbers, and whether the epoch was completed.
    """
    logged = []
    for mb in minibatches(batch, plan, args, generator):
        loss, row = minibatch_loss(model, mb, args)
        logged.append({name: averaged(value.detach()) for name, value in row.items()})
        if args.target_kl and logged[-1]["approx_kl"] > args.target_kl:
            return logged, False
        gradient_step(model, optimizer, loss, args.max_grad_norm)
    return logged, True


def minibatches(batch, plan, args, generator):
    """Yield the minibatches of an epoch, dicts of (S, ...), with the weight of each row.

    With several ranks each gets its share of every minibatch, normalised by the whole minibatch.
    """
    sizes = (plan.num_steps, args.num_envs, args.num_minibatches)
    weights = signed_weights(*sizes, plan.controls).to(batch["obs"].device)
    num_first_rows = args.num_envs * plan.num_steps[0] // args.num_minibatches
    for rows in minibatch_rows(*sizes, generator):
        mb = {name: column[rows] for name, column in batch.items()}
        if args.norm_adv == "minibatch":
            mb["advantages"] = normalised(mb["advantages"], num_first_rows)
        mb["weights"] = weights
        yield own_rows(mb)


def minibatch_rows(num_steps, num_envs, num_minibatches, generator):
    """Return the row numbers of an epoch's minibatches, (B, S): D&E, Algorithm 6.

    The batch has the rows of all members in the order of `joined`. A minibatch has M^l own rows of
    level l, and the rows of the partners at the same actors and steps.
    """
    parts = []
    begin = 0  # where the next member's rows begin
    for level, T in enumerate(num_steps):
        size = num_envs * T
        shuffled = torch.randperm(size, generator=generator).view(num_minibatches, -1)
        if level > 0:
            parts.append(begin + shuffled)
            begin += size
        parts.append(begin + shuffled)
        begin += size
    return torch.cat(parts, dim=1)


def signed_weights(num_steps, num_envs, num_minibatches, controls):
    """Return the weights of a minibatch's S rows: their weighted mean is the telescoping sum.

    For any β, E ℓ^L = E[ℓ^L − β_L ℓ̃^{L−1}] + β_L E ℓ^{L−1} if E ℓ̃ = E ℓ, and so on down to level 1.
    With b_l = β_{l+1} ... β_L level l's own rows weigh S b_l / M^l and its partners' rows
    −S β_l b_l / M^l. If all β are 1 this is D&E, Algorithm 4, line 16. `controls` are β_2 ... β_L.
    """
    sizes = [num_envs * T // num_minibatches for T in num_steps]  # M^l
    total = 2 * sum(sizes) - sizes[0]  # S
    weights = []
    for level, size in enumerate(sizes):
        own = total * math.prod(controls[level:]) / size
        if level > 0:
            weights.append(torch.full((size,), -own * controls[level - 1]))
        weights.append(torch.full((size,), own))
    return torch.cat(weights).float()  # (S,)


def normalised(advantages, num_first_rows):
    """Return advantages less the mean of the first rows, divided by their σ.

    The first rows are those of the plan's first level. With --schedule together this is the
    coarsest one, which has the most rows. One affine map serves all levels: with a map of its own
    for each level the differences between levels would be lost.
    """
    std, mean = torch.std_mean(advantages[:num_first_rows])
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


# ------------------------------------------------------------------------------------ levels
# Which levels an iteration plays. A rule has `plan`, `begin`, `review`, `state`, `restore`, and in
# `best` the parameters that are the run's result, or None for the last ones.


def make_rule(args):
    """Return the rule of --schedule."""
    rules = {"adaptive": Adaptive, "together": Together}
    return rules[args.schedule](args)


class Plan(NamedTuple):
    """What an iteration does."""

    levels: list  # indices, coarse to fine
    num_steps: list  # T^l on each
    controls: list  # control weight β_l of the partners, for each level but the first
    refit: bool = False  # whether to fit the values' last layer first, see `refit_values`


class Together:
    """--schedule together, the paper's: all levels in every iteration.

    The sum of the levels is unbiased for any β if all T^l are whole episodes. Otherwise partners
    see other parts of the episodes than the level below does.

    --control auto: β_l = Cov(Â^l, Ã^{l−1}) / Var(Ã^{l−1}), clipped to [0, 1], makes the variance of
    the difference Â^l − β_l Ã^{l−1} least.
    """

    best = None  # the run's result is its last parameters

    def __init__(self, args):
        self.args = args
        pairs = len(args.levels) - 1
        control = 1.0 if args.control == "auto" else args.control
        self.controls = [control for _ in range(pairs)]
        # Running means of each pair's Cov(Â, Ã) and Var(Ã). This is a guess, which the first
        # iteration replaces. Later ones move the means by a tenth.
        self.moments = torch.tensor([[0.9, 1.0] for _ in range(pairs)], dtype=torch.float32)
        self.rate = 1.0

    def begin(self, run):
        """Before the first iteration nothing is checked."""
        return {}

    def plan(self):
        """Return what the next iteration does."""
        levels = list(range(len(self.args.levels)))
        return Plan(levels, self.args.num_steps, self.controls)

    def review(self, run, own, partners, episodes):
        """Measure an iteration's rows: own batches of all levels, partners' of all but the first.

        Returns what to log: Var(Â^l − Ã^{l−1}) / Var(Â^1), which tells what a level's correction
        with β = 1 adds to the variance per row.
        """
        own = [batch["advantages"].cpu() for batch in own]
        partners = [batch["advantages"].cpu() for batch in partners]
        if partners:
            self.move_moments(own, partners)
        if partners and self.args.control == "auto":
            covariance, variance = self.moments.unbind(dim=1)
            betas = covariance / variance
            self.controls = betas.nan_to_num().clamp(0, 1).tolist()

        logged = {}
        for number, fine, partner in zip(self.args.levels[1:], own[1:], partners):
            logged[f"levels/variance_ratio_{number}"] = float((fine - partner).var() / own[0].var())
        return logged

    def move_moments(self, own, partners):
        """Move the running means towards the moments of these advantages, where they are finite."""
        moments = []
        for fine, partner in zip(own[1:], partners):
            covariances = torch.cov(torch.stack([fine, partner]))  # (2, 2)
            moments.append(covariances[1])
        # An env may have set another default type.
        moments = torch.stack(moments).float()
        moved = torch.lerp(self.moments, moments, self.rate)
        self.moments = torch.where(moments.isfinite(), moved, self.moments)
        self.rate = 0.1

    def state(self):
        """Return what a checkpoint keeps."""
        return {"rate": self.rate, "controls": self.controls, "moments": self.moments}

    def restore(self, state):
        """Go on from a checkpoint's state."""
        self.rate = state["rate"]
        self.controls = state["controls"]
        self.moments = state["moments"]


class Adaptive:
    """--schedule adaptive: one level at a time, the one that teaches most per second.

    ρ of a level is the correlation of its returns with the finest level's, when both play from the
    same starts with the same noise. Where a lucky action pays on both levels, ρ is near 1, and the
    gradients of the two point the same way: to first order ρ is the cosine between them. A step
    along a gradient with that cosine is worth about ρ² as many samples as one of the finest level.
    So the rule trains on the level with the largest trust · ρ² / seconds. It measures ρ now and
    then. The trust tells what ρ cannot: whether the level still has something to teach.

    A level keeps the run for a window of some iterations. Then a *check* plays episodes on the
    finest level with the policy's mode, always from the same starts. If the best check has risen by
    more than its noise, the level's trust becomes 1. That of all others doubles, up to 1: the
    policy has changed, so what they failed at is past. Without a gain the level's trust is halved.
    If, besides, the latest check is below the best one, training goes back to the best parameters,
    unless the level's own returns still rise (`progress_is_hidden`). The best parameters by the
    checks are the run's result.

    Every check has the same starts, so two checks are compared start by start. (The command --check
    is another thing: it inspects a simulation.)

    All times here are those of the run's clock: steps and updates at --level-costs, no wall time.
    """

    WINDOW_ITERATIONS = 8  # a window has at least this many iterations
    WINDOW_CHECKS = 5  # it takes at least as long as this many checks
    WINDOW_SHARE = 0.15  # it takes at least this share of the time so far
    CHECK_AFTER = 6  # a check is due once training has taken as long as this many checks
    ERRORS = 1.0  # a gain is more than this many standard errors of the difference of checks
    MEASURE_SHARE = 0.05  # measurements of ρ may take this share of the time
    LEAST_RHO = 0.03  # a smaller ρ, or one below 0, counts as this
    HIGH_RHO = 0.9  # from here on what is good on a level is good on the finest one

    def __init__(self, args):
        self.args = args
        self.level = None  # the level index that is trained on
        self.trust = [1.0 for _ in args.levels]
        self.rho = [1.0 for _ in args.levels]  # 1 until it is measured
        self.measured_at = 0.0  # when ρ was measured last, in seconds; None if it cannot be
        self.measurements = 0  # how often ρ was measured
        self.refit = False  # whether to refit V, see `refit_values`
        self.best = None  # the model's state at the best check
        self.best_optimizer = None  # the optimizer's state there
        self.best_at = 0.0  # when the best check was, in seconds
        self.best_returns = None  # the returns (E,) of the best check
        self.latest_returns = None  # those of the latest check
        self.returns_before = None  # those of the best check before the window
        self.own_returns = []  # the level's own returns in the window, a mean for each iteration
        self.window_end = 0.0  # when the window is over, in seconds
        self.check_due = 0.0  # when a check is due, in seconds
        self.check_seconds = 0.0  # what the latest check has cost

    def begin(self, run):
        """Make the first check and choose the first level. Returns what is logged."""
        row = {"check_return": self.check(run)}
        self.choose_level(run)
        # V is random at first. With --norm-obs it is fitted one iteration later.
        self.refit = not self.args.norm_obs
        return row | self.logged()

    def plan(self):
        """Return what the next iteration does."""
        return Plan([self.level], [self.args.num_steps[self.level]], [], self.refit)

    def review(self, run, own, partners, episodes):
        """After an iteration: check if it is due; at a window's end judge and choose the level."""
        row = self.logged()
        if episodes[self.level]:
            returns = [episode_return for episode_return, _ in episodes[self.level]]
            self.own_returns.append(float(np.mean(returns)))
        # With --norm-obs the first iteration sets the observations' mean and σ. This changes what V
        # sees, so the next iteration refits it.
        rows = self.args.num_envs * self.args.num_steps[self.level]
        self.refit = self.args.norm_obs and float(run.model.obs_norm.count) <= rows

        window_is_over = run.seconds() >= self.window_end
        check_is_due = run.seconds() >= self.check_due
        if window_is_over or check_is_due or run.share_done() >= 1:
            row["check_return"] = self.check(run)
        if run.share_done() >= 1:
            self.tell_end(run)
        elif window_is_over:
            self.judge(run)
            self.choose_level(run)
        return row

    def logged(self):
        """Return the level, and what is known of all levels, for the log."""
        row = {"level": self.args.levels[self.level]}
        is_measured = self.measurements > 0 and self.measured_at is not None
        for number, rho, trust in zip(self.args.levels, self.rho, self.trust):
            if is_measured:
                row[f"levels/rho_{number}"] = rho
            row[f"levels/trust_{number}"] = trust
        return row

    def check(self, run):
        """Return the mean return of a check; keep the parameters if they are the best so far."""
        began = run.seconds()
        self.latest_returns = run.check()
        self.check_seconds = run.seconds() - began
        self.check_due = run.seconds() + self.CHECK_AFTER * self.check_seconds
        if self.best is None or self.latest_returns.mean() > self.best_returns.mean():
            self.best = copy.deepcopy(run.model.state_dict())
            self.best_optimizer = copy.deepcopy(run.optimizer.state_dict())
            self.best_at = run.seconds()
            self.best_returns = self.latest_returns
        return float(self.latest_returns.mean())

    def judge(self, run):
        """Trust the level by what the window has gained on the finest level."""
        gains = self.best_returns - self.returns_before  # start by start
        error = gains.std() / len(gains) ** 0.5
        if gains.mean() > self.ERRORS * error:
            self.trust = [min(1.0, 2 * trust) for trust in self.trust]
            self.trust[self.level] = 1.0
            return

        self.trust[self.level] /= 2
        is_worse = self.latest_returns.mean() < self.best_returns.mean()
        if is_worse and not self.progress_is_hidden():
            self.go_back(run)

    def progress_is_hidden(self):
        """Whether returns on this level still rise in training, though checks do not.

        That counts only where it is good for the finest level as well: where ρ is high.

        The return of the policy's mode can stand still, or fall, while that of its samples rises.
        The slope of a least-squares line through the window's own returns must be over two errors.
        """
        y = np.array(self.own_returns)
        if len(y) < 4 or self.rho[self.level] < self.HIGH_RHO:
            return False
        x = np.arange(len(y)) - (len(y) - 1) / 2
        slope = (x @ y) / (x @ x)
        residuals = y - y.mean() - slope * x
        error = math.sqrt((residuals @ residuals) / (len(y) - 2) / (x @ x))
        return bool(slope > 2 * error)

    def go_back(self, run):
        """Go on from the best parameters."""
        run.model.load_state_dict(self.best)
        # Adam writes into what it loads.
        best_optimizer = copy.deepcopy(self.best_optimizer)
        run.optimizer.load_state_dict(best_optimizer)
        self.refit = True

    def choose_level(self, run):
        """Measure ρ if it is due, and start a window on the level that teaches most per second."""
        if self.measurement_is_due(run):
            self.measure(run)

        best_worth = 0.0
        for level, (trust, rho) in enumerate(zip(self.trust, self.rho)):
            worth = trust * rho**2 / row_seconds(self.args, level)
            # Of equals the finest wins.
            if worth >= best_worth:
                best_worth = worth
                chosen = level
        if chosen != self.level:
            self.tell(run, chosen)
            self.level = chosen
            self.refit = True
        self.start_window(run)

    def start_window(self, run):
        """Start a window on the level."""
        self.returns_before = self.best_returns
        self.own_returns = []
        iterations = self.WINDOW_ITERATIONS * iteration_seconds(self.args, self.level)
        checks = self.WINDOW_CHECKS * self.check_seconds
        share = self.WINDOW_SHARE * run.seconds()
        self.window_end = run.seconds() + max(iterations, checks, share)

    def tell(self, run, level):
        """Print which level is trained on from now on, and why."""
        if RANK > 0 or self.args.quiet:
            return
        name = run.pool.call("level_names")[0][level]
        rho = f"{self.rho[level]:.2f}"
        if self.measured_at is None:
            rho = "unknown"
        elif self.measurements == 0:
            rho = "not yet measured"
        if len(self.args.levels) == 1:
            print(f"training on level {name}", flush=True)
            return
        seconds = iteration_seconds(self.args, level)
        line = f"training on level {name}: {seconds:.2g} s an iteration, "
        line += f"correlation with the finest {rho}, trust {self.trust[level]:.2g}; "
        line += f"best check {self.best_returns.mean():.4f}"
        print(line, flush=True)

    def tell_end(self, run):
        """Print whether a longer run may gain more."""
        if RANK > 0 or self.args.quiet:
            return
        best = self.best_returns.mean()
        share = self.best_at / run.seconds()
        line = f"the best check, {best:.4f}, came after {share:.0%} of the time; "
        if share > 0.9:
            line += "a longer run may gain more: --resume"
        else:
            line += "checks have not gained since"
        print(line, flush=True)

    def measurement_is_due(self, run):
        """Whether the time since ρ was measured pays for measuring it again."""
        if self.measured_at is None or len(self.args.levels) == 1:
            return False
        costs = costs_of(self.args).steps
        steps_of_an_episode = self.check_seconds / costs[-1] / self.args.check_episodes
        episodes = num_rounds(self.args) * self.args.num_envs
        needed = episodes * steps_of_an_episode * sum(costs)
        affordable = self.MEASURE_SHARE * (run.seconds() - self.measured_at)
        return needed <= affordable and run.seconds() >= 1.5 * self.measured_at

    def measure(self, run):
        """Measure ρ of all levels. If that cannot be done, say so, and go by costs and trust."""
        self.measurements += 1
        returns, starts, problem = play_alike(
            run.model, run.pool, self.args, self.measurements, run
        )
        # The games of training start anew, from other seeds than those of the measurement.
        seeds = game_seeds(self.args, MEASURE_SEED, self.measurements, 1)
        run.pool.call("start", seeds=seeds)
        self.measured_at = run.seconds()
        rho = correlations(returns, starts)
        if problem:
            report(f"{problem}: levels are chosen by costs and gains alone")
            self.measured_at = None
            self.rho = [1.0 for _ in self.rho]
            return
        # Where nothing that the policy does changes the finest level's returns, ρ tells nothing.
        returns_vary = rho[-1] > 0
        if returns_vary:
            self.rho = rho.clip(self.LEAST_RHO, 1).tolist()

    def state(self):
        """Return what a checkpoint keeps: all but the options."""
        kept = dict(vars(self))
        del kept["args"]
        return kept

    def restore(self, state):
        """Go on from a checkpoint's state."""
        vars(self).update(state)


# To measure ρ, each level plays about EPISODES episodes, REPEATS from each start.
EPISODES = 64
REPEATS = 8
MEASURE_SEED = 30_000  # the seeds of measurements are not those of training


def num_rounds(args):
    """Return how many episodes each actor plays on each level to measure ρ."""
    return max(1, round(EPISODES / args.num_envs))


def play_alike(model, pool, args, measurement, run=None):
    """Play episodes on all levels from the same starts and with the same noise of the actions.

    Returns the returns (L, E), the number of each episode's start (E,), and None, or a line on why
    the levels do not start alike. Each `measurement`, a number, has its own starts and noise. A
    `run` is charged. The games of the pool are left where they are: start them anew.
    """
    rounds = num_rounds(args)
    starts = np.arange(rounds * args.num_envs) // REPEATS  # (E,)
    num_starts = starts[-1] + 1
    drawn = draw_seeds(rounds + num_starts, args.seed, MEASURE_SEED, measurement)
    noise_seeds, start_seeds = np.split(drawn, [rounds])
    seeds_of_rounds = start_seeds[starts].reshape(rounds, args.num_envs)

    returns = []
    shown = []
    cut = 0
    for noise_seed, seeds in zip(noise_seeds, seeds_of_rounds):
        generator = torch.Generator().manual_seed(int(noise_seed))
        first_obs, round_returns, unfinished = play_round(model, pool, args, seeds, generator)
        shown.append(first_obs)
        returns.append(round_returns)
        cut += int(unfinished.sum())
        if run is not None:
            run.charge(pool, side_by_side=True)
    if cut:
        report(f"{cut} episodes cut off at {EVAL_STEPS:,} steps: do they ever end?")
    returns = np.concatenate(returns, axis=1)
    shown = np.concatenate(shown, axis=1)
    for number, returns_of_level in zip(args.levels, returns):
        if not np.isfinite(returns_of_level).all():
            raise GameError(f"NaN or infinity in returns of level {number}")
    problem = problem_of_starts(model, pool, args, shown, starts)
    if run is not None:
        run.charge(pool, side_by_side=True)
    return returns, starts, problem


def play_round(model, pool, args, seeds, generator):
    """Play an episode of every actor on every level, each actor from its own seed, (N,).

    Returns the first observations (L, N, D), the returns (L, N), and where an episode was cut off
    (L, N), of all ranks.
    """
    L = len(args.levels)
    shown = start_alike(pool, args, seeds)

    finished = pool.arrays["finished"][OWN]  # (L, N / ranks)
    chunk = len(pool.buffer["noise"])
    for done in range(0, EVAL_STEPS, chunk):
        noise = model.head.noise(chunk * args.num_envs, generator).view(chunk, args.num_envs, -1)
        pool.buffer["noise"][:] = noise.chunk(NUM_RANKS, dim=1)[RANK]
        num_steps = min(chunk, EVAL_STEPS - done)
        for level in range(L):
            if not finished[level].all():
                pool.play(model, num_steps, level=level, until_finished=True)
        if finished.all():
            break
    returns = first_returns(pool.arrays)[OWN]
    ranks = gathered_objects((shown, returns, ~finished))
    return [np.concatenate(parts, axis=1) for parts in zip(*ranks)]


def start_alike(pool, args, seeds):
    """Start each actor on all levels from its own seed, (N,), and where the finest level is.

    Returns this rank's first observations (L, N / ranks, D).
    """
    seeds = np.broadcast_to(seeds, (2, len(args.levels), args.num_envs))
    pool.call("start", seeds=np.split(seeds, NUM_RANKS, axis=2)[RANK])
    pool.call("follow_finest")
    return pool.arrays["obs"][OWN].copy()


# The page that says what to do about starts.
EXAMPLES_PAGE = "tests/examples/README.md, Seeds and starts"
SEED_VARIES = f"two episodes from the same reset(seed) differ, see {EXAMPLES_PAGE}"
STARTS_DIFFER = f"levels start unlike from the same seed, see {EXAMPLES_PAGE}"


def problem_of_starts(model, pool, args, shown, starts):
    """Return None, or a line on why first observations (L, E, D) are not of the same starts."""
    first_of_start = np.searchsorted(starts, starts)  # the first episode from the same start
    if not alike(shown, shown[:, first_of_start]):
        return SEED_VARIES
    # What differs between starts may show after a step.
    if not varies(shown[-1]):
        seeds = draw_seeds(args.num_envs, args.seed, MEASURE_SEED)
        _, next_obs = start_and_step(model, pool, args, seeds)
        shown = np.concatenate(gathered_objects(next_obs), axis=1)
    return None if vary_together(shown) else STARTS_DIFFER


def start_and_step(model, pool, args, seeds):
    """Start the games of all levels from seeds, (N,), and take a step with the policy's mode.

    Returns this rank's observations before and after it, (2, L, N / ranks, D).
    """
    obs = start_alike(pool, args, seeds)
    next_obs = []
    for level in range(len(args.levels)):
        pool.play(model, 1, level=level, sample=False)
        next_obs.append(pool.buffer["next_obs"][OWN, 0].copy())
    return np.stack([obs, np.stack(next_obs)])


def varies(rows):
    """Whether rows (E, D) differ by more than rounding."""
    return not alike(rows, rows[:1])


def alike(a, b):
    """Whether two arrays are equal but for float32 rounding, which may add up in an episode."""
    return np.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)


def vary_together(shown):
    """Whether observations (L, E, D) of all levels vary with the finest level's, if those vary.

    Levels of the reservoirs that start alike have a correlation of at least 0.66 after a step, and
    levels that start unlike have one near 0. So the limit is 0.5.
    """
    if not varies(shown[-1]):
        return True
    centred = shown - shown.mean(axis=1, keepdims=True, dtype=float)
    finest = centred[-1]
    agreement = (centred * finest).sum(axis=(1, 2))  # (L,)
    scale = np.sqrt((centred**2).sum(axis=(1, 2)) * (finest**2).sum())
    return bool((agreement > 0.5 * scale).all())


def correlations(returns, starts):
    """Return the correlations (L,) of returns (L, E) with the finest level's, within a start.

    The mean of the episodes from one start is subtracted. How good a start is does not depend on
    the policy, and would raise every correlation.

    That of a level whose returns do not vary is 0, also that of the finest level with itself.
    """
    within = np.array(returns, float)
    for start in np.unique(starts):
        episodes = starts == start
        within[:, episodes] -= within[:, episodes].mean(axis=1, keepdims=True)
    rounding = 1e-9 * abs(returns).max(axis=1, keepdims=True)
    within[abs(within) <= rounding] = 0
    products = within @ within[-1]
    scale = np.sqrt((within**2).sum(axis=1) * (within[-1] ** 2).sum())
    return products / np.where(scale > 0, scale, 1)


@torch.no_grad()
def refit_values(model, batch):
    """Fit the value function's last layer to a batch's returns and take advantages from it.

    After a change of level V is wrong, and its errors would reach the policy as advantages. The fit
    is in closed form, to R_t as recorded: many rewards, and V only at their end, so that R_t is
    less wrong than V. Â_t becomes R_t − V(s_t). It is a ridge regression, which keeps the weights
    small. With large ones V's gradient would dominate the layers that V shares with the policy.
    """
    features = model.critic(model.obs_norm(batch["obs"]))
    features = nn.functional.pad(features, (0, 1), value=1.0).cpu().double()  # (M, F + 1)
    returns = batch["returns"].cpu().double()  # (M,)
    ridge = 1e-3 * len(returns) * torch.eye(features.shape[1]).to(features)
    solution = torch.linalg.solve(features.T @ features + ridge, features.T @ returns)  # (F + 1,)
    model.value.weight[0] = solution[:-1]
    model.value.bias[0] = solution[-1]

    batch["values"] = model(batch["obs"])[1]
    scale = 1 if model.value_norm is None else model.value_norm.std
    batch["advantages"] = scale * (batch["returns"] - batch["values"])


# ------------------------------------------------------------------------------------ model
def make_model(args, kind=None):
    """Return the Model for the env's spaces, its weights drawn from torch's global generator.

    It may be of another kind, a subclass.
    """
    with closing(make_env(args.env, args.levels[-1])) as env:
        model = (kind or Model)(env.observation_space.shape[0], env.action_space, args)
    device = "cpu" if args.device == "auto" else args.device
    # An env's library may have set another default type.
    model = model.to(device, torch.float32)
    # float32 rounds large numbers, such as Unix times, too coarsely.
    model.obs_norm.double()
    return model


class Model(nn.Module):
    """Policy and value function: hidden layers and a head for each."""

    inputs = ["obs"]  # what `forward` takes
    stored = ["obs", "actions"]  # what a rollout records of the policy

    def __init__(self, obs_dim, action_space, args):
        super().__init__()
        self.obs_dim = obs_dim
        self.action_space = action_space
        self.obs_norm = RunningNorm((obs_dim,), limit=10) if args.norm_obs else nn.Identity()
        self.value_norm = RunningNorm() if args.norm_value else None
        self.actor = hidden_layers(obs_dim, args)
        self.critic = self.actor if args.shared_net else hidden_layers(obs_dim, args)
        self.head = make_head(action_space, args)
        self.value = layer_init(nn.Linear(args.hidden[-1], 1), gain=1.0)
        # With --norm-value V is 0 at first, so that the first σ is that of the rewards' sums.
        if args.norm_value:
            nn.init.zeros_(self.value.weight)

    @property
    def device(self):
        """The device that the model computes on."""
        return self.value.weight.device

    def forward(self, obs):
        """Return the policy's parameters pi (..., ·) and the values (...) of observations (..., D).

        pi holds the log-probabilities of a Categorical head or the means of a Gaussian one. With
        --norm-value the values are normalised.
        """
        x = self.obs_norm(obs)
        h = self.actor(x)
        h_value = h if self.critic is self.actor else self.critic(x)
        return self.head(h), self.value(h_value).squeeze(-1)

    @torch.no_grad()
    def policy(self, obs, noise=None):
        """Return actions (M, ...) for observations (M, D), and None for a memory that is not there.

        The actions are samples made from noise (M, ·), or the policy's mode without it.
        """
        h = self.actor(self.obs_norm(obs))
        return self.head.sample(self.head(h), noise), None

    def act(self, arrays, noise=None):
        """Set the actions for what the games show: samples from noise (N, ·), or the mode.

        `arrays` holds NumPy arrays (N, ...), and noise is one too.
        """
        obs = torch.from_numpy(arrays["obs"]).to(self.device)
        if noise is not None:
            noise = torch.from_numpy(noise).to(self.device)
        actions, _ = self.policy(obs, noise)
        arrays["actions"][:] = actions.cpu().numpy()


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
def make_env(env_id, number, **options):
    """Return the simulation `env_id` on the level of a number; its maker gets `options` it knows.

    Raises ValueError if it is no Gymnasium env, or has spaces that the model does not know.
    """
    make = load_make(env_id)
    parameters = inspect.signature(make).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_all:
        options = {name: value for name, value in options.items() if name in parameters}
    env = make(level=number, **options)

    if not isinstance(env, gym.Env):
        raise ValueError(f"{env_id} returned {env!r}, which is no Gymnasium env")
    space = env.observation_space
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        raise ValueError(f"not supported: observation space {space}")
    num_choices(env.action_space)
    return env


def load_make(name):
    """Return the function that makes the simulation `name` at a level."""
    if name in CASES:
        return functools.partial(ResSim, name)
    if ":" not in name:
        raise ValueError(f"no env '{name}'; known: {', '.join(CASES)}, file.py:make, module:make")
    return load_function(name)


def load_function(name):
    """Return the function of `file.py:function` or `module:function`."""
    module, _, function = name.rpartition(":")
    loaded = load_file(module) if module.endswith(".py") else importlib.import_module(module)
    return getattr(loaded, function)


# All games share one module: its data is there once, and its classes are the same.
@functools.cache
def load_file(path):
    """Return the module in a file, which may also lie in the current folder."""
    found = Path(path)
    # The run may be from another machine.
    if not found.exists():
        found = Path(found.name)
    if not found.exists():
        raise ValueError(f"there is no file {path}")
    # Modules that the file imports lie there.
    sys.path.append(str(found.resolve().parent))
    spec = importlib.util.spec_from_file_location(f"simulation_{found.stem}", found)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


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


class Game:
    """One simulation on one level that starts its next episode by itself.

    It is row n of the arrays (N, ...) of its role and level. A step leads from the action in
    `actions` to `next_obs`. `obs` is what to act on next: the same, or the first observation of the
    next episode if the step `ended` one. `episode_return` and `episode_length` are those of the
    episode so far. `finished` says that an episode has ended since the start, and `first_return` is
    the return of the first one.
    """

    MAX_REPLAY = 100_000  # steps; a longer episode is not replayed when a run is resumed

    def __init__(self, args, number, n, seed, arrays, video=None, **options):
        self.name = f"{Path(args.env).name} level {number}"
        self.n = n
        self.seed = seed
        self.random = None  # the generator of the seeds that a pair without map_from shares
        self.arrays = arrays
        self.env = make_env(args.env, number, **options)
        if video:
            self.env = first_episode_video(self.env, video)

        # What `get_state` saves of an env that cannot save itself: the episode's actions so far and
        # the state of its random generator before the reset, or None if that was by a seed.
        self.actions = []
        self.random_state = None
        self.replays = state_keeper(self.env) is None and not is_paired(args)
        self.episode = 0  # how many have begun since the game was started

        self.failed_reward = args.failed_reward
        self.failures = []  # a line for each step that has failed, where that ends an episode only

        # The first observations of reset and step are compared with psi(), where pairs need it.
        has_psi = callable(getattr(self.env.unwrapped, "psi", None))
        self.to_compare = {"obs", "next_obs"} if has_psi and is_paired(args) else set()

        self.shows_pictures = n == 0 and not video and self.env.render_mode == "rgb_array"
        self.picture = None  # what the last episode's end looked like

    def start(self, seed):
        """Start the first episode of a seed."""
        self.seed = seed
        self.random = np.random.default_rng(seed)
        self.episode = 0
        self.arrays["finished"][self.n] = False
        self.reset(seed)

    def reset(self, seed=None):
        """Start an episode, of the game's current random stream or of a new seed."""
        if self.shows_pictures:
            with suppress(Exception):
                # A render may raise anything.
                self.picture = self.env.render()
        self.random_state = None
        if seed is None and self.replays:
            self.random_state = random_state(self.env)
        self.actions = []
        self.episode += 1
        # Until the next step `ended` says that `obs` is the first observation of an episode.
        self.arrays["ended"][self.n] = True
        obs, _ = reset_env(self.env, seed)
        self.show("obs", obs)

    def note(self, action):
        """Keep an action that is about to be taken, if the episode may be replayed."""
        if self.replays and len(self.actions) <= self.MAX_REPLAY:
            # An env may change the array that it gets.
            self.actions.append(action.copy())

    def step(self, action):
        """Take one step. With --failed-reward a step that fails ends the episode, not the run."""
        self.note(action)
        try:
            returned = step_env(self.env, action)
        except EnvError:
            # This is a mistake in the env's code.
            raise
        except (Exception, SystemExit) as error:
            # A solver may raise anything.
            if self.failed_reward is None:
                raise
            self.fail(one_line(error))
            return
        obs, reward, terminated, truncated, _ = returned
        check_step(reward, terminated, truncated)
        if self.failed_reward is not None and not (is_usable(obs) and is_usable(reward)):
            self.fail("NaN or over 1e15 in what step returned")
            return
        self.record(obs, reward, terminated, truncated)

    def fail(self, reason):
        """End the episode with --failed-reward, where it was before the step."""
        self.failures.append(f"{self.name} ({self.place()}) failed: {reason}")
        # The env may be anywhere.
        self.to_compare = set()
        obs = self.arrays["obs"][self.n].copy()
        self.record(obs, self.failed_reward, terminated=True, truncated=False)

    def record(self, obs, reward, terminated, truncated):
        """Write what came of a step, and start the next episode if this one has ended."""
        a = self.arrays
        n = self.n
        # If the step before ended an episode, this one begins another.
        if a["ended"][n]:
            a["episode_return"][n] = 0
            a["episode_length"][n] = 0
        a["episode_return"][n] += reward
        a["episode_length"][n] += 1
        ended = terminated or truncated
        a["rewards"][n] = reward
        a["terminated"][n] = terminated
        a["truncated"][n] = truncated and not terminated
        a["ended"][n] = ended

        self.show("next_obs", obs)
        if not ended:
            self.show("obs", obs)
            return
        if not a["finished"][n]:
            a["finished"][n] = True
            a["first_return"][n] = a["episode_return"][n]
        self.reset()

    def show(self, name, obs):
        """Write an observation."""
        shape = self.arrays[name].shape[1:]
        # NumPy would stretch an observation of another shape.
        if np.shape(obs) != shape:
            raise EnvError(f"an observation has shape {np.shape(obs)}, its space {shape}")
        if name in self.to_compare:
            self.to_compare.remove(name)
            psi = np.asarray(self.env.unwrapped.psi())
            if psi.shape != np.shape(obs) or not alike(obs, psi):
                raise EnvError("an observation is not psi(): noise in it? a wrapper?")
        self.arrays[name][self.n] = obs

    def place(self):
        """Return where the game is, as text: its seed, the episode since then, the steps in it."""
        ended = self.arrays["ended"][self.n]
        steps = 0 if ended else self.arrays["episode_length"][self.n]
        return f"seed {self.seed}, episode {self.episode}, after {steps} steps"

    def get_state(self):
        """Return, as bytes, what `set_state` needs to go on, or None if nothing helps.

        That is the env's own state, if it has get_state and set_state, or else how the episode
        began and its actions: playing them again leads to the same place. Pairs need the former.
        """
        keeper = state_keeper(self.env)
        can_be_replayed = self.replays and len(self.actions) <= self.MAX_REPLAY
        if keeper is None and not can_be_replayed:
            return None
        state = {"seed": self.seed, "random": self.random}
        state |= {"random_state": self.random_state, "actions": self.actions}
        state["episode"] = self.episode
        try:
            if keeper is not None:
                state["env"] = keeper.get_state()
            return pickle.dumps(state)
        except Exception:
            # An env may raise anything, or hold what cannot be pickled.
            return None

    def set_state(self, state):
        """Go on from the state of such a game; ValueError if the env does not get there."""
        state = pickle.loads(state)
        obs, _ = self.env.reset(seed=state["seed"])
        if "env" in state:
            state_keeper(self.env).set_state(state["env"])
        else:
            obs = self.replay(obs, state)
            shown = self.arrays["obs"][self.n]
            if not np.array_equal(np.asarray(obs, shown.dtype), shown, equal_nan=True):
                raise ValueError("playing its actions again led elsewhere")
        self.seed = state["seed"]
        self.random = state["random"]
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


def is_usable(value):
    """Whether a number or array has no NaN, infinity or number that is too large."""
    return bool((np.abs(value) < LARGEST).all())


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
    """The actors of one process, those in `rows` of all N, and the model that plays them.

    `own[l]` are the games of level index l, one for each actor. `partners[l]` are their partners,
    games one level below. There are some for l > 0 with --schedule together. All games of an actor
    live in one process, for map_from.
    """

    def __init__(self, args, model, levels, seeds, rows, arrays, buffer, **options):
        own_rows = slice(rows[0], rows[-1] + 1)
        self.first_row = rows[0]
        self.seed(int(seeds[OWN, 0, 0]))
        self.model = model
        self.arrays = {name: array[:, :, own_rows] for name, array in arrays.items()}
        self.noise = buffer["noise"][:, own_rows]  # (T, N, ·), one for both roles
        self.buffer = {}
        for name in model.stored + RESULTS:
            self.buffer[name] = buffer[name][:, :, own_rows]
        self.at_work = None  # the game that is at work, and what it does

        self.levels = levels
        self.own = []
        self.partners = []
        for level, number in enumerate(levels):
            partners = []
            if is_paired(args) and level > 0:
                member = view(arrays, PARTNER, level)
                for n in rows:
                    seed = int(seeds[PARTNER, level, n])
                    partners.append(Game(args, levels[level - 1], n, seed, member, **options))
            self.partners.append(partners)

            member = view(arrays, OWN, level)
            own = []
            for n in rows:
                seed = int(seeds[OWN, level, n])
                own.append(Game(args, number, n, seed, member, **options))
            self.own.append(own)

    def games_of(self, actor):
        """Return the list of an actor's games: own¹, partner², own², partner³, own³, ..."""
        games = []
        for own, partners in zip(self.own, self.partners):
            if partners:
                games.append(partners[actor])
            games.append(own[actor])
        return games

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
                if doing == "step":
                    what += "; to go on after such steps: --failed-reward"
                what += f"\n{traceback.format_exc()}"
            raise GameError(what) from None

    def start(self, states=None, seeds=None):
        """Start all actors.

        One with a saved state of use among the N `states` resumes there. All others start from
        their games' seeds, which `seeds` (2, L, N) replace first. Returns a line for each actor
        whose saved state was of no use.
        """
        if seeds is not None:
            for level, (own, partners) in enumerate(zip(self.own, self.partners)):
                for role, games in ((OWN, own), (PARTNER, partners)):
                    for game in games:
                        game.seed = int(seeds[role, level, game.n])
        problems = []
        for actor, game in enumerate(self.own[0]):
            problem = None
            if states:
                problem = self.resume(actor, states[game.n])
            if not states or problem:
                self.start_actor(actor)
            if problem:
                problems.append(problem)
        self.at_work = None
        return problems

    def start_actor(self, actor):
        """Start an actor's games from their seeds, and its partners where the fine are."""
        for game in self.games_of(actor):
            self.at_work = (game, "reset")
            game.start(game.seed)
        for own, partners in zip(self.own, self.partners):
            if partners:
                self.follow(own[actor], partners[actor])

    def resume(self, actor, states):
        """Go on from an actor's saved states. Returns None, or a line that says why not."""
        if states is None:
            return "its state was not saved"
        try:
            for game, state in zip(self.games_of(actor), states, strict=True):
                game.set_state(state)
        except Exception as error:
            # Packages may have changed, so it may be any error.
            return one_line(error)
        return None

    def get_state(self):
        """Return the list of the actors' states, None for one that cannot be taken up again."""
        states = []
        for actor in range(len(self.own[0])):
            saved = [game.get_state() for game in self.games_of(actor)]
            complete = None not in saved
            states.append(saved if complete else None)
        return states

    def follow(self, fine, partner, new_episode=True):
        """Have a partner take over the state of its fine game (D&E, Algorithm 5, line 18).

        `new_episode` says that the fine game has just started one. Without map_from a common seed
        starts both.
        """
        if new_episode and not maps_states(partner.env.unwrapped):
            self.start_pair(fine, partner)
            return
        has_been_reset = partner.arrays["ended"][partner.n]  # by its own end
        if new_episode and not has_been_reset:
            self.at_work = (partner, "reset")
            partner.reset()
        self.at_work = (partner, "map_from")
        partner.env.unwrapped.map_from(fine.env.unwrapped)
        partner.show("obs", partner.env.unwrapped.psi())

    def start_pair(self, fine, partner):
        """Start an episode of both games of a pair from a seed that they share."""
        self.at_work = (partner, "reset")
        seed = int(fine.random.integers(2**31))
        fine.reset(seed)
        partner.reset(seed)

    def follow_finest(self):
        """Have the games of all levels take over the state of the finest one, if they can."""
        for games in self.own[:-1]:
            for game, finest in zip(games, self.own[-1]):
                if maps_states(game.env.unwrapped):
                    self.at_work = (game, "map_from")
                    game.env.unwrapped.map_from(finest.env.unwrapped)
                    game.show("obs", game.env.unwrapped.psi())
        self.at_work = None

    def level_names(self):
        """Return the levels as text, with the name that the simulation gives them, if it does."""
        names = []
        for (game, *_), number in zip(self.own, self.levels):
            name = str(number)
            if hasattr(game.env.unwrapped, "level_name"):
                name += f" ({game.env.unwrapped.level_name})"
            names.append(name)
        return names

    def seed(self, seed):
        """Seed this process's generators, which the games may draw from."""
        seed_generators(seed, RANK, self.first_row)

    def play(self, num_steps, **how):
        """Play a number of steps, see the function `play`."""
        play(self, num_steps, **how)

    def step(self, level, coupling=None):
        """Step the games of a level index once, and their partners as the coupling says."""
        started = time.perf_counter()
        self.step_games(self.own[level], view(self.arrays, OWN, level))
        if coupling is not None:
            self.step_games(self.partners[level], view(self.arrays, PARTNER, level))
            self.follow_all(level, in_each_step=coupling == "step")
        self.at_work = None
        # What this process has spent on the level stands in the entry of its first actor.
        self.arrays["seconds"][OWN, level, 0] += time.perf_counter() - started

    def step_games(self, games, arrays):
        """Step games of one role and level once, together if their env can."""
        envs = [game.env for game in games]
        space = envs[0].action_space
        actions = to_env(arrays["actions"], space).astype(space.dtype, copy=False)
        if steps_in_batches(envs[0]) and games[0].failed_reward is None:
            for game, action in zip(games, actions):
                game.note(action)
            self.at_work = (games[0], "step_batch")
            results = zip(*envs[0].step_batch(envs, actions), strict=True)
            for game, (obs, reward, terminated, truncated) in zip(games, results, strict=True):
                self.at_work = (game, "step_batch")
                check_step(reward, terminated, truncated)
                game.record(obs, reward, terminated, truncated)
        else:
            for game, action in zip(games, actions):
                self.at_work = (game, "step")
                game.step(action)
        arrays["steps"] += 1

    def follow_all(self, level, in_each_step):
        """Have partners follow where a fine episode ended, or everywhere in each step."""
        ended = self.arrays["ended"][OWN, level]
        terminated = self.arrays["terminated"][PARTNER, level]
        # Where the fine episode ended, the partner's ends with it and a new pair starts.
        self.arrays["truncated"][PARTNER, level] |= ended & ~terminated
        for fine, partner, new_episode in zip(self.own[level], self.partners[level], ended):
            if new_episode or in_each_step:
                self.follow(fine, partner, new_episode)

    def take_failures(self):
        """Return a line for each step that has failed since the last time."""
        lines = []
        for game in sum(self.own + self.partners, []):
            lines += game.failures
            game.failures = []
        return lines

    def picture(self):
        """Return the picture of the first game's last end, or None."""
        return self.own[0][0].picture

    def close(self):
        """Close all envs, also after one that fails in it."""
        failure = None
        for game in sum(self.own + self.partners, []):
            try:
                game.env.close()
            except (Exception, SystemExit) as error:
                self.at_work = (game, "close")
                failure = error
        if failure:
            raise failure


def maps_states(env):
    """Whether the env can take over the state of another level, and show it."""
    return callable(getattr(env, "map_from", None)) and callable(getattr(env, "psi", None))


def steps_in_batches(env):
    """Whether the env's class has a step_batch. A subclass that overrides `step` alone has not."""
    for owner in type(env).mro():  # the class, then those that it inherits from
        if "step_batch" in owner.__dict__:
            return True
        if "step" in owner.__dict__:
            return False
    return False


class Costs(NamedTuple):
    """--level-costs by name, in seconds."""

    steps: list  # a step on each of --levels
    update: float  # an update with the coarsest level's rows
    unit: float  # a step on the finest level, or on a finer --eval-level; total_cost counts these


def costs_of(args):
    """Return what the levels of a run cost, and an update."""
    costs = args.level_costs
    return Costs(costs[: len(args.levels)], costs[-1], costs[-2])


def row_seconds(args, level):
    """Return what a row of a level index takes: a step, and its share of an update."""
    costs = costs_of(args)
    return costs.steps[level] + costs.update / (args.num_envs * args.num_steps[0])


def iteration_seconds(args, level):
    """Return what an iteration on a level index takes: simulation and update."""
    return args.num_envs * args.num_steps[level] * row_seconds(args, level)


UNKNOWN_COSTS = [1.0, 0.0]  # where there is one level and nothing depends on what it costs


def costs_of_run(args, model):
    """Return the costs of a run's levels and of an update; in steps, where there is one level."""
    if args.levels == [args.eval_level] and not args.hours:
        return list(UNKNOWN_COSTS)
    return measured_costs(args, model)


def measured_costs(args, model):
    """Return the seconds of a step on each level, and of an update on the coarsest level's rows.

    A step's seconds are those of all workers together, with its share of an episode's start.
    --eval-level has its own. Neither model nor generators change.
    """
    levels = sorted({*args.levels, args.eval_level})
    # The schedule adaptive has no partners.
    args = changed(args, levels=levels, schedule="adaptive", target_kl=0.0)
    model = copy.deepcopy(model)
    generator = torch.Generator()

    # One actor in each process is enough, unless actors are stepped together.
    num_actors = min(args.num_envs, max(1, args.num_workers) * NUM_RANKS)
    with closing(make_env(args.env, levels[0])) as env:
        if steps_in_batches(env):
            num_actors = args.num_envs
    fewer = changed(args, num_envs=num_actors)

    with (
        kept_generators(),
        closing(make_pool(fewer, model, game_seeds(fewer, 0), args.num_workers)) as pool,
    ):
        warm_up(model, pool, len(levels))
        pool.call("start")
        costs = [step_seconds(model, pool, level, generator) for level in range(len(levels))]
        buffer, overhead = rollout_overhead(model, pool, fewer, generator)
    rest = overhead + update_seconds(model, buffer, args, generator)
    # Below 10 ms the difference may be noise.
    if len(costs) > 1 and costs[0] > max(1.5 * costs[1], 0.01):
        report(f"level {levels[0]} costs more than {levels[1]}: slow reset? --level-costs")
    return [*costs, rest]


def changed(args, **options):
    """Return a copy of the options in which some are other ones."""
    return argparse.Namespace(**(vars(args) | options))


def step_seconds(model, pool, level, generator):
    """Return the seconds of a step on a level, the workers of all ranks together.

    All actors play an episode and start the next one.
    """
    # Collect garbage now, not while time is taken: that may be as long as an update.
    gc.collect()
    pool.arrays["seconds"][:] = 0
    pool.arrays["steps"][:] = 0
    chunk = len(pool.buffer["noise"])
    for _ in range(0, EVAL_STEPS, chunk):
        draw_noise(model, pool, generator)
        pool.play(model, chunk, level=level, until_finished=True)
        if pool.arrays["finished"][OWN, level].all():
            break
    return simulated_seconds(pool) / float(pool.arrays["steps"].sum())


def simulated_seconds(pool):
    """Return what the pool's simulations took, spread over the workers of all ranks."""
    workers = max(1, len(pool.workers)) * NUM_RANKS
    return float(pool.arrays["seconds"].sum()) / workers


def rollout_overhead(model, pool, args, generator):
    """Return the buffer of a rollout on the coarsest level, and what it took besides simulation."""
    pool.arrays["seconds"][:] = 0
    started = time.perf_counter()
    (buffer,), _ = rollout(model, pool, 0, args.num_steps[0], args, generator)
    seconds = time.perf_counter() - started
    return buffer, max(0.0, seconds - NUM_RANKS * simulated_seconds(pool))


def update_seconds(model, buffer, args, generator):
    """Return the seconds of an update. The buffer's rows are repeated until all actors have one."""
    actors = torch.arange(args.num_envs) % buffer["rewards"].shape[1]
    buffer = {name: column[:, actors] for name, column in buffer.items()}
    plan = Plan([0], [args.num_steps[0]], [])
    # The first time includes what is done once.
    for _ in range(2):
        gc.collect()
        optimizer = make_optimizer(model, args)
        started = time.perf_counter()
        batch = make_batch(buffer, model, args)
        update(model, optimizer, batch, plan, args, generator)
        seconds = time.perf_counter() - started
    return seconds


def draw_noise(model, pool, generator):
    """Draw the noise of all actions that the pool's buffer has room for."""
    noise = pool.buffer["noise"]
    T, N, _ = noise.shape
    noise[:] = model.head.noise(T * N, generator).view(noise.shape)


def warm_up(model, pool, num_levels):
    """Start the pool's games and take a step, which may do work that is done once."""
    pool.call("start")
    for level in range(num_levels):
        pool.play(model, 1, level=level, sample=False)


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


def game_seeds(args, *entropy):
    """Return the seeds of this rank's games, (2, L, N) by role, level, actor.

    They are other ones whenever games start anew. Partners of the first level do not exist.
    """
    L = len(args.levels)
    drawn = draw_seeds((2 * L - 1) * args.num_envs, args.seed, *entropy)
    members = iter(drawn.reshape(2 * L - 1, args.num_envs))
    seeds = np.zeros((2, L, args.num_envs), drawn.dtype)
    for level in range(L):
        if level > 0:
            seeds[PARTNER, level] = next(members)
        seeds[OWN, level] = next(members)
    return np.split(seeds, NUM_RANKS, axis=2)[RANK]


def make_pool(args, model, seeds, num_workers, levels=None, num_steps=None, **options):
    """Return the pool of actors on the levels, with a seed for each role, level, actor (2, L, N).

    Its buffer has room for `num_steps` steps on one level (default: the largest T^l).
    """
    keep_freed_memory()
    roles, L, N = seeds.shape
    obs_shape = (model.obs_dim,)
    action_shape = model.head.shape
    obs_type = "float64" if args.norm_obs else "float32"
    action_type = "int64" if num_choices(model.action_space) else "float32"

    # Shape and type of what one game shows and does.
    entries = {
        "obs": (obs_shape, obs_type),
        "next_obs": (obs_shape, obs_type),
        "actions": (action_shape, action_type),
    }
    entries["rewards"] = ((), "float32")
    for name in ("terminated", "truncated", "ended", "finished"):
        entries[name] = ((), "bool")
    for name in ("episode_return", "first_return", "seconds", "steps"):
        entries[name] = ((), "float64")
    entries["episode_length"] = ((), "int64")
    entries["noise"] = ((model.head.n,), "float32")

    T = num_steps or max(args.num_steps)
    shown = sorted(set(entries) - {"noise"})
    arrays = layout(entries, shown, (roles, L, N))
    buffer = layout(entries, model.stored + RESULTS, (roles, T, N))
    buffer |= layout(entries, ["noise"], (T, N))

    player = model_of_workers(model) if num_workers else model
    make_games = functools.partial(Games, args, player, levels or args.levels, seeds, **options)
    return WorkerPool(make_games, arrays, buffer, N, num_workers, player)


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
COUNTERS |= {"sim_seconds": 0.0, "sim_cost": 0.0, "total_cost": 0.0}
CHARTS = ["episodic_return", "episodic_length", "eval_return", "eval_cut", "learning_rate"]
CHARTS += ["check_return", "level"]
LOSSES = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance"]
# TensorBoard shows these under CleanRL's names, where it has them. Any other number has its own
# name. Ours are means, of an iteration's minibatches and of the last 100 episodes. CleanRL's are
# not, so curves may differ in level.
TAGS = {"sps": "charts/SPS"}
TAGS |= {name: f"charts/{name}" for name in CHARTS}
TAGS |= {name: f"losses/{name}" for name in LOSSES}
TAGS |= {"baseline_return": "charts/baseline_return"}
TAGS |= {"sim_cost": "costs/sim_cost", "total_cost": "costs/total_cost"}
# After so many iterations measured costs of levels are corrected by what was simulated since.
CORRECTED_AFTER = [10, 30, 100, 300, 1000]
SHOWN = ["level", "sps", "episodic_return", "check_return", "eval_return", "baseline_return"]
SHOWN += ["eval_cut", "failures"]


class Run(AbstractContextManager):
    """The life of a training run: it opens, counts, stops when asked to, saves and closes.

    `pool` has the games, `run_dir` is the folder, `history` the list of all logged rows, `counters`
    say what is complete, and `signal` is the number of the signal that stopped the run, or None.
    The `rule` chooses the levels. The run's result is `rule.best`, or the last parameters.
    """

    def __init__(self, args, model, optimizer, generator, rule):
        self.args = args
        self.model = model
        self.optimizer = optimizer
        self.generator = generator
        self.rule = rule
        self.result = copy.deepcopy(model)  # what evaluations play
        self.evaluated = None  # the last evaluation
        self.evaluated_best = None  # the rule's best parameters at that time

        self.run_dir = Path(args.resume or run_path(args))
        self.counters = dict(COUNTERS)
        self.recent = []  # (return, length) of the last 100 episodes
        self.num_starts = 0  # how often games have started, which their seeds depend on
        self.signal = None
        self.saved = None  # the iteration of the last checkpoint
        self.began = None  # when the current iteration began
        self.asked = None  # when a signal asked the run to stop
        self.corrects_costs = False  # whether they were measured, for --schedule adaptive
        # What this rank's games have simulated so far, by level. A partner simulates one level
        # below, but its seconds count with those of its pair.
        self.simulated_seconds = np.zeros(len(args.levels))
        self.simulated_steps = np.zeros(len(args.levels))
        self.baseline_return = None  # the mean return of --baseline
        self.pool = None  # the games of training
        self.check_pool = None  # those of checks, on the finest level
        self.eval_pool = None  # those of evaluations
        self.pools = []  # all pools that are open
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
        """Return which share of the run's length is complete, in the first unit that is given."""
        for option, counter in LENGTHS.items():
            length = getattr(self.args, option)
            if length:
                return min(1.0, self.counters[counter] / length)
        raise ValueError("a run needs a length")

    def open(self):
        """Catch signals, restore a run that is resumed, make the games and open the files."""
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(signum, self.stop)
                self.stack.callback(signal.signal, signum, before)

        args = self.args
        if args.resume:
            self.saved_games = self.restore()
        if NUM_RANKS > 1:
            backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backends, timeout=datetime.timedelta(days=1))
            self.stack.callback(dist.destroy_process_group)

        self.set_costs_and_length()
        if not args.resume:
            for hint in hints_of_start(args, self.model):
                report(hint)
        if RANK == 0 and args.baseline and args.eval_every:
            self.baseline_return = float(baseline_returns(args).mean())
        if args.resume and self.share_done() >= 1:
            report("run complete; longer: --total-cost (or --hours, --num-iterations)")
        if args.schedule == "adaptive":
            self.check_pool = self.opened(make_check_pool(args, self.model))
        if RANK == 0 and args.eval_every:
            pictures = {"render_mode": "rgb_array"} if args.env in CASES else {}
            self.eval_pool = self.opened(make_eval_pool(args, self.result, **pictures))

        # The games of training are made last, since each pool seeds this process's generators.
        seeds = game_seeds(args, self.num_starts)
        self.pool = self.opened(make_pool(args, self.model, seeds, args.num_workers))
        if RANK == 0:
            self.logger.open(self.stack, self.counters["global_step"] + 1)

    def set_costs_and_length(self):
        """Measure what the levels cost, unless it is given, and set the length that goes by it."""
        args = self.args
        if args.level_costs is None:
            self.corrects_costs = args.schedule == "adaptive" and len(args.levels) > 1
            args.level_costs = gathered_objects(costs_of_run(args, self.model))[0]
        if args.hours:
            set_hours(args)
        if not any(getattr(args, option) for option in LENGTHS):
            args.total_cost = default_cost(args)

    def opened(self, pool):
        """Return the pool, which is closed at the run's end."""
        self.pools.append(pool)
        return self.stack.enter_context(closing(pool))

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
        """Start the games. In a new run the rule begins, too, and there are hints on scales."""
        self.start_games()
        for row in self.logger.take_unfinished():
            self.log(row)
        agreed = max(gathered_objects(self.signal or 0))
        if self.history or agreed:
            return

        for hint in hints_of_scale(self.args, obs=self.pool.arrays["obs"]):
            report(hint)
        began = time.perf_counter()
        row = self.rule.begin(self)
        self.counters["wall_seconds"] += time.perf_counter() - began
        if row or self.args.eval_every:
            row |= self.counters
            self.log(row)
        first = row.get("check_return", row.get("eval_return"))
        returns = [] if first is None else [first]
        for hint in hints_of_scale(self.args, returns=returns):
            report(hint)
        for hint in hints_of_failed_reward(self.args, returns):
            report(hint)
        if self.share_done() >= 1:
            report("nothing learned: the first check takes --total-cost")

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

    def seconds(self):
        """Return how long the run is on its clock: simulation and updates, at --level-costs."""
        return self.counters["total_cost"] * costs_of(self.args).unit

    def charge(self, pool, side_by_side=False):
        """Count what the games of a pool, on all ranks, have simulated since the last time.

        `side_by_side` says that no game went on to other work before the last one had ended. Then
        each is charged with the steps of the longest.
        """
        steps = pool.arrays["steps"]
        seconds = pool.arrays["seconds"]
        self.simulated_steps += self.by_level(pool, steps)
        self.simulated_seconds += self.by_level(pool, seconds)

        charged = steps
        if side_by_side:
            longest = np.max(gathered_objects(steps.max(axis=-1, keepdims=True)), axis=0)
            charged = np.broadcast_to(longest, steps.shape)
        costs = costs_of(self.args)
        cost = self.by_level(pool, charged) @ costs.steps / costs.unit

        sim_seconds, cost = np.sum(gathered_objects([seconds.sum(), cost]), axis=0).tolist()
        self.counters["sim_seconds"] += sim_seconds
        self.counters["sim_cost"] += cost
        self.counters["total_cost"] += cost
        steps[:] = 0
        seconds[:] = 0

    def count_iteration(self, num_rows):
        """Count an iteration and its rows, and charge its update by their number."""
        costs = costs_of(self.args)
        rows_on_the_coarsest = self.args.num_envs * self.args.num_steps[0]
        self.counters["iteration"] += 1
        self.counters["global_step"] += num_rows
        self.counters["total_cost"] += num_rows / rows_on_the_coarsest * costs.update / costs.unit

    def by_level(self, pool, array):
        """Return the sums (L,) of an array of a pool's games, by the level that they simulate."""
        sums = np.zeros(len(self.args.levels))
        # A check's games, (E,), are of the finest level.
        if pool is not self.pool:
            sums[-1] = array.sum()
            return sums
        sums += array[OWN].sum(axis=-1)
        # A partner plays one level below.
        sums[:-1] += array[PARTNER, 1:].sum(axis=-1)
        return sums

    def correct_costs(self):
        """Correct measured costs by what all ranks have simulated so far; return what is logged.

        The finest level's own cost stays what it was, since the run's length is counted in its
        steps. So do the cost of an update and that of a level that was not simulated.
        """
        seconds = np.sum(gathered_objects(self.simulated_seconds), axis=0)
        steps = np.sum(gathered_objects(self.simulated_steps), axis=0)
        corrected = list(self.args.level_costs)
        # There was a check, so the finest level has steps.
        finest = seconds[-1] / steps[-1]
        for level in np.flatnonzero(steps[:-1]):
            ratio = float(seconds[level] / steps[level] / finest)
            corrected[level] = ratio * costs_of(self.args).unit
        # The rule goes by these from now on.
        self.args.level_costs = corrected
        logged = {}
        for number, cost in zip(self.args.levels, corrected):
            logged[f"levels/step_seconds_{number}"] = cost
        return logged

    def check(self):
        """Play the episodes of a check, and charge them. Returns their returns, (E,)."""
        with kept_generators():
            ranks = gathered_objects(evaluate(self.model, self.check_pool))
        returns = np.concatenate([returns for returns, _ in ranks])
        cut = sum(cut for _, cut in ranks)
        self.charge(self.check_pool, side_by_side=True)
        if not np.isfinite(returns).all():
            raise GameError(f"NaN or infinity in returns of a check, level {self.args.levels[-1]}")
        if cut:
            report(f"check: {cut} episodes cut off at {EVAL_STEPS:,} steps: do they ever end?")
        return torch.from_numpy(returns)

    def end_iteration(self, row, episodes, steps):
        """Log an iteration's row and its episodes, {level index: [(return, length)]}; save."""
        seconds = time.perf_counter() - self.began
        self.counters["wall_seconds"] += seconds
        if self.history and self.history[-1].get("level") != row.get("level"):
            # The recent episodes are of another level.
            self.recent = []
        for level, ended in episodes.items():
            if ended:
                name = f"levels/return_{self.args.levels[level]}"
                row[name] = np.mean([episode_return for episode_return, _ in ended])

        if self.corrects_costs and self.iteration in CORRECTED_AFTER:
            row |= self.correct_costs()
        self.recent = (self.recent + episodes[max(episodes)])[-100:]  # the finest level's
        mean_return, mean_length = np.mean(self.recent or [(math.nan, math.nan)], axis=0).tolist()
        row |= self.counters
        row |= {"episodic_return": mean_return, "episodic_length": mean_length}
        row["sps"] = round(steps / seconds)
        if self.iteration == 1 and len(episodes) > 1 and not self.args.quiet:
            if not self.pool.arrays["ended"][OWN].all():  # at the last step
                report("--num-steps: not whole episodes, so the sum of levels is biased")
        self.log(row)
        if self.args.save_every and self.iteration % self.args.save_every == 0:
            self.save()

    def count_failures(self):
        """Count the steps that have failed in all pools and ranks; failures.txt has all of them."""
        lines = sum(gathered_objects(taken_failures(self.pools)), [])
        tell_failures(lines)
        if lines and RANK == 0:
            with (self.run_dir / "failures.txt").open("a") as file:
                file.writelines(f"iteration {self.iteration}: {line}\n" for line in lines)
        self.counters["failures"] = self.counters.get("failures", 0) + len(lines)

    def log(self, row):
        """Evaluate if it is due, and write the row."""
        self.history.append(row)
        every = self.args.eval_every
        evaluation_is_due = every and (self.iteration % every == 0 or self.share_done() >= 1)
        if RANK == 0 and evaluation_is_due:
            # If it stays NaN, --resume evaluates again.
            row["eval_return"] = math.nan
            self.evaluate(row)
        if self.args.failed_reward is not None:
            self.count_failures()
            row["failures"] = self.counters["failures"]
        if RANK == 0:
            self.logger.write(row, self.share_done())

    def evaluate(self, row):
        """Add an evaluation of the run's result to the row, unless a signal cuts it short."""
        best = self.rule.best
        unchanged = best is not None and best is self.evaluated_best
        if not unchanged:
            self.evaluated_best = best
            self.result.load_state_dict(best or self.model.state_dict())
            with kept_generators():
                self.evaluated = evaluate(self.result, self.eval_pool, run=self)
        if not self.signal:
            returns, cut = self.evaluated
            row["eval_return"] = float(returns.mean())
            if cut:
                row["eval_cut"] = cut
        if self.baseline_return is not None:
            row["baseline_return"] = self.baseline_return
        picture = self.eval_pool.call("picture")[0]
        if picture is not None:
            events = self.logger.events
            events.add_image("eval/end", picture, row["global_step"], dataformats="HWC")

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
            "model": self.rule.best or self.model.state_dict(),  # the result, which --eval plays
            "current": self.model.state_dict(),
            "rule": self.rule.state(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "counters": self.counters,
            "starts": self.num_starts,
            "corrects_costs": self.corrects_costs,
            "simulated_seconds": self.simulated_seconds.tolist(),
            "simulated_steps": self.simulated_steps.tolist(),
            "level_costs": self.args.level_costs,
            "history": json.loads(json.dumps(self.history, default=float)),  # plain numbers
            "recent": self.recent,
        }

    def restore(self):
        """Take over what the checkpoint has. Returns (arrays, states) of the games, or None."""
        state, games = Checkpoint(self.run_dir).load()
        self.model.load_state_dict(state["current"])
        self.rule.restore(state["rule"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.counters = state["counters"]
        self.num_starts = state["starts"] + 1
        self.corrects_costs = state["corrects_costs"]
        self.simulated_seconds = np.array(state["simulated_seconds"])
        self.simulated_steps = np.array(state["simulated_steps"])
        self.args.level_costs = state["level_costs"]
        self.recent = state["recent"]
        self.logger.restore(state["history"])
        self.saved = self.iteration
        return games

    def games_to_save(self):
        """Return (arrays, states) of every rank's games."""
        states = sum(self.pool.call("get_state"), [])
        return gathered_objects((self.pool.arrays, states))

    def take_back_unlogged_iteration(self):
        """Do not count an iteration that is not logged, since the check after it has failed.

        A resumed run does another one with its number. What it has learned stays.
        """
        if self.history and self.history[-1]["iteration"] < self.iteration:
            self.counters["iteration"] -= 1

    def __exit__(self, kind, _, trace):
        """Close everything. First save if `train` is done, or if its failure allows it."""
        with self.stack:
            # After a second Ctrl-C the state is whole if games were at work: no update had begun.
            in_games = kind is KeyboardInterrupt and any(pool.busy for pool in self.pools)
            unsaved = self.saved != self.iteration
            state_is_whole = kind is None or in_games
            failed_outside = kind in (GameError, BrokenPipeError)
            if failed_outside or (unsaved and state_is_whole):
                if kind:
                    self.take_back_unlogged_iteration()
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
NEWEST_ENTRY = "simulated_steps"


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
CHECK_SEED = 20_000  # checks have seeds of their own, too
EVAL_STEPS = 10_000  # an evaluation takes no more steps, so that it always ends
EVAL_CHUNK = 50  # steps between two looks at whether the run was asked to stop


def make_eval_pool(args, model, episodes=None, **options):
    """Return the pool of evaluation games, with arrays (E, ...)."""
    seeds = EVAL_SEED + np.arange(episodes or args.eval_episodes)
    # A film is made in this process.
    workers = 0 if episodes else args.num_workers
    return one_level_pool(args, model, seeds, workers, args.eval_level, evaluation=True, **options)


def make_check_pool(args, model):
    """Return the pool of this rank's games of a check, on the finest level; arrays (E, ...)."""
    seeds = CHECK_SEED + np.array_split(np.arange(args.check_episodes), NUM_RANKS)[RANK]
    finest = args.levels[-1]
    return one_level_pool(args, model, seeds, args.num_workers, finest, validation=True)


def one_level_pool(args, model, seeds, num_workers, number, **options):
    """Return the pool of one game per seed on the level of a number, with arrays (E, ...)."""
    seeds = np.stack([seeds, seeds])[:, np.newaxis]  # (2, 1, E): there are no partners
    options |= {"levels": [number], "num_steps": EVAL_CHUNK}
    pool = make_pool(args, model, seeds, num_workers, **options)
    pool.arrays = view(pool.arrays, OWN, 0)
    return pool


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


def taken_failures(pools):
    """Return a line for each step of the pools' games that has failed since the last time."""
    lines = []
    for pool in pools:
        lines += sum(pool.call("take_failures"), [])
    return lines


def tell_failures(lines, most=3):
    """Report failed steps: the first ones, and how many more there are."""
    for line in lines[:most]:
        report(line)
    if len(lines) > most:
        report(f"and {len(lines) - most:,} more failed steps")


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
        tell_failures(taken_failures([pool]))
        inputs = {name: pool.arrays[name][:1] for name in model.inputs if name != "starts"}
    what = f"{len(returns)} episodes of {Path(args.env).name} level {args.eval_level}"
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


class Controller(Model):
    """A function obs → action, the user's own, that plays in the policy's place."""

    def __init__(self, obs_dim, action_space, args):
        super().__init__(obs_dim, action_space, args)
        # A worker loads the function itself.
        self.name = args.baseline

    def act(self, arrays, noise=None):
        """Set the actions for what the games show. GameError if the function fails."""
        decide = load_function(self.name)
        # The policy counts from 0.
        first = getattr(self.action_space, "start", 0)
        for n, obs in enumerate(arrays["obs"]):
            try:
                action = np.asarray(decide(obs.copy()), dtype=float).reshape(self.head.shape)
                if not is_usable(action):
                    raise ValueError("NaN or over 1e15 in its action")
                arrays["actions"][n] = action - first
            except Exception as error:
                # The function may raise anything.
                raise GameError(f"argument --baseline: {one_line(error)}") from None


def baseline_returns(args):
    """Print and return the returns (E,) of --baseline in the episodes of an evaluation."""
    with kept_generators():
        controller = make_model(args, Controller)
        with closing(make_eval_pool(args, controller)) as pool:
            returns, cut = evaluate(controller, pool)
            tell_failures(taken_failures([pool]))
            outside = share_outside(controller.action_space, pool.arrays["actions"])
    if outside > 0.5:
        report(
            f"baseline: {outside:.0%} of its last actions lie outside the Box and are clipped. "
            "Does it return them in other units than the action space has?"
        )
    line = f"baseline: return {returns.mean():.4f} ± {returns.std():.4f}"
    if cut:
        line += f", {cut} episodes cut off"
    print(line, flush=True)
    return returns


def share_outside(space, actions):
    """Return the share of the entries of actions (E, ...) that are clipped to a Box, else 0."""
    if not isinstance(space, gym.spaces.Box):
        return 0.0
    # No units differ by so little.
    margin = 1e-3 * (1 + np.abs(actions))
    outside = (actions < space.low - margin) | (actions > space.high + margin)
    return float(outside.mean())


def compare_with_baseline(args, returns):
    """Play --baseline in the episodes of an evaluation with these returns, and tell the gain."""
    gains = returns - baseline_returns(args)
    line = f"policy minus baseline: {gains.mean():.4f}"
    if len(gains) > 1:
        error = gains.std(ddof=1) / len(gains) ** 0.5
        line += f" ± {error:.4f} (standard error)"
    print(line)


# ------------------------------------------------------------------------------------ analysis
# An analysis measures ten times what --schedule adaptive measures now and then.
MEASUREMENTS = 10


def analyse(args):
    """Print what --schedule adaptive goes by: what a level costs, and ρ. Returns the rows.

    It writes them to analysis.csv, too.
    """
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = make_model(args)
    if args.analyse:
        model.load_state_dict(Checkpoint(args.analyse).read()["model"])
    else:
        hint = hint_of_actions(args, model.action_space)
        if hint:
            report(hint)
    args.level_costs = args.level_costs or measured_costs(args, model)

    path = Path(args.analyse or run_path(args)) / "analysis.csv"
    returns = []
    starts = []
    began = time.perf_counter()
    with closing(make_pool(args, model, game_seeds(args, 0), args.num_workers)) as pool:
        names = pool.call("level_names")[0]
        for measurement in range(MEASUREMENTS):
            measured, numbers, problem = play_alike(model, pool, args, measurement)
            returns.append(measured)
            starts.append(numbers + measurement * len(numbers))  # other starts than before
            if measurement == 0 and problem:
                report(f"{problem}: ρ means little")
            rows = level_rows(args, names, np.concatenate(returns, axis=1), np.concatenate(starts))
            # An analysis that is stopped leaves what it has found.
            write_table(path, rows)
            tell_progress(measurement + 1, time.perf_counter() - began)
            print_table(rows)
    print(f"table: {path}")
    return rows


def tell_progress(count, seconds):
    """Print after how many measurements the table below is, and how long the others will take."""
    left = seconds / count * (MEASUREMENTS - count)
    print(f"\nmeasured {count} of {MEASUREMENTS} times, {left:.0f} s left", flush=True)


def level_rows(args, names, returns, starts):
    """Return a row for each level from returns (L, E) and the number of each episode's start (E,).

    `worth` is what the rule goes by, ρ² per second, divided by that of the finest level. An entry
    that ends in _error is a standard error.
    """
    seconds = [row_seconds(args, level) for level in range(len(names))]
    numbers = level_numbers(returns, starts)
    errors = jackknife_errors(returns, starts)
    rows = []
    for level, name in enumerate(names):
        row = {"level": name, "step_ms": 1e3 * args.level_costs[level]}
        row["iteration_s"] = iteration_seconds(args, level)
        for quantity in numbers:
            row[quantity] = float(numbers[quantity][level])
            row[f"{quantity}_error"] = float(errors[quantity][level])
        row["worth"] = max(0.0, row["rho"]) ** 2 * seconds[-1] / seconds[level]
        rows.append(row)
    return rows


def level_numbers(returns, starts):
    """Return {name: (L,)}: mean returns, how far they are below the finest level's, and ρ."""
    mean = returns.mean(axis=1)
    return {"return": mean, "difference": mean - mean[-1], "rho": correlations(returns, starts)}


def jackknife_errors(returns, starts):
    """Return {name: (L,)}, standard errors of `level_numbers`: from leaving out each start once."""
    without = []
    for start in np.unique(starts):
        rest = starts != start
        without.append(level_numbers(returns[:, rest], starts[rest]))
    num_starts = len(without)
    errors = {}
    for name in without[0]:
        variance = np.var([numbers[name] for numbers in without], axis=0)
        errors[name] = ((num_starts - 1) * variance) ** 0.5
    return errors


def print_table(rows):
    """Print rows with a column for each number, and its error beside it."""
    names = [name for name in rows[0] if not name.endswith("_error")]
    table = [names]
    for row in rows:
        table.append([cell(row, name) for name in names])
    for line in table:
        print("".join(text.rjust(22) for text in line), flush=True)


def cell(row, name):
    """Return an entry of a row as text, with its error to one digit if there is one."""
    if name == "level":
        return row[name]
    if f"{name}_error" not in row:
        return f"{row[name]:.3g}"
    error = round(float(f"{row[f'{name}_error']:.1g}"), 9)  # not what rounding leaves of 0
    return f"{row[name]:.4g} ± {error:g}"


def write_table(path, rows):
    """Write rows to a .csv file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


class Trial(NamedTuple):
    """What --check has seen in an episode of T steps."""

    obs: np.ndarray  # (T + 1, D)
    rewards: np.ndarray  # (T,)
    reset_seconds: float
    step_seconds: np.ndarray  # (T,), the last one with the reset that follows
    end: str  # terminated, truncated, or cut off


def check_simulation(args):
    """Print what --check finds: costs of levels, what is wrong with them, which options to set.

    It plays two episodes of the first policy, whose actions are random, on each level.
    """
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = make_model(args)
    trials = []
    advice = []
    print_row(["level", "reset s", "first step s", "other steps s", "steps", "end", "return"])
    for number in args.levels:
        name, trial, problems = try_level(args, model, number)
        print_row([name, *trial_cells(trial)])
        trials.append(trial)
        advice += [f"level {name}: {problem}" for problem in problems]

    for hint in hints_of_start(args, model):
        # Some are told of a level already.
        if not any(line.endswith(hint) for line in advice):
            advice.append(hint)
    starts_agree = not any(line.endswith((SEED_VARIES, STARTS_DIFFER)) for line in advice)
    if starts_agree:
        advice += hints_of_levels(trials)
    obs = np.concatenate([trial.obs for trial in trials])
    returns = [trial.rewards.sum() for trial in trials]
    advice += hints_of_scale(args, obs, returns)
    advice += hints_of_failed_reward(args, returns)
    advice += hints_of_ends(args, trials)
    print_scales(args, model, trials)
    try:
        print_costs(args, measured_costs(args, model))
    except GameError as error:
        reason = str(error).partition("\n")[0]
        advice.append(f"costs were not measured: {reason}")
    print("\nadvice:" if advice else "\nno advice")
    for line in advice:
        print(line)


def try_level(args, model, number):
    """Play two episodes of one seed on a level, and save a game in the middle of a third.

    Returns the level's name, the second episode's Trial, and lines on what is wrong.
    """
    problems = []
    with closing(trial_pool(args, model, number)) as pool:
        name = pool.call("level_names")[0][0]
        first = try_episode(model, pool, EVAL_SEED)
        again = try_episode(model, pool, EVAL_SEED + 1)
        saved = save_in_mid_episode(model, pool, len(first.rewards) // 2)
        failures = sum(pool.call("take_failures"), [])
    problems += failures[:1]
    if not (is_usable(again.obs) and is_usable(again.rewards)):
        problems.append("NaN or over 1e15 in observations or rewards")
    if not same_episode(first, again):
        problems.append(SEED_VARIES)

    # Another pool takes up the saved game, like a run that is resumed.
    with closing(trial_pool(args, model, number)) as pool:
        problem = go_on_from(model, pool, *saved)
    if problem:
        problems.append(problem)
    return name, again, problems


def trial_pool(args, model, number):
    """Return the pool of one game on a level, in a worker if a run has workers."""
    return one_level_pool(args, model, np.array([EVAL_SEED]), min(1, args.num_workers), number)


def try_episode(model, pool, global_seed):
    """Play an episode from its seed, one step after the other. Returns the Trial.

    `global_seed` is for the generators of `random`, NumPy and torch. An episode that depends on it
    is not determined by reset(seed).
    """
    arrays = pool.arrays
    generator = torch.Generator().manual_seed(EVAL_SEED)
    pool.call("seed", global_seed)
    began = time.perf_counter()
    pool.call("start")
    reset_seconds = time.perf_counter() - began

    obs = [arrays["obs"][0].copy()]
    rewards = []
    seconds = []
    while not arrays["finished"][0] and len(rewards) < EVAL_STEPS:
        if len(rewards) == 1000:
            report("no end after 1,000 steps: does step ever return terminated or truncated?")
        arrays["seconds"][:] = 0
        take_random_step(model, pool, generator)
        obs.append(arrays["next_obs"][0].copy())
        rewards.append(arrays["rewards"][0])
        seconds.append(arrays["seconds"].sum())
    end = "cut off"
    for name in ("terminated", "truncated"):
        if arrays[name][0]:
            end = name
    return Trial(np.array(obs), np.array(rewards), reset_seconds, np.array(seconds), end)


def take_random_step(model, pool, generator):
    """Take one step of the pool's games, by the first of the buffer's rows of noise."""
    draw_noise(model, pool, generator)
    pool.play(model, 1)


def same_episode(first, again):
    """Whether two Trials have the same observations and rewards."""
    if len(first.rewards) != len(again.rewards):
        return False
    return alike(first.obs, again.obs) and alike(first.rewards, again.rewards)


def save_in_mid_episode(model, pool, num_steps):
    """Save the pool's game after some steps, and take one more.

    Returns the arrays and the states that were saved, the noise of that step and its observation.
    """
    generator = torch.Generator().manual_seed(EVAL_SEED)
    pool.call("seed", EVAL_SEED)
    pool.call("start")
    for _ in range(num_steps):
        take_random_step(model, pool, generator)
    arrays = {name: array.copy() for name, array in pool.arrays.items()}
    states = sum(pool.call("get_state"), [])
    take_random_step(model, pool, generator)
    noise = pool.buffer["noise"].copy()
    return arrays, states, noise, pool.arrays["next_obs"][0].copy()


def go_on_from(model, pool, arrays, states, noise, next_obs):
    """Take up a saved game and its next step. Returns None, or a line if it leads elsewhere."""
    for name, array in arrays.items():
        pool.arrays[name][:] = array
    pool.call("seed", EVAL_SEED + 1)
    problems = sum(pool.call("start", states), [])
    if problems:
        return f"a resumed run starts a new episode: {problems[0]}"
    pool.buffer["noise"][:] = noise
    pool.play(model, 1)
    if not np.array_equal(pool.arrays["next_obs"][0], next_obs, equal_nan=True):
        return (
            "a resumed run continues elsewhere: after saving and loading the next step is another"
        )
    return None


def hints_of_start(args, model):
    """Return lines on actions and on starts: what --check and a new run say first."""
    hints = [hint_of_actions(args, model.action_space), problem_at_start(args, model)]
    return [hint for hint in hints if hint]


def problem_at_start(args, model):
    """Return None, or a line on what the first step of episodes shows to be wrong with starts.

    Up to eight games of each level start twice from the same seeds.
    """
    actors = max(4, min(8, args.num_envs // NUM_RANKS))
    # The schedule adaptive has no partners, which would follow finer levels.
    few = changed(args, schedule="adaptive", num_envs=actors * NUM_RANKS)
    seeds = draw_seeds(few.num_envs, args.seed, MEASURE_SEED)
    steps = None
    failure = None
    try:
        with (
            kept_generators(),
            closing(make_pool(few, model, game_seeds(few, 0), args.num_workers)) as pool,
        ):
            steps = np.stack([start_and_step(model, pool, few, seeds) for _ in range(2)])
    except GameError as error:
        failure = str(error).partition("\n")[0]

    ranks = gathered_objects((steps, failure))
    failures = [failure for _, failure in ranks if failure]
    if failures:
        return f"starts were not compared: {failures[0]}"
    first, again = np.concatenate([steps for steps, _ in ranks], axis=3)  # (2, L, N, D) each
    if not alike(first, again):
        return SEED_VARIES
    obs, next_obs = first
    # What differs may show after a step.
    shown = obs if varies(obs[-1]) else next_obs
    comparable = len(args.levels) > 1 and np.isfinite(shown).all()
    return STARTS_DIFFER if comparable and not vary_together(shown) else None


def hints_of_levels(trials):
    """Return a line if returns from one start, with the same noise, differ by a factor."""
    sizes = [abs(trial.rewards.sum()) for trial in trials]
    lengths = {len(trial.rewards) for trial in trials}
    if len(lengths) > 1 or not 0 < 1.5 * min(sizes) < max(sizes):
        return []
    returns = ", ".join(f"{trial.rewards.sum():.4g}" for trial in trials)
    return [f"returns of the levels differ: {returns}. Are rewards sums over cells? Take means"]


def hints_of_failed_reward(args, returns):
    """Return a line if a step that fails is better than a whole episode with these returns."""
    if args.failed_reward is None or not len(returns) or args.failed_reward <= np.mean(returns):
        return []
    return [
        f"--failed-reward {args.failed_reward:g} is better than an episode, which brings "
        f"{np.mean(returns):.4g}: the policy may learn to fail"
    ]


def hints_of_scale(args, obs=(), returns=()):
    """Return lines on observations and returns that are far from 1, if nothing normalises them."""
    lines = []
    if not args.norm_obs and far_from_one(obs):
        lines.append(f"{far_from_one(obs)} observations: --norm-obs?")
    if not args.norm_value and far_from_one(returns):
        lines.append(f"{far_from_one(returns)} returns: --norm-value?")
    return lines


def far_from_one(values):
    """Return "large" or "small", and how large, if the largest value is far from 1, else None."""
    largest = np.abs(values).max(initial=0)
    if largest > 10:
        return f"large (up to {largest:.2g})"
    if 0 < largest < 0.01:
        return f"small (up to {largest:.2g})"
    return None


def hints_of_ends(args, trials):
    """Return lines on how the episodes of all levels end."""
    lines = []
    lengths = {len(trial.rewards) for trial in trials}
    ends = {trial.end for trial in trials}
    longest = max(lengths)
    if "cut off" in ends:
        lines.append(f"an episode is not over after {EVAL_STEPS:,} steps: does it ever end?")
    elif longest > max(args.num_steps):
        lines.append(f"an iteration is shorter than an episode: --num-steps {longest}?")
    if ends == {"truncated"} and len(lengths) == 1:
        lines.append(
            f"all episodes are truncated after {longest} steps, so rewards are assumed to go on "
            "afterwards. If they end there, return terminated=True and put the time into the "
            "observation"
        )
    return lines


def trial_cells(trial):
    """Return a Trial's entries in the table of --check."""
    others = trial.step_seconds[1:-1]  # without the last, which includes a reset
    other = f"{others.mean():.2g}" if len(others) else "-"
    first = f"{trial.step_seconds[0]:.2g}"
    cells = [f"{trial.reset_seconds:.2g}", first, other, len(trial.rewards), trial.end]
    return [*cells, f"{trial.rewards.sum():.4g}"]


def print_row(cells):
    """Print a row of the table of --check."""
    print("".join(str(cell).rjust(16) for cell in cells), flush=True)


def print_scales(args, model, trials):
    """Print how large observations, rewards and actions are."""
    obs = np.concatenate([trial.obs for trial in trials])
    rewards = np.concatenate([trial.rewards for trial in trials])
    entry = int(np.abs(obs).max(axis=0).argmax())
    print(
        f"\nobservations: {obs.min():.4g} to {obs.max():.4g}, entry {entry} (from 0) is the largest"
    )
    print(f"rewards: {rewards.min():.4g} to {rewards.max():.4g}")
    space = model.action_space
    if isinstance(space, gym.spaces.Box):
        bounds = f"{space.low.min():.4g} to {space.high.max():.4g}"
        print(f"actions: 0 ± {math.exp(args.init_log_std):.3g} at first, clipped to {bounds}")
    else:
        print(f"actions: {space}")


def print_costs(args, costs):
    """Print measured costs as an option, and how long a run of the default length takes."""
    words = " ".join(f"{cost:.3g}" for cost in costs)
    print("\nseconds of a step on each level over the workers, and of an update, as an option:")
    print(f"--level-costs {words}")

    args = changed(args, level_costs=costs)
    one_level = len(args.levels) == 1
    if one_level and args.num_iterations:
        seconds = args.num_iterations * iteration_seconds(args, 0)
    elif args.schedule == "adaptive" and not args.num_iterations and not args.total_timesteps:
        seconds = (args.total_cost or default_cost(args)) * costs_of(args).unit
    else:  # its iterations are not all alike
        return
    print(f"a run takes {seconds / 3600:.3g} hours, unless --hours or another length is given")


# ------------------------------------------------------------------------------------ reservoirs
# Shapes: n reservoirs are stepped together. A grid has (ny, nx) cells: axis 0 is y, axis 1 x.
#         It has (faces,) faces between neighbouring cells. A set has K permeability fields.
# Units:  m, days, Pa. Permeability k is in m², viscosity μ in Pa s. Everything is per metre of
#         the reservoir's thickness: rates and fluxes are in m²/day, volumes in m².

FOOT = 0.3048  # m
DAY = 86400.0  # s
MILLIDARCY = 9.869233e-16  # m²


class Case(NamedTuple):
    """A reservoir and its operation: everything that does not depend on the level."""

    # The levels have these grids, coarse to fine. The last one is the policy's grid.
    grids: tuple  # (ny, nx) each

    # The domain is a rectangle.
    lx: float  # m
    ly: float  # m

    # Wells are cells of the policy's grid.
    injectors: tuple  # (rows, columns)
    producers: tuple  # (rows, columns)

    # The function fields(case, n, seed) draws n permeability fields on the policy's grid. It
    # returns an array (n, ny, nx) in m².
    fields: object

    # A control step has `substeps` backward Euler steps of `dt` days. An episode has
    # `control_steps` control steps and injects `pore_volumes` times the volume of all pores.
    dt: float  # days
    pore_volumes: float
    substeps: int = 5
    control_steps: int = 5

    # Porosity is the share of the volume that fluids can fill.
    porosity: float = 0.2

    # Water and oil have the same viscosity, and relative permeabilities s and 1 - s, where s is
    # the saturation of water. So the share of water in a flow is s, and the total mobility is
    # s / μ + (1 - s) / μ = 1 / μ, whatever s is.
    viscosity: float = 3e-4  # Pa s

    # Each of the three sets (training, evaluation, validation) has this many fields.
    n_fields: int = 16

    # A run has these defaults: its length in steps of the finest level, and the pairs
    # (level, T^l) of --schedule together.
    finest_steps: int = 200_000
    together: tuple = ()

    @property
    def rate(self):
        """What all injectors together inject, and all producers produce [m²/day]."""
        pores = self.lx * self.ly * self.porosity  # m²
        days = self.control_steps * self.substeps * self.dt
        return self.pore_volumes * pores / days


def channel_fields(case, n, seed):
    """Draw fields with one straight channel from the left to the right edge.

    Log k (k in millidarcy) is 5.5 in the channel and -2 elsewhere. Returns k (n, ny, nx) in m².
    """
    ny, nx = case.grids[-1]
    rng = np.random.default_rng(seed)
    x = (np.arange(nx) + 0.5) / nx  # (nx,)
    y = (np.arange(ny)[:, None] + 0.5) / ny  # (ny, 1)

    # Lengths are shares of ly. The channel's width is w ~ U(0.1, 0.3), and the heights at which
    # its lower side starts and ends are ~ U(0, 1 - w).
    width, left, right = rng.random((3, n, 1, 1))
    width = 0.1 + 0.2 * width
    lower_side = (1 - width) * (left + (right - left) * x)  # (n, 1, nx)

    height = y - lower_side  # (n, ny, nx)
    inside = (height >= 0) & (height <= width)
    return MILLIDARCY * np.exp(np.where(inside, 5.5, -2.0))


def gaussian_fields(
    case,
    n,
    seed,
    mean=2.41,
    variance=5.0,
    lengths=(1.0, 0.1),
    angle=math.pi / 8,
):
    """Draw Gaussian random fields of log k (k in millidarcy), known to be `mean` at the wells.

    `angle` [rad] turns the main direction from x towards -y. The correlation lengths along and
    across it are `lengths` times lx. Returns k (n, ny, nx) in m².
    """
    ny, nx = case.grids[-1]
    dy = case.ly / ny
    dx = case.lx / nx
    cos = math.cos(angle)
    sin = math.sin(angle)

    # C(h) = variance · exp(-|h'|), where h' is h turned by `angle` and divided by lengths · lx.
    def covariance(hy, hx):
        along = cos * hx - sin * hy
        across = cos * hy + sin * hx
        return variance * np.exp(-np.hypot(along / lengths[0], across / lengths[1]) / case.lx)

    # The fields are drawn on a periodic grid. Its period is the domain plus 8 times the longest
    # correlation length. Their covariance is then within 0.4 % of C; 5 times would give 2 %.
    pad = 8 * max(lengths) * case.lx
    my = math.ceil((case.ly + pad) / dy)
    mx = math.ceil((case.lx + pad) / dx)
    hy = np.fft.fftfreq(my, 1 / my) * dy  # (my,)
    hx = np.fft.fftfreq(mx, 1 / mx) * dx  # (mx,)
    rng = np.random.default_rng(seed)
    z = draw_stationary_fields(covariance(hy[:, None], hx), (n, ny, nx), rng)

    # Simple kriging: z(x) ← z(x) - C(x, wells) C(wells, wells)⁻¹ z(wells) is 0 at the wells.
    rows, cols = np.concatenate([case.injectors, case.producers], axis=1)
    y = np.arange(ny) * dy
    x = np.arange(nx) * dx
    c = covariance(y[:, None, None] - y[rows], x[:, None] - x[cols])  # (ny, nx, wells)
    solution = np.linalg.solve(c[rows, cols], z[:, rows, cols].T)  # (wells, n)
    z -= np.einsum("yxw,wn->nyx", c, solution)
    return MILLIDARCY * np.exp(mean + z)


def draw_stationary_fields(covariance, shape, rng):
    """Draw Gaussian random fields of mean 0 and of `shape` (n, ny, nx), by FFT.

    They are corners of fields on a larger, periodic grid (my, mx). `covariance` (my, mx) is the
    one between this grid's first cell and each cell. Source: circulant embedding, Dietrich &
    Newsam 1997.
    """
    n, ny, nx = shape
    eigenvalues = np.fft.fft2(covariance).real.clip(min=0)  # (my, mx)
    scale = np.sqrt(eigenvalues / eigenvalues.size)

    # Real and imaginary part are two independent fields. If n is odd, the last one is not used.
    fields = np.empty((n + n % 2, ny, nx))
    for i in range(0, n, 2):
        a, b = rng.standard_normal((2, *covariance.shape))
        both = np.fft.fft2(scale * (a + 1j * b))[:ny, :nx]
        fields[i] = both.real
        fields[i + 1] = both.imag
    return fields[:n]


def streak_fields(case, n, seed, width=1):
    """Draw fields with two or three thief zones, `width` cells wide, from left to right.

    Log k (k in millidarcy) is 8 in the zones and ~ N(3, 0.3²) elsewhere. Returns k (n, ny, nx)
    in m².
    """
    ny, nx = case.grids[-1]
    rng = np.random.default_rng(seed)
    log_k = rng.normal(3.0, 0.3, (n, ny, nx))
    for field in log_k:
        for _ in range(rng.integers(2, 4)):
            left, right = rng.integers(ny, size=2)
            draw_streak(field, left, right, width)
    return MILLIDARCY * np.exp(log_k)


def draw_streak(log_k, left, right, width):
    """Set log_k (ny, nx) to 8 on a line from row `left` to row `right`, in place."""
    ny, nx = log_k.shape
    rows = np.rint(np.linspace(left, right, nx)).astype(int).clip(max=ny - width)

    # A streak has no gaps: in each column it reaches from the previous column's row to its own.
    previous = np.concatenate([rows[:1], rows[:-1]])
    first = np.minimum(rows, previous)
    last = np.maximum(rows, previous) + width
    for column in range(nx):
        log_k[first[column] : last[column], column] = 8.0


def wells_in_column(rows, column):
    """Return wells in these rows of one column, in the form of `Case.injectors`."""
    return tuple(rows), tuple(column for _ in rows)


CASES = {
    # Water flows from the left to the right edge through a channel.
    "ResSim-v1": Case(
        grids=((8, 8), (16, 16), (32, 32), (64, 64), (128, 128)),
        lx=1200 * FOOT,
        ly=1200 * FOOT,
        injectors=wells_in_column(range(2, 128, 4), 0),
        producers=wells_in_column(range(2, 128, 4), 127),
        fields=channel_fields,
        dt=5.0,
        pore_volumes=0.7,
        finest_steps=32_000,
        together=((2, 100), (5, 5)),
    ),
    # Injectors stand in the middle column, producers at both edges.
    "ResSim-v2": Case(
        grids=((27, 9), (57, 19), (111, 37), (219, 73)),
        lx=620 * FOOT,
        ly=1820 * FOOT,
        injectors=wells_in_column(range(1, 219, 36), 36),
        producers=(
            (1, 1, 37, 37, 73, 73, 109, 109, 145, 145, 181, 181, 217, 217),
            (0, 72, 0, 72, 0, 72, 0, 72, 0, 72, 0, 72, 0, 72),
        ),
        fields=gaussian_fields,
        dt=1.0,
        pore_volumes=1.0,
        finest_steps=50_000,
        together=((1, 140), (4, 5)),
    ),
    # Water flows from the left to the right edge, fastest in thief zones one cell wide.
    "ResSim-v3": Case(
        grids=((8, 8), (16, 16), (32, 32), (64, 64)),
        lx=1200 * FOOT,
        ly=1200 * FOOT,
        injectors=wells_in_column(range(1, 64, 2), 0),
        producers=wells_in_column(range(1, 64, 2), 63),
        fields=streak_fields,
        dt=5.0,
        pore_volumes=0.7,
        finest_steps=200_000,
        together=((3, 60), (4, 15)),
    ),
    # This is ResSim-v3 with thief zones three cells wide.
    "ResSim-v4": Case(
        grids=((8, 8), (16, 16), (32, 32), (64, 64)),
        lx=1200 * FOOT,
        ly=1200 * FOOT,
        injectors=wells_in_column(range(1, 64, 2), 0),
        producers=wells_in_column(range(1, 64, 2), 63),
        fields=functools.partial(streak_fields, width=3),
        dt=5.0,
        pore_volumes=0.7,
        finest_steps=200_000,
        together=((3, 60), (4, 15)),
    ),
}


def partition(n, parts):
    """Cut n cells into `parts` parts and return their edges (parts + 1,).

    The first n mod parts of them have one cell more than the others.
    """
    i = np.arange(parts + 1)
    return i * (n // parts) + np.minimum(i, n % parts)


def coarsen(x, shape):
    """Return x (..., ny, nx) on a coarser grid `shape`: the means over the cells in a cell."""
    rows = partition(x.shape[-2], shape[0])
    cols = partition(x.shape[-1], shape[1])
    sums = np.add.reduceat(x, rows[:-1], axis=-2)
    sums = np.add.reduceat(sums, cols[:-1], axis=-1)
    return sums / (np.diff(rows)[:, None] * np.diff(cols))


def refine(x, shape):
    """Return x (..., ny, nx) on a finer grid `shape`: copies of a cell for all cells in it."""
    heights = np.diff(partition(shape[0], x.shape[-2]))
    widths = np.diff(partition(shape[1], x.shape[-1]))
    return x.repeat(heights, axis=-2).repeat(widths, axis=-1)


def transport(s, p, transmissibility, q, grid):
    """Move the water for one control step: `case.substeps` backward Euler steps.

    Takes saturations s, pressures p [Pa] and rates q [m²/day], all (n, ny, nx), and
    transmissibilities (n, faces) [m²/(Pa day)]. Pressures and rates are constant during the
    steps. Returns the saturations (n, ny, nx) after them.

    Each of the C cells of all reservoirs has one equation, storage (s⁺ - s) + flow s⁺ = source,
    in m²/day. s and s⁺ are the saturations (C,) before and after a step.
    """
    case = grid.case

    # Fluid flows to cells of lower pressure. When the cells are sorted by falling pressure, it
    # flows to later cells only: the matrix is lower triangular, and easy to solve.
    order, rank = order_by_pressure(p)
    q = q.ravel()[order]
    source = np.maximum(q, 0)
    storage = grid.pore / case.dt

    # All steps solve (storage + flow) s⁺ = storage s + source, with the same matrix.
    entries, rows, cols = upwind_matrix(p, transmissibility, q, rank, grid)
    entries[: q.size] += storage
    lu = factor_lower(entries, rows, cols)
    sorted_s = s.ravel()[order]
    for _ in range(case.substeps):
        sorted_s = lu.solve(storage * sorted_s + source)
    return sorted_s[rank].reshape(s.shape)


def order_by_pressure(p):
    """Sort the cells of each reservoir by falling pressure p (n, ny, nx).

    Returns the cells in this order (C,), one reservoir after the other, and the rank of each
    cell in it (n, ny · nx). Both count the cells of all reservoirs together, from 0 to C - 1.
    """
    n = len(p)
    first_cells = np.arange(0, p.size, p.size // n, dtype=np.int32)[:, None]  # (n, 1)
    order = (np.argsort(-p.reshape(n, -1)) + first_cells).ravel()
    rank = np.empty(p.size, dtype=np.int32)
    rank[order] = np.arange(p.size, dtype=np.int32)
    return order, rank.reshape(n, -1)


def upwind_matrix(p, transmissibility, q, rank, grid):
    """Assemble the sparse matrix `flow` of `transport` (C, C) by the upwind scheme.

    Only the rates q (C,) are sorted by falling pressure; p (n, ny, nx), transmissibilities
    (n, faces) and rank (n, ny · nx) are not. Returns the entries [m²/day], their rows and their
    columns. The first C entries are the diagonal.
    """
    # Fluid flows through a face from the upstream to the downstream cell.
    p = p.reshape(len(p), -1)
    flux = (transmissibility * np.abs(p[:, grid.a] - p[:, grid.b])).ravel()  # m²/day
    rank_a = rank[:, grid.a].ravel()
    rank_b = rank[:, grid.b].ravel()
    upstream = np.minimum(rank_a, rank_b)
    downstream = np.maximum(rank_a, rank_b)

    # The diagonal holds what leaves a cell, to its neighbours and through its producers. Each
    # other entry is what flows from the upstream cell (column) to the downstream cell (row).
    leaving = np.bincount(upstream, flux, q.size) - np.minimum(q, 0)
    diagonal = np.arange(q.size, dtype=np.int32)
    entries = np.concatenate([leaving, -flux])
    rows = np.concatenate([diagonal, downstream])
    cols = np.concatenate([diagonal, upstream])
    return entries, rows, cols


def factor_lower(values, rows, cols):
    """Return LU factors of a sparse lower triangular matrix, given its entries, none twice."""
    # SciPy would search for entries to sum. The flag tells it that no two have the same place.
    matrix = sparse.coo_array((values, (rows, cols)))
    matrix.has_canonical_format = True
    matrix = matrix.tocsc()

    # SciPy would sort each column, but SuperLU takes the entries in any order.
    matrix.has_canonical_format = True
    return splu(matrix, permc_spec="NATURAL", diag_pivot_thresh=0, panel_size=2, relax=1)


# The cache makes a process factor the pressure matrix of a field only once.
@functools.cache
class Grid:
    """One level of a case with the permeability fields of a seed.

    `perm` (K, ny, nx) are the fields [m²] and `pore` is the pore volume of a cell [m²]. Face i
    lies between the cells a[i] and b[i], indices of a flattened field. Raises ValueError if the
    case's fields have another shape, or values that are not finite and positive.
    """

    def __init__(self, case, level, seed):
        self.case = case
        self.level = level
        self.shape = case.grids[level - 1]
        ny, nx = self.shape
        dy = case.ly / ny
        dx = case.lx / nx
        self.pore = case.lx * case.ly * case.porosity / (ny * nx)

        finest = len(case.grids)
        if level == finest:
            self.perm = np.asarray(case.fields(case, case.n_fields, seed), float)
            has_shape = self.perm.shape[1:] == self.shape
            if not has_shape or not 0 < self.perm.min() <= self.perm.max() < np.inf:
                raise ValueError(f"fields must be finite, > 0 and of shape (K, {ny}, {nx})")
        else:
            # Each cell gets the harmonic mean of its cells on the finest grid.
            self.perm = 1 / coarsen(1 / Grid(case, finest, seed).perm, self.shape)

        # The faces between neighbours in x come first, then those between neighbours in y.
        cells = np.arange(ny * nx).reshape(ny, nx)
        self.a = np.concatenate([cells[:, :-1], cells[:-1]], axis=None, dtype=np.int32)
        self.b = np.concatenate([cells[:, 1:], cells[1:]], axis=None, dtype=np.int32)
        faces_x = ny * (nx - 1)
        faces_y = (ny - 1) * nx

        # The flow through a face depends on its length over the distance of the cells' centres.
        ratio = dy / dx
        self.length_over_distance = np.repeat([ratio, 1 / ratio], [faces_x, faces_y])

        # A coarse cell may hold several wells.
        self.injectors = self.well_index(case.injectors)
        self.producers = self.well_index(case.producers)

        self.factored = {}  # field -> (LU factors, transmissibilities)

    def well_index(self, wells):
        """Return the index (..., rows, columns) of the cells that hold these wells."""
        ny, nx = self.shape
        cells = np.arange(ny * nx).reshape(ny, nx)
        cells_on_policy_grid = refine(cells, self.case.grids[-1])
        rows, cols = np.unravel_index(cells_on_policy_grid[wells], self.shape)
        return ..., rows, cols

    def solve_pressure(self, field, q):
        """Solve div(-k / μ grad p) = q with closed boundaries, by finite volumes.

        Takes the number of a field, and rates q (ny, nx) [m²/day] whose sum is 0. Returns
        pressures p (ny, nx) [Pa], where p[0, 0] = 0, and transmissibilities (faces,)
        [m²/(Pa day)].
        """
        if field not in self.factored:
            transmissibility = self.transmissibility(field)
            lu = self.factor_pressure(transmissibility)
            self.factored[field] = lu, transmissibility

        lu, transmissibility = self.factored[field]
        return lu.solve(q.ravel()).reshape(q.shape), transmissibility

    def transmissibility(self, field):
        """Return the transmissibilities (faces,) [m²/(Pa day)] of a field."""
        # T = 2 A / (Δ/k₁λ + Δ/k₂λ): length over distance times the harmonic mean of k λ
        total_mobility = 1 / self.case.viscosity  # λ, in 1/(Pa s)
        resistance = 1 / (DAY * self.perm[field] * total_mobility).ravel()
        return 2 * self.length_over_distance / (resistance[self.a] + resistance[self.b])

    def factor_pressure(self, transmissibility):
        """Return LU factors of the pressure matrix, which is symmetric."""
        a = self.a
        b = self.b
        t = transmissibility

        # The equations determine p up to a constant only. Adding its own value t0 to the first
        # diagonal entry makes p[0, 0] = 0: the sum of all equations is t0 p[0, 0] = Σ q = 0.
        t0 = t[a == 0].sum()

        # SciPy sums entries that have the same row and column.
        entries = np.concatenate([t, t, -t, -t, [t0]])
        rows = np.concatenate([a, b, a, b, [0]])
        cols = np.concatenate([a, b, b, a, [0]])
        matrix = sparse.csc_array((entries, (rows, cols)))
        return splu(
            matrix,
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0,
            panel_size=4,
            relax=2,
            options={"SymmetricMode": True},
        )

    def observe(self, s, p):
        """Return the observations (..., D) of states s, p (..., ny, nx), see `ResSim.psi`."""
        p = np.concatenate([p[self.producers], p[self.injectors]], axis=-1)
        low = p.min(axis=-1, keepdims=True)
        high = p.max(axis=-1, keepdims=True)

        # Equal pressures are all scaled to 1.
        p = 1 - 2 * (high - p) / np.maximum(high - low, 1e-300)
        return np.concatenate([s[self.producers].clip(0, 1), p], axis=-1)


class ResSim(gym.Env):
    """Water displaces oil in one reservoir, simulated on one level. An action sets the wells.

    A control step solves Darcy's equation for the pressure once and then moves the water by the
    upwind scheme. The reward is the oil produced in the step over the oil in place at first. An
    episode terminates after `case.control_steps` steps. Source: Dixit & ElSheikh, arXiv
    2210.08400, section 4.

    `case` is a `Case` or a name in CASES, and level 1 is the coarsest. Training, evaluation and
    validation have permeability fields of their own.

    Raises ValueError if there is no such level.
    """

    def __init__(self, case, level, evaluation=False, validation=False):
        if isinstance(case, str):
            case = CASES[case]
        if level not in range(1, len(case.grids) + 1):
            raise ValueError(f"level must be 1..{len(case.grids)}, got {level}")

        # Each set of permeability fields is drawn from a seed of its own.
        if validation:
            self.fields = 2
        elif evaluation:
            self.fields = 1
        else:
            self.fields = 0

        self.case = case
        self.grid = Grid(case, level, self.fields)
        self.t = None  # control steps since reset

        n_in = len(case.injectors[0])
        n_out = len(case.producers[0])
        low = np.concatenate([np.zeros(n_out), -np.ones(n_out + n_in)]).astype(np.float32)
        self.observation_space = gym.spaces.Box(low, np.float32(1), dtype=np.float32)
        self.action_space = gym.spaces.Box(0.001, 1, (n_in + n_out,), dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        """Fill the reservoir with oil and draw a field, or take `options={"field": k}`.

        In evaluation and validation, consecutive seeds visit every field. Returns the
        observation (D,) float32 and {"field": k}. Raises ValueError if there is no such field.
        """
        super().reset(seed=seed)
        n_fields = len(self.grid.perm)
        if self.fields and seed is not None:
            field = seed % n_fields
        else:
            field = self.np_random.integers(n_fields)
        if options and "field" in options:
            field = options["field"]

        self.field = int(field)
        if self.field not in range(n_fields):
            raise ValueError(f"field must be 0..{n_fields - 1}, got {self.field}")

        self.s = np.zeros(self.grid.shape)  # water saturation
        self.p = np.zeros(self.grid.shape)  # Pa
        self.t = 0
        return self.psi().astype(np.float32), {"field": self.field}

    def phi(self, action):
        """Return the rates q (..., ny, nx) [m²/day] of actions (..., wells).

        An action holds relative rates, injectors first. Values are clipped to [0.001, 1].
        """
        action = np.asarray(action, dtype=np.float64).clip(0.001, 1)
        n_in = len(self.case.injectors[0])
        injected, produced = np.split(action, [n_in], axis=-1)

        # A well's rate is ± total rate · a / Σ a. The rates of wells in the same cell add up.
        q = np.zeros((*action.shape[:-1], *self.grid.shape))
        injected = self.case.rate * injected / injected.sum(-1, keepdims=True)
        produced = -self.case.rate * produced / produced.sum(-1, keepdims=True)
        np.add.at(q, self.grid.injectors, injected)
        np.add.at(q, self.grid.producers, produced)
        return q

    def psi(self):
        """Return the observation (D,) of the state.

        It holds s at the producers, then p at the producers and at the injectors, scaled to
        [-1, 1].
        """
        return self.grid.observe(self.s, self.p)

    def map_from(self, other):
        """Take over the state of another level, coarsened or refined.

        Raises ValueError if the other simulation has another case or another set of fields.
        """
        if (self.case, self.fields) != (other.case, other.fields):
            raise ValueError("map_from needs the same simulation, on another level")

        change = coarsen if other.grid.level >= self.grid.level else refine
        self.s = change(other.s, self.grid.shape)
        self.p = change(other.p, self.grid.shape)
        self.field = other.field
        self.t = other.t

    def step(self, action):
        """Take one control step with an action (wells,).

        Raises ValueError if the action is not finite or has another shape, and RuntimeError if
        the episode has ended or has not begun.
        """
        obs, rewards, terminated, truncated = self.step_batch([self], np.asarray(action)[None])
        return obs[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}

    @staticmethod
    def step_batch(envs, actions):
        """Take one control step in n simulations of one case and level.

        Takes actions (n, wells). Returns obs (n, D) float32, rewards (n,), terminated (n,) and
        truncated (n,), bit for bit as n calls of `step` would. Raises the errors of `step`.
        """
        case = envs[0].case
        grid = envs[0].grid
        shape = (len(envs), *envs[0].action_space.shape)
        actions = np.asarray(actions, dtype=np.float64)
        if actions.shape != shape or not np.isfinite(actions).all():
            raise ValueError(f"actions must be finite and of shape {shape}")
        if any(env.t is None or env.t >= case.control_steps for env in envs):
            raise RuntimeError("ResSim: step() before reset() or after the end of the episode")

        s = np.stack([env.s for env in envs])  # (n, ny, nx)
        q = envs[0].phi(actions)  # (n, ny, nx)
        p, transmissibility = solve_pressures(envs, q)

        # Transport takes as many reservoirs at a time as fit into the processor's cache.
        chunk_size = max(1, 2**13 // s[0].size)
        parts = []
        for start in range(0, len(envs), chunk_size):
            chunk = slice(start, start + chunk_size)
            parts.append(transport(s[chunk], p[chunk], transmissibility[chunk], q[chunk], grid))
        s_new = np.concatenate(parts)

        for env, env_s, env_p in zip(envs, s_new, p):
            env.s = env_s
            env.p = env_p
            env.t += 1

        # Nothing is compressible and all boundaries are closed: oil produced = water gained.
        oil_produced = grid.pore * (s_new - s).sum(axis=(1, 2))
        oil_in_place = grid.pore * s[0].size
        rewards = oil_produced / oil_in_place
        terminated = np.array([env.t >= case.control_steps for env in envs])
        truncated = np.zeros(len(envs), dtype=bool)
        return grid.observe(s_new, p).astype(np.float32), rewards, terminated, truncated


def solve_pressures(envs, q):
    """Solve the pressure equation of each simulation for its rates q[i].

    Returns pressures (n, ny, nx) [Pa] and transmissibilities (n, faces) [m²/(Pa day)].
    """
    # SuperLU rounds differently when it solves for several right-hand sides at once. One at a
    # time, each simulation gets the bits that it would get alone.
    pressures = []
    transmissibilities = []
    for env, rates in zip(envs, q):
        p, transmissibility = env.grid.solve_pressure(env.field, rates)
        pressures.append(p)
        transmissibilities.append(transmissibility)
    return np.stack(pressures), np.stack(transmissibilities)


# ------------------------------------------------------------------------------------ command line
# The options that say how long a run is, and the counters that they limit.
LENGTHS = {
    "num_iterations": "iteration",
    "total_timesteps": "global_step",
    "total_cost": "total_cost",
    "hours": "total_cost",  # into which they are converted before the first iteration
}
# These options may change when a run is resumed or evaluated.
MAY_CHANGE = ["device", "num_workers", "total_timesteps", "num_iterations"]
MAY_CHANGE += ["eval_every", "eval_episodes", "save_every", "total_cost", "hours"]
MAY_CHANGE += ["failed_reward", "baseline"]
# These may change, too, when it is analysed.
MAY_ANALYSE = ["num_envs", "num_steps", "levels", "level_costs", "seed"]
# These options are not kept in config.json.
NOT_KEPT = ["resume", "eval", "sample", "video", "export_onnx", "quiet", "analyse", "check"]
FLAG = argparse.BooleanOptionalAction  # --x and --no-x

EXAMPLES = """
examples:
  python ppo_multilevel.py --env ResSim-v1                         train, one level at a time
  python ppo_multilevel.py --env my.py:Rod --levels 1 2 3 --check  look at your own simulation
  python ppo_multilevel.py --env my.py:Rod --levels 1 2 3          train on it
  python ppo_multilevel.py --eval RUN_DIR --video                  evaluate, and film an episode
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
    parser.set_defaults(num_workers=num_cores(), eval_every=10, num_envs=50, hidden=[150, 100, 80])
    parser.set_defaults(shared_net=True, anneal_lr=False, clip_coef=0.1, ent_coef=1e-3, vf_coef=1.0)
    parser.set_defaults(num_minibatches=10, learning_rate=1e-4, update_epochs=5, clip_vloss=False)
    parser.set_defaults(target_kl=0.05)
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


def env_name(text):
    """Return --env with the path of its file made absolute: an env may change the folder."""
    module, _, function = text.rpartition(":")
    if module.endswith(".py"):
        return f"{os.path.abspath(module)}:{function}"
    return text


def or_auto(kind):
    """Return an argparse type: `kind`, or the word auto."""

    def parse(text):
        return text if text == "auto" else kind(text)

    parse.__name__ = f"{kind.__name__} or auto"
    return parse


def parse_args(argv=None):
    """Parse and check the command line (default: the program's)."""
    parser = make_parser()
    # This first reading names the case, which has defaults of its own.
    given = parser.parse_args(argv)
    set_defaults_of_case(parser, given)
    args = parse_with_run(parser, argv)
    check_levels(parser, args)
    if args.analyse is not None:
        set_options_of_analysis(args, given)
    args.eval_level = args.eval_level or args.levels[-1]

    check_spaces(parser, args)
    check_norm_obs(parser, args)
    check_baseline(parser, args)
    check_eval_level(parser, args)
    check_level_costs(parser, args)
    # An analysed run may have been of the other schedule.
    if args.schedule == "adaptive" and not args.analyse:
        check_adaptive(parser, args)
    complete_num_steps(parser, args)
    check_num_steps(parser, args)
    set_length(parser, args)
    return args


def set_options_of_analysis(args, given):
    """Set what an analysis does otherwise than the run: no partners, costs as given now."""
    if args.schedule == "together" or len(args.num_steps) != len(args.levels):
        args.num_steps = args.num_steps[:1]
    args.schedule = "adaptive"
    args.eval_level = None
    args.level_costs = given.level_costs


def set_defaults_of_case(parser, given):
    """Set the defaults that --env, --schedule and --levels decide on."""
    schedule = "together" if len(given.levels) == 1 else "adaptive"
    parser.set_defaults(schedule=schedule)
    case = CASES.get(given.env)
    if case:
        parser.set_defaults(levels=levels_of(case), init_log_std=-2.9)
    if given.schedule == "together" and len(given.levels) != 1 and given.analyse is None:
        pairs = case.together if case else ()
        levels = [level for level, _ in pairs]
        num_steps = [steps for _, steps in pairs]
        if given.levels:
            num_steps = [100] + [10] * (len(given.levels) - 1)
        parser.set_defaults(levels=levels, num_steps=num_steps)
        parser.set_defaults(learning_rate=3e-5, update_epochs=10)


def levels_of(case):
    """Return the numbers of a case's levels, from 1."""
    return list(range(1, len(case.grids) + 1))


def is_paired(args):
    """Whether actors have partners: several levels are played together."""
    return len(args.levels) > 1 and args.schedule == "together"


def check_levels(parser, args):
    """Refuse levels that are not in order, or too few of them."""
    least = 1 if args.analyse is None else 2
    if args.levels != sorted(set(args.levels)) or len(args.levels) < least:
        parser.error(
            "argument --levels: give them, coarse to fine, like 1 2 3 (--analyse: at least two)"
        )


def check_spaces(parser, args):
    """Refuse levels with other spaces than the first, and a --coupling that the env cannot do."""
    first = None
    for number in sorted({*args.levels, args.eval_level}):
        with closing(make_env(args.env, number)) as env:
            spaces = (env.observation_space, env.action_space)
            maps = maps_states(env.unwrapped)
        first = first or spaces
        if spaces != first:
            parser.error(f"argument --levels: level {number} has {spaces}, not {first}")
        if args.coupling == "step" and not maps:
            parser.error(
                f"argument --coupling: step needs map_from, which {args.env} does not have"
            )


def check_eval_level(parser, args):
    """Refuse a level of evaluations that is below the last one, or above one of several."""
    last = args.levels[-1]
    highest = last if args.schedule == "adaptive" or is_paired(args) else math.inf
    if not args.eval and not last <= args.eval_level <= highest:
        parser.error("argument --eval-level: the last of --levels, or above a single one")


def check_baseline(parser, args):
    """Refuse a --baseline that cannot be loaded, or with which nothing is compared."""
    if not args.baseline:
        return
    new_run = not args.eval and not args.resume
    if new_run and not args.eval_every:
        parser.error("argument --baseline: it is compared with evaluations, see --eval-every")
    try:
        function = load_function(args.baseline)
        if not callable(function):
            raise TypeError(f"{args.baseline} is no function")
    except Exception as error:
        # The file may raise anything.
        parser.error(f"argument --baseline: {one_line(error)}")


def check_level_costs(parser, args):
    """Refuse another number of costs than that of the levels and an update."""
    needed = len({*args.levels, args.eval_level}) + 1
    if args.level_costs and not args.eval and len(args.level_costs) != needed:
        parser.error(f"argument --level-costs: give {needed} numbers, the last of an update")


def check_adaptive(parser, args):
    """Refuse options of --schedule together, and fewer episodes of a check than ranks."""
    for name in ("coupling", "correction", "control"):
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"argument --{name}: only with --schedule together")
    if args.check_episodes < NUM_RANKS:
        parser.error(f"argument --check-episodes: each of the {NUM_RANKS} ranks needs one")


def complete_num_steps(parser, args):
    """Complete --num-steps to one entry per level."""
    L = len(args.levels)
    if len(args.num_steps) == 1:
        args.num_steps = args.num_steps * L
    if len(args.num_steps) != L:
        parser.error(f"argument --num-steps: one number per level of {args.levels}, or one for all")


def check_num_steps(parser, args):
    """Refuse numbers of steps whose rows the minibatches cannot share."""
    for level, T in enumerate(args.num_steps):
        finer = is_paired(args) and level > 0
        rows = args.num_envs * T
        what = "finer rows" if finer else "rows"
        check_rows(parser, args, rows, what)
        if not finer:
            check_normalised(parser, args, rows)


def set_length(parser, args):
    """Set the run's length, if it is not given."""
    if args.hours and args.level_costs == UNKNOWN_COSTS:
        parser.error("argument --hours: this run has not measured costs; use --num-iterations")
    lengths = [args.total_cost, args.hours, args.total_timesteps or args.num_iterations]
    if lengths.count(None) < 2:
        parser.error(
            "argument --total-cost, --hours, --total-timesteps, --num-iterations: give one"
        )
    if args.total_timesteps and len(args.levels) == 1:
        rows = args.num_envs * args.num_steps[0]
        args.num_iterations = max(1, args.total_timesteps // rows)
    if any(getattr(args, option) for option in LENGTHS):
        return
    if args.schedule == "together":
        args.num_iterations = 200
        return
    # Other simulations are as long as `default_cost` says, once their costs are known.
    case = CASES.get(args.env)
    if case and args.levels[-1] == levels_of(case)[-1]:
        args.total_cost = float(case.finest_steps)


def set_hours(args):
    """Convert --hours to --total-cost, steps of the finest level, and say so."""
    args.total_cost = args.hours * 3600 / costs_of(args).unit
    report(
        f"{args.hours:g} hours are --total-cost {args.total_cost:.6g}, steps of the finest level"
    )
    args.hours = None


def default_cost(args):
    """Return what 100 iterations on the finest level cost, updates included, in its steps."""
    finest = len(args.levels) - 1
    return 100 * iteration_seconds(args, finest) / costs_of(args).unit


def parse_with_run(parser, argv):
    """Parse argv; with --resume, --eval or --analyse that run's options are the defaults."""
    args = parser.parse_args(argv)
    check_eval_options(parser, args)
    check_analyse_options(parser, args)
    run_dir = args.resume or args.eval or args.analyse
    if run_dir:
        may_change = list(MAY_CHANGE)
        if args.eval:
            may_change += ["eval_level"]
        if args.analyse:
            may_change += MAY_ANALYSE
        args = options_of_run(parser, argv, args, run_dir, may_change)
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


def check_analyse_options(parser, args):
    """Refuse --analyse and --check together with what trains or evaluates."""
    if args.analyse is not None and (args.eval or args.resume or NUM_RANKS > 1):
        parser.error("argument --analyse: not with --eval, --resume, torchrun")
    others = args.eval or args.resume or args.analyse is not None
    if args.check and (others or NUM_RANKS > 1):
        parser.error("argument --check: not with --eval, --resume, --analyse, torchrun")


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
            returns = evaluate_run(args)
            if args.baseline:
                compare_with_baseline(args, returns)
            return 0
        if args.check:
            check_simulation(args)
            return 0
        if args.analyse is not None:
            analyse(args)
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
