"""Tests of ppo.py: its numerical functions by hand values, its runs by what they leave behind."""

import csv
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import ppo

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).parent / "golden"
SMALL = (
    "--num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 2 --hidden 16 16 "
    "--learning-rate 1e-3 --eval-episodes 2 --quiet"
).split()


def options(words=""):
    """Return the parsed options of a command line, unchecked."""
    return ppo.make_parser().parse_args(words.split())


def column(*values):
    """Return values as a (T, 1) tensor."""
    return torch.tensor(values).reshape(-1, 1)


# GAE ----------------------------------------------------------------------------------------------


def test_gae_golden():
    """Reference numbers; there `episode_starts` of a step says that the one before ended."""
    g = {name: torch.tensor(value) for name, value in np.load(GOLDEN / "d_gae.npz").items()}
    terminated = torch.cat([g["episode_starts"][1:], g["dones"][None]])
    next_values = torch.cat([g["values"][1:], g["last_values"][None]])
    gamma, lam = float(g["gamma"]), float(g["lam"])
    never = torch.zeros_like(terminated)
    advantages = ppo.gae(g["rewards"], g["values"], next_values, terminated, never, gamma, lam)
    torch.testing.assert_close(advantages, g["advantages"], rtol=1e-5, atol=1e-6)
    buffer = {"obs": torch.zeros(7, 3, 2), "actions": torch.zeros(7, 3), "next_values": next_values}
    buffer |= {"logprobs": torch.zeros(7, 3), "rewards": g["rewards"], "values": g["values"]}
    buffer |= {"terminated": terminated, "truncated": never}
    model = SimpleNamespace(inputs=("obs", "state"), memory=None)  # an input's name says nothing
    buffer["state"] = torch.zeros(7, 3, 5)
    batch = ppo.make_batch(buffer, model, options(f"--gamma {gamma} --gae-lambda {lam}"))
    torch.testing.assert_close(batch["returns"], g["returns"].flatten(), rtol=1e-5, atol=1e-6)
    assert batch["obs"].shape == (21, 2) and batch["state"].shape == (21, 5)


@pytest.mark.parametrize(
    "terminated, truncated, next_value, expected",
    [
        (False, False, 30.0, (-0.1875, -4.75, -7.0)),
        (False, True, 7.0, (-2.625, -14.5, -7.0)),  # bootstraps from 7, the sum stops
        (True, False, 7.0, (-3.5, -18.0, -7.0)),  # 7 counts for nothing, the sum stops
        (True, True, 7.0, (-3.5, -18.0, -7.0)),  # the same
    ],
)
def test_gae_ends(terminated, truncated, next_value, expected):
    """Hand values with γ = λ = ½ for an end, or none, at the second of three steps."""
    rewards, values = column(1.0, 2.0, 3.0), column(10.0, 20.0, 30.0)
    ends = [column(False, flag, False) for flag in (terminated, truncated)]
    advantages = ppo.gae(rewards, values, column(20.0, next_value, 40.0), *ends, 0.5, 0.5)
    assert advantages.flatten().tolist() == list(expected)


def test_gae_special_lambdas():
    """λ = 0 is the one-step error; λ = 1 the discounted rewards and last value, less V."""
    gamma, T = 0.9, 6
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, T, 3, generator=generator)
    last = torch.randn(1, 3, generator=generator)
    following, never = torch.cat([values[1:], last]), torch.zeros(T, 3, dtype=torch.bool)
    zero = ppo.gae(rewards, values, following, never, never, gamma, 0.0)
    torch.testing.assert_close(zero, rewards + gamma * following - values)
    one = ppo.gae(rewards, values, following, never, never, gamma, 1.0)
    for t in range(T):
        future = sum(gamma ** (k - t) * rewards[k] for k in range(t, T))
        torch.testing.assert_close(one[t], future + gamma ** (T - t) * last[0] - values[t])


def test_gae_example():
    """The numbers that the docstring of ppo.py works out."""

    def column(*numbers):
        return torch.tensor(numbers)[:, None]

    rewards = column(0.0, 0.0, 1.0)
    values = column(0.5, 0.6, 0.8)
    following = column(0.6, 0.8, 9.0)
    terminated = column(False, False, True)
    never = column(False, False, False)
    for gae_lambda, expected in ((0.0, 0.1), (0.5, 0.25), (1.0, 0.5)):
        ends = (terminated, never)
        advantages = ppo.gae(rewards, values, following, *ends, 1.0, gae_lambda)
        assert advantages[0].item() == pytest.approx(expected)
    assert "Â_0 is 0.1 + 0.5 · 0.2 + 0.25 · 0.2 = 0.25." in ppo.__doc__


