"""Numbers that a model or an optimizer cannot have are refused by name, before anything is made."""

import pytest

from tests.lib.helpers import config_refusal

REFUSED = {
    "model.rms_norm_eps=nan": "must be a finite number",
    "model.rms_norm_eps=0": "must be positive",
    "model.rope_theta=-1": "must be positive",
    "model.initializer_range=-1": "must be at least 0",
    "model.initializer_range=inf": "must be a finite number",
    "model.attn_logit_softcapping=0": "must be positive, or null",
    "optim.lr=0": "must be positive",
    "optim.lr=inf": "must be a finite number",
    "optim.eps=0": "must be positive",
    "optim.clip=0": "must be positive, or null",
    "optim.min_lr=inf": "must be a finite number",
    "optim.weight_decay=nan": "must be at least 0",
}
LINEAR = "{rope_type:linear,factor:FACTOR}"
YARN = "{rope_type:yarn,factor:4,original_max_position_embeddings:16,OTHER}"
ROPE = {
    LINEAR.replace("FACTOR", "abc"): "factor=abc: must be a number",
    LINEAR.replace("FACTOR", "null"): "factor=null: must be a number",
    LINEAR.replace("FACTOR", "true"): "factor=true: must be a number",
    LINEAR.replace("FACTOR", "nan"): "factor=nan: must be a number",
    LINEAR.replace("FACTOR", "0"): "factor=0: must be positive",
    YARN.replace("OTHER", "mscale:abc,mscale_all_dim:1"): "mscale=abc: must be a number",
    YARN.replace("OTHER", "attention_factor:inf"): "attention_factor=inf: must be a number",
}


@pytest.mark.parametrize("override", REFUSED)
def test_number_out_of_range_is_refused(override):
    key = override.partition("=")[0]
    line = config_refusal(["recipe=llama_debug", override])
    assert line.startswith(f"{key}=") and line.endswith(f": {REFUSED[override]}")


@pytest.mark.parametrize("scaling", ROPE)
def test_rope_number_out_of_range_is_refused(scaling):
    assert config_refusal(["recipe=llama_debug", f"model.rope_scaling={scaling}"]) == (
        f"model.rope_scaling.{ROPE[scaling]}"
    )
