"""PPO (proximal policy optimisation) for Gymnasium environments, observations seen as vectors.

    python ppo.py --env CartPole-v1                        # train, about half a minute
    python ppo.py --env Pendulum-v1 --gamma 0.9 --num-envs 8 --num-steps 256 --learning-rate 1e-3
    python ppo.py --env Taxi-v4 --num-envs 16 --learning-rate 1e-3 --norm-reward  # action masks
    python ppo.py --eval runs/CartPole-v1__ppo__1__<time>  # evaluate what a run has learned
    tensorboard --logdir runs

Papers: "PPO" is Schulman et al. 2017, Proximal policy optimization algorithms (arXiv 1707.06347);
"GAE" is Schulman et al. 2016, High-dimensional continuous control using generalized advantage
estimation (arXiv 1506.02438). See also Huang et al. 2022, The 37 implementation details of PPO.

Each iteration runs the policy π_old for T steps in N games, then takes K epochs of minibatch steps:

    δ_t = r_t + γ V(s_{t+1}) (1 − terminated_t) − V(s_t)                             PPO, Eq. (12)
    Â_t = δ_t + γλ (1 − done_t) Â_{t+1},   R_t = Â_t + V(s_t)           PPO, Eq. (11); GAE, Eq. (16)
    r_t(θ) = π_θ(a_t|s_t) / π_old(a_t|s_t)                                           PPO, Sec. 3
    L^CLIP(θ) = E[min(r_t(θ) Â_t, clip(r_t(θ), 1−ε, 1+ε) Â_t)]                       PPO, Eq. (7)
    loss = E[−L^CLIP + c_v ½ (V_θ(s_t) − R_t)² − c_e H(π_θ(·|s_t))]                  PPO, Eq. (9)
           + β E[KL(π_old(·|s_t), π_θ(·|s_t))], with --kl-coef                       PPO, Eq. (8)

r_t is the reward, r_t(θ) the probability ratio. Shapes: T steps (--num-steps), N games
(--num-envs), B minibatches of M rows, D observation entries, A action entries, n logits; H memory
entries of a recurrent policy, S entries of its whole state. Everything stored at index t belongs to
the action taken at t: `terminated[t]` and `truncated[t]` say how that action ended the episode, if
it did.
"""

import argparse
import copy
import csv
import datetime
import functools
import hashlib
import importlib.util
import io
import itertools
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

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads keep cores from workers

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


def add_network_arguments(parser, **defaults):
    """Add the options of networks that see vectors, with a script's own `defaults`."""
    group = parser.add_argument_group("network")
    option = functools.partial(add_option, group, own=defaults)
    count, real = number(int, 1), number(float)
    option("--hidden", count, [64, 64], "widths of the hidden layers", nargs="+")
    option("--activation", str, "tanh", "of the hidden layers", choices=sorted(ACTIVATIONS))
    option("--layer-norm", bool, False, "LayerNorm before every activation")
    option("--shared-net", bool, False, "policy and value function share the hidden layers")
    option("--init-log-std", real, 0.0, "log σ of a Gaussian policy at the start; -3 to 0 usual")
    option("--full-covariance", bool, False, "Gaussian policy with correlated action entries")
    option("--norm-obs", bool, False, "observations become (s − μ) / σ, running, cut at ±10")
    option("--norm-value", bool, False, "value targets become (R − μ) / σ, running (PopArt)")


