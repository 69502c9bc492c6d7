"""The steps of many workers in one call: forward and backward of as many models as wait for their gradients.

A worker whose script asks for a gradient lets the clock come to where somebody may first see it. The first for whom
that time has come computes the gradients of all who wait (torch.func: vmap of grad), those of the same computation
together. Sums are made in another order than one by one, so results are equal to rounding. That they are is looked at:
a worker's first step of a kind, its second, fourth, eighth and so on are computed both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from stretto.sim.answers import CALL, Model, Tape, plainly, played, real, refused, unfit
from stretto.sim.world import Worker
from stretto.train.gradients import FORWARD

LEAST = 4
"""Fewer are computed one by one: a call for many costs as much as for so many."""
MOST = 256
"""More are several calls: it does not get faster, and takes memory."""
MOST_BYTES = 64 << 20
"""Of memory in one call, about."""
MOST_CALLS, MOST_KINDS = 256, 1000
"""Of calls that are kept as they were traced, and of kinds of steps that are batched."""

Run = Callable[[dict[str, Tensor], dict[str, Tensor], list[Tensor]], tuple[dict[str, Tensor], list[Any]]]


class Batches:
    """Takes the steps of the workers of a world together. `say` is told once why what is not."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._tell = say
        self._models: dict[int, Model] = {}
        """By the id of the module."""
        self._waiting: list[Tape] = []
        self._kinds: dict[Any, int] = {}
        """Of models, numbered."""
        self._steps: dict[Any, int] = {}
        """The kinds of steps, numbered."""
        self._unfit: dict[int, str] = {}
        """By the kind of model: why its steps can't be computed with those of others."""
        self._runs: dict[Any, Run | None] = {}
        """By the kind of step and by how many there are: the call, or None when it was made once."""
        self._is_playing = False
        self._together = self._alone = self._calls = 0
        """Backward passes that were computed with others, those that were not, and the calls for many."""

    def begins(self, worker: Worker, module: nn.Module) -> None:
        """A worker has its model. That of an earlier life is not its model any more."""
        self._models = {key: one for key, one in self._models.items() if one.worker.number != worker.number}
        if why := unfit(module):
            self._say(why)
            return
        self._models[id(module)] = model = Model(worker, module)
        model.number = self._kinds.setdefault(model.kind, len(self._kinds))

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have workers' models answer later."""
        backward, apply = torch.autograd.backward, vars(torch.autograd.Function)["apply"]

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            model = self._models.get(id(module))
            if model is None or not self._is_now(model):
                return CALL(module, *args, **kwargs)
            return self._answered(model, args, kwargs)

        def pass_alone(tensors: Any, *given: Any, **named: Any) -> None:
            self._alone += 1
            backward(real(tensors, "backward"), *given, **named)

        def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return apply.__func__(cls, *real(args, "apply"), **real(kwargs, "apply"))

        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.backward = pass_alone
        torch.autograd.Function.apply = classmethod(applied)  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__call__ = CALL  # type: ignore[method-assign]
            torch.autograd.backward = backward
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]

    def _is_now(self, model: Model) -> bool:
        """Whether a call is a part of a worker's hand, and a gradient may be asked for."""
        if self._is_playing or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return False
        return model.worker.is_at_work() and torch._C._functorch.peek_interpreter_stack() is None

    def summary(self) -> str:
        """What came of it, in words."""
        steps = self._together + self._alone
        return f"--batched: {self._together} of {steps} steps were computed in {self._calls} calls for many workers"

    def _say(self, text: str) -> None:
        self._tell(f"--batched: {text}: such steps are computed one by one")

    # --- a worker's step ----------------------------------------------------------------------------------------

    def _answered(self, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a model will have answered; or what it answers, if that can't be computed later."""
        if not model.is_current:
            self.begins(model.worker, model.module)
            return model.module(*args, **kwargs)
        if why := self._why_alone(model, args, kwargs):
            self._say(why)
        elif (answer := Tape(model, self.step, self._say).note(None, args, {})) is not None:
            return answer
        return CALL(model.module, *args, **kwargs)

    def _why_alone(self, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if model.is_hooked:
            return "the model has hooks"
        if torch._C._is_any_autocast_enabled():
            return "the model is called under autocast"
        if kwargs or len(args) != 1 or type(args[0]) is not Tensor or args[0].requires_grad:
            return "the model is given something else than a plain tensor"
        return self._unfit.get(model.number, "")

    def step(self, tape: Tape, loss: int) -> bool:
        """Compute the gradient of a value with those of others. False if it is to be computed as torch does."""
        model, worker = tape.model, tape.model.worker
        if model.is_heard or worker.in_backward or not self._numbered(tape, loss):
            return False
        self._waiting.append(tape)
        worker.computes((FORWARD if model.is_exchanged else 1.0) * model.progress())
        worker.catch_up()
        if tape.gradients is None and not tape.is_alone:
            self._compute()
        if tape.gradients is None:
            return False
        self._check(tape)
        worker.backward(lambda: _accumulate(tape))
        tape.forget()
        return True

    def _numbered(self, tape: Tape, loss: int) -> bool:
        """Number the kind of a step. False if it is a new one, and there are too many: they do not come again."""
        tape.loss = loss
        shapes = tuple((one.shape, one.dtype, one.device) for one in tape.inputs)
        kind = tape.key, tuple(tape.calls), loss, shapes
        if len(self._steps) == MOST_KINDS and kind not in self._steps:
            self._say("there are steps of too many kinds")
            return False
        tape.key = self._steps.setdefault(kind, len(self._steps))
        return True

    def _check(self, tape: Tape) -> None:
        """Compute a step in the other way, too, every now and then. Raises ScriptError if the gradient is another."""
        model, found = tape.model, tape.gradients
        number = model.seen[tape.key] = model.seen.get(tape.key, 0) + 1
        if number & (number - 1):
            return
        assert found is not None
        own = torch.autograd.grad(tape.play()[tape.loss], [one for one in model.parameters if one.requires_grad])
        model.largest = max(model.largest, _square(own))
        if not _equal(found, own, model):
            raise refused(
                f"a step of worker {model.worker.number} computed with those of others is not what it is alone",
                got="gradients that differ by more than rounding",
                expected="the same",
            )

    # --- the steps of many --------------------------------------------------------------------------------------

    def _compute(self) -> None:
        """Compute the gradients of all who wait."""
        waiting, self._waiting = self._waiting, []
        groups: dict[Any, list[Tape]] = {}
        for tape in waiting:
            tape.is_alone = bool(tape.changed)
            if not tape.is_alone:
                groups.setdefault(tape.key, []).append(tape)
        for tapes in groups.values():
            at, most = 0, min(MOST, MOST_BYTES // tapes[0].model.nbytes(tapes[0].inputs))
            while (left := min(len(tapes) - at, most)) >= LEAST:
                size = 1 << (left.bit_length() - 1)
                self._at_once(tapes[at : at + size])
                at += size
            for tape in tapes[at:]:
                tape.is_alone = True

    def _at_once(self, tapes: Sequence[Tape]) -> None:
        """One call. A computation that can't be made so is made one by one from now on."""
        first = tapes[0].model
        try:
            gradients, values = self._called(tapes)
        except Exception as error:
            self._unfit[first.number] = str(error).partition("\n")[0]
            self._say(self._unfit[first.number])
            for tape in tapes:
                tape.is_alone = True
            return
        self._calls += 1
        self._together += len(tapes)
        rows = [one.unbind(0) for one in _apart(gradients.values())]
        for row, tape in enumerate(tapes):
            tape.keep(values, row, [one[row] for one in rows])

    def _called(self, tapes: Sequence[Tape]) -> tuple[dict[str, Tensor], list[Any]]:
        first, key = tapes[0], (tapes[0].key, len(tapes))
        trained, frozen = dict[str, Tensor](), dict[str, Tensor]()
        self._is_playing = True
        try:
            with plainly(grad=False):
                for index, name in enumerate(first.model.names):
                    stacked = torch.stack([tape.model.parameters[index] for tape in tapes])
                    (trained if first.model.parameters[index].requires_grad else frozen)[name] = stacked
                inputs = [torch.stack([tape.inputs[index] for tape in tapes]) for index in range(len(first.inputs))]
                return self._run(key, first, (trained, frozen, inputs))(trained, frozen, inputs)
        finally:
            self._is_playing = False

    def _run(self, key: Any, tape: Tape, given: tuple[Any, ...]) -> Run:
        """The call for a kind of step. It is traced when it is made for the second time, and quicker from then on."""
        run = self._runs.get(key)
        if run is not None:
            return run
        plain: Run = vmap(grad(_replay(tape), has_aux=True), randomness="error")
        if key in self._runs:
            plain = self._runs[key] = make_fx(plain)(*given)
        elif len(self._runs) < MOST_CALLS:
            self._runs[key] = None
        return plain


def _replay(tape: Tape) -> Callable[..., tuple[Tensor, list[Any]]]:
    module, calls, loss = tape.model.module, tuple(tape.calls), tape.loss

    def replay(trained: dict[str, Tensor], frozen: dict[str, Tensor], inputs: list[Tensor]) -> tuple[Tensor, list[Any]]:
        def model(*args: Any) -> Any:
            return functional_call(module, {**trained, **frozen}, args)

        values = played(calls, inputs, model)
        return values[loss], values

    return replay


def _accumulate(tape: Tape) -> None:
    """Give each parameter its gradient, as a backward pass does: it comes to what is there, and is heard of."""
    trained = [one for one in tape.model.parameters if one.requires_grad]
    assert tape.gradients is not None
    for parameter, gradient in zip(trained, tape.gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
        for listener in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
            listener(parameter)


def _apart(gradients: Iterable[Tensor]) -> list[Tensor]:
    """The same, where no two numbers share a place in memory: scripts change gradients in place."""
    found, places = list[Tensor](), set[int]()
    for one in gradients:
        is_own = one.is_contiguous() and one.data_ptr() not in places
        found.append(one if is_own else one.clone(memory_format=torch.contiguous_format))
        places.add(one.data_ptr())
    return found


def _square(tensors: Sequence[Tensor]) -> float:
    return sum(float(one.detach().square().sum()) for one in tensors)


def _equal(found: Sequence[Tensor], own: Sequence[Tensor], model: Model) -> bool:
    """Whether gradients differ by rounding only; nobody can tell of those that are not finite.

    A gradient that vanishes is the sum of what does not: it is as exact as those that the model had before.
    """
    apart = _square([one - other for one, other in zip(found, own, strict=True)])
    rounding = torch.finfo(found[0].dtype).eps
    size = model.largest + rounding * (_square(model.parameters) + sum(one.numel() for one in found))
    return not apart > rounding * size
