"""Bad input ends in one line that names the option and in exit code 2, never in a traceback."""

import argparse
import contextlib
import functools
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import envs
import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo
import ppo_atari
import ppo_multilevel

SCRIPTS = [ppo, ppo_atari, ppo_multilevel]
HAS_MPS = torch.backends.mps.is_available()
GOOD = {
    ppo: "--num-envs 2 --num-steps 8 --hidden 8".split(),
    ppo_atari: "--num-envs 2 --num-steps 8".split(),
    ppo_multilevel: (
        "--env envs:make --levels 1 2 --num-steps 8 4 --num-envs 2 --hidden 8 --schedule together "
        "--level-costs 1 4 1"
    ).split(),
}
TINY = "--num-minibatches 2 --update-epochs 1 --num-iterations 1 --quiet".split()
TINY += "--num-workers 0 --eval-every 0 --eval-episodes 1".split()

# Numeric options that may be 0, below 0, and those that may not be above 1.
COMMON_ZERO = (
    "--seed --num-workers --eval-every --save-every --gamma --gae-lambda --ent-coef --vf-coef "
    "--target-kl"
).split()
ZERO = {
    ppo: [*COMMON_ZERO, "--init-log-std", "--kl-coef"],
    ppo_atari: [*COMMON_ZERO, "--sticky-actions", "--noop-max"],
    ppo_multilevel: [*COMMON_ZERO, "--init-log-std", "--control", "--failed-reward"],
}
NUMBERS = ["int", "flo"]  # how the types' names begin
NEGATIVE = ["--init-log-std", "--failed-reward"]
FRACTIONS = ["--gamma", "--gae-lambda", "--sticky-actions", "--control"]
CHOICES = {
    ppo: ["--norm-adv", "--activation"],
    ppo_atari: ["--norm-adv", "--precision"],
    ppo_multilevel: ["--norm-adv", "--activation"],
}


def only(*scripts):
    """Mark a test that makes sense for some scripts only."""
    names = [script.__name__ for script in scripts]
    return pytest.mark.parametrize("script", scripts, ids=names, indirect=True)


@pytest.fixture(autouse=True)
def in_tmp_path(monkeypatch, tmp_path):
    """Run in an empty folder: --log-dir is runs by default. Copied checkpoints take 20 MB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo_atari, "EVAL_STEPS", 5)  # no need to play whole games
    yield
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(scope="module", params=SCRIPTS, ids=lambda script: script.__name__)
def script(request):
    """Each of the scripts."""
    return request.param


@pytest.fixture
def refused(script, outcome):
    """Return a function: main fails with one line that has these words; returns the line."""

    def check(options, *words):
        code, err = outcome(options)
        assert code == 2
        assert err.startswith(f"{script.__name__}.py: error: ")
        assert err.count("\n") == 1 and err.endswith("\n"), err
        for word in words:
            assert word in err
        return err

    return check


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Return a function: script → the folder of its finished run, the same at every call."""

    @functools.cache
    def run(script):
        options = [*GOOD[script], *TINY, "--log-dir", str(tmp_path_factory.mktemp("runs"))]
        return script.train(script.parse_args(options)).run_dir

    return run


@pytest.fixture
def run_dir(script, finished_run):
    """The folder of a finished run of the script."""
    return finished_run(script)


@pytest.fixture
def outcome(script, monkeypatch, capsys):
    """Return a function: run the script's main with these words. Returns exit code and stderr."""

    def run(words):
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *words])
        monkeypatch.setattr(sys, "path", [*sys.path])  # main appends to it
        try:
            code = script.main()
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        assert out == ""
        return code, err

    return run


def numeric_options(script):
    """Return the numeric options {name: type} of a script, as its parser has them."""
    options = {action.option_strings[0]: action.type for action in script.make_parser()._actions}
    return {name: kind for name, kind in options.items() if kind and kind.__name__[:3] in NUMBERS}


# Numbers ------------------------------------------------------------------------------------------


def test_numeric_options(script, refused):
    """Every numeric option refuses text, NaN, infinity and numbers outside its range."""
    options = numeric_options(script)
    assert len(options) > 20 and set(ZERO[script]) <= set(options)
    assert ("--frameskip" in options) == (script is ppo_atari)
    for name, kind in options.items():
        refused([f"{name}=x"], f"argument {name}: invalid {kind.__name__} value: 'x'")
        bad = ["", "nan", "inf", "1,5"]
        bad += ["0"] if name not in ZERO[script] else []
        bad += ["-1", "-0.5"] if name not in NEGATIVE else []
        bad += ["1.0001", "2"] if name in FRACTIONS else []
        bad += ["1.5"] if kind.__name__.startswith("int") else []
        for value in bad:
            refused([f"{name}={value}"], name)


