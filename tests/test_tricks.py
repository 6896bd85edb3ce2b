"""Tests of ppo.py's options: normalisations, learning rates, networks, the rungs, memory."""

import copy
import csv
import json
import math
import re
import shutil
from contextlib import closing
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import ppo

NOISE = "envs_tricks:Noise-v0"
SMALL = (
    f"--env {NOISE} --num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 2 --hidden 8 8 "
    "--learning-rate 1e-2 --eval-episodes 4 --num-iterations 3 --quiet"
).split()
T, N = 16, 4  # of SMALL
DISCRETE, BOX = gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,))


def clone(thing):
    """Return a copy of tensors and modules, also those in dicts, lists and tuples."""
    if isinstance(thing, torch.Tensor):
        return thing.detach().clone()
    if isinstance(thing, nn.Module):
        return copy.deepcopy(thing)
    if isinstance(thing, dict):
        return {name: clone(value) for name, value in thing.items()}
    return [clone(value) for value in thing] if isinstance(thing, (list, tuple)) else thing


def spy(monkeypatch, name):
    """Have ppo's function `name` keep copies of its arguments and results in the returned list."""
    calls, real = [], getattr(ppo, name)

    def function(*args, **options):
        before = clone(args)
        result = real(*args, **options)
        calls.append(SimpleNamespace(args=before, result=clone(result)))
        return result

    monkeypatch.setattr(ppo, name, function)
    return calls


def lively(monkeypatch):
    """Have ppo start with policies far from uniform, so that a wrong input of theirs shows."""
    real = ppo.make_model

    def make_model(args):
        model = real(args)
        model.head.output.weight.data *= 100
        return model

    monkeypatch.setattr(ppo, "make_model", make_model)


def make_model(words="", space=DISCRETE, obs_dim=3):
    """Return a model with these options, unchecked."""
    return ppo.Model(obs_dim, space, ppo.make_parser().parse_args(words.split()))


def inputs(model, rows):
    """Return the model's inputs among the rows."""
    return {name: rows[name] for name in model.inputs}


def parse(log_dir, *options):
    """Return the arguments of a small run."""
    return ppo.parse_args([*SMALL, "--log-dir", str(log_dir), *options])


def train(log_dir, *options):
    """Train in this process."""
    return ppo.train(parse(log_dir, *options))


def assert_same_parameters(run, other):
    """Both runs have bitwise the same weights and statistics."""
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name


def close(actual, expected, **tolerances):
    """Assert that tensors or arrays have the same numbers, in float32's precision."""
    actual, expected = (torch.as_tensor(x).detach().float() for x in (actual, expected))
    torch.testing.assert_close(actual, expected, **({"rtol": 1e-4, "atol": 1e-5} | tolerances))


# Running statistics -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,)])
def test_running_norm_is_numpys(shape):
    """After batches of different sizes, mean and variance are NumPy's over all rows."""
    rng, norm, rows = np.random.default_rng(0), ppo.RunningNorm(shape), []
    for size in (5, 1, 37, 100, 2):
        rows.append(rng.normal(size, 1 + size / 10, (size, *shape)))
        norm.update(torch.tensor(rows[-1], dtype=torch.float32))
        seen = np.concatenate(rows)
        close(norm.mean, seen.mean(axis=0))
        close(norm.var, seen.var(axis=0))
        assert norm.count == len(seen)
    x = torch.tensor(rows[2], dtype=torch.float32)
    close(norm(x), (rows[2] - seen.mean(axis=0)) / seen.std(axis=0), atol=1e-4)


def test_running_norm_limit():
    """Nothing is beyond `limit`; a column without variance stays finite; the model's is ±10."""
    norm = ppo.RunningNorm((2,), limit=2)
    norm.update(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))  # mean 2 and 5, deviation 1 and 0
    close(norm(torch.tensor([[3.5, 5.0], [9.0, 5.0], [-9.0, 5.0]])), [[1.5, 0], [2, 0], [-2, 0]])
    assert ppo.RunningNorm()(torch.tensor(1e6)) == 1e6
    for words in ("--norm-obs", "--norm-obs --rnn gru"):
        model = make_model(words, obs_dim=2)
        assert model.obs_norm(torch.tensor([[99.0, -99.0]])).tolist() == [[10, -10]]


@pytest.mark.parametrize("rnn", [[], ["--rnn", "gru"]])
def test_norm_obs(monkeypatch, tmp_path, rnn):
    """The policy sees observations normalised by all those of the iterations before."""
    lively(monkeypatch)
    seen, scores, as_function, sample = [], [], ppo.as_function, ppo.Categorical.sample

    def watched(module):
        function = as_function(module)
        if type(module) is not ppo.RunningNorm:
            return function
        return lambda obs: seen.append(function(obs)) or seen[-1]

    def watched_sample(head, logits, *rest):
        scores.append(torch.from_numpy(logits.copy()))
        return sample(head, logits, *rest)

    monkeypatch.setattr(ppo, "as_function", watched)
    monkeypatch.setattr(ppo.Categorical, "sample", watched_sample)
    rollouts, losses = spy(monkeypatch, "rollout"), spy(monkeypatch, "losses")
    run = train(tmp_path, "--norm-obs", *rnn)
    obs = [rollout.result["obs"].numpy() for rollout in rollouts]  # (T, N, D) per iteration
    for i, rollout in enumerate(call.result for call in rollouts):
        x = np.stack(seen[i * T : (i + 1) * T])
        before = np.concatenate(obs[:i] or [[-1.0, 1.0]]).reshape(-1, 3 if i else 1)
        close(x, ((obs[i] - before.mean(axis=0)) / before.std(axis=0)).clip(-10, 10), atol=1e-4)
        logp = torch.stack(scores[i * T : (i + 1) * T]).log_softmax(dim=-1)
        close(rollout["logprobs"], logp.gather(-1, rollout["actions"][..., None])[..., 0])
    everything = np.concatenate(obs).reshape(-1, 3)
    close(run.model.obs_norm.mean, everything.mean(axis=0))
    close(run.model.obs_norm.var, everything.var(axis=0))
    assert run.model.obs_norm.count == len(everything) == 3 * T * N
    # The statistics change after the update: in its first minibatch the ratio is still 1.
    assert len(losses) == 3 * 2 * 2
    for first, last in zip(losses[::4], losses[3::4]):
        assert first.result[3].abs().max() < 1e-4 < last.result[3].abs().max()


