"""PPO (proximal policy optimisation) for Gymnasium environments with vector observations.

    python ppo.py --env CartPole-v1                        # train, about half a minute
    python ppo.py --env Pendulum-v1 --gamma 0.9 --num-steps 256 --learning-rate 1e-3 --norm-reward
    python ppo.py --env Taxi-v4 --num-envs 16 --learning-rate 1e-3 --norm-reward  # action masks
    python ppo.py --eval runs/CartPole-v1__ppo__1__<time>  # evaluate what a run has learned
    tensorboard --logdir runs

How to read this file
    Is reinforcement learning new to you? Read "New to reinforcement learning" in README.md first:
    it explains the terms. Then read "The algorithm" below, with the symbols of "Notation and
    shapes". Skip the options, and read the functions in this order:

    1. `train`, the loop.
    2. Play: `rollout`, and far below `Player`, from `play` on, and `Game`. Then `Policy.act` and
       `Categorical.sample`. Playing computes in NumPy, learning in torch.
    3. Judge: `add_values`, `gae`, `make_batch`.
    4. Learn: `update`, `run_epoch`, `minibatches`, `normalised`, `minibatch_loss`, `losses`,
       `policy_change`, `gradient_step`.
    5. The networks: `Model`, `Categorical`.

    A first reading can pass over lines on `memory`, `state`, masks and `value_norm`, whose options
    are off by default. "The machinery" below is for those who then want to know how runs are
    stopped and saved. The section "From the policy gradient to the clip" of
    tests/benchmarks/reference.md derives the equations.

The algorithm
    Each iteration plays T steps in N environments with the current policy π_θ, which is then called
    π_old, and makes K passes (epochs) of minibatch gradient steps over what was recorded. V is the
    value function. It predicts the sum of all rewards from a state on, discounted by γ per step:

    V(s_t) ≈ E[Σ_k γ^k r_{t+k}]

    The policy gradient is the gradient of a cross-entropy loss with weights: the label is the
    action a_t that was taken, and its weight says how good it was. If the weight were the sum of
    the rewards that followed, the gradient would be noisy. Subtracting V(s_t), which does not
    depend on a_t, lowers the noise, and the gradient's mean stays the same. So the weight is the
    advantage Â_t: how much better a_t was than V expected. It is a sum of δ, each of which says how
    wrong V was about one step. This is generalised advantage estimation, GAE. done_t is 1 if the
    episode ends with step t, and terminated_t is 1 if it ends for another reason than a time limit.

    δ_t = r_t + γ V(s_{t+1}) (1 − terminated_t) − V(s_t)                         PPO, Eq. (12)
    Â_t = Σ_l (γλ)^l δ_{t+l}, up to the end of the episode or of the rollout
        = δ_t + γλ (1 − done_t) Â_{t+1}                        PPO, Eq. (11);  GAE, Eq. (16)
    R_t = Â_t + V(s_t), to which V is fitted; the code calls it `returns`

    For example, three steps have the rewards 0, 0, 1 and V = 0.5, 0.6, 0.8, then the episode
    terminates. With γ = 1 the δ are 0.6 − 0.5 = 0.1, 0.8 − 0.6 = 0.2 and 1 − 0.8 = 0.2. With
    λ = 0.5, Â_0 is 0.1 + 0.5 · 0.2 + 0.25 · 0.2 = 0.25. λ chooses how many rewards Â_t uses before
    it relies on V. λ = 0 relies on V after one reward, so Â_0 is δ_0 = 0.1: low variance, but a
    wrong V biases the gradient. λ = 1 uses all rewards, so Â_0 is 1 − 0.5: noisy, but V replaces
    rewards only where a time limit or the rollout's end cuts the episode.

    Environment steps are expensive, so each batch is reused for K epochs. The ratio corrects for
    the policy having changed since. At ratio 1 the gradient is that of the cross-entropy above,
    since ∇ratio = ratio · ∇log π_θ. States and Â_t remain those of π_old, and say little about a
    policy far from it. So there is a clip, which takes away what could be gained by going far.

    ratio_t = π_θ(a_t|s_t) / π_old(a_t|s_t)                              r_t(θ) in PPO, Sec. 3
    L^CLIP(θ) = E[min(ratio_t Â_t, clip(ratio_t, 1−ε, 1+ε) Â_t)]                 PPO, Eq. (7)

    The clip means that a row, a recorded step, stops pushing: if its ratio is above 1 + ε and
    Â_t > 0, or below 1 − ε and Â_t < 0, its policy gradient is 0. If the ratio has moved the wrong
    way, the minimum keeps the gradient. The clip does not limit the probability, which other rows
    still move, as all share the weights. `clipfrac` is the share of ratios beyond 1 ± ε. In the
    loss the entropy H rewards a policy that keeps trying different actions:

    loss = −L^CLIP(θ) + E[c_v ½ (V_θ(s_t) − R_t)² − c_e H(π_θ(·|s_t))]           PPO, Eq. (9)
           + β E[KL(π_old(·|s_t), π_θ(·|s_t))], only with --kl-coef               PPO, Eq. (8)

    On by default, and not in the equations: advantages are normalised, V's change is clipped, so is
    the gradient, and the learning rate falls to 0.

Notation and shapes
    s_t state or observation, a_t action, r_t reward. π_θ(a|s) is the probability of a in s with the
    weights θ, γ the discount per step. λ, ε, c_v, c_e and β are options, see --help. A row is what
    was recorded of one step of one environment, but the dict `row` is what is logged. E[·] is a
    mean: in V over what may follow, in the loss over the rows of a minibatch. H(p) = E_p[−log p] is
    the entropy of p, and KL(p, q) = E_p[log p − log q] says how far q is from p.
    T steps (--num-steps), N environments (--num-envs), K epochs, B minibatches of M rows.
    `model.inputs` names what the model sees: obs, and starts, state, action_mask if they are used.
    D observation entries, A action entries, n logits of a discrete policy, F features of the last
    hidden layer, U features of a recurrent policy's memory, S entries of its whole state.
    `pi` is the output of the policy's last layer, `model.head`: the log-probabilities of the
    choices, or the mean of a Gaussian. It is not π. From it the head computes the log-probabilities
    of actions, and the entropy.
    `returns` in a batch are R_t. The return of an episode is the plain sum of its rewards.
    What is stored at index t belongs to the action at step t. `terminated` means that this action
    ended the task. `truncated` means that a time limit cut the episode short, so V(s_{t+1}) stands
    for the rewards that would have followed. done_t is 1 after either. Then s_{t+1} is
    `next_obs[t]`, since `obs[t+1]` is the first observation of the next episode.

The machinery
    How the games are played stands in the section "games": `Player.play` and `Game.step`. `train`
    opens a `Run`, which logs, evaluates, saves and stops. It has a `WorkerPool`: one `Player` in
    each worker process, or one in this process. A player has its share of the games, a `Policy`
    that acts for them, and the rows that they fill. A `Game` is one environment. `rollout` sends
    all players the command "play", and puts side by side what they answer.
    Several processes can train one model together, started by torchrun. They are called ranks. In a
    single process RANK is 0 and NUM_RANKS is 1. Then `gathered_objects`, `averaged`, `own_rows` and
    `average_gradients` change nothing, so a first reading can skip them.

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

FLAG = argparse.BooleanOptionalAction  # --x and --no-x


def add_ppo_options(parser):
    """Add the options of PPO."""
    add = parser.add_argument_group("PPO", "Usual ranges stand in brackets.").add_argument
    modes = ("minibatch", "batch", "off")
    add("--num-envs", type=int, default=4, help="N, environments (4 to 64)")
    add(
        "--num-steps", type=int, default=128, help="T, steps of each env per iteration (16 to 2048)"
    )
    add("--learning-rate", type=float, default=2.5e-4, help="Adam's step size (1e-5 to 1e-3)")
    add("--anneal-lr", action=FLAG, default=True, help="lower the rate linearly to 0 over the run")
    add("--gamma", type=float, default=0.99, help="γ, discount per step (0.9 to 0.9997)")
    add("--gae-lambda", type=float, default=0.95, help="λ, 0: low variance, 1: little bias (0.95)")
    add("--num-minibatches", type=int, default=4, help="B, minibatches per epoch; divides N · T")
    add("--update-epochs", type=int, default=4, help="K, passes over a rollout (3 to 30)")
    add("--norm-adv", choices=modes, default="minibatch", help="over what to normalise advantages")
    add("--clip-coef", type=float, default=0.2, help="ε, clip the ratio at 1 ± ε (0.1 to 0.3)")
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


def add_network_options(parser):
    """Add the options of the networks."""
    add = parser.add_argument_group("network").add_argument
    names = sorted(ACTIVATIONS)
    add("--hidden", type=int, nargs="+", default=[64, 64], help="widths of the hidden layers")
    add("--activation", choices=names, default="tanh", help="activation of the hidden layers")
    add("--layer-norm", action=FLAG, default=False, help="LayerNorm before every activation")
    add("--shared-net", action=FLAG, default=False, help="policy and V share the hidden layers")
    add("--init-log-std", type=float, default=0.0, help="initial log σ of a Gaussian (-3 to 0)")
    add("--full-covariance", action=FLAG, default=False, help="correlate a Gaussian's entries")
    add("--norm-obs", action=FLAG, default=False, help="observations as (s − μ) / σ, within ±10")
    add("--norm-value", action=FLAG, default=False, help="V's targets as (R − μ) / σ (PopArt)")


def add_own_options(parser):
    """Add the options that only ppo.py has."""
    add = parser.add_argument_group("ppo.py").add_argument
    cells = ("gru", "lstm")
    add("--env", default="CartPole-v1", help="Gymnasium id, or module:id")
    add(
        "--norm-reward", action=FLAG, default=False, help="divide rewards by σ of their running sum"
    )
    add("--action-masks", action=FLAG, help="use the env's action masks; by default if it has them")
    add(
        "--time-limit-bootstrap",
        action=FLAG,
        default=True,
        help="add γ V(s_{t+1}) where a time limit ends an episode",
    )
    add("--baseline", action=FLAG, default=True, help="use V; without it Â_t = Σ_k (γλ)^k r_{t+k}")
    add("--kl-coef", type=float, default=0.0, help="β, weight of a KL penalty (0.01 to 3)")
    add(
        "--adaptive-lr",
        type=float,
        help="no annealing: change the rate so that KL stays near this (0.01)",
    )
    add("--rnn", choices=cells, help="memory in front of the hidden layers; B must divide N")
    add("--rnn-size", type=int, default=64, help="U, width of the memory")


# ------------------------------------------------------------------------------------ train
def train(args):
    """Train with these options. Returns the `Run`.

    If a game fails, the run is saved, and GameError is raised.
    """
    # More threads only slow a small network down.
    torch.set_num_threads(1)
    # The weights are drawn from torch's global generator, noise and minibatches from another one.
    seed_generators(args.seed)
    model = make_model(args)
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = make_optimizer(model, args)

    with Run(args, model, optimizer, generator) as run:
        run.begin()
        while run.goes_on():
            if not args.adaptive_lr:
                remaining = 1 - run.share_done() if args.anneal_lr else 1
                for group in optimizer.param_groups:
                    group["lr"] = args.learning_rate * remaining

            # Play: T steps in each of N environments with the policy π_old.
            buffer = rollout(model, run.pool, args, generator)

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
            # before the update they would make ratios ≠ 1 at its start.
            if args.norm_obs:
                model.obs_norm.update(buffer["obs"].flatten(0, 1))

            run.end_iteration(row, finished_episodes(buffer), args.num_envs * args.num_steps)
    return run


def make_optimizer(model, args):
    """Return Adam over all parameters. Its ε is that of OpenAI's baselines, as in CleanRL."""
    return torch.optim.Adam(model.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)


