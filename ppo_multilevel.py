"""Multilevel PPO: policy optimisation for expensive simulations that exist on several levels.

    python ppo_multilevel.py --env ResSim-v1               # wells of a reservoir, 3 minutes
    python ppo_multilevel.py --env ResSim-v1 --levels 5    # finest grid only: PPO
    python ppo_multilevel.py --env ResSim-v1 --schedule together          # the paper's schedule
    python ppo_multilevel.py --env my_simulation.py:Rod --levels 1 2 3   # yours, see README

How to read this file
    This is `ppo.py` for a simulation that exists on L levels (grids, time steps), coarse to fine.
    GAE, the losses and the network are those of ppo.py. What is new stands in `train`, `rollout`,
    `update` and in the section "levels". Two schedules choose the levels. Masks and recurrent
    policies, of which shared functions speak, are only in ppo.py.
    The machinery starts at the section "speed". `train` opens a `Run`, which logs, evaluates, saves
    and stops. It has `Simulations`: the `Costs` of the levels, which are the run's clock, and a
    `WorkerPool` with one `Player` in each worker process, or one in this process. A player has its
    share of every `Team` of games, a `Policy` that acts for them, and the rows that they fill. A
    `Game` is one simulation on one level. The commands are "start" and "play" for rollouts, and
    "play_episodes" for checks, evaluations, and the measurements of costs and correlations.

The schedule adaptive, the default
    Each iteration is PPO on one level, the one with the largest trust · ρ² / seconds. ρ is the
    correlation of a level's returns with those of the finest level. Trust says whether training on
    the level has helped on the finest one lately. Seconds are those of a row: a step on the level,
    and its share of an update.
    For a first reading take `train` and `Adaptive`, and skip partners, weights and coupling, which
    only the other schedule uses. Without partners all weights are 1, and an update is that of
    ppo.py. A run on a single level needs no choice. It is plain PPO: `Together` without pairs.

The schedule together, the paper's
    In each iteration N actors take many steps, T^1, on the coarsest level and few, T^L, on the
    finest. It is multilevel Monte Carlo in the loss, see `Together`.
    On a level l > 1 each actor has a partner, which plays the same simulation on level l − 1 with
    the same noise. The losses of the two differ little, so that few samples tell by how much. The
    coarsest level's loss plus the differences is the finest level's loss:

    L_a = −min(ratio_t Â_t, clip(ratio_t, 1−ε, 1+ε) Â_t)                         PPO, Eq. (7)
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
    To start levels alike two more methods are used, if they are there: `psi()` returns the
    observation of the state, and `map_from(other)` takes over another level's state. Without them
    levels start from a common seed. A static method `step_batch(envs, actions)` steps many
    simulations at once. It returns arrays of observations, rewards, terminated and truncated.

Notation and shapes
    L levels, T^l steps on level l (--num-steps), N actors (--num-envs), B minibatches of M^l rows
    of level l, S rows in all. D observation entries, A action entries, as in ppo.py.
    `level` is an index from 0. `number`, which is `args.levels[level]`, is what a simulation knows
    the level by: 1, 2, 3 and so on.
    A game is one simulation. An actor has its own game on each level and, with --schedule
    together, a partner on each level but the first: a game one level below. Own game and partner
    are a pair, in which the own game is the fine one.

Papers, and departures from them
    "D&E" is the multilevel PPO of Dixit & ElSheikh (arXiv 2210.08400), with the algorithms of A.
    Dixit's "Implementation of multilevel PPO in Stable Baselines 3". "PPO", Â_t, R_t and ratio_t
    are those of ppo.py. With --coupling step a partner is mapped before each step and takes the
    action of the fine game. By default it is mapped only when an episode starts, and then acts
    itself, with the same noise. PPO's Eq. (9) has no factor ½; this code has it. What Dixit's text
    prints otherwise: Algorithm 3 has L_a without its minus sign and the entropy term as −C_e L_now.
    Algorithm 4 prints N T^l ≤ M^l where ≥ is meant. Algorithm 5 has map_from after the fine step,
    and assigns ã twice.
"""

import argparse
import copy
import csv
import ctypes
import datetime
import functools
import importlib.util
import inspect
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

FLAG = argparse.BooleanOptionalAction  # --x and --no-x


def add_ppo_options(parser):
    """Add the options of PPO."""
    add = parser.add_argument_group("PPO", "Usual ranges stand in brackets.").add_argument
    add("--num-envs", type=int, default=50, help="N, actors (4 to 64)")
    add(
        "--num-steps",
        type=int,
        nargs="+",
        default=[50],
        help="T^l, steps per actor and iteration: one number per level, or one for all levels. "
        "together: the sum of levels is unbiased if all are whole episodes",
    )
    add("--learning-rate", type=float, default=1e-4, help="Adam's step size (1e-5 to 1e-3)")
    add("--anneal-lr", action=FLAG, default=False, help="lower the rate linearly to 0 over the run")
    add("--gamma", type=float, default=0.99, help="γ, discount per step (0.9 to 0.9997)")
    add("--gae-lambda", type=float, default=0.95, help="λ, 0: low variance, 1: little bias (0.95)")
    add("--num-minibatches", type=int, default=10, help="B, minibatches per epoch; divides N · T")
    add("--update-epochs", type=int, default=5, help="K, passes over a rollout (3 to 30)")
    add("--norm-adv", action=FLAG, default=True, help="normalise the advantages of a minibatch")
    add("--clip-coef", type=float, default=0.1, help="ε, clip the ratio at 1 ± ε (0.1 to 0.3)")
    add("--clip-vloss", action=FLAG, default=False, help="clip V's change, too, at ±ε (absolute)")
    add("--ent-coef", type=float, default=1e-3, help="c_e, weight of entropy (0 to 0.01)")
    add("--vf-coef", type=float, default=1.0, help="c_v, weight of the value loss (0.5, 1)")
    add("--max-grad-norm", type=float, default=0.5, help="clip the gradient to this global norm")
    add(
        "--target-kl",
        type=float,
        default=0.05,
        help="stop an update above this KL(π_old, π) (0.01 to 0.05); 0: never",
    )


def add_network_options(parser):
    """Add the options of the networks."""
    add = parser.add_argument_group("network").add_argument
    widths = [150, 100, 80]
    add("--hidden", type=int, nargs="+", default=widths, help="widths of the hidden layers")
    add("--shared-net", action=FLAG, default=True, help="policy and V share the hidden layers")
    add("--init-log-std", type=float, default=0.0, help="initial log σ of a Gaussian (-3 to 0)")
    add("--norm-obs", action=FLAG, default=False, help="observations as (s − μ) / σ, within ±10")
    add("--norm-value", action=FLAG, default=False, help="V's targets as (R − μ) / σ (PopArt)")


def add_own_options(parser):
    """Add the options that only ppo_multilevel.py has."""
    add = parser.add_argument_group("ppo_multilevel.py").add_argument
    add(
        "--env",
        type=env_name,
        default="ResSim-v1",
        help="ResSim-v1 to -v4 (they set --init-log-std -2.9), file.py:make, module:make",
    )
    add("--levels", type=int, nargs="+", default=[], help="levels, coarse to fine; []: the case's")
    add(
        "--schedule",
        choices=RULES,
        help="adaptive: one level at a time, the one that teaches most per second; together: all "
        "levels in each iteration, which sets --learning-rate 3e-5, --update-epochs 10 and 200 "
        "iterations unless they are given; None: adaptive if there are several levels",
    )
    add(
        "--level-costs",
        type=float,
        nargs="+",
        help="seconds of a step on each level, divided by the number of workers, and seconds of an "
        "update with the rows of the coarsest; None: measured",
    )
    add("--check-episodes", type=int, default=16, help="episodes of a check on the finest level")
    add(
        "--failed-reward",
        type=float,
        help="reward of a step that raises an exception or returns NaN, which ends its episode; "
        "None: it ends the run",
    )
    add(
        "--control",
        type=float,
        help="together: β, weight of partners' rows; 1: as in the paper; None: measured",
    )
    add(
        "--coupling",
        choices=("step", "noise"),
        default="noise",
        help="together: a partner takes over the fine state when an episode starts (noise) or in "
        "each step (step: biased)",
    )
    add(
        "--correction",
        choices=("literal", "bounded"),
        default="bounded",
        help="together: literal is Algorithm 4, whose loss is unbounded; bounded: clip by the "
        "signed Â, and fit values to own rows only",
    )


# ------------------------------------------------------------------------------------ train
def train(args, rule=None):
    """Train with these options. Returns the `Run`.

    The `rule` chooses each iteration's levels, see `Adaptive`. If a game fails, the run is saved,
    and GameError is raised.
    """
    # More threads only slow a small network down.
    torch.set_num_threads(1)
    # The weights are drawn from torch's global generator, noise and minibatches from another one.
    seed_generators(args.seed)
    model = make_model(args)
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    rule = rule or RULES[args.schedule](args)

    with Run(args, model, optimizer, generator, rule) as run:
        run.begin()
        while run.goes_on():
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate = args.learning_rate * (1 - run.share_done())
            optimizer.param_groups[0]["lr"] = learning_rate

            # Play: T^l steps on each level of the plan. This is one level if adaptive, all if
            # together. In the latter actors above the coarsest level play in pairs.
            plan = rule.plan()
            own = []
            partners = []
            failures = 0
            for level in plan.levels:
                buffers = rollout(model, run.sims, level, generator)
                failures += sum(int(buffer["failed"].sum()) for buffer in buffers)
                episodes = finished_episodes(buffers[0])  # those on the last level are kept
                # Judge: was an action better than the value function expected?
                own.append(make_batch(buffers[0], model, args))
                partners += [make_batch(buffer, model, args) for buffer in buffers[1:]]
            batch = joined(own, partners)

            # Learn: K epochs of minibatch steps towards the better actions. Several levels have one
            # loss, their telescoping sum.
            row = {"explained_variance": explained_variance(own[0])}  # on the plan's first level
            began = time.perf_counter()
            if args.norm_value:
                normalise_values(model, batch, own[0]["returns"])
            if plan.refit:
                refit_values(model, batch)
            row |= update(model, optimizer, batch, plan, args, generator)

            # Only now update the mean and σ of observations. They are part of the policy, so
            # before the update they would make ratios ≠ 1 at its start.
            if args.norm_obs:
                model.obs_norm.update(torch.cat([rows["obs"] for rows in own]))

            # Count what it cost. The rule may then check the policy, and choose another level.
            run.sims.costs.count_update(len(batch["obs"]), time.perf_counter() - began)
            run.count_iteration(len(batch["obs"]), failures)
            row |= rule.review(run, own, partners, episodes)
            run.end_iteration(row, episodes)
    return run


