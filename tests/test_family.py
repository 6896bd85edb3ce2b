"""The scripts are one family: the same text for the same thing, the same order of sections."""

import ast
import csv
import datetime
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["ppo", "ppo_atari", "ppo_multilevel"]
SECTIONS = (
    "options, train, rollout, GAE, losses, update, levels, model, heads and normalisers, speed, "
    "games, worker pool, ranks, run folder, evaluation, analysis, reservoirs, command line"
).split(", ")
OF_LEVELS = ("levels", "analysis", "reservoirs")  # sections that only ppo_multilevel.py has

# What has the same name as in ppo.py and differs by design; all else is the same text.
DIFFERS = {
    "ppo_atari": (
        "add_own_options train make_optimizer rollout RESULTS play add_values make_batch "
        "minibatch_loss update run_epoch minibatches make_model Model Categorical make_env Game "
        "Games make_pool model_of_workers own_rows EVAL_STEPS EXAMPLES make_parser parse_args"
    ).split(),
    "ppo_multilevel": (
        "add_own_options train make_optimizer rollout RESULTS play add_values make_batch "
        "minibatch_loss update run_epoch minibatches normalised make_model Model make_env Game "
        "Games game_seeds make_pool own_rows SHOWN Run NEWEST_ENTRY make_eval_pool evaluate_run "
        "NOT_KEPT EXAMPLES make_parser parse_args parse_with_run LENGTHS main"
    ).split(),
}
# What both siblings have as one text: the lesson without memory, masks and parameter groups.
SIMPLER = ["make_optimizer", "make_batch", "own_rows"]
SIBLINGS = [name for name in SCRIPTS if name != "ppo"]


def lines(script):
    """Return a script's lines."""
    return (ROOT / f"{script}.py").read_text().splitlines()


@functools.cache
def places(script):
    """Return {name: (first line, last line)} of a script's functions, classes and constants."""
    found = {}
    for node in ast.parse("\n".join(lines(script))).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            start = min(part.lineno for part in (node, *node.decorator_list))
            found[node.name] = start, node.end_lineno
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.lineno, node.end_lineno
    return found


@functools.cache
def top_level(script):
    """Return {name: source text} of a script's functions, classes and constants."""
    text = lines(script)
    return {name: text[first - 1 : last] for name, (first, last) in places(script).items()}


def sections(script):
    """Return {name: line number} of a script's sections, as its banner comments say."""
    found = {}
    for number, line in enumerate(lines(script), start=1):
        if match := re.fullmatch(r"# -{60,} (\w.*)", line):
            assert match[1] not in found
            found[match[1]] = number
    return found


def option_parser(script):
    """Return the parser of a script's command line."""
    return importlib.import_module(script).make_parser()


@pytest.mark.parametrize("script", SIBLINGS)
def test_shared_names_are_the_same_text(script):
    """What has one name in two scripts has one text, but for the names in DIFFERS."""
    ours, theirs = top_level("ppo"), top_level(script)
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 30
    assert {name for name in shared if ours[name] != theirs[name]} <= set(DIFFERS[script])


def test_names_of_siblings_only_are_the_same_text():
    """What two siblings have and ppo.py has not is one text too."""
    ours, theirs = map(top_level, SIBLINGS)
    shared = ours.keys() & theirs.keys() - top_level("ppo").keys()
    assert "num_cores" in shared
    for name in (*shared, *SIMPLER):
        assert ours[name] == theirs[name], name


