"""Steps per second of ppo_atari.py and of Stable-Baselines3's PPO, in results/speed_atari.csv.

    pip install stable-baselines3
    python tests/benchmarks/speed_atari.py

Breakout, 8 games × 128 steps, 4 epochs × 4 minibatches, both with the same numbers, all cores and
the GPU, if there is one. They run in turn, each run in a process of its own. A row has the median
of both in steps per second over the whole training (games, policy, update, logging; neither start
nor compilation: the first iterations do not count), and the median, lowest and highest ratio of a
pair of runs.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import pairs

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "speed_atari.csv"

# Options of ours, Stable-Baselines3's vectorised env.
CASES = {
    "default": ("", "SubprocVecEnv"),
    "fp32": ("--precision fp32", "SubprocVecEnv"),
    "bf16": ("--precision bf16", "SubprocVecEnv"),
    "default, games in one process": ("--num-workers 0", "DummyVecEnv"),
    "bf16, compiled": ("--precision bf16 --compile", "SubprocVecEnv"),
}
WARM_UP, ITERATIONS = 3, 12


def ours(options, _):
    """Return the steps per second of ppo_atari.py, and the versions."""
    sys.path.insert(0, str(ROOT))
    import ppo_atari

    with tempfile.TemporaryDirectory() as folder:
        options += f" --env Breakout --num-iterations {WARM_UP + ITERATIONS} --quiet"
        args = ppo_atari.parse_args([*options.split(), "--log-dir", folder])
        started, log = [], ppo_atari.Run.log

        def timed_log(run, row):
            log(run, row)
            if row["iteration"] == WARM_UP:
                started.append(time.perf_counter())

        ppo_atari.Run.log = timed_log
        run = ppo_atari.train(args)
        seconds = time.perf_counter() - started[0]
    versions = json.loads(pairs.origin()["versions"])
    precision = "bf16" if run.model.bf16 else "fp32"
    return ITERATIONS * 1024 / seconds, versions | {"precision": precision}


def sb3(_, vec_env):
    """Return the steps per second of Stable-Baselines3 with the same numbers, and its version."""
    import stable_baselines3
    from stable_baselines3.common import vec_env as vec_envs
    from stable_baselines3.common.env_util import make_atari_env

    env = make_atari_env(
        "ale_py:BreakoutNoFrameskip-v4", 8, seed=1, vec_env_cls=getattr(vec_envs, vec_env)
    )
    model = stable_baselines3.PPO(
        "CnnPolicy",
        vec_envs.VecFrameStack(env, 4),
        n_steps=128,
        batch_size=256,
        n_epochs=4,
        learning_rate=2.5e-4,
        clip_range=0.1,
        clip_range_vf=0.1,
        ent_coef=0.01,
        vf_coef=0.5,
        device="auto",
        seed=1,
    )
    model.learn(WARM_UP * 1024)
    started = time.perf_counter()
    model.learn(ITERATIONS * 1024, reset_num_timesteps=False)
    seconds = time.perf_counter() - started
    env.close()
    return ITERATIONS * 1024 / seconds, {"stable_baselines3": stable_baselines3.__version__}


if __name__ == "__main__":
    functions = {"ours": ours, "sb3": sb3}
    pairs.main(__file__, __doc__, CASES, functions, RESULTS, {})
