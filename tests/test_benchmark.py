"""Measuring speed and memory."""

import csv
import json
import time

import pytest
import torch
from gconvnext import benchmark
from gconvnext.benchmark import Setting, Spread, interleave, make_model, make_step, parse_model, peak_memory
from gconvnext.layers import SGConv
from scripting import call, load_script

SCRIPT = "eval/benchmark.py"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(benchmark, "TURN_SECONDS", 0.001)


def test_interleaved_steps_take_turns_in_a_rotating_order(monkeypatch):
    monkeypatch.setattr(benchmark, "TURN_SECONDS", 1e-9)
    calls = []
    steps = [lambda i=i, ms=ms: (calls.append(i), time.sleep(ms / 1000)) for i, ms in enumerate([1, 8, 3])]
    times = interleave(steps, 3, CPU)
    assert calls == [0, 1, 2, 0, 1, 2, 0, 1, 2, 1, 2, 0, 2, 0, 1]  # twice to warm up, then the rounds
    assert len(times) == 3 and all(0.001 <= row[0] < row[1] > row[2] >= 0.003 for row in times)


def test_short_steps_are_repeated_in_a_turn(monkeypatch):
    monkeypatch.setattr(benchmark, "TURN_SECONDS", 0.02)
    calls = []
    times = interleave([lambda: (calls.append(0), time.sleep(0.004))], 2, CPU)
    assert 2 + 2 * 2 <= len(calls) <= 2 + 2 * 5  # two to warm up
    assert all(row[0] >= 0.004 for row in times)


def test_spread_is_median_and_extremes():
    assert Spread.of([3, 1, 2.5]) == Spread(2.5, 1, 3)


def test_model_options_follow_its_name():
    assert parse_model("mrconvnext_atto,norm=spectral,row_gap=3") == (
        "mrconvnext_atto",
        {"norm": "spectral", "row_gap": 3},
    )


