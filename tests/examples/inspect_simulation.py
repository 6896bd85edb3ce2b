"""Inspect a simulation before training: what its levels cost, what is wrong, what to do next.

    python tests/examples/inspect_simulation.py --env tests/examples/rod.py:Rod --levels 1 2 3

It plays two episodes of each level with random actions, and the first step of eight more. In the
second episode other simulations take turns, as in training. It is plain Gymnasium in one process,
without a policy: change it as you like. If you train on another machine give the number of its
cores: --num-workers 32.
"""

import argparse
import math
import shlex
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import check_env

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of ppo_multilevel.py

import ppo_multilevel as ml  # noqa: E402

SEED = 10_000  # the seed of the episodes, and the first one of the starts
NUM_STARTS = 8
CHECK_EPISODES = 16  # the default of --check-episodes
RUN_PER_CHECK = 100  # a run should be so many times as long as a check
EXPENSIVE = 0.1  # seconds: steps that take longer ask for other options than the defaults


class Episode(NamedTuple):
    """What an episode of T steps has shown."""

    obs: np.ndarray  # (T + 1, D)
    rewards: np.ndarray  # (T,)
    seconds: list  # T + 1 numbers: of reset, and of each step
    end: str  # terminated, truncated, failed or none yet
    failure: str  # where and how the simulation has failed, else ""


def play(number, env, finest, seed=SEED, most_steps=ml.MOST_STEPS, *, neighbours=()):
    """Play an episode of a level, or its first steps, always with the same actions.

    The generators of `random` and `np.random` start from a seed, so that levels can be compared
    even if the simulation draws from them. With `neighbours`, other simulations, the seed is
    another one. After each of the first steps one of them takes its turn, as simulations do in
    training. So an episode that depends on either shows other numbers.

    Returns the Episode. Raises RuntimeError if not even the first step succeeds.
    """
    ml.seed_generators(len(neighbours))
    rng = np.random.default_rng(SEED)
    observations = []
    rewards = []
    seconds = []
    end = "none"
    failure = ""
    try:
        began = time.perf_counter()
        obs, _ = env.reset(seed=seed)
        seconds.append(time.perf_counter() - began)
        if env is not finest and hasattr(env.unwrapped, "map_from"):
            # As in training the level starts where the finest one does.
            finest.reset(seed=seed)
            env.unwrapped.map_from(finest.unwrapped)
            obs = env.unwrapped.psi()
        observations.append(checked(obs, env.observation_space.shape))

        while end == "none" and len(rewards) < most_steps:
            action = first_action(env.action_space, rng)
            began = time.perf_counter()
            obs, reward, terminated, truncated, _ = env.step(action)
            seconds.append(time.perf_counter() - began)
            observations.append(checked(obs, env.observation_space.shape))
            rewards.append(checked(reward, ()))
            if terminated or truncated:
                end = "terminated" if terminated else "truncated"
            if len(rewards) <= len(neighbours):
                take_turn(neighbours[len(rewards) - 1])
    except Exception as error:
        # A solver may raise anything.
        if not rewards:
            where = f"level {number}, seed {seed}"
            raise RuntimeError(f"reset or the first step fails: {where}") from error
        end = "failed"
        failure = f"seed {seed}, step {len(rewards) + 1}: {type(error).__name__}: {error}"
    return Episode(np.array(observations), np.array(rewards), seconds, end, failure)


def take_turn(neighbour):
    """Begin an episode of another simulation."""
    neighbour.reset(seed=0)
    neighbour.step(first_action(neighbour.action_space, np.random.default_rng(0)))


def checked(values, shape):
    """Return numbers in float64. Raises ValueError for NaN, infinity, and any other shape."""
    values = np.array(values, np.float64)
    if not np.isfinite(values).all():
        raise ValueError("NaN or infinity in an observation or a reward")
    if values.shape != shape:
        raise ValueError(f"an observation or a reward has the shape {values.shape}, not {shape}")
    return values


def first_action(space, rng):
    """Draw an action like an untrained policy: 0 ± 1 clipped to a Box, or any of the choices."""
    if isinstance(space, gym.spaces.Box):
        return rng.normal(size=space.shape).clip(space.low, space.high).astype(space.dtype)
    return space.start + rng.integers(space.n)


def tell(text):
    """Print a piece of advice, in lines that are not too long and break no option."""
    indents = {"initial_indent": "* ", "subsequent_indent": "  "}
    print(textwrap.fill(text, 95, break_on_hyphens=False, **indents), flush=True)


def look_at_level(number, first, again):
    """Say what two episodes with the same seed and actions show. Returns whether they are right."""
    failure = first.failure or again.failure
    if failure:
        tell(
            f"Level {number} fails, {failure}. With --failed-reward R such a step ends an "
            "episode, not the run. Let R be worse than the return of the worst episode. Without "
            "whole episodes there are no times below."
        )
    # Rounding may add up in an episode.
    pairs = [(first.obs, again.obs), (first.rewards, again.rewards)]
    alike = [a.shape == b.shape and np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs]
    if not all(alike):
        tell(
            f"Level {number}: two episodes with the same reset(seed) and actions differ. Draw all "
            "random numbers from self.np_random, and let reset set everything that changes. Or the "
            "solver has global state, which another simulation has changed."
        )
    return all(alike) and not failure