def parse_args(argv=None):
    """Parse and check the command line (default: the program's)."""
    parser = Parser("ppo.py", description="PPO for Gymnasium envs; 500,000 steps by default.")
    parser.add_argument("--env", default="CartPole-v1", help="Gymnasium id, or module:id")
    add_common_arguments(parser)
    add_network_arguments(parser)
    steps_help = "T, steps per game and iteration; 128 to 2048 usual (%(default)s)"
    parser.add_argument("--num-steps", type=number(int, 1), default=128, help=steps_help)
    add_trick_arguments(parser)
    args = parse_with_run(parser, argv)
    with option_error(parser, "--env"), closing(make_env(args.env)) as env:
        check_spaces(env.observation_space, env.action_space)
        args.action_masks = args.action_masks and action_mask(env, env.reset()[1]) is not None
    if args.rnn:  # minibatches of whole sequences
        check_rows(parser, args, args.num_envs, "games (--num-envs) of a recurrent policy")
    check_rows(parser, args, args.num_envs * args.num_steps)
    check_normaliser(parser, args, args.num_envs * args.num_steps)
    if args.num_iterations is None:
        total_timesteps = args.total_timesteps or 500_000
        args.num_iterations = max(1, total_timesteps // (args.num_envs * args.num_steps))
    if args.adaptive_lr and args.update_epochs * args.num_minibatches == 1:
        parser.error("argument --adaptive-lr: a single step per rollout always starts at KL 0")
    if not args.baseline:
        args.vf_coef = 0.0
    check_checkpoint(parser, args)
    return args


def add_trick_arguments(parser):
    """Add the options that ppo.py has beyond the common ones."""
    positive, coefficient = number(float, 0, open_low=True), number(float, 0)
    option = functools.partial(add_option, parser.add_argument_group("tricks"))
    text = "divide rewards by the running deviation of the discounted return, cut at ±10"
    option("--norm-reward", bool, False, text)
    text = "use the actions allowed by info['action_mask'] or env.action_masks(), where there are"
    option("--action-masks", bool, True, text)
    text = "where a time limit cut an episode short, V of its last state stands for the rest"
    option("--time-limit-bootstrap", bool, True, text)
    text = "off: Â is the sum of rewards, discounted by γλ, to the rollout's end; no value loss"
    option("--baseline", bool, True, text)
    text = "β of PPO-Penalty: adds β KL(π_old, π) to the loss, beside clipping; 0.01 to 3 usual"
    option("--kl-coef", coefficient, 0.0, text)
    text = "after each epoch ×1.5 or ÷1.5 on the learning rate while the epoch's mean KL is below "
    text += "half or above twice this; replaces --anneal-lr, a resumed run goes on; 0.01 usual"
    option("--adaptive-lr", positive, None, text)
    text = "learning rate of the value function; default: --learning-rate"
    option("--value-learning-rate", positive, None, text)
    text = "recurrent policy: a memory in front of the hidden layers, if s_t does not show all"
    option("--rnn", str, None, text, choices=("gru", "lstm"))
    option("--rnn-size", number(int, 1), 64, "width of the memory")


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


def check_spaces(observation_space, action_space):
    """Raise ValueError unless the spaces are ones that the model knows."""
    spaces = gym.spaces
    if not isinstance(observation_space, spaces.Box) or len(observation_space.shape) != 1:
        raise ValueError(f"not supported: observation space {observation_space}")
    discrete = isinstance(action_space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))
    box = isinstance(action_space, spaces.Box) and np.issubdtype(action_space.dtype, np.floating)
    if not discrete and not box:
        supported = "only Discrete, MultiDiscrete, MultiBinary and Box of floats"
        raise ValueError(f"{supported}; not supported: action space {action_space}")


# ------------------------------------------------------------------------------------ game


def make_env(env_id, **options):
    """Return the env; an observation that is no vector is flattened, a Discrete one is one-hot."""
    env = gym.make(env_id, **options)
    space = env.observation_space
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
        return env
    check_flattens(space)
    return gym.wrappers.FlattenObservation(env)


def check_flattens(space):
    """Raise ValueError unless an observation space is one that the model can see as a vector."""
    spaces = gym.spaces
    if isinstance(space, (spaces.Dict, spaces.Tuple)) and len(space.spaces) > 0:
        for part in space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces:
            check_flattens(part)
    elif not isinstance(
        space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    ):
        supported = "only Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of them"
        raise ValueError(f"{supported}; not supported: observation space {space}")


def action_mask(env, info):
    """Return which actions are allowed, flags for all logits of the policy; None: env has no mask.

    A choice without any allowed action is a ValueError.
    """
    if isinstance(env.action_space, gym.spaces.Box):
        return None
    if "action_mask" in info:
        mask = info["action_mask"]
    elif env.has_wrapper_attr("action_masks"):
        mask = env.get_wrapper_attr("action_masks")()
    else:
        return None
    mask = flat(mask).astype(bool)
    options = num_options(env.action_space)
    if len(mask) != sum(options):
        raise ValueError(f"the action mask has {len(mask)} flags, not {sum(options)}")
    offsets = np.cumsum([0, *options[:-1]])
    if not np.logical_or.reduceat(mask, offsets).all():
        raise ValueError("the action mask allows no action")
    return mask


def flat(mask):
    """Return a mask, an array or nested tuples of arrays, as a vector."""
    if isinstance(mask, (tuple, list)):
        return np.concatenate([flat(part) for part in mask])
    return np.ravel(mask)