def reward_norm_literal(rollouts, gamma):
    """Return the rewards of [(rewards, ended), ...] as --norm-reward has them, by loops."""
    games = range(rollouts[0][0].shape[1])
    sums, running, scaled = [], [0.0] * len(games), []
    for rewards, ended in rollouts:
        for n in games:
            for t in range(len(rewards)):
                running[n] = float(rewards[t, n]) + gamma * running[n]
                sums.append(running[n])
                if ended[t, n]:
                    running[n] = 0.0
        scaled.append(np.clip(rewards / np.std(sums), -10, 10))
    return scaled


def scaled(model, rewards, sums):
    """Return a rollout's rewards (T, N) as GAE gets them, given their discounted sums."""
    buffer = {"rewards": torch.as_tensor(rewards, dtype=torch.float32)}
    buffer["discounted"] = torch.tensor(sums)
    ppo.normalise_rewards(model, buffer)
    return buffer["rewards"]


def test_rewards_are_divided():
    """By the deviation of all discounted sums so far, this rollout's too; ten of them at most."""
    model, rng = make_model("--norm-reward"), np.random.default_rng(0)
    sums = [rng.normal(3, 2, (20, 3)).astype(np.float32) for _ in range(3)]
    for i in range(3):
        rewards = rng.normal(3, 2, (20, 3))
        rewards[5, 1] = 1e4
        expected = np.clip(rewards / np.std(sums[: i + 1]), -10, 10)
        close(scaled(model, rewards, sums[i]), expected)
    assert model.reward_norm.count == 3 * 60


def test_rewards_are_cut():
    """A reward beyond ten deviations counts as ten."""
    model = make_model("--norm-reward")
    model.reward_norm.update(torch.tensor([-1.0, 1.0]).repeat(10_000))
    rewards = [[50.0], [-50.0], [0.5]]
    close(scaled(model, rewards, rewards), [[10], [-10], [0.5]], rtol=0.2)
    assert scaled(model, [[70.0]], [[70.0]]).item() == 10


def test_discounted_sums_begin_anew(monkeypatch):
    """Game by game they are Σ_k γ^k r_{t−k} over the episode so far, whenever it began."""
    args = ppo.parse_args("--env envs:Scripted-v0 --gamma 0.9 --num-envs 3 --num-steps 32".split())
    rng = np.random.default_rng(0)
    rewards, ended = rng.normal(3, 2, (64, 3)), rng.random((64, 3)) < 0.2
    model = ppo.make_model(args)
    pool = ppo.make_pool(args, model)
    pool.call("start", np.arange(3))
    for n, game in enumerate(pool.player.games):
        pairs = zip(rewards[:, n], ended[:, n])
        steps = iter([(np.zeros(2), reward, bool(end), False, {}) for reward, end in pairs])
        monkeypatch.setattr(game.env, "step", lambda action, steps=steps: next(steps))
    generator = torch.Generator()
    rollouts = [ppo.rollout(model, pool, args, generator) for _ in range(2)]
    seen = torch.cat([buffer["discounted"] for buffer in rollouts])
    for n in range(3):
        running = 0.0
        for t in range(64):
            running = rewards[t, n] + 0.9 * running
            assert seen[t, n] == pytest.approx(running, rel=1e-5)
            running *= not ended[t, n]


def test_norm_reward(monkeypatch, tmp_path):
    """GAE gets the scaled rewards, progress.csv the raw returns; statistics go on over updates."""
    rollouts, advantages = spy(monkeypatch, "rollout"), spy(monkeypatch, "gae")
    options = "--env envs:Scripted-v0 --gamma 0.9".split()
    run, plain = train(tmp_path, "--norm-reward", *options), train(tmp_path, *options)
    raw = []
    for call in rollouts[:3]:
        buffer = {name: rows.numpy() for name, rows in call.result.items()}
        raw.append((buffer["rewards"], buffer["terminated"] | buffer["truncated"]))
    assert raw[0][0].max() > 30  # 10 · episode + step
    for call, expected in zip(advantages, reward_norm_literal(raw, 0.9)):
        close(call.args[0], expected)
    returns = [row["episodic_return"] for row in run.history]
    assert returns == [row["episodic_return"] for row in plain.history]
    episodes = ppo.finished_episodes(rollouts[0].result)
    assert returns[0] == pytest.approx(np.mean([pair[0] for pair in episodes]))
    assert run.model.reward_norm.count == 3 * T * N


NORMS = ("--norm-obs", "--norm-reward", "--norm-value")


@pytest.fixture(scope="module")
def normalised_run(tmp_path_factory):
    """A run with all running statistics."""
    return train(tmp_path_factory.mktemp("norms"), *NORMS, "--eval-every", "3")


def statistics(state):
    """Return the running statistics in a state_dict."""
    return {name: state[name] for name in state if "norm." in name}


def test_statistics_are_in_the_checkpoint(normalised_run):
    """checkpoint.pt has mean, variance, deviation and count of all three."""
    kept = statistics(ppo.read_checkpoint(normalised_run.run_dir)["model"])
    for norm in ("obs_norm", "reward_norm", "value_norm"):
        assert kept[f"{norm}.count"] == 3 * T * N and (kept[f"{norm}.var"] != 1).all()
        for name in ("mean", "var", "std"):
            expected = getattr(getattr(normalised_run.model, norm), name)
            assert torch.equal(kept[f"{norm}.{name}"], expected)


def test_statistics_are_loaded_and_frozen_in_evaluation(normalised_run, monkeypatch):
    """--eval plays with the run's statistics, and leaves them as they are."""
    calls = spy(monkeypatch, "evaluate")
    models, real = [], ppo.make_model
    monkeypatch.setattr(ppo, "make_model", lambda args: models.append(real(args)) or models[-1])
    returns = ppo.evaluate_run(ppo.parse_args(["--eval", str(normalised_run.run_dir)]))
    assert returns.mean() == normalised_run.history[-1]["eval_return"]
    expected = statistics(normalised_run.model.state_dict())
    assert len(expected) == 3 * 4
    for model in (calls[0].args[0], models[-1]):  # before and after
        for name, value in statistics(model.state_dict()).items():
            assert torch.equal(value, expected[name]), name


def test_statistics_go_on_in_a_resumed_run(normalised_run, tmp_path):
    """--resume takes further rows into the statistics of the checkpoint."""
    run_dir = shutil.copytree(normalised_run.run_dir, tmp_path / "copy")
    run = ppo.train(ppo.parse_args(f"--resume {run_dir} --num-iterations 4 --quiet".split()))
    for norm in (run.model.obs_norm, run.model.reward_norm, run.model.value_norm):
        assert norm.count == 4 * T * N


