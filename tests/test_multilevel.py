"""Oracles of multilevel PPO: exact identities, the literal Algorithm 4, the order of events."""

import itertools
import sys
import types
from pathlib import Path

import envs
import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo
import ppo_multilevel as ml

GOLDEN = Path(__file__).parent / "golden"
SMALL = (
    "--num-envs 6 --num-minibatches 3 --update-epochs 2 --hidden 30 20 --shared-net --init-log-std "
    "-1 --learning-rate 1e-3 --no-anneal-lr --num-iterations 3 --clip-coef 0.1 --ent-coef 0.001 "
    "--vf-coef 0.5 --no-clip-vloss --target-kl 1000 --quiet"
).split()
TOGETHER = [*SMALL, "--schedule", "together", "--control", "1"]


NUMBERS = itertools.count()


def install(monkeypatch, make):
    """Make `make` importable. Returns the name for --env, another one each time: it is cached."""
    module = types.ModuleType(f"user_simulation_{next(NUMBERS)}")
    module.make = make
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return f"{module.__name__}:make"


def started(args):
    """Return a model and simulations that have started, in this process. Seeds are 0, 1, ..."""
    torch.manual_seed(0)
    model = ml.make_model(args)
    sims = ml.Simulations(args, model)
    N = args.num_envs
    for level in range(len(args.levels)):
        sims.start(level, np.arange(level * N, (level + 1) * N))
    return model, sims


def collect(args):
    """Return the batches of one iteration, the model, the simulations and the levels' episodes."""
    model, sims = started(args)
    batches, episodes = rollouts(model, sims, args, torch.Generator().manual_seed(1))
    return batches, model, sims, episodes


def rollouts(model, sims, args, generator):
    """Roll out all levels as `train` does. Returns the batches of own¹, partner², own², ..., and
    the lists of levels' episodes."""
    batches, episodes = [], []
    for level in range(len(args.levels)):
        buffers = ml.rollout(model, sims, level, generator)
        batches += [ml.make_batch(b, model, args) for b in reversed(buffers)]
        episodes.append(ml.finished_episodes(buffers[0]))
    return batches, episodes


def learn(model, batch, args):
    """Update the model as `train` does in the first iteration. Returns what is logged."""
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    plan = ml.Together(args).plan()
    return ml.update(model, optimizer, batch, plan, args, torch.Generator().manual_seed(0))


def small_model(obs_dim, actions, words):
    """Return a model for a Box of so many actions, with the network that the options say."""
    args = ml.make_parser().parse_args(words.split())
    return ml.Model(obs_dim, gym.spaces.Box(-1, 1, (actions,)), args)


# One level is PPO ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", ["0", "2"])
@pytest.mark.parametrize(
    "options", ["", "--norm-obs --norm-value --no-norm-adv --no-shared-net --anneal-lr"]
)
def test_one_level_is_ppo_bit_for_bit(tmp_path, num_workers, options):
    """L = 1 gives the parameters of ppo.py on the same simulation after several updates."""
    if "OneLevel-v0" not in gym.registry:
        kwargs = {"case": "ResSim-v1", "level": 2}
        gym.register("OneLevel-v0", entry_point=ml.ResSim, kwargs=kwargs)
    common = [*SMALL, "--log-dir", str(tmp_path), "--num-workers", num_workers, "--num-steps", "7"]
    multi = [*common, *options.split(), "--env", "ResSim-v1", "--levels", "2"]
    multi = ml.train(ml.parse_args(multi))
    # Here --norm-adv has another choice, of the whole batch.
    common += options.replace("--no-norm-adv", "--norm-adv off").split()
    single = ppo.train(ppo.parse_args(["--env", "OneLevel-v0", *common]))
    expected, actual = single.model.state_dict(), multi.model.state_dict()
    assert expected.keys() == actual.keys()
    for name in expected:
        assert torch.equal(expected[name], actual[name]), name
    assert single.history[-1]["policy_loss"] == multi.history[-1]["policy_loss"]
    start = ppo.make_model(ppo.parse_args(["--env", "OneLevel-v0", *common])).state_dict()
    assert not torch.equal(start["value.weight"], expected["value.weight"])  # it did learn