def num_options(space):
    """Return the number of options of each choice that a discrete action consists of."""
    if isinstance(space, gym.spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, gym.spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    return space.nvec.ravel().tolist()


class Game:
    """One Gymnasium env that resets itself and keeps the return and length of its episode."""

    def __init__(self, env_id, seed, **options):
        self.name, self.seed = env_id, seed
        self.env = make_env(env_id, **options)
        self.action_space = self.env.action_space

    def reset(self, seed=None):
        """Start an episode, of the game's current random stream or of a new seed. Return (D,)."""
        self.episode_return, self.episode_length = 0.0, 0
        obs, self.info = self.env.reset(seed=seed)
        return obs

    def step(self, action):
        """Take one step. Returns what `record` does."""
        action = to_env(action, self.action_space)
        obs, reward, terminated, truncated, self.info = self.env.step(action)
        return self.record(obs, reward, terminated, truncated)

    def record(self, obs, reward, terminated, truncated):
        """Keep the episode's books of a step, start the next episode if this one ended.

        Returns (obs, final_obs, reward, terminated, truncated, episode_return, episode_length):
        `obs` is what to act on next, the first one of the next episode if this one ended;
        `final_obs` is where this step led. Return and length are NaN and 0 until an episode ends.
        """
        self.episode_return += reward
        self.episode_length += 1
        if not (terminated or truncated):
            return obs, obs, reward, False, False, math.nan, 0
        episode = self.episode_return, self.episode_length
        return self.reset(), obs, reward, terminated, truncated and not terminated, *episode

    def get_state(self):
        """Return what `set_state` needs to go on as if nothing had happened, or None."""
        state = env_state(self.env)
        return state and (self.episode_return, self.episode_length, state)

    def set_state(self, state):
        """Go on from the state of a game like this one."""
        self.episode_return, self.episode_length, state = state
        set_env_state(self.env, state)


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


class EnvPickler(pickle.Pickler):
    """Refuses to pickle an env: Gymnasium's EzPickle keeps how it was made, not where it is."""

    def persistent_id(self, value):
        if isinstance(value, gym.Env):
            raise pickle.PicklingError("an env")


def layers(env):
    """Return the env's wrappers, from outside, and the env itself."""
    chain = [env]
    while isinstance(chain[-1], gym.Wrapper):
        chain.append(chain[-1].env)
    return chain


def env_state(env):
    """Return what an env and its wrappers keep, as bytes; None if it cannot be pickled.

    If the env has `get_state` and `set_state`, it says itself what that is.
    """
    *wrappers, inner = layers(env)
    states = [{k: v for k, v in vars(w).items() if k not in ("env", "spec")} for w in wrappers]
    file = io.BytesIO()
    try:
        states.append(inner.get_state() if says_its_state(inner) else vars(inner))
        EnvPickler(file).dump(states)
    except Exception:  # whatever an env and its attributes raise
        return None
    return file.getvalue()


def set_env_state(env, state):
    """Put an env and its wrappers into the state of another one that was made alike."""
    *states, inner_state = pickle.loads(state)
    *wrappers, inner = layers(env)
    for wrapper, attributes in zip(wrappers, states, strict=True):
        vars(wrapper).update(attributes)
    if says_its_state(inner):
        inner.set_state(inner_state)
    else:
        vars(inner).update(inner_state)


def says_its_state(env):
    """Return whether an env has methods for its state; MuJoCo's set_state alone is none."""
    return hasattr(env, "get_state") and hasattr(env, "set_state")


def to_env(action, space):
    """Return the policy's action as the env takes it.

    A Box's action is cut to its bounds here, on the way to the env, not in log π(a|s).
    """
    if isinstance(space, gym.spaces.Box):
        return np.asarray(action.clip(space.low, space.high), space.dtype)
    return (action + getattr(space, "start", 0)).astype(space.dtype)


class Games:
    """The games of one worker: rows `rows` of all N, stepped one after the other.

    They read their actions from, and write what comes of them to, the arrays that all share.
    """

    def __init__(self, env_id, seeds, rows, arrays, **options):
        self.rows, self.arrays = rows, {name: array[rows] for name, array in arrays.items()}
        self.games = [Game(env_id, int(seed), **options) for seed in seeds[rows]]

    def reset(self, states=None):
        """Start all games from their seeds; those that have one of the N `states` go on from it."""
        states = states[self.rows] if states else [None] * len(self.games)
        for i, (game, state) in enumerate(zip(self.games, states, strict=True)):
            with named(game, "reset"):
                if not restored([game], [state]):
                    self.arrays["obs"][i] = game.reset(game.seed)
                    self.show(i, game)
        check_finite(self.arrays, self.games)

    def get_states(self):
        """Return what `reset` needs to go on with these games, None for one that cannot tell."""
        return [game.get_state() for game in self.games]

    def step(self):
        """Step all games once."""
        actions, outputs = self.arrays["actions"], [self.arrays[name] for name in STEP_OUTPUTS]
        for i, game in enumerate(self.games):
            with named(game, "step"):
                for array, value in zip(outputs, game.step(actions[i]), strict=True):
                    array[i] = value
                self.show(i, game)
        check_finite(self.arrays, self.games)

    def restart(self, _):
        """Start new games after a failure in a step: the episodes end there."""
        for game in self.games:
            game.seed = new_seed()
        set_truncated(self.arrays)
        self.reset()

    def show(self, i, game):
        """Write what some policies see beside the observation."""
        if "action_mask" in self.arrays:
            mask = action_mask(game.env, game.info)
            if mask is None:
                raise ValueError("there is no action mask any more")
            self.arrays["action_mask"][i] = mask
        if "starts" in self.arrays:
            self.arrays["starts"][i] = game.episode_length == 0

    def close(self):
        """Close all envs."""
        for game in self.games:
            game.env.close()


# The shared arrays that receive what Game.step returns, in its order.
STEP_RESULTS = ("final_obs", "rewards", "terminated", "truncated")  # what a rollout stores
STEP_OUTPUTS = ("obs", *STEP_RESULTS, "episode_return", "episode_length")


def array_layout(num_envs, observation_space, action_space):
    """Return {name: (shape, dtype)} of the arrays that main process and workers share."""
    N, D = num_envs, observation_space.shape
    box = isinstance(action_space, gym.spaces.Box)
    return {
        "obs": ((N, *D), np.float32),
        "final_obs": ((N, *D), np.float32),
        "actions": ((N, *action_space.shape), np.float32 if box else np.int64),
        "rewards": ((N,), np.float32),
        "terminated": ((N,), np.bool_),
        "truncated": ((N,), np.bool_),
        "episode_return": ((N,), np.float64),
        "episode_length": ((N,), np.int64),
    }


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


def check_finite(arrays, games):
    """Raise GameError if the games' step made an observation or reward that is no number."""
    for name in ("obs", "final_obs", "rewards"):
        # The sum is the quick test; it may overflow where all entries are finite.
        if not math.isfinite(arrays[name].sum()) and not np.isfinite(arrays[name]).all():
            game = games[int(np.argwhere(~np.isfinite(arrays[name]))[0][0])]
            raise GameError(f"NaN or infinity in {name} of {game.name} (seed {game.seed})")


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


class MultiCategorical(Categorical):
    """Policy head for MultiDiscrete and MultiBinary: A independent choices, all logits in a row.

    `options` has the number of options of each choice, for MultiBinary [2, 2, ...]; `shape` is that
    of an action in the env.
    """

    def __init__(self, features, options, shape):
        super().__init__(features, sum(options))
        self.options, self.shape = options, shape
        offsets = torch.tensor([0, *options[:-1]]).cumsum(0)  # of each choice's logits
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, h, action_mask=None):
        """Features (M, F) → log-probabilities (M, n), choice after choice."""
        parts = self.masked_logits(h, action_mask).split(self.options, dim=-1)
        return torch.cat([part.log_softmax(dim=-1) for part in parts], dim=-1)

    def mode(self, logp):
        """The most probable action, (M, ...)."""
        parts = [part.argmax(dim=-1) for part in logp.split(self.options, dim=-1)]
        return torch.stack(parts, dim=-1).view(*logp.shape[:-1], *self.shape)

    def log_prob(self, logp, action):
        """log π(a|s), the sum over the choices, (M,)."""
        rows = action.reshape(*logp.shape[:-1], -1) + self.offsets
        return logp.gather(-1, rows).sum(dim=-1)


