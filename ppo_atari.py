"""PPO for Atari games: pictures, a convolutional network, games played in worker processes.

    python ppo_atari.py --env Breakout                     # 10M steps, takes hours
    python ppo_atari.py --env Pong
    python ppo_atari.py --eval runs/Pong__ppo_atari__1__<time> --video
    tensorboard --logdir runs

This is `ppo.py` with a Game that makes pictures of an Atari game, a convolutional network and
shared memory for whole rollouts: on a CPU the workers have the policy too and play on their own,
each on one core, so that nobody waits for anybody between two steps. Then all cores work on the
update, in bfloat16 where the processor can.

Papers: "PPO" is Schulman et al. 2017, Proximal policy optimization algorithms (arXiv 1707.06347);
"GAE" is Schulman et al. 2016 (arXiv 1506.02438); pictures and network are those of Mnih et al.
2015, Human-level control through deep reinforcement learning. Network, rollout and loss have the
constants of labml's annotated implementation, but for Adam's ε (1e-5) and biases (0 at the start);
games are as in Gymnasium's AtariPreprocessing, with signs of rewards, FIRE and lives besides.

Each iteration runs the policy π_old for T steps in N games, then takes K epochs of minibatch steps:

    δ_t = r_t + γ V(s_{t+1}) (1 − terminated_t) − V(s_t)                             PPO, Eq. (12)
    Â_t = δ_t + γλ (1 − done_t) Â_{t+1},   R_t = Â_t + V(s_t)           PPO, Eq. (11); GAE, Eq. (16)
    r_t(θ) = π_θ(a_t|s_t) / π_old(a_t|s_t)                                           PPO, Sec. 3
    L^CLIP(θ) = E[min(r_t(θ) Â_t, clip(r_t(θ), 1−ε, 1+ε) Â_t)]                       PPO, Eq. (7)
    loss = E[−L^CLIP + c_v ½ (V_θ(s_t) − R_t)² − c_e H(π_θ(·|s_t))]                  PPO, Eq. (9)

r_t is the reward's sign, r_t(θ) the probability ratio. Shapes: T steps (--num-steps), N games
(--num-envs), B minibatches of M rows, n actions. Everything stored at index t belongs to the action
taken at t: `terminated[t]` and `truncated[t]` say how that action ended the episode, if it did.
"""

import argparse
import copy
import csv
import ctypes
import datetime
import difflib
import functools
import hashlib
import importlib.util
import io
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import cv2
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

# ------------------------------------------------------------------------------------ arguments


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line naming the option, exit code 2."""

    def __init__(self, prog, description):
        super().__init__(prog, description=description, allow_abbrev=False)

    def error(self, message):
        if rank() > 0:
            time.sleep(5)  # rank 0 most likely says the same, which ends this process
        self.exit(2, f"{self.prog}: error: {message}\n")


def number(kind, low=-math.inf, high=math.inf, open_low=False):
    """Return an argparse type: a finite `kind` in [low, high], or (low, high] with `open_low`."""

    def parse(text):
        try:
            value = kind(text)
            finite = math.isfinite(value)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"'{text}' is not a valid {kind.__name__}") from None
        if not finite or not low <= value <= high or (open_low and value == low):
            bounds = f"{'above' if open_low else 'at least'} {low}"
            bounds += f" and at most {high}" if high < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text} is out of range, it must be {bounds}")
        return value

    return parse


def add_option(group, name, kind, default, text, own=None, **more):
    """Add an option to a parser's group; the kind is an argparse type, or bool for --x, --no-x.

    `own` are defaults of the script's own, {name: default}.
    """
    default = (own or {}).get(name[2:].replace("-", "_"), default)
    more |= {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
    default_text = "" if default is None or kind is bool and not default else " (%(default)s)"
    group.add_argument(name, default=default, help=text + default_text, **more)


def add_common_arguments(parser, **defaults):
    """Add the options that all scripts of the family share, with a script's own `defaults`."""
    count, positive, coefficient = number(int, 1), number(float, 0, open_low=True), number(float, 0)
    natural, fraction = number(int, 0), number(float, 0, 1)

    def option(*arguments, **more):
        add_option(group, *arguments, own=defaults, **more)

    group = parser.add_argument_group("run")
    option("--seed", number(int, 0, 2**63 - 1), 1, "seed of all generators")
    text = "auto, cpu, cuda or mps; auto: cpu, best for small networks; Atari: cuda if there is one"
    option("--device", str, "auto", text)
    option("--num-workers", natural, 0, "processes that step the games; 0: step them in this one")
    text = "end a run whose workers take more seconds than this for a step; 0: wait"
    option("--step-timeout", coefficient, 0, text)
    text = "how often to start a worker again that fails in a step; its episodes count as truncated"
    option("--restart-workers", natural, 0, text)
    option("--log-dir", str, "runs", "folder that receives the run's own folder")
    option("--run-name", str, None, "name of the run's folder; default env__script__seed__time")
    option("--eval-every", natural, 0, "iterations between evaluations; 0: never")
    option("--eval-episodes", count, 16, "episodes of an evaluation")
    option("--save-every", natural, 50, "iterations between checkpoints; 0: only at the end")
    option("--resume", str, None, "continue this run; options beside it replace the run's")
    option("--eval", str, None, "evaluate this run's policy (its mode), print mean ± sd and stop")
    text = "with --eval: sample the actions instead of taking the policy's mode"
    group.add_argument("--sample", action="store_true", help=text)
    group.add_argument("--video", action="store_true", help="with --eval: also write video.mp4")
    text = "with --eval: also write policy.onnx, from observations to the env's actions"
    group.add_argument("--export-onnx", action="store_true", help=text)
    group.add_argument("--quiet", action="store_true", help="print no status lines")

    group = parser.add_argument_group("sampling")
    option("--num-envs", count, 4, "N, games (actors) side by side; 4 to 64 usual")
    group = group.add_mutually_exclusive_group()
    option("--total-timesteps", count, None, "length of the run in steps of all games together")
    option("--num-iterations", count, None, "length of the run in iterations")

    group = parser.add_argument_group("PPO")
    option("--learning-rate", positive, 2.5e-4, "Adam's step size; 1e-5 to 1e-3 usual")
    option("--anneal-lr", bool, True, "lower the learning rate linearly to 0 over the run")
    option("--gamma", fraction, 0.99, "γ, discount per step; 0.9 to 0.9997 usual")
    option("--gae-lambda", fraction, 0.95, "λ of GAE, 0: low variance, 1: no bias; 0.9 to 1 usual")
    option("--num-minibatches", count, 4, "B, minibatches per epoch; divides the number of rows")
    option("--update-epochs", count, 4, "K, passes over the rollout; 3 to 30 usual")
    text, choices = "set in which advantages are normalised", ("minibatch", "batch", "off")
    option("--norm-adv", str, "minibatch", text, choices=choices)
    option("--clip-coef", positive, 0.2, "ε, the ratio's gradient ends at 1 ± ε; 0.1 to 0.3 usual")
    option("--clip-vloss", bool, True, "clip the change of the value by ε too")
    option("--ent-coef", coefficient, 0.01, "c_e, weight of the entropy bonus; 0 to 0.01 usual")
    option("--vf-coef", coefficient, 0.5, "c_v, weight of the value loss; 0.5 to 1 usual")
    option("--max-grad-norm", positive, 0.5, "clip the gradient to this global norm")
    option("--target-kl", positive, None, "end an update when KL(π_old, π) is above; 0.01 to 0.05")


