"""Tests of what environments of other people do: after public reports on PPO implementations."""

import functools
import random
import sys

import envs_foreign
import numpy as np
import onnxruntime
import pytest
import torch

import ppo
import ppo_atari
import ppo_multilevel as ml

pytestmark = pytest.mark.filterwarnings("ignore")  # Gymnasium's, on the old API
SMALL = "--num-envs 2 --num-minibatches 2 --update-epochs 1 --hidden 8 --quiet".split()
LEVELS = "--levels 1 2 --level-costs 1 2 0.1 --num-workers 0 --check-episodes 2".split()


def parse(script, log_dir, name, *more):
    """Return the options of a small run on an env of envs_foreign."""
    if script is ppo:
        env = f"envs_foreign:{name}-v0"
        own = "--num-steps 10".split()
    else:
        env = f"envs_foreign:{name}"
        own = [*LEVELS, "--num-steps", "10"]
    argv = [*SMALL, *own, "--env", env, "--num-iterations", "2", "--log-dir", str(log_dir), *more]
    return script.parse_args(argv)


both = pytest.mark.parametrize("script", [ppo, ml], ids=["ppo", "ppo_multilevel"])


@both
def test_autograd_in_step(script, tmp_path):
    """An env may use torch's gradients wherever it is stepped."""
    run = script.train(parse(script, tmp_path, "Gradient", "--eval-every", "1"))
    assert np.isfinite(run.history[-1]["eval_return"])
    script.evaluate_run(script.parse_args(["--eval", str(run.run_dir)]))
    if script is ml:
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


def returns_of(script, log_dir, name, *options):
    """Return the returns that a run logs, and what --eval has of it."""
    random.seed()
    np.random.seed()
    torch.seed()
    run = script.train(parse(script, log_dir, name, *options))
    random.seed()
    np.random.seed()
    torch.seed()
    evaluated = script.evaluate_run(script.parse_args(["--eval", str(run.run_dir)]))
    rows = [row for row in run.history if row["iteration"]]
    return [row["episodic_return"] for row in rows], evaluated.tolist(), run


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("draw", ["numpy", "python", "torch"])
def test_global_generators(draw, workers, tmp_path):
    """The same seed gives the same numbers, of training and of evaluations, in every process.

    An evaluation does not change what training draws, and --eval repeats the run's last one.
    """
    name = f"Lottery-{draw}"
    first = returns_of(ppo, tmp_path, name, "--num-workers", workers)
    second = returns_of(ppo, tmp_path, name, "--num-workers", workers, "--eval-every", "1")
    other = returns_of(ppo, tmp_path, name, "--num-workers", workers, "--seed", "2")
    assert first[:2] == second[:2] and first[0] != other[0]
    run = second[2]
    assert run.history[-1]["eval_return"] == np.mean(second[1])
    assert len({*second[1]}) > 1  # the games do not draw alike


def test_global_generators_of_levels(tmp_path):
    """The same with levels, whose evaluations and checks have pools that stay."""
    options = ["--eval-every", "1"]
    first = returns_of(ml, tmp_path, "Lottery", *options)
    second = returns_of(ml, tmp_path, "Lottery", *options)
    assert first[:2] == second[:2]
    checks = [row["check_return"] for row in second[2].history if "check_return" in row]
    assert len({*checks}) == 1  # the same episodes each time: no luck in a gain


@both
def test_global_generators_of_a_resumed_run(script, tmp_path):
    """A run that goes on does not draw the numbers of its first iterations again."""
    name = "Lottery-numpy" if script is ppo else "Lottery"
    run = script.train(parse(script, tmp_path, name))
    argv = ["--resume", str(run.run_dir), "--num-iterations", "4", "--quiet"]
    run = script.train(script.parse_args(argv))
    returns = [episode[0] for episode in run.recent]
    assert len({*returns}) == len(returns) == 16


def test_spawned_workers_are_seeded(tmp_path, monkeypatch):
    """A spawned worker has not the main process's generators."""
    monkeypatch.setattr(ppo, "WorkerPool", functools.partial(ppo.WorkerPool, start_method="spawn"))
    first = returns_of(ppo, tmp_path, "Lottery-python", "--num-workers", "1")
    second = returns_of(ppo, tmp_path, "Lottery-python", "--num-workers", "1")
    assert first[0] == second[0]


@pytest.mark.parametrize("script", [ppo, ppo_atari, ml])
def test_seeds_fit_into_int32(script):
    """C libraries take an int32."""
    seeds = script.draw_seeds(10_000, 1, 2)
    assert seeds.min() >= 0 and 2**30 < seeds.max() < 2**31
    assert len({*seeds.tolist()}) > 9_990
    assert (seeds != script.draw_seeds(10_000, 1, 3)).mean() > 0.99


@both
def test_runs_with_int32_seeds(script, tmp_path):
    """All games of a run, an evaluation and an analysis get such seeds."""
    script.train(parse(script, tmp_path, "Int32", "--num-envs", "20", "--eval-every", "1"))
    if script is ml:
        ml.train(parse(ml, tmp_path, "Int32", "--num-envs", "20", "--schedule", "together"))
        ml.analyse(parse(ml, tmp_path, "Int32", "--num-envs", "20", "--analyse"))


