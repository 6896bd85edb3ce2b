"""What people change in copies of the scripts: it works, or an error says what else to change.

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
"""

import csv
import importlib.util
import inspect
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import ppo
import ppo_atari
import ppo_multilevel

SMALL = "--num-minibatches 2 --update-epochs 2 --num-workers 0 --quiet --eval-every 0".split()
OWN = {
    ppo: "--num-envs 4 --num-steps 32".split(),
    ppo_atari: "--num-envs 2 --num-steps 4".split(),
    ppo_multilevel: "--env ResSim-v1 --levels 1 --num-envs 4 --num-steps 10".split(),
}
all_scripts = pytest.mark.parametrize("script", OWN, ids=lambda script: script.__name__)
vectors = pytest.mark.parametrize("script", [ppo, ppo_multilevel], ids=lambda s: s.__name__)


def options(script, tmp_path, iterations=2):
    """Return the options of a small run."""
    argv = [*SMALL, *OWN[script], "--num-iterations", str(iterations), "--log-dir", str(tmp_path)]
    return script.parse_args(argv)


@all_scripts
def test_own_number(script, tmp_path, monkeypatch):
    """A number in a row gets a curve in TensorBoard by its name, and a column in progress.csv."""
    real = script.update
    monkeypatch.setattr(script, "update", lambda *a: real(*a) | {"novelty": 1.5})
    run = script.train(options(script, tmp_path))
    events = EventAccumulator(str(run.run_dir)).Reload()
    assert [event.value for event in events.Scalars("novelty")] == [1.5, 1.5]
    expected = pytest.approx([row["explained_variance"] for row in run.history])
    assert [e.value for e in events.Scalars("losses/explained_variance")] == expected
    assert set(script.COUNTERS).isdisjoint(events.Tags()["scalars"])
    with (run.run_dir / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    known = list(script.COUNTERS | script.TAGS)
    assert list(rows[0])[: len(known)] == known
    assert [row["novelty"] for row in rows] == ["1.5", "1.5"]


@all_scripts
def test_number_that_comes_late(script, tmp_path, monkeypatch):
    """A key that only a later row has gets a column, too; the rows before it stay."""
    real, calls = script.update, []

    def update(*arguments):
        calls.append(1)
        late = {"late": 2.5} if len(calls) == 2 else {}
        return real(*arguments) | late

    monkeypatch.setattr(script, "update", update)
    run = script.train(options(script, tmp_path, iterations=3))
    with (run.run_dir / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["late"] for row in rows] == ["", "2.5", ""]
    assert [row["iteration"] for row in rows] == ["1", "2", "3"]


@all_scripts
def test_own_loss_term(script, tmp_path, monkeypatch):
    """A term that `minibatch_loss` adds to its numbers is logged by its name, beside the others."""
    real = script.minibatch_loss

    def minibatch_loss(*arguments):
        loss, row = real(*arguments)
        return loss, {"novelty": 9 + 0 * row["entropy"]} | row

    monkeypatch.setattr(script, "minibatch_loss", minibatch_loss)
    args = options(script, tmp_path)
    args.target_kl = 1.0
    first, last = script.train(args).history
    assert first["novelty"] == 9 and last["approx_kl"] > 0


@all_scripts
def test_early_stop(script, tmp_path):
    """A `break` at an iteration's end in `train` leaves a checkpoint, which can be resumed."""
    whole = script.train(options(script, tmp_path / "whole", iterations=4))
    line = r"(\n +)(run\.end_iteration\(.*\))"
    source, stop = inspect.getsource(script.train), r"\1\2\1if run.iteration == 2: break"
    code, count = re.subn(line, stop, source)
    exec(code, changed := dict(vars(script)))
    run = changed["train"](options(script, tmp_path, iterations=4))
    assert count == 1
    assert run.iteration == script.Checkpoint(run.run_dir).read()["counters"]["iteration"] == 2
    again = script.train(script.parse_args(["--resume", str(run.run_dir), "--quiet"]))
    for name, weights in whole.model.state_dict().items():
        assert torch.equal(weights, again.model.state_dict()[name])


def changed_head(script, monkeypatch):
    real = script.Categorical.forward
    shift = torch.tensor([2.0, 0.0])
    monkeypatch.setattr(script.Categorical, "forward", lambda *a: real(*a) + shift)
    monkeypatch.setattr(script.Gaussian, "forward", lambda head, h, _=None: 2 * head.mean(h) + 0.1)


def changed_forward(script, monkeypatch):
    real = script.Model.forward

    def forward(model, *arguments, **inputs):
        pi, values = real(model, *arguments, **inputs)
        return pi + torch.linspace(0, 2, pi.shape[-1]), values

    monkeypatch.setattr(script.Model, "forward", forward)


def changed_sample(script, monkeypatch):
    real = script.fast_act

    def fast_act(model):
        act = real(model)
        return lambda arrays, noise: act(arrays, np.zeros_like(noise))

    monkeypatch.setattr(script, "fast_act", fast_act)


@vectors
@pytest.mark.parametrize("change", [changed_head, changed_forward, changed_sample])
def test_policy_that_has_two_texts(script, tmp_path, monkeypatch, change):
    """What acts, in NumPy, is what the model learns from: who changes one alone is told."""
    change(script, monkeypatch)
    with pytest.raises(AssertionError, match="change fast_act too"):
        script.train(options(script, tmp_path))


@vectors
def test_rounding_decides_an_action(script, tmp_path, monkeypatch):
    """A tie that rounding decides otherwise is no fault, however few the rows are."""
    real, calls = script.fast_act, []

    def fast_act(model):
        act = real(model)

        def other(arrays, noise):
            act(arrays, noise)
            if noise is None:  # hints at the start play the mode
                return
            calls.append(1)
            if len(calls) % 8 in (1, 2):  # two entries in an iteration
                action = arrays["actions"].reshape(-1)
                action[0] = 1 - action[0]

        return other

    monkeypatch.setattr(script, "fast_act", fast_act)
    args = options(script, tmp_path)
    args.num_envs, args.num_steps = 1, 8 if script is ppo else [8]
    assert script.train(args).iteration == 2 and len(calls) == 16


class Residual(nn.Module):
    """A network that has the parts of a plain one, but adds its input."""

    def __init__(self, width, args):
        super().__init__()
        self.first, self.activation = nn.Linear(width, args.hidden[-1]), nn.Tanh()
        self.second, self.last = nn.Linear(args.hidden[-1], args.hidden[-1]), nn.Tanh()

    def forward(self, x):
        h = self.activation(self.first(x))
        return h + self.last(self.second(h))


@vectors
def test_own_network(script, tmp_path, monkeypatch):
    """Any module may stand for the hidden layers."""
    monkeypatch.setattr(script, "hidden_layers", Residual)
    run = script.train(options(script, tmp_path))
    assert script.fast_act(run.model) == run.model.act
    assert script.evaluate_run(script.parse_args(["--eval", str(run.run_dir)])).size


@all_scripts
def test_option_that_an_old_run_does_not_have(script, tmp_path, capsys):
    """It takes its default, and a line names it; what the script does not have is ignored."""
    run_dir = script.train(options(script, tmp_path)).run_dir
    config = json.loads((run_dir / "config.json").read_text())
    del config["options"]["gamma"]
    config["options"]["dropout"] = 0.5
    (run_dir / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    for what in ("--eval", "--resume"):
        args = script.parse_args([what, str(run_dir)])
        assert args.gamma == 0.99 and "dropout" not in args
        missing, unknown = capsys.readouterr().err.splitlines()
        assert missing == "the run has no gamma: the defaults are used"
        assert unknown == "this script has no dropout: ignored"


# Patches ------------------------------------------------------------------------------------------

DUAL_CLIP = [
    (
        '    add("--clip-vloss"',
        '    add("--dual-clip", type=real(1), default=3.0, help="c, for Â < 0 r counts up to c")\n'
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
        return (self.predictor(obs) - self.target(obs)).square().mean(dim=-1)
""",
    ),
    (
        "            # Judge: was an action better than the value function expected?\n",
        """            # Reward what is new.
            with torch.no_grad():
                bonus = model.novelty(buffer["next_obs"])
            buffer["rewards"] += 0.1 * bonus

            # Judge: was an action better than the value function expected?
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
    \"\"\"A Gaussian whose samples go through tanh, into (−1, 1).\"\"\"

    def sample(self, mean, noise=None):
        return super().sample(mean, noise).tanh()

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
        "    return torch.optim.Adam(groups, eps=1e-5, fused=True)\n",
        """    decayed = []
    for group in groups:
        weights = [p for p in group["params"] if p.dim() > 1]
        group["params"] = [p for p in group["params"] if p.dim() <= 1]
        decayed.append({"params": weights, "lr": group["lr"], "weight_decay": 0.1})
    return torch.optim.AdamW(groups + decayed, eps=1e-5, weight_decay=0.0, fused=True)
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
        '    add("--value-epochs", type=count, default=5, help="passes over a rollout for V")\n'
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


@pytest.fixture
def patched(tmp_path, monkeypatch):
    """Return a function: a patch → a module, a copy of ppo.py with this change."""

    def make(patch):
        text = Path(ppo.__file__).read_text()
        for old, new in patch:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = tmp_path / "changed_ppo.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        return module

    return make


def run_of(module, tmp_path, *words, iterations=4):
    """Train a little with a patched script."""
    argv = [*SMALL, *OWN[ppo], "--num-iterations", str(iterations), *words]
    return module.train(module.parse_args([*argv, "--log-dir", str(tmp_path / "runs")]))


def assert_resume_is_exact(module, tmp_path, *words):
    """Two iterations and two more give the weights of four."""
    whole = run_of(module, tmp_path, *words, "--no-anneal-lr")
    part = run_of(module, tmp_path, *words, "--no-anneal-lr", iterations=2)
    more = ["--resume", str(part.run_dir), "--num-iterations", "4", "--quiet"]
    resumed = module.train(module.parse_args(more))
    for name, weights in whole.model.state_dict().items():
        assert torch.equal(weights, resumed.model.state_dict()[name]), name


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
    start = module.make_model(run.args)
    assert not torch.equal(start.predictor[0].weight, run.model.predictor[0].weight)
    assert_resume_is_exact(module, tmp_path)


def test_squashed_gaussian(patched, tmp_path):
    """Its density is that of torch's transformed distribution; its entropy is −log π on average."""
    module = patched(SQUASHED)
    env = ["--env", "Pendulum-v1"]
    run = run_of(module, tmp_path, *env)
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
    assert module.fast_act(run.model) == run.model.act  # NumPy's policy does not know it
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
