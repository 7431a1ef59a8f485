"""ConvNeXt's weights in models with a local branch: every published layout, without loss."""

import copy
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from reference import relative_error
from timm.models import get_model_input_config, get_pretrained_cfg
from timm.utils import reparameterize_model
from torch import Tensor, nn

SIZES = ("atto", "femto", "pico", "nano", "tiny", "small", "base", "large")
TAGS = [(size, tag) for size in SIZES for tag in timm.models.convnext.default_cfgs[f"convnext_{size}"].tags]


def source(name: str = "convnext_atto", dtype=torch.float64, **kwargs) -> nn.Module:
    """A ConvNeXt with layer scale near 1, so that every block matters."""
    torch.manual_seed(0)
    model = timm.create_model(name, dtype=dtype, **kwargs)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("gamma"):
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            elif key.endswith("conv_dw.weight"):
                parameter.normal_(std=0.15)
            elif parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def images(*size: int, dtype=torch.float64) -> Tensor:
    return torch.randn(2, 3, *size, dtype=dtype, generator=torch.Generator().manual_seed(1))


def inherit(model: nn.Module, path, name: str = "mrconvnext_atto_local", cfg=None, dtype=torch.float64, **kwargs):
    """A local model made with the weights of `model` through timm's loading of a file."""
    state_dict = model if isinstance(model, dict) else model.state_dict()
    if str(path).endswith(".safetensors"):
        safetensors.torch.save_file(state_dict, path)
    else:
        torch.save(state_dict, path)
    overlay = dict(file=str(path), **(cfg or {}))
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, dtype=dtype, **kwargs)


def original_layout(state_dict: dict) -> dict:
    """timm's names and shapes -> those of the ConvNeXt authors' files."""
    out = {}
    for key, value in state_dict.items():
        parts = key.split(".")
        if parts[0] == "stem":
            key = "downsample_layers.0." + ".".join(parts[1:])
        elif parts[0] == "stages" and parts[2] == "downsample":
            key = f"downsample_layers.{parts[1]}." + ".".join(parts[3:])
        elif parts[0] == "stages":
            key = f"stages.{parts[1]}.{parts[3]}." + ".".join(parts[4:])
            key = key.replace("conv_dw", "dwconv").replace("mlp.fc", "pwconv")
            value = value.flatten(1) if "pwconv" in key and value.dim() == 4 else value
        elif parts[1] == "norm":
            key = f"norm.{parts[2]}"
        else:
            key = f"head.{parts[2]}"
        out[key] = value
    return out


# ---- The same function ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(224, 224), (192, 256), (64, 64)])
@pytest.mark.parametrize("name", ["atto", "tiny", "base"])
def test_inherited_function_is_convnext(name, size, tmp_path):
    """Unfused in training mode and eval, and fused; the global branches wait at alpha = 0."""
    depths = {} if name == "atto" else {"depths": (1, 1, 2, 1)}  # full width; the depth would only cost time
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        theirs = source(f"convnext_{name}", dtype, **depths)
        ours = inherit(theirs, tmp_path / "model.safetensors", f"mrconvnext_{name}_local", dtype=dtype, **depths)
        x = images(*size, dtype=dtype)
        with torch.no_grad():
            expected = theirs(x)
            forms = {"eval": ours.eval(), "fused": reparameterize_model(ours), "train": copy.deepcopy(ours).train()}
            for form, model in forms.items():
                assert relative_error(model(x), expected) < tolerance, form


def test_a_row_gap_of_two_is_not_enough(tmp_path):
    theirs = source()
    ours = inherit(theirs, tmp_path / "model.safetensors").eval()
    for mixer in ours.token_mixers().values():
        mixer.row_gap = 2
    with torch.no_grad():
        assert relative_error(ours(images(64, 64)), theirs(images(64, 64))) > 1e-3


@pytest.mark.parametrize("output_stride", [8, 16])
def test_dilated_stages_stay_lossless(output_stride, tmp_path):
    theirs = source(output_stride=output_stride)
    ours = inherit(theirs, tmp_path / "model.safetensors", output_stride=output_stride).eval()
    with torch.no_grad():
        expected = theirs(images(96, 64))
        assert relative_error(ours(images(96, 64)), expected) < 1e-9
        assert relative_error(reparameterize_model(ours)(images(96, 64)), expected) < 1e-9


def test_features_pooled_features_and_another_head(tmp_path):
    theirs, x, path = source(), images(64, 96), tmp_path / "model.safetensors"
    with torch.no_grad():
        features = inherit(theirs, path, features_only=True).eval()(x)
        for feature, expected in zip(features, theirs.forward_intermediates(x)[1], strict=True):
            assert relative_error(feature, expected) < 1e-9
        pooled = theirs.forward_head(theirs.forward_features(x), pre_logits=True)
        assert relative_error(inherit(theirs, path, num_classes=0).eval()(x), pooled) < 1e-9
        other = inherit(theirs, path, num_classes=5).eval()
        assert relative_error(other.forward_features(x), theirs.forward_features(x)) < 1e-9
        assert other(x).shape == (2, 5)
        gray = inherit(theirs, path, in_chans=1).eval()
        same = x[:, :1].expand(-1, 3, -1, -1)
        # timm sums the stem's channels in float32
        assert relative_error(gray.forward_features(x[:, :1]), theirs.forward_features(same)) < 1e-5


