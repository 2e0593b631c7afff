"""Workloads of schemas: sizes do not depend on the kernels that will train."""

from __future__ import annotations

import dataclasses

from gem_data.interface import IdFeature, LabelInfo, Schema, StreamInfo, TableInfo
from gem_pipelines.model import presets
from gem_pipelines.planner.shapes import shaped_workload

SCHEMA = Schema(
    name="tiny",
    created_by="tests",
    tables=(TableInfo(name="item", rows=50),),
    labels=(LabelInfo(name="click", weighted=False),),
    scalars=(IdFeature(name="item", table="item"),),
    lists=(),
    dense=("price",),
    streams=(StreamInfo(name="clicks", fields=(IdFeature(name="item", table="item"),), action_bits=1, max_length=8),),
)


def test_a_model_for_gpu_kernels_is_sized_on_a_cpu():
    """The kernels run on CUDA only; the plan is made anywhere, and is the plan of the same model."""
    plain = presets.debug()
    kernels = dataclasses.replace(plain, attention="triton", hstu="triton")
    sizes = {
        "lengths": {stream.name: [3, 5] for stream in SCHEMA.streams},
        "stream_means": {stream.name: 4.0 for stream in SCHEMA.streams},
        "list_means": {feature.name: 1.0 for feature in SCHEMA.lists},
    }
    found, expected = (
        shaped_workload(SCHEMA, config, name="w", batch=4, source="test", **sizes)
        for config in (kernels, dataclasses.replace(plain, attention="eager", hstu="eager"))
    )
    assert found == expected
