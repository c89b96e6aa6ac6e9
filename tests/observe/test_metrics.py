"""metrics.jsonl, wandb, the console, peak FLOP/s and peak memory."""

import builtins
import errno
import io
import json
import math
import os
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from ndtrain.config import HardwareConfig, load_config, resolve
from ndtrain.device import measured_peak, peak
from ndtrain.device.measured_peak import Measurement
from ndtrain.engine.setup import device_of
from ndtrain.observe import Metrics, peak_flops, peak_memory_bytes, reset_peak_memory, wandb_logger
from ndtrain.observe.console import Console, duration
from ndtrain.observe.jsonl import JsonlWriter, read_rows
from tests.lib.ranks import run_ranks

KEYS = [
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "tokens_per_s_per_device", "tflops_per_device"),
    *("mfu", "hfu", "step_time_s", "data_wait_s", "peak_memory_bytes"),
]


def make(folder: Path, start: int = 0, resume: bool = False, logger: str = "jsonl", **train) -> Metrics:
    """The metrics of a run on 4 devices of 1 TFLOP/s, with 1e8 model FLOPs and 1.25e8 hardware FLOPs per token."""
    overrides = [f"train.{key}={value}" for key, value in train.items()]
    cfg = load_config([f"run.dir={folder}", "run.name=t", f"logger={logger}", *overrides])
    return Metrics(cfg, folder, start, 1e8, 1.25e8, 1e12, 4, resume)


def log(metrics: Metrics, step: int, **changes) -> None:
    row = {
        "loss": 8 - step / 4,
        "grad_norm": 1.234,
        "lr": 3e-3,
        "tokens": 2048 * step,
        "step_tokens": 2048,
        "step_time_s": 0.5,
        "data_wait_s": 0.01,
        "peak_memory_bytes": 123,
    }
    metrics.log(step, **{**row, **changes})


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ----------------------------------------------------------------------------------------------------------- rows


def test_row_has_exactly_the_documented_keys_and_figures(tmp_path):
    metrics = make(tmp_path)
    log(metrics, 1)
    metrics.close()
    (row,) = rows(tmp_path)
    assert list(row) == KEYS
    assert row["tokens_per_s"] == 4096
    assert row["tokens_per_s_per_device"] == 1024
    assert row["tflops_per_device"] == pytest.approx(0.1024)
    assert row["mfu"] == pytest.approx(0.1024)
    assert row["hfu"] == pytest.approx(0.128)
    assert (row["step"], row["tokens"], row["loss"]) == (1, 2048, 7.75)


def test_extra_numbers_follow_documented_keys(tmp_path):
    metrics = make(tmp_path)
    log(metrics, 1, skipped=torch.tensor(1.0))
    metrics.close()
    (row,) = rows(tmp_path)
    assert list(row) == [*KEYS, "skipped"] and row["skipped"] == 1


def test_row_is_written_to_file_at_once(tmp_path):
    metrics = make(tmp_path)
    log(metrics, 1)
    assert len(rows(tmp_path)) == 1
    metrics.close()
    metrics.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_written_as_null(tmp_path, value, capsys):
    metrics = make(tmp_path)
    log(metrics, 1, loss=value, grad_norm=value)
    metrics.close()

    def refuse(constant):
        raise AssertionError(constant)

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row["loss"] is None and row["grad_norm"] is None
    assert f"loss {value:.4f}" in capsys.readouterr().out


def test_resume_leaves_one_line_per_step(tmp_path):
    first = make(tmp_path)
    for step in range(1, 8):
        log(first, step)
    first.close()
    second = make(tmp_path, start=5, resume=True)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]
    for step in range(6, 11):
        log(second, step, loss=0.5)
    second.close()
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 11))
    assert [row["loss"] for row in rows(tmp_path)][5:] == [0.5] * 5
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_torn_lines_are_dropped_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"ste\n{"step": 2}\n\xff\xfe\n[]\n{"step": 3, "loss": 2.')
    JsonlWriter(path, 3).close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(b'{"step": 1}\n{"step": 2}')  # valid JSON, but digits may be missing
    JsonlWriter(path, 3).close()
    assert path.read_bytes() == b'{"step": 1}\n'


