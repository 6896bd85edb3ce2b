"""Tests of tests/examples: adapters to packages that the project does not need itself."""

import re
import sys
import tempfile
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


@pytest.fixture
def water(tmp_path, monkeypatch):
    """Return the module of the water network. Temporary files and the current folder are ours."""
    pytest.importorskip("wntr", reason="needs the package wntr")
    import water_network

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(water_network.tempfile, "tempdir", str(tmp_path))
    water_network.input_text.cache_clear()  # so that its files would be here, too
    yield water_network
    assert list(tmp_path.glob("*")) == []


def day(env, seed, num_steps=24):
    """Play some hours with random actions. Returns their observations and rewards."""
    rng = np.random.default_rng(seed)
    obs, _ = env.reset(seed=seed)
    observations = [obs]
    rewards = []
    for _ in range(num_steps):
        obs, reward, terminated, truncated, _ = env.step(rng.uniform(-1, 1, 2).astype(np.float32))
        observations.append(obs)
        rewards.append(reward)
    assert terminated == (num_steps == 24) and not truncated
    return np.array(observations), np.array(rewards)


def test_water_network_levels_start_alike_and_converge(water):
    """A seed is one day on all levels, and returns differ less from the finest on finer levels."""
    returns = []
    for level in (1, 2, 3, 4):
        env = water.make(level)
        observations, rewards = day(env, seed=3)
        env.close()
        returns.append(rewards.sum())
        assert np.isfinite(observations).all() and (rewards <= 0).all()
        assert observations[:, 3].tolist() == list(range(25))  # the hour
        if level == 1:
            coarsest = observations
        assert np.array_equal(observations[0], coarsest[0])
        assert np.array_equal(observations[:, 4:], coarsest[:, 4:])  # demand, price, speeds
    assert not np.array_equal(coarsest[0], water.make(1).reset(seed=4)[0])
    differences = np.abs(np.array(returns[:3]) - returns[3])
    assert differences[0] > 3 * differences[1] > 9 * differences[2] > 0


def test_water_network_surrogate_by_hand(water):
    """An hour's water and energy, what is missing in low tanks, and what is lost in a day."""
    env = water.make(1).unwrapped
    env.reset(seed=3)
    env.demand[0] = 0.9
    before = env.levels
    obs, reward, *_ = env.step(np.float32([1, 1]))
    gained = (3400 + 14000 - 0.9 * 11000) * 60 / 7.48  # ft³
    assert ((env.levels - before) * water.AREA).sum() == pytest.approx(gained, rel=1e-6)
    assert reward == pytest.approx(-(80 + 280) * 0.06 / 10)  # at night's price

    # Without pumps 8,000 gallons a minute come through the bypass, for nothing. Tank 2 is 1 ft
    # above its lowest level, so that 2 ft of the reserve are missing there.
    env.demand[1] = 8 / 11
    env.net.levels = np.array([20.0, 7.5, 20.0])
    _, reward, *_ = env.step(np.float32([0.49, 0.49]))
    assert env.speeds.tolist() == [0, 0]
    assert reward == pytest.approx(-20 * 2 / 10 / 3)

    env.hour = 23
    env.demand[23] = 8 / 11
    env.first_levels = np.array([21.0, 12.0, 20.0])
    env.net.levels = np.array([20.0, 13.0, 20.0])
    _, reward, terminated, *_ = env.step(np.float32([0, 0]))
    lost = np.pi / 4 * (85**2 - 50**2)  # ft³: tank 1 has lost 1 ft, tank 2 gained 1 ft
    assert terminated and reward == pytest.approx(-lost / 2000)


def test_water_network_is_that_of_wntr(water):
    """Levels of tanks and the pumps' energy, hour by hour, are those of wntr's own simulator."""
    import wntr

    starts = [20.0, 15.0, 25.0]  # ft
    speeds = [0.9, 0.95]
    network = wntr.network.WaterNetworkModel("Net3")
    for name in list(network.control_name_list):
        network.remove_control(name)
    for tank, level in zip(water.TANKS, starts):
        network.get_node(tank).init_level = level * 0.3048
    for pump, speed in zip(water.PUMPS, speeds):
        network.get_link(pump).initial_status = "Open"
        network.get_link(pump).initial_setting = speed
    network.options.time.duration = 24 * 3600
    network.options.time.hydraulic_timestep = 3600
    network.options.hydraulic.demand_multiplier = 1.1
    with tempfile.TemporaryDirectory() as folder:
        results = wntr.sim.EpanetSimulator(network).run_sim(file_prefix=f"{folder}/net")
    found = results.node["pressure"][list(water.TANKS)].to_numpy() / 0.3048  # (25, 3), ft
    flow = results.link["flowrate"][list(water.PUMPS)].to_numpy()  # m³/s
    head = -results.link["headloss"][list(water.PUMPS)].to_numpy()  # m
    power = (9.81 * flow * head).sum(axis=1) / 0.75  # kW

    net = water.Epanet(3)
    net.start(starts, 1.1)
    for hour in range(24):
        levels, energy, _ = net.simulate_hour(speeds, 1.1)
        assert levels == pytest.approx(found[hour + 1], abs=0.02)
        if not np.isin(found[hour + 1].round(1), water.HIGHEST).any():  # else it is less in part
            assert energy == pytest.approx(power[hour], rel=0.01)
    net.close()


