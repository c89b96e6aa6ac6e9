"""How times are read between the sizes that a machine was measured at, and which files are refused."""

import copy
import math

import pytest
import yaml

from ndtrain.config import ConfigError, MeshConfig, load_config, resolve
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.plan.calibrate import INTERFERENCE, LATE_S, write
from ndtrain.plan.events import Kernel
from ndtrain.plan.hardware import load_hardware
from ndtrain.plan.measured import Measured, along, near_rate
from ndtrain.plan.predict import Predictor
from ndtrain.plan.price import Prices, Rates

SDPA = "_scaled_dot_product_flash_attention_for_cpu"
TABLES = {
    "matmul": {"fp32": [[1, 64, 64, 64, 2 * 64**3 / 1e10], [1, 256, 256, 256, 2 * 256**3 / 1e11]]},
    "attention": {"sdpa fp32": [[1, 4, 64, 64, 32, 1_000_000, 1e-3]]},
    "memory": {"mul fp32": [[100, 1e-6], [10_000, 1e-4]], "exp fp32": [[100, 3e-6]]},
}
PLAIN = {
    "cores": 2,
    "kernels": {1: TABLES, 2: copy.deepcopy(TABLES) | {"memory": {"mul fp32": [[100, 2e-6], [10_000, 2e-4]]}}},
    "collectives": {"all_gather": {"2 of 2": [[1000, 1e-4]], "4 of 4": [[1000, 3e-4]], "2 of 4": [[1000, 2e-4]]}},
}
DESCRIPTION = {
    "measured": PLAIN, "rates": {"launch_s": 1e-5, "step_s": 1e-3}, "device": "cpu", "memory_gb": 8,
    "gpus_per_node": 8, "peak_tflops": {"fp32": 0.2}, "memory_gb_s": 10, "link_gb_s": 1, "network_gb_s": None,
}  # fmt: skip


def memory(op: str, nbytes: int, dtype: str = "fp32") -> Kernel:
    return Kernel("memory", 0, nbytes, dtype, (), op)


def matmul(size: int) -> Kernel:
    return Kernel("matmul", 2 * size**3, 0, "fp32", (1, size, size, size), "mm")


def test_along_interpolates_in_logarithms():
    points = [[100, 1e-6], [10_000, 1e-4]]
    assert along(points, 300) == pytest.approx(3e-6)
    assert along(points, 10) == 1e-6 and along(points, 20_000) == 2e-4


def test_near_rate_favours_nearest_shape():
    points = [((64, 64), 1.0), ((256, 256), 4.0)]
    assert near_rate(points, (64, 64)) == 1.0 and near_rate(points, (256, 256)) == 4.0
    assert near_rate(points, (128, 128)) == pytest.approx(2.0)
    assert near_rate(points, (80, 80)) < 2 < near_rate(points, (200, 200))


def test_kernel_time_depends_on_ranks_sharing_cores():
    measured = Measured.of(PLAIN)
    assert measured.kernel(matmul(64), 1) == pytest.approx(2 * 64**3 / 1e10)
    assert measured.kernel(memory("mul", 100), 1) == 1e-6
    assert measured.kernel(memory("mul", 100), 2) == 2e-6
    assert measured.kernel(memory("mul", 100), 8) == 8e-6, "eight ranks share two cores"
    assert measured.kernel(memory("exp", 100), 1) == 3e-6
    assert measured.kernel(memory("exp", 100, "bf16"), 1) == 3e-6, "the same operator in another precision"
    assert measured.kernel(memory("tanh", 100), 1) == 2e-6, "the median operator"
    assert measured.kernel(Kernel("attention", 2_000_000, 0, "fp32", (1, 4, 64, 64, 32), "sdpa"), 1) == 2e-3
    with pytest.raises(ConfigError, match="no matmul in bf16 is measured"):
        measured.kernel(matmul(64)._replace(dtype="bf16"), 1)


def test_kernel_measured_only_at_few_bytes_uses_typical_time():
    many = {"mul fp32": [[16, 2e-5], [2**20, 1e-4]], "add fp32": [[2**22, 4e-4]]}
    few = {f"{op} fp32": [[16, 2e-5]] for op in ("eq", "ne", "abs")}
    tables = {"matmul": {}, "attention": {}, "memory": many | few}
    measured = Measured.of({"cores": 1, "kernels": {1: tables}, "collectives": {}})
    of = lambda op, size: measured.kernel(memory(op, size), 1)
    assert of("cat", 16) == pytest.approx(2e-5), "the median of all"
    assert of("cat", 2**22) == pytest.approx(4e-4), "not 2e-5 s for each 16 bytes"
    assert of("eq", 2**22) == pytest.approx(4e-4) and of("eq", 64) == pytest.approx(8e-5)
    assert of("cat", 2**26) == pytest.approx(64e-4), "beyond all that is measured"