# ------------------------------------------------------------------------------------ rollout
def rollout(model, sims, level, generator):
    """Take T^l steps with all N actors on a level (D&E, Algorithm 5).

    Returns the buffers, [own] or [own, partners']: tensors (T, N, ...), obs, actions, logprobs,
    values, next_values, rewards, terminated, truncated, next_obs, and what else `make_rows` names.
    """
    args = sims.args
    # An action is drawn by adding noise: argmax(log π + Gumbel noise) is a sample of a categorical
    # distribution (the Gumbel-max trick), and μ + σ z is one of a Gaussian. The noise of all T · N
    # actions is drawn first, in this process, so they do not depend on the number of workers. Both
    # members of a pair have the same.
    noise = model.head.noise(args.num_steps[level] * args.num_envs, generator)
    noise = noise.view(args.num_steps[level], args.num_envs, -1)
    teams = [f"own {level}"]
    if is_paired(args) and level > 0:
        teams.append(f"partners {level}")

    buffers = sims.play(model, teams, noise)
    for buffer in buffers:
        # The last observation is that of the next rollout's first step.
        buffer["obs"] = buffer["obs"][:-1]
        add_values(model, buffer)
    return buffers


@torch.no_grad()
def add_values(model, buffer):
    """Add values V(s_t), next_values V(s_{t+1}) and logprobs log π_old(a_t|s_t) to the buffer.

    Two passes over all steps give them, since no weight has changed while they were played.
    """
    pi, values = model(buffer["obs"])
    buffer["logprobs"] = model.head.log_prob(pi, buffer["actions"])

    # V(s_{t+1}) is of the state that the step led to, not of the next episode's first state.
    _, next_values = model(buffer["next_obs"])
    if model.value_norm is not None:
        values = model.value_norm.restored(values)
        next_values = model.value_norm.restored(next_values)
    buffer["values"] = values
    buffer["next_values"] = next_values


def finished_episodes(buffer):
    """Return the list of (return, length) of the episodes that have ended in a rollout."""
    ended = buffer["terminated"] | buffer["truncated"]
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


def joined(own, partners):
    """Return one batch of all rows, in the order own¹, partners², own², partners³, own³, ..."""
    assert len(partners) == len(own) - 1
    parts = [own[0]]
    for partner_rows, own_rows_above in zip(partners, own[1:]):
        parts += [partner_rows, own_rows_above]
    batch = {}
    for name in own[0]:
        batch[name] = torch.cat([part[name] for part in parts])
    return batch


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


