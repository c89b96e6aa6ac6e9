"""Messages between leaders: each survives JSON, and one of another form is refused with ValueError."""

import json
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndtrain.islands import messages as m
from ndtrain.islands.epoch import MOST_ISLANDS, MOST_TEXT, Epoch, Member, epoch_of, member_of
from ndtrain.islands.messages import from_json, start_of, to_json

MEMBERS = (Member("a", "a#1", "host:1", 2, 1.5), Member("b", "b#1", "host:2"))
EPOCH = Epoch(3, MEMBERS, 7, (4, 4), ("b",), ("a",), (((0, 4), (6, 8)), ((4, 6),)))
START = m.Start(5, "hash", {"model": "tiny"})
ONE_OF_EACH = [
    m.Beat(2, None, 0.0, False),
    m.Beat(2, 7, 1.5, True),
    m.Beat(2, 7, 1.5, True, 8),
    m.Join(START),
    m.Refuse("because"),
    m.Meet(MEMBERS),
    m.Prepare(3, (1, "a"), 9),
    m.Promise(3, (1, "a"), 9, 5, True, START, (0, ""), None),
    m.Promise(3, (2, "b"), 9, None, False, START, (1, "a"), EPOCH),
    m.Busy(3, (2, "b")),
    m.Accept((1, "a"), EPOCH),
    m.Accepted(3, (1, "a")),
    m.Decided(EPOCH),
]
OTHERS = [None, True, -1, 1.5, float("nan"), float("inf"), "x" * (MOST_TEXT + 1), [], {}, [[]], 10**400]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
named = pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda x: type(x).__name__)


def sent(message) -> dict:
    """Return a message as the receiver sees it."""
    return json.loads(json.dumps(to_json(message)))


def places(data, path=()):
    """Yield the path of each value inside JSON."""
    yield path
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


def changed(data, path, value):
    """Return JSON in which the value at a path is another one."""
    if not path:
        return value
    data = deepcopy(data)
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


def test_one_of_each_are_all_kinds():
    assert {type(x) for x in ONE_OF_EACH} == set(m.Message.__args__)


@named
def test_from_json_of_to_json_is_equal(message):
    assert from_json(sent(message)) == message


@named
def test_from_json_missing_field_raises_value_error(message):
    for name in sent(message):
        with pytest.raises(ValueError):
            from_json({k: v for k, v in sent(message).items() if k != name})


@named
def test_from_json_extra_field_raises_value_error(message):
    data = sent(message)
    for path in places(data):
        at = data
        for key in path:
            at = at[key]
        if isinstance(at, dict) and path[-1:] != ("plan",):  # a plan has any keys
            with pytest.raises(ValueError):
                from_json(changed(data, path, {**at, "more": 1}))


def is_same_kind(old, new) -> bool:
    """Return True if a new value may be allowed at the place of an old one."""
    numbers = lambda x: isinstance(x, int | float) and not isinstance(x, bool)
    if isinstance(old, bool | list | dict) and type(old) is type(new):
        return True
    return numbers(old) and numbers(new) and 0 <= new < 2**40


@named
def test_from_json_field_of_another_type_raises_value_error(message):
    data = sent(message)
    optional = {"done", "accepted"}
    for path in places(data):
        at = data
        for key in path:
            at = at[key]
        for other in OTHERS:
            allowed = path[-1:] and path[-1] in optional and (other is None or at is None)
            if is_same_kind(at, other) or allowed:
                continue
            with pytest.raises(ValueError):
                from_json(changed(data, path, other))
                pytest.fail(f"{other!r:.40} at {path}")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("kind",), []),
        (("kind",), {}),
        (("epoch", "number"), True),
        (("epoch", "begin"), True),
        (("epoch", "members", 0, 3), True),
        (("epoch", "members", 0, 4), True),
        (("epoch", "number"), 10**400),
        (("epoch", "begin"), 10**400),
        (("epoch", "members", 0, 3), 10**400),
    ],
)
def test_from_json_value_of_a_similar_type_raises_value_error(path, value):
    with pytest.raises(ValueError):
        from_json(changed(sent(m.Decided(EPOCH)), path, value))


@named
@settings(max_examples=60)
@given(data=st.data())
def test_from_json_any_value_at_any_place_raises_only_value_error(message, data):
    whole = sent(message)
    path = data.draw(st.sampled_from(list(places(whole))))
    value = data.draw(json_values)
    try:
        made = from_json(changed(whole, path, value))
    except ValueError:
        return
    assert from_json(json.loads(json.dumps(to_json(made)))) == made


@settings(max_examples=200)
@given(json_values)
def test_readers_of_any_value_raise_only_value_error(value):
    for read in (from_json, start_of, epoch_of, member_of):
        try:
            read(value)
        except ValueError:
            continue
        raise AssertionError(f"{read.__name__} takes {value!r}")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("number",), 0),
        (("begin",), 0),
        (("members",), []),
        (("members",), [list(MEMBERS[0])] * 2),
        (("members",), [[f"i{k}", "x", "", 1, 1.0] for k in range(MOST_ISLANDS + 1)]),
        (("members", 0, 0), ""),
        (("members", 0, 1), ""),
        (("members", 0, 3), 0),
        (("members", 0, 4), -0.5),
        (("members", 0, 4), 1e12),
        (("shares",), [8]),
        (("shares", 0), -1),
        (("shares", 0), 2**40),
        (("learners",), ["c"]),
        (("holders",), ["c"]),
        (("opening",), [[]]),
        (("opening", 0), [[4, 4]]),
        (("opening", 0), [[-1, 4]]),
        (("opening", 0), [[0, 2**40]]),
        (("opening", 0), [[0, 1, 2]]),
        (("opening", 0), [[k, k + 1] for k in range(MOST_ISLANDS + 1)]),
    ],
)
def test_epoch_of_field_out_of_bounds_raises_value_error(path, value):
    data = sent(m.Decided(EPOCH))["epoch"]
    assert epoch_of(data) == EPOCH
    with pytest.raises(ValueError):
        epoch_of(changed(data, path, value))


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (m.Accepted(3, (1, "a")), ("kind",), "Stop"),
        (m.Accepted(3, (1, "a")), ("number",), 2**53),
        (m.Beat(2, 7, 1.5, True), ("speed",), 1e12),
        (m.Beat(2, 7, 1.5, True), ("done",), -1),
        (m.Beat(2, 7, 1.5, True), ("computed",), -1),
        (m.Beat(2, 7, 1.5, True), ("computed",), None),
        (m.Busy(3, (2, "b")), ("ballot",), [1]),
        (m.Busy(3, (2, "b")), ("ballot",), [1, "a", 2]),
        (m.Busy(3, (2, "b")), ("ballot",), ["a", 1]),
        (m.Join(START), ("start", "plan"), {str(k): "" for k in range(m.MOST_KEYS + 1)}),
        (m.Join(START), ("start", "plan"), {"k": 1}),
        (m.Join(START), ("start", "plan"), {"k" * (MOST_TEXT + 1): ""}),
        (m.Meet(MEMBERS), ("members",), [list(MEMBERS[0])] * (MOST_ISLANDS + 1)),
    ],
)
def test_from_json_field_out_of_bounds_raises_value_error(message, path, value):
    with pytest.raises(ValueError):
        from_json(changed(sent(message), path, value))