def test_gae_refuses_other_shapes():
    """All tensors have to be (T, N)."""
    ok, flags = torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.bool)
    with pytest.raises(AssertionError):
        ppo.gae(ok, torch.zeros(4), ok, flags, flags, 0.9, 0.9)


# Losses -------------------------------------------------------------------------------------------


def losses_batch(model, ratios, advantages):
    """Return a batch on which the model's ratios are `ratios`, and its values there."""
    obs = torch.randn(len(ratios), 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pi, values = model(obs)
        actions = torch.from_numpy(model.head.sample(pi.numpy()))
        logprobs = model.head.log_prob(pi, actions) - torch.tensor(ratios).log()
    batch = {"obs": obs, "actions": actions, "logprobs": logprobs, "values": values}
    return batch | {"advantages": torch.tensor(advantages), "returns": values + 1}, values


SPACES = {"discrete": gym.spaces.Discrete(3), "box": gym.spaces.Box(-1, 1, (2,))}


@pytest.mark.parametrize("space", SPACES)
def test_clipped_objective(space):
    """PPO, Eq. (7), for ε = 0.2: a ratio beyond 1 ± ε gains nothing, but may lose."""
    model = ppo.Model(3, SPACES[space], options("--hidden 8 --init-log-std -0.5"))
    ratios = [0.5, 0.9, 1.0, 1.1, 1.5] * 2
    batch, _ = losses_batch(model, ratios, [2.0] * 5 + [-2.0] * 5)
    pg_loss, _, entropy, logratio = ppo.losses(model, batch, 0.2, clip_vloss=False)
    expected = [-1.0, -1.8, -2.0, -2.2, -2.4, 1.6, 1.8, 2.0, 2.2, 3.0]
    torch.testing.assert_close(pg_loss, torch.tensor(expected))
    torch.testing.assert_close(logratio.exp(), torch.tensor(ratios))
    assert entropy.shape == (10,)


def test_ratio_one_gives_minus_advantage():
    """The policy that took the actions has ratio 1, so the loss is exactly −Â."""
    model = ppo.Model(3, SPACES["discrete"], options("--hidden 8 --shared-net"))
    batch, _ = losses_batch(model, [1.0] * 4, [1.0, -2.0, 3.0, -4.0])
    pg_loss, *_, logratio = ppo.losses(model, batch, 0.2, clip_vloss=False)
    assert pg_loss.tolist() == [-1.0, 2.0, -3.0, 4.0]
    assert logratio.tolist() == [0.0] * 4


def test_losses_literal():
    """All terms against NumPy formulas on random rows."""
    rng, n, eps = np.random.default_rng(0), 50, 0.1
    model = ppo.Model(3, SPACES["box"], options("--hidden 8 8 --shared-net --init-log-std 0.3"))
    obs, actions, logprobs = rng.normal(size=(n, 3)), rng.normal(size=(n, 2)), rng.normal(size=n)
    old_values, advantages, returns = rng.normal(size=(3, n))
    columns = [obs, actions, logprobs - 3, old_values, advantages, returns]
    names = ("obs", "actions", "logprobs", "values", "advantages", "returns")
    batch = {name: torch.tensor(c, dtype=torch.float32) for name, c in zip(names, columns)}
    with torch.no_grad():
        terms = [term.numpy() for term in ppo.losses(model, batch, eps, clip_vloss=True)]
        mean, values = (tensor.numpy().astype(float) for tensor in model(batch["obs"]))
    sigma = np.exp(0.3)
    density = np.exp(-0.5 * ((actions - mean) / sigma) ** 2) / (sigma * np.sqrt(2 * np.pi))
    ratio = density.prod(axis=1) / np.exp(logprobs - 3)
    objective = np.minimum(ratio * advantages, np.clip(ratio, 1 - eps, 1 + eps) * advantages)
    clipped = old_values + np.clip(values - old_values, -eps, eps)
    v_loss = 0.5 * np.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    entropy = np.full(n, np.log(2 * np.pi * np.e * sigma**2))
    for actual, expected in zip(terms, (-objective, v_loss, entropy, np.log(ratio))):
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=1e-5)


