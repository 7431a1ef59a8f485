"""The layers against independent float64 references, written here as plainly as possible."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from gconvnext.layers import (
    KINDS,
    NORMS,
    FusedGlobalConv,
    MRConv,
    SGConv,
    fft_length,
    global_conv,
    local_kernel,
    resample_kernel,
    spectral_moments,
)
from reference import direct_conv, relative_error, resample_in_loops
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
SG_OPTIONS = [{}, {"combine": "sum"}, {"init": "cosine"}, {"position_decay": 1.0}]
MR_OPTIONS = [{"kind": kind, "norm": norm} for kind in KINDS for norm in ("batch", "spectral")]
MR_OPTIONS += [{"weighted": False}, {"local": 7, "row_gap": 3}, {"local": 7, "row_gap": 3, "norm": "spectral"}]
LAYERS = [(SGConv, options) for options in SG_OPTIONS] + [(MRConv, options) for options in MR_OPTIONS]
LAYERS += [(SGConv, {"row_gap": 2}), (SGConv, {"causal": True}), (MRConv, {"causal": True, "norm": "spectral"})]


def make(cls, map_size=(8, 6), dim=4, seed=0, dtype=torch.float64, **options):
    """A layer with every parameter and running statistic away from its initial value."""
    torch.manual_seed(seed)
    layer = cls(dim, map_size, stride=32, dtype=dtype, **options)
    layer.reset_parameters()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in ("alpha", "norm_weight", "norm_bias", "bias", "local"):
                parameter.copy_(torch.randn_like(parameter) + (name in ("alpha", "norm_weight")))
        if hasattr(layer, "running_mean"):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2.0)
    return layer


# ---- The operation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("backend", ["auto", "fft", "toeplitz"])
@pytest.mark.parametrize("batch,dim,length", [
    (1, 1, 1), (2, 3, 1), (3, 2, 2), (2, 3, 3), (2, 3, 49), (3, 2, 50), (130, 2, 61), (1, 5, 97), (2, 3, 196),
    (2, 2, 784), (1, 2, 3136),
])  # fmt: skip
def test_global_conv_equals_direct_sum(backend, directions, dtype, batch, dim, length):
    if backend == "toeplitz" and length > 784:
        dim = 1
    torch.manual_seed(0)
    u = torch.randn(batch, dim, length, dtype=dtype, requires_grad=True)
    kernel = torch.randn(directions, dim, length, dtype=dtype, requires_grad=True)
    target = torch.randn(batch, dim, length, dtype=dtype)
    y = global_conv(u, kernel, backend)
    assert y.dtype == dtype
    assert relative_error(y, direct_conv(u.detach(), kernel.detach())) < TOLERANCE[dtype]

    # The adjoints of the same sum: du[s] = sum_t k[t - s] g[t] and dk[m] = sum_t g[t] u[t - m].
    du, dk = torch.autograd.grad(y, (u, kernel), target)
    u64, k64 = u.detach().double(), kernel.detach().double()
    expected_du = direct_conv(target.flip(-1), k64).flip(-1)
    assert relative_error(du, expected_du) < TOLERANCE[dtype]
    expected_dk = torch.zeros_like(k64)
    for m in range(length):
        expected_dk[0, :, m] = (target.double()[..., m:] * u64[..., : length - m]).sum((0, 2))
        if directions == 2 and m + 1 < length:
            expected_dk[1, :, m] = (target.double()[..., : length - m - 1] * u64[..., m + 1 :]).sum((0, 2))
    assert relative_error(dk, expected_dk) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", ["fft", "toeplitz"])
def test_global_conv_with_several_kernels(backend):
    torch.manual_seed(0)
    u, kernels = torch.randn(3, 4, 21), torch.randn(5, 2, 4, 21)
    y = global_conv(u, kernels, backend)
    assert y.shape == (3, 5, 4, 21)
    for i in range(5):
        assert relative_error(y[:, i], direct_conv(u, kernels[i])) < 1e-5


@pytest.mark.parametrize("size", [224, 192])
@pytest.mark.parametrize("mode", ["half", "bfloat16", "autocast"])
@pytest.mark.parametrize("backend", ["fft", "toeplitz"])
def test_global_conv_in_low_precision(backend, mode, size):
    """The four maps of an image: finite, dtype kept, within 2 % of float32; large values do not overflow."""
    for stride in (4, 8, 16, 32):
        length = (size // stride) ** 2
        if backend == "toeplitz" and length > 196:
            continue
        torch.manual_seed(0)
        u, kernel = 50 * torch.randn(2, 3, length), torch.randn(2, 3, length)
        expected = global_conv(u, kernel, backend)
        if mode == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = global_conv(u, kernel, backend)
            assert y.dtype == torch.float32 and relative_error(y, expected) < 1e-6
        else:
            dtype = getattr(torch, mode)
            y = global_conv(u.to(dtype), kernel.to(dtype), backend)
            assert y.dtype == dtype
        assert torch.isfinite(y).all()
        assert relative_error(y, expected) < 0.02


def test_fft_length_is_even_smooth_and_long_enough():
    for length in list(range(1, 300)) + [784, 3136, 12544]:
        n = fft_length(length)
        assert n >= 2 * length - 1 and n % 2 == 0
        for prime in (2, 3, 5, 7):
            while n % prime == 0:
                n //= prime
        assert n == 1
    assert [fft_length(length) for length in (3136, 784, 196)] == [6272, 1568, 392]


@pytest.mark.parametrize("u,kernel,backend,message", [
    ((2, 3, 5), (2, 3, 6), "auto", "same C and L"), ((2, 3, 5), (2, 4, 5), "auto", "same C and L"),
    ((3, 5), (2, 3, 5), "auto", "same C and L"), ((2, 3, 5), (3, 3, 5), "auto", "1 or 2 directions"),
    ((2, 3, 5), (2, 3, 5), "cudnn", "fft, toeplitz"),
])  # fmt: skip
def test_global_conv_names_what_is_wrong(u, kernel, backend, message):
    with pytest.raises(ValueError, match=message):
        global_conv(torch.zeros(u), torch.zeros(kernel), backend)


# ---- Resolution ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("gap0,gap", [(0, 0), (3, 3)])
@pytest.mark.parametrize("map_size0", [(7, 7), (5, 8), (8, 5)])
@pytest.mark.parametrize(
    "map_size", [(7, 7), (12, 12), (7, 10), (10, 7), (3, 4), (1, 1), (2, 1), (1, 5), (14, 14), (5, 8)]
)
def test_resampled_kernel_equals_the_rule_in_loops(map_size, map_size0, gap0, gap, directions):
    torch.manual_seed(0)
    reference, grid = (*map_size0, gap0), (*map_size, gap)
    kernel = torch.randn(directions, 3, map_size0[0] * (map_size0[1] + gap0), dtype=torch.float64)
    kernel[1:, :, -1] = 0  # offset -L, which no element reaches
    expected = resample_in_loops(kernel, reference, grid)
    y = resample_kernel(kernel, reference, grid)
    assert y.shape == expected.shape
    assert relative_error(y, expected) < 1e-12
    if reference == grid:
        assert torch.equal(y, kernel) and relative_error(expected, kernel) < 1e-12


def test_resampled_kernel_keeps_its_sum():
    """A smooth kernel that fits into both grids has the same sum on each."""
    offsets = torch.arange(16.0, dtype=torch.float64)
    row = torch.exp(-((offsets[:, None] ** 2 + offsets[None, :] ** 2) / 8))
    row[:, 8:] = 0
    kernel = torch.zeros(2, 1, 256, dtype=torch.float64)
    kernel[0, 0] = row.flatten()
    doubled = resample_kernel(kernel, (16, 16, 0), (32, 32, 0))
    assert doubled.sum().item() == pytest.approx(kernel.sum().item(), rel=0.02)


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("map_size", [(1, 1), (1, 3), (2, 2), (5, 4), (7, 7), (9, 14)])
def test_local_kernel_is_a_2d_convolution(map_size, dilation):
    torch.manual_seed(0)
    height, width = map_size
    gap = 3 * dilation
    x, weight = torch.randn(2, 3, height, width).double(), torch.randn(3, 7, 7).double()
    kernel = local_kernel(weight, (height, width, gap), dilation, 2)
    y = global_conv(F.pad(x, (0, gap)).flatten(2), kernel).unflatten(-1, (height, width + gap))[..., :width]
    expected = F.conv2d(x, weight.unsqueeze(1), padding=3 * dilation, dilation=dilation, groups=3)
    assert relative_error(y, expected) < 1e-12


# ---- SGConv --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length,scales,dim", [(1, 1, 1), (2, 2, 1), (4, 3, 1), (16, 5, 1), (49, 5, 3), (3136, 5, 196)])
def test_number_of_scales(length, scales, dim):
    layer = SGConv(2, (1, length))
    assert (layer.num_scales, layer.kernel_dim) == (scales, dim)


def upsample_in_loops(row: Tensor, factor: int) -> Tensor:
    """Linear interpolation between sample centres, edges held."""
    out = []
    for j in range(len(row) * factor):
        position = min(max((j + 0.5) / factor - 0.5, 0.0), len(row) - 1.0)
        left = int(position)
        right = min(left + 1, len(row) - 1)
        out.append(row[left] * (1 - (position - left)) + row[right] * (position - left))
    return torch.stack(out)


@pytest.mark.parametrize("options", SG_OPTIONS)
def test_sgconv_kernel_equals_the_equation(options):
    layer = make(SGConv, map_size=(7, 7), dim=3, **options)
    combine = options.get("combine", "concat")
    weight = getattr(layer, combine).detach()
    kernel, _ = layer.merge(torch.float64)
    for direction in range(2):
        for channel in range(3):
            expected = torch.zeros(49, dtype=torch.float64)
            start = 0
            for i in range(layer.num_scales):
                factor = 2 ** max(i - 1, 0) if combine == "concat" else 2**i
                alpha = 1.0 if "position_decay" in options else layer.alpha[channel] ** i
                part = alpha * upsample_in_loops(weight[i, direction, channel], factor)
                expected[start : start + len(part)] += part
                start += len(part) if combine == "concat" else 0
            if "position_decay" in options:
                expected /= torch.arange(1, 50).double() ** options["position_decay"]
            expected /= layer.norm[direction, channel, 0]
            assert relative_error(kernel[direction, channel], expected) < 1e-12
            assert expected.norm().item() == pytest.approx(1.0)  # Z is the norm at initialisation


def test_cosine_initialisation():
    layer = make(SGConv, map_size=(16, 16), dim=8, init="cosine")
    assert ((layer.alpha >= 1 / 3) & (layer.alpha <= 1)).all() and layer.alpha.unique().numel() == 8
    phase = torch.linspace(0, 2 * math.pi, layer.kernel_dim, dtype=torch.float64)
    waves = torch.stack([(i * phase).cos() for i in range(8)])
    distance = torch.cdist(layer.concat.detach()[2, 1], waves).min(1)
    assert distance.values.max() < 1e-5 and distance.indices.unique().numel() == 8


def test_sgconv_normaliser_never_changes():
    layer = make(SGConv).train()
    before = layer.norm.clone()
    with torch.no_grad():
        layer.concat.mul_(3)
    layer(torch.randn(2, 4, 8, 8, dtype=torch.float64))
    assert torch.equal(layer.norm, before)


# ---- MRConv --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("map_size", [(8, 6), (7, 7), (4, 4), (1, 2), (1, 1), (16, 16)])
def test_branch_kernels_equal_their_definition(kind, map_size):
    layer = make(MRConv, map_size=map_size, dim=2, kind=kind)
    length, branches, d = layer.length, layer.num_branches, layer.kernel_dim
    kernels = layer.branch_kernels(torch.float64)
    assert kernels.shape == (branches, 2, 2, length)
    for i in range(branches):
        size = min(length, d * 2**i)
        for direction in range(2):
            for channel in range(2):
                row = getattr(layer, kind).detach()[direction, channel]
                w = row[i * d : (i + 1) * d]
                expected = torch.zeros(length, dtype=torch.float64)
                if kind == "dense":
                    expected[:size] = row[d * (2**i - 1) : d * (2**i - 1) + size]
                elif kind == "dilated":
                    for j in range(d):
                        expected[j * 2**i] = w[j]
                elif kind == "sparse":
                    positions = layer.mask[i, direction].nonzero().flatten()
                    assert len(positions) == d and positions.max() < size
                    expected[positions] = w
                else:
                    t = torch.arange(size, dtype=torch.float64)
                    for j in range(d):  # 1, cos 1, sin 1, cos 2, ... of unit norm
                        mode = (j + 1) // 2
                        wave = torch.cos(2 * math.pi * mode * t / size)
                        if j % 2 == 0 and j > 0:
                            wave = -torch.sin(2 * math.pi * mode * t / size)
                        expected[:size] += w[j] * wave / wave.norm()
                assert relative_error(kernels[i, direction, channel], expected) < 1e-12


def test_sparse_positions_come_from_the_seed():
    masks = [make(MRConv, kind="sparse", seed=0), make(MRConv, kind="sparse")]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        other = MRConv(4, (8, 6), kind="sparse", seed=5)
        other.reset_parameters()
    assert torch.equal(masks[0].mask, masks[1].mask)
    assert not torch.equal(masks[0].mask, other.mask)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("batch,length", [(1, 1), (1, 2), (3, 2), (2, 49), (3, 50)])
def test_spectral_moments_are_those_of_the_circular_convolution(kind, mean, batch, length):
    layer = make(MRConv, map_size=(1, length), dim=3, kind=kind)
    kernels = layer.branch_kernels(torch.float64).detach()
    u = torch.randn(batch, 3, length, dtype=torch.float64) + mean
    n = fft_length(length)
    circular = torch.zeros(batch, layer.num_branches, 3, n, dtype=torch.float64)
    for s in range(length):
        for j in range(length):
            circular[..., (s + j) % n] += kernels[:, 0, :, j] * u[:, None, :, s]
            if j + 1 < length:
                circular[..., (s - j - 1) % n] += kernels[:, 1, :, j] * u[:, None, :, s]
    taps = torch.cat([kernels[:, 1, :, :-1].flip(-1), kernels[:, 0]], dim=-1)
    moments = spectral_moments(torch.fft.rfft(u, n=n), torch.fft.rfft(taps, n=n), n)
    expected_mean, expected_var = circular.mean((0, 3)), circular.var((0, 3), unbiased=False)
    torch.testing.assert_close(moments[0], expected_mean, rtol=1e-10, atol=1e-10 * (1 + mean))
    torch.testing.assert_close(moments[1], expected_var, rtol=1e-8, atol=1e-10)
    assert (moments[1] >= 0).all()


def test_spectral_variance_is_never_negative():
    """Constant inputs, float32: E[x^2] - E[x]^2 would come out negative here."""
    kernels = torch.zeros(4, 3, 51)
    kernels[..., 0] = 1e3
    u = torch.zeros(5, 3, 51, dtype=torch.complex64)
    u[..., 0] = 1e4 + 0.3
    _, variance = spectral_moments(u, kernels.to(torch.complex64), 100)
    assert (variance >= 0).all() and variance.max() < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", NORMS)
def test_mrconv_gradients(kind, norm):
    layer = make(MRConv, map_size=(3, 2), dim=2, kind=kind, norm=norm).train()
    x = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *parameters):
        fresh = copy.deepcopy(layer)  # running statistics change with every call
        return torch.func.functional_call(fresh, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_mrconv_training_forward_equals_the_equation(norm, weighted, gap):
    layer = make(MRConv, norm=norm, weighted=weighted, row_gap=gap, map_size=(8, 8)).train()
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64)
    u = F.pad(x, (0, gap)).flatten(2)
    before = copy.deepcopy(layer)
    y = layer(x)
    expected = torch.zeros_like(x)
    for i, kernel in enumerate(before.branch_kernels(torch.float64)):
        branch = direct_conv(u, kernel).unflatten(-1, (8, 8 + gap))[..., :8]
        dims = (0, 2, 3) if norm == "batch" else (1,)
        mean, var = branch.mean(dims, keepdim=True), branch.var(dims, unbiased=False, keepdim=True)
        branch = (branch - mean) / (var + layer.eps).sqrt()
        branch = branch * before.norm_weight[i, :, None, None] + before.norm_bias[i, :, None, None]
        expected += branch * (before.alpha[i, :, None, None] if weighted else 1.0)
        if norm == "batch":
            count = 3 * 64
            torch.testing.assert_close(layer.running_mean[i], 0.9 * before.running_mean[i] + 0.1 * mean.flatten())
            unbiased = var.flatten() * count / (count - 1)
            torch.testing.assert_close(layer.running_var[i], 0.9 * before.running_var[i] + 0.1 * unbiased)
    expected += before.skip[:, None, None] * x + before.bias[:, None, None]
    assert relative_error(y, expected) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_spectral_training_forward_normalises_by_its_moments(kind):
    layer = make(MRConv, kind=kind, norm="spectral").train()
    x = torch.randn(3, 4, 8, 6, dtype=torch.float64)
    u, n = x.flatten(2), fft_length(48)
    before = copy.deepcopy(layer)
    kernels = layer.branch_kernels(torch.float64)
    taps = torch.cat([kernels[:, 1, :, :-1].flip(-1), kernels[:, 0]], dim=-1)
    mean, var = spectral_moments(torch.fft.rfft(u, n=n), torch.fft.rfft(taps, n=n), n)
    y = layer(x).flatten(2)
    expected = layer.skip[:, None] * u + layer.bias[:, None]
    for i in range(layer.num_branches):
        branch = (direct_conv(u, kernels[i]) - mean[i, :, None]) / (var[i, :, None] + layer.eps).sqrt()
        branch = branch * layer.norm_weight[i, :, None] + layer.norm_bias[i, :, None]
        expected = expected + layer.alpha[i, :, None] * branch
    assert relative_error(y, expected) < 1e-10
    torch.testing.assert_close(layer.running_mean, 0.9 * before.running_mean + 0.1 * mean)
    torch.testing.assert_close(layer.running_var, 0.9 * before.running_var + 0.1 * var * (3 * n) / (3 * n - 1))


@pytest.mark.parametrize("norm", ["batch", "spectral"])
def test_one_value_per_channel_is_refused_in_training(norm):
    layer = MRConv(4, (7, 7), norm=norm, stride=32)
    layer.reset_parameters()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=r"one value a channel.*larger batch"):
        layer.train()(torch.randn(1, 4, 1, 1))
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
    assert layer.eval()(torch.randn(1, 4, 1, 1)).shape == (1, 4, 1, 1)
    assert layer.train()(torch.randn(2, 4, 1, 1)).shape == (2, 4, 1, 1)


# ---- Every layer ---------------------------------------------------------------------------------------------------


def layer_id(value):
    return value.__name__ if isinstance(value, type) else "-".join(f"{k}={v}" for k, v in value.items()) or "default"


@pytest.mark.parametrize("map_size", [(8, 6), (12, 9), (8, 8)])
@pytest.mark.parametrize("cls,options", LAYERS, ids=layer_id)
def test_fused_layer_equals_layer(cls, options, map_size):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        layer = make(cls, dtype=dtype, **options).eval()
        fused = layer.fuse()
        assert isinstance(fused, FusedGlobalConv) and fused.kernel.dtype == dtype
        assert fused.fuse() is fused
        x = torch.randn(2, 4, *map_size, dtype=dtype)
        y = layer(x)
        assert relative_error(fused(x), y) < tolerance
        with torch.no_grad():
            fused.kernel.zero_()
        assert relative_error(fused(x), y) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_merged_layer_equals_the_sum_of_branches(kind):
    """Inference with the stored statistics, branch by branch through torch's own BatchNorm."""
    layer = make(MRConv, kind=kind, map_size=(8, 6)).eval()
    x = torch.randn(2, 4, 8, 6, dtype=torch.float64)
    expected = layer.skip[:, None, None] * x + layer.bias[:, None, None]
    for i, kernel in enumerate(layer.branch_kernels(torch.float64)):
        norm = torch.nn.BatchNorm2d(4, eps=layer.eps, dtype=torch.float64).eval()
        norm.running_mean, norm.running_var = layer.running_mean[i], layer.running_var[i]
        with torch.no_grad():
            norm.weight.copy_(layer.norm_weight[i])
            norm.bias.copy_(layer.norm_bias[i])
        expected = expected + layer.alpha[i, :, None, None] * norm(direct_conv(x.flatten(2), kernel).view_as(x))
    assert relative_error(layer(x), expected) < 1e-10