@pytest.mark.parametrize("options", [{"weighted": False}, {"norm": "spectral"}, {"norm": "layer"}, {"kind": "sparse"}])
def test_every_option_inherits(options, tmp_path):
    theirs = source()
    ours = inherit(theirs, tmp_path / "model.safetensors", **options)
    with torch.no_grad():
        for model in (ours.eval(), ours.train()):
            assert relative_error(model(images(64, 64)), theirs(images(64, 64))) < 1e-9


# ---- Published layouts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["timm", "authors", "authors-wrapped", "clip", "local-dir", "ours"])
def test_published_layouts(layout, tmp_path):
    theirs, x = source(num_classes=640 if layout == "clip" else 1000), images(64, 64)
    state, cfg, path = theirs.state_dict(), {}, tmp_path / "model.pth"
    if layout == "authors":
        state = original_layout(state)
    elif layout == "authors-wrapped":
        state = {"model": original_layout(state)}
    elif layout == "clip":
        state["head.fc.bias"].zero_()  # a CLIP projection has none
        head = {"visual.head.proj.weight": state.pop("head.fc.weight")}
        state.pop("head.fc.bias")
        state = {**{f"visual.trunk.{key}": value for key, value in state.items()}, **head, "text.weight": x}
        cfg = dict(num_classes=640)
    elif layout == "local-dir":
        cfg, path = dict(source="local-dir"), tmp_path / "model.safetensors"
    elif layout == "ours":
        state = inherit(theirs, tmp_path / "first.pth").state_dict()
    if layout == "local-dir":
        safetensors.torch.save_file(state, path)
        overlay = dict(source="local-dir", file=str(tmp_path))
        ours = timm.create_model(
            "mrconvnext_atto_local", pretrained=True, pretrained_cfg_overlay=overlay, dtype=torch.float64
        )
    else:
        ours = inherit(state, path, cfg=cfg)
    with torch.no_grad():
        assert relative_error(ours.eval()(x), theirs(x)) < 1e-9


@pytest.mark.parametrize("size,tag", TAGS)
def test_tag_is_timms(size, tag):
    """Everything about a tag is its source's; only the architecture's name differs."""
    ours = get_pretrained_cfg(f"mrconvnext_{size}_local.{tag}").to_dict()
    theirs = get_pretrained_cfg(f"convnext_{size}.{tag}").to_dict()
    assert ours.pop("architecture") == f"mrconvnext_{size}_local" and theirs.pop("architecture") == f"convnext_{size}"
    assert ours == theirs and ours["hf_hub_id"] == f"timm/convnext_{size}.{tag}" and ours["license"]
    model = timm.create_model(f"mrconvnext_{size}_local.{tag}", device="meta")
    assert model.num_classes == theirs["num_classes"]
    assert get_model_input_config(model)["input_size"] == theirs["input_size"]
    assert model.kernel_img_size == theirs["input_size"][1:]


def test_readme_lists_every_tag_under_its_licence():
    lines = (Path(__file__).parents[1] / "README.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| `mrconvnext_SIZE_local` | apache-2.0"))
    licences = [cell.strip() for cell in lines[start].split("|")[2:-1]]
    listed = set()
    for size, line in zip(SIZES, lines[start + 2 :], strict=False):
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert cells[0] == size
        for licence, cell in zip(licences, cells[1:], strict=True):
            listed |= {(size, tag.strip("` "), licence) for tag in cell.split(",") if tag}
    assert listed == {(size, tag, get_pretrained_cfg(f"convnext_{size}.{tag}").license) for size, tag in TAGS}


def test_tags_are_listed_and_the_plain_name_is_imagenet():
    listed = timm.list_pretrained("mrconvnext*")
    assert len(listed) == len(TAGS)
    assert set(listed) == {f"mrconvnext_{size}_local.{tag}" for size, tag in TAGS}
    for size in SIZES:
        cfg = get_pretrained_cfg(f"mrconvnext_{size}_local")
        assert cfg.num_classes == 1000 and cfg.input_size == (3, 224, 224)


@pytest.mark.parametrize("kwargs", [{}, {"num_classes": 5}, {"features_only": True}])
@pytest.mark.parametrize("name", ["convnextv2_atto", "convnext_femto", "convnext_tiny", "sgconvnext_atto", "resnet18"])
def test_other_networks_are_refused(name, kwargs, tmp_path):
    other = timm.create_model(name).state_dict()
    states = [other] + ([original_layout(other)] if name in ("convnext_femto", "convnext_tiny") else [])
    for state in states:
        with pytest.raises(ValueError, match="not weights of mrconvnext_atto_local"):
            inherit(state, tmp_path / "other.pth", dtype=torch.float32, **kwargs)


# ---- Waking up -----------------------------------------------------------------------------------------------------


def test_global_branches_wake_up(tmp_path):
    """The first loss is ConvNeXt's; after ten steps alpha and the global kernels have moved."""
    theirs = source(dtype=torch.float32, num_classes=4)
    overlay = dict(num_classes=4, input_size=(3, 64, 64))
    ours = inherit(theirs, tmp_path / "model.safetensors", cfg=overlay, dtype=torch.float32).train()
    x, target = images(64, 64, dtype=torch.float32), torch.tensor([0, 1])
    before = copy.deepcopy(ours.state_dict())
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    expected = nn.functional.cross_entropy(theirs(x), target)
    for step in range(10):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ours(x), target)
        if step == 0:
            assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
        loss.backward()
        optimizer.step()
    after = ours.state_dict()
    for name in ours.token_mixers():
        assert after[f"{name}.alpha"].abs().max() > 1e-4
        assert not torch.equal(after[f"{name}.dilated"], before[f"{name}.dilated"])