def test_command_line_wins(normalised_run, tmp_path, capsys):
    """A resumed run learns at the rate that is given; statistics are as in the run, or refused."""
    run_dir = shutil.copytree(normalised_run.run_dir, tmp_path / "copy")
    words = f"--resume {run_dir} --num-iterations 6 --learning-rate 4e-3 --no-anneal-lr --quiet"
    run = ppo.train(ppo.parse_args(words.split()))
    assert [row["learning_rate"] for row in run.history[-3:]] == [4e-3] * 3
    assert json.loads((run_dir / "config.json").read_text())["learning_rate"] == 4e-3
    with pytest.raises(SystemExit) as error:
        ppo.parse_args(["--eval", str(run_dir), "--no-norm-obs"])
    assert error.value.code == 2
    pattern = r"ppo.py: error: cannot use the run in .*obs_norm.*\n"
    assert re.fullmatch(pattern, capsys.readouterr().err)


# Normalised values --------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_popart_keeps_the_values(shared):
    """V(s) = μ + σ V_normalised(s) stays the same when μ and σ change."""
    model = make_model("--norm-value" + " --shared-net" * shared)
    torch.nn.init.normal_(model.value.weight)
    obs, generator = torch.randn(20, 3), torch.Generator().manual_seed(0)

    def values():
        return model.value_norm.mean + (model.value_norm.var + 1e-8).sqrt() * model(obs)[1]

    before, pi, rows = values(), model(obs)[0], []
    for mean, std in ((100.0, 7.0), (-3.0, 0.1), (0.0, 50.0)):
        rows.append(mean + std * torch.randn(30, generator=generator))
        statistics = clone(model.value_norm)
        batch = {"values": values(), "returns": rows[-1]}
        ppo.normalise_values(model, batch, rows[-1])
        close(batch["values"], model(obs)[1], atol=1e-4)
        close(model.value_norm.mean + model.value_norm.std * batch["returns"], rows[-1], atol=1e-4)
        assert model.value_norm.mean != statistics.mean and model.value_norm.var != statistics.var
        close(values(), before, atol=1e-4)
        close(model.value_norm.mean, torch.cat(rows).mean())
        close(model.value_norm.var, torch.cat(rows).var(correction=0))
    assert torch.equal(model(obs)[0], pi)


def test_values_that_are_normalised_begin_at_zero():
    """Else a random V would be large beside small returns, and PopArt would keep it."""
    model, obs = make_model("--norm-value"), torch.randn(20, 3)
    assert (model(obs)[1] == 0).all() and (make_model("")(obs)[1] != 0).any()
    returns = 5 + 1e-3 * torch.randn(50)
    ppo.normalise_values(model, {"values": torch.zeros(50), "returns": returns}, returns)
    close(model.value_norm.std, returns.std(correction=0))
    close(model.value_norm.restored(model(obs)[1]), torch.zeros(20), atol=1e-4)
    assert (model.value.weight == 0).all()


@pytest.mark.parametrize("rnn", [[], ["--rnn", "gru"]])
def test_norm_value(monkeypatch, tmp_path, rnn):
    """Values have the scale of the rewards in GAE, and are normalised in the loss."""
    names = ("rollout", "make_batch", "update", "losses")
    rollouts, batches, updates, losses = (spy(monkeypatch, name) for name in names)
    run = train(tmp_path, "--norm-value", *rnn)
    returns = []
    for i, (rollout, made, updated) in enumerate(zip(rollouts, batches, updates)):
        model, buffer = rollout.args[0], rollout.result
        mean, std = model.value_norm.mean, (model.value_norm.var + 1e-8).sqrt()
        assert i == 0 or (mean > 2 and std > 1)  # rewards of about 6
        with torch.no_grad():
            values = model(**inputs(model, buffer))[1]
            close(buffer["values"], mean + std * values)
            if not rnn:
                close(buffer["next_values"], mean + std * model(buffer["next_obs"])[1])
        going_on = ~(buffer["terminated"] | buffer["truncated"])[:-1]
        close(buffer["next_values"][:-1][going_on], buffer["values"][1:][going_on])
        assert torch.equal(made.args[0]["values"], buffer["values"])
        returns.append(made.result["returns"].flatten())
        mean, std = torch.cat(returns).mean(), torch.cat(returns).std(correction=0)
        model, _, batch, *_ = updated.args
        close(model.value_norm.mean, mean)
        for name in ("returns", "values"):
            close(batch[name], (made.result[name] - mean) / std)
        # The values that clipping compares with are those of the model after PopArt.
        close(batch["values"], model(**inputs(model, batch))[1])
        assert torch.equal(batch["advantages"], made.result["advantages"])
    first = updates[0].args[2]["returns"]
    close(first.mean(), 0.0)
    close(first.std(correction=0), 1.0)
    rows = torch.cat([call.args[1]["returns"].flatten() for call in losses[:2]])
    close(rows.sort()[0], first.flatten().sort()[0])
    assert run.history[0]["value_loss"] < 2