def test_rows_without_integer_step_are_dropped(tmp_path):
    """Somebody edited the file: a row without an integer step does not count, whatever else it has."""
    path = tmp_path / "metrics.jsonl"
    strange = [b'{"step": "x"}', b'{"step": 1e999}', b'{"step": null}', b'{"step": [1]}', b"[" * 100_000]
    path.write_bytes(b'{"step": 1}\n' + b"\n".join(strange) + b'\n{"step": 2}\n')
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    JsonlWriter(path, 2).close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_fresh_run_overwrites_the_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    make(tmp_path, start=3).close()
    assert rows(tmp_path) == []


def test_full_disk_tears_no_line_and_loses_no_row(tmp_path, capsys):
    metrics = make(tmp_path)
    log(metrics, 1)
    whole = metrics._jsonl._file

    class Full:
        """Accepts ten bytes of each write, as a disk with ten free bytes."""

        name = "metrics.jsonl"
        fileno, truncate = whole.fileno, whole.truncate

        def write(self, data):
            return whole.write(data[:10])

    metrics._jsonl._file = Full()
    log(metrics, 2)
    log(metrics, 3)
    assert [row["step"] for row in rows(tmp_path)] == [1]
    metrics._jsonl._file = whole
    log(metrics, 4)
    metrics.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert capsys.readouterr().out.count("No space left") == 1


# ---------------------------------------------------------------------------------------------------------- wandb


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """wandb without credentials."""
    wandb = pytest.importorskip("wandb")
    for key in [k for k in os.environ if k.startswith("WANDB_") or k == "NETRC"]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
    wandb.teardown()
    yield wandb
    wandb.teardown()


def wandb_records(folder: Path, deadline_s: float = 60) -> list:
    """The protobuf records of all wandb runs in `folder`, oldest first. It waits until the files are complete, since
    wandb's process may write after the end of the run."""
    end = time.monotonic() + deadline_s
    while True:
        paths = sorted(folder.glob("wandb/*run-*/*.wandb"), key=lambda p: p.stat().st_mtime_ns)
        files = [read_records(path) for path in paths]
        whole = [any(r.WhichOneof("record_type") == "exit" for r in records) for records in files]
        if all(whole) or time.monotonic() > end:
            return [r for records in files for r in records]
        time.sleep(0.1)


