"""Tests of what environments of other people do: after public reports on PPO implementations."""

import os
import random
import re
import sys

import numpy as np
import pytest
import torch

import ppo
import ppo_multilevel as ml

pytestmark = pytest.mark.filterwarnings("ignore")  # Gymnasium's, on the old API
SMALL = "--num-envs 2 --num-minibatches 2 --update-epochs 1 --hidden 8 --num-steps 10".split()
LEVELS = "--levels 1 2 --level-costs 1 2 0.1 --check-episodes 2 --eval-every 0".split()
both = pytest.mark.parametrize("script", [ppo, ml], ids=["ppo", "ppo_multilevel"])


def parse(script, log_dir, name, *more):
    """Return the options of a small run on an env of envs_foreign."""
    env = f"envs_foreign:{name}-v0" if script is ppo else f"envs_foreign:{name}"
    own = [] if script is ppo else LEVELS
    argv = [*SMALL, *own, "--env", env, "--num-iterations", "2", "--num-workers", "0", "--quiet"]
    return script.parse_args([*argv, "--log-dir", str(log_dir), *more])


def evaluate(script, run, *more):
    """Evaluate a run as --eval does. Returns the returns."""
    return script.evaluate_run(script.parse_args(["--eval", str(run.run_dir), *more]))


# Torch, NumPy and their generators ----------------------------------------------------------------


@both
def test_autograd_in_step(script, tmp_path, monkeypatch):
    """An env may use torch's gradients wherever it is stepped."""
    run = script.train(parse(script, tmp_path, "Gradient", "--eval-every", "1"))
    assert np.isfinite(run.history[-1]["eval_return"])
    assert np.isfinite(evaluate(script, run)).all()
    if script is ml:
        monkeypatch.setattr(ml, "MEASUREMENTS", 1)
        ml.analyse(parse(script, tmp_path, "Gradient", "--analyse"))


OPTIONS = {
    "plain": [ppo],
    "norms": [ppo, "--norm-obs", "--norm-value", "--activation", "relu", "--layer-norm"],
    "gru": [ppo, "--rnn", "gru", "--norm-reward"],
    "covariance": [ppo, "--full-covariance"],
    "adaptive": [ml],
    "together": [ml, "--schedule", "together", "--norm-value"],
}


@pytest.mark.parametrize("case", OPTIONS)
def test_default_type(case, tmp_path):
    """The scripts compute in float32, whatever default an env's library has set."""
    script, *options = OPTIONS[case]
    try:
        run = script.train(parse(script, tmp_path, "Double", "--eval-every", "1", *options))
        assert torch.get_default_dtype() == torch.float64  # the env keeps what it wants
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert np.isfinite(run.history[-1]["eval_return"])


@both
@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_gradients_that_are_off(script, num_workers, tmp_path):
    """Learning switches them on for itself. A surrogate may have switched them off."""
    more = ["--eval-every", "1", "--num-workers", num_workers]
    try:
        run = script.train(parse(script, tmp_path, "Surrogate", *more))
        assert not torch.is_grad_enabled()  # the env keeps what it wants
    finally:
        torch.set_grad_enabled(True)
    assert np.isfinite(run.history[-1]["policy_loss"])


@both
@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_global_generators(script, num_workers, tmp_path):
    """Games may draw from the generators that all code shares. They follow the run's seed."""

    def returns(seed):
        random.seed()
        np.random.seed()
        torch.seed()
        more = ["--num-workers", num_workers, "--eval-every", "1", "--seed", seed]
        run = script.train(parse(script, tmp_path, "Lottery", *more))
        names = ("episodic_return", "eval_return")
        evaluated = evaluate(script, run).tolist()
        assert len({*evaluated}) == 16  # no two games draw alike
        return [row.get(name) for row in run.history for name in names], evaluated

    first = returns("1")
    assert first == returns("1")
    for mine, other in zip(first, returns("2")):
        drawn = set(mine) - {None}
        assert len(drawn) >= 3 and not drawn & set(other)


def test_seeds_fit_into_int32():
    """C libraries take an int32."""
    seeds = ppo.draw_seeds(10_000, 1, 2)
    assert seeds.min() >= 0 and 2**30 < seeds.max() < 2**31
    assert len({*seeds.tolist()}) > 9_990
    assert (seeds != ppo.draw_seeds(10_000, 1, 3)).mean() > 0.99


@both
def test_runs_with_int32_seeds(script, tmp_path, monkeypatch):
    """All games of a run, an evaluation and an analysis get such seeds."""
    more = ["--num-envs", "20", "--eval-every", "1"]
    script.train(parse(script, tmp_path, "Int32", *more))
    if script is ml:
        monkeypatch.setattr(ml, "MEASUREMENTS", 2)
        ml.train(parse(ml, tmp_path, "Int32", *more, "--schedule", "together"))
        ml.analyse(parse(ml, tmp_path, "Int32", *more, "--analyse"))


