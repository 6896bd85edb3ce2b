"""PPO (proximal policy optimisation) for any Gymnasium environment with vector observations.

    python ppo.py --env CartPole-v1                        # train, about a minute
    python ppo.py --env Pendulum-v1 --gamma 0.9 --num-envs 8 --num-steps 256 --learning-rate 1e-3
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

r_t is the reward, r_t(θ) the probability ratio. Shapes: T steps (--num-steps), N games
(--num-envs), B minibatches of M rows, D observation entries, A action entries. Everything stored at
index t belongs to the action taken at t: `terminated[t]` and `truncated[t]` say how that action
ended the episode, if it did.
"""

import argparse
import csv
import functools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
from torch import nn

# ------------------------------------------------------------------------------------ arguments


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line naming the option, exit code 2."""

    def __init__(self, prog, description):
        super().__init__(prog, description=description, allow_abbrev=False)

    def error(self, message):
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


def add_common_arguments(parser, **defaults):
    """Add the options that all scripts of the family share, with a script's own `defaults`."""
    count, positive, coefficient = number(int, 1), number(float, 0, open_low=True), number(float, 0)
    natural, fraction, real = number(int, 0), number(float, 0, 1), number(float)

    def option(name, kind, default, text, **more):
        default = defaults.get(name[2:].replace("-", "_"), default)
        more |= {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        default_text = "" if default is None or kind is bool and not default else " (%(default)s)"
        group.add_argument(name, default=default, help=text + default_text, **more)

    group = parser.add_argument_group("run")
    option("--seed", number(int, 0, 2**63 - 1), 1, "seed of all generators")
    option("--device", str, "auto", "auto, cpu, cuda or mps; auto is cpu, best for small networks")
    option("--num-workers", natural, 0, "processes that step the games; 0: step them in this one")
    option("--log-dir", str, "runs", "folder that receives the run's own folder")
    option("--run-name", str, None, "name of the run's folder; default env__script__seed__time")
    option("--eval-every", natural, 0, "iterations between evaluations; 0: never")
    option("--eval-episodes", count, 16, "episodes of an evaluation")
    option("--save-every", natural, 50, "iterations between checkpoints; 0: only at the end")
    option("--resume", str, None, "continue this run; options beside it replace the run's")
    option("--eval", str, None, "evaluate this run's policy (its mode), print mean ± sd and stop")
    group.add_argument("--video", action="store_true", help="with --eval: also write video.mp4")
    group.add_argument("--quiet", action="store_true", help="print no status lines")

    group = parser.add_argument_group("sampling")
    option("--num-envs", count, 4, "N, games (actors) side by side; 4 to 64 usual")
    group = group.add_mutually_exclusive_group()
    option("--total-timesteps", count, None, "length of the run in steps of all games together")
    option("--num-iterations", count, None, "length of the run in iterations")

    group = parser.add_argument_group("network")
    option("--hidden", count, [64, 64], "widths of the tanh layers", nargs="+")
    option("--shared-net", bool, False, "policy and value function share the hidden layers")
    option("--init-log-std", real, 0.0, "log σ of a Gaussian policy at the start; -3 to 0 usual")

    group = parser.add_argument_group("PPO")
    option("--learning-rate", positive, 2.5e-4, "Adam's step size; 1e-5 to 1e-3 usual")
    option("--anneal-lr", bool, True, "lower the learning rate linearly to 0 over the run")
    option("--gamma", fraction, 0.99, "γ, discount per step; 0.9 to 0.9997 usual")
    option("--gae-lambda", fraction, 0.95, "λ of GAE, 0: low variance, 1: no bias; 0.9 to 1 usual")
    option("--num-minibatches", count, 4, "B, minibatches per epoch; divides the number of rows")
    option("--update-epochs", count, 4, "K, passes over the rollout; 3 to 30 usual")
    option("--norm-adv", bool, True, "normalise advantages to mean 0, deviation 1 per minibatch")
    option("--clip-coef", positive, 0.2, "ε, the ratio's gradient ends at 1 ± ε; 0.1 to 0.3 usual")
    option("--clip-vloss", bool, True, "clip the change of the value by ε too")
    option("--ent-coef", coefficient, 0.01, "c_e, weight of the entropy bonus; 0 to 0.01 usual")
    option("--vf-coef", coefficient, 0.5, "c_v, weight of the value loss; 0.5 to 1 usual")
    option("--max-grad-norm", positive, 0.5, "clip the gradient to this global norm")
    option("--target-kl", positive, None, "end an update when KL(π_old, π) is above; 0.01 to 0.05")


def parse_args(argv=None):
    """Parse and check the command line (default: the program's)."""
    parser = Parser("ppo.py", description="PPO for Gymnasium envs with vector observations.")
    parser.add_argument("--env", default="CartPole-v1", help="Gymnasium id, or module:id")
    add_common_arguments(parser)
    steps_help = "T, steps per game and iteration; 128 to 2048 usual (%(default)s)"
    parser.add_argument("--num-steps", type=number(int, 1), default=128, help=steps_help)
    args = parse_with_run(parser, argv)
    with option_error(parser, "--env"):
        env = gym.make(args.env)
        check_spaces(env.observation_space, env.action_space)
        env.close()
    check_rows(parser, args, args.num_envs * args.num_steps)
    check_normaliser(parser, args, args.num_envs * args.num_steps)
    if args.num_iterations is None:
        total_timesteps = args.total_timesteps or 500_000
        args.num_iterations = max(1, total_timesteps // (args.num_envs * args.num_steps))
    check_checkpoint(parser, args)
    return args


def parse_with_run(parser, argv):
    """Parse argv; with --resume or --eval, that run's options are the defaults."""
    args = parser.parse_args(argv)
    if args.resume and args.eval:
        parser.error("argument --resume: not allowed with argument --eval")
    if args.video and not args.eval:
        parser.error("argument --video: only with --eval")
    run_dir, option = args.resume or args.eval, "--resume" if args.resume else "--eval"
    if run_dir:
        with option_error(parser, option):
            options = json.loads((Path(run_dir) / "config.json").read_text())["options"]
            load_checkpoint(run_dir, "cpu")
            for name in ("resume", "eval", "video", "quiet", "log_dir", "run_name"):
                options.pop(name)
        parser.set_defaults(**options)
        given = parser.parse_args(argv)
        if given.total_timesteps != options["total_timesteps"]:
            given.num_iterations = None  # that of the run followed from its --total-timesteps
        args = given
    if args.device not in ("auto", "cpu", "cuda", "mps"):
        parser.error(f"argument --device: '{args.device}' is none of auto, cpu, cuda, mps")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: there is no cuda device here, use cpu")
    if args.device == "mps" and not torch.backends.mps.is_available():
        parser.error("argument --device: there is no mps device here, use cpu")
    if run_dir:
        return args
    with option_error(parser, "--log-dir"):
        Path(args.log_dir).mkdir(parents=True, exist_ok=True)
        if not os.access(args.log_dir, os.W_OK):
            raise OSError(f"no permission to write to '{args.log_dir}'")
    if args.run_name and (Path(args.log_dir) / folder_name(args.run_name)).exists():
        parser.error(f"argument --run-name: '{args.run_name}' is there already, choose another")
    return args


def check_checkpoint(parser, args):
    """Refuse options beside --resume or --eval whose network is not that of the checkpoint."""
    option, run_dir = ("--resume", args.resume) if args.resume else ("--eval", args.eval)
    if run_dir:
        with option_error(parser, option):
            weights = load_checkpoint(run_dir)["model"]
            shapes = {name: weight.shape for name, weight in weights.items()}
            model = make_model(args).state_dict()
            if shapes != {name: weight.shape for name, weight in model.items()}:
                raise ValueError(f"the network in {run_dir} is not that of the options")


def check_rows(parser, args, num_rows):
    """Refuse a number of minibatches that does not divide the rows."""
    B = args.num_minibatches
    if num_rows % B:
        parser.error(f"argument --num-minibatches: {B} does not divide the {num_rows} rows")


def check_normaliser(parser, args, num_rows):
    """Refuse minibatches of a single row, whose advantages have no deviation."""
    if args.norm_adv and num_rows == args.num_minibatches:
        parser.error("argument --num-minibatches: --norm-adv needs 2 rows in each minibatch")


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
    if not isinstance(observation_space, gym.spaces.Box) or len(observation_space.shape) != 1:
        raise ValueError(
            f"observation space {observation_space} is not supported, only Box vectors"
        )
    discrete = isinstance(action_space, gym.spaces.Discrete) and action_space.start == 0
    vector = isinstance(action_space, gym.spaces.Box) and len(action_space.shape) == 1
    if not discrete and not vector:
        supported = "only Discrete (from 0) and Box vectors"
        raise ValueError(f"action space {action_space} is not supported, {supported}")


# ------------------------------------------------------------------------------------ game


class Game:
    """One Gymnasium env that resets itself and keeps the return and length of its episode."""

    def __init__(self, env_id, seed, **options):
        self.name, self.seed = env_id, seed
        self.env = gym.make(env_id, **options)
        space = self.env.action_space
        self.bounds = (space.low, space.high) if isinstance(space, gym.spaces.Box) else None

    def reset(self, seed=None):
        """Start an episode, of the game's current random stream or of a new seed. Return (D,)."""
        self.episode_return, self.episode_length = 0.0, 0
        obs, _ = self.env.reset(seed=seed)
        return obs

    def clip(self, action):
        """Return a Box action within its bounds: on the way to the env, not in log π(a|s)."""
        return action if self.bounds is None else np.clip(action, *self.bounds)

    def step(self, action):
        """Take one step. Returns what `record` does."""
        return self.record(*self.env.step(self.clip(action))[:4])

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


class Games:
    """The games of one worker: rows `rows` of all N, stepped one after the other.

    They read their actions from, and write what comes of them to, the arrays that all share.
    """

    def __init__(self, env_id, seeds, rows, arrays):
        self.arrays = {name: array[rows] for name, array in arrays.items()}
        self.games = [Game(env_id, int(seed)) for seed in seeds[rows]]

    def reset(self):
        """Start all games from their seeds."""
        for i, game in enumerate(self.games):
            with named(game, "reset"):
                self.arrays["obs"][i] = game.reset(game.seed)

    def step(self):
        """Step all games once."""
        outputs = [self.arrays[name] for name in STEP_OUTPUTS]
        for i, game in enumerate(self.games):
            with named(game, "step"):
                for array, value in zip(outputs, game.step(self.arrays["actions"][i]), strict=True):
                    array[i] = value

    def close(self):
        """Close all envs."""
        for game in self.games:
            game.env.close()


# The shared arrays that receive what Game.step returns, in its order.
STEP_OUTPUTS = (
    *("obs", "final_obs", "rewards", "terminated", "truncated"),
    *("episode_return", "episode_length"),
)


def array_layout(num_envs, observation_space, action_space):
    """Return {name: (shape, dtype)} of the arrays that main process and workers share."""
    N, D = num_envs, observation_space.shape
    return {
        "obs": ((N, *D), np.float32),
        "final_obs": ((N, *D), np.float32),
        "actions": ((N, *action_space.shape), action_space.dtype),
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
    except Exception as error:
        pipe.send(GameError(f"a worker failed: {first_line(error)}\n{traceback.format_exc()}"))


class WorkerPool:
    """N games in `num_workers` processes, or in this process with 0.

    `make_games(rows, arrays)` makes the games of one worker; its methods are the commands that
    `call` sends. Observations, actions, rewards and flags stay in `arrays`, which all processes
    share; only the command and a small answer go through the pipe.

    Raises GameError when a game raises or a worker dies.
    """

    def __init__(self, make_games, layout, num_envs, num_workers, start_method=None):
        # A fork shares the memory of all imported libraries, but is safe on Linux only.
        start_method = start_method or ("fork" if sys.platform == "linux" else "spawn")
        context = multiprocessing.get_context(start_method)
        buffers = {}
        for name, (shape, dtype) in layout.items():
            size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
            buffers[name] = context.RawArray("b", size), shape, dtype
        self.arrays = view(buffers)
        self.workers, self.games = [], None
        if num_workers == 0:
            self.games = make_games(slice(0, num_envs), self.arrays)
            return
        for share in np.array_split(np.arange(num_envs), min(num_workers, num_envs)):
            pipe, remote = context.Pipe()
            rows = slice(int(share[0]), int(share[-1]) + 1)
            arguments = (remote, make_games, rows, buffers)
            process = context.Process(target=worker_process, args=arguments, daemon=True)
            process.start()
            remote.close()
            self.workers.append((pipe, process))
        try:
            self.receive()
        except BaseException:  # one of them could not start
            self.close()
            raise

    def call(self, command, *arguments):
        """Have every worker carry out a command. Return the list of their answers."""
        if self.games is not None:
            return [getattr(self.games, command)(*arguments)]
        for pipe, _ in self.workers:
            with suppress(BrokenPipeError):  # receive reports a dead worker
                pipe.send((command, *arguments))
        return self.receive()

    def receive(self):
        """Return the answers of all workers; raise the first GameError among them."""
        answers = []
        for i, (pipe, process) in enumerate(self.workers):
            multiprocessing.connection.wait([pipe, process.sentinel])
            try:
                if not pipe.poll():
                    raise EOFError
                answers.append(pipe.recv())
            except (EOFError, ConnectionError):
                process.join()
                answers.append(GameError(f"worker {i} died with exit code {process.exitcode}"))
        for answer in answers:
            if isinstance(answer, GameError):
                raise answer
        return answers

    def close(self):
        """Close the games and end the processes, also those that do not answer."""
        if self.games is not None:
            self.games.close()
        for pipe, _ in self.workers:
            with suppress(OSError):
                pipe.send(("close",))
        for _, process in self.workers:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def check_finite(arrays, where):
    """Raise GameError if the games' step made an observation or reward that is no number."""
    for name in ("obs", "final_obs", "rewards"):
        if not np.isfinite(arrays[name]).all():
            game = int(np.argwhere(~np.isfinite(arrays[name]))[0][0])
            raise GameError(f"NaN or infinity in {name} of game {game} at {where}")


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

    def forward(self, h):
        """Features (M, F) → log-probabilities (M, n)."""
        return torch.log_softmax(self.logits(h), dim=-1)

    def noise(self, batch, generator):
        """Standard Gumbel noise, (batch, n)."""
        return -torch.empty(batch, self.n).exponential_(generator=generator).log()

    def sample(self, logp, noise):
        """Gumbel-max: the argmax of log-probability + Gumbel noise has the policy's law. (M,)"""
        return (logp + noise).argmax(dim=-1)

    def mode(self, logp):
        """The most probable action, (M,)."""
        return logp.argmax(dim=-1)

    def log_prob(self, logp, action):
        """log π(a|s), (M,)."""
        return logp.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self, logp):
        """H = −Σ π log π, (M,)."""
        return -(logp.exp() * logp).sum(dim=-1)


class Gaussian(nn.Module):
    """Policy head for Box(A): mean from the features, one free log σ per action entry."""

    def __init__(self, features, n, init_log_std):
        super().__init__()
        self.n = n
        self.mean = layer_init(nn.Linear(features, n), 0.01)
        self.log_std = nn.Parameter(torch.full((n,), init_log_std))

    def forward(self, h):
        """Features (M, F) → mean (M, A)."""
        return self.mean(h)

    def noise(self, batch, generator):
        """Standard normal noise, (batch, A)."""
        return torch.randn(batch, self.n, generator=generator)

    def sample(self, mean, noise):
        """a = μ + σ ε, (M, A)."""
        return mean + self.log_std.exp() * noise

    def mode(self, mean):
        """The most probable action, (M, A)."""
        return mean

    def log_prob(self, mean, action):
        """log π(a|s) = −½ Σ ((a − μ)/σ)² − Σ log σ − (A/2) log 2π, (M,)."""
        z = (action - mean) * torch.exp(-self.log_std)
        constant = self.log_std.sum() + 0.5 * self.n * math.log(2 * math.pi)
        return -0.5 * z.square().sum(dim=-1) - constant

    def entropy(self, mean):
        """H = Σ log σ + (A/2) log 2πe, (M,)."""
        constant = 0.5 * self.n * math.log(2 * math.pi * math.e)
        return (self.log_std.sum() + constant).expand(mean.shape[0])


class Model(nn.Module):
    """Policy and value function: tanh layers, orthogonal weights, a head for each."""

    def __init__(self, obs_dim, action_space, hidden, shared_net, init_log_std):
        super().__init__()
        self.actor = self.tanh_layers(obs_dim, hidden)
        self.critic = self.actor if shared_net else self.tanh_layers(obs_dim, hidden)
        if isinstance(action_space, gym.spaces.Discrete):
            self.head = Categorical(hidden[-1], int(action_space.n))
        else:
            self.head = Gaussian(hidden[-1], action_space.shape[0], init_log_std)
        self.value = layer_init(nn.Linear(hidden[-1], 1), 1.0)

    @staticmethod
    def tanh_layers(width, hidden):
        """Return the tanh layers of widths `hidden` over an input of `width` entries."""
        layers = []
        for previous, following in zip([width, *hidden], hidden, strict=False):
            layers += [layer_init(nn.Linear(previous, following)), nn.Tanh()]
        return nn.Sequential(*layers)

    def forward(self, obs):
        """Observations (M, D) → the policy's parameters pi (M, ·) for the head, values (M,)."""
        h = self.actor(obs)
        h_value = h if self.critic is self.actor else self.critic(obs)
        return self.head(h), self.value(h_value).squeeze(-1)


# ------------------------------------------------------------------------------------ rollout


@torch.no_grad()
def rollout(model, pool, num_steps, generator):
    """Take T steps in all N games with the current policy.

    Returns the buffer, tensors (T, N, ...): obs, actions, logprobs, values, next_values, rewards,
    terminated, truncated; and the (return, length) of the episodes that ended.
    """
    device, arrays = model.value.weight.device, pool.arrays
    buffer, episodes = defaultdict(list), []
    for t in range(num_steps):
        obs = torch.tensor(arrays["obs"], device=device)  # (N, D)
        pi, values = model(obs)
        noise = model.head.noise(len(obs), generator).to(device)
        actions = model.head.sample(pi, noise)
        arrays["actions"][:] = actions.cpu().numpy()
        pool.call("step")
        check_finite(arrays, f"step {t}")
        logprobs = model.head.log_prob(pi, actions)
        store(buffer, arrays, obs=obs, actions=actions, logprobs=logprobs, values=values)
        episodes += ended_episodes(arrays)
    return finish(model, buffer), episodes


def store(buffer, arrays, **tensors):
    """Append one step of all games to a buffer's lists, tensors (N, ...)."""
    for name in ("final_obs", "rewards", "terminated", "truncated"):
        tensors[name] = torch.tensor(arrays[name], device=tensors["obs"].device)
    for name, tensor in tensors.items():
        buffer[name].append(tensor)


def finish(model, buffer):
    """Stack a buffer's lists to tensors (T, N, ...) and add V(s_{t+1}), `next_values`."""
    buffer = {name: torch.stack(rows) for name, rows in buffer.items()}
    # Where step t led to, whatever came of the episode there: not the next episode's first state.
    _, buffer["next_values"] = model(buffer.pop("final_obs"))  # (T, N)
    return buffer


def ended_episodes(arrays):
    """Return (return, length) of the games whose episode ended with the last step."""
    ended = arrays["episode_length"] > 0
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
        advantage = deltas[t] + decay[t] * advantage
        advantages[t] = advantage
    return advantages


def make_batch(buffer, gamma, gae_lambda):
    """Add advantages and returns to a buffer and flatten it: (T, N, ...) → (T·N, ...)."""
    names = ("rewards", "values", "next_values", "terminated", "truncated")
    advantages = gae(*(buffer[name] for name in names), gamma, gae_lambda)
    columns = {name: buffer[name] for name in ("obs", "actions", "logprobs", "values")}
    columns |= {"advantages": advantages, "returns": advantages + buffer["values"]}
    return {name: column.flatten(0, 1) for name, column in columns.items()}


# ------------------------------------------------------------------------------------ losses


def losses(model, batch, clip_coef, clip_vloss):
    """PPO's loss terms, row by row.

    `batch` holds obs (M, D), actions (M, ...), logprobs, values, advantages, returns (M,). Returns
    pg_loss, v_loss, entropy and logratio = log r_t(θ), each (M,).
    """
    pi, values = model(batch["obs"])
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
    seen = []
    for _ in range(args.update_epochs):
        rows = torch.randperm(len(batch["obs"]), generator=generator)
        for mb_rows in rows.view(args.num_minibatches, -1):  # (B, M)
            mb = {name: column[mb_rows] for name, column in batch.items()}
            if args.norm_adv:
                advantages = mb["advantages"]
                mb["advantages"] = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            *terms, logratio = losses(model, mb, args.clip_coef, args.clip_vloss)
            terms = pg_loss, v_loss, entropy = [term.mean() for term in terms]
            # PPO, Eq. (9): loss = E[−L^CLIP + c_v ½ (V_θ − R)² − c_e H]
            loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy
            seen.append(torch.stack([*terms, *policy_change(logratio, args.clip_coef)]).detach())
            if args.target_kl is not None and seen[-1][3] > args.target_kl:
                return summary(seen)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            if not torch.isfinite(norm):  # before it reaches the weights
                raise GameError(f"loss {loss.item()}, its gradient is not finite: lower the rate?")
            optimizer.step()
    return summary(seen)


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
def evaluate(model, pool, arrays, max_steps=100_000):
    """Play one whole episode with the policy's mode in every game. Return the returns, (E,).

    Raises GameError if an episode takes more than `max_steps` steps.
    """
    device = model.value.weight.device
    pool.call("reset")
    returns = np.full(len(arrays["rewards"]), math.nan)
    for t in range(max_steps):
        pi, _ = model(torch.tensor(arrays["obs"], device=device))
        arrays["actions"][:] = model.head.mode(pi).cpu().numpy()
        pool.call("step")
        check_finite(arrays, f"step {t} of the evaluation")
        first = np.isnan(returns)
        returns[first] = arrays["episode_return"][first]
        if not np.isnan(returns).any():
            return returns
    raise GameError(f"evaluation: an episode has not ended after {max_steps} steps")


# ------------------------------------------------------------------------------------ run folder


class Logger:
    """Writes a run's folder: config.json, progress.csv, TensorBoard events; prints status lines."""

    def __init__(self, run_dir, args, columns, last_iteration=0, first_step=None):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, only training needs it

        self.columns, self.args, self.last_iteration = columns, args, last_iteration
        self.start, self.rows = time.perf_counter(), []
        config = {"options": vars(args), "command": sys.argv, "versions": versions()}
        (run_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        self.events = SummaryWriter(str(run_dir), purge_step=first_step)
        path = run_dir / "progress.csv"
        rows = list(csv.DictReader(path.open())) if last_iteration else []
        self.csv = path.open("w", newline="")
        self.writer = csv.DictWriter(self.csv, columns)
        self.writer.writeheader()
        self.writer.writerows(row for row in rows if int(row["iteration"]) <= last_iteration)
        self.csv.flush()

    def write(self, row, **scalars):
        """Log an iteration: `row` to progress.csv and TensorBoard, {tag: value} to the latter."""
        self.rows.append(row)
        self.writer.writerow({name: row.get(name) for name in self.columns})
        self.csv.flush()
        for name in ("episodic_return", "episodic_length", "eval_return", "learning_rate", "sps"):
            scalars[f"charts/{'SPS' if name == 'sps' else name}"] = row.get(name)
        for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"):
            scalars[f"losses/{name}"] = row.get(name)
        scalars["losses/explained_variance"] = row.get("explained_variance")
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

    def close(self):
        """Close the files."""
        self.csv.close()
        self.events.close()


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
    """Create and return the run's folder; raises FileExistsError if --run-name is taken."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = args.run_name or f"{args.env}__{script}__{args.seed}__{stamp}"
    run_dir = Path(args.log_dir) / folder_name(name)
    while run_dir.exists() and not args.run_name:  # another run began in the same second
        run_dir = run_dir.with_name(run_dir.name + "_")
    run_dir.mkdir()
    return run_dir


def save_checkpoint(run_dir, model, optimizer, generator, counters):
    """Write RUN_DIR/checkpoint.pt atomically: whoever dies here leaves the old one whole."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"generator": generator.get_state(), "counters": counters}
    partial = run_dir / "checkpoint.partial"
    torch.save(state, partial)
    os.replace(partial, run_dir / "checkpoint.pt")


def load_checkpoint(run_dir, device="cpu"):
    """Read RUN_DIR/checkpoint.pt: tensors and plain values, no code runs from the file."""
    return torch.load(Path(run_dir) / "checkpoint.pt", map_location=device, weights_only=True)


def restore(run_dir, model, optimizer, generator):
    """Set model, optimizer and generator to their state in the checkpoint. Return its counters."""
    state = load_checkpoint(run_dir, model.value.weight.device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    generator.set_state(state["generator"].cpu())
    return state["counters"]


@contextmanager
def saved_at_the_end(save):
    """Save when the block ends, also by a GameError: the last iteration is complete then."""
    try:
        yield
    except GameError:
        save()
        raise
    save()


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
            raise KeyboardInterrupt
        self.signal = signum
        print("stopping after this iteration; once more to stop now", file=sys.stderr, flush=True)

    def __exit__(self, *_):
        for signum, handler in self.handlers.items():
            signal.signal(signum, handler)


# ------------------------------------------------------------------------------------ train

COLUMNS = (
    "iteration global_step wall_seconds sps episodic_return episodic_length eval_return "
    "policy_loss value_loss entropy approx_kl clipfrac explained_variance learning_rate"
).split()


def make_model(args):
    """Return the Model for the env's spaces, its weights drawn from torch's global generator."""
    env = gym.make(args.env)
    obs_dim, action_space = env.observation_space.shape[0], env.action_space
    env.close()
    model = Model(obs_dim, action_space, args.hidden, args.shared_net, args.init_log_std)
    return model.to("cpu" if args.device == "auto" else args.device)


EVAL_SEED = 10_000  # evaluation games have their own seeds, the same in every run


def make_eval_pool(args):
    """Return the pool of evaluation games, stepped in this process."""
    return make_pool(args, EVAL_SEED + np.arange(args.eval_episodes), num_workers=0)


def make_pool(args, seeds, num_workers):
    """Return the pool of one game per seed."""
    env = gym.make(args.env)
    layout = array_layout(len(seeds), env.observation_space, env.action_space)
    env.close()
    games = functools.partial(Games, args.env, seeds)
    return WorkerPool(games, layout, len(seeds), num_workers)


def train(args):
    """Train as `args` say. Returns a namespace: run_dir, model, optimizer, history (logged rows),
    signal (the one that stopped the run, or None).

    Raises GameError when a game or a worker fails, after saving the last complete iteration.
    """
    torch.set_num_threads(1)  # more threads only slow a small network down
    torch.manual_seed(args.seed)
    model = make_model(args)
    optimizer = torch.optim.Adam(model.parameters(), args.learning_rate, eps=1e-5, fused=True)
    generator = torch.Generator().manual_seed(args.seed)
    counters = {"iteration": 0, "global_step": 0, "wall_seconds": 0.0}
    run_dir = Path(args.resume) if args.resume else make_run_dir(args, "ppo")
    if args.resume:
        counters = restore(run_dir, model, optimizer, generator)
    # A resumed run starts new episodes, so their seeds depend on where it starts.
    seeds = np.random.SeedSequence([args.seed, counters["iteration"]]).generate_state(args.num_envs)
    recent = deque(maxlen=100)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        pool = stack.enter_context(closing(make_pool(args, seeds, args.num_workers)))
        eval_pool = stack.enter_context(closing(make_eval_pool(args)))
        steps = counters["iteration"], counters["global_step"] + 1
        logger = stack.enter_context(closing(Logger(run_dir, args, COLUMNS, *steps)))
        save = functools.partial(save_checkpoint, run_dir, model, optimizer, generator, counters)
        stack.enter_context(saved_at_the_end(save))
        pool.call("reset")
        check_finite(pool.arrays, "the reset")
        if args.eval_every and counters["iteration"] == 0:
            logger.write(
                counters | {"eval_return": evaluate(model, eval_pool, eval_pool.arrays).mean()}
            )
        while counters["iteration"] < args.num_iterations and stop.signal is None:
            started = time.perf_counter()
            progress = counters["iteration"] / args.num_iterations if args.anneal_lr else 0
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - progress)
            buffer, episodes = rollout(model, pool, args.num_steps, generator)
            batch = make_batch(buffer, args.gamma, args.gae_lambda)
            row = update(model, optimizer, batch, args, generator)

            seconds = time.perf_counter() - started
            counters["iteration"] += 1
            counters["global_step"] += len(batch["obs"])
            counters["wall_seconds"] += seconds
            recent += episodes
            row |= counters | episode_means(recent) | {"sps": round(len(batch["obs"]) / seconds)}
            row["explained_variance"] = explained_variance(batch["values"], batch["returns"])
            row["learning_rate"] = optimizer.param_groups[0]["lr"]
            if args.save_every and counters["iteration"] % args.save_every == 0:
                save()
            last = counters["iteration"] == args.num_iterations
            if args.eval_every and (last or counters["iteration"] % args.eval_every == 0):
                row["eval_return"] = evaluate(model, eval_pool, eval_pool.arrays).mean()
            logger.write(row)
    if not args.quiet:
        print(f"run folder: {run_dir}")
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
    with closing(make_eval_pool(args)) as pool:
        returns = evaluate(model, pool, pool.arrays)
    print(f"return {returns.mean():.4f} ± {returns.std():.4f} over {len(returns)} episodes")
    if args.video:
        try:
            game = Game(args.env, EVAL_SEED, render_mode="rgb_array")
            print(f"video: {record_video(Path(args.eval) / 'video.mp4', model, game)}")
        except Exception as error:
            problem = f"argument --video: no pictures of {args.env}: {first_line(error)}"
            raise GameError(problem) from None
    return returns


@torch.no_grad()
def record_video(path, model, game, max_steps=10_000):
    """Play one episode with the policy's mode, write its pictures to `path`. Returns the path."""
    import cv2

    env, pictures, ended = game.env, [], False
    obs, _ = env.reset(seed=game.seed)
    with closing(env), named(game, "render"):
        pictures.append(env.render()[..., ::-1])  # OpenCV wants BGR
        while not ended and len(pictures) < max_steps:
            obs = torch.tensor(obs, dtype=torch.float32, device=model.value.weight.device)
            action = model.head.mode(model(obs.unsqueeze(0))[0])[0].cpu().numpy()
            obs, _, terminated, truncated, _ = env.step(game.clip(action))
            ended = terminated or truncated
            pictures.append(env.render()[..., ::-1])
    height, width, _ = pictures[0].shape
    fps = env.metadata.get("render_fps", 30)
    video = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), fps, (width, height))
    for picture in pictures:
        video.write(np.ascontiguousarray(picture))
    video.release()
    return path


def main():
    """Run the command line. Returns the exit code."""
    args = parse_args()
    try:
        result = evaluate_run(args) if args.eval else train(args)
    except GameError as error:
        print(f"ppo.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    stopped_by = getattr(result, "signal", None)
    return 128 + stopped_by if stopped_by else 0


if __name__ == "__main__":
    sys.exit(main())
