"""Tests of tests/examples: adapters to packages that the project does not need itself."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import ppo_multilevel as ml

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


@pytest.fixture
def opm_flow():
    """Return the module of the example."""
    pytest.importorskip("opm.simulators", reason="needs the packages opm and opm-simulators")
    import opm_flow

    return opm_flow


def test_opm_flow_episode(opm_flow):
    """One pore volume is injected, so that as much is produced: oil first, then water, too."""
    env = opm_flow.Flow(level=1)
    obs, _ = env.reset(seed=3)
    total = 0.0
    for step in range(1, 9):
        obs, reward, terminated, truncated, _ = env.step(opm_flow.equal(obs))
        total += reward
        assert obs[-1] == step / 8 and terminated == (step == 8) and not truncated
    oil, water = env.totals / opm_flow.PORE_VOLUME
    assert oil + water == pytest.approx(1, abs=0.02)  # rock and fluids are hardly compressible
    assert total == pytest.approx(oil - 0.25 * water)
    assert (obs[8:12] > 0).any() and env.folder.exists()

    # Water has taken the place of the oil, from the injectors on the left on.
    assert opm_flow.FIRST_OIL - env.oil().mean() == pytest.approx(oil, abs=0.02)
    picture = env.render().astype(float)
    assert picture.shape == (320, 320, 3)
    blueness = (picture[..., 2] - picture[..., 0]).mean(axis=0)  # of each column
    assert blueness[:32].mean() > blueness[-32:].mean() + 20
    env.close()
    assert not env.folder.exists()


def test_opm_flow_levels_have_the_same_rock(opm_flow):
    """A seed is one rock on all levels: a coarse cell has the geometric mean of the cells in it."""
    fields = []
    for level in (1, 2, 3):
        env = opm_flow.Flow(level)
        env.np_random = np.random.default_rng(5)
        fields.append(np.log(env.draw_permeability()))
        env.close()
    for coarse, fine in zip(fields, fields[1:]):
        n = len(coarse)
        assert np.allclose(coarse, fine.reshape(n, 2, n, 2).mean(axis=(1, 3)))


def test_opm_flow_trains(opm_flow, tmp_path):
    """One process has many simulators side by side, and a resumed run makes new ones."""
    argv = "--env opm_flow:Flow --levels 1 --num-envs 2 --num-steps 5 --num-minibatches 2"
    argv += f" --num-workers 0 --eval-every 0 --quiet --num-iterations 1 --log-dir {tmp_path}"
    run = ml.train(ml.parse_args(argv.split()))
    words = ["--resume", str(run.run_dir), "--num-iterations", "2", "--quiet"]
    resumed = ml.train(ml.parse_args(words))
    assert resumed.iteration == 2 and np.isfinite(resumed.history[-1]["policy_loss"])


def test_permeability_fields_of_your_own(tmp_path, monkeypatch):
    """The code that examples/README.md shows has other fields for training, evaluation, checks."""
    text = (Path(__file__).parent / "examples" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    rng = np.random.default_rng(0)
    fields = 1e-13 * rng.uniform(1, 2, (48, 128, 128))
    np.save(tmp_path / "my_fields.npy", fields)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reservoir.py").write_text(code)
    make = ml.load_make(f"{tmp_path}/my_reservoir.py:make")
    found = [make(5), make(5, evaluation=True), make(5, validation=True)]
    for env, own in zip(found, np.split(fields, 3)):
        assert np.array_equal(env.grid.perm, own)
    coarse = make(1)
    coarse.reset(seed=1)
    obs, reward, *_ = coarse.step(coarse.action_space.high)
    assert np.isfinite(obs).all() and 0 < reward < 1