def test_values_at_the_bounds(script):
    """What may be 0 may be 0."""
    zeros = [word for name in ZERO[script] for word in (name, "0")]
    args = script.parse_args([*GOOD[script], "--num-minibatches", "2", *zeros])
    assert args.gamma == args.gae_lambda == args.ent_coef == args.vf_coef == args.seed == 0


def test_huge_seed(refused, script):
    """A seed that the generators cannot take is refused at once."""
    for seed in (2**64, 10**400):
        refused([*GOOD[script], "--num-minibatches", "2", "--seed", str(seed)], "--seed")


def test_num_minibatches(script, refused):
    """The number of minibatches has to divide the rows, and to leave two in each."""
    refused([*GOOD[script], "--num-minibatches", "3"], "--num-minibatches", "3")
    options = [*GOOD[script], "--num-minibatches", "16"]
    options += ["--num-steps", "8", "8"] if script is ppo_multilevel else []
    refused(options, "--num-minibatches", "--norm-adv")
    for norm_adv in ("batch", "off"):  # a rollout has more rows than one
        script.parse_args([*options, "--norm-adv", norm_adv])


def test_rollout_of_one_row(script, refused):
    """A single row has no deviation, whether in a minibatch or in the whole rollout."""
    options = "--num-envs 1 --num-steps 1 --num-minibatches 1".split()
    options += ["--env", "envs:make", "--levels", "1"] if script is ppo_multilevel else []
    for norm_adv in ("minibatch", "batch"):
        refused([*options, "--norm-adv", norm_adv], "--norm-adv")
    script.parse_args([*options, "--norm-adv", "off"])


def test_choices(script, refused):
    """A word that is none of an option's choices; the line says what there is."""
    for name in CHOICES[script]:
        refused([name, "nonsense"], name, "nonsense", "choose from")


@pytest.mark.parametrize("options", ["--nonsense 1", "--learn 1", "--seed", "stray"])
def test_unknown_and_incomplete_options(refused, options):
    """Unknown options, abbreviations, missing values and stray words."""
    refused(options.split(), options.split()[0])


def test_exclusive_options(refused):
    """The length of a run is given once."""
    options = "--total-timesteps 100 --num-iterations 2".split()
    refused(options, "--num-iterations", "--total-timesteps")


# Environments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", ["Nonsense-v0", "CartPole-v99", "nope:Nonsense-v0", ""])
def test_unknown_env(script, refused, env):
    """An env that is not there; ppo_multilevel.py names those that are."""
    options = ["--levels", "1", "--num-steps", "8", "--env", env]
    line = refused(options if script is ppo_multilevel else options[4:])
    if script is ppo_multilevel and env != "nope:Nonsense-v0":
        assert all(name in line for name in ppo_multilevel.CASES)


SPACE_NAMES = "Sequence Dict Graph Dict Box Box Dict Tuple Text".split()  # of envs.BAD_SPACES


@only(ppo, ppo_multilevel)
@pytest.mark.parametrize("spaces, name", list(zip(envs.BAD_SPACES, SPACE_NAMES)))
def test_unsupported_spaces(script, refused, spaces, name):
    """Spaces that the model does not know are refused and named."""
    if script is ppo:
        options = ["--env", f"envs:Spaces-{spaces}-v0"]
    else:
        options = ["--env", f"envs:make_{spaces}", "--levels", "1", "--num-steps", "8"]
    kind = "action" if "action" in envs.BAD_SPACES[spaces] else "observation"
    if spaces == "empty" and script is ppo:  # which Gymnasium cannot flatten
        refused(options)
    else:
        refused(options, f"{kind} space {name}", "not supported")


@pytest.mark.parametrize("spaces", envs.FLATTENED)
def test_observations_that_are_no_vectors(refused_levels, spaces):
    """ppo_multilevel.py takes vectors only: its simulations form them in psi."""
    options = f"--env envs:make_{spaces} --levels 1 --num-steps 8"
    refused_levels(options, "observation space", "not supported")


@only(ppo)
def test_game_that_cannot_start(refused, tmp_path):
    """A game that fails in the first reset, that of ppo.py's parse_args: one line and no run."""
    words = "RuntimeError", "broken on purpose", "envs.py:"
    refused(["--env", "envs:Trouble-every_reset-v0"], *words)
    assert list((tmp_path / "runs").iterdir()) == []


