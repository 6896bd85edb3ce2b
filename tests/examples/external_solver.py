"""Water in a heated pipe: the program that external_program.py runs.

    python external_solver.py input.json

It stands for a solver that you have as a program only. It works in the current folder and uses
nothing but Python's own library, so that it starts in a few hundredths of a second.

Equation
    ∂T/∂t + u ∂T/∂x = D ∂²T/∂x² + q(x),  0 < x < 1 m

    T [K] is the temperature above that of the water that flows in at x = 0. The speed u is
    0.1 m/s and the diffusivity D is 0.01 m²/s. Four heaters warm a quarter of the pipe each, with
    q [K/s]. The finite volumes have upwind fluxes, and the time steps are explicit.

Files
    input.json     cells; seconds to simulate; heating (4,) [K/s]; target [K]; safety, the time
                   step as a share of the largest stable one. A safety above 1 diverges, and 0
                   never ends.
    restart.json   temperature (cells,) [K], which is read and then overwritten.
    results.json   deviation, the mean of (T − target)² over pipe and time [K²]; outflow [K].

Like many solvers it ends with exit code 0 when it has diverged, and leaves NaN in its files.
"""

import json
import math
import sys

LENGTH = 1.0  # m
SPEED = 0.1  # m/s
DIFFUSIVITY = 0.01  # m²/s


def rates(temperature, heating):
    """Return dT/dt [K/s] of all cells. Both arguments have an entry for each cell."""
    width = LENGTH / len(temperature)
    fluxes = [0.0]  # K·m/s at the faces: water of 0 K flows in
    for left, right in zip(temperature, temperature[1:]):
        fluxes.append(SPEED * left - DIFFUSIVITY * (right - left) / width)
    fluxes.append(SPEED * temperature[-1])

    changes = []
    for entering, leaving, heat in zip(fluxes, fluxes[1:], heating):
        changes.append((entering - leaving) / width + heat)
    return changes


def solve(temperature, heating, seconds, target, safety):
    """Simulate some seconds with four heaters. Returns the temperature and the deviation [K²]."""
    cells = len(temperature)
    width = LENGTH / cells
    time_step = safety / (2 * DIFFUSIVITY / width**2 + SPEED / width)
    heating_of_cells = [heating[4 * i // cells] for i in range(cells)]

    time = 0.0
    deviation = 0.0
    while time < seconds:
        dt = min(time_step, seconds - time)
        changes = rates(temperature, heating_of_cells)
        temperature = [value + dt * change for value, change in zip(temperature, changes)]
        squares = [(value - target) * (value - target) for value in temperature]
        deviation += dt / seconds * sum(squares) / cells
        time += dt
    return temperature, deviation


def main(path):
    """Read the input and the restart file, simulate, and write the restart file and results."""
    with open(path) as file:
        inputs = json.load(file)
    with open("restart.json") as file:
        temperature = json.load(file)["temperature"]
    cells = inputs.pop("cells")
    if len(temperature) != cells:
        sys.exit(f"restart.json has {len(temperature)} cells, the input {cells}")

    temperature, deviation = solve(temperature, **inputs)
    if not math.isfinite(deviation):
        print("warning: the solution has diverged", file=sys.stderr)

    with open("restart.json", "w") as file:
        json.dump({"temperature": temperature}, file)
    with open("results.json", "w") as file:
        json.dump({"deviation": deviation, "outflow": temperature[-1]}, file)


if __name__ == "__main__":
    main(sys.argv[1])
