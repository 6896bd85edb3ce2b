"""Tests of what one does with a trained policy: sampled evaluation, export to ONNX, README code."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import onnxruntime
import pytest
import torch

import ppo
import ppo_atari
import ppo_multilevel

ROOT = Path(__file__).resolve().parent.parent
SMALL = "--num-minibatches 2 --update-epochs 1 --num-iterations 1 --num-workers 0 --quiet".split()
OWN = {
    ppo: "--num-envs 4 --num-steps 16 --hidden 8 --eval-episodes 4".split(),
    ppo_atari: "--num-envs 2 --num-steps 4 --eval-episodes 1 --eval-every 0".split(),
    ppo_multilevel: "--env ResSim-v1 --levels 1 --num-steps 10 --eval-every 0".split(),
}
CASES = {
    "CartPole": (ppo, "--env CartPole-v1 --shared-net"),
    "HalfCheetah": (ppo, "--env HalfCheetah-v5 --norm-obs --layer-norm"),
    "start": (ppo, "--env envs_spaces:Action-five-v0"),
    "MultiDiscrete": (ppo, "--env envs_spaces:Action-multi_start-v0"),
    "unsigned": (ppo, "--env envs_spaces:Action-unsigned-v0"),
    "MultiBinary": (ppo, "--env envs_spaces:Action-square-v0"),
    "full covariance": (ppo, "--env Pendulum-v1 --full-covariance"),
    "masks": (ppo, "--env envs_spaces:Masked-table-info-v0"),
    "GRU": (ppo, "--env CartPole-v1 --rnn gru --rnn-size 8"),
    "LSTM": (ppo, "--env HalfCheetah-v5 --rnn lstm --rnn-size 8 --norm-obs"),
    "Breakout": (ppo_atari, "--env Breakout --precision bf16"),
    "ResSim": (ppo_multilevel, "--norm-obs"),
}


@pytest.fixture(autouse=True)
def remove_runs(tmp_path, monkeypatch):
    """Remove the runs' folders: Atari's checkpoints have 20 MB. Do not play whole Atari games."""
    monkeypatch.setattr(ppo_atari, "EVAL_STEPS", 5)
    yield
    shutil.rmtree(tmp_path)


def train(script, log_dir, *options):
    """Train a little. Returns the run's folder."""
    argv = [*SMALL, *OWN[script], *options, "--log-dir", str(log_dir)]
    return script.train(script.parse_args(argv)).run_dir


@pytest.mark.parametrize("case", CASES)
def test_onnx_policy_acts_like_the_model(case, tmp_path, monkeypatch, capsys):
    """On the way through two episodes and more, the file gives the actions that the env gets."""
    script, options = CASES[case]
    run_dir = train(script, tmp_path, *options.split())
    if script is ppo_atari:  # a policy that does not do always the same
        state = script.Checkpoint(run_dir).read()
        state["model"]["head.logits.weight"].normal_()
        state["model"]["head.logits.bias"].copy_(torch.tensor([9.0, 0, 0, 0]))
        torch.save(state, run_dir / "checkpoint.pt")
    args = script.parse_args(["--eval", str(run_dir), "--export-onnx"])
    script.evaluate_run(args)
    assert f"policy: {run_dir / 'policy.onnx'}" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(run_dir / "policy.onnx")
    inputs = [value.name for value in session.get_inputs()]
    model = script.make_model(args)
    model.load_state_dict(script.Checkpoint(run_dir).read()["model"])
    with script.closing(script.make_eval_pool(args, model)) as pool:
        pool.call("start")
        arrays, levels = pool.arrays, script is ppo_multilevel
        game = pool.games.own[0][0] if levels else pool.games.games[0]
        step = ("step", 0) if levels else ("step",)
        seen, rng = set(), np.random.default_rng(0)
        if script is ppo_atari:
            model.bf16 = False  # the file computes in float32
        for _ in range(60):
            if script is ppo_atari:  # more to tell apart than the start of a game
                pictures = rng.integers(0, 256, arrays["obs"].shape)
                arrays["obs"][:] = pictures * (rng.random(pictures.shape) < rng.random())
            feed = {name: arrays[name] for name in inputs}
            if "state" in inputs:  # zeros at an episode's start, else what came out last
                feed["state"] = arrays["next_state"] * ~arrays["ended"][:, None]
            actions, *state = session.run(None, feed)
            model.act(arrays)
            for i, action in enumerate(arrays["actions"]):
                space = game.env.action_space
                expected = ppo.to_env(action, space).astype(space.dtype)
                np.testing.assert_allclose(actions[i], expected, rtol=1e-4, atol=1e-5)
                assert script is ppo_atari or space.contains(expected)
                seen.add(str(expected))
            if state:
                np.testing.assert_allclose(state[0], arrays["next_state"], rtol=1e-4, atol=1e-5)
            pool.call(*step)
    assert len(seen) > 1


