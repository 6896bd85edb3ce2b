"""Bad input ends in one line that names the option and in exit code 2, never in a traceback."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import envs
import pytest
import torch

import ppo
import ppo_atari
import ppo_multilevel

SCRIPTS = [ppo, ppo_atari, ppo_multilevel]
GOOD = {
    ppo: "--num-envs 2 --num-steps 8 --hidden 8".split(),
    ppo_atari: "--num-envs 2 --num-steps 8".split(),
    ppo_multilevel: "--env envs:make --levels 1 2 --num-steps 8 4 --num-envs 2 --hidden 8".split(),
}
OTHER_NETWORK = {
    ppo: ["--hidden", "9"],
    ppo_atari: ["--full-action-space"],
    ppo_multilevel: ["--hidden", "9"],
}
TINY = "--num-minibatches 2 --update-epochs 1 --num-iterations 1 --quiet".split()
TINY += "--num-workers 0 --eval-every 0 --eval-episodes 1".split()

# Numeric options that may be 0, below 0, and those that may not be above 1.
COMMON_ZERO = (
    "--seed --num-workers --eval-every --save-every --gamma --gae-lambda --ent-coef --vf-coef "
    "--step-timeout --restart-workers"
).split()
ZERO = {
    ppo: [*COMMON_ZERO, "--init-log-std", "--kl-coef"],
    ppo_atari: [*COMMON_ZERO, "--sticky-actions", "--noop-max"],
    ppo_multilevel: [*COMMON_ZERO, "--init-log-std"],
}
NEGATIVE = ["--init-log-std"]
FRACTIONS = ["--gamma", "--gae-lambda", "--sticky-actions"]
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
    yield
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(scope="module", params=SCRIPTS, ids=lambda script: script.__name__)
def script(request):
    """Each of the scripts."""
    return request.param


@pytest.fixture
def refused(script, capsys):
    """Return a function: parsing fails with one line that has these words; returns the line."""

    def check(options, *words, parse=script.parse_args):
        with pytest.raises(SystemExit) as exit_info:
            parse(options)
        out, err = capsys.readouterr()
        assert exit_info.value.code == 2
        assert out == ""
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


def numeric_options(script):
    """Return the numeric options {name: type} of a script, as its parser has them."""
    parsers = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.Parser, "parse_args", lambda self, _: parsers.append(self) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            script.parse_args([])
    actions = [action for action in parsers[0]._actions if action.type not in (None, str)]
    return {action.option_strings[0]: action.type for action in actions}


# Numbers ------------------------------------------------------------------------------------------


def test_numeric_options(script, refused):
    """Every numeric option refuses text, NaN, infinity and numbers outside its range."""
    options = numeric_options(script)
    assert len(options) > 20 and set(ZERO[script]) <= set(options)
    assert ("--frameskip" in options) == (script is ppo_atari)
    for name, kind in options.items():
        bad = ["x", "", "nan", "inf", "1,5"]
        bad += ["0"] if name not in ZERO[script] else []
        bad += ["-1", "-0.5"] if name not in NEGATIVE else []
        bad += ["1.0001", "2"] if name in FRACTIONS else []
        bad += ["1.5"] if isinstance(kind("1"), int) else []
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
    line = refused(options if script is ppo_multilevel else options[4:], "--env")
    if script is ppo_multilevel and env != "nope:Nonsense-v0":
        assert all(name in line for name in ppo_multilevel.CASES)


SPACE_NAMES = "Sequence Dict Graph Text Dict Box Box Dict Tuple Text".split()  # of envs.BAD_SPACES


@only(ppo, ppo_multilevel)
@pytest.mark.parametrize("spaces, name", list(zip(envs.BAD_SPACES, SPACE_NAMES)))
def test_unsupported_spaces(script, refused, spaces, name):
    """Spaces that the model does not know are refused and named."""
    if script is ppo:
        options = ["--env", f"envs:Spaces-{spaces}-v0"]
    else:
        options = ["--env", f"envs:make_{spaces}", "--levels", "1", "--num-steps", "8"]
    option = "--env" if script is ppo else "--levels"
    kind = "action" if "action" in envs.BAD_SPACES[spaces] else "observation"
    if spaces == "nested" and script is ppo:
        name = "Sequence"  # the part of it that cannot be flattened
    refused(options, option, f"{kind} space {name}", "not supported")


@pytest.mark.parametrize("spaces", envs.FLATTENED)
def test_observations_that_are_no_vectors(refused_levels, spaces):
    """ppo_multilevel.py takes vectors only: its simulations form them in psi."""
    options = f"--env envs:make_{spaces} --levels 1 --num-steps 8"
    refused_levels(options, "--levels", "observation space", "not supported")


def test_game_that_cannot_start(capsys, tmp_path):
    """A game that fails in the first reset, that of ppo.py's parse_args: one line and no run."""
    with pytest.raises(SystemExit) as exit_info:
        ppo.parse_args(["--env", "envs:Trouble-every_reset-v0"])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "ppo.py: error: argument --env: broken on purpose\n"
    assert list((tmp_path / "runs").iterdir()) == []