class Gaussian(nn.Module):
    """Policy head for Box: mean from the features, one free log σ per action entry."""

    def __init__(self, features, n, init_log_std, shape=(-1,)):
        super().__init__()
        self.n, self.shape = n, shape
        self.mean = layer_init(nn.Linear(features, n), 0.01)
        self.log_std = nn.Parameter(torch.full((n,), init_log_std))

    def forward(self, h, action_mask=None):
        """Features (M, F) → mean (M, A)."""
        return self.mean(h)

    def noise(self, batch, generator):
        """Standard normal noise, (batch, A)."""
        return torch.randn(batch, self.n, generator=generator)

    def scale(self, noise):
        """σ ε, (M, A)."""
        return self.log_std.exp() * noise

    def standardise(self, deviation):
        """(a − μ) / σ, (M, A)."""
        return deviation * torch.exp(-self.log_std)

    def sample(self, mean, noise):
        """a = μ + σ ε, (M, ...)."""
        return (mean + self.scale(noise)).view(*mean.shape[:-1], *self.shape)

    def mode(self, mean):
        """The most probable action, (M, ...)."""
        return mean.view(*mean.shape[:-1], *self.shape)

    def log_prob(self, mean, action):
        """log π(a|s) = −½ Σ ((a − μ)/σ)² − Σ log σ − (A/2) log 2π, (M,)."""
        z = self.standardise(action.reshape(mean.shape) - mean)
        constant = self.log_std.sum() + 0.5 * self.n * math.log(2 * math.pi)
        return -0.5 * z.square().sum(dim=-1) - constant

    def entropy(self, mean):
        """H = Σ log σ + (A/2) log 2πe, (M,)."""
        constant = 0.5 * self.n * math.log(2 * math.pi * math.e)
        return (self.log_std.sum() + constant).expand(mean.shape[:-1])


class FullGaussian(Gaussian):
    """A Gaussian with covariance L Lᵀ: L is lower triangular, with σ on its diagonal."""

    def __init__(self, *args):
        super().__init__(*args)
        self.lower = nn.Parameter(torch.zeros(self.n, self.n))  # only what is below the diagonal

    def factor(self):
        """L, (A, A)."""
        return self.lower.tril(-1) + self.log_std.exp().diag()

    def scale(self, noise):
        """L ε, (M, A)."""
        return noise @ self.factor().T

    def standardise(self, deviation):
        """L⁻¹ (a − μ), (M, A)."""
        return torch.linalg.solve_triangular(self.factor().T, deviation, upper=True, left=False)


