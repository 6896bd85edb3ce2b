"""A reservoir whose thief zones are cut by sealing faults: --env tests/benchmarks/faults.py:make

It is ResSim-v4's reservoir, with faults that are one cell of the finest grid wide. Coarse grids
take the mean permeability of their cells, so water flows through the faults there.
"""

import numpy as np

from ppo_multilevel import CASES, MILLIDARCY, ResSim


def fields(case, n, seed):
    """Draw n permeability fields (n, 64, 64) of ResSim-v4, in m², each with three faults.

    A fault is a wall of half the field's height in a random column, with exp(-2) millidarcy.
    """
    k = CASES["ResSim-v4"].fields(case, n, seed)
    rng = np.random.default_rng([seed, 1])
    ny, nx = case.grids[-1]
    for field in k:
        for column in rng.integers(4, nx - 4, size=3):
            first = rng.integers(ny // 2 + 1)
            field[first : first + ny // 2, column] = MILLIDARCY * np.exp(-2.0)
    return k


CASE = CASES["ResSim-v4"]._replace(fields=fields)


def make(level, evaluation=False, validation=False):
    """Return the reservoir on a level, 1 to 4: 8² to 64² cells."""
    return ResSim(CASE, level, evaluation, validation)
