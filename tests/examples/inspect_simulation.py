"""Inspect a simulation before training: what its levels cost, what is wrong, what to do next.

    python tests/examples/inspect_simulation.py --env tests/examples/rod.py:Rod --levels 1 2 3

On each level it plays two episodes with the random actions of an untrained policy, and the first
step of eight more. It is plain Gymnasium in one process, without a policy.

It takes the options of ppo_multilevel.py. Give those that the run shall have, like --num-workers or
--hours, and they stand in the command that it prints in the end.
"""

import math
import os
import shlex
import sys
import textwrap
import time
import warnings
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import check_env

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of ppo_multilevel.py

from ppo_multilevel import Adaptive, make_env, parse_args  # noqa: E402

SEED = 10_000  # the seed of the episodes, and the first one of the starts
NUM_STARTS = 8
MOST_STEPS = 10_000  # an episode that takes longer never ends, it seems
NUM_CHECKS = 50  # a run with so many checks can tell which levels pay
HEADER = ["level", "reset s", "first step s", "other step s", "steps", "end", "return"]
HEADER += ["max |reward|", "max |obs|"]
PAGE = "See tests/examples/README.md, Seeds and starts."
# check_env warns of infinite bounds, which are harmless here, and of those of actions, which
# `look_at_actions` judges.
EXPECTED_WARNINGS = ["infinity", "symmetric and normalized"]


class Episode(NamedTuple):
    """What an episode of T steps has shown."""

    obs: np.ndarray  # (T + 1, D)
    rewards: np.ndarray  # (T,)
    seconds: list  # T + 1 numbers: of reset, and of each step
    end: str  # terminated, truncated, failed or none
    failure: str  # where and how the simulation has failed, else ""


# ------------------------------------------------------------------------------------ episodes
def play(env, finest, sigma, seed=SEED, most_steps=MOST_STEPS):
    """Play an episode, or its first steps, always with the same actions. Returns the Episode."""
    rng = np.random.default_rng(SEED)
    observations = []
    rewards = []
    seconds = []
    end = "none"
    failure = ""
    place = "reset"
    try:
        obs, took = start(env, seed, finest)
        observations.append(obs)
        seconds.append(took)

        while end == "none" and len(rewards) < most_steps:
            place = f"step {len(rewards) + 1}"
            action = first_action(env.action_space, rng, sigma)
            began = time.perf_counter()
            obs, reward, terminated, truncated, _ = env.step(action)
            took = time.perf_counter() - began

            obs = finite(obs, env.observation_space.shape)
            reward = float(finite(reward))
            observations.append(obs)
            rewards.append(reward)
            seconds.append(took)
            if terminated or truncated:
                end = "terminated" if terminated else "truncated"
            if len(rewards) == 1000:
                print("(1,000 steps, and this episode goes on)", flush=True)
    except Exception as error:
        # A solver may raise anything.
        end = "failed"
        failure = f"seed {seed}, {place}: {one_line(error)}"
    return Episode(np.array(observations), np.array(rewards), seconds, end, failure)


def start(env, seed, finest):
    """Reset an env, and let it take over the start of the finest level's env if it can.

    Returns its observation, and the seconds of its own reset.
    """
    began = time.perf_counter()
    obs, _ = env.reset(seed=seed)
    seconds = time.perf_counter() - began

    coarse = env.unwrapped
    can_map = hasattr(coarse, "map_from") and hasattr(coarse, "psi")
    if can_map and env is not finest:
        finest.reset(seed=seed)
        coarse.map_from(finest.unwrapped)
        obs = coarse.psi()
    return finite(obs, env.observation_space.shape), seconds


def finite(values, shape=()):
    """Return values in float64. Raises ValueError for NaN, infinity, and another shape."""
    array = np.array(values, np.float64)
    if array.shape != shape:
        raise ValueError(f"an observation or a reward has the shape {array.shape}, not {shape}")
    if not np.isfinite(array).all():
        raise ValueError("NaN or infinity in an observation or a reward")
    return array


def first_action(space, rng, sigma):
    """Draw an action like an untrained policy: 0 ± σ clipped to a Box, or any of the choices."""
    if isinstance(space, gym.spaces.Box):
        action = rng.normal(0, sigma, space.shape)
        return action.clip(space.low, space.high).astype(space.dtype)
    space.seed(int(rng.integers(2**31)))
    return space.sample()


def alike(a, b):
    """Whether two arrays are equal but for rounding, which may add up in an episode."""
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-4, atol=1e-6)


def vary_together(obs):
    """Whether the observations (L, E, D) of all levels are correlated with the finest level's.

    Where levels start alike this correlation is at least 0.66 in the reservoirs, else near 0.
    """
    centred = obs - obs.mean(axis=1, keepdims=True)
    finest = centred[-1]
    agreement = (centred * finest).sum(axis=(1, 2))  # (L,)
    scale = np.sqrt((centred**2).sum(axis=(1, 2)) * (finest**2).sum())
    return bool((agreement >= 0.5 * scale).all())


