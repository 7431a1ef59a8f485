"""The registered models: parametrised over the registry, so that a new variant is tested the day it is registered."""

import copy
import shutil

import gconvnext
import pytest
import safetensors.torch
import timm
import torch
from gconvnext import global_convnext
from gconvnext.layers import KINDS, FusedGlobalConv, residual_feed_forward
from reference import direct_conv, relative_error, resample_in_loops
from timm.models import get_model_input_config
from timm.models._features import FeatureGetterNet
from timm.models.convnext import ConvNeXtBlock
from timm.optim import param_groups_layer_decay
from timm.utils import ModelEmaV2, ModelEmaV3, reparameterize_model
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

ALL = timm.list_models(["sgconvnext_*", "mrconvnext_*"])
SMALL = [name for name in ALL if "_atto" in name]  # one of each family
OPTIONS = [("sgconvnext_atto", {}), ("sgconvnext_atto", {"combine": "sum"}), ("sgconvnext_atto", {"init": "cosine"})]
OPTIONS += [("sgconvnext_atto", {"position_decay": 1.0}), ("mrconvnext_atto", {"norm": "spectral"})]
OPTIONS += [("mrconvnext_atto", {"kind": kind}) for kind in KINDS] + [("mrconvnext_atto", {"weighted": False})]
SHALLOW = {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 24)}


def option_id(value):
    return "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value


