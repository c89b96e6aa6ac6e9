"""Small Hugging Face folders in the style of published chat models: weights, tokenizer, templates and all other files.

The templates are short and written for the tests. Each one has a habit that published templates have.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.lib.helpers import WORDS
from tests.model.test_families import LLAMA, MISTRAL, QWEN3

VOCAB = 400

# A system message with the date, header tokens, and begin-of-text in the template itself.
LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') }}
{{- '\\n' + system + '<|eot_id|>' }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + (tools | tojson(indent=1)) + '<|eot_id|>' }}
{%- endif %}
{%- for message in turns %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls %}
        {{- MARK }}{{- message.tool_calls[0].function | tojson + '<|eot_id|>' }}{{- END }}
    {%- elif message['role'] == 'assistant' %}
        {{- MARK }}{{- message['content'] | trim + '<|eot_id|>' }}{{- END }}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# ChatML whose earlier turns lose their thoughts once another question follows.
QWEN3_TEMPLATE = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{{- MARK }}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content + '<|im_end|>' }}{{- END }}{{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Roles that must alternate, no generation prompt, and no end-of-text token before the answer's.
MISTRAL_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- else %}
        {{- MARK }}{{- ' ' + message.content + eos_token }}{{- END }}
    {%- endif %}
{%- endfor %}
"""
_MARKERS = {True: ("{% generation %}", "{% endgeneration %}"), False: ("", "")}


def template(text: str, marked: bool) -> str:
    """Returns the template with or without the markers of generated text."""
    begin, end = _MARKERS[marked]
    return text.replace("{{- MARK }}", begin).replace("{{- END }}", end)


STYLES: dict[str, dict[str, Any]] = {
    "llama3": {
        "template": LLAMA3_TEMPLATE, "where": "tokenizer_config.json",
        "special": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "pad": "<|end_of_text|>",
        "config": LLAMA | {"eos_token_id": [1, 4], "bos_token_id": 0, "use_cache": False},
        "generation": {"bos_token_id": 0, "eos_token_id": [1, 4], "do_sample": True, "temperature": 0.6, "top_p": 0.9},
        "files": {"LICENSE": "a licence", "USE_POLICY.md": "a policy", "original/params.json": "{}"},
    },
    "qwen3": {
        "template": QWEN3_TEMPLATE, "where": "chat_template.jinja",
        "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"],
        "bos": None, "eos": "<|im_end|>", "pad": "<|endoftext|>",
        "config": QWEN3 | {"eos_token_id": 2, "bos_token_id": 0, "max_window_layers": 28, "favourite_colour": "blue"},
        "generation": {
            "bos_token_id": 0, "pad_token_id": 0, "eos_token_id": [2, 0], "do_sample": True, "temperature": 0.7,
            "top_k": 20, "top_p": 0.8, "transformers_version": "4.51.0",
        },
        "files": {"merges.txt": "#version: 0.2\n", "added_tokens.json": '{"<think>": 3}', "NOTICE": "a notice"},
    },
    "mistral": {
        "template": MISTRAL_TEMPLATE, "where": "chat_template.jinja",
        "special": ["<s>", "</s>", "[INST]", "[/INST]"], "bos": "<s>", "eos": "</s>", "pad": None,
        "config": MISTRAL | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None},
        "generation": {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1},
        "files": {
            "tokenizer.model": "pieces", "tekken.json": '{"config": {}}', "params.json": '{"dim": 32}',
            "additional_chat_templates/tool_use.jinja": "{{ bos_token }}{{ tools | tojson }}",
        },
    },
}  # fmt: skip


def tokenizer_json(style: dict[str, Any]) -> Tokenizer:
    """Returns a byte-level BPE whose first ids are the style's special tokens. It begins a text with bos, if any."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [" ".join(WORDS)] * 9,
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=style["special"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    if style["bos"]:
        made.post_processor = processors.TemplateProcessing(
            single=f"{style['bos']} $A", special_tokens=[(style["bos"], made.token_to_id(style["bos"]))]
        )
    return made


def write_tokenizer(folder: Path, name: str, marked: bool) -> None:
    """Writes the tokenizer's files of a style, with its template."""
    style = STYLES[name]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_json(style).save(str(folder / "tokenizer.json"))
    named = {f"{key}_token": style[key] for key in ("bos", "eos", "pad") if style[key]}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {"AutoTokenizer": ["tok.Tok", None]}, **named}
    config["clean_up_tokenization_spaces"] = False
    text = template(style["template"], marked)
    if style["where"] == "tokenizer_config.json":
        config["chat_template"] = text
    else:
        (folder / style["where"]).write_text(text)
    _write(folder / "tokenizer_config.json", config)
    _write(folder / "special_tokens_map.json", named)


def write_model_folder(folder: Path, name: str, marked: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes a folder of a style with a random model, as one downloads it: with code, a card and a licence."""
    style = STYLES[name]
    config = style["config"] | {"vocab_size": VOCAB}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=draw) + parameter.endswith("norm.weight"))
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder, name, marked)
    _write(folder / "config.json", config | {"auto_map": {"AutoModel": "modeling_x.X"}, "pad_token_id": 0})
    _write(folder / "generation_config.json", style["generation"])
    others = {
        "README.md": "a card",
        "modeling_x.py": "raise SystemExit",
        "pytorch_model.bin": "x",
        ".gitattributes": "",
    }
    for other, content in (style["files"] | others).items():
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_text(content)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))