@both
@pytest.mark.parametrize("name", ["OldReset", "OldStep"])
def test_old_api(script, name, tmp_path):
    """An env of Gym's old API is told what is wanted."""
    with pytest.raises(ppo.GameError if script is ppo else ml.GameError) as failure:
        script.train(parse(script, tmp_path, name))
    first_line = str(failure.value).partition("\n")[0]
    assert "reset must return (obs, info), step (obs, reward, terminated," in first_line


def test_mistake_in_reset(tmp_path):
    """An env that unpacks wrongly in its own code has its own error."""
    with pytest.raises(ppo.GameError, match="ValueError: too many values to unpack .expected 2"):
        ppo.train(parse(ppo, tmp_path, "Careless"))


def test_old_api_under_a_wrapper(tmp_path):
    """The same where a wrapper of Gymnasium's unpacks what the env returns."""
    with pytest.raises(ppo.GameError, match="reset must return .obs, info., step"):
        ppo.train(parse(ppo, tmp_path, "OldPlane"))


@pytest.mark.parametrize("kind", ["none", "list", "tuple", "decimal"])
def test_rewards_that_are_no_numbers(kind, tmp_path):
    """They are named as arrays are."""
    with pytest.raises(ppo.GameError, match="failed in step: EnvError: not a number and two fl"):
        ppo.train(parse(ppo, tmp_path, f"Reward-{kind}"))


@pytest.mark.parametrize("form", ["additive", "large", "indices", "nan"])
def test_masks_that_are_no_flags(form, tmp_path):
    """They are refused: read as flags they would allow what is forbidden."""
    with pytest.raises(ppo.GameError, match="failed in reset: EnvError: action mask .* 3 flags"):
        ppo.train(parse(ppo, tmp_path, f"Shop-{form}"))


@pytest.mark.parametrize("form", ["padded", "bools", "array", "changing"])
def test_first_mask_that_has_two_meanings(form, tmp_path):
    """[0, 1, 1] may be flags or numbers of choices, and is refused. Bools and arrays are flags.

    After a first mask that is flags beyond doubt such a list ends no run.
    """
    args = parse(ppo, tmp_path, f"Shop-{form}")
    if form == "padded":
        with pytest.raises(ppo.GameError, match=r"mask \[0, 1, 1\]: are these flags, or numbers"):
            ppo.train(args)
    else:
        assert ppo.train(args).history[-1]["episodic_return"] > 0  # the last action pays


@pytest.mark.parametrize("name", ["Shop-flags", "Menu"])
def test_masks_in_lists(name, tmp_path):
    """Lists of flags, or of lists of flags, one for each entry of an action."""
    run = ppo.train(parse(ppo, tmp_path, name))
    assert run.history[-1]["episodic_return"] == 0


@pytest.mark.parametrize("where", ["reset", "step", "no_method"])
def test_masks_in_some_places_only(where, tmp_path):
    """A line says where a mask has to be, and how to ignore it."""
    with pytest.raises(ppo.GameError, match="an action_mask must be in the info of reset and of"):
        ppo.train(parse(ppo, tmp_path, f"Shop-{where}"))
    ppo.train(parse(ppo, tmp_path, f"Shop-{where}", "--no-action-masks"))


def test_mask_as_attribute(tmp_path, capsys):
    """An attribute is no mask that the script could read in time."""
    with pytest.raises(SystemExit):
        parse(ppo, tmp_path, "Shop-attribute")
    assert "an action_mask must be in the info" in capsys.readouterr().err
    ppo.train(parse(ppo, tmp_path, "Shop-attribute", "--no-action-masks"))


@pytest.mark.parametrize("env", ["ALE/Pong-v5", "ale_py:ALE/Pong-v5"])
def test_atari_names(env, tmp_path):
    """ppo.py names the script for Atari, and that one takes both spellings."""
    with pytest.raises(ValueError, match="Atari games are for ppo_atari.py"):
        ppo.parse_args(["--env", env, "--log-dir", str(tmp_path)])
    assert ppo_atari.game_name(env) == "Pong"


def test_file_as_module(tmp_path):
    """ppo.py takes module:id."""
    with pytest.raises(ValueError, match="module:id, without .py"):
        ppo.parse_args(["--env", "my.py:Sim-v0", "--log-dir", str(tmp_path)])


def test_film_of_pictures_that_change_size(tmp_path):
    """There is no film of them, and a line says so: a part of the frames would be no film."""
    run = ppo.train(parse(ppo, tmp_path, "Sizes"))
    with pytest.raises(ppo.GameError, match="no film.* same size"):
        ppo.evaluate_run(ppo.parse_args(["--eval", str(run.run_dir), "--video"]))
    assert not list(run.run_dir.glob("*.mp4"))