# ------------------------------------------------------------------------------------ rollout
def rollout(model, pool, args, generator):
    """Play T steps in all N environments with the current policy.

    The players of the `pool` do it, in this process or in workers. In short, `Player.play` is

        for t in range(T):
            actions[t] = policy.act(obs[t], noise[t])
            obs[t + 1], rewards[t], terminated[t], truncated[t] = env.step(actions[t])

    Returns the buffer, tensors (T, N, ...): obs, actions, logprobs, values, next_values, rewards,
    terminated, truncated, next_obs, and what else `make_rows` names.
    """
    # An action is drawn by adding noise: argmax(log π + Gumbel noise) is a sample of a categorical
    # distribution (the Gumbel-max trick), and μ + σ z is one of a Gaussian. The noise of all T · N
    # actions is drawn first, in this process, so they do not depend on the number of workers.
    noise = model.head.noise(args.num_steps * args.num_envs, generator)
    noise = noise.view(args.num_steps, args.num_envs, -1)
    pool.load(model)
    buffer = side_by_side(pool.call("play", noise.cpu().numpy()))
    buffer = {name: rows.to(model.device) for name, rows in buffer.items()}

    # What the policy sees has T + 1 rows. The next rollout starts with the last one.
    if model.memory is not None:
        buffer["next_state"] = buffer["state"][1:]
    for name in model.inputs:
        buffer[name] = buffer[name][:-1]
    add_values(model, buffer)
    return buffer


