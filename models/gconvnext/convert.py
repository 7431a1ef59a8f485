"""SGConvNeXt and MRConvNeXt from the weights of a ConvNeXt, by projection (ours).

What both networks have is copied. Each block's global kernel, which is linear in its parameters for every kind, is
fitted to the taps of the block's depthwise convolution; optionally once more, so that its output on images fits.

    source = timm.create_model("convnext_tiny", pretrained=True)
    model, fits = from_convnext(source, "sgconvnext_tiny", images)

The result is where fine-tuning starts, not the source's function: kernels that are coarse far from the centre cannot
hold every tap, and without a row gap a row's end touches the next row's start.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.convnext import ConvNeXt
from torch import Tensor, nn

from .checkpoint import create_model
from .global_convnext import GlobalConvNeXt
from .layers import MRConv, SGConv, TokenMixer, global_conv, local_kernel

__all__ = ["BlockFit", "from_convnext", "stage_means"]

# Five steps of iterated ridge, for basis functions of norm 1. Where the basis is well conditioned (SGConv's concat and
# eq. 2, dilated, sparse, dense) the solution is exact to 1e-13. Where it is not (sum, fourier) it does without huge
# parameters that cancel each other: Fourier at 224, stage 3, has residual 0.66 and parameters up to 30; the exact
# solution, 0.55 and 22,000.
_RIDGE, _RIDGE_STEPS = 1e-3, 5
# Conjugate gradients on images. convnext_atto at 64 px, 256 images, errors of the four stages on 512 others: 0.256,
# 0.394, 0.740, 0.487 after 10, 20 and 50 steps alike (0.296, 0.500, 0.908, 0.719 for the plain fit).
_STEPS, _CONVERGED = 20, 1e-12
_CHUNK = 64  # images at a time
_NOISE_VALUES = 4096  # values a channel of the white noise that stands for activations


@dataclass
class BlockFit:
    """How well a block's token mixer stands in for the depthwise convolution.

    Attributes:
        name: Module name of the mixer.
        stage: Stage number, from 0.
        kernel: Relative error of the kernel (skip included) against the 7x7 taps, over both directions.
        output: Relative error of the mixer's output against the convolution's over the images, each on the activations
            of its own network; None without images.
    """

    name: str
    stage: int
    kernel: float
    output: float | None = None


def stage_means(fits: list[BlockFit]) -> list[tuple[float, float | None]]:
    """Mean kernel and output error of each stage's blocks."""
    means = []
    for stage in range(fits[-1].stage + 1):
        blocks = [fit for fit in fits if fit.stage == stage]
        kernel = sum(fit.kernel for fit in blocks) / len(blocks)
        outputs = [fit.output for fit in blocks if fit.output is not None]
        means.append((kernel, sum(outputs) / len(outputs) if outputs else None))
    return means


@torch.no_grad()
def from_convnext(
    source: ConvNeXt, name: str, images: Tensor | None = None, **model_args: Any
) -> tuple[GlobalConvNeXt, list[BlockFit]]:
    """Makes the model `name` from a ConvNeXt of the same size.

    Args:
        source: timm's ConvNeXt, with its weights; put into eval mode.
        name: `sgconvnext_SIZE`, `mrconvnext_SIZE` or `mrconvnext_SIZE_fourier`.
        images: Unlabelled images to fit the mixers' outputs on, `(n, channels, H, W)` with `(H, W)` the model's
            `img_size`, normalised as the source expects; a few hundred are enough. They also set MRConv's BatchNorm,
            which otherwise takes its statistics from white noise. None for the plain fit of the kernels.
        **model_args: Keywords of the model (`img_size`, `kind`, ...); classes and input channels are the source's.

    Returns:
        The model, in eval mode, and the fit of each block in network order.

    Raises:
        ValueError: If the source is no ConvNeXt (V1) or has another size or other options than the model, if the model
            cannot be fitted (a local branch, `causal`, `norm="layer"`), or if the images have another size.
    """
    _check_source(source)
    model = create_model(name, **{"num_classes": source.num_classes, "in_chans": source.in_chans, **model_args})
    _check_target(model, name)
    model.to(next(source.parameters()))
    _copy_shared(source, model, name)
    if images is not None:
        _check_images(images, model)
    source.eval()
    model.eval()
    x, y = _run(source.stem, images), _run(model.stem, images)  # activations of the source and of the model
    fits = []
    for number, (old, new) in enumerate(zip(source.stages, model.stages, strict=True)):
        x, y = _run(old.downsample, x), _run(new.downsample, y)
        space = _KernelSpace(new.blocks[0].conv_dw)  # the same for all blocks of a stage
        for index, (old_block, new_block) in enumerate(zip(old.blocks, new.blocks, strict=True)):
            kernel, output = _fit_mixer(space, old_block.conv_dw, new_block.conv_dw, x, y)
            fits.append(BlockFit(f"stages.{number}.blocks.{index}.conv_dw", number, kernel, output))
            x, y = _run(old_block, x), _run(new_block, y)
    return model, fits


