r"""The pumps of a town's water network in EPANET for a day, on four levels that are no grids.

    pip install wntr==1.5.0
    python tests/examples/inspect_simulation.py --env tests/examples/water_network.py:make \
        --levels 1 2 3 4
    python ppo_multilevel.py --env tests/examples/water_network.py:make --levels 1 2 3 4 \
        --norm-obs --norm-value --hours 0.1
    python tests/examples/use_policy.py RUN_DIR --compare tests/examples/water_network.py:by_price

The recorded runs are those of `water` in tests/benchmarks/learn_ressim.py.

The town is Net3, an example of EPANET that is part of the package wntr: 92 junctions, 3 tanks, and
2 pumps, which bring water from a lake and a river. Electricity is cheap at night, and expensive in
the evening. The tanks store water for these hours.

Levels
    1 Surrogate: a balance of the water in all tanks together, with straight lines for the pumps.
    2 Reduced network: EPANET with 55 junctions, without the branches and loops of small pipes.
    3 Network by hours: EPANET with all junctions. Its time step is an hour.
    4 Network by 30 seconds: the same with a time step of 30 seconds.

What is seen, done and rewarded
    A step is an hour, an episode a day. It starts at midnight with random levels of the tanks and
    a random demand in each hour, the same on all levels.
    The policy sees the levels of the three tanks [ft], the hour, the demand factor of the coming
    hour, its price [$/kWh], and the speeds of the two pumps in the last hour.
    It sets these speeds, from 0 to 1.2 of the nominal ones. A pump below 0.5 is off. `make` has the
    actions from −1 to 1.
    The reward of an hour is −1 for each 10 $ of electricity, and −20 times the share of the wanted
    pressure (40 psi) that is missing, as a mean over time and over the junctions that take water.
    The surrogate has no pressures, and counts how low its tanks are instead. At the end of the day
    each 2,000 ft³ that the tanks have lost since its start give −1, so that it does not pay to
    empty them.

What one has to know of EPANET's toolkit in wntr (1.5.0)
    Each `ENepanet` has a handle of its own, so many networks in a process do not disturb each
    other. That holds for EPANET 2.2 only, which is the default.
    The wrapper lacks EN_setoption, which sets the factor of all demands. It is called here in the
    library itself.
    To open a pump sets its speed to 1. So the status comes first, then the speed.
    A time step ends early when a tank is full or empty.
    After `ENnextH` the tanks have their new levels. Pressures of junctions are still the old ones.
    `ENinitH` has to be told to start its search for flows anew (INITFLOW). Else it starts from
    those of the episode before, and a seed leads to the same episode only within 0.002 ft.
    Warnings, for example of a pump that is too slow to deliver, are logged, and kept in a list that
    only grows.
    `skeletonize` writes temp.inp, temp.rpt and temp.bin into the current folder, unless it has
    `use_epanet=False`. The reduced network is the same with both.
    EPANET has read the input file when `ENopen` returns, so that the file may go. The report is
    not needed, and goes to os.devnull.
"""

import ctypes
import functools
import logging
import os
import tempfile
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import wntr
from scipy.optimize import OptimizeWarning
from wntr.epanet.toolkit import ENepanet
from wntr.epanet.util import EN

# A policy that learns often has pumps too slow to deliver. EPANET would warn in each time step.
logging.getLogger("wntr.epanet.toolkit").setLevel(logging.ERROR)

HOURS = 24  # steps of an episode
HOUR = 3600  # s
PRICE = np.full(HOURS, 0.12)  # $/kWh in each hour
PRICE[0:6] = 0.06
PRICE[16:21] = 0.30

TANKS = ("1", "2", "3")
LOWEST = np.array([0.1, 6.5, 4.0])  # ft, level of each tank
HIGHEST = np.array([32.1, 40.3, 35.5])  # ft
AREA = np.pi / 4 * np.array([85.0, 50.0, 164.0]) ** 2  # ft²

PUMPS = ("10", "335")  # at the lake, at the river
BYPASS = "330"  # of the river's pump: water flows through it by itself, if it is open
FASTEST = 1.2  # of the nominal speed
SLOWEST = 0.5  # a pump below it is off

WANTED_PRESSURE = 40  # psi
PSI_OF_A_FOOT = 0.4333
GALLONS = 7.48  # in a ft³
THIN_PIPE = 16 * 0.0254  # m, of the pipes that the reduced network may leave out

DOLLARS = 10  # that cost 1 of the reward
PRESSURE_WEIGHT = 20  # of an hour without any pressure
MOST_MISSING = 3  # of wanted pressures, at one junction
LOSS_WEIGHT = 0.0005  # of a ft³ that the tanks have lost in the day

