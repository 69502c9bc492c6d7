"""Transports of tensors of a device: through a group of the devices, or through the memory of the host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from device_runs import GROUP, LIVE, REFUSING, SHARING, results

from stretto import notices
from stretto.transport import device_groups, device_memory
from stretto.transport.device_groups import agreed_kind, offered_device

RECIPES = ["allreduce", "gossip", "power_sgd", "allreduce(how=error_feedback(top_k(0.2)))", "diloco(every=3)"]


@pytest.mark.parametrize(
    ("offers", "kind", "why"),
    [
        (["", ""], "", ""),
        (["cuda a", "cuda b"], "cuda", ""),
        (["", "cuda a", "cuda b"], "", "only workers 1, 2 have a device of kind cuda"),
        (["cuda a", "cuda b", "cuda b"], "", "workers 1, 2 share a device, so there are more workers than devices"),
        (["xpu a", "xpu b"], "", "PyTorch has no group of devices of kind xpu that Stretto uses"),
        (["mps a", "cuda a"], "", "only worker 0 has a device of kind mps"),
    ],
)
def test_devices_form_a_group_if_all_workers_have_one_each(offers: list[str], kind: str, why: str) -> None:
    assert agreed_kind(offers) == (kind, why)


def test_instances_of_one_gpu_count_as_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL compares bus addresses; the UUIDs of the instances differ."""
    found = [SimpleNamespace(pci_domain_id=0, pci_bus_id=7, pci_device_id=0, uuid=f"MIG-{one}") for one in range(2)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found[device.index])
    first, second = (offered_device(torch.device("cuda", index)) for index in range(2))
    assert first == second != ""
    assert not offered_device(torch.device("cpu"))
    assert not offered_device(None)


def test_every_kind_of_device_has_a_place() -> None:
    assert offered_device(torch.device("xpu", 0)).startswith("xpu ")
    assert offered_device(torch.device("mps")).startswith("mps ")


@pytest.mark.parametrize("carrier", [LIVE, GROUP, pytest.param(SHARING, marks=pytest.mark.long)])
def test_training_has_the_bits_of_the_cpu_through_each_transport(carrier: str, tmp_path: Path) -> None:
    near, far = (results("recipe", 2, tmp_path / one[:3], one, RECIPES, carrier) for one in ("cpu", "far:0"))
    assert near == far
    assert not [one for one in near[0].values() if "error" in one]


@pytest.mark.parametrize("carrier", [LIVE, pytest.param(GROUP, marks=pytest.mark.long)])
def test_workers_train_together_if_only_some_have_a_device(carrier: str, tmp_path: Path) -> None:
    near = results("recipe", 2, tmp_path / "cpu", "cpu", RECIPES, carrier)
    mixed = results("one_device", 2, tmp_path / "far", "far:0", RECIPES, carrier)
    assert near == mixed
    assert not [one for one in near[0].values() if "error" in one]


@pytest.mark.parametrize(
    "carrier",
    [LIVE, GROUP, pytest.param(SHARING, marks=pytest.mark.long), pytest.param(REFUSING, marks=pytest.mark.long)],
)
def test_operations_on_tensors_of_a_device_return_tensors_of_the_device(carrier: str, tmp_path: Path) -> None:
    (first, second) = results("operations", 2, tmp_path / "far", "far:0", ["once"], carrier)
    assert "error" not in first["once"] | second["once"], (first, second)
    assert first == second


def test_a_group_of_devices_carries_tensors_of_the_device_and_no_others(tmp_path: Path) -> None:
    """Each worker notes the operations of its group of devices: one to connect, a mean, an all-gather."""
    (first, _) = results("group_operations", 2, tmp_path / "far", "far:0", ["once"], GROUP)
    operations = ["allreduce", "allreduce", "allgather"]
    assert first["once"].get("facts") == {"operations": operations, "is_shut": True, "used": ["far:0"]}


@pytest.mark.parametrize("carrier", [GROUP])
def test_an_elastic_transport_aborts_the_group_of_its_devices(carrier: str, tmp_path: Path) -> None:
    (first, second) = results("elastic_operations", 2, tmp_path / "far", "far:0", ["once"], carrier)
    assert "error" not in first["once"], first["once"]["error"]
    assert first["once"]["facts"] == second["once"]["facts"] == {"state": "aborted", "later": "BrokenTransportError"}


def test_a_worker_whose_device_does_not_stop_has_to_restart(tmp_path: Path) -> None:
    """Its tensors may still be written to, so it neither repeats the operation nor forms the next group."""
    (first, second) = results("failed_operations", 2, tmp_path / "far", "far:0", ["stops", "hangs"], GROUP)
    assert not [one for outcomes in (first, second) for one in outcomes.values() if "error" in one]
    assert first["stops"]["facts"] == {"raised": ["BrokenTransportError"]}
    assert first["hangs"]["facts"] == {"raised": ["BrokenTransportError", "MemberOutError"]}
    assert second["stops"] == second["hangs"] == first["stops"]


class FakeStream:
    """A stream that notes the streams it waits for."""

    def __init__(self) -> None:
        self.waited: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited.append(other)


def test_a_buffer_is_sent_after_all_streams_that_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, sender = FakeStream(), FakeStream(), FakeStream()
    current = [first]
    monkeypatch.setattr(
        device_memory, "streams_of", lambda _: SimpleNamespace(current_stream=lambda _device: current[0])
    )
    writers = device_memory.Writers(torch.device("cuda", 0))
    for stream in (first, second, first, sender):
        current[0] = stream
        writers.note()
    writers.join()
    assert sender.waited == [first, second]
    writers.join()
    assert sender.waited == [first, second]


def test_memory_of_the_host_is_pinned_for_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = list[bool]()
    monkeypatch.setattr(torch, "empty", lambda *_, pin_memory, **__: pinned.append(pin_memory))
    for kind in ("cpu", "cuda", "xpu", "mps"):
        device_memory.host_memory(torch.ones(2), torch.device(kind))
    assert pinned == [False, True, True, False]


def test_a_buffer_of_the_cpu_has_no_streams() -> None:
    writers = device_memory.Writers(torch.device("cpu"))
    writers.note()
    writers.join()


def test_the_notice_about_the_memory_of_the_host_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    notices.say_once.cache_clear()
    for _ in range(2):
        device_groups.notice_host_memory("workers 0, 1 share a device, so there are more workers than devices")
    assert capsys.readouterr().err.count("pass through the memory of the hosts, since workers 0, 1 share") == 1
