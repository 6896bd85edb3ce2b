"""Multilevel PPO: policy optimisation for expensive simulations that exist on several grids.

    python ppo_multilevel.py --env ResSim-v1               # wells of a reservoir, eight minutes
    python ppo_multilevel.py --env ResSim-v1 --levels 5 --num-steps 50   # finest grid only: PPO
    python ppo_multilevel.py --env my_simulation.py:make --levels 1 2 --num-steps 40 10
    tensorboard --logdir runs

This is `ppo.py` with a simulation on L levels, coarse to fine. Per iteration N actors take many
steps T^1 on the coarsest and few, T^L, on the finest. On each level l > 1 a partner simulation on
level l−1 follows the fine one, so that few samples tell their difference. The sum of the coarsest
level's loss and these differences telescopes to the finest level's loss (multilevel Monte Carlo).

Papers: "ML" is the multilevel PPO of Dixit & ElSheikh (arXiv 2210.08400) as its author printed it
in "Implementation of multilevel PPO in Stable Baselines 3" (2023), by the numbers of its
algorithms; "PPO" is arXiv 1707.06347 and "GAE" is arXiv 1506.02438, see `ppo.py`.

    δ_t = r_t + γ V(s_{t+1}) (1 − terminated_t) − V(s_t)                             PPO, Eq. (12)
    Â_t = δ_t + γλ (1 − done_t) Â_{t+1},   R_t = Â_t + V(s_t)           PPO, Eq. (11); GAE, Eq. (16)
    r_t(θ) = π_θ(a_t|s_t) / π_old(a_t|s_t)                                           PPO, Sec. 3
    L_a = −min(r_t(θ) Â_t, clip(r_t(θ), 1−ε, 1+ε) Â_t)                               PPO, Eq. (7)
    ℓ = L_a + c_v ½ (V_θ(s_t) − R_t)² − c_e H(π_θ(·|s_t))                            PPO, Eq. (9)
    loss = Σ_l mean[ℓ^l − ℓ̃^{l−1}],  ℓ̃^0 = 0                                      ML, Algorithm 4

The loss is a signed, weighted sum: a row of a level's own simulation weighs +1/M^l, a row of its
coarse partner −1/M^l. So a minibatch is one forward pass over all rows, and with one level the
script is `ppo.py`, bit for bit.

Departures from print: Algorithm 3 prints L_a without its minus sign and the entropy term as
−C_e L_now; Algorithm 4's text prints N T^l ≤ M^l for ≥; Algorithm 5 prints map_from after the fine
step and assigns ã twice: both members of a pair must start from the same state, so the coarse one
is mapped before the fine step, and takes the same action a^L.
Departures from the author's code: each level keeps its own stream of episodes; a partner's values
come from its own observations; one normaliser of advantages serves all levels, since one for each
level would erase the differences that the method adds up.

A simulation is a function `make(level, evaluation=False)` that returns a Gymnasium env whose spaces
are the policy's (the finest level's) on every level. The env owns `psi()`, its state → the policy's
observation; `phi(action)`, the policy's action → its own; `map_from(other)`, which takes over the
state of the same simulation on another level; if it can step several at once, a static method
`step_batch(envs, actions)` → (obs, rewards, terminated, truncated) too.

r_t is the reward, r_t(θ) the probability ratio. Shapes: L levels, T^l steps, N actors, B
minibatches of M^l rows, D observation entries, A action entries. A tilde in the paper is `sync`
here. Everything stored at index t belongs to the action taken at t: `terminated[t]` and
`truncated[t]` say how that action ended the episode, if it did.
"""

import argparse
import copy
import csv
import datetime
import functools
import hashlib
import importlib
import importlib.util
import inspect
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
from collections.abc import Callable
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads keep cores from workers

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from scipy import sparse
from scipy.sparse.linalg import splu
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


