"""Variables of torch that let a process survive a failure of NCCL."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from stretto.transport.nccl_communicator import set_variables, weakness


def test_the_variables_are_set_before_the_first_communicator() -> None:
    before = {name: value for name, value in os.environ.items() if "NCCL" not in name}
    with mock.patch.dict(os.environ, before, clear=True):
        assert set_variables(os.environ, 60.0) is None
        environment = dict(os.environ)
    assert {name: value for name, value in environment.items() if name not in before} == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",
    }
    assert set_variables(environment, 60.0) is None, "those of the generation before are no settings of the user"


@pytest.mark.parametrize(
    ("name", "value", "consequence"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "ends the process"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", "half of a result"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "ends the process"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "ends the process"),
        ("TORCH_NCCL_ENABLE_MONITORING", "1", "ends the process"),
        ("TORCH_NCCL_DESYNC_DEBUG", "true", "ends the process"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "ends the process"),
    ],
)
def test_settings_of_the_user_stay_and_dangerous_ones_are_named(name: str, value: str, consequence: str) -> None:
    environment = {name: value}
    notice = set_variables(environment, 60.0)
    assert notice is not None
    assert f"{name}={value}" in notice
    assert consequence in notice
    assert environment[name] == value
    if name == "NCCL_ASYNC_ERROR_HANDLING":
        assert f"TORCH_{name}" not in environment, "the new name would override the old one"


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_DUMP_ON_TIMEOUT"])
def test_harmless_settings_of_the_user_are_not_named(name: str) -> None:
    environment = {name: "1"}
    assert set_variables(environment, 60.0) is None
    assert environment[name] == "1"


def test_an_old_nccl_is_named() -> None:
    assert weakness((2, 26, 2)) is None
    assert "NCCL 2.21.5" in str(weakness((2, 21, 5)))
