"""`python -m ndtrain.bench peers`: ours and the peers do the same work, figures are there, mistakes are one line."""

import json
import math
import time

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lab.peers import attention, pipelining
from lab.peers.implementations import IMPLEMENTATIONS
from lab.peers.run import SHAPES, Case, Options, Training, _require_equal_losses, config_of, make_batches
from ndtrain.bench.__main__ import main
from ndtrain.config import world_from_env
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.mesh.sequence_sharding import SequenceSharding
from tests.lib.ranks import run_ranks

QUICK = ["shape=tiny", "rounds=2", "steps=1", "warmup=1"]
RATIO = {"median", "q1", "q3", "min", "max", "best"}
# zero -> all-gathers and reduce-scatters of a step of 2 microbatches; units: 2 blocks, and the root, which stays
COLLECTIVES = {1: (3, 3), 2: (3, 6), 3: (10, 6)}
# sequence parallelism -> all-gathers, reduce-scatters and all-reduces of a step of one microbatch and 2 blocks. Either
# way round each block needs 2 exchanges, embedding and head one; all-reduces beside those: 3 of the loss, 1 of the
# norm, and with sequence parallelism the gradients of 5 norms
TP_COLLECTIVES = {False: (0, 0, 4 * 2 + 2 + 4), True: (4 * 2 + 2, 4 * 2 + 2, 5 + 4)}
CP = ["axis=cp", "seq_len=64", "heads=4", "kv_heads=2", "head_dim=16", "rounds=2"]


@pytest.mark.parametrize("axis", ["one", "dp", "fsdp", "tp", pytest.param("pp", marks=pytest.mark.full)])
def test_every_case_of_axis_resolves(axis):
    options = Options(axis=axis)
    options.check()
    for case in options.cases:
        assert config_of(options, case).train.seq_len == SHAPES[case.shape][6]


@pytest.mark.parametrize(
    ("args", "peers"),
    [
        pytest.param(["axis=one", "profile=true"], {"bare", "transformers"}, marks=pytest.mark.full),
        pytest.param(["axis=one", "precision=bf16", "accumulate=2"], {"bare", "transformers"}, marks=pytest.mark.full),
        pytest.param(["axis=dp", "accumulate=2"], {"ddp"}, marks=pytest.mark.full),
        pytest.param(["axis=fsdp", "profile=true"], {"fsdp2"}, marks=pytest.mark.full),
        pytest.param(["axis=tp", "accumulate=2"], {"dtensor_tp", "dtensor_tp_sp"}, marks=pytest.mark.full),
        pytest.param(
            ["axis=tp", "precision=bf16", "sequence_parallel=false", "overlap=true"],
            {"dtensor_tp", "dtensor_tp_sp"},
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["axis=pp", "shape=pp_tiny", "schedule=1f1b", "precision=bf16"],
            {"torch_pipelining"},
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["axis=pp", "shape=pp_tiny", "schedule=zb_v", "accumulate=3"], {"torch_pipelining"}, marks=pytest.mark.full
        ),
    ],
    ids=lambda words: " ".join(sorted(words)),  # in the same order in every process
)
def test_peers_are_measured_and_have_equal_losses(args, peers, tmp_path, capsys):
    assert main(["peers", *QUICK, *args, f"out={tmp_path}/results.json"]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["commit"] and results["hardware"]["cores"] and results["versions"]["torch"]
    (shape,) = results["shapes"].values()
    losses = {name: own["losses"] for name, own in shape["sides"].items() if name != "local"}
    assert losses.keys() == {"ours", *peers}
    for name in peers:
        assert losses[name] == pytest.approx(losses["ours"], rel=1e-3 if "precision=bf16" in args else 1e-5)
        assert shape["ratios"][name].keys() == RATIO and min(shape["ratios"][name].values()) > 0
        assert len(shape["sides"][name]["block_ms"]) == 2
    said = capsys.readouterr().out
    assert all(f"{name} / ours" in said for name in peers)
    assert ("aten::mm" in said) == ("profile=true" in args)


def test_require_equal_losses_refuses_difference():
    with pytest.raises(RuntimeError, match="at step 2 the loss of ddp is 4"):
        _require_equal_losses({"ours": [5.0, 4.1], "ddp": [5.0, 4.0]}, 1e-4)


class Collectives(TorchDispatchMode):
    """Collects the names of collective operators, without underscores."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor first: what it sends it sends by operators of its own
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func.name().replace("_", ""))
        return func(*args, **(kwargs or {}))

    def count(self, word: str) -> int:
        return sum(word in name for name in self.names)


def collectives_of_a_step(name: str, options: dict, *case: str) -> tuple[Collectives, dict[str, Tensor]]:
    """On one rank: the collectives of a step of this implementation, and its parameters."""
    rank, _, world = world_from_env()
    cfg = config_of(Options(ranks=world, **options), Case(*case or ("tiny",)))
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    loop = IMPLEMENTATIONS[name](cfg, mesh)
    training = Training(loop, [make_batches(cfg, mesh, 0)])
    training()  # the first step sets up
    with Collectives() as seen:
        training()
    return seen, dict(loop.module.named_parameters())


def held(parameters: dict[str, Tensor]) -> float:
    """The share of the DTensors' elements that this rank holds."""
    sharded = [p for p in parameters.values() if isinstance(p, DTensor)]
    return sum(p.to_local().numel() for p in sharded) / sum(p.numel() for p in sharded)


def fsdp2_collectives(zero: int) -> tuple[int, int, float]:
    """On one rank: all-gathers and reduce-scatters of a step with FSDP2, and the share of parameters held after it."""
    seen, parameters = collectives_of_a_step("fsdp2", {"axis": "fsdp", "zero": zero, "accumulate": 2})
    assert all(isinstance(p, DTensor) for p in parameters.values())
    return seen.count("allgather"), seen.count("reducescatter"), held(parameters)


def dtensor_collectives(sequence_parallel: bool) -> tuple[int, int, int, float]:
    """On one rank: all-gathers, reduce-scatters and all-reduces of a step with DTensor, and the share of the matrices
    that is held."""
    name = "dtensor_tp_sp" if sequence_parallel else "dtensor_tp"
    seen, parameters = collectives_of_a_step(name, {"axis": "tp"})
    matrices = {name: p for name, p in parameters.items() if p.ndim == 2}
    assert all(isinstance(p, DTensor) for p in matrices.values())
    return seen.count("allgather"), seen.count("reducescatter"), seen.count("allreduce"), held(matrices)


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.full), True])
def test_dtensor_has_expected_collectives_and_shard(sequence_parallel):
    expected = (*TP_COLLECTIVES[sequence_parallel], 0.5)
    assert run_ranks(dtensor_collectives, 2, sequence_parallel) == [expected] * 2