def test_onnx_without_the_package(tmp_path, monkeypatch, capsys):
    """One line names the package."""
    run_dir = train(ppo, tmp_path)
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setattr(sys, "argv", ["ppo.py", "--eval", str(run_dir), "--export-onnx"])
    assert ppo.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "onnx" in line


def test_onnx_of_an_env_without_pictures(tmp_path, monkeypatch, capsys):
    """The policy is written all the same; then one line says that there is no film."""
    run_dir = train(ppo, tmp_path, "--env", "envs:Quick-v0")  # no render_mode
    words = ["ppo.py", "--eval", str(run_dir), "--video", "--export-onnx"]
    monkeypatch.setattr(sys, "argv", words)
    assert ppo.main() == 1
    out, err = capsys.readouterr()
    assert "±" in out and f"policy: {run_dir / 'policy.onnx'}" in out
    assert err.count("\n") == 1 and "--video: no film, see README" in err and "Traceback" not in err
    assert onnxruntime.InferenceSession(run_dir / "policy.onnx").get_inputs()[0].name == "obs"
    assert not (run_dir / "video.mp4").exists()


@pytest.mark.parametrize("script", [ppo, ppo_multilevel], ids=lambda script: script.__name__)
def test_sampled_evaluation(script, tmp_path, capsys):
    """--sample plays the policy, not its mode: the same in each evaluation, other than the mode."""
    run_dir = train(script, tmp_path)
    argv = ["--eval", str(run_dir), "--eval-episodes", "3"]
    kinds = [], ["--sample"], ["--sample"]
    mode, *sampled = [script.evaluate_run(script.parse_args([*argv, *kind])) for kind in kinds]
    assert sampled[0].tolist() == sampled[1].tolist() != mode.tolist()
    env = {ppo: "CartPole-v1", ppo_multilevel: "ResSim-v1 level 1"}[script]
    found = f"return {sampled[0].mean():.4f} ± {sampled[0].std():.4f} over 3 episodes of {env}\n"
    assert capsys.readouterr().out.count(found) == 2


class Elsewhere(gym.Wrapper):
    """An env that works in another folder, and whose pictures are grey."""

    def __init__(self, env, folder):
        super().__init__(env)
        self.folder, self.grey = folder, True
        os.chdir(folder)

    def render(self):
        picture = super().render()
        return picture[..., 0] if self.grey else picture


@pytest.mark.parametrize("grey", [False, True])
def test_env_that_changes_the_folder(tmp_path, monkeypatch, capsys, grey):
    """The run's files are where they belong; a picture that is none for a film is an error."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path)

    def make(render_mode=None):
        env = Elsewhere(gym.make("CartPole-v1", render_mode=render_mode), tmp_path / "work")
        env.grey = grey
        return env

    monkeypatch.delitem(gym.registry, "Elsewhere-v0", raising=False)
    gym.register("Elsewhere-v0", make)
    run_dir = train(ppo, "runs", "--env", "Elsewhere-v0", "--eval-every", "1")
    assert run_dir == next((tmp_path / "runs").iterdir())
    assert not [*(tmp_path / "work").iterdir()]
    os.chdir(tmp_path)
    argv = f"--eval runs/{run_dir.name} --eval-episodes 1 --export-onnx --video".split()
    monkeypatch.setattr(sys, "argv", ["ppo.py", *argv])
    assert ppo.main() == (1 if grey else 0)
    assert (run_dir / "policy.onnx").exists() and not [*(tmp_path / "work").iterdir()]
    out, err = capsys.readouterr()
    assert ("video: " in out) == (not grey) and ("uint8 pictures (H, W, 3)" in err) == grey


@pytest.mark.parametrize("option", ["--sample", "--video", "--export-onnx"])
@pytest.mark.parametrize("script", OWN, ids=lambda script: script.__name__)
def test_options_of_an_evaluation(script, capsys, option):
    """They are refused without --eval."""
    with pytest.raises(SystemExit) as exit_info:
        script.parse_args([option])
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert option in line and "--eval" in line


def readme_code(part):
    """Return the Python code in README.md that has this part."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if part in block]
    return code


PLAYED = ["CartPole-v1", "Taxi-v4", "CartPole-v1 --rnn gru"]  # plain, with masks, with memory


