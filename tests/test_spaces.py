"""Tests of ppo.py's spaces: heads against torch.distributions, flattened observations, masks."""

import math
from contextlib import closing
from types import SimpleNamespace

import envs_spaces
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import MultiDiscrete
from torch import nn
from torch.distributions import Bernoulli, MultivariateNormal, Normal
from torch.distributions import Categorical as Choice

import ppo

SMALL = (
    "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2 --hidden 8 "
    "--learning-rate 1e-2 --num-iterations 2 --eval-every 1 --eval-episodes 2 --quiet"
).split()
close = torch.testing.assert_close


def parse(log_dir, env, *options):
    """Parse the options of a small run in one of the test's envs."""
    env = env if env in gym.registry else f"envs_spaces:{env}-v0"
    return ppo.parse_args([*SMALL, "--env", env, "--log-dir", str(log_dir), *options])


def started(log_dir, env, *options):
    """Return args, a model and a pool of started games."""
    args = parse(log_dir, env, *options)
    torch.manual_seed(0)
    model = ppo.make_model(args)
    pool = ppo.make_pool(args, model)
    pool.call("start", np.arange(args.num_envs))
    return args, model, pool


def rollout(args, model, pool):
    """Return the buffer of a rollout."""
    return ppo.rollout(model, pool, args, torch.Generator().manual_seed(0))


def assert_trained(args):
    """Train; there are all losses, evaluations and other weights than at the start."""
    run = ppo.train(args)
    torch.manual_seed(args.seed)
    start = ppo.make_model(args).state_dict()
    for name, value in run.model.state_dict().items():
        assert torch.isfinite(value).all() and not torch.equal(value, start[name]), name
    assert [row["iteration"] for row in run.history] == [0, 1, 2]
    assert all(math.isfinite(row["eval_return"]) for row in run.history)
    assert all(math.isfinite(row["policy_loss"]) for row in run.history[1:])
    return run


# Action spaces ------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", envs_spaces.ACTIONS)
def test_action_spaces(tmp_path, action):
    """Training and evaluation work; the env raises for an action that is not in its space."""
    assert_trained(parse(tmp_path, f"Action-{action}"))


VALUES = {
    "zero": [{0, 1, 2, 3}],
    "five": [{5, 6, 7, 8}],
    "multi": [{0, 1, 2}, {0, 1}, {0, 1, 2, 3}],
    "multi_start": [{1, 2, 3}, {-2, -1}, {5, 6, 7, 8}],
    "table": [{0, 1, 2}, {0, 1}, {0, 1}, {0, 1, 2, 3}],
    "unsigned": [{0, 1, 2}, {0, 1}],
    "binary": [{0, 1}] * 3,
    "square": [{0, 1}] * 4,
}


@pytest.mark.parametrize("action", envs_spaces.ACTIONS)
def test_actions_are_those_of_the_space(tmp_path, action):
    """A policy of large entropy takes all of a space's options, or goes to a Box's bounds."""
    args, model, pool = started(tmp_path, f"Action-{action}", "--num-steps", "64")
    buffer = rollout(args, model, pool)
    env = pool.player.games[1].env.unwrapped
    space, received = env.action_space, np.stack(env.actions)
    assert received.dtype == space.dtype and received.shape == (64, *space.shape)
    stored = buffer["actions"][:, 1].numpy()
    if action in VALUES:
        assert [set(entry.tolist()) for entry in received.reshape(64, -1).T] == VALUES[action]
        start = {"five": 5, "multi_start": [1, -2, 5]}.get(action, 0)
        np.testing.assert_array_equal(received, stored + np.array(start))
    else:
        assert (received.min(axis=0) == space.low).all()
        assert (received.max(axis=0) == space.high).all()
        inside = np.abs(stored) < 0.1
        assert inside.any() and np.abs(stored).max() > 1
        np.testing.assert_allclose(received[inside], stored[inside], rtol=1e-3)


