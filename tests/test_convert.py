"""Projected inheritance: what is copied, what is fitted and how well, and the script around it."""

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from gconvnext.checkpoint import load_model, save_checkpoint
from gconvnext.convert import from_convnext, stage_means
from PIL import Image
from reference import direct_conv, relative_error
from test_scripts import call

KINDS = [
    ("sgconvnext_atto", {}),
    ("sgconvnext_atto", {"init": "cosine"}),
    ("sgconvnext_atto", {"position_decay": 0.5}),
    ("sgconvnext_atto", {"row_gap": 3}),
    ("mrconvnext_atto", {}),
    ("mrconvnext_atto", {"kind": "sparse", "norm": "spectral"}),
    ("mrconvnext_atto", {"kind": "dense", "weighted": False}),
]
ILL_CONDITIONED = [("sgconvnext_atto", {"combine": "sum"}), ("mrconvnext_atto_fourier", {})]


def ids(kinds):
    return [" ".join([name, *(f"{key}={value}" for key, value in kwargs.items())]) for name, kwargs in kinds]


def convnext(**kwargs):
    """A ConvNeXt-Atto whose every part matters: random taps, biases and norms, layer scale near 1."""
    torch.manual_seed(0)
    model = timm.create_model("convnext_atto", **{"num_classes": 10, "ls_init_value": 1.0, **kwargs})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "conv_dw.weight" in name:
                parameter.normal_(std=1 / 7)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            elif "head" not in name:
                parameter.mul_(3)
    return model.eval()


def smooth_images(count, seed):
    """Random colour fields with the falling spectrum of photos, `(count, 3, 32, 32)`."""
    generator = torch.Generator().manual_seed(seed)
    octaves = [torch.randn(count, 3, side, side, generator=generator) for side in (2, 4, 8, 16, 32)]
    return sum(F.interpolate(x, 32, mode="bilinear") * 0.6**i for i, x in enumerate(octaves))


def target_kernel(conv, mixer):
    """The taps of a depthwise convolution as a global kernel `(2, C, L)`, one by one."""
    height, width, gap = mixer.reference
    kernel = torch.zeros(2, conv.in_channels, height * (width + gap), dtype=torch.float64)
    for i in range(7):
        for j in range(7):
            dy, dx = (i - 3) * conv.dilation[0], (j - 3) * conv.dilation[0]
            offset = -(dy * (width + gap) + dx)
            if abs(dy) < height and abs(dx) < width:
                kernel[int(offset < 0), :, offset if offset >= 0 else -offset - 1] += conv.weight[:, 0, i, j].double()
    return kernel


def whole_kernel(mixer):
    """A mixer's inference kernel with its skip, without the offset that reaches nothing."""
    kernel = mixer.read_kernel(mixer.merge(torch.float64)[0], mixer.reference).clone()
    kernel[1, :, -1] = 0
    return kernel


# The plain fit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, kwargs", KINDS + ILL_CONDITIONED, ids=ids(KINDS + ILL_CONDITIONED))
@torch.no_grad()
def test_all_else_is_copied_and_the_report_is_that_of_the_kernels(name, kwargs):
    source = convnext()
    model, fits = from_convnext(source, name, img_size=64, **kwargs)
    state = model.state_dict()
    for key, value in source.state_dict().items():
        if not key.endswith("conv_dw.weight") and not ("mrconvnext" in name and key.endswith("conv_dw.bias")):
            assert torch.equal(state[key], value), key
    mixers = model.token_mixers()
    assert [fit.name for fit in fits] == list(mixers) and not model.training
    convs = dict(source.named_modules())
    for fit in fits:
        kernel, target = whole_kernel(mixers[fit.name]), target_kernel(convs[fit.name], mixers[fit.name])
        assert relative_error(kernel, target) == pytest.approx(fit.kernel, abs=1e-4)
        assert fit.kernel < 1 and fit.output is None
    means = [np.mean([fit.kernel for fit in fits if fit.stage == stage]) for stage in range(4)]
    assert [kernel for kernel, _ in stage_means(fits)] == pytest.approx(means)


