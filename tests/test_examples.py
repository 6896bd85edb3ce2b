"""Tests of tests/examples: adapters to packages that the project does not need itself."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "examples"))


@pytest.fixture(params=["KuramotoSivashinsky", "GinzburgLandau"])
def make(request):
    """Return a class of controlgym_pde."""
    pytest.importorskip("controlgym", reason="needs the package controlgym")
    import controlgym_pde

    return getattr(controlgym_pde, request.param)


def test_controlgym_shows_the_state_after_a_step(make):
    """The observation is the state's, the episode is truncated after fifty steps."""
    env = make(level=1)
    env.reset(seed=3)
    for step in range(1, 51):
        obs, reward, terminated, truncated, _ = env.step(np.full(8, 0.1))
        spacing = len(env.pde.state) // 16
        assert np.allclose(obs, env.pde.state[::spacing]) and reward < 0
        assert not terminated and truncated == (step == 50)


def test_controlgym_levels_start_alike_and_converge(make):
    """A seed leads to one start on all levels; finer levels differ less from the finest."""
    envs = [make(level=level) for level in (1, 2, 3)]
    starts = [env.reset(seed=3)[0] for env in envs]
    assert np.allclose(starts[0], starts[2]) and np.allclose(starts[1], starts[2])
    for env in envs:
        for _ in range(8):
            obs, *_ = env.step(np.linspace(-1, 1, 8))
        env.last = obs
    coarse, middle = [abs(env.last - envs[2].last).max() for env in envs[:2]]
    assert 0 < middle < coarse