@pytest.mark.parametrize("zero", [*(pytest.param(z, marks=pytest.mark.full) for z in (1, 2)), 3])
def test_fsdp2_has_expected_collectives_per_block(zero):
    assert run_ranks(fsdp2_collectives, 2, zero) == [(*COLLECTIVES[zero], 0.5)] * 2


def pipelining_step(schedule: str) -> tuple[int, int, list[str], float]:
    """On one rank: sends and receives of a step of 4 microbatches with torch.distributed.pipelining, its layers, and
    how far its gradients are from those of the whole model in one process, relative."""
    seen, parameters = collectives_of_a_step("torch_pipelining", {"axis": "pp"}, "pp_tiny", schedule)
    _, whole = collectives_of_a_step("bare", {"axis": "pp"}, "pp_tiny", schedule)
    own = {name.rpartition("part.")[2]: p.grad for name, p in parameters.items()}
    off = max(((grad - whole[name].grad).norm() / whole[name].grad.norm()).item() for name, grad in own.items())
    layers = dict.fromkeys(name.split(".")[2] for name in own if ".layers." in name)
    return seen.count("send"), seen.count("recv"), list(layers), off


@pytest.mark.parametrize(
    ("schedule", "messages", "layers"),
    [
        pytest.param(
            "gpipe", 4, ["01", "23"], marks=pytest.mark.full
        ),  # of each microbatch an activation one way and a gradient the other
        pytest.param("1f1b", 4, ["01", "23"], marks=pytest.mark.full),
        ("zb_h1", 4, ["01", "23"]),
        ("interleaved", 12, ["02", "13"]),  # over three links
        pytest.param("zb_v", 8, ["03", "12"], marks=pytest.mark.full),  # the middle link is within rank 1
        ("dualpipe_v", 8, ["03", "12"]),
    ],
)
def test_pipelining_peer_has_expected_stages_and_messages(schedule, messages, layers):
    for (*results, off), expected in zip(run_ranks(pipelining_step, 2, schedule), layers, strict=True):
        assert results == [messages, messages, list(expected)]
        assert off < 1e-4


