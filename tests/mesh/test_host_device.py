"""Memory and threads of the host."""

import gc
from types import SimpleNamespace

import pytest
import torch

from ndtrain.mesh.host_device import host_threads, page_locked, using_threads


class Owner:
    pass


@pytest.fixture
def registered(monkeypatch):
    """address -> bytes, of a stub of CUDA's runtime."""
    known: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        known[address] = size
        return 0

    stub = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=known.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stub)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    return known


def test_page_locked_allocates_exact_bytes_and_frees_them(registered):
    """A 10,000th of an 8B model's master weights and moments (12 N bytes), which PyTorch's allocator makes 1.4 times as
    large."""
    numel = 3 * 8_030_261_248 // 10_000
    owner = Owner()
    buffers = [page_locked(numel, torch.float32, owner), page_locked(0, torch.bfloat16, owner)]
    assert sum(registered.values()) == 4 * numel and not buffers[0].any()
    assert 1 << (4 * numel - 1).bit_length() > 1.35 * 4 * numel
    del owner
    gc.collect()
    assert not registered, "memory that CUDA still knows cannot be freed"


def test_host_threads_follow_cores_ranks_and_user(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with using_threads(1):
        assert (host_threads(cpu), host_threads(gpu)) == (1, 4), "torchrun's OMP_NUM_THREADS=1"
        with using_threads(2):
            assert (host_threads(cpu), host_threads(gpu)) == (2, 2), "the user's"
        assert torch.get_num_threads() == 1
