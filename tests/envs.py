"""Small environments for the tests: Gymnasium ids `envs:<id>`, simulations with levels `envs:make`.

They are a module of their own so that worker processes and subprocesses can import them too.
"""

import functools
import os
import signal
from contextlib import suppress

import gymnasium as gym
import numpy as np

SPACES = {
    "box": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "four": gym.spaces.Box(-np.inf, np.inf, (4,), np.float32),
    "dict": gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,)), "b": gym.spaces.Discrete(2)}),
    "image": gym.spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "discrete": gym.spaces.Discrete(2),
    "from_one": gym.spaces.Discrete(2, start=1),
    "binary": gym.spaces.MultiBinary(3),
    "half": gym.spaces.Box(-0.5, 0.5, (3,), np.float32),
    "matrix": gym.spaces.Box(-0.5, 0.5, (2, 3), np.float32),
    "multi": gym.spaces.MultiDiscrete([3, 2, 4], start=[1, -2, 5]),
    "integers": gym.spaces.Box(0, 9, (2,), np.int64),
    "many_integers": gym.spaces.Box(np.arange(99), 99, dtype=np.int64),  # its text has many lines
    "text": gym.spaces.Text(3),
    "tuple": gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Discrete(3)]),
    "sequence": gym.spaces.Sequence(gym.spaces.Discrete(2)),
    "nested": gym.spaces.Dict({"a": gym.spaces.Sequence(gym.spaces.Box(-1, 1, (2,)))}),
    "graph": gym.spaces.Graph(gym.spaces.Box(-1, 1, (2,)), None),
    "empty": gym.spaces.Dict({}),
}


class Scripted(gym.Env):
    """Observation (episode, step), reward 10 · episode + step; episodes end as `ends` say."""

    def __init__(self, ends=((1000, "terminated"),), obs="box", action="discrete"):
        self.ends, self.actions, self.episode = ends, [], -1
        self.observation_space, self.action_space = SPACES[obs], SPACES[action]

    def psi(self):
        obs = np.zeros(self.observation_space.shape or 2, dtype=np.float32)
        obs[:2] = self.episode, self.t
        return obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.psi(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action} is not in {self.action_space}"
        self.actions.append(np.array(action))
        self.t += 1
        length, how = self.ends[self.episode % len(self.ends)]
        terminated = self.t == length and how in ("terminated", "both")
        truncated = self.t == length and how in ("truncated", "both")
        return self.psi(), float(10 * self.episode + self.t), terminated, truncated, {}


class Trouble(Scripted):
    """An env whose `where` goes wrong: step, reward and observation at the 5th step of an episode,
    the first observation only of its first episode, psi() only between map_from and step; resets
    with a seed (those of a pool) or all of them."""

    def __init__(self, where, level=1, **kwargs):
        super().__init__(((7, "terminated"),), **kwargs)
        self.where, self.mapped = where, False

    def map_from(self, other):
        assert type(self) is type(other), "the two levels come from different modules"
        self.episode, self.t, self.mapped = other.episode, other.t, True

    def psi(self):
        bad = self.where == "nan_psi" and self.mapped
        bad |= self.where == "nan_reset" and self.episode == self.t == 0
        return super().psi() * (np.nan if bad else 1)

    def reset(self, *, seed=None, options=None):
        self.mapped = False
        obs, info = super().reset(seed=seed)
        if self.where == "reset" and seed is not None or self.where == "every_reset":
            raise RuntimeError("broken on purpose")
        return obs, info

    def step(self, action):
        self.mapped = False
        obs, reward, *ends = super().step(action)
        if self.t == 5 and self.where == "step":
            raise RuntimeError("broken on purpose")
        if self.t == 5 and self.where == "nan_reward":
            reward = np.nan
        if self.t == 5 and self.where == "huge_reward":  # its square is infinite in float32
            reward = -1e25
        if self.t == 5 and self.where == "nan_obs":
            obs = obs + np.inf
        return obs, reward, *ends


class Line(gym.Env):
    """Reach 0 on a line of 2^level cells with noise: a simulation that is quick on every level."""

    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, level, obs_dim=2):
        self.level = level
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (obs_dim,), np.float32)

    def psi(self):
        return np.round(self.state * 2**self.level).astype(np.float32) / 2**self.level

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state, self.t = self.np_random.normal(size=2), 0
        return self.psi(), {}

    def step(self, action):
        self.state, self.t = self.state + 0.1 * np.asarray(action), self.t + 1
        return self.psi(), -float(np.square(self.state).sum()), False, self.t == 10, {}

    def get_state(self):
        return self.state, self.t, self.np_random

    def set_state(self, state):
        self.state, self.t, self.np_random = state


class Levels(Line):
    """The line, whose state can be taken over from another level."""

    def map_from(self, other):
        self.state, self.t = other.state.copy(), other.t


