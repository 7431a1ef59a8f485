"""The GPU kernel where there is no GPU: in Triton's interpreter, compiled but not run, and out of the way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gconvnext.layers import SGConv, global_conv, triton_conv

ROOT = Path(__file__).parents[1]


def python(*args, **environment):
    path = os.pathsep.join([str(ROOT / "models"), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, *args], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    result = python("-m", "pytest", "-q", "-x", "tests/triton_interpreted.py", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("capability", "instruction"), [(80, "mma.sync"), (90, "wgmma.mma_async")])
def test_kernel_compiles_for_the_tensor_cores(capability, instruction):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    kernel = triton_conv._compile()
    constants = {"x_position": 1, "CAUSAL": False, "ALIGNED": 8, "BLOCK_I": 128, "BLOCK_J": 64, "BLOCK_B": 128}
    types = {"x": "*bf16", "table": "*bf16", "bias": "*fp32", "y": "*bf16"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in (*types, "pitch")}
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    ptx = compiled.asm["ptx"]
    assert instruction in ptx
    assert "cp.async.cg.shared.global" in ptx and "ld.global.b16" not in ptx  # 16 bytes at a time


def test_nothing_changes_on_a_cpu(monkeypatch):
    monkeypatch.setattr(triton_conv, "convolve", None)
    layer, x = SGConv(2, (4, 4)).eval().fuse(), torch.randn(1, 2, 4, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.float32
        assert layer(x.bfloat16()).dtype == torch.bfloat16
        assert global_conv(x.half().flatten(2), torch.randn(2, 2, 16)).dtype == torch.float16


def test_backend_needs_a_gpu():
    with pytest.raises(ValueError, match="'triton' needs .* on a GPU .* got torch.float16 on cpu. Use backend='fft'"):
        global_conv(torch.zeros(1, 2, 4).half(), torch.zeros(2, 2, 4), backend="triton")


def test_importing_the_package_leaves_triton_alone():
    code = "import sys, torch, timm, timm.models; before = 'triton' in sys.modules; import gconvnext; "
    result = python("-c", code + "assert ('triton' in sys.modules) == before")
    assert result.returncode == 0, result.stderr