@pytest.mark.parametrize(
    "env", ["Action-multi_start", "Action-matrix", "Masked-multi-parts", "Masked-five-method"]
)
def test_workers_change_nothing(tmp_path, env):
    """Games in two other processes give the parameters of games in this one, but for rounding.

    The policy of a worker sees fewer rows, which may round otherwise. Twice the same number of
    workers gives the same bits.
    """
    runs = [ppo.train(parse(tmp_path, env, "--num-workers", n)) for n in ("0", "2", "2")]
    here, there, again = (run.model.state_dict() for run in runs)
    for name, value in there.items():
        torch.testing.assert_close(here[name], value, rtol=1e-4, atol=1e-5)
        assert torch.equal(value, again[name]), name


# Heads of discrete actions ------------------------------------------------------------------------


def random_head(options, shape):
    """Return a Categorical head whose policy depends on the features much, and features."""
    torch.manual_seed(0)
    head = ppo.Categorical(5, options, shape)
    nn.init.normal_(head.output.weight)
    nn.init.normal_(head.output.bias)
    return head, torch.randn(50, 5)


def sample(head, scores, noise=None, action_mask=None):
    """Return the head's actions for tensors, as a tensor."""
    tensors = (scores, noise, action_mask)
    arrays = [None if tensor is None else tensor.detach().numpy() for tensor in tensors]
    return torch.from_numpy(head.sample(*arrays))


@pytest.mark.parametrize(
    "options, shape", [([4], ()), ([3, 2, 4], (3,)), ([3, 2, 2, 4], (2, 2)), ([2] * 6, (2, 3))]
)
def test_choices_are_torchs(options, shape):
    """log π and H are the sums over independent Categoricals; the mode is that of each."""
    head, h = random_head(options, shape)
    logits, logp = head.output(h), head(h)
    choices = [Choice(logits=part) for part in logits.split(options, dim=1)]
    assert logp.shape == (50, sum(options))
    actions = torch.stack([choice.sample() for choice in choices], dim=1)
    expected = sum(choice.log_prob(actions[:, k]) for k, choice in enumerate(choices))
    close(head.log_prob(logp, actions.view(50, *shape)), expected)
    close(head.entropy(logp), sum(choice.entropy() for choice in choices))
    modes = torch.stack([choice.probs.argmax(dim=1) for choice in choices], dim=1)
    assert torch.equal(sample(head, logits), modes.view(50, *shape))
    # With the same noise logits and log-probabilities give the same sample.
    noise = head.noise(50, torch.Generator().manual_seed(0))
    actions = sample(head, logits, noise)
    assert torch.equal(actions, sample(head, logp, noise)) and actions.shape == (50, *shape)
    # Everything is the same for rows (T, M) as for rows (T·M,).
    wide, wide_actions = head(h.view(10, 5, 5)), actions.view(10, 5, *shape)
    close(head.log_prob(wide, wide_actions), head.log_prob(logp, actions).view(10, 5))
    close(head.entropy(wide), head.entropy(logp).view(10, 5))


def test_binary_choices_are_torchs():
    """MultiBinary is a Bernoulli for each flag, with the difference of its two logits."""
    head, h = random_head([2] * 6, (2, 3))
    logits, logp = head.output(h), head(h)
    pairs = logits.view(50, 2, 3, 2)
    reference = Bernoulli(logits=pairs[..., 1] - pairs[..., 0])
    actions = reference.sample()
    close(head.log_prob(logp, actions.to(torch.int8)), reference.log_prob(actions).sum(dim=(1, 2)))
    close(head.entropy(logp), reference.entropy().sum(dim=(1, 2)))
    assert torch.equal(sample(head, logits), (reference.probs > 0.5).long())


def test_joint_frequencies():
    """Joint actions have the product of the choices' probabilities, to five standard errors."""
    head, n = ppo.Categorical(2, [3, 2, 4], (3,)), 40_000
    choices = [[0.1, 0.3, 0.6], [0.25, 0.75], [0.4, 0.1, 0.3, 0.2]]
    probs = torch.tensor(np.einsum("i,j,k->ijk", *choices)).flatten()
    logp = torch.tensor(sum(choices, [])).log().expand(n, 9)
    i, j, k = sample(head, logp, head.noise(n, torch.Generator().manual_seed(0))).T
    frequencies = torch.bincount((2 * i + j) * 4 + k, minlength=24) / n
    assert ((frequencies - probs).abs() < 5 * (probs * (1 - probs) / n).sqrt()).all()