class RunningNorm(nn.Module):
    """(x − μ) / σ with the mean and deviation of all rows seen; saved with the model."""

    def __init__(self, shape=(), cut=math.inf):
        super().__init__()
        self.cut = cut
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))

    @property
    def std(self):
        """σ, never 0."""
        return (self.var + 1e-8).sqrt()

    def update(self, rows):
        """Take in rows (M, ...): two sets' moments are combined as in Chan et al. 1983."""
        total, delta = self.count + len(rows), rows.mean(dim=0) - self.mean
        share = len(rows) / total
        within = self.var * (1 - share) + rows.var(dim=0, correction=0) * share
        self.var.copy_(within + delta.square() * share * (1 - share))
        self.mean += delta * share
        self.count.copy_(total)

    def forward(self, x):
        """(x − μ) / σ, cut at ±cut."""
        return ((x - self.mean) / self.std).clamp(-self.cut, self.cut)


class RewardNorm(RunningNorm):
    """Rewards divided by the running deviation of their discounted sum (Engstrom et al. 2020)."""

    def __init__(self, gamma, num_envs):
        super().__init__(cut=10)
        self.gamma = gamma
        self.register_buffer("discounted", torch.zeros(num_envs))

    def forward(self, rewards, ended):
        """Scale the rewards (T, N) of a rollout, whose sums begin anew where an episode ended."""
        sums, discounted = [], self.discounted
        for t in range(len(rewards)):
            discounted = rewards[t] + self.gamma * discounted
            sums.append(discounted)
            discounted = discounted * ~ended[t]
        self.discounted.copy_(discounted)
        self.update(torch.cat(sums))
        return (rewards / self.std).clamp(-self.cut, self.cut)


ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}


class Model(nn.Module):
    """Policy and value function: hidden layers, orthogonal weights, a head for each."""

    def __init__(
        self,
        obs_dim,
        action_space,
        hidden=(64, 64),
        shared_net=False,
        init_log_std=0.0,
        activation="tanh",
        layer_norm=False,
        full_covariance=False,
        norm_obs=False,
        norm_value=False,
        action_masks=False,
        features=None,
    ):
        super().__init__()
        self.inputs = ("obs", "action_mask") if action_masks else ("obs",)  # of `forward`
        self.stored = (*self.inputs, "actions")  # what a rollout stores of each step's choice
        self.obs_norm = RunningNorm((obs_dim,), cut=10) if norm_obs else nn.Identity()
        self.value_norm = RunningNorm() if norm_value else None
        width = features or obs_dim  # of the hidden layers' input
        layers = functools.partial(self.hidden_layers, width, hidden, activation, layer_norm)
        self.actor = layers()
        self.critic = self.actor if shared_net else layers()
        if isinstance(action_space, gym.spaces.Box):
            head = FullGaussian if full_covariance else Gaussian
            n, shape = math.prod(action_space.shape), action_space.shape
            self.head = head(hidden[-1], n, init_log_std, shape)
        elif isinstance(action_space, gym.spaces.Discrete):
            self.head = Categorical(hidden[-1], int(action_space.n))
        else:
            self.head = MultiCategorical(hidden[-1], num_options(action_space), action_space.shape)
        self.value = layer_init(nn.Linear(hidden[-1], 1), 1.0)

    @staticmethod
    def hidden_layers(width, hidden, activation, layer_norm):
        """Return layers of widths `hidden` over an input of `width` entries."""
        layers = []
        for previous, following in zip([width, *hidden], hidden, strict=False):
            layers += [layer_init(nn.Linear(previous, following))]
            layers += [nn.LayerNorm(following)] if layer_norm else []
            layers += [ACTIVATIONS[activation]()]
        return nn.Sequential(*layers)

    def forward(self, obs, action_mask=None):
        """Observations (M, D) → the policy's parameters pi (M, ·) for the head, values (M,).

        Allowed actions are flags (M, n). With --norm-value the values are normalised ones.
        """
        return self.heads(self.obs_norm(obs), action_mask)

    def heads(self, x, action_mask=None):
        """Input of the hidden layers (M, ·) → pi (M, ·), values (M,)."""
        h = self.actor(x)
        h_value = h if self.critic is self.actor else self.critic(x)
        return self.head(h, action_mask), self.value(h_value).squeeze(-1)

    def act(self, arrays, noise=None):
        """Set actions for what the games show: samples from noise (N, ·), else the mode."""
        x, *mask = self.see(arrays)
        pi = self.head(self.actor(x), *mask)
        actions = self.head.mode(pi) if noise is None else self.head.sample(pi, noise)
        arrays["actions"][:] = actions.cpu().numpy()

    def policy(self, obs, *action_mask):
        """The policy's mode for observations (M, D): a tuple (actions (M, ...),)."""
        return (self.head.mode(self.head(self.actor(self.obs_norm(obs)), *action_mask)),)

    def see(self, arrays):
        """Return the input of the hidden layers (N, ·), and the flags of allowed actions if any."""
        obs, *mask = to_tensors(arrays, self.inputs, self.value.weight.device)
        return self.obs_norm(obs), *mask

    def final_values(self, buffer):
        """V of where each step led to, (T, N): not of the next episode's first state."""
        return self(buffer["final_obs"])[1]

    @torch.no_grad()
    def update_value_norm(self, returns):
        """Take in returns (M,) and change the last layer so that V(s) stays what it was.

        PopArt: van Hasselt et al. 2016, arXiv 1602.07714.
        """
        mean, std = self.value_norm.mean.clone(), self.value_norm.std
        self.value_norm.update(returns)
        self.value.weight.mul_(std / self.value_norm.std)
        bias = std * self.value.bias + mean - self.value_norm.mean
        self.value.bias.copy_(bias / self.value_norm.std)


