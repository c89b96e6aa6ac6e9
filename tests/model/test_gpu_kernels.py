"""The kernels of a GPU that compute many tiles at once: how they are called, against a brute-force masked softmax."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from ndtrain.model.attention import flex
from ndtrain.model.attention.core import local_core
from ndtrain.model.attention.scores import AttentionMod, Scores
from ndtrain.model.attention.tiles import SequenceSlice
from tests.lib.gpu_kernels import flash_attention_backward, flash_attention_forward, on_a_gpu
from tests.model.test_attention import (
    VARIANTS,
    assert_close,
    brute_force,
    out_and_gradients,
    random_documents,
    random_qkv,
    variant,
)

FLASH = {"packed": {"documents": True}, "window": {"window": 11}, "packed, window": {"documents": True, "window": 11}}


def flash_scores(name: str, B: int, T: int) -> Scores:
    """The scores that flash computes by segments, with a window shorter than some documents."""
    given = FLASH[name]
    documents = random_documents(B, T, seed=5, mean=T // 6) if "documents" in given else None
    return Scores(window=given.get("window"), documents=documents)


def check(name: str, scores: Scores, dtype: torch.dtype, bound: float, heads=(4, 2), length: int = 64) -> list[dict]:
    q, k, v, grad = random_qkv(2, length, *heads, 16, dtype)
    with on_a_gpu(name) as calls:
        got = out_and_gradients(lambda *x: local_core(*x, SimpleNamespace(scores=scores)), q, k, v, grad)
    wide = [x.double() for x in (q, k, v, grad)]
    assert all(x.dtype == dtype for x in got)
    assert_close(got, out_and_gradients(lambda *x: brute_force(*x, scores), *wide), bound, 10 * bound)
    return calls


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("name", FLASH)
def test_flash_with_documents_equals_masked_softmax(name, heads):
    scores = flash_scores(name, 2, 64)
    calls = check("flash", scores, torch.float64, 1e-10, heads)
    check("flash", scores, torch.float32, 2e-6, heads)
    assert len(calls) == 1, "one call for all documents of all rows"
    assert calls[0]["tokens"] == 2 * 64 and calls[0]["left"] == (-1 if scores.window is None else 10)


@pytest.mark.parametrize("name", [*(pytest.param(n, marks=pytest.mark.full) for n in VARIANTS[:-1]), VARIANTS[-1]])
def test_flex_equals_masked_softmax(name):
    check("flex", variant(name, 2, 64, 4), torch.float64, 1e-10)
    check("flex", variant(name, 2, 64, 4), torch.float32, 2e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", ["everything", "packed"])
def test_flex_over_several_blocks_equals_masked_softmax(name, monkeypatch):
    """Some blocks of scores are computed without a mask, and some not at all."""
    monkeypatch.setattr(flex, "BLOCK_SIZE", 16)
    check("flex", variant(name, 2, 130, 4), torch.float64, 1e-10, length=130)


def test_flex_call_selects_expected_blocks():
    """For four blocks of queries, count the blocks of keys computed with a mask and without."""
    whole = (SequenceSlice(0, 512, 0, 1),)
    blocks = lambda documents, window, masked=False: (
        flex._flex_call(whole, whole, documents, window, masked, torch.device("cpu")).inputs.blocks
    )
    counts = lambda b, name: b[f"{name}_num_blocks"][0, 0].tolist()
    plain = blocks(None, None)
    assert counts(plain, "kv") == [1, 1, 1, 1] and counts(plain, "full_kv") == [0, 1, 2, 3]
    assert counts(plain, "full_q") == [3, 2, 1, 0]
    assert counts(blocks(None, None, masked=True), "kv") == [1, 2, 3, 4]
    packed = blocks(((0, 256),), None)
    assert counts(packed, "kv") == [1, 1, 1, 1] and counts(packed, "full_kv") == [0, 1, 0, 1]
    window = blocks(None, 200)
    assert counts(window, "kv") == [1, 2, 3, 3] and counts(window, "full_kv") == [0, 0, 0, 0]


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_compiled_flex_forward_equals_masked_softmax(name):
    """Inductor's CPU kernel has only a forward, without log-sum-exp. The test uses one row: if rows have different
    documents, the kernel of torch 2.13 uses the documents of a wrong row."""
    q, k, v, _ = (x.transpose(1, 2) for x in random_qkv(1, 256, 4, 2, 16, torch.float32))
    scores, whole = variant(name, 1, 256, 4), (SequenceSlice(0, 256, 0, 1),)
    call = flex.flex_call(scores, whole, whole, 256, q)
    operations = flex.Operations(scores.window, scores.softcap, scores.mod or AttentionMod(), 0)
    compiled = torch.compile(partial(flex.attention, operations, with_lse=False), dynamic=False, fullgraph=True)
    with torch.no_grad():
        got = compiled(q, k, v, call._inputs(q, scores)).transpose(1, 2)
    wide = [x.transpose(1, 2).double() for x in (q, k, v)]
    expected = brute_force(*wide, scores)
    assert (got - expected).abs().max() < 2e-6 * expected.abs().max()


# --------------------------------------------------------------------------------------------------------- signatures


@pytest.mark.parametrize(
    "stub, op",
    [
        (flash_attention_forward, torch.ops.aten._flash_attention_forward.default),
        (flash_attention_backward, torch.ops.aten._flash_attention_backward.default),
    ],
)
def test_kernel_stubs_have_signatures_of_pytorch(stub, op):
    """Further arguments of the op have defaults."""
    import inspect

    named, schema = list(inspect.signature(stub).parameters.values()), op._schema.arguments
    known = {a.name: a for a in schema}
    positional = [p.name for p in named if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [a.name for a in schema if not a.kwarg_only]
    assert all(known[p.name].kwarg_only for p in named if p.kind is p.KEYWORD_ONLY)
    assert all(a.has_default_value() for a in schema if a.name not in {p.name for p in named})


@pytest.mark.parametrize("heads", [4, 2])
def test_flash_with_documents_fits_pytorch_signatures(heads):
    """Fake GPU tensors have only shapes: the ops accept our arguments and return the results we read."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ndtrain.model.attention.varlen import varlen_calls

    whole, documents = (SequenceSlice(0, 48, 0, 1),), ((0, 5, 40), (0, 17))
    with FakeTensorMode(allow_non_fake_inputs=True):
        ((call,),) = varlen_calls(whole, whole, 48, documents, 9, 2, torch.device("cpu"))
        make = lambda n: torch.empty(2, 48, n, 16, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        q, k, v = make(4), make(heads), make(heads)
        cuda = lambda s: type(s)(torch.empty(s.cu.shape, dtype=torch.int32, device="cuda"), s.most, s.index)
        call = type(call)(cuda(call.queries), cuda(call.keys), call.left, call.right, call.first)
        out, lse = call.forward(q, k, v, Scores())
        assert out.shape == q.shape and lse.shape == q.shape[:-1] and lse.dtype == torch.float32
        gradients = call.backward(torch.empty_like(out), q, k, v, out, lse, Scores())
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
        assert all(x.device.type == "cuda" for x in (out, lse, *gradients))
