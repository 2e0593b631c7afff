"""D5 over ranks: what one rank alone meets is a failed step on all of them, the same one, with nothing changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {}),
        (4, {"table_shard": 2, "table_replica": 2}),
        (4, {"shard": 2, "replicate": 2, "table_shard": 2, "table_replica": 2, "fully_sharded": True}),
    ],
    ids=["whole", "copies of tables", "sharded"],
)
def test_d5_one_rank_alone(debug_data, tmp_path, counted, world, parallel):
    (tmp_path / "plan.json").write_text(
        json.dumps({"data": str(debug_data), "out": str(tmp_path), "parallel": parallel})
    )
    worker = str(Path(__file__).with_name("bad_step_worker.py"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)),
            *(worker, str(tmp_path / "plan.json")),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(world)]
    for case in ranks[0]:
        outcomes = [rank[case] for rank in ranks]
        assert all(outcome["same"] for outcome in outcomes), (case, outcomes)
        assert len({outcome["step"] for outcome in outcomes}) == 1, case
        if "skip" in case:
            assert {outcome["said"][0] for outcome in outcomes} == {"skip"}, (case, outcomes)
            assert {outcome["said"][2] for outcome in outcomes} == {32}
            assert len({outcome["loss"] for outcome in outcomes}) == 1
            assert outcomes[0]["step"] == 4
        else:
            kinds = {outcome["said"][0] for outcome in outcomes}
            assert kinds in ({"BatchError", "RemoteBatchError"}, {"GradientError"}), (case, outcomes)
            assert all("sample_id" in outcome["said"][1] for outcome in outcomes), (case, outcomes)
            assert outcomes[0]["step"] == 2
    counted("cases", f"{len(ranks[0])} on {world} ranks")
