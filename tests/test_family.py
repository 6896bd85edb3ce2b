"""The scripts are one family: the same text for the same thing, the same order of sections."""

import ast
import csv
import datetime
import functools
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["ppo", "ppo_atari", "ppo_multilevel"]
PAGES = [str(page.relative_to(ROOT)) for page in sorted((ROOT / "tests").rglob("*.md"))]
PAGES.append("README.md")
SECTIONS = (
    "options, train, rollout, GAE, losses, update, levels, model, heads and normalisers, speed, "
    "games, worker pool, ranks, run folder, evaluation, analysis, reservoirs, command line"
).split(", ")
OF_LEVELS = ("levels", "analysis", "reservoirs")  # sections that only ppo_multilevel.py has

# What has the same name as in ppo.py and differs by design; all else is the same text.
DIFFERS = {
    "ppo_atari": (
        "add_ppo_options add_own_options train rollout add_values finished_episodes make_batch "
        "minibatch_loss update minibatches make_model Model Categorical make_env AtWork Game "
        "make_rows Player make_pool own_rows evaluate EXAMPLES make_parser add_run_options "
        "parse_args check_options main"
    ).split(),
    "ppo_multilevel": (
        "add_ppo_options add_network_options add_own_options train rollout add_values make_batch "
        "minibatch_loss update minibatches normalised make_model Model Policy hidden_layers "
        "make_head Categorical Gaussian make_env Game make_rows Player own_rows COUNTERS SHOWN Run "
        "NOT_KEPT MOST_STEPS evaluate evaluate_run EXAMPLES add_run_options parse_args "
        "check_options main"
    ).split(),
}
# What both siblings have as one text: the lesson without memory, masks and several choices.
SIMPLER = ["make_batch", "Categorical", "own_rows"]
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
    assert len(shared) > 60
    assert {name for name in shared if ours[name] != theirs[name]} <= set(DIFFERS[script])


def test_names_of_siblings_only_are_the_same_text():
    """What two siblings have and ppo.py has not is one text too."""
    ours, theirs = map(top_level, SIBLINGS)
    shared = ours.keys() & theirs.keys() - top_level("ppo").keys()
    assert shared >= {"num_cores", "keep_freed_memory"}
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
    assert first < 240 and last - first < 60


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


# Code tokens. Who needs more takes something else out.
LIMITS = {"ppo": 11_255, "ppo_atari": 8_780, "ppo_multilevel": 20_235}
LAYOUT = [tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER]


def count_code_tokens(text):
    """Return the number of tokens of a program but for comments, docstrings and layout."""
    docstrings = set()  # their lines
    for node in ast.walk(ast.parse(text)):
        has_docstring = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if has_docstring and ast.get_docstring(node):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))

    count = 0
    depth = 0  # of f-strings
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # Since Python 3.12 an f-string has many tokens. It counts as one, as before.
        kind = tokenize.tok_name[token.type]
        depth += kind == "FSTRING_START"
        depth -= kind == "FSTRING_END"
        is_code = token.type not in (tokenize.COMMENT, *LAYOUT)
        count += is_code and depth == 0 and token.start[0] not in docstrings
    return count


def test_counting():
    """By hand."""
    text = """
'''A docstring.'''

def f(x):  # a comment
    '''Another one,
    of two lines.'''
    return f"{x + 1} {f'{x}'}"
"""
    assert count_code_tokens(text.replace("'''", '"""')) == 8  # 6 before the return
    assert count_code_tokens("x = 1 + 2\n") == 5
    assert count_code_tokens("x = (\n    'text',\n)\n") == 6


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_stay_small(script):
    """A reader has to hold in mind what the code says; packing makes no tokens fewer."""
    assert count_code_tokens("\n".join(lines(script)) + "\n") <= LIMITS[script]


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


COMMON = (
    "env seed num-workers num-envs num-steps num-minibatches num-iterations update-epochs "
    "learning-rate anneal-lr no-anneal-lr gamma gae-lambda clip-coef clip-vloss no-clip-vloss "
    "ent-coef vf-coef max-grad-norm target-kl norm-adv eval-every eval-episodes save-every resume "
    "eval run-name log-dir quiet"
).split()
OF_TWO = {
    "ppo_atari": "device total-timesteps video".split(),
    "ppo_multilevel": "hidden shared-net init-log-std norm-obs norm-value".split(),
}
# These are explained in a script's own words.
OWN_WORDS = "env device num-workers num-envs num-steps norm-adv".split()
OWN_WORDS += ["total-timesteps", "num-iterations"]