# Devices and folders ------------------------------------------------------------------------------


def test_unknown_device(refused):
    """Only auto, cpu, cuda, mps."""
    refused(["--device", "bogus"], "--device", "bogus")


@pytest.mark.parametrize("device, module", [("cuda", torch.cuda), ("mps", torch.backends.mps)])
def test_device_that_is_not_here(refused, monkeypatch, device, module):
    """A device that torch does not have here."""
    monkeypatch.setattr(module, "is_available", lambda: False)
    refused(["--device", device], "--device", device)


@pytest.mark.parametrize("log_dir", ["file", "file/below"])
def test_log_dir_that_cannot_be(refused, tmp_path, log_dir):
    """A file lies where the folder should be."""
    (tmp_path / "file").write_text("")
    refused(["--log-dir", str(tmp_path / log_dir)], "--log-dir")


@pytest.mark.parametrize("name, folder", [("mine", "mine"), ("my run", "my_run"), ("a/b", "a_b")])
def test_run_name_that_is_taken(refused, tmp_path, name, folder):
    """The folder of the run is there already, also if its name has to be changed a little."""
    (tmp_path / folder).mkdir()
    refused(["--log-dir", str(tmp_path), "--run-name", name], "--run-name", name)


# Runs to continue or evaluate ---------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--resume", "--eval"])
@pytest.mark.parametrize(
    "damage",
    ["missing", "empty", "no checkpoint", "no config", "half", "nothing", "garbage", "foreign"],
)
def test_run_that_is_damaged(refused, run_dir, tmp_path, option, damage):
    """A folder that is missing or lacks a file, a checkpoint that is cut off."""
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
    refused([option, str(copy)], option)


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"options": {}}', '{"options": []}'])
def test_run_with_a_damaged_config(refused, run_dir, tmp_path, config):
    """A config.json that is none."""
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    (copy / "config.json").write_text(config)
    refused(["--resume", str(copy)], "--resume")


@pytest.mark.parametrize("option", ["--resume", "--eval"])
def test_run_of_another_network(script, refused, run_dir, tmp_path, monkeypatch, option):
    """Options beside --resume or --eval that do not fit the checkpoint."""
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    options = [f"{script.__name__}.py", option, str(copy), *OTHER_NETWORK[script]]
    monkeypatch.setattr(sys, "argv", [*options, "--quiet"])
    refused(None, option, parse=lambda _: sys.exit(script.main()))


@only(ppo, ppo_multilevel)
@pytest.mark.parametrize("option", ["--resume", "--eval"])
def test_networks_of_the_same_shapes(script, refused, run_dir, option):
    """Options that the weights' shapes do not show: they would silently be another network."""
    refused([option, str(run_dir), "--activation", "elu"], "--activation", "tanh")
    other = "--no-shared-net" if script is ppo_multilevel else "--shared-net"
    refused([option, str(run_dir), other], "--shared-net")


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
    again = vars(args) | {"resume": None, "log_dir": options["log_dir"], "quiet": True}
    assert again == options


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
    """A game that is not there; the line has the nearest names."""
    refused(["--env", env], "--env", f"no Atari game '{env}'", f"nearest names are {nearest}")