# Devices and folders ------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--resume", "--eval"])
def test_run_without_a_name(refused, option):
    """What a shell makes of a variable that is not set is no new run."""
    refused([option, ""], f"cannot use the run in {os.getcwd()}: ")


@pytest.mark.parametrize("device", ["bogus", "cuda", "mps", "meta"])
def test_device_that_is_not_here(refused, device):
    """A device that torch does not know, or does not have here."""
    if device == "cuda" and torch.cuda.is_available() or device == "mps" and HAS_MPS:
        pytest.skip("it is here")
    assert device in refused(["--device", device]).lower()


@pytest.mark.parametrize("log_dir", ["file", "file/below"])
def test_log_dir_that_cannot_be(refused, tmp_path, log_dir):
    """A file lies where the folder should be."""
    (tmp_path / "file").write_text("")
    refused(["--log-dir", str(tmp_path / log_dir)], str(tmp_path / log_dir))


@pytest.mark.parametrize(
    "name, folder", [("lr=1e-3,b+c", "lr=1e-3,b+c"), ("my run", "my_run"), ("a/b", "a_b")]
)
def test_run_name_that_is_taken(refused, tmp_path, name, folder):
    """The folder of the run is there already, also if its name has to be changed a little."""
    (tmp_path / folder).mkdir()
    refused(["--log-dir", str(tmp_path), "--run-name", name], "--run-name", folder)


# Runs to continue or evaluate ---------------------------------------------------------------------


@only(ppo)
@pytest.mark.parametrize("option", ["--resume", "--eval"])
@pytest.mark.parametrize(
    "damage",
    "missing,empty,no checkpoint,no config,half,nothing,garbage,foreign,NaN".split(","),
)
def test_run_that_is_damaged(refused, run_dir, tmp_path, option, damage):
    """A folder that is missing or lacks a file, a checkpoint that is cut off or has NaN weights."""
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    checkpoint = copy / "checkpoint.pt"
    content = checkpoint.read_bytes()
    broken = {"half": content[: len(content) // 2], "nothing": b"", "garbage": b"garbage" * 100}
    if damage in ("missing", "empty"):
        shutil.rmtree(copy)
    if damage == "empty":
        copy.mkdir()
    if damage == "no checkpoint":
        checkpoint.unlink()
    if damage == "no config":
        (copy / "config.json").unlink()
    if damage in broken:
        checkpoint.write_bytes(broken[damage])
    if damage == "foreign":
        torch.save({"state_dict": {}}, checkpoint)
    if damage == "NaN":
        state = torch.load(checkpoint, weights_only=True)
        state["model"]["value.bias"] *= np.nan
        torch.save(state, checkpoint)
    refused([option, str(copy)], str(copy))


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"options": {}}', '{"options": []}'])
def test_run_with_a_damaged_config(refused, run_dir, tmp_path, config):
    """A config.json that is none."""
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    (copy / "config.json").write_text(config)
    refused(["--resume", str(copy)], str(copy))


def another(action, value):
    """Return words that give an option another value."""
    name = action.option_strings[0]
    if isinstance(action, argparse.BooleanOptionalAction) or isinstance(value, bool):
        return [f"--no-{name[2:]}" if value else name]
    if action.choices:
        return [name, next(choice for choice in action.choices if choice != value)]
    if name == "--env":
        return [name, "Pong"]
    kind = action.type or str
    words = ["x"] if kind is str else ["9", "0.5"]
    for word in words:
        with contextlib.suppress(ValueError, argparse.ArgumentTypeError):
            if kind(word) not in (value, *(value if isinstance(value, list) else ())):
                return [name, word]
    raise AssertionError(f"no other value for {name}")


@pytest.mark.parametrize("option", ["--resume", "--eval"])
def test_options_that_a_run_has(script, refused, run_dir, option):
    """Only the run's length, workers, evaluation and saving may be others beside --resume, --eval.

    Whatever else is given is refused by name: it might silently be another network.
    """
    options = json.loads((run_dir / "config.json").read_text())["options"]
    free = set(script.MAY_CHANGE)
    if option == "--eval":  # else it sets the unit of cost
        free.add("eval_level")
    for action in script.make_parser()._actions:
        if action.dest in options.keys() - free:
            words = another(action, options[action.dest])
            refused([option, str(run_dir), *words], f"argument {action.option_strings[0]}: the run")


@pytest.mark.parametrize("length", ["num_iterations", "total_timesteps"])
def test_options_that_may_change(script, run_dir, length):
    """They get their new values, all others stay; a length replaces the run's, in other units."""
    new = {"num_workers": 3, "eval_every": 4, "eval_episodes": 5, "save_every": 6, "device": "cpu"}
    new |= {"quiet": True, length: 700}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in new.items()]
    words[words.index("--quiet=True")] = "--quiet"
    args = vars(script.parse_args(["--resume", str(run_dir), *words]))
    options = json.loads((run_dir / "config.json").read_text())["options"]
    if length == "total_timesteps":  # with several levels it is the steps that are counted
        new["num_iterations"] = None if script is ppo_multilevel else 700 // (2 * 8)
    assert args.items() >= new.items()
    assert {name for name in options if args[name] != options[name]} <= new.keys()
    script.parse_args(["--eval", str(run_dir), "--sample", "--video", "--export-onnx", "--quiet"])