# Identical levels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("coupling", ["step", "noise"])
def test_identical_levels_have_no_correction(monkeypatch, coupling):
    """Levels that are the same simulation make every term of every correction exactly zero."""
    env = install(monkeypatch, lambda level, evaluation=False: ml.ResSim("ResSim-v1", 1))
    options = ["--levels", "1", "2", "3", "--num-steps", "10", "7", "5", "--coupling", coupling]
    args = ml.parse_args([*TOGETHER, "--env", env, *options, "--num-workers", "0"])
    batches, model, *_ = collect(args)
    for level in (1, 2):
        for name in batches[0]:
            assert torch.equal(batches[2 * level][name], batches[2 * level - 1][name]), name
    for parameter in model.parameters():  # a policy that has moved: ratios away from 1
        parameter.data += 0.01 * torch.randn_like(parameter)
    batch = {name: torch.cat([b[name] for b in batches]) for name in batches[0]}
    generator = torch.Generator().manual_seed(2)
    rows = ml.minibatch_rows(args.num_steps, args.num_envs, args.num_minibatches, generator)[0]
    pg_loss, v_loss, entropy, logratio = ml.losses(
        model, {name: column[rows] for name, column in batch.items()}, 0.1, False
    )
    assert logratio.abs().max() > 1e-3
    start = args.num_envs * 10 // 3
    for M in (14, 10):
        sync, own = slice(start, start + M), slice(start + M, start + 2 * M)
        for term in (pg_loss, v_loss, entropy):
            assert torch.equal(term[own], term[sync])
        start += 2 * M


@pytest.mark.parametrize("coupling", ["step", "noise"])
def test_different_levels_have_a_correction(coupling):
    """The same check is not empty: real levels differ, less with `step` than with `noise`."""
    options = ["--levels", "1", "2", "--num-steps", "10", "5", "--coupling", coupling]
    args = ml.parse_args([*TOGETHER, "--env", "ResSim-v1", *options, "--num-workers", "0"])
    (_, sync, own), *_ = collect(args)
    assert torch.equal(sync["actions"], own["actions"]) == (coupling == "step")
    assert not torch.equal(sync["advantages"], own["advantages"])


# Order of events ----------------------------------------------------------------------------------


