"""What people change in copies of the scripts: it works, or an error says what else to change."""

import csv
import inspect
import json
import re

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
    """A number that is put into a row gets to TensorBoard by its name, beside all others."""
    real = script.update
    monkeypatch.setattr(script, "update", lambda *a: real(*a) | {"novelty": 1.5})
    run = script.train(options(script, tmp_path))
    events = EventAccumulator(str(run.run_dir)).Reload()
    assert [event.value for event in events.Scalars("novelty")] == [1.5, 1.5]
    expected = pytest.approx([row["explained_variance"] for row in run.history])
    assert [e.value for e in events.Scalars("losses/explained_variance")] == expected
    assert set(script.COUNTERS).isdisjoint(events.Tags()["scalars"])
    with (run.run_dir / "progress.csv").open() as file:
        assert csv.DictReader(file).fieldnames == script.COLUMNS


@all_scripts
def test_own_loss_needs_a_name(script, tmp_path, monkeypatch):
    """What `update` stacks has as many names, so that no number is taken for another."""
    monkeypatch.setattr(script, "LOSSES", [*script.LOSSES, "novelty"])
    with pytest.raises(ValueError, match="zip"):
        script.train(options(script, tmp_path))


@all_scripts
def test_own_loss_moves_no_other(script, tmp_path, monkeypatch):
    """Wherever it is put, with its name, the KL's limits go by the KL."""
    code, terms = inspect.getsource(script.update), "[pg_loss, v_loss, entropy, "
    assert code.count(terms) == 1
    code = code.replace(terms, f"{terms}9 + 0 * entropy, ")
    names = [*script.LOSSES[:3], "novelty", *script.LOSSES[3:]]
    exec(code, changed := vars(script) | {"LOSSES": names})
    monkeypatch.setattr(script, "update", changed["update"])
    args = options(script, tmp_path)
    args.target_kl, args.adaptive_lr = 1.0, 1.0
    first, last = script.train(args).history
    assert first["novelty"] == 9 and last["approx_kl"] > 0
    if script is ppo:  # the rate rises with a KL below half of 1
        assert last["learning_rate"] > first["learning_rate"] > args.learning_rate


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


@all_scripts
@pytest.mark.parametrize("what", ["optimizer", "model", "another optimizer"])
def test_zero_grad(script, tmp_path, monkeypatch, what):
    """The optimizer's may be called, others' are an error if they take the gradients away."""
    whole, real = script.train(options(script, tmp_path / "whole")), script.losses
    owners = {}

    def make_optimizer(model, *arguments, make=script.make_optimizer, **more):
        owners["model"], owners["optimizer"] = model, make(model, *arguments, **more)
        owners["another optimizer"] = torch.optim.Adam(model.actor.parameters())
        return owners["optimizer"]

    monkeypatch.setattr(script, "make_optimizer", make_optimizer)
    monkeypatch.setattr(script, "losses", lambda *a: (owners[what].zero_grad(), real(*a))[1])
    args = options(script, tmp_path)
    if what == "optimizer":
        for ours, theirs in zip(script.train(args).model.parameters(), whole.model.parameters()):
            assert torch.equal(ours, theirs)
    else:
        with pytest.raises(AssertionError, match="see make_optimizer"):
            script.train(args)


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
        return lambda arrays, noise: act(arrays, torch.zeros_like(noise))

    monkeypatch.setattr(script, "fast_act", fast_act)


@vectors
@pytest.mark.parametrize("change", [changed_head, changed_forward, changed_sample])
def test_policy_that_has_two_texts(script, tmp_path, monkeypatch, change):
    """What acts, in NumPy, is what the model learns from: who changes one alone is told."""
    change(script, monkeypatch)
    with pytest.raises(AssertionError, match=r"fast_act\?"):
        script.train(options(script, tmp_path))


@vectors
def test_rounding_decides_an_action(script, tmp_path, monkeypatch):
    """A tie that rounding decides otherwise is no fault, however few the rows are."""
    real, calls = script.fast_act, []

    def fast_act(model):
        act = real(model)

        def other(arrays, noise):
            act(arrays, noise)
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
        self.first, self.activation = nn.Linear(width, args.hidden[-1]), ppo.Tanh()
        self.second, self.last = nn.Linear(args.hidden[-1], args.hidden[-1]), ppo.Tanh()

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
def test_own_option(script, tmp_path, capsys):
    """A run of before an option was there is refused by the option's name."""
    run_dir = script.train(options(script, tmp_path)).run_dir
    config = json.loads((run_dir / "config.json").read_text())
    del config["options"]["gamma"]
    (run_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit):
        script.parse_args(["--eval", str(run_dir)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("not a run of this script, see options ['gamma']")