@pytest.mark.parametrize("other", SCRIPTS, ids=lambda script: script.__name__)
def test_run_of_another_script(script, refused, finished_run, other):
    """A run of one script is no run of another, also if the env is named again."""
    if other is script:
        pytest.skip("the same script")
    names = {ppo: "CartPole-v1", ppo_atari: "Breakout", ppo_multilevel: "envs:make"}
    for env in ([], ["--env", names[script]]):
        refused(["--resume", str(finished_run(other)), *env])


def test_eval_writes_nothing_but_its_answer(script, run_dir, tmp_path, capsys):
    """--eval leaves no folder behind and does not change the run's."""
    before = {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    script.evaluate_run(script.parse_args(["--eval", str(run_dir)]))
    assert "±" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()} == before
    assert list(tmp_path.iterdir()) == []


def test_config_holds_what_was_given(script, run_dir):
    """The options of config.json give the same run again."""
    options = json.loads((run_dir / "config.json").read_text())["options"]
    assert options["num_envs"] == 2 and options["num_iterations"] == 1
    assert script is ppo_atari or options["hidden"] == [8]
    args = script.parse_args(["--resume", str(run_dir)])
    assert options.keys() == vars(args).keys() - set(script.NOT_KEPT)
    assert {name: getattr(args, name) for name in options} == options


def test_video_of_an_env_without_pictures(script, run_dir, tmp_path, monkeypatch, capsys):
    """One line names --video; the evaluation itself is there."""
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    if script is ppo:
        options = json.loads((copy / "config.json").read_text())
        options["options"]["env"] = "envs:Quick-v0"  # no render_mode; CartPole's spaces
        (copy / "config.json").write_text(json.dumps(options))
    if script is ppo_atari:  # all its games have pictures; something else fails
        (copy / "video.mp4").mkdir()
    options = [f"{script.__name__}.py", "--eval", str(copy), "--video"]
    monkeypatch.setattr(sys, "argv", options)
    assert script.main() == 1
    out, err = capsys.readouterr()
    assert "±" in out
    assert err.count("\n") == 1 and "--video" in err


def test_resume_or_eval(refused, run_dir):
    """A run is either continued or evaluated, and only an evaluation makes a video."""
    refused(["--resume", str(run_dir), "--eval", str(run_dir)], "--resume", "--eval")
    refused(["--video"], "--video", "--eval")


# Atari --------------------------------------------------------------------------------------------


@only(ppo_atari)
@pytest.mark.parametrize("env, nearest", [("Brekout", "Breakout"), ("CartPole-v1", "")])
def test_unknown_game(refused, env, nearest):
    """A game that is not there; Gymnasium's line has the nearest name."""
    refused(["--env", env], env.removesuffix("-v1"), nearest)


@pytest.mark.parametrize("env", ["breakout", "BreakoutNoFrameskip-v4", "ALE/Breakout-v5"])
def test_names_of_a_game(env):
    """Several names are one game, also in the name of the run's folder."""
    assert ppo_atari.parse_args(["--env", env]).env == "Breakout"


@only(ppo_atari)
def test_without_ale_py(outcome, monkeypatch):
    """A line says what is missing."""
    monkeypatch.setitem(sys.modules, "ale_py", None)
    code, line = outcome([])
    assert code == 2 and line.count("\n") == 1 and "ale_py" in line


@only(ppo_atari)
def test_compile_without_a_compiler(refused, monkeypatch):
    """--compile is tried at once, and compiles nothing without a C++ compiler."""

    def fail(function):
        raise RuntimeError("No working C++ compiler\nlong story")

    monkeypatch.setattr(torch, "compile", fail)
    ppo_atari.parse_args([])
    refused(["--compile"], "C++ compiler")


