"""The C kernels compiled for every instruction set that the compiler and the processor know."""

import platform
from pathlib import Path

import pytest

from decodescope.model.kernels.build import FLAGS, build
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
    if request.param == "native":
        flags = FLAGS
    else:
        flags = ("-O1", *LESS[request.param], *(f for f in FLAGS if f not in ("-O3", "-march=native")))
    if request.param == "avx2" and "avx2" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("needs AVX2; ends on such a machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECODESCOPE_CACHE", str(tmp_path_factory.mktemp("built")))
        built = build(flags)
    if built.reason == "no_compiler":
        pytest.skip("needs a C compiler; ends where there is one")
    assert built.path, built.detail
    return Library(built.path)
