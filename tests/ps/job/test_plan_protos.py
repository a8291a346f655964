from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hubring.ps.checkpoint.checkpoint_folder import Manifest
from hubring.ps.coordinator.agreed_model import AgreedModel
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import BucketSpec, TensorSpec
from hubring.ps.job.control_messages import bucket_from_proto, bucket_to_proto, model_difference
from hubring.ps.job.sharding import plan
from hubring.ps.store.consistency import BSP

BUCKET = BucketSpec(3, "float32", "SGD", (TensorSpec("w", (4, 5)), TensorSpec("b", ())), "topk:0.01")


def test_a_bucket_survives_the_control_plane() -> None:
    assert bucket_from_proto(bucket_to_proto(BUCKET)) == BUCKET


def test_workers_that_compress_differently_are_told_so() -> None:
    plain = replace(BUCKET, codec="")
    assert model_difference([BUCKET], [BUCKET]) is None
    assert model_difference([BUCKET], [plain]) == "expected --compress topk:0.01, got no --compress"
    assert model_difference([plain], [BUCKET]) == "expected no --compress, got --compress topk:0.01"


def test_parameters_in_another_order_are_told_by_the_first() -> None:
    turned = replace(BUCKET, tensors=BUCKET.tensors[::-1])
    assert model_difference([BUCKET], [turned]) == "expected w [4, 5] float32, got b [] float32"


def test_a_checkpoint_of_other_buckets_says_how_to_have_them() -> None:
    tensors = [TensorSpec(name, (100,)) for name in "abcd"]

    def cut(*places: str) -> tuple[BucketSpec, ...]:
        by_name = {tensor.name: tensor for tensor in tensors}
        return tuple(
            BucketSpec(index, "float32", "SGD", tuple(by_name[name] for name in names))
            for index, names in enumerate(places)
        )

    held, whole = cut("a", "bc", "d"), cut("ad", "bc")
    manifest = Manifest("job", "bsp", 7, 3, held, plan(held, 1, 1 << 20).slices, ())
    agreed_model = AgreedModel(BSP(), "bsp", None, (Path("checkpoint"), manifest))
    with pytest.raises(
        ConfigError, match=r"the bucket sizes differ, .* overlap=False .*--bucket-bytes 800 on every worker"
    ):
        agreed_model.draw(whole, 1)


def test_a_checkpoint_goes_on_under_another_codec() -> None:
    buckets = (replace(BUCKET, index=0, codec="int8"),)
    slices = plan(buckets, 1, 1 << 20)
    manifest = Manifest("job", "bsp", 7, 3, buckets, slices.slices, ())
    agreed_model = AgreedModel(BSP(), "bsp", 1 << 20, (Path("checkpoint"), manifest))
    assert agreed_model.draw((replace(BUCKET, index=0, codec=""),), 1) == (slices, Path("checkpoint"))