# Advantages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["minibatch", "batch", "off"])
def test_norm_adv_of_sequences(monkeypatch, tmp_path, where):
    """Advantages have mean 0 and deviation 1 in each minibatch, over the rollout, or neither."""
    updates, losses = spy(monkeypatch, "update"), spy(monkeypatch, "losses")
    train(tmp_path, "--norm-adv", where, "--num-iterations", "1", "--rnn", "lstm")
    raw = updates[0].args[2]["advantages"].flatten()
    minibatches = [call.args[1]["advantages"].flatten() for call in losses]
    assert [len(mb) for mb in minibatches] == [T * N // 2] * 4
    for epoch in (minibatches[:2], minibatches[2:]):
        rows = torch.cat(epoch).sort()[0]
        if where == "minibatch":
            assert all(abs(mb.mean()) < 1e-5 and abs(mb.std() - 1) < 1e-4 for mb in epoch)
            continue
        assert all(abs(mb.mean()) > 1e-3 for mb in epoch)
        expected = (raw - raw.mean()) / raw.std() if where == "batch" else raw
        close(rows, expected.sort()[0])


def buffers_and_advantages(monkeypatch, log_dir, *options):
    """Return [(buffer of a rollout, its advantages (T, N)), ...]."""
    rollouts, updates = spy(monkeypatch, "rollout"), spy(monkeypatch, "update")
    train(log_dir, *options)
    columns = [call.args[2]["advantages"].view(T, N) for call in updates]
    return [(call.result, column) for call, column in zip(rollouts, columns)]


@pytest.mark.parametrize("bootstrap", [True, False])
def test_time_limit_bootstrap(monkeypatch, tmp_path, bootstrap):
    """V of a truncated episode's last state counts by default, not with the option off."""
    options = ["--gae-lambda", "0", "--gamma", "0.9"]
    options += [] if bootstrap else ["--no-time-limit-bootstrap"]
    for buffer, advantages in buffers_and_advantages(monkeypatch, tmp_path, *options):
        terminated, truncated = buffer["terminated"], buffer["truncated"]
        assert truncated.any() and terminated.any() and not (terminated & truncated).any()
        for t in range(T):
            for n in range(N):
                expected = buffer["rewards"][t, n] - buffer["values"][t, n]
                if not terminated[t, n] and (bootstrap or not truncated[t, n]):
                    expected += 0.9 * buffer["next_values"][t, n]
                close(advantages[t, n], expected)


def test_no_baseline(monkeypatch, tmp_path):
    """Without baseline, an advantage is the discounted sum of rewards to the episode's end."""
    options = "--no-baseline --gae-lambda 1 --gamma 0.9".split()
    for buffer, advantages in buffers_and_advantages(monkeypatch, tmp_path, *options):
        ended = buffer["terminated"] | buffer["truncated"]
        assert buffer["values"].abs().max() > 0.01
        for t in range(T):
            for n in range(N):
                expected, discount = 0.0, 1.0
                for k in range(t, T):
                    expected += discount * buffer["rewards"][k, n]
                    discount *= 0.9
                    if ended[k, n]:
                        break
                close(advantages[t, n], expected)


# Learning rates -----------------------------------------------------------------------------------


def adapted_rates(monkeypatch, rates, *kls):
    """Return learning rates after an update of one epoch per list of its minibatches' KLs."""
    weight, logratios = nn.Parameter(torch.zeros(1)), []
    for kl in np.ravel(kls):
        x = math.sqrt(2 * kl)
        for _ in range(9 if kl else 0):  # Newton's method for r − 1 − log r = kl, x = log r
            x -= (math.exp(x) - 1 - x - kl) / (math.exp(x) - 1)
        logratios.append((0 * weight, 0 * weight, 0 * weight, torch.full((4,), x)))
    losses = iter(logratios)
    monkeypatch.setattr(ppo, "losses", lambda *_: next(losses))
    words = f"--adaptive-lr 0.01 --update-epochs {len(kls)} --num-minibatches {len(kls[0])}"
    args = ppo.make_parser().parse_args(words.split())
    model = SimpleNamespace(parameters=list)
    other = nn.Parameter(torch.zeros(1))
    groups = [{"params": [weight], "lr": rates[0]}, {"params": [other]}]
    optimizer = torch.optim.SGD(groups, lr=rates[1])
    ppo.update(model, optimizer, {"advantages": torch.zeros(8)}, args, torch.Generator())
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    "rate, kl, expected",
    [
        (3e-4, 0.0201, 2e-4),  # above 2 · 0.01
        (3e-4, 0.0199, 3e-4),
        (3e-4, 0.01, 3e-4),
        (3e-4, 0.0051, 3e-4),
        (3e-4, 0.0049, 4.5e-4),  # below ½ · 0.01
        (1.2e-6, 1.0, 1e-6),
        (9e-3, 0.0, 1e-2),
        (3e-2, 0.0, 3e-2),  # a low KL does not lower a rate, a high one does not raise it
        (1e-7, 1.0, 1e-7),
    ],
)
def test_adaptive_lr(monkeypatch, rate, kl, expected):
    """skrl's rule by hand values, with a target of 0.01, for all parameter groups.

    What counts is the mean over an epoch's minibatches.
    """
    second = 1e-3 / 1.5 if kl > 0.02 else 1.5e-3 if kl < 0.005 else 1e-3
    for kls in ([kl], [0.5 * kl, 1.5 * kl]):
        found = adapted_rates(monkeypatch, (rate, 1e-3), kls)
        assert found == pytest.approx([expected, second])


def test_adaptive_lr_of_epochs(monkeypatch):
    """Each epoch counts by itself: down, as it is, and up twice."""
    kls = [0.05, 0.03], [0.02, 0.01], [0.002, 0.004], [0.0, 0.001]
    assert adapted_rates(monkeypatch, (3e-4, 6e-4), *kls) == pytest.approx([4.5e-4, 9e-4])


def test_adaptive_lr_beside_target_kl(tmp_path):
    """An update that the KL ends early lowers the learning rate all the same."""
    options = "--learning-rate 1e-2 --adaptive-lr 1e-5 --target-kl 1e-4 --num-iterations 2".split()
    rates = [row["learning_rate"] for row in train(tmp_path, *options).history]
    assert rates[0] < 1e-2 and rates[1] < rates[0]


def group_rates(monkeypatch):
    """Have updates append the learning rates of their optimizer's groups to the returned list."""
    rates, real = [], ppo.update

    def update(model, optimizer, *rest):
        rates.append([group["lr"] for group in optimizer.param_groups])
        return real(model, optimizer, *rest)

    monkeypatch.setattr(ppo, "update", update)
    return rates


def test_adaptive_lr_goes_on_over_iterations_and_in_a_resumed_run(monkeypatch, tmp_path):
    """A KL that is never reached raises the rate by 1.5 per epoch, from where it is."""
    rates = group_rates(monkeypatch)
    options = "--adaptive-lr 1e3 --learning-rate 1e-5".split()
    run = train(tmp_path, *options)
    ppo.train(ppo.parse_args(f"--resume {run.run_dir} --num-iterations 4 --quiet".split()))
    grown = [1, 1.5**2, 1.5**4, 1.5**6]  # two epochs an iteration
    assert [rate for (rate,) in rates] == pytest.approx([1e-5 * factor for factor in grown])
    logged = [row["learning_rate"] for row in run.history]
    assert logged == pytest.approx([1e-5 * factor for factor in grown[1:]])
    rates.clear()
    train(tmp_path, "--adaptive-lr", "1e-12", "--num-iterations", "2")
    assert rates[1] == pytest.approx([1e-2 / 1.5**2])