def _chunks(x: Tensor) -> tuple[Tensor, ...]:
    """`x` in parts of nearly the same number of images, at most `_CHUNK`: none is left over alone, for BatchNorm."""
    return x.tensor_split(-(-len(x) // _CHUNK))


def _run(function: Callable[[Tensor], Tensor], x: Tensor | None) -> Tensor | None:
    """`function(x)`, some images at a time; None, for no images, stays None."""
    return None if x is None else torch.cat([function(chunk) for chunk in _chunks(x)])


# Checks and copies ----------------------------------------------------------------------------------------------------


def _check_source(source: nn.Module) -> None:
    if not isinstance(source, ConvNeXt) or isinstance(source, GlobalConvNeXt):
        raise ValueError(f"the source is a {type(source).__name__}: expected timm's ConvNeXt, e.g. convnext_atto.")
    if any(".grn." in name for name in source.state_dict()):
        raise ValueError("the source is a ConvNeXt-V2 (it has GRN layers): give a ConvNeXt, e.g. convnext_atto.")


def _check_target(model: nn.Module, name: str) -> None:
    if not isinstance(model, GlobalConvNeXt):
        raise ValueError(f"{name} has no global kernels to fit: choose an sgconvnext or mrconvnext model.")
    mixer = next(iter(model.token_mixers().values()))
    if mixer.local is not None:
        raise ValueError(
            f"{name} has a local branch, which takes over a ConvNeXt's weights without loss: load them into the model "
            "(timm.create_model with a pretrained tag or checkpoint), there is nothing to fit."
        )
    if mixer.directions == 1:
        raise ValueError(f"{name} with causal=True cannot be fitted: it holds one half of a 7x7 kernel. Leave it out.")
    if isinstance(mixer, MRConv) and mixer.norm == "layer":
        raise ValueError(f"{name} with norm='layer' has no single kernel to fit: use norm='batch' or 'spectral'.")


def _check_images(images: Tensor, model: GlobalConvNeXt) -> None:
    expected = (model.in_chans, *model.kernel_img_size)
    if images.dim() != 4 or tuple(images.shape[1:]) != expected or len(images) < 2:
        raise ValueError(
            f"images of shape {tuple(images.shape)}: expected (n, {', '.join(map(str, expected))}) with n of at least "
            "2. Resize them, or make the model for their size with img_size."
        )


def _copy_shared(source: ConvNeXt, model: GlobalConvNeXt, name: str) -> None:
    """Copies all but the depthwise convolutions' taps; their biases go to the mixers."""
    state = {key: value for key, value in source.state_dict().items() if not key.endswith("conv_dw.weight")}
    mixers = tuple(f"{mixer}." for mixer in model.token_mixers())
    own = model.state_dict()
    expected = {key for key in own if not key.startswith(mixers) or key.endswith("conv_dw.bias")}
    wrong = sorted(expected ^ state.keys())
    wrong += [key for key in expected & state.keys() if own[key].shape != state[key].shape]
    if wrong:
        raise ValueError(
            f"{name} and the source do not have the same size and options: {len(wrong)} parameters differ, {wrong[0]} "
            "for one. Give the ConvNeXt of the model's size, and the model the source's options."
        )
    blocks = dict(source.named_modules())
    if any(blocks[key].dilation != (mixer.dilation,) * 2 for key, mixer in model.token_mixers().items()):
        raise ValueError(f"{name} and the source are dilated differently: give both the same output_stride.")
    model.load_state_dict({**own, **state})


# The plain fit --------------------------------------------------------------------------------------------------------


class _KernelSpace:
    """The kernels that a mixer can have: `kernel = theta @ basis`, plus a free value at offset 0, the skip.

    A point is `theta (C, D, P)` with P parameters a channel and direction, which multiply basis functions of norm 1:
    factors that the layers keep per channel (SGConv's alpha and Z, MRConv's norms) are left to `_write_mixer`.

    Args:
        mixer: The layer to read the basis off.
    """

    def __init__(self, mixer: TokenMixer) -> None:
        basis = _unit_kernels(mixer)  # (D, P, L)
        self.norms = basis.norm(dim=-1)  # (D, P)
        self.basis = basis / self.norms.unsqueeze(-1)

    def kernel(self, theta: Tensor, skip: Tensor) -> Tensor:
        """`theta (C, D, P)` and `skip (C,)` -> kernel `(D, C, L)`."""
        kernel = theta.transpose(0, 1) @ self.basis
        kernel[0, :, 0] += skip
        return kernel

    def fit(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Least-squares `theta` and `skip` for a kernel `(D, C, L)`."""
        # Offset 0 is the skip's, and offset -L reaches no element: neither binds the parameters.
        free = torch.zeros_like(target[:, 0], dtype=torch.bool)  # (D, L)
        free[0, 0] = free[1, -1] = True
        basis = self.basis.masked_fill(free.unsqueeze(1), 0)
        wanted = target.masked_fill(free.unsqueeze(1), 0)
        theta = torch.stack([_least_squares(b.T, w.T).T for b, w in zip(basis, wanted, strict=True)], dim=1)
        skip = target[0, :, 0] - self.kernel(theta, torch.zeros_like(target[0, :, 0]))[0, :, 0]
        return theta, skip


def _least_squares(a: Tensor, b: Tensor) -> Tensor:
    """Solution x of `a x = b` for `a (rows, columns)`, `b (rows, C)` by iterated ridge, on the smaller Gram matrix."""
    rows, columns = a.shape
    gram = a.T @ a if columns <= rows else a @ a.T
    gram.diagonal().add_(_RIDGE)
    factor = torch.linalg.cholesky(gram)
    x = torch.zeros_like(a.T @ b)
    for _ in range(_RIDGE_STEPS):
        rest = b - a @ x
        x += torch.cholesky_solve(a.T @ rest, factor) if columns <= rows else a.T @ torch.cholesky_solve(rest, factor)
    return x


def _unit_kernels(mixer: TokenMixer) -> Tensor:
    """Kernel of each parameter alone at 1, without factors per channel: `(D, P, L)` in float64."""
    probe = copy.deepcopy(mixer).double()
    if isinstance(probe, SGConv) and probe.position_decay is None:
        probe.alpha.fill_(1)
    count = sum(_branch_sizes(probe))
    units = torch.eye(count, dtype=torch.float64, device=probe.skip.device)
    kernels = []
    for rows in units.split(probe.dim):  # one parameter a channel
        rows = F.pad(rows, (0, 0, 0, probe.dim - len(rows)))
        _write_parameters(probe, rows.unsqueeze(1).expand(-1, 2, -1))
        if isinstance(probe, SGConv):
            kernels.append(probe.unscaled_kernel(rows.dtype))
        else:
            kernels.append(probe.branch_kernels(rows.dtype).sum(0))
    return torch.cat(kernels, dim=1)[:, :count]


def _branch_sizes(mixer: TokenMixer) -> list[int]:
    """Number of parameters of each sub-kernel, per channel and direction."""
    if isinstance(mixer, SGConv):
        return [mixer.kernel_dim] * mixer.num_scales
    return [mixer.kernel_dim * (2**i if mixer.kind == "dense" else 1) for i in range(mixer.num_branches)]


def _write_parameters(mixer: TokenMixer, values: Tensor) -> None:
    """Sets the kernel's parameters from `(C, D, P)`, the sub-kernels one after another in P."""
    if isinstance(mixer, SGConv):
        values = values.unflatten(-1, (mixer.num_scales, mixer.kernel_dim)).permute(2, 1, 0, 3)  # (N, D, C, d)
    else:
        values = values.transpose(0, 1)  # (D, C, P)
    getattr(mixer, mixer.kernel_names()[0]).copy_(values)


def _fit_mixer(
    space: _KernelSpace, conv: nn.Conv2d, mixer: TokenMixer, x: Tensor | None, y: Tensor | None
) -> tuple[float, float | None]:
    """Fits one mixer to a depthwise convolution; returns the errors of kernel and output (see `BlockFit`).

    `x` are activations of the source and `y` those of the model, `(n, C, H, W)`, or both None. The mixer learns from
    `y` what the convolution makes of `x`, so that it also makes up for errors of the mixers before it.
    """
    target = local_kernel(conv.weight.squeeze(1).double(), mixer.reference, mixer.dilation, 2)
    theta, skip = space.fit(target)
    bias, wanted = conv.bias.double(), _run(conv, x)
    if y is not None:
        theta, skip, bias = _fit_outputs(space, mixer, (theta, skip, bias), y, wanted)
    _write_mixer(mixer, theta / space.norms, skip, bias, y)
    difference = space.kernel(theta, skip) - target
    difference[1, :, -1] = 0  # offset -L
    output = None if y is None else ((_run(mixer, y) - wanted).norm() / wanted.norm()).item()
    return (difference.norm() / target.norm()).item(), output


def _write_mixer(mixer: TokenMixer, values: Tensor, skip: Tensor, bias: Tensor, y: Tensor | None) -> None:
    """Sets a mixer so that its eval-mode kernel is that of the parameters `values (C, D, P)` without any factor."""
    mixer.skip.copy_(skip)
    mixer.bias.copy_(bias)
    if isinstance(mixer, SGConv):
        branches = values.split(_branch_sizes(mixer), dim=-1)
        scale = mixer.norm.squeeze(-1).T.unsqueeze(-1).double()  # Z, (C, D, 1)
        if mixer.position_decay is None:
            alpha = mixer.alpha.double().view(-1, 1, 1)
            branches = [branch / alpha**i for i, branch in enumerate(branches)]
        _write_parameters(mixer, torch.cat(branches, dim=-1) * scale)
    else:
        _write_parameters(mixer, values)
        _write_norms(mixer, y)


def _write_norms(mixer: MRConv, y: Tensor | None) -> None:
    """Sets the branches' norms so that each branch gives `k_i * u` as it is.

    The statistics are those of the layer in training on `y`, so that training starts from the same function.
    """
    if y is None:
        height, width, _ = mixer.reference
        shape = (max(2, _NOISE_VALUES // (height * width)), mixer.dim, height, width)
        generator = torch.Generator("cpu").manual_seed(0)
        y = torch.randn(shape, generator=generator, device="cpu").to(mixer.skip)
    momentum = mixer.momentum
    mixer.train()
    for i, chunk in enumerate(_chunks(y)):
        mixer.momentum = 1 / (i + 1)  # the mean over the chunks
        mixer(chunk)
    mixer.eval()
    mixer.momentum = momentum
    alpha = 1 if mixer.alpha is None else mixer.alpha
    mixer.norm_weight.copy_((mixer.running_var + mixer.eps).sqrt() / alpha)
    mixer.norm_bias.copy_(mixer.running_mean / alpha)


# The fit on images ----------------------------------------------------------------------------------------------------


def _fit_outputs(
    space: _KernelSpace, mixer: TokenMixer, start: tuple[Tensor, Tensor, Tensor], y: Tensor, wanted: Tensor
) -> list[Tensor]:
    """Fits `theta`, `skip` and `bias` so that the mixer's output on `y` is `wanted`, both `(n, C, H, W)`.

    Least squares by conjugate gradients on the residual (CGLS), in float64, all channels side by side. It needs
    convolutions only, no matrix of the problem's size. Stopped early, it changes what the images determine and leaves
    the rest as it was at `start`.
    """
    gap = mixer.reference[2]
    u, wanted = F.pad(y, (0, gap)).flatten(2), F.pad(wanted, (0, gap)).flatten(2)
    inside = F.pad(torch.ones_like(y[0, 0]), (0, gap)).flatten()
    transposed = space.basis.transpose(1, 2)  # (D, L, P)

    def forward(point: list[Tensor]) -> Tensor:
        theta, skip, bias = point
        kernel = space.kernel(theta, skip)
        outputs = [global_conv(chunk.double(), kernel) for chunk in _chunks(u)]
        return (torch.cat(outputs) + bias.unsqueeze(-1)) * inside

    def adjoint(residual: Tensor) -> list[Tensor]:
        pairs = zip(_chunks(u), _chunks(residual), strict=True)
        kernel = sum(_kernel_gradient(chunk.double(), part) for chunk, part in pairs)
        return [(kernel @ transposed).transpose(0, 1), kernel[0, :, 0], residual.sum((0, 2))]

    point = list(start)
    residual = wanted - forward(point)
    gradient = direction = adjoint(residual)
    first = energy = _energy(gradient)
    for _ in range(_STEPS):
        change = forward(direction)
        active = energy > _CONVERGED * first  # per channel: beyond this there is rounding only
        step = torch.where(active, energy / change.square().sum((0, 2)), 0)
        point = _add(point, direction, step)
        residual -= change * step.unsqueeze(-1)
        gradient = adjoint(residual)
        previous, energy = energy, _energy(gradient)
        direction = _add(gradient, direction, torch.where(active, energy / previous, 0))
    return point


def _kernel_gradient(u: Tensor, residual: Tensor) -> Tensor:
    """Gradient of `sum(residual * global_conv(u, kernel))` with respect to the kernel `(2, C, L)`."""
    with torch.enable_grad():
        kernel = u.new_zeros(2, *u.shape[1:]).requires_grad_()  # any will do: the sum is linear in it
        return torch.autograd.grad((global_conv(u, kernel) * residual).sum(), kernel)[0]


def _energy(point: list[Tensor]) -> Tensor:
    """Squared norm of each channel's part, `(C,)`."""
    return sum(part.flatten(1).square().sum(1) if part.dim() > 1 else part.square() for part in point)


def _add(a: list[Tensor], b: list[Tensor], scale: Tensor) -> list[Tensor]:
    """`a + scale * b` with a factor a channel."""
    return [p + q * scale.view(-1, *[1] * (p.dim() - 1)) for p, q in zip(a, b, strict=True)]