def test_value_clipping():
    """Hand values: V moved by 1 from the old one, clipped to 0.2; the worse of both counts."""
    model = ppo.Model(3, SPACES["discrete"], options("--hidden 8"))
    batch, values = losses_batch(model, [1.0, 1.0], [0.0, 0.0])
    batch |= {"values": values - 1, "returns": values + torch.tensor([0.5, -2.0])}
    _, plain, *_ = ppo.losses(model, batch, 0.2, clip_vloss=False)
    _, clipped, *_ = ppo.losses(model, batch, 0.2, clip_vloss=True)
    torch.testing.assert_close(plain, torch.tensor([0.125, 2.0]))
    torch.testing.assert_close(clipped, torch.tensor([0.845, 2.0]))


def test_change_of_the_policy():
    """KL estimate and share of clipped rows that an update reports, by hand."""
    model = ppo.Model(3, SPACES["discrete"], options("--hidden 8"))
    batch, _ = losses_batch(model, [0.5, 0.9, 1.0, 1.5], [0.0] * 4)
    args = options("--update-epochs 1 --num-minibatches 1")
    row = ppo.update(model, ppo.make_optimizer(model, args), batch, args, torch.Generator())
    expected = np.mean([0.5 - 1 - math.log(0.5), -0.1 - math.log(0.9), 0, 0.5 - math.log(1.5)])
    assert row["approx_kl"] == pytest.approx(expected, rel=1e-5)
    assert row["clipfrac"] == 0.5


@pytest.mark.parametrize(
    "values, expected", [((1.0, 2.0, 3.0, 6.0), 1.0), ((5.0, 5.0, 5.0, 5.0), 0.0)]
)
def test_explained_variance(values, expected):
    """1 for a perfect value function, 0 for a constant, NaN if there is nothing to explain."""
    batch = {"values": torch.tensor(values), "returns": torch.tensor([1.0, 2.0, 3.0, 6.0])}
    assert ppo.explained_variance(batch) == pytest.approx(expected)
    assert math.isnan(ppo.explained_variance(batch | {"returns": torch.ones(4)}))


# Rollout ------------------------------------------------------------------------------------------


def scripted_rollout(env_id, words):
    """Return model, pool, buffer and args of a rollout in two games.

    Values are V(s) = 100 s_0 + s_1, the policy is the same in all states.
    """
    args = options(f"--env {env_id} --hidden 2 --num-envs 2 {words}")
    model = ppo.make_model(args)
    model.actor = model.critic = nn.Sequential(nn.Identity())
    nn.init.zeros_(model.head.output.weight)
    model.value.weight.data = torch.tensor([[100.0, 1.0]])
    pool = ppo.make_pool(args, model)
    pool.call("start", np.arange(2))
    buffer = ppo.rollout(model, pool, args, torch.Generator().manual_seed(0))
    return model, pool, buffer, args


def test_rollout_at_ends_of_episodes():
    """Episodes of 2 (truncated), 3 (terminated) and 2 (both) steps; obs = (episode, step)."""
    _, pool, buffer, _ = scripted_rollout("envs:Scripted-v0", "--num-steps 8")
    assert ppo.finished_episodes(buffer)[::2] == [(3.0, 2), (36.0, 3), (43.0, 2)]
    assert [game.episode_return for game in pool.player.games] == [31, 31]
    buffer = {name: rows[:, 1] for name, rows in buffer.items()}  # of the second game
    steps = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (3, 0)]
    assert [tuple(row) for row in buffer["obs"].int().tolist()] == steps
    assert buffer["rewards"].tolist() == [10 * episode + t + 1 for episode, t in steps]
    assert buffer["values"].tolist() == [100 * episode + t for episode, t in steps]
    assert buffer["truncated"].nonzero().flatten().tolist() == [1]
    assert buffer["terminated"].nonzero().flatten().tolist() == [4, 6]  # both is terminated
    # V of where the step led, also at the truncated step 1; what ends for good does not count.
    next_values = buffer["next_values"].where(~buffer["terminated"], torch.tensor(-1.0))
    assert next_values.tolist() == [1, 2, 101, 102, -1, 201, -1, 301]


def test_next_rollout_goes_on():
    """It begins where the last one has ended, and leaves the buffer of that one as it was."""
    model, pool, buffer, args = scripted_rollout("envs:Scripted-v0", "--num-steps 8")
    before = {name: rows.clone() for name, rows in buffer.items()}
    after = ppo.rollout(model, pool, args, torch.Generator().manual_seed(1))
    assert after["obs"][:3, 0].tolist() == [[3, 1], [4, 0], [4, 1]]
    assert after["truncated"][0].all()
    assert ppo.finished_episodes(after)[0] == (31 + 32, 2)
    for name, rows in before.items():
        assert torch.equal(buffer[name], rows), name