@pytest.mark.parametrize("script", SIBLINGS)
def test_common_options(script):
    """The scripts share the words of their command line, and most of the texts of --help."""
    ours = option_parser(script)._option_string_actions
    theirs = option_parser("ppo")._option_string_actions
    for name in [*COMMON, *OF_TWO[script]]:
        a = ours[f"--{name}"]
        b = theirs[f"--{name}"]
        if name not in OWN_WORDS:
            assert (a.help, a.choices, a.nargs, a.type) == (b.help, b.choices, b.nargs, b.type)


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


@pytest.mark.parametrize("script", SCRIPTS)
def test_import_runs_nothing(script, monkeypatch, capfd):
    """Importing a script parses no command line and prints nothing."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--nonsense"])
    spec = importlib.util.spec_from_file_location("imported_again", ROOT / f"{script}.py")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert callable(module.train) and capfd.readouterr() == ("", "")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux does")
def test_numpy_has_one_thread():
    """NumPy starts none of the threads that would keep cores from the workers, unless told to."""
    heads = {}
    for script in ("ppo", "ppo_multilevel"):
        text = lines(script)
        # Gymnasium's is the first import that is not Python's own.
        heads[script] = text[: text.index("import gymnasium as gym")]
    setting = heads["ppo"][-2]
    assert "NUM_THREADS" in setting and setting == heads["ppo_multilevel"][-2]

    code = "\n".join([*heads["ppo"], "import numpy as np; x = np.ones((999, 999)); x @ x"])
    code += "; print(len(os.listdir('/proc/self/task')))"
    env = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    threads = []
    for asked in ({}, {"OPENBLAS_NUM_THREADS": "1"}, {"OPENBLAS_NUM_THREADS": "2"}):
        command = [sys.executable, "-c", code]
        threads.append(int(subprocess.check_output(command, cwd=ROOT, env=env | asked)))
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
            (name, options.strip().replace("$seed", "1"))
            for name, options in commands
            if "<" not in options and "RUN_DIR" not in options
        }
    )


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_the_records(page, monkeypatch):
    """Every number of a table of results is that of the recorded runs."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    tables = importlib.import_module("tables")
    text = (ROOT / page).read_text()
    assert text.count("<!-- table") == text.count("<!-- end -->")
    assert ROOT / page in tables.PAGES or "<!-- table" not in text
    assert tables.filled(text) == text, "python tests/benchmarks/tables.py"


def test_comparison_with_the_best_single_level(monkeypatch):
    """By hand: the cheap level is there after 10 s, the rule after 20 s, the finest after 100 s."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    tables = importlib.import_module("tables")

    def seeds(seconds, end):
        return {"1": (np.array([0.0, seconds, end]), np.array([0.0, 1.0, 1.0]))}

    curves = {"rod-only-1": seeds(10, 30), "rod-only-4": seeds(100, 200)}
    curves |= {"rod-adaptive": seeds(20, 50)}
    budgets, factors, shortfalls = tables.comparison("rod", curves)
    assert budgets[0] == pytest.approx(2500 * 0.13e-3 + 0.1) and budgets[-1] == pytest.approx(50)
    late = budgets >= 10.1
    assert np.isnan(factors[~late]).all()  # no level has gained anything by then
    assert factors[late] == pytest.approx(2, rel=0.01)
    assert (shortfalls == ((budgets >= 10.1) & (budgets < 20))).all()
    curves["rod-adaptive"]["1"][1][:] = 0
    assert np.isinf(tables.comparison("rod", curves)[1][late]).all()


def test_returns_at_equal_time(monkeypatch):
    """By hand: after 50 s, the time of the rule, the finest level has a fifth of its gain."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    tables = importlib.import_module("tables")

    def seeds(*returns, every):
        return {"1": (np.arange(len(returns)) * float(every), np.array(returns))}

    curves = {"rod-only-1": seeds(-100, -90, -80, every=20)}
    curves |= {"rod-only-2": seeds(-100, -100, -60, every=25)}
    curves |= {"rod-only-3": seeds(-100, -70, every=60)}
    curves |= {"rod-only-4": seeds(-100, -90, -80, -70, -50, every=50)}
    curves |= {"rod-adaptive": seeds(-100, -45, every=50)}
    found = {"finest": 0.2, "coarsest": 0.4, "best coarse": 0.8, "adaptive": 1.1}
    shares = tables.shares("rod", curves)
    assert {way: share.tolist() for way, share in shares.items()} == {
        way: pytest.approx([share]) for way, share in found.items()
    }
    assert tables.at_equal_time("rod", curves)["best coarse"] == ("rod-only-2", [-60])
    # The best of all has gained 90.
    curves |= {"rod-finest-fit": seeds(-100, -10, every=50)}
    shares = tables.shares_of_best("rod", curves)
    found = {"finest": 10 / 90, "coarsest": 20 / 90, "best coarse": 40 / 90, "adaptive": 55 / 90}
    found |= {"finest-fit": 1}
    assert {way: share.tolist() for way, share in shares.items()} == {
        way: pytest.approx([share]) for way, share in found.items()
    }
    both = [shares, {"finest": np.array([0.1, 0.2])}]
    row = tables.summary("lowest share", np.min, both, found)
    assert row[:2] == ["**lowest share**", ""]
    assert row[2:] == ["**11 %**", "**22 %**", "**44 %**", "**61 %**", "**100 %**"]
    row = tables.summary("mean share", np.mean, both, ["finest"])
    assert row == ["**mean share**", "", "**13 %**"]