def test_water_network_simulations_do_not_disturb_each_other(water):
    """Side by side in a process they give the same bits as each one alone."""
    levels = [2, 3, 3, 4]
    alone = []
    for seed, level in enumerate(levels):
        env = water.make(level)
        alone.append(day(env, seed, num_steps=3))
        env.close()

    envs = [water.make(level) for level in levels]
    rngs = [np.random.default_rng(seed) for seed in range(4)]
    observations = [[env.reset(seed=seed)[0]] for seed, env in enumerate(envs)]
    for _ in range(3):
        for k, env in enumerate(envs):
            obs, *_ = env.step(rngs[k].uniform(-1, 1, 2).astype(np.float32))
            observations[k].append(obs)
    for env in envs:
        env.close()
    for found, (expected, _) in zip(observations, alone):
        assert np.array_equal(found, expected)


def test_water_network_repeats_a_seed(water):
    """It does so bit for bit, also after other episodes."""
    env = water.make(3)
    first = day(env, seed=1)
    other = day(env, seed=2)
    again = day(env, seed=1)
    env.close()
    assert not np.allclose(first[0][0], other[0][0])
    for found, expected in zip(again, first):
        assert np.array_equal(found, expected)


def test_water_network_leaves_no_files(water, tmp_path):
    """Nothing is there while it runs, and to close it twice does no harm."""
    for level in (2, 4):
        env = water.make(level)
        day(env, seed=0, num_steps=1)
        assert list(tmp_path.glob("*")) == []
        env.close()
        env.close()


def test_water_network_trains_in_two_workers(water, tmp_path_factory):
    """Each process makes its own networks. The run is that of one process, but for rounding."""
    runs = tmp_path_factory.mktemp("runs")
    path = Path(__file__).parent / "examples" / "water_network.py"
    losses = []
    for workers in (0, 2):
        argv = f"--env {path}:make --levels 1 2 --num-envs 2 --num-steps 24 --num-minibatches 2 "
        argv += f"--num-workers {workers} --eval-every 0 --check-episodes 2 --level-costs 2 1 1 "
        argv += f"--norm-obs --norm-value --quiet --num-iterations 2 --log-dir {runs}"
        run = ml.train(ml.parse_args(argv.split()))
        losses.append(run.history[-1]["policy_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_water_network_controllers(water):
    """By hand: what they do. On the reduced network the price pays."""
    obs = np.array([10, 20, 20, 0, 1, 0.06, 0, 0], np.float32)
    speeds = (by_price_action(water, obs) + 1) * 0.6
    assert speeds == pytest.approx([0.65, 0.65])
    obs[5] = 0.30  # $/kWh
    assert by_price_action(water, obs) == pytest.approx([0.65 / 0.6 - 1, -1])
    obs[:3] = 30  # ft
    assert by_price_action(water, obs).tolist() == [-1, -1]
    assert (water.constant(obs) + 1) * 0.6 == pytest.approx([0.7, 0.51])

    env = water.make(2)
    returns = {}
    for controller in (water.constant, water.by_price):
        total = 0.0
        for seed in range(8):
            obs, _ = env.reset(seed=seed)
            terminated = False
            while not terminated:
                obs, reward, terminated, *_ = env.step(controller(obs))
                total += reward / 8
        returns[controller] = total
    env.close()
    assert returns[water.by_price] > returns[water.constant] + 2


def by_price_action(water, obs):
    """Return the action of `by_price`, which must be one of `make`."""
    action = water.by_price(obs)
    assert water.make(1).action_space.contains(action)
    return action


def test_permeability_fields_of_your_own(tmp_path, monkeypatch):
    """The code of the reference has other fields for training, evaluation, checks."""
    text = (Path(__file__).parent / "benchmarks" / "reference.md").read_text()
    code, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
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