# Heads of continuous actions ----------------------------------------------------------------------


def gaussian(shape, full=False):
    """Return a head for five features and actions of this shape."""
    return ppo.Gaussian(5, shape, SimpleNamespace(init_log_std=0.0, full_covariance=full))


def full_gaussian():
    """Return a full Gaussian with random covariance, its L, means and other rows."""
    torch.manual_seed(0)
    head = gaussian((4,), full=True)
    nn.init.normal_(head.output.weight)
    head.log_std.data = torch.tensor([-1.0, 0.0, 0.5, -0.3])
    nn.init.normal_(head.lower)  # also what is not below the diagonal, which is not used
    L = head.lower.detach().clone()
    for i, j in np.ndindex(4, 4):
        L[i, j] = head.log_std[i].exp() if i == j else L[i, j] if j < i else 0.0
    return head, L, head(torch.randn(6, 5)), torch.randn(6, 4)


def test_full_gaussian_is_torchs():
    """Log-probability, entropy and mode of N(μ, L Lᵀ) agree with torch.distributions."""
    head, L, mean, actions = full_gaussian()
    reference = MultivariateNormal(mean, scale_tril=L)
    close(head.log_prob(mean, actions), reference.log_prob(actions))
    close(head.entropy(mean), reference.entropy())
    assert torch.equal(sample(head, mean), mean)


def standard_normal(head, batch):
    """Return ε (batch, A), standard normal, that a Gaussian head's noise is made of with seed 0."""
    return torch.randn(batch, head.n, generator=torch.Generator().manual_seed(0))


def test_full_gaussian_sample():
    """A sample is μ + L ε; many of them have the covariance L Lᵀ."""
    head, L, mean, _ = full_gaussian()
    noise = head.noise(6, torch.Generator().manual_seed(0))
    expected = mean + torch.stack([L @ row for row in standard_normal(head, 6)])
    close(sample(head, mean, noise), expected)
    n, covariance = 40_000, L @ L.T
    samples = sample(head, torch.zeros(n, 4), head.noise(n, torch.Generator().manual_seed(0)))
    variances = covariance.diag()
    assert (samples.mean(dim=0).abs() < 5 * (variances / n).sqrt()).all()
    errors = ((torch.outer(variances, variances) + covariance.square()) / n).sqrt()
    assert ((samples.T.cov() - covariance).abs() < 5 * errors).all()


def test_full_gaussian_without_correlation():
    """With nothing below the diagonal it is a Gaussian."""
    head, _, mean, actions = full_gaussian()
    nn.init.zeros_(head.lower)
    plain = gaussian((4,))
    plain.log_std.data = head.log_std.data
    noises = [h.noise(6, torch.Generator().manual_seed(0)) for h in (head, plain)]
    close(*noises)
    close(head.log_prob(mean, actions), plain.log_prob(mean, actions))
    close(head.entropy(mean), plain.entropy(mean))


def test_full_gaussian_gradients():
    """Gradients reach all deviations, and of `lower` exactly what is below the diagonal."""
    head, _, mean, actions = full_gaussian()
    head.log_prob(mean, actions).sum().backward()
    below = torch.ones(4, 4).tril(-1).bool()
    assert torch.equal(head.lower.grad != 0, below)
    assert (head.log_std.grad != 0).all() and (head.output.weight.grad != 0).all()