DEFAULTS = {  # levels and steps per actor, coarse to fine
    "ResSim-v1": {"levels": [3, 4, 5], "num_steps": [80, 10, 5]},
    "ResSim-v2": {"levels": [3, 4], "num_steps": [140, 15]},
    "ResSim-v3": {"levels": [3, 4], "num_steps": [60, 15]},
}


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
    description = "Multilevel PPO for simulations on levels; 200 iterations by default."
    parser = Parser("ppo_multilevel.py", description=description)
    env_help = f"{', '.join(CASES)}, path/to/file.py:make or package.module:make (%(default)s)"
    parser.add_argument("--env", default="ResSim-v1", help=env_help)
    defaults = {"num_workers": num_cores(), "eval_every": 5, "num_envs": 50}
    defaults |= {"hidden": [150, 100, 80], "shared_net": True, "init_log_std": -2.9}
    defaults |= {"learning_rate": 3e-5, "anneal_lr": False, "num_minibatches": 10}
    defaults |= {"update_epochs": 10, "clip_coef": 0.1, "ent_coef": 0.001, "target_kl": 0.05}
    defaults |= {"vf_coef": 1.0, "clip_vloss": False}
    add_common_arguments(parser, **defaults)
    add_network_arguments(parser, **defaults)
    group = parser.add_argument_group("levels")
    levels_help = "levels to use, coarse to fine; the built-in simulations have a default"
    group.add_argument("--levels", type=number(int, 1), nargs="+", help=levels_help)
    steps_help = "T^l, steps per actor and iteration on each level; many coarse, few fine ones"
    group.add_argument("--num-steps", type=number(int, 1), nargs="+", help=steps_help)
    eval_help = "level of the evaluation; default: the last of --levels"
    group.add_argument("--eval-level", type=number(int, 1), help=eval_help)
    coupling_help = (
        "step: before each step the partner takes over the fine state, then the fine action (the "
        "paper's; small differences, biased); noise: it takes over the state at the episode's "
        "start, then acts itself with the same noise (larger differences, unbiased) (%(default)s)"
    )
    group.add_argument("--coupling", choices=("step", "noise"), default="step", help=coupling_help)
    correction_help = (
        "literal: Algorithm 4, whose signed sum has no lower bound; bounded: partners' rows are "
        "clipped by the signed advantage, the value function fits own rows only (%(default)s)"
    )
    choices = "literal", "bounded"
    group.add_argument("--correction", choices=choices, default="bounded", help=correction_help)
    args = parse_with_run(parser, argv)
    check_levels(parser, args)
    for steps in args.num_steps[::-1]:
        check_rows(parser, args, args.num_envs * steps)
    check_normaliser(parser, args, args.num_envs * args.num_steps[0])
    if args.num_iterations is None:
        total_timesteps = args.total_timesteps or 200 * steps_per_iteration(args)
        args.num_iterations = max(1, total_timesteps // steps_per_iteration(args))
    check_checkpoint(parser, args)
    return args


def check_levels(parser, args):
    """Set the built-in simulations' defaults; refuse levels, steps and envs that do not fit."""
    defaults = DEFAULTS.get(args.env, {"levels": None, "num_steps": None})
    args.levels = args.levels or defaults["levels"]
    if args.levels is None:
        parser.error(f"argument --levels: name the levels of {args.env} to use, coarse to fine")
    if args.num_steps is None and args.levels == defaults["levels"]:
        args.num_steps = defaults["num_steps"]
    if args.num_steps is None or len(args.num_steps) != len(args.levels):
        parser.error(f"argument --num-steps: give one number per level of {args.levels}")
    if args.levels != sorted(set(args.levels)):
        parser.error(f"argument --levels: {args.levels} must rise, coarse to fine")
    args.eval_level = args.eval_level or args.levels[-1]
    with option_error(parser, "--env"):
        load_make(args.env)
    spaces = []
    for level in [*args.levels, args.eval_level]:
        option = "--eval-level" if len(spaces) == len(args.levels) else "--levels"
        with option_error(parser, option):
            env = make_env(args.env, level, evaluation=option == "--eval-level")
            wrapped = isinstance(env, (gym.ObservationWrapper, gym.ActionWrapper))
            if wrapped and hasattr(env.unwrapped, "map_from"):
                raise ValueError(f"{env} hides psi and phi: do there what the wrapper does")
            check_spaces(env.observation_space, env.action_space)
            spaces.append((env.observation_space, env.action_space))
            env.close()
            if spaces[-1] != spaces[0]:
                raise ValueError(f"level {level} of {args.env} has other spaces than the first")
    if args.coupling == "step" and not hasattr(env.unwrapped, "map_from"):
        report(f"{args.env} has no map_from: partners get common seeds and noise")
        args.coupling = "noise"


def num_cores():
    """Return the number of cores that this process may use, its share if torchrun started it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def steps_per_iteration(args):
    """Return N Σ_l (T^l + T̃^{l−1}): the steps of all actors, coarse partners included."""
    return args.num_envs * (2 * sum(args.num_steps) - args.num_steps[0])


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


# ------------------------------------------------------------------------------------ reservoirs
#
# Shapes: n reservoirs stepped together, (ny, nx) cells, axis 0 = y, axis 1 = x; K fields.
# Units:  m, days, Pa; permeability k in m², viscosity μ in Pa s; per metre of reservoir thickness,
#         so rates q and fluxes v are m²/day and volumes are m².

FOOT, DAY, MILLIDARCY = 0.3048, 86400.0, 9.869233e-16  # m, s, m²


@dataclass(frozen=True)
class Case:
    """A reservoir and its operation: everything that does not depend on the level.

    `grids` are the (ny, nx) of the levels, coarse to fine; the last one is the policy's grid, on
    which `injectors` and `producers` = ((rows), (columns)) lie. `fields(case, n, seed)` draws n
    permeability fields (n, ny, nx) [m²] on it. An episode injects `pore_volumes` times the pore
    space in `control_steps` × `substeps` × `dt` days, or `total_rate` m²/day if that is given.
    """

    grids: tuple
    lx: float
    ly: float
    injectors: tuple
    producers: tuple
    fields: Callable
    dt: float  # one backward Euler step [days]
    pore_volumes: float
    substeps: int = 5
    control_steps: int = 5
    porosity: float = 0.2
    mu_w: float = 3e-4  # viscosity of water and of oil [Pa s]
    mu_o: float = 3e-4
    s_wir: float = 0.0  # saturations that cannot be displaced: water, oil
    s_oir: float = 0.0
    mobility: str = "linear"  # or "quadratic": relative permeability S or S²
    total_rate: float | None = None
    n_fields: int = 16

    @property
    def linear(self):
        """Total mobility λ does not depend on the saturation and f(S) = S."""
        return self.mobility == "linear" and self.mu_w == self.mu_o

    @property
    def rate(self):
        """What all injectors together inject, and all producers produce [m²/day]."""
        pore_volume = self.lx * self.ly * self.porosity
        days = self.control_steps * self.substeps * self.dt
        return self.total_rate or self.pore_volumes * pore_volume / days


def channel_fields(case, n, seed):
    """Straight channels, log k (millidarcy) 5.5 in -2, from the left to the right edge.

    Width w ~ U(0.1, 0.3) of ly; its lower side starts and ends at heights ~ U(0, ly - w).
    Returns (n, ny, nx) in m².
    """
    (ny, nx), rng = case.grids[-1], np.random.default_rng(seed)
    x, y = (np.arange(nx) + 0.5) / nx, (np.arange(ny)[:, None] + 0.5) / ny
    width, left, right = (u[:, None, None] for u in rng.random((3, n)))
    width = 0.1 + 0.2 * width
    above = y - (1 - width) * (left + (right - left) * x)  # (n, ny, nx) height above the lower side
    return MILLIDARCY * np.exp(np.where((above >= 0) & (above <= width), 5.5, -2.0))


def gaussian_fields(case, n, seed, mean=2.41, variance=5.0, lengths=(1.0, 0.1), angle=math.pi / 8):
    """Gaussian log k (millidarcy), known to be `mean` at the wells.

    Covariance C(h) = variance · exp(-|h'|), h' = h rotated by `angle` [rad, from x to -y] and
    divided by `lengths` · lx. Drawn on a periodic grid by FFT (circulant embedding, Dietrich &
    Newsam 1997), then conditioned by simple kriging. Returns (n, ny, nx) in m².
    """
    (ny, nx), rng = case.grids[-1], np.random.default_rng(seed)
    dy, dx = case.ly / ny, case.lx / nx
    cos, sin = math.cos(angle), math.sin(angle)

    def covariance(hy, hx):
        along, across = cos * hx - sin * hy, cos * hy + sin * hx
        return variance * np.exp(-np.hypot(along / lengths[0], across / lengths[1]) / case.lx)

    # Period: domain + 8 longest lengths. C is within 0.4 % of the wanted one (5 lengths: 2 %).
    pad = 8 * max(lengths) * case.lx
    my, mx = math.ceil((case.ly + pad) / dy), math.ceil((case.lx + pad) / dx)
    hy, hx = np.fft.fftfreq(my, 1 / my) * dy, np.fft.fftfreq(mx, 1 / mx) * dx
    eigenvalues = np.fft.fft2(covariance(hy[:, None], hx)).real.clip(min=0)  # (my, mx)
    z = np.empty((n, ny, nx))
    for i in range(0, n, 2):  # real and imaginary part are two independent fields
        noise = rng.standard_normal((2, my, mx))
        both = np.fft.fft2(np.sqrt(eigenvalues / eigenvalues.size) * (noise[0] + 1j * noise[1]))
        z[i] = both.real[:ny, :nx]
        z[i + 1 : i + 2] = both.imag[:ny, :nx]

    # Kriging: z(x) ← z(x) - C(x, wells) C(wells, wells)⁻¹ z(wells), which is 0 at the wells.
    rows, cols = np.concatenate([case.injectors, case.producers], axis=1)
    y, x = np.arange(ny) * dy, np.arange(nx) * dx
    c_cells = covariance(y[:, None, None] - y[rows], x[:, None] - x[cols])  # (ny, nx, wells)
    c_wells = covariance(y[rows][:, None] - y[rows], x[cols][:, None] - x[cols])
    z -= np.einsum("yxw,nw->nyx", c_cells, np.linalg.solve(c_wells, z[:, rows, cols].T).T)
    return MILLIDARCY * np.exp(mean + z)


def streak_fields(case, n, seed):
    """Thief zones: log k (millidarcy) ~ N(3, 0.3²) per cell, crossed by 2 or 3 streaks of log k 8.

    A streak is one cell wide and runs from a random row on the left to a random row on the right,
    each cell touching the next with a face. Coarse grids (harmonic means) do not see it.
    Returns (n, ny, nx) in m².
    """
    (ny, nx), rng = case.grids[-1], np.random.default_rng(seed)
    log_k = rng.normal(3.0, 0.3, (n, ny, nx))
    for field in log_k:
        for _ in range(rng.integers(2, 4)):
            rows = np.rint(np.linspace(*rng.integers(ny, size=2), nx)).astype(int)
            for col in range(nx):  # from the previous column's row to this one's
                low, high = sorted(rows[max(col - 1, 0) : col + 1][[0, -1]])
                field[low : high + 1, col] = 8.0
    return MILLIDARCY * np.exp(log_k)


def _built_in_cases():
    def edges(rows, nx):  # injectors on the left edge, producers on the right
        rows = tuple(rows)
        return {"injectors": (rows, (0,) * len(rows)), "producers": (rows, (nx - 1,) * len(rows))}

    square = {"lx": 1200 * FOOT, "ly": 1200 * FOOT, "dt": 5.0, "pore_volumes": 0.7}
    grids = tuple((m, m) for m in (8, 16, 32, 64, 128))
    v1 = Case(grids, fields=channel_fields, **edges(range(2, 128, 4), 128), **square)
    v3 = Case(grids[:4], fields=streak_fields, **edges(range(1, 64, 2), 64), **square)
    rows = tuple(range(1, 219, 36))  # injectors in the middle column, producers on both edges
    wells = {"injectors": (rows, (36,) * 7), "producers": (tuple(sorted(2 * rows)), (0, 72) * 7)}
    tall = {"lx": 620 * FOOT, "ly": 1820 * FOOT, "dt": 1.0, "pore_volumes": 1.0}
    v2 = Case(((27, 9), (57, 19), (111, 37), (219, 73)), fields=gaussian_fields, **wells, **tall)
    return {"ResSim-v1": v1, "ResSim-v2": v2, "ResSim-v3": v3}


CASES = _built_in_cases()


# Maps between grids ----------------------------------------------------------------------------


def partition(n, parts):
    """Edges (parts + 1,) of n cells cut into parts; the first n mod parts get one cell more."""
    i = np.arange(parts + 1)
    return i * (n // parts) + np.minimum(i, n % parts)


def coarsen(x, shape, how="mean"):
    """x (..., ny, nx) on a coarser grid `shape`: "mean", "sum" or "harmonic" mean."""
    if x.shape[-2:] == tuple(shape):
        return x.copy()
    rows, cols = partition(x.shape[-2], shape[0]), partition(x.shape[-1], shape[1])
    cells = np.diff(rows)[:, None] * np.diff(cols)
    y = 1 / x if how == "harmonic" else x
    y = np.add.reduceat(np.add.reduceat(y, rows[:-1], axis=-2), cols[:-1], axis=-1)
    if how == "sum":
        return y
    return cells / y if how == "harmonic" else y / cells


def refine(x, shape):
    """x (..., ny, nx) on a finer grid `shape`: every cell is repeated over the cells in it."""
    rows = np.diff(partition(shape[0], x.shape[-2]))
    return x.repeat(rows, axis=-2).repeat(np.diff(partition(shape[1], x.shape[-1])), axis=-1)


# The solver: pressure, fluxes, transport ---------------------------------------------------------


def mobility(s, case):
    """Total mobility λ [1/(Pa s)], water's share f of the flow and df/ds at saturations s."""
    movable = 1 - case.s_wir - case.s_oir
    power = 1 if case.mobility == "linear" else 2
    # S = (s - s_wir) / (1 - s_wir - s_oir), λ_w = Sᵐ/μ_w, λ_o = (1 - S)ᵐ/μ_o, m = 1 or 2
    big_s = (s - case.s_wir) / movable
    water, oil = big_s**power / case.mu_w, (1 - big_s) ** power / case.mu_o
    d_water = power * big_s ** (power - 1) / case.mu_w
    d_oil = -power * (1 - big_s) ** (power - 1) / case.mu_o
    # λ = λ_w + λ_o, f = λ_w / λ, df/ds = (λ_w' λ_o - λ_w λ_o') / λ² · dS/ds
    total = water + oil
    return total, water / total, (d_water * oil - water * d_oil) / (total**2 * movable)


def transmissibility(k, lx, ly):
    """Of the inner faces, (n, ny, nx-1) and (n, ny-1, nx), for k (n, ny, nx) = permeability · λ."""
    dy, dx = ly / k.shape[-2], lx / k.shape[-1]
    # T = 2 A / (Δ/k₁ + Δ/k₂): area over distance times the harmonic mean of both cells, per day
    r = 1 / (DAY * k)
    tx = 2 * dy / dx / (r[..., :, :-1] + r[..., :, 1:])
    return tx, 2 * dx / dy / (r[..., :-1, :] + r[..., 1:, :])


def factor_pressure(tx, ty):
    """LU factors of one reservoir's pressure matrix, from tx (ny, nx-1) and ty (ny-1, nx)."""
    nx = ty.shape[1]
    east, south = np.pad(tx, ((0, 0), (0, 1))), np.pad(ty, ((0, 1), (0, 0)))
    diagonal = east + south
    diagonal[:, 1:] += tx
    diagonal[1:] += ty
    diagonal[0, 0] *= 2  # p is free up to a constant: this makes p[0, 0] = 0, since Σ q = 0
    east, south = -east.ravel()[:-1], -south.ravel()[:-nx]
    matrix = sparse.diags_array(
        [south, east, diagonal.ravel(), east, south], offsets=[-nx, -1, 0, 1, nx], format="csc"
    )
    matrix.eliminate_zeros()
    options = {"diag_pivot_thresh": 0, "panel_size": 4, "relax": 2}  # for symmetric matrices
    return splu(matrix, "MMD_AT_PLUS_A", **options, options={"SymmetricMode": True})


def fluxes(p, tx, ty):
    """vx (n, ny, nx+1), vy (n, ny+1, nx) [m²/day] over all faces; 0 at the outer ones."""
    n, ny, nx = p.shape
    vx, vy = np.zeros((n, ny, nx + 1)), np.zeros((n, ny + 1, nx))
    # v = T (p₁ - p₂), positive towards the larger index
    np.multiply(tx, p[:, :, :-1] - p[:, :, 1:], out=vx[:, :, 1:-1])
    np.multiply(ty, p[:, :-1] - p[:, 1:], out=vy[:, 1:-1])
    return vx, vy


def flow_matrix(p, vx, vy, q):
    """What leaves and enters the cells when every cell's fluid moves along vx, vy and q.

    The cells of each reservoir are ordered by falling pressure. Everything then flows from earlier
    to later cells, so the upwind matrix is lower triangular, and block-diagonal over reservoirs.
    Returns the order (n·ny·nx,) and the entries, diagonal first: values, rows, columns.
    """
    n, size = len(p), p.size
    order = np.argsort(-p.reshape(n, -1), axis=1)
    order = (order + size // n * np.arange(n)[:, None]).ravel()
    index, rank = np.arange(size, dtype=np.int32), np.empty(size, dtype=np.int32)
    rank[order] = index
    rank = rank.reshape(p.shape)
    leaving = np.maximum(vx[:, :, 1:], 0) - np.minimum(vx[:, :, :-1], 0) - np.minimum(q, 0)
    leaving += np.maximum(vy[:, 1:], 0) - np.minimum(vy[:, :-1], 0)
    a = [rank[:, :, :-1].ravel(), rank[:, :-1].ravel()]  # the two cells of every face
    b = [rank[:, :, 1:].ravel(), rank[:, 1:].ravel()]
    down = np.concatenate([index, *map(np.maximum, a, b)])
    up = np.concatenate([index, *map(np.minimum, a, b)])
    entering = [-np.abs(vx[:, :, 1:-1]).ravel(), -np.abs(vy[:, 1:-1]).ravel()]
    return order, np.concatenate([leaving.ravel()[order], *entering]), down, up


def factor_lower(values, rows, cols):
    """LU factors of the sparse lower triangular matrix of these entries (none twice)."""
    matrix = sparse.coo_array((values, (rows, cols)))
    matrix.has_canonical_format = True  # nothing to sum, and SuperLU needs no sorted columns:
    matrix = matrix.tocsc()
    matrix.has_canonical_format = True  # so do not sort
    return splu(matrix, permc_spec="NATURAL", diag_pivot_thresh=0, panel_size=2, relax=1)


def transport(s, p, vx, vy, q, pore, case):
    """Saturations (n, ny, nx) after `case.substeps` backward Euler steps of `case.dt` days.

    s, p, q are (n, ny, nx), vx and vy as `fluxes` returns them, `pore` [m²] is the cells' pore
    space (number or array). Injected is water only. RuntimeError if Newton does not converge.
    """
    movable, n, size = 1 - case.s_wir - case.s_oir, len(s), s.size
    order, flow, down, up = flow_matrix(p, vx, vy, q)
    storage = np.broadcast_to(pore * movable / case.dt, s.shape).ravel()[order]
    source = np.maximum(q, 0).ravel()[order]
    big_s = ((s.ravel() - case.s_wir) / movable)[order]  # S = (s - s_wir) / movable, ordered

    # Every step solves  storage (S⁺ - S) + flow f(S⁺) = source  for S⁺.
    if case.linear:  # f(S) = S: one matrix for all steps
        flow[:size] += storage
        lu = factor_lower(flow, down, up)
        for _ in range(case.substeps):
            big_s = lu.solve(storage * big_s + source)
    else:
        # Where f is steepest: a Newton step across this S stops there, and so Newton converges
        # (Jenny, Tchelepi & Lee 2009, J. Comput. Phys. 228).
        grid_s = np.linspace(0, 1, 2001)
        steepest = grid_s[mobility(case.s_wir + movable * grid_s, case)[2].argmax()]
        throughput = storage + flow[:size]
        for _ in range(case.substeps):
            old = big_s
            for _ in range(200):
                _, f, df = mobility(case.s_wir + movable * big_s, case)
                net = np.bincount(down, flow * f[up], size)  # flow f(S)
                residual = storage * (big_s - old) + net - source
                error = np.abs(residual / throughput).reshape(n, -1).max(axis=1)
                if (error < 1e-12).all():
                    break
                jacobian = flow * (df * movable)[up]
                jacobian[:size] += storage
                new = big_s - factor_lower(jacobian, down, up).solve(residual)
                new = new.clip(-1e-6, 1 + 1e-6)  # the fluxes' rounding errors need some room
                new[(big_s - steepest) * (new - steepest) < 0] = steepest
                # A reservoir that has converged stays as it is, whatever its neighbours do.
                big_s = np.where(np.repeat(error < 1e-12, size // n), big_s, new)
            else:
                raise RuntimeError(f"transport: Newton residual {error.max():.1e} after 200 steps")

    result = np.empty(size)
    result[order] = case.s_wir + movable * big_s
    return result.reshape(s.shape)


class Grid:
    """One level of a case: its cells, wells, fields and factored pressure matrices.

    `perm` (K, ny, nx) [m²] lies on this level's or on the finest grid. A case's simulations
    share it: with constant mobility a field's pressure matrix is factored once in a process.
    """

    def __init__(self, case, level, perm):
        self.case, self.level, self.shape = case, level, case.grids[level - 1]
        self.perm = coarsen(perm, self.shape, "harmonic")  # (K, ny, nx)
        self.pore = case.lx * case.ly * case.porosity / math.prod(self.shape)  # [m²] per cell
        self.oil_in_place = self.pore * math.prod(self.shape) * (1 - case.s_wir)
        edges = [partition(*sizes) for sizes in zip(case.grids[-1], self.shape)]
        # The cell (row, col) of this grid that holds each well of the finest grid.
        self.injectors, self.producers = (
            tuple(np.searchsorted(e, w, "right") - 1 for e, w in zip(edges, wells))
            for wells in (case.injectors, case.producers)
        )
        self.factored = {}  # field -> (LU factors, tx, ty)

    def solve_pressure(self, field, s, q):
        """Pressure p [Pa] (ny, nx) with div(-k λ(s) grad p) = q, and tx, ty."""
        if self.case.linear and field in self.factored:
            lu, tx, ty = self.factored[field]
        else:
            k = self.perm[field] * mobility(s, self.case)[0]
            tx, ty = transmissibility(k, self.case.lx, self.case.ly)
            lu = factor_pressure(tx, ty)
            if self.case.linear:
                self.factored[field] = lu, tx, ty
        return lu.solve(q.ravel()).reshape(q.shape), tx, ty

    def rates(self, actions):
        """phi for a batch: actions (n, injectors + producers) -> q (n, ny, nx) [m²/day]."""
        n_injectors = len(self.injectors[0])
        a = actions.clip(0.001, 1)
        share_in, share_out = a[:, :n_injectors], a[:, n_injectors:]
        q, i = np.zeros((len(a), *self.shape)), np.arange(len(a))[:, None]
        # q = total rate · a / Σ a, wells in the same cell add up
        np.add.at(q, (i, *self.injectors), self.case.rate * share_in / share_in.sum(1)[:, None])
        np.add.at(q, (i, *self.producers), -self.case.rate * share_out / share_out.sum(1)[:, None])
        return q

    def observe(self, s, p):
        """psi for a batch: s, p (n, ny, nx) -> (n, observations), see `ResSim.psi`."""
        (y_in, x_in), (y_out, x_out) = self.injectors, self.producers
        p = np.concatenate([p[:, y_out, x_out], p[:, y_in, x_in]], axis=1)
        low, high = p.min(axis=1, keepdims=True), p.max(axis=1, keepdims=True)
        p = 1 - 2 * (high - p) / np.maximum(high - low, 1e-300)  # all 1 if there is no difference
        return np.concatenate([s[:, y_out, x_out].clip(0, 1), p], axis=1)


@functools.cache
def _drawn_fields(case, evaluation):
    return case.fields(case, case.n_fields, int(evaluation))  # the seed: 0 training, 1 evaluation


@functools.cache
def _shared_grid(case, level, evaluation):
    return Grid(case, level, _drawn_fields(case, evaluation))


class ResSim(gym.Env):
    """Water displaces oil in one reservoir, simulated on one level; an action sets the wells.

    Single-phase Darcy pressure and two-point fluxes once per control step, then upwind transport
    (Dixit & ElSheikh, arXiv 2210.08400, section 4). The reward is the oil produced in the control
    step / oil originally in place. The episode ends (terminated) after `case.control_steps` steps.

    case        a `Case` or a name in CASES
    level       1 = coarsest .. len(case.grids) = finest (default); spaces are the same on all
    evaluation  draw from the evaluation fields instead of the training fields
    perm        own fields (K, ny, nx) [m²] on the finest grid, or on this level's; else ValueError
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 2}

    def __init__(self, case="ResSim-v1", level=None, evaluation=False, perm=None, render_mode=None):
        self.case = case = CASES[case] if isinstance(case, str) else case
        level = len(case.grids) if level is None else level
        if level not in range(1, len(case.grids) + 1):
            raise ValueError(f"level must be 1..{len(case.grids)}, got {level}")
        self.evaluation, self.render_mode = evaluation, render_mode
        if perm is None:
            self.grid = _shared_grid(case, level, evaluation)
        else:
            if np.iscomplexobj(perm):
                raise ValueError("perm must be real")
            perm = np.asarray(perm, dtype=np.float64)
            shapes = [case.grids[level - 1], case.grids[-1]]
            if perm.ndim != 3 or perm.shape[1:] not in shapes or len(perm) == 0:
                raise ValueError(
                    f"perm must be (K, ny, nx), (ny, nx) in {shapes}, not {perm.shape}"
                )
            if not (np.isfinite(perm).all() and (perm > 0).all()):
                raise ValueError("perm must be finite and positive everywhere")
            self.grid = Grid(case, level, perm)
        n_in, n_out = len(case.injectors[0]), len(case.producers[0])
        low = np.r_[np.zeros(n_out), -np.ones(n_out + n_in)].astype(np.float32)
        self.observation_space = gym.spaces.Box(low, np.float32(1), dtype=np.float32)
        self.action_space = gym.spaces.Box(0.001, 1, (n_in + n_out,), dtype=np.float32)
        self.t = None  # control steps since reset

    def reset(self, *, seed=None, options=None):
        """All oil; a field is drawn, or `options={"field": k}` picks it. Returns psi, info.

        In evaluation a seed picks the field seed mod K, so that consecutive seeds visit all fields.
        """
        super().reset(seed=seed)
        n_fields = len(self.grid.perm)
        self.field = int(self.np_random.integers(n_fields))
        if self.evaluation and seed is not None:
            self.field = seed % n_fields  # the seeds of an evaluation visit every field
        if options and "field" in options:
            self.field = int(options["field"])
            if self.field not in range(n_fields):
                raise ValueError(f"field must be 0..{n_fields - 1}, got {self.field}")
        self.s = np.full(self.grid.shape, self.case.s_wir)  # water saturation
        self.p = np.zeros(self.grid.shape)  # pressure
        self.t = 0
        return self.psi().astype(np.float32), {"field": self.field}

    def phi(self, action):
        """Policy's action, relative rates (injectors, then producers) -> q (ny, nx) [m²/day]."""
        return self.grid.rates(np.asarray(action, dtype=np.float64)[None])[0]

    def psi(self):
        """State -> policy's observation: s at producers, p at producers, p at injectors.

        Coarse cells stand for all finest cells in them. p is scaled to [-1, 1] over the wells.
        """
        return self.grid.observe(self.s[None], self.p[None])[0]

    def get_state(self):
        """Return what `set_state` of a simulation of this case and level needs to go on."""
        return self.s, self.p, self.t, self.field, self.np_random

    def set_state(self, state):
        """Go on from a state."""
        self.s, self.p, self.t, self.field, self.np_random = state

    def map_from(self, other):
        """Takes over the state of the same simulation on another (or the same) level.

        Saturation and pressure are means over the cells in a coarser cell, or repeated over those
        in it; the field is the same one, on this level. ValueError if `other` is another case.
        """
        same = self.case == other.case and self.evaluation == other.evaluation
        if not same or len(self.grid.perm) != len(other.grid.perm) or other.t is None:
            raise ValueError("map_from needs the same simulation (case, fields), after its reset")
        change = coarsen if other.grid.level >= self.grid.level else refine
        self.s, self.p = change(other.s, self.grid.shape), change(other.p, self.grid.shape)
        self.field, self.t = other.field, other.t

    def step(self, action):
        """One control step. ValueError: action not finite; RuntimeError: episode over."""
        obs, rewards, terminated, truncated = self.step_batch([self], np.asarray(action)[None])
        return obs[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}

    @staticmethod
    def step_batch(envs, actions):
        """One control step of n simulations of one case and level; bitwise as if stepped alone.

        actions (n, n_actions) -> obs (n, n_obs) float32, rewards (n,) float64, terminated (n,),
        truncated (n,) bool. Nothing is reset.
        """
        case, grid = envs[0].case, envs[0].grid
        actions = np.asarray(actions, dtype=np.float64)
        if actions.shape != (len(envs), *envs[0].action_space.shape):
            raise ValueError(f"actions have shape {actions.shape} for {len(envs)} simulations")
        if not np.isfinite(actions).all():
            raise ValueError("actions must be finite")
        if any(env.t is None or env.t >= case.control_steps for env in envs):
            raise RuntimeError("ResSim: step() before reset() or after the end of the episode")
        rates = grid.rates(actions)
        obs, rewards = [], []
        # As many reservoirs at a time as the processor's cache holds.
        chunk = max(1, 2**13 // rates[0].size)
        for start in range(0, len(envs), chunk):
            part, q = envs[start : start + chunk], rates[start : start + chunk]
            s = np.stack([env.s for env in part])  # (chunk, ny, nx)
            # One right-hand side per solve: solving several at once rounds differently.
            solved = [e.grid.solve_pressure(e.field, e.s, q_e) for e, q_e in zip(part, q)]
            p, tx, ty = (np.stack(arrays) for arrays in zip(*solved))
            vx, vy = fluxes(p, tx, ty)
            s_new = transport(s, p, vx, vy, q, grid.pore, case)
            # Nothing is compressible and all boundaries are closed: oil produced = water gained
            gained = grid.pore * (s_new - s).reshape(len(part), -1).sum(axis=1)
            rewards.append(gained / grid.oil_in_place)
            obs.append(grid.observe(s_new, p).astype(np.float32))
            for i, env in enumerate(part):
                env.s, env.p, env.t = s_new[i], p[i], env.t + 1
        terminated = np.array([env.t >= case.control_steps for env in envs])
        return np.concatenate(obs), np.concatenate(rewards), terminated, np.zeros(len(envs), bool)

    def render(self):
        """Picture (height, width, 3) uint8: oil brown, water blue; wells white (in), red (out)."""
        zoom = math.ceil(256 / self.case.grids[-1][0])
        share = refine(self.s, self.case.grids[-1])[..., None].clip(0, 1)
        image = (1 - share) * (84, 52, 30) + share * (44, 123, 214)  # (ny, nx, 3)
        image = image.repeat(zoom, axis=0).repeat(zoom, axis=1).astype(np.uint8)
        injectors = [(*well, (255, 255, 255)) for well in zip(*self.case.injectors)]
        producers = [(*well, (230, 30, 30)) for well in zip(*self.case.producers)]
        for row, col, colour in injectors + producers:
            y, x = row * zoom, col * zoom
            image[max(y - 1, 0) : y + zoom + 1, max(x - 1, 0) : x + zoom + 1] = colour
        return image


for _name in CASES:
    if _name not in gym.registry:  # the script may be __main__ and imported
        gym.register(_name, entry_point=ResSim, kwargs={"case": _name})

# ------------------------------------------------------------------------------------ game


def load_make(name):
    """Return the function that makes the simulation `name` at a level."""
    if name in CASES:
        return functools.partial(ResSim, name)
    module, _, function = name.rpartition(":")
    if not module:
        raise ValueError(
            f"no env '{name}'; there are {', '.join(CASES)}, file.py:make, module:make"
        )
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), function)
    return getattr(load_file(module), function)


@functools.cache  # one module for all games: its data is there once, and its classes are the same
def load_file(path):
    """Return the Python file as a module."""
    spec = importlib.util.spec_from_file_location(f"simulation_{Path(path).stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_env(name, level, **options):
    """Return the simulation `name` at `level`; its maker gets those `options` that it knows."""
    make = load_make(name)
    known = inspect.signature(make).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        options = {key: value for key, value in options.items() if key in known}
    return make(level=level, **options)


def num_options(space):
    """Return the number of options of each choice that a discrete action consists of."""
    if isinstance(space, gym.spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, gym.spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    return space.nvec.ravel().tolist()


def to_env(action, space):
    """Return the policy's action as the env takes it.

    A Box's action is cut to its bounds here, on the way to the env, not in log π(a|s).
    """
    if isinstance(space, gym.spaces.Box):
        return np.asarray(action.clip(space.low, space.high), space.dtype)
    return (action + getattr(space, "start", 0)).astype(space.dtype)


class Game:
    """One simulation on one level that resets itself and keeps its episode's return and length."""

    def __init__(self, env_id, level, seed, **options):
        self.name, self.seed = f"{env_id} level {level}", seed
        self.random = np.random.default_rng(seed)  # of the seeds that a pair has in common
        self.env = make_env(env_id, level, **options)
        self.action_space = self.env.action_space

    def reset(self, seed=None):
        """Start an episode, of the game's current random stream or of a new seed. Return (D,)."""
        self.episode_return, self.episode_length = 0.0, 0
        obs, _ = self.env.reset(seed=seed)
        return obs

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
        return state and (self.episode_return, self.episode_length, self.random, state)

    def set_state(self, state):
        """Go on from the state of a game like this one."""
        self.episode_return, self.episode_length, self.random, state = state
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


def step_games(games, actions):
    """Step games of one level once, together if their env can. Returns a list of their records."""
    actions = to_env(actions, games[0].action_space)
    envs, batch = [game.env for game in games], None
    if hasattr(envs[0], "step_batch"):
        with named(games[0], "step_batch"):
            batch = list(zip(*envs[0].step_batch(envs, actions), strict=True))
    records = []
    for i, game in enumerate(games):
        with named(game, "step"):
            output = game.env.step(actions[i])[:4] if batch is None else batch[i]
            records.append(game.record(*output))
    return records


class Games:
    """The actors `rows` of one worker. Each has a game on every level and, on all levels but the
    coarsest, its partner one level below.

    An actor's members are ordered own¹, sync², own², sync³, own³, ...: member 2l is the game of
    level index l, member 2l − 1 its partner. They live in one process, so that map_from moves no
    state between processes. The shared arrays have a leading axis of members.
    """

    def __init__(self, env_id, levels, seeds, rows, arrays, **options):
        self.rows, self.arrays = rows, {name: array[:, rows] for name, array in arrays.items()}
        self.games = []
        for m, member_seeds in enumerate(seeds[:, rows]):
            level = levels[m // 2]  # member 2l − 1 is one level below member 2l
            self.games.append([Game(env_id, level, int(s), **options) for s in member_seeds])
        self.maps = hasattr(self.games[0][0].env.unwrapped, "map_from")

    def reset(self, states=None):
        """Start all games from their seeds, each partner where its fine game starts; those of an
        actor that has one of the N `states` go on from it.
        """
        states, actors = states[self.rows] if states else None, list(zip(*self.games))
        starting = [
            i for i, actor in enumerate(actors) if not restored(actor, states and states[i])
        ]
        for m, games in enumerate(self.games):
            for i in starting:
                with named(games[i], "reset"):
                    self.arrays["obs"][m, i] = games[i].reset(games[i].seed)
        for level in range(1, len(self.games) // 2 + 1):
            self.start_partners(level, starting)
        for m in range(len(self.games)):
            self.check_finite(m)

    def get_states(self):
        """Return what `reset` needs to go on with these actors, None for one that cannot tell."""
        states = [[game.get_state() for game in actor] for actor in zip(*self.games)]
        return [None if None in actor else actor for actor in states]

    def start_partners(self, level, actors):
        """Start an episode of these actors' partners at the start of the fine game's episode."""
        own, sync, started = 2 * level, 2 * level - 1, time.perf_counter()
        for i in actors:
            fine, partner = self.games[own][i], self.games[sync][i]
            with named(partner, "reset"):
                if not self.maps:  # a common seed is what the two can have in common
                    seed = int(fine.random.integers(2**31))
                    self.arrays["obs"][own, i] = fine.reset(seed)
                    self.arrays["obs"][sync, i] = partner.reset(seed)
                elif partner.episode_length > 0:  # else its own end has reset it
                    partner.reset()
        self.arrays["seconds"][sync, 0] += time.perf_counter() - started
        if self.maps:
            self.synchronize(level, actors)

    def synchronize(self, level, actors=None):
        """Have the partners take over the state of their fine game: ML, Algorithm 5, line 18."""
        started = time.perf_counter()
        for i in range(len(self.games[0])) if actors is None else actors:
            fine, partner = self.games[2 * level][i], self.games[2 * level - 1][i]
            with named(partner, "map_from"):
                partner.env.unwrapped.map_from(fine.env.unwrapped)
                self.arrays["obs"][2 * level - 1, i] = partner.env.unwrapped.psi()
        self.check_finite(2 * level - 1)
        self.arrays["seconds"][2 * level - 1, 0] += time.perf_counter() - started

    def step(self, level=0, synchronize=False):
        """Step the games of a level index once, then their partners, and map these if asked to."""
        for m in range(2 * level, 2 * level - (2 if level else 1), -1):
            started = time.perf_counter()
            records = step_games(self.games[m], self.arrays["actions"][m])
            for i, record in enumerate(records):
                for name, value in zip(STEP_OUTPUTS, record, strict=True):
                    self.arrays[name][m, i] = value
            self.arrays["seconds"][m, 0] += time.perf_counter() - started
            self.arrays["steps"][m, 0] += len(records)
            self.check_finite(m)
        if level:
            # Where the fine episode ended, the partner's ends with it and a new pair starts.
            ended = self.arrays["episode_length"][2 * level] > 0
            truncated = self.arrays["truncated"][2 * level - 1]
            truncated |= ended & ~self.arrays["terminated"][2 * level - 1]
            self.start_partners(level, np.flatnonzero(ended))
        if synchronize:
            self.synchronize(level)

    def check_finite(self, m):
        """Raise GameError if a member's game made a number that is none."""
        check_finite({name: array[m] for name, array in self.arrays.items()}, self.games[m])

    def restart(self, _):
        """Start new games after a failure in a step: the episodes end there."""
        for game in itertools.chain(*self.games):
            game.seed = new_seed()
            game.random = np.random.default_rng(game.seed)
        set_truncated(self.arrays)
        self.reset()

    def close(self):
        """Close all envs."""
        for game in itertools.chain(*self.games):
            game.env.close()


def members(pool):
    """Return the list of the pool's members (see Games), each a dict of arrays of all N actors."""
    count = len(pool.arrays["obs"])
    return [{name: array[m] for name, array in pool.arrays.items()} for m in range(count)]


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


# ------------------------------------------------------------------------------------ rollout


@torch.no_grad()
def rollout(model, pool, level, args, generator):
    """Take T^l steps with all N actors on a level index (ML, Algorithm 5).

    Returns the buffers [own] of the coarsest level, [own, sync] above, each tensors (T, N, ...):
    obs, actions, logprobs, values, next_values, rewards, terminated, truncated; and the (return,
    length) of the level's own episodes that ended.
    """
    T, by_step = args.num_steps[level], level > 0 and args.coupling == "step"
    pair = [members(pool)[m] for m in ([2 * level, 2 * level - 1] if level else [0])]
    buffers, episodes = [make_buffer(model, arrays, T) for arrays in pair], []
    act = sampler(model)
    noise = make_noise(model, T, len(pair[0]["obs"]), generator)  # both members'
    if by_step:
        pool.call("synchronize", level, steps=1)
    for t, step_noise in enumerate(noise):
        for m, arrays in enumerate(pair):
            if m and by_step:  # a partner takes the fine member's action
                arrays["actions"][:] = pair[0]["actions"]
            else:
                act(arrays, step_noise)
            store(buffers[m], t, arrays, model.stored)
        pool.call("step", level, by_step, steps=1)
        for m, arrays in enumerate(pair):
            store(buffers[m], t, arrays, STEP_RESULTS)
        episodes += ended_episodes(pair[0])
    buffers = [gathered(finish(model, buffer)) for buffer in buffers]
    return buffers, sum(gathered_objects(episodes), [])


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


def signed_weights(num_steps, num_envs, num_minibatches):
    """Return a minibatch's weights, rows as `minibatches` gives them: ML, Algorithm 4, line 16.

    A row of level l's own games weighs +S/M^l, one of the partners −S/M^l, S = the number of rows:
    the mean of the weighted rows is the telescoping sum. One level alone has weights of 1.
    """
    sizes = [num_envs * T // num_minibatches for T in num_steps]  # M^l
    total = 2 * sum(sizes) - sizes[0]
    weights = [torch.full((sizes[0],), total / sizes[0])]
    for M in sizes[1:]:
        weights += [torch.full((M,), -total / M), torch.full((M,), total / M)]
    return torch.cat(weights)  # (S,)


def minibatches(num_steps, num_envs, num_minibatches, generator):
    """Return the row numbers of an epoch's minibatches, (B, S): ML, Algorithm 6.

    The rows of all members lie one after the other: own¹, sync², own², sync³, own³, ... A minibatch
    has M^l rows of level l, and the partner's rows of the same actors and steps.
    """
    rows, start = [], 0
    for level, T in enumerate(num_steps):
        shuffled = torch.randperm(num_envs * T, generator=generator).view(num_minibatches, -1)
        for _ in range(2 if level else 1):
            rows.append(shuffled + start)
            start += num_envs * T
    return torch.cat(rows, dim=1)


def update(model, optimizer, batch, args, generator):
    """Take K epochs of minibatch steps on the rows of `batch`. Return the means of the losses."""
    seen = []
    weights = signed_weights(args.num_steps, args.num_envs, args.num_minibatches)
    weights = weights.to(batch["obs"].device)[rank() :: num_ranks()]  # of `own_rows`
    # Literally, a partner's row is +min(r Ã, clip(r) Ã): its ratio may run away, and with it the
    # sum to −∞. Bounded, it is −min(−r Ã, −clip(r) Ã), PPO's own bound for an advantage of −Ã, with
    # the same gradient at π_old; and the value function fits the rows of positive weight.
    bounded = args.correction == "bounded"
    term_weights = (1, weights.clamp(min=0), weights) if bounded else (weights, weights, weights)
    coarsest = args.num_envs * args.num_steps[0]  # rows of the coarsest level
    if args.norm_adv == "batch":
        batch = batch | {"advantages": normalised(batch["advantages"], coarsest)}
    coarsest //= args.num_minibatches  # M^1
    for _ in range(args.update_epochs):
        rows = minibatches(args.num_steps, args.num_envs, args.num_minibatches, generator)
        for mb_rows in rows:  # (S,)
            mb = {name: column[mb_rows] for name, column in batch.items()}
            if args.norm_adv == "minibatch":
                mb["advantages"] = normalised(mb["advantages"], coarsest)
            mb = own_rows(mb)
            if bounded:
                mb["advantages"] = weights * mb["advantages"]
            *terms, logratio = losses(model, mb, args.clip_coef, args.clip_vloss)
            terms = [(w * term).mean() for w, term in zip(term_weights, terms)]
            pg_loss, v_loss, entropy = terms
            # ML, Algorithm 4: loss = Σ_l mean[ℓ^l − ℓ̃^{l−1}]
            loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy
            approx_kl, clipfrac = policy_change(logratio[weights > 0].detach(), args.clip_coef)
            row = torch.stack([*terms, approx_kl, clipfrac]).detach()
            seen.append(averaged(row))
            if args.target_kl is not None and row[3] > args.target_kl:
                return summary(seen)
            take_step(optimizer, loss, args.max_grad_norm)
    return summary(seen)


def normalised(advantages, coarsest):
    """Return advantages less the mean of the first `coarsest` rows, divided by their deviation.

    It is one affine map for all levels, from the coarsest level's many rows.
    """
    own = advantages[:coarsest]
    return (advantages - own.mean()) / (own.std() + 1e-8)


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
    "iteration global_step wall_seconds restarts sim_seconds sim_cost "
    "simulation_seconds policy_seconds update_seconds sps "
    "episodic_return episodic_length eval_return "
    "policy_loss value_loss entropy approx_kl clipfrac explained_variance learning_rate"
).split()


GAMES_MADE_OF = ("env", "num_envs", "levels")  # options

MODEL_OPTIONS = (
    "hidden shared_net init_log_std activation layer_norm full_covariance norm_obs norm_value"
).split()


def make_model(args):
    """Return the Model for the env's spaces, its weights drawn from torch's global generator."""
    env = make_env(args.env, args.levels[-1])
    obs_dim, action_space = env.observation_space.shape[0], env.action_space
    env.close()
    model = Model(obs_dim, action_space, **{name: getattr(args, name) for name in MODEL_OPTIONS})
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
    seeds = EVAL_SEED + np.arange(args.eval_episodes)
    num_workers = int(args.step_timeout > 0)
    return make_pool(args, [args.eval_level], seeds[np.newaxis], num_workers, evaluation=True)


def make_pool(args, levels, seeds, num_workers, **options):
    """Return the pool of actors on the levels, with a seed per member and actor (2L − 1, N)."""
    env = make_env(args.env, levels[0])
    layout = array_layout(seeds.shape[1], env.observation_space, env.action_space)
    # What each worker has spent on simulating a member, in the entry of its first actor.
    layout |= {name: ((seeds.shape[1],), np.float64) for name in ("seconds", "steps")}
    layout = {name: ((len(seeds), *shape), dtype) for name, (shape, dtype) in layout.items()}
    env.close()
    games = functools.partial(Games, args.env, levels, seeds, **options)
    return WorkerPool(games, layout, seeds.shape[1], num_workers, args.step_timeout)


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
    counters |= {"sim_seconds": 0.0, "sim_cost": 0.0}
    run_dir = Path(args.resume) if args.resume else make_run_dir(args, "ppo_multilevel")
    if args.resume:
        counters |= restore(run_dir, model, optimizer, generator)
    games = load_games(args, counters["iteration"]) if args.resume else None
    shape = 2 * len(args.levels) - 1, args.num_envs  # of the members
    seeds = game_seeds(args, shape, counters["iteration"], games)
    recent = games["recent"] if games else [deque(maxlen=100) for _ in args.levels]
    evaluates = args.eval_every and rank() == 0
    with ExitStack() as stack:
        if not args.quiet and rank() == 0:
            stack.callback(print, f"run folder: {run_dir}")
        stack.enter_context(connected_ranks(model))
        stop = stack.enter_context(StopRequest())
        pool = stack.enter_context(closing(make_pool(args, args.levels, seeds, args.num_workers)))
        if evaluates or args.eval_level > args.levels[-1]:
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
            returns = evaluate(model, eval_pool, members(eval_pool)[0])
            logger.write(counters | {"eval_return": returns.mean()})
        finest = members(pool)[-1]  # one of its steps is the unit of sim_cost
        if args.eval_level > args.levels[-1]:
            finest = members(eval_pool)[0]
            for _ in range(2):  # the first evaluation includes what is done only once
                finest["seconds"][:], finest["steps"][:] = 0, 0
                evaluate(model, eval_pool, finest)
        while counters["iteration"] < args.num_iterations and not stop.received():
            started = time.perf_counter()
            seconds_before, steps_before = simulated(pool)
            progress = counters["iteration"] / args.num_iterations if args.anneal_lr else 0
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * (1 - progress)
            batches = rollouts(model, pool, args, generator, recent)
            batch = {name: torch.cat([b[name] for b in batches]) for name in batches[0]}
            rollout_seconds = time.perf_counter() - started
            if args.norm_value:
                normalise_values(model, batch, batches[0]["returns"])
            row = update(model, optimizer, batch, args, generator)
            if args.norm_obs:  # after the update: within it, π_old is the policy that sampled
                model.obs_norm.update(torch.cat([b["obs"] for b in batches[::2]]))

            seconds = time.perf_counter() - started
            restarts, pool.restarts = sum(gathered_objects(pool.restarts)), 0
            counters["iteration"] += 1
            counters["global_step"] += len(batch["obs"])
            counters["wall_seconds"] += seconds
            counters["restarts"] += restarts
            sim_seconds, steps = simulated(pool)
            # Each step counts as what one of its member takes on average, in finest-level steps.
            sim_cost = ((steps - steps_before) * sim_seconds / steps).sum()
            sim_cost /= finest["seconds"].sum() / finest["steps"].sum()
            spent = gathered_objects([(sim_seconds - seconds_before).sum(), sim_cost])
            sim_seconds, sim_cost = np.sum(spent, axis=0).tolist()
            counters["sim_seconds"] += sim_seconds
            counters["sim_cost"] += sim_cost
            row |= counters | episode_means(recent[-1])
            row["sps"] = round(len(batch["obs"]) / seconds)
            row["simulation_seconds"] = sim_seconds / max(1, len(pool.workers)) / num_ranks()
            row["policy_seconds"] = rollout_seconds - row["simulation_seconds"]
            row["update_seconds"] = seconds - rollout_seconds
            coarsest = batches[0]
            row["explained_variance"] = explained_variance(coarsest["values"], coarsest["returns"])
            row["learning_rate"] = optimizer.param_groups[0]["lr"]
            last = counters["iteration"] == args.num_iterations
            try:
                if evaluates and (last or counters["iteration"] % args.eval_every == 0):
                    row["eval_return"] = evaluate(model, eval_pool, members(eval_pool)[0]).mean()
            finally:
                logger.write(row, **level_scalars(args.levels, recent, batches))
            if args.save_every and counters["iteration"] % args.save_every == 0:
                save()
        if not args.quiet and rank() == 0:
            print(time_split(logger.rows))
    result = {"run_dir": run_dir, "model": model, "optimizer": optimizer, "history": logger.rows}
    return SimpleNamespace(**result, signal=stop.signal)


def simulated(pool):
    """Return seconds spent on simulating and steps taken so far by each member, (2L − 1,) each."""
    return [pool.arrays[name].sum(axis=1) for name in ("seconds", "steps")]


def normalise_values(model, batch, returns):
    """Take returns into the running mean and deviation, normalise the batch's values by them."""
    model.update_value_norm(returns.flatten())
    for name in ("values", "returns"):
        batch[name] = model.value_norm(batch[name])


def rollouts(model, pool, args, generator, recent):
    """Roll out all levels and add their episodes to `recent`.

    Returns the batches of all members, in the order own¹, sync², own², sync³, own³, ...
    """
    batches = []
    for level in range(len(args.levels)):
        buffers, episodes = rollout(model, pool, level, args, generator)
        for buffer in buffers[::-1]:
            batches.append(make_batch(buffer, model.inputs, args.gamma, args.gae_lambda))
        recent[level] += episodes
    return batches


def level_scalars(levels, recent, batches):
    """Return what TensorBoard shows of each level: its episodes' return, and V_l / V_1.

    V_l = Var(Â^l − Ã^{l−1}) is what the level's correction adds to the variance per row, V_1 =
    Var(Â^1): a level pays if its V_l is small, and needs few steps in proportion to it.
    """
    scalars = {}
    for l, level in enumerate(levels):  # noqa: E741, the paper's l
        scalars[f"levels/return_{level}"] = episode_means(recent[l])["episodic_return"]
        if l > 0:
            difference = batches[2 * l]["advantages"] - batches[2 * l - 1]["advantages"]
            ratio = difference.var() / batches[0]["advantages"].var()
            scalars[f"levels/variance_ratio_{level}"] = float(ratio)
    return scalars


def time_split(rows):
    """Return where the time of the logged iterations went, as a line."""
    names = ("simulation", "policy", "update")
    seconds = [sum(row.get(f"{name}_seconds", 0) for row in rows) for name in names]
    parts = [f"{name} {value:.1f} s" for name, value in zip(names, seconds)]
    return f"wall time: {', '.join(parts)}"


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
        returns = evaluate(model, pool, members(pool)[0], generator)
        inputs = {name: members(pool)[0][name][:1] for name in model.inputs}
    print(f"return {returns.mean():.4f} ± {returns.std():.4f} over {len(returns)} episodes")
    if args.video:
        try:
            path = record_video(args, model)
        except Exception as error:
            problem = f"argument --video: no film of {args.env}: {first_line(error)}"
            raise GameError(problem) from None
        print(f"video: {path}")
    if args.export_onnx:
        with closing(make_env(args.env, args.eval_level)) as env:
            path = export_onnx(Path(args.eval) / "policy.onnx", model, inputs, env.action_space)
        print(f"policy: {path}")
    return returns


def record_video(args, model):
    """Play an episode, write its pictures to a file. Return its path."""
    generator = torch.Generator().manual_seed(EVAL_SEED) if args.sample else None
    seeds = np.array([[EVAL_SEED]])
    options = {"evaluation": True, "render_mode": "rgb_array"}
    with closing(make_pool(args, [args.eval_level], seeds, 0, **options)) as pool:
        env = pool.games.games[0][0].env
        path = Path(args.eval) / "video.mp4"
        write_video(path, env, play(model, pool, members(pool)[0], env, generator))
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
        print(f"ppo_multilevel.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    stopped_by = getattr(result, "signal", None)
    return 128 + stopped_by if stopped_by else 0


if __name__ == "__main__":
    sys.exit(main())
