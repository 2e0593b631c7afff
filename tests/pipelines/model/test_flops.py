"""FLOPs by hand, and against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from gem_pipelines.model import build_model, model_flops, training_flops
from gem_pipelines.model.config import InteractionConfig
from gem_pipelines.model.dhen import MEMBERS
from gem_pipelines.model.testing import KINDS, make_config, make_inputs, make_schema, stream_config
from torch.utils.flop_counter import FlopCounterMode


def test_by_hand():
    """Rows of 3 and 5 clicks with a candidate each: 10 tokens, pairs 1+2+3+4 and 1+..+6 = 31. Width 8, table dim 4."""
    one = make_config(layers=1, stream=stream_config(blocks=("hstu",)))
    flops = model_flops(one, make_schema(), {"clicks": [3, 5], "views": [0, 0]})
    block = 2 * 10 * 5 * 64 + 2 * 2 * 8 * 31
    tokens = 2 * 10 * (2 * 4) * 8 + 2 * 8 * (3 + 2) * 8
    assert flops["sequence"] == block + tokens  # views: no table of a scalar, so no candidate, so no token at all


def test_lengths_count_and_padding_does_not():
    schema, config = make_schema(), make_config()
    ragged = model_flops(config, schema, {"clicks": [12, 0], "views": [1, 1]})
    alone = [model_flops(config, schema, {"clicks": [n], "views": [1]}) for n in (12, 0)]
    # Seeds' own projection is done once a batch: the only part that is not a sum over rows.
    seeds = 2 * 3 * 64 * 6
    assert ragged["sequence"] == sum(part["sequence"] for part in alone)
    assert ragged["cross"] == sum(part["cross"] for part in alone) - seeds
    assert ragged["heads"] == sum(part["heads"] for part in alone)


def unmasked(**changes):
    """Configs whose attention lets all pairs meet, so that padded and counted pairs agree on equal lengths."""
    return make_config(stream=stream_config(blocks=("interformer", "pffn"), cls_tokens=1, candidate=True), **changes)


READ_FIELDS = 1  # of the clicks' fields, "item" is also a scalar
CONFIGS = {
    "wukong": unmasked(),
    "target_read": make_config(
        stream=stream_config(blocks=("interformer", "pffn"), target_read=True), dense_hidden=(5, 4)
    ),
    "dhen": unmasked(interaction=InteractionConfig(kind="dhen", members=tuple(MEMBERS), rank=3)),
    "experts": unmasked(interaction=InteractionConfig(kind="experts", rank=3)),
    "hsp": make_config(stream=stream_config(blocks=("pffn", "interformer"), summary="hsp")),
    "mmoe": unmasked(heads=KINDS["interformer"].heads),
    "separate": unmasked(heads=KINDS["mixed"].heads),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_torchs_counter(name):
    config, schema = CONFIGS[name], make_schema()
    model = build_model(schema, config, seed=0)
    inputs = make_inputs([6] * 4, [3] * 4, dtype=torch.float32)
    lengths = {"clicks": [6] * 4, "views": [3] * 4}
    with FlopCounterMode(display=False) as counter:
        logits = model(inputs)
    assert counter.get_total_flops() == sum(model_flops(config, schema, lengths).values())
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    forward, both = model_flops(config, schema, lengths), training_flops(config, schema, lengths)
    # torch multiplies four matrices in attention's backward, since eager kept the scores; we count the fifth.
    recomputed = _attention_forward(config, lengths) // 2
    assert counter.get_total_flops() == sum(both.values()) - sum(forward.values()) - recomputed


def _attention_forward(config, lengths):
    """FLOPs of all attention calls: 4 * width * pairs each; clicks have events, a candidate and perhaps a cls."""
    total = 0
    for name, length in (("clicks", 6), ("views", 3)):
        own = config.stream
        tokens = length + own.cls_tokens + (name == "clicks")
        pairs = {"interformer": tokens * own.weight_tokens + tokens**2, "pffn": tokens * own.weight_tokens}
        pooled = 3 * own.seeds * tokens  # in layers 0 and 1, and before the heads
        total += 4 * own.dim * len(lengths[name]) * (sum(pairs[kind] for kind in own.blocks) + pooled)
        if own.target_read and name == "clicks":  # a head as wide as the tables for each field
            total += 4 * config.table_dim * len(lengths[name]) * length * READ_FIELDS
    return total


def test_bad_lengths_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"streams \['views'\] are missing"):
        model_flops(make_config(), make_schema(), {"clicks": [1]})
    with pytest.raises(ValueError, match="one length a row"):
        model_flops(make_config(), make_schema(), {"clicks": [1, 2], "views": [1]})
