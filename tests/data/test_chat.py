"""Conversations: what is learned of them, as `transformers` masks it; how they are packed; and what is refused."""

import copy
import json
from datetime import date, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import chat_template_utils

from ndtrain.config import Config, ConfigError, load_config, resolve
from ndtrain.data import microbatches, open_data
from ndtrain.data.chat.conversations import Conversations
from ndtrain.data.chat.dataset import ChatData
from ndtrain.data.chat.packing import PackedConversations, pack
from ndtrain.data.chat.rows import RowError, Span, samples_of, token_weights
from ndtrain.data.chat.template import ChatTemplate, TemplateError, read_template
from ndtrain.data.token_array import Packing
from ndtrain.model.vocabulary import IGNORE
from tests.lib.chat_folders import STYLES, VOCAB, write_tokenizer
from tests.lib.helpers import config_refusal

DAY = date(2026, 1, 1)
HELLO = [{"role": "user", "content": "the quick fox?"}, {"role": "assistant", "content": "a lazy dog."}]
LONG = [*HELLO, {"role": "user", "content": "jumps over"}, {"role": "assistant", "content": "seven wizards"}]
SYSTEM = [{"role": "system", "content": "mix potions"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple[str, bool], Path]:
    """Tokenizers of every style, whose template marks what is generated or does not."""
    root = tmp_path_factory.mktemp("tokenizers")
    made = {(style, marked): root / f"{style}-{marked}" for style in STYLES for marked in (True, False)}
    for (style, marked), folder in made.items():
        write_tokenizer(folder, style, marked)
    return made


@cache
def composed() -> Config:
    """Composing takes longer than most of these tests."""
    return load_config(["recipe=llama_debug", "data=chat", f"model.vocab_size={VOCAB}", "train.global_batch=2"])


def config(folder: Path, path: Path, seq_len: int = 128, **data: Any) -> Config:
    cfg = copy.deepcopy(composed())
    cfg.train.seq_len = seq_len
    keys = {"path": str(path), "tokenizer": str(folder), "validation": 0.0, "cache": f"{path.parent}/cache", **data}
    for key, value in keys.items():
        setattr(cfg.data, key, value)
    return resolve(cfg, 1)


@cache
def tokenizer_of(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def opened(folder: Path, rows: list[Any], tmp_path: Path, **keys: Any) -> ChatData:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return open_data(config(folder, path, **keys))


def conversations(data: ChatData) -> list[tuple[list[int], list[int]]]:
    """(ids, whether each is learned) of every conversation of the training split, in order."""
    held = data.corpus.train
    ends = zip([0, *held.ends[:-1]], held.ends, strict=True)
    return [(held.ids[a:b].tolist(), held.learned[a:b].tolist()) for a, b in ends]


class _Today(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 1, 1)


@pytest.fixture
def theirs(monkeypatch):
    """`transformers` with the date that ndtrain gives to templates."""
    monkeypatch.setattr(chat_template_utils, "datetime", _Today)
    chat_template_utils._compile_jinja_template.cache_clear()

    def encode(folder: Path, messages: list, **more: Any) -> Any:
        return tokenizer_of(folder).apply_chat_template(messages, return_dict=True, **more)

    yield encode
    chat_template_utils._compile_jinja_template.cache_clear()


# --------------------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_marked_template_learns_assistant_mask_of_transformers(style, turns, folders, theirs, tmp_path):
    messages = [message for _ in range(turns) for message in HELLO]
    if style != "mistral":
        messages = [*SYSTEM, *messages]
    folder = folders[style, True]
    want = theirs(folder, messages, return_assistant_tokens_mask=True)
    assert 0 < sum(want["assistant_masks"]) < len(want["assistant_masks"])
    ((ids, learned),) = conversations(opened(folder, [{"messages": messages}], tmp_path))
    assert ids == want["input_ids"] and learned == want["assistant_masks"]
    bos = STYLES[style]["special"].index(STYLES[style]["bos"]) if STYLES[style]["bos"] else None
    assert bos is None or ids.count(bos) == 1, "the token that begins a text is there once"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("marked", [False, True])
def test_completion_is_learned_after_templated_prompt(style, marked, folders, theirs, tmp_path):
    """The rule of TRL's `completion_only_loss`: all tokens after the prompt with its generation prompt."""
    folder, (prompt, completion) = folders[style, marked], (LONG[:3], LONG[3:])
    before = theirs(folder, prompt, add_generation_prompt=True)["input_ids"]
    whole = theirs(folder, LONG)["input_ids"]
    assert whole[: len(before)] == before
    row = {"prompt": prompt, "completion": completion}
    ((ids, learned),) = conversations(opened(folder, [row], tmp_path))
    assert ids == whole and learned == [0] * len(before) + [1] * (len(whole) - len(before))


@pytest.mark.parametrize("style", STYLES)
def test_plain_text_completion_needs_no_template(style, folders, tmp_path):
    folder = folders[style, False]
    tokenizer = tokenizer_of(folder)
    prompt, completion = "the quick brown", " fox jumps"
    ((ids, learned),) = conversations(opened(folder, [{"prompt": prompt, "completion": completion}], tmp_path))
    before = tokenizer(prompt)["input_ids"]
    assert (
        ids == tokenizer(prompt + completion + tokenizer.eos_token)["input_ids"] and ids[-1] == tokenizer.eos_token_id
    )
    assert learned == [0] * len(before) + [1] * (len(ids) - len(before))


@pytest.mark.parametrize("style", ["llama3", "mistral"])
def test_unmarked_template_learns_text_after_each_prompt(style, folders, theirs, tmp_path):
    folder = folders[style, False]
    ((ids, learned),) = conversations(opened(folder, [{"messages": LONG}], tmp_path))
    length = lambda count, **more: len(theirs(folder, LONG[:count], **more)["input_ids"])
    want = [0] * len(ids)
    for turn in (1, 3):
        start, end = length(turn, add_generation_prompt=True), length(turn + 1)
        want[start:end] = [1] * (end - start)
    assert ids == theirs(folder, LONG)["input_ids"] and learned == want


def test_turns_rerendered_later_become_own_conversations(folders, theirs, tmp_path):
    """The template drops the thoughts of earlier turns. So each turn is learned in a conversation that ends with it."""
    folder = folders["qwen3", False]
    data = opened(folder, [{"messages": LONG}, {"messages": HELLO}], tmp_path)
    got = conversations(data)
    assert len(got) == 3 and data.corpus.train.rows == 2
    for (ids, learned), count in zip(got, (2, 4, 2), strict=True):
        before = theirs(folder, LONG[: count - 1], add_generation_prompt=True)["input_ids"]
        assert ids == theirs(folder, LONG[:count])["input_ids"]
        assert learned == [0] * len(before) + [1] * (len(ids) - len(before))
    (line,) = [line for line in data.warnings(config(folder, tmp_path / "chat.jsonl")) if "became" in line]
    assert "2 rows became 3 conversations" in line


def test_consecutive_assistant_turns_stay_in_one_conversation(folders, tmp_path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "mix", "arguments": {}}}]}
    messages = [HELLO[0], call, {"role": "tool", "content": "fox"}, HELLO[1]]
    ((_, learned),) = conversations(opened(folders["qwen3", False], [{"messages": messages}], tmp_path))
    assert learned.count(1) > 10 and [a < b for a, b in pairwise(learned)].count(True) == 2


