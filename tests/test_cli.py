"""Wrong options end in one line that names the option and in exit code 2; config.json has defaults.

Mistakes in other people's code have Python's traceback.
"""

import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from contextlib import closing
from pathlib import Path

import envs
import numpy as np
import pytest
import torch

import ppo
import ppo_atari
import ppo_multilevel

ROOT = Path(ppo.__file__).parent
SCRIPTS = [ppo, ppo_atari, ppo_multilevel]
GOOD = {
    ppo: "--num-envs 2 --num-steps 8 --hidden 8".split(),
    ppo_atari: "--num-envs 2 --num-steps 8".split(),
    ppo_multilevel: (
        "--env envs:make --levels 1 2 --num-steps 8 4 --num-envs 2 --hidden 8 --schedule together "
        "--level-costs 1 4 1"
    ).split(),
}
TINY = "--num-minibatches 2 --update-epochs 1 --num-iterations 1".split()
TINY += "--num-workers 0 --eval-every 0 --eval-episodes 1".split()


def only(*scripts):
    """Mark a test that is of these scripts."""
    names = [script.__name__ for script in scripts]
    return pytest.mark.parametrize("script", scripts, ids=names, indirect=True)


# The other two scripts have this code, too.
once = only(ppo)
each_main = only(ppo, ppo_multilevel)


@pytest.fixture(autouse=True)
def in_tmp_path(monkeypatch, tmp_path):
    """Run in an empty folder: --log-dir is runs by default."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", params=SCRIPTS, ids=lambda script: script.__name__)
def script(request):
    """Each of the scripts."""
    return request.param


@pytest.fixture
def outcome(script, monkeypatch, capfd):
    """Return a function: run the script's main with these words. Returns exit code and stderr."""

    def run(words):
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *words])
        monkeypatch.setattr(sys, "path", [*sys.path])  # main appends to it
        try:
            code = script.main()
        except SystemExit as error:
            code = error.code
        return code, capfd.readouterr().err

    return run


@pytest.fixture
def refused(script, outcome, monkeypatch):
    """Return a function: main fails with one line that has these words; returns the line."""

    def train(args):
        pytest.fail(f"not refused: {sys.argv}")

    def check(options, *words):
        monkeypatch.setattr(script, "train", train)
        code, err = outcome(options.split() if isinstance(options, str) else options)
        assert code == 2
        assert err.startswith(f"{script.__name__}.py: error: ")
        assert err.count("\n") == 1 and err.endswith("\n"), err
        for word in words:
            assert word in err
        return err

    return check