def test_full_covariance_run(tmp_path):
    """--full-covariance starts without correlations and learns some, below the diagonal only."""
    args = parse(tmp_path, "Action-matrix", "--full-covariance")
    assert (ppo.make_model(args).head.lower == 0).all()
    lower = ppo.train(args).model.head.lower.detach()
    assert torch.equal(lower != 0, torch.ones(6, 6).tril(-1).bool())


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("rows", [(7,), (3, 7)])
@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_gaussian_is_torchs(full, rows, shape):
    """Actions are the mean's entries in rows, plus σ ε; log π and H are sums over all entries."""
    torch.manual_seed(0)
    head, n = gaussian(shape, full), math.prod(shape)
    nn.init.normal_(head.output.weight)
    head.log_std.data = torch.linspace(-1, 1, n)
    sigma, count = torch.linspace(-1, 1, n).exp(), math.prod(rows)
    flat = head(torch.randn(count, 5))
    assert torch.equal(sample(head, flat), flat.reshape(count, *shape))
    noise = head.noise(count, torch.Generator().manual_seed(0))
    close(noise, sigma * standard_normal(head, count))
    actions = sample(head, flat, noise)
    close(actions, (flat + noise).reshape(count, *shape))
    mean, actions = flat.view(*rows, n), actions.view(*rows, *shape)
    reference, entries = Normal(mean, sigma), actions.reshape(*rows, n)
    close(head.log_prob(mean, actions), reference.log_prob(entries).sum(dim=-1))
    close(head.entropy(mean), reference.entropy().sum(dim=-1))


# Observation spaces -------------------------------------------------------------------------------

WIDTHS = {"vector": 3, "matrix": 6, "image": 48, "one_hot": 4, "one_hots": 5, "flags": 4}
WIDTHS |= {"dict": 5, "tuple": 6, "nested": 7, "text": 3}


@pytest.mark.parametrize("obs", envs_spaces.OBSERVATIONS)
def test_observations_are_flattened(tmp_path, obs):
    """What arrives is Gymnasium's vector of the raw observation, also at an episode's end."""
    args, model, pool = started(tmp_path, f"Obs-{obs}", "--num-steps", "8")
    buffer = rollout(args, model, pool)
    games = [game.env.unwrapped for game in pool.player.games]
    assert buffer["obs"].shape == buffer["next_obs"].shape == (8, 2, WIDTHS[obs])
    assert buffer["terminated"].sum() == 4

    for n, env in enumerate(games):
        flat = [gym.spaces.flatten(envs_spaces.OBSERVATIONS[obs], raw) for raw in env.raw]
        flat = torch.from_numpy(np.stack(flat).astype(np.float32))
        # Episodes of three steps have four observations.
        assert torch.equal(buffer["obs"][:, n], flat[[0, 1, 2, 4, 5, 6, 8, 9]])
        assert torch.equal(buffer["next_obs"][:, n], flat[[1, 2, 3, 5, 6, 7, 9, 10]])
    assert len({str(raw) for raw in games[0].raw}) > 1


def test_flattened_by_hand():
    """One-hot of Discrete and MultiDiscrete, entries of a Dict by name, arrays row by row."""
    for obs, raw, expected in (
        ("one_hot", 5, [0, 0, 1, 0]),  # of 3, 4, 5, 6
        ("one_hots", np.array([2, 0]), [0, 0, 1, 1, 0]),
        ("dict", {"b": 1, "a": np.array([0.5, -1], np.float32)}, [0.5, -1, 0, 1, 0]),
        ("text", "10", [1, 0, 2]),  # each character's number; 2 where there is none
        ("tuple", (1, np.array([[1.0, 2.0], [3.0, 4.0]])), [0, 1, 1, 2, 3, 4]),
    ):
        with closing(ppo.make_env(SimpleNamespace(env=f"envs_spaces:Obs-{obs}-v0"))) as env:
            env.unwrapped.psi = lambda raw=raw: raw
            assert env.reset()[0].tolist() == expected


@pytest.mark.parametrize("obs", envs_spaces.OBSERVATIONS)
def test_observation_spaces(tmp_path, obs):
    """Training works, and so does the evaluation of what it leaves behind."""
    run = assert_trained(parse(tmp_path, f"Obs-{obs}"))
    returns = ppo.evaluate_run(ppo.parse_args(["--eval", str(run.run_dir)]))
    assert returns.mean() == run.history[-1]["eval_return"]