def minibatch_loss(model, mb, args):
    """Return the loss of a minibatch, and a dict of the numbers to log, all scalar tensors.

    Without partners all weights are 1, and this is plain PPO.
    --correction literal is the paper's: a partner's policy loss is +min(r Ã, clip(r) Ã), with the
    ratio r. It goes to −∞ with r if Ã < 0. --correction bounded takes the signed advantage into the
    minimum, −min(−r Ã, −clip(r) Ã). This is bounded from below, and has the same gradient at π_old.
    V is then fitted to own rows only, since −(V − R)² has no minimum.
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
    # PPO, Eq. (9): loss = −L^CLIP + E[c_v ½ (V_θ − R)² − c_e H]
    loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy

    approx_kl, clipfrac = policy_change(logratio[weights > 0], args.clip_coef)
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
# An env's module may have switched gradients off.
@torch.enable_grad()
def update(model, optimizer, batch, plan, args, generator):
    """Take K epochs of minibatch steps, unless the policy moves beyond --target-kl.

    Returns the means of what the minibatches log.
    """
    logged = []
    for _ in range(args.update_epochs):
        for mb in minibatches(batch, plan, args, generator):
            loss, row = minibatch_loss(model, mb, args)
            logged.append({name: averaged(value.detach()) for name, value in row.items()})
            if args.target_kl and logged[-1]["approx_kl"] > args.target_kl:
                return mean_row(logged)
            gradient_step(model, optimizer, loss, args.max_grad_norm)
    return mean_row(logged)


def minibatches(batch, plan, args, generator):
    """Yield the minibatches of an epoch, dicts of (S, ...), with the weight of each row.

    With several ranks each gets its share of every minibatch, normalised by the whole minibatch.
    """
    num_steps = [args.num_steps[level] for level in plan.levels]
    sizes = (num_steps, args.num_envs, args.num_minibatches)
    weights = signed_weights(*sizes, plan.controls)
    num_first_rows = args.num_envs * num_steps[0] // args.num_minibatches
    for rows in minibatch_rows(*sizes, generator):
        mb = {name: column[rows] for name, column in batch.items()}
        if args.norm_adv:
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
    for i, T in enumerate(num_steps):
        size = num_envs * T
        shuffled = torch.randperm(size, generator=generator).view(num_minibatches, -1)
        if i > 0:
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
    for i, size in enumerate(sizes):
        own = total * math.prod(controls[i:]) / size
        if i > 0:
            weights.append(torch.full((size,), -own * controls[i - 1]))
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
    """Return the means of a list of dicts of scalar tensors, as a dict of numbers.

    A row may lack names of the first one.
    """
    means = {}
    for name in rows[0]:
        means[name] = float(torch.stack([row[name] for row in rows if name in row]).mean())
    return means


# ------------------------------------------------------------------------------------ levels
# Rules choose which levels an iteration plays. To add one write a class and name it in RULES.
#
#   begin(run)      is called once, in a new run, and returns what is logged at first.
#   plan()          returns the Plan of the next iteration.
#   review(run, own, partners, episodes)    is called after it, with the batches of the plan's
#                   levels, and the (return, length) of episodes on the last of them. It returns
#                   what is logged. If this has the key "level" returns are averaged within a level.
#   best            is the state of the model that is the run's result, or None for the last one.
#
# A rule uses `run.seconds()`, `run.share_done()`, `run.sims.costs` and `run.sims.play_episodes`.
# Checkpoints keep its attributes: tensors and plain values. All ranks must decide alike.


class Plan(NamedTuple):
    """What an iteration does."""

    levels: list  # indices: one level, or all if they are played in pairs
    controls: list = []  # control weight β_l of the partners, for each level but the first
    refit: bool = False  # whether to fit the values' last layer first, see `refit_values`


class Together:
    """--schedule together, the paper's: all levels in every iteration.

    The sum of the levels is unbiased for any β if all T^l are whole episodes. Otherwise partners
    see other parts of the episodes than the level below does.

    Without --control β_l = Cov(Â^l, Ã^{l−1}) / Var(Ã^{l−1}), clipped to [0, 1], makes the variance
    of the difference Â^l − β_l Ã^{l−1} least.
    """

    best = None  # the run's result is its last parameters

    def __init__(self, args):
        self.args = args
        pairs = len(args.levels) - 1
        control = 1.0 if args.control is None else args.control
        self.controls = [control for _ in range(pairs)]  # 1 until they are measured
        self.moments = None  # running means of each pair's Cov(Â, Ã) and Var(Ã), (L − 1, 2)

    def begin(self, run):
        """Before the first iteration nothing is checked."""
        return {}

    def plan(self):
        """Return what the next iteration does."""
        levels = list(range(len(self.args.levels)))
        return Plan(levels, self.controls)

    def review(self, run, own, partners, episodes):
        """Measure the control weights of the next iteration, unless they are given."""
        if self.args.control is not None or not partners:
            return {}
        moments = []
        for fine, partner in zip(own[1:], partners):
            advantages = torch.stack([fine["advantages"], partner["advantages"]])
            moments.append(torch.cov(advantages)[1])
        moments = torch.stack(moments)

        # Later iterations move the means by a tenth.
        self.moments = moments if self.moments is None else self.moments.lerp(moments, 0.1)
        covariance, variance = self.moments.unbind(dim=1)
        self.controls = (covariance / variance).nan_to_num().clamp(0, 1).tolist()
        names = [f"levels/control_{number}" for number in self.args.levels[1:]]
        return dict(zip(names, self.controls))


class Adaptive:
    """--schedule adaptive: one level at a time, the one that teaches most per second.

    ρ of a level is the correlation of its returns with the finest level's, when both play from the
    same starts with the same noise. Where a lucky action pays on both levels, ρ is near 1, and the
    gradients of the two point the same way: ρ is the cosine between them, to first order in the
    noise of the actions. A step along a gradient with that cosine is worth about ρ² as many samples
    as one of the finest level, as long as their noise is larger than the level's bias. So the rule
    trains on the level with the largest trust · ρ² / seconds. It measures ρ now and then, and takes
    it for 1 before. The trust tells what ρ cannot: whether the level still has something to teach.
    This is a heuristic, and can fail: on ResSim-v4 with faults the level with the lowest ρ teaches
    most (tests/benchmarks/README.md).

    A level keeps the run for a window of some iterations. Then a *check* plays episodes on the
    finest level with the policy's mode, always from the same starts. If the best check has risen by
    more than one standard error, the level's trust becomes 1. That of all others doubles, up to 1,
    as the policy has changed, and what they failed at is past. Without a gain the level's trust is
    halved. If, besides, the latest check is below the best one, training goes back to the best
    parameters, unless the level's own returns still rise (`progress_is_hidden`). The best
    parameters by the checks are the run's result.

    While no window has gained, a failure says that ρ may be far from 1, so it is measured then, if
    the run pays for that. Only if it is low, training goes back to the best parameters.

    Every check has the same starts, so two checks are compared start by start. All times here are
    those of the run's clock, see `Costs`.
    """

    WINDOW_ITERATIONS = 8  # a window has at least this many iterations
    WINDOW_CHECKS = 5  # it takes at least as long as this many checks
    WINDOW_SHARE = 0.15  # it takes at least this share of the time so far
    CHECK_AFTER = 6  # a check is due once training has taken as long as this many checks
    ERRORS = 1.0  # a gain is more than this many standard errors of the difference of checks
    MEASURE_SHARE = 0.05  # measurements of ρ may take this share of the time
    LEAST_RHO = 0.03  # a smaller ρ, or one below 0, counts as this
    HIGH_RHO = 0.9  # from here on what is good on a level is good on the finest one
    FAIR_RHO = 0.7  # from here on a step is worth half of one of the finest level or more (ρ²)

    def __init__(self, args):
        self.args = args
        L = len(args.levels)
        self.level = None  # the level index that is trained on
        self.trust = torch.ones(L, dtype=torch.float64)
        self.rho = torch.ones(L, dtype=torch.float64)  # 1 until it is measured
        self.measured_at = 0.0  # when ρ was measured last, in seconds
        self.measurements = 0  # how often ρ was measured
        self.has_gained = False  # whether any window has gained
        self.refit = False  # whether to refit V, see `refit_values`
        self.best = None  # the model's state at the best check
        self.best_optimizer = None  # the optimizer's state there
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
        return Plan([self.level], refit=self.refit)

    def review(self, run, own, partners, episodes):
        """After an iteration: check if it is due; at a window's end judge and choose the level."""
        row = self.logged()
        if episodes:
            self.own_returns.append(float(np.mean(episodes, axis=0)[0]))
        # With --norm-obs the first iteration sets the observations' mean and σ. This changes what V
        # sees, so the next iteration refits it.
        self.refit = self.args.norm_obs and run.iteration == 1

        window_is_over = run.seconds() >= self.window_end
        run_is_over = run.share_done() >= 1
        if window_is_over or run_is_over or run.seconds() >= self.check_due:
            row["check_return"] = self.check(run)
        if window_is_over and not run_is_over:
            self.judge(run)
            self.choose_level(run)
        return row

    def logged(self):
        """Return the level, and what is known of all levels, for the log."""
        row = {"level": self.args.levels[self.level]}
        for number, rho, trust in zip(self.args.levels, self.rho, self.trust):
            if self.measurements:
                row[f"levels/rho_{number}"] = float(rho)
            row[f"levels/trust_{number}"] = float(trust)
        return row

    def check(self, run):
        """Return the mean return of a check; keep the parameters if they are the best so far."""
        began = run.seconds()
        seeds = CHECK_SEED + np.arange(self.args.check_episodes)
        returns, _ = run.sims.play_episodes(run.model, ["check"], seeds)
        self.latest_returns = torch.from_numpy(returns[0])
        self.check_seconds = run.seconds() - began
        self.check_due = run.seconds() + self.CHECK_AFTER * self.check_seconds
        if self.best is None or self.latest_returns.mean() > self.best_returns.mean():
            self.best = copy.deepcopy(run.model.state_dict())
            self.best_optimizer = copy.deepcopy(run.optimizer.state_dict())
            self.best_returns = self.latest_returns
        return float(self.latest_returns.mean())

    def judge(self, run):
        """Trust the level by what the window has gained on the finest level."""
        gains = self.best_returns - self.returns_before  # start by start
        error = gains.std() / len(gains) ** 0.5
        if gains.mean() > self.ERRORS * error:
            self.trust = (2 * self.trust).clamp(max=1)
            self.trust[self.level] = 1
            self.has_gained = True
            return

        self.trust[self.level] /= 2
        # Before any window has gained, going back loses nearly all training. So it is done only if
        # a low ρ shows that the level misleads.
        may_go_back = self.has_gained
        if self.early_measurement_is_due(run):
            self.measure(run)
            may_go_back = self.rho[self.level] < self.FAIR_RHO
        is_worse = self.latest_returns.mean() < self.best_returns.mean()
        if may_go_back and is_worse and not self.progress_is_hidden():
            self.go_back(run)

    def progress_is_hidden(self):
        """Whether returns on this level still rise in training, though checks do not.

        That counts only where it is good for the finest level as well: where ρ is high.

        The return of the policy's mode can stand still, or fall, while that of its samples rises.
        The slope of a least-squares line through the window's own returns must be over two errors.
        """
        y = self.own_returns
        if len(y) < 4 or self.rho[self.level] < self.HIGH_RHO:
            return False
        (slope, _), covariance = np.polyfit(range(len(y)), y, 1, cov=True)
        return bool(slope > 2 * covariance[0, 0] ** 0.5)

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
        seconds = torch.tensor([run.sims.costs.row(level) for level in range(len(self.rho))])
        worth = self.trust * self.rho**2 / seconds
        # The finest of equals is chosen.
        chosen = int((worth == worth.max()).nonzero()[-1])
        if chosen != self.level:
            self.tell(run, chosen)
            self.level = chosen
            self.refit = True

        # A window begins.
        self.returns_before = self.best_returns
        self.own_returns = []
        rows = self.args.num_envs * self.args.num_steps[chosen]
        iterations = self.WINDOW_ITERATIONS * rows * run.sims.costs.row(chosen)
        checks = self.WINDOW_CHECKS * self.check_seconds
        share = self.WINDOW_SHARE * run.seconds()
        self.window_end = run.seconds() + max(iterations, checks, share)

    def tell(self, run, level):
        """Print which level is trained on from now on, and why."""
        rho = f"{self.rho[level]:.2f}" if self.measurements else "not yet measured"
        line = f"training on level {self.args.levels[level]}: correlation with the finest {rho}, "
        line += f"trust {self.trust[level]:.2g}; best check {self.best_returns.mean():.4f}"
        if not self.args.quiet:
            report(line)

    def measurement_is_due(self, run):
        """Whether the time since ρ was measured pays for measuring it again."""
        affordable = self.MEASURE_SHARE * (run.seconds() - self.measured_at)
        is_time = run.seconds() >= 1.5 * self.measured_at
        return is_time and self.measurement_seconds(run) <= affordable

    def early_measurement_is_due(self, run):
        """Whether ρ is unknown, no window has gained, and the run pays for measuring ρ now.

        The run so far must have been as long as that takes. Of the whole run it may take a share.
        """
        if self.has_gained or self.measurements:
            return False
        whole_run = run.seconds() / run.share_done()
        affordable = min(run.seconds(), self.MEASURE_SHARE * whole_run)
        return self.measurement_seconds(run) <= affordable

    def measurement_seconds(self, run):
        """Return how long it takes to measure ρ."""
        costs = [run.sims.costs.step(level) for level in range(len(self.rho))]
        episodes = num_rounds(self.args) * self.args.num_envs
        on_the_finest = episodes / self.args.check_episodes * self.check_seconds
        return on_the_finest * sum(costs) / costs[-1]

    def measure(self, run):
        """Measure ρ of all levels. Afterwards the games of training start anew."""
        self.measurements += 1
        returns, starts = play_alike(run.model, run.sims, self.measurements)
        run.start_games()
        self.measured_at = run.seconds()
        rho = correlations(returns, starts)
        # Where nothing that the policy does changes the finest level's returns, ρ tells nothing.
        returns_vary = rho[-1] > 0
        if returns_vary:
            self.rho = torch.from_numpy(rho).clamp(self.LEAST_RHO, 1)


RULES = {"adaptive": Adaptive, "together": Together}


# To measure ρ, each level plays about EPISODES episodes, REPEATS from each start.
EPISODES = 64
REPEATS = 8
MEASURE_SEED = 30_000  # the seeds of measurements are not those of training


def num_rounds(args):
    """Return how many episodes each actor plays on each level to measure ρ."""
    return max(1, round(EPISODES / args.num_envs))


def play_alike(model, sims, measurement):
    """Play episodes on all levels from the same starts and with the same noise of the actions.

    Returns the returns (L, E), and the number of each episode's start (E,). Each `measurement`, a
    number, has its own starts and noise. It plays the games of training: start them anew then.
    """
    args = sims.args
    rounds = num_rounds(args)
    starts = np.arange(rounds * args.num_envs) // REPEATS  # (E,)
    seeds = draw_seeds(starts[-1] + 1, args.seed, MEASURE_SEED, measurement)[starts]
    noise_seeds = draw_seeds(len(starts), args.seed, MEASURE_SEED, measurement, 1)
    teams = [f"own {level}" for level in range(len(args.levels))]

    returns = []
    agreement = 1.0
    for episodes in np.split(np.arange(len(starts)), rounds):
        played, shown = sims.play_episodes(model, teams, seeds[episodes], noise_seeds[episodes])
        returns.append(played)
        agreement = min(agreement, start_agreement(shown).min())
    if agreement <= 0.5:
        report("levels start unlike from the same seed, so correlations mean little")
    return np.concatenate(returns, axis=1), starts