# A real run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a function: script → (folder, result) of a run by the script's own program."""

    @functools.cache
    def run(script):
        log_dir = tmp_path_factory.mktemp("runs")
        words = [script.__file__, *GOOD[script], *TINY, "--log-dir", str(log_dir)]
        environment = os.environ | {"PYTHONPATH": str(Path(envs.__file__).parent)}
        command = [sys.executable, *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        (run_dir,) = log_dir.iterdir()
        return run_dir, done

    return run


@pytest.fixture
def run_dir(script, finished):
    """The folder of a finished run of the script."""
    return finished(script)[0]


def test_program(script, finished):
    """It prints a status line and its folder, and no library says anything more."""
    run_dir, done = finished(script)
    status, folder = done.stdout.splitlines()
    assert status.startswith("iteration 1 (100%)  steps ")
    assert folder == f"run folder: {run_dir}"
    assert done.stderr == ""
    files = sorted(path.name.partition(".tfevents")[0] for path in run_dir.iterdir())
    source = f"{script.__name__}.py"
    assert files == ["checkpoint.pt", "config.json", "events.out", source, "progress.csv"]
    # The copy is the code that has run, so it can evaluate the run when the script is another one.
    assert (run_dir / source).read_bytes() == Path(script.__file__).read_bytes()


# Options that are wrong ---------------------------------------------------------------------------


def numeric_options(script):
    """Return the numeric options {name: type} of a script, as its parser has them."""
    options = {action.option_strings[0]: action.type for action in script.make_parser()._actions}
    return {name: kind for name, kind in options.items() if kind in (int, float)}


def test_words_that_are_no_numbers(script, refused):
    """The line names the option and its value."""
    options = numeric_options(script)
    assert len(options) > 20 and ("--frameskip" in options) == (script is ppo_atari)
    for name, kind in options.items():
        for value in ["x", "", "1,5", *(["1.5"] if kind is int else [])]:
            refused([f"{name}={value}"], f"argument {name}: invalid {kind.__name__} value: ", value)


@once
@pytest.mark.parametrize("options", ["--nonsense 1", "--learn 1", "--seed", "stray"])
def test_unknown_and_incomplete_options(refused, options):
    """Unknown options, abbreviations, missing values and stray words."""
    refused(options, options.split()[0])


@pytest.mark.parametrize(
    "script, name",
    [
        (ppo, "--norm-adv"),
        (ppo, "--activation"),
        (ppo, "--rnn"),
        (ppo_atari, "--precision"),
        (ppo_multilevel, "--schedule"),
        (ppo_multilevel, "--coupling"),
        (ppo_multilevel, "--correction"),
    ],
    indirect=["script"],
)
def test_choices(refused, name):
    """A word that is none of an option's choices; the line says what there is."""
    refused([name, "sideways"], name, "sideways", "choose from")


def test_exclusive_options(script, refused):
    """The length of a run is given once, and a run is either resumed or evaluated."""
    other = "--hours" if script is ppo_multilevel else "--total-timesteps"
    refused(f"{other} 100 --num-iterations 2", "--num-iterations", other)
    refused("--resume here --eval here", "--resume", "--eval")


# Rows are options, the option that the line names, and what else it says.
NO_DIVISOR = ("--num-minibatches 3", "--num-minibatches", "3, over all ranks, must divide N · T")
ONE_ROW = ("--num-minibatches 16", "--num-minibatches", "--norm-adv needs two rows")
TAKEN = ("--num-minibatches 2 --log-dir . --run-name a/b", "--run-name", "a_b is there already")
WISHES = {
    ppo: [
        NO_DIVISOR,
        ONE_ROW,
        TAKEN,
        ("--rnn gru --num-minibatches 4", "--num-minibatches", "(--rnn: N)"),
        ("--num-minibatches 16 --norm-adv batch", "--num-minibatches", "two rows"),
        ("--num-envs 1 --num-steps 1 --num-minibatches 1", "--num-minibatches", "two rows"),
    ],
    ppo_atari: [NO_DIVISOR, ONE_ROW, TAKEN],
    ppo_multilevel: [
        NO_DIVISOR,
        ("--num-minibatches 8", "--num-minibatches", "--norm-adv needs two rows"),  # of level 2
        TAKEN,
        ("--levels 5 4", "--levels", "coarse to fine"),
        ("--levels 4 4", "--levels", "coarse to fine"),
        ("--levels 1 --analyse", "--analyse", "two levels"),
        ("--num-steps 10 20 30", "--num-steps", "for each of 2 levels"),
        ("--level-costs 1 2", "--level-costs", "give 3 numbers"),
    ],
}


@pytest.mark.parametrize(
    "script, options, words",
    [(script, options, words) for script in SCRIPTS for options, *words in WISHES[script]],
    indirect=["script"],
)
def test_wishes(script, refused, tmp_path, options, words):
    """Options that do not go together."""
    (tmp_path / "a_b").mkdir()
    options = ["--num-minibatches", "2", *options.split()]
    refused([*GOOD[script], *options], f"argument {words[0]}: ", *words[1:])


@only(ppo, ppo_atari)
def test_gpu_that_is_not_there(script, refused, monkeypatch):
    """It is said before a run begins."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused([*GOOD[script], "--device", "cuda"], "argument --device: ", "no GPU")


def test_what_is_not_refused(script, monkeypatch):
    """Two rows a minibatch, or one that is not normalised, also where two ranks share them."""
    rows = 8 if script is ppo_multilevel else 16
    off = ["--norm-adv", "off"] if script is ppo else ["--no-norm-adv"]
    script.parse_args([*GOOD[script], *off, "--num-minibatches", str(rows)])
    script.parse_args([*GOOD[script], "--num-minibatches", str(rows // 2)])
    monkeypatch.setattr(script, "NUM_RANKS", 2)
    script.parse_args([*GOOD[script], *off, "--num-minibatches", str(rows // 2)])


def test_wishes_of_ranks(script, refused, monkeypatch):
    """The minibatches of all ranks must divide the rows."""
    monkeypatch.setattr(script, "NUM_RANKS", 3)
    refused([*GOOD[script], "--num-minibatches", "2"], "--num-minibatches: 6, over all ranks")


# Environments -------------------------------------------------------------------------------------

BAD_ENVS = {
    ppo: ["Nonsense-v0", "CartPole-v99", "nope:Nonsense-v0", "ALE/Pong-v5", ""],
    ppo_atari: ["Brekout", "CartPole-v1", "nope:Nonsense-v0", ""],
    ppo_multilevel: ["CartPole-v1", "nope:make", "nope.py:make", "envs:make_other_spaces", ""],
}
SAID = {
    "Nonsense-v0": "`Nonsense` doesn't exist",
    "CartPole-v99": "version `v99` for environment `CartPole`",
    "nope:Nonsense-v0": "nope'",
    "ALE/Pong-v5": "argument --env: Atari games are for ppo_atari.py",
    "Brekout": "Did you mean: `Breakout`",
    "nope:make": "No module named 'nope'",
    "nope.py:make": "nope.py'",
    "envs:make_other_spaces": "argument --levels: level 2 has (Box",
}


@pytest.mark.parametrize(
    "script, env",
    [(script, env) for script in SCRIPTS for env in BAD_ENVS[script]],
    indirect=["script"],
)
def test_env_that_is_not_there(script, refused, env):
    """One line, which has Gymnasium's or Python's words; ppo_multilevel.py names its own cases."""
    line = refused([*GOOD[script], "--num-minibatches", "2", "--env", env], SAID.get(env, ""))
    if script is ppo_multilevel and ":" not in env:
        assert all(case in line for case in [f"no env '{env}'", *ppo_multilevel.CASES])


SPACE_NAMES = "Sequence Dict Graph Dict Box Box Dict Tuple Text".split()  # of envs.BAD_SPACES


@each_main
def test_spaces_that_are_not_known(script, refused):
    """They are refused and named."""
    for spaces, name in zip(envs.BAD_SPACES, SPACE_NAMES, strict=True):
        # This space's text has many lines.
        if spaces == "many_integers":
            continue
        env = f"envs:Spaces-{spaces}-v0" if script is ppo else f"envs:make_{spaces}"
        options = [*GOOD[script], "--num-minibatches", "2", "--env", env]
        # Gymnasium cannot flatten the empty one.
        if spaces == "empty" and script is ppo:
            refused(options)
        else:
            refused(options, "not supported: ", "space", name)


@only(ppo_multilevel)
@pytest.mark.parametrize("spaces", [*envs.FLATTENED, "multi", "binary"])
def test_spaces_of_ppo_alone(refused, spaces):
    """ppo_multilevel.py takes vectors, which simulations form in psi, and one choice or a Box."""
    refused(f"--env envs:make_{spaces} --levels 1 --num-steps 50", "not supported: spaces ")


@only(ppo_multilevel)
@pytest.mark.parametrize(
    "options, words",
    [
        ("--env ResSim-v2 --levels 3 5", "level must be 1..4, got 5"),
        ("--env envs:make", "argument --levels: give them"),
        ("--env ResSim-v1 --levels", "argument --levels: expected"),
        ("--env envs:make_cartpole --levels 1 2 --coupling step", "argument --coupling: step"),
    ],
)
def test_levels(refused, options, words):
    """Levels that a simulation does not have, and states that it cannot take over."""
    refused(options, words)


MISTAKES = {
    "def make(:\n": SyntaxError,
    "x = 1\n": AttributeError,
    "1 / 0\n": ZeroDivisionError,
    "def make(level):\n    return None\n": AttributeError,
}


@only(ppo_multilevel)
def test_mistakes_in_a_users_file(refused, outcome, tmp_path):
    """They have Python's own traceback. A module that is missing is told in a line."""
    for i, (content, error) in enumerate(MISTAKES.items()):
        path = tmp_path / f"mine{i}.py"  # a file is loaded once
        path.write_text(content)
        with pytest.raises(error):
            outcome(f"--env {path}:make --levels 1".split())
    (tmp_path / "other.py").write_text("import nope\n")
    refused(f"--env {tmp_path}/other.py:make --levels 1", "No module named 'nope'")


@pytest.mark.parametrize(
    "script, form",
    [(ppo, "{}:Rig-v0"), (ppo_multilevel, "{}:make"), (ppo_multilevel, "{}.py:make")],
    indirect=["script"],
)
def test_module_that_has_options_of_its_own(script, outcome, tmp_path, monkeypatch, form):
    """It ends the program, as argparse does, while it is imported. The last line names it."""
    name = f"rig_{script.__name__}"
    text = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    levels = ["--levels", "1"] if script is ppo_multilevel else []
    code, error = outcome(["--env", form.format(name), *levels])
    *_, argparses, line = error.splitlines()
    assert code == 2 and "unrecognized arguments: --env" in argparses
    assert line.startswith(f"{script.__name__}.py: error: ")
    assert name in line and line.endswith(" ended the program as it was loaded, code 2")


QUITTER = """
import sys
import gymnasium

class Quitter(gymnasium.Env):
    def __init__(self, level=1):
        sys.exit(0)

def make(level):
    sys.exit(0)

gymnasium.register("Quitter-v0", Quitter)
"""


@pytest.mark.parametrize(
    "script, form",
    [
        (ppo, "{}:Quitter-v0"),
        (ppo_multilevel, "{}:Quitter"),
        (ppo_multilevel, "{}:make"),
        (ppo_multilevel, "{}.py:Quitter"),
    ],
    indirect=["script"],
)
def test_env_that_exits_when_it_is_made(script, outcome, tmp_path, monkeypatch, form):
    """sys.exit(0) in a maker or a constructor is an error, not the end of a run that went well."""
    name = f"quitter_{script.__name__}"
    (tmp_path / f"{name}.py").write_text(QUITTER)
    monkeypatch.chdir(tmp_path)
    levels = ["--levels", "1"] if script is ppo_multilevel else []
    code, error = outcome(["--env", form.format(name), *levels])
    assert code == 2
    (line,) = error.splitlines()
    assert line.startswith(f"{script.__name__}.py: error: ")
    assert line.endswith(f"{form.format(name)} ended the program as it was loaded, code 0")


@each_main
def test_module_in_the_working_folder(script, outcome, tmp_path):
    """--env finds a module that lies where one works, and so does a worker."""
    name = f"helper_{script.__name__}"
    text = "import envs, gymnasium\nfrom envs import make\n"
    text += f"gymnasium.register('{name}-v0', envs.Levels, kwargs={{'level': 1}})\n"
    (tmp_path / f"{name}.py").write_text(text)
    env = f"{name}:{name}-v0" if script is ppo else f"{name}:make"
    words = [*GOOD[script], *TINY, "--quiet", "--env", env, "--num-workers", "1"]
    assert outcome(words) == (0, "")


@only(ppo_multilevel)
@pytest.mark.parametrize("folder", [".", "sub", "ABSOLUTE"])
def test_module_beside_the_file(script, tmp_path, monkeypatch, folder):
    """A file may import what lies beside it, from whatever working folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # main appends to it
    path = tmp_path / folder
    path.mkdir(exist_ok=True)
    (path / f"beside_{folder.strip('.')}.py").write_text("from envs import make\n")
    (path / "two.py").write_text(f"from beside_{folder.strip('.')} import make\n")
    env = f"{path if folder == 'ABSOLUTE' else folder}/two.py:make"
    args = script.parse_args([*GOOD[script], "--num-minibatches", "2", "--env", env])
    assert args.env == f"{path}/two.py:make"


# Runs to resume or evaluate -----------------------------------------------------------------------


@once
@pytest.mark.parametrize("option", ["--resume", "--eval"])
def test_run_without_a_name(refused, option):
    """What a shell makes of a variable that is not set is no new run."""
    refused([option, ""], "No such file", f"{os.getcwd()}/config.json")


class Code:
    """What makes a folder when it is loaded from a file."""

    def __reduce__(self):
        return os.mkdir, ("made by the file",)


def damage(run_dir, how):
    """Damage a run's folder."""
    checkpoint = run_dir / "checkpoint.pt"
    config = run_dir / "config.json"
    content = checkpoint.read_bytes()
    if how == "missing":
        shutil.rmtree(run_dir)
    elif how == "no checkpoint":
        checkpoint.unlink()
    elif how == "no config":
        config.unlink()
    elif how == "half a checkpoint":
        checkpoint.write_bytes(content[: len(content) // 2])
    elif how == "empty checkpoint":
        checkpoint.write_bytes(b"")
    elif how == "garbage":
        checkpoint.write_bytes(b"garbage" * 100)
    elif how == "foreign":
        torch.save({"state_dict": {}}, checkpoint)
    elif how == "code":
        torch.save({"model": Code()}, checkpoint)
    elif how == "half a config":
        config.write_text(config.read_text()[:99])
    elif how == "empty config":
        config.write_text("{}")  # The defaults have another network.


@once
@pytest.mark.parametrize("option", ["--resume", "--eval"])
@pytest.mark.parametrize(
    "how",
    [
        "missing",
        "no checkpoint",
        "no config",
        "half a checkpoint",
        "empty checkpoint",
        "garbage",
        "foreign",
        "code",
        "half a config",
        "empty config",
    ],
)
def test_run_that_is_damaged(refused, run_dir, tmp_path, option, how):
    """A file is missing, cut off, or of something else; no code of a checkpoint is run."""
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    damage(copy, how)
    refused([option, str(copy)], "" if how == "half a config" else str(copy))
    assert not Path("made by the file").exists()


def test_run_of_another_network(script, refused, run_dir, finished):
    """The line says which weights do not fit."""
    if script is ppo:
        other = finished(ppo_atari)[0]
        line = f"cannot use the run in {other}: "
        options = ["--env", "CartPole-v1", "--device", "cpu"]
        refused(["--resume", str(other), *options], line, "actor.4.weight")
        refused(["--eval", str(run_dir), "--hidden", "9"], f"cannot use the run in {run_dir}: ")
        refused(["--eval", str(run_dir), "--norm-obs"], f"cannot use the run in {run_dir}: ")
    if script is ppo_atari:
        refused(["--eval", str(run_dir), "--env", "Pong"], f"cannot use the run in {run_dir}: ")
    if script is ppo_multilevel:
        refused(["--eval", str(run_dir), "--norm-value"], f"cannot use the run in {run_dir}: ")


def config_of(run_dir):
    """Return the options in a run's config.json."""
    return json.loads((run_dir / "config.json").read_text())


@pytest.mark.parametrize("option", ["--resume", "--eval"])
def test_config_has_the_defaults(script, run_dir, option):
    """The options of config.json give the same run again."""
    options = config_of(run_dir)
    assert options["num_envs"] == 2 and options["num_iterations"] == 1
    assert script is ppo_atari or options["hidden"] == [8]
    args = vars(script.parse_args([option, str(run_dir)]))
    assert options.keys() == args.keys() - set(script.NOT_KEPT)
    assert {name: args[name] for name in options} == options
    assert args[option.strip("-")] == str(run_dir)


@pytest.mark.parametrize("option", ["--resume", "--eval"])
def test_command_line_wins(script, run_dir, option):
    """What is given replaces what the run had, and all else stays."""
    new = {"num_workers": 3, "eval_every": 4, "eval_episodes": 5, "save_every": 6, "seed": 7}
    new |= {"learning_rate": 0.5, "gamma": 0.75, "update_epochs": 8, "num_minibatches": 1}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in new.items()]
    changed = not config_of(run_dir)["anneal_lr"]
    words += ["--anneal-lr" if changed else "--no-anneal-lr", "--quiet"]
    new |= {"anneal_lr": changed}

    args = vars(script.parse_args([option, str(run_dir), *words]))
    assert args.items() >= (new | {"quiet": True}).items()
    assert {name: args[name] for name in config_of(run_dir)} == config_of(run_dir) | new


@only(ppo, ppo_atari)
def test_length_that_is_given(script, run_dir, tmp_path):
    """It replaces the run's, in other units, too: 43 iterations have 43 · 2 · 8 = 688 steps."""
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    args = script.parse_args(["--resume", str(copy), "--total-timesteps", "700"])
    assert args.num_iterations == 43
    script.write_config(copy, args)
    assert script.parse_args(["--resume", str(copy)]).num_iterations == 43
    args = script.parse_args(["--resume", str(copy), "--num-iterations", "9"])
    assert args.num_iterations == 9


LENGTHS = {"hours": 2.5, "finest_steps": 700, "num_iterations": 9}


@only(ppo_multilevel)
def test_lengths_that_are_given(script, run_dir, tmp_path):
    """One replaces the run's, whichever it was, and the options that config.json has."""
    assert list(LENGTHS) == script.LENGTHS
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    for before in LENGTHS:
        lengths = dict.fromkeys(LENGTHS) | {before: 5}
        (copy / "config.json").write_text(json.dumps(config_of(run_dir) | lengths))
        for name, value in LENGTHS.items():
            words = ["--resume", str(copy), f"--{name.replace('_', '-')}", str(value)]
            args = vars(script.parse_args(words))
            given = {length: args[length] for length in LENGTHS}
            assert given == dict.fromkeys(LENGTHS) | {name: value}


@only(ppo_multilevel)
def test_levels_of_a_run(script, run_dir, refused):
    """A resumed run keeps its levels and checks; --eval may be on others, with their own costs."""
    words = "argument --resume: ['levels', 'check_episodes'] must stay"
    refused(["--resume", str(run_dir), "--levels", "1", "3"], words)
    refused(["--resume", str(run_dir), "--check-episodes", "9"], words)
    args = script.parse_args(["--eval", str(run_dir), "--levels", "2", "3", "4"])
    assert (args.levels, args.level_costs, args.num_steps) == ([2, 3, 4], None, [8, 8, 8])


@each_main
def test_eval_writes_nothing_but_its_answer(script, run_dir, tmp_path, capsys):
    """--eval leaves no folder behind and does not change the run's."""
    before = {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    returns = script.evaluate_run(script.parse_args(["--eval", str(run_dir)]))
    line = capsys.readouterr().out
    assert re.fullmatch(rf"return {returns.mean():.4f} ± 0.0000 over 1 episodes of .*\n", line)
    assert {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()} == before
    assert list(tmp_path.iterdir()) == []


# Defaults of ppo_multilevel.py --------------------------------------------------------------------

# An option that says how long the run is, and its value; the default has no option.
BY_DEFAULT = None, None
DEFAULTS = [
    ("--env ResSim-v1", "adaptive", [1, 2, 3, 4, 5], [50] * 5, ("finest_steps", 32_000)),
    ("--num-steps 20 --env ResSim-v3", "adaptive", [1, 2, 3, 4], [20] * 4, ("finest_steps", 2e5)),
    ("--levels 2 5 --finest-steps 9", "adaptive", [2, 5], [50] * 2, ("finest_steps", 9)),
    ("--levels 2 5 --num-iterations 9", "adaptive", [2, 5], [50] * 2, ("num_iterations", 9)),
    ("--levels 2 5 --hours 9", "adaptive", [2, 5], [50] * 2, ("hours", 9)),
    ("--levels 1 2", "adaptive", [1, 2], [50] * 2, BY_DEFAULT),
    ("--levels 5", "together", [5], [50], ("finest_steps", 32_000)),
    ("--levels 4", "together", [4], [50], BY_DEFAULT),
    ("--schedule together", "together", [2, 5], [100, 5], ("num_iterations", 200)),
    ("--env envs:make --levels 1 2 3", "adaptive", [1, 2, 3], [50] * 3, BY_DEFAULT),
    (
        "--schedule together --levels 1 2 3",
        "together",
        [1, 2, 3],
        [100, 10, 10],
        ("num_iterations", 200),
    ),
    (
        "--schedule together --levels 1 2 --num-steps 9",
        "together",
        [1, 2],
        [9, 9],
        ("num_iterations", 200),
    ),
    ("--schedule together --levels 1 2 --hours 1", "together", [1, 2], [100, 10], ("hours", 1)),
]


@pytest.mark.parametrize("options, schedule, levels, num_steps, length", DEFAULTS)
def test_what_is_not_given(options, schedule, levels, num_steps, length):
    """All levels of a built-in case; the length of a run that chooses among them is a time."""
    args = ppo_multilevel.parse_args(options.split())
    assert (args.schedule, args.levels, args.num_steps) == (schedule, levels, num_steps)
    assert args.init_log_std == (0.0 if "envs" in options else -2.9)
    # The first of these that there is decides, see `Run.share_done` and `run_length`.
    lengths = {name: getattr(args, name) for name in ("num_iterations", "hours", "finest_steps")}
    assert next((pair for pair in lengths.items() if pair[1]), BY_DEFAULT) == length


LEARNING = [
    ("", (1e-4, 5, 0.05)),
    ("--levels 5", (1e-4, 5, 0.05)),
    ("--levels 5 --schedule together", (1e-4, 5, 0.05)),
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


# The run's folder ---------------------------------------------------------------------------------


@once
@pytest.mark.parametrize(
    "name, folder", [("lr=1e-3,b+c", "lr=1e-3,b+c"), ("my run", "my_run"), ("a/b", "a_b")]
)
def test_run_name(script, tmp_path, name, folder):
    """It is the folder's, with an underscore for what may not be in a name."""
    args = script.parse_args(["--run-name", name])
    assert script.run_path(args) == tmp_path / "runs" / folder


def test_run_without_a_run_name(script, tmp_path):
    """Its folder has the name of what ran, and when; the end of a name that is too long."""
    env = "envs:make" if script is ppo_multilevel else "Pong"
    args = Namespace(log_dir="runs", run_name=None, env=env, seed=3)
    folder = env.replace(":", "_")
    name = rf"{folder}__{script.__name__}__3__\d{{8}}-\d{{6}}-\d{{6}}"
    assert re.fullmatch(name, script.run_path(args).name)
    args.env = "folder/" + "Long" * 60 + "-v0"
    assert script.run_path(args).name.startswith(args.env[-100:] + f"__{script.__name__}__3__")


@once
@pytest.mark.parametrize(
    "words", ["--log-dir file", "--log-dir file/below", "--run-name " + 300 * "x"]
)
def test_run_folder_that_cannot_be(outcome, tmp_path, words):
    """A file lies where the folder should be, or the name is too long."""
    (tmp_path / "file").write_text("")
    code, err = outcome([*GOOD[ppo], "--num-minibatches", "2", *words.split()])
    assert code == 1 and err.count("\n") == 1
    assert err.startswith("ppo.py: error: ") and words.split()[1] in err


# Exit codes ---------------------------------------------------------------------------------------

ENDS = {
    "done": (Namespace(signal=None), 0, ""),
    "SIGTERM": (Namespace(signal=signal.SIGTERM), 128 + 15, ""),
    "SIGINT": (Namespace(signal=signal.SIGINT), 128 + 2, ""),
    "Ctrl-C": (KeyboardInterrupt(), 128 + 2, ""),
    "gradient": (FloatingPointError("no finite gradient"), 1, "no finite gradient"),
    "disk": (OSError("no space left"), 1, "no space left"),
    "game": ("GameError", 1, "Pong failed\nTraceback"),
}


@each_main
@pytest.mark.parametrize("end", ENDS)
def test_exit_codes(script, outcome, monkeypatch, end):
    """0 for a run, 128 + the signal that has stopped it, 1 for what fails on the way."""
    result, code, message = ENDS[end]
    if result == "GameError":
        result = script.GameError(message)

    def train(args):
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(script, "train", train)
    line = f"{script.__name__}.py: error: {message}\n" if message else ""
    assert outcome([*GOOD[script], "--num-minibatches", "2"]) == (code, line)


@each_main
@pytest.mark.parametrize("error", [ValueError, ImportError, RuntimeError])
def test_mistakes_in_code_have_a_traceback(script, outcome, monkeypatch, error):
    """They pass through main."""

    def train(args):
        raise error("broken on purpose")

    monkeypatch.setattr(script, "train", train)
    with pytest.raises(error, match="broken on purpose"):
        outcome([*GOOD[script], "--num-minibatches", "2"])


@each_main
def test_help_on_a_terminal_with_few_letters(script, monkeypatch):
    """One that has no γ shows the rest."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])  # main appends to it
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "cp1252"))
    with pytest.raises(SystemExit, match="0"):
        script.main()
    sys.stdout.flush()
    assert b"?, discount per step" in sys.stdout.buffer.getvalue()


# Games that break their word ----------------------------------------------------------------------

WRONG_STEPS = {
    "shape (1,)": lambda obs, *rest: (obs[:1], *rest),
    "scalar": lambda obs, *rest: (obs[0], *rest),
    "text": lambda obs, *rest: ("text", *rest),
    "reward (2,)": lambda obs, reward, *rest: (obs, np.ones(2), *rest),
    "no reward": lambda obs, reward, *rest: (obs, None, *rest),
    "flags": lambda obs, reward, terminated, *rest: (obs, reward, np.array([True, False]), *rest),
    "four": lambda *results: results[:4],
}


def play(script):
    """Play a rollout of eight steps in two scripted games."""
    if script is ppo:
        args = ppo.parse_args([*GOOD[ppo], *TINY, "--env", "envs:Quick-v0"])
        with closing(ppo.make_pool(args, ppo.make_model(args))) as pool:
            pool.call("start", np.arange(2))
            pool.call("play", np.zeros((8, 2, 2), np.float32))
    else:
        words = "--env envs:make_from_one --levels 1 --num-steps 8 --level-costs 1 1"
        args = ppo_multilevel.parse_args([*GOOD[ppo_multilevel], *TINY, *words.split()])
        model = ppo_multilevel.make_model(args)
        with closing(ppo_multilevel.Simulations(args, model)) as sims:
            sims.start(0, np.arange(2))
            sims.play(model, ["own 0"], torch.zeros(8, 2, 2))


@each_main
@pytest.mark.parametrize("wrong", WRONG_STEPS)
def test_wrong_results_of_a_step(script, monkeypatch, wrong):
    """Nothing is stretched to its place: an error names the game and what it did."""
    real = envs.Scripted.step
    change = WRONG_STEPS[wrong]
    play(script)
    monkeypatch.setattr(envs.Scripted, "step", lambda self, action: change(*real(self, action)))
    name = "envs:Quick-v0" if script is ppo else "envs:make_from_one level 1"
    where = rf"^{name} \(seed 0, episode 1, after [01] steps\) failed in step: \w+Error: "
    with pytest.raises(script.GameError, match=where):
        play(script)


@once
def test_wrong_last_observation(script, monkeypatch):
    """It is not what the policy sees next, but its value is asked for."""
    real = envs.Scripted.step

    def step(self, action):
        obs, reward, terminated, *rest = real(self, action)
        return obs[:1] if terminated else obs, reward, terminated, *rest

    monkeypatch.setattr(envs.Scripted, "step", step)
    with pytest.raises(script.GameError, match=r"after 2 steps\) failed in step: .*reshape"):
        play(script)


@each_main
def test_wrong_observation_of_a_reset(script, monkeypatch):
    """The same for the first observation of an episode."""
    real = envs.Scripted.reset
    monkeypatch.setattr(envs.Scripted, "reset", lambda *a, **k: (real(*a, **k)[0][:1], {}))
    with pytest.raises(script.GameError, match=r"failed in reset: ValueError: .*reshape"):
        play(script)


@only(ppo_multilevel)
def test_psi_of_another_shape(script, monkeypatch):
    """What a partner sees after map_from is checked, too."""

    def map_from(self, other):
        self.psi = lambda: np.zeros(1, np.float32)

    monkeypatch.setattr(envs.Levels, "map_from", map_from)
    args = script.parse_args([*GOOD[script], *TINY])
    with closing(script.Simulations(args, script.make_model(args))) as sims:
        sims.start(0, np.arange(2))
        with pytest.raises(script.GameError, match=r"level 1 .*failed in map_from: .*reshape"):
            sims.start(1, np.arange(2))


# What is returned, and what the line says.
STEP_BATCHES = {
    "five": (
        lambda games, results: (*results, [{}] * len(games)),
        r"TypeError: Game.record\(\) takes",
    ),
    "three": (lambda games, results: results[:3], r"TypeError: Game.record\(\) missing"),
    "a row too few": (
        lambda games, results: [results[0][1:], *results[1:]],
        r"ValueError: zip\(\) argument",
    ),
    "None": (lambda games, results: None, "TypeError: "),
    "no rewards": (lambda games, results: (results[0], [None] * len(games), *results[2:]), "Type"),
    "shape (1,)": (
        lambda games, results: ([obs[:1] for obs in results[0]], *results[1:]),
        "ValueError: cannot reshape",
    ),
}


@only(ppo_multilevel)
@pytest.mark.parametrize("wrong", [None, *STEP_BATCHES])
def test_wrong_results_of_step_batch(script, monkeypatch, wrong):
    """It returns four things, a row each per env."""

    def step_batch(games, actions):
        results = [env.step(action)[:4] for env, action in zip(games, actions)]
        results = [list(column) for column in zip(*results)]
        return STEP_BATCHES[wrong][0](games, results) if wrong else results

    monkeypatch.setattr(envs.Scripted, "step_batch", staticmethod(step_batch), raising=False)
    if wrong:
        line = r"level 1 .*failed in step_batch: " + STEP_BATCHES[wrong][1]
        with pytest.raises(script.GameError, match=line):
            play(script)
    else:
        play(script)
