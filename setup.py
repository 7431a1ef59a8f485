"""The CPU kernel; the rest is in pyproject.toml. Without a C compiler the install succeeds, PyTorch's FFTs serve."""

from setuptools import Extension, setup

FOLDER = "models/gconvnext/layers/"

setup(
    ext_modules=[
        Extension(
            "gconvnext.layers._fft_conv",
            sources=[FOLDER + name for name in ("fft_conv.c", "fft_conv_avx2.c", "fft_conv_avx512.c")],
            depends=[FOLDER + name for name in ("fft_conv.h", "fft_conv_lanes.h")],
            extra_compile_args=["-std=gnu11", "-O3", "-g0", "-fvisibility=hidden", "-Wno-psabi"],
            libraries=["m"],
            optional=True,
        )
    ]
)