TIME_STEPS = {2: HOUR, 3: HOUR, 4: 30}  # s, of the levels in EPANET


@functools.cache
def input_text(level):
    """Return EPANET's input file for a level from 2 to 4."""
    network = wntr.network.WaterNetworkModel("Net3")
    for name in list(network.control_name_list):
        network.remove_control(name)  # the policy takes their place
    if level == 2:
        with warnings.catch_warnings():
            # wntr fits three numbers to the three points of a pump's curve.
            warnings.simplefilter("ignore", OptimizeWarning)
            network = wntr.morph.skeletonize(network, THIN_PIPE, use_epanet=False)

    network.options.time.duration = HOURS * HOUR
    network.options.time.hydraulic_timestep = TIME_STEPS[level]
    network.options.time.report_timestep = HOUR
    network.options.report.status = "NO"  # else each time step writes into the report
    with tempfile.TemporaryDirectory(prefix="water_network_") as folder:
        path = Path(folder) / "net.inp"
        wntr.network.write_inpfile(network, str(path), units="GPM")
        return path.read_text()


class Epanet:
    """One network in EPANET, which is simulated hour by hour."""

    def __init__(self, level):
        self.en = ENepanet(version=2.2)
        with tempfile.TemporaryDirectory(prefix="water_network_") as folder:
            path = Path(folder) / "net.inp"
            path.write_text(input_text(level))
            self.en.ENopen(str(path), os.devnull, "")
        self.tanks = [self.en.ENgetnodeindex(name) for name in TANKS]
        self.pumps = [self.en.ENgetlinkindex(name) for name in PUMPS]
        self.bypass = self.en.ENgetlinkindex(BYPASS)
        nodes = range(1, self.en.ENgetcount(EN.NODECOUNT) + 1)
        self.junctions = [node for node in nodes if self.takes_water(node)]
        self.en.ENopenH()

    def takes_water(self, node):
        """Return whether a node is a junction with a demand."""
        is_junction = self.en.ENgetnodetype(node) == EN.JUNCTION
        return is_junction and self.en.ENgetnodevalue(node, EN.BASEDEMAND) > 0

    def start(self, levels, demand):
        """Start a day with these levels of the tanks (3,) [ft], and a demand factor."""
        for tank, level in zip(self.tanks, levels):
            self.en.ENsetnodevalue(tank, EN.TANKLEVEL, float(level))
        self.set_demand(demand)
        self.en.ENinitH(EN.INITFLOW)
        self.en.errcodelist.clear()
        self.time = 0  # s

    def set_demand(self, factor):
        """Set the factor of all demands."""
        option = ctypes.c_int(EN.DEMANDMULT)
        error = self.en.ENlib.EN_setoption(self.en._project, option, ctypes.c_double(factor))
        if error:
            raise RuntimeError(f"EPANET: error {error} of EN_setoption")

    def set_pumps(self, speeds):
        """Set the speeds of the pumps. The bypass is open if the river's pump is off."""
        for pump, speed in zip(self.pumps, speeds):
            self.en.ENsetlinkvalue(pump, EN.STATUS, float(speed > 0))
            if speed > 0:
                self.en.ENsetlinkvalue(pump, EN.SETTING, float(speed))
        self.en.ENsetlinkvalue(self.bypass, EN.STATUS, float(speeds[1] == 0))

    def simulate_hour(self, speeds, demand):
        """Simulate an hour with these speeds of the pumps and this demand factor.

        Returns the levels of the tanks after it (3,) [ft], the energy of the pumps [kWh], and the
        share of the wanted pressure that is missing, as a mean over junctions and time.
        """
        self.set_demand(demand)
        energy = 0.0
        missing = 0.0
        end = self.time + HOUR
        while self.time < end:
            self.set_pumps(speeds)
            self.en.ENrunH()
            pressures = [self.en.ENgetnodevalue(node, EN.PRESSURE) for node in self.junctions]
            power = sum(self.en.ENgetlinkvalue(pump, EN.ENERGY) for pump in self.pumps)  # kW
            seconds = self.en.ENnextH()
            if seconds == 0:  # the day has ended before
                break

            shares = (WANTED_PRESSURE - np.array(pressures)) / WANTED_PRESSURE
            energy += power * seconds / HOUR
            missing += float(np.clip(shares, 0, MOST_MISSING).mean()) * seconds / HOUR
            self.time += seconds
        pressures = [self.en.ENgetnodevalue(tank, EN.PRESSURE) for tank in self.tanks]
        return np.array(pressures) / PSI_OF_A_FOOT, energy, missing

    def close(self):
        """Free the network. Closing it again does no harm."""
        if self.en.isOpen():
            self.en.ENclose()