@pytest.mark.parametrize("script", SIBLINGS)
def test_list_of_differences_is_needed(script):
    """Every name in DIFFERS is in both scripts and has two texts."""
    ours, theirs = top_level("ppo"), top_level(script)
    assert [name for name in DIFFERS[script] if ours[name] == theirs[name]] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_import_of_a_sibling(script):
    """Each script stands alone."""
    imported = set()
    for node in ast.walk(ast.parse("\n".join(lines(script)))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported.isdisjoint(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_sections_have_the_same_order(script):
    """First what an iteration does, in its order, then the machinery; no other sections."""
    own = [name for name in SECTIONS if name not in OF_LEVELS or script == "ppo_multilevel"]
    assert list(sections(script)) == own


@pytest.mark.parametrize("script", SCRIPTS)
def test_train_comes_first(script):
    """`train` is short and stands near the top, after the options."""
    first, last = places(script)["train"]
    assert first < 280 and last - first < 60


def functions(script):
    """Return (name, node) of all functions and methods of a script."""
    tree = ast.parse("\n".join(lines(script)))
    return [(node.name, node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_functions_are_short(script):
    """But for `train` and tables of options none has more than 40 lines of code."""
    text = lines(script)
    for name, node in functions(script):
        if name == "train" or name.endswith("_options"):
            continue
        body = [line.strip() for line in text[node.lineno - 1 : node.end_lineno]]
        code = [line for line in body if line and not line.startswith("#")]
        documented = len((ast.get_docstring(node, clean=False) or "").splitlines())
        assert len(code) - documented <= 40, name


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_idea_a_line(script):
    """No expression is used as control flow, and no assignment stands inside an expression."""
    packed = (ast.BoolOp, ast.Tuple, ast.IfExp, ast.Compare)
    for node in ast.walk(ast.parse("\n".join(lines(script)))):
        flow = isinstance(node, ast.Expr) and isinstance(node.value, packed)
        assert not flow and not isinstance(node, ast.NamedExpr), f"line {node.lineno}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_of_the_lesson_stand_first(script):
    """The options of the algorithm stand before `train`, those of running at the end."""
    found = places(script)
    tables = [name for name in found if name.endswith("_options") and name.startswith("add_")]
    lesson = [name for name in tables if found[name][1] < found["train"][0]]
    assert set(tables) - set(lesson) == {"add_run_options"}
    assert {"add_ppo_options", "add_own_options"} <= set(lesson)
    assert found["add_run_options"][0] > sections(script)["command line"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_has_a_help_text(script):
    """No option without meaning."""
    options = [action for action in option_parser(script)._actions if action.option_strings]
    assert len(options) > 30
    assert [a.option_strings for a in options if not (a.help and a.help.strip())] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_can_be_printed(script, capsys):
    """--help formats all texts (no stray %), names all options and exits with 0."""
    with pytest.raises(SystemExit) as exit_info:
        importlib.import_module(script).parse_args(["--help"])
    text = capsys.readouterr().out
    assert exit_info.value.code == 0
    assert "%(" not in text and "==SUPPRESS==" not in text
    for action in option_parser(script)._actions:
        assert all(name in text for name in action.option_strings)
    examples = text.partition("examples:")[2].split("\n")
    assert sum(line.strip().startswith(f"python {script}.py") for line in examples) == 4


@pytest.mark.parametrize("script", SCRIPTS)
def test_common_options(script):
    """The scripts share the words of their command line."""
    names = (
        "env seed device num-workers num-envs num-steps num-minibatches update-epochs "
        "total-timesteps num-iterations learning-rate anneal-lr no-anneal-lr gamma gae-lambda "
        "clip-coef clip-vloss ent-coef vf-coef max-grad-norm target-kl norm-adv eval-every "
        "eval-episodes save-every resume eval sample video export-onnx run-name log-dir quiet"
    ).split()
    if script != "ppo_atari":  # its network is what it is
        names += (
            "hidden activation layer-norm shared-net init-log-std full-covariance norm-obs "
            "norm-value"
        ).split()
    known = option_parser(script)._option_string_actions
    assert [name for name in names if f"--{name}" not in known] == []
    theirs = option_parser("ppo")._option_string_actions
    for name in {f"--{name}" for name in names} - {"--env", "--num-steps"}:
        a, b = known[name], theirs[name]
        assert (a.help, a.choices, a.nargs) == (b.help, b.choices, b.nargs)
        assert getattr(a.type, "__name__", "") == getattr(b.type, "__name__", "")  # has bounds


def test_nothing_else_at_top_level():
    """The repository's top level holds the scripts, four more names and dot-files."""
    command = ["git", "-C", str(ROOT), "ls-files"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    found = {line.split("/")[0] for line in listing.splitlines()}
    known = {"ppo.py", "ppo_atari.py", "ppo_multilevel.py"}
    known |= {"requirements.txt", "README.md", "LICENSE", "tests"}
    assert {name for name in found if not name.startswith(".")} <= known


def test_import_runs_nothing():
    """Importing the scripts parses no command line and prints nothing."""
    code = f"import sys; sys.argv.append('--nonsense'); import {', '.join(SCRIPTS)}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux does")
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "ppo_atari"])
def test_numpy_has_one_thread(script):
    """NumPy starts none of the threads that would keep cores from the workers, unless told to."""
    text = lines(script)
    own = text.index("import gymnasium as gym")  # the first import that is not Python's own
    code = "\n".join([*text[:own], "import numpy as np; x = np.ones((999, 999)); x @ x"])
    code += "; print(len(os.listdir('/proc/self/task')))"
    env = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    threads = []
    for asked in ({}, {"OPENBLAS_NUM_THREADS": "1"}, {"OPENBLAS_NUM_THREADS": "2"}):
        command, options = [sys.executable, "-c", code], {"cwd": ROOT, "env": env | asked}
        threads.append(int(subprocess.check_output(command, **options)))
    assert threads[0] == threads[1] <= threads[2]


def readme_commands():
    """The scripts' command lines in README.md and in the docstrings, without placeholders."""
    texts = [
        (ROOT / "README.md").read_text(),
        *(importlib.import_module(name).__doc__ for name in SCRIPTS),
    ]
    commands = re.findall(r"python (ppo\w*)\.py(.*?)(?:[#;`].*)?$", "\n".join(texts), re.MULTILINE)
    return sorted(
        {
            (name, options.strip())
            for name, options in commands
            if "<" not in options and "RUN_DIR" not in options
        }
    )


@pytest.mark.parametrize("page", ["README.md", "tests/benchmarks/README.md"])
def test_tables_are_the_records(page, monkeypatch):
    """Every number of a table of results is that of the recorded runs."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    tables = importlib.import_module("tables")
    text = (ROOT / page).read_text()
    assert text.count("<!-- table") == text.count("<!-- end -->") > 2
    assert tables.filled(text) == text, "python tests/benchmarks/tables.py"


def test_comparison_with_the_best_single_level(monkeypatch):
    """By hand: the cheap level is there after 10 s, the rule after 20 s, the finest after 100 s."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    tables = importlib.import_module("tables")

    def seeds(seconds, end):
        return {"1": (np.array([0.0, seconds, end]), None, np.array([0.0, 1.0, 1.0]))}

    curves = {"rod-only-1": seeds(10, 30), "rod-only-4": seeds(100, 200)}
    curves |= {"rod-adaptive": seeds(20, 50), "rod-multigrid": seeds(70, 99)}
    budgets, factors, shortfalls = tables.comparison("rod", curves, "rod-adaptive")
    assert budgets[0] == pytest.approx(2500 * 0.13e-3 + 0.1) and budgets[-1] == pytest.approx(50)
    late = budgets >= 10.1
    assert np.isnan(factors[~late]).all()  # no level has gained anything by then
    assert factors[late] == pytest.approx(2, rel=0.01)
    assert (shortfalls == ((budgets >= 10.1) & (budgets < 20))).all()
    assert np.isinf(tables.comparison("rod", curves, "rod-multigrid")[1][late]).all()


def test_budgets_without_a_gain_do_not_count(monkeypatch):
    """Until single levels have 5 % of their gain: here 4 % after 5 s, 6 % after 10 s."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    tables = importlib.import_module("tables")
    curve = np.array([0.0, 5, 10, 20, 50]), None, np.array([0, 0.04, 0.06, 1, 1])
    curves = {"rod-only-1": {"1": curve}, "rod-adaptive": {"1": curve}}
    budgets, factors, _ = tables.comparison("rod", curves, "rod-adaptive")
    assert (np.isnan(factors) == (budgets < 10)).all()
    assert tables.factor(np.nan) == "—"


def test_commands_of_results(monkeypatch):
    """The options that a table shows are those that its numbers were recorded with."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    runs, results = importlib.import_module("learn_ppo").RUNS, ROOT / "tests/benchmarks/results"
    with (results / "ppo.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            assert row["command"] == f"python ppo.py {runs[row['run']]} --seed {row['seed']}"


def test_origin_of_results():
    """Every recorded result has its command, versions with the commit, processor and day."""
    results = ROOT / "tests/benchmarks/results"
    rows = [*json.loads((results / "ressim/runs.json").read_text()).values()]
    for path in [*results.glob("*.csv"), *results.glob("analysis/*.csv")]:
        with path.open(newline="") as file:
            rows += csv.DictReader(file)
    for row in rows:
        versions = row["versions"]
        versions = json.loads(versions) if isinstance(versions, str) else versions
        assert row["command"].startswith("python ") and versions["git_commit"], row
        assert row["processor"] and row["processor"] != "not recorded", row
        assert datetime.date.fromisoformat(row["date"]), row


def test_readme_is_a_page():
    """It links to files that exist; its prose has no ±, no thousandths, no durations."""
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert links and all((ROOT / link).exists() for link in links)
    prose = re.sub(r"```.*?```|^\|.*?$|`[^`]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"±\s*\d|\b0\.\d{3}|\d (times|seconds|minutes|s) ", prose)


def torchrun_commands():
    """The torchrun command lines in README.md: script, number of ranks, options."""
    command = r"torchrun (?:--nnodes (\d+) )?--nproc-per-node (\d+) .*?(ppo\w*)\.py([^`(]*)"
    found = re.findall(command, " ".join((ROOT / "README.md").read_text().split()))
    assert found
    return [(name, int(nodes or 1) * int(ranks), words) for nodes, ranks, name, words in found]


@pytest.mark.parametrize("name, ranks, options", torchrun_commands())
def test_torchrun_commands_are_accepted(name, ranks, options, tmp_path, monkeypatch):
    """The ranks can share what the README's torchrun commands ask for."""
    script = importlib.import_module(name)
    monkeypatch.setattr(script, "NUM_RANKS", ranks)
    script.parse_args([*options.split(), "--log-dir", str(tmp_path)])


@pytest.mark.parametrize("name, options", readme_commands())
def test_readme_commands_are_accepted(name, options, tmp_path):
    """Every command that the README and the docstrings show is one that the script takes."""
    if "my_simulation.py" in options:
        options = options.replace("my_simulation.py:Rod", "envs:make")
    importlib.import_module(name).parse_args([*options.split(), "--log-dir", str(tmp_path)])
