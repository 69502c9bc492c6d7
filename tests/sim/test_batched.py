"""Many workers' steps in one call: the same run to rounding, whatever the script does; and what cannot be is told."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

import pytest
import torch
from safetensors.torch import load
from sim.simulated import Ended, simulated

from stretto.errors import LaunchError
from stretto.events import Event
from stretto.sim import batched

NET = "torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))"
STEP = """
optimizer.zero_grad()
loss = cross_entropy(net(a), b)
loss.backward()
optimizer.step()
"""
SCRIPT = """
import torch, stretto
from torch.nn.functional import cross_entropy
torch.manual_seed(3)
x = torch.randn(330, 6, dtype=torch.float64)
y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
BEFORE
net = NET.double()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
data = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
loader = stretto.distribute(net, optimizer, loader, evaluate=lambda net: {"loss": cross_entropy(net(x), y).item()})
for epoch in range(2):
    for a, b in loader:
STEP
"""
WORKERS = 9


def script(step: str = STEP, net: str = NET, before: str = "") -> str:
    indented = "".join(f"        {line}\n" for line in dedent(step).strip().splitlines())
    return SCRIPT.replace("BEFORE", dedent(before)).replace("NET", net).replace("STEP\n", indented)


def both(text: str, recipe: str = "local_sgd(every=4)", **more: Any) -> tuple[Ended, Ended]:
    """The same simulation without batches, and with them."""
    return simulated(WORKERS, text, recipe, **more), simulated(WORKERS, text, recipe, batched=True, **more)


def together(ended: Ended) -> tuple[int, int]:
    """How many steps were computed with others, and how many there were."""
    text = next(one["text"] for one in ended.of("notice") if one["text"].startswith("--batched"))
    found = re.search(r"(\d+) of (\d+) steps", text)
    assert found is not None
    return int(found[1]), int(found[2])


def are_alike(alone: Ended, ended: Ended) -> None:
    """The same parameters to rounding, at the same times, with the same bytes."""
    own, theirs = load(alone.final), load(ended.final)
    for name, one in own.items():
        assert torch.allclose(one, theirs[name], rtol=1e-6, atol=1e-9), name
    assert ended.seconds == pytest.approx(alone.seconds, rel=1e-9)
    assert [what_and_when(one) for one in ended.events if not is_summary(one)] == [
        what_and_when(one) for one in alone.events
    ]


def is_summary(event: Event) -> bool:
    return event["event"] == "notice" and event["text"].startswith("--batched")


def what_and_when(event: Event) -> tuple[Any, ...]:
    counted = [event.get(key) for key in ("step", "samples", "rounds", "bytes_sent", "bytes_received")]
    return event["event"], event["worker"], pytest.approx(event["t"], abs=2e-6), counted


@pytest.mark.parametrize(
    "recipe",
    [
        "allreduce",
        "local_sgd(every=4)",
        "diloco(every=5)",
        "power_sgd(rank=2)",
        "async_sgd",
        "stale_synchronous(bound=2)",
        "elastic_averaging(every=3)",
        "delay_compensated",
        "staleness_aware(overlap=True)",
    ],
)
@pytest.mark.parametrize("speed", ["equal", "lognormal(0.5)"])
def test_the_run_is_the_same_to_rounding(recipe: str, speed: str) -> None:
    alone, ended = both(script(), recipe, speed=speed, net="100Mbit/s 1ms")
    are_alike(alone, ended)
    assert together(ended)[0] > 0


STEPS = {
    "a loss made of modules": STEP.replace("cross_entropy(", "torch.nn.CrossEntropyLoss()("),
    "looks after the step": STEP + "assert loss.item() > 0 and (net(a).argmax(1) == b).shape",
    "accuracy, looked at later": """
        optimizer.zero_grad()
        answer = net(a)
        right = (answer.argmax(1) == b).float().mean()
        cross_entropy(answer, b).backward()
        optimizer.step()
        stretto.log(right=right)
        """,
    "gradients that are accumulated": """
        optimizer.zero_grad()
        for part in range(2):
            (cross_entropy(net(a[part::2]), b[part::2]) / 2).backward()
        optimizer.step()
        """,
    "clipped": """
        optimizer.zero_grad()
        cross_entropy(net(a), b, label_smoothing=0.1).mul(2).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        """,
    "a scaler": """
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        optimizer.zero_grad()
        scaler.scale(cross_entropy(net(a), b)).backward()
        scaler.step(optimizer)
        scaler.update()
        """,
    "frozen for a while": "net[0].requires_grad_(epoch == 1)\n" + STEP,
    "numbers of a worker's own": """
        optimizer.zero_grad()
        (cross_entropy(net(a), b) * (1 + float(a[0, 0] > 0))).backward()
        optimizer.step()
        """,
    "a closure": """
        def closure():
            optimizer.zero_grad()
            loss = cross_entropy(net(a), b)
            loss.backward()
            return loss
        optimizer.step(closure)
        """,
    "weights": STEP.replace("net(a), b", "net(a), b, torch.tensor([1.0, 2, 3]).double()"),
}


@pytest.mark.parametrize("name", STEPS)
def test_whatever_a_script_does_that_can_be_batched(name: str) -> None:
    alone, ended = both(script(STEPS[name]))
    are_alike(alone, ended)
    found, steps = together(ended)
    assert found > steps / 2


ALONE = {
    "looks before": (STEP.replace("loss.backward()", "assert loss.item() > 0\nloss.backward()"), "uses item"),
    "the graph is kept": (STEP.replace("backward()", "backward(retain_graph=True)"), "uses backward"),
    "torch's own function": (STEP.replace("loss.backward()", "torch.autograd.backward([loss])"), "uses backward"),
    "a loss with parameters in it": (
        STEP.replace("cross_entropy(net(a), b)", "cross_entropy(net(a), b) + net[0].weight.square().sum()"),
        "uses add",
    ),
    "two answers": (STEP.replace("net(a), b)", "net(a[:2]), b[:2]) + cross_entropy(net(a[2:]), b[2:])"), "uses add"),
    "under autocast": (
        STEP.replace("loss = cross_entropy(net(a), b)", 'with torch.autocast("cpu"): loss = cross_entropy(net(a), b)'),
        "autocast",
    ),
    "hooks": ("if not net._forward_hooks: net.register_forward_hook(lambda *given: None)\n" + STEP, "has hooks"),
    "gradients with listeners": (
        "handle = net[0].weight.register_hook(lambda grad: grad * 0.5)\n" + STEP + "handle.remove()",
        "",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_can_not_be_batched_is_computed_one_by_one_and_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    step, why = ALONE[name]
    alone, ended = both(script(step))
    are_alike(alone, ended)
    assert together(ended)[0] == 0
    assert why in capsys.readouterr().err


NETS = {
    "dropout": (NET.replace("torch.nn.Tanh()", "torch.nn.Dropout(0.5)"), "randomness"),
    "buffers": (NET.replace("torch.nn.Tanh()", "torch.nn.BatchNorm1d(12)"), "the model has buffers"),
    "pairs": ("Pair()", "the model answers with tuple, no tensor"),
    "a forward pass that looks": ("Looking()", "one by one"),
    "a forward pass that counts": ("Counting()", "changes the model's attributes"),
}
CLASSES = """
class Pair(torch.nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
    def forward(self, x):
        return super().forward(x), x
class Looking(Pair):
    def forward(self, x):
        found = torch.nn.Linear.forward(self, x)
        return found if found.sum().item() > 0 else 2 * found
class Counting(Pair):
    times = 0
    def forward(self, x):
        self.times = self.times + 1
        return torch.nn.Linear.forward(self, x) / self.times
"""


@pytest.mark.parametrize("name", NETS)
def test_models_that_can_not_be_batched_are_computed_one_by_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    net, why = NETS[name]
    step = STEP.replace("net(a)", "net(a)[0]") if name == "pairs" else STEP
    alone, ended = both(script(step, net, CLASSES).replace("net(x), y)", "torch.zeros(330, 3).double(), y)"))
    are_alike(alone, ended)
    assert alone.final == ended.final
    assert together(ended)[0] == 0
    assert why in capsys.readouterr().err


def test_a_parameter_that_is_not_used_gets_no_gradient() -> None:
    before = """
    class Partly(torch.nn.Sequential):
        def forward(self, x):
            return self[2](self[0](x))
    """
    net = "Partly(torch.nn.Linear(6, 12), torch.nn.Linear(12, 12), torch.nn.Linear(12, 3))"
    step = STEP + "\nassert net[1].weight.grad is None and net[0].weight.grad is not None"
    alone, ended = both(script(step, net, before))
    are_alike(alone, ended)
    assert together(ended)[0] > 0


def test_tied_weights_are_one() -> None:
    before = """
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
            self.last.weight = self.first.weight
        def forward(self, x):
            return self.last(self.first(x).tanh())
    """
    alone, ended = both(script(STEP, "Tied()", before))
    are_alike(alone, ended)
    assert together(ended)[0] > 0


def test_what_a_model_has_besides_its_parameters_counts() -> None:
    """Each worker may be in another epoch than the others."""
    before = """
    class Scaled(torch.nn.Linear):
        scale = 1.0
        def forward(self, x):
            return super().forward(x) * self.scale
    """
    step = "net.scale = 1.0 + epoch + float(a[0, 0] > 0)\n" + STEP
    alone, ended = both(script(step, "Scaled(6, 3)", before), "async_sgd", speed="lognormal(0.5)")
    are_alike(alone, ended)
    assert together(ended)[0] > 0


def test_kinds_of_steps_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is of another kind here."""
    monkeypatch.setattr(batched, "MOST_KINDS", 3)
    before = """
    class Scaled(torch.nn.Linear):
        scale = 1.0
        def forward(self, x):
            return super().forward(x) * self.scale
    """
    step = "net.scale = net.scale * 0.99 + 0.01 * float(a[0, 0] > 0)\n" + STEP
    are_alike(*both(script(step, "Scaled(6, 3)", before), "async_sgd", speed="lognormal(0.5)"))


def test_the_same_run_comes_again_bit_for_bit() -> None:
    runs = [
        simulated(WORKERS, script(), "async_sgd", speed="lognormal(0.5)", batched=True, order=order)
        for order in (None, None, list(reversed(range(WORKERS))))
    ]
    assert runs[0].log == runs[1].log == runs[2].log
    assert runs[0].final == runs[1].final == runs[2].final


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_who_dies_while_others_wait_for_the_same_call(recipe: str) -> None:
    """Times are those of the middle of a step."""
    fault = "kill worker 2 at 35ms, back after 20ms; kill worker 4 at 55ms; pause worker 1 for 30ms at 71ms"
    ended = simulated(WORKERS, script(), recipe, fault=fault, batched=True, net="1Gbit/s 1ms")
    assert together(ended)[0] > 0
    assert [one["text"] for one in ended.of("error")] == []
    for number in (1, 2):
        assert ended.of("epoch")[number - 1]["seen"]["once"] == 330


def test_processors_may_be_shared() -> None:
    alone, ended = both(script(), processors=2.0)
    are_alike(alone, ended)
    assert together(ended)[0] > 0


def test_models_that_differ_in_what_can_not_be_seen_are_found_out() -> None:
    before = """
    import numpy
    factor = numpy.array([1.0 + stretto_worker])
    class Hidden(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(factor[0])
    """
    text = script(STEP, "Hidden(6, 3)", before)
    text = text.replace("stretto_worker", "given_seat.get().worker").replace(
        "import torch, stretto\n", "import torch, stretto\nfrom stretto.train.seat import given_seat\n"
    )
    with pytest.raises(LaunchError, match="is not what it is alone"):
        simulated(WORKERS, text, "local_sgd(every=4)", batched=True)


@pytest.mark.parametrize(("change", "what"), [("optimizer.step()", "the model"), ("a.add_(1)", "its input")])
def test_an_answer_that_is_looked_at_too_late_is_refused(change: str, what: str) -> None:
    step = STEP.replace("loss.backward()", "other = net(a)\nloss.backward()").replace(
        "optimizer.step()", f"{change}\nother.sum().item()"
    )
    with pytest.raises(LaunchError, match=f"after {what} has changed"):
        simulated(WORKERS, script(step), "local_sgd(every=4)", batched=True)


def test_nothing_is_left_behind() -> None:
    before = torch.nn.Module.__call__, torch.autograd.backward
    simulated(WORKERS, script(), "local_sgd(every=4)", batched=True)
    with pytest.raises(LaunchError):
        simulated(WORKERS, script("raise ValueError"), "local_sgd(every=4)", batched=True)
    assert before == (torch.nn.Module.__call__, torch.autograd.backward)