def test_a_training_step_trains_and_inference_does_not():
    model = make_model("mrconvnext_atto,norm=spectral", 32)
    assert model.kernel_img_size == (32, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    make_step(model, Setting(2, 32), CPU)()
    assert not model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    make_step(model, Setting(2, 32, training=True), CPU)()
    assert model.training and not torch.equal(model.head.fc.weight, before["head.fc.weight"])


def test_peak_memory_is_that_of_the_model_alone():
    ballast = torch.ones(2**26)  # 256 MiB of this process
    parameters = sum(parameter.numel() for parameter in make_model("test_resnet", 96).parameters())
    least = 4 * (4 * parameters + 16 * 3 * 96 * 96)  # weights, gradients, two moments; images
    assert 2 * least < peak_memory("test_resnet", Setting(16, 96, training=True)) < 2**27 < 4 * len(ballast)


# benchmark.py ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [[], ["--training"], ["--unfused", "--amp", "--channels-last"]])
def test_models_are_compared_in_one_run(tmp_path, capsys, mode):
    models = ["convnext_atto", "mrconvnext_atto,norm=spectral"]
    options = [*mode, "--img-size", 32, "--batch-size", 4, 2, "--repeats", 3, "--threads", 1]
    assert call(SCRIPT, *models, *options, "--results-file", tmp_path / "speed.csv") == 0
    rows = list(csv.DictReader((tmp_path / "speed.csv").open()))
    assert [(row["model"], row["batch_size"]) for row in rows] == [(model, batch) for batch in "42" for model in models]
    for row in rows:
        assert float(row["images_per_second"]) == pytest.approx(1000 * int(row["batch_size"]) / float(row["ms_median"]))
        assert float(row["ratio_low"]) <= float(row["ratio_median"]) <= float(row["ratio_high"])
        assert row["mode"] == ("training" if "--training" in mode else "inference")
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[0] == models[0] and "1.000 (1.000 - 1.000)" in lines[2]
    assert lines[3].split()[0] == models[1] and float(lines[3].split()[1]) > 0


def test_default_models_are_of_one_size_and_timm_has_them(capsys):
    script = load_script(SCRIPT)
    models = script.default_models("atto", training=False)
    assert models[0] == "convnext_atto" and {"sgconvnext_atto", "mrconvnext_atto", "convnextv2_atto"} < set(models)
    assert "not in timm, left out: mambaout_atto, swin_atto_patch4_window7_224" in capsys.readouterr().out
    models = script.default_models("base", training=True)
    families = [
        "convnext",
        "sgconvnext",
        "mrconvnext",
        "mrconvnext",
        "convnextv2",
        "inception_next",
        "mambaout",
        "swin",
    ]
    assert [model.split("_base")[0] for model in models] == families and models[3] == "mrconvnext_base,norm=spectral"


def test_plot_of_models_shows_parameters_or_accuracy(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = ["convnext_atto", "test_resnet", "--img-size", 32, "--batch-size", 2, "--repeats", 1]
    (tmp_path / "accuracy.csv").write_text("model,top1\nconvnext_atto,75.7\n")
    assert call(SCRIPT, *options, "--plot", tmp_path / "parameters.svg") == 0
    assert call(SCRIPT, *options, "--plot", tmp_path / "top1.png", "--accuracy", tmp_path / "accuracy.csv") == 0
    assert "test_resnet: no accuracy given" in capsys.readouterr().out
    assert (tmp_path / "parameters.svg").stat().st_size > 1000 and (tmp_path / "top1.png").stat().st_size > 1000


def test_the_textbook_form_is_the_same_layer():
    script = load_script(SCRIPT)
    torch.manual_seed(0)
    layer, x = SGConv(4, (6, 7)), torch.randn(2, 4, 6, 7)
    torch.testing.assert_close(script.TextbookConv(layer)(x), layer(x))


def test_layers_are_compared_on_every_map(tmp_path, capsys):
    options = ["--layers", "--size", "atto", "--img-size", 32, "--batch-size", 2, "--repeats", 1]
    assert call(SCRIPT, *options, "--results-file", tmp_path / "layers.json") == 0
    rows = json.loads((tmp_path / "layers.json").read_text())
    forward, both = [row for row in rows if not row["backward"]], [row for row in rows if row["backward"]]
    assert [row["layer"] for row in forward] == ["ours, fused", "textbook", "7x7"] * 4
    assert [row["layer"] for row in both] == ["SGConv", "MRConv, spectral", "textbook", "7x7"] * 4
    assert [(row["channels"], row["side"]) for row in forward[::3]] == [(40, 8), (80, 4), (160, 2), (320, 1)]
    for row in rows:
        assert row["ms"] > 0 and row["to_textbook_median"] > 0 and row["to_7x7_median"] > 0
        assert row["layer"] not in ("textbook", "7x7") or row[f"to_{row['layer']}_median"] == 1


def test_cost_against_length_is_relative_to_its_smallest(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    module = load_script(SCRIPT)
    monkeypatch.setattr(module, "LENGTH_SIDES", (4, 8))
    plot, results = tmp_path / "lengths.png", tmp_path / "lengths.csv"
    options = ["--lengths", "--size", "atto", "--repeats", "1", "--plot", str(plot), "--results-file", str(results)]
    monkeypatch.setattr("sys.argv", [SCRIPT, *options])
    assert module.main() == 0
    rows = list(csv.DictReader(results.open()))
    assert [(row["layer"], row["length"]) for row in rows[::2]] == [("ours, fused", "16"), ("ours, fused", "64")]
    costs = [float(row["cost_median"]) for row in rows[::2]]
    assert min(costs) == 1 and plot.stat().st_size > 1000
    assert costs[0] / costs[1] == pytest.approx(float(rows[0]["ms"]) * 64 * 6 / (float(rows[2]["ms"]) * 16 * 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["convnext_atto,norm"], "expected key=value"),
        (["convnext_attto"], "did you mean convnext_atto"),
        (["convnext_atto", "--baseline", "resnet18"], "'resnet18' is none of the models"),
        (["convnext_atto", "--layers"], "leave out models"),
        (["--layers", "--training"], "not allowed with"),
        (["--layers", "--plot", "layers.png"], "--layers has no plot"),
        (["--accuracy", "results.csv"], "--accuracy is for --plot"),
        (["--plot", "plot.txt"], "must be a .png, .svg or .pdf"),
        (["--results-file", "table.txt"], "must end in .csv or .json"),
        (["convnext_atto", "--plot", "plot.png", "--accuracy", "README.md"], "with the columns model and top1"),
    ],
)
def test_benchmark_refuses(options, message, capsys):
    assert call(SCRIPT, *options) == 2
    assert message in capsys.readouterr().err