@pytest.mark.parametrize("name, kwargs", KINDS, ids=ids(KINDS))
def test_fit_is_the_least_squares_solution(name, kwargs):
    source = convnext().double()
    model, fits = from_convnext(source, name, img_size=64, **kwargs)
    convs = dict(source.named_modules())
    for fit in fits[::3]:
        mixer = model.token_mixers()[fit.name]
        parameters = [getattr(mixer, mixer.kernel_names()[0]), mixer.skip]
        target = target_kernel(convs[fit.name], mixer).detach()
        gradients = torch.autograd.grad((whole_kernel(mixer) - target).square().sum(), parameters)
        for gradient in gradients:
            assert gradient.norm() < 1e-6 * target.norm()


@pytest.mark.parametrize("kwargs", [{}, {"position_decay": 1.0}], ids=["concat", "eq. 2"])
@torch.no_grad()
def test_sgconv_holds_a_7x7_kernel_on_maps_of_26_columns_and_more(kwargs):
    source = convnext()
    model, fits = from_convnext(source, "sgconvnext_atto", img_size=224, **kwargs)
    convs = dict(source.named_modules())
    for fit in fits[:4]:
        mixer = model.token_mixers()[fit.name]
        assert relative_error(whole_kernel(mixer), target_kernel(convs[fit.name], mixer)) < 1e-5
    residuals = [kernel for kernel, _ in stage_means(fits)]
    assert residuals[2:] == pytest.approx([0.54, 0.71], abs=0.03)


@torch.no_grad()
def test_an_exact_fit_with_a_row_gap_is_the_convolution():
    options = {"img_size": 64, "output_stride": 8}  # dilated taps, and maps large enough for them
    source = convnext(output_stride=8)
    model, fits = from_convnext(source, "mrconvnext_atto", kind="dense", row_gap=3, **options)
    assert max(fit.kernel for fit in fits) < 1e-6
    x = F.interpolate(smooth_images(2, seed=0), 64)
    assert relative_error(model(x), source(x)) < 1e-4
    assert relative_error(from_convnext(source, "mrconvnext_atto", kind="dense", **options)[0](x), source(x)) > 0.01


@pytest.mark.parametrize("norm", ["batch", "spectral"])
@torch.no_grad()
def test_training_starts_from_the_function_in_force(norm):
    images = smooth_images(48, seed=1)
    model, _ = from_convnext(convnext(), "mrconvnext_atto", images, img_size=32, norm=norm)
    inference = model(images)
    assert relative_error(model.train()(images), inference) < 0.02
    # Without images the statistics are those of white noise.
    mixer = from_convnext(convnext(), "mrconvnext_atto", img_size=32, norm=norm)[0].stages[0].blocks[0].conv_dw
    noise = torch.randn(500, 40, 8, 8, generator=torch.Generator().manual_seed(1))
    inference = mixer(noise)
    assert relative_error(mixer.train()(noise), inference) < 0.05


# The fit on images ----------------------------------------------------------------------------------------------------


def mixer_outputs(model, images):
    outputs = {}
    hooks = [
        module.register_forward_hook(lambda module, args, output, name=name: outputs.update({name: output}))
        for name, module in model.named_modules()
        if name.endswith("conv_dw")
    ]
    outputs["logits"] = model(images)
    for hook in hooks:
        hook.remove()
    return outputs