def test_advantages_do_not_see_what_follows_termination():
    """δ of a terminated step is r − V, whatever next_values holds there."""
    words = "--num-steps 8 --gamma 0.9 --gae-lambda 0"
    model, _, buffer, args = scripted_rollout("envs:Scripted-v0", words)
    batch = ppo.make_batch(buffer, model, args)
    advantages = batch["advantages"].view(8, 2)[:, 0]
    assert advantages[4] == 13 - 102 and advantages[6] == 22 - 201
    assert float(advantages[1]) == pytest.approx(2 + 0.9 * 2 - 1)  # truncated: V of next_obs


def test_box_actions_are_clipped_for_the_env_only():
    """The env gets actions within its bounds, the buffer keeps what the policy sampled."""
    words = "--num-steps 6 --init-log-std 1"
    model, pool, buffer, _ = scripted_rollout("envs:ScriptedBox-v0", words)
    stored = buffer["actions"][:, 0].numpy()
    received = np.stack(pool.player.games[0].env.unwrapped.actions)
    assert np.abs(stored).max() > 0.5
    np.testing.assert_array_equal(received, stored.clip(-0.5, 0.5))
    expected = model.head.log_prob(torch.zeros(6, 3), buffer["actions"][:, 0])
    torch.testing.assert_close(buffer["logprobs"][:, 0], expected)


POLICIES = {
    "one choice": "--env CartPole-v1",
    "entries": "--env envs_spaces:Action-multi_start-v0",
    "flags": "--env envs_spaces:Action-square-v0",
    "masks": "--env envs_spaces:Masked-zero-info-v0 --action-masks",
    "masks of entries": "--env envs_spaces:Masked-multi-info-v0 --action-masks",
    "gaussian": "--env envs_spaces:Action-matrix-v0 --init-log-std -0.5",
    "full covariance": "--env envs_spaces:Action-matrix-v0 --full-covariance",
    "gru": "--rnn gru --rnn-size 5",
    "lstm": "--env Pendulum-v1 --rnn lstm --rnn-size 5 --norm-obs",
    "normaliser": "--norm-obs --shared-net",
    "relu": "--env Pendulum-v1 --activation relu",
    "layer norm": "--layer-norm --activation elu",
}


def acted_literally(head, pi, noise):
    """Return the actions (M, ...) that the head's distribution pi (M, ·) and the noise make."""
    if isinstance(head, ppo.Gaussian):
        entries = pi if noise is None else pi + noise
    else:
        scores = pi if noise is None else pi + noise
        parts = scores.split(head.choices, dim=-1)
        entries = torch.stack([part.argmax(dim=-1) for part in parts], dim=-1)
    return entries.reshape(len(pi), *head.shape)


@pytest.mark.parametrize("kind", POLICIES)
def test_policy_is_the_models(kind):
    """`Policy.act`, in NumPy, samples the distribution that `Model.forward`, in torch, gives."""
    torch.manual_seed(0)
    model = ppo.make_model(options(f"{POLICIES[kind]} --hidden 8 8"))
    policy = ppo.Policy(model)
    for parameter in model.parameters():  # the policy has the model's weights of now
        parameter.data += 0.5 * torch.randn(parameter.shape)
    M, obs_dim = 300, model.obs_dim
    rows = {"obs": torch.randn(M, obs_dim)}
    if "norm-obs" in POLICIES[kind]:
        model.obs_norm.update(3 * torch.randn(9, obs_dim, dtype=torch.double) + 1)
        rows["obs"] = 20 * rows["obs"].double()  # some are beyond ±10 when normalised
    if model.memory is not None:
        rows |= {"starts": torch.rand(M) < 0.5, "state": torch.randn(M, model.memory.size)}
    if "action_mask" in model.inputs:
        rows["action_mask"] = torch.rand(M, model.head.n) < 0.5
        rows["action_mask"][:, torch.tensor([0, *model.head.choices[:-1]]).cumsum(0)] = True
    time_major = {name: column.unsqueeze(0) for name, column in rows.items()}
    with torch.no_grad():
        pi = model(**time_major)[0][0]
    arrays = {name: column.numpy() for name, column in rows.items()}
    noise = model.head.noise(M, torch.Generator().manual_seed(0))
    for given in (noise, None):
        actions, state = policy.act(**arrays, noise=None if given is None else given.numpy())
        expected = acted_literally(model.head, pi, given)
        torch.testing.assert_close(torch.from_numpy(actions), expected, rtol=1e-4, atol=1e-5)
        if isinstance(model.head, ppo.Categorical):
            assert len(expected.reshape(M, -1).unique(dim=0)) > 1
    if model.memory is not None:
        with torch.no_grad():
            x = model.obs_norm(time_major["obs"])
            _, expected = model.memory(x, time_major["starts"], rows["state"])
        torch.testing.assert_close(torch.from_numpy(state), expected)


