"""What people change in copies of the scripts works.

At the end are five changes as patches on copies of ppo.py. A patch is a list of places: the text
that stands there, and the text that replaces it. So many places does each change need here, and in
CleanRL's ppo.py or ppo_continuous_action.py (counted by hand, and without saving and resuming,
which those scripts do not have; here the patches need nothing more for it):

    change                                        here    CleanRL
    dual clip, an option                          2       2 (Args, loss)
    random network distillation, logged           3       5 (Agent, optimizer, reward, loss, log)
    tanh-squashed Gaussian                        2       2 (import, Agent)
    AdamW on weights only, cosine schedule        2       2 (optimizer, annealing)
    separate epochs for V, an option              3       3 (Args, loss, loop)

This prints a copy of ppo.py with one of them, DUAL_CLIP, NOVELTY, SQUASHED, ADAMW or VALUE_EPOCHS:

    python tests/test_changes.py NOVELTY > rnd_ppo.py
"""

import csv
import importlib.util
import inspect
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of the three scripts

import ppo  # noqa: E402
import ppo_atari  # noqa: E402
import ppo_multilevel  # noqa: E402

SMALL = "--num-minibatches 2 --update-epochs 2 --num-workers 0 --quiet --eval-every 0".split()
OWN = {
    ppo: "--num-envs 4 --num-steps 32".split(),
    ppo_atari: "--num-envs 2 --num-steps 4".split(),
    ppo_multilevel: "--env ResSim-v1 --levels 1 --num-envs 4 --num-steps 10".split(),
}
all_scripts = pytest.mark.parametrize("script", OWN, ids=lambda script: script.__name__)


def options(script, tmp_path, iterations=2):
    """Return the options of a small run."""
    argv = [*SMALL, *OWN[script], "--num-iterations", str(iterations), "--log-dir", str(tmp_path)]
    return script.parse_args(argv)


