r"""The wells of a waterflood in OPM Flow, an industrial reservoir simulator, on three levels.

    pip install opm==2026.4 opm-simulators==2026.4                    # Linux, x86-64
    export OMP_NUM_THREADS=1
    python tests/examples/inspect_simulation.py --env tests/examples/opm_flow.py:Flow \
        --levels 1 2 3
    python ppo_multilevel.py --env tests/examples/opm_flow.py:Flow --levels 1 2 3 \
        --num-envs 40 --num-steps 16 --failed-reward -1 --hours 0.75 \
        --learning-rate 3e-4 --update-epochs 10 --init-log-std -1 --norm-value --no-shared-net \
        --hidden 64 64 --ent-coef 0 --target-kl 0
    python tests/examples/use_policy.py RUN_DIR \
        --compare tests/examples/opm_flow.py:against_water

Four injectors on the left and four producers on the right of a square layer of streaky rock, which
each episode draws anew. Level 1, 2 and 3 have 10, 20 and 40 cells a side. The rock is always drawn
on the finest grid; a coarse cell has the geometric mean of the permeabilities in it.

An episode has eight control steps of 100 days. In each of them an eighth of the pore volume is
injected and as much produced. The policy says how these rates are shared among the wells. It sees
the wells' pressures, the producers' water cuts and the time. The reward is the oil that is
produced, less a price for the water, in pore volumes.

What one has to know of OPM's Python bindings (2026.4)
    `BlackOilSimulator` wants three phases, else an assertion ends the process. So there is a gas,
    which never appears.
    The options of the first simulator in a process hold for all that follow, its folder too. So
    each env has its input file, and its results beside it, in a folder of its own. The first
    input file must stay where it was, even if it is empty by then.
    Several simulators in one process, stepped in turn, give the same bits as each one alone.
    They print on the file descriptor 1, past Python.
    A step that does not converge raises RuntimeError, and other simulators go on.
    What wells produce is not in the bindings. It is in a file that is written after each step.
"""

import ctypes
import os
import shutil
import sys
import tempfile
import weakref
from contextlib import contextmanager
from pathlib import Path

import gymnasium as gym
import numpy as np
from opm.io.ecl import ESmry
from opm.io.ecl_state import EclipseState
from opm.io.parser import Parser
from opm.io.schedule import Schedule
from opm.io.summary import SummaryConfig
from opm.simulators import BlackOilSimulator
from scipy.ndimage import gaussian_filter

FINEST = 40  # cells a side
SIDE = 400.0  # m
HEIGHT = 10.0  # m
POROSITY = 0.2
PORE_VOLUME = SIDE**2 * HEIGHT * POROSITY  # m³

STEPS = 8  # control steps of an episode
DAYS = 100.0  # of a control step
RATE = PORE_VOLUME / (STEPS * DAYS)  # m³ a day, of all injectors together
WATER_PRICE = 0.25  # m³ of oil for a m³ of produced water

FIRST_OIL = 0.8  # share of the pores that is oil at first
PRESSURE = 250.0  # bar, at first
LOWEST = 50.0  # bar, in a producer
HIGHEST = 600.0  # bar, in an injector

INJECTORS = ["I0", "I1", "I2", "I3"]
PRODUCERS = ["P0", "P1", "P2", "P3"]
WELLS = INJECTORS + PRODUCERS

OPTIONS = [
    "--enable-terminal-output=false",
    "--enable-async-ecl-output=false",
    "--threads-per-process=1",
]
first_input_file = None  # of this process; OPM looks for it ever after

DECK = """RUNSPEC
DIMENS
 {n} {n} 1 /
OIL
WATER
GAS
METRIC
START
 1 'JAN' 2026 /
WELLDIMS
 8 1 1 8 /
TABDIMS
/
UNIFOUT
GRID
DX
 {cells}*{dx} /
DY
 {cells}*{dx} /
DZ
 {cells}*{HEIGHT} /
TOPS
 {cells}*2000 /
PORO
 {cells}*{POROSITY} /
PERMX
 {permeability} /
COPY
 PERMX PERMY /
 PERMX PERMZ /
/
PROPS
SWOF
 {saturations} /
SGOF
 0    0 1 0
 0.7  1 0 0
 0.75 1 0 0 /
PVTW
 250 1.0 4e-5 0.5 0 /
PVDO
 100 1.02 2.0
 400 0.99 2.0 /
PVDG
 100 0.01   0.02
 400 0.0025 0.03 /
ROCK
 250 4e-5 /
DENSITY
 850 1000 1 /
SOLUTION
PRESSURE
 {cells}*{PRESSURE} /
SWAT
 {cells}*0.2 /
SGAS
 {cells}*0 /
SUMMARY
FOPT
FWPT
WBHP
/
WWCT
/
SCHEDULE
RPTRST
 BASIC=0 /
WELSPECS
 {wells}
/
COMPDAT
 {connections}
/
{rates}
TSTEP
 {STEPS}*{DAYS} /
END
"""


def rates(action):
    """Return OPM's keywords for an action (8,): shares of the rate are as e^(2 action)."""
    weights = np.exp(2 * np.asarray(action, float)).reshape(2, 4)
    injected, produced = RATE * weights / weights.sum(axis=1, keepdims=True)
    lines = ["WCONINJE"]
    for name, rate in zip(INJECTORS, injected):
        lines.append(f" {name} WATER OPEN RATE {rate:.5f} 1* {HIGHEST} /")
    lines += ["/", "WCONPROD"]
    for name, rate in zip(PRODUCERS, produced):
        lines.append(f" {name} OPEN LRAT 3* {rate:.5f} 1* {LOWEST} /")
    return "\n".join([*lines, "/", ""])