def test_collective_of_unmeasured_group_is_scaled():
    measured = Measured.of(PLAIN)
    assert measured.collective("all_gather", 1000, 2, 4) == 2e-4
    assert measured.collective("all_gather", 1000, 4, 8) == pytest.approx(2 * 3e-4), "twice as many share the links"
    assert measured.collective("all_gather", 1000, 3, 4) == pytest.approx(3e-4 * (2 / 3) / (3 / 4))
    with pytest.raises(ConfigError, match="all_to_all is not measured"):
        measured.collective("all_to_all", 1000, 2, 2)


def described(tmp_path, **changes):
    path = tmp_path / "this.yaml"
    path.write_text(yaml.safe_dump(DESCRIPTION | changes))
    return load_hardware(str(path))


def test_measured_times_replace_formulas(tmp_path):
    mesh = MeshSpec.of(MeshConfig(dp=4))
    prices = Prices(described(tmp_path), Rates(launch_s=1e-5), mesh)
    assert prices.kernel(memory("mul", 100)) == pytest.approx(2 * (2e-6 + 1e-5)), "the host's time is shared, too"
    assert Prices(prices.hardware, Rates(launch_s=1e-5), mesh, own_core=True).kernel(memory("mul", 100)) == 1.2e-5
    assert prices.collective("dp", "all_gather", 1000) == 3e-4 and prices.ranks_a_core == 2


def test_late_s_is_zero_on_shared_cores(tmp_path):
    hardware, rates = described(tmp_path), Rates(late_s=1e-3)
    assert [Prices(hardware, rates, MeshSpec.of(MeshConfig(dp=dp))).late_s for dp in (2, 4)] == [1e-3, 0]


def test_ranks_that_wait_leave_their_core_to_others(tmp_path):
    """Four pipeline ranks run on two cores: while one rank waits, another uses its core."""
    attention = {f"{op} fp32": [[1, 4, 64, 64, 32, 1_000_000, 1e-3]] for op in (SDPA, f"{SDPA}_backward")}
    collectives = {op: {"4 of 4": [[1000, 1e-6]]} for op in ("all_gather", "all_reduce", "send_recv")}
    kernels = {1: TABLES | {"attention": attention}}
    times = {}
    for cores in (2, 4):
        plain = {"cores": cores, "kernels": kernels, "collectives": collectives}
        cfg = resolve(load_config(["recipe=llama_debug", "mesh.pp=4", "train.global_batch=4", "train.micro_batch=1",
                                   "model.num_hidden_layers=4", "train.compile=false"]), 4)  # fmt: skip
        prediction = Predictor(described(tmp_path, measured=plain)).predict(cfg)
        assert sum(prediction.waterfall.values()) == pytest.approx(prediction.step_time_s)
        times[cores] = prediction.step_time_s
    assert times[4] <= times[2] < 1.9 * times[4]


def broken(*path, value):
    plain = copy.deepcopy(PLAIN)
    at = plain
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return plain


BROKEN = {
    "cores": (broken("cores", value=0), "measured.cores=0: must be a whole number"),
    "no tables": (broken("kernels", value={}), "some kernels measured"),
    "half a table": (broken("kernels", 1, value={"matmul": {}}), "measured.kernels.1: must have the keys matmul"),
    "point": (broken("kernels", 1, "memory", "mul fp32", value=[[100]]), "mul fp32: [100]: a point has 2 positive"),
    "nan": (broken("kernels", 1, "memory", "mul fp32", value=[[100, math.nan]]), "a point has 2 positive numbers"),
    "order": (broken("kernels", 1, "memory", "mul fp32", value=[[9, 1.0], [8, 1.0]]), "sizes must increase"),
    "group": (
        broken("collectives", "all_gather", value={"2": [[1, 1.0]]}),
        "collectives.all_gather.2: must be the ranks of a group",
    ),
    "strange key": (broken("probes", value={1: 0.1}), "measured: must be a mapping with the keys cores, kernels"),
    "text": ("half", "measured: must be a mapping"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_measured_section_is_one_line_error(tmp_path, name):
    measured, text = BROKEN[name]
    with pytest.raises(ConfigError) as raised:
        described(tmp_path, measured=measured)
    assert text in str(raised.value) and "\n" not in str(raised.value)
    assert str(raised.value).endswith("run `ndtrain plan calibrate` again")


def test_smallest_calibrated_rates_are_accepted(tmp_path):
    found = {"launch_s": 1e-7, "step_s": 1e-7, "interference": min(INTERFERENCE), "late_s": min(LATE_S)}
    assert described(tmp_path, rates=found).rates == found


@pytest.mark.parametrize("rate", [-0.1, None, "fast", math.inf])
def test_invalid_rate_is_one_line_error(tmp_path, rate):
    with pytest.raises(ConfigError, match=rf"^hardware=\S+: rates\.late_s={rate}: must be a number, at least 0$"):
        described(tmp_path, rates={"late_s": rate})


def test_truncated_hardware_file_is_refused(tmp_path):
    path = tmp_path / "this.yaml"
    write(path, DESCRIPTION, "measured on this")
    text = path.read_text()
    load_hardware(str(path))
    for end in range(1, len(text) - len(" null\n"), 3):
        path.write_text(text[:end])
        with pytest.raises(ConfigError) as raised:
            load_hardware(str(path))
        assert "\n" not in str(raised.value)
