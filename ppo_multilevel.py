"""Multilevel PPO: policy optimisation for expensive simulations that exist on several levels.

    python ppo_multilevel.py --env ResSim-v1               # wells of a reservoir, 1.5 to 6 minutes
    python ppo_multilevel.py --env ResSim-v1 --levels 5    # finest grid only: PPO
    python ppo_multilevel.py --env ResSim-v1 --schedule together          # the paper's schedule
    python ppo_multilevel.py --env my_simulation.py:Rod --levels 1 2 3   # yours, see README

This is `ppo.py` for a simulation on L levels (grids, time steps), coarse to fine. A *climb*, the
default, trains on one level at a time; checks on the finest tell which level teaches most a second,
see `Climb`. *Together* is the paper's multilevel Monte Carlo: N actors take many steps, T^1, on the
coarsest level and few, T^L, on the finest. On a level l > 1 each has a partner on level l−1 with
the same noise: losses differ little, few samples tell how; coarsest + differences = finest loss.

Papers: "ML" is the multilevel PPO of Dixit & ElSheikh (arXiv 2210.08400), algorithms as in A.
Dixit's "Implementation of multilevel PPO in Stable Baselines 3"; "PPO", Â_t, R_t, r_t(θ): `ppo.py`.

    L_a = −min(r_t(θ) Â_t, clip(r_t(θ), 1−ε, 1+ε) Â_t)                               PPO, Eq. (7)
    ℓ = L_a + c_v ½ (V_θ(s_t) − R_t)² − c_e H(π_θ(·|s_t))                PPO, Eq. (9), but for the ½
    loss = Σ_l mean[ℓ^l − ℓ̃^{l−1}],  ℓ̃^0 = 0                                      ML, Algorithm 4

The loss is a signed, weighted sum: a row of a level's own simulation weighs +1/M^l, one of its
coarse partner (ℓ̃; here `sync`) −1/M^l, times control weights β, see `Together`; a minibatch is one
forward pass over all rows, see `update`. With one level the script is `ppo.py`, bit for bit.

Departures from print: Algorithm 3 prints L_a without its minus sign and the entropy term as −C_e
L_now; Algorithm 4's text prints N T^l ≤ M^l for ≥; Algorithm 5 prints map_from after the fine step
and assigns ã twice: with --coupling step the coarse member is mapped before it and takes the same
action a^L, by default it is mapped when an episode starts and acts itself, with the same noise.

A simulation is a class or function `make(level, evaluation=False, validation=False)` of Gymnasium
envs, spaces and rewards (means, not sums) the same on all levels; the last two, if known, ask for
starts of their own. For pairs: `psi()`, state → observation, and `map_from(other)`, to take over
another level's state (else one seed starts both); static `step_batch(envs, actions)` returns
arrays of observations, rewards, terminated, truncated.

Shapes: L levels, T^l steps, N actors, B minibatches of M^l rows, S in all; D, A as in `ppo.py`.
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
from typing import NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads keep cores from workers

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from scipy import sparse
from scipy.sparse.linalg import splu
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
    option = functools.partial(add_option, parser.add_argument_group("ppo_multilevel.py"))
    count, positive, fraction = number(int, 1), number(float, 1e-300), number(float, 0, 1)
    option("--env", str, "ResSim-v1", "ResSim-v1 to -v4 (log σ -2.9), file.py:make or module:make")
    text = "climb: one level at a time; together: all in each iteration (by default rate 3e-5, 10 "
    text += "epochs, KL 0.05, 200 iterations); None: climb if there are several levels"
    option("--schedule", str, None, text, choices=("climb", "together"))
    option("--levels", count, [], "coarse to fine; []: the case's (two if together)", nargs="+")
    text = "T^l, steps per actor and iteration: one per level; of a climb also one for all; of "
    text += "together also 'T auto': T on the coarsest level, the rest by costs and variances; the "
    text += "sum of levels is unbiased if all are whole episodes"
    option("--num-steps", or_auto(number(int, 1, 100_000)), [50], text, nargs="+")
    option("--control", or_auto(fraction), "auto", "β of coarse rows; 1: the paper; auto: measured")
    option("--total-cost", positive, None, "finest-level steps; None: climbs by --env or 100 N T")
    text = "seconds of a step of each level / workers, an update on the coarsest; None: measured"
    option("--level-costs", positive, None, text, nargs="+")
    option("--check-episodes", number(int, 2, 100_000), 16, "of each check of a climb")
    text = "no training: print which levels pay, by this run's policy or else by the initial one"
    option("--analyse", str, None, text, nargs="?", const="", metavar="RUN_DIR")
    option("--eval-level", count, None, "level of evaluations, if not the last")
    text = "of partners; noise: the fine state when an episode starts, step: in each step (biased)"
    option("--coupling", str, "noise", text, choices=("step", "noise"))
    text = "literal: Algorithm 4, unbounded; bounded: clip by signed Â, values fit own rows only"
    option("--correction", str, "bounded", text, choices=("literal", "bounded"))
    parser.set_defaults(num_workers=num_cores(), eval_every=10, num_envs=50, hidden=[150, 100, 80])
    parser.set_defaults(shared_net=True, anneal_lr=False, clip_coef=0.1, ent_coef=1e-3, vf_coef=1.0)
    parser.set_defaults(num_minibatches=10, learning_rate=1e-4, update_epochs=5, clip_vloss=False)
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
def train(args, rule=None):
    """Train as `args` say; `rule` chooses each iteration's levels, see `Climb`. Returns the `Run`.
    Saves, then raises GameError, when a game fails."""
    torch.set_num_threads(1)  # more threads only slow a small network down
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = make_model(args)
    optimizer = make_optimizer(model)
    rule = rule or {"climb": Climb, "together": Together}[args.schedule](args)
    with Run(args, model, optimizer, generator, rule) as run:
        while run.goes_on():
            rate = args.learning_rate * (1 - run.share_done() if args.anneal_lr else 1)
            optimizer.param_groups[0]["lr"] = rate
            plan = rule.plan()  # the levels of this iteration: one of a climb, all if together
            # Sample: T^l steps on each of them; if together, above the coarsest in pairs.
            batches, episodes = [], {}  # of all members: own¹, sync², own², sync³, own³, ...
            for level, T in zip(plan.levels, plan.num_steps):
                buffers, episodes[level] = rollout(model, run.pool, level, T, args, generator)
                batches += [make_batch(buffer, model.inputs, args) for buffer in buffers]
            batch = {name: torch.cat([b[name] for b in batches]) for name in batches[0]}
            row = {"explained_variance": explained_variance(batches[0]), "learning_rate": rate}
            if args.norm_value:
                normalise_values(model, batch, batches[0]["returns"])
            if plan.refit:
                refit_values(model, batch)
            # Learn: K epochs of minibatch steps down the telescoping sum of the levels' losses.
            row |= update(model, optimizer, batch, plan, args, generator)
            if args.norm_obs:  # after the update: within it, π_old is the policy that sampled
                model.obs_norm.update(torch.cat([b["obs"] for b in batches[::2]]))  # own rows
            run.charge(run.pool, iteration=1, global_step=len(batch["obs"]))
            row |= rule.review(run, batches)  # a climb may check the policy, and change its level
            run.end_iteration(row, episodes, len(batch["obs"]))
    return run


# ------------------------------------------------------------------------------------ rollout
@torch.no_grad()
def rollout(model, pool, level, T, args, generator):
    """Take T steps with all N actors on a level (ML, Algorithm 5). Returns the buffers [own], or
    [sync, own] with partners, tensors (T, N, ...): obs, actions, logprobs, values, next_values,
    rewards, terminated, truncated; and the (return, length) of its own episodes that ended."""
    paired, act = level > 0 and args.schedule == "together", fast_act(model)
    by_step = paired and args.coupling == "step"
    # Views of level index l's own member, 2l, and of its partner, 2l − 1, if paired: own first.
    arrays = {name: a[2 * level - paired : 2 * level + 1][::-1] for name, a in pool.arrays.items()}
    pair, steps, ends = members(arrays), [], ("ended", "episode_return", "episode_length")
    noise = model.head.noise(T * args.num_envs, generator).view(T, args.num_envs, -1)
    noise = noise.chunk(NUM_RANKS, 1)[RANK].to(model.device)  # of this rank, for both members
    for t in range(T):
        for member in pair[:1] if by_step else pair:
            act(member, noise[t])
        if by_step:  # a partner takes the fine member's action
            arrays["actions"][1] = arrays["actions"][0]
        step = {name: arrays[name].copy() for name in model.stored}  # what the policy saw and did
        pool.call("step", level, by_step)
        steps.append(step | {k: arrays[k].copy() for k in model.results + ends})  # what came of it
    buffer = {name: np.stack([step[name] for step in steps], axis=1) for name in steps[0]}
    ended, returns, lengths = gathered({k: torch.tensor(buffer.pop(k)[0]) for k in ends}).values()
    names, noises = args.levels[level::-1], [noise, None if by_step else noise]  # own, partner's
    buffers = [gathered(finish(model, *part)) for part in zip(members(buffer), names, noises)]
    return buffers[::-1], [*zip(returns[ended].tolist(), lengths[ended].tolist())]


def finish(model, buffer, label, noise=None):
    """Return a member's buffer as tensors (T, N, ...), with values, next_values and logprobs, which
    one pass over all steps gives. Where actions should be those of a `noise`, check it."""
    for name in ("next_obs", "rewards", "obs"):  # whose squares must fit into float32
        for t, n, *entry in np.argwhere(~(abs(buffer[name]) < 1e15)).tolist():  # NaN < x is False
            where = f"{name}{entry or ''} of level {label}, actor {n}, step {t}"
            raise GameError(f"NaN or over 1e15 in {where}")
    buffer = {name: torch.from_numpy(a).to(model.device) for name, a in buffer.items()}
    pi, values = model(**{name: buffer[name] for name in model.inputs})
    if noise is not None:  # a few may differ, by rounding
        wrong = ~np.isclose(model.head.sample(pi, noise).cpu(), buffer["actions"].cpu(), 1e-3, 1e-3)
        assert wrong.sum() < 3 + wrong.size / 99, "acted unlike head.sample(pi, noise): fast_act?"
    values = torch.stack([values, model(buffer["next_obs"])[1]])  # V(s_t), V(s_{t+1})
    if model.value_norm is not None:
        values = model.value_norm.mean + model.value_norm.std * values
    buffer["values"], buffer["next_values"] = values
    return buffer | {"logprobs": model.head.log_prob(pi, buffer["actions"])}


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
def update(model, optimizer, batch, plan, args, generator):
    """Take K epochs of minibatch steps on the rows of `batch`. Return the means of the losses."""
    assert all(p.grad._base is model.gradient for p in model.parameters()), "see make_optimizer"
    seen, sizes = [], (plan.num_steps, args.num_envs, args.num_minibatches)
    mine = slice(RANK, None, NUM_RANKS)  # a minibatch's rows of this rank
    weights = signed_weights(*sizes, plan.controls).to(batch["obs"].device)[mine]
    # literal: a partner's policy loss is +min(r Ã, clip(r) Ã): if Ã < 0 it goes to −∞ as r grows.
    # bounded: it is PPO's loss for −Ã, −min(−r Ã, −clip(r) Ã), with the same gradient at π_old; and
    # V fits own rows only, as −(V − R)² has no minimum; their weights are Σ_l b_l in all, not 1.
    bounded = args.correction == "bounded"
    term_weights = (1, weights.clamp(min=0), weights) if bounded else (weights,) * 3  # of pg, v, H
    coarsest = args.num_envs * plan.num_steps[0]  # number of the coarsest level's rows
    if args.norm_adv == "batch":
        batch = batch | {"advantages": normalised(batch["advantages"], coarsest)}
    for mb_rows in (r for _ in range(args.update_epochs) for r in minibatches(*sizes, generator)):
        mb = {name: column[mb_rows] for name, column in batch.items()}  # (S, ...)
        if args.norm_adv == "minibatch":
            mb["advantages"] = normalised(mb["advantages"], coarsest // args.num_minibatches)
        mb = {name: column[mine] for name, column in mb.items()}
        if bounded:  # so that min(·) sees the signed advantage; pg_loss has the weight 1 then
            mb["advantages"] = weights * mb["advantages"]
        *terms, logratio = losses(model, mb, args.clip_coef, args.clip_vloss)
        # ML, Algorithm 4: Σ_l mean[ℓ^l − ℓ̃^{l−1}]; bounded: pg_loss has the same gradient at π_old
        pg_loss, v_loss, entropy = [(w * term).mean() for w, term in zip(term_weights, terms)]
        loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy
        logratio = logratio[weights > 0]
        ratio = logratio.exp()
        approx_kl = (ratio - 1 - logratio).mean()  # estimates KL(π_old, π) without bias, ≥ 0
        clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
        row = averaged(torch.stack([pg_loss, v_loss, entropy, approx_kl, clipfrac]).detach())
        seen.append(row)
        if args.target_kl is not None and row[LOSSES.index("approx_kl")] > args.target_kl:
            break
        model.gradient.zero_()  # the parameters' gradients are views of it: `make_optimizer`
        loss.backward()
        norm = float(averaged(model.gradient).norm())
        if not math.isfinite(norm):  # before it reaches the weights
            raise FloatingPointError("no finite gradient: lower --learning-rate? --norm-value?")
        model.gradient.mul_(min(1, args.max_grad_norm / (norm + 1e-6)))  # as clip_grad_norm_
        optimizer.step()
    return dict(zip(LOSSES, torch.stack(seen).mean(dim=0).tolist(), strict=True))


def normalised(advantages, coarsest):
    """Return advantages less the mean of the first `coarsest` rows, divided by their deviation. It
    is one affine map for all levels, from the coarsest level's many rows."""
    std, mean = torch.std_mean(advantages[:coarsest])
    return (advantages - mean) / (std + 1e-8)