def side_by_side(parts):
    """Return the rows of several processes, arrays (T, n, ...), as tensors (T, N, ...)."""
    buffer = {}
    for name in parts[0]:
        column = np.concatenate([rows[name] for rows in parts], axis=1)  # a copy
        buffer[name] = torch.from_numpy(column)
    return buffer


@torch.no_grad()
def add_values(model, buffer):
    """Add values V(s_t), next_values V(s_{t+1}) and logprobs log π_old(a_t|s_t) to the buffer.

    Two passes over all steps give them, since no weight has changed while they were played.
    """
    pi, values = model(**{name: buffer[name] for name in model.inputs})
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
    # V's target in PPO, Eq. (9): R_t = Â_t + V(s_t), what V expected plus how much better it went
    batch["returns"] = advantages + values
    if model.memory is not None:
        # `forward` reads only the state before step 0.
        batch["state"] = batch["state"][:1]
        return batch
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


def minibatch_loss(model, mb, args):
    """Return the loss of a minibatch, and a dict of the numbers to log, all scalar tensors."""
    pg_loss, v_loss, entropy, logratio = losses(model, mb, args.clip_coef, args.clip_vloss)
    pg_loss = pg_loss.mean()
    v_loss = v_loss.mean()
    entropy = entropy.mean()
    approx_kl, clipfrac = policy_change(logratio, args.clip_coef)

    # PPO, Eq. (9): loss = −L^CLIP + E[c_v ½ (V_θ − R)² − c_e H]
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
    """Return the means of a list of dicts of scalar tensors, as a dict of numbers.

    A row may lack names of the first one.
    """
    means = {}
    for name in rows[0]:
        means[name] = float(torch.stack([row[name] for row in rows if name in row]).mean())
    return means