def input_file(permeability):
    """Return the text of OPM's input file for a permeability field (n, n) in millidarcy."""
    n = len(permeability)
    saturations = []
    for s in np.linspace(0, 1, 21):  # water, its and the oil's relative permeability
        saturations.append(f"{0.2 + 0.6 * s:.4f} {0.4 * s**2:.6f} {(1 - s) ** 2:.6f} 0")
    wells = []
    connections = []
    for name in WELLS:
        x = 0.05 if name in INJECTORS else 0.95  # of the side
        y = (int(name[1]) + 0.5) / 4
        cell = f"{int(x * n) + 1} {int(y * n) + 1}"
        phase = "WATER" if name in INJECTORS else "OIL"
        wells.append(f"{name} G {cell} 1* {phase} /")
        connections.append(f"{name} {cell} 1 1 OPEN 1* 1* 0.2 /")
    rows = [" ".join(f"{k:.6g}" for k in row) for row in permeability]
    return DECK.format(
        n=n,
        cells=n * n,
        dx=SIDE / n,
        HEIGHT=HEIGHT,
        POROSITY=POROSITY,
        PRESSURE=PRESSURE,
        STEPS=STEPS,
        DAYS=DAYS,
        permeability="\n ".join(rows),
        saturations="\n ".join(saturations),
        wells="\n ".join(wells),
        connections="\n ".join(connections),
        rates=rates(np.zeros(8)),
    )


@contextmanager
def printing_to(path):
    """Let what C++ prints meanwhile go to a file."""
    sys.stdout.flush()
    kept = os.dup(1)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.close(file)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


class Flow(gym.Env):
    """The waterflood on one level."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (13,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (8,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 2}

    def __init__(self, level, render_mode=None):
        self.render_mode = render_mode
        self.n = 10 * 2 ** (level - 1)
        if FINEST % self.n:
            raise ValueError(f"level {level} has {self.n} cells a side, no part of {FINEST}")
        self.simulator = None
        self.folder = Path(tempfile.mkdtemp(prefix="opm_flow_"))
        self.remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def draw_permeability(self):
        """Return a field (n, n) in millidarcy, with streaks along x."""
        noise = self.np_random.standard_normal((FINEST, FINEST))
        z = gaussian_filter(noise, (FINEST / 16, FINEST / 4), mode="reflect")
        z = 2 * (z - z.mean()) / z.std()
        width = FINEST // self.n
        blocks = z.reshape(self.n, width, self.n, width)
        return 200 * np.exp(blocks.mean(axis=(1, 3)))

    def reset(self, *, seed=None, options=None):
        """Start a simulation on new rock."""
        super().reset(seed=seed)
        file = self.folder / "CASE.DATA"
        file.write_text(input_file(self.draw_permeability()))
        self.simulator = None  # frees the one before
        keep_first(file)
        with printing_to(self.folder / "stdout"):
            deck = Parser().parse(str(file))
            state = EclipseState(deck)
            self.schedule = Schedule(deck, state)
            summary = SummaryConfig(deck, state, self.schedule)
            parts = (deck, state, self.schedule, summary)
            self.simulator = BlackOilSimulator(*parts, args=OPTIONS)
            failed = self.simulator.step_init()
        if failed:
            raise RuntimeError("OPM: " + (self.folder / "stdout").read_text()[-2000:])
        self.steps = 0
        self.totals = np.zeros(2)  # m³ of oil, of water
        return np.zeros(13, np.float32), {}

    def step(self, action):
        """Take a control step. RuntimeError if OPM does not converge."""
        with printing_to(self.folder / "stdout"):
            self.schedule.insert_keywords(rates(action), self.simulator.current_step())
            self.simulator.step()
        self.steps += 1
        summary = ESmry(str(self.folder / "CASE.SMSPEC"))

        before = self.totals
        self.totals = np.array([summary["FOPT"][-1], summary["FWPT"][-1]])
        oil, water = (self.totals - before) / PORE_VOLUME
        reward = float(oil - WATER_PRICE * water)

        pressures = np.array([summary[f"WBHP:{name}"][-1] for name in WELLS])
        water_cuts = [summary[f"WWCT:{name}"][-1] for name in PRODUCERS]
        time = self.steps / STEPS
        obs = np.array([*(pressures - PRESSURE) / 100, *water_cuts, time], np.float32)
        # The end is terminated, not truncated: nothing is earned after it, and the policy sees
        # the time.
        return obs, reward, self.steps == STEPS, False, {}

    def oil(self):
        """Return the share of the pores that is oil in each cell, (n, n): axis 0 is y, axis 1 x."""
        return self.simulator.get_fluidstate_variable("So").reshape(self.n, self.n)

    def render(self):
        """Return a picture (height, width, 3): oil is brown, the water that replaces it blue."""
        brown = np.array([84, 52, 30])
        blue = np.array([44, 123, 214])
        left = (self.oil() / FIRST_OIL)[:, :, np.newaxis].clip(0, 1)
        picture = left * brown + (1 - left) * blue
        zoom = 320 // self.n  # pixels of a cell
        return picture.astype(np.uint8).repeat(zoom, axis=0).repeat(zoom, axis=1)

    def close(self):
        """Remove the folder."""
        self.simulator = None
        self.remove()


def keep_first(file):
    """Have the input file of this process's first simulator exist, be it empty."""
    global first_input_file
    if first_input_file is None:
        first_input_file = file
    first_input_file.parent.mkdir(exist_ok=True)
    first_input_file.touch()


def equal(obs):
    """Share the rates equally."""
    return np.zeros(8)


def against_water(obs):
    """Take less from producers that make water, and inject less opposite of them."""
    water_cuts = obs[8:12]
    return np.tile(1 - 2 * water_cuts, 2)