def clipped(most: float) -> float:
    """On one of 2 ranks, with gradients 3 and 4: the rank's gradient after clipping."""
    p = torch.nn.Parameter(torch.zeros(1))
    p.grad = torch.tensor([3.0 + dist.get_rank()])
    pipelining.clip([p], most, dist.group.WORLD)
    return p.grad.item()


@pytest.mark.parametrize(("most", "factor"), [(1.0, 1 / 5), (6.0, 1.0)])
def test_pipelining_peer_clips_by_norm_over_stages(most, factor):
    assert run_ranks(clipped, 2, most) == pytest.approx([3 * factor, 4 * factor])


@pytest.mark.full
@pytest.mark.parametrize(
    "args",
    [["profile=true"], ["ulysses=2", "precision=bf16"], ["ranks=4", "ulysses=2", "balance=striped"]],
    ids=" ".join,
)
def test_attention_peers_are_measured_and_agree(args, tmp_path, capsys):
    assert main(["peers", *CP, *args, f"out={tmp_path}/results.json"]) == 0
    results = json.loads((tmp_path / "results.json").read_text())["shapes"]["64"]
    assert results["sides"].keys() == {"ours", *attention.PEERS, "silent"}
    assert results["ratios"].keys() == set(attention.PEERS) == results["differences"].keys() - {"ours"}
    bound = 2e-2 if "precision=bf16" in args else 1e-5
    assert all(d.keys() == set(attention.NAMES) and max(d.values()) < bound for d in results["differences"].values())
    assert results["exposed"]["spent_ms"] > 0
    if args == ["profile=true"]:  # k and v of 32 tokens go there twice, and their gradients once
        assert results["exposed"]["received_mb"] == pytest.approx(3 * 2 * 32 * 2 * 16 * 4 / 1e6)
    if args[0] == "ulysses=2":  # of 32 tokens half the heads of q, k, v and the output, and their gradients; bf16
        assert results["exposed"]["received_mb"] == pytest.approx(2 * 32 * (2 + 1 + 1 + 2) * 16 * 2 / 1e6)
    assert ("_scaled_dot_product_flash_attention_for_cpu" in capsys.readouterr().out) == ("profile=true" in args)


@pytest.mark.quiet
def test_slow_link_adds_its_full_transfer_time(tmp_path):
    """The time spent waiting for a link is the difference to a step without it."""
    slow = ["seq_len=512", "rounds=5", "link_mb_s=1", f"out={tmp_path}/results.json"]
    assert main(["peers", *CP, *slow]) == 0
    results = json.loads((tmp_path / "results.json").read_text())["shapes"]["512"]
    assert results["sides"].keys() == {"ours", "silent"} and not results["ratios"]
    exposed, link_ms = results["exposed"], results["exposed"]["received_mb"] * 1e3
    assert exposed["spent_ms"] > 0.7 * link_ms  # more where a neighbour is late
    assert exposed["lost_ms"] == pytest.approx(exposed["spent_ms"], rel=0.4)


def over_a_slow_link() -> tuple[float, float, float, int, bool]:
    """On one of 2 ranks: how long two transfers take, how much of it was slept meanwhile, how much the links say is
    spent, bytes, and whether what was sent has arrived."""
    group, bytes_per_s = dist.group.WORLD, 1e5
    links = attention.MeteredLinks(SequenceSharding(8, 2), group, group.rank(), bytes_per_s)
    send, receive = torch.full((2, 2500), float(group.rank())), torch.empty(2, 2500)
    dist.barrier()
    began = time.perf_counter()
    works = [links.shift(a, b) for a, b in zip(send, receive, strict=True)]
    posted = time.perf_counter()
    time.sleep(0.05)  # not spent on the link
    slept = time.perf_counter() - posted
    for work in works:
        work.wait()
    took = time.perf_counter() - began
    return took, slept, *links.reset(), bool((receive == 1 - group.rank()).all())


@pytest.mark.quiet
def test_transfer_over_slow_link_takes_bytes_over_rate():
    for took, slept, spent, received, right in run_ranks(over_a_slow_link, 2):
        assert received == 20000 and right
        assert took >= 0.2  # one after the other: 20 kB at 100 kB/s
        assert spent <= took - slept, "what is slept is not spent on the link"
        assert spent > took - slept - 0.1  # a busy machine may stop this thread between any two lines


