"""Tests of the reservoir simulator: reference numbers, conservation, batching, level maps."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from scipy import ndimage

import ppo_multilevel

CASES, Case, ResSim = ppo_multilevel.CASES, ppo_multilevel.Case, ppo_multilevel.ResSim
coarsen, refine, partition = (
    ppo_multilevel.coarsen,
    ppo_multilevel.refine,
    ppo_multilevel.partition,
)
GOLDEN = Path(__file__).parent / "golden"
ENVS = ["a_env_case1_L1_8x8_k0", "a_env_case1_L2_15x15_k0", "a_env_case1_L3_30x30_k0"]
ENVS += ["a_env_case2_L1_7x22_k0"]
KEYS = ("p0", "p1", "fine", "mean", "hmean", "sum", "coarse", "c2f")
IDS = sorted(CASES)


def load(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def relative(a, b):
    """Largest difference over the largest value."""
    return np.abs(a - b).max() / np.abs(b).max()


def golden_env(g, name, **changes):
    """The simulation of a reference episode, a small version of case 1 or 2."""
    sizes = (8, 15, 30, 61) if "case1" in name else None
    grids = tuple((m, m) for m in sizes) if sizes else ((22, 7), (45, 15), (91, 31))
    wells = [
        (tuple(g[a].tolist()), tuple(g[b].tolist())) for a, b in (("i_x", "i_y"), ("p_x", "p_y"))
    ]
    k = refine(g["k"][None], grids[-1])
    settings = {"dt": float(g["dt"]), "substeps": int(g["nstep"]), "fields": lambda *_: k}
    settings |= {"lx": float(g["lx"]), "ly": float(g["ly"]), **changes}
    steps = settings.get("control_steps", 5) * settings["substeps"]
    injected = steps * settings["dt"] * float(g["c"])  # [m²] at total rate c
    settings["pore_volumes"] = injected / (settings["lx"] * settings["ly"] * 0.2)
    case = Case(grids, injectors=wells[0], producers=wells[1], **settings)
    return ResSim(case, grids.index(g["k"].shape) + 1)


def with_fields(case, perm):
    """A built-in case with these permeability fields, training's and all others."""
    return CASES[case]._replace(fields=lambda *_: perm)


def random_actions(rng, env, n=1):
    return rng.uniform(-0.5, 1, (n, *env.action_space.shape)).clip(0.001, 1)


# Maps between grids -----------------------------------------------------------------------------


def summed(x, shape):
    """Sums of a field over the cells of a coarser grid."""
    rows, cols = partition(x.shape[0], shape[0]), partition(x.shape[1], shape[1])
    return coarsen(x, shape) * np.diff(rows)[:, None] * np.diff(cols)


def pairs():
    with np.load(GOLDEN / "b_mapping.npz") as file:
        return sorted({key.rsplit("_", 1)[0] for key in file.files})


