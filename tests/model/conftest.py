"""The C kernels compiled for every instruction set that the compiler and the processor know."""

import os
import platform
from pathlib import Path

import pytest

from decodescope.model.kernels.build import FLAGS, Built, build
from decodescope.model.kernels.compiled import Library

_ON_X86 = platform.machine() == "x86_64"
LESS = {
    "digits": ("-march=native", "-mno-amx-int8") if _ON_X86 else ("-march=native",),
    "lanes": ("-march=native", "-mno-avx512vnni") if _ON_X86 else ("-march=native",),
    "avx2": ("-mavx2", "-mfma", "-mf16c") if _ON_X86 else (),
    "plain": (),
}


@pytest.fixture(scope="session", params=["native", *LESS])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    if request.param == "avx2" and "avx2" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("needs AVX2; ends on such a machine")
    built = build() if request.param == "native" else _built(LESS[request.param], _shared(tmp_path_factory))
    if built.reason == "no_compiler":
        pytest.skip("needs a C compiler; ends where there is one")
    assert built.path, built.detail
    return Library(built.path)


def _built(instructions: tuple[str, ...], cache: Path) -> Built:
    flags = ("-O1", *instructions, *(f for f in FLAGS if f not in ("-O3", "-march=native")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECODESCOPE_CACHE", str(cache))
        return build(flags)


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a run: what one has compiled the next one finds."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "built"
    folder.mkdir(exist_ok=True)
    return folder