def parse_args(argv=None):
    """Parse and check the command line (default: the program's)."""
    parser = Parser("ppo_atari.py", description="PPO for Atari games; 10M steps by default.")
    env_help = (
        "game: Breakout, BreakoutNoFrameskip-v4 and ALE/Breakout-v5 are the same (%(default)s)"
    )
    parser.add_argument("--env", default="Breakout", help=env_help)
    add_common_arguments(parser, num_workers=num_cores(), num_envs=8, clip_coef=0.1)
    steps_help = "T, steps per game and iteration; 128 usual (%(default)s)"
    parser.add_argument("--num-steps", type=number(int, 1), default=128, help=steps_help)
    add_atari_arguments(parser)
    args = parse_with_run(parser, argv)
    with option_error(parser, "--env"):
        args.env = game_name(args.env)
        make_env(args.env).close()
    check_rows(parser, args, args.num_envs * args.num_steps)
    check_normaliser(parser, args, args.num_envs * args.num_steps)
    if args.num_iterations is None:
        total_timesteps = args.total_timesteps or 10_000_000
        args.num_iterations = max(1, total_timesteps // (args.num_envs * args.num_steps))
    if args.compile and not args.eval:
        with option_error(parser, "--compile"):
            torch.compile(lambda x: x + 1)(torch.zeros(1))  # needs a C++ compiler
    check_checkpoint(parser, args)
    return args


def add_atari_arguments(parser):
    """Add the options that ppo_atari.py has beyond the common ones."""
    option = functools.partial(add_option, parser.add_argument_group("Atari"))
    option("--frameskip", number(int, 1), 4, "frames that an action lasts; Gymnasium's v5: 4")
    text = "probability that a frame repeats the last action; 0.25 in Gymnasium's v5"
    option("--sticky-actions", number(float, 0, 1), 0.0, text)
    text = "all 18 actions instead of those that the game knows; off in Gymnasium too"
    option("--full-action-space", bool, False, text)
    text = "an episode ends with a life, but the game goes on; off in Gymnasium"
    option("--episodic-life", bool, True, text)
    text = "a game starts with 1 to so many frames without action; 0 in Gymnasium"
    option("--noop-max", number(int, 0), 30, text)
    text = "press FIRE at the start of an episode where the game has it; off in Gymnasium"
    option("--fire", bool, True, text)
    text = "lower ε linearly to 0 over the run, as the learning rate"
    option("--anneal-clip", bool, True, text)
    text = "of the network's layers; auto: bf16 where the processor has it, else fp32"
    option("--precision", str, "auto", text, choices=("auto", "fp32", "bf16"))
    option("--compile", bool, False, "torch.compile the network for updates; needs a C++ compiler")


def parse_with_run(parser, argv):
    """Parse argv; with --resume or --eval, that run's options are the defaults."""
    args = parser.parse_args(argv)
    if args.resume and args.eval:
        parser.error("argument --resume: not allowed with argument --eval")
    for name in ("sample", "video", "export_onnx"):
        if getattr(args, name) and not args.eval:
            parser.error(f"argument --{name.replace('_', '-')}: only with --eval")
    if args.export_onnx and importlib.util.find_spec("onnx") is None:
        parser.error("argument --export-onnx: needs a package, pip install onnx")
    if args.eval and num_ranks() > 1:
        parser.error("argument --eval: takes one process, not torchrun")
    run_dir, option = args.resume or args.eval, "--resume" if args.resume else "--eval"
    if run_dir:
        with option_error(parser, option):
            options = run_options(run_dir)
            if unknown := options.keys() - vars(args).keys():
                raise ValueError(f"{run_dir} is a run of another script, it has {min(unknown)}")
            checked = parse_strictly(parser, words(options))
        options |= {name: checked[name] for name in options if name != "total_timesteps"}
        parser.set_defaults(**options)
        given = parser.parse_args(argv)
        for name in ("shared_net", "activation", "init_log_std"):  # no shapes of weights show these
            value = options.get(name, parser.get_default(name))
            if getattr(given, name, value) != value:
                parser.error(f"argument --{name.replace('_', '-')}: the run has {value}")
        for name in ("log_dir", "run_name"):
            if getattr(given, name) != parser.get_default(name):
                parser.error(f"argument --{name.replace('_', '-')}: not allowed with {option}")
        if args.resume and given.seed != options.get("seed", given.seed):
            parser.error(f"argument --seed: the run has {options['seed']}, its generators go on")
        if given.total_timesteps != options.get("total_timesteps"):
            given.num_iterations = None  # that of the run followed from its --total-timesteps
        args = given
    if args.device not in ("auto", "cpu", "cuda", "mps"):
        parser.error(f"argument --device: '{args.device}' is none of auto, cpu, cuda, mps")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: there is no cuda device here, use cpu")
    if args.device == "cuda" and not a_gpu_each():
        parser.error("argument --device: there are fewer cuda devices than ranks, use cpu")
    if args.device == "mps" and not torch.backends.mps.is_available():
        parser.error("argument --device: there is no mps device here, use cpu")
    for name in ("step_timeout", "restart_workers"):
        if getattr(args, name) and not args.num_workers:
            parser.error(f"argument --{name.replace('_', '-')}: only with --num-workers above 0")
    if run_dir:
        return args
    with option_error(parser, "--log-dir"):
        Path(args.log_dir).mkdir(parents=True, exist_ok=True)
        if not os.access(args.log_dir, os.W_OK):
            raise OSError(f"no permission to write to '{args.log_dir}'")
    if rank() == 0 and args.run_name and (Path(args.log_dir) / folder_name(args.run_name)).exists():
        parser.error(f"argument --run-name: '{args.run_name}' is there already, choose another")
    return args


def run_options(run_dir):
    """Return the options of a run that another one can have too, {name: value}."""
    path = Path(run_dir) / "config.json"
    try:
        options = json.loads(path.read_text())["options"]
        options["env"]  # there in any run
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is damaged") from None
    for name in "resume eval sample video export_onnx quiet log_dir run_name".split():
        options.pop(name, None)
    return options


def parse_strictly(parser, line):
    """Return {name: value} of a command line; ValueError, not the program's end, if it is wrong."""

    def refuse(message):
        raise ValueError(f"its config.json is damaged: {message}")

    parser = copy.copy(parser)
    parser.error = refuse
    return vars(parser.parse_args(line))


def words(options):
    """Return options {name: value} as the words of a command line."""
    line = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            line.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, list):
            line += [option, *map(str, value)]
        elif value is not None and name != "total_timesteps":  # num_iterations follows from it
            line.append(f"{option}={value}")
    return line


def check_checkpoint(parser, args):
    """Refuse options beside --resume or --eval whose network is not that of the checkpoint.

    Options that --resume does change are printed.
    """
    option, run_dir = ("--resume", args.resume) if args.resume else ("--eval", args.eval)
    if run_dir:
        with option_error(parser, option):
            weights, model = load_checkpoint(run_dir)["model"], make_model(args)
            shapes = {name: weight.shape for name, weight in weights.items()}
            if shapes != {name: weight.shape for name, weight in model.state_dict().items()}:
                raise ValueError(f"network or normalisers in {run_dir} are not the options'")
            restore(run_dir, model, make_optimizer(model), torch.Generator())  # if it can be
    if args.resume:
        new, old = vars(args), run_options(run_dir)
        names = [name for name in old if new[name] != old[name]]
        for name in {"learning_rate", "value_learning_rate"} & {*names}:
            if new.get("adaptive_lr"):
                parser.error(
                    f"argument --{name.replace('_', '-')}: --adaptive-lr goes on with its own"
                )
        changed = [f"{name} {new[name]} (was {old[name]})" for name in names]
        if changed:
            report(f"options changed: {', '.join(changed)}")


def check_rows(parser, args, num_rows, rows="rows"):
    """Refuse minibatches that the rows cannot be divided into, or ranks that share unequally."""
    B = args.num_minibatches
    if num_rows % B:
        parser.error(f"argument --num-minibatches: {B} does not divide the {num_rows} {rows}")
    if num_rows // B % num_ranks():
        problem = f"{num_ranks()} ranks cannot share {num_rows // B} {rows} of a minibatch equally"
        parser.error(f"argument --num-minibatches: {problem}")
    if args.num_envs % num_ranks():
        parser.error(f"argument --num-envs: {num_ranks()} ranks cannot share {args.num_envs} games")


def check_normaliser(parser, args, num_rows):
    """Refuse minibatches of a single row, whose advantages have no deviation."""
    if args.norm_adv == "minibatch" and num_rows == args.num_minibatches:
        parser.error("argument --num-minibatches: --norm-adv needs 2 rows in each minibatch")
    if args.norm_adv == "batch" and num_rows == 1:
        parser.error("argument --norm-adv: batch needs a rollout of 2 rows")


@contextmanager
def option_error(parser, option):
    """Turn any exception into the one-line error of this option."""
    try:
        yield
    except Exception as error:
        parser.error(f"argument {option}: {first_line(error)}")


def first_line(error):
    """Return an exception as one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def num_cores():
    """Return the number of cores that this process may use, its share if torchrun started it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


# ------------------------------------------------------------------------------------ game


def game_name(name):
    """Return a game's short name: `BreakoutNoFrameskip-v4`, `ALE/Breakout-v5` → `Breakout`.

    Raises ValueError with the nearest names if there is no such game, or without ale-py.
    """
    try:
        import ale_py
    except ModuleNotFoundError:
        raise ValueError("Atari games need ale-py: pip install 'gymnasium[atari]'") from None
    gym.register_envs(ale_py)
    games = [id[4:-3] for id in gym.registry if re.fullmatch(r"ALE/.*-v5", id)]
    games = {game.lower(): game for game in games}
    game = re.sub(r"^ALE/|(NoFrameskip|Deterministic)?-v\d+$", "", name).lower()
    if game not in games:
        nearest = difflib.get_close_matches(game, games, cutoff=0)
        nearest = ", ".join(games[name] for name in nearest)
        raise ValueError(f"there is no Atari game '{name}'; the nearest names are {nearest}")
    return games[game]


