"""`python -m ndtrain.bench matmul`: rates and shares are what times give, wrong products are found, sizes beyond the
memory are left out, mistakes are one line."""

import json
import statistics
from pathlib import Path
from unittest import mock

import pytest
import torch

from ndtrain.bench import matmul
from ndtrain.bench.__main__ import main
from ndtrain.bench.matmul import CONTENTS, KINDS, Options, Product
from tests.bench.test_bench_collectives import is_png

PEAK = 5e10
QUICK = ["min=32", "max=64", "rounds=3", "device=cpu"]


@pytest.fixture
def known_peak(monkeypatch):
    """Instead of measuring for a second."""
    monkeypatch.setattr(matmul, "peak_flops", lambda hardware, device, dtype: PEAK)


def run_bench(args: list[str], folder: Path) -> dict:
    assert main(["matmul", *QUICK, *args, f"out={folder}/results.json", f"plot={folder}/results.png"]) == 0
    width, height = is_png(folder / "results.png")
    assert width > 800 and height > 400
    return json.loads((folder / "results.json").read_text())


def test_bench_reports_rates_and_shares_of_peak(known_peak, tmp_path, capsys):
    results = run_bench([], tmp_path)
    assert [(r["dtype"], r["size"]) for r in results["rows"]] == [(d, s) for d in ("fp32", "bf16") for s in (32, 64)]
    for row in results["rows"]:
        assert list(row["contents"]) == ["zeros", "rand", "randn"]
        for of in row["contents"].values():
            assert of["right"] and len(of["seconds"]) == 3
            assert of["tflops"] == pytest.approx(2 * row["size"] ** 3 / statistics.median(of["seconds"]) / 1e12)
            assert of["hfu"] == pytest.approx(of["tflops"] * 1e12 / PEAK)
    said = capsys.readouterr().out
    assert said.count("  yes\n") == 4 and "fp32 0.05, bf16 0.05 (measured" in said


@pytest.mark.full
def test_the_peak_is_measured_on_a_cpu(tmp_path):
    results = run_bench(["dtypes=fp32", "contents=randn", "min=512", "max=512"], tmp_path)
    assert results["peak_flops"]["fp32"] > 1e9 and results["rows"][0]["contents"]["randn"]["hfu"] > 0


def test_fp8_peak_is_twice_bf16(monkeypatch):
    peaks = {torch.float32: 1e12, torch.bfloat16: 3e12}
    monkeypatch.setattr(matmul, "peak_flops", lambda hardware, device, dtype: peaks[dtype])
    results = {kind: matmul._peak(kind, torch.device("cuda")) for kind in KINDS}
    assert results == {"fp32": 1e12, "bf16": 3e12, "fp16": 3e12, "fp8": 6e12}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_product_passes_its_check(kind, content):
    product = Product(kind, content, 96, torch.empty(96, 96, dtype=KINDS[kind].product))
    assert product.right()


@pytest.mark.parametrize(
    ("harm", "contents"),
    [
        (lambda out: out[-1, 5].add_(1.0), CONTENTS),
        (lambda out: out.mul_(1.05), ("rand", "randn")),
        (lambda out: out[0, 0].fill_(torch.nan), CONTENTS),
        (lambda out: out.copy_(out.t().contiguous()), ("randn",)),
    ],
    ids=["element", "scale", "nan", "transposed"],
)
def test_product_check_finds_wrong_elements(harm, contents):
    for content in contents:
        product = Product("bf16", content, 64, torch.empty(64, 64, dtype=torch.bfloat16))
        multiply = product.multiply
        with mock.patch.object(product, "multiply", lambda: (multiply(), harm(product.out))):  # noqa: B023
            assert not product.right(), content


def test_a_wrong_product_fails_the_command(known_peak, capsys):
    with mock.patch.object(Product, "multiply", lambda self: None):
        assert main(["matmul", *QUICK, "dtypes=fp32", "max=32", "contents=rand"]) == 1
    out, err = capsys.readouterr()
    assert "WRONG: rand" in out and err == "error: WRONG products: fp32 rand of 32\n"


def test_size_beyond_free_memory_is_skipped(known_peak, monkeypatch, tmp_path, capsys):
    enough = Options(device="cpu").need("fp32", 32)
    monkeypatch.setattr(matmul, "free_memory_bytes", lambda device: enough)
    results = run_bench(["dtypes=fp32"], tmp_path)
    assert [r["size"] for r in results["rows"]] == [32]
    assert "fp32       64  skipped: needs" in capsys.readouterr().out


@pytest.mark.parametrize("contents", ["all", "randn"])
def test_need_covers_what_is_allocated(contents):
    """Operands and the product that they share, without what PyTorch holds for itself."""
    options, size = Options(device="cpu", contents=contents), 256
    for kind in options.kinds:
        out = torch.empty(size, size, dtype=KINDS[kind].product)
        products = [Product(kind, name, size, out) for name in options.names]
        held = out.nbytes + sum(p.a.nbytes + p.b.nbytes for p in products)
        assert held < options.need(kind, size) < 4 * held


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["min=128", "max=64"], "min=128 is more than max=64"),
        (["min=8192"], "min=8192 is more than max=4096"),
        (["dtypes=fp16"], "fp16: no such dtype of this device; did you mean 'bf16'? known: fp32, bf16"),
        (["contents=rnd"], "rnd: no such contents; did you mean 'rand'?"),
        (["min=16777216", "max=16777216"], "are free: lower min"),
        (["out=/nowhere/x.json"], "the folder /nowhere does not exist"),
        (["plot=x.pdf"], "let the name end in .png"),
        (["size=4"], "size: no such key"),
    ],
)
def test_bad_argument_is_one_line_error(args, said, capsys):
    assert main(["matmul", "device=cpu", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and said in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_missing_gpu_is_refused(capsys):
    assert main(["matmul", "device=cuda"]) == 2
    assert "device=cuda: this machine has no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_bench_on_gpu_gives_correct_products(tmp_path):
    results = run_bench(["device=cuda", "min=1024", "max=2048"], tmp_path)
    assert {r["dtype"] for r in results["rows"]} >= {"fp32", "bf16"}
    assert all(of["right"] and 0 < of["hfu"] < 1.1 for r in results["rows"] for of in r["contents"].values())