@pytest.mark.parametrize("name, kwargs", KINDS[:1] + KINDS[4:6] + ILL_CONDITIONED)
@torch.no_grad()
def test_images_improve_the_fit_on_other_images(name, kwargs):
    source, seen, held_out = convnext(), smooth_images(96, seed=1), smooth_images(96, seed=2)
    expected = mixer_outputs(source, held_out)
    plain, _ = from_convnext(source, name, img_size=32, **kwargs)
    fitted, fits = from_convnext(source, name, seen, img_size=32, **kwargs)
    before, after = mixer_outputs(plain, held_out), mixer_outputs(fitted, held_out)
    errors = {key: (relative_error(after[key], y), relative_error(before[key], y)) for key, y in expected.items()}
    assert all(a < b for a, b in errors.values()), errors
    outputs, on_seen = mixer_outputs(fitted, seen), mixer_outputs(source, seen)
    for fit in fits:
        assert fit.output == pytest.approx(relative_error(outputs[fit.name], on_seen[fit.name]), rel=1e-3)


@torch.no_grad()
def test_fit_on_images_solves_the_least_squares_problem():
    """One block of a 2x2 map, whose normal equations are small, in another way."""
    source, images = convnext().double(), smooth_images(64, seed=1).double()
    model, _ = from_convnext(source, "sgconvnext_atto", images, img_size=32)
    name = "stages.2.blocks.0.conv_dw"
    mixer, outputs = model.token_mixers()[name], mixer_outputs(source, images)
    inputs = {}
    hook = mixer.register_forward_pre_hook(lambda module, args: inputs.update(x=args[0]))
    model(images)
    hook.remove()
    u, wanted = inputs["x"].flatten(2), outputs[name].flatten(2)  # (B, C, 4)
    error = (direct_conv(u, whole_kernel(mixer)) + mixer.bias.unsqueeze(-1) - wanted).square().sum((0, 2))
    # N = 3 scales of d = 1 on 4 offsets: sub-kernels on offsets 0, 1 and 2 to 3, in both directions, skip and bias.
    units = torch.zeros(6, 2, 4, dtype=torch.float64)
    for direction in range(2):
        for i, places in enumerate(([0], [1], [2, 3])):
            units[3 * direction + i, direction, places] = 1.0
    columns = [direct_conv(u, unit.unsqueeze(1).expand(-1, u.shape[1], -1)) for unit in units]
    design = torch.stack([*columns, torch.ones_like(u)], dim=-1).transpose(0, 1).flatten(1, 2)  # (C, B * 4, 7)
    rhs = wanted.transpose(0, 1).flatten(1).unsqueeze(-1)
    solution = torch.linalg.lstsq(design, rhs, driver="gelsd").solution
    best = (design @ solution - rhs).square().sum((1, 2))
    assert torch.all(error < best * 1.001 + 1e-9)


@torch.no_grad()
def test_any_number_of_images_will_do():
    for count in (2, 65):  # stage 4 has maps of one pixel
        model, fits = from_convnext(convnext(), "mrconvnext_atto", smooth_images(count, seed=1), img_size=32)
        assert all(torch.isfinite(value).all() for value in model.state_dict().values())


# Errors ---------------------------------------------------------------------------------------------------------------