def make_env(env_id, sticky_actions=0.0, full_action_space=False, render_mode=None):
    """Return the Gymnasium env of a game, one frame per step."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
    return gym.make(
        f"ALE/{game_name(env_id)}-v5",
        frameskip=1,
        repeat_action_probability=sticky_actions,
        full_action_space=full_action_space,
        obs_type="ram",  # small: `Game` looks at the screen itself, not at every frame
        render_mode=render_mode,
        disable_env_checker=True,
    )


class Game:
    """An Atari game as the policy sees it (Mnih et al. 2015).

    An action lasts `frameskip` frames. The maximum of the last two, grey, shrunk to 84 × 84, is a
    picture; the last four pictures are the observation, (84, 84, 4). An episode ends with a life,
    the next one goes on with the same game unless that is over. Rewards are the score's sign.
    """

    def __init__(
        self, env_id, seed, frameskip=4, noop_max=30, episodic_life=True, fire=True, **options
    ):
        self.name, self.seed = env_id, seed
        self.frameskip, self.episodic_life = frameskip, episodic_life
        self.env = make_env(env_id, **options)
        self.ale = self.env.unwrapped.ale
        actions = self.env.unwrapped.get_action_meanings()
        self.noop_max = noop_max if actions[0] == "NOOP" else 0  # in Backgammon it is FIRE
        self.start_action = actions.index("FIRE") if fire and "FIRE" in actions else None
        self.screens = np.zeros((2, *self.ale.getScreenDims()), np.uint8)  # last, the one before
        self.obs = np.zeros((84, 84, 4), np.uint8)
        self.game_over, self.score, self.length = True, 0.0, 0

    def reset(self, seed=None):
        """Start an episode: with the next life, or a new game if it is over or with a seed.

        Returns the observation, (84, 84, 4).
        """
        if self.game_over or seed is not None:
            self.new_game(seed)
        else:
            self.press(0)
        if self.start_action is not None and not self.game_over:
            self.press(self.start_action)
        if self.game_over:  # that was all the last life had to give
            return self.reset()
        self.obs[:] = self.picture()[..., None]
        return self.obs

    def new_game(self, seed):
        """Start a new game; return and length of the one before stay in `ended`."""
        self.ended, self.score, self.length = (self.score, self.length), 0.0, 0
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
        for frames_left in reversed(range(self.frameskip)):
            _, reward, terminated, truncated, info = self.env.step(action)
            score += reward
            self.game_over = terminated or truncated
            terminated |= self.episodic_life and info["lives"] < self.lives
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

    def step(self, action):
        """Take one step, start the next episode if this one ended.

        Returns (obs, final_obs, reward, terminated, truncated, episode_return, episode_length):
        `obs` is what to act on next, the first one of the next episode if this one ended;
        `final_obs` is where this step led. Return (the true score) and length (in steps) are those
        of the whole game, NaN and 0 until it is over.
        """
        score, terminated, truncated = self.press(int(action))
        self.length += 1
        # The four pictures are the four bytes of a number: a shift is much faster than np.roll.
        pictures = self.obs.view("<u4")[..., 0]
        pictures >>= 8
        pictures |= self.picture().astype("<u4") << 24
        final_obs, self.ended = self.obs, (math.nan, 0)
        if terminated or truncated:
            final_obs = self.obs.copy()
            self.reset()
        truncated = truncated and not terminated
        return self.obs, final_obs, np.sign(score), terminated, truncated, *self.ended

    def get_state(self):
        """Return what `set_state` needs to go on as if nothing had happened."""
        kept = {name: value for name, value in vars(self).items() if name not in ("env", "ale")}
        return kept, self.ale.cloneState(include_rng=True), self.env.unwrapped.np_random

    def set_state(self, state):
        """Go on from the state of a game like this one."""
        self.env.reset()
        kept, ale_state, self.env.unwrapped.np_random = state
        vars(self).update(kept)
        self.ale.restoreState(ale_state)


def restored(games, states):
    """Set the games' states, if there are any and they fit. Return whether they are set."""
    try:
        for game, state in zip(games, states or [None], strict=False):
            if state is None:
                return False
            game.set_state(state)
    except Exception as error:  # of any kind, if the env or its packages are others than then
        report(f"{games[0].name} starts a new episode: {first_line(error)}")
        return False
    return True


class Games:
    """The games of one worker: rows `rows` of all N, stepped one after the other.

    They read their actions from, and write what comes of them to, the arrays that all share. With
    a `model` they can play whole rollouts, into the buffer that all share.
    """

    def __init__(self, env_id, seeds, rows, arrays, model=None, **options):
        if multiprocessing.parent_process():  # a worker has one core
            torch.set_num_threads(1)
            cv2.setNumThreads(1)
        self.arrays = {name: array[rows] for name, array in arrays.items() if name[0] != "*"}
        self.rows, self.buffer, self.model = rows, shared_buffer(arrays, rows), model
        self.games = [Game(env_id, int(seed), **options) for seed in seeds[rows]]

    def reset(self, states=None):
        """Start all games from their seeds; those that have one of the N `states` go on from it."""
        states = states[self.rows] if states else [None] * len(self.games)
        for i, (game, state) in enumerate(zip(self.games, states, strict=True)):
            with named(game, "reset"):
                if not restored([game], [state]):
                    self.arrays["obs"][i] = game.reset(game.seed)

    def get_states(self):
        """Return what `reset` needs to go on with these games."""
        return [game.get_state() for game in self.games]

    def step(self):
        """Step all games once."""
        actions, outputs = self.arrays["actions"], [self.arrays[name] for name in STEP_OUTPUTS]
        for i, game in enumerate(self.games):
            with named(game, "step"):
                for array, value in zip(outputs, game.step(actions[i]), strict=True):
                    array[i] = value

    def restart(self, command):
        """Start new games after a failure in a step: the episodes end there.

        A rollout is played again from its start.
        """
        for game in self.games:
            game.seed = new_seed()
        set_truncated(self.arrays)
        self.reset()
        if command == "rollout":
            self.rollout()

    def rollout(self):
        """Play T steps with the model."""
        play_steps(self.model, self.arrays, self.step, self.buffer)

    def close(self):
        """Close all envs."""
        for game in self.games:
            game.env.close()


# The shared arrays that receive what Game.step returns, in its order.
STEP_RESULTS = (  # what a rollout stores
    "final_obs rewards terminated truncated episode_return episode_length"
).split()
STEP_OUTPUTS = ("obs", *STEP_RESULTS)


def array_layout(num_envs, num_steps, num_actions):
    """Return {name: (shape, dtype)} of the arrays that main process and workers share.

    Those of the games' last step are (N, ...), those of the rollout's buffer, *name, (T, N, ...).
    """
    frames = (84, 84, 4), np.uint8
    arrays = {"obs": frames, "final_obs": frames, "actions": ((), np.int64)}
    arrays |= {"rewards": ((), np.float32), "terminated": ((), np.bool_)}
    arrays |= {"truncated": ((), np.bool_), "episode_return": ((), np.float64)}
    arrays |= {"episode_length": ((), np.int64)}
    buffer = {"noise": ((num_actions,), np.float32)} | arrays
    layout = {name: ((num_envs, *shape), dtype) for name, (shape, dtype) in arrays.items()}
    for name, (shape, dtype) in buffer.items():
        layout[f"*{name}"] = (num_steps, num_envs, *shape), dtype
    return layout


def shared_buffer(arrays, rows=slice(None)):
    """Return the rollout's buffer among the shared arrays, {name: (T, N, ...)}, for these games."""
    return {name[1:]: array[:, rows] for name, array in arrays.items() if name[0] == "*"}


# ------------------------------------------------------------------------------------ worker pool


class GameError(RuntimeError):
    """A game or a worker process failed; the first line of the message says which and how."""


@contextmanager
def named(game, doing):
    """Turn an exception of a game into a GameError with the game's name, seed and traceback."""
    try:
        yield
    except Exception as error:
        where = f"{game.name} (seed {game.seed}) failed in {doing}: {first_line(error)}"
        raise GameError(f"{where}\n{traceback.format_exc()}") from None


def view(buffers):
    """Return {name: NumPy array} over the shared {name: (buffer, shape, dtype)}."""
    return {
        name: np.frombuffer(buffer, dtype, math.prod(shape)).reshape(shape)
        for name, (buffer, shape, dtype) in buffers.items()
    }