class Tape(gym.Env):
    """Episodes of 3 steps, 4 on the coarse level; writes down what is done to it."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-10, 10, (1,), np.float32)
    events = []

    def __init__(self, level):
        self.level, self.t, self.x = level, 0, 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.x = 0, float(self.np_random.integers(100)) if seed is None else float(seed)
        self.events.append(("reset", self.level))
        return self.psi(), {}

    def psi(self):
        return np.array([self.t, self.x], np.float32)

    def map_from(self, other):
        self.events.append(("map_from", self.level, other.t, other.x))
        self.t, self.x = other.t, other.x

    def step(self, action):
        self.events.append(("step", self.level, self.t, self.x, float(action[0])))
        self.t += 1
        self.x += float(action[0]) / self.level
        return self.psi(), self.x, self.t == (3 if self.level == 2 else 4), False, {}


def tape(monkeypatch, coupling, num_steps):
    """Play one actor on two levels. Return what happened on level 2, and the buffers."""
    env = install(monkeypatch, lambda level: Tape(level))
    options = ["--levels", "1", "2", "--num-steps", "1", str(num_steps), "--coupling", coupling]
    options += ["--num-envs", "1", "--no-norm-adv", "--num-workers", "0", "--num-minibatches", "1"]
    args = ml.parse_args([*TOGETHER, "--env", env, *options])
    Tape.events.clear()
    model, sims = started(args)
    start = Tape.events[-1]
    assert start[:2] == ("map_from", 1)
    Tape.events[:] = [start] if coupling == "step" else []
    buffers = ml.rollout(model, sims, 1, torch.Generator().manual_seed(0))
    return list(Tape.events), buffers


def test_step_coupling_order(monkeypatch):
    """Before each step the partner is mapped to the fine state, then both take one action."""
    events, (own, sync) = tape(monkeypatch, "step", 5)
    assert [length for _, length in ml.finished_episodes(own)] == [3]
    steps = [event for event in events if event[0] == "step"]
    assert [event[1] for event in steps] == [2, 1] * 5  # fine, then partner
    for fine, partner in zip(steps[::2], steps[1::2]):
        assert fine[2:] == partner[2:]  # same state, same action
    assert [event[1] for event in events if event[0] == "reset"] == [2, 1]  # one episode ended
    for i, event in enumerate(events):  # the last thing before a fine step is its partner's mapping
        if event[:2] == ("step", 2):
            assert events[i - 1] == ("map_from", 1, event[2], event[3])
    assert torch.equal(own["obs"], sync["obs"]) and torch.equal(own["actions"], sync["actions"])
    # Where the fine episode ends, at its third step, the partner's is cut but not terminated.
    assert own["terminated"].ravel().tolist() == [False, False, True, False, False]
    assert sync["terminated"].ravel().tolist() == [False] * 5
    assert sync["truncated"].ravel().tolist() == [False, False, True, False, False]


def test_step_coupling_partner_bootstraps_from_its_own_state(monkeypatch):
    """A partner's next value is that of where its own step led, at every row."""
    env = install(monkeypatch, lambda level: Tape(level))
    options = ["--levels", "1", "2", "--num-steps", "1", "5", "--num-workers", "0"]
    options += ["--num-envs", "2", "--no-norm-adv", "--num-minibatches", "1"]
    args = ml.parse_args([*TOGETHER, "--env", env, *options])
    model, sims = started(args)
    own, sync = ml.rollout(model, sims, 1, torch.Generator().manual_seed(0))
    where = sync["obs"].clone()  # t + 1, x + a / level
    where[..., 0] += 1
    where[..., 1] += sync["actions"][..., 0].clamp(-10, 10)
    torch.testing.assert_close(sync["next_values"], model(where)[1])
    assert not torch.allclose(sync["next_values"], own["next_values"])


def test_noise_coupling_order(monkeypatch):
    """The partner is mapped at starts of fine episodes only; then it follows its own states."""
    events, (own, sync) = tape(monkeypatch, "noise", 7)
    assert [e[1] for e in events if e[0] == "step"] == [2, 1] * 7
    partner = [e for e in events if e[:2] == ("step", 1)]
    mapped = [i for i, e in enumerate(events) if e[0] == "map_from"]
    assert len(mapped) == 2  # after fine steps 3 and 6
    assert all(events[i - 2][:2] == ("step", 1) or events[i - 1][0] == "reset" for i in mapped)
    for now, after in zip(partner, partner[1:]):
        if after[2] == now[2] + 1:  # no new episode in between: its own dynamics, x + a / 1
            assert after[3] == pytest.approx(now[3] + now[4], rel=1e-6)
    assert torch.equal(own["obs"][0], sync["obs"][0])
    assert not torch.equal(own["obs"][1], sync["obs"][1])
    # Same noise: the two actions differ by the difference of the means only.
    assert (own["actions"] - sync["actions"]).abs().max() < 0.2
    assert sync["truncated"].ravel().tolist() == [False, False, True, False, False, True, False]


def test_noise_coupling_discrete_actions(monkeypatch):
    """Categorical policies share Gumbel noise: equal observations give equal actions."""
    maker = lambda level: gym.make("CartPole-v1").unwrapped  # noqa: E731, no map_from
    env = install(monkeypatch, maker)
    options = ["--levels", "1", "2", "--num-steps", "9", "30", "--num-workers", "0"]
    args = ml.parse_args([*TOGETHER, "--env", env, *options])
    assert args.coupling == "noise"  # without map_from there is no other
    (_, sync, own), _, _, episodes = collect(args)
    for name in own:  # the levels are the same, seeds and noise are common
        assert torch.equal(own[name], sync[name]), name
    assert episodes[1] and own["actions"].dtype == torch.int64