def test_cells_of_seeds(monkeypatch):
    """By hand: two seeds with 0.2 and 0.4 of the gain."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    tables = importlib.import_module("tables")

    def seeds(*ends, until):
        times = np.array([0.0, until])
        return {str(end): (times, np.array([-100.0, end])) for end in ends}

    curves = {"rod-only-1": seeds(-90, -80, until=40), "rod-only-4": seeds(-50, until=200)}
    curves |= {"rod-adaptive": seeds(-45, until=50), "rod-halves": seeds(-50, until=50)}
    assert tables.seeds_cell("rod", curves, "coarsest") == "30 % (20 to 40), 2 seeds"
    assert tables.seeds_cell("rod", curves, "adaptive") == "110 %, 1 seed"
    assert tables.seeds_cell("rod", curves, "multigrid") == "—"


def test_compared_runs_are_as_long(monkeypatch):
    """They last as long as the rule's, up to an iteration of theirs and a check of the rule's."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    tables = importlib.import_module("tables")
    for case in tables.cases():
        curves = tables.recorded(case)
        for run, _ in tables.at_equal_time(case, curves).values():
            end = min(seconds[-1] for seconds, _ in curves[run].values())
            assert end >= 0.95 * tables.rule_seconds(case, curves), run


def test_time_per_level(monkeypatch, tmp_path):
    """By hand: two iterations on 16 points, a check, one iteration on 128 points."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    tables = importlib.import_module("tables")
    path = tmp_path / "rod-adaptive__1.csv"
    coarse = 2500 * 5e-6 + 0.1  # seconds of an iteration
    fine = 2500 * 0.13e-3 + 0.1
    check = 0.2
    rows = [(0, 1, check), (5000, 1, 2 * coarse + 2 * check), (7500, 4, 2 * coarse + fine + 0.6)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("global_step", "level", "seconds"), *rows])
    levels, total = tables.training_seconds("rod", path)
    assert levels == pytest.approx([2 * coarse, 0, 0, fine])
    assert total == pytest.approx(2 * coarse + fine + 3 * check)


def test_budgets_without_a_gain_do_not_count(monkeypatch):
    """Until single levels have 5 % of their gain: here 4 % after 5 s, 6 % after 10 s."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    tables = importlib.import_module("tables")
    curve = np.array([0.0, 5, 10, 20, 50]), np.array([0, 0.04, 0.06, 1, 1])
    curves = {"rod-only-1": {"1": curve}, "rod-adaptive": {"1": curve}}
    budgets, factors, _ = tables.comparison("rod", curves)
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


def anchors(page):
    """Return the names that GitHub gives the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    names = []
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)  # the text of a link
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = names.count(name)
        names.append(f"{name}-{count}" if count else name)
    return names


@pytest.mark.parametrize("page", PAGES)
def test_links_exist(page):
    """The files and the headings that a page links to exist."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_is_a_page():
    """What is longer belongs on the pages that it links to."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 330


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