def worker_process(pipe, make_games, rows, buffers):
    """Main loop of a worker: make its games, then carry out one command after the other."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # these are for the main process to handle
        signal.signal(signum, signal.SIG_IGN)
    parent = multiprocessing.parent_process().sentinel
    try:
        games = make_games(rows, view(buffers))
        pipe.send(None)
        while pipe in multiprocessing.connection.wait([pipe, parent]):  # else the parent is gone
            command, *arguments = pipe.recv()
            pipe.send(getattr(games, command)(*arguments))
            if command == "close":
                return
    except GameError as error:
        pipe.send(error)
    except (EOFError, BrokenPipeError):  # the parent is gone
        return
    except Exception as error:
        pipe.send(GameError(f"a worker failed: {first_line(error)}\n{traceback.format_exc()}"))


class WorkerPool:
    """N games in `num_workers` processes, or in this process with 0.

    `make_games(rows, arrays)` makes the games of one worker; its methods are the commands that
    `call` sends. Observations, actions, rewards and flags stay in `arrays`, which all processes
    share; only the command and a small answer go through the pipe.

    Raises GameError when a game raises, a worker dies, or takes more than `timeout` seconds per
    step; but starts a worker again that fails in a step, as long as there are `restarts_left`.
    """

    def __init__(self, make_games, layout, num_envs, num_workers, timeout=0, start_method=None):
        # A fork shares the memory of all imported libraries, but is safe on Linux only.
        start_method = start_method or ("fork" if sys.platform == "linux" else "spawn")
        self.context = multiprocessing.get_context(start_method)
        self.make_games, self.buffers = make_games, {}
        for name, (shape, dtype) in layout.items():
            size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
            self.buffers[name] = self.context.RawArray("b", size), shape, dtype
        self.arrays = view(self.buffers)
        self.workers, self.games, self.timeout = [], None, timeout
        self.restarts, self.restarts_left = 0, 0
        if num_workers == 0:
            try:
                self.games = make_games(slice(0, num_envs), self.arrays)
            except Exception as error:
                problem = f"a game cannot be made: {first_line(error)}\n{traceback.format_exc()}"
                raise GameError(problem) from None
            return
        shares = np.array_split(np.arange(num_envs), min(num_workers, num_envs))
        self.rows = [slice(int(share[0]), int(share[-1]) + 1) for share in shares]
        self.workers = [self.start(rows) for rows in self.rows]
        try:
            self.receive()
        except BaseException:  # one of them could not start
            self.close()
            raise

    def start(self, rows):
        """Start a worker for these games. Return its pipe and process."""
        pipe, remote = self.context.Pipe()
        arguments = (remote, self.make_games, rows, self.buffers)
        process = self.context.Process(target=worker_process, args=arguments, daemon=True)
        process.start()
        remote.close()
        return pipe, process

    def call(self, command, *arguments, steps=0):
        """Have every worker carry out a command that takes this many steps of its games.

        Returns the list of their answers.
        """
        if self.games is not None:
            return [getattr(self.games, command)(*arguments)]
        for pipe, _ in self.workers:
            with suppress(BrokenPipeError):  # receive reports a dead worker
                pipe.send((command, *arguments))
        return self.receive(command, steps)

    def receive(self, command=None, steps=0):
        """Return the answers of all workers; raise the first GameError that no restart mends."""
        answers = [self.answer(i, steps) for i in range(len(self.workers))]
        for i, answer in enumerate(answers):
            while isinstance(answer, GameError):
                if not steps or not self.restarts_left:
                    raise answer
                answer = answers[i] = self.restart(i, answer, command, steps)
        return answers

    def answer(self, i, steps):
        """Return the answer of worker i, or the GameError that is the reason why there is none."""
        pipe, process = self.workers[i]
        limit = self.timeout * steps if self.timeout and steps else None
        if not multiprocessing.connection.wait([pipe, process.sentinel], limit):
            process.kill()
            return GameError(f"worker {i} has not answered for {limit:g} s, see --step-timeout")
        try:
            if not pipe.poll():
                raise EOFError
            return pipe.recv()
        except (EOFError, OSError):
            process.join()
            return GameError(f"worker {i} died with exit code {process.exitcode}")

    def restart(self, i, error, command, steps):
        """Start worker i again, with new games. Return its answer for the command."""
        self.restarts, self.restarts_left = self.restarts + 1, self.restarts_left - 1
        print(f"worker {i} starts again: {first_line(error)}", file=sys.stderr, flush=True)
        pipe, process = self.workers[i]
        process.kill()
        process.join()
        pipe.close()
        self.workers[i] = self.start(self.rows[i])
        answer = self.answer(i, 0)
        if not isinstance(answer, GameError):
            with suppress(BrokenPipeError):
                self.workers[i][0].send(("restart", command))
            answer = self.answer(i, steps)
        return answer

    def close(self):
        """Close the games and end the processes, also those that do not answer."""
        if self.games is not None:
            self.games.close()
        for pipe, _ in self.workers:
            with suppress(OSError):
                pipe.send(("close",))
        end = time.monotonic() + 5
        try:
            for _, process in self.workers:
                process.join(max(0, end - time.monotonic()))
        finally:
            for _, process in self.workers:
                process.kill()
                process.join()


def new_seed():
    """Return a seed that no game has had."""
    return int(np.random.SeedSequence().generate_state(1)[0])


def set_truncated(arrays):
    """Let the last step of these games' arrays have ended their episodes, as a time limit does."""
    arrays["final_obs"][:] = np.nan_to_num(arrays["obs"], posinf=0, neginf=0)
    last = {"rewards": 0, "terminated": False, "truncated": True}
    for name, value in (last | {"episode_return": math.nan, "episode_length": 0}).items():
        arrays[name][:] = value


# ------------------------------------------------------------------------------------ ranks

# torchrun starts several processes, the ranks, to train one model. A rank has its share of the
# games, and gets the rows of all: statistics and minibatches are those of one process. Of each
# minibatch it takes its share; then the ranks average their gradients.


def rank():
    """Return this process's number among those that torchrun started, 0 without torchrun."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def num_ranks():
    """Return how many processes torchrun started, 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def a_gpu_each():
    """Return whether there is a GPU for each rank of this machine, and choose this rank's."""
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if enough and num_ranks() > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return enough


def report(message):
    """Print a message, once for all ranks."""
    if rank() == 0:
        print(message, file=sys.stderr, flush=True)


@contextmanager
def connected_ranks(model):
    """Connect the ranks while the block runs; they start from rank 0's parameters."""
    if num_ranks() == 1:
        yield
        return
    with lost_rank(ConnectionError):
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(days=1))  # of an evaluation
    try:
        with lost_rank(ConnectionError):
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)
        yield
    finally:
        dist.destroy_process_group()


def own_games(num_envs):
    """Return the slice of all games that this rank has."""
    share = num_envs // num_ranks()
    return slice(rank() * share, (rank() + 1) * share)


def own_rows(minibatch, axis=0):
    """Return this rank's share of a minibatch's rows: every num_ranks-th."""
    if num_ranks() == 1:
        return minibatch
    share = (*[slice(None)] * axis, slice(rank(), None, num_ranks()))
    return {name: column[share] for name, column in minibatch.items()}


def gathered(buffer):
    """Return a buffer, tensors (T, N, ...), with the games of all ranks side by side."""
    if num_ranks() == 1:
        return buffer
    with lost_rank(GameError):
        for name, column in buffer.items():
            column = column.contiguous()
            parts = [torch.empty_like(column) for _ in range(num_ranks())]
            dist.all_gather(parts, column)
            buffer[name] = torch.cat(parts, dim=1)
    return buffer


def gathered_objects(value):
    """Return the list of the ranks' values."""
    values = [value] * num_ranks()
    if num_ranks() > 1:
        with lost_rank(GameError):
            dist.all_gather_object(values, value)
    return values


def averaged(tensor):
    """Return the mean of the ranks' tensors, which replaces this one."""
    if num_ranks() > 1:
        with lost_rank(ConnectionError):  # in the middle of an update: nothing to save
            dist.all_reduce(tensor)
        tensor /= num_ranks()
    return tensor


@contextmanager
def lost_rank(kind):
    """Raise an error of this kind if another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise kind(f"rank {rank()} has lost another one: {first_line(error)}") from None


# ------------------------------------------------------------------------------------ model


def layer_init(layer, gain=2**0.5):
    """Initialise a linear layer: orthogonal weight scaled by `gain`, zero bias."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Categorical(nn.Module):
    """Policy head for Discrete(n): one logit per action."""

    def __init__(self, features, n):
        super().__init__()
        self.n = n
        self.logits = layer_init(nn.Linear(features, n), 0.01)

    def masked_logits(self, h, action_mask):
        """Features (M, F), flags of allowed actions (M, n) or None → logits (M, n)."""
        logits = self.logits(h)
        # A probability of exactly 0; its π log π is 0 too, where −∞ would make it NaN.
        return logits if action_mask is None else logits.where(action_mask, -1e8)

    def forward(self, h, action_mask=None):
        """Features (M, F) → log-probabilities (M, n)."""
        return self.masked_logits(h, action_mask).log_softmax(dim=-1)

    def noise(self, batch, generator):
        """Standard Gumbel noise, (batch, n)."""
        return -torch.empty(batch, self.n).exponential_(generator=generator).log()

    def sample(self, logp, noise):
        """Gumbel-max: the argmax of log π + Gumbel noise has the law of the policy. (M, ...)"""
        return self.mode(logp + noise)

    def mode(self, logp):
        """The most probable action, (M,)."""
        return logp.argmax(dim=-1)

    def log_prob(self, logp, action):
        """log π(a|s), (M,)."""
        return logp.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self, logp):
        """H = −Σ π log π, (M,)."""
        return -(logp.exp() * logp).sum(dim=-1)


