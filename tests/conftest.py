"""Settings of the tests: where the scripts are, and which tests run only on request."""

import gc
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.fsync = lambda file: None  # no test cuts the power, and checkpoints of 20 MB take their time


def pytest_addoption(parser):
    """Add --slow."""
    parser.addoption("--slow", action="store_true", help="also learning runs and more faults")


def pytest_configure(config):
    """Register the marker of the learning runs; silence a warning that is not about the scripts."""
    config.addinivalue_line("markers", "slow: takes long, as a learning run does; only with --slow")
    config.addinivalue_line(
        "filterwarnings", r"ignore:.*The environment ResSim.* is out of date:DeprecationWarning"
    )


def pytest_collection_finish(session):
    """Keep what is imported out of garbage collections, which measured costs begin with."""
    import torch._dynamo  # noqa: F401, Adam and SummaryWriter would import them later
    import torch.utils.tensorboard  # noqa: F401

    gc.freeze()


def pytest_collection_modifyitems(config, items):
    """Skip the tests marked slow unless asked for."""
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow, runs with --slow"))
