"""What every test runs under: one thread a process, a data cache of its own, and the marks `full` and `gpu`."""

import os
import shutil
import tempfile

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: the ranks of a test share two cores
CACHE = tempfile.mkdtemp(prefix="ndtrain-tests-")
os.environ["NDTRAIN_CACHE"] = CACHE


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")


def pytest_collection_modifyitems(config, items):
    import torch

    reasons = {} if config.getoption("--full") else {"full": "part of the full sweep: pytest --full"}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device"
    for item in items:
        for mark, reason in reasons.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_unconfigure(config):
    shutil.rmtree(CACHE, ignore_errors=True)