def start_agreement(shown):
    """Return the correlations (L,) of first observations (L, N, D) with the finest level's.

    It is 1 if those of the finest level are all the same. Otherwise it is near 0 for a level that
    starts unlike. For one that starts alike it is mostly above 0.9, but lower where coarse grids
    hide much, as on ResSim-v3.
    """
    if np.allclose(shown[-1], shown[-1, 0], rtol=1e-4, atol=1e-6):
        return np.ones(len(shown))
    centred = shown - shown.mean(axis=1, keepdims=True, dtype=float)
    products = (centred * centred[-1]).sum(axis=(1, 2))
    scale = np.sqrt((centred**2).sum(axis=(1, 2)) * products[-1])
    return products / np.where(scale > 0, scale, 1)


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
    is in closed form, to R_t as recorded. R_t has rewards in it, so it is less wrong than V. Â_t
    becomes R_t − V(s_t). It is a ridge regression, which keeps the weights small. With large ones
    V's gradient would dominate the layers that V shares with the policy.
    """
    features = model.critic(model.obs_norm(batch["obs"]))
    features = nn.functional.pad(features, (0, 1), value=1.0).double()  # (M, F + 1)
    returns = batch["returns"].double()  # (M,)
    ridge = 1e-3 * len(returns) * torch.eye(features.shape[1]).to(features)
    solution = torch.linalg.solve(features.T @ features + ridge, features.T @ returns)  # (F + 1,)
    model.value.weight[0] = solution[:-1]
    model.value.bias[0] = solution[-1]

    batch["values"] = model(batch["obs"])[1]
    scale = 1 if model.value_norm is None else model.value_norm.std
    batch["advantages"] = scale * (batch["returns"] - batch["values"])


# ------------------------------------------------------------------------------------ model
def make_model(args):
    """Return the Model for the env's spaces, its weights drawn from torch's global generator."""
    with closing_env(make_env(args, args.levels[-1])) as env:
        model = Model(env.observation_space.shape[0], env.action_space, args)
    # An env's library may have set another default type.
    model = model.float()
    # float32 rounds large numbers, such as Unix times, too coarsely.
    model.obs_norm.double()
    return model


class Model(nn.Module):
    """Policy and value function: hidden layers and a head for each."""

    inputs = ["obs"]  # what `forward` takes

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

    def forward(self, obs):
        """Return the policy's parameters pi (..., ·) and the values (...) of observations (..., D).

        pi holds the log-probabilities of a Categorical head or the means of a Gaussian one. With
        --norm-value the values are normalised.
        """
        x = self.obs_norm(obs)
        h = self.actor(x)
        h_value = h if self.critic is self.actor else self.critic(x)
        return self.head(h), self.value(h_value).squeeze(-1)


class Policy:
    """The policy as games see it: arrays of observations in, arrays of actions out.

    It is made of the model's own layers, which `as_function` turns into functions of arrays. Their
    weights are always the model's current ones.
    """

    def __init__(self, model):
        self.head = model.head
        self.obs_norm = as_function(model.obs_norm)
        self.actor = as_function(model.actor)
        self.output = as_function(model.head.output)

    def act(self, obs, noise=None):
        """Return actions (M, ...) for observations (M, D).

        The actions are samples made from noise (M, ·), or the policy's mode without it.
        """
        scores = self.output(self.actor(self.obs_norm(obs)))
        return self.head.sample(scores, noise)


# ------------------------------------------------------------------------ heads and normalisers
def hidden_layers(width, args):
    """Return tanh layers of widths `args.hidden` over an input of `width` entries."""
    layers = []
    for features in args.hidden:
        layers += [layer_init(nn.Linear(width, features)), nn.Tanh()]
        width = features
    return nn.Sequential(*layers)


def layer_init(layer, gain=2**0.5):
    """Initialise a linear or convolutional layer: orthogonal weight times `gain`, zero bias.

    √2 keeps the scale of features through layers with ReLU, and is usual with tanh, too. A policy's
    last layer has 0.01, so that its first actions are nearly uniform, or have means near 0.
    """
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def make_head(action_space, args):
    """Return the policy's last layer for an action space.

    `head.output` is a linear layer. From what it returns `head.forward` makes the distribution's
    parameters pi, and `head.sample` an action. This takes random numbers that `head.noise` draws
    beforehand. Who changes the distribution changes both.
    """
    if isinstance(action_space, gym.spaces.Discrete):
        return Categorical(args.hidden[-1], int(action_space.n))
    return Gaussian(args.hidden[-1], action_space.shape, args)


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


class Gaussian(nn.Module):
    """Policy head for Box: the mean from the features, and one free log σ per action entry."""

    def __init__(self, features, shape, args):
        super().__init__()
        self.shape = shape
        self.n = math.prod(shape)
        self.output = layer_init(nn.Linear(features, self.n), gain=0.01)
        self.log_std = nn.Parameter(torch.full((self.n,), args.init_log_std))

    def forward(self, h):
        """Return the means (M, A) for features (M, F)."""
        return self.output(h)

    @torch.no_grad()
    def noise(self, batch, generator):
        """Return σ z with standard normal noise z, (batch, A)."""
        noise = torch.randn(batch, self.n, generator=generator, dtype=torch.float32)
        return self.log_std.exp() * noise

    def sample(self, mean, noise=None):
        """Return actions (M, ...) for means (M, A): μ + σ z, or the mode μ. All are arrays."""
        actions = mean if noise is None else mean + noise
        return actions.reshape(len(mean), *self.shape)

    def log_prob(self, mean, action):
        """Return log π(a|s) = −½ |z|² − Σ log σ − (A/2) log 2π with z = (a − μ) / σ, (M,)."""
        z = (action.reshape(mean.shape) - mean) * torch.exp(-self.log_std)
        constant = self.log_std.sum() + 0.5 * self.n * math.log(2 * math.pi)
        return -0.5 * z.square().sum(dim=-1) - constant

    def entropy(self, mean, logprobs=None):
        """Return H = Σ log σ + (A/2) log 2πe, (M,). `logprobs` is not needed."""
        constant = 0.5 * self.n * math.log(2 * math.pi * math.e)
        return (self.log_std.sum() + constant).expand(mean.shape[:-1])


class RunningNorm(nn.Module):
    """(x − μ) / σ with the mean and standard deviation of all rows seen; saved with the model.

    An entry that varies by little more than rounding of its mean has σ = 1: it is only shifted.
    """

    def __init__(self, shape=(), limit=math.inf):
        super().__init__()
        self.limit = limit
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("std", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))

    def update(self, rows):
        """Add rows (M, ...): the moments of two sets are combined as in Chan et al. 1983."""
        self.count += len(rows)
        share = len(rows) / self.count
        delta = rows.mean(dim=0) - self.mean
        within = self.var * (1 - share) + rows.var(dim=0, correction=0) * share
        between = delta.square() * share * (1 - share)
        self.var.copy_(within + between)
        self.mean += delta * share
        std = self.var.sqrt()
        rounding = torch.finfo(std.dtype).eps * self.mean.abs()
        self.std.copy_(torch.where(std > 10 * rounding, std, 1.0))

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
    old_std = norm.std.clone()
    norm.update(returns.flatten())

    layer.weight.mul_(old_std / norm.std)
    layer.bias.copy_((old_std * layer.bias + old_mean - norm.mean) / norm.std)
    batch["values"] = norm(batch["values"])
    batch["returns"] = norm(batch["returns"])


# ------------------------------------------------------------------------------------ speed
def as_function(module):
    """Return a module as a function of arrays.

    Layers of the usual kinds are computed in NumPy. Torch takes longer to start an operation than
    to carry it out where there are few rows. Any other module is called as it is.
    """
    if type(module) is nn.Sequential:
        functions = [as_function(layer) for layer in module]

        def composed(x):
            for function in functions:
                x = function(x)
            return x

        return composed
    if type(module) is nn.Linear:
        # These are views of the weights, so they see every change.
        weight = module.weight.detach().numpy().T
        bias = module.bias.detach().numpy()
        return lambda x: x @ weight + bias
    if type(module) is nn.Tanh:
        return np.tanh
    if type(module) is nn.Identity:
        return lambda x: x
    if type(module) is RunningNorm:
        mean = module.mean.numpy()
        std = module.std.numpy()

        def normalise(x):
            x = (x - mean) / std
            return x.clip(-module.limit, module.limit).astype(np.float32)

        return normalise

    @torch.no_grad()
    def by_torch(x):
        return module(torch.from_numpy(x)).numpy()

    return by_torch


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
def make_env(args, number, **options):
    """Return the simulation --env on the level of a number; its maker gets the `options` it knows.

    Raises ValueError if it has spaces that the model does not know, and ImportError if its code
    ends the program.
    """
    try:
        make = load_make(args.env)
        parameters = inspect.signature(make).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if not takes_all:
            options = {name: value for name, value in options.items() if name in parameters}
        env = make(level=number, **options)
    except SystemExit as error:
        raise ImportError(f"{args.env} ended the program as it was loaded, code {error}") from None

    space = env.observation_space
    actions = env.action_space
    sees_vectors = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
    takes_floats = isinstance(actions, gym.spaces.Box) and actions.dtype.kind == "f"
    if not sees_vectors or not (takes_floats or isinstance(actions, gym.spaces.Discrete)):
        raise ValueError(f"not supported: spaces {space}, {actions}")
    return env


def load_make(name):
    """Return the function that makes the simulation `name`: a case, file.py:make or module:make."""
    if name in CASES:
        return functools.partial(ResSim, name)
    if ":" not in name:
        raise ValueError(f"no env '{name}'; known: {', '.join(CASES)}, file.py:make, module:make")
    module, _, function = name.rpartition(":")
    loaded = load_file(module) if module.endswith(".py") else importlib.import_module(module)
    return getattr(loaded, function)


# All games share one module: its data is there once, and its classes are the same.
@functools.cache
def load_file(path):
    """Return the module in a file."""
    # Modules that the file imports lie there.
    sys.path.append(os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(f"simulation_{Path(path).stem}", path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def to_env(actions, space):
    """Return actions (N, ...) as envs take them: clipped to a Box's bounds, counted from `start`.

    The policy's log π is of the actions before clipping.
    """
    if isinstance(space, gym.spaces.Box):
        actions = actions.clip(space.low, space.high)
    else:
        actions = actions + getattr(space, "start", 0)
    return actions.astype(space.dtype, copy=False)


def as_array(obs, shape):
    """Return an observation as an array of that shape.

    Raises TypeError if it has no numbers, and ValueError if they do not fit the shape.
    """
    # Text would be converted, and an observation of another shape would be stretched.
    obs = np.asarray(obs)
    if obs.dtype.kind not in "biuf":
        raise TypeError(f"an observation is of type {obs.dtype}, which is no number")
    return obs.reshape(shape)


def steps_in_batches(env):
    """Whether the env's class has a step_batch. A subclass that overrides `step` alone has not."""
    for owner in type(env).mro():  # the class, then those that it inherits from
        if "step_batch" in vars(owner):
            return True
        if "step" in vars(owner):
            return False
    return False


