"""The Triton kernel in Triton's interpreter, on the CPU: `test_triton.py` runs this file in a process of its own."""

import pytest
import torch
from gconvnext.layers import SGConv, global_conv, triton_conv
from gconvnext.layers.global_conv import flatten_map, two_sided, unflatten_map
from reference import direct_conv, relative_error
from torch.library import opcheck
from triton.runtime import interpreter

ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
PATHS = {"toeplitz": 1024, "split": 0}  # MAX_TOEPLITZ


@pytest.fixture(autouse=True)
def multiply_bfloat16(monkeypatch):
    """The interpreter keeps bfloat16 as 16-bit integers and would multiply those."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def widen(handle):
        if handle.dtype != interpreter.tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype("uint32") << 16).view("float32"), interpreter.tl.float32)

    def widened(self, a, b, *args):
        return create_dot(self, widen(a), widen(b), *args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", widened)


def reference(x, kernel, bias, gap):
    y = direct_conv(flatten_map(x, gap), kernel) + bias.double()[:, None]
    return unflatten_map(y, (*x.shape[-2:], gap))


def make(batch, channels, height, width, gap, directions, dtype=torch.float32, memory_format=torch.contiguous_format):
    torch.manual_seed(0)
    length = height * (width + gap)
    x = torch.randn(batch, channels, height, width).to(dtype).contiguous(memory_format=memory_format)
    kernel = torch.randn(directions, channels, length) / length**0.5
    kernel[0, :, 0] += torch.randn(channels)  # the skip
    return x, kernel, torch.randn(channels)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(
    ("shape", "directions"),
    [((3, 3, 7, 7, 0), 1), ((3, 2, 5, 9, 3), 2), ((17, 1, 8, 8, 0), 2), ((1, 2, 1, 19, 1), 1), ((2, 1, 13, 1, 0), 2)],
)
def test_maps_of_any_size(monkeypatch, shape, directions, dtype, path):
    monkeypatch.setattr(triton_conv, "MAX_TOEPLITZ", PATHS[path])
    memory_format = torch.channels_last if directions == 1 else torch.contiguous_format
    x, kernel, bias = make(*shape, directions, dtype, memory_format)
    y = triton_conv.convolve(x, two_sided(kernel), bias, shape[-1])
    assert y.dtype == dtype and y.shape == x.shape
    assert relative_error(y, reference(x, kernel, bias, shape[-1])) < ERROR[dtype]


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("shape", [(2, 2, 15, 15, 0), (130, 1, 3, 3, 0), (2, 1, 18, 16, 0)])
def test_maps_of_many_tiles(shape, directions):
    x, kernel, bias = make(*shape, directions)
    assert relative_error(triton_conv.convolve(x, two_sided(kernel), bias, 0), reference(x, kernel, bias, 0)) < 1e-6


def test_large_values_do_not_overflow_float16(monkeypatch):
    monkeypatch.setattr(triton_conv, "MAX_TOEPLITZ", 0)
    x, kernel, bias = make(1, 1, 36, 4, 0, 2)
    x = (x.abs() * 400 + 6000).half()  # the plain sum over the rows exceeds 65504
    y = triton_conv.convolve(x, two_sided(kernel), bias, 0)
    assert relative_error(y, reference(x, kernel, bias, 0)) < 2e-3


@pytest.mark.parametrize("tiles", [None, (16, 32, 64)])
def test_operator_takes_any_strides(tiles):
    x, kernel, bias = make(3, 5, 6, 7, 0, 2, memory_format=torch.channels_last)
    y = triton_conv.toeplitz(x.flatten(2), two_sided(kernel), bias, 41, tiles=tiles)
    assert y.is_contiguous() and relative_error(y.view(x.shape), reference(x, kernel, bias, 0)) < 1e-6


def test_operator_is_registered_whole():
    x, kernel, bias = make(2, 3, 4, 4, 0, 2)
    opcheck(triton_conv.toeplitz, (x.flatten(2), two_sided(kernel), bias, 15))


def test_seam_serves_several_kernels_and_nothing_with_derivatives():
    x, kernel, _ = make(2, 3, 1, 10, 0, 2, torch.float16)
    u, zero = x.squeeze(2), torch.zeros(3)
    y = global_conv(u, torch.stack([kernel, 2 * kernel]), backend="triton")
    assert y.dtype == torch.float16 and torch.equal(y[:, 1], 2 * y[:, 0])
    assert relative_error(y[:, 0], reference(x, kernel, zero, 0).squeeze(2)) < 1e-3
    with pytest.raises(ValueError, match="derivatives wanted"):
        global_conv(u, kernel.requires_grad_(), backend="triton")
    with pytest.raises(ValueError, match="float64"):
        global_conv(u.double(), kernel, backend="triton")


@pytest.mark.parametrize("map_size", [(6, 5), (5, 13)])
@pytest.mark.parametrize("options", [{}, {"row_gap": 3, "local": 7}, {"causal": True}])
def test_fused_layer_in_half_precision_and_autocast(monkeypatch, options, map_size):
    layer = SGConv(2, (6, 5), **options).eval().fuse().requires_grad_(False)
    x = torch.randn(2, 2, *map_size).contiguous(memory_format=torch.channels_last)
    expected = layer(x)
    monkeypatch.setattr(triton_conv, "MAX_TOEPLITZ", 60)
    monkeypatch.setattr(
        type(layer), "_runs_in_triton", lambda self, x: triton_conv.working_dtype(x) in triton_conv._HALF
    )
    for dtype in (torch.float16, torch.bfloat16):
        y = layer(x.to(dtype))
        assert y.dtype == dtype and relative_error(y, expected) < ERROR[dtype]
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.float32 and 1e-4 < relative_error(y, expected) < ERROR[torch.bfloat16]


def test_compiled_layer_holds_one_operator(monkeypatch):
    layer = SGConv(2, (4, 4)).eval().fuse().half()
    monkeypatch.setattr(type(layer), "_runs_in_triton", lambda self, x: True)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    x = torch.randn(2, 2, 4, 4).half()
    with torch.no_grad():
        y = torch.compile(layer, backend=keep, fullgraph=True)(x)
        assert torch.equal(y, layer(x))
    assert sum("toeplitz" in str(node.target) for node in graphs[0].graph.nodes) == 1