def look_at_api(env):
    """Say what Gymnasium's own check finds wrong. What it only warns of may be meant so."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_env(env.unwrapped, skip_render_check=True)
    except Exception as error:
        tell(f"Gymnasium's check_env finds: {error}")


def compare_levels(numbers, envs, returns):
    """Say if levels start unlike from the same seed, or if their returns differ by a factor."""
    shown = []
    for number, env in zip(numbers, envs):
        for seed in range(SEED, SEED + NUM_STARTS):
            shown.append(play(number, env, envs[-1], seed, most_steps=1).obs)
    # Two observations, since the first may always be the same: a reservoir is full of oil.
    agreement = ml.start_agreement(np.reshape(shown, (len(envs), NUM_STARTS, -1)))
    sizes = np.abs(returns)
    if agreement.min() <= 0.9:
        correlations = ", ".join(f"{r:.2f}" for r in agreement)
        tell(
            "Do levels start alike from the same seed? The first two observations of "
            f"{NUM_STARTS} seeds have these correlations with the finest level: {correlations}. "
            "Near 0 levels start unlike, and below 0.9 perhaps a part of the start. Draw random "
            "fields on the finest grid, and coarsen them. Where that is impossible, write psi and "
            "map_from."
        )
    elif 0 < 1.5 * sizes.min() < sizes.max():
        tell(
            f"The returns of levels differ by a factor: {', '.join(f'{r:.4g}' for r in returns)}. "
            "If rewards are sums over cells, take means."
        )


def look_at_lengths(lengths):
    """Say if episodes of the levels have unequal numbers of steps."""
    if len(set(lengths)) > 1:
        numbers = ", ".join(map(str, lengths))
        tell(f"Episodes have {numbers} steps on the levels. Let all have the same number.")


def look_at_scale(name, values, option):
    """Say if the largest value is above 10 or below 0.01. Returns options of the next command."""
    largest = np.abs(values).max()
    if largest == 0 or 0.01 <= largest <= 10:
        return []
    tell(f"The largest of {name} is {largest:.2g}. Give {option}, or rescale them to about 1.")
    return [option]


def look_at_actions(space):
    """Say if a Box is not −1 to 1. One without any bounds is right, too."""
    low = np.float64(space.low)
    high = np.float64(space.high)
    is_unbounded = (low < -1e30) & (high > 1e30)
    if (((low != -1) | (high != 1)) & ~is_unbounded).any():
        tell(
            f"The first actions are 0 ± 1, clipped to the Box, {low.min():g} to {high.max():g}. If "
            "it is not -1 to 1, half of them or more may be clipped, or all may be small. Let "
            "--env name a function that returns gymnasium.wrappers.RescaleAction(env, -1, 1)."
        )


def look_at_steps(number, episodes, num_workers):
    """Say if a step of the finest level is expensive. Returns options that suit it then."""
    step = np.mean(episodes[-1].seconds[1:])
    if step < EXPENSIVE:
        return []
    tell(
        f"A step of level {number} takes {step:.2g} s. For such expensive steps the command below "
        "has small rollouts, a larger learning rate, and checkpoints after every iteration. It has "
        "no evaluations: watch check_return, and evaluate after the run."
    )
    workers = max(1, num_workers)
    num_steps = min(len(episodes[-1].rewards), 50)
    # Four environments for each worker, or fewer: a rollout should have no more than 2,500 steps.
    num_envs = workers * max(1, min(4, 2500 // (workers * num_steps)))
    # Four minibatches must divide a rollout.
    multiple = 4 // math.gcd(num_envs, 4)
    num_steps = max(4, num_steps // multiple * multiple)
    options = f"--num-envs {num_envs} --num-steps {num_steps} --num-minibatches 4 "
    options += "--learning-rate 3e-4 --init-log-std -1 --save-every 1 --eval-every 0"
    return options.split()


def look_at_checks(num_workers):
    """Return options that let a check occupy all workers, where the default does not."""
    workers = max(1, num_workers)
    episodes = math.ceil(CHECK_EPISODES / workers) * workers
    return [] if episodes == CHECK_EPISODES else ["--check-episodes", str(episodes)]


def as_time(seconds):
    """Return seconds as text."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def print_timetable(args, episodes):
    """Print how long the parts of a run with the options `args` take. Returns its hours."""
    workers = max(1, args.num_workers)
    finest = args.levels[-1]
    fine_episode = sum(episodes[-1].seconds)
    an_episode_each = sum(sum(episode.seconds) for episode in episodes)
    measuring_costs = 2 * an_episode_each

    num_played = args.num_envs * args.num_steps[-1] / len(episodes[-1].rewards)  # episodes
    iteration = num_played / workers * fine_episode
    check = math.ceil(args.check_episodes / workers) * fine_episode
    num_measured = ml.num_rounds(args) * args.num_envs
    correlation = num_measured / workers * an_episode_each
    first_measurement = correlation / ml.Adaptive.MEASURE_SHARE
    stopping = 1.1 * (iteration + check + correlation)
    analysis = measuring_costs + ml.MEASUREMENTS * correlation
    comparison = 2 * math.ceil(64 / workers) * fine_episode
    hours = math.ceil(RUN_PER_CHECK * check / 360) / 10

    rows = {
        "at first, to measure what steps cost": measuring_costs,
        f"an iteration on level {finest}": iteration,
        f"a check, {args.check_episodes} episodes on level {finest}": check,
        f"a measurement of correlations, {num_measured} episodes on every level": correlation,
        "until the first measurement, or sooner if training gains nothing": first_measurement,
        f"at most from a signal to the run's end (Slurm: TERM@{stopping:.0f})": stopping,
        f"--hours {hours:g}: {RUN_PER_CHECK} times as long as a check, rounded up": 3600 * hours,
        "--analyse: ten measurements (stop it when you have seen enough)": analysis,
        "--compare: 64 episodes of the policy, and 64 of the controller": comparison,
    }
    print(f"\nTimes with --num-workers {args.num_workers}:\n")
    for what, seconds in rows.items():
        print(f"{as_time(seconds):>14}  {what}")
    return hours