class Plan(NamedTuple):
    """What an iteration does."""

    levels: list  # indices, coarse to fine
    num_steps: list  # T^l on each
    controls: list  # control weight β_l of the partner, for each but the first
    refit: bool = False  # whether to fit the values' last layer first, see `refit_values`


def signed_weights(num_steps, num_envs, num_minibatches, controls):
    """Return the weights of a minibatch's S rows, ordered as by `minibatches`: their weighted mean
    is the telescoping sum. For any β, E ℓ^L = E[ℓ^L − β_L ℓ̃^{L−1}] + β_L E ℓ^{L−1} if E ℓ̃ = E ℓ,
    and so on down to level 1. So with b_l = β_{l+1} ... β_L level l's own rows weigh S b_l / M^l,
    its partners' −S β_l b_l / M^l; all β = 1: ML, Algorithm 4, line 16."""
    sizes = [num_envs * T // num_minibatches for T in num_steps]  # M^l
    total, weights = 2 * sum(sizes) - sizes[0], []
    for l, M in enumerate(sizes):  # noqa: E741, the paper's l
        own = total * math.prod(controls[l:]) / M
        rows = [-own * controls[l - 1], own] if l > 0 else [own]
        weights += [torch.full((M,), weight) for weight in rows]
    return torch.cat(weights)  # (S,)


def minibatches(num_steps, num_envs, num_minibatches, generator):
    """Return the row numbers of an epoch's minibatches, (B, S): ML, Algorithm 6. The rows of all
    members lie one after the other: own¹, sync², own², sync³, own³, ... A minibatch has M^l rows of
    level l, and the partner's rows of the same actors and steps."""
    rows, start = [], 0
    for level, T in enumerate(num_steps):
        shuffled = torch.randperm(num_envs * T, generator=generator).view(num_minibatches, -1)
        for _ in range(2 if level else 1):
            rows.append(shuffled + start)
            start += num_envs * T
    return torch.cat(rows, dim=1)


class Together:
    """--schedule together, the paper's: all levels in every iteration. The sum is right with any β
    if all T^l are whole episodes; else partners see other parts of them than the level below does.

    --control auto: β_l = Cov(Â^l, Ã^{l−1}) / Var(Ã^{l−1}), cut to [0, 1], makes the variance of the
    difference Â^l − β_l Ã^{l−1} least. --num-steps auto: T^l ∝ √(V_l / C_l), V_l that variance
    (times Π_{k>l} β_k²), C_l the cost of a step of the pair (Giles 2015, Acta Numerica 24)."""

    best = None  # the run's result is its last parameters
    begin = staticmethod(lambda run: {})  # nothing is checked, nor logged, at first

    def __init__(self, args):
        self.args, self.rate, more = args, 1.0, len(args.levels) - 1
        # Of each level's advantages: Var(Â), Cov(Â, Ã), Var(Ã), running means, if finite.
        self.moments = torch.tensor([[1.0, 0, 0], *[[1.0, 0.9, 1.0]] * more])
        self.controls = [1.0 if args.control == "auto" else args.control] * more

    def plan(self):
        """Return what the next iteration does; minibatches and ranks share N T^l rows equally."""
        args, L = self.args, len(self.args.levels)
        first, costs = args.num_steps[0], np.array(args.level_costs or [1.0] * L)[:L]
        beta, (own, cov, sync) = np.array([0, *self.controls]), self.moments.T.numpy()
        rest = np.array([math.prod(self.controls[i:]) for i in range(L)])  # Π_{k>l} β_k
        variances = rest**2 * (own - 2 * beta * cov + beta**2 * sync).clip(1e-12)
        ratios = np.sqrt(variances / (costs + np.r_[0, costs[:-1]]))
        unit = math.lcm(args.num_minibatches * NUM_RANKS, args.num_envs) // args.num_envs  # of T^l
        units = np.rint(first * ratios / max(ratios[0], 1e-12) / unit).clip(1, first // unit)
        steps = [unit * int(n) if T == "auto" else T for T, n in zip(args.num_steps, units)]
        return Plan([*range(L)], steps, self.controls)

    def review(self, run, batches):
        """Measure an iteration's rows. Returns Var(Â^l − Ã^{l−1}) / Var(Â^1) for the log, what a
        level's correction with β = 1 adds to the variance per row, beside the coarsest's."""
        own, sync = ([b["advantages"].cpu() for b in batches[i::2]] for i in (0, 1))
        rows = [torch.cov(torch.stack(pair)).flatten()[[0, 1, 3]] for pair in zip(own[1:], sync)]
        rows = torch.stack([torch.tensor([own[0].var(), 0, 0]), *rows])
        self.moments = self.moments.lerp(rows, self.rate).where(rows.isfinite(), self.moments)
        self.rate = 0.1
        if self.args.control == "auto":
            betas = self.moments[1:, 1] / self.moments[1:, 2]
            self.controls = betas.nan_to_num().clamp(0, 1).tolist()
        ratios = [float((a - b).var() / own[0].var()) for a, b in zip(own[1:], sync)]
        return {f"levels/variance_ratio_{n}": x for n, x in zip(self.args.levels[1:], ratios)}


class Climb:
    """--schedule climb: one level at a time, the one that pays on the finest level.

    A check plays episodes on the finest level with the policy's mode, always from the same starts;
    the best parameters by these checks are the run's result, and a new level starts from them. A
    window of training on a level, see `usual`, is productive if it raises the best check by more
    than ERRORS standard errors of the difference. Then the run stays; but once a window costs at
    most a SHARE of the time since the last trial, it tries the next level, kept if it gains more
    per second (of --level-costs) than the window before. After an unproductive one the nearest
    cheaper level that was productive since its last chance has one as long; if in vain: up."""

    ERRORS, SHARE = 1.5, 0.25
    CHECKS = 6  # a check is due after training as long as so many checks, or at a window's end
    ITERATIONS, PART = 5, 0.2  # a window's least: so many of the next level, part of the time

    def __init__(self, args):
        self.args, self.level, self.refit = args, 0, not args.norm_obs  # refit: V is still random
        self.best = self.adam = self.returns = None  # by the best check, whose returns are (E,)
        self.time = self.unchecked = 0.0  # seconds in all, since the last check
        self.home, self.rate, self.tried = 0, 0.0, 0.0  # level left, gain a second; a trial's end
        self.paid = [False] * len(args.levels)  # which were productive since their last chance

    def plan(self):
        """Return what the next iteration does."""
        return Plan([self.level], [self.args.num_steps[self.level]], [], self.refit)

    def begin(self, run):
        """Make the first check. Returns what is logged of it."""
        row = {"level": self.args.levels[0], "check_return": self.check(run)}
        self.start()
        return row

    def review(self, run, batches):
        """After an iteration: check if it is due, choose the level if the window is over."""
        row, seconds = {"level": self.args.levels[self.level]}, self.seconds(self.level)
        self.time, self.spent = self.time + seconds, self.spent + seconds
        self.unchecked += seconds
        # The first observations to normalise by change what V sees: the next iteration refits it.
        rows = self.args.num_envs * self.args.num_steps[self.level]
        self.refit = self.args.norm_obs and float(run.model.obs_norm.count) <= rows
        over = self.spent >= self.window
        if over or self.unchecked >= self.CHECKS * self.check_seconds or run.share_done() >= 1:
            row["check_return"] = self.check(run)
        if over:
            gain = self.returns - self.before
            self.choose(run, float(gain.mean()), float(gain.std()) / len(gain) ** 0.5)
        return row

    def check(self, run):
        """Return the mean return of a check; keep the parameters if they are the best so far."""
        returns, cost = run.check()
        self.check_seconds = cost * self.args.level_costs[-2]
        self.time, self.unchecked = self.time + self.check_seconds, 0.0
        if self.best is None or returns.mean() > self.returns.mean():
            states = run.model.state_dict(), run.optimizer.state_dict()
            (self.best, self.adam), self.returns = copy.deepcopy(states), returns
        return float(returns.mean())

    def choose(self, run, gain, error):
        """Stay on the level or go to another one, by what the window has gained."""
        level, last, rate = self.level, len(self.args.levels) - 1, gain / self.spent
        productive = gain > self.ERRORS * error
        self.paid[level] = self.kind != "chance" and (productive or self.paid[level])
        chances = [i for i in range(level) if self.paid[i]]  # the nearest last
        window, allowed = self.usual(level), self.SHARE * (self.time - self.tried)  # for a trial
        if self.kind == "trial" and rate <= self.rate:
            self.go(run, self.home, rate, "back: less than there")
        elif self.kind == "chance" and not productive:
            self.go(run, min(self.home + 1, last), rate, "up: the last chance was missed")
        elif productive and not self.kind and level < last and window <= allowed:
            self.go(run, level + 1, rate, "a trial", "trial", window)
            self.tried = self.time + window
        elif not productive and chances:
            self.go(run, chances[-1], rate, "a last chance: no more than noise", "chance", window)
        elif not productive and level < last:
            self.go(run, level + 1, rate, "up: no more than noise")
        else:
            self.start()

    def go(self, run, level, rate, why, kind="", window=None):
        """Go to a level, from the best parameters, for a window of so many seconds, or as usual."""
        names, found = self.args.levels, f"{rate:.2g} per second, best {self.returns.mean():.4f}"
        if RANK == 0 and not self.args.quiet:
            print(f"level {names[self.level]} → {names[level]}, {why} ({found})", flush=True)
        self.home, self.rate, self.level, self.refit = self.level, rate, level, True
        run.model.load_state_dict(self.best)
        run.optimizer.load_state_dict(copy.deepcopy(self.adam))  # a copy: Adam writes into it
        self.start(kind, window)

    def start(self, kind="", window=None):
        """Start a window on the level: a "trial", a "chance" or, kind "", neither."""
        self.kind, self.before = kind, self.returns  # the best ones before
        self.window, self.spent = window or self.usual(self.level), 0.0  # its seconds, those gone

    def usual(self, level):
        """Return how long a window on a level is: what a fair trial of the next one would cost."""
        above = min(level + 1, len(self.args.levels) - 1)
        return max(self.ITERATIONS * self.seconds(above), self.PART * self.time)

    def seconds(self, level):
        """Return what an iteration on a level index takes; `update`: one with the coarsest's T."""
        T, (*steps, update) = self.args.num_steps, self.args.level_costs
        return self.args.num_envs * T[level] * steps[level] + T[level] / T[0] * update


# ------------------------------------------------------------------------------------ model
def make_model(args):
    """Return the Model for the env's spaces, its weights drawn from torch's global generator."""
    with closing(make_env(args.env, args.levels[-1])) as env:
        model = Model(env.observation_space.shape[0], env.action_space, args)
    return model.to("cpu" if args.device == "auto" else args.device)


class Model(nn.Module):
    """Policy and value function: hidden layers, orthogonal weights, a head for each."""

    inputs, stored = ("obs",), ("obs", "actions")  # of `forward`, by a rollout
    results = ("next_obs", "rewards", "terminated", "truncated")  # of a step, stored too
    device = property(lambda model: model.value.weight.device)  # where it computes

    def __init__(self, obs_dim, action_space, args):
        super().__init__()
        self.obs_dim, self.action_space = obs_dim, action_space
        self.obs_norm = RunningNorm((obs_dim,), cut=10) if args.norm_obs else nn.Identity()
        self.value_norm = RunningNorm() if args.norm_value else None
        self.actor = hidden_layers(obs_dim, args)
        self.critic = self.actor if args.shared_net else hidden_layers(obs_dim, args)
        if options := num_options(action_space):
            self.head = Categorical(args.hidden[-1], options, action_space.shape)
        else:
            self.head = Gaussian(args.hidden[-1], action_space.shape, args)
        self.value = layer_init(nn.Linear(args.hidden[-1], 1), 1.0)

    def forward(self, obs):
        """Observations (M, D) → the policy's parameters pi (M, ·) for the head, values (M,). With
        --norm-value the values are normalised ones."""
        x = self.obs_norm(obs)
        h = self.actor(x)
        h_value = h if self.critic is self.actor else self.critic(x)
        return self.head(h), self.value(h_value).squeeze(-1)

    def policy(self, obs, noise=None):
        """Observations (M, D) → actions (M, ...): samples from noise (M, ·), else the mode. Also
        returns None, for the memory that policies of `ppo.py` may have."""
        return self.head.sample(self.head(self.actor(self.obs_norm(obs))), noise), None

    def act(self, arrays, noise=None):
        """Set actions for what the games show: samples from noise (N, ·), else the mode."""
        actions, _ = self.policy(torch.from_numpy(arrays["obs"]).to(self.device), noise)
        arrays["actions"][:] = actions.cpu().numpy()


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


@torch.no_grad()
def refit_values(model, batch):
    """Fit the value function's last layer to a batch's returns and take advantages from it: values
    of another level would spoil the policy. Ridge: at large weights V alone moves shared layers."""
    features = nn.functional.pad(model.critic(model.obs_norm(batch["obs"])), (0, 1), value=1.0)
    features, returns = features.cpu().double(), batch["returns"].cpu().double()  # (M, F + 1), (M,)
    square = features.T @ features + 1e-3 * len(returns) * torch.eye(features.shape[1]).to(features)
    solution = torch.linalg.solve(square, features.T @ returns)  # (F + 1,)
    model.value.weight[0], model.value.bias[0] = solution[:-1], solution[-1]
    batch["values"] = model(batch["obs"])[1]
    scale = 1 if model.value_norm is None else model.value_norm.std
    batch["advantages"] = scale * (batch["returns"] - batch["values"])


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
def make_env(env_id, level, **options):
    """Return the simulation `env_id` at a level; its maker gets those `options` that it knows.
    Raises ValueError if it is none, or has spaces that the model does not know."""
    known = inspect.signature(make := load_make(env_id)).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    env = make(level=level, **{k: x for k, x in options.items() if takes_all or k in known})
    if not isinstance(env, gym.Env):
        raise ValueError(f"{env_id} returned {env!r}, which is no Gymnasium env")
    space = env.observation_space
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        raise ValueError(f"not supported: observation space {space}")
    num_options(env.action_space)
    return env


@functools.cache  # one module for all games: its data is there once, and its classes are the same
def load_make(name):
    """Return the function that makes the simulation `name` at a level."""
    if name in CASES:
        return functools.partial(ResSim, name)
    module, _, function = name.rpartition(":")
    if not module:
        raise ValueError(f"no env '{name}'; known: {', '.join(CASES)}, file.py:make, module:make")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), function)
    sys.path.append(str(Path(module).resolve().parent))  # of the modules that the file imports
    spec = importlib.util.spec_from_file_location(f"simulation_{Path(module).stem}", module)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


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