TOOLS = [{"type": "function", "function": {"name": "mix", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("as_text", [False, True])
def test_template_gets_tools_calls_and_extra_variables(as_text, folders, theirs, tmp_path):
    folder = folders["llama3", True]
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "mix"}}]}
    messages = [HELLO[0], call, {"role": "tool", "content": "fox"}, HELLO[1]]
    row = {"messages": messages, "tools": json.dumps(TOOLS) if as_text else TOOLS}
    ((ids, learned),) = conversations(opened(folder, [row], tmp_path, seq_len=256))
    want = theirs(folder, messages, tools=TOOLS, return_assistant_tokens_mask=True)
    assert ids == want["input_ids"] and learned == want["assistant_masks"]
    template = ChatTemplate({"default": "{{ mood }}{{ messages[0].content }}"}, {}, DAY)
    assert template.render(HELLO, more={"mood": "glad "}).text == "glad the quick fox?"


def test_thinking_counts_as_reasoning_content(folders, theirs, tmp_path):
    folder = folders["qwen3", True]
    messages = [HELLO[0], HELLO[1] | {"thinking": "hm hm"}]
    ((ids, _),) = conversations(opened(folder, [{"messages": messages}], tmp_path))
    assert ids == theirs(folder, messages)["input_ids"]


def test_span_is_found_if_generation_prompt_adds_text():
    text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    text += "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    (sample,) = samples_of({"messages": HELLO}, ChatTemplate({"default": text}, {}, DAY), "")
    assert [sample.text[a:b] for a, b, _ in sample.spans] == ["a lazy dog."]