# What step and reset return -----------------------------------------------------------------------

API = "; reset must return (obs, info), step (obs, reward, terminated, truncated, info)"


@pytest.mark.parametrize(
    "script, name, doing",
    [
        (ppo, "OldReset", "reset"),
        (ppo, "OldStep", "step"),
        (ppo, "OldPlane", "reset"),  # here a wrapper of Gymnasium's unpacks
        (ml, "OldStep", "step"),
    ],
)
def test_old_api(script, name, doing, tmp_path):
    """An env of Gym's old API is told what is wanted."""
    with pytest.raises(script.GameError) as failure:
        script.train(parse(script, tmp_path, name))
    first = str(failure.value).partition("\n")[0]
    assert f" failed in {doing}: " in first and first.endswith(API)


def test_mistake_in_reset(tmp_path):
    """An env that unpacks wrongly in its own code has its own error, and the place of it."""
    with pytest.raises(ppo.GameError) as failure:
        ppo.train(parse(ppo, tmp_path, "Careless"))
    first, *_, line, _, error = str(failure.value).strip().splitlines()
    assert "failed in reset: ValueError: too many values to unpack (expected 2)" in first
    assert line.strip() == "x, y = super().see()"
    assert error == "ValueError: too many values to unpack (expected 2)"


@pytest.mark.parametrize("kind", ["none", "list", "tuple"])
def test_rewards_that_are_no_numbers(kind, tmp_path):
    """They are an error, also where NumPy would stretch them."""
    with pytest.raises(ppo.GameError, match="failed in step: TypeError: float"):
        ppo.train(parse(ppo, tmp_path, f"Reward-{kind}"))


def test_rewards_that_are_numbers(tmp_path):
    """Python's decimals are numbers."""
    run = ppo.train(parse(ppo, tmp_path, "Reward-decimal"))
    assert run.history[-1]["episodic_return"] == 5


@both
@pytest.mark.parametrize(
    "name, doing, error",
    [
        ("Text", "step", "TypeError: an observation is of type <U3, which is no number"),
        ("Objects", "reset", "TypeError: an observation is of type object, which is no number"),
        ("Tensor", "reset", "RuntimeError: Can't call numpy() on Tensor that requires grad"),
    ],
)
def test_observations_that_are_no_numbers(script, name, doing, error, tmp_path):
    """They are an error with the place, also where NumPy would convert them."""
    with pytest.raises(script.GameError) as failure:
        script.train(parse(script, tmp_path, name))
    first = str(failure.value).partition("\n")[0]
    assert re.match(rf"envs_foreign:{name}.* \(seed \d+, episode 1, after \d steps\) failed", first)
    assert f" failed in {doing}: {error}" in first


@both
def test_observations_that_are_numbers(script, tmp_path):
    """Flags, integers, short floats and tensors are numbers."""
    assert script.train(parse(script, tmp_path, "Integers")).iteration == 2


@pytest.mark.parametrize("form", ["additive", "large", "indices", "nan"])
def test_masks_that_are_no_flags(form, tmp_path):
    """They are refused: read as flags they would allow what is forbidden."""
    with pytest.raises(ppo.GameError, match="failed in reset: ValueError: action mask .* 3 flags"):
        ppo.train(parse(ppo, tmp_path, f"Shop-{form}"))


@pytest.mark.parametrize(
    "form, least, most",
    [("flags", 0, 0), ("padded", 1, 4), ("bools", 1, 4), ("array", 1, 4), ("changing", 1, 4)],
)
def test_masks_that_are_flags(form, least, most, tmp_path):
    """Lists of integers or bools, arrays, other flags in each step. The third action pays 1."""
    run = ppo.train(parse(ppo, tmp_path, f"Shop-{form}", "--num-iterations", "4"))
    assert least <= run.history[-1]["episodic_return"] <= most
    assert run.args.action_masks


@pytest.mark.parametrize(
    "where, doing", [("reset", "step"), ("late", "step"), ("no_method", "reset")]
)
def test_masks_in_some_places_only(where, doing, tmp_path):
    """A mask that is missing once is an error. --no-action-masks ignores masks."""
    with pytest.raises(ppo.GameError, match=f"failed in {doing}: "):
        ppo.train(parse(ppo, tmp_path, f"Shop-{where}"))
    run = ppo.train(parse(ppo, tmp_path, f"Shop-{where}", "--no-action-masks"))
    assert run.history[-1]["episodic_return"] > 0


def test_masks_in_observations(tmp_path):
    """They are not used unseen. Masks in info are, and --no-action-masks ignores both."""
    with pytest.raises(ValueError, match="argument --action-masks: .* give it in info"):
        parse(ppo, tmp_path, "Menu")
    run = ppo.train(parse(ppo, tmp_path, "Menu", "--no-action-masks"))
    assert run.history[-1]["episodic_return"] > 0
    run = ppo.train(parse(ppo, tmp_path, "Menu-info"))
    assert run.history[-1]["episodic_return"] == 0  # the third action, which pays, is forbidden