# Update -------------------------------------------------------------------------------------------


def update_setup(words=""):
    """Return model, optimizer, batch of 12 rows, args and generator for `update`."""
    torch.manual_seed(0)
    args = options(f"--hidden 8 --update-epochs 3 --no-clip-vloss {words}")
    model = ppo.Model(3, SPACES["discrete"], args)
    batch, values = losses_batch(model, [1.0] * 12, torch.randn(12).tolist())
    batch["returns"] = values + torch.randn(12)
    optimizer = ppo.make_optimizer(model, args)
    optimizer.param_groups[0]["lr"] = 0.01
    return model, optimizer, batch, args, torch.Generator().manual_seed(0)


def test_target_kl_ends_the_update(monkeypatch):
    """The first step has KL 0; a minibatch that sees a KL above the target stops the update."""
    real, seen = ppo.minibatch_loss, []

    def minibatch_loss(*arguments):
        loss, row = real(*arguments)
        seen.append(float(row["approx_kl"]))
        return loss, row

    def steps_of(target):
        model, optimizer, *rest = update_setup(f"--target-kl {target}")
        steps = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        ppo.update(model, optimizer, *rest)
        return len(steps)

    monkeypatch.setattr(ppo, "minibatch_loss", minibatch_loss)
    assert steps_of(0) == steps_of(1e9) == 3 * 4
    second = seen[1]
    assert seen[0] < 1e-9 < second
    assert steps_of(0.99 * second) == 1 < steps_of(1.01 * second)


def test_means_of_an_update():
    """A number that the last minibatch lacks, since --target-kl ended it, is the others' mean."""
    rows = [{"loss": 1, "norm": 2}, {"loss": 2, "norm": 4}, {"loss": 6}]
    rows = [{name: torch.tensor(float(value)) for name, value in row.items()} for row in rows]
    assert ppo.mean_row(rows) == {"loss": 3, "norm": 3}


@pytest.mark.parametrize("norm_adv", ["minibatch", "batch", "off"])
def test_minibatches(monkeypatch, norm_adv):
    """Every epoch uses each row once; advantages are normalised per minibatch, once or never."""
    used, real = [], ppo.losses
    monkeypatch.setattr(ppo, "losses", lambda model, mb, *a: used.append(mb) or real(model, mb, *a))
    model, optimizer, batch, args, generator = update_setup(f"--norm-adv {norm_adv}")
    expected = batch["advantages"].clone()
    ppo.update(model, optimizer, batch, args, generator)
    assert torch.equal(batch["advantages"], expected)  # the caller's stay what they were
    if norm_adv == "batch":
        expected = (expected - expected.mean()) / expected.std()
    orders = []
    for epoch in (used[:4], used[4:8], used[8:]):
        returns = torch.cat([mb["returns"] for mb in epoch])
        assert torch.equal(returns.sort()[0], batch["returns"].sort()[0])
        orders.append(returns.tolist())
        if norm_adv != "minibatch":
            advantages = torch.cat([mb["advantages"] for mb in epoch])
            torch.testing.assert_close(advantages.sort()[0], expected.sort()[0])
            continue
        for mb in epoch:
            assert abs(float(mb["advantages"].mean())) < 1e-6
            assert float(mb["advantages"].std()) == pytest.approx(1, abs=1e-5)
    assert orders[0] != orders[1] != orders[2]


