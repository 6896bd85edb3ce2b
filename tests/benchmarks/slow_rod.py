"""An expensive simulation: the rod of the examples, with steps that sleep.

    python ppo_multilevel.py --env tests/benchmarks/slow_rod.py:make --levels 1 2 --hours 2

A step of level 1 (16 cells) takes a tenth of a second, one of level 2 (64 cells) a second.
"""

import sys
import time
from pathlib import Path

import gymnasium as gym

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from rod import Rod  # noqa: E402

ROD_LEVELS = {1: 1, 2: 3}  # levels of the rod that it is made of
SECONDS = {1: 0.1, 2: 1.0}  # of a step


class Slow(gym.Wrapper):
    """Lets a step take longer."""

    def __init__(self, env, seconds):
        super().__init__(env)
        self.seconds = seconds

    def step(self, action):
        """Sleep before the step."""
        time.sleep(self.seconds)
        return self.env.step(action)


def make(level):
    """Return the rod on a level."""
    return Slow(Rod(ROD_LEVELS[level]), SECONDS[level])