@pytest.mark.parametrize(("wrong", "value"), [(0, 1e-3), (3, math.nan)])
def test_require_agreement_names_wrong_tensor(wrong, value):
    expected = tuple(torch.ones(1, 4, 2, 8) for _ in attention.NAMES)
    results = tuple(x.clone() for x in expected)
    assert max(attention.require_agreement("ours", results, expected, 1e-4).values()) == 0
    results[wrong][0, 3, 1, 7] += value
    with pytest.raises(RuntimeError, match=f"not the same work: {attention.NAMES[wrong]} of ours is"):
        attention.require_agreement("ours", results, expected, 1e-4)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "bench: no such bench; known: peers"),
        (["peer"], "did you mean 'peers'?"),
        (["peers"], "axis is missing; known: one, dp, fsdp, tp, cp, pp"),
        (["peers", "axis=fdsp"], "fdsp: no such axis; did you mean 'fsdp'? known: one, dp, fsdp, tp, cp, pp"),
        (["peers", "axis=dp", "rank=2"], "rank: no such key; did you mean 'ranks'?"),
        (["peers", "axis=dp", "ranks=1"], "axis=one needs 1 rank, the other axes at least 2"),
        (["peers", "axis=one", "ranks=2"], "ranks=2: axis=one needs 1 rank"),
        (["peers", "axis=dp", "zero=2"], "zero=2: only axis=fsdp shards"),
        (["peers", "axis=dp", "rounds=0"], "rounds=0: must be a whole number, at least 1"),
        (["peers", "axis=dp", "profile=yes"], "yes: no such profile; known: true, false"),
        (["peers", "axis=dp", "out=/nowhere/x.json"], "the folder /nowhere does not exist"),
        (["peers", "axis"], "arguments are key=value"),
        (["peers", "axis=dp", "overlap=true"], "sequence_parallel and overlap only apply to axis=tp"),
        (["peers", "axis=tp", "ranks=4", "shape=tiny"], "ranks=4: DTensor cannot split a head, and shape=tiny has 2"),
        (["peers", "axis=tp", "ranks=3"], "must divide"),
        (["peers", "axis=dp", "seq_len=64"], "seq_len: no such key"),
        (["peers", "axis=pp", "ranks=1"], "axis=one needs 1 rank, the other axes at least 2"),
        (["peers", "axis=pp", "schedule=zbv"], "zbv: no such schedule; did you mean 'zb_v'?"),
        (["peers", "axis=dp", "schedule=zb_v"], "schedule=zb_v: only axis=pp has a schedule"),
        (["peers", "axis=pp", "shape=tiny", "schedule=zb_v"], "schedule=zb_v cuts the model into 4 stages"),
        (["peers", "axis=pp", "ranks=4", "accumulate=3"], "accumulate=3: PyTorch's 1f1b needs at least 4"),
        (["peers", "axis=pp", "schedule=dualpipe_v", "accumulate=3"], "PyTorch's dualpipe_v needs at least 4"),
        (["peers", "axis=pp", "schedule=zb_h1", "accumulate=5"], "PyTorch's zb_h1 needs 2 equal rounds"),
        (["peers", "axis=cp", "zero=1"], "zero: no such key"),
        (["peers", "axis=cp", "ranks=1"], "axis=one needs 1 rank, the other axes at least 2"),
        (["peers", "axis=cp", "seq_len=66"], "seq_len=66 must be a multiple of 2 x ranks=2"),
        (["peers", "axis=cp", "heads=6", "kv_heads=4"], "heads=6 must be a multiple of kv_heads=4"),
        (["peers", "axis=cp", "ulysses=4"], "ulysses=4 must divide ranks=2"),
        (["peers", "axis=cp", "ranks=6", "ulysses=6", "heads=6", "kv_heads=4"], "heads=6 must be a multiple"),
        (["peers", "axis=cp", "ranks=6", "heads=12", "kv_heads=4", "ulysses=6"], "ulysses=6 and kv_heads=4"),
        (["peers", "axis=cp", "balance=zagzig"], "did you mean 'zigzag'?"),
        (
            ["peers", "axis=cp", "link_mb_s=5", "exposed=false"],
            "link_mb_s measures exposed communication: remove exposed=false",
        ),
    ],
)
def test_bad_argument_is_one_line_error(args, said, capsys):
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and said in err