# ------------------------------------------------------------------------------------ advice
# Some of these functions return the options that they recommend, as words of the next command.
def tell(text):
    """Print a piece of advice, in lines that are not too long and break no option."""
    indents = {"initial_indent": "* ", "subsequent_indent": "  "}
    print(textwrap.fill(text, 95, break_on_hyphens=False, **indents), flush=True)


def one_line(error):
    """Return an exception or a warning as one line, without Gymnasium's colours."""
    text = str(error).replace("\x1b[33m", "").replace("\x1b[0m", "").replace("WARN: ", "")
    return f"{type(error).__name__}: {' '.join(text.split())[:400]}"


def look_at_api(env):
    """Say what Gymnasium finds wrong with the methods of an env."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(env.unwrapped, skip_render_check=True)
        except Exception as error:
            found.append(one_line(error))
    found += [one_line(warning.message) for warning in caught]

    for line in dict.fromkeys(found):  # each line once, in their order
        if not any(words in line for words in EXPECTED_WARNINGS):
            tell(f"check_env of Gymnasium says {line}")


def look_at_level(number, first, again):
    """Say what two episodes with the same seed and the same actions show of a level."""
    if first.failure:
        tell(f"Level {number} fails, {first.failure}")
    if first.end == "none":
        tell(f"Level {number}: an episode has not ended in {MOST_STEPS:,} steps. Let it end.")
    if not alike(first.obs, again.obs) or not alike(first.rewards, again.rewards):
        tell(
            f"Level {number}: two episodes from the same reset(seed), with the same actions, "
            "differ. Draw all random numbers from self.np_random, and let reset set everything "
            f"that changes. {PAGE}"
        )
        return False
    return True


def look_at_failed_reward(args, episodes):
    """Say how training goes on after a step that fails, and if failing would pay."""
    returns = [episode.rewards.sum() for episode in episodes]
    fails = any(episode.failure for episode in episodes)
    if fails and args.failed_reward is None:
        tell(
            "With --failed-reward R a training run goes on after a step that fails: R is its "
            "reward, and its episode ends. Let R be worse than the return of any episode. A run "
            "always ends after a reset that fails."
        )
    if args.failed_reward is not None and args.failed_reward > np.mean(returns):
        tell(
            f"--failed-reward {args.failed_reward:g} is better than an episode, which brings "
            f"{np.mean(returns):.2g}. A policy may learn to fail."
        )


def look_at_starts(envs, sigma):
    """Say if levels start unlike from the same seed, by the first observations of some seeds.

    If those of the finest level are all the same, the observations after a step are compared.
    """
    finest = list(envs.values())[-1]
    seen = []
    for number, env in envs.items():
        for seed in range(SEED, SEED + NUM_STARTS):
            episode = play(env, finest, sigma, seed, most_steps=1)
            if episode.failure:
                tell(f"Starts cannot be compared: level {number} fails, {episode.failure}")
                return False
            seen.append(episode.obs)

    seen = np.reshape(seen, (len(envs), NUM_STARTS, 2, -1))
    shown = seen[:, :, 0]
    if alike(shown[-1, 1:], shown[-1, :-1]):
        shown = seen[:, :, 1]
    if vary_together(shown):
        return True
    tell(
        "Levels start unlike from the same seed. Draw random fields on the finest grid, and "
        f"coarsen them. Where that is impossible, write psi and map_from. {PAGE}"
    )
    return False


def look_at_returns(numbers, episodes):
    """Say if the returns of levels differ by a factor."""
    returns = [episode.rewards.sum() for episode in episodes]
    sizes = np.abs(returns)
    failed = any(episode.failure for episode in episodes)
    if failed or not 0 < 1.5 * sizes.min() < sizes.max():
        return
    lengths = [len(episode.rewards) for episode in episodes]
    reason = "If rewards are sums over cells, take means."
    if len(set(lengths)) > 1:
        reason = f"So do their numbers of steps: {lengths}. Let all levels take as many."
    values = ", ".join(f"{value:.4g}" for value in returns)
    tell(f"The returns of levels {numbers} differ by a factor: {values}. {reason}")


def look_at_scale(name, values, option):
    """Say if the largest value is above 10 or below 0.01."""
    largest = np.abs(values).max()
    if largest == 0 or 0.01 <= largest <= 10:
        return []
    tell(f"The largest of {name} is {largest:.2g}, far from 1. Give {option}, or rescale them.")
    return [option]


def look_at_actions(space, sigma):
    """Say if a Box is far wider or narrower than the first actions, or apart from them.

    Actions outside of a Box are only clipped, so such a policy learns slowly or not at all.
    """
    if not isinstance(space, gym.spaces.Box):
        return
    low = np.float64(space.low)
    high = np.float64(space.high)
    half_width = high / 2 - low / 2
    unbounded = half_width > 1e30
    too_narrow = half_width < sigma / 20
    too_wide = (half_width > 12.5 * sigma) & ~unbounded
    apart = np.maximum(low, -high) > sigma  # the distance from 0 to the Box
    if (too_narrow | too_wide | apart).any():
        tell(
            f"The first actions are 0 ± {sigma:.3g}, and the Box is {low.min():g} to "
            f"{high.max():g}. Let --env name a function that returns "
            "gymnasium.wrappers.RescaleAction(env, -1, 1). (--init-log-std changes the ± only.)"
        )


def look_at_ends(args, episodes):
    """Say if all episodes are truncated, or longer than an iteration."""
    longest = max(len(episode.rewards) for episode in episodes)
    if all(episode.end == "truncated" for episode in episodes):
        tell(
            f"All episodes are truncated, after {longest} steps at most. There V is bootstrapped: "
            "it stands for the rewards that would have followed. If a fixed horizon belongs to "
            "the task, return terminated=True instead, and put the time into the observation."
        )
    if not max(args.num_steps) < longest < MOST_STEPS:
        return []
    num_steps = longest
    while args.num_envs * num_steps % args.num_minibatches:
        num_steps += 1
    tell(
        f"An episode of {longest} steps is longer than an iteration. Give --num-steps {num_steps}."
    )
    return ["--num-steps", str(num_steps)]


def look_at_hours(args, episode):
    """Say how long a check and a run take, by the seconds of an episode on the finest level."""
    # A run on a single level makes no checks.
    if len(args.levels) == 1 or episode.end in ("failed", "none"):
        return []
    workers = max(1, min(args.num_workers, args.check_episodes))
    check = args.check_episodes * sum(episode.seconds) / workers
    cycle = check * (1 + Adaptive.CHECK_AFTER)  # a check, and the training before the next one
    hours = math.ceil(NUM_CHECKS * cycle / 360) / 10
    text = (
        f"A check plays {args.check_episodes} episodes on level {args.levels[-1]}, {workers} at a "
        f"time, which takes {check:.2g} s. Until the next check training takes "
        f"{Adaptive.CHECK_AFTER} times as long. A run should have time for {NUM_CHECKS} checks. "
        f"It has in {hours:g} hours."
    )
    if args.hours and args.hours < hours:
        text += f" So --hours {args.hours:g} is short."
    tell(text)
    return [] if args.hours else ["--hours", f"{hours:g}"]


# ------------------------------------------------------------------------------------ command line
def print_row(cells):
    """Print a row of the table of levels."""
    print("".join(str(cell).rjust(13) for cell in cells), flush=True)


def print_level(number, episode):
    """Print what an episode of a level has cost, how it ended, and its largest numbers."""
    reset, first, *others = episode.seconds
    numbers = [reset, first, np.mean(others or [first])]
    numbers += [episode.rewards.sum(), np.abs(episode.rewards).max(), np.abs(episode.obs).max()]
    texts = [f"{number:.2g}" for number in numbers]
    print_row([number, *texts[:3], len(episode.rewards), episode.end, *texts[3:]])


def inspect(envs, args):
    """Print costs and advice. Returns options for the run, or None if a level fails at once."""
    sigma = math.exp(args.init_log_std)
    finest = envs[args.levels[-1]]
    pairs = []
    print_row(HEADER)
    for number, env in envs.items():
        first = play(env, finest, sigma)
        again = play(env, finest, sigma)
        pairs.append((first, again))
        if len(again.rewards) > 0:
            print_level(number, again)
    print()

    look_at_api(envs[args.levels[0]])
    repeatable = [look_at_level(number, *pair) for number, pair in zip(envs, pairs)]
    episodes = [again for _, again in pairs]
    if any(len(episode.rewards) == 0 for episode in episodes):
        return None
    look_at_failed_reward(args, episodes)
    if all(repeatable) and look_at_starts(envs, sigma):
        look_at_returns(args.levels, episodes)

    options = []
    if not args.norm_obs:
        obs = np.concatenate([episode.obs for episode in episodes])
        options += look_at_scale("observations", obs, "--norm-obs")
    if not args.norm_value:
        returns = [episode.rewards.sum() for episode in episodes]
        options += look_at_scale("returns", returns, "--norm-value")
    look_at_actions(finest.action_space, sigma)
    options += look_at_ends(args, episodes)
    options += look_at_hours(args, episodes[-1])
    return options


def main(argv=None):
    """Inspect a simulation. Returns the exit code: 1 if that is impossible."""
    argv = argv or sys.argv[1:]
    sys.path.append(os.getcwd())  # where a module of --env may lie
    try:
        args = parse_args(argv)
    except Exception as error:
        print(f"No simulation can be made: {one_line(error)}")
        return 1

    with ExitStack() as stack:
        envs = {}
        for number in args.levels:
            env = make_env(args.env, number)
            envs[number] = stack.enter_context(closing(env))
        options = inspect(envs, args)
    if options is None:
        print("\nNothing else can be said while a level fails at once.")
        return 1
    print("\nWhen the simulation is as you want it, train:\n")
    print(shlex.join(["python", "ppo_multilevel.py", *argv, *options]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