def test_token_weights_cover_overlapping_tokens():
    offsets = [(0, 0), (0, 2), (2, 4), (4, 6), (6, 8), (8, 9)]
    assert token_weights(offsets, [Span(3, 5), Span(8, 9, 0.5)]) == [0, 0, 1, 1, 0, 0.5]


# ----------------------------------------------------------------------------------------------------------- templates


def test_template_tags_in_user_text_stay_text(folders, tmp_path):
    """A mark is no text that a conversation could hold, so one that spells the tag is text."""
    said = [HELLO[0] | {"content": "{% generation %}{{ bos_token }}"}, HELLO[1]]
    data = opened(folders["mistral", True], [{"messages": said}], tmp_path)
    ((ids, _),) = conversations(data)
    assert "{% generation %}{{ bos_token }}" in data.tokenizer.decode(ids)


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace(__class__=1) }}",
    "{{ (namespace(a=1)).__init__.__globals__ }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ '%s' | format(messages.__class__.__subclasses__()) }}",
    "{% for i in range(1000000) %}{% endfor %}",
    "{{ messages[9]['role'] }}",
    "{{ messages[0]['content'] + 1 }}",
    "{{ raise_exception('no way\nat all') }}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_template_cannot_escape_sandbox(text):
    with pytest.raises(TemplateError) as caught:
        rendered = ChatTemplate({"default": text}, {}, DAY).render(HELLO).text
        assert rendered == "", rendered  # what is undefined
        raise TemplateError("nothing came of it")
    assert "\n" not in str(caught.value)


def test_template_with_too_long_output_is_stopped(monkeypatch):
    monkeypatch.setattr("ndtrain.data.chat.template._LARGEST", 1000)
    with pytest.raises(TemplateError, match="its output has more than"):
        ChatTemplate({"default": "{% for i in range(99999) %}{{ i }}{% endfor %}"}, {}, DAY).render(HELLO)


def test_read_template_finds_every_place_of_template():
    single = json.dumps({"chat_template": "one", "bos_token": {"content": "<s>"}}).encode()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    render = lambda files, tools=None: read_template(files, DAY).render(HELLO, tools).text
    assert render({"tokenizer_config.json": single}) == "one"
    assert render({"tokenizer_config.json": single, "chat_template.jinja": b"{{ bos_token }}two"}) == "<s>two"
    listed = {"tokenizer_config.json": json.dumps({"chat_template": named}).encode()}
    assert render(listed) == "plain" and render(listed, TOOLS) == "tools"
    assert render({"chat_template.json": b'{"chat_template": "three"}'}) == "three"
    more = {"chat_template.jinja": b"four", "additional_chat_templates/tool_use.jinja": b"five"}
    assert render(more) == "four" and render(more, TOOLS) == "five"
    assert read_template({"tokenizer_config.json": b"{}"}, DAY) is None
    for broken in (b"[1]", b"{", b'{"chat_template": 3}', b'{"chat_template": "{% if %}"}', b"[" * 99999):
        with pytest.raises(TemplateError):
            read_template({"tokenizer_config.json": broken}, DAY)


def test_template_date_comes_from_configuration(folders, tmp_path):
    folder, rows = folders["llama3", True], [{"messages": HELLO}]
    told = lambda data: data.tokenizer.decode(conversations(data)[0][0])
    first = opened(folder, rows, tmp_path)
    assert "Today: 01 Jan 2026" in told(first)
    other = opened(folder, rows, tmp_path, date="2024-07-26")
    assert "Today: 26 Jul 2024" in told(other) and other.fingerprint != first.fingerprint
    assert jinja2.__version__ >= "3.1.6"


# ------------------------------------------------------------------------------------------------------------- packing


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
@settings(max_examples=100)
def test_packing_keeps_every_item_whole_and_fills_bins(lengths):
    plan = pack(np.array(lengths), 40)
    bins = np.split(plan.order, plan.ends[:-1])
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in held) for held in bins]
    assert max(totals) <= 40 and min(totals) > 0
    assert all(a + b > 40 for n, a in enumerate(totals) for b in totals[:n]), "two bins fit into one"
    assert [held[0] for held in bins] == sorted(held[0] for held in bins)