@all_scripts
def test_own_numbers(script, tmp_path, monkeypatch):
    """A number gets a column in progress.csv and a curve, even if only a later row has it.

    It comes from a term that `minibatch_loss` adds to its numbers, or from anything else in a row.
    """
    minibatch_loss, update, calls = script.minibatch_loss, script.update, []

    def own_loss(*arguments):
        loss, row = minibatch_loss(*arguments)
        return loss, {"novelty": 9 + 0 * row["entropy"]} | row

    def own_update(*arguments):
        calls.append(1)
        late = {"late": 2.5} if len(calls) == 2 else {}
        return update(*arguments) | late

    monkeypatch.setattr(script, "minibatch_loss", own_loss)
    monkeypatch.setattr(script, "update", own_update)
    args = options(script, tmp_path, iterations=3)
    args.target_kl = 1.0
    run = script.train(args)
    events = EventAccumulator(str(run.run_dir)).Reload()
    for name, expected in (("novelty", [9, 9, 9]), ("late", [2.5])):
        assert [event.value for event in events.Scalars(name)] == expected
    expected = pytest.approx([row["explained_variance"] for row in run.history])
    assert [e.value for e in events.Scalars("losses/explained_variance")] == expected
    assert set(script.COUNTERS).isdisjoint(events.Tags()["scalars"])
    with (run.run_dir / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    known = list(script.COUNTERS | script.TAGS)
    assert list(rows[0])[: len(known)] == known
    assert [float(row["novelty"]) for row in rows] == [9, 9, 9]
    assert [row["late"] for row in rows] == ["", "2.5", ""]
    assert [row["iteration"] for row in rows] == ["1", "2", "3"]
    assert run.history[-1]["approx_kl"] > 0


@all_scripts
def test_own_numbers_of_other_types(script, tmp_path, monkeypatch):
    """NumPy's and torch's numbers are logged as plain ones, and the run can be loaded."""
    update = script.update
    own = {"bonus": np.float64(0.25), "novelty": torch.tensor(0.5, requires_grad=True)}
    own |= {"count": np.int64(3), "tries": 4}
    monkeypatch.setattr(script, "update", lambda *arguments: update(*arguments) | own)
    run = script.train(options(script, tmp_path, iterations=1))
    with (run.run_dir / "progress.csv").open() as file:
        row = list(csv.DictReader(file))[-1]
    assert [row[name] for name in own] == ["0.25", "0.5", "3", "4"]

    more = ["--resume", str(run.run_dir), "--num-iterations", "2", "--quiet"]
    resumed = script.train(script.parse_args(more))
    assert resumed.iteration == 2 and resumed.history[: len(run.history)] == run.history
    words = ["--eval", str(run.run_dir), "--eval-episodes", "2"]
    assert len(script.evaluate_run(script.parse_args(words))) == 2


@all_scripts
def test_other_rate_of_a_resumed_run(script, tmp_path):
    """It learns at the rate that is given, though its optimizer had another one."""
    run = script.train(options(script, tmp_path, iterations=1))
    words = ["--resume", str(run.run_dir), "--num-iterations", "2", "--quiet"]
    args = script.parse_args([*words, "--learning-rate", "3e-3", "--no-anneal-lr"])
    assert script.train(args).history[-1]["learning_rate"] == 3e-3


def start_games_anew(monkeypatch, module, iteration):
    """Have every run start new episodes at an iteration, as one does that is resumed there."""
    goes_on = module.Run.goes_on

    def goes_on_anew(run):
        if run.iteration == iteration:
            run.start_games()
        return goes_on(run)

    monkeypatch.setattr(module.Run, "goes_on", goes_on_anew)


def test_early_stop(tmp_path, monkeypatch):
    """A `break` at an iteration's end in `train` leaves a checkpoint, which can be resumed."""
    start_games_anew(monkeypatch, ppo, 2)
    whole = ppo.train(options(ppo, tmp_path / "whole", iterations=4))
    line = r"(\n +)(run\.end_iteration\(.*\))"
    source, stop = inspect.getsource(ppo.train), r"\1\2\1if run.iteration == 2: break"
    code, count = re.subn(line, stop, source)
    exec(code, changed := dict(vars(ppo)))
    run = changed["train"](options(ppo, tmp_path, iterations=4))
    assert count == 1
    assert run.iteration == ppo.read_checkpoint(run.run_dir)["counters"]["iteration"] == 2
    again = ppo.train(ppo.parse_args(["--resume", str(run.run_dir), "--quiet"]))
    for name, weights in whole.model.state_dict().items():
        assert torch.equal(weights, again.model.state_dict()[name])


class Residual(nn.Module):
    """A network that has the parts of a plain one, but adds its input."""

    def __init__(self, width, args):
        super().__init__()
        self.first, self.activation = nn.Linear(width, args.hidden[-1]), nn.Tanh()
        self.second, self.last = nn.Linear(args.hidden[-1], args.hidden[-1]), nn.Tanh()

    def forward(self, x):
        h = self.activation(self.first(x))
        return h + self.last(self.second(h))


def test_own_network(tmp_path, monkeypatch):
    """Any module may stand for the hidden layers: it acts and learns."""
    monkeypatch.setattr(ppo, "hidden_layers", Residual)
    run = ppo.train(options(ppo, tmp_path))
    obs = torch.randn(50, 4)
    actions, _ = ppo.Policy(run.model).act(obs.numpy())
    assert actions.tolist() == run.model(obs)[0].argmax(dim=-1).tolist()
    torch.manual_seed(run.args.seed)
    start = ppo.make_model(run.args)
    assert not torch.equal(start.actor.second.weight, run.model.actor.second.weight)
    args = ppo.parse_args(["--eval", str(run.run_dir)])
    assert len(ppo.evaluate_run(args)) == args.eval_episodes


def test_option_that_an_old_run_does_not_have(tmp_path):
    """It takes its default; what the script does not have changes nothing."""
    args = options(ppo, tmp_path)
    args.gamma = 0.9
    run_dir = ppo.train(args).run_dir
    config = json.loads((run_dir / "config.json").read_text())
    del config["gamma"]
    config["dropout"] = 0.5
    (run_dir / "config.json").write_text(json.dumps(config))
    words = ["--resume", str(run_dir), "--num-iterations", "3", "--quiet"]
    run = ppo.train(ppo.parse_args(words))
    assert run.args.gamma == 0.99 and run.iteration == 3
    assert len(ppo.evaluate_run(ppo.parse_args(["--eval", str(run_dir)]))) == 16


# Patches ------------------------------------------------------------------------------------------

DUAL_CLIP = [
    (
        '    add("--clip-vloss"',
        '    add("--dual-clip", type=float, default=3.0, help="c, for Â < 0 r counts up to c")\n'
        '    add("--clip-vloss"',
    ),
    (
        "    pg_loss = pg_loss.mean()\n",
        """    # Dual clip (Ye et al. 2020, arXiv 1912.09729): if Â < 0 the loss is at most −c Â.
    bound = -args.dual_clip * mb["advantages"]
    pg_loss = torch.where(mb["advantages"] < 0, torch.min(pg_loss, bound), pg_loss).mean()
""",
    ),
]

NOVELTY = [
    (
        "        self.memory = Memory(obs_dim, args) if args.rnn else None\n",
        """        self.memory = Memory(obs_dim, args) if args.rnn else None
        # Random network distillation (Burda et al. 2018, arXiv 1810.12894).
        self.target = hidden_layers(obs_dim, args).requires_grad_(False)
        self.predictor = hidden_layers(obs_dim, args)

    def novelty(self, obs):
        \"\"\"Return how badly a network predicts a random one: less where it was trained.\"\"\"
        x = self.obs_norm(obs)
        return (self.predictor(x) - self.target(x)).square().mean(dim=-1)
""",
    ),
    (
        "            batch = make_batch(buffer, model, args)\n",
        """
            # Reward what is new, after the env's rewards have been normalised.
            with torch.no_grad():
                bonus = model.novelty(buffer["next_obs"])
            buffer["rewards"] += 0.1 * bonus

            batch = make_batch(buffer, model, args)
""",
    ),
    (
        '    row = {"policy_loss": pg_loss, "value_loss": v_loss, "entropy": entropy}\n',
        """    novelty = model.novelty(mb["obs"]).mean()
    loss = loss + novelty
    row = {"policy_loss": pg_loss, "value_loss": v_loss, "entropy": entropy, "novelty": novelty}
""",
    ),
]

SQUASHED = [
    (
        "class Memory(nn.Module):\n",
        """class SquashedGaussian(Gaussian):
    \"\"\"A Gaussian whose samples go through tanh, into (−1, 1).

    Actions are not scaled to a Box of other bounds: there use gymnasium.wrappers.RescaleAction.
    \"\"\"

    def sample(self, mean, noise=None, action_mask=None):
        return np.tanh(super().sample(mean, noise))

    def log_prob(self, mean, action):
        a = action.clamp(-1 + 1e-6, 1 - 1e-6)
        correction = (1 - a.square()).log().flatten(len(mean.shape) - 1).sum(dim=-1)
        return super().log_prob(mean, a.atanh()) - correction

    def entropy(self, mean, logprobs):
        return -logprobs  # an estimate: there is no closed form


class Memory(nn.Module):
""",
    ),
    (
        "    return Gaussian(args.hidden[-1], action_space.shape, args)\n",
        "    return SquashedGaussian(args.hidden[-1], action_space.shape, args)\n",
    ),
]

ADAMW = [
    (
        "    return torch.optim.Adam("
        "model.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)\n",
        """    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": others}, {"params": weights, "weight_decay": 0.1}]
    options = {"lr": args.learning_rate, "eps": 1e-5, "weight_decay": 0.0}
    return torch.optim.AdamW(groups, **options, fused=True)
""",
    ),
    (
        "                remaining = 1 - run.share_done() if args.anneal_lr else 1\n",
        "                remaining = 0.5 + 0.5 * math.cos(math.pi * run.share_done())\n",
    ),
]

VALUE_EPOCHS = [
    (
        '    add("--norm-adv"',
        '    add("--value-epochs", type=int, default=5, help="passes over a rollout for V")\n'
        '    add("--norm-adv"',
    ),
    (
        "    loss = pg_loss + value_coef * v_loss - args.ent_coef * entropy\n",
        "    loss = pg_loss - args.ent_coef * entropy\n",
    ),
    (
        "        if not completed:\n            break\n    return mean_row(logged)\n",
        """        if not completed:
            break
    for _ in range(args.value_epochs):
        for mb in minibatches(batch, args, generator):
            v_loss = losses(model, mb, args.clip_coef, args.clip_vloss)[1].mean()
            gradient_step(model, optimizer, v_loss, args.max_grad_norm)
    return mean_row(logged)
""",
    ),
]


def change(patch):
    """Return the text of ppo.py with a patch."""
    text = Path(ppo.__file__).read_text()
    for old, new in patch:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.fixture
def patched(tmp_path, monkeypatch):
    """Return a function: a patch → a module, a copy of ppo.py with this change.

    Its games start anew at the second iteration.
    """

    def make(patch):
        path = tmp_path / "changed_ppo.py"
        path.write_text(change(patch))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        start_games_anew(monkeypatch, module, 2)
        return module

    return make


def run_of(module, tmp_path, *words, iterations=4):
    """Train a little with a patched script."""
    argv = [*SMALL, *OWN[ppo], "--num-iterations", str(iterations), *words]
    return module.train(module.parse_args([*argv, "--log-dir", str(tmp_path / "runs")]))


def assert_resume_is_exact(module, tmp_path, *words):
    """Two iterations and two more give the weights of four, and the optimizer's moments."""
    whole = run_of(module, tmp_path, *words, "--no-anneal-lr")
    part = run_of(module, tmp_path, *words, "--no-anneal-lr", iterations=2)
    more = ["--resume", str(part.run_dir), "--num-iterations", "4", "--quiet"]
    resumed = module.train(module.parse_args(more))
    for name, weights in whole.model.state_dict().items():
        assert torch.equal(weights, resumed.model.state_dict()[name]), name
    for name, moments in whole.optimizer.state_dict()["state"].items():
        for key, value in moments.items():
            assert torch.equal(value, resumed.optimizer.state_dict()["state"][name][key])


def test_dual_clip(patched, tmp_path):
    """Hand values for c = 3: with Â = −1 and r = 5 a row has the loss 3, with Â = 1 it has −1.2."""
    module = patched(DUAL_CLIP)
    args = module.parse_args(["--log-dir", str(tmp_path)])
    model = module.make_model(args)
    obs = torch.zeros(1, 4)
    pi, values = model(obs)
    for advantage, ratio, expected in ((-1.0, 5.0, 3.0), (-1.0, 2.0, 2.0), (1.0, 5.0, -1.2)):
        old = model.head.log_prob(pi, torch.tensor([0])) - math.log(ratio)
        mb = {"obs": obs, "actions": torch.tensor([0]), "logprobs": old, "values": values}
        mb |= {"advantages": torch.tensor([advantage]), "returns": values}
        _, row = module.minibatch_loss(model, mb, args)
        assert row["policy_loss"].item() == pytest.approx(expected, rel=1e-5)
    assert_resume_is_exact(module, tmp_path)


def test_random_network_distillation(patched, tmp_path):
    """The bonus is logged and falls where the policy has been; all of it is saved and resumed."""
    module = patched(NOVELTY)
    run = run_of(module, tmp_path, "--learning-rate", "1e-3", iterations=20)
    novelty = [row["novelty"] for row in run.history]
    assert novelty[-1] < 0.5 * novelty[0]
    with (run.run_dir / "progress.csv").open() as file:
        assert [float(row["novelty"]) for row in csv.DictReader(file)] == novelty
    curve = EventAccumulator(str(run.run_dir)).Reload().Scalars("novelty")
    assert [event.value for event in curve] == pytest.approx(novelty)
    torch.manual_seed(run.args.seed)
    start = module.make_model(run.args)
    assert torch.equal(start.target[0].weight, run.model.target[0].weight)
    assert not torch.equal(start.predictor[0].weight, run.model.predictor[0].weight)
    # --norm-reward does not divide the bonus.
    train = inspect.getsource(module.train)
    assert train.index("normalise_rewards(") < train.index("+= 0.1 * bonus")
    assert_resume_is_exact(module, tmp_path)
    assert_resume_is_exact(module, tmp_path, "--norm-obs", "--norm-reward")


def test_squashed_gaussian(patched, tmp_path):
    """Its density is that of torch's transformed distribution; its entropy is −log π on average."""
    module = patched(SQUASHED)
    # Pendulum's torque is up to ±2.
    make = lambda: gym.wrappers.RescaleAction(gym.make("Pendulum-v1"), -1, 1)  # noqa: E731
    gym.register("RescaledPendulum-v0", make)
    env = ["--env", "RescaledPendulum-v0"]
    run = run_of(module, tmp_path, *env)
    assert run.model.action_space == gym.spaces.Box(-1, 1, (1,))
    head = run.model.head
    mean = torch.tensor([[0.3]])
    normal = torch.distributions.Normal(mean, head.log_std.exp())
    squash = torch.distributions.transforms.TanhTransform()
    theirs = torch.distributions.TransformedDistribution(normal, [squash])
    actions = torch.linspace(-0.999, 0.999, 9999)[:, None]
    density = head.log_prob(mean.expand(9999, 1), actions)
    torch.testing.assert_close(density, theirs.log_prob(actions)[:, 0], rtol=1e-3, atol=1e-3)
    total = density.exp().sum() * (actions[1] - actions[0])
    assert total.item() == pytest.approx(1, abs=0.01)
    noise = head.noise(500, torch.Generator()).numpy()
    found, _ = module.Policy(run.model).act(np.ones((500, 3), np.float32), noise=noise)
    assert np.abs(found).max() < 1
    mean, _ = run.model(torch.ones(1, 3))
    np.testing.assert_allclose(found, np.tanh(mean.detach().numpy() + noise), atol=1e-5)
    assert_resume_is_exact(module, tmp_path, *env)


def test_adamw_with_a_cosine_schedule(patched, tmp_path):
    """Weights decay, biases and log σ do not; the rate follows the cosine, after a resume too."""
    module = patched(ADAMW)
    run = run_of(module, tmp_path, "--env", "Pendulum-v1", "--learning-rate", "1e-3")
    plain, decayed = run.optimizer.param_groups
    assert {p.dim() for p in decayed["params"]} == {2} and decayed["weight_decay"] == 0.1
    assert {p.dim() for p in plain["params"]} == {1} and plain["weight_decay"] == 0
    cosine = [0.5 + 0.5 * math.cos(math.pi * k / 4) for k in range(4)]
    rates = [row["learning_rate"] for row in run.history]
    assert rates == pytest.approx([1e-3 * factor for factor in cosine])
    more = ["--resume", str(run.run_dir), "--num-iterations", "8", "--quiet"]
    resumed = module.train(module.parse_args(more))
    last = 1e-3 * (0.5 + 0.5 * math.cos(math.pi * 7 / 8))
    assert resumed.history[-1]["learning_rate"] == pytest.approx(last)
    assert [group["lr"] for group in resumed.optimizer.param_groups] == pytest.approx([last] * 2)


def test_separate_epochs_for_the_value_function(patched, tmp_path):
    """V takes its own number of steps, and neither part moves in the other's steps."""
    module = patched(VALUE_EPOCHS)
    run = run_of(module, tmp_path, "--value-epochs", "3", iterations=2)
    state = run.optimizer.state
    policy = [*run.model.actor.parameters(), *run.model.head.parameters()]
    value = [*run.model.critic.parameters(), *run.model.value.parameters()]
    assert {int(state[p]["step"]) for p in policy} == {2 * 2 * 2}  # iterations, epochs, minibatches
    assert {int(state[p]["step"]) for p in value} == {2 * 3 * 2}
    assert_resume_is_exact(module, tmp_path)


def test_command(tmp_path):
    """The command that the docstring shows prints a copy with a patch, which is a program."""
    (command,) = re.findall(r"^    python (tests/test_changes.py NOVELTY) >", __doc__, re.MULTILINE)
    root = Path(ppo.__file__).parent
    text = subprocess.check_output([sys.executable, *command.split()], cwd=root, text=True)
    assert text == change(NOVELTY)
    names = re.findall("[A-Z_]{5,}", __doc__.partition("with one of them")[2].partition(":")[0])
    assert len(names) == 5 and all(change(globals()[name]) for name in names)


if __name__ == "__main__":
    patches = ("DUAL_CLIP", "NOVELTY", "SQUASHED", "ADAMW", "VALUE_EPOCHS")
    if len(sys.argv) < 2 or sys.argv[1] not in patches:
        sys.exit(f"give the name of a patch: {', '.join(patches)}")
    print(change(globals()[sys.argv[1]]), end="")
