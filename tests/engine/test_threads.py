"""The number of threads of a rank on the CPU."""

import pytest
import torch

from ndtrain.config import load_config, resolve
from ndtrain.device.cores import THREADS_ARE_A_DEFAULT
from ndtrain.engine.threads import PAYS_FROM, largest_matmul, set_threads
from ndtrain.run import torchrun

CPU = torch.device("cpu")
SMALL, LARGE = ["recipe=llama_debug"], ["recipe=llama_small"]
CASES = {  # overrides, OMP_NUM_THREADS -> threads that PyTorch has before -> after
    "a small model": (SMALL, None, 8, 1),
    "a larger model": (LARGE, None, 8, 8),
    "a larger model with one token a step": ([*LARGE, "train.seq_len=1", "train.micro_batch=1"], None, 8, 1),
    "a small model with a large microbatch": (
        [*SMALL, "train.global_batch=4096", "train.micro_batch=4096"],
        None,
        8,
        8,
    ),
    "OMP_NUM_THREADS wins": (SMALL, "8", 8, 8),
    "hardware.threads wins": ([*SMALL, "hardware.threads=3"], "8", 8, 3),
    "hardware.threads of a larger model": ([*LARGE, "hardware.threads=1"], None, 8, 1),
}


@pytest.fixture
def threads(monkeypatch):
    """PyTorch's number of threads: a list, whose last element is the current one."""
    numbers: list[int] = [1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    for name in ("OMP_NUM_THREADS", THREADS_ARE_A_DEFAULT):
        monkeypatch.setenv(name, "")  # so that what a test sets is gone after it
        monkeypatch.delenv(name)
    return numbers


@pytest.mark.parametrize("case", CASES)
def test_set_threads_uses_one_thread_for_small_matmuls(case, threads, monkeypatch):
    overrides, variable, before, after = CASES[case]
    threads.append(before)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    set_threads(resolve(load_config(overrides), 1), CPU)
    assert threads[-1] == after


def test_set_threads_ignores_omp_default_of_torchrun(threads, monkeypatch):
    monkeypatch.setattr(torchrun, "cpu_cores", lambda: 8)
    torchrun.set_threads(2)
    threads.append(4)
    set_threads(resolve(load_config(SMALL), 1), CPU)
    assert threads[-1] == 1


def test_set_threads_keeps_threads_of_gpu_rank(threads):
    threads.append(8)
    set_threads(resolve(load_config(SMALL), 1), torch.device("cuda"))
    assert threads[-1] == 8


def test_largest_matmul_halves_with_tp_2():
    one = largest_matmul(resolve(load_config(SMALL), 1))
    two = largest_matmul(resolve(load_config([*SMALL, "mesh.tp=2"]), 2))
    assert one == 128 * 64 * 176 and two == one // 2 and one < PAYS_FROM