def make(name: str, seed: int = 0, dtype=torch.float32, **kwargs) -> nn.Module:
    """A model with layer scale 1 and every statistic and weight away from its initial value."""
    torch.manual_seed(seed)
    model = timm.create_model(name, dtype=dtype, **kwargs)
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("running_mean"):
                buffer.normal_()
            elif key.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)
        for key, parameter in model.named_parameters():
            leaf = key.split(".")[-1]
            if leaf == "gamma":
                parameter.fill_(1.0)
            elif leaf in ("alpha", "norm_weight"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif leaf in ("norm_bias", "bias"):
                parameter.normal_(std=0.3)
    return model


def images(*size: int, batch: int = 2, dtype=torch.float32) -> Tensor:
    return torch.randn(batch, 3, *size, dtype=dtype, generator=torch.Generator().manual_seed(1))


def zero_kernels(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, FusedGlobalConv):
                module.kernel.zero_()
    return model


def states_equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# ---- The registry --------------------------------------------------------------------------------------------------


def test_every_size_of_every_family_is_registered():
    sizes = ("atto", "femto", "pico", "nano", "tiny", "small", "base", "large")
    expected = {f"{family}_{size}" for family in ("sgconvnext", "mrconvnext") for size in sizes}
    expected |= {f"mrconvnext_{size}_{kind}" for size in sizes for kind in ("fourier", "local")}
    assert expected <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_only_the_token_mixer_differs_from_convnext(name):
    ours = timm.create_model(name, device="meta")
    theirs = timm.create_model(f"convnext_{name.split('_')[1]}", device="meta")
    rest = {key: value.shape for key, value in ours.state_dict().items() if ".conv_dw." not in key}
    assert rest == {key: value.shape for key, value in theirs.state_dict().items() if ".conv_dw." not in key}
    assert ours.feature_info == theirs.feature_info
    cfg = {
        key: value for key, value in theirs.pretrained_cfg.items() if key in ("mean", "std", "classifier", "first_conv")
    }
    assert cfg.items() <= ours.pretrained_cfg.items()
    assert ours.pretrained_cfg["num_classes"] == 1000 and ours.pretrained_cfg["input_size"] == (3, 224, 224)


@pytest.mark.parametrize("size,millions", [("tiny", 29), ("small", 51), ("base", 90), ("large", 200)])
def test_sgconvnext_has_the_parameters_of_the_paper(size, millions):
    """Table 8 of the SGConv paper, in millions, truncated."""
    model = timm.create_model(f"sgconvnext_{size}", device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) // 10**6 == millions


@pytest.mark.parametrize("name", ALL)
def test_parameter_groups_of_every_variant(name):
    model = timm.create_model(name, device="meta")
    names = {key for key, _ in model.named_parameters()}
    kernels, no_decay = model.kernel_parameter_names(), model.no_weight_decay()
    assert kernels <= no_decay <= names
    assert len(kernels) == sum(len(stage.blocks) for stage in model.stages)
    assert all(".conv_dw." in key for key in no_decay)
    assert no_decay == {key for key in names if ".conv_dw." in key and not key.endswith((".bias", ".local"))}


@pytest.mark.parametrize("name", ["sgconvnext_atto", "mrconvnext_atto"])
@pytest.mark.parametrize("wrong", [{"kernel_sizes": 5}, {"pretraned": True}, {"kindd": "fourier"}])
def test_unknown_argument(name, wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        timm.create_model(name, **wrong)


def test_unknown_option_value_and_missing_weights():
    with pytest.raises(ValueError, match="'wavelet'.*dilated"):
        timm.create_model("mrconvnext_atto", kind="wavelet")
    for size in (24, 0, 64.0, "64", (64, 24), (64, 64, 64)):
        with pytest.raises(ValueError, match="img_size.*at least 32"):
            timm.create_model("sgconvnext_atto", img_size=size)
    assert timm.list_pretrained(["sgconvnext*"]) == []
    with pytest.raises(RuntimeError, match="No pretrained weights exist"):
        timm.create_model("sgconvnext_atto", pretrained=True)


# ---- timm's contract -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_features_intermediates_and_pruning(name):
    x = images(64, 96)
    features = make(name, features_only=True, out_indices=(1, 3)).eval()(x)
    assert [tuple(feature.shape[-2:]) for feature in features] == [(8, 12), (2, 3)]
    model = make(name).eval()
    final, intermediates = model.forward_intermediates(x)
    assert torch.equal(intermediates[1], features[0]) and torch.equal(intermediates[3], features[1])
    assert torch.equal(final, model.forward_features(x))
    assert torch.equal(model.forward_head(final), model(x))
    getter = make(name, features_only=True, feature_cls="getter").eval()
    assert isinstance(getter, FeatureGetterNet) and torch.equal(getter(x)[1], intermediates[1])
    model.prune_intermediate_layers([1])
    assert torch.equal(model.forward_intermediates(x, intermediates_only=True)[1], intermediates[1])


@pytest.mark.parametrize("name", SMALL)
def test_head_channels_pooling_and_stride(name):
    x = images(64, 64)
    assert make(name, img_size=64, num_classes=0)(x).shape == (2, 320)
    assert make(name, img_size=64, num_classes=0, global_pool="")(x).shape == (2, 320, 2, 2)
    assert make(name, img_size=64, num_classes=7, in_chans=1)(x[:, :1]).shape == (2, 7)
    model = make(name, img_size=64, num_classes=7)
    model.reset_classifier(3, "max")
    assert model(x).shape == (2, 3)
    for stride in (8, 16):
        assert make(name, img_size=64, output_stride=stride).forward_features(x).shape == (
            2,
            320,
            64 // stride,
            64 // stride,
        )


@pytest.mark.parametrize("options", [{"causal": True}, {"local": 7, "row_gap": 3}], ids=option_id)
@pytest.mark.parametrize("output_stride", [16, 32])
def test_causal_and_local_models(options, output_stride):
    """Causal: a pixel changes nothing before it. Both: fused equals unfused, dilated stages included."""
    name = "sgconvnext_atto" if "causal" in options else "mrconvnext_atto"
    model = make(name, dtype=torch.float64, img_size=64, output_stride=output_stride, **SHALLOW, **options).eval()
    x = images(64, 96, dtype=torch.float64)
    with torch.no_grad():
        assert relative_error(reparameterize_model(model)(x), model(x)) < 1e-10
        mixer = model.stages[3].blocks[0].conv_dw
        gap = 3 * (32 // output_stride) if "local" in options else 0
        assert mixer.row_gap == gap and mixer.reference == (64 // output_stride, 64 // output_stride, gap)
        if "causal" in options:
            y = torch.randn(1, 24, 4, 5, dtype=torch.float64)
            z = y.clone()
            z[..., 2, 3] += 1
            changed = ((mixer(y) - mixer(z)).abs() > 1e-9).flatten(2).any(1)[0]
            assert not changed[:13].any() and changed[13:].all()


@pytest.mark.parametrize("name,options", [
    ("sgconvnext_atto", {"use_grn": True}), ("mrconvnext_atto", {"use_grn": True}),
    ("sgconvnext_atto", {"norm_layer": "rmsnorm2d"}), ("sgconvnext_atto", {"stem_type": "overlap_tiered"}),
    ("mrconvnext_atto", {"head_norm_first": True}), ("mrconvnext_tiny", {"conv_bias": False}),
    ("sgconvnext_atto", {"ls_init_value": None, "act_layer": "relu"}),
    ("mrconvnext_atto", {"head_hidden_size": 8, "head_init_scale": 0.5})], ids=option_id)  # fmt: skip
def test_convnext_options_are_initialised(name, options):
    torch.manual_seed(3)
    expected = timm.create_model(name, img_size=64, **SHALLOW, **options)
    model = timm.create_model(name, img_size=64, device="meta", **SHALLOW, **options).to_empty(device="cpu")
    for value in model.state_dict().values():
        value.fill_(float("nan") if value.is_floating_point() else 1)
    torch.manual_seed(3)
    model.init_weights()
    assert states_equal(model.state_dict(), expected.state_dict())
    assert all(torch.isfinite(value).all() for value in expected.state_dict().values())
    theirs = timm.create_model(f"convnext_{name.split('_')[1]}", **SHALLOW, **options)
    for key, value in theirs.state_dict().items():
        if ".conv_dw." not in key and value.numel() > 300:  # drawn from the same distribution as timm's
            assert expected.state_dict()[key].std().item() == pytest.approx(value.std().item(), rel=0.25, abs=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_gradient_checkpointing_and_layer_groups(name):
    model, x = make(name, num_classes=4), images(64, 64)
    model.eval()(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.set_grad_checkpointing()
    model(x).sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    groups = param_groups_layer_decay(model, weight_decay=0.1, no_weight_decay_list=model.no_weight_decay())
    by_id = {id(parameter): key for key, parameter in model.named_parameters()}
    grouped = [by_id[id(parameter)] for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(by_id.values())
    decayed = {by_id[id(p)] for group in groups for p in group["params"] if group["weight_decay"]}
    assert not decayed & model.no_weight_decay()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", SMALL)
def test_factory_dtype(name, dtype):
    model = timm.create_model(name, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    y = model(images(64, 64).to(dtype))
    assert y.dtype == dtype and torch.isfinite(y).all()


@pytest.mark.parametrize("device_context", [False, True])
@pytest.mark.parametrize("name,options", OPTIONS + [("mrconvnext_atto", {"norm": "layer"})], ids=option_id)
def test_meta_device_creation_equals_normal_creation(name, options, device_context):
    torch.manual_seed(3)
    expected = timm.create_model(name, img_size=64, **options).state_dict()
    if device_context:
        with torch.device("meta"):
            model = timm.create_model(name, img_size=64, **options)
    else:
        model = timm.create_model(name, img_size=64, device="meta", **options)
    assert all(value.is_meta for value in model.state_dict().values())
    model.to_empty(device="cpu")
    for value in model.state_dict().values():
        value.fill_(float("nan") if value.is_floating_point() else 1)
    torch.manual_seed(3)
    model.init_weights()
    assert states_equal(model.state_dict(), expected)


@pytest.mark.parametrize("name", SMALL)
def test_fx_torchscript_and_export(name):
    model, x = make(name, img_size=(64, 96)).eval(), images(64, 96)
    expected = model(x)
    nodes = timm.layers.create_feature_extractor(model, {"stages.2": "out"})
    assert torch.equal(nodes(x)["out"], model.forward_intermediates(x)[1][2])
    for form in (model, reparameterize_model(model)):
        scripted = torch.jit.script(form)
        torch.testing.assert_close(scripted(x), expected, rtol=1e-4, atol=1e-4)
        batch = torch.export.Dim("batch", min=2, max=512)
        exported = torch.export.export(form, (x,), dynamic_shapes=({0: batch},)).module()
        torch.testing.assert_close(exported(x), expected, rtol=1e-4, atol=1e-4)
        larger = images(64, 96, batch=5)
        torch.testing.assert_close(exported(larger), model(larger), rtol=1e-4, atol=1e-4)


COMPILED = [("aot_eager", "sgconvnext_atto", {}), ("aot_eager", "mrconvnext_atto", {})]
COMPILED += [("aot_eager", "mrconvnext_atto", {"norm": "spectral"}), ("aot_eager", "mrconvnext_atto_local", {})]
COMPILED += [("inductor", "sgconvnext_atto", {}), ("inductor", "mrconvnext_atto", {})]  # takes long: one a family


@pytest.mark.parametrize("backend,name,options", COMPILED, ids=option_id)
def test_compiled_equals_eager(backend, name, options):
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("inductor needs a C++ compiler")
    torch._dynamo.reset()
    model = make(name, img_size=64, num_classes=4, **SHALLOW, **options).train()
    compiled_model = copy.deepcopy(model)
    # One graph an image size: a graph for all sizes takes minutes to capture.
    compiled = torch.compile(compiled_model, fullgraph=True, backend=backend, dynamic=False)
    for size in ((64, 64),) if backend == "inductor" else ((64, 64), (32, 96)):
        x = images(*size)
        y, z = model(x), compiled(x)
        torch.testing.assert_close(z, y, rtol=1e-4, atol=1e-4)
        model.zero_grad()
        compiled_model.zero_grad()
        y.square().sum().backward()
        z.square().sum().backward()
        for ours, theirs in zip(model.parameters(), compiled_model.parameters(), strict=True):
            assert (theirs.grad - ours.grad).norm() <= 1e-3 * ours.grad.norm() + 1e-4
    for ours, theirs in zip(model.buffers(), compiled_model.buffers(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


# ---- Fusing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(224, 224), (160, 96)])
@pytest.mark.parametrize("name,options", OPTIONS, ids=option_id)
def test_fused_equals_unfused(name, options, size):
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
        model, x = make(name, dtype=dtype, **options).eval(), images(*size, dtype=dtype)
        with torch.no_grad():
            expected = model(x)
            fused = reparameterize_model(model)
            assert relative_error(fused(x), expected) < tolerance
            assert relative_error(zero_kernels(fused)(x), expected) > 0.1
        assert not any(isinstance(module, FusedGlobalConv) for module in model.modules())


@pytest.mark.parametrize("name", SMALL)
def test_fused_twice_saved_and_loaded(name, tmp_path):
    model, x = make(name, img_size=64).eval(), images(64, 64)
    fused = reparameterize_model(model)
    twice = reparameterize_model(fused)
    assert torch.equal(twice(x), fused(x))
    safetensors.torch.save_file(fused.state_dict(), tmp_path / "fused.safetensors")
    fresh = reparameterize_model(make(name, seed=9, img_size=64).eval())
    fresh.load_state_dict(safetensors.torch.load_file(tmp_path / "fused.safetensors"), strict=True)
    assert torch.equal(fresh(x), fused(x))
    with pytest.raises(RuntimeError, match=r"eval\(\)"):
        reparameterize_model(model.train())
    assert torch.equal(model.eval()(x), make(name, img_size=64).eval()(x))


def test_fused_model_keeps_dtype_and_trains():
    fused = reparameterize_model(make("mrconvnext_atto", img_size=64).bfloat16().eval())
    assert {parameter.dtype for parameter in fused.parameters()} == {torch.bfloat16}
    fused.train()(images(64, 64).bfloat16()).sum().backward()
    assert all(parameter.grad is not None for parameter in fused.parameters())


# ---- Inference by rows ---------------------------------------------------------------------------------------------

BLOCKS = [("sgconvnext_atto", {}), ("mrconvnext_atto", {}), ("mrconvnext_atto_local", {})]
BLOCKS += [("sgconvnext_atto", {"conv_mlp": False}), ("sgconvnext_atto", {"ls_init_value": None})]


@pytest.fixture
def runs_by_rows(monkeypatch):
    """A list that gets an entry for every block that runs by rows."""
    calls = []

    def listening(x, *args):
        calls.append(tuple(x.shape))
        return residual_feed_forward(x, *args)

    monkeypatch.setattr(global_convnext, "residual_feed_forward", listening)
    return calls


def first_block(name: str = "sgconvnext_atto", **kwargs) -> nn.Module:
    return make(name, **kwargs).eval().stages[0].blocks[0]


def features(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name,options", BLOCKS, ids=option_id)
@pytest.mark.parametrize("shape", [(1, 40, 8, 8), (3, 40, 9, 13), (2, 40, 56, 56), (1, 40, 97, 83)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_block_by_rows_equals_timms(name, options, shape, layout, runs_by_rows):
    block = first_block(name, **options)
    x = features(*shape).to(memory_format=layout)
    before = x.clone()
    with torch.no_grad():
        y = block(x)
        reference = ConvNeXtBlock.forward(copy.deepcopy(block).double(), x.double())
    assert runs_by_rows == [(shape[0] * shape[2] * shape[3], 40)]
    assert y.shape == x.shape and relative_error(y, reference) < 2e-6
    assert torch.equal(x, before)


@pytest.mark.parametrize("onednn", [True, False])
def test_rows_without_onednn_and_of_a_slice(onednn, runs_by_rows):
    block = first_block()
    x = features(4, 80, 30, 31)[1:, ::2, 1:, :-1]  # no dense layout
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=onednn):
        y = block(x)
        reference = ConvNeXtBlock.forward(copy.deepcopy(block).double(), x.double())
    assert len(runs_by_rows) == 1 and relative_error(y, reference) < 2e-6


def test_rows_follow_the_weights(runs_by_rows):
    block, x = first_block(), features(2, 40, 14, 14)
    with torch.no_grad():
        block(x)
        block.mlp.fc1.weight.mul_(2.0)
        block.norm.bias = nn.Parameter(features(40))
        block.gamma.fill_(-0.5)
        reference = ConvNeXtBlock.forward(copy.deepcopy(block).double(), x.double())
        assert relative_error(block(x), reference) < 2e-6
    assert len(runs_by_rows) == 2


class Doubled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked(block):
    block.mlp.fc1.register_forward_hook(lambda module, args, y: 2 * y if y.dim() == 4 else 1 / 0)


def pre_hooked(block):
    block.norm.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def of_another_class(block):
    block.mlp.fc2.__class__ = Doubled


def parametrised(block):
    nn.utils.parametrizations.weight_norm(block.mlp.fc2)
    with torch.no_grad():
        block.mlp.fc2.parametrizations.weight.original0.mul_(2)


def with_a_forward_of_its_own(block):
    block.mlp.forward = lambda x: 2 * x


def with_another_activation(block):
    block.mlp.act = nn.Tanh()


def without_norm(block):
    block.norm = nn.Identity()


def with_dropout(block):
    block.mlp.drop2 = nn.Dropout(0.5).train()


@pytest.mark.parametrize(
    "change",
    [hooked, pre_hooked, of_another_class, parametrised, with_a_forward_of_its_own, with_another_activation]
    + [without_norm, with_dropout],
)
def test_a_changed_block_runs_module_by_module(change, runs_by_rows):
    block, x = first_block(), features(2, 40, 14, 14)
    with torch.no_grad():
        unchanged = block(x)
        assert len(runs_by_rows) == 1
        change(block)
        torch.manual_seed(0)
        y = block(x)
        torch.manual_seed(0)
        reference = ConvNeXtBlock.forward(block, x)
    assert len(runs_by_rows) == 1
    assert torch.equal(y, reference) and not torch.allclose(y, unchanged)


@pytest.mark.parametrize("options", [{"use_grn": True}, {"drop_path_rate": 0.5}, {"act_layer": "relu"}], ids=option_id)
def test_other_convnexts_run_module_by_module(options, runs_by_rows):
    model = make("sgconvnext_atto", **options).eval()
    model.stages[1].blocks[0].drop_path.train(options == {"drop_path_rate": 0.5})
    block, x = model.stages[1].blocks[0], features(2, 80, 14, 14)
    with torch.no_grad():
        torch.manual_seed(0)
        y = block(x)
        torch.manual_seed(0)
        reference = ConvNeXtBlock.forward(block, x)
    assert runs_by_rows == [] and torch.equal(y, reference)


def test_everything_but_plain_inference_runs_module_by_module(runs_by_rows):
    block, x = first_block(), features(2, 40, 14, 14)
    assert block(x).requires_grad
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            block(x)
        block.double()(x.double())
        block.float()
        torch.jit.trace(block, x, check_trace=False)
        torch.func.functional_call(block, {"gamma": 2 * block.gamma}, (x,))
        with FlopCounterMode(display=False) as counter:
            block(x)
    assert runs_by_rows == [] and counter.get_total_flops() >= 2 * 2 * x.numel() * 4 * 40
    remove = nn.modules.module.register_module_forward_hook(lambda module, args, y: None)
    try:
        with torch.inference_mode():
            block(x)
            assert runs_by_rows == []
    finally:
        remove.remove()
    with torch.inference_mode():
        block(x)
    assert len(runs_by_rows) == 1


def test_functional_call_replaces_the_parameters_of_rows():
    block, x = first_block(), features(2, 40, 14, 14)
    with torch.no_grad():
        replaced = {"mlp.fc1.weight": 2 * block.mlp.fc1.weight, "norm.bias": 1 + block.norm.bias}
        y = torch.func.functional_call(block, replaced, (x,))
        changed = copy.deepcopy(block)
        changed.mlp.fc1.weight.mul_(2)
        changed.norm.bias.add_(1)
        assert relative_error(y, changed(x)) < 1e-6


# ---- Resolution ----------------------------------------------------------------------------------------------------

SIZES = [(224, 224), (384, 384), (224, 320), (320, 224), (97, 131), (32, 32)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name,options", [("sgconvnext_atto", {}), ("mrconvnext_atto", {"row_gap": 3})], ids=option_id)
def test_each_stage_reads_its_kernel_by_the_rule(name, options, size):
    """The first mixer of each stage of a model made for 224, against a direct sum with a kernel resampled in loops."""
    model = make(name, dtype=torch.float64, **SHALLOW, **options).eval()
    seen = {}
    for key, mixer in model.token_mixers().items():
        mixer.register_forward_hook(lambda _, args, out, key=key: seen.update({key: (args[0], out)}))
    with torch.no_grad():
        model(images(*size, batch=1, dtype=torch.float64))
        for key, mixer in model.token_mixers().items():
            x, y = (value[:, :2] for value in seen[key])
            height, width, gap = *x.shape[-2:], options.get("row_gap", 0)
            stage = int(key.split(".")[1])
            reference = (56 >> stage, 56 >> stage, gap)
            assert (height, width) == tuple(side // 4 >> stage for side in size)
            kernel, bias = mixer.merge(torch.float64)
            kernel = resample_in_loops(kernel[:, :2], reference, (height, width, gap))
            u = torch.nn.functional.pad(x, (0, gap)).flatten(2)
            expected = direct_conv(u, kernel).unflatten(-1, (height, width + gap))[..., :width]
            expected = expected + mixer.skip[:2, None, None] * x + bias[:2, None, None]
            assert relative_error(y, expected) < 1e-10


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name,options", [("sgconvnext_atto", {}), ("mrconvnext_atto", {}),
                                          ("mrconvnext_atto", {"norm": "spectral"}),
                                          ("mrconvnext_atto", {"local": 7, "row_gap": 3})], ids=option_id)  # fmt: skip
def test_any_image_size(name, options, size):
    model, x = make(name, **options), images(*size)
    model.train()(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        expected = model.eval()(x)
        assert relative_error(reparameterize_model(model)(x), expected) < 1e-4


@pytest.mark.parametrize("size", [(31, 64), (64, 31), (16, 16)])
@pytest.mark.parametrize("name", SMALL)
def test_too_small_an_image_is_refused(name, size):
    for model in (make(name, img_size=64), make(name, img_size=64, features_only=True)):
        with pytest.raises(ValueError, match="smaller than 32x32"):
            model.eval()(images(*size))


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, None])
@pytest.mark.parametrize("size", [224, 192])
@pytest.mark.parametrize("name", SMALL)
def test_low_precision_model(name, size, dtype):
    """`.half()`, `.bfloat16()` and autocast: every mixer keeps its input's dtype and stays within 2 % of float32."""
    model, x = make(name, **SHALLOW).eval(), images(size, size)
    errors = []

    def compare(mixer, args, y):
        reference = copy.deepcopy(mixer).float()
        reference._forward_hooks.clear()
        assert y.dtype == args[0].dtype and torch.isfinite(y).all()
        with torch.autocast("cpu", enabled=False):
            errors.append(relative_error(y, reference(args[0].float())))

    low = copy.deepcopy(model) if dtype is None else copy.deepcopy(model).to(dtype)
    for mixer in low.token_mixers().values():
        mixer.register_forward_hook(compare)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is None):
        y = low(x if dtype is None else x.to(dtype))
    assert torch.isfinite(y).all() and len(errors) == 4
    assert max(errors) < 0.02


def test_image_size_sets_grid_cfg_and_expected_input():
    model = timm.create_model("sgconvnext_atto", img_size=(64, 96))
    assert [mixer.reference for mixer in model.token_mixers().values()][0] == (16, 24, 0)
    assert timm.data.resolve_model_data_config(model)["input_size"] == (3, 64, 96)
    for parameter in model.stem.parameters():
        parameter.requires_grad_(False)
    grids = {key: value.clone() for key, value in model.state_dict().items() if key.endswith(".grid")}
    model.set_input_size(128)
    assert get_model_input_config(model)["input_size"] == (3, 128, 128)
    assert not any(parameter.requires_grad for parameter in model.stem.parameters())
    assert all(torch.equal(model.state_dict()[key], value) for key, value in grids.items())


def test_pretrained_cfg_sets_the_grid(tmp_path):
    """With weights the grid is that of the cfg's input size; `img_size` only changes the expected input."""
    trained = make("mrconvnext_atto", img_size=64, num_classes=5)
    safetensors.torch.save_file(trained.state_dict(), tmp_path / "model.safetensors")
    overlay = dict(file=str(tmp_path / "model.safetensors"), input_size=(3, 64, 64), num_classes=5)
    for kwargs in ({}, {"img_size": 96}):
        model = timm.create_model("mrconvnext_atto", pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)
        assert torch.equal(model.eval()(images(96, 96)), trained.eval()(images(96, 96)))
        size = kwargs.get("img_size", 64)
        assert get_model_input_config(model)["input_size"] == (3, size, size)
    adapted = timm.create_model(
        "mrconvnext_atto", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=3, in_chans=1
    )
    assert adapted(images(64, 64)[:, :1]).shape == (2, 3)
    assert torch.equal(adapted.stages[0].blocks[0].conv_dw.dilated, trained.stages[0].blocks[0].conv_dw.dilated)


def test_model_saved_for_the_hub_loads_from_its_folder(tmp_path):
    """Through timm's own saving and `local-dir:`, also after the expected image size was changed."""
    model = make("mrconvnext_atto", img_size=64, num_classes=5, kind="sparse").eval()
    for size, folder in ((64, tmp_path / "same"), (96, tmp_path / "changed")):
        model.set_input_size(size)
        timm.models.save_for_hf(model, folder, safe_serialization=True)
        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        assert torch.equal(loaded(images(64, 96)), model(images(64, 96)))
        assert get_model_input_config(loaded)["input_size"] == (3, size, size)
        assert loaded.kernel_img_size == (64, 64)


# ---- State ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,options", OPTIONS, ids=option_id)
def test_saved_and_loaded_before_any_forward(name, options, tmp_path):
    model, x = make(name, img_size=64, **options).eval(), images(64, 64)
    state = copy.deepcopy(model.state_dict())
    expected = model(x)
    assert states_equal(model.state_dict(), state)
    torch.save(model.state_dict(), tmp_path / "state.pth")
    fresh = make(name, seed=7, img_size=64, **options).eval()
    fresh.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True), strict=True)
    assert torch.equal(fresh(x), expected)
    assert not any(value.is_complex() for value in model.state_dict().values())


@pytest.mark.parametrize("ema_cls", [ModelEmaV2, ModelEmaV3])
@pytest.mark.parametrize("name,options", OPTIONS, ids=option_id)
def test_ema_made_before_the_first_forward(name, options, ema_cls):
    model = make(name, img_size=64, num_classes=4, **options).train()
    ema = ema_cls(model, decay=0.9)
    before = copy.deepcopy(model.state_dict())
    model(images(64, 64)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    ema.update(model)
    after = model.state_dict()
    for key, value in ema.module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, 0.9 * before[key] + 0.1 * after[key])
        else:
            assert torch.equal(value, after[key])
    fresh = make(name, seed=5, img_size=64, num_classes=4, **options)
    fresh.load_state_dict(ema.module.state_dict(), strict=True)


def ddp_worker(rank: int, world: int, path: str, options: dict) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    torch.manual_seed(rank)
    options = dict(options)
    name = options.pop("name", "mrconvnext_atto")
    model = timm.create_model(name, num_classes=4, ls_init_value=1.0, **SHALLOW, **options)
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        size = (224, 96)[step % 2]
        ddp(torch.randn(2, 3, size, size)).square().sum().backward()
        optimizer.step()
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    both = [torch.empty_like(mine) for _ in range(world)]
    torch.distributed.all_gather(both, mine)
    assert torch.equal(both[0], both[1]) and torch.isfinite(mine).all()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "options", [{"name": "sgconvnext_atto"}, {"kind": "sparse"}, {"norm": "spectral"}], ids=option_id
)
def test_two_processes_with_changing_image_sizes(options, tmp_path):
    torch.multiprocessing.spawn(ddp_worker, args=(2, str(tmp_path / "rendezvous"), options), nprocs=2)


# ---- Weights that do not fit ---------------------------------------------------------------------------------------


def save(model: nn.Module, path) -> str:
    safetensors.torch.save_file(model.state_dict(), path)
    return str(path)


@pytest.mark.parametrize(
    "kwargs", [{}, {"num_classes": 5}, {"features_only": True}, {"num_classes": 0}, {"in_chans": 1}]
)
@pytest.mark.parametrize("other,message", [
    (("mrconvnext_atto", {}), "not weights of sgconvnext_atto.*missing.*concat.*unexpected"),
    (("sgconvnext_femto", {}), "not weights of sgconvnext_atto.*of another size"),
    (("convnext_atto", {}), "not weights of sgconvnext_atto.*missing.*unexpected"),
    (("sgconvnext_atto", {"combine": "sum"}), "not weights of sgconvnext_atto.*missing.*unexpected.*sum"),
    (("sgconvnext_atto", {"img_size": 64}), "16x16.*images of 64x64.*56x56.*img_size"),
    (("sgconvnext_atto", {"img_size": (448, 112)}), "112x28.*56x56"),
    (("fused", {}), "checkpoint is fused.*reparameterize_model"),
])  # fmt: skip
def test_other_weights_are_refused_by_name(other, message, kwargs, tmp_path):
    name, options = other
    source = reparameterize_model(make("sgconvnext_atto").eval()) if name == "fused" else make(name, **options)
    overlay = dict(file=save(source, tmp_path / "other.safetensors"))
    with pytest.raises((ValueError, RuntimeError), match=message):
        timm.create_model("sgconvnext_atto", pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)


def test_kinds_of_equal_shape_do_not_load_into_each_other(tmp_path):
    overlay = dict(file=save(make("mrconvnext_atto"), tmp_path / "dilated.safetensors"))
    with pytest.raises(ValueError, match="missing.*fourier.*unexpected.*dilated"):
        timm.create_model("mrconvnext_atto_fourier", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=5)


@pytest.mark.parametrize("options", [{"kind": "fourier"}, {"kind": "sparse"}, {"norm": "layer"}, {"weighted": False}])
def test_another_kernel_is_refused_also_non_strictly(options):
    """Else the kernels would stay random without a word; the two BatchNorms share their weights on purpose."""
    model, other = make("mrconvnext_atto", img_size=64), make("mrconvnext_atto", img_size=64, seed=2, **options)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="holds another token mixer.*options"):
        model.load_state_dict(other.state_dict(), strict=False)
    convnext = timm.create_model("convnext_atto").state_dict()
    with pytest.raises(RuntimeError, match="holds another token mixer"):
        model.load_state_dict(convnext, strict=False)
    assert states_equal(model.state_dict(), before)
    model.load_state_dict(make("mrconvnext_atto", img_size=64, norm="spectral").state_dict(), strict=True)


@pytest.mark.parametrize("strict", [True, False])
def test_a_refused_load_changes_nothing(strict):
    model = make("sgconvnext_atto", img_size=64)
    fused = reparameterize_model(make("sgconvnext_atto", img_size=64, seed=2).eval())
    before = copy.deepcopy(model.state_dict())
    wrong_grid = make("sgconvnext_atto", img_size=(32, 128), seed=2).state_dict()
    for state, message in ((fused.state_dict(), "is fused"), (wrong_grid, "8x32.*16x16")):
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(state, strict=strict)
        assert states_equal(model.state_dict(), before)
    before = copy.deepcopy(fused.state_dict())
    with pytest.raises(RuntimeError, match="model is fused"):
        fused.load_state_dict(model.state_dict(), strict=strict)
    assert states_equal(fused.state_dict(), before)


def test_checkpoint_path_of_another_grid(tmp_path):
    path = save(make("sgconvnext_atto", img_size=64), tmp_path / "model.safetensors")
    model = timm.create_model("sgconvnext_atto", img_size=64, checkpoint_path=path)
    assert states_equal(model.state_dict(), safetensors.torch.load_file(path))
    with pytest.raises(RuntimeError, match="16x16.*56x56"):
        timm.create_model("sgconvnext_atto", checkpoint_path=path)
    features = timm.create_model("sgconvnext_atto", features_only=True)
    wrong = timm.create_model("sgconvnext_atto", features_only=True, img_size=64).state_dict()
    with pytest.raises(RuntimeError, match="16x16.*56x56"):
        features.load_state_dict(wrong, strict=False)


def test_version_is_a_version():
    assert gconvnext.__version__.count(".") == 2
