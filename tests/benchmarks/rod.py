"""Heat in a rod, random starts, long episodes, no fields: --env tests/benchmarks/rod.py:make

It is the README's simulation with longer episodes, and a `step_batch`.
"""

import gymnasium as gym
import numpy as np


class Rod(gym.Env):
    """Heat in a rod of 8 · 2^level cells with cold ends; four heaters shall hold it at 1."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (8,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (4,), np.float32)

    def __init__(self, level):
        self.n = 8 * 2**level

    def psi(self):
        """Return the mean heat of eight parts of the rod."""
        return self.heat.reshape(8, -1).mean(axis=1).astype(np.float32)

    def phi(self, action):
        """Return the source of each cell."""
        return np.repeat(20 * (1 + action), self.n // 4)

    def map_from(self, other):
        """Take over the heat of the rod on another level."""
        fine = np.repeat(other.heat, max(1, self.n // other.n))
        self.heat, self.t = fine.reshape(self.n, -1).mean(axis=1), other.t

    def reset(self, *, seed=None, options=None):
        """Start with eight random temperatures."""
        super().reset(seed=seed)
        self.heat, self.t = np.repeat(self.np_random.random(8), self.n // 8), 0
        return self.psi(), {}

    def step(self, action):
        """Take one step: 0.004 time units."""
        results = self.step_batch([self], np.asarray(action)[np.newaxis])
        return *(column[0] for column in results), {}

    @staticmethod
    def step_batch(envs, actions):
        """Step several rods by explicit Euler."""
        n, heat = envs[0].n, np.stack([env.heat for env in envs])
        source = np.stack([env.phi(action) for env, action in zip(envs, actions)])
        padded = np.zeros((len(envs), n + 2))
        for _ in range(n**2 // 50):
            padded[:, 1:-1] = heat
            curvature = padded[:, 2:] - 2 * heat + padded[:, :-2]
            heat = heat + 0.2 * curvature + 0.2 / n**2 * source
        for env, row in zip(envs, heat):
            env.heat, env.t = row, env.t + 1
        rewards = -np.square(heat - 1).mean(axis=1)
        truncated = np.array([env.t == 100 for env in envs])
        return np.stack([env.psi() for env in envs]), rewards, np.zeros(len(envs), bool), truncated


def make(level, evaluation=False):
    """Return the rod of a level, 1 to 5: 16 to 256 cells."""
    return Rod(level)