# ------------------------------------------------------------------------------------ model
def make_model(args):
    """Return the Model for the env's spaces, its weights drawn from torch's global generator."""
    with closing_env(make_env(args)) as env:
        model = Model(env.observation_space.shape[0], env.action_space, args)
    device = args.device
    # Each rank has a GPU of its own.
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
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
            x, _ = self.memory(x, starts, state[0])  # (T, M, U)
        h = self.actor(x)
        h_value = h if self.critic is self.actor else self.critic(x)
        return self.head(h, action_mask), self.value(h_value).squeeze(-1)


class Policy:
    """The policy as games see it: arrays of observations in, arrays of actions out.

    It is made of the model's own layers, which `as_function` turns into functions of arrays. Their
    weights are always the model's current ones.
    """

    def __init__(self, model):
        self.memory = model.memory
        self.head = model.head
        self.obs_norm = as_function(model.obs_norm)
        self.actor = as_function(model.actor)
        self.output = as_function(model.head.output)

    def act(self, obs, starts=None, state=None, action_mask=None, noise=None):
        """Return actions (M, ...) for observations (M, D), and the memory's next state or None.

        The actions are samples made from noise (M, ·), or the policy's mode without it.
        """
        x = self.obs_norm(obs)
        if self.memory is not None:
            x, state = self.remember(x, starts, state)
        output = self.output(self.actor(x))
        return self.head.sample(output, noise, action_mask), state

    @torch.no_grad()
    def remember(self, x, starts, state):
        """Return the memory's output (M, U) after one step, and its next state (M, S)."""
        x, starts, state = [torch.from_numpy(array) for array in (x, starts, state)]
        memories, state = self.memory(x[None], starts[None], state)
        return memories[0].numpy(), state.numpy()


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
        self.output = layer_init(nn.Linear(features, self.n), gain=0.01)
        offsets = torch.tensor([0, *choices[:-1]]).cumsum(0)  # where each entry's logits begin
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, h, action_mask=None):
        """Return log-probabilities (M, n) for features (M, F) and flags (M, n) or None."""
        logits = self.output(h)
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

    def sample(self, logits, noise=None, action_mask=None):
        """Return actions (M, ...) for logits (M, n). All are arrays.

        argmax(log π + Gumbel noise) is a sample of π, the Gumbel-max trick. Logits are log π plus a
        constant, which changes no argmax. Without noise the actions are the mode, the most likely
        ones.
        """
        scores = logits if noise is None else logits + noise
        if action_mask is not None:
            scores = np.where(action_mask, scores, -1e8)
        parts = [scores]
        # A CartPole's step takes less time without split.
        if len(self.choices) > 1:
            parts = np.split(scores, np.cumsum(self.choices[:-1]), axis=-1)
        actions = np.stack([part.argmax(-1) for part in parts], axis=-1)
        return actions.reshape(len(logits), *self.shape)

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
        self.output = layer_init(nn.Linear(features, self.n), gain=0.01)
        self.log_std = nn.Parameter(torch.full((self.n,), args.init_log_std))
        self.lower = nn.Parameter(torch.zeros(self.n, self.n)) if args.full_covariance else None

    @property
    def factor(self):
        """L, the lower triangular factor of the covariance, (A, A)."""
        return self.lower.tril(-1) + self.log_std.exp().diag()

    def forward(self, h, action_mask=None):
        """Return the means (M, A) for features (M, F)."""
        return self.output(h)

    @torch.no_grad()
    def noise(self, batch, generator):
        """Return σ z, or L z, with standard normal noise z, (batch, A)."""
        noise = torch.randn(batch, self.n, generator=generator, dtype=torch.float32)
        noise = noise.to(self.log_std.device)
        return self.log_std.exp() * noise if self.lower is None else noise @ self.factor.T

    def sample(self, mean, noise=None, action_mask=None):
        """Return actions (M, ...) for means (M, A): μ + σ z, or the mode μ. All are arrays."""
        actions = mean if noise is None else mean + noise
        return actions.reshape(len(mean), *self.shape)

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
        """Return the memories (T, M, U) after each step, and the last state (M, S).

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


# ------------------------------------------------------------------------------------ games
def make_env(args, video=None):
    """Return the env, observations as vectors. It films its first episode if `video` is a folder.

    Raises ValueError for Atari games, and if observations cannot be vectors. Raises ImportError if
    the env's code ends the program.
    """
    if "ALE/" in args.env:
        raise ValueError("argument --env: Atari games are for ppo_atari.py")
    options = {"render_mode": "rgb_array"} if video else {}
    try:
        env = gym.make(args.env, **options)
    except SystemExit as error:
        raise ImportError(f"{args.env} ended the program as it was loaded, code {error}") from None
    if video:
        env = gym.wrappers.RecordVideo(env, video, episode_trigger=lambda k: k == 0)

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


def has_masks(env):
    """Whether the env says which actions are allowed, by a method or in the info of reset.

    It is None if a discrete env does not say: then `Game.show` refuses masks that come later.
    Raises ValueError if only its observations do.
    """
    if not num_choices(env.action_space):
        return False
    if env.has_wrapper_attr("action_masks") or "action_mask" in env.reset()[1]:
        return True
    if "action_mask" in getattr(env.unwrapped.observation_space, "spaces", {}):
        raise ValueError(
            "argument --action-masks: the action_mask in observations is not used; give it in info "
            "too, or give --no-action-masks"
        )
    return None


def action_mask(env, info):
    """Return flags of the allowed choices, entry after entry, from `info` or the env's method.

    Raises ValueError if they are not as many flags as there are choices, or if an entry has no
    allowed choice.
    """
    mask = info["action_mask"] if "action_mask" in info else env.get_wrapper_attr("action_masks")()
    # Several entries may have a tuple of arrays.
    mask = np.concatenate(mask) if isinstance(mask, tuple) else np.ravel(mask)

    choices = num_choices(env.action_space)
    begins = np.cumsum([0, *choices[:-1]])
    are_flags = len(mask) == sum(choices) and ((mask == 0) | (mask == 1)).all()
    if not are_flags or not np.logical_or.reduceat(mask, begins).all():
        raise ValueError(f"action mask {mask}: not {sum(choices)} flags, or no action is allowed")
    return mask.astype(bool)


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


class Game:
    """One env that starts its next episode by itself. It writes column n of its player's rows.

    Row t has what the policy saw and did at step t, and what came of it. What the policy sees next,
    the same episode or the start of another one, is in row t + 1.
    """

    def __init__(self, args, rows, n, video=None):
        self.args = args
        self.rows = rows
        self.n = n
        self.env = make_env(args, video)
        self.shape = self.env.observation_space.shape
        self.seed = None  # the seed of the last start
        self.episode = 0  # how many have begun since then
        self.episode_length = 0

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
        self.discounted = 0.0  # Σ_k γ^k r_{t−k}, the discounted sum of the rewards so far
        with AtWork(self, "reset"):
            obs, info = self.env.reset(seed=seed)
            self.show(t, obs, info)

    def step(self, t, action):
        """Take an action in row t. If it ends the episode the next one starts in row t + 1."""
        rows = self.rows
        n = self.n
        with AtWork(self, "step"):
            obs, reward, terminated, truncated, info = self.env.step(action)
            reward = float(reward)
            ended = bool(terminated) or bool(truncated)
            rows["next_obs"][t, n] = as_array(obs, self.shape)
            if not ended:
                self.show(t + 1, obs, info)

        self.episode_return += reward
        self.episode_length += 1
        self.discounted = reward + self.args.gamma * self.discounted
        rows["rewards"][t, n] = reward
        rows["discounted"][t, n] = self.discounted
        rows["terminated"][t, n] = terminated
        rows["truncated"][t, n] = truncated and not terminated
        if ended:
            rows["episode_return"][t, n] = self.episode_return
            rows["episode_length"][t, n] = self.episode_length
            if self.first_return is None:
                self.first_return = self.episode_return
            self.reset(t + 1)

    def show(self, t, obs, info):
        """Write what the policy sees in row t."""
        self.rows["obs"][t, self.n] = as_array(obs, self.shape)
        if "action_mask" in self.rows:
            self.rows["action_mask"][t, self.n] = action_mask(self.env, info)
        elif self.args.action_masks is None and "action_mask" in info:
            raise ValueError(
                "info has an action_mask, but that of the first reset had none; give it there too, "
                "or give --no-action-masks"
            )

    def place(self):
        """Return where the game is, as text: its seed, the episode since then, the steps in it."""
        where = f"seed {self.seed}, episode {self.episode}, after {self.episode_length} steps"
        return f"{self.args.env} ({where})"


def make_rows(args, model, num_games):
    """Return {name: array} for a rollout of some games: (T, N, ...), T + 1 for what is carried on.

    To record another number, name it here and write it in `Game.step`: it is in the buffer then.
    """
    T = args.num_steps
    obs_type = np.float64 if args.norm_obs else np.float32
    action_type = np.int64 if num_choices(model.action_space) else np.float32

    def zeros(count, shape=(), dtype=np.float32):
        return np.zeros((count, num_games, *shape), dtype)

    # What the policy sees. The last row is where the next rollout begins.
    found = {"obs": zeros(T + 1, (model.obs_dim,), obs_type)}
    if args.action_masks:
        found["action_mask"] = zeros(T + 1, (model.head.n,), bool)
    if args.rnn:
        found["starts"] = zeros(T + 1, (), bool)
        found["state"] = zeros(T + 1, (model.memory.size,))

    # What it does, and what comes of it. Return and length stand where an episode has ended.
    found["actions"] = zeros(T, model.head.shape, action_type)
    found["next_obs"] = zeros(T, (model.obs_dim,), obs_type)
    found["terminated"] = zeros(T, (), bool)
    found["truncated"] = zeros(T, (), bool)
    found["episode_return"] = zeros(T, (), np.float64)
    found["episode_length"] = zeros(T, (), np.int64)
    for name in ("rewards", "discounted"):
        found[name] = zeros(T)
    return found


# float32 must be able to hold squares of numbers, and sums of squares.
LARGEST = 1e15
MOST_STEPS = 10_000  # an episode of an evaluation takes no more steps


class Player:
    """One process's share of the games, the model that plays them, and the rows that they fill."""

    def __init__(self, args, model, index=0, count=1, video=None):
        self.policy = Policy(model)
        self.inputs = model.inputs
        self.action_space = model.action_space
        self.index = index  # this process's number
        self.count = count  # the number of processes
        num_games = len(self.share(range(args.num_envs)))
        self.rows = make_rows(args, model, num_games)
        self.games = [Game(args, self.rows, n, video) for n in range(num_games)]

    def share(self, rows, axis=0):
        """Return this process's share of what is there for all N games."""
        return np.array_split(rows, self.count, axis)[self.index]

    def start(self, seeds):
        """Start all games from seeds (N,), in the last row: there the next rollout begins."""
        for game, seed in zip(self.games, self.share(seeds)):
            game.start(int(seed), -1)
        if "starts" in self.rows:
            self.rows["starts"][-1] = True

    def play(self, noise):
        """Act, step, record, T times, with noise (T, N, ·). Returns the rows, see `make_rows`."""
        self.carry(-1)
        for t, noise_of_step in enumerate(self.share(noise, axis=1)):
            self.take_step(t, noise_of_step)
        self.check_finite()
        return self.rows

    def carry(self, t):
        """Go on in row 0 with what the policy sees in row t."""
        for name in self.inputs:
            self.rows[name][0] = self.rows[name][t]

    def take_step(self, t, noise=None):
        """Act in row t, and step the games. Without noise the policy's mode acts."""
        rows = self.rows
        inputs = {name: rows[name][t] for name in self.inputs}
        actions, state = self.policy.act(**inputs, noise=noise)
        rows["actions"][t] = actions
        for game, action in zip(self.games, to_env(actions, self.action_space)):
            game.step(t, action)

        # A memory begins anew where an episode starts.
        if state is not None:
            rows["state"][t + 1] = state
            rows["starts"][t + 1] = rows["terminated"][t] | rows["truncated"][t]

    def play_episodes(self, seeds):
        """Play an episode of every game with the policy's mode. Returns their returns (N,).

        Raises GameError if an episode takes more than MOST_STEPS steps.
        """
        self.start(seeds)
        self.carry(-1)
        for _ in range(MOST_STEPS):
            # Each step is taken in row 0, and leads to row 1.
            self.take_step(0)
            self.check_finite()
            self.carry(1)
            returns = [game.first_return for game in self.games]
            if None not in returns:
                return np.array(returns)
        raise GameError(f"{self.games[0].args.env}: an episode takes over {MOST_STEPS:,} steps")

    def check_finite(self):
        """Raise GameError at the first NaN, infinity, or number of 1e15 or more."""
        for name in ("next_obs", "rewards", "obs"):
            # NaN < LARGEST is False, so NaN is wrong, too.
            wrong = ~(np.abs(self.rows[name]) < LARGEST)
            if wrong.any():
                t, n, *entry = np.argwhere(wrong)[0].tolist()
                place = f"{name}{entry}" if entry else name
                game = self.games[n]
                where = f"{game.args.env} (seed {game.seed}), step {t} of the rollout"
                raise GameError(f"NaN or over 1e15 in {place} of {where}")

    def close(self):
        """Close all envs."""
        for game in self.games:
            close_env(game.env, game.place())