def test_levels_keep_their_own_episodes():
    """With T^l short of an episode, the next iteration goes on where the level stopped."""
    options = ["--levels", "1", "2", "--num-steps", "4", "2", "--num-workers", "0"]
    args = ml.parse_args([*TOGETHER, "--env", "ResSim-v1", *options])
    _, model, sims, episodes = collect(args)
    games = [sims.pool.player.games[name][0] for name in ("own 0", "partners 1", "own 1")]
    assert [game.env.t for game in games] == [4, 2, 2]
    assert not any(episodes)
    _, episodes = rollouts(model, sims, args, torch.Generator().manual_seed(3))
    assert [game.env.t for game in games] == [3, 4, 4]
    assert [[length for _, length in ended] for ended in episodes] == [[5] * 6, []]


# The loss -----------------------------------------------------------------------------------------


def reference():
    """Return the reference's model, its minibatch as our signed rows, and all its numbers."""
    with np.load(GOLDEN / "c_losses.npz") as file:
        g = {name: file[name] for name in file.files}
    model = small_model(5, 3, "--hidden 8 8 --init-log-std -1")
    names = {
        "actor.0": "mlp_extractor.shared_net.0",
        "actor.2": "mlp_extractor.shared_net.2",
        "critic.0": "mlp_extractor.shared_net.0",
        "critic.2": "mlp_extractor.shared_net.2",
        "head.output": "action_net",
        "value": "value_net",
    }
    names = {f"{a}.{w}": f"{b}.{w}" for a, b in names.items() for w in ("weight", "bias")}
    names["head.log_std"] = "log_std"
    model.load_state_dict({ours: torch.tensor(g[f"param/{name}"]) for ours, name in names.items()})
    parts = ["L1", "L2sync", "L2", "L3sync", "L3"]
    columns = {
        "obs": "observations",
        "actions": "actions",
        "logprobs": "old_log_prob",
        "values": "old_values",
        "advantages": "advantages",
        "returns": "returns",
    }
    batch = {
        ours: torch.tensor(np.concatenate([g[f"{part}/{name}"] for part in parts]))
        for ours, name in columns.items()
    }
    # The reference normalises each part by itself.
    normalised = [torch.tensor(g[f"{part}/advantages"]) for part in parts]
    normalised = [(a - a.mean()) / (a.std() + 1e-8) for a in normalised]
    batch["advantages"] = torch.cat(normalised)
    return model, batch, g, parts, names


