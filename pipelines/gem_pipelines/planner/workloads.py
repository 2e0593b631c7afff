"""Workloads for planning on clusters that nobody here has: of the kind that is published for GEM, with our own figures.

The article gives no sizes beyond "LLM-scale", about a trillion table parameters, shard groups of 128 to 256 ranks and
table groups of 256. All figures below are assumptions that make a step of that kind; they are nobody's measurements.
"""

from __future__ import annotations

from gem_pipelines.errors import ConfigError, did_you_mean
from gem_pipelines.planner.workload import ExpertGroup, TableLoad, Unit, Workload

LAYERS, DIM, TABLE_COUNT, TABLE_DIM = 8, 768, 400, 128
SCALARS, EVENT_IDS, TOKENS = 300, 12_000, 1_500


def _layer(index: int) -> Unit:
    """A sequence block (12 matrices of DIM x DIM) and two experts of 34 million parameters."""
    expert = ((4 * DIM, 7 * DIM), (7 * DIM, 4 * DIM), (DIM, DIM))
    return Unit(
        name=f"layers.{index}",
        shapes=tuple((DIM, DIM) for _ in range(12)),
        experts=ExpertGroup(shapes=(expert, expert), in_elements=32 * DIM, out_elements=32 * DIM),
    )


def _tables(parameters: float) -> tuple[TableLoad, ...]:
    """TABLE_COUNT tables whose rows fall as 1 / rank^0.8; the first 100 hold event ids, the rest are looked up once."""
    weights = [(i + 1) ** -0.8 for i in range(TABLE_COUNT)]
    rows = [max(1000, int(parameters / TABLE_DIM * w / sum(weights))) for w in weights]
    ids = [EVENT_IDS / 100 if i < TABLE_COUNT - SCALARS else 1.0 for i in range(TABLE_COUNT)]
    return tuple(
        TableLoad(name=f"table{i}", rows=rows[i], dim=TABLE_DIM, ids=ids[i], vectors=ids[i]) for i in range(TABLE_COUNT)
    )


def _gem_like(name: str, parameters: float) -> Workload:
    layers = tuple(_layer(i) for i in range(LAYERS))
    root = Unit(name="root", shapes=((64 * DIM, 4 * DIM), (TABLE_DIM, DIM)), root=True)
    # a sample: its tokens through each block's matrices, and eight rows through each expert's
    block = 2 * 12 * DIM * DIM * TOKENS
    experts = 2 * 2 * (2 * 28 * DIM * DIM + DIM * DIM) * 8
    forward = LAYERS * (block + experts)
    return Workload(
        name=name,
        units=(*layers, root),
        tables=_tables(parameters),
        batch=256,
        forward_flops=forward,
        backward_flops=2 * forward,
        flops_spread=0.8,
        activation_bytes=LAYERS * TOKENS * DIM * 2 * 8,
        gather_bytes=2,
        reduce_bytes=4,
        activation_number_bytes=2,
        vector_bytes=2,
        source="assumed, of the published kind",
    )


def gem_like_100b() -> Workload:
    """100 billion table parameters: one copy fits on eight devices."""
    return _gem_like("gem_like_100b", 1e11)


def gem_like_1t() -> Workload:
    """A trillion table parameters."""
    return _gem_like("gem_like_1t", 1e12)


WORKLOADS = {"gem_like_100b": gem_like_100b, "gem_like_1t": gem_like_1t}


def find_workload(name: str) -> Workload:
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload {name!r}; {did_you_mean(name, WORKLOADS)}")
    return WORKLOADS[name]()
