from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ps.blueprint import Blueprint
from ps.consistency import BSP
from ps.manifest import Manifest
from ps.plans import bucket_from_proto, bucket_to_proto, difference
from ps.sharding import plan
from ps.types import BucketSpec, TensorSpec

BUCKET = BucketSpec(3, "float32", 1, "SGD", (TensorSpec("w", (4, 5)), TensorSpec("b", ())), "topk:0.01")


def test_a_bucket_survives_the_control_plane() -> None:
    assert bucket_from_proto(bucket_to_proto(BUCKET)) == BUCKET


def test_workers_that_compress_differently_are_told_so() -> None:
    plain = replace(BUCKET, codec="")
    assert difference([BUCKET], [BUCKET]) is None
    assert difference([BUCKET], [plain]) == "--compress not given where it is topk:0.01"
    assert difference([plain], [BUCKET]) == "--compress topk:0.01 where it is not given"


def test_a_checkpoint_goes_on_under_another_codec() -> None:
    buckets = (replace(BUCKET, index=0, codec="int8"),)
    slices = plan(buckets, 1, 1 << 20)
    manifest = Manifest("job", "bsp", 7, 3, buckets, slices.slices, ())
    blueprint = Blueprint(BSP(), "bsp", 1 << 20, (Path("checkpoint"), manifest))
    assert blueprint.draw((replace(BUCKET, index=0, codec=""),), 1) == slices
