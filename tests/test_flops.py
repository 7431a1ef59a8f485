"""Counting parameters, FLOPs and activations."""

import csv
import json

import pytest
import timm
import torch
from gconvnext.checkpoint import fuse
from gconvnext.flops import count_flops, flop_analysis, global_conv_flops, mixer_flops
from gconvnext.layers import MRConv, SGConv
from scripting import call
from torch import nn

SHALLOW = (1, 1, 2, 1)  # depths


@pytest.mark.parametrize(
    ("length", "operations"),
    [(256, 8.7e3), (1024, 43.0e3), (4096, 205e3), (16384, 0.95e6), (65536, 4.32e6), (262144, 19.4e6)],
)
def test_operations_of_a_global_convolution_are_those_of_the_mrconv_paper(length, operations):
    assert global_conv_flops(length) == pytest.approx(operations, rel=5e-3)


@pytest.mark.parametrize(("size", "flops"), [("tiny", 4.5), ("small", 8.7), ("base", 15.4), ("large", 34.4)])
def test_convnext_has_its_published_flops(size, flops):
    model = timm.create_model(f"convnext_{size}", device="meta").to_empty(device="cpu")
    with torch.no_grad():
        total = flop_analysis(model, torch.zeros(1, 3, 224, 224)).total()
    assert round(total / 1e9, 1) == flops


def depthwise_flops(map_sizes, depths, dims, per_position):
    return sum(
        depth * dim * per_position(side * side) for side, depth, dim in zip(map_sizes, depths, dims, strict=True)
    )


def test_token_mixing_of_convnext_and_ours_is_that_of_their_depthwise_layers():
    shape = ((16, 8, 4, 2), SHALLOW, (40, 80, 160, 320))  # atto at 64 pixels
    convnext = count_flops(timm.create_model("convnext_atto", depths=SHALLOW), (3, 64, 64))
    assert convnext.token_mixing == depthwise_flops(*shape, lambda length: 49 * length)
    model = timm.create_model("sgconvnext_atto", depths=SHALLOW)
    ours = count_flops(model, (3, 64, 64))
    assert ours.token_mixing == depthwise_flops(*shape, lambda length: global_conv_flops(length) / 2)
    assert ours.rest == convnext.rest > 10 * convnext.token_mixing
    assert ours.activations == convnext.activations
    assert ours.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "options"),
    [("sgconvnext_atto", {}), ("mrconvnext_atto", {"norm": "spectral"}), ("mrconvnext_atto_local", {})],
)
def test_the_count_depends_neither_on_batch_nor_mode_nor_form_nor_repetition(name, options):
    model = timm.create_model(name, img_size=64, depths=SHALLOW, **options)
    count = count_flops(model, (3, 64, 64))
    assert count_flops(model, (3, 64, 64)) == count
    assert model.training and count_flops(model.eval(), (3, 64, 64)) == count
    fused = count_flops(fuse(model), (3, 64, 64))
    assert (fused.flops, fused.token_mixing, fused.activations) == (count.flops, count.token_mixing, count.activations)
    with torch.no_grad():
        assert flop_analysis(model, torch.zeros(3, 3, 64, 64)).total() == 3 * count.flops
    assert count_flops(model.double(), (3, 64, 64)) == count


def test_analysis_files_the_flops_of_each_mixer_under_its_module():
    model = timm.create_model("mrconvnext_atto", img_size=64, depths=SHALLOW)
    analysis = flop_analysis(model, torch.zeros(1, 3, 64, 64))
    mixer = model.stages[2].blocks[1].conv_dw
    assert analysis.by_module()["stages.2.blocks.1.conv_dw"] == mixer_flops(mixer, (4, 4)) > 0
    assert model.stages[2].blocks[1].conv_dw is mixer  # the model is left as it is


def test_row_gap_and_branches_that_do_not_merge_cost_more():
    plain = mixer_flops(SGConv(6, (4, 5)), (4, 5))
    assert plain == round(6 * global_conv_flops(20) / 2)
    assert mixer_flops(MRConv(6, (4, 5), local=7, row_gap=3), (4, 5)) == round(6 * global_conv_flops(32) / 2)
    layer = MRConv(6, (4, 5), norm="layer")
    branches = global_conv_flops(20, layer.num_branches) / 2 + 5 * layer.num_branches * 20
    assert mixer_flops(layer, (4, 5)) == round(6 * branches) > layer.num_branches * plain / 2


def test_attention_counts_the_same_fused_and_as_two_products():
    class Attention(nn.Module):
        def __init__(self, fused):
            super().__init__()
            self.fused = fused

        def forward(self, x):  # (B, N, d) as query, key and value
            if self.fused:
                return nn.functional.scaled_dot_product_attention(x, x, x)
            return (x @ x.transpose(1, 2)).softmax(-1) @ x

    flops = [flop_analysis(Attention(fused), torch.zeros(2, 5, 3)).total() for fused in (True, False)]
    assert flops == [2 * 2 * 5 * 5 * 3] * 2


def test_depthwise_convolution_is_told_from_others():
    for conv, depthwise in [(nn.Conv2d(4, 8, 3, groups=4), True), (nn.Conv2d(4, 8, 3, groups=2), False)]:
        count = count_flops(conv, (4, 5, 5))
        assert count.flops == 9 * conv.weight.numel() and count.token_mixing == (count.flops if depthwise else 0)
    assert count_flops(nn.Conv2d(4, 4, 1, groups=4), (4, 5, 5)).token_mixing == 0  # mixes nothing


def test_count_refuses_a_size_that_is_none():
    with pytest.raises(ValueError, match="expected \\(channels, height, width\\)"):
        count_flops(nn.Identity(), (64, 64))


# flops.py -------------------------------------------------------------------------------------------------------------


def test_table_of_models(tmp_path, capsys):
    models = ["convnext_att?", "sgconvnext_atto", "mrconvnext_atto,row_gap=3", "convnextv2_atto"]
    results = tmp_path / "flops.csv"
    assert call("eval/flops.py", *models, "--img-size", 64, "--results-file", results) == 0
    rows = list(csv.DictReader(results.open()))
    assert [row["model"] for row in rows] == ["convnext_atto", *models[1:]]
    mixing = [int(row["token_mixing"]) for row in rows]
    assert mixing[0] == mixing[3] > mixing[2] > mixing[1] > 0
    assert len({row["rest"] for row in rows[:3]}) == 1 and rows[3]["published_flops_g"] == ""  # published at 224
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [[row["model"], "64x64"] for row in rows]


def test_table_names_what_was_published(capsys):
    assert call("eval/flops.py", "convnextv2_atto") == 0
    assert capsys.readouterr().out.rstrip().endswith("3.7, 0.55")


def test_table_of_lengths(tmp_path):
    results = tmp_path / "lengths.json"
    assert call("eval/flops.py", "--lengths", "--results-file", results) == 0
    rows = json.loads(results.read_text())
    assert [row["length"] for row in rows] == [256, 1024, 4096, 16384, 65536, 262144]
    for row in rows:
        assert row["operations"] == 2 * row["ours"] and row["ours"] < row["row_gap=3"] < row["7x7"] < row["norm=layer"]
        assert row["7x7"] == 49 * row["length"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["convnext_attto"], "did you mean convnext_atto"),
        (["nothing*"], "nothing*: no timm model matches"),
        (["--lengths", "--img-size", "64"], "leave out models and --img-size"),
        (["convnext_atto", "--results-file", "table.txt"], "must end in .csv or .json"),
    ],
)
def test_table_refuses(options, message, capsys):
    assert call("eval/flops.py", *options) == 2
    assert message in capsys.readouterr().err
