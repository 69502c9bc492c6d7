"""Entries of an optimizer's state of parameters that are divided among processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from stretto.strategies.parameter_view import like_parameter


@pytest.fixture
def parameter() -> Iterator[nn.Parameter]:
    """A parameter of one row, so that the first of two ranks has all of it and the second nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    yield nn.Parameter(
        DTensor.from_local(torch.ones(1, 4), mesh, [Shard(0)], run_check=False, shape=(1, 4), stride=(4, 1))
    )
    dist.destroy_process_group()


def test_divided_entry_of_the_size_of_its_part_is_left_divided(parameter: nn.Parameter) -> None:
    entry = torch.zeros_like(parameter.detach())
    assert like_parameter(parameter, entry) is entry
    made = like_parameter(parameter, torch.full((1, 4), 3.0))
    assert isinstance(made, DTensor)
    assert made.to_local().tolist() == [[3.0] * 4]
