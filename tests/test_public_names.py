"""What a script sees of `import hubring`."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import hubring


def test_names_are_those_of_the_api_and_dir_lists_them() -> None:
    from hubring.workers import api

    assert all(getattr(hubring, name) is getattr(api, name) for name in api.__all__)
    assert set(dir(hubring)) == {*api.__all__, "horovod", "__version__"}
    assert hubring.__version__ == version("hubring")


def test_an_unknown_name_says_where_the_known_ones_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'; dir\(hubring\) lists the names"):
        hubring.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_importing_it_brings_no_library_and_horovod_comes_when_asked_for() -> None:
    program = (
        "import sys, hubring\n"
        "assert not {'torch', 'grpc', 'numpy', 'msgspec'} & set(sys.modules)\n"
        "assert callable(hubring.horovod.init)\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n"  # 0.5 s, for the audit alone
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=60)