def test_packed_rows_restart_positions_and_mask_users(folders, tmp_path):
    folder = folders["llama3", True]
    rows = [{"messages": LONG if n % 3 else HELLO} for n in range(9)]
    data = opened(folder, rows, tmp_path)
    cfg = config(folder, tmp_path / "chat.jsonl")
    source = data.sequences(cfg, None, 0, None)
    seen = []
    for step in range(data.packed.count):
        for batch in microbatches(source, step, range(2), 1, packing=Packing(data.eos_id)):
            seen += conversations_of(batch)
    assert sorted(seen) == sorted(2 * [(ids[:-1], _labels(ids, learned)) for ids, learned in conversations(data)])


def _labels(ids: list[int], learned: list[int]) -> list[int]:
    return [i if known else IGNORE for i, known in zip(ids[1:], learned[1:], strict=True)]


def conversations_of(batch) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) of each conversation in a row, without its last token, which predicts nothing."""
    (starts,), found = batch.documents, []
    for a, b in zip(starts, [*starts[1:], batch.tokens.shape[1]], strict=True):
        tokens, labels = batch.tokens[0, a:b].tolist(), batch.labels[0, a:b].tolist()
        assert batch.positions[0, a:b].tolist() == list(range(b - a))
        if any(label != IGNORE for label in labels):
            assert labels[-1] == IGNORE
            found.append((tokens[:-1], labels[:-1]))
        else:
            assert b == batch.tokens.shape[1] and not any(tokens), "only padding learns nothing"
    return found


def test_too_long_conversation_is_cut_or_dropped_and_counted(folders, tmp_path):
    folder = folders["mistral", True]
    late = [{"role": "user", "content": "potions " * 60}, HELLO[1]]
    rows = [{"messages": HELLO}, {"messages": [*HELLO, *HELLO, *HELLO, *HELLO]}, {"messages": late}]
    data = opened(folder, rows, tmp_path, seq_len=32)
    (line,) = [line for line in data.warnings(config(folder, tmp_path / "chat.jsonl")) if "train.seq_len" in line]
    assert "2 of 3 conversations are longer than" in line and "1 are truncated, and 1, whose" in line
    assert data.packed.count == 2
    ids, learned = conversations(data)[1]
    assert [data.packed.tokens(1)[:32].tolist(), data.packed.weights(1)[1:32].tolist()] == [ids[:32], learned[1:32]]
    only_late = [{"messages": late}]
    with pytest.raises(ConfigError, match=r"no conversation has an answer within its first train.seq_len=32 tokens"):
        opened(folder, only_late, tmp_path, seq_len=32)


def test_the_first_token_of_a_conversation_is_never_learned():
    weights = np.array([0, 1, 0.5], np.float32)
    held = Conversations(np.arange(6), np.array([1, 1, 2, 1, 1, 1]), weights, np.array([3, 6]), np.array([1, 1]), 2)
    packed = PackedConversations.__new__(PackedConversations)
    packed._conversations, packed._seq_len, packed._order = held, 7, np.array([0, 1])
    packed._starts, packed._lengths, packed._ends = held.starts, held.lengths, np.array([2])
    assert packed.weights(0).tolist() == [0, 1, 0.5, 0, 1, 1, 0, 0]
    assert packed.starts(0).tolist() == [3, 6]


def test_conversations_are_cached(folders, tmp_path, monkeypatch):
    folder, rows = folders["qwen3", True], [{"messages": LONG}] * 3
    first = opened(folder, rows, tmp_path)
    monkeypatch.setattr("ndtrain.data.chat.conversations.samples_of", lambda *args: pytest.fail("rendered again"))
    monkeypatch.setattr("ndtrain.data.chat.packing.pack", lambda *args: pytest.fail("packed again"))
    again = open_data(config(folder, tmp_path / "chat.jsonl"))
    assert again.fingerprint == first.fingerprint and conversations(again) == conversations(first)
    (path,) = (tmp_path / "cache").glob("*.train.learned")
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(pytest.fail.Exception, match="rendered again"):
        open_data(config(folder, tmp_path / "chat.jsonl"))


def test_the_validation_split_holds_whole_rows(folders, tmp_path):
    folder = folders["qwen3", False]
    rows = [{"messages": LONG}] * 40
    data = opened(folder, rows, tmp_path, validation=0.3)
    held, trained = data.corpus.validation, data.corpus.train
    assert held.rows + trained.rows == 40 and 4 < held.rows < 20
    assert len(held.ends) == 2 * held.rows and len(trained.ends) == 2 * trained.rows
    split = data.validation_set(data.validation, config(folder, tmp_path / "chat.jsonl"))
    labels = sum(
        int((batch.labels != IGNORE).sum())
        for step in range(split.passes)
        for batch in microbatches(split, step, range(2), 1, packing=Packing(data.eos_id))
    )
    assert labels == int(held.learned.sum())


# ------------------------------------------------------------------------------------------------------------- weights


def weights_of(data: ChatData) -> list[list[float]]:
    """The weights of the learned tokens of every conversation of the training split, each value once, in order."""
    held = data.corpus.train
    ends = zip([0, *held.ends[:-1]], held.ends, strict=True)
    weights = [held.weights[held.learned[a:b]].tolist() for a, b in ends]
    return [[w for w in dict.fromkeys(each) if w] for each in weights]


@pytest.mark.parametrize("marked", [False, True])
def test_token_weight_is_row_weight_times_message_weight(marked, folders, tmp_path):
    user, answer = HELLO
    turns = [user, answer | {"weight": 0.5}, user, answer | {"weight": 0}, user, answer]
    rows = [
        {"messages": turns},
        {"messages": turns, "weight": 3},
        {"prompt": [user], "completion": [answer], "weight": 2},
    ]
    data = opened(folders["llama3", marked], rows, tmp_path)
    assert weights_of(data) == [[0.5, 1], [1.5, 3], [2]] and data.corpus.train.has_weights
    plain = opened(folders["llama3", marked], [{"messages": [user, answer, user, answer, user, answer]}], tmp_path)
    (whole, *_), (without, *_) = conversations(plain)[0], conversations(data)[0]
    assert whole == without, "the template does not see the weight"
    learned, fewer = conversations(plain)[0][1], [bool(known) for known in conversations(data)[0][1]]
    assert 0 < sum(fewer) < sum(learned) and all(a <= b for a, b in zip(fewer, learned, strict=True))


def test_batch_weights_belong_to_predicted_tokens(folders, tmp_path):
    user, answer = HELLO
    data = opened(folders["llama3", True], [{"messages": [user, answer | {"weight": 0.5}]}], tmp_path)
    cfg = config(folders["llama3", True], tmp_path / "chat.jsonl")
    source = data.sequences(cfg, None, 0, None)
    (batch,) = microbatches(source, 0, [0], 1, packing=Packing(data.eos_id), columns=["weights"])
    assert torch.equal(batch.labels != IGNORE, batch.columns["weights"] != 0)
    assert set(batch.columns["weights"].unique().tolist()) == {0, 0.5}
    (plain,) = microbatches(source, 0, [0], 1, packing=Packing(data.eos_id))
    assert torch.equal(plain.labels, batch.labels) and not plain.columns


def test_objective_that_ignores_weights_gives_warning(folders, tmp_path):
    folder, (user, answer) = folders["llama3", True], HELLO
    cfg = config(folder, tmp_path / "chat.jsonl")
    warned = lambda data: any("objective=weighted" in line for line in data.warnings(cfg))
    assert warned(opened(folder, [{"messages": HELLO, "weight": 2}], tmp_path))
    assert not warned(opened(folder, [{"messages": [user, answer | {"weight": 0}, user, answer]}], tmp_path))
    cfg = cfg.unfrozen()
    cfg.objective.name = "weighted"
    assert not warned(opened(folder, [{"messages": HELLO, "weight": 2}], tmp_path))


def test_the_fingerprint_changes_with_the_weights(folders, tmp_path):
    rows = [[{"messages": HELLO, "weight": weight}] for weight in (1, 2, 3)]
    assert len({opened(folders["llama3", True], each, tmp_path).fingerprint for each in rows}) == 3


# -------------------------------------------------------------------------------------------------------------- errors

REFUSED = {  # a row -> what the line must say behind the file and the row
    "no JSON": ("{nothing\n", "not a JSON object"),
    "deep JSON": ("[" * 100000 + "\n", "not a JSON object"),
    "a list": ([1], "not a JSON object but a list"),
    "other fields": ({"conversations": []}, "neither messages nor prompt and completion: rename its fields (conv"),
    "both": ({"messages": HELLO, "prompt": "x"}, "both messages and prompt"),
    "half": ({"prompt": "x"}, "neither messages nor prompt and completion"),
    "no list": ({"messages": "hi"}, "messages must be a list of messages, not a string"),
    "empty": ({"messages": []}, "messages is empty: remove the row"),
    "mixed": ({"prompt": "x", "completion": HELLO[1:]}, "prompt must be a list of messages, not a string"),
    "no completion": ({"prompt": "x", "completion": ""}, "completion is empty"),
    "no message": ({"messages": ["hi"]}, "message 1 of messages must be an object, not a string"),
    "no role": ({"messages": [{"content": "x"}]}, "message 1 of messages has no role"),
    "strange role": ({"messages": [HELLO[0], {"role": "asistant", "content": "x"}]}, "unknown role 'asistant'; known"),
    "no content": ({"messages": [HELLO[0], {"role": "assistant"}]}, "message 2 of messages has neither content nor"),
    "a number": ({"messages": [{"role": "user", "content": 3}]}, "message 1 of messages must be a string, not 3"),
    "weight 0": ({"messages": HELLO, "weight": 0}, "has weight 0: remove the row"),
    "a negative weight": ({"messages": HELLO, "weight": -1}, "the row has weight -1: it must be 0, or a number from"),
    "a text as weight": ({"messages": [HELLO[0], HELLO[1] | {"weight": "1"}]}, "message 2 of the row has weight a st"),
    "no weight": ({"messages": [HELLO[0], HELLO[1] | {"weight": 0}]}, "no assistant message with a weight"),
    "no answer": ({"messages": HELLO[:1]}, "has no assistant message"),
    "refused by the template": ({"messages": [HELLO[0], *HELLO]}, "roles must alternate user/assistant"),
    "tools in words": ({"messages": HELLO, "tools": "mix"}, "tools is a string that is not JSON"),
    "one tool": ({"messages": HELLO, "tools": {}}, "tools must be a list, not an object"),
    "variables": ({"messages": HELLO, "chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
    "half a pair": ('{"prompt": "\\ud800", "completion": "x"}\n', "unpaired surrogate"),
}  # fmt: skip


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_row_is_named_by_line(case, marked, folders, tmp_path):
    row, line = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        opened(folders["mistral", marked], [{"messages": HELLO}, "\n", row], tmp_path)
    said = str(caught.value)
    assert said.startswith(f"data.path: {tmp_path}/chat.jsonl:3: ") and line in said and "\n" not in said


def test_template_that_rewrites_earlier_messages_is_refused(folders, tmp_path):
    """Without markers, nobody can tell where the answer begins."""
    text = "{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    with pytest.raises(RowError, match=r"renders the messages before message 2 differently once it follows"):
        samples_of({"messages": HELLO}, ChatTemplate({"default": text}, {}, DAY), "")


def test_too_long_row_is_refused(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("ndtrain.data.chat.conversations._ROW_BYTES", 200)
    rows = [{"messages": HELLO}, {"messages": HELLO * 9}]
    with pytest.raises(ConfigError, match=r"chat.jsonl:2: longer than"):
        opened(folders["mistral", True], rows, tmp_path)


def test_tokenizer_without_chat_template_is_refused(folders, tmp_path):
    write_tokenizer(tmp_path / "plain", "qwen3", True)
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"chat.jsonl:1: has messages, but the tokenizer has no chat template"):
        opened(tmp_path / "plain", [{"messages": HELLO}], tmp_path)


def test_chat_keys_that_contradict_are_refused():
    chat = ["recipe=llama_debug", "data=chat", "data.path=x.jsonl"]
    assert "data.tokenizer=byte: data=chat needs the model's tokenizer" in config_refusal(chat)
    given_folder = [*chat, "data.tokenizer=folder"]
    assert config_refusal([*given_folder, "data.pack=false"]).startswith("data.pack=false: data=chat always packs")
    assert config_refusal([*given_folder, "data.date=today"]).startswith("data.date=today: must be a date")
    assert config_refusal([*given_folder, "data.path=null"]).startswith("data.path is missing")