class Game:
    """One simulation on one level that starts its next episode by itself: row n of the arrays of a
    member, for what comes of a step. `next_obs` is where the step led, `obs` what to act on next,
    an episode's first if the step `ended` one. Return and length are of the episode so far."""

    def __init__(self, args, level, n, seed, arrays, **options):
        self.name, self.n, self.seed, self.arrays = f"{args.env} level {level}", n, seed, arrays
        self.env, paired = make_env(args.env, level, **options), args.schedule == "together"
        self.compared = set() if paired and args.levels[1:] else {"obs", "next_obs"}  # with psi()
        self.pictured, self.picture = n == 0 and self.env.render_mode == "rgb_array", None

    def reset(self, seed=None):
        """Start an episode, of the game's current random stream or of a new seed."""
        with suppress(Exception):  # whatever a render raises
            self.picture = self.env.render() if self.pictured else None  # the last one's end
        self.arrays["ended"][self.n] = True  # the one before
        self.show("obs", self.env.reset(seed=seed)[0])

    def record(self, obs, reward, terminated, truncated):
        """Write what came of a step, and start the next episode if it ended this one."""
        a, n, flags = self.arrays, self.n, (True, False)
        shapes = [getattr(x, "shape", ()) for x in (reward, terminated, truncated)]
        if any(shapes) or terminated not in flags or truncated not in flags:
            raise ValueError(f"not a number and two flags: {(reward, terminated, truncated)}")
        self.show("next_obs", obs)
        if a["ended"][n]:  # by the step before
            a["episode_return"][n] = a["episode_length"][n] = 0
        a["episode_return"][n] += reward
        a["episode_length"][n] += 1
        a["rewards"][n], a["ended"][n] = reward, terminated or truncated
        a["terminated"][n], a["truncated"][n] = terminated, truncated and not terminated
        self.reset() if a["ended"][n] else self.show("obs", obs)

    def show(self, name, obs):
        """Write an observation; the first ones of reset and step are compared with psi()."""
        if np.shape(obs) != (shape := self.arrays[name].shape[1:]):  # NumPy would stretch it
            raise ValueError(f"an observation has shape {np.shape(obs)}, its space {shape}")
        if name not in self.compared and callable(getattr(self.env.unwrapped, "psi", None)):
            self.compared.add(name)
            psi = np.asarray(self.env.unwrapped.psi())
            if psi.shape != np.shape(obs) or not np.allclose(obs, psi, 1e-4, 1e-6, equal_nan=True):
                raise ValueError("an observation is not psi(): noise in it? a wrapper?")
        self.arrays[name][self.n] = obs

    def get_state(self):
        """Return what `set_state` needs to go on as if nothing had happened, or None."""
        with suppress(Exception):  # whatever an env and its attributes raise
            states = [x.get_state() if kept is None else kept for x, kept in layers(self.env)]
            numbers, seen = {id(x): i for i, (x, _) in enumerate(layers(self.env))}, []
            pickler = pickle.Pickler(file := io.BytesIO())  # a link to a layer becomes its number
            pickler.persistent_id = lambda x: seen.append(x) or numbers.get(id(x))
            pickler.dump([self.seed, self.random, *states])
            # EzPickle keeps how an env was made, not where it is; arrays lose what they share.
            arrays = {id(x): x for x in seen if isinstance(x, np.ndarray)}.values()
            pairs = ((x, y) for x in arrays if x.base is not None for y in arrays if y is not x)
            lost = b"_ezpickle_args" in file.getvalue() or any(np.shares_memory(*p) for p in pairs)
            return None if lost else file.getvalue()

    def set_state(self, state):
        """Go on from the state of a game like this one."""
        envs, unpickler = layers(self.env), pickle.Unpickler(io.BytesIO(state))
        unpickler.persistent_load = lambda number: envs[number][0]
        self.seed, self.random, *states = unpickler.load()
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
    """The actors of one worker, those in `rows` of all N, with their `members`: own¹, sync², own²,
    sync³, own³, ...: 2l is the game of level index l, 2l − 1 its partner, one level below. They
    live in one process, for map_from. The shared arrays have a leading axis of members."""

    def __init__(self, args, levels, seeds, rows, arrays, **options):
        self.rows, self.arrays, self.members = slice(rows[0], rows[-1] + 1), members(arrays), []
        self.paired = args.schedule == "together"  # a climb has no partners
        for m, member in enumerate(self.arrays):
            make = functools.partial(Game, args, levels[m // 2], **options)
            actors = [] if m % 2 and not self.paired else rows
            self.members.append([make(n, int(seeds[m][n]), member) for n in actors])
        self.games, self.actors = self.members[0], [*zip(*filter(None, self.members))]

    def call(self, command, *arguments):
        """Carry out a command; an error names the game that was busy, and what with."""
        try:
            return getattr(self, command)(*arguments)
        except (Exception, SystemExit) as error:
            game, doing = self.busy
            what = f"{game.name} (seed {game.seed}) failed in {doing}: {one_line(error)}"
            raise GameError(f"{what}\n{traceback.format_exc()}") from None

    def start(self, states=None, shift=0):
        """Start all games, from those of the N `states` that are kept, else from seeds + shift."""
        for actor in self.actors:
            if states and (kept := states[actor[0].n]):
                try:
                    for game, state in zip(actor, kept, strict=True):
                        game.set_state(state)
                    continue
                except Exception as error:  # of any kind, if packages are others than then
                    report(f"{actor[0].name} starts a new episode: {one_line(error)}")
            for game in actor:
                self.busy, game.seed = (game, "reset"), game.seed + shift
                game.random = np.random.default_rng(game.seed)  # of the seeds that a pair shares
                game.reset(game.seed)
            for fine, partner in zip(actor[2::2], actor[1::2]) if self.paired else ():
                self.follow(fine, partner)  # from its state

    def get_state(self):
        """Return what `start` needs to go on with these actors, None for one that cannot tell."""
        states = [[game.get_state() for game in actor] for actor in self.actors]
        return [None if None in actor else actor for actor in states]

    def follow(self, fine, partner, starts=True):
        """Have a partner take over the state of its fine game (ML, Algorithm 5, line 18), in a new
        episode if that one `starts`; without map_from a common seed starts both."""
        self.busy = partner, "reset"
        if starts and not hasattr(partner.env.unwrapped, "map_from"):
            seed = int(fine.random.integers(2**31))
            fine.reset(seed)
            return partner.reset(seed)
        if starts and not partner.arrays["ended"][partner.n]:  # else its own end has reset it
            partner.reset()
        self.busy = partner, "map_from"
        partner.env.unwrapped.map_from(fine.env.unwrapped)
        partner.show("obs", partner.env.unwrapped.psi())

    def step(self, level=0, synchronize=False):
        """Step the games of a level index once, then their partners, and map these if asked to."""
        started, m = time.perf_counter(), 2 * level
        self.step_member(m)
        if level and self.paired:
            self.step_member(m - 1)
            # Where the fine episode ended, the partner's ends with it and a new pair starts.
            ended, sync = self.arrays[m]["ended"][self.rows], self.arrays[m - 1]
            sync["truncated"][self.rows] |= ended & ~sync["terminated"][self.rows]
            for fine, partner, starts in zip(self.members[m], self.members[m - 1], ended):
                if starts or synchronize:
                    self.follow(fine, partner, starts)
        self.arrays[m]["seconds"][self.rows.start] += time.perf_counter() - started

    def step_member(self, m):
        """Step the games of a member once, together if their env can."""
        games, envs = self.members[m], [game.env for game in self.members[m]]
        actions = to_env(self.arrays[m]["actions"][self.rows], envs[0].action_space)
        owner = next(c for c in type(envs[0]).__mro__ if {"step", "step_batch"} & vars(c).keys())
        if "step_batch" in vars(owner):  # not if a subclass has overridden `step` alone
            self.busy = games[0], "step_batch"
            for game, *result in zip(games, *envs[0].step_batch(envs, actions), strict=True):
                self.busy = game, "step_batch"
                obs, reward, terminated, truncated = result
                game.record(obs, reward, terminated, truncated)
        else:
            for game, action in zip(games, actions):
                self.busy = game, "step"
                game.record(*game.env.step(action)[:4])
        self.arrays[m]["steps"][self.rows] += 1

    def picture(self):
        """Return the picture of the first game, see `Game`."""
        return self.games[0].picture

    def close(self):
        """Close all envs, also after one that fails in it."""
        failure = None
        for game in sum(self.members, []):
            try:
                game.env.close()
            except (Exception, SystemExit) as error:
                self.busy, failure = (game, "close"), error
        if failure:
            raise failure


def members(arrays):
    """Return the list of the members (see Games), each a dict of its part of the arrays."""
    return [{name: array[m] for name, array in arrays.items()} for m in range(len(arrays["obs"]))]


def measured_costs(args, model):
    """Return the seconds that a step takes on each level (--eval-level too), all workers together,
    and then all that an iteration does beside simulating. Neither model nor generators change."""
    levels, costs, shown = sorted({*args.levels, args.eval_level}), [], []
    if len(levels) == 1 and args.analyse is None:
        return [1.0, 0.0]
    args = argparse.Namespace(**vars(args) | {"levels": levels, "schedule": "climb"})  # no partners
    model, generator, args.target_kl = copy.deepcopy(model), torch.Generator(), None
    with closing(make_pool(args, model, game_seeds(args, 0), args.num_workers)) as pool:
        for _ in range(2):  # from the same seeds: first observations and rewards should be the same
            pool.call("start"), pool.call("step")
            shown.append(np.dstack([pool.arrays["obs"], pool.arrays["rewards"]]))
        np.allclose(*shown, 1e-4, 1e-6, True) or report("reset(seed) varies: README, Randomness")
        for level in reversed(range(len(levels))):  # the coarsest last: one whole iteration
            # Few steps: an episode's start costs more, like a reservoir's, whose field is new.
            T, seconds = 2 if level else args.num_steps[0], pool.arrays["seconds"][2 * level]
            for _ in range(2):  # the first time includes what is done once
                gc.collect()  # now, not while time is taken: that may be as long as an update
                seconds[:], started = 0, time.perf_counter()
                (buffer,), _ = rollout(model, pool, level, T, args, generator)
                batch = make_batch(buffer, model.inputs, args)
                if level == 0:
                    update(model, make_optimizer(model), batch, Plan([0], [T], []), args, generator)
            simulated = float(seconds.sum()) / max(1, len(pool.workers))
            costs.insert(0, simulated / len(batch["obs"]))
        if costs[0] > max(1.5 * costs[:2][-1], 0.01):  # below 10 ms it may be noise
            report(f"level {levels[0]} costs more than {levels[1]}: slow reset? --level-costs")
        return [*costs, max(0.0, time.perf_counter() - started - simulated)]


def game_seeds(args, *starts):
    """Return the seeds of this rank's games, (2L − 1, N): others whenever games start anew."""
    shape = 2 * len(args.levels) - 1, args.num_envs  # of the members
    seeds = np.random.SeedSequence([args.seed, *starts]).generate_state(math.prod(shape))
    return np.split(seeds.reshape(shape), NUM_RANKS, axis=1)[RANK]


def make_pool(args, model, seeds, num_workers, levels=None, **options):
    """Return the pool of actors on the levels, with a seed per member and actor (2L − 1, N)."""
    keep_freed_memory()
    (M, N), D, A = seeds.shape, (model.obs_dim,), model.head.shape
    actions = "int64" if num_options(model.action_space) else "float32"
    layout = {"obs": (D, "float32"), "next_obs": (D, "float32"), "rewards": ((), "float32")}
    layout |= {name: ((), "bool") for name in ("terminated", "truncated", "ended")}
    layout |= {"episode_return": ((), "float64"), "episode_length": ((), "int64")}
    # What a worker spends on `step`, partners included, is in the entry of the first own game.
    layout |= {"actions": (A, actions), "seconds": ((), "float64"), "steps": ((), "float64")}
    layout = {name: ((M, N, *shape), dtype) for name, (shape, dtype) in layout.items()}
    games = functools.partial(Games, args, levels or args.levels, seeds, **options)
    return WorkerPool(games, layout, N, num_workers)


# ------------------------------------------------------------------------------------ worker pool
class GameError(RuntimeError):
    """A game or a worker failed: a line that says which and how, then the game's own traceback."""


def num_cores():
    """Return the number of cores that this process may use, its share if torchrun started it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


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
COUNTERS |= {"sim_seconds": 0.0, "sim_cost": 0.0}
LENGTHS = dict(num_iterations="iteration", total_timesteps="global_step", total_cost="sim_cost")
CHARTS = "episodic_return episodic_length eval_return eval_cut learning_rate".split()
CHARTS += ["check_return", "level"]
LOSSES = "policy_loss value_loss entropy approx_kl clipfrac".split()  # as `update` stacks them
TAGS = {"sps": "charts/SPS"} | {name: f"charts/{name}" for name in CHARTS}  # of TensorBoard
TAGS |= {n: f"losses/{n}" for n in (*LOSSES, "explained_variance")} | {"sim_cost": "costs/sim_cost"}
COLUMNS = [*(COUNTERS | TAGS)]  # of progress.csv


class Run(AbstractContextManager):
    """A run of `train`: its games (`pool`), counters, folder, logged rows (`history`), and the
    `signal` that stopped it, or None. Its end closes all and saves, after a game's failure too."""

    iteration = property(lambda run: run.counters["iteration"])  # how many are complete

    def __init__(self, args, model, optimizer, generator, rule):
        self.args, self.model, self.optimizer, self.generator = args, model, optimizer, generator
        self.rule, self.result, self.played = rule, copy.deepcopy(model), None
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
            if args.level_costs is None:
                args.level_costs = gathered_objects(measured_costs(args, model))[0]
            seeds = game_seeds(args, self.counters["starts"])
            pool = make_pool(args, model, seeds, args.num_workers)
            self.pool = self.stack.enter_context(closing(pool))
            if args.schedule == "climb":
                self.check_pool = self.stack.enter_context(closing(make_check_pool(args, model)))
            if RANK == 0:
                if args.eval_every:
                    pictures = {"render_mode": "rgb_array"} if args.env in CASES else {}
                    pool = make_eval_pool(args, model, **pictures)
                    self.eval_pool = self.stack.enter_context(closing(pool))
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
                if kind and self.history and self.history[-1]["iteration"] < self.iteration:
                    self.counters["iteration"] -= 1  # to be done again
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
        if not self.history and not max(gathered_objects(self.signal or 0)):
            if not self.args.norm_obs and abs(self.pool.arrays["obs"]).max() > 10:
                report("large observations: --norm-obs?")
            began, row = time.perf_counter(), self.rule.begin(self)
            self.counters["wall_seconds"] += time.perf_counter() - began
            if row or self.args.eval_every:
                self.log(row := row | self.counters)
            first = row.get("check_return", row.get("eval_return", 0))
            abs(first) > 10 and not self.args.norm_value and report("large returns: --norm-value?")
            self.share_done() < 1 or report("nothing learned: the first check takes --total-cost")
        self.started = time.perf_counter()
        agreed = max(gathered_objects(self.signal or 0))  # which any of the ranks has received
        self.signal = agreed or self.signal
        going = self.share_done() < 1 and not agreed
        if not going and self.saved != self.iteration:
            self.save()
        return going

    def share_done(self):
        """Return which share of the run's length is complete, in the first unit that is given."""
        lengths = [(counter, getattr(self.args, option)) for option, counter in LENGTHS.items()]
        return next(self.counters[counter] / length for counter, length in lengths if length)

    def charge(self, pool, **counts):
        """Add up the `counts`, and what a pool's games have simulated since the last time, on all
        ranks. Returns its cost, in steps of the finest level."""
        seconds, steps = (pool.arrays[name].sum(axis=-1) for name in ("seconds", "steps"))
        pool.arrays["seconds"][:] = pool.arrays["steps"][:] = 0
        costs = np.array(self.args.level_costs[:-1]) / self.args.level_costs[-2]
        costs = np.repeat(costs, 2)[: len(steps)] if pool is self.pool else costs[-1]  # of members
        busy, cost = np.sum(gathered_objects([seconds.sum(), (steps * costs).sum()]), 0).tolist()
        for name, count in (counts | {"sim_seconds": busy, "sim_cost": cost}).items():
            self.counters[name] += count
        return cost

    def check(self):
        """Play the episodes of a check. Returns their returns (E,), and the cost, see `charge`."""
        returns, cuts = zip(*gathered_objects(evaluate(self.model, self.check_pool)))
        steps = self.check_pool.arrays["steps"]
        steps[:] = max(gathered_objects(steps.max()))  # as if all ranks' games ran side by side
        if not np.isfinite(returns := np.concatenate(returns)).all():
            raise GameError(f"NaN or infinity in returns of a check, level {self.args.levels[-1]}")
        if cut := sum(cuts):
            report(f"check: {cut} episodes cut off at {EVAL_STEPS:,} steps: do they ever end?")
        return torch.from_numpy(returns), self.charge(self.check_pool)

    def end_iteration(self, row, episodes, steps):
        """Log an iteration's row and its episodes, {level index: [(return, length)]}; save."""
        seconds = time.perf_counter() - self.started
        self.counters["wall_seconds"] += seconds
        if self.history and self.history[-1].get("level") != row.get("level"):
            self.recent = []  # episodes of the level that a climb was on
        ended = {self.args.levels[i]: np.mean(e, 0)[0] for i, e in episodes.items() if e}
        row |= {f"levels/return_{level}": mean for level, mean in ended.items()}
        self.recent = (self.recent + episodes[max(episodes)])[-100:]  # the finest level's
        means = np.mean(self.recent or [(math.nan, math.nan)], axis=0).tolist()
        row |= self.counters | dict(zip(("episodic_return", "episodic_length"), means))
        row["sps"] = round(steps / seconds)
        if self.iteration == 1 and len(episodes) > 1 and not self.args.quiet:
            whole = self.pool.arrays["ended"][::2].all()  # own games, at the last step
            whole or report("--num-steps: not whole episodes, so the sum of levels is biased")
        self.log(row)
        if self.args.save_every and self.iteration % self.args.save_every == 0:
            self.save()

    def log(self, row):
        """Evaluate if it is due, add that to the row, write and print the row."""
        args, done = self.args, self.iteration
        self.history.append(row)
        if RANK > 0:
            return
        if args.eval_every and (done % args.eval_every == 0 or self.share_done() >= 1):
            row["eval_return"] = math.nan  # made again by --resume if it stays so
            if self.rule.best is None or self.rule.best is not self.played:  # else it is as before
                self.played = self.rule.best
                self.result.load_state_dict(self.played or self.model.state_dict())
                self.evaluated = evaluate(self.result, self.eval_pool, run=self)
            returns, cut = self.evaluated
            if not self.signal:  # which has cut it short
                row |= {"eval_return": float(returns.mean())} | ({"eval_cut": cut} if cut else {})
            if (picture := self.eval_pool.call("picture")[0]) is not None:
                self.events.add_image("eval/end", picture, row["global_step"], dataformats="HWC")
        self.writer.writerow(row)
        for name, tag in (TAGS | {name: name for name in row if name not in COLUMNS}).items():
            if name in row and math.isfinite(row[name]):
                self.events.add_scalar(tag, row[name], row["global_step"])
        share, of = self.share_done(), f"/{args.num_iterations}" if args.num_iterations else ""
        line = f"update {done}{of}  {share:.0%}  steps {row['global_step']:,}"
        for name in ("level", "sps", "episodic_return", "check_return", "eval_return", "eval_cut"):
            line += f"  {name} {row[name]:,.6g}" if name in row else ""
        if done and (of or share > 0.1):  # at first, on coarse levels, a share takes far longer
            left = round(min(row["wall_seconds"] * max(0, 1 / share - 1), 1e9))
            line += f"  ETA {datetime.timedelta(seconds=left)}"
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
        plain = {k: v if type(v) in (int, float) else str(v) for k, v in options.items()}
        self.events.file_writer.add_summary(summary.hparams(plain, {})[1])  # add_hparams: a new run
        self.args.quiet or self.stack.callback(print, f"run folder: {self.run_dir}")

    def save(self, with_games=True):
        """Write checkpoint.pt, games as bytes that only --resume unpickles; all ranks call this."""
        games, file = None, io.BytesIO()
        if with_games:
            games = gathered_objects((self.pool.arrays, sum(self.pool.call("get_state"), [])))
            games = torch.frombuffer(bytearray(pickle.dumps(games)), dtype=torch.uint8)
        if RANK == 0:
            self.events.flush()  # a checkpoint must not be ahead of TensorBoard's file
            rule = {name: value for name, value in vars(self.rule).items() if name != "args"}
            state = {"model": self.rule.best or self.model.state_dict(), "rule": rule}
            state |= {"current": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
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
        self.model.load_state_dict(state["current"])
        vars(self.rule).update(state["rule"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.history, self.recent = state["history"], state["recent"]
        if self.history and math.isnan(self.history[-1].get("eval_return", 0)):
            self.again = [self.history.pop()]  # whose evaluation was not completed
        self.counters, self.saved = state["counters"], state["counters"]["iteration"]
        self.share_done() < 1 or report("run complete; longer: --total-cost (or --num-iterations)")
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
CHECK_SEED = 20_000  # so have those of a climb's checks
EVAL_STEPS = 10_000  # an evaluation takes no more, to end always
ROUNDS, REPEATS = 10, 2  # an analysis plays ROUNDS · N episodes, in pairs REPEATS from each start


def make_eval_pool(args, model, episodes=None, **options):
    """Return the pool of evaluation games; its arrays are those of the only member, (E, ...)."""
    seeds = EVAL_SEED + np.arange(episodes or args.eval_episodes)[np.newaxis]
    workers = 0 if episodes else args.num_workers  # a film is made in this process
    pool = make_pool(args, model, seeds, workers, [args.eval_level], evaluation=True, **options)
    pool.arrays = members(pool.arrays)[0]
    return pool


def make_check_pool(args, model):
    """Return the pool of this rank's games of a check, on the finest level."""
    seeds = CHECK_SEED + np.array_split(np.arange(args.check_episodes), NUM_RANKS)[RANK][np.newaxis]
    pool = make_pool(args, model, seeds, args.num_workers, args.levels[-1:], validation=True)
    pool.arrays = members(pool.arrays)[0]
    return pool


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


def analyse(args):
    """Tell which levels pay: each plays whole episodes alone and, from other starts, in pairs with
    the next one and the finest. Prints rows of `compare` and `verdict`s, writes analysis.csv."""
    torch.set_num_threads(1), torch.manual_seed(args.seed)
    model, generator = make_model(args), torch.Generator().manual_seed(args.seed)
    if args.analyse:
        model.load_state_dict(load_checkpoint(args.analyse)["model"])
    costs = dict(zip(args.levels, args.level_costs or measured_costs(args, model)))
    finest, episodes, began = args.levels[-1], ROUNDS * args.num_envs, time.perf_counter()
    pairs = {*zip(args.levels, args.levels[1:]), *((level, finest) for level in args.levels[:-1])}
    plays, played, alone = [*zip(args.levels), *sorted(pairs)], {}, {}
    for levels in plays:
        played[levels] = play(model, levels, args, generator)
        if len(played) == 1:  # all others take about as many steps
            seconds = played[levels]["steps"] * sum(costs[level] for level in sum(plays, ()))
            print(f"{episodes} episodes of every level and pair: about {seconds:.0f} s", flush=True)
    steps = np.stack([played[level,]["lengths"].ravel() for level in args.levels])
    if steps.std(axis=1).min() == 0 < steps.std():  # a level's are all alike, but not all levels'
        report(f"episodes of {steps.mean(axis=1).round(2).tolist()} steps: does a level diverge?")
    for level in args.levels:
        mean = jackknife(lambda x: {"return": x.mean()}, played[level,]["returns"][0, :, 0])
        alone[level] = {"level": level, "step_ms": 1e3 * costs[level]} | mean
    rows = [compare(alone[c], alone[f], played[c, f]) for c, f in sorted(pairs)] + [alone[finest]]
    widths = {n: 20 if f"{n}_error" in rows[0] else 9 for n in rows[0] if "_error" not in n}
    print("".join(name.rjust(width) for name, width in widths.items()))
    for row in rows:
        cells = {name: f"{value:.3g}" for name, value in row.items()}
        errors = {n: float(f"{row[n + '_error']:.1g}") for n in row if n + "_error" in row}
        cells |= {n: f"{row[n]:.4g} ± {error:g}" for n, error in errors.items()}
        print("".join(cells.get(name, "").rjust(width) for name, width in widths.items()).rstrip())
    for row in (row for row in rows[:-1] if row["against"] == finest):
        row["verdict"] = verdict(row, args.coupling == "step")
        print(f"level {row['level']}: {row['verdict']}")
    path = Path(args.analyse or run_path(args)) / "analysis.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, max(rows, key=len))  # the columns of a row with a verdict
        writer.writeheader()
        writer.writerows(rows)
    cut, seconds = sum(each["cut"] for each in played.values()), time.perf_counter() - began
    print(f"{cut} episodes cut off at {EVAL_STEPS:,} steps; it took {seconds:.0f} s; {path}")
    return rows


def compare(coarse, fine, pair):
    """Return the row of a pair of levels, after `mlmc_test` of Giles (2015, Acta Numerica 24), from
    the rows of both alone and what they have played. Errors are half widths of 95 % intervals."""
    diff = pair["returns"][1] - pair["returns"][0]  # (S, R)
    c, f = pair["returns"] - pair["returns"].mean(axis=2, keepdims=True)  # within a start
    samples = np.stack([diff, c * c, f * f, c * f, *pair["products"]]).mean(axis=2)  # (7, S)

    def numbers(samples):  # of some starts
        difference, *products = samples.mean(axis=1)
        cc, ff, cf = np.reshape(products, (2, 3)).T  # of returns, of advantages
        rho = np.clip(cf / np.sqrt(cc * ff), -1, 1)
        gain, ratio = saving(rho.min(), fine["step_ms"], coarse["step_ms"])
        return {
            "difference": difference,  # of the returns, fine − coarse
            "rho_return": rho[0],  # within a start: how far the levels agree on what is good to do
            "rho_adv": rho[1],  # of advantages Â, row by row
            "var_ratio": ((cc + ff - 2 * cf) / ff)[1],  # Var(Â_f − Ã_c) / Var(Â_f)
            "saving": gain,  # by the smaller rho: rho_adv is high until values are learned
            "ratio": ratio,  # best number of coarse steps for a fine one
        }

    row = jackknife(numbers, samples)
    del row["ratio_error"]
    a, b, d = coarse["return"], fine["return"], row["difference"]
    errors = coarse["return_error"] + fine["return_error"] + row["difference_error"]
    row["kurtosis"] = ((diff - d) ** 4).mean() / (diff.var() + 1e-99) ** 2  # above 100: too few
    # |a − b + d| / 3 (σ_a + σ_b + σ_d); above 1 levels do not play in pairs as they do alone
    row["check"] = abs(a - b + d) / (3 / 1.96 * errors + 1e-6 * (abs(a) + abs(b)) + 1e-99)
    return {"level": coarse["level"], "against": fine["level"]} | coarse | row


def jackknife(numbers, samples):
    """Return the dict `numbers(samples)` of samples (..., S), one per start, and by "..._error" the
    half widths of 95 % intervals, from what leaving out one start after the other changes."""
    S, row = samples.shape[-1], {}
    with np.errstate(all="ignore"):  # 0 / 0 where nothing varies, ∞ where rho is 1
        without = [[*numbers(np.delete(samples, i, axis=-1)).values()] for i in range(S)]
        errors = 1.96 * ((S - 1) * np.var(without, axis=0)) ** 0.5
        for (name, value), error in zip(numbers(samples).items(), errors):
            row |= {name: value, f"{name}_error": error}
    return row


def saving(rho, c_f, c_c):
    """Return what two levels save, the cost of the fine one alone over theirs at equal variance,
    and the best number of coarse steps per fine one, by the correlation of their advantages and the
    costs of a step: Peherstorfer et al. 2016, but with β = Cov/Var and coarse rows of their own."""
    rho = np.clip(rho, 0, 1)  # below 0 is as good as 0
    ratio = np.sqrt(rho**2 * (c_f + c_c) / ((1 - rho**2) * c_c))
    return c_f / (np.sqrt((c_f + c_c) * (1 - rho**2)) + rho * np.sqrt(c_c)) ** 2, ratio


def verdict(row, by_step=False):
    """Return what to do with a level, by its pair with the finest: the first line that holds."""
    rho, error, bias = row["rho_return"], row["rho_return_error"], -row["difference"]
    lines = [
        (by_step, "no verdict: with --coupling step partners do not play by themselves"),
        (row["check"] > 1, "no verdict: in pairs levels do not play as alone (--coupling step?)"),
        (row["kurtosis"] > 100, "no verdict: too few episodes, more by --num-envs"),
        (rho - error > 0.9, f"enough on its own, it sees what matters, bias {bias:.4g}"),
        (row["saving"] > 1.2, f"worth a correction, which saves {row['saving']:.1f} times"),
        (rho > 0.6, "good for a start, only runs tell for how long; a correction hardly pays"),
        (rho + error < 0.6, "drop it, it does not see what matters"),
        (True, "no verdict: too few episodes, or the policy's noise does not change the returns"),
    ]
    text = next(text for holds, text in lines if holds) + f"; rho {rho:.4g} ± {error:.1g}"
    alike = abs(bias) < 0.5 * max(abs(row["return"]), abs(row["return"] - bias), 1e-99)
    return text if alike else text + "; returns differ: same rewards, lengths? does one diverge?"


@torch.no_grad()
def play(model, levels, args, generator):
    """Play ROUNDS · N whole episodes of a level, (l,), or of pairs, (coarse, fine), from S starts R
    times, each member to its own end; with --coupling step the partner takes over the fine state
    after every step, and ends with it. Returns `returns`, `lengths` (members, S, R); `products` c²,
    f², cf of advantages (3, S, R); the number of `steps`, and of episodes `cut`."""
    N, L, name, results, cut = args.num_envs, len(levels), " or ".join(map(str, levels)), [], 0
    by_step, R, rows = L > 1 and args.coupling == "step", REPEATS if L > 1 else 1, []
    act, seeds = fast_act(model), game_seeds(args, *levels)[: 2 * L - 1]  # of the members
    with closing(make_pool(args, model, seeds, args.num_workers, levels)) as pool:
        games = {name: array[-L:] for name, array in pool.arrays.items()}  # members: (coarse, fine)
        for number in range(ROUNDS):
            pool.call("start", None, number % R == 0)  # R times from the same starts
            if number % R and not np.allclose(rows[0]["obs"], games["obs"], 1e-4, 1e-6, True):
                raise GameError(f"level {name}: starts from one seed differ: README, Randomness")
            c, f = (x - x.mean(axis=0) for x in games["obs"][[0, -1]].astype(float))  # (N, D)
            if number == 0 and (c * f).sum() < 0.5 * (f * f).sum():  # starts do not vary together
                report(f"level {name}: pairs start unlike: README, Randomness")
            rows, going = [], np.ones((L, N), bool)
            while going.any() and len(rows) < EVAL_STEPS:
                row = {"own": going, "obs": games["obs"].copy()}
                act(games, model.head.noise(N, generator).to(model.device))
                if by_step:
                    games["actions"][0] = games["actions"][1]
                    pool.call("step", 1, True)
                else:
                    for m in range(L - 1, 2 * L - 1):
                        pool.call("step_member", m)
                rows.append(row | {k: games[k].copy() for k in ("actions", *model.results)})
                going = going & ~(games["ended"][-1] if by_step else games["ended"])
            buffer = {k: np.stack([row[k] for row in rows]).swapaxes(1, 2) for k in rows[0]}
            own, both = buffer["own"], buffer["own"].all(axis=2)  # (T, N, members), (T, N)
            batch = make_batch(finish(model, buffer, name), model.inputs, args)
            A = batch["advantages"].cpu().double().numpy().reshape(own.shape)
            c, f = ((x - x[both].mean()) * both for x in (A[..., 0], A[..., -1]))
            returns = (buffer["rewards"] * own).sum(axis=0, dtype=float).T  # (members, N)
            results.append([*returns, *own.sum(0).T, *np.stack([c * c, f * f, c * f]).sum(1)])
            cut += int(going.any(axis=0).sum())
    results, steps = np.stack(results, axis=-1).reshape(2 * L + 3, -1, R), pool.arrays["steps"]
    found = {"returns": results[:L], "lengths": results[L:-3], "products": results[-3:]}
    return found | {"steps": steps.sum(), "cut": cut}


# ------------------------------------------------------------------------------------ reservoirs
# Shapes: n reservoirs stepped together, (ny, nx) cells, axis 0 = y, axis 1 = x; K fields.
# Units:  m, days, Pa; permeability k in m², viscosity μ in Pa s; per metre of reservoir thickness,
#         so rates q and fluxes v are m²/day and volumes are m².

FOOT, DAY, MILLIDARCY = 0.3048, 86400.0, 9.869233e-16  # m, s, m²


class Case(NamedTuple):
    """A reservoir and its operation: everything that does not depend on the level."""

    grids: tuple  # (ny, nx) of the levels, coarse to fine; the last one is the policy's grid
    lx: float  # size of the domain [m]
    ly: float
    injectors: tuple  # ((rows), (columns)) of the wells on the policy's grid
    producers: tuple
    fields: object  # function (case, n, seed): n permeability fields (n, ny, nx) [m²] on this grid
    dt: float  # one backward Euler step [days]
    pore_volumes: float  # injected in an episode of control_steps · substeps · dt days
    substeps: int = 5
    control_steps: int = 5
    porosity: float = 0.2
    mu_w: float = 3e-4  # viscosity of water and of oil [Pa s]
    mu_o: float = 3e-4
    s_wir: float = 0.0  # saturations that cannot be displaced: water, oil
    s_oir: float = 0.0
    mobility: str = "linear"  # or "quadratic": relative permeability S or S²
    n_fields: int = 16

    # Total mobility λ does not depend on the saturation, and f(S) = S
    linear = property(lambda case: case.mobility == "linear" and case.mu_w == case.mu_o)

    @property
    def rate(self):
        """What all injectors together inject, and all producers produce [m²/day]."""
        injected = self.pore_volumes * (self.lx * self.ly * self.porosity)  # [m²]
        return injected / (self.control_steps * self.substeps * self.dt)


def channel_fields(case, n, seed):
    """Straight channels, log k (millidarcy) 5.5 in -2, from the left to the right edge, in m²."""
    (ny, nx), rng = case.grids[-1], np.random.default_rng(seed)
    x, y = (np.arange(nx) + 0.5) / nx, (np.arange(ny)[:, None] + 0.5) / ny
    # Width w ~ U(0.1, 0.3) of ly; its lower side starts and ends at heights ~ U(0, ly - w).
    width, left, right = rng.random((3, n, 1, 1))
    width = 0.1 + 0.2 * width
    above = y - (1 - width) * (left + (right - left) * x)  # (n, ny, nx) height above the lower side
    return MILLIDARCY * np.exp(np.where((above >= 0) & (above <= width), 5.5, -2.0))


def gaussian_fields(case, n, seed, mean=2.41, variance=5.0, lengths=(1.0, 0.1), angle=math.pi / 8):
    """Gaussian log k (millidarcy), known to be `mean` at the wells, in m²."""
    (ny, nx), rng = case.grids[-1], np.random.default_rng(seed)
    dy, dx, cos, sin = case.ly / ny, case.lx / nx, math.cos(angle), math.sin(angle)

    # C(h) = variance · exp(-|h'|), h' = h rotated by angle [rad, x to -y], divided by lengths · lx
    def covariance(hy, hx):
        along, across = cos * hx - sin * hy, cos * hy + sin * hx
        return variance * np.exp(-np.hypot(along / lengths[0], across / lengths[1]) / case.lx)

    # Drawn on a periodic grid by FFT (circulant embedding, Dietrich & Newsam 1997), whose period is
    # the domain + 8 longest lengths: C is within 0.4 % of the wanted one (5 lengths: 2 %).
    pad, z = 8 * max(lengths) * case.lx, []
    my, mx = math.ceil((case.ly + pad) / dy), math.ceil((case.lx + pad) / dx)
    hy, hx = np.fft.fftfreq(my, 1 / my) * dy, np.fft.fftfreq(mx, 1 / mx) * dx
    eigenvalues = np.fft.fft2(covariance(hy[:, None], hx)).real.clip(min=0)  # (my, mx)
    for _ in range(0, n, 2):  # real and imaginary part are two independent fields
        a, b = rng.standard_normal((2, my, mx))
        both = np.fft.fft2(np.sqrt(eigenvalues / eigenvalues.size) * (a + 1j * b))[:ny, :nx]
        z += [both.real.copy(), both.imag.copy()]
    z = np.array(z[:n])  # (n, ny, nx)
    # Simple kriging: z(x) ← z(x) - C(x, wells) C(wells, wells)⁻¹ z(wells), which is 0 at the wells.
    rows, cols = np.concatenate([case.injectors, case.producers], axis=1)
    y, x = np.arange(ny) * dy, np.arange(nx) * dx
    c = covariance(y[:, None, None] - y[rows], x[:, None] - x[cols])  # (ny, nx, wells)
    z -= np.einsum("yxw,wn->nyx", c, np.linalg.solve(c[rows, cols], z[:, rows, cols].T))
    return MILLIDARCY * np.exp(mean + z)


def streak_fields(case, n, seed, width=1):
    """Thief zones, `width` cells wide: log k (millidarcy) N(3, 0.3²), streaks of 8; in m²."""
    (ny, nx), rng = case.grids[-1], np.random.default_rng(seed)
    log_k = rng.normal(3.0, 0.3, (n, ny, nx))
    for field in log_k:
        for _ in range(rng.integers(2, 4)):  # from a random row to a random row
            rows = np.rint(np.linspace(*rng.integers(ny, size=2), nx)).astype(int)
            rows = rows.clip(max=ny - width)
            for col, ends in enumerate(zip([rows[0], *rows], rows)):  # from the previous one's
                field[min(ends) : max(ends) + width, col] = 8.0
    return MILLIDARCY * np.exp(log_k)


def _built_in_cases():
    grids, size = tuple((m, m) for m in (8, 16, 32, 64, 128)), (1200 * FOOT, 1200 * FOOT)
    rows, left, right = tuple(range(2, 128, 4)), (0,) * 32, (127,) * 32
    v1 = Case(grids, *size, (rows, left), (rows, right), channel_fields, dt=5.0, pore_volumes=0.7)
    wells = (tuple(range(1, 64, 2)), left), (tuple(range(1, 64, 2)), (63,) * 32)
    v3 = Case(grids[:4], *size, *wells, streak_fields, dt=5.0, pore_volumes=0.7)
    v4 = v3._replace(fields=functools.partial(streak_fields, width=3))
    grids, size = ((27, 9), (57, 19), (111, 37), (219, 73)), (620 * FOOT, 1820 * FOOT)
    rows = tuple(range(1, 219, 36))  # injectors in the middle column, producers on both edges
    wells = (rows, (36,) * 7), (tuple(sorted(2 * rows)), (0, 72) * 7)
    v2 = Case(grids, *size, *wells, gaussian_fields, dt=1.0, pore_volumes=1.0)
    return {"ResSim-v1": v1, "ResSim-v2": v2, "ResSim-v3": v3, "ResSim-v4": v4}


CASES = _built_in_cases()


def partition(n, parts):
    """Edges (parts + 1,) of n cells cut into parts; the first n mod parts get one cell more."""
    i = np.arange(parts + 1)
    return i * (n // parts) + np.minimum(i, n % parts)


def coarsen(x, shape):
    """x (..., ny, nx) on a coarser grid `shape`: the means over the cells in a cell."""
    rows, cols = partition(x.shape[-2], shape[0]), partition(x.shape[-1], shape[1])
    sums = np.add.reduceat(np.add.reduceat(x, rows[:-1], axis=-2), cols[:-1], axis=-1)
    return sums / (np.diff(rows)[:, None] * np.diff(cols))


def refine(x, shape):
    """x (..., ny, nx) on a finer grid `shape`: every cell is repeated over the cells in it."""
    rows = np.diff(partition(shape[0], x.shape[-2]))
    return x.repeat(rows, axis=-2).repeat(np.diff(partition(shape[1], x.shape[-1])), axis=-1)


def mobility(s, case):
    """Total mobility λ [1/(Pa s)], water's share f of the flow and df/ds at saturations s."""
    movable, m = 1 - case.s_wir - case.s_oir, 1 if case.mobility == "linear" else 2
    # S = (s - s_wir) / (1 - s_wir - s_oir), λ_w = Sᵐ/μ_w, λ_o = (1 - S)ᵐ/μ_o, m = 1 or 2
    big_s = (s - case.s_wir) / movable
    water, oil = big_s**m / case.mu_w, (1 - big_s) ** m / case.mu_o
    d_water, d_oil = m * big_s ** (m - 1) / case.mu_w, -m * (1 - big_s) ** (m - 1) / case.mu_o
    # λ = λ_w + λ_o, f = λ_w / λ, df/ds = (λ_w' λ_o - λ_w λ_o') / λ² · dS/ds
    total = water + oil
    return total, water / total, (d_water * oil - water * d_oil) / (total**2 * movable)


def factor_lower(values, rows, cols):
    """LU factors of the sparse lower triangular matrix of these entries (none twice)."""
    matrix = sparse.coo_array((values, (rows, cols)))
    matrix.has_canonical_format = True  # nothing to sum, and SuperLU needs no sorted columns:
    matrix = matrix.tocsc()
    matrix.has_canonical_format = True  # so do not sort
    return splu(matrix, permc_spec="NATURAL", diag_pivot_thresh=0, panel_size=2, relax=1)


def transport(s, p, t, q, grid):
    """Saturations (n, ny, nx) after `case.substeps` backward Euler steps of `case.dt` days in the
    flow of pressures p, transmissibilities t (n, faces) and rates q."""
    case, shape, n, size = grid.case, s.shape, len(s), s.size
    # Ordered by falling pressure, fluid moves to later cells only: matrices are lower triangular.
    first = np.arange(0, size, size // n, dtype=np.int32)[:, None]  # cell of each reservoir
    order = (np.argsort(-p.reshape(n, -1)) + first).ravel()
    index, rank = np.arange(size, dtype=np.int32), np.empty(size, dtype=np.int32)
    rank[order] = index
    a, b = rank[(grid.a + first).ravel()], rank[(grid.b + first).ravel()]
    up, down = np.minimum(a, b), np.maximum(a, b)
    s, p, q = s.ravel()[order], p.ravel()[order], q.ravel()[order]
    v = t.ravel() * (p[up] - p[down])  # fluxes [m²/day] through the faces
    leaving = np.bincount(up, v, size) - np.minimum(q, 0)
    # The upwind matrix: what leaves the cells on its diagonal, then what flows from `up` to `down`
    rows, cols = np.concatenate([index, down]), np.concatenate([index, up])
    flow, source = np.concatenate([leaving, -v]), np.maximum(q, 0)
    # Every step solves  storage (S⁺ - S) + flow f(S⁺) = source  for S⁺, S = (s - s_wir) / movable.
    movable = 1 - case.s_wir - case.s_oir
    big_s = (s - case.s_wir) / movable
    storage = np.broadcast_to(grid.pore * movable / case.dt, shape).ravel()[order]
    if case.linear:  # f(S) = S: one matrix for all steps
        flow[:size] += storage
        lu = factor_lower(flow, rows, cols)
        for _ in range(case.substeps):
            big_s = lu.solve(storage * big_s + source)
    else:
        # Where f is steepest: a Newton step across this S stops there, and so Newton converges
        # (Jenny, Tchelepi & Lee 2009, J. Comput. Phys. 228).
        grid_s = np.linspace(0, 1, 2001)
        steepest = grid_s[mobility(case.s_wir + movable * grid_s, case)[2].argmax()]
        for _ in range(case.substeps):
            old = big_s
            for _ in range(200):
                _, f, df = mobility(case.s_wir + movable * big_s, case)
                residual = storage * (big_s - old) + np.bincount(rows, flow * f[cols]) - source
                error = np.abs(residual / (storage + leaving)).reshape(n, -1).max(axis=1)
                if (error < 1e-12).all():
                    break
                jacobian = flow * (df * movable)[cols]
                jacobian[:size] += storage
                new = big_s - factor_lower(jacobian, rows, cols).solve(residual)
                new = new.clip(-1e-6, 1 + 1e-6)  # the fluxes' rounding errors need some room
                new[(big_s - steepest) * (new - steepest) < 0] = steepest
                # A reservoir that has converged stays as it is, whatever its neighbours do.
                big_s = np.where(np.repeat(error < 1e-12, size // n), big_s, new)
            else:
                raise RuntimeError(f"transport: Newton residual {error.max():.1e} after 200 steps")
    return (case.s_wir + movable * big_s[rank]).reshape(shape)


@functools.cache  # so that a field's pressure matrix is factored once in a process
class Grid:
    """One level of a case, with its permeability fields of a seed, `perm` (K, ny, nx) [m²]."""

    def __init__(self, case, level, seed):
        self.case, self.level, self.shape = case, level, case.grids[level - 1]
        ny, nx = self.shape
        if level == len(case.grids):
            self.perm = k = np.asarray(case.fields(case, case.n_fields, seed), float)
            if k.shape[1:] != self.shape or not 0 < k.min() <= k.max() < np.inf:
                raise ValueError(f"fields must be (K, *{self.shape}), finite, > 0")
        else:  # harmonic means
            self.perm = 1 / coarsen(1 / Grid(case, len(case.grids), seed).perm, self.shape)
        self.pore = case.lx * case.ly * case.porosity / (ny * nx)  # [m²] per cell
        # Between cells a and b (faces,) there is a face; its length over their distance.
        cells, ratio = np.arange(ny * nx).reshape(ny, nx), (case.ly / ny) / (case.lx / nx)
        self.a = np.concatenate([cells[:, :-1], cells[:-1]], axis=None, dtype=np.int32)
        self.b = np.concatenate([cells[:, 1:], cells[1:]], axis=None, dtype=np.int32)
        self.ratio = np.repeat([ratio, 1 / ratio], [ny * (nx - 1), (ny - 1) * nx])
        # Index (..., rows, columns) of the wells' cells; a coarse cell may hold several.
        cells = refine(cells, case.grids[-1])
        self.injectors = ..., *np.unravel_index(cells[case.injectors], self.shape)
        self.producers = ..., *np.unravel_index(cells[case.producers], self.shape)
        self.factored = {}  # field -> LU factors, transmissibilities

    def solve_pressure(self, field, s, q):
        """Pressure p [Pa] (ny, nx) with div(-k λ(s) grad p) = q; transmissibilities (faces,)."""
        case, a, b = self.case, self.a, self.b
        if field not in self.factored or not case.linear:
            # λ of a linear case never changes, not even by rounding: once is enough
            lam = mobility(case.s_wir if case.linear else s, case)[0]
            # T = 2 A / (Δ/k₁ + Δ/k₂): area over distance times the harmonic mean of k λ, per day
            r = 1 / (DAY * self.perm[field] * lam).ravel()
            t = 2 * self.ratio / (r[a] + r[b])
            # p is free up to a constant: the first entry, doubled, makes p[0, 0] = 0, since Σ q = 0
            rows, cols = np.concatenate([a, b, a, b, [0]]), np.concatenate([a, b, b, a, [0]])
            values = np.concatenate([t, t, -t, -t, [t[a == 0].sum()]])
            matrix = sparse.csc_array((values, (rows, cols)))  # values at the same place are summed
            hints = {"diag_pivot_thresh": 0, "panel_size": 4, "relax": 2}  # for symmetric matrices
            lu = splu(matrix, "MMD_AT_PLUS_A", **hints, options={"SymmetricMode": True})
            self.factored[field] = lu, t
        lu, t = self.factored[field]
        return lu.solve(q.ravel()).reshape(q.shape), t

    def observe(self, s, p):
        """psi for a batch: s, p (..., ny, nx) -> (..., observations), see `ResSim.psi`."""
        p = np.concatenate([p[self.producers], p[self.injectors]], axis=-1)
        low, high = p.min(axis=-1, keepdims=True), p.max(axis=-1, keepdims=True)
        p = 1 - 2 * (high - p) / np.maximum(high - low, 1e-300)  # all 1 if there is no difference
        return np.concatenate([s[self.producers].clip(0, 1), p], axis=-1)


class ResSim(gym.Env):
    """Water displaces oil in one reservoir, simulated on one level; an action sets the wells.

    Darcy pressure once per control step, then upwind transport (Dixit & ElSheikh, arXiv 2210.08400,
    section 4). Reward: oil produced / oil in place at first. Terminated after `case.control_steps`.
    A `Case` or a name in CASES; level 1 is coarsest; fields of training, evaluation, validation."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 2}

    def __init__(self, case, level, evaluation=False, validation=False, render_mode=None):
        self.case = case = CASES[case] if isinstance(case, str) else case
        if level not in range(1, len(case.grids) + 1):
            raise ValueError(f"level must be 1..{len(case.grids)}, got {level}")
        self.fields = 2 if validation else int(evaluation)  # the seed of the set
        self.grid, self.render_mode, self.t = Grid(case, level, self.fields), render_mode, None
        n_in, n_out = len(case.injectors[0]), len(case.producers[0])
        low = np.r_[np.zeros(n_out), -np.ones(n_out + n_in)].astype(np.float32)
        self.observation_space = gym.spaces.Box(low, np.float32(1), dtype=np.float32)
        self.action_space = gym.spaces.Box(0.001, 1, (n_in + n_out,), dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        """All oil; a field is drawn, or `options={"field": k}` picks it. Returns psi, info."""
        super().reset(seed=seed)
        K = len(self.grid.perm)  # consecutive seeds of an evaluation visit every field
        field = seed % K if self.fields and seed is not None else self.np_random.integers(K)
        self.field = int((options or {}).get("field", field))
        if self.field not in range(K):
            raise ValueError(f"field must be 0..{K - 1}, got {self.field}")
        self.s = np.full(self.grid.shape, self.case.s_wir)  # water saturation
        self.p, self.t = np.zeros(self.grid.shape), 0  # pressure, control steps since reset
        return self.psi().astype(np.float32), {"field": self.field}

    def phi(self, action):
        """Action (..., wells), relative rates, injectors first -> q (..., ny, nx) [m²/day]."""
        grid, a = self.grid, np.asarray(action, dtype=np.float64).clip(0.001, 1)
        a_in, a_out = np.split(a, [len(self.case.injectors[0])], axis=-1)
        q = np.zeros((*a.shape[:-1], *grid.shape))
        # q = ± total rate · a / Σ a, wells in the same cell add up
        np.add.at(q, grid.injectors, self.case.rate * a_in / a_in.sum(-1, keepdims=True))
        np.add.at(q, grid.producers, -self.case.rate * a_out / a_out.sum(-1, keepdims=True))
        return q

    def psi(self):
        """State -> observation: s and p at producers, p at injectors, p scaled to [-1, 1]."""
        return self.grid.observe(self.s, self.p)

    def get_state(self):
        """Return what `set_state` of a simulation of this case and level needs to go on."""
        return self.s, self.p, self.t, self.field, self.np_random

    def set_state(self, state):
        self.s, self.p, self.t, self.field, self.np_random = state

    def map_from(self, other):
        """Take over the state of another level, coarsened or refined; ValueError: another case."""
        if (self.case, self.fields) != (other.case, other.fields):
            raise ValueError("map_from needs the same simulation, on another level")
        change = coarsen if other.grid.level >= self.grid.level else refine
        self.s, self.p = change(other.s, self.grid.shape), change(other.p, self.grid.shape)
        self.field, self.t = other.field, other.t

    def step(self, action):
        """One control step. ValueError: action not finite; RuntimeError: episode over."""
        obs, rewards, terminated, truncated = self.step_batch([self], np.asarray(action)[None])
        return obs[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}

    @staticmethod
    def step_batch(envs, actions):
        """`step` of n simulations of one case and level, bitwise as if stepped alone: actions (n,
        wells) -> obs (n, n_obs) float32, rewards (n,), terminated (n,), truncated (n,)."""
        case, grid, shape = envs[0].case, envs[0].grid, (len(envs), *envs[0].action_space.shape)
        actions = np.asarray(actions, dtype=np.float64)
        if actions.shape != shape or not np.isfinite(actions).all():
            raise ValueError(f"actions must be finite and of shape {shape}")
        if any(env.t is None or env.t >= case.control_steps for env in envs):
            raise RuntimeError("ResSim: step() before reset() or after the end of the episode")
        s, q = np.stack([env.s for env in envs]), envs[0].phi(actions)  # (n, ny, nx)
        # One right-hand side per solve: solving several at once rounds differently.
        solved = [e.grid.solve_pressure(e.field, e.s, e_q) for e, e_q in zip(envs, q)]
        p, t = (np.stack(arrays) for arrays in zip(*solved))
        chunk = max(1, 2**13 // s[0].size)  # reservoirs at a time: what the cache holds
        parts = [slice(i, i + chunk) for i in range(0, len(envs), chunk)]
        s_new = np.concatenate([transport(s[i], p[i], t[i], q[i], grid) for i in parts])
        for env, env_s, env_p in zip(envs, s_new, p):
            env.s, env.p, env.t = env_s, env_p, env.t + 1
        # Nothing is compressible and all boundaries are closed: oil produced = water gained
        gained = grid.pore * (s_new - s).sum(axis=(1, 2))
        rewards = gained / (grid.pore * s[0].size * (1 - case.s_wir))
        terminated, truncated = np.array([[env.t >= case.control_steps, False] for env in envs]).T
        return grid.observe(s_new, p).astype(np.float32), rewards, terminated, truncated

    def render(self):
        """Picture (height, width, 3) uint8: oil brown, water blue; wells white (in), red (out)."""
        zoom = math.ceil(256 / self.case.grids[-1][0])
        share = refine(self.s, self.case.grids[-1])[..., None].clip(0, 1)
        image = (1 - share) * (84, 52, 30) + share * (44, 123, 214)  # (ny, nx, 3)
        image[self.case.injectors], image[self.case.producers] = 255, (230, 30, 30)
        return image.astype(np.uint8).repeat(zoom, axis=0).repeat(zoom, axis=1)


# ------------------------------------------------------------------------------------ command line
# By --env: levels and total cost of a climb, levels and steps of --schedule together.
DEFAULTS = {
    "ResSim-v1": ([1, 2, 3, 4, 5], 32_000.0, [2, 5], [100, 5]),
    "ResSim-v2": ([1, 2, 3, 4], 50_000.0, [1, 4], [140, 5]),
    "ResSim-v3": ([1, 2, 3, 4], 200_000.0, [3, 4], [60, 15]),
    "ResSim-v4": ([1, 2, 3, 4], 200_000.0, [3, 4], [60, 15]),
}
# What may be another for a run that goes on or is evaluated; what config.json does not keep.
MAY_CHANGE = "device num_workers total_timesteps num_iterations eval_every eval_episodes save_every"
MAY_CHANGE += " total_cost"
NOT_KEPT = {"resume", "eval", "sample", "video", "export_onnx", "quiet", "analyse"}
MAY_ANALYSE = MAY_CHANGE + " num_envs num_steps levels level_costs coupling seed"


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


def or_auto(kind):
    """Return an argparse type: `kind`, or the word auto."""
    parse = functools.wraps(kind)(lambda text: text if text == "auto" else kind(text))
    parse.__name__ = f"{kind.__name__} or auto"
    return parse


def parse_args(argv=None):
    """Parse and check the command line (default: the program's)."""
    parser = make_parser()
    given = parser.parse_args(argv)  # --env, --schedule, --levels decide on the others' defaults
    climbed, cost, pair, pair_steps = DEFAULTS.get(given.env, ([], 0.0, [], []))
    parser.set_defaults(levels=climbed, schedule="together" if len(given.levels) == 1 else "climb")
    parser.set_defaults(init_log_std=-2.9 if given.env in CASES else 0.0)
    if given.schedule == "together" and len(given.levels) != 1 and given.analyse is None:
        parser.set_defaults(learning_rate=3e-5, update_epochs=10, target_kl=0.05)
        parser.set_defaults(levels=pair, num_steps=[100, "auto"] if given.levels else pair_steps)
    args = parse_with_run(parser, argv)
    if args.levels != sorted(set(args.levels)) or len(args.levels) < (2 if args.analyse else 1):
        parser.error("argument --levels: give them, coarse to fine, like 1 2 3 (--analyse: two up)")
    L, last = len(args.levels), args.levels[-1]
    if args.analyse is not None:  # all members play, whatever the run's schedule was
        args.schedule, args.eval_level, args.num_steps = "together", None, args.num_steps[:1] * L
        args.level_costs = given.level_costs
    args.eval_level, climbs = args.eval_level or last, args.schedule == "climb"
    used, spaces = sorted({*args.levels, args.eval_level}), []
    for level in used:
        with closing(make_env(args.env, level)) as env:
            spaces.append((env.observation_space, env.action_space))
            if args.coupling == "step" and not hasattr(env.unwrapped, "map_from"):
                parser.error(f"argument --coupling: step needs map_from, which {args.env} has not")
        if spaces[-1] != spaces[0]:
            parser.error(f"argument --levels: level {level} has {spaces[-1]}, not {spaces[0]}")
    args.resume or args.eval or num_options(box := env.action_space) or warn_of_scale(args, box)
    paired = L > 1 and not climbs
    if not args.eval and not last <= args.eval_level <= (last if climbs or paired else math.inf):
        parser.error("argument --eval-level: the last of --levels, or above a single one")
    if args.level_costs and not args.eval and len(args.level_costs) != len(used) + 1:
        parser.error(f"argument --level-costs: give {len(used) + 1} numbers, the last of an update")
    for name in ("coupling", "correction", "control"):
        if climbs and getattr(args, name) != parser.get_default(name):
            parser.error(f"argument --{name}: only with --schedule together")
    if climbs and args.check_episodes < NUM_RANKS:
        parser.error(f"argument --check-episodes: each of the {NUM_RANKS} ranks needs one")
    if args.num_steps[1:] == (["auto"] if paired else []):  # 'T auto', or T: the last for the rest
        args.num_steps = args.num_steps[:1] + args.num_steps[-1:] * (L - 1)
    if len(args.num_steps) != L or "auto" in args.num_steps[: 1 if paired else L]:
        parser.error(f"argument --num-steps: one number per level of {args.levels}, or see --help")
    for i, T in enumerate(args.num_steps):
        if T != "auto":
            check_rows(parser, args, args.num_envs * T, "finer rows" if paired and i else "rows")
    if args.total_cost and (args.total_timesteps or args.num_iterations):
        parser.error("argument --total-cost: not with --total-timesteps, --num-iterations")
    if args.total_timesteps and L == 1:
        args.num_iterations = max(1, args.total_timesteps // (args.num_envs * args.num_steps[0]))
    given = args.total_cost or args.total_timesteps or args.num_iterations
    if climbs and not given:
        usual = 100.0 * args.num_envs * max(args.num_steps)
        args.total_cost = cost if climbed[-1:] == [last] else usual
    args.num_iterations = args.num_iterations if climbs or given else 200
    return args


def parse_with_run(parser, argv):
    """Parse argv; a run's own options are the defaults, and most stay."""
    args = parser.parse_args(argv)
    if not args.eval and (args.sample or args.video or args.export_onnx):
        parser.error("argument --sample, --video, --export-onnx: only with --eval")
    if (args.analyse is not None) + bool(args.eval) + (bool(args.resume) or NUM_RANKS > 1) > 1:
        parser.error("argument --eval, --analyse: one of them, not with --resume, torchrun")
    args.export_onnx and __import__("onnx")  # torch needs it for that
    if run_dir := args.resume or args.eval or args.analyse:
        try:
            options = json.loads((Path(run_dir) / "config.json").read_text())["options"]
            if others := options.keys() ^ (vars(args).keys() - NOT_KEPT):
                raise ValueError(f"not a run of this script, see options {sorted(others)[:3]}")
            if any(getattr(args, name) for name in LENGTHS):
                options |= dict.fromkeys(LENGTHS)
            parser.set_defaults(**options)
            own, args = parser.parse_args([]), parser.parse_args(argv)
            free = MAY_ANALYSE if args.analyse else MAY_CHANGE + " eval_level" * bool(args.eval)
            for name in sorted(options.keys() - free.split()):
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
        act = evaluate_run if args.eval else train if args.analyse is None else analyse
        result = act(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if args and not args.eval and not isinstance(error, told):
            raise
        line = error if isinstance(error, GameError) else one_line(error)
        print(f"{Path(__file__).name}: error: {line}", file=sys.stderr)
        return 1 if args else 2
    return 128 + result.signal if act is train and result.signal else 0


if __name__ == "__main__":
    sys.exit(main())