@pytest.mark.parametrize("env", ["breakout", "BreakoutNoFrameskip-v4", "ALE/Breakout-v5"])
def test_names_of_a_game(env):
    """Several names are one game, also in the name of the run's folder."""
    assert ppo_atari.parse_args(["--env", env]).env == "Breakout"


@only(ppo_atari)
def test_without_ale_py(refused, monkeypatch):
    """The line says how to install what is missing."""
    monkeypatch.setitem(sys.modules, "ale_py", None)
    refused([], "--env", "pip install 'gymnasium[atari]'")


@only(ppo_atari)
def test_compile_without_a_compiler(refused, monkeypatch):
    """--compile is tried at once, and compiles nothing without a C++ compiler."""

    def fail(function):
        raise RuntimeError("No working C++ compiler\nlong story")

    monkeypatch.setattr(torch, "compile", fail)
    ppo_atari.parse_args([])
    refused(["--compile"], "--compile", "C++ compiler")


@only(ppo_atari)
@pytest.mark.parametrize("option", ["--resume", "--eval"])
def test_run_of_another_game(refused, run_dir, option):
    """Another game with more actions than the checkpoint's."""
    refused([option, str(run_dir), "--env", "Pong"], option, str(run_dir))


def test_parsing_prints_nothing(tmp_path):
    """The emulator, which is not Python, prints no banner to either stream."""
    code = "import ppo_atari; print(ppo_atari.parse_args([]).env)"
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(Path(ppo_atari.__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Breakout\n", "")


# Levels -------------------------------------------------------------------------------------------


@pytest.fixture
def refused_levels(capsys):
    """Return a function: ppo_multilevel.py refuses the options with one line with these words."""

    def check(options, *words):
        with pytest.raises(SystemExit) as exit_info:
            ppo_multilevel.parse_args(options.split())
        err = capsys.readouterr().err
        assert exit_info.value.code == 2
        assert err.count("\n") == 1, err
        for word in words:
            assert word in err

    return check


LEVEL_ERRORS = [
    ("--env ResSim-v2 --levels 3 5 --num-steps 10 10", ("--levels", "1..4")),
    ("--env ResSim-v1 --levels 5 --num-steps 10 --eval-level 6", ("--eval-level", "1..5")),
    ("--env ResSim-v1 --levels 4 5 --num-steps 10", ("--num-steps",)),
    ("--env ResSim-v1 --levels 4 5 --num-steps 10 20 30", ("--num-steps",)),
    ("--env ResSim-v1 --levels 4 5", ("--num-steps",)),
    ("--env ResSim-v1 --levels 5 4 --num-steps 10 20", ("--levels", "rise")),
    ("--env ResSim-v1 --levels 4 4 --num-steps 10 20", ("--levels", "rise")),
    ("--env ResSim-v1 --levels", ("--levels",)),
    ("--env envs:make", ("--levels",)),
    ("--env envs:make_other_spaces --levels 1 2 --num-steps 8 4", ("--levels", "spaces")),
    ("--env nope.py:make --levels 1 --num-steps 8", ("--env", "nope.py")),
    ("--env nope:make --levels 1 --num-steps 8", ("--env", "nope")),
    ("--env envs:nope --levels 1 --num-steps 8", ("--env", "nope")),
    ("--env envs:TROUBLES --levels 1 --num-steps 8", ("callable",)),
    ("--coupling none", ("--coupling",)),
]


@pytest.mark.parametrize("options, words", LEVEL_ERRORS)
def test_levels(refused_levels, options, words):
    """Levels, steps and simulations that do not fit."""
    refused_levels(options, *words)


@pytest.mark.parametrize("content", ["def make(:\n", "import nope\n", "x = 1\n", "1 / 0\n"])
def test_file_that_cannot_be_loaded(refused_levels, tmp_path, content):
    """A user's file with an error in it, or without the function."""
    (tmp_path / "mine.py").write_text(content)
    refused_levels(f"--env {tmp_path}/mine.py:make --levels 1 --num-steps 8", "--env")