class Model(nn.Module):
    """Policy and value function: three convolutions, 512 features, a head for each.

    The layers under the heads compute in bfloat16 if `bf16`; weights and heads are float32.
    """

    inputs, stored = ("obs",), ("obs", "actions")

    def __init__(self, num_actions, bf16=False):
        super().__init__()
        self.bf16 = bf16
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
        self.head = Categorical(512, num_actions)
        layer_init(self.head.logits, 0.1)
        self.value = layer_init(nn.Linear(512, 1), 1.0)

    def forward(self, obs):
        """Pictures (..., 84, 84, 4) in uint8 → log-probabilities pi (..., n), values (...)."""
        h = self.features(obs)
        return self.head(h), self.value(h).squeeze(-1)

    def features(self, obs):
        """Pictures (..., 84, 84, 4) in uint8 → what the heads see, (..., 512)."""
        assert obs.shape[-3:] == (84, 84, 4) and obs.dtype == torch.uint8
        x = obs.flatten(0, -4).permute(0, 3, 1, 2)  # (M, 4, 84, 84), in memory channels last
        with self.autocast():
            h = self.actor(x.to(torch.bfloat16 if self.bf16 else torch.float32) / 255)
        return h.float().view(*obs.shape[:-3], -1)

    def autocast(self, enabled=True):
        """Return the context in which layers compute in bfloat16, if so; it casts weights once."""
        device_type, enabled = self.value.weight.device.type, enabled and self.bf16
        return torch.autocast(device_type, torch.bfloat16, enabled=enabled)

    def policy(self, obs):
        """The policy's mode for pictures (M, 84, 84, 4), in float32: a tuple (actions (M,),)."""
        self.bf16 = False  # other runtimes may not have it
        return (self.head.mode(self.head(self.features(obs))),)

    def act(self, arrays, noise=None):
        """Set actions for what the games show: samples from noise (N, n), else the mode."""
        (obs,) = to_tensors(arrays, self.inputs, self.value.weight.device)
        h = self.features(obs)
        with self.autocast(enabled=False):  # float32 for the head, in `play_steps` too
            pi = self.head(h)
        actions = self.head.mode(pi) if noise is None else self.head.sample(pi, noise)
        arrays["actions"][:] = actions.cpu().numpy()


# ------------------------------------------------------------------------------------ rollout


@torch.no_grad()
def rollout(model, pool, generator):
    """Take T steps in all N games with the current policy.

    Returns the buffer, tensors (T, N, ...): obs, actions, logprobs, values, next_values, rewards,
    terminated, truncated; and the (return, length) of the games that ended, both of all ranks. On a
    CPU the tensors are the memory that the next rollout writes to.
    """
    buffer = shared_buffer(pool.arrays)
    T, N, _ = buffer["noise"].shape
    buffer["noise"][:] = make_noise(model, T, N, generator).cpu()
    if model.value.weight.is_cpu:
        pool.call("rollout", steps=T)  # the workers play with the same weights, in shared memory
    else:
        play_steps(model, pool.arrays, functools.partial(pool.call, "step", steps=1), buffer)
    return gathered(finish(model, buffer)), sum(gathered_objects(ended_episodes(buffer)), [])


@torch.no_grad()
def play_steps(model, arrays, step, buffer):
    """Fill a buffer: let the model act in the games of these arrays, which `step` steps."""
    noise = torch.from_numpy(buffer["noise"]).to(model.value.weight.device)
    with model.autocast():
        for t in range(len(noise)):
            model.act(arrays, noise[t])
            store(buffer, t, arrays, model.stored)
            step()
            store(buffer, t, arrays, STEP_RESULTS)


def make_noise(model, num_steps, num_envs, generator):
    """Return the noise that makes a rollout's actions random, (T, N, ·)."""
    num_envs *= num_ranks()
    noise = model.head.noise(num_steps * num_envs, generator).view(num_steps, num_envs, -1)
    return noise[:, own_games(num_envs)].to(model.value.weight.device)


def store(buffer, t, arrays, names):
    """Copy what the games' arrays hold to a buffer's step t."""
    for name in names:
        buffer[name][t] = arrays[name]


def finish(model, buffer):
    """Return a full buffer as tensors (T, N, ...), with values, next_values and logprobs.

    They come from passes over all steps here, with the update's own arithmetic: its first ratios
    are 1, whatever the workers' rounding.
    """
    device = model.value.weight.device
    final_obs = torch.from_numpy(buffer["final_obs"])
    names = ("obs", "actions", "rewards", "terminated", "truncated")
    buffer = dict(zip(names, to_tensors(buffer, names, device), strict=True))
    # In pieces: on a CPU that is faster than 1,000 pictures at once.
    pieces = [model(obs) for obs in buffer["obs"].split(32)]
    pi, values = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    # V(s_{t+1}) is the next row's, but for a time limit's end and the end of the rollout.
    next_values, own = values.roll(-1, 0), buffer["truncated"].clone()
    own[-1] = True
    next_values[own] = model(final_obs[own.cpu()].to(device))[1]
    logprobs = model.head.log_prob(pi, buffer["actions"])
    return buffer | {"values": values, "next_values": next_values, "logprobs": logprobs}


def to_tensors(arrays, names, device):
    """Return the arrays of these names as tensors; on a CPU they share the arrays' memory."""
    return [torch.from_numpy(arrays[name]).to(device) for name in names]


def ended_episodes(arrays):
    """Return (return, length) of the games whose episode ended with the last step."""
    ended = arrays["episode_length"] > 0
    if not ended.any():
        return []
    pairs = zip(arrays["episode_return"][ended], arrays["episode_length"][ended], strict=True)
    return [(float(episode_return), int(length)) for episode_return, length in pairs]