class RecurrentModel(Model):
    """A Model whose hidden layers see a GRU's or LSTM's memory of the episode instead of s_t.

    Its inputs are time-major, (T, M, ...): obs, starts (whether obs is an episode's first) and
    state, the memory before each step, of which only that before the first step is used.
    """

    def __init__(self, obs_dim, action_space, rnn, rnn_size, **options):
        super().__init__(obs_dim, action_space, features=rnn_size, **options)
        self.inputs = ("obs", "starts", "state", *self.inputs[1:])
        self.stored = (*self.inputs, "actions", "next_state")
        self.memory = {"gru": nn.GRU, "lstm": nn.LSTM}[rnn](obs_dim, rnn_size)
        for name, parameter in self.memory.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)

    def remember(self, obs, starts, state):
        """Return the memories (T, M, H) after each of the steps, and the last state (M, S)."""
        obs, memories, lstm = self.obs_norm(obs), [], isinstance(self.memory, nn.LSTM)
        # Where no game starts an episode, one call does many steps.
        cuts = (starts[1:].any(dim=1).nonzero().flatten() + 1).tolist()
        for begin, end in itertools.pairwise([0, *cuts, len(obs)]):
            state = (state * ~starts[begin].unsqueeze(-1)).unsqueeze(0)  # (1, M, S)
            if lstm:  # its state is h and c, side by side
                state = tuple(part.contiguous() for part in state.chunk(2, dim=-1))
            h, state = self.memory(obs[begin:end], state)
            state = (torch.cat(state, dim=-1) if lstm else state)[0]
            memories.append(h)
        return torch.cat(memories), state

    def forward(self, obs, starts, state, action_mask=None):
        """Observations (T, M, D) → the policy's parameters pi (T, M, ·), values (T, M)."""
        return self.heads(self.remember(obs, starts, state[0])[0], action_mask)

    def policy(self, obs, state, *action_mask):
        """The policy's mode for observations (M, D), and the memories (M, S) after these."""
        never = torch.zeros(1, len(obs), dtype=torch.bool)
        memories, state = self.remember(obs.unsqueeze(0), never, state)
        return self.head.mode(self.head(self.actor(memories[0]), *action_mask)), state

    def see(self, arrays):
        """Return the memories (N, H), and the flags of allowed actions if any; go on in memory."""
        arrays["state"][:] = arrays["next_state"]
        obs, starts, state, *mask = to_tensors(arrays, self.inputs, self.value.weight.device)
        memories, state = self.remember(obs.unsqueeze(0), starts.unsqueeze(0), state)
        arrays["next_state"][:] = state.cpu().numpy()
        return memories[0], *mask

    def final_values(self, buffer):
        """V of where each step led to, (T, N), seen with the memory after that step."""
        rows = [buffer[name].flatten(0, 1).unsqueeze(0) for name in ("final_obs", "next_state")]
        never = torch.zeros_like(rows[0][..., 0], dtype=torch.bool)  # (1, T·N)
        return self(rows[0], never, rows[1])[1].view(buffer["rewards"].shape)


# ------------------------------------------------------------------------------------ rollout


@torch.no_grad()
def rollout(model, pool, num_steps, generator):
    """Take T steps in all N games with the current policy.

    Returns the buffer, tensors (T, N, ...): obs, actions, logprobs, values, next_values, rewards,
    terminated, truncated; and the (return, length) of the episodes that ended.
    """
    arrays, episodes, act = pool.arrays, [], sampler(model)
    buffer = make_buffer(model, arrays, num_steps)
    noise = make_noise(model, num_steps, len(arrays["obs"]), generator)
    for t, step_noise in enumerate(noise):
        act(arrays, step_noise)
        store(buffer, t, arrays, model.stored)
        pool.call("step", steps=1)
        store(buffer, t, arrays, STEP_RESULTS)
        episodes += ended_episodes(arrays)
    return gathered(finish(model, buffer)), sum(gathered_objects(episodes), [])


def sampler(model):
    """Return `model.act` for sampling; of a plain policy a NumPy version that does the same.

    Plain is Discrete or Box, linear and tanh layers, on a CPU. On the few rows of a step torch is
    mostly overhead, which NumPy does not have (measured in tests/benchmarks/speed_ppo.py).
    """
    layers, norm = [*model.actor, *model.head.children()], model.obs_norm
    plain = model.inputs == ("obs",) and type(model.head) in (Categorical, Gaussian)
    plain &= all(isinstance(layer, (nn.Linear, nn.Tanh)) for layer in layers)
    if not plain or not model.value.weight.is_cpu:
        return model.act
    *hidden, last = [
        (layer.weight.detach().numpy().T, layer.bias.detach().numpy())
        for layer in layers
        if isinstance(layer, nn.Linear)
    ]
    discrete = type(model.head) is Categorical
    sigma = None if discrete else model.head.log_std.detach().exp().numpy()

    def act(arrays, noise):
        h, noise = arrays["obs"], noise.numpy()
        if isinstance(norm, RunningNorm):
            h = norm(torch.from_numpy(h)).numpy()
        for W, b in hidden:
            h = np.tanh(h @ W + b)
        pi = h @ last[0] + last[1]
        actions = (pi + noise).argmax(axis=-1) if discrete else pi + sigma * noise
        arrays["actions"][:] = actions.reshape(arrays["actions"].shape)

    return act