def test_actions_of_a_float64_box(tmp_path):
    """They are inside the Box in float64, on its bounds too."""
    run = ppo.train(parse(ppo, tmp_path, "Valve"))
    state = ppo.read_checkpoint(run.run_dir)
    for bias, bound in ((-9.0, -0.1), (9.0, 0.3)):
        state["model"]["head.output.bias"].fill_(bias)
        torch.save(state, run.run_dir / "checkpoint.pt")
        assert evaluate(ppo, run) == pytest.approx(-5 * bound)  # the env looks at each action


# Processes and threads ----------------------------------------------------------------------------


@both
@pytest.mark.parametrize("num_workers", ["0", "1"])
def test_close_before_reset(script, num_workers, tmp_path, capfd):
    """An error in it is told, and the run goes on: at first only the env's spaces are looked at."""
    run = script.train(parse(script, tmp_path, "Pump", "--num-workers", num_workers))
    assert run.iteration == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) >= 2
    for line in lines:
        assert re.fullmatch(r"<.*Pump.*> failed in close: 'Pump' object has no .*'simulator'", line)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@both
def test_processes_of_an_env(script, tmp_path, capfd):
    """A worker cannot have them. The line says what to do, and this process can."""
    more = ["--num-workers", "1"]
    with pytest.raises(script.GameError, match="in reset: .*daemonic.* needs --num-workers 0\n"):
        script.train(parse(script, tmp_path, "Parallel", *more))
    with pytest.raises(script.GameError, match="worker 0 died .*; try --num-workers 0$"):
        script.train(parse(script, tmp_path, "ParallelMake", *more))
    assert "daemonic" in capfd.readouterr().err
    for name in ("Parallel", "ParallelMake"):
        assert script.train(parse(script, tmp_path, name)).iteration == 2


# Numbers of any scale -----------------------------------------------------------------------------

LEARN = (
    "--norm-obs --hidden 32 --num-envs 8 --num-steps 60 --num-minibatches 4 --update-epochs 4 "
    "--learning-rate 1e-2"
).split()


@pytest.mark.parametrize("scale, num_workers", [("nano", "0"), ("epoch", "1"), ("utm", "0")])
def test_observations_of_any_scale(scale, num_workers, tmp_path):
    """--norm-obs sees what differs by 1e-9 in all, or by 1e-8 of its size."""
    more = [*LEARN, "--num-iterations", "20", "--num-workers", num_workers]
    run = ppo.train(parse(ppo, tmp_path, f"Bit-{scale}", *more))
    assert run.history[-1]["episodic_return"] > 17  # of 20, by chance 10
    assert run.model.obs_norm.std[1] == 1  # of a constant
    assert (evaluate(ppo, run) == 20).all()


@pytest.mark.parametrize("schedule", ["adaptive", "together"])
def test_observations_of_any_scale_on_levels(schedule, tmp_path):
    """The same of levels: seconds since 1970 that differ by a minute."""
    more = [*LEARN, "--num-iterations", "20", "--schedule", schedule]
    run = ml.train(parse(ml, tmp_path, "Bit", *more))
    assert (evaluate(ml, run) == 20).all()


# Names and folders --------------------------------------------------------------------------------


@pytest.mark.parametrize("env", ["ALE/Pong-v5", "ale_py:ALE/Pong-v5"])
def test_atari_names(env, tmp_path):
    """ppo.py names the script for Atari."""
    with pytest.raises(ValueError, match="Atari games are for ppo_atari.py"):
        ppo.parse_args(["--env", env, "--log-dir", str(tmp_path)])


WANDERER = """
import os
import envs_foreign

class Wanderer(envs_foreign.Small):
    def __init__(self, level):
        os.chdir("/")
"""


def test_file_after_a_change_of_folder(tmp_path, monkeypatch):
    """Paths of the command line are those of the folder where it was given, for --eval too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wanderer.py").write_text(WANDERER)
    options = "--levels 1 --num-iterations 1 --num-workers 2 --eval-every 0 --quiet".split()
    options += [*SMALL, "--env", "wanderer.py:Wanderer", "--log-dir", "runs"]
    args = ml.parse_args(options)
    assert os.getcwd() == "/"
    run = ml.train(args)
    assert run.run_dir.parent == tmp_path / "runs"
    assert run.run_dir.name.startswith("wanderer.py_Wanderer__ppo_multilevel__1__")

    monkeypatch.chdir(tmp_path / "runs")
    ml.load_file.cache_clear()
    words = ["--eval", run.run_dir.name, "--num-workers", "0"]
    assert np.isfinite(ml.evaluate_run(ml.parse_args(words))).all()