# ------------------------------------------------------------------------------------ GAE


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2016). All tensors are (T, N).

    `next_values[t]` is V of the state that step t led to; it counts for nothing where the episode
    `terminated`. The sum over later steps stops at either kind of end.
    """
    for tensor in (values, next_values, terminated, truncated):
        assert tensor.shape == rewards.shape
    # PPO, Eq. (12): δ_t = r_t + γ V(s_{t+1}) (1 − terminated_t) − V(s_t)
    deltas = rewards + gamma * next_values * ~terminated - values
    # GAE, Eq. (16): Â_t = δ_t + γλ (1 − done_t) Â_{t+1}
    decay = gamma * gae_lambda * ~(terminated | truncated)
    advantages = torch.empty_like(rewards)
    advantage = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        advantages[t] = advantage = torch.addcmul(deltas[t], decay[t], advantage)
    return advantages


def make_batch(buffer, inputs, gamma, gae_lambda):
    """Add advantages and returns to a buffer and flatten it: (T, N, ...) → (T·N, ...).

    `inputs` names the model's inputs. A buffer with a recurrent policy's states keeps its shape:
    there a minibatch consists of whole sequences.
    """
    names = ("rewards", "values", "next_values", "terminated", "truncated")
    advantages = gae(*(buffer[name] for name in names), gamma, gae_lambda)
    columns = {name: buffer[name] for name in (*inputs, "actions", "logprobs", "values")}
    columns |= {"advantages": advantages, "returns": advantages + buffer["values"]}
    if "state" in inputs:
        return columns
    return {name: column.flatten(0, 1) for name, column in columns.items()}


# ------------------------------------------------------------------------------------ losses


def losses(model, batch, clip_coef, clip_vloss):
    """PPO's loss terms, row by row.

    `batch` holds obs (M, ...) and the model's other inputs, actions (M, ...), logprobs, values,
    advantages, returns (M,). Returns pg_loss, v_loss, entropy and logratio = log r_t(θ), each (M,);
    (T, M) instead of (M,) with a recurrent policy.
    """
    pi, values = model(*(batch[name] for name in model.inputs))
    logratio = model.head.log_prob(pi, batch["actions"]) - batch["logprobs"]
    advantages, returns = batch["advantages"], batch["returns"]
    assert logratio.shape == values.shape == advantages.shape == returns.shape
    # PPO, Eq. (7): −min(r_t(θ) Â_t, clip(r_t(θ), 1−ε, 1+ε) Â_t)
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    pg_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)
    # PPO, Eq. (9), second term: ½ (V_θ(s_t) − R_t)²
    v_loss = 0.5 * (values - returns).square()
    if clip_vloss:
        change = (values - batch["values"]).clamp(-clip_coef, clip_coef)
        v_loss = torch.max(v_loss, 0.5 * (batch["values"] + change - returns).square())
    return pg_loss, v_loss, model.head.entropy(pi), logratio


# ------------------------------------------------------------------------------------ update


def update(model, optimizer, batch, args, clip_coef, generator):
    """Take K epochs of minibatch steps on the rows of `batch`. Return the means of the losses."""
    seen, B = [], args.num_minibatches
    if args.norm_adv == "batch":
        batch = batch | {"advantages": normalised(batch["advantages"])}
    for _ in range(args.update_epochs):
        rows = torch.randperm(len(batch["obs"]), generator=generator).to(batch["obs"].device)
        for mb_rows in rows.chunk(B):
            mb = {name: column[mb_rows] for name, column in batch.items()}
            if args.norm_adv == "minibatch":
                mb["advantages"] = normalised(mb["advantages"])
            mb = own_rows(mb)
            *terms, logratio = losses(model, mb, clip_coef, args.clip_vloss)
            pg_loss, v_loss, entropy = [term.mean() for term in terms]
            approx_kl, clipfrac = policy_change(logratio.detach(), clip_coef)
            # PPO, Eq. (9): loss = E[−L^CLIP + c_v ½ (V_θ − R)² − c_e H]
            loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy
            row = torch.stack([pg_loss, v_loss, entropy, approx_kl, clipfrac]).detach()
            seen.append(averaged(row))
            if args.target_kl is not None and row[3] > args.target_kl:
                return summary(seen)
            take_step(optimizer, loss, args.max_grad_norm)
    return summary(seen)


def normalised(advantages):
    """Return advantages with mean 0 and deviation 1."""
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def take_step(optimizer, loss, max_grad_norm):
    """Take an optimizer step down the clipped gradient of the loss."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()  # not None: the gradient is a view of its vector, see `flatten`
    loss.backward()
    for parameter in parameters:
        averaged(parameter.grad)
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm, foreach=False)
    if not torch.isfinite(norm):  # before it reaches the weights
        problem = f"loss {loss.item()}, its gradient is not finite: lower the learning rate?"
        raise FloatingPointError(problem)
    optimizer.step()


def policy_change(logratio, clip_coef):
    """Return approx_kl and clipfrac, the share of rows whose ratio is beyond 1 ± ε."""
    ratio = logratio.exp()
    # E[r − 1 − log r] estimates KL(π_old, π) without bias and is never negative.
    approx_kl = (ratio - 1 - logratio).mean()
    return approx_kl, ((ratio - 1).abs() > clip_coef).float().mean()


def summary(seen):
    """Return the mean over an update's minibatches of each quantity, {name: float}."""
    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")
    return dict(zip(names, torch.stack(seen).mean(dim=0).tolist(), strict=True))


def explained_variance(values, returns):
    """1 − Var(R − V) / Var(R): 1 is a perfect value function, 0 no better than a constant."""
    variance = returns.var()
    return float(1 - (returns - values).var() / variance) if variance > 0 else math.nan


# ------------------------------------------------------------------------------------ evaluation


@torch.no_grad()
def evaluate(model, pool, arrays, generator=None, max_steps=110_000):
    """Play one whole episode in every game. Return the returns, (E,).

    With a generator actions are sampled, else the policy's mode is taken. Raises GameError if an
    episode takes more than `max_steps` steps.
    """
    pool.call("reset")
    returns = np.full(len(arrays["rewards"]), math.nan)
    for _ in range(max_steps):
        model.act(arrays, evaluation_noise(model, len(returns), generator))
        pool.call("step", steps=1)
        first = np.isnan(returns)
        returns[first] = arrays["episode_return"][first]
        if not np.isnan(returns).any():
            return returns
    raise GameError(f"evaluation: an episode has not ended after {max_steps} steps")


def evaluation_noise(model, num_envs, generator):
    """Return the noise (N, ·) of a step's actions, None without a generator."""
    return None if generator is None else make_noise(model, 1, num_envs, generator)[0]


# ------------------------------------------------------------------------------------ run folder


class Logger:
    """Writes a run's folder: config.json, progress.csv, TensorBoard events; prints status lines."""

    def __init__(self, run_dir, args, seeds, columns, last_iteration=0, first_step=None):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, only training needs it

        self.columns, self.args, self.last_iteration = columns, args, last_iteration
        self.run_dir, self.start, self.rows = run_dir, time.perf_counter(), []
        if rank() > 0:
            return
        config = {"options": vars(args), "command": sys.argv, "versions": versions()}
        config["game_seeds"] = seeds.tolist()
        write_file(run_dir / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        self.events = SummaryWriter(str(run_dir), purge_step=first_step)
        path, kept = run_dir / "progress.csv", io.StringIO(newline="")
        self.writer = csv.DictWriter(kept, columns, extrasaction="ignore")
        self.writer.writeheader()
        if last_iteration:
            self.writer.writerows(whole_rows(path.read_bytes(), last_iteration))
        write_file(path, kept.getvalue().encode())
        self.csv = path.open("a", newline="")
        self.writer = csv.DictWriter(self.csv, columns)

    def write(self, row, **scalars):
        """Log an iteration: `row` to progress.csv and TensorBoard, {tag: value} to the latter."""
        self.rows.append(row)
        if rank() > 0:
            return
        for name in ("episodic_return", "episodic_length", "eval_return", "learning_rate", "sps"):
            scalars[f"charts/{'SPS' if name == 'sps' else name}"] = row.get(name)
        scalars["charts/restarts"] = row.get("restarts")
        for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"):
            scalars[f"losses/{name}"] = row.get(name)
        scalars["losses/explained_variance"] = row.get("explained_variance")
        with named_file(self.run_dir):
            self.writer.writerow({name: row.get(name) for name in self.columns})
            self.csv.flush()
            for tag, value in scalars.items():
                if value is not None and math.isfinite(value):
                    self.events.add_scalar(tag, value, row["global_step"])
        if not self.args.quiet:
            print(self.status(row), flush=True)

    def status(self, row):
        """Return the status line of an iteration."""
        iteration, total = row["iteration"], self.args.num_iterations
        line = f"update {iteration}/{total}  steps {row['global_step']:,}"
        for name, form in {"sps": ",", "episodic_return": ".4g", "eval_return": ".4g"}.items():
            line += f"  {name} {row[name]:{form}}" if row.get(name) is not None else ""
        done = iteration - self.last_iteration
        if done > 0:
            seconds = (time.perf_counter() - self.start) / done * (total - iteration)
            line += f"  ETA {seconds // 60:.0f}:{seconds % 60:02.0f}"
        return line

    def flush(self):
        """Write what TensorBoard still keeps: a checkpoint must not be ahead of it."""
        with named_file(self.run_dir):
            self.events.flush()

    def close(self):
        """Close the files."""
        if rank() > 0:
            return
        with named_file(self.run_dir):
            self.csv.close()
            self.events.close()


def whole_rows(content, last_iteration):
    """Return the rows of a progress.csv up to an iteration, without those that are damaged."""
    text = content.decode(errors="replace").replace("\0", "")
    rows = csv.DictReader(text.splitlines(), quoting=csv.QUOTE_NONE)
    rows = [row for row in rows if None not in (*row, *row.values())]
    rows = [row for row in rows if row.get("iteration", "").isdecimal()]
    return [row for row in rows if int(row["iteration"]) <= last_iteration]


def versions():
    """Return the versions that a run's numbers depend on."""
    git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # no git here
        commit = None
    packages = {"torch": torch.__version__, "gymnasium": gym.__version__, "numpy": np.__version__}
    return {"python": platform.python_version(), **packages, "git_commit": commit}


def folder_name(name):
    """Return a run's name with an underscore for what may not be in a folder's name."""
    return re.sub(r"[^\w.-]+", "_", name)


def make_run_dir(args, script):
    """Create and return the run's folder, on rank 0; FileExistsError if --run-name is taken."""
    if rank() > 0:
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = args.run_name or f"{args.env}__{script}__{args.seed}__{stamp}"
    run_dir = Path(args.log_dir) / folder_name(name)
    while run_dir.exists() and not args.run_name:  # another run began in the same second
        run_dir = run_dir.with_name(run_dir.name + "_")
    run_dir.mkdir()
    return run_dir


def save_checkpoint(run_dir, model, optimizer, generator, counters, games=None):
    """Write RUN_DIR/checkpoint.pt, and the games of a `save_games` to a file beside it.

    Each checkpoint has its own games-ITERATION.pkl, there before it and removed after the next.
    """
    games_file = run_dir / f"games-{counters['iteration']}.pkl"
    if games is not None:
        content = pickle.dumps(games)
        write_file(games_file, hashlib.sha256(content).digest() + content)
    elif games_file.exists():  # this iteration is saved, with its games
        return
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"generator": generator.get_state(), "counters": counters}
    file = io.BytesIO()
    torch.save(state, file)
    write_file(run_dir / "checkpoint.pt", file.getvalue())
    for old in set(run_dir.glob("games-*.pkl")) - {games_file}:
        old.unlink()


