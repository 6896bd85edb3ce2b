"""Environments for the tests of ppo.py's options: Gymnasium ids `envs_tricks:<id>`."""

import gymnasium as gym
import numpy as np

ACTIONS = {
    "discrete": gym.spaces.Discrete(3),
    "box": gym.spaces.Box(-1, 1, (2,), np.float32),
}


class Noise(gym.Env):
    """Random observations, rewards that depend on the action, ends of both kinds at random."""

    def __init__(self, action="discrete"):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = ACTIONS[action]

    def psi(self):
        return (self.np_random.normal(size=3) * (1, 2, 0.5) + (0, 3, -2)).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.psi(), {}

    def step(self, action):
        reward = float(self.np_random.normal() + np.sum(action) + 5)
        terminated, truncated = self.np_random.random(2) < 0.15
        return self.psi(), reward, bool(terminated), bool(truncated), {}


for _name, _action in {"Noise-v0": "discrete", "NoiseBox-v0": "box"}.items():
    if _name not in gym.registry:
        _options = {"kwargs": {"action": _action}, "disable_env_checker": True}
        gym.register(_name, entry_point=Noise, **_options)