def make_buffer(model, arrays, num_steps):
    """Return empty arrays for T steps of all games, {name: (T, N, ...)}."""
    stored = {name: arrays[name] for name in (*model.stored, *STEP_RESULTS)}
    return {name: np.empty((num_steps, *a.shape), a.dtype) for name, a in stored.items()}


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

    They come from passes over all steps here, so that the rollout runs the policy only.
    """
    device = model.value.weight.device
    buffer = dict(zip(buffer, to_tensors(buffer, buffer, device), strict=True))
    pi, values = model(*(buffer[name] for name in model.inputs))
    values = torch.stack([values, model.final_values(buffer)])  # V(s_t), V(s_{t+1})
    if model.value_norm is not None:
        values = model.value_norm.mean + model.value_norm.std * values
    buffer["values"], buffer["next_values"] = values
    buffer["logprobs"] = model.head.log_prob(pi, buffer["actions"])
    return buffer


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


def update(model, optimizer, batch, args, generator):
    """Take K epochs of minibatch steps on the rows of `batch`. Return the means of the losses."""
    seen, B = [], args.num_minibatches
    axis = batch["advantages"].dim() - 1  # of the rows; (T, N): a row is a game's whole sequence
    if args.norm_adv == "batch":
        batch = batch | {"advantages": normalised(batch["advantages"])}
    for _ in range(args.update_epochs):
        kls = []
        rows = torch.randperm(batch["advantages"].shape[axis], generator=generator)
        rows = rows.to(batch["obs"].device)
        # One gather per epoch: minibatches are slices of the shuffled rows.
        shuffled = {name: c.index_select(axis, rows).chunk(B, axis) for name, c in batch.items()}
        for i in range(B):
            mb = {name: chunks[i] for name, chunks in shuffled.items()}
            if args.norm_adv == "minibatch":
                mb["advantages"] = normalised(mb["advantages"])
            mb = own_rows(mb, axis)
            *terms, logratio = losses(model, mb, args.clip_coef, args.clip_vloss)
            pg_loss, v_loss, entropy = [term.mean() for term in terms]
            if not args.kl_coef:
                logratio = logratio.detach()
            approx_kl, clipfrac = policy_change(logratio, args.clip_coef)
            # PPO, Eq. (9): loss = E[−L^CLIP + c_v ½ (V_θ − R)² − c_e H]
            loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy
            if args.kl_coef:
                # PPO, Eq. (8): + β KL(π_old, π_θ)
                loss += args.kl_coef * approx_kl
            row = torch.stack([pg_loss, v_loss, entropy, approx_kl, clipfrac]).detach()
            seen.append(averaged(row))
            kls.append(row[3])
            stop = args.target_kl is not None and row[3] > args.target_kl
            if stop:
                break
            take_step(optimizer, loss, args.max_grad_norm)
        if args.adaptive_lr:
            adapt_learning_rate(optimizer, torch.stack(kls).mean(), args.adaptive_lr)
        if stop:
            break
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


def adapt_learning_rate(optimizer, kl, target):
    """Lower learning rates if an epoch's KL is above twice the target, raise them below half of it.

    This is skrl's KLAdaptiveLR: by a factor of 1.5, between 1e-6 and 1e-2.
    """
    for group in optimizer.param_groups:
        if kl > 2 * target:
            group["lr"] = max(group["lr"] / 1.5, 1e-6)
        elif kl < target / 2:
            group["lr"] = min(group["lr"] * 1.5, 1e-2)


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


GAMES_MADE_OF = ("env", "num_envs", "action_masks")  # options

MODEL_OPTIONS = (
    "hidden shared_net init_log_std activation layer_norm full_covariance norm_obs norm_value "
    "action_masks"
).split()


def make_model(args):
    """Return the Model for the env's spaces, its weights drawn from torch's global generator."""
    with closing(make_env(args.env)) as env:
        spaces = env.observation_space.shape[0], env.action_space
    options = {name: getattr(args, name) for name in MODEL_OPTIONS}
    if args.rnn:
        model = RecurrentModel(*spaces, args.rnn, args.rnn_size, **options)
    else:
        model = Model(*spaces, **options)
    # Here, so that its statistics are saved with the model.
    model.reward_norm = RewardNorm(args.gamma, args.num_envs) if args.norm_reward else None
    return model.to("cpu" if args.device == "auto" else args.device)


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


def make_pool(args, seeds, num_workers, **options):
    """Return the pool of one game per seed."""
    N = len(seeds)
    with closing(make_env(args.env)) as env:
        layout = array_layout(N, env.observation_space, env.action_space)
        if args.action_masks:
            layout["action_mask"] = (N, sum(num_options(env.action_space))), np.bool_
    if args.rnn:
        size = (2 if args.rnn == "lstm" else 1) * args.rnn_size
        layout |= {name: ((N, size), np.float32) for name in ("state", "next_state")}
        layout["starts"] = (N,), np.bool_
    games = functools.partial(Games, args.env, seeds, **options)
    return WorkerPool(games, layout, N, num_workers, args.step_timeout)


def game_seeds(args, shape, iteration, games):
    """Return the seeds of this rank's games (..., N): those of `load_games`, else new ones."""
    # Games that start when a run is resumed must not repeat those that started with it.
    seeds = np.random.SeedSequence([args.seed, iteration]).generate_state(math.prod(shape))
    seeds = seeds.reshape(shape)[..., own_games(shape[-1])]
    if games:
        seeds = np.where([state is None for state in games["states"]], seeds, games["seeds"])
    return seeds


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
    torch.set_num_threads(1)  # more threads only slow a small network down
    torch.manual_seed(args.seed)
    model = make_model(args)
    optimizer = make_optimizer(model)
    generator = torch.Generator().manual_seed(args.seed)
    counters = {"iteration": 0, "global_step": 0, "wall_seconds": 0.0, "restarts": 0}
    run_dir = Path(args.resume) if args.resume else make_run_dir(args, "ppo")
    if args.resume:
        counters |= restore(run_dir, model, optimizer, generator)
    games = load_games(args, counters["iteration"]) if args.resume else None
    seeds = game_seeds(args, (args.num_envs,), counters["iteration"], games)
    recent = games["recent"] if games else deque(maxlen=100)
    if model.reward_norm is not None and not games:
        model.reward_norm.discounted.zero_()
    evaluates = args.eval_every and rank() == 0
    with ExitStack() as stack:
        if not args.quiet and rank() == 0:
            stack.callback(print, f"run folder: {run_dir}")
        stack.enter_context(connected_ranks(model))
        stop = stack.enter_context(StopRequest())
        pool = stack.enter_context(closing(make_pool(args, seeds, args.num_workers)))
        if evaluates:
            eval_pool = stack.enter_context(closing(make_eval_pool(args)))
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
        reset(pool, games)
        pool.restarts_left = args.restart_workers
        if evaluates and counters["iteration"] == 0:
            logger.write(
                counters | {"eval_return": evaluate(model, eval_pool, eval_pool.arrays).mean()}
            )
        while counters["iteration"] < args.num_iterations and not stop.received():
            started = time.perf_counter()
            set_learning_rates(optimizer, args, counters["iteration"])
            buffer, episodes = rollout(model, pool, args.num_steps, generator)
            adjust_for_gae(model, buffer, args)
            batch = make_batch(buffer, model.inputs, args.gamma, args.gae_lambda)
            row = {"explained_variance": explained_variance(batch["values"], batch["returns"])}
            if args.norm_value:
                normalise_values(model, batch, batch["returns"])
            row |= update(model, optimizer, batch, args, generator)
            if args.norm_obs:  # after the update: within it, π_old is the policy that sampled
                model.obs_norm.update(buffer["obs"].flatten(0, 1))

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


