"""Messages in a store that strangers may write to."""

import json
from datetime import timedelta
from threading import Timer

import pytest
import torch.distributed as dist

from lab.scale.counted_store import CountedStore
from ndtrain.run import signed_store
from ndtrain.run.signed_store import TOKEN, SignedStore


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def messages(store) -> SignedStore:
    return SignedStore(store, "attempt", "secret")


@pytest.mark.parametrize("value", ["", 0, False, [], {"a": [1, 2.5, None]}, "ü"])
def test_signed_message_round_trips(messages, store, value):
    messages.put("key", value)
    other = SignedStore(store, "attempt", "secret")
    assert other.read("key") == value and other.read_all(["key"]) == {"key": value}
    assert other.wait("key", 1) == value and other.wait_all(["key"], 1) == {"key": value}


FORGED = ["1", "", " ", f"{'0' * 64} 1", "unsigned 1", f"{'é' * 64} 1", "\x80"]


@pytest.mark.parametrize("text", FORGED)
def test_a_forged_message_is_absent_and_named_once(messages, store, text, capsys, caplog):
    store.set("attempt/hang/called", text)
    assert messages.read("hang/called") is None and messages.read_all(["hang/called"]) == {}
    assert messages.wait_all(["hang/called"], 0) == {}
    with pytest.raises(dist.DistStoreError, match="attempt/hang/called signed by this job arrived within 0 s"):
        messages.wait("hang/called", 0)
    err = capsys.readouterr().err
    assert err.count("ignored the message attempt/hang/called, which is not signed by this job") == 1 == err.count("\n")
    assert len(caplog.records) == 1


def test_a_message_counts_only_under_its_key(messages, store):
    messages.put("report/1", "rank 1")
    store.set("attempt/report/2", store.get("attempt/report/1"))
    store.set("other/report/1", store.get("attempt/report/1"))
    assert messages.read("report/2") is None and SignedStore(store, "other", "secret").read("report/1") is None
    assert messages.read("report/1") == "rank 1"


def test_message_of_other_job_or_unsigned_is_absent(messages, store):
    for stranger in (SignedStore(store, "attempt", "guess"), SignedStore(store, "attempt", "")):
        stranger.put("key", 1)
        assert messages.read("key") is None


def test_without_token_any_json_is_accepted(store, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    messages = SignedStore(store, "attempt")
    SignedStore(store, "attempt", "of someone").put("key", 1)
    assert messages.read("key") == 1
    for text in ("unsigned {", "unsigned " + "[" * 100_000, "", "unsigned \xff"):
        store.set("attempt/key", text)
        assert messages.read("key") is None, text[:20]


def test_token_is_read_from_environment(store, monkeypatch):
    monkeypatch.setenv(TOKEN, "secret")
    SignedStore(store, "job").within("attempt").put("key", 1)
    assert SignedStore(store, "job/attempt", "secret").read("key") == 1
    assert "secret" not in store.get("job/attempt/key").decode()


def test_too_long_message_is_not_parsed(messages, monkeypatch):
    messages.put("key", "x" * 100)
    monkeypatch.setattr(signed_store, "MOST_BYTES", 100)
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("parsed"))
    assert messages.read("key") is None


def test_wait_ignores_forged_message(messages, store):
    store.set("attempt/key", "1")
    writer = Timer(0.1, lambda: SignedStore(store, "attempt", "secret").put("key", "genuine"))
    writer.start()
    assert messages.wait("key", 20) == "genuine"
    writer.join()


def test_wait_all_returns_messages_that_arrived(messages):
    messages.put("1", "one")
    assert messages.wait_all(["1", "2"], 0) == {"1": "one"}


@pytest.mark.parametrize("absent", [(), (0,), (499,), (17, 300, 301)])
def test_wait_all_looks_for_few_missing_messages_in_few_operations(store, absent):
    counted = CountedStore(store)
    messages = SignedStore(counted, "attempt", "secret")
    there = {str(n): n for n in range(500) if n not in absent}
    messages.put_all(there)
    assert messages.wait_all(map(str, range(500)), 0) == there
    assert counted.operations.total() < 3 + 4 * 9 * max(1, len(absent)), counted.operations


def test_claim_is_won_by_one_process(messages, store):
    other = SignedStore(store, "attempt", "secret")
    assert messages.claim("reporter", 3) == 3 and other.claim("reporter", 5) == 3
    store.set("attempt/reporter", "7")
    assert other.claim("reporter", 5) == 5 and messages.claim("reporter", 3) == 5, "a forged claim is replaced"


def test_signed_store_works_over_tcp():
    """PyTorch's TCP store has operations that a HashStore does not have."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    messages = SignedStore(server, "attempt", "secret")
    messages.put_all({"1": "one", "2": "two"})
    assert messages.read_all(["1", "2"]) == {"1": "one", "2": "two"} and messages.read("3") is None
    assert messages.claim("reporter", 3) == 3 and messages.claim("reporter", 5) == 3
