"""Setup of every test: one thread a process, a data cache of its own, the marks `full`, `gpu` and `quiet`, and a
budget of time."""

import hashlib
import os
import shutil
import sys
import tempfile
import time

import pytest
from hypothesis import settings

settings.register_profile("ndtrain", deadline=None)  # an example may wait for a busy machine
settings.load_profile("ndtrain")
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: the ranks of a test share two cores
CACHE = tempfile.mkdtemp(prefix="ndtrain-tests-")
os.environ["NDTRAIN_CACHE"] = CACHE


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")
    parser.addoption("--chaos", type=int, default=2, help="of twenty runs that are killed ten times each, how many")
    parser.addoption("--budget", type=float, help="minutes: leave tests out evenly to stay within")
    parser.addoption("--order", help="any word (CI gives the commit): the files run in an order drawn by it")


def pytest_collection_modifyitems(config, items):
    import torch

    order = config.getoption("--order")
    if order:  # --budget leaves out what follows slow files; another order leaves other tests out, so each runs in time
        items.sort(key=lambda item: hashlib.sha256(f"{order} {item.location[0]}".encode()).digest())
    reasons = {} if config.getoption("--full") else {"full": "part of the full sweep: pytest --full"}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device"
    if hasattr(config, "workerinput"):
        reasons["quiet"] = "measures time: run without -n"
    for item in items:
        for mark, reason in reasons.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session):
    session.config.places = {item.nodeid: i for i, item in enumerate(session.items)}
    session.config.began = time.monotonic()


def pytest_runtest_setup(item):
    minutes, places = item.config.getoption("--budget"), item.config.places
    if minutes is None:
        return
    allowed = minutes * (0.1 + 0.9 * places[item.nodeid] / len(places))  # a tenth ahead, then at an even pace
    if time.monotonic() - item.config.began > 60 * allowed:
        pytest.skip(f"left out: behind the pace of --budget {minutes:g} minutes")


@pytest.fixture(autouse=True)
def no_process_group_left():
    """Fails the test that leaves a process group behind, and not the tests that come after it in the same process."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group behind")


def pytest_unconfigure(config):
    shutil.rmtree(CACHE, ignore_errors=True)