@pytest.mark.parametrize(
    "options, factors",
    [("", (1, 2 / 3, 1 / 3)), ("--no-anneal-lr", (1, 1, 1))],
)
def test_linear_and_constant_rates(monkeypatch, tmp_path, options, factors):
    """The rate falls linearly or stays."""
    rates, options = group_rates(monkeypatch), options.split()
    history = train(tmp_path, *options).history
    np.testing.assert_allclose(rates, [[1e-2 * factor] for factor in factors])
    np.testing.assert_allclose([row["learning_rate"] for row in history], np.array(rates)[:, 0])


# KL penalty ---------------------------------------------------------------------------------------

OLD = torch.tensor([0.5, 0.25, 0.25])  # π_old
ENUMERATED = torch.tensor([0, 0, 1, 2])  # actions with these frequencies


def exact_kl(logp):
    """KL(π_old, π) = Σ π_old (log π_old − log π)."""
    return (OLD * (OLD.log() - logp)).sum()


def test_approx_kl_is_the_exact_kl_on_average(monkeypatch):
    """Over all actions, in π_old's frequencies, the mean and its gradient are the exact KL's."""
    logits = nn.Parameter(torch.tensor([0.3, -1.0, 0.8]))
    logp, nothing = logits.log_softmax(dim=0), 0 * logits
    terms = nothing, nothing, nothing, logp[ENUMERATED] - OLD.log()[ENUMERATED]
    monkeypatch.setattr(ppo, "losses", lambda *_: terms)
    words = "--kl-coef 1 --update-epochs 1 --num-minibatches 1 --norm-adv off --max-grad-norm 1e9"
    args = ppo.make_parser().parse_args(words.split())
    model = SimpleNamespace(parameters=lambda: [logits])
    optimizer, batch = torch.optim.SGD([logits], 0.1), {"advantages": torch.zeros(4)}
    kl = ppo.update(model, optimizer, batch, args, torch.Generator())["approx_kl"]
    with torch.no_grad():
        logp = torch.tensor([0.3, -1.0, 0.8]).log_softmax(dim=0)
    close(kl, exact_kl(logp))
    assert kl > 0.1
    close(logits.grad, logp.exp() - OLD)  # what calculus says of the exact KL of a softmax


def update_args(**changes):
    """Return the arguments of `update`."""
    args = {"update_epochs": 1, "num_minibatches": 1, "norm_adv": "off", "clip_coef": 0.2}
    args |= {"clip_vloss": False, "vf_coef": 0.5, "ent_coef": 0.01, "max_grad_norm": 1e9}
    args |= {"target_kl": None, "kl_coef": 0.0, "adaptive_lr": None, "baseline": True}
    return SimpleNamespace(**args | changes)


def kl_batch(model):
    """Return rows that are one state with all actions, in the frequencies of π_old."""
    obs = torch.ones(4, 3)
    batch = {"obs": obs, "actions": ENUMERATED, "logprobs": OLD.log()[ENUMERATED]}
    batch["values"] = model(obs)[1].detach()
    return batch | {"advantages": torch.tensor([1.0, -2.0, 3.0, 0.5]), "returns": torch.ones(4)}


def test_kl_coef_adds_the_kl_to_the_loss():
    """One SGD step with rate 1: β moves the parameters by −β ∇KL(π_old, π) more."""
    torch.manual_seed(0)
    start, changes, beta = make_model("--hidden 8"), [], 0.7
    for kl_coef in (0.0, beta):
        model, generator = clone(start), torch.Generator()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        ppo.update(model, optimizer, kl_batch(model), update_args(kl_coef=kl_coef), generator)
        before = nn.utils.parameters_to_vector(start.parameters())
        changes.append(nn.utils.parameters_to_vector(model.parameters()) - before)
    kl = exact_kl(start(torch.ones(1, 3))[0][0])
    gradients = torch.autograd.grad(kl, [*start.parameters()], allow_unused=True)
    pairs = zip(gradients, start.parameters())
    gradient = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])
    assert gradient.norm() > 0.1
    close(changes[1] - changes[0], -beta * gradient)