class Surrogate:
    """A balance of the water in the tanks, whose levels rise and fall alike.

    The flow through a pump is a straight line in its speed, and its power grows with the speed's
    cube. The numbers were fitted to the network by eye.
    """

    def start(self, levels, demand):
        """Start a day with these levels of the tanks (3,) [ft]."""
        self.levels = levels

    def simulate_hour(self, speeds, demand):
        """Simulate an hour. Returns the same as that of `Epanet`.

        Instead of missing pressure it returns how far the tanks are below a reserve of 3 ft, in
        units of 10 ft.
        """
        lake = 3400 * max(0, speeds[0] - 0.55) / 0.45  # gallons a minute
        river = 14000 * (speeds[1] - 0.4) / 0.6 if speeds[1] > 0 else 8000
        used = 11000 * demand
        gained = (lake + river - used) * 60 / GALLONS  # ft³ in the hour
        energy = 80 * speeds[0] ** 3 + 280 * speeds[1] ** 3  # kWh

        levels = self.levels + gained / AREA.sum()
        missing = float(np.clip((LOWEST + 3 - levels) / 10, 0, MOST_MISSING).mean())
        self.levels = np.clip(levels, LOWEST, HIGHEST)
        return self.levels, energy, missing

    def close(self):
        """Do nothing: a surrogate holds nothing that must be freed."""


class Town(gym.Env):
    """A day of the town's water on one level. See above what is seen, done and rewarded."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (8,), np.float32)
    action_space = gym.spaces.Box(0, FASTEST, (2,), np.float32)

    def __init__(self, level):
        self.net = Surrogate() if level == 1 else Epanet(level)

    def reset(self, *, seed=None, options=None):
        """Start with tanks that are a quarter to three quarters full, and draw the day's demand."""
        super().reset(seed=seed)
        filled = self.np_random.uniform(0.25, 0.75, 3)
        self.levels = LOWEST + (HIGHEST - LOWEST) * filled
        self.first_levels = self.levels
        self.demand = self.draw_demand()
        self.hour = 0
        self.speeds = np.ones(2)
        self.net.start(self.levels, self.demand[0])
        return self.observe(), {}

    def draw_demand(self):
        """Return the demand factor of each hour, and of the one after the end (25,)."""
        noise = np.zeros(HOURS + 1)
        for hour in range(HOURS):
            noise[hour + 1] = 0.8 * noise[hour] + 0.05 * self.np_random.standard_normal()
        return self.np_random.uniform(0.8, 1.15) * np.exp(noise)

    def observe(self):
        """Return what the policy sees."""
        demand = self.demand[self.hour]
        price = PRICE[self.hour % HOURS]
        return np.array([*self.levels, self.hour, demand, price, *self.speeds], np.float32)

    def step(self, action):
        """Simulate an hour with these speeds of the pumps."""
        self.speeds = np.where(np.asarray(action) < SLOWEST, 0.0, action)
        self.levels, energy, missing = self.net.simulate_hour(self.speeds, self.demand[self.hour])
        reward = -energy * PRICE[self.hour] / DOLLARS - PRESSURE_WEIGHT * missing
        self.hour += 1

        # The end is terminated, not truncated: nothing is earned after it, and the policy sees
        # the hour.
        terminated = self.hour == HOURS
        if terminated:
            lost = float(((self.first_levels - self.levels) * AREA).sum())  # ft³
            reward -= LOSS_WEIGHT * max(0.0, lost)
        return self.observe(), reward, terminated, False, {}

    def close(self):
        """Free the network."""
        self.net.close()


def make(level):
    """Return the simulation on a level, with actions from −1 to 1."""
    return gym.wrappers.RescaleAction(Town(level), -1, 1)


def to_action(speeds):
    """Return the action of `make` that sets these speeds of the pumps."""
    return (2 * np.asarray(speeds) / FASTEST - 1).astype(np.float32)


def constant(obs):
    """Keep the speeds of both pumps all day: the best of a grid, on the days of `by_price`."""
    return to_action([0.7, 0.51])


def by_price(obs):
    """Run a pump while the emptiest tank is below a level, which falls with the price.

    The lake's pump always runs, but in expensive hours only if that tank is less than half full.
    The river's pump runs if it is less than 62 % full at night, or 44 % by day, and in no expensive
    hour. The numbers were tuned on level 3, in up to 64 days from other seeds than those of
    evaluations: 300 random tries, then a grid of 54 around the best of them.
    """
    emptiest = ((obs[:3] - LOWEST) / (HIGHEST - LOWEST)).min()  # 0 to 1
    price = obs[5]  # $/kWh
    lake = 0.65 if emptiest < 1.4 - 3 * price else 0
    river = 0.65 if emptiest < 0.8 - 3 * price else 0
    return to_action([lake, river])