def test_signed_sum_is_algorithm_4():
    """Loss terms, loss, gradient and one Adam step are the reference's literal Algorithm 4."""
    model, batch, g, parts, names = reference()
    pg_loss, v_loss, entropy, logratio = ml.losses(model, batch, 0.1, False)
    for term, name, factor in (
        (pg_loss, "policy_loss", 1),
        (v_loss, "value_loss", 2),  # its value loss has no 1/2
        (entropy, "entropy", 1),
        (logratio.exp(), "ratio", 1),
    ):
        expected = np.concatenate([g[f"{part}/{name}"] for part in parts])
        np.testing.assert_allclose(factor * term.detach(), expected, rtol=2e-4, atol=2e-6)
    weights = ml.signed_weights([16, 8, 4], 1, 1, [1, 1])
    loss = (weights * (pg_loss + 1.0 * v_loss - 0.001 * entropy)).mean()
    np.testing.assert_allclose(loss.item(), g["loss_mlmc"], rtol=1e-5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-5, fused=True)
    parameters = dict(model.named_parameters())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    norm = torch.stack([p.grad.norm() for p in parameters.values()]).norm()
    scale = min(1, 0.5 / (float(g["grad_norm_before_clip"]) + 1e-6))
    np.testing.assert_allclose(norm, float(g["grad_norm_before_clip"]) * scale, rtol=1e-4)
    for ours, parameter in parameters.items():
        gradient, after = g[f"grad/{names[ours]}"], g[f"param_after_step/{names[ours]}"]
        np.testing.assert_allclose(parameter.grad, gradient * scale, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(parameter.detach(), after, atol=2e-6)


def test_weights_telescope():
    """Own rows of a level and the partner rows one level up cancel; level 1 alone weighs 1."""
    assert torch.equal(ml.signed_weights([50], 5, 10, []), torch.ones(25))
    weights = ml.signed_weights([80, 10, 5], 50, 10, [1, 1])
    sizes = [400, 50, 50, 25, 25]
    assert len(weights) == sum(sizes)
    sums = [part.sum().item() / len(weights) for part in weights.split(sizes)]
    np.testing.assert_allclose(sums, [1, -1, 1, -1, 1], rtol=1e-5)


def test_minibatches_pair_rows():
    """An epoch visits every row once, and a pair's rows stand opposite each other."""
    rows = ml.minibatch_rows([8, 4, 2], 3, 2, torch.Generator().manual_seed(0))
    assert rows.shape == (2, 12 + 6 + 6 + 3 + 3)
    assert sorted(rows.ravel().tolist()) == list(range(24 + 12 + 12 + 6 + 6))
    assert torch.equal(rows[:, 12:18] + 12, rows[:, 18:24])
    assert torch.equal(rows[:, 24:27] + 6, rows[:, 27:30])


def test_one_normaliser_keeps_the_correction():
    """A constant difference between the levels' advantages survives normalisation."""
    # A normaliser per part would map both parts of the pair to the same numbers.
    torch.manual_seed(0)
    base = torch.randn(60)
    own, sync = base[:10] + 0.5, base[:10]
    model = small_model(2, 1, "--hidden 4 --init-log-std 0")
    obs = torch.zeros(80, 2)
    pi, values = model(obs)
    actions = torch.zeros(80, 1)
    batch = {
        "obs": obs,
        "actions": actions,
        "logprobs": model.head.log_prob(pi, actions).detach(),
        "values": values.detach(),
        "advantages": torch.cat([base, sync, own]),
        "returns": torch.zeros(80),
    }
    options = ["--levels", "1", "2", "--num-steps", "60", "10", "--num-workers", "0"]
    options += ["--num-envs", "1", "--num-minibatches", "1", "--update-epochs", "1"]
    args = ml.parse_args(["--env", "ResSim-v1", *options])
    seen = learn(model, batch, args)
    # −mean(base normalised) − mean(own − sync) / std = −0.5 / std
    assert seen["policy_loss"] == pytest.approx(-0.5 / base.std().item(), rel=1e-4)


def gaussian_batch(advantages, logratio=0.0):
    """Return a model and rows of random observations and actions with these advantages."""
    torch.manual_seed(0)
    M = len(advantages)
    model = small_model(3, 2, "--hidden 8 --init-log-std -1")
    obs, actions = torch.randn(M, 3), torch.randn(M, 2)
    pi, values = model(obs)
    batch = {"obs": obs, "actions": actions, "values": values.detach(), "advantages": advantages}
    batch["logprobs"] = model.head.log_prob(pi, actions).detach() - logratio
    return model, batch | {"returns": values.detach()}


def policy_term(model, batch, weights, bounded):
    """Return the policy's part of the loss as `update` forms it."""
    if bounded:
        signed = batch | {"advantages": weights * batch["advantages"]}
        return ml.losses(model, signed, 0.1, False)[0].mean()
    return (weights * ml.losses(model, batch, 0.1, False)[0]).mean()


def test_bounded_correction_has_algorithm_4s_gradient_at_the_old_policy():
    """Both forms have the same gradient where the ratio is 1, so the same first step."""
    weights = ml.signed_weights([8, 4], 2, 1, [1])
    model, batch = gaussian_batch(torch.randn(len(weights), generator=torch.manual_seed(1)))
    gradients = []
    for bounded in (False, True):
        model.zero_grad()
        policy_term(model, batch, weights, bounded).backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    assert gradients[0].norm() > 1e-3
    torch.testing.assert_close(gradients[0], gradients[1])


def test_only_the_bounded_correction_is_bounded():
    """A partner's row of negative advantage and ratio e⁵ pulls the literal sum down without end."""
    weights = ml.signed_weights([8, 4], 2, 1, [1])  # 16 own, 8 partner, 8 own rows
    advantages = torch.zeros(len(weights))
    advantages[16:24] = -1.0
    model, batch = gaussian_batch(advantages, logratio=5.0)
    bound = -1.1 * (weights * advantages).abs().mean().item()
    assert policy_term(model, batch, weights, False).item() < 100 * bound
    assert policy_term(model, batch, weights, True).item() >= bound - 1e-6


@pytest.mark.parametrize("correction", ["literal", "bounded"])
def test_update_forms_the_chosen_correction(correction):
    """The loss that `update` reports is the one of --correction; the value fits own rows or all."""
    options = ["--levels", "1", "2", "--num-steps", "8", "4", "--schedule", "together"]
    options += ["--num-envs", "2", "--num-minibatches", "1", "--update-epochs", "1"]
    args = ml.parse_args([*options, "--correction", correction, "--no-norm-adv"])
    weights = ml.signed_weights([8, 4], 2, 1, [1])
    model, batch = gaussian_batch(torch.randn(32, generator=torch.manual_seed(1)), logratio=0.3)
    batch["returns"] = torch.randn(32, generator=torch.manual_seed(2))
    generator = torch.Generator().manual_seed(0)
    rows = ml.minibatch_rows([8, 4], 2, 1, generator)[0]
    mb = {name: column[rows] for name, column in batch.items()}
    expected = policy_term(model, mb, weights, correction == "bounded").item()
    v_loss = ml.losses(model, mb, 0.1, False)[1]
    own = weights.clamp(min=0) if correction == "bounded" else weights
    seen = learn(model, batch, args)
    assert seen["policy_loss"] == pytest.approx(expected, rel=1e-5)
    assert seen["value_loss"] == pytest.approx((own * v_loss).mean().item(), rel=1e-5)


@pytest.mark.parametrize("norm_adv", ["--norm-adv", "--no-norm-adv"])
def test_where_advantages_are_normalised(monkeypatch, norm_adv):
    """One affine map of all levels, from the coarsest level's rows of a minibatch."""
    options = ["--levels", "1", "2", "--num-steps", "8", "4", "--schedule", "together"]
    options += ["--num-envs", "2", "--num-minibatches", "2", "--update-epochs", "1"]
    args = ml.parse_args([*options, "--correction", "literal", norm_adv])
    model, batch = gaussian_batch(torch.randn(32, generator=torch.manual_seed(1)))
    used, real = [], ml.losses
    monkeypatch.setattr(ml, "losses", lambda model, mb, *a: used.append(mb) or real(model, mb, *a))
    learn(model, batch, args)
    rows = ml.minibatch_rows([8, 4], 2, 2, torch.Generator().manual_seed(0))
    for mb, mb_rows in zip(used, rows, strict=True):
        expected = batch["advantages"][mb_rows]
        if args.norm_adv:
            own = expected[:8]
            expected = (expected - own.mean()) / own.std()
        torch.testing.assert_close(mb["advantages"], expected)


# Runs ---------------------------------------------------------------------------------------------


def small_run(tmp_path, *more):
    """Train three levels for three iterations."""
    options = ["--levels", "1", "2", "3", "--num-steps", "10", "5", "5", "--eval-every", "1"]
    options += ["--eval-episodes", "4", "--log-dir", str(tmp_path), *more]
    return ml.train(ml.parse_args([*TOGETHER, "--env", "ResSim-v1", *options]))


def test_any_number_of_workers_gives_the_same_parameters(tmp_path):
    """But for rounding: the policy of a worker sees fewer rows. One worker sees all of them."""
    runs = [small_run(tmp_path, "--num-workers", str(n)) for n in (0, 1, 2, 2)]
    here, one, two, again = [run.model.state_dict() for run in runs]
    for name, value in here.items():
        assert torch.equal(value, one[name]) and torch.equal(two[name], again[name]), name
        torch.testing.assert_close(value, two[name], rtol=1e-3, atol=1e-5)
    returns = [[row["eval_return"] for row in run.history] for run in runs]
    assert returns[0] == returns[1] == pytest.approx(returns[2], rel=1e-4)
    assert returns[2] == returns[3]


def test_running_statistics_are_of_own_rows(tmp_path):
    """Observations: all levels' own rows, no partners'; value targets: the coarsest level's."""
    model = small_run(tmp_path, "--norm-obs", "--norm-value", "--num-workers", "0").model
    assert model.obs_norm.count == 3 * 6 * (10 + 5 + 5)  # iterations, actors, steps
    assert model.value_norm.count == 3 * 6 * 10
    assert (model.obs_norm.var != 1).any() and model.value_norm.var != 1


@pytest.mark.parametrize("spaces", ["from_one", "matrix"])
def test_action_spaces(tmp_path, spaces):
    """Discrete and Box actions of any start or shape train on two levels, within their space."""
    options = ["--env", f"envs:make_{spaces}", "--levels", "1", "2", "--num-steps", "8", "4"]
    options += ["--log-dir", str(tmp_path), "--num-workers", "0", "--eval-every", "0"]
    options += ["--level-costs", "1", "1", "1"]  # the episodes of these envs do not end
    run = ml.train(ml.parse_args([*TOGETHER, *options]))
    assert all(np.isfinite(row["policy_loss"]) for row in run.history)


def test_step_of_a_subclass(monkeypatch, tmp_path):
    """A reward of one's own in `step` counts, though the simulation could step in batches."""

    class Fined(ml.ResSim):
        def step(self, action):
            obs, reward, *ends = super().step(action)
            return obs, reward - 1000, *ends

    make = lambda level, evaluation=False: Fined("ResSim-v3", level, evaluation)  # noqa: E731
    options = ["--env", install(monkeypatch, make), "--levels", "1", "--num-steps", "10"]
    (first, *_, last) = small_run(tmp_path, *options, "--num-workers", "0").history
    assert -5000 < last["episodic_return"] < -4998 and -5000 < first["eval_return"] < -4998


def test_one_row_per_level(tmp_path):
    """It has no variance, which is no reason to believe in none, or to fail."""
    options = "--env envs:make --levels 1 2 --num-envs 1 --num-minibatches 1 --num-steps 4 2"
    options += " --no-norm-adv --num-iterations 5 --num-workers 0 --level-costs 1 1000 1"
    args = ml.parse_args([*options.split(), "--schedule", "together", "--log-dir", str(tmp_path)])
    run = ml.train(args)
    assert run.rule.moments.isfinite().all() and run.rule.plan().levels == [0, 1]


def test_counts_of_steps_and_seconds(tmp_path):
    """All members' steps are counted; seconds add up and never fall."""
    run = small_run(tmp_path, "--num-workers", "2")
    rows = run.history
    assert [row["global_step"] for row in rows] == [0, 180, 360, 540]  # 6 · (10 + 2·5 + 2·5)
    for name in ("seconds", "wall_seconds"):
        values = [row[name] for row in rows]
        assert all(b > a for a, b in zip(values, values[1:]))
    # The measurement of costs and evaluations are not on the run's clock.
    assert rows[0]["seconds"] == 0 and rows[-1]["seconds"] < rows[-1]["wall_seconds"]
    assert rows[-1]["episodic_length"] == 5


def test_given_costs_are_the_clock(tmp_path):
    """Own and partners' steps cost what their level does, and updates what their rows do."""
    run = small_run(tmp_path, "--num-workers", "0", "--level-costs", "1", "4", "16", "6000")
    # Own games on levels 1, 2, 3; partners of levels 2 and 3; rows over those of an update.
    steps = 6 * (10 * 1 + 5 * 4 + 5 * 16 + 5 * 1 + 5 * 4)
    update = 6000 * 180 / 60
    seconds = [row["seconds"] for row in run.history]
    assert seconds == pytest.approx([i * (steps + update) for i in range(4)])


def test_evaluation_uses_other_fields_and_the_finest_level():
    """Each evaluation game is on another evaluation field."""
    options = "--env ResSim-v1 --levels 1 3 --num-workers 0 --level-costs 1 1 1"
    args = ml.parse_args(options.split())
    model = ml.make_model(args)
    sims = ml.Simulations(args, model)
    ml.evaluate(model, sims)
    games = sims.pool.player.games["evaluation"]
    assert sorted(game.env.reset(seed=game.seed)[1]["field"] for game in games) == list(range(16))
    training = ml.ResSim("ResSim-v1", 3).grid.perm
    for env in [game.env for game in games]:
        assert env.grid.shape == (32, 32) and env.fields == 1
        assert not any(np.array_equal(env.grid.perm[env.field], k) for k in training)


def test_evaluation_in_workers():
    """Workers share the episodes; the returns are those of one process."""
    options = "--env ResSim-v1 --levels 1 --eval-episodes 5 --level-costs 1 1"
    args = ml.parse_args(options.split())
    model, seen = ml.make_model(args), []
    for args.num_workers in (0, 2):
        with ml.closing(ml.Simulations(args, model)) as sims:
            assert len(sims.pool.workers) == args.num_workers
            seen.append(ml.evaluate(model, sims))
    np.testing.assert_allclose(*seen, rtol=1e-5)  # the policy sees other batches


def test_all_envs_are_closed(monkeypatch, capsys):
    """Also after one that fails in it, which is told."""
    closed, broken = [], []

    class Closing(envs.Levels):
        def close(self):
            closed.append(self)
            if self in broken:
                raise RuntimeError("broken on purpose")

    name = install(monkeypatch, Closing)
    options = "--levels 1 2 --num-envs 2 --num-minibatches 1 --eval-every 0 --num-workers 0"
    _, sims = started(ml.parse_args(["--env", name, *TOGETHER, *options.split()]))
    games = sum(sims.pool.player.games.values(), [])
    broken.append(games[1].env)
    closed.clear()
    sims.close()
    assert closed == [game.env for game in games] and len(closed) == 2 * 3
    line = capsys.readouterr().err
    assert "level 1 (seed 1, episode 1, after 0 steps) failed in close: broken on purpose" in line


def test_simulation_that_gives_nan(monkeypatch, tmp_path):
    """The error names quantity, game and level; the run is saved."""
    steps = []

    class Broken(Tape):
        def step(self, action):
            steps.append(self.level)
            obs, reward, *ends = super().step(action)
            return obs, float("nan") if len(steps) > 40 and self.level == 2 else reward, *ends

    env = install(monkeypatch, lambda level: Broken(level))
    options = ["--levels", "1", "2", "--num-steps", "2", "2", "--eval-every", "0"]
    options += ["--level-costs", "1", "1", "1"]
    options += ["--log-dir", str(tmp_path)]
    args = ml.parse_args(
        [*TOGETHER, "--env", env, *options, "--num-envs", "3", "--num-workers", "0"]
    )
    with pytest.raises(ml.GameError, match=r"level 2 .* failed in step: .*the reward is nan"):
        ml.train(args)
    (checkpoint,) = tmp_path.glob("*/checkpoint.pt")
    state = torch.load(checkpoint, weights_only=True)
    assert state["counters"]["iteration"] == 2


class Clock(envs.Scripted):
    """Episodes of 10 steps, whose rewards are 1, 2, ..., 10, on all levels."""

    map_from = lambda self, other: None  # noqa: E731

    def __init__(self, level):
        super().__init__([(10, "truncated")])

    def step(self, action):
        obs, _, *ends = super().step(action)
        return obs, float(self.t), *ends


@pytest.mark.parametrize("steps, biased", [("20 10", False), ("20 5", True), ("15 10", True)])
def test_rollouts_that_are_not_whole_episodes(steps, biased, monkeypatch, tmp_path):
    """The coarse rows of pairs take away what the coarse level's own rows give if both see all
    times of an episode. If not, the sum does not telescope."""
    review, means = ml.Together.review, []

    def spy(rule, run, own, partners, episodes):
        means.extend(float(batch["returns"].mean()) for batch in (own[0], partners[0]))
        return review(rule, run, own, partners, episodes)

    monkeypatch.setattr(ml.Together, "review", spy)
    options = ["--env", install(monkeypatch, Clock), "--levels", "1", "2", "--gamma", "0"]
    options += ["--num-steps", *steps.split(), "--norm-value", "--log-dir", str(tmp_path)]
    ml.train(ml.parse_args([*TOGETHER, *options]))  # with γ = 0 returns are rewards
    assert (means[0] == pytest.approx(means[1])) is not biased
