"""The second device of the tests: bits of the CPU, and no operation that mixes the devices."""

from __future__ import annotations

import pytest
from child_process import call

PROGRAMS = "second_device_programs"


@pytest.mark.parametrize("optimizer", ["SGD", "momentum", "Adam", "AdamW", "AdamW, fused", "RMSprop"])
def test_training_has_the_bits_of_the_cpu(optimizer: str) -> None:
    assert call(PROGRAMS, "trains_alike", optimizer, False, False, False)


@pytest.mark.parametrize(("scales", "autocast"), [(False, False), (True, False), (False, True), (True, True)])
def test_clipping_scalers_and_autocast_have_the_bits_of_the_cpu(scales: bool, autocast: bool) -> None:
    assert call(PROGRAMS, "trains_alike", "AdamW", True, scales, autocast)


def test_operations_refuse_a_cpu_tensor_beside_one_of_the_device() -> None:
    errors = call(PROGRAMS, "crossings")
    assert all("far:0" in error for error in errors.values()), errors


def test_operations_of_one_device_and_copies_between_two_work() -> None:
    found = call(PROGRAMS, "allowed")
    assert all(found.values()), found


def test_the_device_has_random_numbers_of_its_own() -> None:
    assert call(PROGRAMS, "random_numbers") == [True, True]


def test_reads_of_the_host_are_counted() -> None:
    assert call(PROGRAMS, "host_reads") == {"_local_scalar_dense": 2, "copy": 1, "equal": 1}


def test_a_backward_pass_runs_in_a_thread_of_the_device() -> None:
    assert call(PROGRAMS, "backward_thread")