def read_records(path: Path) -> list:
    """The protobuf records of one file. It is a LevelDB log after a header of 7 bytes: blocks of 32 KiB with fragments.
    Each fragment has a header: crc (4 bytes), length (2), kind (1 whole, 2 first, 3 middle, 4 last)."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = []
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left_in_block = 32768 - at % 32768
        if left_in_block < 7:
            at += left_in_block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            break  # still being written
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(parts))
            parts = b""
    return records


def wandb_history(folder: Path) -> list[dict]:
    history = [r.history for r in wandb_records(folder) if r.WhichOneof("record_type") == "history"]
    return [{i.key or i.nested_key[0]: json.loads(i.value_json) for i in h.item} for h in history]


def wandb_exit_codes(folder: Path) -> list[int]:
    return [r.exit.exit_code for r in wandb_records(folder) if r.WhichOneof("record_type") == "exit"]


def test_wandb_offline_history_continues_after_resume(tmp_path, wandb, capfd):
    first = make(tmp_path, logger="wandb")
    for step in (1, 2, 3):
        log(first, step)
    first.close()
    second = make(tmp_path, start=3, resume=True, logger="wandb")
    for step in (4, 5):
        log(second, step)
    second.close()
    history = wandb_history(tmp_path)
    assert [(h["step"], h["_step"], h["loss"]) for h in history] == [(s, s, 8 - s / 4) for s in range(1, 6)]
    assert all(set(KEYS) <= set(h) for h in history)
    runs = [r.run for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "run"]
    assert {r.run_id for r in runs} == {(tmp_path / "wandb_id").read_text().strip()} and len(runs) == 2
    config = {u.key: json.loads(u.value_json) for u in runs[0].config.update}
    assert config["model"]["hidden_size"] == 64 and config["data"]["vocab_size"] == 512
    assert wandb_exit_codes(tmp_path) == [0, 0]
    output = capfd.readouterr()
    notes = [line for line in output.out.splitlines() if not line.startswith("step ")]
    assert output.err == "" and len(notes) == 2
    assert all(line.startswith(f"wandb: {tmp_path}/wandb/offline-run-") for line in notes)


def test_wandb_never_asks_for_a_key(tmp_path, wandb, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("wandb asked"))
    metrics = make(tmp_path, logger="wandb")
    log(metrics, 1)
    metrics.close()
    assert len(wandb_history(tmp_path)) == 1
    assert "WANDB_MODE=online but wandb has no API key" in capsys.readouterr().out


def test_wandb_falls_back_to_offline_when_the_server_is_dead(tmp_path, wandb, monkeypatch, capfd):
    home = tmp_path / "home"
    home.mkdir()
    netrc = home / ".netrc"
    netrc.write_text(f"machine 127.0.0.1:9 login user password {'a' * 40}\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the discard port: nothing listens
    monkeypatch.setattr(wandb_logger, "_INIT_TIMEOUT_S", 1.0)
    start = time.monotonic()
    metrics = make(tmp_path, logger="wandb")
    log(metrics, 1)
    metrics.close()
    assert time.monotonic() - start < 20
    assert [h["loss"] for h in wandb_history(tmp_path)] == [7.75]
    output = capfd.readouterr()
    assert output.err == "" and output.out.count("warning: wandb logs offline") == output.out.count("warning") == 1


def test_wandb_mode_disabled_writes_nothing(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    metrics = make(tmp_path, logger="wandb")
    log(metrics, 1)
    metrics.close()
    assert not list(tmp_path.glob("wandb/*/*.wandb")) and len(rows(tmp_path)) == 1


def test_training_goes_on_without_wandb(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # `import wandb` raises ImportError
    metrics = make(tmp_path, logger="wandb")
    log(metrics, 1)
    metrics.close()
    assert len(rows(tmp_path)) == 1
    assert capsys.readouterr().out.count("warning: wandb is off") == 1


@pytest.mark.parametrize("where", ["log", "finish"])
def test_training_goes_on_when_wandb_fails(tmp_path, where, capsys):
    class Broken:
        def log(self, *_, **__):
            if where == "log":
                raise RuntimeError("lost\nits service")

        def finish(self, **_):
            raise RuntimeError("lost\nits service")

    metrics = make(tmp_path)
    logger = wandb_logger.WandbLogger.__new__(wandb_logger.WandbLogger)
    logger._run, logger._warn, logger._best = Broken(), metrics.warn, wandb_logger.NO_EVALUATION
    metrics._loggers = {"wandb": logger}
    for step in (1, 2):
        log(metrics, step)
    metrics.close()
    assert len(rows(tmp_path)) == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: wandb")]
    assert len(lines) == 1 and lines[0].endswith("lost")


def test_an_exception_ends_the_wandb_run_as_failed(tmp_path, wandb):
    """Without a call of close() the wandb run contains all rows and its exit code is 1."""
    script = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_metrics import log, make
        metrics = make(Path({str(tmp_path)!r}), logger="wandb")
        log(metrics, 1)
        raise RuntimeError("boom")
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "boom" in done.stderr and "wandb" not in done.stderr
    assert [h["loss"] for h in wandb_history(tmp_path)] == [7.75]
    assert wandb_exit_codes(tmp_path) == [1]


# -------------------------------------------------------------------------------------------------------- console


def shown_row(step: int, **changes) -> dict:
    row = {"loss": 6.1234, "grad_norm": 1.23, "lr": 3e-3, "tokens_per_s": 12345.0, "mfu": 0.412, "step_time_s": 0.33}
    return {"step": step, **row, **changes}


def test_console_prints_plain_lines_to_file():
    stream = io.StringIO()
    console = Console(300, 10, stream)
    for step in range(1, 21):
        console.update(shown_row(step))
    console.note("a [note]")
    console.warn("careful")
    console.close()
    assert stream.getvalue().splitlines() == [
        "step 10/300  loss 6.1234  grad_norm 1.23  lr 3.0e-03  12,345 tok/s  MFU 41.2 %  0.33 s/step  left 1m36s",
        "step 20/300  loss 6.1234  grad_norm 1.23  lr 3.0e-03  12,345 tok/s  MFU 41.2 %  0.33 s/step  left 1m32s",
        "a [note]",
        "warning: careful",
    ]


def test_console_loss_is_mean_since_previous_line():
    stream = io.StringIO()
    console = Console(5, 2, stream)
    for step, loss in enumerate((8.0, 7.0, 6.0, math.nan, 4.0), start=1):
        console.update(shown_row(step, loss=loss))
    assert [line.split("  ")[1] for line in stream.getvalue().splitlines()] == [
        "loss 7.5000", "loss 6.0000", "loss 4.0000",
    ]  # fmt: skip


def test_bar_shows_mean_loss_over_log_every_steps(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    console = Console(3, 2, stream)
    for step, loss in enumerate((8.0, 7.0, 6.0), start=1):
        console.update(shown_row(step, loss=loss))
    console.close()
    frames = [line for line in stream.getvalue().replace("\r", "\n").splitlines() if "step 3/3" in line]
    assert all("loss 6.5000" in line for line in frames) and frames


def test_console_prints_mean_and_file_keeps_each_loss(tmp_path, capsys):
    metrics = make(tmp_path, log_every=2, steps=2)
    log(metrics, 1)
    log(metrics, 2)
    metrics.close()
    assert [row["loss"] for row in rows(tmp_path)] == [7.75, 7.5]
    assert "loss 7.6250" in capsys.readouterr().out


def test_plain_lines_on_a_narrow_terminal_fit(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    monkeypatch.setattr(stream, "fileno", lambda: 1)
    for columns, last in ((50, "left 1m36s"), (30, "loss 6.1234"), (10, "step 9/300")):
        monkeypatch.setattr(os, "get_terminal_size", lambda _, n=columns: os.terminal_size((n, 24)))
        console = Console(300, 1, stream)
        console.update(shown_row(8))
        console.update(shown_row(9))
        line = stream.getvalue().splitlines()[-1]
        assert len(line) <= columns and line.startswith("step 9/300") and line.endswith(last), line


def test_console_rates_ignore_first_step():
    stream = io.StringIO()
    console = Console(3, 1, stream)
    console.update(shown_row(1, tokens_per_s=1.0, mfu=0.0, step_time_s=1000.0))
    console.update(shown_row(2, tokens_per_s=100.0, mfu=0.2, step_time_s=1.0))
    console.update(shown_row(3, tokens_per_s=25.0, mfu=0.05, step_time_s=4.0))
    first, second, third = stream.getvalue().splitlines()
    assert "tok/s" not in first
    assert second.endswith("100 tok/s  MFU 20.0 %  1 s/step  left 1s")
    assert third.endswith("40 tok/s  MFU 8.0 %  2.5 s/step  left 0s")  # 200 tokens in 5 s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_is_drawn_on_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    console = Console(300, 10, stream)
    for step in range(1, 121):
        console.update(shown_row(step))
    console.note("saved [red]step-120[/red]")
    console.update(shown_row(300))
    console.close()
    output = stream.getvalue()
    frames = [line for line in output.replace("\r", "\n").splitlines() if "step" in line]
    assert "300/300" in frames[-1] and "loss 6.1234  12,345 tok/s  MFU 41.2 %  left 0s" in frames[-1]
    assert any(line.endswith("saved [red]step-120[/red]") for line in frames)
    assert output.count("loss") < 20  # drawn at most ten times a second


@pytest.mark.parametrize(
    ("columns", "shown"),
    [(80, "loss 6.1234  12,345 tok/s  MFU 41.2 %  left 0s"), (50, "loss 6.1234  left 0s"), (30, "loss 6.1234")],
)
def test_bar_on_a_narrow_terminal_drops_whole_figures(monkeypatch, columns, shown):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    console = Console(300, 10, stream)
    for step in (299, 300):
        console.update(shown_row(step))
    console.close()
    last = [line for line in stream.getvalue().replace("\r", "\n").splitlines() if "step" in line][-1]
    assert "step 300/300" in last and last.endswith(f" {shown}")


@pytest.mark.parametrize("closed_at", [1, 3])
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_that_is_closed_ends_no_run(monkeypatch, term, closed_at):
    monkeypatch.setenv("TERM", term)
    stream, gone = Terminal(), mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    console = Console(4, 1, stream)
    for step in range(1, 5):
        if step == closed_at:
            stream.write = stream.flush = gone
        console.update(shown_row(step))
    console.note("saved")
    console.close()
    assert gone.called


def test_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    Console(1, 1, stream).update(shown_row(1))
    assert stream.getvalue() == "step 1/1  loss 6.1234  grad_norm 1.23  lr 3.0e-03\n"


def test_console_prints_last_line_at_stop_at(tmp_path, capsys):
    metrics = make(tmp_path, steps=300, stop_at=5, log_every=100)
    for step in range(1, 6):
        log(metrics, step)
    metrics.close()
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == ["step 5/5"]


def test_a_stream_that_fails_does_not_stop_the_training():
    stream = open("/dev/full", "w")  # noqa: SIM115 (closing it raises what the console has swallowed)
    console = Console(2, 1, stream)
    console.update(shown_row(1))
    console.warn("nobody reads this")
    with pytest.raises(OSError):
        stream.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.6, "1m00s"), (92, "1m32s"), (3 * 3600 + 301, "3h05m"), (2 * 86400 + 4 * 3600, "2d04h")],
)
def test_duration_is_formatted_from_seconds_to_days(seconds, text):
    assert duration(seconds) == text


# ------------------------------------------------------------------------------------------------ peak and memory


def test_configured_peak_wins():
    assert peak_flops(HardwareConfig(peak_tflops=2.5), "cpu", torch.float32) == 2.5e12


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989, 67),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA H200", 989, 67),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA A10G", 70, 31.5),
        ("NVIDIA A10", 125, 31.2),
        ("NVIDIA L40S", 362, 91.6),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("Tesla V100-SXM2-16GB", 125, 15.7),
    ],
)
def test_listed_peak_of_known_gpus(name, bf16, fp32):
    assert peak._listed(name, torch.bfloat16) == bf16 * 1e12
    assert peak._listed(name, torch.float32) == fp32 * 1e12


@pytest.mark.parametrize(
    "name", ["NVIDIA A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "FutureChip"]
)
def test_unknown_gpus_are_measured(name, monkeypatch, tmp_path):
    monkeypatch.setenv("NDTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(measured_peak, "measure", lambda *_: Measurement(7.0, 256))
    assert peak_flops(HardwareConfig(), "cuda", torch.bfloat16) == 7


def test_fp32_peak_is_tf32_only_if_allowed(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak._listed("NVIDIA H100 80GB HBM3", torch.float32) == 494e12
    assert peak._listed("NVIDIA H100 80GB HBM3", torch.float64) is None


def test_cpu_peak_memory_rises_and_is_reset():
    """It runs in a fresh process: here, pages that earlier tests freed and the allocator kept would hide the rise."""
    (resets,) = run_ranks(_check_peak_memory, 1)
    if not resets:
        pytest.skip("this kernel does not reset the peak")


def _check_peak_memory() -> bool:
    device = torch.device("cpu")
    size = 256 * 2**20
    reset_peak_memory(device)
    before = peak_memory_bytes(device)
    block = torch.ones(size, dtype=torch.uint8)
    with_block = peak_memory_bytes(device)
    assert size * 0.9 < with_block - before < size * 1.2
    del block
    assert peak_memory_bytes(device) > with_block - size * 0.1  # the kernel's counters are batched
    reset_peak_memory(device)
    resets = os.access("/proc/self/clear_refs", os.W_OK)
    assert not resets or peak_memory_bytes(device) < with_block - size * 0.9
    return resets


@pytest.mark.parametrize("given", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_default_on_gpu(given, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(given, "max_split_size_mb:64")
    settings = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: settings.append("in use"))
    assert device_of(resolve(load_config(["recipe=llama_debug"]), 1), 0).type == "cuda"
    assert settings == [*([] if given else ["expandable_segments:True"]), "in use"]