def test_exported_policy_of_a_float64_box(tmp_path):
    """Its actions are those that the env gets, inside the Box in float64, on its bounds too."""
    run = ppo.train(parse(ppo, tmp_path, "Valve"))
    state = ppo.Checkpoint(run.run_dir).read()
    for bias, bound in ((-9.0, -0.1), (9.0, 0.3)):
        state["model"]["head.mean.bias"].fill_(bias)
        torch.save(state, run.run_dir / "checkpoint.pt")
        ppo.evaluate_run(ppo.parse_args(["--eval", str(run.run_dir), "--export-onnx"]))
        session = onnxruntime.InferenceSession(run.run_dir / "policy.onnx")
        (action,) = session.run(None, {"obs": np.zeros((1, 3), np.float32)})
        assert action.dtype == np.float64 and action[0] == bound
        assert envs_foreign.Valve.action_space.contains(action[0])


LEARN = (
    "--norm-obs --hidden 32 --num-envs 8 --num-steps 60 --num-minibatches 4 --update-epochs 4 "
    "--learning-rate 1e-2"
)


@pytest.mark.parametrize("scale, workers", [("nano", 0), ("epoch", 1), ("utm", 0)])
def test_observations_of_any_scale(scale, workers, tmp_path):
    """--norm-obs sees what differs by 1e-9 in all, or by 1e-8 of its size; so does its ONNX."""
    options = [*LEARN.split(), "--num-iterations", "30", "--num-workers", str(workers)]
    run = ppo.train(parse(ppo, tmp_path, f"Bit-{scale}", *options))
    assert run.history[-1]["episodic_return"] > 18  # of 20, by chance 10
    assert run.model.obs_norm.std[1] == 1  # of a constant

    returns = ppo.evaluate_run(ppo.parse_args(["--eval", str(run.run_dir), "--export-onnx"]))
    assert (returns == 20).all()
    session = onnxruntime.InferenceSession(run.run_dir / "policy.onnx")
    low, high = envs_foreign.Bit.VALUES[scale]
    (actions,) = session.run(None, {"obs": np.array([[low, high], [high, high]])})
    assert actions.tolist() == [0, 1]


@pytest.mark.parametrize("schedule", ["adaptive", "together"])
def test_observations_of_any_scale_on_levels(schedule, tmp_path):
    """The same of levels: seconds since 1970 that differ by a minute."""
    options = [*LEARN.split(), "--num-iterations", "60", "--schedule", schedule]
    run = ml.train(parse(ml, tmp_path, "Bit", *options))
    returns = ml.evaluate_run(ml.parse_args(["--eval", str(run.run_dir)]))
    assert (returns == 20).all()


@both
def test_no_float64_on_mps(script, tmp_path, monkeypatch, capsys):
    """--norm-obs on a device without float64 is refused in a line."""
    monkeypatch.setattr(script, "check_device", lambda args: None)
    with pytest.raises(SystemExit):
        parse(script, tmp_path, "Bit-utm" if script is ppo else "Bit", "--norm-obs", "--device=mps")
    assert "--norm-obs: needs float64" in capsys.readouterr().err


MODULE = """
import gymnasium
import envs_foreign
gymnasium.register("Mine-v0", envs_foreign.Small)
"""


def test_eval_away_from_the_module(tmp_path, monkeypatch, capsys):
    """The line says where the run was started, which is where the module lies."""
    (tmp_path / "my_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run = ppo.train(parse(ppo, tmp_path, "Small", "--env", "my_module:Mine-v0"))
    monkeypatch.undo()
    sys.modules.pop("my_module")
    with pytest.raises(SystemExit):
        ppo.parse_args(["--eval", str(run.run_dir)])
    assert f"the run was started in {tmp_path}\n" in capsys.readouterr().err


WANDERER = """
import os
import envs_foreign

class Wanderer(envs_foreign.Small):
    def __init__(self, level):
        os.chdir("/")
"""


def test_file_after_a_change_of_folder(tmp_path, monkeypatch, capsys):
    """A path of --env is that of the folder where the run was started, in spawned workers, too.

    From elsewhere --eval finds the file, or one of its name in the current folder.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ml, "WorkerPool", functools.partial(ml.WorkerPool, start_method="spawn"))
    file = tmp_path / "wanderer.py"
    file.write_text(WANDERER)
    options = "--levels 1 --num-steps 10 --num-iterations 1 --num-workers 1 --eval-every 0".split()
    options += [*SMALL, "--env", "wanderer.py:Wanderer", "--log-dir", str(tmp_path / "runs")]
    run = ml.train(ml.parse_args(options))
    assert run.run_dir.name.startswith("wanderer.py_Wanderer__ppo_multilevel__1__")

    words = ["--eval", str(run.run_dir), "--num-workers", "0"]
    ml.evaluate_run(ml.parse_args(words))  # in the folder "/" now
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file.rename("wanderer.py")
    ml.load_file.cache_clear()
    ml.evaluate_run(ml.parse_args(words))
    monkeypatch.chdir(tmp_path)
    ml.load_file.cache_clear()
    with pytest.raises(SystemExit):
        ml.parse_args(words)
    assert f"there is no file {file}" in capsys.readouterr().err