def normalise_values(model, batch, returns):
    """Take returns into the running mean and deviation, normalise the batch's values by them."""
    model.update_value_norm(returns.flatten())
    for name in ("values", "returns"):
        batch[name] = model.value_norm(batch[name])


def set_learning_rates(optimizer, args, iteration):
    """Set the learning rates of an iteration; --adaptive-lr goes on from where it is."""
    if args.adaptive_lr and iteration > 0:
        return
    factor = 1 - iteration / args.num_iterations if args.anneal_lr else 1
    rates = args.learning_rate, args.value_learning_rate or args.learning_rate
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor


def adjust_for_gae(model, buffer, args):
    """Change a buffer in place, as some options want it before GAE."""
    if model.reward_norm is not None:
        ended = buffer["terminated"] | buffer["truncated"]
        buffer["rewards"] = model.reward_norm(buffer["rewards"], ended)
    if not args.time_limit_bootstrap:
        buffer["terminated"] |= buffer["truncated"]
    if not args.baseline:  # then GAE is the sum of rewards, discounted by γλ
        buffer["values"] = buffer["next_values"] = torch.zeros_like(buffer["values"])


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
    """Play an episode, write its pictures to a file. Return its path."""
    generator = torch.Generator().manual_seed(EVAL_SEED) if args.sample else None
    with closing(make_pool(args, np.array([EVAL_SEED]), 0, render_mode="rgb_array")) as pool:
        env = pool.games.games[0].env
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
        print(f"ppo.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    stopped_by = getattr(result, "signal", None)
    return 128 + stopped_by if stopped_by else 0


if __name__ == "__main__":
    sys.exit(main())