@pytest.mark.parametrize("cls,options", LAYERS + [(MRConv, {"norm": "layer"})], ids=layer_id)
def test_every_parameter_has_a_gradient_on_every_map(cls, options):
    for map_size in ((8, 6), (1, 1), (1, 3), (12, 9)):
        layer = make(cls, **options).train()
        layer(torch.randn(2, 4, *map_size, dtype=torch.float64)).square().sum().backward()
        missing = [name for name, parameter in layer.named_parameters() if parameter.grad is None]
        assert not missing


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
@pytest.mark.parametrize("cls,options", LAYERS + [(MRConv, {"norm": "layer"})], ids=layer_id)
def test_layer_in_low_precision(cls, options, dtype):
    layer = make(cls, dtype=torch.float32, **options)
    x = torch.randn(2, 4, 8, 6)
    for train in (False, True):
        expected = copy.deepcopy(layer).train(train)(x)
        low = copy.deepcopy(layer).to(dtype).train(train)
        y = low(x.to(dtype))
        assert y.dtype == dtype and torch.isfinite(y).all()
        assert relative_error(y, expected) < 0.02
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.float32 and torch.isfinite(y).all()


@pytest.mark.parametrize("norm", ["batch", "spectral"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_counts_a_batch_once(norm, use_reentrant):
    plain = make(MRConv, norm=norm).train()
    checkpointed = copy.deepcopy(plain)
    x = torch.randn(2, 4, 8, 6, dtype=torch.float64, requires_grad=True)
    plain(x).square().sum().backward()
    torch.utils.checkpoint.checkpoint(checkpointed, x, use_reentrant=use_reentrant).square().sum().backward()
    for ours, theirs in zip(plain.buffers(), checkpointed.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_initial_values():
    """A layer is ready when constructed: skip ~ N(0, 1), no bias, alpha for unit variance, norms at identity."""
    torch.manual_seed(0)
    for layer in (SGConv(4096, (4, 4)), MRConv(4096, (4, 4), local=7, row_gap=3)):
        assert abs(layer.skip.std().item() - 1) < 0.05 and abs(layer.skip.mean().item()) < 0.05
        assert not layer.bias.any()
        assert torch.isfinite(layer.eval()(torch.randn(1, 4096, 4, 5))).all()
    assert torch.equal(layer.alpha, torch.full_like(layer.alpha, layer.num_branches**-0.5))
    assert layer.local.std().item() == pytest.approx(0.02, rel=0.15)
    assert torch.equal(layer.norm_weight, torch.ones_like(layer.norm_weight)) and not layer.norm_bias.any()
    assert torch.equal(layer.running_var, torch.ones_like(layer.running_var)) and not layer.running_mean.any()
    assert layer.dilated.std().item() == pytest.approx(1, rel=0.05)


def test_unknown_options_name_the_known_ones():
    with pytest.raises(ValueError, match="'conv'.*concat"):
        SGConv(4, (7, 7), combine="conv")
    with pytest.raises(ValueError, match="'uniform'.*cosine"):
        SGConv(4, (7, 7), init="uniform")
    with pytest.raises(ValueError, match="'wavelet'.*dilated, fourier, sparse, dense"):
        MRConv(4, (7, 7), kind="wavelet")
    with pytest.raises(ValueError, match="'group'.*batch, spectral, layer"):
        MRConv(4, (7, 7), norm="group")
    with pytest.raises(ValueError, match="Pass row_gap=3"):
        MRConv(4, (7, 7), local=7, row_gap=2)
    for wrong in ({"row_gap": -1}, {"row_gap": 1.5}, {"local": -7}):
        with pytest.raises(ValueError, match="whole number of at least 0"):
            MRConv(4, (7, 7), **wrong)


def test_fuse_refuses_training_mode_and_layer_norm():
    with pytest.raises(RuntimeError, match=r"model\.eval\(\)"):
        make(SGConv).train().fuse()
    with pytest.raises(RuntimeError, match="norm='layer'.*cannot be fused"):
        make(MRConv, norm="layer").eval().fuse()