def write_file(path, content):
    """Write bytes to a file atomically: whoever dies here, or finds no room, leaves the old one."""
    partial = path.with_suffix(".partial")
    with named_file(path):
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def named_file(path):
    """Give an OSError, like that of a full disk, the name of the file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def load_checkpoint(run_dir, device="cpu"):
    """Read RUN_DIR/checkpoint.pt: tensors and plain values, no code runs from the file.

    Raises OSError if it cannot be read, ValueError if it is no checkpoint of these scripts.
    """
    path = Path(run_dir) / "checkpoint.pt"
    content = io.BytesIO(path.read_bytes())
    try:
        state = torch.load(content, map_location=device, weights_only=True)
    except Exception:  # of many kinds
        raise ValueError(f"{path} is damaged") from None
    parts = {"model", "optimizer", "generator", "counters"}
    if not isinstance(state, dict) or state.keys() != parts:
        raise ValueError(f"{path} is no checkpoint of these scripts")
    return state


def restore(run_dir, model, optimizer, generator):
    """Set model, optimizer and generator to their state in the checkpoint. Return its counters."""
    state = load_checkpoint(run_dir, model.value.weight.device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    generator.set_state(state["generator"].cpu())
    return state["counters"]


def save_games(args, pool, seeds, recent):
    """Return what a resumed run needs to go on in the middle of its episodes, for every rank."""
    states = [state for answer in pool.call("get_states") for state in answer]
    arrays = {name: array.copy() for name, array in pool.arrays.items() if name[0] != "*"}
    games = {"made_of": [getattr(args, name) for name in GAMES_MADE_OF], "seeds": seeds}
    return gathered_objects(games | {"states": states, "arrays": arrays, "recent": recent})


def load_games(args, iteration):
    """Return what `save_games` did at the resumed run's checkpoint, None if that cannot be used.

    Says so if games start new episodes. The file is a pickle: do not resume a stranger's run.
    """
    path = Path(args.resume) / f"games-{iteration}.pkl"
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            raise ValueError(f"{path} is damaged")
        games = pickle.loads(content[32:])
        for other in {*path.parent.glob("games-*.pkl")} - {path}:
            other.unlink(missing_ok=True)  # of a checkpoint that was never written
        if len(games) != num_ranks():
            raise ValueError(f"the run had {len(games)} ranks")
        if games[0]["made_of"] != [getattr(args, name) for name in GAMES_MADE_OF]:
            raise ValueError("the run's games were made with other options")
    except Exception as error:  # of any kind, if the packages are others than then
        report(f"all games start new episodes: {first_line(error)}")
        return None
    if lost := sum(part["states"].count(None) for part in games):
        report(f"{lost} games start new episodes: they could not be saved")
    return games[rank()]


@contextmanager
def saved_at_the_end(save):
    """Save when the block ends, also by a GameError: the last iteration is complete then."""
    try:
        yield
        save()
    except GameError:
        save(with_games=False)
        raise


class StopRequest:
    """Ctrl-C or SIGTERM: finish the iteration, save, stop. A second one stops at once."""

    def __enter__(self):
        self.signal, self.handlers = None, {}
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self.handlers[signum] = signal.signal(signum, self)
        return self

    def __call__(self, signum, frame):
        if self.signal is not None:
            if num_ranks() == 1:
                raise KeyboardInterrupt
            return  # torchrun may send a second one while rank 0 still saves
        self.signal = signum
        report("stopping after this iteration; once more to stop now")

    def received(self):
        """Return whether any rank has received a signal."""
        agreed = max(gathered_objects(self.signal or 0))
        self.signal = agreed or self.signal
        return agreed > 0

    def __exit__(self, *_):
        for signum, handler in self.handlers.items():
            signal.signal(signum, handler)


# ------------------------------------------------------------------------------------ train

COLUMNS = (
    "iteration global_step wall_seconds restarts sps episodic_return episodic_length eval_return "
    "policy_loss value_loss entropy approx_kl clipfrac explained_variance learning_rate"
).split()


GAME_OPTIONS = "frameskip sticky_actions full_action_space episodic_life noop_max fire".split()
GAMES_MADE_OF = ("env", "num_envs", *GAME_OPTIONS)


def make_model(args):
    """Return the Model for the game, its weights drawn from torch's global generator."""
    with closing(make_env(args.env, full_action_space=args.full_action_space)) as env:
        num_actions = int(env.action_space.n)
    device = choose_device(args.device)
    bf16 = args.precision == "bf16" or args.precision == "auto" and has_bf16(device)
    return Model(num_actions, bf16).to(device)


def choose_device(name):
    """Return the torch device of this name; auto: cuda if there is one, else cpu."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and a_gpu_each() else "cpu"
    return torch.device(name)


def has_bf16(device):
    """Return whether a device computes in bfloat16 faster than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    able = getattr(torch.cpu, "get_capabilities", dict)() if device.type == "cpu" else {}
    return able.get("avx512_bf16", False) or able.get("amx_bf16", False)


def make_optimizer(model):
    """Return Adam with two groups, of the policy and of the value function, each one vector.

    The model's parameters become views of the vectors: Adam, the gradient's norm and its clipping
    work on two tensors instead of many small ones.
    """
    value = [*model.value.parameters()]
    value += model.critic.parameters() if model.critic is not model.actor else []
    policy = [parameter for parameter in model.parameters() if parameter not in set(value)]
    groups = [{"params": [flatten(parameters)]} for parameters in (policy, value)]
    return torch.optim.Adam(groups, eps=1e-5, fused=True)


def flatten(parameters):
    """Move parameters and their gradients into one vector each. Return the vector, a Parameter."""
    vector = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach())
    vector.grad = torch.zeros_like(vector)
    sizes = [parameter.numel() for parameter in parameters]
    pieces = zip(parameters, vector.detach().split(sizes), vector.grad.split(sizes), strict=True)
    for parameter, values, gradient in pieces:
        parameter.data, parameter.grad = values.view_as(parameter), gradient.view_as(parameter)
    return vector


EVAL_SEED = 10_000  # evaluation games have their own seeds, the same in every run


def make_eval_pool(args):
    """Return the pool of evaluation games; only a worker can be timed."""
    seeds, num_workers = EVAL_SEED + np.arange(args.eval_episodes), int(args.step_timeout > 0)
    return make_pool(args, seeds, num_workers)


def make_pool(args, seeds, num_workers, model=None, num_steps=0, **options):
    """Return the pool of one game per seed; with a model it can play rollouts of num_steps."""
    with closing(make_env(args.env, full_action_space=args.full_action_space)) as env:
        layout = array_layout(len(seeds), num_steps, int(env.action_space.n))
    options |= {name: getattr(args, name) for name in GAME_OPTIONS}
    games = functools.partial(Games, args.env, seeds, model=model, **options)
    return WorkerPool(games, layout, len(seeds), num_workers, args.step_timeout)


def game_seeds(args, shape, iteration, games):
    """Return the seeds of this rank's games (..., N): those of `load_games`, else new ones."""
    # Games that start when a run is resumed must not repeat those that started with it.
    seeds = np.random.SeedSequence([args.seed, iteration]).generate_state(math.prod(shape))
    seeds = seeds.reshape(shape)[..., own_games(shape[-1])]
    if games:
        seeds = np.where([state is None for state in games["states"]], seeds, games["seeds"])
    return seeds


def settings(args, model):
    """Return the line that a run starts with: what is played, and how."""
    shown = {name: getattr(args, name) for name in (*GAME_OPTIONS, "num_workers")}
    shown["precision"] = "bf16" if model.bf16 else "fp32"
    return f"{args.env}: " + ", ".join(f"{name} {value}" for name, value in shown.items())


def keep_freed_memory():
    """Have glibc keep what is freed: new pages for every minibatch make updates slower."""
    if platform.libc_ver()[0] == "glibc":
        mallopt, M_TRIM_THRESHOLD, M_MMAP_MAX = ctypes.CDLL(None).mallopt, -1, -4
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def reset(pool, games):
    """Start all games of the pool; if there are `games` of a `load_games`, go on with these."""
    if games:
        for name, array in games["arrays"].items():
            pool.arrays[name][:] = array
    pool.call("reset", games and games["states"])


