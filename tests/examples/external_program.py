r"""A simulation that is an external program, with input, result and restart files.

    python tests/examples/inspect_simulation.py --env tests/examples/external_program.py:Pipe \
        --levels 1 3 5
    python ppo_multilevel.py --env tests/examples/external_program.py:Pipe --levels 1 3 5 \
        --num-envs 8 --num-steps 10 --num-workers 0 --save-every 1 --hours 0.4

The second command is that of the recorded run, on one core. For a solver of your own leave out
--num-workers, so that as many programs run at once as there are cores, and take the options that
README advises for expensive steps. Then --num-minibatches should leave 50 rows or more in each.

Copy this file if your solver can only be started from the command line. The program is
external_solver.py beside this file: water flows through a pipe of 8 · 2^level cells, and four
heaters shall hold it 10 K above the temperature of the inflow.

What the class does for the program
    Folder: each game has a folder of its own, which `close` removes. The folders are in $TMPDIR.
    State: the restart file is the state. `reset` writes it, and `map_from` reads that of another
    level.
    Time: a program that hangs is killed after `timeout` seconds, with all processes that it has
    started (`mpirun` starts many). These are a process group because of `start_new_session`. The
    new session also keeps Ctrl-C in the terminal from the program: the script ends only after the
    iteration, and a step that is cut short would spoil it.
    Errors: a timeout, an exit code other than 0, missing results and NaN raise RuntimeError. This
    ends the training, with a checkpoint. If actions can make your solver fail, let it raise, and
    train with `--failed-reward R`: then only the episode ends, with the reward R, which must be
    worse than a whole episode.

It works on Linux and macOS. Windows has no `os.killpg`: use `process.kill()` there.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np

TARGET = 10.0  # K


class Pipe(gym.Env):
    """Water in a heated pipe, simulated by a program on one level."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (8,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (4,), np.float32)

    command = (sys.executable, str(Path(__file__).resolve().with_name("external_solver.py")))
    # Seconds for one run of the program: several times the longest step when all workers are busy.
    timeout = 60.0
    safety = 0.5  # time step of the solver as a share of the largest stable one

    def __init__(self, level):
        self.cells = 8 * 2**level
        self.temporary = tempfile.TemporaryDirectory(prefix="pipe_")
        self.folder = Path(self.temporary.name)

    def reset(self, *, seed=None, options=None):
        """Start with eight random temperatures from 0 to 20 K. This does not run the program."""
        super().reset(seed=seed)
        start = 2 * TARGET * self.np_random.random(8)
        self.write_restart(np.repeat(start, self.cells // 8))
        self.t = 0
        return self.psi(), {}

    def step(self, action):
        """Simulate one second. The reward is minus the mean of (T / target − 1)²."""
        heating = 2 * (1 + np.asarray(action, dtype=float))  # (4,), K/s
        inputs = {
            "cells": self.cells,
            "seconds": 1.0,
            "heating": heating.tolist(),
            "target": TARGET,
            "safety": self.safety,
        }
        (self.folder / "input.json").write_text(json.dumps(inputs))
        deviation = self.run_program()
        self.t += 1

        reward = -deviation / TARGET**2
        terminated = False
        truncated = self.t == 10
        return self.psi(), reward, terminated, truncated, {}

    def run_program(self):
        """Run the program once. Returns the deviation that it wrote [K²].

        Raises RuntimeError if the program fails, or if its files are incomplete or not finite.
        """
        results = self.folder / "results.json"
        results.unlink(missing_ok=True)  # the last step's results must not pass for new ones
        stderr = run_in_folder([*self.command, "input.json"], self.folder, self.timeout)

        try:
            deviation = json.loads(results.read_text())["deviation"]
            temperature = self.read_restart()
        except (OSError, ValueError, KeyError) as error:
            raise failure(f"left no results: {error}", stderr) from error
        if not np.isfinite([deviation, *temperature]).all():
            raise failure("left results that are not finite", stderr)
        return deviation

    def read_restart(self):
        """Return the temperature (cells,) [K] in the restart file."""
        text = (self.folder / "restart.json").read_text()
        return np.array(json.loads(text)["temperature"])

    def write_restart(self, temperature):
        """Write a restart file with a temperature (cells,) [K]."""
        text = json.dumps({"temperature": temperature.tolist()})
        (self.folder / "restart.json").write_text(text)

    def psi(self):
        """Return the mean temperature of each eighth of the pipe, in units of the target."""
        parts = self.read_restart().reshape(8, -1)
        return (parts.mean(axis=1) / TARGET).astype(np.float32)

    def map_from(self, other):
        """Take over the state of another level: repeat its cells, or take means of them."""
        temperature = other.read_restart()
        repeats = max(1, self.cells // other.cells)
        fine = np.repeat(temperature, repeats)
        self.write_restart(fine.reshape(self.cells, -1).mean(axis=1))
        self.t = other.t

    def close(self):
        """Remove the folder."""
        self.temporary.cleanup()


def run_in_folder(command, folder, timeout):
    """Run a command to its end. Returns what it wrote to stderr, as bytes.

    Raises RuntimeError after `timeout` seconds, or if the exit code is not 0. When it stops
    waiting before the end, it kills the command with all processes of its group.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        # One thread each: programs run side by side, one on each core. With k threads each set
        # --num-workers to the number of cores / k.
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        try:
            _, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            kill_group(process)
            raise failure(f"was killed after {timeout} s", error.stderr) from error
        except BaseException:  # Ctrl-C for the second time
            kill_group(process)
            raise
    if process.returncode != 0:
        raise failure(f"ended with exit code {process.returncode}", stderr)
    return stderr


def kill_group(process):
    """Kill a process that leads a group, and all others in it."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failure(problem, stderr):
    """Return the RuntimeError for a problem, with the last line that the program wrote."""
    lines = (stderr or b"").decode(errors="replace").split("\n")
    written = [line.strip() for line in lines if line.strip()]
    last = written[-1] if written else "nothing"
    return RuntimeError(f"the program {problem}; the end of its stderr: {last}")