def test_gradient_clipping():
    """A gradient longer than --max-grad-norm is shortened to it, a shorter one is kept."""
    changes = []
    for max_grad_norm in (1e-3, 1e9):
        words = f"--max-grad-norm {max_grad_norm} --update-epochs 1 --num-minibatches 1"
        model, _, *rest = update_setup(words)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        ppo.update(model, torch.optim.SGD(model.parameters(), lr=1.0), *rest)
        changes.append(nn.utils.parameters_to_vector(model.parameters()).detach() - before)
    clipped, free = changes
    assert float(clipped.norm()) == pytest.approx(1e-3, rel=1e-2) and float(free.norm()) > 0.01
    torch.testing.assert_close(clipped / clipped.norm(), free / free.norm(), atol=2e-3, rtol=0)


def test_loss_that_is_not_finite_reaches_no_weight():
    """NaN in the loss is an error, and the weights stay what they were."""
    model, optimizer, batch, *rest = update_setup()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    batch["returns"][:] = float("nan")
    with pytest.raises(FloatingPointError, match="no finite gradient"):
        ppo.update(model, optimizer, batch, *rest)
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_update_is_that_of_peers(monkeypatch, env):
    """From one rollout it gives the weights of Stable-Baselines3 and of skrl, but for rounding."""
    pytest.importorskip("stable_baselines3")
    pytest.importorskip("skrl")
    monkeypatch.syspath_prepend(Path(__file__).parent / "benchmarks")
    import peers

    for advantages, weights in peers.compare(env).values():
        assert advantages < 1e-5 and weights < 1e-4


# Runs ---------------------------------------------------------------------------------------------


def train(log_dir, *words):
    """Train on CartPole in this process."""
    return ppo.train(ppo.parse_args([*SMALL, "--log-dir", str(log_dir), *words]))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four iterations."""
    return train(tmp_path_factory.mktemp("run"), "--num-iterations", "4", "--eval-every", "2")


def progress(run_dir):
    """Return the rows of progress.csv."""
    with (run_dir / "progress.csv").open() as file:
        return list(csv.DictReader(file))


def test_run_config(run):
    """config.json has the options; the folder's name says what ran."""
    config = json.loads((run.run_dir / "config.json").read_text())
    expected = {name: value for name, value in vars(run.args).items() if name in config}
    assert config == expected
    assert vars(run.args).keys() - config.keys() == set(ppo.NOT_KEPT)
    assert config["learning_rate"] == 1e-3 and config["env"] == "CartPole-v1"
    assert run.run_dir.name.startswith("CartPole-v1__ppo__1__")


def test_run_progress(run):
    """progress.csv has a row per iteration, after the evaluation of the start, and all columns."""
    rows = progress(run.run_dir)
    names = (
        "iteration global_step wall_seconds sps iteration_return episodic_return eval_return "
        "policy_loss value_loss entropy approx_kl clipfrac explained_variance learning_rate"
    ).split()
    assert set(names) <= rows[0].keys()
    assert [int(row["iteration"]) for row in rows] == [0, 1, 2, 3, 4]
    assert [int(row["global_step"]) for row in rows] == [0, 128, 256, 384, 512]
    assert [bool(row["eval_return"]) for row in rows] == [True, False, True, False, True]
    for row in rows[1:]:
        assert all(math.isfinite(float(row[name])) for name in names if name != "eval_return")
    seconds = [float(row["wall_seconds"]) for row in rows]
    assert seconds == sorted(seconds) and seconds[0] == 0
    assert 0 < float(rows[-1]["entropy"]) < math.log(2) + 1e-6
    assert float(rows[-1]["eval_return"]) == run.history[-1]["eval_return"]


def test_returns_of_an_iteration(tmp_path, monkeypatch):
    """`iteration_return` is the mean of the episodes that ended in it, `episodic_return` of 100."""
    finished = []
    find = ppo.finished_episodes

    def record(buffer):
        finished.append([episode[0] for episode in find(buffer)])
        return find(buffer)

    monkeypatch.setattr(ppo, "finished_episodes", record)
    history = train(tmp_path, "--num-iterations", "20", "--num-steps", "8").history
    assert any(finished) and not all(finished)
    for i, row in enumerate(history):
        assert ("iteration_return" in row) == bool(finished[i])
        if finished[i]:
            assert row["iteration_return"] == pytest.approx(np.mean(finished[i]))
            recent = sum(finished[: i + 1], [])[-100:]
            assert row["episodic_return"] == pytest.approx(np.mean(recent))


def test_run_checkpoint(run):
    """checkpoint.pt loads without running code; it has model, optimizer and counters."""
    state = torch.load(run.run_dir / "checkpoint.pt", weights_only=True)
    assert state["counters"]["iteration"] == 4 and state["counters"]["global_step"] == 512
    for name, value in run.model.state_dict().items():
        assert torch.equal(state["model"][name], value)
    assert float(state["optimizer"]["state"][0]["step"]) == 4 * 2 * 2
    assert torch.equal(state["generator"], run.generator.get_state())
    assert not list(run.run_dir.glob("*partial*"))


