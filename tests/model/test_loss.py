"""The loss of a chunk's logits: its compiled form is the same as op by op."""

from unittest import mock

import pytest
import torch

from ndtrain.model.loss import IGNORE, LOCAL, chunked_loss, compiled_cross_entropy, cross_entropy

V = 101


def losses_of(x, weight, labels, form, wanted):
    """(loss, gradient of x, gradient of the weight) over chunks of 16 tokens, the last of which is shorter."""
    dw = torch.zeros(weight.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    add = lambda a, b: dw.add_(a @ b)
    scale = torch.tensor(0.1, dtype=dw.dtype)
    total, dx = chunked_loss(x, weight, labels, scale, 16, wanted, add, LOCAL, form)
    return [total, dx, dw] if wanted else [total]


@pytest.fixture
def compiled():
    """The compiled form, whose graphs run op by op."""
    compile_ = torch.compile
    compiled_cross_entropy.cache_clear()
    with mock.patch.object(torch, "compile", lambda f: compile_(f, backend="aot_eager")):
        yield compiled_cross_entropy()
    compiled_cross_entropy.cache_clear()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_compiled_is_the_same(compiled, dtype, bound):
    torch.manual_seed(0)
    x, weight = torch.randn(42, 24, dtype=dtype), torch.randn(V, 24, dtype=dtype)
    labels = torch.randint(0, V, (42,)).masked_fill(torch.rand(42) < 0.3, IGNORE)
    for wanted in (True, False):
        with torch.no_grad():
            want, got = (losses_of(x, weight, labels, f, wanted) for f in (cross_entropy, compiled))
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and (a - b).norm() <= bound * b.norm()
