"""The CPU kernel, with and without the compiled extension, against float64 references; and what fused layers keep."""

import copy
import io
import pickle
import random
import resource
import threading

import pytest
import torch
import torch.nn.functional as F
from gconvnext.layers import MRConv, SGConv, cpu, fft_length, global_conv, resample_kernel
from gconvnext.layers.global_conv import flatten_map, map_conv, unflatten_map
from reference import direct_conv, relative_error
from torch.library import opcheck

needs_extension = pytest.mark.skipif(not cpu.available(), reason="the extension is not built")
INSTRUCTIONS = ["avx512", "avx2", "baseline"]


@pytest.fixture
def instructions(request, monkeypatch):
    """Limits the kernel to older instructions; what the machine lacks is not used."""
    if request.param != "avx512":
        monkeypatch.setenv("GCONVNEXT_CPU", request.param)
    cpu._plan.cache_clear()
    yield request.param
    cpu._plan.cache_clear()


@pytest.fixture(params=["extension", "plain"])
def built(request, monkeypatch):
    """With the extension and as if it had not been built."""
    if request.param == "plain":
        monkeypatch.setattr(cpu, "available", lambda: False)
    elif not cpu.available():
        pytest.skip("the extension is not built")
    return request.param


def conv_of_map(x, kernel, bias, gap):
    """The reference, in float64 throughout."""
    u = flatten_map(x.double(), gap)
    grid = (x.shape[2], x.shape[3], gap)
    return unflatten_map(direct_conv(u, kernel), grid) + bias.double()[:, None, None]


def random_map(seed, channels_last=True):
    rng = random.Random(seed)
    batch, dim = rng.randint(1, 5), rng.choice([1, 3, 8, 16, 17, 24, 35])
    height, width, gap = rng.randint(1, 9), rng.randint(1, 9), rng.choice([0, 0, 1, 3])
    torch.manual_seed(seed)
    x = torch.randn(batch, dim, height, width)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    kernel = torch.randn(rng.choice([1, 2]), dim, height * (width + gap))
    return x, kernel, torch.randn(dim), gap


# ---- The operation -------------------------------------------------------------------------------------------------


@needs_extension
@pytest.mark.parametrize("instructions", INSTRUCTIONS, indirect=True)
def test_random_maps_equal_the_direct_sum(instructions):
    for seed in range(25):
        x, kernel, bias, gap = random_map(seed, channels_last=seed % 3 > 0)
        inputs = [value.requires_grad_() for value in (x, kernel, bias)]
        y = map_conv(x, kernel, bias, gap)
        assert relative_error(y, conv_of_map(x.detach(), kernel.detach(), bias.detach(), gap)) < 1e-6
        g = torch.randn_like(y)
        exact = [value.detach().double().requires_grad_() for value in inputs]
        u = flatten_map(exact[0], gap)
        expected = unflatten_map(global_conv(u, exact[1], "fft"), (*x.shape[2:], gap)) + exact[2][:, None, None]
        pairs = zip(torch.autograd.grad(y, inputs, g), torch.autograd.grad(expected, exact, g.double()), strict=True)
        for gradient, theirs in pairs:
            assert gradient.shape == theirs.shape and relative_error(gradient, theirs) < 1e-5


@needs_extension
@pytest.mark.parametrize("length", [1, 2, 3, 7, 11, 49, 121, 211, 243, 256, 1001, 3136, 12544])
def test_lengths_of_all_factors(length):
    torch.manual_seed(length)
    u, kernel = torch.randn(3, 2, length), torch.randn(2, 2, length)
    assert relative_error(global_conv(u, kernel, "cpu"), global_conv(u.double(), kernel.double(), "fft")) < 1e-6


