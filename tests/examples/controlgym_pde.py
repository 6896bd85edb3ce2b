r"""Two partial differential equations of the package controlgym, on three levels each.

    pip install --no-deps controlgym==1.0.0
    python ppo_multilevel.py --env tests/examples/controlgym_pde.py:KuramotoSivashinsky \
        --levels 1 2 3 --num-envs 16 --norm-value --init-log-std -1.5 --gamma 0.95 \
        --learning-rate 1e-3 --update-epochs 10

Eight controls push a periodic field u(x, t) towards 0, and sixteen sensors see it. The reward is
minus the mean square of the field, and a tenth of that of the controls. The finest level has the
256 points and about the time step that controlgym itself has by default.
"""

import controlgym
import gymnasium as gym
import numpy as np


class NoNoise:
    """A generator without noise. controlgym's own factors a matrix in each step to draw it."""

    def multivariate_normal(self, mean, covariance):
        """Return the mean, which is what a covariance of 0 leaves."""
        return mean


class Field(gym.Env):
    """A field of controlgym on one level."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (16,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (8,), np.float32)

    def __init__(self, name, num_points, sample_time, time_step):
        self.pde = controlgym.make(
            name,
            n_state=num_points,
            n_observation=16,
            n_action=8,
            n_steps=50,
            sample_time=sample_time,
            integration_time=time_step,
            control_sup_width=1 / 8,  # each control acts on an eighth of the domain
            sensor_noise_cov=0.0,
            Q_weight=1 / num_points,  # the mean over points, not their sum
            R_weight=0.1 / 8,
        )

    def reset(self, *, seed=None, options=None):
        """Start from one of controlgym's random states, which a seed leads to on all levels."""
        super().reset(seed=seed)
        self.pde.reset(seed=int(self.np_random.integers(2**31)))
        self.pde.rng = NoNoise()
        return self.psi(), {}

    def step(self, action):
        """Take a step of `sample_time`.

        What controlgym returns is the observation before the step, and its time limit as
        `terminated`.
        """
        _, reward, time_is_over, _, _ = self.pde.step(np.asarray(action, dtype=float))
        return self.psi(), reward, False, time_is_over, {}

    def psi(self):
        """Return what the sensors see."""
        return (self.pde.C @ self.pde.state).astype(np.float32)


class KuramotoSivashinsky(Field):
    """Waves of a flame front, chaotic without control."""

    # Powers of two: controlgym rounds sample_time / time_step down.
    TIME_STEPS = {1: 1 / 8, 2: 1 / 32, 3: 1 / 128}

    def __init__(self, level):
        points = 32 * 2**level
        super().__init__("kuramoto_sivashinsky", points, 1 / 2, self.TIME_STEPS[level])


class GinzburgLandau(Field):
    """A field that grows from 0 to 1 or −1. Coarse grids do not resolve the fronts between."""

    TIME_STEPS = {1: 1 / 8, 2: 1 / 32, 3: 1 / 128}

    def __init__(self, level):
        points = 4 * 4**level
        super().__init__("ginzburg_landau", points, 1 / 8, self.TIME_STEPS[level])