class Secret(gym.Env):
    """An env that also draws from a generator that nobody seeds: it cannot be replayed."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def observe(self):
        return np.float32([self.first, np.random.default_rng().normal()])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.first, self.t = self.np_random.normal(), 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, False, self.t == 50, {}


def make_wrapped(**options):
    """Return Pendulum in wrappers: a time limit, another scale of actions and rewards."""
    env = gym.make("Pendulum-v1", max_episode_steps=30, **options)
    env = gym.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))
    return gym.wrappers.TransformReward(env, lambda reward: reward / 10)


def fail_now_and_then():
    """Fail as the environment variable FLAKY, "how:times:folder", says: only the first times.

    Returns NaN or 0, to be added to the observation.
    """
    how, times, folder = os.environ["FLAKY"].split(":", 2)
    for i in range(int(times)):
        with suppress(FileExistsError):
            os.close(os.open(f"{folder}/{i}", os.O_CREAT | os.O_EXCL))
            if how == "raise":
                raise RuntimeError("broken on purpose")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            return np.nan
    return 0


class Flaky(Levels):
    """Levels whose 5th step fails now and then."""

    def step(self, action):
        failure = fail_now_and_then() if self.t == 4 else 0
        obs, *results = super().step(action)
        return obs + np.float32(failure), *results


def make_flaky(level, evaluation=False):
    """Return a simulation that fails now and then on level 2."""
    return (Flaky if level == 2 else Levels)(level)


def make_flaky_evaluation(level, evaluation=False):
    """Return a simulation that fails in evaluations."""
    return (Flaky if evaluation else Levels)(level)


def make(level, evaluation=False):
    """Return the simulation that works."""
    return Levels(level)


def make_line(level, evaluation=False):
    """Return a simulation without map_from that can tell its state."""
    return Line(level)


def make_cartpole(level, evaluation=False):
    """Return a simulation without map_from."""
    return gym.make("CartPole-v1")


def make_other_spaces(level, evaluation=False):
    """Return a simulation whose observation space is another one on every level."""
    return Levels(level, obs_dim=level)


def make_spaces(level, evaluation=False, **spaces):
    """Return a simulation with these spaces."""
    return Scripted(**spaces)


def make_trouble(level, evaluation=False, where=None):
    """Return a simulation that goes wrong on level 2."""
    return Trouble(where if level == 2 else None, level)


TROUBLES = ("step", "reset", "every_reset", "nan_reward", "huge_reward", "nan_obs", "nan_reset")
TROUBLES += ("nan_psi",)
BAD_SPACES = {  # for both scripts
    "sequence": {"obs": "sequence"},
    "nested": {"obs": "nested"},
    "graph": {"obs": "graph"},
    "empty": {"obs": "empty"},
    "integers": {"action": "integers"},
    "many_integers": {"action": "many_integers"},
    "dict_action": {"action": "dict"},
    "tuple_action": {"action": "tuple"},
    "text_action": {"action": "text"},
}
FLATTENED = {name: {"obs": name} for name in ("dict", "image", "text")}  # bad for ppo_multilevel.py
SIMPLE_SPACES = {  # good for both scripts
    "binary": {"action": "binary"},
    "from_one": {"action": "from_one"},
    "multi": {"action": "multi"},
    "matrix": {"action": "matrix"},
}
for _where in TROUBLES:  # envs:make_step, ...
    globals()[f"make_{_where}"] = functools.partial(make_trouble, where=_where)
for _name, _spaces in (BAD_SPACES | FLATTENED | SIMPLE_SPACES).items():  # envs:make_dict, ...
    globals()[f"make_{_name}"] = functools.partial(make_spaces, **_spaces)

_scripted = {"ends": ((2, "truncated"), (3, "terminated"), (2, "both"))}
_registry = {"Scripted-v0": (Scripted, _scripted)}
_registry["Quick-v0"] = Scripted, {"ends": ((3, "terminated"),), "obs": "four"}
_registry["Flaky-v0"] = Flaky, {"level": 20}  # so fine that no two starts are alike
_registry["Line-v0"] = Line, {"level": 20}
_registry["Secret-v0"] = Secret, {}
_registry["Rescaled-v0"] = make_wrapped, {}
_registry["ScriptedBox-v0"] = Scripted, _scripted | {"action": "half"}
for _where in TROUBLES:  # envs:Trouble-step-v0, ...
    _registry[f"Trouble-{_where}-v0"] = Trouble, {"where": _where}
for _name, _spaces in BAD_SPACES.items():  # envs:Spaces-dict-v0, ...
    _registry[f"Spaces-{_name}-v0"] = Scripted, _spaces
for _name, (_class, _kwargs) in _registry.items():
    if _name not in gym.registry:
        gym.register(_name, entry_point=_class, kwargs=_kwargs, disable_env_checker=True)