def test_refuses():
    source = convnext()
    for given, name, kwargs, message in [
        (source, "sgconvnext_femto", {}, "do not have the same size and options"),
        (source, "sgconvnext_tiny", {}, "do not have the same size and options"),
        (source, "sgconvnext_atto", {"num_classes": 3}, "do not have the same size and options: 2 parameters differ"),
        (timm.create_model("convnextv2_atto"), "sgconvnext_atto", {}, "ConvNeXt-V2"),
        (timm.create_model("sgconvnext_atto"), "sgconvnext_atto", {}, "a SGConvNeXt: expected timm's ConvNeXt"),
        (torch.nn.Linear(1, 1), "sgconvnext_atto", {}, "a Linear: expected timm's ConvNeXt"),
        (source, "convnext_atto", {}, "no global kernels to fit"),
        (source, "mrconvnext_atto", {"local": 7, "row_gap": 3}, "without loss"),
        (source, "mrconvnext_atto", {"norm": "layer"}, "norm='batch' or 'spectral'"),
        (source, "sgconvnext_atto", {"causal": True}, "causal=True cannot be fitted"),
        (source, "sgconvnext_ato", {}, "did you mean"),
        (source, "sgconvnext_atto", {"output_stride": 16}, "the same output_stride"),
        (source, "sgconvnext_atto", {"colour": 1}, "cannot be made with"),
        (source, "sgconvnext_atto", {"img_size": 64, "images": smooth_images(4, 0)}, r"\(4, 3, 32, 32\): expected"),
        (source, "sgconvnext_atto", {"img_size": 32, "images": smooth_images(1, 0)}, "at least 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            from_convnext(given, name, **kwargs)


# from_convnext.py -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "convnext.pth"
    save_checkpoint(
        path,
        convnext(num_classes=2),
        arch="convnext_atto",
        model_args={"num_classes": 2, "ls_init_value": 1.0},
        class_names=["cat", "dog"],
        data_config=load_model("convnext_atto", img_size=32).data_config,
        epoch=1,
        metrics={},
        args={},
    )
    return path


def test_script_writes_a_checkpoint_to_go_on_from(checkpoint, tmp_path, capsys):
    rng, output = np.random.default_rng(0), tmp_path / "start.pth"
    (tmp_path / "images").mkdir()
    for i in range(12):
        image = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
        image.resize((40, 40)).save(tmp_path / "images" / f"{i}.png")
    (tmp_path / "images" / "broken.png").write_bytes(b"no image")
    options = ("--model", "mrconvnext_atto", "--model-kwargs", "kind=sparse", "--output", output)
    images = ("--images", tmp_path / "images", "--num-images", 20)
    assert call("weights/from_convnext.py", "--checkpoint", checkpoint, *options, *images) == 0
    out = capsys.readouterr().out
    assert "fitting on 12 images of 32x32" in out
    assert "train.py DATA --model mrconvnext_atto --model-kwargs kind=sparse --img-size 32 --initial-checkpoint" in out
    rows = [line.split() for line in out.splitlines() if line.strip()[:1] in "1234"]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"] and all(0 < float(row[2]) < 1 for row in rows)
    loaded = load_model(checkpoint=output)
    assert loaded.arch == "mrconvnext_atto" and loaded.class_names == ["cat", "dog"]
    assert loaded.data_config["input_size"] == (3, 32, 32) and loaded.model.kernel_img_size == (32, 32)
    weight = load_model(checkpoint=checkpoint).model.stem[0].weight
    assert torch.equal(loaded.model.stem[0].weight, weight)


@torch.no_grad()
def test_script_gives_what_the_function_gives(tmp_path, capsys):
    source, output = convnext(num_classes=1000, ls_init_value=1e-6), tmp_path / "start.pth"
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    options = ("--source", "convnext_atto", "--checkpoint", tmp_path / "weights.pth", "--img-size", 64)
    assert call("weights/from_convnext.py", *options, "--model", "sgconvnext_atto", "--output", output) == 0
    assert "       -\n" in capsys.readouterr().out
    model, _ = from_convnext(source, "sgconvnext_atto", img_size=64)
    x = F.interpolate(smooth_images(2, seed=0), 64)
    loaded = load_model(checkpoint=output)
    assert relative_error(loaded.model(x), model(x)) < 1e-4
    assert loaded.class_names[0] == "n01440764"


def test_script_refuses(checkpoint, tmp_path, capsys):
    output = ("--output", tmp_path / "start.pth")
    for args, message in [
        (("--source", "convnext_atto", "--model", "sgconvnext_atto"), "no weights: give --checkpoint"),
        (("--checkpoint", tmp_path / "gone.pth", "--model", "sgconvnext_atto"), "no checkpoint file at"),
        (("--checkpoint", checkpoint, "--model", "sgconvnext_tiny"), "do not have the same size"),
        (
            ("--checkpoint", checkpoint, "--model", "sgconvnext_atto", "--images", tmp_path / "gone"),
            "no file or folder",
        ),
    ]:
        assert call("weights/from_convnext.py", *args, *output) == 2, args
        assert message in capsys.readouterr().err
    assert not (tmp_path / "start.pth").exists()