@needs_extension
@pytest.mark.parametrize("instructions", INSTRUCTIONS, indirect=True)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("batch,dim,length", [(4, 3, 20), (3, 40, 1), (1, 40, 12), (2, 5, 49)])
def test_what_is_not_finite_stays_in_its_image_and_channel(instructions, bad, batch, dim, length):
    """Images share a transform as real and imaginary part, and so do channels of a single image."""
    torch.manual_seed(0)
    u, kernel, g = torch.randn(batch, dim, length), torch.randn(2, dim, length), torch.randn(batch, dim, length)
    clean = global_conv(u, kernel, "cpu")
    u[batch - 1, 1, length // 2] = bad
    y = global_conv(u, kernel, "cpu")
    spoilt = torch.zeros(batch, dim, dtype=torch.bool)
    spoilt[batch - 1, 1] = True
    assert torch.equal(y.isfinite().all(-1), ~spoilt) and not y[spoilt].isfinite().any()
    torch.testing.assert_close(y[~spoilt], clean[~spoilt])

    u = torch.randn(batch, dim, length, requires_grad=True)
    kernel.requires_grad_()
    g[0, 0, 0] = bad
    du, dk = torch.autograd.grad(global_conv(u, kernel, "cpu"), (u, kernel), g)
    assert not du[0, 0].isfinite().any() and du[0, 1:].isfinite().all() and du[1:].isfinite().all()
    assert dk[:, 1:].isfinite().all() and not dk[:, 0, :-1].isfinite().any()


def test_the_layout_is_kept(built):
    x, kernel, bias, gap = random_map(3)
    y = map_conv(x, kernel, bias, gap)
    if built == "extension":
        assert y.is_contiguous(memory_format=torch.channels_last)
    assert relative_error(map_conv(x.contiguous(), kernel, bias, gap), y) < 1e-6


@needs_extension
def test_empty_batch_and_broken_input():
    assert global_conv(torch.zeros(0, 3, 9), torch.randn(2, 3, 9), "cpu").shape == (0, 3, 9)
    with pytest.raises(ValueError, match="float64.*backend='fft'"):
        global_conv(torch.zeros(1, 3, 9).double(), torch.randn(2, 3, 9), "cpu")


def test_a_missing_extension_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(cpu.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(RuntimeWarning, match="^gconvnext was installed without its CPU kernel[^\n]*$"):
        assert cpu._load_library() is None


@needs_extension
def test_operators_are_registered_properly():
    x, kernel, bias, gap = random_map(5)
    x = x.permute(0, 2, 3, 1)
    height, width = x.shape[1:3]
    bins = torch.randn(x.shape[-1], fft_length(height * (width + gap)) // 2 + 1)
    packed = cpu.make_spectrum(kernel, height, width, gap)
    for name, arguments in {
        "conv": (x.clone().requires_grad_(), kernel.clone().requires_grad_(), bias.clone().requires_grad_(), gap),
        "conv_backward": (torch.randn_like(x), x, kernel, gap, [True, False, True]),
        "conv_spectrum": (x, packed, bias, None, gap),
        "pack_bins": (bins, height, width, gap),
        "power": (x, gap),
    }.items():
        opcheck(getattr(torch.ops.gconvnext, name).default, arguments)


@needs_extension
def test_second_derivatives_are_refused():
    u, kernel = torch.randn(2, 3, 9, requires_grad=True), torch.randn(2, 3, 9)
    (du,) = torch.autograd.grad(global_conv(u, kernel, "cpu").square().sum(), u, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only.*backend='fft'"):
        du.sum().backward()


@needs_extension
def test_export_keeps_one_operator():
    layer = fused(SGConv)
    x = torch.randn(2, 4, 8, 6)
    program = torch.export.export(layer, (x,))
    assert [str(node.target) for node in program.graph.nodes].count("gconvnext.conv.default") == 1
    assert relative_error(program.module()(x), layer(x)) < 1e-6


@needs_extension
def test_threads_of_both_kinds():
    """Any number of threads gives the same forward pass, and several callers do not disturb one another."""
    torch.manual_seed(0)
    u, kernel = torch.randn(5, 40, 50), torch.randn(2, 40, 50)
    expected, results = global_conv(u, kernel, "cpu"), {}

    def call(index):
        for _ in range(20):
            results[index] = global_conv(u, kernel, "cpu")

    callers = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    try:
        torch.set_num_threads(2)
        results["two"] = global_conv(u, kernel, "cpu")
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    finally:
        torch.set_num_threads(1)
    assert len(results) == 4 and all(torch.equal(y, expected) for y in results.values())


# ---- What fused layers keep ----------------------------------------------------------------------------------------


def fused(cls, dtype=torch.float32, **options):
    torch.manual_seed(0)
    layer = cls(4, (8, 6), dtype=dtype, **options)
    layer.reset_parameters()
    torch.nn.init.normal_(layer.bias)
    return layer.eval().fuse()


@torch.no_grad()
def expected_of(layer, x):
    """The layer's function in float64, from its parameters as they are now."""
    exact = {name: value.detach().double() for name, value in layer.named_parameters()}
    grid = (x.shape[2], x.shape[3], layer.row_gap)
    y = unflatten_map(
        direct_conv(flatten_map(x.double(), layer.row_gap), resample_kernel(exact["kernel"], layer.reference, grid)),
        grid,
    )
    if "local" in exact:
        y = y + F.conv2d(x.double(), exact["local"].unsqueeze(1), padding=exact["local"].shape[-1] // 2, groups=4)
    return y + exact["skip"][:, None, None] * x.double() + exact["bias"][:, None, None]


def edits():
    """Ways to change weights, most of them unseen by version counters."""
    yield "data", lambda m: m.kernel.data.mul_(-1)
    yield "one element", lambda m: m.kernel.data[1, 2].view(-1)[3].add_(5)
    yield "skip", lambda m: m.skip.data.add_(1)
    yield "bias", lambda m: m.bias.data.add_(1)
    yield "local", lambda m: m.local.data.add_(1)
    yield "swapped channels", lambda m: m.kernel.data.copy_(m.kernel.data.flip(1))
    yield "another tensor", lambda m: setattr(m.kernel, "data", torch.randn_like(m.kernel))
    yield "DLPack", lambda m: torch.from_dlpack(m.kernel.detach()).mul_(3)
    yield "load", lambda m: m.load_state_dict({**m.state_dict(), "kernel": torch.randn_like(m.kernel)})
    yield "parameter", lambda m: setattr(m, "kernel", torch.nn.Parameter(torch.randn_like(m.kernel)))
    yield (
        "optimizer",
        lambda m: (
            [setattr(p, "grad", torch.ones_like(p)) for p in m.parameters()]
            and (torch.optim.SGD(m.parameters(), lr=0.5).step())
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_kept_spectra_are_never_stale(built, dtype):
    layer = fused(MRConv, dtype, local=3, row_gap=1)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 0.02}[dtype]
    maps = [torch.randn(3, 4, *size, dtype=dtype) for size in ((8, 6), (5, 9))]
    with torch.no_grad():
        before = [layer(x) for x in maps]
        assert layer._spectra
        for name, edit in edits():
            with torch.enable_grad():
                edit(layer)
            after = [layer(x) for x in maps]  # alternating sizes
            for x, old, new in zip(maps, before, after, strict=True):
                assert relative_error(new, expected_of(layer, x)) < tolerance, name
                assert relative_error(old, expected_of(layer, x)) > 5 * tolerance, name
            before = after


def test_kept_spectra_travel_with_nothing(built):
    layer = fused(SGConv)
    x = torch.randn(2, 4, 8, 6)
    empty = len(pickle.dumps(layer))
    names = set(layer.state_dict())
    with torch.no_grad():
        y = layer(x)
        assert layer._spectra and set(layer.state_dict()) == names and len(pickle.dumps(layer)) == empty
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)]
        for other in copies:
            assert not other._spectra and torch.equal(other(x), y)
        with_half = copy.deepcopy(layer)
        with_half(x)
        assert relative_error(with_half.half()(x.half()), y) < 0.01
        assert relative_error(layer.double()(x.double()), y) < 1e-6
        assert relative_error(layer.float()(x), y) < 1e-6


def test_kept_spectra_are_bounded_and_only_for_inference(built):
    layer = fused(SGConv)
    x = torch.randn(2, 4, 8, 6)
    layer(x).sum().backward()
    assert not layer._spectra and all(p.grad is not None for p in layer.parameters())
    with torch.inference_mode():
        for height in range(1, 20):
            layer(torch.randn(1, 4, height, 3))
    assert len(layer._spectra) == 4


@pytest.mark.parametrize("transform", ["vmap", "functional_call"])
def test_function_transforms_see_their_own_weights(built, transform):
    layer = fused(SGConv)
    x = torch.randn(3, 2, 4, 8, 6)
    with torch.no_grad():
        layer(x[0])
        if transform == "functional_call":
            y = torch.func.functional_call(layer, {"kernel": 2 * layer.kernel}, (x[0],))
            layer.kernel.mul_(2)
            assert relative_error(y, expected_of(layer, x[0])) < 1e-5
        else:
            y = torch.vmap(layer)(x)
            assert relative_error(y, torch.stack([layer(one) for one in x])) < 1e-6


def test_no_leak_over_changing_sizes(built):
    """1,000 calls of 50 sizes, forward and fused: the memory at the end is that after a first round."""
    layer, trained = fused(SGConv), MRConv(4, (8, 6), norm="spectral").train()

    def calls(count):
        for i in range(count):
            x = torch.randn(2, 4, 8 + i % 50, 9)
            with torch.no_grad():
                layer(x)
            if i % 10 == 0:
                trained(x).sum().backward()

    calls(100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls(1000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024  # KiB


@needs_extension
def test_hash_sees_every_bit():
    values = torch.randn(1000)
    seen = {cpu.content_hash(values)}
    for i in range(0, 1000, 7):
        changed = values.view(torch.int32).clone()
        changed[i] ^= 1 << (i % 31)
        seen.add(cpu.content_hash(changed))
    for other in (-values, values.flip(0), values.roll(2), values[:-1], torch.cat([values, torch.zeros(1)])):
        seen.add(cpu.content_hash(other))
    assert len(seen) == 1 + 143 + 5


# ---- Spectral statistics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dilated", "sparse"])
@pytest.mark.parametrize("map_size", [(8, 6), (12, 9)])
@pytest.mark.parametrize("options", [{}, {"local": 3, "row_gap": 1}, {"causal": True}])
def test_spectral_training_equals_float64(built, kind, map_size, options):
    """Outputs, statistics and all gradients in float32; float64 takes the plain path, which has its own tests."""
    torch.manual_seed(0)
    layer = MRConv(20, (8, 6), kind=kind, norm="spectral", **options).train()
    exact = copy.deepcopy(layer).double()
    x = (torch.randn(5, 20, *map_size) + 1).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    g = torch.randn(x.shape)
    y, y64 = layer(x), exact(x64)
    assert relative_error(y, y64) < 1e-5
    for ours, theirs in zip(layer.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-5)
    ours = torch.autograd.grad(y, (x, *layer.parameters()), g)
    theirs = torch.autograd.grad(y64, (x64, *exact.parameters()), g.double())
    names = ["x", *(name for name, _ in layer.named_parameters())]
    for name, gradient, expected in zip(names, ours, theirs, strict=True):
        assert relative_error(gradient, expected) < 1e-4, name


@needs_extension
def test_spectral_training_keeps_only_its_input():
    """Between forward and backward: the input, and what does not grow with the batch."""
    layer = MRConv(64, (14, 14), norm="spectral").train()
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    sizes = []
    for batch in (2, 34):
        saved.clear()
        x = torch.randn(batch, 64, 14, 14).to(memory_format=torch.channels_last).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x)
        sizes.append(sum(saved.values()))
    per_image = (sizes[1] - sizes[0]) / 32
    assert per_image < 1.05 * 4 * 64 * 196