@contextmanager
def closing_env(env):
    """Lend an env for a short look, and close it."""
    try:
        yield env
    finally:
        close_env(env, env)


def close_env(env, place):
    """Close an env. An error in this is reported, and does not end the run."""
    try:
        env.close()
    except Exception as error:
        report(f"{place} failed in close: {error}")


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
        if "unpack" in str(error):
            line += (
                "; reset must return (obs, info), step (obs, reward, terminated, truncated, info)"
            )
        if "daemonic" in str(error):
            line += "; an env with processes of its own needs --num-workers 0"
        raise GameError(f"{line}\n{traceback.format_exc()}") from None


# float32 must be able to hold squares of numbers, and sums of squares.
LARGEST = 1e15


class Game:
    """One simulation on one level that starts its next episode by itself.

    It writes column n of its team's rows. Row t has what the policy saw and did at step t, and what
    came of it. What the policy sees next, the same episode or the start of another one, is in row
    t + 1.
    """

    def __init__(self, args, number, rows, n, options):
        self.name = f"{Path(args.env).name} level {number}"
        self.failed_reward = args.failed_reward
        self.rows = rows
        self.n = n
        self.env = make_env(args, number, **options)
        self.shape = self.env.observation_space.shape
        self.seed = None  # the seed of the last start
        self.episode = 0  # how many have begun since then
        self.episode_length = 0
        self.maps = hasattr(self.env.unwrapped, "map_from")  # whether it takes over other states

    def start(self, seed, t):
        """Start the first episode of a seed in row t."""
        self.seed = seed
        self.episode = 0
        self.first_return = None  # the return of the first one, when it has ended
        self.reset(t, seed)

    def reset(self, t, seed=None):
        """Start an episode in row t: the next one, or the first one of a seed."""
        self.episode += 1
        self.episode_return = 0.0
        self.episode_length = 0
        with AtWork(self, "reset"):
            obs, _ = self.env.reset(seed=seed)
            self.rows["obs"][t, self.n] = self.vector(obs)

    def follow(self, fine, t):
        """Take over the state of a finer game, and show it in row t (D&E, Algorithm 5, line 18)."""
        with AtWork(self, "map_from"):
            self.env.unwrapped.map_from(fine.env.unwrapped)
            self.rows["obs"][t, self.n] = self.vector(self.env.unwrapped.psi())

    def start_with(self, fine, t):
        """Start an episode in row t together with a finer game, which has just started one."""
        if not self.maps:
            # A common seed starts both.
            seed = int(draw_seeds(1, fine.seed, fine.episode)[0])
            fine.reset(t, seed)
            self.reset(t, seed)
            return
        # If its own episode has just ended it was reset already.
        if self.episode_length > 0:
            self.reset(t)
        self.follow(fine, t)

    def step(self, t, action):
        """Take an action in row t. With --failed-reward a failure ends the episode, not the run."""
        try:
            with AtWork(self, "step"):
                obs, reward, terminated, truncated, _ = self.env.step(action)
                self.record(t, obs, reward, terminated, truncated)
        except GameError as error:
            if self.failed_reward is None:
                raise
            report(str(error).partition("\n")[0])
            obs = self.rows["obs"][t, self.n]
            self.record(t, obs, self.failed_reward, terminated=True, truncated=False, failed=True)
        self.go_on(t)

    def record(self, t, obs, reward, terminated, truncated, *, failed=False):
        """Write what came of the step in row t. The types are checked by converting them."""
        obs = self.vector(obs)
        reward = float(reward)
        terminated = bool(terminated)
        truncated = bool(truncated) and not terminated
        # NaN < LARGEST is False, so NaN is wrong, too.
        if not abs(reward) < LARGEST:
            raise FloatingPointError(f"the reward is {reward}")

        self.episode_return += reward
        self.episode_length += 1
        rows = self.rows
        n = self.n
        rows["next_obs"][t, n] = obs
        rows["rewards"][t, n] = reward
        rows["terminated"][t, n] = terminated
        rows["truncated"][t, n] = truncated
        rows["failed"][t, n] = failed

    def go_on(self, t):
        """Show in row t + 1 what follows on row t: the same episode, or the next one."""
        rows = self.rows
        n = self.n
        if not (rows["terminated"][t, n] or rows["truncated"][t, n]):
            rows["obs"][t + 1, n] = rows["next_obs"][t, n]
            return
        rows["episode_return"][t, n] = self.episode_return
        rows["episode_length"][t, n] = self.episode_length
        if self.first_return is None:
            self.first_return = self.episode_return
        self.reset(t + 1)

    def vector(self, obs):
        """Return an observation in its space's shape. Raises FloatingPointError for NaN in it."""
        obs = as_array(obs, self.shape).astype(self.rows["obs"].dtype)
        # The square must be finite, too: it is used in norms.
        if not math.isfinite(obs @ obs):
            raise FloatingPointError("an observation has NaN, infinity, or too large numbers")
        return obs

    def place(self):
        """Return where the game is, as text: its seed, the episode since then, the steps in it."""
        where = f"seed {self.seed}, episode {self.episode}, after {self.episode_length} steps"
        return f"{self.name} ({where})"


class Team(NamedTuple):
    """Games that are played together. Each process has its share of them."""

    level: int  # the index of the level that they simulate
    size: int  # how many there are
    num_steps: int  # how many steps their rows hold
    options: dict = {}  # what `make_env` gets


def make_teams(args):
    """Return {name: Team} of all games: those of training, of checks and of evaluations.

    "own l" are the actors' games of level index l. With --schedule together there are "partners l"
    for l > 0, which play one level below.
    """
    teams = {}
    finest = len(args.levels) - 1
    trains = not args.eval and not args.analyse
    if trains or args.analyse:
        for level, num_steps in enumerate(args.num_steps):
            teams[f"own {level}"] = Team(level, args.num_envs, num_steps)
            if is_paired(args) and level > 0:
                teams[f"partners {level}"] = Team(level - 1, args.num_envs, num_steps)
    if trains and args.schedule != "together":
        teams["check"] = Team(finest, args.check_episodes, 1, {"validation": True})
    if not args.analyse and (args.eval or args.eval_every):
        teams["evaluation"] = Team(finest, args.eval_episodes, 1, {"evaluation": True})
    return teams


def is_paired(args):
    """Whether actors have partners: several levels are played together."""
    return len(args.levels) > 1 and args.schedule == "together"


def make_rows(args, model, num_steps, num_games):
    """Return {name: array} for a rollout of some games: (T, N, ...), and T + 1 for observations.

    To record another number, name it here and write it in `Game.record`: it is in the buffer then.
    """
    T = num_steps
    is_discrete = isinstance(model.action_space, gym.spaces.Discrete)
    obs_type = np.float64 if args.norm_obs else np.float32
    action_type = np.int64 if is_discrete else np.float32

    def zeros(count, shape=(), dtype=np.float32):
        return np.zeros((count, num_games, *shape), dtype)

    # Return and length stand where an episode has ended.
    return {
        "obs": zeros(T + 1, (model.obs_dim,), obs_type),
        "actions": zeros(T, model.action_space.shape, action_type),
        "next_obs": zeros(T, (model.obs_dim,), obs_type),
        "rewards": zeros(T),
        "terminated": zeros(T, (), bool),
        "truncated": zeros(T, (), bool),
        "failed": zeros(T, (), bool),
        "episode_return": zeros(T, (), np.float64),
        "episode_length": zeros(T, (), np.int64),
    }