def test_run_tensorboard(run):
    """TensorBoard finds CleanRL's tags at the global steps of progress.csv."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.run_dir))
    events.Reload()
    names = ("iteration_return", "episodic_return", "SPS", "learning_rate")
    charts = {f"charts/{name}" for name in names}
    names = "policy_loss value_loss entropy approx_kl clipfrac explained_variance".split()
    tags = set(events.Tags()["scalars"])
    assert charts | {f"losses/{name}" for name in names} | {"charts/eval_return"} <= tags
    values = events.Scalars("losses/value_loss")
    assert [event.step for event in values] == [128, 256, 384, 512]
    expected = [row["value_loss"] for row in run.history[1:]]
    assert [event.value for event in values] == pytest.approx(expected)


@pytest.mark.parametrize("num_workers", ["0", "1", "2"])
def test_same_seed_same_parameters(run, tmp_path, num_workers):
    """A seed gives bitwise the same parameters, with any number of workers and evaluations."""
    again = train(tmp_path, "--num-iterations", "4", "--num-workers", num_workers)
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_other_seed_other_parameters(run, tmp_path):
    """Another seed gives other weights and another run."""
    other = train(tmp_path, "--num-iterations", "4", "--seed", "2")
    assert not torch.equal(run.model.value.weight, other.model.value.weight)
    assert other.history[-1]["policy_loss"] != run.history[-1]["policy_loss"]


def test_resume(run, tmp_path):
    """--resume continues counters, optimizer and learning rate, and appends to progress.csv."""
    first = train(tmp_path, "--num-iterations", "2")
    with (first.run_dir / "progress.csv").open("a") as file:
        file.write("3,384\r\n")  # as if the run had gone on after its last checkpoint
    words = ["--resume", str(first.run_dir), "--num-iterations", "4", "--quiet"]
    args = ppo.parse_args(words)
    assert args.hidden == [16, 16] and args.num_steps == 32
    second = ppo.train(args)
    assert second.run_dir == first.run_dir
    assert [row["iteration"] for row in second.history] == [1, 2, 3, 4]
    assert [row["global_step"] for row in second.history] == [128, 256, 384, 512]
    rates = [row["learning_rate"] for row in second.history[2:]]
    assert rates == pytest.approx([0.5e-3, 0.25e-3])
    assert [int(row["iteration"]) for row in progress(first.run_dir)] == [1, 2, 3, 4]
    state = torch.load(first.run_dir / "checkpoint.pt", weights_only=True)
    assert float(state["optimizer"]["state"][0]["step"]) == 4 * 2 * 2
    assert state["counters"]["wall_seconds"] > first.history[-1]["wall_seconds"]


def test_resume_starts_from_the_checkpoint(run, tmp_path):
    """A run resumed for no iteration more has the parameters of its checkpoint."""
    copy = shutil.copytree(run.run_dir, tmp_path / "copy")
    again = ppo.train(ppo.parse_args(["--resume", str(copy), "--quiet"]))
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])
    assert len(run.recent) > 2 and again.recent == run.recent
    assert progress(copy) == progress(run.run_dir)


def play_literally(model, seed):
    """Return the return of CartPole's first episode from a seed, with the policy's mode."""
    total, ended = 0.0, False
    with gym.make("CartPole-v1") as env:
        obs, _ = env.reset(seed=seed)
        while not ended:
            action = int(model(torch.tensor(obs))[0].argmax())
            obs, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + reward, terminated or truncated
    return total


def test_eval(run, capsys):
    """--eval prints mean ± sd of the episodes from its seeds; those of the run's own evaluations.

    A game that has ended before the others plays further episodes, which do not count.
    """
    args = ppo.parse_args(["--eval", str(run.run_dir), "--eval-episodes", "16"])
    returns = ppo.evaluate_run(args)
    assert returns.tolist() == [play_literally(run.model, ppo.EVAL_SEED + k) for k in range(16)]
    found = re.search(r"(-?\d+\.\d+) ± (\d+\.\d+) over 16 episodes", capsys.readouterr().out)
    assert float(found[1]) == pytest.approx(returns.mean(), abs=1e-3)
    assert float(found[2]) == pytest.approx(returns.std(), abs=1e-3)
    assert returns[: run.args.eval_episodes].mean() == run.history[-1]["eval_return"]


def test_evaluations_begin_alike(tmp_path):
    """What a wrapper has learned in evaluations is forgotten, as it is where --eval begins."""
    wrapped = lambda **more: gym.wrappers.NormalizeObservation(gym.make("Pendulum-v1", **more))  # noqa: E731
    gym.register("Wrapped-v0", wrapped)
    argv = [*SMALL, "--env", "Wrapped-v0", "--eval-every", "1", "--num-iterations", "2"]
    run = ppo.train(ppo.parse_args([*argv, "--log-dir", str(tmp_path)]))
    returns = ppo.evaluate_run(ppo.parse_args(["--eval", str(run.run_dir)]))
    assert returns.mean() == pytest.approx(run.history[-1]["eval_return"], rel=1e-6)


def test_episode_that_never_ends(monkeypatch):
    """An evaluation plays first episodes of two steps, rewards 1 and 2; one step is too few."""
    args = options("--env envs:Scripted-v0 --eval-episodes 2")
    model = ppo.make_model(args)
    monkeypatch.setattr(ppo, "MOST_STEPS", 2)
    assert ppo.evaluate(model, args).tolist() == [3, 3]
    monkeypatch.setattr(ppo, "MOST_STEPS", 1)
    with pytest.raises(ppo.GameError, match="envs:Scripted-v0: an episode takes over 1 steps"):
        ppo.evaluate(model, args)


def test_video(run, monkeypatch, tmp_path):
    """--eval --video writes a film of one episode that can be read."""
    cv2 = pytest.importorskip("cv2")
    monkeypatch.chdir(tmp_path)
    words = ["--eval", str(run.run_dir), "--eval-episodes", "1", "--video"]
    returns = ppo.evaluate_run(ppo.parse_args(words))
    video = cv2.VideoCapture(str(run.run_dir / "video" / "rl-video-episode-0.mp4"))
    readable, picture = video.read()
    frames = video.get(cv2.CAP_PROP_FRAME_COUNT)
    video.release()
    assert readable and picture.std() > 0
    assert abs(frames - returns[0]) <= 1  # CartPole's return is its length


@pytest.mark.parametrize("save_every, expected", [("2", [2, 4, 5]), ("0", [5])])
def test_save_every(monkeypatch, tmp_path, save_every, expected):
    """Checkpoints are written every so many iterations, and at the end."""
    saved, real = [], ppo.Run.save

    def save(run):
        saved.append(run.iteration)
        real(run)

    monkeypatch.setattr(ppo.Run, "save", save)
    train(tmp_path, "--num-iterations", "5", "--save-every", save_every)
    assert sorted(set(saved)) == expected


def test_total_timesteps(monkeypatch, tmp_path):
    """The number of iterations follows from the steps, those of one iteration are the minimum."""
    monkeypatch.chdir(tmp_path)
    assert ppo.parse_args([*SMALL, "--total-timesteps", "1000"]).num_iterations == 7
    assert ppo.parse_args([*SMALL, "--total-timesteps", "1"]).num_iterations == 1
    assert ppo.parse_args([]).num_iterations == 500_000 // 512


def test_status_lines(capsys, tmp_path):
    """Without --quiet there is a line per iteration, and the last line names the run's folder."""
    words = [*SMALL[:-1], "--log-dir", str(tmp_path), "--num-iterations", "2"]
    run_dir = ppo.train(ppo.parse_args(words)).run_dir
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and str(run_dir) in lines[-1]
    for i, line in enumerate(lines[:2], start=1):
        assert re.search(rf"^iteration {i} \({i / 2:.0%}\) .*{128 * i}.*ETA", line)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2", "3"])
@pytest.mark.parametrize("name, least", [("CartPole", 475), ("Pendulum", -250)])
def test_learns(monkeypatch, tmp_path, name, least, seed):
    """The recorded commands do: to 475, CartPole's "solved", and to -250 on Pendulum."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    words = importlib.import_module("learn_ppo").RUNS[name].split()
    command = [sys.executable, "ppo.py", *words, "--seed", seed, "--quiet"]
    subprocess.run([*command, "--log-dir", str(tmp_path)], cwd=ROOT, check=True)
    (run_dir,) = tmp_path.iterdir()
    assert max(float(row["episodic_return"]) for row in progress(run_dir)) >= least