def inspect(numbers, envs, neighbours, num_workers):
    """Print costs and advice. Returns an episode of each level, and options to train with."""
    print("   level     reset s      step s   steps         end      return")
    pairs = []
    for number, env in zip(numbers, envs):
        first = play(number, env, envs[-1])
        if first.end == "none":
            sys.exit(f"level {number}: an episode has not ended in {ml.MOST_STEPS:,} steps")
        again = play(number, env, envs[-1], neighbours=neighbours)
        pairs.append((number, first, again))
        costs = f"{number:8}{again.seconds[0]:12.2g}{np.mean(again.seconds[1:]):12.2g}"
        print(f"{costs}{len(again.rewards):8}{again.end:>12}{again.rewards.sum():12.4g}")
    print()

    are_right = [look_at_level(*pair) for pair in pairs]
    episodes = [again for _, _, again in pairs]
    obs = np.concatenate([episode.obs for episode in episodes])
    returns = [episode.rewards.sum() for episode in episodes]
    ends = {episode.end for episode in episodes}
    if all(are_right):
        look_at_api(envs[0])
    if "failed" not in ends:
        compare_levels(numbers, envs, returns)
        look_at_lengths([len(episode.rewards) for episode in episodes])
    options = look_at_scale("observations", obs, "--norm-obs")
    options += look_at_scale("returns", returns, "--norm-value")
    if isinstance(envs[-1].action_space, gym.spaces.Box):
        look_at_actions(envs[-1].action_space)
    if ends == {"truncated"}:
        tell(
            "All episodes are truncated, which is right for a plant that runs on: V stands for the "
            "rewards that would have followed. A batch process that stops is terminated: return "
            "terminated then, and put the time into obs."
        )
    if "failed" not in ends:
        options += look_at_steps(numbers[-1], episodes, num_workers)
    return episodes, options


def main(argv=None):
    """Inspect a simulation, and print the commands to give next."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--env", required=True, help="as ppo_multilevel.py takes it")
    add("--levels", type=int, nargs="+", required=True, help="coarse to fine")
    add("--num-workers", type=int, default=ml.num_cores(), help="processes that play in training")
    args = parser.parse_args(argv)
    sys.path.append(".")  # where a module of --env may lie

    named = argparse.Namespace(env=ml.env_name(args.env), levels=args.levels, coupling=None)
    ml.check_spaces(parser, named)
    envs = [ml.make_env(named, number) for number in args.levels]
    neighbours = [ml.make_env(named, number) for number in args.levels]
    try:
        episodes, options = inspect(args.levels, envs, neighbours, args.num_workers)
    finally:
        for env in envs + neighbours:
            ml.close_env(env, env)

    words = ["--env", args.env, "--levels", *map(str, args.levels)]
    words += ["--num-workers", str(args.num_workers), *options]
    length = []
    # A run on a single level makes no checks.
    if len(envs) > 1:
        words += look_at_checks(args.num_workers)
        if all(episode.end != "failed" for episode in episodes):
            length = ["--hours", f"{print_timetable(ml.parse_args(words), episodes):g}"]
    train = shlex.join(["python", "ppo_multilevel.py", *words])
    print("\nWhen the simulation is as you want it:\n")
    if len(envs) > 1:
        print(f"{train} --analyse")
    print(" ".join([train, *length]))
    print("python tests/examples/use_policy.py RUN_DIR --compare FILE:CONTROLLER --episodes 64")


if __name__ == "__main__":
    main()
