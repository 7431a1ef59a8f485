"""The script for GPUs, on the CPU."""

import json
import sys

from scripting import call


def test_dry_run_checks_and_times(tmp_path, capsys):
    results = tmp_path / "gpu.json"
    assert call("eval/gpu_check.py", "--dry-run", "--parts", "backends", "times", "--results-file", results) == 0
    rows = json.loads(results.read_text())
    checks = [row for row in rows if row["part"] == "backends"]
    assert {row["dtype"] for row in checks} == {"float32", "float16", "bfloat16"}
    assert all(row["ok"] and 0 <= row["error"] <= row["limit"] for row in checks)
    assert all(row["ms"] > 0 and row["hardware"].startswith("cpu") for row in rows if row["part"] == "times")
    assert f"{len(checks)} checks passed, 0 failed" in capsys.readouterr().out


def test_a_failed_check_is_reported(monkeypatch, capsys):
    module = sys.modules["gconvnext.layers.global_conv"]  # the package's attribute of that name is the function
    monkeypatch.setattr(module, "_fft_conv", lambda u, kernel: u)
    assert call("eval/gpu_check.py", "--dry-run", "--parts", "backends") == 1
    assert "FAILED backends fft 7x7" in capsys.readouterr().out


def test_a_gpu_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert call("eval/gpu_check.py") == 2
    assert "--dry-run" in capsys.readouterr().err