class Player:
    """One process: its share of the games of all teams, their rows, and the model that plays."""

    def __init__(self, args, model, index=0, count=1):
        keep_freed_memory()
        self.policy = Policy(model)
        self.head = model.head
        self.action_space = model.action_space
        self.maps_each_step = args.coupling == "step"
        self.in_batches = args.failed_reward is None  # whether to use the env's step_batch
        self.index = index  # this process's number
        self.count = count  # the number of processes
        self.rows = {}
        self.games = {}
        for name, team in make_teams(args).items():
            num_games = len(self.share(range(team.size)))
            rows = make_rows(args, model, team.num_steps, num_games)
            number = args.levels[team.level]
            games = [Game(args, number, rows, n, team.options) for n in range(num_games)]
            self.rows[name] = rows
            self.games[name] = games

    def share(self, rows, axis=0):
        """Return this process's share of what is there for all games or actors."""
        return np.array_split(rows, self.count, axis)[self.index]

    def start(self, seeds, leader, followers=()):
        """Start a team's games from seeds (N,), in the last row, which a rollout moves to row 0.

        Games of other teams start from the same seeds and, if they can, where the leader's are.
        """
        for name in (leader, *followers):
            for game, fine, seed in zip(self.games[name], self.games[leader], self.share(seeds)):
                game.start(int(seed), -1)
                if game is not fine and game.maps:
                    game.follow(fine, -1)

    def play(self, teams, noise):
        """Act, step, record, T times, with noise (T, N, ·): [own] or [own, partners].

        Returns the list of the teams' rows, and that of their seconds.
        """
        seconds = [0.0 for _ in teams]
        for name in teams:
            self.carry(name, -1)
        for t, noise_of_step in enumerate(self.share(noise, axis=1)):
            for i, name in enumerate(teams):
                began = time.perf_counter()
                if i > 0 and self.maps_each_step:
                    # The partners take the fine games' actions.
                    self.step_games(name, t, self.rows[teams[0]]["actions"][t])
                else:
                    self.take_step(name, t, noise_of_step)
                seconds[i] += time.perf_counter() - began
            if len(teams) > 1:
                self.follow_own(*teams, t)
        return [self.rows[name] for name in teams], seconds

    def carry(self, name, t):
        """Go on in row 0 with what the policy sees in row t."""
        self.rows[name]["obs"][0] = self.rows[name]["obs"][t]

    def take_step(self, name, t, noise=None, playing=None):
        """Act in row t of a team, and step its games, or only those that are `playing`.

        Without noise the policy's mode acts.
        """
        actions = self.policy.act(self.rows[name]["obs"][t], noise)
        self.step_games(name, t, actions, playing)

    def step_games(self, name, t, actions, playing=None):
        """Take actions (N, ...) in row t, in all games at once if their env can."""
        self.rows[name]["actions"][t] = actions
        games = self.games[name] if playing is None else playing
        envs = [game.env for game in games]
        actions = to_env(actions, self.action_space)[[game.n for game in games]]
        if not (self.in_batches and steps_in_batches(envs[0])):
            for game, action in zip(games, actions):
                game.step(t, action)
            return
        with AtWork(games[0], "step_batch"):
            results = list(zip(*envs[0].step_batch(envs, actions), strict=True))
        for game, result in zip(games, results, strict=True):
            with AtWork(game, "step_batch"):
                game.record(t, *result)
            game.go_on(t)

    def follow_own(self, own, partners, t):
        """Where a fine episode has ended its partner's ends with it, and a new pair starts.

        With --coupling step partners take over the fine state after every step.
        """
        ended = self.rows[own]["terminated"][t] | self.rows[own]["truncated"][t]
        terminated = self.rows[partners]["terminated"][t]
        self.rows[partners]["truncated"][t] |= ended & ~terminated
        for fine, partner, is_new in zip(self.games[own], self.games[partners], ended):
            if is_new:
                partner.start_with(fine, t + 1)
            elif self.maps_each_step:
                partner.follow(fine, t + 1)

    def play_episodes(self, teams, seeds, noise_seeds=None):
        """Play an episode of actors on each team, from the same starts and with the same noise.

        Where they can, games start where those of the last team do. There may be fewer seeds than
        actors. Without noise seeds the policy's mode acts.

        Returns returns (K, n) and first observations (K, n, D) of K teams, their steps and seconds.
        """
        num_games = len(self.share(seeds))
        *others, finest = teams
        self.start(seeds, finest, others)
        returns = []
        shown = []
        steps = []
        seconds = []
        for name in teams:
            self.carry(name, -1)
            shown.append(self.rows[name]["obs"][0, :num_games].copy())
            began = time.perf_counter()
            games = self.games[name][:num_games]
            steps.append(self.finish_episodes(name, games, noise_seeds))
            seconds.append(time.perf_counter() - began)
            returns.append([game.first_return for game in games])
        return np.array(returns, float), np.array(shown), steps, seconds

    def finish_episodes(self, name, games, noise_seeds):
        """Play until some games of a team have finished an episode. Returns the number of steps.

        Raises GameError if an episode takes more than MOST_STEPS steps.
        """
        noise = None
        generators = []
        if noise_seeds is not None:
            seeds = self.share(noise_seeds).tolist()
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        steps = 0
        for _ in range(MOST_STEPS):
            playing = [game for game in games if game.first_return is None]
            if not playing:
                return steps
            if generators:
                noise = torch.cat([self.head.noise(1, generator) for generator in generators])
                noise = noise.numpy()
            self.take_step(name, 0, noise, playing)
            self.carry(name, 1)
            steps += len(playing)
        raise GameError(f"{playing[0].place()}: an episode takes over {MOST_STEPS:,} steps")

    def close(self):
        """Close all envs."""
        for game in sum(self.games.values(), []):
            close_env(game.env, game.place())


class Costs:
    """What a step on each level takes, and a row of an update: given, or the mean of what was seen.

    `total` is the run's clock: the seconds of simulation, spread over all workers, and of updates.
    """

    def __init__(self, args):
        L = len(args.levels)
        self.given = None  # seconds of a step on each level, and of a row of an update
        if args.level_costs:
            *steps, update = args.level_costs
            self.given = [*steps, update / (args.num_envs * args.num_steps[0])]
        self.steps = [0 for _ in range(L)]
        self.seconds = [0.0 for _ in range(L)]
        self.rows = 0
        self.update_seconds = 0.0
        self.total = 0.0

    def count_steps(self, level, steps, seconds=None):
        """Count steps on a level. Without seconds they are charged at what a step takes."""
        if self.given or seconds is None:
            seconds = steps * self.step(level)
        else:
            self.steps[level] += steps
            self.seconds[level] += seconds
        self.total += seconds

    def count_update(self, rows, seconds):
        """Count an update with so many rows."""
        # All ranks must have the same clock, since the rule goes by it.
        seconds = max(gathered_objects(seconds))
        if self.given:
            seconds = rows * self.given[-1]
        self.rows += rows
        self.update_seconds += seconds
        self.total += seconds

    def step(self, level):
        """Return the seconds of a step on a level."""
        if self.given:
            return self.given[level]
        return self.seconds[level] / max(1, self.steps[level])

    def row(self, level):
        """Return the seconds of a row on a level: a step, and its share of an update."""
        update = self.given[-1] if self.given else self.update_seconds / max(1, self.rows)
        return self.step(level) + update


class Simulations:
    """The games of all teams in all processes, and what they cost."""

    def __init__(self, args, model):
        self.args = args
        self.teams = make_teams(args)
        self.costs = Costs(args)
        self.pool = WorkerPool(args, model, functools.partial(Player, args))

    def measure_costs(self, model):
        """Play an episode on every level, to know what steps cost. It is not charged."""
        with closing_env(make_env(self.args, self.args.levels[0])) as env:
            in_batches = self.args.failed_reward is None and steps_in_batches(env)
        # One actor in each process is enough, unless actors are stepped together.
        num_actors = num_processes(self.args) * NUM_RANKS
        if in_batches:
            num_actors = self.args.num_envs
        seeds = draw_seeds(num_actors, self.args.seed)
        total = self.costs.total
        # The first time includes what is done once.
        for _ in range(2):
            self.costs = Costs(self.args)
            for level in range(len(self.args.levels)):
                self.play_episodes(model, [f"own {level}"], seeds)
        self.costs.total = total

    def start(self, level, seeds):
        """Start the games of training on a level from seeds (N,), with their partners if any."""
        partners = [name for name in self.teams if name == f"partners {level}"]
        self.pool.call("start", seeds, f"own {level}", partners)

    def play(self, model, teams, noise):
        """Have the model play teams side by side with noise (T, N, ·). Returns their buffers."""
        self.pool.load(model)
        answers = self.pool.call("play", teams, noise.numpy())
        T, N, _ = noise.shape
        buffers = []
        for i, name in enumerate(teams):
            buffers.append(side_by_side([rows[i] for rows, _ in answers]))
            seconds = float(np.mean([seconds[i] for _, seconds in answers]))
            self.costs.count_steps(self.teams[name].level, T * N, seconds)
        return buffers

    def play_episodes(self, model, teams, seeds, noise_seeds=None):
        """Have the model play episodes, see `Player.play_episodes`.

        Returns returns (K, N) and first observations (K, N, D) of K teams.
        """
        self.pool.load(model)
        answers = self.pool.call("play_episodes", teams, seeds, noise_seeds)
        returns, shown, steps, seconds = zip(*answers)
        for i, name in enumerate(teams):
            team = self.teams[name]
            team_steps = sum(counts[i] for counts in steps)
            team_seconds = None
            # Games of checks have work of their own that is done once.
            if not team.options:
                team_seconds = float(np.mean([times[i] for times in seconds]))
            self.costs.count_steps(team.level, team_steps, team_seconds)
        return np.concatenate(returns, axis=1), np.concatenate(shown, axis=1)

    def close(self):
        """End all processes."""
        self.pool.close()


