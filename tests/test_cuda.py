"""Tests on a GPU, skipped where there is none: what it computes is what the CPU computes, and runs
go on from one to the other. ppo_multilevel.py computes on the CPU only."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ppo
import ppo_atari

ROOT = Path(__file__).resolve().parent.parent
GPU = "cuda"
LOSSES = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHORT = "--num-envs 4 --num-minibatches 2 --update-epochs 2 --num-iterations 2 --quiet".split()
CARTPOLE = "--env CartPole-v1 --num-steps 32 --eval-every 1 --eval-episodes 2"
CASES = {
    "CartPole": (ppo, CARTPOLE),
    "normalisers": (ppo, f"{CARTPOLE} --norm-obs --norm-reward --norm-value --adaptive-lr 0.01"),
    "GRU": (ppo, f"{CARTPOLE} --rnn gru --rnn-size 8"),
    "Pendulum": (ppo, "--env Pendulum-v1 --num-steps 32"),
    "Breakout": (ppo_atari, "--num-steps 16 --precision fp32 --eval-every 2 --eval-episodes 1"),
}


def train(module, options, folder, device):
    """Return the run of a training on a device."""
    words = [*SHORT, *options.split(), "--log-dir", str(folder), "--device", device]
    return module.train(module.parse_args(words))


@pytest.mark.parametrize("case", CASES)
def test_gpu_computes_what_the_cpu_does(case, tmp_path):
    """With the same noise both take the same actions, and their updates go the same way."""
    module, options = CASES[case]
    runs = [train(module, options, tmp_path, device) for device in ("cpu", GPU)]
    torch.manual_seed(runs[0].args.seed)
    start, on_cpu, on_gpu = [
        torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
        for model in (module.make_model(runs[0].args), *(run.model for run in runs))
    ]
    assert runs[1].model.device.type == GPU
    assert (on_gpu - on_cpu).norm() < 0.5 * (on_cpu - start).norm()
    rows = [first_update(run.history) for run in runs]
    assert rows[0].keys() == rows[1].keys()  # with an episodic_return if an episode has ended
    for name in {*LOSSES, "episodic_return"} & rows[0].keys():
        assert rows[1][name] == pytest.approx(rows[0][name], 0.02, 2e-3), name


def first_update(rows):
    """Return the first row of an update."""
    return next(row for row in rows if row.get("policy_loss"))


@pytest.mark.parametrize("there, back", [("cpu", GPU), (GPU, "cpu")])
@pytest.mark.parametrize("case", CASES)
def test_run_goes_on_on_another_device(case, there, back, tmp_path):
    """A run's iterations on one device are followed by those on another; both can play it."""
    module, options = CASES[case]
    run_dir = train(module, options, tmp_path, there).run_dir
    words = ["--resume", str(run_dir), "--device", back, "--num-iterations", "3", "--quiet"]
    run = module.train(module.parse_args(words))
    assert run.model.device.type == back and run.iteration == 3
    for device in ("cpu", GPU):
        words = ["--eval", str(run_dir), "--device", device, "--eval-episodes", "2"]
        assert len(module.evaluate_run(module.parse_args(words))) == 2


@pytest.mark.parametrize("target_kl", ["1e-9", "1"])
def test_atari_takes_the_gpu_and_bfloat16(target_kl, tmp_path):
    """--device auto is the GPU for Atari; compiled, it learns the same numbers, up to rounding,
    and ends an update as early."""
    words = [*SHORT, "--num-steps", "16", "--log-dir", str(tmp_path), "--target-kl", target_kl]
    losses = []
    for option in ("--no-compile", "--compile"):
        run = ppo_atari.train(ppo_atari.parse_args([*words, option]))
        assert run.model.device.type == GPU and run.model.bf16
        losses.append([first_update(run.history)[name] for name in LOSSES])
    assert losses[0] == pytest.approx(losses[1], rel=0.05, abs=0.02)


@pytest.mark.parametrize(
    "script, ranks, device", [("ppo", 1, GPU), ("ppo_atari", 1, GPU), ("ppo", 2, "cpu")]
)
def test_torchrun(script, ranks, device, tmp_path):
    """One rank does on the GPU what the script does alone; two use the CPU beside a GPU."""
    module, options = CASES["CartPole" if script == "ppo" else "Breakout"]
    words = [*SHORT, *options.split(), "--device", device, "--log-dir", str(tmp_path)]
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split()
    rows = []
    for name, start in {"alone": [], "ranks": torchrun}.items():
        call = [sys.executable, *start, f"{script}.py", *words, "--run-name", name]
        subprocess.run(call, cwd=ROOT, check=True, timeout=300)
        with (tmp_path / name / "progress.csv").open() as file:
            row = first_update([*csv.DictReader(file)])
        rows.append([float(row[name]) for name in LOSSES])
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["device"] == device
    assert rows[0] == pytest.approx(rows[1], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("module", [ppo, ppo_atari])
def test_nccl_takes_what_ranks_exchange(module, tmp_path, monkeypatch):
    """In a group of one: what several make of it is seen with gloo, in test_ranks.py."""
    group = {"init_method": f"file://{tmp_path}/group", "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl", **group)
    monkeypatch.setattr(module, "NUM_RANKS", 2)  # both of which are this one
    try:
        assert module.averaged(torch.tensor([6.0, 4.0], device=GPU)).tolist() == [3, 2]
        assert module.gathered_objects({"a": [1]})[0] == {"a": [1]}
    finally:
        dist.destroy_process_group()
