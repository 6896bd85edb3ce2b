"""Steps per second of ppo.py and of Stable-Baselines3's PPO, recorded in results/speed_ppo.csv.

    pip install stable-baselines3 "gymnasium[mujoco]"
    python tests/benchmarks/speed_ppo.py

Both get the same numbers and one thread; they run in turn, each run in a process of its own. A row
has the median of both in steps per second over the whole training (env, policy, update, logging;
neither start nor imports), and the median, lowest and highest ratio of a pair of runs.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "speed_ppo.csv"

# env, num_envs, num_steps, num_minibatches, update_epochs, total_timesteps; of ours only: number of
# workers, whether rollouts run the policy in NumPy
CASES = {
    "CartPole-v1": ("CartPole-v1", 4, 128, 4, 4, 100_000, 0, True),
    "CartPole-v1, policy in torch": ("CartPole-v1", 4, 128, 4, 4, 100_000, 0, False),
    "HalfCheetah-v5": ("HalfCheetah-v5", 8, 2048, 32, 10, 98_304, 0, True),
    "HalfCheetah-v5, 2 workers": ("HalfCheetah-v5", 8, 2048, 32, 10, 98_304, 2, True),
}
COLUMNS = ("case", "ours", "sb3", "ratio", "lowest", "highest", "pairs", "versions")


def ours(env, num_envs, num_steps, num_minibatches, update_epochs, total_timesteps, workers, fast):
    """Return the steps per second of ppo.py, and its versions."""
    sys.path.insert(0, str(ROOT))
    import torch._dynamo  # noqa: F401, Adam and SummaryWriter import them: imports do not count
    import torch.utils.tensorboard  # noqa: F401

    import ppo

    if not fast:
        ppo.sampler = lambda model: model.act
    options = f"--env {env} --num-envs {num_envs} --num-steps {num_steps} --quiet "
    options += f"--num-minibatches {num_minibatches} --update-epochs {update_epochs} "
    options += f"--total-timesteps {total_timesteps} --num-workers {workers}"
    with tempfile.TemporaryDirectory() as folder:
        args = ppo.parse_args([*options.split(), "--log-dir", folder])
        started = time.perf_counter()
        run = ppo.train(args)
    return run.history[-1]["global_step"] / (time.perf_counter() - started), ppo.versions()


def sb3(env, num_envs, num_steps, num_minibatches, update_epochs, total_timesteps, *_):
    """Return the steps per second of Stable-Baselines3 with the same numbers, and its version."""
    import stable_baselines3
    import torch
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    model = stable_baselines3.PPO(
        "MlpPolicy",
        make_vec_env(env, num_envs, seed=1),
        n_steps=num_steps,
        batch_size=num_envs * num_steps // num_minibatches,
        n_epochs=update_epochs,
        learning_rate=2.5e-4,
        clip_range_vf=0.2,
        ent_coef=0.01,
        device="cpu",
        seed=1,
    )
    started = time.perf_counter()
    model.learn(total_timesteps)
    seconds = time.perf_counter() - started
    return model.num_timesteps / seconds, {"stable_baselines3": stable_baselines3.__version__}


def measure(who, case):
    """Return what `who` returns for a case, in a process of its own."""
    call = [sys.executable, "-W", "ignore", __file__, "--only", who, case]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="runs of each of the two per case")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        who, case = args.only
        print(json.dumps({"ours": ours, "sb3": sb3}[who](*CASES[case])))
        return
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for case in CASES:
            pairs = [[measure(who, case) for who in ("ours", "sb3")] for _ in range(args.pairs)]
            ratios = [mine[0] / peers[0] for mine, peers in pairs]
            row = {"case": case, "pairs": args.pairs, "ratio": f"{statistics.median(ratios):.2f}"}
            row |= {"lowest": f"{min(ratios):.2f}", "highest": f"{max(ratios):.2f}"}
            for i, who in enumerate(("ours", "sb3")):
                row[who] = round(statistics.median(pair[i][0] for pair in pairs))
            row["versions"] = json.dumps(pairs[0][0][1] | pairs[0][1][1])
            writer.writerow(row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