def train(args):
    """Train as `args` say. Returns a namespace: run_dir, model, optimizer, history (logged rows),
    signal (the one that stopped the run, or None).

    Raises GameError when a game or a worker fails, after saving the last complete iteration.
    """
    keep_freed_memory()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a worker that is forked off must not find several
    torch.manual_seed(args.seed)
    model = make_model(args)
    optimizer = make_optimizer(model)
    model.share_memory()  # workers see every update
    generator = torch.Generator().manual_seed(args.seed)
    counters = {"iteration": 0, "global_step": 0, "wall_seconds": 0.0, "restarts": 0}
    run_dir = Path(args.resume) if args.resume else make_run_dir(args, "ppo_atari")
    if args.resume:
        counters |= restore(run_dir, model, optimizer, generator)
    games = load_games(args, counters["iteration"]) if args.resume else None
    seeds = game_seeds(args, (args.num_envs,), counters["iteration"], games)
    recent = games["recent"] if games else deque(maxlen=100)
    evaluates = args.eval_every and rank() == 0
    with ExitStack() as stack:
        if not args.quiet and rank() == 0:
            stack.callback(print, f"run folder: {run_dir}")
        stack.enter_context(connected_ranks(model))
        stop = stack.enter_context(StopRequest())
        player = model if model.value.weight.is_cpu else None
        pool = make_pool(args, seeds, args.num_workers, player, args.num_steps)
        stack.enter_context(closing(pool))
        if evaluates:
            eval_pool = stack.enter_context(closing(make_eval_pool(args)))
        torch.set_num_threads(num_threads)
        if args.compile:
            model.compile()
        steps = counters["iteration"], counters["global_step"] + 1
        all_seeds = np.concatenate(gathered_objects(seeds), axis=-1)
        logger = stack.enter_context(closing(Logger(run_dir, args, all_seeds, COLUMNS, *steps)))

        def save(with_games=True):
            games = save_games(args, pool, seeds, recent) if with_games else None
            if rank() == 0:
                logger.flush()
                save_checkpoint(run_dir, model, optimizer, generator, counters, games)
            if with_games:
                gathered_objects(None)  # nobody ends, which would end rank 0, before it has saved

        stack.enter_context(saved_at_the_end(save))
        if not args.quiet and rank() == 0:
            print(settings(args, model), flush=True)
        reset(pool, games)
        pool.restarts_left = args.restart_workers
        if evaluates and counters["iteration"] == 0:
            logger.write(
                counters | {"eval_return": evaluate(model, eval_pool, eval_pool.arrays).mean()}
            )
        while counters["iteration"] < args.num_iterations and not stop.received():
            started = time.perf_counter()
            remaining = 1 - counters["iteration"] / args.num_iterations
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * (remaining if args.anneal_lr else 1)
            clip_coef = args.clip_coef * (remaining if args.anneal_clip else 1)
            buffer, episodes = rollout(model, pool, generator)
            batch = make_batch(buffer, model.inputs, args.gamma, args.gae_lambda)
            row = {"explained_variance": explained_variance(batch["values"], batch["returns"])}
            row |= update(model, optimizer, batch, args, clip_coef, generator)

            seconds = time.perf_counter() - started
            restarts, pool.restarts = sum(gathered_objects(pool.restarts)), 0
            counters["iteration"] += 1
            counters["global_step"] += args.num_envs * args.num_steps
            counters["wall_seconds"] += seconds
            counters["restarts"] += restarts
            recent += episodes
            row |= counters | episode_means(recent)
            row["sps"] = round(args.num_envs * args.num_steps / seconds)
            row["learning_rate"] = optimizer.param_groups[0]["lr"]
            last = counters["iteration"] == args.num_iterations
            try:
                if evaluates and (last or counters["iteration"] % args.eval_every == 0):
                    row["eval_return"] = evaluate(model, eval_pool, eval_pool.arrays).mean()
            finally:
                logger.write(row)
            if args.save_every and counters["iteration"] % args.save_every == 0:
                save()
    result = {"run_dir": run_dir, "model": model, "optimizer": optimizer, "history": logger.rows}
    return SimpleNamespace(**result, signal=stop.signal)


def episode_means(episodes):
    """Return the mean return and length of (return, length) pairs; NaN where there are none."""
    means = np.mean(episodes, axis=0) if episodes else (math.nan, math.nan)
    return {"episodic_return": float(means[0]), "episodic_length": float(means[1])}


def evaluate_run(args):
    """Evaluate the checkpoint of a run, as --eval says. Returns the returns, (E,)."""
    model = make_model(args)
    model.load_state_dict(load_checkpoint(args.eval)["model"])
    generator = torch.Generator().manual_seed(EVAL_SEED) if args.sample else None
    with closing(make_eval_pool(args)) as pool:
        returns = evaluate(model, pool, pool.arrays, generator)
        inputs = {name: pool.arrays[name][:1] for name in model.inputs if name != "starts"}
    print(f"return {returns.mean():.4f} ± {returns.std():.4f} over {len(returns)} episodes")
    if args.video:
        try:
            path = record_video(args, model)
        except Exception as error:
            problem = f"argument --video: no film of {args.env}: {first_line(error)}"
            raise GameError(problem) from None
        print(f"video: {path}")
    if args.export_onnx:
        with closing(make_env(args.env)) as env:
            path = export_onnx(Path(args.eval) / "policy.onnx", model, inputs, env.action_space)
        print(f"policy: {path}")
    return returns


def record_video(args, model):
    """Play a game, write its pictures to a file. Return the file's path."""
    generator = torch.Generator().manual_seed(EVAL_SEED) if args.sample else None
    with closing(make_pool(args, np.array([EVAL_SEED]), 0, render_mode="rgb_array")) as pool:
        env = pool.games.games[0].env
        env.metadata = env.metadata | {"render_fps": 60 / args.frameskip}
        path = Path(args.eval) / "video.mp4"
        write_video(path, env, play(model, pool, pool.arrays, env, generator))
    return path


@torch.no_grad()
def play(model, pool, arrays, env, generator=None, max_steps=110_000):
    """Play an episode of the pool's only game. Yields the pictures."""
    pool.call("reset")
    for _ in range(max_steps):
        yield env.render()
        model.act(arrays, evaluation_noise(model, 1, generator))
        pool.call("step", steps=1)
        if arrays["episode_length"][0] > 0:
            return


def write_video(path, env, pictures):
    """Write RGB pictures to a file, at the env's speed."""
    import cv2

    video = None
    for picture in pictures:
        if video is None:
            size = picture.shape[1::-1]
            fps = env.metadata.get("render_fps", 30)
            video = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), fps, size)
            if not video.isOpened():
                raise OSError(f"{path} cannot be written")
        video.write(np.ascontiguousarray(picture[..., ::-1]))  # OpenCV wants BGR
    video.release()


class Policy(nn.Module):
    """The policy's mode, from what the env shows to what it takes: what --export-onnx writes."""

    def __init__(self, model, action_space):
        super().__init__()
        self.model, self.start = model, torch.tensor(getattr(action_space, "start", 0))
        box = isinstance(action_space, gym.spaces.Box)
        self.bounds = torch.tensor(np.stack([action_space.low, action_space.high])) if box else None

    def forward(self, *inputs):
        """Inputs of `Model.policy` → its outputs, the actions as `to_env` makes them."""
        actions, *memory = self.model.policy(*inputs)
        if self.bounds is None:
            return actions + self.start, *memory
        return torch.maximum(torch.minimum(actions, self.bounds[1]), self.bounds[0]), *memory


def export_onnx(path, model, inputs, action_space):
    """Write the policy to a file that takes arrays like `inputs`, of any length. Return the path.

    The names are those of the inputs (obs; state if there is a memory, zeros at an episode's start;
    action_mask), and action, next_state.
    """
    outputs = ["action", "next_state"] if "state" in inputs else ["action"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter speaks of its successor
        torch.onnx.export(
            Policy(model.eval(), action_space).cpu(),
            tuple(torch.from_numpy(array) for array in inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=outputs,
            dynamic_axes={name: {0: "batch"} for name in (*inputs, *outputs)},
            dynamo=False,
        )
    return path


def main():
    """Run the command line. Returns the exit code."""
    args = parse_args()
    threading.excepthook = lambda _: None  # TensorBoard's thread hands its errors to the Logger
    try:
        result = evaluate_run(args) if args.eval else train(args)
    except (GameError, FloatingPointError, OSError) as error:
        print(f"ppo_atari.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    stopped_by = getattr(result, "signal", None)
    return 128 + stopped_by if stopped_by else 0


if __name__ == "__main__":
    sys.exit(main())
