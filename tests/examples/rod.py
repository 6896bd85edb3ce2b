"""Heat in a rod, the simulation of the README's section "Your own simulation".

    python ppo_multilevel.py --env tests/examples/rod.py:Rod --levels 1 2 3 --analyse
    python ppo_multilevel.py --env tests/examples/rod.py:Rod --levels 1 2 3

The first command takes a minute and prints which levels pay. The second trains, for five minutes or
more.

Physics
    Four heaters shall hold a rod with cold ends at the temperature 1:

    ∂T/∂t = ∂²T/∂x² + q(x, t),  0 < x < 1,  T = 0 at both ends

    T has the wanted temperature as its unit, x the rod's length L, and t the time L²/α, where α is
    the thermal diffusivity [m²/s]. Each heater warms a quarter of the rod with q from 0 to 40. An
    episode has 20 control steps of about 0.004 time units. It starts with eight random
    temperatures from 0 to 1, the same ones on all levels. The reward is minus the mean of
    (T − 1)² over the rod.
"""

import gymnasium as gym
import numpy as np


class Rod(gym.Env):
    """Heat in a rod of 8 · 2^level cells with cold ends; four heaters shall hold it at 1."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (8,), np.float32)  # the same on all levels
    action_space = gym.spaces.Box(-1, 1, (4,), np.float32)

    def __init__(self, level):
        self.n = 8 * 2**level

    def reset(self, *, seed=None, options=None):
        """Start with eight random temperatures."""
        super().reset(seed=seed)
        self.heat = np.repeat(self.np_random.random(8), self.n // 8)
        self.t = 0
        return self.psi(), {}

    def step(self, action):
        """Heat for about 0.004 time units. Returns the state after them."""
        power = np.repeat(20 * (1 + action), self.n // 4)
        for _ in range(self.n**2 // 50):  # explicit Euler: 20 control steps are 0.08 time units
            curvature = self.n**2 * np.diff(np.pad(self.heat, 1), 2)
            self.heat = self.heat + 0.2 / self.n**2 * (curvature + power)
        self.t += 1

        reward = -float(np.square(self.heat - 1).mean())
        terminated = False
        truncated = self.t == 20
        return self.psi(), reward, terminated, truncated, {}

    def psi(self):
        """Return the observation of the state: the mean temperature of each eighth of the rod."""
        return self.heat.reshape(8, -1).mean(axis=1).astype(np.float32)

    def map_from(self, fine):
        """Take over the state of a rod with as many cells or more, as means of its cells."""
        self.heat = fine.heat.reshape(self.n, -1).mean(axis=1)
        self.t = fine.t


def thermostat(obs):
    """Heat where the rod is colder than 1: a rule to compare a policy with, see use_policy.py."""
    temperatures = obs.reshape(4, 2).mean(axis=1)  # of the rod above each heater
    return np.clip(20 * (1 - temperatures), -1, 1)