def side_by_side(parts):
    """Return the rows of several processes, arrays (T, n, ...), as tensors (T, N, ...)."""
    buffer = {}
    for name in parts[0]:
        column = np.concatenate([rows[name] for rows in parts], axis=1)  # a copy
        buffer[name] = torch.from_numpy(column)
    return buffer


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
COUNTERS = {"iteration": 0, "global_step": 0, "wall_seconds": 0.0, "failures": 0}
CHARTS = ["iteration_return", "episodic_return", "episodic_length", "eval_return", "learning_rate"]
CHARTS += ["check_return", "level", "seconds", "failures"]
LOSSES = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance"]
# TensorBoard shows these under CleanRL's names, where it has them. Any other number has its own
# name. Ours are means, of an iteration's minibatches and of the last 100 episodes. CleanRL's are
# not, so curves may differ in level. `seconds` is the run's clock, see `Costs`.
TAGS = {"sps": "charts/SPS"}
TAGS |= {name: f"charts/{name}" for name in CHARTS}
TAGS |= {name: f"losses/{name}" for name in LOSSES}
SHOWN = ["level", "sps", "episodic_return", "check_return", "eval_return"]  # in the status line


class Run(AbstractContextManager):
    """The life of a training run: it opens, counts, stops when asked to, saves and closes.

    `sims` has the games, `run_dir` is the folder, `history` the list of all logged rows, `counters`
    say what is complete, and `signal` is the number of the signal that stopped the run, or None.
    The `rule` chooses the levels. The run's result is `rule.best`, or the last parameters.
    """

    def __init__(self, args, model, optimizer, generator, rule):
        self.args = args
        self.model = model
        self.optimizer = optimizer
        self.generator = generator
        self.rule = rule
        self.run_dir = Path(args.resume or run_path(args))
        self.counters = dict(COUNTERS)
        self.recent = []  # (return, length) of the last 100 episodes
        self.history = []
        self.signal = None
        self.asked = None  # when a signal asked the run to stop
        self.length = None  # the run's length, in seconds of its clock
        self.evaluated = None  # the rule's best parameters at the last evaluation, and its return
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
            dist.init_process_group("gloo", timeout=datetime.timedelta(days=1))
            self.stack.callback(dist.destroy_process_group)
        self.sims = self.stack.enter_context(closing(Simulations(self.args, self.model)))
        if self.args.resume:
            self.restore()
        if RANK == 0:
            logger = Logger(self.run_dir, self.args, self.history)
            self.logger = self.stack.enter_context(closing(logger))

    @property
    def iteration(self):
        """How many iterations are complete."""
        return self.counters["iteration"]

    def seconds(self):
        """Return how long the run is on its clock."""
        return self.sims.costs.total

    def share_done(self):
        """Return which share of the run's length is complete."""
        if self.args.num_iterations:
            return self.iteration / self.args.num_iterations
        return self.seconds() / self.length

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
        """Measure what levels cost, and start the games. In a new run the rule begins, too."""
        args = self.args
        goes_by_costs = args.schedule != "together" or not args.num_iterations
        is_complete = args.hours and self.seconds() >= 3600 * args.hours
        if goes_by_costs and not args.level_costs and not is_complete:
            report("measuring what steps cost")
            self.sims.measure_costs(self.model)
        self.length = run_length(args, self.sims.costs)
        if self.share_done() >= 1:
            report(
                "the run is complete: to resume it, give more --hours, or --num-iterations above "
                f"{self.iteration}"
            )
        elif self.args.resume and RANK == 0:
            write_config(self.run_dir, self.args)
        self.start_games()
        self.began = time.perf_counter()
        if self.history:
            return
        if not args.num_iterations:
            report(f"the run takes {self.length / 3600:.3g} hours of simulation and updates")
        row = self.rule.begin(self)
        if row or args.eval_every:
            self.log(row)

    def start_games(self):
        """Start new episodes in all games of training. Their seeds depend on the iteration."""
        L = len(self.args.levels)
        N = self.args.num_envs
        seeds = draw_seeds(L * N, self.args.seed, self.iteration).reshape(L, N)
        for level in range(L):
            self.sims.start(level, seeds[level])

    def goes_on(self):
        """Whether another iteration is due: the run is not complete, and no rank is to stop.

        A signal that one rank has received stops all ranks.
        """
        # A library of the games may have caught signals itself.
        for signum in SIGNALS:
            signal.signal(signum, self.stop)
        agreed = max(gathered_objects(self.signal or 0))
        self.signal = agreed or self.signal
        return self.share_done() < 1 and not agreed

    def count_iteration(self, num_steps, failures):
        """Count an iteration, its steps, and those that have failed in it."""
        self.counters["iteration"] += 1
        self.counters["global_step"] += num_steps
        self.counters["failures"] += failures

    def end_iteration(self, row, episodes):
        """Log an iteration's row and its episodes; save at times."""
        if self.history and self.history[-1].get("level") != row.get("level"):
            # The recent episodes are of another level.
            self.recent = []
        if episodes:
            row["iteration_return"], _ = np.mean(episodes, axis=0)
        self.recent = (self.recent + episodes)[-100:]
        if self.recent:
            mean_return, mean_length = np.mean(self.recent, axis=0)
            row |= {"episodic_return": mean_return, "episodic_length": mean_length}
        row["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        self.log(row)
        if self.args.save_every and self.iteration % self.args.save_every == 0:
            self.save()

    def log(self, row):
        """Evaluate if it is due, and write the row."""
        seconds = time.perf_counter() - self.began
        self.counters["wall_seconds"] += seconds
        row |= self.counters | {"seconds": self.seconds()}
        steps_before = self.history[-1]["global_step"] if self.history else 0
        row["sps"] = (row["global_step"] - steps_before) / seconds

        every = self.args.eval_every
        if every and (self.iteration % every == 0 or self.share_done() >= 1):
            row["eval_return"] = self.evaluate()
        self.began = time.perf_counter()
        # A checkpoint must hold plain numbers: those of NumPy and torch become Python's.
        for name, value in row.items():
            if hasattr(value, "item"):
                row[name] = value.item()
        self.history.append(row)
        if RANK == 0:
            self.logger.write(row, self.share_done())

    def evaluate(self):
        """Return the mean return of the run's result in an evaluation, which is not charged."""
        best = self.rule.best
        if best is None or self.evaluated is None or self.evaluated[0] is not best:
            total = self.seconds()
            result = copy.deepcopy(self.model)
            result.load_state_dict(best or self.model.state_dict())
            self.evaluated = (best, float(evaluate(result, self.sims).mean()))
            self.sims.costs.total = total
        return self.evaluated[1]

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
        rule = {name: value for name, value in vars(self.rule).items() if name != "args"}
        return {
            "model": self.rule.best or self.model.state_dict(),  # the result, which --eval plays
            "current": self.model.state_dict(),
            "rule": rule,
            "seconds": self.seconds(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "counters": self.counters,
            "history": self.history,
            "recent": self.recent,
        }

    def restore(self):
        """Go on from the checkpoint. The games start new episodes."""
        state = read_checkpoint(self.run_dir)
        self.model.load_state_dict(state["current"])
        vars(self.rule).update(state["rule"])
        self.sims.costs.total = state["seconds"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.counters = state["counters"]
        self.history = state["history"]
        self.recent = state["recent"]

    def __exit__(self, kind, *_):
        """Close everything. First save, unless the code has failed or a signal stops at once."""
        with self.stack:
            # An iteration that is not logged, since the check after it has failed, is done again.
            if kind is GameError and self.history:
                self.counters = {name: self.history[-1][name] for name in COUNTERS}
            if kind is None or issubclass(kind, (GameError, OSError)):
                self.save()
            if kind is None:
                # Barrier: no rank may exit before rank 0 has saved, or torchrun would kill it.
                gathered_objects(None)


def run_length(args, costs):
    """Return how long a run is, in seconds of its clock: --hours, or steps of the finest level."""
    if args.hours:
        return 3600 * args.hours
    finest = len(args.levels) - 1
    rows = args.num_envs * args.num_steps[finest]
    return (args.finest_steps or 100 * rows) * costs.step(finest)


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


# These options are not kept in config.json.
NOT_KEPT = ["resume", "eval", "analyse", "quiet"]


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
CHECK_SEED = 20_000  # checks have seeds of their own, too
MOST_STEPS = 10_000  # an episode takes no more steps, where whole episodes are played


def evaluate(model, sims):
    """Play the episodes of an evaluation with the policy's mode. Returns their returns, (E,)."""
    seeds = EVAL_SEED + np.arange(sims.args.eval_episodes)
    (returns,), _ = sims.play_episodes(model, ["evaluation"], seeds)
    return returns


def load_model(args):
    """Return the policy of --eval, or a new one."""
    seed_generators(args.seed)
    model = make_model(args)
    if args.eval:
        model.load_state_dict(read_checkpoint(args.eval)["model"])
    return model


def evaluate_run(args):
    """Evaluate the policy of --eval on the last of --levels. Returns the returns, (E,)."""
    model = load_model(args)
    with closing(Simulations(args, model)) as sims:
        returns = evaluate(model, sims)
    what = f"{len(returns)} episodes of {Path(args.env).name} level {args.levels[-1]}"
    print(f"return {returns.mean():.4f} ± {returns.std():.4f} over {what}")
    return returns


# ------------------------------------------------------------------------------------ analysis
# An analysis measures ten times what --schedule adaptive measures now and then.
MEASUREMENTS = 10


def analyse(args):
    """Print what --schedule adaptive goes by: what a level costs, and ρ. Returns the rows.

    It writes them to analysis.csv, too: in the folder of --eval, or in one of its own, whose name
    says that it is not that of a run.
    """
    torch.set_num_threads(1)
    model = load_model(args)
    path = Path(args.eval or f"{run_path(args)}__analysis") / "analysis.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    returns = []
    starts = []
    with closing(Simulations(args, model)) as sims:
        if not args.level_costs:
            sims.measure_costs(model)
            measure_update(model, sims)
        for measurement in range(MEASUREMENTS):
            measured, numbers = play_alike(model, sims, measurement)
            returns.append(measured)
            starts.append(numbers + measurement * len(numbers))  # other starts than before
            rows = level_rows(sims, np.concatenate(returns, axis=1), np.concatenate(starts))
            # An analysis that is stopped leaves what it has found.
            write_table(path, rows)
            print(
                f"\nmeasured {measurement + 1} of {MEASUREMENTS} times; step_ms is the time of a "
                "step divided by the number of workers"
            )
            print_table(rows)
            print(f"table: {path}")
    return rows


def measure_update(model, sims):
    """Take an update with a copy of the model, to know what updates cost."""
    args = sims.args
    model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, fused=True)
    generator = torch.Generator().manual_seed(args.seed)
    sims.start(0, draw_seeds(args.num_envs, args.seed))
    (buffer,) = rollout(model, sims, 0, generator)
    batch = make_batch(buffer, model, args)
    began = time.perf_counter()
    update(model, optimizer, batch, Plan([0]), args, generator)
    sims.costs.count_update(len(batch["obs"]), time.perf_counter() - began)


def level_rows(sims, returns, starts):
    """Return a row for each level from returns (L, E) and the number of each episode's start (E,).

    `worth` is what the rule goes by, ρ² per second, divided by that of the finest level. ρ has a
    standard error.
    """
    rho = correlations(returns, starts)
    # The jackknife: how much ρ varies when each start is left out once.
    kept = [starts != start for start in np.unique(starts)]
    without = [correlations(returns[:, episodes], starts[episodes]) for episodes in kept]
    errors = np.std(without, axis=0) * (len(kept) - 1) ** 0.5

    seconds = [sims.costs.row(level) for level in range(len(rho))]
    rows = []
    for level, number in enumerate(sims.args.levels):
        row = {"level": number, "step_ms": 1e3 * sims.costs.step(level)}
        row["return"] = returns[level].mean()
        row |= {"rho": rho[level], "rho_error": errors[level]}
        row["worth"] = max(0.0, rho[level]) ** 2 * seconds[-1] / seconds[level]
        rows.append(row)
    return rows


def print_table(rows):
    """Print rows with a column for each number."""
    print("".join(name.rjust(12) for name in rows[0]))
    for row in rows:
        print("".join(f"{value:12.4g}" for value in row.values()), flush=True)


def write_table(path, rows):
    """Write rows to a .csv file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


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
}
# This is ResSim-v3 with thief zones three cells wide.
CASES["ResSim-v4"] = CASES["ResSim-v3"]._replace(fields=functools.partial(streak_fields, width=3))


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
# The options that say how long a run is. One that is given replaces those of a run that is resumed.
LENGTHS = ["hours", "finest_steps", "num_iterations"]

EXAMPLES = """
examples:
  python ppo_multilevel.py --env ResSim-v1                         train, one level at a time
  python ppo_multilevel.py --env my.py:Rod --levels 1 2 3          train on your own simulation
  python ppo_multilevel.py --resume RUN_DIR --hours 2              resume, for longer
  python ppo_multilevel.py --eval RUN_DIR                          evaluate
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
    """Add the options of running."""
    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--seed", type=int, default=1, help="seed of all generators")
    add("--num-workers", type=int, default=num_cores(), help="processes that play; 0: this one")
    add("--log-dir", type=os.path.abspath, default="runs", help="folder of the runs' folders")
    add("--run-name", help="name of the run's folder, if not env__script__seed__time")
    add("--eval-every", type=int, default=10, help="iterations between evaluations; 0: never")
    add("--eval-episodes", type=int, default=16, help="episodes of an evaluation")
    add("--save-every", type=int, default=50, help="iterations between checkpoints; 0: at end")
    add("--quiet", action="store_true", help="print no status lines")
    add(
        "--analyse",
        action="store_true",
        help="do not train: print what each level costs and how well it agrees with the finest, "
        "for the policy of --eval or a new one",
    )

    add = group.add_mutually_exclusive_group().add_argument
    add("--resume", type=os.path.abspath, help="folder of a run to resume, with its options")
    add("--eval", type=os.path.abspath, help="folder of a run whose policy's mode is evaluated")

    add = group.add_mutually_exclusive_group().add_argument
    add("--hours", type=float, help="length of the run in hours of simulation and updates")
    add(
        "--finest-steps",
        type=int,
        help="its length in the time that so many steps of the finest level take; None: by --env, "
        "or 100 iterations on the finest level",
    )
    add("--num-iterations", type=int, help="its length in iterations")


def env_name(text):
    """Return --env with the path of its file made absolute: an env may change the folder."""
    module, _, function = text.rpartition(":")
    if module.endswith(".py"):
        return f"{os.path.abspath(module)}:{function}"
    return text


def parse_args(argv=None):
    """Parse and check the command line (default: the program's).

    With --resume or --eval the options of that run are the defaults.
    """
    parser = make_parser()
    # This first reading names the run or the case, which has defaults of its own.
    given = parser.parse_args(argv)
    run_dir = given.resume or given.eval
    options = {}
    if run_dir:
        options = json.loads((Path(run_dir) / "config.json").read_text())
        if any(getattr(given, name) for name in LENGTHS):
            options |= dict.fromkeys(LENGTHS)
        if given.eval and given.levels:
            # The run's own are those of its levels.
            options |= {"level_costs": None, "num_steps": options["num_steps"][:1]}
        parser.set_defaults(**options)
    else:
        parser.set_defaults(**defaults_of(given))
    args = parser.parse_args(argv)

    # Pairs are not analysed, and a single level needs no choice.
    if args.analyse:
        args.schedule = "adaptive"
        args.num_steps = args.num_steps[:1]
    elif len(args.levels) == 1:
        args.schedule = "together"
    if len(args.num_steps) == 1:
        args.num_steps = args.num_steps * len(args.levels)
    check_options(parser, args, options)
    check_spaces(parser, args)
    if run_dir:
        check_weights(parser, args, run_dir)
    return args


def defaults_of(given):
    """Return the defaults that --env, --schedule and --levels decide on."""
    defaults = {"schedule": "adaptive"}
    case = CASES.get(given.env)
    if case:
        levels = list(range(1, len(case.grids) + 1))
        defaults |= {"levels": levels, "init_log_std": -2.9}
        # Another finest level has another length.
        if not given.levels or given.levels[-1] == levels[-1]:
            defaults["finest_steps"] = case.finest_steps
    if given.schedule == "together" and len(given.levels) != 1:
        defaults |= {"learning_rate": 3e-5, "update_epochs": 10, "num_iterations": 200}
        defaults["num_steps"] = [100] + [10 for _ in given.levels[1:]]
        if case and not given.levels:
            defaults["levels"] = [level for level, _ in case.together]
            defaults["num_steps"] = [num_steps for _, num_steps in case.together]
    # A length that is given replaces all of these.
    if any(getattr(given, name) for name in LENGTHS):
        defaults |= dict.fromkeys(LENGTHS)
    return defaults


def check_options(parser, args, options):
    """Refuse options that do not go together, in one line; `options` are those of a run."""
    L = len(args.levels)
    is_ordered = L > 0 and args.levels == sorted(set(args.levels))
    parts = args.num_minibatches * NUM_RANKS
    divides = all(args.num_envs * T % parts == 0 for T in args.num_steps)
    two_rows = all(args.num_envs * T > parts for T in args.num_steps)
    costs_fit = not args.level_costs or len(args.level_costs) == L + 1
    kept = {name: getattr(args, name) for name in ("levels", "check_episodes")}
    is_new = not args.resume and not args.eval
    folder = run_path(args)
    wishes = [
        (is_ordered, "levels", "give them, coarse to fine, like 1 2 3"),
        (L > 1 or not args.analyse, "analyse", "it takes two levels or more"),
        (not args.eval or NUM_RANKS == 1, "eval", "it takes one process, not torchrun"),
        (len(args.num_steps) == L, "num-steps", f"one number for each of {L} levels, or for all"),
        (divides, "num-minibatches", f"{parts}, over all ranks, must divide N · T of each level"),
        (two_rows or not args.norm_adv, "num-minibatches", "--norm-adv needs two rows"),
        (costs_fit, "level-costs", f"give {L + 1} numbers, the last of an update"),
        (args.check_episodes > 1, "check-episodes", "two or more: their differences are compared"),
        (not args.resume or kept.items() <= options.items(), "resume", f"{list(kept)} must stay"),
        (not is_new or not folder.exists(), "run-name", f"{folder} is there already"),
    ]
    for is_right, option, wish in wishes:
        if not is_right:
            parser.error(f"argument --{option}: {wish}")


def check_spaces(parser, args):
    """Refuse levels with other spaces than the first, and a --coupling that the env cannot do."""
    first = None
    for number in args.levels:
        with closing_env(make_env(args, number)) as env:
            spaces = (env.observation_space, env.action_space)
            maps = hasattr(env.unwrapped, "map_from")
        first = first or spaces
        if spaces != first:
            parser.error(f"argument --levels: level {number} has {spaces}, not {first}")
        if args.coupling == "step" and not maps:
            parser.error(
                f"argument --coupling: step needs map_from, which {args.env} does not have"
            )


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
    sys.path.append(os.getcwd())  # where a module of --env may lie
    sys.stdout.reconfigure(errors="replace")  # not all of Windows's code pages have a γ
    args = None
    try:
        args = parse_args()
        if args.analyse:
            analyse(args)
            return 0
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
