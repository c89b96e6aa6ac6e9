"""Choice of a rank's GPU, on stubs of `torch.cuda`: by its local rank, or the only one that its process sees."""

import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ndtrain
from ndtrain.checkpoint.saver import _in_background
from ndtrain.config import ConfigError, load_config
from ndtrain.engine.setup import device_of, meet
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.preflight import host
from ndtrain.preflight.report import Ranks, Status
from ndtrain.run.rendezvous import Meeting

PACKAGE = Path(ndtrain.__file__).parent
CFG = load_config(["recipe=llama_debug", "hardware.device=cuda"])


@contextmanager
def gpus(n: int, uuid: str = "GPU-0", current: list | None = None):
    """A process that sees n GPUs. Devices that become a thread's own are appended to `current`."""
    properties = SimpleNamespace(uuid=uuid)
    chosen = [] if current is None else current
    with (
        mock.patch("torch.cuda.is_available", return_value=n > 0),
        mock.patch("torch.cuda.device_count", return_value=n),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch("torch.cuda.get_device_name", return_value="H200"),
        mock.patch("torch.cuda.mem_get_info", return_value=(99 << 30, 100 << 30)),
        mock.patch("torch.cuda.set_device", lambda device: chosen.append((threading.current_thread().name, device))),
    ):
        yield chosen


@pytest.mark.parametrize(
    ("here", "visible", "local_rank", "index"),
    [("8", 8, 3, 3), ("2", 8, 1, 1), ("4", 1, 2, 0), (None, 1, 3, 0)],  # the last two: a GPU for each task of Slurm
)
def test_device_of_gives_each_rank_its_gpu(here, visible, local_rank, index, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if here:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    with gpus(visible) as current:
        assert device_of(CFG, local_rank) == torch.device("cuda", index)
        assert current == [("MainThread", torch.device("cuda", index))]
        assert host.device_of(CFG) == torch.device("cuda", index), "in the preflight too"


def test_device_of_refuses_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with gpus(2), pytest.raises(ConfigError, match="4 ranks on this host but 2 GPUs: lower --nproc-per-node to 2"):
        device_of(CFG, 1)


def join(rank: int, store: dist.Store, visible: int, uuid: str) -> None:
    """Makes the rank meet the two others, without a process group."""
    meeting = Meeting(store, "attempt")
    with gpus(visible, uuid), mock.patch("ndtrain.run.rendezvous.join") as joined:
        meet(CFG, rank, 3, torch.device("cuda", 0), meeting)
    assert joined.call_args.args[:3] == ("nccl", rank, 3)


@pytest.mark.parametrize(
    ("visible", "uuids", "refused"),
    [
        (1, ("GPU-a", "GPU-b", "GPU-c"), None),
        (1, ("GPU-a", "GPU-b", "GPU-b"), "ranks 1 and 2 see only one GPU, and the same one (GPU-b)"),
        (3, ("GPU-a", "GPU-a", "GPU-a"), None),  # each sees all, and its local rank tells which is its own
    ],
)
def test_join_refuses_ranks_that_share_a_gpu(visible, uuids, refused):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    for rank in (2, 1):
        join(rank, store, visible, uuids[rank])
    if refused is None:
        join(0, store, visible, uuids[0])
        return
    with pytest.raises(ConfigError) as error:
        join(0, store, visible, uuids[0])
    assert str(error.value).startswith(refused) and "\n" not in str(error.value)


def test_the_preflight_finds_ranks_that_share_their_only_gpu():
    def facts(uuid: str, visible: int = 1) -> dict:
        with gpus(visible, uuid):
            return host.device_facts(torch.device("cuda", 0), "cuda")

    ranks = Ranks(MeshSpec(("dp",), (3,)))
    ranks.hosts.update({0: "a", 1: "a", 2: "a"})
    own = {r: facts(f"GPU-{r}") for r in range(3)}
    assert host._devices(own, ranks).status == Status.OK
    assert host._devices({r: facts("GPU-a", 3) for r in range(3)}, ranks).status == Status.OK
    row = host._devices(own | {2: facts("GPU-0")}, ranks)
    assert row.status == Status.FAILED and row.notes == ("uses the same GPU as rank 0: rank 2 (a, dp=2)",)


def test_the_checkpoint_thread_is_on_the_gpu_of_its_rank():
    with gpus(4) as current:
        threads = lambda: (list(current), threading.current_thread().name)
        before, name = _in_background(threads, torch.device("cuda", 3)).result(20)
        assert before == [("checkpoint", torch.device("cuda", 3))] and name == "checkpoint"
        assert _in_background(threads, torch.device("cpu")).result(20)[0] == before, "there is nothing to set"


# module that starts threads -> whether it makes them choose their GPU
THREADS = {
    "checkpoint/safetensors_reader.py": False,  # its threads fetch bytes
    "checkpoint/saver.py": True,
    "data/batches.py": True,
    "data/corpora.py": False,
    "data/prepare.py": False,
    "data/progress.py": False,
    "data/workers.py": False,
    "device/heartbeat.py": False,
    "engine/island_wait.py": True,
    "engine/outer_step.py": False,
    "islands/leader.py": False,  # the islands' threads see only tensors on the host
    "islands/reading.py": False,
    "islands/wire.py": False,
    "model/init.py": False,  # `parallel/build.py` does: the model knows no rank
    "preflight/run.py": True,
    "run/launcher.py": False,
    "run/hang_watchdog.py": False,  # it reads results that another thread has set
}


def test_every_thread_is_known_and_chooses_its_gpu():
    sources = {str(p.relative_to(PACKAGE)): p.read_text() for p in PACKAGE.rglob("*.py")}
    starts = {path: text for path, text in sources.items() if re.search(r"\b(Thread|ThreadPoolExecutor)\(", text)}
    assert {path: "use_gpu(" in text for path, text in starts.items()} == THREADS


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_checkpoint_thread_creates_no_context_on_gpu_0():
    """The process uses GPU 1, and the checkpoint thread waits for an event there."""
    script = """
import torch
from ndtrain.checkpoint.saver import _in_background
device = torch.device("cuda", 1)
torch.cuda.set_device(device)
torch.cuda._sleep(10**7)
event = torch.cuda.Event()
event.record()
_in_background(event.synchronize, device).result(60)
raise SystemExit(int(torch._C._cuda_hasPrimaryContext(0)))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0