# Action masks: heads ------------------------------------------------------------------------------


def random_masks(options, rows):
    """Return flags (rows, ·) of which each choice has at least one that is set."""
    torch.manual_seed(1)
    parts = [torch.rand(rows, n) < 0.4 for n in options]
    for part, n in zip(parts, options):
        part[torch.arange(rows), torch.randint(n, (rows,))] = True
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("options", [[6], [3, 2, 4], [2, 2, 2]])
def test_masked_policy_is_torchs(options):
    """log π, H and mode are those of the distribution over the allowed options alone."""
    head, h = random_head(options, (len(options),))
    masks, logits = random_masks(options, 50), head.output(h)
    logp = head(h, masks)
    assert (logp.exp()[~masks] == 0).all() and (logp[masks] > -50).all()
    actions = sample(head, logits, head.noise(50, torch.Generator().manual_seed(0)), masks)
    modes = sample(head, logits, None, masks)
    logprobs, entropies = head.log_prob(logp, actions), head.entropy(logp)
    for i in range(50):
        expected_logprob = expected_entropy = 0
        for k, (mask, part) in enumerate(zip(masks[i].split(options), logits[i].split(options))):
            allowed = mask.nonzero().flatten()
            reference = Choice(logits=part[allowed])
            index = (allowed == actions[i, k]).nonzero().flatten()  # none if it is forbidden
            expected_logprob += reference.log_prob(index)
            expected_entropy += reference.entropy()
            assert modes[i, k] == allowed[reference.probs.argmax()]
        close(logprobs[i : i + 1], expected_logprob)
        close(entropies[i], expected_entropy)


def test_all_allowed_is_no_mask():
    """A mask that allows everything changes no bit."""
    head, h = random_head([3, 2, 4], (3,))
    assert torch.equal(head(h, torch.ones(50, 9, dtype=torch.bool)), head(h))


def test_forbidden_options_are_never_drawn():
    """However large their logits: probability 0, no draw; the others by their probabilities."""
    head, n = ppo.Categorical(1, [4]), 40_000
    head.output.bias.data = torch.tensor([1000.0, -1000.0, -1000.0 + math.log(3), 1000.0])
    mask = torch.tensor([[False, True, True, False]])
    h = torch.zeros(1, 1)
    logp = head(h, mask)
    assert logp.exp().flatten().tolist() == pytest.approx([0, 0.25, 0.75, 0], abs=1e-4)
    assert logp.exp()[~mask].tolist() == [0.0, 0.0]
    noise = head.noise(n, torch.Generator().manual_seed(0))
    actions = sample(head, head.output(h).expand(n, 4), noise, mask)
    counts = torch.bincount(actions, minlength=4)
    assert counts[0] == counts[3] == 0
    assert abs(counts[2] / n - 0.75) < 5 * (0.75 * 0.25 / n) ** 0.5


@pytest.mark.parametrize("action", ["zero", "multi", "square"])
def test_single_allowed_option(action):
    """There log π = 0 and H = 0, and the loss has finite gradients, none for the policy."""
    torch.manual_seed(0)
    space, options = envs_spaces.ACTIONS[action], envs_spaces.OPTIONS[action]
    args = ppo.make_parser().parse_args(["--hidden", "8", "--action-masks"])
    model = ppo.Model(3, space, args)
    nn.init.normal_(model.head.output.weight, std=10)
    chosen = torch.stack([torch.randint(n, (20,)) for n in options], dim=1)
    flags = [nn.functional.one_hot(chosen[:, k], n) for k, n in enumerate(options)]
    batch = {"obs": torch.randn(20, 3), "action_mask": torch.cat(flags, dim=1).bool()}
    batch |= {"actions": chosen.view(20, *space.shape)}
    zeros = {name: torch.zeros(20) for name in ("logprobs", "values")}
    batch |= zeros | {"advantages": torch.randn(20), "returns": torch.randn(20)}
    pg_loss, v_loss, entropy, logratio = ppo.losses(model, batch, 0.2, clip_vloss=False)
    assert logratio.tolist() == entropy.tolist() == [0.0] * 20
    policy, flags = ppo.Policy(model), batch["action_mask"].numpy()
    actions, _ = policy.act(batch["obs"].numpy(), action_mask=flags)
    assert actions.tolist() == batch["actions"].tolist()
    (pg_loss + v_loss - entropy).mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        policy = name.startswith(("actor", "head"))
        assert bool((parameter.grad == 0).all()) == policy, name