@pytest.mark.parametrize("pair", pairs())
def test_maps_equal_reference(pair):
    with np.load(GOLDEN / "b_mapping.npz") as file:
        g = {key: file[f"{pair}_{key}"] for key in KEYS}
    shape, fine = g["mean"].shape, g["fine"]
    np.testing.assert_array_equal(partition(fine.shape[0], shape[0]), g["p0"])
    np.testing.assert_array_equal(partition(fine.shape[1], shape[1]), g["p1"])
    np.testing.assert_allclose(coarsen(fine, shape), g["mean"], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(1 / coarsen(1 / fine, shape), g["hmean"], rtol=1e-12)
    np.testing.assert_allclose(summed(fine, shape), g["sum"], rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(refine(g["coarse"], fine.shape), g["c2f"])


def test_maps_take_leading_axes_and_do_not_alias():
    x = np.random.default_rng(0).random((2, 3, 7, 5))
    np.testing.assert_array_equal(coarsen(x, (3, 2))[1, 2], coarsen(x[1, 2], (3, 2)))
    np.testing.assert_array_equal(refine(x, (10, 9))[1, 2], refine(x[1, 2], (10, 9)))
    same = coarsen(x, (7, 5))
    np.testing.assert_array_equal(same, x)
    assert not np.shares_memory(same, x)


# Solver -----------------------------------------------------------------------------------------


def fluxes(p, t, grid):
    """What flows over all faces of a grid in x (1, ny, nx + 1) and y (1, ny + 1, nx)."""
    ny, nx = grid.shape
    v = t.ravel() * (p.ravel()[grid.a] - p.ravel()[grid.b])
    vx, vy = v[: ny * (nx - 1)].reshape(1, ny, -1), v[ny * (nx - 1) :].reshape(1, -1, nx)
    return np.pad(vx, ((0, 0), (0, 0), (1, 1))), np.pad(vy, ((0, 0), (1, 1), (0, 0)))


def test_solver_equals_reference():
    """Pressures and fluxes of a simulator with unequal viscosities; any rates; oblong cells.

    There λ depends on the saturation. Here the viscosity is 1, and the permeability is k λ of the
    reference. So the saturations of a step are checked by the discrete equation itself.
    """
    g = load("a_solver_linear_8x8")
    ny, nx = g["k"].shape
    q = g["q"][None]
    for i, before in enumerate([g["s0"], *g["s"][:3]]):
        effective = (before - g["s_wir"]) / (1 - g["s_wir"] - g["s_oir"])
        mobility = effective / g["mu_w"] + (1 - effective) / g["mu_o"]
        if i == 0:
            np.testing.assert_allclose(mobility, g["lamb0"], rtol=1e-10)
        case = Case(
            ((ny, nx),), float(g["lx"]), float(g["ly"]), (), (),
            lambda *_, k=g["k"] * mobility: k[None],
            float(g["dt"]), 0.0, substeps=1, viscosity=1.0,
        )  # fmt: skip
        grid = ppo_multilevel.Grid(case, 1, 0)
        p, t = (array[None] for array in grid.solve_pressure(0, q[0]))
        vx, vy = fluxes(p, t, grid)
        # p up to a constant, and in Pa instead of Pa · s / day
        assert relative(p[0] - p.mean(), (g["p"][i] - g["p"][i].mean()) / 86400) < 1e-5
        assert relative(vx[0], g["vx"][i]) < 1e-5 and relative(vy[0], g["vy"][i]) < 1e-5
        # pore ds/dt + div(s v) = q⁺ + q⁻ s, cell by cell
        s = ppo_multilevel.transport(before[None], p, t, q, grid)[0]
        fx = np.maximum(vx[0, :, 1:-1], 0) * s[:, :-1] + np.minimum(vx[0, :, 1:-1], 0) * s[:, 1:]
        fy = np.maximum(vy[0, 1:-1], 0) * s[:-1] + np.minimum(vy[0, 1:-1], 0) * s[1:]
        out = np.diff(np.pad(fx, ((0, 0), (1, 1)))) + np.diff(np.pad(fy, ((1, 1), (0, 0))), axis=0)
        residual = grid.pore * (s - before) / case.dt + out - q[0].clip(0) - q[0].clip(max=0) * s
        assert np.abs(residual).max() < 1e-9 * q.max()


@pytest.mark.parametrize("name", ENVS)
def test_episode_equals_reference(name):
    g = load(name)
    env = golden_env(g, name)
    env.reset(seed=0)
    np.testing.assert_allclose(env.psi(), g["obs0"])
    for t in range(5):
        np.testing.assert_allclose(env.phi(g["actions"][t]), g["q"][t], rtol=1e-10, atol=1e-12)
        obs, reward, terminated, truncated, _ = env.step(g["actions"][t])
        vx, vy = fluxes(*env.grid.solve_pressure(0, g["q"][t]), env.grid)
        assert relative(vx[0], g["vx"][t]) < 1e-8 and relative(vy[0], g["vy"][t]) < 1e-8
        assert np.abs(env.s - g["s_sub"][t, -1]).max() < 1e-8
        np.testing.assert_allclose(env.psi(), g["obs"][t], rtol=0, atol=1e-8)
        assert obs.dtype == np.float32 and np.abs(obs - g["obs"][t]).max() < 1e-6
        assert abs(reward - g["reward"][t]) < 1e-8 and not truncated and terminated == (t == 4)


@pytest.mark.parametrize("name", ENVS)
def test_substeps_equal_reference(name):
    """A control step of one sub-step, five times: every sub-step's saturation and oil."""
    g = load(name)
    env = golden_env(g, name, substeps=1, control_steps=25)
    env.reset(seed=0)
    for t in range(5):
        oil = 0.0
        for j in range(5):
            oil += env.step(g["actions"][t])[1]
            assert np.abs(env.s - g["s_sub"][t, j]).max() < 1e-8
        assert abs(oil - g["reward"][t]) < 1e-8


@pytest.mark.parametrize("name", ["case1_L1_8x8_k0", "case1_L3_30x30_k0"])
def test_small_time_steps_tend_to_the_refined_reference(name):
    g, refined = load(f"a_env_{name}"), load(f"refined_{name}")
    errors = []
    for split in (1, 4, 16):
        env = golden_env(g, name, substeps=5 * split, dt=float(g["dt"]) / split)
        env.reset(seed=0)
        rewards = [env.step(action)[1] for action in g["actions"]]
        errors.append(abs(sum(rewards) - refined["reward"].sum()))
    assert errors[0] < 0.012 and errors[1] < errors[0] / 2.5 and errors[2] < errors[1] / 2.5


@pytest.mark.parametrize("case", IDS)
def test_mass_balance_at_full_size(case):
    """Water injected = water stored + water produced, with one sub-step per control step."""
    case = CASES[case]._replace(substeps=1, control_steps=25)
    env, rng = ResSim(case, len(case.grids), evaluation=True), np.random.default_rng(0)
    env.reset(seed=1)
    injected = produced = oil = 0.0
    for t in range(25):
        if t % 5 == 0:
            action = random_actions(rng, env)[0]
        q = env.phi(action)
        reward = env.step(action)[1]
        assert env.s.min() >= -1e-12 and env.s.max() <= 1 + 1e-6
        injected += case.dt * q.clip(0).sum()
        produced += case.dt * (-q.clip(max=0) * env.s).sum()
        oil += case.dt * (-q.clip(max=0) * (1 - env.s)).sum()
    stored = (env.s * env.grid.pore).sum()
    assert injected == pytest.approx(case.pore_volumes * case.lx * case.ly * 0.2)
    assert abs(injected - stored - produced) < 1e-6 * injected
    assert abs(injected - oil - produced) < 1e-6 * injected
    assert reward > 0


def test_symmetric_reservoir_stays_symmetric():
    even = with_fields("ResSim-v3", np.full((1, 64, 64), 1e-13))
    wells = {"injectors": ((7, 56), (0, 0)), "producers": ((7, 56), (63, 63))}
    env = ResSim(even._replace(**wells), 4)
    env.reset(seed=0)
    for _ in range(3):
        env.step(np.ones(4))
        np.testing.assert_allclose(env.s, env.s[::-1], atol=1e-9)
        drop = env.p - env.p.mean()
        np.testing.assert_allclose(drop, drop[::-1], atol=1e-9 * np.abs(drop).max())
        np.testing.assert_allclose(drop, -drop[:, ::-1], atol=1e-9 * np.abs(drop).max())


@pytest.mark.parametrize("case, level", [(c, k) for c in IDS for k in (1, 3)] + [("ResSim-v1", 5)])
def test_batch_is_bitwise_the_single_simulations(case, level):
    n, rng = 7, np.random.default_rng(5)
    batch, alone = ([ResSim(case, level, evaluation=k > 4) for k in range(n)] for _ in "ab")
    for k in range(n):
        batch[k].reset(options={"field": k // 2})
        alone[k].reset(options={"field": k // 2})
    alone = alone[::-1]  # the other order, too
    for _ in range(2):
        actions = random_actions(rng, batch[0], n)
        obs, rewards, terminated, truncated = ResSim.step_batch(batch, actions)
        assert obs.shape == (n, *batch[0].observation_space.shape) and obs.dtype == np.float32
        assert rewards.dtype == np.float64 and terminated.dtype == truncated.dtype == bool
        for k in range(n):
            single = alone[n - 1 - k].step(actions[k])
            np.testing.assert_array_equal(single[0], obs[k])
            assert single[1] == rewards[k]
            np.testing.assert_array_equal(alone[n - 1 - k].s, batch[k].s)
            np.testing.assert_array_equal(alone[n - 1 - k].p, batch[k].p)


# Levels -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", IDS)
def test_map_from_between_levels(case):
    rng = np.random.default_rng(0)
    fine, same, coarse, back = (ResSim(case, level) for level in (3, 3, 1, 3))
    fine.reset(seed=3)
    for _ in range(2):
        fine.step(random_actions(rng, fine)[0])
    same.map_from(fine)
    np.testing.assert_array_equal(same.s, fine.s)
    np.testing.assert_array_equal(same.p, fine.p)
    np.testing.assert_array_equal(same.psi(), fine.psi())
    assert not np.shares_memory(same.s, fine.s)

    coarse.map_from(fine)
    assert (coarse.t, coarse.field) == (fine.t, fine.field) == (2, fine.field)
    np.testing.assert_array_equal(coarse.s, coarsen(fine.s, coarse.grid.shape))
    np.testing.assert_array_equal(coarse.p, coarsen(fine.p, coarse.grid.shape))
    back.map_from(coarse)
    np.testing.assert_array_equal(back.s, refine(coarse.s, back.grid.shape))
    if case != "ResSim-v2":  # whose grids are not nested: there the wells see other cells
        np.testing.assert_allclose(back.psi(), coarse.psi(), atol=1e-14)
    again = ResSim(case, 1)
    again.map_from(back)
    np.testing.assert_allclose(again.s, coarse.s, rtol=1e-15)
    np.testing.assert_allclose(again.p, coarse.p, rtol=1e-14)

    # The copy goes on exactly as the original does, and leaves it alone.
    action, s = random_actions(rng, fine)[0], fine.s.copy()
    obs, reward = same.step(action)[:2]
    np.testing.assert_array_equal(fine.s, s)
    fine_obs, fine_reward = fine.step(action)[:2]
    np.testing.assert_array_equal(obs, fine_obs)
    assert reward == fine_reward


def test_map_from_refuses_another_simulation():
    env = ResSim("ResSim-v1", 1)
    other, evaluation = ResSim("ResSim-v3", 1), ResSim("ResSim-v1", 2, evaluation=True)
    for e in (other, evaluation):
        e.reset(seed=0)
    for e in (other, evaluation):
        with pytest.raises(ValueError, match="map_from needs the same simulation"):
            env.map_from(e)


@pytest.mark.parametrize("case", IDS)
def test_levels_share_spaces_rates_and_permeability(case):
    envs = [ResSim(case, level + 1) for level in range(len(CASES[case].grids))]
    action = random_actions(np.random.default_rng(0), envs[0])[0]
    q = envs[-1].phi(action)
    n_in, n_out = len(CASES[case].injectors[0]), len(CASES[case].producers[0])
    assert np.count_nonzero(q > 0) == n_in and np.count_nonzero(q < 0) == n_out
    assert q.clip(0).sum() == pytest.approx(CASES[case].rate)
    np.testing.assert_allclose(
        q[CASES[case].injectors], action[:n_in] / action[:n_in].sum() * CASES[case].rate
    )
    for env, shape in zip(envs, CASES[case].grids):
        assert env.observation_space == envs[-1].observation_space
        assert env.action_space == envs[-1].action_space
        assert env.observation_space.shape == (2 * n_out + n_in,)
        np.testing.assert_allclose(env.phi(action), summed(q, shape), atol=1e-12)
        np.testing.assert_allclose(
            env.grid.perm, 1 / coarsen(1 / envs[-1].grid.perm, shape), rtol=1e-12
        )
        # psi reads the wells of the field repeated onto the finest grid
        env.reset(seed=0)
        env.step(action)
        fine = refine(env.s, CASES[case].grids[-1])
        np.testing.assert_array_equal(env.psi()[:n_out], fine[CASES[case].producers].clip(0, 1))


def test_sizes_of_the_built_in_cases():
    sizes = {k: (c.grids[0], c.grids[-1], len(c.injectors[0])) for k, c in CASES.items()}
    assert sizes == {
        "ResSim-v1": ((8, 8), (128, 128), 32),
        "ResSim-v2": ((27, 9), (219, 73), 7),
        "ResSim-v3": ((8, 8), (64, 64), 32),
        "ResSim-v4": ((8, 8), (64, 64), 32),
    }
    producers = CASES["ResSim-v2"].producers
    assert list(zip(*producers))[:3] == [(1, 0), (1, 72), (37, 0)] and len(producers[0]) == 14


# Permeability fields ----------------------------------------------------------------------------


def log_k(case, n=16, seed=0):
    return np.log(CASES[case].fields(CASES[case], n, seed) / ppo_multilevel.MILLIDARCY)


def crosses(mask):
    """Whether face-connected cells of mask lead from the left edge to the right edge."""
    labels = ndimage.label(mask)[0]
    return bool(set(labels[:, 0][labels[:, 0] > 0]) & set(labels[:, -1]))


@pytest.mark.parametrize("case", IDS)
def test_fields_are_reproducible_and_sets_differ(case):
    a = log_k(case, 4, 0)
    assert a.shape == (4, *CASES[case].grids[-1]) and np.isfinite(a).all()
    np.testing.assert_array_equal(a, log_k(case, 4, 0))
    level = len(CASES[case].grids)
    training, evaluation = (ResSim(case, level, e).grid.perm for e in (False, True))
    assert training.shape == (16, *CASES[case].grids[-1])
    both = np.concatenate([training, evaluation]).reshape(32, -1)
    assert len(np.unique(both, axis=0)) == 32
    assert ResSim(case, level).grid is ResSim(case, level).grid


def test_channel_fields():
    x = log_k("ResSim-v1", 200)
    inside = x > 0
    np.testing.assert_allclose(x, np.where(inside, 5.5, -2.0), atol=1e-12)
    assert all(crosses(field) for field in inside)
    width = inside.mean(axis=1)  # share of every column
    assert width.min() > 0.1 - 1 / 64 and width.max() < 0.3 + 1 / 64
    assert width.mean() == pytest.approx(0.2, abs=0.015)
    assert np.ptp(width, axis=1).max() < 1 / 60  # a parallelogram


def test_gaussian_fields():
    case = CASES["ResSim-v2"]
    x = log_k("ResSim-v2", 60) - 2.41
    for rows, cols in (case.injectors, case.producers):
        np.testing.assert_allclose(x[:, rows, cols], 0, atol=1e-8)
    # Far from wells the prior's variance: rows half-way between wells, columns between the edges
    far = x[:, 19:200:36, 18:22]
    assert 3.5 < far.var() < 5.5 and abs(far.mean()) < 0.3
    # Along π/8 (x grows, row falls) the correlation is longer than across, the other way and down
    d = 10
    step_x, step_y = round(d * np.cos(np.pi / 8)), round(d * np.sin(np.pi / 8))

    def correlation(dy, dx):
        a = x[:, 20:-20, 12:-12]
        b = x[:, 20 + dy : x.shape[1] - 20 + dy, 12 + dx : x.shape[2] - 12 + dx]
        return np.corrcoef(a.ravel(), b.ravel())[0, 1]

    along = correlation(-step_y, step_x)
    others = [correlation(step_y, step_x), correlation(step_x, step_y), correlation(d, 0)]
    assert along > max(others) + 0.25
    assert along == pytest.approx(np.exp(-d * 2.59 / case.lx), abs=0.12)


def test_streak_fields():
    x = log_k("ResSim-v3", 100)
    streaks = x > 6
    np.testing.assert_allclose(x[streaks], 8.0)
    rest = x[~streaks]
    assert rest.mean() == pytest.approx(3, abs=0.01) and rest.std() == pytest.approx(0.3, abs=0.01)
    assert all(crosses(field) for field in streaks)
    share = streaks.mean(axis=(1, 2))  # 2 or 3 of 64 rows, and the steps between them
    assert 1 / 64 < share.min() and share.max() < 6 / 64 + 1e-9
    # A streak is one cell wide, and the harmonic mean does not see it.
    assert not any(ndimage.binary_erosion(f, np.ones((2, 2))).sum() > 60 for f in streaks)
    k = np.exp(x)
    coarse = 1 / coarsen(1 / k, (32, 32))  # only where streaks meet or turn are cells full
    assert (coarse > np.exp(5)).mean() < 0.005 and share.min() > 0.02


def test_wide_streak_fields():
    """ResSim-v4 has ResSim-v3's thief zones, three cells wide: 32² sees them blurred."""
    thin, wide = log_k("ResSim-v3", 100) > 6, log_k("ResSim-v4", 100) > 6
    for narrow, streak in zip(thin, wide):
        # Rows r to r + 2 of every column, kept inside the field: three shifted copies of r.
        full = narrow | np.roll(narrow, 1, axis=0) | np.roll(narrow, 2, axis=0)
        inner = slice(2, 61)  # what wraps around, and what is kept inside, is beyond
        np.testing.assert_array_equal(streak[inner], full[inner])
        assert streak.sum(axis=0).min() >= 3 and crosses(streak)
    # Blurred: a uniform control returns .522 on 64², .585 on 32², .666 on 16².
    means = []
    for level in (4, 3, 2):
        envs = [ResSim("ResSim-v4", level) for _ in range(16)]
        for field, env in enumerate(envs):
            env.reset(options={"field": field})
        rewards = [ResSim.step_batch(envs, np.full((16, 64), 0.5))[1] for _ in range(5)]
        means.append(np.sum(rewards, axis=0).mean())
    np.testing.assert_allclose(means, [0.5219, 0.5845, 0.6661], atol=1e-4)


# The environment --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", IDS)
def test_gymnasium_accepts_it(case):
    check_env(ResSim(case, 1), skip_render_check=True)


def test_reset_draws_fields_and_step_ends():
    env = ResSim("ResSim-v1", 1)
    drawn = [env.reset(seed=4)[1]["field"]] + [env.reset()[1]["field"] for _ in range(9)]
    again = [env.reset(seed=4)[1]["field"]] + [env.reset()[1]["field"] for _ in range(9)]
    assert drawn == again and len(set(drawn)) > 3
    obs, info = env.reset(options={"field": 7})
    assert info == {"field": 7} and not obs[:32].any() and (obs[32:] == 1).all()
    flags = [env.step(np.ones(64))[2:4] for _ in range(5)]
    assert flags == [(False, False)] * 4 + [(True, False)]
    with pytest.raises(RuntimeError, match="after the end"):
        env.step(np.ones(64))
    with pytest.raises(ValueError, match="field must be 0..15"):
        env.reset(options={"field": 16})
    with pytest.raises(RuntimeError, match="before reset"):
        ResSim("ResSim-v1", 1).step(np.ones(64))


def test_actions_are_clipped_and_must_be_finite():
    a, b = ResSim("ResSim-v2", 1), ResSim("ResSim-v2", 1)
    a.reset(options={"field": 0}), b.reset(options={"field": 0})
    wild = np.linspace(-3, 4, 21)
    np.testing.assert_array_equal(a.step(wild)[0], b.step(wild.clip(0.001, 1))[0])
    with pytest.raises(ValueError, match="finite"):
        a.step(np.full(21, np.nan))
    with pytest.raises(ValueError, match="shape"):
        a.step(np.ones(20))


@pytest.mark.parametrize(
    "fields",
    [np.ones((128, 128)), np.ones((1, 8, 8)), np.zeros((1, 128, 128))]
    + [np.full((1, 128, 128), np.nan), -np.ones((1, 128, 128)), np.full((1, 128, 128), np.inf)],
)
def test_wrong_permeability_is_refused(fields):
    with pytest.raises(ValueError, match="^fields must be .*$"):
        ResSim(with_fields("ResSim-v1", fields), 1)


def test_level_must_exist_and_own_fields_are_upscaled():
    with pytest.raises(ValueError, match="level must be 1..5"):
        ResSim("ResSim-v1", 6)
    fine = np.random.default_rng(0).lognormal(size=(3, 128, 128)) * 1e-13
    case = with_fields("ResSim-v1", fine)
    np.testing.assert_array_equal(ResSim(case, 5).grid.perm, fine)
    np.testing.assert_array_equal(ResSim(case, 2).grid.perm, 1 / coarsen(1 / fine, (16, 16)))


@pytest.fixture
def imported(monkeypatch):
    """Return a function that imports a benchmark, whose settings do not outlive the test."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "benchmarks")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which a benchmark sets
    return importlib.import_module


def test_benchmark_measures_iterations(imported, tmp_path):
    """Simulation and the rest are all of an iteration, of each but the first."""
    options = "--schedule together --levels 1 2 --num-steps 5 5 --num-envs 2 --num-minibatches 2 "
    options += "--num-iterations 4 --num-workers 0 --eval-every 4 --level-costs 1 2 1 --quiet "
    options += f"--log-dir {tmp_path}"
    parts = imported("speed_ressim").iteration_seconds(options.split())
    simulation, rest, iteration = parts.values()
    assert len(iteration) == 3 and (simulation > 0).all() and (rest > 0).all()
    np.testing.assert_allclose(simulation + rest, iteration)


def test_benchmark_runs_have_known_options(imported):
    """Every recorded run of ppo_multilevel.py can be made again."""
    learn = imported("learn_ressim")
    parser = ppo_multilevel.make_parser()
    for name in learn.RUNS:
        script, *words = learn.command(name, 1)
        parser.parse_args(words if script == "ppo_multilevel.py" else words[1:])


def test_benchmark_knows_which_runs_have_ended(imported):
    """Their length is a number of iterations, or seconds of steps of the finest level."""
    has_ended = imported("learn_ressim").has_ended
    words = "--env ResSim-v1 --levels 1 2 --level-costs 1 2 1".split()
    for more, last in {"--num-iterations 5": (5, 0.0), "--finest-steps 30": (0, 60.0)}.items():
        options = vars(ppo_multilevel.parse_args([*words, *more.split()]))
        iteration, seconds = last
        row = {"iteration": str(iteration), "seconds": str(seconds)}
        assert has_ended(options, row)
        row = {"iteration": str(iteration - 1), "seconds": str(seconds - 1)}
        assert not has_ended(options, row)


def test_faults_are_walls_of_half_a_field(imported):
    """They are all that differs from ResSim-v4. On 8² no permeability falls below its half."""
    faults = imported("faults")
    shape = faults.CASE.grids[0]
    k = faults.fields(faults.CASE, 4, seed=0)
    without = ppo_multilevel.CASES["ResSim-v4"].fields(faults.CASE, 4, seed=0)
    walls = k != without
    assert (k[walls] == ppo_multilevel.MILLIDARCY * np.exp(-2.0)).all()
    heights = walls.sum(axis=1)  # (4, 64)
    assert set(heights.ravel()) <= {0, *range(32, 65)} and (heights > 0).sum() >= 8
    coarse, coarse_without = (ppo_multilevel.coarsen(x, shape) for x in (k, without))
    assert (coarse >= coarse_without / 2).all()