def test_kl_coef_holds_the_policy():
    """The larger β, the nearer the policy stays to π_old over an update of many steps."""
    distances = []
    for kl_coef in (0.0, 1.0, 100.0):
        torch.manual_seed(0)
        model = make_model("--hidden 8")
        model.head.output.bias.data = OLD.log()
        model.head.output.weight.data.zero_()
        args = update_args(kl_coef=kl_coef, update_epochs=50, clip_coef=10.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        ppo.update(model, optimizer, kl_batch(model), args, torch.Generator())
        distances.append(exact_kl(model(torch.ones(1, 3))[0][0]).item())
    assert distances[0] > 1.5 * distances[1] > 100 * distances[2] > 0, distances


def test_kl_coef_reaches_the_run(tmp_path):
    """--kl-coef on the command line lowers the logged KL."""
    options = "--num-iterations 1 --update-epochs 10".split()
    runs = [train(tmp_path, "--kl-coef", coef, *options) for coef in ("0", "10")]
    free, held = (run.history[0]["approx_kl"] for run in runs)
    assert 0 < held < free / 2


# Networks -----------------------------------------------------------------------------------------

FUNCTIONS = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "elu": lambda x: np.where(x > 0, x, np.exp(x) - 1),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_hidden_layers(tmp_path, activation, layer_norm):
    """Linear, LayerNorm, activation, for each width: by NumPy, from the command line."""
    options = ["--activation", activation, "--hidden", "16", "6"]
    options += ["--layer-norm"] if layer_norm else []
    model = ppo.make_model(parse(tmp_path, *options))
    obs = np.random.default_rng(0).normal(size=(5, 3))
    assert model.critic is not model.actor
    for net, last in ((model.actor, model.head.output), (model.critic, model.value)):
        x, linear = obs, [layer for layer in net if isinstance(layer, nn.Linear)]
        assert [layer.out_features for layer in linear] == [16, 6]
        for layer in (*linear, last):
            x = x @ layer.weight.detach().numpy().T.astype(float)
            if layer is last:
                break
            if layer_norm:
                x = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(
                    x.var(axis=1, keepdims=True) + 1e-5
                )
            x = FUNCTIONS[activation](x)
        actual = model(torch.tensor(obs, dtype=torch.float32))[
            0 if last is model.head.output else 1
        ]
        if last is model.value:
            close(actual, x[:, 0])
        else:
            close(actual, x - np.log(np.exp(x).sum(axis=1, keepdims=True)))


def is_orthogonal(W, gain):
    """Assert that the shorter side's vectors are orthogonal, of length `gain`."""
    W = W.detach()
    product = W @ W.T if W.shape[0] <= W.shape[1] else W.T @ W
    close(product, gain**2 * torch.eye(len(product)))


BOX_OPTIONS = "--env envs_tricks:NoiseBox-v0 --init-log-std -0.7"


@pytest.mark.parametrize(
    "options", ["", "--layer-norm --activation relu", "--shared-net", BOX_OPTIONS]
)
@pytest.mark.parametrize("rnn", ["", "--rnn gru --rnn-size 5", "--rnn lstm --rnn-size 5"])
def test_initialisation(tmp_path, options, rnn):
    """Orthogonal weights of gain √2, 0.01 (policy) and 1 (value, memory); zero biases."""
    model = ppo.make_model(parse(tmp_path, *options.split(), *rnn.split()))
    gains, linear = {model.head.output: 0.01, model.value: 1.0}, []
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            linear.append(layer)
            is_orthogonal(layer.weight, gains.get(layer, 2**0.5))
            assert (layer.bias == 0).all()
    shared = "--shared-net" in options
    assert len(linear) == 2 + (2 if shared else 4) and (model.critic is model.actor) == shared
    if options == BOX_OPTIONS:
        assert model.head.log_std.tolist() == pytest.approx([-0.7, -0.7])
    if rnn:
        for name, parameter in model.memory.named_parameters():
            if "bias" in name:
                assert (parameter == 0).all()
            else:
                is_orthogonal(parameter, 1.0)


# The rungs from policy gradient to PPO ------------------------------------------------------------


def sgd_step(monkeypatch, log_dir, *options):
    """Train for one SGD step of rate 1 on a whole rollout.

    Returns the rollout's buffer, the model before the step and the change of its parameters.
    """
    lively(monkeypatch)
    real = ppo.make_optimizer

    def make_sgd(model, split):
        return torch.optim.SGD(real(model, split).param_groups[0]["params"], 1)

    monkeypatch.setattr(ppo, "make_optimizer", make_sgd)
    rollouts = spy(monkeypatch, "rollout")
    one = "--num-iterations 1 --update-epochs 1 --num-minibatches 1 --norm-adv off".split()
    one += "--learning-rate 1 --max-grad-norm 1e9 --gamma 0.9".split()
    after = train(log_dir, *one, *options).model
    (call,) = rollouts
    before, buffer = call.args[0], call.result
    changes = {}
    for (name, new), old in zip(after.named_parameters(), before.parameters()):
        changes[name] = (new - old).detach()
    return buffer, before, changes


def textbook(model, features, actions):
    """Return log π(a|s), V(s) and H(π(·|s)) by torch.distributions."""
    h = model.actor(features)
    values = model.value(model.critic(features)).squeeze(-1)
    if isinstance(model.head, ppo.Categorical):
        pi = torch.distributions.Categorical(logits=model.head.output(h))
        return pi.log_prob(actions), values, pi.entropy()
    pi = torch.distributions.Normal(model.head.output(h), model.head.log_std.exp())
    return pi.log_prob(actions).sum(dim=-1), values, pi.entropy().sum(dim=-1)


def assert_steps(model, changes, loss):
    """Every parameter changed by minus the gradient of the loss."""
    names, parameters = zip(*model.named_parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for name, parameter, gradient in zip(names, parameters, gradients):
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        close(changes[name], -gradient, rtol=1e-3, atol=2e-5)
    assert max(change.abs().max() for change in changes.values()) > 0.1


VARIANTS = {
    "discrete": "",
    "box": "--env envs_tricks:NoiseBox-v0 --init-log-std -0.5",
    "shared": "--shared-net",
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_actor_critic_gradient(monkeypatch, tmp_path, variant):
    """λ = 0, one step: −E[∇log π (r + γ V(s′)(1 − terminated) − V(s))] and the value's gradient."""
    options = "--gae-lambda 0 --vf-coef 0.7 --ent-coef 0.05".split() + VARIANTS[variant].split()
    buffer, model, changes = sgd_step(monkeypatch, tmp_path, *options)
    logp, values, entropy = textbook(model, buffer["obs"], buffer["actions"])
    next_values = textbook(model, buffer["next_obs"], buffer["actions"])[1]
    target = buffer["rewards"] + 0.9 * next_values * (1 - buffer["terminated"].float())
    target = target.detach()
    policy_loss = -(logp * (target - values.detach())).mean()
    value_loss = 0.5 * (values - target).square().mean()
    assert_steps(model, changes, policy_loss + 0.7 * value_loss - 0.05 * entropy.mean())


@pytest.mark.parametrize("variant", VARIANTS)
def test_vanilla_policy_gradient(monkeypatch, tmp_path, variant):
    """Without baseline, λ = 1: −E[∇log π Σ γ^k r_{t+k}]; the value function does not move."""
    options = "--no-baseline --gae-lambda 1 --ent-coef 0".split()
    options += VARIANTS[variant].split()
    buffer, model, changes = sgd_step(monkeypatch, tmp_path, *options)
    logp, *_ = textbook(model, buffer["obs"], buffer["actions"])
    ended, sums = buffer["terminated"] | buffer["truncated"], torch.zeros(T, N)
    for t in range(T):
        for n in range(N):
            end = next((k for k in range(t, T) if ended[k, n]), T - 1)
            sums[t, n] = sum(0.9 ** (k - t) * buffer["rewards"][k, n] for k in range(t, end + 1))
    assert_steps(model, changes, -(logp * sums).mean())
    assert all((changes[name] == 0).all() for name in ("value.weight", "value.bias"))


def n_step_targets(buffer, next_values, num_steps):
    """Return r_t + γ r_{t+1} + … + γ^n V: to the end of the episode or of the rollout."""
    targets = torch.zeros(num_steps, N)
    for t in range(num_steps):
        for n in range(N):
            for k in range(t, num_steps):
                targets[t, n] += 0.9 ** (k - t) * buffer["rewards"][k, n]
                ended = buffer["terminated"][k, n] or buffer["truncated"][k, n]
                if (ended or k == num_steps - 1) and not buffer["terminated"][k, n]:
                    targets[t, n] += 0.9 ** (k - t + 1) * next_values[k, n]
                if ended:
                    break
    return targets


@pytest.mark.parametrize("variant", VARIANTS)
def test_n_step_actor_critic_gradient(monkeypatch, tmp_path, variant):
    """λ = 1 with five steps: advantages are Σ γ^k r_{t+k} + γ^n V(s_{t+n}) − V(s_t)."""
    options = "--num-steps 5 --gae-lambda 1 --vf-coef 0.7 --ent-coef 0.05".split()
    buffer, model, changes = sgd_step(monkeypatch, tmp_path, *options, *VARIANTS[variant].split())
    logp, values, entropy = textbook(model, buffer["obs"], buffer["actions"])
    next_values = textbook(model, buffer["next_obs"], buffer["actions"])[1].detach()
    assert (buffer["terminated"] | buffer["truncated"]).any()
    targets = n_step_targets(buffer, next_values, 5)
    policy_loss = -(logp * (targets - values.detach())).mean()
    value_loss = 0.5 * (values - targets).square().mean()
    assert_steps(model, changes, policy_loss + 0.7 * value_loss - 0.05 * entropy.mean())


# Memory -------------------------------------------------------------------------------------------

RNNS = ("gru", "lstm")


def stepwise(model, buffers):
    """Return (logprobs, values, next_values, entropies) of rollouts by a loop over single steps.

    The memory is a GRUCell or LSTMCell with the model's own parameters; (T, N) over all rollouts.
    """
    rnn = model.memory.rnn
    lstm = isinstance(rnn, nn.LSTM)
    cell = (nn.LSTMCell if lstm else nn.GRUCell)(3, rnn.hidden_size)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, getattr(rnn, f"{name}_l0"))
    rows = {name: torch.cat([b[name] for b in buffers]) for name in buffers[0]}
    results = []
    for n in range(N):
        state = None
        for t in range(len(rows["obs"])):
            state = cell(rows["obs"][t, n].unsqueeze(0), state)
            h = (state[0] if lstm else state)[0]
            logp, value, entropy = textbook(model, h, rows["actions"][t, n])
            following = cell(rows["next_obs"][t, n].unsqueeze(0), state)
            following = (following[0] if lstm else following)[0]
            next_value = textbook(model, following, rows["actions"][t, n])[1]
            results.append(torch.stack([logp, value, next_value, entropy]))
            if rows["terminated"][t, n] or rows["truncated"][t, n]:
                state = None
    return torch.stack(results).view(N, -1, 4).permute(2, 1, 0)


@pytest.mark.parametrize("options", ["", "--shared-net", "--env envs_tricks:NoiseBox-v0"])
@pytest.mark.parametrize("rnn", RNNS)
def test_memory_over_rollouts(monkeypatch, tmp_path, rnn, options):
    """Log-probabilities and values are those of single steps, with a new memory per episode."""
    lively(monkeypatch)
    rollouts = spy(monkeypatch, "rollout")
    rates = "--learning-rate 1e-30 --num-iterations 2".split()  # the policy stays what it is
    train(tmp_path, "--rnn", rnn, "--rnn-size", "8", *rates, *options.split())
    model, buffers = rollouts[0].args[0], [call.result for call in rollouts]
    assert all(b["terminated"][:-1].any() and b["truncated"][:-1].any() for b in buffers)
    with torch.no_grad():
        logprobs, values, next_values, _ = stepwise(model, buffers)
    for name, expected in (
        ("logprobs", logprobs),
        ("values", values),
        ("next_values", next_values),
    ):
        close(torch.cat([b[name] for b in buffers]), expected)
    # The memory goes on from rollout to rollout, and is not always new there.
    first, second = buffers
    assert first["state"].shape == (T, N, 16 if rnn == "lstm" else 8)
    ended = first["terminated"] | first["truncated"]
    following = torch.cat([first["state"][1:], second["state"][:1]])
    assert torch.equal(
        following, first["next_state"]
    )  # the memory masks it where an episode starts
    starts = torch.cat([first["starts"], second["starts"][:1]])
    assert torch.equal(starts[1:], ended) and starts[0].all() and not starts[-1].all()
    assert (second["state"][0][~ended[-1]] != 0).all()


@pytest.mark.parametrize("rnn", RNNS)
def test_memory_is_reset_at_starts(rnn):
    """An episode's memory depends on its own observations only, from its first to its last."""
    torch.manual_seed(0)
    memory = make_model(f"--rnn {rnn} --rnn-size 4").memory
    size = 8 if rnn == "lstm" else 4
    obs, other = torch.randn(2, 6, 2, 3)
    other[3:, 0] = obs[3:, 0]  # the second episode of sequence 0 begins at step 3
    starts = torch.zeros(6, 2, dtype=torch.bool)
    starts[3, 0] = True
    (h, state), (h_other, state_other) = (
        memory(x, starts, torch.randn(2, size)) for x in (obs, other)
    )
    assert torch.equal(h[3:, 0], h_other[3:, 0]) and torch.equal(state[0], state_other[0])
    assert (h[:3] != h_other[:3]).all() and (h[:, 1] != h_other[:, 1]).all()
    alone, _ = memory(obs[3:, :1], starts[3:, :1], torch.randn(1, size))
    close(alone[:, 0], h[3:, 0])
    starts[0] = True  # then the state before does not count at all
    memories = [memory(obs, starts, torch.randn(2, size))[0] for _ in range(2)]
    assert torch.equal(*memories)


@pytest.mark.parametrize("rnn", RNNS)
def test_gradients_flow_through_time(rnn):
    """A value's gradient reaches the first observation of its episode, and none before."""
    torch.manual_seed(0)
    model = make_model(f"--rnn {rnn} --rnn-size 4")
    obs, starts = torch.randn(6, 1, 3, requires_grad=True), torch.zeros(6, 1, dtype=torch.bool)
    starts[0] = starts[2] = True
    state = torch.zeros(6, 1, 8 if rnn == "lstm" else 4)
    _, values = model(obs, starts, state)
    (gradient,) = torch.autograd.grad(values[-1].sum(), obs)
    assert (gradient[2:] != 0).all() and (gradient[:2] == 0).all()


@pytest.mark.parametrize("rnn", RNNS)
def test_recurrent_actor_critic_gradient(monkeypatch, tmp_path, rnn):
    """The step of an actor-critic is that of a loop of single steps, also through the memory."""
    options = "--num-steps 5 --gae-lambda 1 --vf-coef 0.7 --ent-coef 0.05".split()
    rnn_options = ["--rnn", rnn, "--rnn-size", "8"]
    buffer, model, changes = sgd_step(monkeypatch, tmp_path, *options, *rnn_options)
    logp, values, next_values, entropy = stepwise(model, [buffer])
    targets = n_step_targets(buffer, next_values.detach(), 5)
    policy_loss = -(logp * (targets - values.detach())).mean()
    value_loss = 0.5 * (values - targets).square().mean()
    assert_steps(model, changes, policy_loss + 0.7 * value_loss - 0.05 * entropy.mean())
    assert changes["memory.rnn.weight_hh_l0"].abs().max() > 1e-3


@pytest.mark.parametrize("rnn", RNNS)
def test_recurrent_minibatches(monkeypatch, tmp_path, rnn):
    """A minibatch has whole sequences, every game once an epoch; the first has ratio 1."""
    lively(monkeypatch)
    updates, losses = spy(monkeypatch, "update"), spy(monkeypatch, "losses")
    train(tmp_path, "--rnn", rnn, "--rnn-size", "8", "--norm-adv", "off", "--num-iterations", "2")
    for i in range(2):
        batch, orders = updates[i].args[2], []
        calls = losses[4 * i : 4 * i + 4]
        games = {tuple(batch["returns"][:, n].tolist()): n for n in range(N)}
        for call in calls:
            mb, order = call.args[1], []
            for m in range(2):
                n = games[tuple(mb["returns"][:, m].tolist())]
                order.append(n)
                for name, rows in batch.items():
                    steps = 1 if name == "state" else T  # the memory's state before step 0
                    assert mb[name].shape == (steps, 2, *rows.shape[2:])
                    assert torch.equal(mb[name][:, m], rows[:, n]), name
            orders.append(order)
        assert sorted(orders[0] + orders[1]) == sorted(orders[2] + orders[3]) == [0, 1, 2, 3]
        assert {"obs", "starts", "state", "actions", "logprobs"} <= batch.keys()
        assert calls[0].result[3].abs().max() < 1e-5 < 1e-3 < calls[3].result[3].abs().max()


@pytest.fixture(scope="module")
def recurrent_run(tmp_path_factory):
    """A run with a memory, without evaluations."""
    return train(tmp_path_factory.mktemp("rnn"), "--rnn", "lstm", "--rnn-size", "8")


@pytest.mark.parametrize(
    "options", [["--eval-every", "1"], ["--num-workers", "2"], ["--num-workers", "3"]]
)
def test_recurrent_run_is_reproducible(recurrent_run, tmp_path, options):
    """Evaluations have a memory of their own; any number of workers gives the same parameters."""
    other = train(tmp_path, "--rnn", "lstm", "--rnn-size", "8", *options)
    assert_same_parameters(recurrent_run, other)


def test_recurrent_evaluations_repeat(recurrent_run):
    """What a player's memory holds from one evaluation does not count in the next."""
    args = ppo.parse_args(["--eval", str(recurrent_run.run_dir)])
    with closing(ppo.Player(args, recurrent_run.model)) as player:
        first = player.play_episodes(np.arange(N))
        player.rows["state"][:] = 5.0
        second = player.play_episodes(np.arange(N))
    assert first.tolist() == second.tolist()
    returns = ppo.evaluate(recurrent_run.model, args)
    assert len(set(returns.tolist())) == args.eval_episodes


def test_recurrent_run_needs_games_for_all_minibatches(capsys, tmp_path):
    """--num-minibatches has to divide the number of games: else exit code 2, one line."""
    with pytest.raises(SystemExit) as error:
        parse(tmp_path, "--rnn", "gru", "--num-minibatches", "8")
    assert error.value.code == 2
    pattern = r"ppo.py: error: argument --num-minibatches: 8, over all ranks, must divide .*\n"
    assert re.fullmatch(pattern, capsys.readouterr().err)
    parse(tmp_path, "--num-minibatches", "8")


def test_recurrent_resume(recurrent_run, tmp_path):
    """--resume goes on from the checkpoint, with the run's memory."""
    run_dir = shutil.copytree(recurrent_run.run_dir, tmp_path / "copy")
    same = ppo.train(ppo.parse_args(["--resume", str(run_dir), "--quiet"]))
    assert_same_parameters(recurrent_run, same)
    run = ppo.train(ppo.parse_args(f"--resume {run_dir} --num-iterations 4 --quiet".split()))
    assert [row["iteration"] for row in run.history] == [1, 2, 3, 4]
    with (run_dir / "progress.csv").open() as file:
        assert [row["iteration"] for row in csv.DictReader(file)] == ["1", "2", "3", "4"]
    assert json.loads((run_dir / "config.json").read_text())["rnn"] == "lstm"


def play_literal(model, env, seed):
    """Return the return of an episode by the policy's mode, memory carried by hand."""
    obs, _ = env.reset(seed=seed)
    state, total, ended = None, 0.0, False
    while not ended:
        x = torch.tensor(obs, dtype=torch.float32).view(1, 1, -1)
        h, state = model.memory.rnn(x, state)
        action = int(model.head.output(model.actor(h[0, 0])).argmax())
        obs, reward, terminated, truncated, _ = env.step(action)
        total, ended = total + reward, terminated or truncated
    return total


@pytest.mark.parametrize("rnn", RNNS)
def test_recurrent_eval(monkeypatch, tmp_path, rnn):
    """--eval plays the checkpoint's policy with its memory."""
    lively(monkeypatch)
    run = train(tmp_path, "--env", "CartPole-v1", "--rnn", rnn, "--rnn-size", "8")
    options = ["--eval", str(run.run_dir), "--eval-episodes", "2"]
    returns = ppo.evaluate_run(ppo.parse_args(options))
    with closing(gym.make("CartPole-v1")) as env:
        expected = [play_literal(run.model, env, ppo.EVAL_SEED + i) for i in range(2)]
    assert returns.tolist() == expected


def test_all_together(monkeypatch, tmp_path):
    """Options of all kinds in one run: it stays finite, and each update begins with ratio 1."""
    lively(monkeypatch)
    losses = spy(monkeypatch, "losses")
    options = "--rnn gru --norm-adv batch --kl-coef 1 --adaptive-lr 0.01 --layer-norm".split()
    options += "--activation silu --shared-net".split()
    run = train(tmp_path, *NORMS, *options)
    assert all(call.result[3].abs().max() < 1e-4 for call in losses[::4])
    for row in run.history:
        assert all(math.isfinite(value) for value in row.values())