@pytest.mark.parametrize("env", PLAYED)
def test_readme_code_loads_a_policy(tmp_path, monkeypatch, env):
    """The lines, with what is said of masks and memory, play the first episode of --eval."""
    run_dir = train(ppo, tmp_path, "--env", *env.split())
    args = ppo.parse_args(["--eval", str(run_dir), "--eval-episodes", "1"])
    expected, code, names = ppo.evaluate_run(args), readme_code("Checkpoint"), {}
    assert code.count("\n") <= 15 and "runs/my-run" in code
    text = " ".join((ROOT / "README.md").read_text().split())
    memory, start, masked = re.search(
        r"With `--rnn` it is `(.*?)`, after `(.*?)` at .*? with masks `(.*?)`", text
    ).groups()
    if "rnn" in env:
        code = code.replace("model.policy(obs)", memory).replace("while", f"{start}\nwhile")
    if "Taxi" in env:
        code = code.replace("model.policy(obs)", masked)
    real = ppo.make_env
    monkeypatch.setattr(ppo, "make_env", lambda *a: gym.wrappers.RecordEpisodeStatistics(real(*a)))
    exec(code.replace("runs/my-run", str(run_dir)), names)
    assert list(names["env"].return_queue) == expected.tolist()


def test_readme_code_loads_a_policy_of_levels(tmp_path):
    """So do they for ppo_multilevel.py with what their comments say."""
    run_dir = train(ppo_multilevel, tmp_path, "--env", "envs:make", "--levels", "1", "2")
    args = ppo_multilevel.parse_args(["--eval", str(run_dir), "--eval-episodes", "1"])
    expected, rewards = ppo_multilevel.evaluate_run(args), []
    code = readme_code("Checkpoint").replace("runs/my-run", str(run_dir))
    code = re.sub(r"import ppo  # or: (.*)", r"\1", code)
    code = re.sub(r"ppo\.make_env\(.*?\)(.*)# levels: (.*)", r"\2\1", code)
    exec(code + "    rewards.append(reward)", {"rewards": rewards})
    assert sum(rewards) == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("coupling", ["step", "noise"])
def test_readme_simulation_trains(tmp_path, coupling):
    """The rod has the same spaces and the same physics on its levels, and trains on two of them."""
    path, names = tmp_path / "my_simulation.py", {}
    path.write_text(readme_code("map_from"))
    exec(path.read_text(), names)
    coarse, fine = names["Rod"](1), names["Rod"](2)
    fine.reset(seed=3)
    coarse.reset(seed=4)
    for _ in range(10):
        coarse.map_from(fine)
        np.testing.assert_allclose(coarse.psi(), fine.psi(), rtol=1e-6)
        rewards = [env.step(np.float32([0.5, -0.5, 0, 1]))[1] for env in (coarse, fine)]
        assert rewards[0] == pytest.approx(rewards[1], rel=0.2)
    options = f"--env {path}:Rod --levels 1 2 --schedule together --coupling {coupling}".split()
    run_dir = train(ppo_multilevel, tmp_path, *options, "--num-steps", "8", "4")
    assert (run_dir / "checkpoint.pt").exists()


def test_readme_simulation_needs_no_more(tmp_path):
    """One level at a time needs neither psi nor map_from; σ is 1 at first."""
    code = readme_code("map_from").partition("    def map_from")[0].replace("psi", "observe")
    (path := tmp_path / "bare.py").write_text(code)
    run_dir = train(ppo_multilevel, tmp_path, "--env", f"{path}:Rod", "--levels", "1", "2")
    config = json.loads((run_dir / "config.json").read_text())
    assert config["options"]["schedule"] == "adaptive" and config["options"]["init_log_std"] == 0
    assert ppo_multilevel.parse_args(["--levels", "1"]).init_log_std == -2.9


SB3 = dict(learning_rate=3e-4, num_steps=2048, update_epochs=10, gamma=0.99, gae_lambda=0.95)
SB3 |= dict(clip_coef=0.2, ent_coef=0.0, vf_coef=2 * 0.5, max_grad_norm=0.5, target_kl=0)
SB3 |= dict(norm_adv="minibatch", clip_vloss=False, anneal_lr=False, hidden=[64, 64])
SB3 |= dict(activation="tanh", shared_net=False, init_log_std=0.0)


def test_readme_options_are_the_defaults_of_sb3(tmp_path):
    """Those of `PPO("MlpPolicy", env)` of Stable-Baselines3 2.9.2, whose batch_size is 64."""
    text = " ".join((ROOT / "tests/benchmarks/README.md").read_text().split())
    options = re.search(r"with N envs, `(.*?)` \(VecNormalize: `(.*?)`", text)
    words = " ".join(options.groups()).replace("(32 N)", "96").replace(" N ", " 3 ").split()
    args = ppo.parse_args([*words, "--log-dir", str(tmp_path)])
    assert {name: getattr(args, name) for name in SB3} == SB3
    assert args.num_envs * args.num_steps / args.num_minibatches == 64
    assert args.norm_obs and args.norm_reward