# Action masks: games ------------------------------------------------------------------------------


@pytest.mark.parametrize("env", envs_spaces.MASKS)
def test_masks_are_those_of_the_observations(tmp_path, env):
    """The env's observation is its mask: what is stored is alike, also after an episode's end."""
    args, model, pool = started(tmp_path, f"Masked-{env}", "--num-steps", "32")
    assert args.action_masks
    buffer = rollout(args, model, pool)
    assert len(ppo.finished_episodes(buffer)) == 2 * (32 // 3)
    masks, options = buffer["action_mask"], envs_spaces.OPTIONS[env.split("-")[0]]
    assert masks.dtype == torch.bool and masks.shape == (32, 2, sum(options))
    assert torch.equal(masks.float(), buffer["obs"])
    assert 0.2 < masks.float().mean() < 0.8
    chosen = buffer["actions"].reshape(32, 2, -1) + torch.tensor([0, *options[:-1]]).cumsum(0)
    assert masks.gather(2, chosen).all()
    pi, _ = model(buffer["obs"], action_mask=masks)
    close(buffer["logprobs"], model.head.log_prob(pi, buffer["actions"]))


@pytest.mark.parametrize("env", envs_spaces.MASKS)
def test_masked_runs(tmp_path, env):
    """Neither training nor evaluations take a forbidden action, for which the env raises."""
    run = assert_trained(parse(tmp_path, f"Masked-{env}"))
    returns = ppo.evaluate_run(ppo.parse_args(["--eval", str(run.run_dir)]))
    assert returns.mean() == run.history[-1]["eval_return"]


def test_evaluation_of_a_policy_that_wants_what_is_forbidden(tmp_path):
    """The mode is the best allowed action; without masks the same policy would be refused."""
    for options in ([], ["--no-action-masks"]):
        args, model, _ = started(tmp_path, "Masked-multi-info", "--num-envs", "8", *options)
        model.head.output.bias.data = 100 * torch.arange(9.0)
        with closing(ppo.Player(args, model)) as player:
            if options:
                with pytest.raises(ppo.GameError, match="forbidden"):
                    player.play_episodes(np.arange(8))
                continue
            returns = player.play_episodes(np.arange(8))
            games = [game.env.unwrapped for game in player.games]
        for env, episode_return in zip(games, returns):
            # The last allowed option of each choice, in an episode of 3 steps.
            last = [[max(np.flatnonzero(part)) for part in np.split(f, [3, 5])] for f in env.raw]
            assert np.stack(env.actions).tolist() == last[:3]
            assert episode_return == np.sum(last[:3])


def test_no_action_masks(tmp_path):
    """--no-action-masks, or an env without a mask: neither games nor model know of any."""
    for env, *options in (["Masked-multi-info", "--no-action-masks"], ["CartPole-v1"]):
        args, model, pool = started(tmp_path, env, *options)
        assert not args.action_masks
        assert "action_mask" not in pool.player.rows and model.inputs == ["obs"]
    with pytest.raises(ppo.GameError, match="forbidden"):
        ppo.train(parse(tmp_path, "Masked-multi-info", "--no-action-masks"))


def test_masks_that_are_not_there(tmp_path):
    """--action-masks for an env without any is an error of the first reset."""
    with pytest.raises(ppo.GameError, match="CartPole-v1 .* failed in reset: .*action_masks"):
        ppo.train(parse(tmp_path, "CartPole-v1", "--action-masks"))


@pytest.mark.parametrize("options", [[], ["--rnn", "gru"], ["--shared-net"]])
def test_update_uses_the_stored_masks(tmp_path, options):
    """The ratio of the policy that has sampled is 1 with the stored masks, and not without."""
    args, model, pool = started(tmp_path, "Masked-multi-info", "--num-steps", "32", *options)
    nn.init.normal_(model.head.output.weight)
    batch = ppo.make_batch(rollout(args, model, pool), model, args)
    logratio = ppo.losses(model, batch, 0.2, clip_vloss=True)[3]
    assert logratio.abs().max() < 1e-5
    batch["action_mask"] = torch.ones_like(batch["action_mask"])
    assert ppo.losses(model, batch, 0.2, clip_vloss=True)[3].abs().max() > 0.1


@pytest.mark.parametrize("options", [[], ["--rnn", "lstm", "--num-minibatches", "1"]])
def test_shuffled_rows_keep_their_masks(tmp_path, options):
    """A run whose policy hardly moves has ratios of 1 in all minibatches."""
    options = ["--learning-rate", "1e-12", *options]
    history = ppo.train(parse(tmp_path, "Masked-multi-parts", *options)).history
    for row in history[1:]:
        assert abs(row["approx_kl"]) < 1e-6 and row["clipfrac"] == 0


@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_mask_without_any_allowed_action(tmp_path, num_workers):
    """One choice without an allowed option is an error that names the game."""
    args = parse(tmp_path, "Masked-multi-empty", "--num-workers", num_workers)
    with pytest.raises(ppo.GameError) as error:
        ppo.train(args)
    game = r"envs_spaces:Masked-multi-empty-v0 \(seed \d+.*\) failed in step"
    error.match(rf"^{game}: ValueError: action mask .* no action is allowed\n")


def test_mask_that_ends(tmp_path):
    """An env that gives a mask at first and none later is an error that names the game."""
    with pytest.raises(ppo.GameError, match="Masked-zero-forgotten-v0 .* step: .*action.mask"):
        ppo.train(parse(tmp_path, "Masked-zero-forgotten"))


@pytest.mark.parametrize("env", envs_spaces.BAD_MASKS)
def test_bad_masks(tmp_path, env):
    """A mask of the wrong length, or none allowed at the start: an error names game and mask."""
    with pytest.raises(ppo.GameError, match=rf"Masked-{env}-v0 .* reset: ValueError: action mask"):
        ppo.train(parse(tmp_path, f"Masked-{env}"))


def test_taxi(tmp_path):
    """Taxi tells in info which actions change its state; the policy takes no other."""
    env = next(name for name in gym.registry if name.startswith("Taxi-"))
    args, model, pool = started(tmp_path, env, "--num-steps", "100")
    buffer = rollout(args, model, pool)
    assert buffer["obs"].shape == (100, 2, 500) and (buffer["obs"].sum(dim=2) == 1).all()
    taxi = pool.player.games[0].env.unwrapped
    states, actions = buffer["obs"].argmax(dim=2).flatten(), buffer["actions"].flatten()
    for state, action, mask in zip(states, actions, buffer["action_mask"].flatten(0, 1)):
        allowed = taxi.action_mask(int(state)).astype(bool)
        assert mask.tolist() == allowed.tolist() and allowed[action]
    history = ppo.train(parse(tmp_path, env, "--eval-every", "0")).history
    assert [row["iteration"] for row in history] == [1, 2]
    assert 0 < history[-1]["entropy"] < math.log(6)


def test_masks_are_flattened():
    """A MultiDiscrete's own masks are tuples of flags of different lengths."""
    env = SimpleNamespace(action_space=MultiDiscrete([[2, 3], [2, 1]]))
    mask = (np.array([1, 0]), [1, 1, 0], np.array([0, 1]), (1,))
    flags = ppo.action_mask(env, {"action_mask": mask})
    assert flags.tolist() == [1, 0, 1, 1, 0, 0, 1, 1]
