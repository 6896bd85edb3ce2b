"""CartPole without its velocities, `hidden:CartPoleHidden-v0`: a task that needs a memory."""

import gymnasium as gym
import numpy as np


class CartPoleHidden(gym.ObservationWrapper):
    """CartPole-v1 whose observation is the cart's position and the pole's angle only."""

    def __init__(self, **options):
        super().__init__(gym.make("CartPole-v1", **options).unwrapped)
        limits = self.env.observation_space.high[[0, 2]]
        self.observation_space = gym.spaces.Box(-limits, limits, dtype=np.float32)

    def observation(self, observation):
        return observation[[0, 2]]


gym.register("CartPoleHidden-v0", CartPoleHidden, max_episode_steps=500)