def test_parsing_prints_nothing(tmp_path):
    """The emulator, which is not Python, prints no banner to either stream."""
    code = "import ppo_atari; print(ppo_atari.parse_args([]).env)"
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(Path(ppo_atari.__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Breakout\n", "")


# Levels -------------------------------------------------------------------------------------------


@pytest.fixture
def refused_levels(monkeypatch, capsys):
    """Return a function: ppo_multilevel.py refuses the options with one line with these words."""

    def check(options, *words):
        monkeypatch.setattr(sys, "argv", ["ppo_multilevel.py", *options.split()])
        monkeypatch.setattr(sys, "path", [*sys.path])  # main appends to it
        try:
            code = ppo_multilevel.main()
        except SystemExit as error:
            code = error.code
        err = capsys.readouterr().err
        assert (code, err.count("\n")) == (2, 1), err
        for word in words:
            assert word in err

    return check


LEVEL_ERRORS = [
    ("--env ResSim-v2 --levels 3 5 --num-steps 10 10", ("level must be 1..4, got 5",)),
    ("--env ResSim-v1 --levels 5 --num-steps 10 --eval-level 6", ("must be 1..5, got 6",)),
    ("--env ResSim-v1 --levels 4 5 --num-steps 10 20 30", ("--num-steps",)),
    ("--env ResSim-v1 --levels 4 5 --num-steps 10 auto", ("--num-steps", "'auto'")),
    ("--env ResSim-v1 --levels 2 4 --eval-level 5", ("--eval-level", "last")),
    ("--env ResSim-v1 --levels 2 --eval-level 1", ("--eval-level", "last")),
    ("--env ResSim-v1 --levels 2 --schedule adaptive --eval-level 3", ("--eval-level", "last")),
    ("--env envs:make_cartpole --levels 1 2 --schedule together --coupling step", ("map_from",)),
    ("--env ResSim-v1 --coupling step", ("--coupling", "together")),
    ("--env ResSim-v1 --levels 2 4 --control 1", ("--control", "together")),
    ("--env ResSim-v1 --levels 2 4 --level-costs 1 2", ("--level-costs", "3 numbers")),
    ("--env ResSim-v1 --levels 2 4 --level-costs 1 2 -3", ("--level-costs",)),
    ("--env ResSim-v1 --total-cost 9 --num-iterations 2", ("--total-cost",)),
    ("--env ResSim-v1 --control 1.5", ("--control",)),
    ("--env ResSim-v1 --schedule sideways", ("--schedule",)),
    ("--env ResSim-v1 --levels 5 4 --num-steps 10 20", ("--levels", "coarse to fine")),
    ("--env ResSim-v1 --levels 4 4 --num-steps 10 20", ("--levels", "coarse to fine")),
    ("--env ResSim-v1 --levels", ("--levels",)),
    ("--env envs:make", ("--levels",)),
    ("--env envs:make_other_spaces --levels 1 2 --num-steps 8 4", ("--levels", "level 2 has (Box")),
    ("--env nope.py:make --levels 1 --num-steps 8", ("nope.py",)),
    ("--env nope:make --levels 1 --num-steps 8", ("nope",)),
    ("--env envs:nope --levels 1 --num-steps 8", ("nope",)),
    ("--env envs:TROUBLES --levels 1 --num-steps 8", ("callable",)),
    ("--coupling none", ("--coupling",)),
]


@pytest.mark.parametrize("options, words", LEVEL_ERRORS)
def test_levels(refused_levels, options, words):
    """Levels, steps and simulations that do not fit."""
    refused_levels(options, *words)


DEFAULTS = [
    ("--env ResSim-v1", "adaptive", [1, 2, 3, 4, 5], [50] * 5, 32_000, None),
    ("--env ResSim-v3 --num-steps 20", "adaptive", [1, 2, 3, 4], [20] * 4, 200_000, None),
    ("--env ResSim-v1 --levels 2 5 --total-cost 9", "adaptive", [2, 5], [50] * 2, 9, None),
    ("--env ResSim-v1 --levels 1 2", "adaptive", [1, 2], [50] * 2, None, None),
    ("--env ResSim-v1 --levels 4", "together", [4], [50], None, 200),
    ("--env ResSim-v1 --schedule together", "together", [2, 5], [100, 5], None, 200),
    ("--env envs:make --levels 1 2 3", "adaptive", [1, 2, 3], [50] * 3, None, None),
    ("--env envs:make --levels 1 2 --num-iterations 7", "adaptive", [1, 2], [50] * 2, None, 7),
    ("--env envs:make --levels 1 2 --total-timesteps 9", "adaptive", [1, 2], [50] * 2, None, None),
    ("--schedule together --levels 1 2 3", "together", [1, 2, 3], [100, 10, 10], None, 200),
    ("--schedule together --levels 1 2 --num-steps 9", "together", [1, 2], [9, 9], None, 200),
]


@pytest.mark.parametrize("options, schedule, levels, num_steps, total_cost, length", DEFAULTS)
def test_what_is_not_given(options, schedule, levels, num_steps, total_cost, length):
    """All levels of a built-in case; the length of a run that chooses among them is a cost."""
    args = ppo_multilevel.parse_args(options.split())
    assert (args.schedule, args.levels, args.num_steps) == (schedule, levels, num_steps)
    assert (args.total_cost, args.num_iterations) == (total_cost, length)


LEARNING = [
    ("", (1e-4, 5, 0.05)),
    ("--levels 5", (1e-4, 5, 0.05)),
    ("--target-kl 0", (1e-4, 5, 0)),
    ("--schedule together", (3e-5, 10, 0.05)),
    ("--target-kl 1 --update-epochs 2", (1e-4, 2, 1)),
    ("--schedule together --target-kl 1 --learning-rate 1", (1, 10, 1)),
]


@pytest.mark.parametrize("options, learning", LEARNING)
def test_how_a_schedule_learns(options, learning):
    """Adam's step size, epochs and target KL are those of the schedule, if not given."""
    args = ppo_multilevel.parse_args(options.split())
    assert (args.learning_rate, args.update_epochs, args.target_kl) == learning


@pytest.mark.parametrize("content", ["def make(:\n", "import nope\n", "x = 1\n", "1 / 0\n"])
def test_file_that_cannot_be_loaded(refused_levels, tmp_path, content):
    """A user's file with an error in it, or without the function."""
    (tmp_path / "mine.py").write_text(content)
    refused_levels(f"--env {tmp_path}/mine.py:make --levels 1 --num-steps 8")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_help_on_a_terminal_with_few_letters(script, monkeypatch):
    """One that has no γ shows the rest."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", "--help"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "cp1252"))
    with pytest.raises(SystemExit, match="0"):
        script.main()
    sys.stdout.flush()
    assert b"?, discount per step" in sys.stdout.buffer.getvalue()


# Evaluations that would not end -------------------------------------------------------------------


def test_evaluation_that_is_cut_off(monkeypatch, capsys):
    """After EVAL_STEPS steps episodes count with their return so far; lines say how many.

    A policy that has not learned much walks into a wall of CliffWalking for ever.
    """
    monkeypatch.setattr(ppo, "EVAL_STEPS", 20)
    options = [*GOOD[ppo], *TINY, "--env", "CliffWalking-v1", "--eval-every", "1"]
    options.remove("--quiet")
    run = ppo.train(ppo.parse_args(options))
    first, last = capsys.readouterr().out.splitlines()[:2]
    assert "eval_cut 1" in first and "eval_cut 1" in last
    assert (run.run_dir / "progress.csv").read_text().splitlines()[0].count("eval_cut") == 1
    env, expected = ppo.make_env("CliffWalking-v1"), 0.0
    arrays = {"obs": np.float32([env.reset(seed=10_000)[0]]), "actions": np.zeros(1, np.int64)}
    for _ in range(20):
        with torch.no_grad():
            run.model.act(arrays)
        obs, reward, terminated, *_ = env.step(arrays["actions"][0])
        arrays["obs"], expected = np.float32([obs]), expected + reward
        assert not terminated
    assert run.history[-1]["eval_return"] == expected
    returns = ppo.evaluate_run(ppo.parse_args(["--eval", str(run.run_dir)]))
    assert returns.tolist() == [expected]
    text = f"return {expected:.4f} ± 0.0000 over 1 episodes of CliffWalking-v1, "
    assert capsys.readouterr().out == text + "1 cut off at 20 steps\n"


# Games that break their word ----------------------------------------------------------------------

WRONG_STEPS = {
    "shape (1,)": lambda obs, *rest: (obs[:1], *rest),
    "scalar": lambda obs, *rest: (obs[0], *rest),
    "shape (1, n)": lambda obs, *rest: (obs[None], *rest),
    "reward (2,)": lambda obs, reward, *rest: (obs, np.ones(2), *rest),
    "no reward": lambda obs, reward, *rest: (obs, None, *rest),
    "terminated None": lambda obs, reward, terminated, *rest: (obs, reward, None, *rest),
    "truncated None": lambda *results: (*results[:3], None, results[-1]),
    "terminated (1,)": lambda obs, reward, *rest: (obs, reward, np.array([False]), *rest[1:]),
    "truncated (1,)": lambda *results: (*results[:3], np.array([False]), results[-1]),
}


@only(ppo, ppo_multilevel)
def test_return_after_nan(script):
    """A reward that is NaN spoils the return of its own episode only."""
    args = script.parse_args([*GOOD[script], *TINY])
    model, seeds = script.make_model(args), script.game_seeds(args, 0)
    with contextlib.closing(script.make_pool(args, model, seeds, 0)) as pool:
        pool.call("start")
        pool.arrays["episode_return"][:] = np.nan
        pool.arrays["ended"][:] = True
        level = [0] if script is ppo_multilevel else []
        pool.call("step", *level)
        assert np.isfinite(pool.arrays["episode_return"][..., 0].flat[0])
        assert pool.arrays["episode_length"].max() == 1


WRONG_GAME = {  # a short run of an envs.Scripted game, which is then made wrong
    ppo: [*GOOD[ppo], *TINY, "--env", "envs:Quick-v0"],
    ppo_multilevel: [*GOOD[ppo_multilevel], *TINY, "--env", "envs:make_binary"],
}


@only(ppo, ppo_multilevel)
@pytest.mark.parametrize("wrong", WRONG_STEPS)
def test_wrong_results_of_a_step(script, monkeypatch, wrong):
    """Nothing is stretched to its place: an error names the simulation and what it did."""
    args, real = script.parse_args(WRONG_GAME[script]), envs.Scripted.step
    change = WRONG_STEPS[wrong]
    monkeypatch.setattr(envs.Scripted, "step", lambda self, action: change(*real(self, action)))
    name = args.env if script is ppo else f"{args.env} level 1"
    with pytest.raises(script.GameError, match=rf"{name} \(seed \d+.*\) failed in step: "):
        script.train(args)


@only(ppo, ppo_multilevel)
def test_wrong_observation_of_a_reset(script, monkeypatch):
    """The same for the first observation of an episode."""
    args, real = script.parse_args(WRONG_GAME[script]), envs.Scripted.reset
    monkeypatch.setattr(envs.Scripted, "reset", lambda *a, **k: (real(*a, **k)[0][:1], {}))
    with pytest.raises(script.GameError, match=r"\(seed \d+.*\) failed in (start|reset): .*shape"):
        script.train(args)


@only(ppo_multilevel)
@pytest.mark.parametrize("what", ["step", "reset"])
def test_observation_that_is_not_psi(script, monkeypatch, what):
    """What step or reset returns is what psi() gives, or an error says so."""
    args, real = script.parse_args(WRONG_GAME[script]), getattr(envs.Scripted, what)

    def other(*arguments, **options):
        obs, *rest = real(*arguments, **options)
        return obs + np.float32(0.01), *rest

    monkeypatch.setattr(envs.Scripted, what, other)
    with pytest.raises(script.GameError, match=rf"level 1 .*failed in {what}: .*psi\(\)"):
        script.train(args)


@only(ppo_multilevel)
def test_psi_of_another_shape(script, monkeypatch):
    """What a partner sees after map_from is checked, too."""
    args = script.parse_args([*GOOD[script], *TINY])
    monkeypatch.setattr(script, "hints_of_start", lambda *_: [])  # they map states, too
    real, mapped = envs.Levels.map_from, []
    monkeypatch.setattr(envs.Levels, "map_from", lambda *a: mapped.append(1) or real(*a))
    psi = envs.Levels.psi
    monkeypatch.setattr(envs.Levels, "psi", lambda self: psi(self)[: 1 if mapped else 2])
    with pytest.raises(script.GameError, match=r"level 1 .*failed in map_from: .*shape"):
        script.train(args)


STEP_BATCHES = {  # what is returned, what the line says
    "five": (
        lambda envs, results: (*results, [{}] * len(envs)),
        r"ValueError: too many .*expected 4",
    ),
    "three": (lambda envs, results: results[:3], r"ValueError: not enough .*expected 4"),
    "a row too few": (
        lambda envs, results: [column[1:] for column in results],
        "ValueError: zip.. argument",
    ),
    "None": (
        lambda envs, results: (*results[:3], [None] * len(envs)),
        "EnvError: not a number and two fl",
    ),
    "shape (1,)": (
        lambda envs, results: ([o[:1] for o in results[0]], *results[1:]),
        "EnvError: an obs",
    ),
}


@only(ppo_multilevel)
@pytest.mark.parametrize("wrong", [None, *STEP_BATCHES])
def test_wrong_results_of_step_batch(script, monkeypatch, wrong):
    """It returns four things, a row each per env."""

    def step_batch(envs, actions):
        results = [env.step(action)[:4] for env, action in zip(envs, actions)]
        results = [list(column) for column in zip(*results)]
        return STEP_BATCHES[wrong][0](envs, results) if wrong else results

    monkeypatch.setattr(envs.Scripted, "step_batch", staticmethod(step_batch), raising=False)
    args = script.parse_args(WRONG_GAME[script])
    if wrong:
        line = r"level 1 .*failed in step_batch: " + STEP_BATCHES[wrong][1]
        with pytest.raises(script.GameError, match=line):
            script.train(args)
    else:
        script.train(args)


# Other odd command lines --------------------------------------------------------------------------

LONG = "Long" * 60 + "-v0"  # a name that is good, but too long for a folder's
if LONG not in gym.registry:
    gym.register(LONG, entry_point=envs.Scripted, disable_env_checker=True)


@pytest.mark.parametrize(
    "words",
    [
        ["--run-name", "x" * 300],
        ["--env", "x" * 250],
        ["--env", "x" * 250 + ":make"],
        ["--hidden", "1000000", "1000000"],
        ["--num-envs", "1000000000"],
        ["--num-steps", "1000000000"],
    ],
    ids=lambda words: words[0],
)
def test_numbers_and_names_out_of_all_bounds(script, outcome, words):
    """One line that names the option, or shows the value; no traceback."""
    code, err = outcome([*GOOD[script], *words])
    assert (code, err.count("\n")) == (2, 1)
    assert f" {words[0]}" in err or words[1][:50] in err


@only(ppo_multilevel)
def test_make_that_returns_no_env(script, outcome, monkeypatch):
    """The line says what it returned."""
    monkeypatch.setattr(envs, "make_none", lambda level: None, raising=False)
    code, err = outcome([*GOOD[script], "--env", "envs:make_none"])
    assert (code, err.count("\n")) == (2, 1) and "envs:make_none returned None" in err


@only(ppo, ppo_multilevel)
@pytest.mark.parametrize("first_step", [False, True], ids=["at once", "after a step"])
def test_close_that_fails(outcome, script, tmp_path, monkeypatch, first_step):
    """The first line says so; after a step it can only be found when all has been saved."""

    def close(self):
        if not first_step or self.actions:
            raise RuntimeError("broken on purpose")

    monkeypatch.setattr(envs.Scripted, "close", close)
    code, err = outcome(WRONG_GAME[script])
    (line, *more), saved = err.splitlines(), list(tmp_path.glob("runs/*/checkpoint.pt"))
    assert "close" in line and "broken on purpose" in line
    assert (code, len(saved)) == ((1, 1) if first_step else (2, 0))
    assert first_step or not more


@only(ppo)
def test_name_too_long_for_a_folder(outcome, tmp_path):
    """Its end names the folder."""
    assert outcome([*GOOD[ppo], *TINY, "--env", LONG]) == (0, "")
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith(LONG[-100:] + "__ppo__1__")


@only(ppo, ppo_multilevel)
@pytest.mark.parametrize("num_workers", ["0", "1"])
def test_module_in_the_working_folder(script, outcome, tmp_path, num_workers):
    """--env finds a module that lies where one works."""
    name = f"helper_{script.__name__}_{num_workers}"
    text = "import envs, gymnasium\nfrom envs import make\n"
    text += f"gymnasium.register('{name}-v0', envs.Levels, kwargs={{'level': 1}})\n"
    (tmp_path / f"{name}.py").write_text(text)
    env = f"{name}:{name}-v0" if script is ppo else f"{name}:make"
    words = [*GOOD[script], *TINY, "--env", env, "--num-workers", num_workers]
    assert outcome(words) == (0, "")


@only(ppo_multilevel)
@pytest.mark.parametrize("folder", [".", "sub", "ABSOLUTE"])
def test_module_beside_the_file(outcome, tmp_path, folder):
    """A file may import what lies beside it, from whatever working folder."""
    path = tmp_path / folder
    path.mkdir(exist_ok=True)
    (path / f"beside_{folder.strip('.')}.py").write_text("from envs import make\n")
    (path / "two.py").write_text(f"from beside_{folder.strip('.')} import make\n")
    env = f"{path if folder == 'ABSOLUTE' else folder}/two.py:make"
    assert outcome([*GOOD[ppo_multilevel], *TINY, "--env", env]) == (0, "")
