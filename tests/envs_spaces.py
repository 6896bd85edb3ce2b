"""Environments of all spaces and with action masks: Gymnasium ids `envs_spaces:<id>`."""

import copy

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

ACTIONS = {
    "zero": Discrete(4),
    "five": Discrete(4, start=5),
    "multi": MultiDiscrete([3, 2, 4]),
    "multi_start": MultiDiscrete([3, 2, 4], start=[1, -2, 5]),
    "table": MultiDiscrete([[3, 2], [2, 4]]),
    "unsigned": MultiDiscrete([3, 2], dtype=np.uint16),
    "binary": MultiBinary(3),
    "square": MultiBinary((2, 2)),
    "vector": Box(-0.5, 0.5, (2,), np.float32),
    "matrix": Box(-0.5, 0.5, (2, 3), np.float32),
    "number": Box(-0.5, 0.5, (), np.float32),
    "double": Box(-0.1, 0.3, (2,), np.float64),
    "short": Box(-0.5, 0.5, (2,), np.float16),
}
OPTIONS = {  # of each choice
    "zero": [4],
    "five": [4],
    "multi": [3, 2, 4],
    "multi_start": [3, 2, 4],
    "table": [3, 2, 2, 4],
    "binary": [2, 2, 2],
    "square": [2, 2, 2, 2],
}
OBSERVATIONS = {
    "vector": Box(-1, 1, (3,), np.float32),
    "matrix": Box(-1, 1, (2, 3), np.float32),
    "image": Box(0, 255, (4, 4, 3), np.uint8),
    "one_hot": Discrete(4, start=3),
    "one_hots": MultiDiscrete([3, 2]),
    "flags": MultiBinary((2, 2)),
    "text": Text(3, charset="01"),
    "dict": Dict({"a": Box(-1, 1, (2,), np.float32), "b": Discrete(3)}),
    "tuple": Tuple([Discrete(2), Box(-9, 9, (2, 2), np.float64)]),
    "nested": Dict({"a": Tuple([Discrete(2), Discrete(3)]), "b": Dict({"c": MultiBinary(2)})}),
}


class Sampled(gym.Env):
    """Random observations, an error for an action outside the space; episodes of 3 steps.

    It keeps all observations in `raw` and all actions in `actions`.
    """

    def __init__(self, obs="vector", action="zero"):
        # Each env has its own: a space has a generator.
        self.observation_space = copy.deepcopy(OBSERVATIONS.get(obs))
        self.action_space = copy.deepcopy(ACTIONS[action])
        self.raw, self.actions = [], []

    def psi(self):
        self.raw.append(self.observation_space.sample())
        return self.raw[-1]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.psi(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action} is not in {self.action_space}"
        self.actions.append(action)
        self.t += 1
        return self.psi(), float(np.sum(action)), self.t == 3, False, {}


class Masked(Sampled):
    """The observation is the mask, random flags for all options; an error for a forbidden action.

    The mask is in info: as one array ("info"), one per choice ("parts"), one of the action's shape
    with the flags as its last axis ("shaped"), or as a list; or it comes from a "method". Or it
    goes wrong: "empty" allows nothing in one choice at an episode's second step, "empty_reset" at
    its start; "forgotten" is in the reset's info only; "short", "long" and "single" have not as
    many flags as there are options.
    """

    def __init__(self, action, where):
        super().__init__(action=action)
        self.where, self.options = where, OPTIONS[action]
        self.starts = np.cumsum([0, *self.options[:-1]])
        self.observation_space = Box(0, 1, (sum(self.options),), np.float32)
        if where == "method":
            self.action_masks = lambda: self.flags

    def psi(self):
        self.flags = self.np_random.random(sum(self.options)) < 0.3
        for start, n in zip(self.starts, self.options):
            self.flags[start + self.np_random.integers(n)] = True
        if self.where == "empty" and self.t == 1 or self.where == "empty_reset":
            self.flags[-self.options[-1] :] = False
        self.raw.append(self.flags)
        return self.flags.astype(np.float32)

    def mask(self):
        flags = self.flags
        if self.where == "shaped":
            return flags.reshape(*self.action_space.shape, -1)
        masks = {"parts": tuple(np.split(flags, self.starts[1:])), "list": flags.tolist()}
        masks |= {"short": flags[:-1], "long": np.append(flags, True), "single": flags[:1] | True}
        return masks.get(self.where, flags.astype(np.int8))

    def info(self):
        return {} if self.where == "method" else {"action_mask": self.mask()}

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], self.info()

    def step(self, action):
        chosen = np.ravel(action - getattr(self.action_space, "start", 0)) + self.starts
        if not self.flags[chosen].all():
            raise ValueError(f"action {np.ravel(action)} is forbidden")
        return *super().step(action)[:4], {} if self.where == "forgotten" else self.info()


# envs_spaces:Action-zero-v0, envs_spaces:Obs-vector-v0, envs_spaces:Masked-zero-info-v0, ...
_registry = {f"Action-{name}": (Sampled, {"action": name}) for name in ACTIONS}
_registry |= {f"Obs-{name}": (Sampled, {"obs": name}) for name in OBSERVATIONS}
MASKS = (
    "zero-info five-method zero-list multi-info multi-parts multi_start-method multi_start-parts "
    "table-info table-parts binary-info binary-shaped square-method square-shaped"
).split()
BAD_MASKS = (  # from the start
    "multi-empty_reset zero-short zero-long zero-single binary-short binary-long binary-single"
).split()
for _name in MASKS + BAD_MASKS + ["multi-empty", "zero-forgotten"]:
    _registry[f"Masked-{_name}"] = Masked, dict(zip(("action", "where"), _name.split("-")))
for _name, (_class, _kwargs) in _registry.items():
    if f"{_name}-v0" not in gym.registry:
        gym.register(f"{_name}-v0", _class, kwargs=_kwargs, disable_env_checker=True)