def make_pool(args, model):
    """Return the pool of the players of all N games."""
    return WorkerPool(args, model, functools.partial(Player, args))


def seed_generators(seed):
    """Seed the generators of `random`, NumPy and torch: an environment may draw from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def draw_seeds(count, *entropy):
    """Return seeds (count,) below 2³¹: environments written in C can take them."""
    return np.random.SeedSequence(entropy).generate_state(count) % 2**31


# ------------------------------------------------------------------------------------ worker pool
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


def own_rows(mb, axis=0):
    """Return this rank's share of a minibatch, rows along an axis."""
    if NUM_RANKS == 1:
        return mb
    rows = torch.arange(RANK, mb["advantages"].shape[axis], NUM_RANKS)
    return {name: column.index_select(axis, rows.to(column.device)) for name, column in mb.items()}


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


def evaluate(model, args, video=None):
    """Play the episodes of an evaluation with the policy's mode. Returns their returns, (E,).

    The games are new each time, so that wrappers have not seen more than they do in --eval.
    """
    games = argparse.Namespace(**vars(args) | {"num_envs": args.eval_episodes, "num_steps": 1})
    with closing(Player(games, copy.deepcopy(model).cpu(), video=video)) as player:
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
  python ppo.py --env CartPole-v1                           train
  python ppo.py --env Hopper-v5 --norm-obs --norm-reward    train with normalisers
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
    """Add the options of running."""
    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--seed", type=int, default=1, help="seed of all generators")
    add("--device", default="cpu", help="cpu or cuda")
    add("--num-workers", type=int, default=0, help="processes that play; 0: this one plays")
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
    add("--total-timesteps", type=int, help="length of the run in steps of all envs (500,000)")
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

    if args.action_masks is None:
        with closing_env(make_env(args)) as env:
            args.action_masks = has_masks(env)
    if args.total_timesteps or not args.num_iterations:
        steps = args.total_timesteps or 500_000
        args.num_iterations = max(1, steps // (args.num_envs * args.num_steps))
    check_options(parser, args)
    if run_dir:
        check_weights(parser, args, run_dir)
    return args


def check_options(parser, args):
    """Refuse options that do not go together, in one line."""
    rows = args.num_envs * args.num_steps
    parts = args.num_minibatches * NUM_RANKS
    # With a memory minibatches are of whole sequences.
    divides = rows % parts == 0 and (not args.rnn or args.num_envs % parts == 0)
    has_device = args.device != "cuda" or torch.cuda.is_available()
    is_new = not args.resume and not args.eval
    folder = run_path(args)
    wishes = [
        (divides, "num-minibatches", f"{parts}, over all ranks, must divide N · T (--rnn: N)"),
        (rows > parts or args.norm_adv == "off", "num-minibatches", "--norm-adv needs two rows"),
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
    sys.path.append(os.getcwd())  # where a module of --env may lie
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
