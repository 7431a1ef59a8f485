"""Two processes against one: batch statistics over all processes (gloo, CPU)."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gconvnext.layers import MRConv


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def mixer(norm: str) -> MRConv:
    torch.manual_seed(0)
    layer = MRConv(3, (4, 4), norm=norm, local=3, row_gap=1).double()
    torch.nn.init.uniform_(layer.norm_weight, 0.5, 1.5)
    torch.nn.init.uniform_(layer.norm_bias)
    return layer


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 3, 4, 4, generator=generator, dtype=torch.float64) * torch.arange(1, 6).view(5, 1, 1, 1) + 2
    return x, torch.randn(x.shape, generator=generator, dtype=torch.float64)


def forward_backward(layer: MRConv, rows: slice) -> dict[str, torch.Tensor]:
    x, weight = batch()
    x = x[rows].requires_grad_()
    y = layer(x)
    (y * weight[rows]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "mean": layer.running_mean, "var": layer.running_var, **gradients}


def one_of_two(rank: int, port: int, norm: str, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    layer = mixer(norm)
    layer.sync = True
    torch.save(forward_backward(layer, slice(0, 2) if rank == 0 else slice(2, 5)), f"{folder}/{rank}.pth")
    dist.destroy_process_group()


@pytest.mark.parametrize("norm", ["batch", "spectral"])
def test_synchronised_statistics_of_two_uneven_processes_are_those_of_the_whole_batch(norm: str, tmp_path: Path):
    mp.spawn(one_of_two, (free_port(), norm, str(tmp_path)), nprocs=2)
    parts = [torch.load(tmp_path / f"{rank}.pth") for rank in (0, 1)]
    whole = forward_backward(mixer(norm), slice(0, 5))
    for name, expected in whole.items():
        if name in ("y", "x"):
            actual = torch.cat([part[name] for part in parts])
        elif name in ("mean", "var"):
            actual = parts[0][name]
            torch.testing.assert_close(parts[1][name], actual, rtol=0, atol=0)
        else:  # the gradient of the sum of both losses: DDP averages it
            actual = parts[0][name] + parts[1][name]
        torch.testing.assert_close(
            actual, expected, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )
