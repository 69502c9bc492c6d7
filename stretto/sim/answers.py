"""What a model will have answered: noted instead of computed, so that many workers' answers can be computed at once.

A script calls its model, makes a loss of the answer and asks for the gradient. Until then nobody needs a number, and
what is done is kept on a tape. Whoever looks at a number before has the tape played for this worker alone.

So a model is called later than its script calls it. Nobody can tell where it is made of torch's own layers, changes
nothing, keeps nothing and draws no random numbers; others answer at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stretto.errors import ScriptError, explain

if TYPE_CHECKING:
    from stretto.sim.world import Worker

CALL: Callable[..., Any] = nn.Module.__call__
PLAIN = frozenset((bool, int, float, str, type(None)))
"""What a module's behaviour may depend on besides its parameters, and can be compared quickly."""
STATIC = PLAIN | {torch.dtype, torch.device}
NOTED = frozenset(
    """
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div log_softmax softmax logsumexp
    binary_cross_entropy binary_cross_entropy_with_logits mean sum add sub mul div neg pow square sqrt exp log abs
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __neg__ __pow__ eq __eq__
    view reshape flatten squeeze unsqueeze transpose permute float double argmax detach
    """.split()  # noqa: SIM905
)
"""Functions of which one tensor comes, that change nothing, and that depend on nothing but what they are given."""
LAYERS = frozenset(
    (
        *(nn.Sequential, nn.Linear, nn.Embedding, nn.LayerNorm, nn.Identity, nn.Flatten, nn.Unflatten),
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh),
        *(nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Softmax, nn.LogSoftmax),
    )
)
"""Layers whose answers depend on their input, their parameters and their plain attributes, and on nothing else."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TEMPORARIES = 16
"""Numbers that are kept for one number of a layer's answer, in forward and backward and between them."""
VALUE, INPUT, GIVEN = range(3)
Argument = tuple[Any, ...]
"""The number of an earlier value, or of an input, or something given with its type."""
Call = tuple[Callable[..., Any] | None, tuple[Argument, ...], tuple[tuple[str, Argument], ...]]
"""A function, None for the model itself, and what it is called with."""


def unfit(module: nn.Module) -> str:
    """Why a model is not called later, if it isn't."""
    for one in module.modules():
        changes = getattr(one, "inplace", False) or getattr(one, "max_norm", None) is not None
        if type(one) not in LAYERS or changes or getattr(one, "sparse", False) or "forward" in vars(one):
            return f"{one!s:.60} is none of the layers whose answers depend on nothing else".replace("\n", " ")
    return ""


class Model:
    """A worker's model that is fit, and what decides whether a step of another worker is the same computation."""

    def __init__(self, worker: Worker, module: nn.Module) -> None:
        self.worker, self.module = worker, module
        named = list(module.named_parameters())
        self.names = [name for name, _ in named]
        self.parameters = [one for _, one in named]
        self.seen: dict[Any, int] = {}
        """How often a step of each kind was computed with others."""
        self.largest = 0.0
        """The largest square of a gradient's length that was looked at."""
        self._hand, self._passes, self._passes_before = 0, 0, 1
        """The hand of the last backward pass, how many there were in it, and in the one before."""
        layers = list(module.modules())
        self._width = sum(getattr(one, "out_features", getattr(one, "embedding_dim", 0)) for one in layers)
        self._own = [vars(one) for one in layers]
        self._parts = [(part, list(part.values())) for own in self._own if (part := own["_modules"])]
        self._parts += [(part, list(part.values())) for own in self._own if (part := own["_parameters"])]
        self._hooks = [own[kind] for own in self._own for kind in HOOKS]
        self._attributes = sum(map(len, self._own))
        self._plain = [(own, key) for own in self._own for key, value in own.items() if type(value) in PLAIN]
        shapes = tuple((one.shape, one.dtype, one.device) for one in self.parameters)
        self.kind = (str(module), tuple(self.names), shapes)
        self.number = 0
        """That of its kind."""

    @property
    def is_current(self) -> bool:
        """Whether the module still has these layers, parameters, and attributes of the same names."""
        if self._attributes != sum(map(len, self._own)):
            return False
        return all(len(now) == len(then) and all(map(is_, now.values(), then)) for now, then in self._parts)

    @property
    def is_hooked(self) -> bool:
        """Whether others are called when the model is."""
        others = (one for kind in self._hooks for one in kind.values() if not hasattr(one, "only_looks"))
        return any(others) or bool(nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]

    @property
    def versions(self) -> int:
        """Grows with each change of a parameter."""
        return sum(one._version for one in self.parameters)

    @property
    def state(self) -> tuple[Any, ...]:
        """What layers have besides their parameters; and which parameters are frozen."""
        found = [own.get(key) for own, key in self._plain]
        plain = [value if type(value) in PLAIN else None for value in found]
        return *plain, *(one.requires_grad for one in self.parameters)

    @property
    def is_heard(self) -> bool:
        """Whether a gradient has listeners that may change it, which torch itself must call."""
        return any(one._backward_hooks for one in self.parameters)

    @property
    def is_exchanged(self) -> bool:
        """Whether somebody hears of each gradient when it is there, before the step's computing is over."""
        return any(one._post_accumulate_grad_hooks for one in self.parameters)

    def nbytes(self, inputs: Sequence[Tensor]) -> int:
        """About what a step takes of memory."""
        size, rows = self.parameters[0].element_size(), max(map(_rows, inputs))
        return 4 * sum(one.nbytes for one in self.parameters) + TEMPORARIES * size * rows * self._width

    def progress(self) -> float:
        """How much of a hand's computing is done behind this backward pass, if all hands have as many as the last."""
        if self._hand != self.worker.steps:
            self._hand, self._passes, self._passes_before = self.worker.steps, 0, max(self._passes, 1)
        self._passes += 1
        return min(self._passes / self._passes_before, 1.0)


def _rows(given: Tensor) -> int:
    """How many answers of each layer an input makes; each whole number is one that is embedded."""
    return given.numel() // max(given.shape[-1], 1) if given.is_floating_point() and given.dim() else given.numel()


class Tape:
    """What a script does with a model's answer. Value 0 is the answer, value i what the i-th further call makes.

    `play` computes the values of this worker alone; `keep` takes those that were computed with others'.
    """

    def __init__(self, model: Model, step: Callable[[Tape, int], bool], say: Callable[[str], None]) -> None:
        self.model, self.step, self._say = model, step, say
        self.inputs: list[Tensor] = []
        self.calls: list[Call] = []
        self.loss = 0
        """Which value's gradient is asked for."""
        self.key: Any = model.number, model.state
        """Steps with the same key are the same computation."""
        self.gradients: list[Tensor] | None = None
        self.is_alone = False
        """Whether it has turned out that this step is computed for this worker alone."""
        self._answers: list[weakref.ref[Answer]] = []
        self._values: Any = None
        self._versions = model.versions
        self._inputs_versions: list[int] = []

    @property
    def is_open(self) -> bool:
        """Whether nothing was computed yet."""
        return self._values is None

    @property
    def changed(self) -> str:
        """What is not as it was when it was noted; nothing if all is."""
        if [one._version for one in self.inputs] != self._inputs_versions:
            return "its input"
        return "the model" if self.model.versions != self._versions else ""

    def note(self, function: Callable[..., Any] | None, args: Sequence[Any], kwargs: dict[str, Any]) -> Answer | None:
        """Note a call; None if it can't be."""
        placed = [self._argument(one) for one in args]
        named = [(name, self._argument(one)) for name, one in kwargs.items()]
        if None in placed or any(one is None for _, one in named):
            return None
        self.calls.append((function, tuple(placed), tuple(named)))  # type: ignore[arg-type]
        answer = Answer.of(self, len(self.calls) - 1)
        self._answers.append(weakref.ref(answer))
        return answer

    def _argument(self, thing: Any) -> Argument | None:
        if isinstance(thing, Answer):
            return (VALUE, thing.at) if thing.tape is self else None
        if isinstance(thing, Tensor):
            if thing.requires_grad or thing.layout is not torch.strided:
                return None
            self.inputs.append(thing)
            self._inputs_versions.append(thing._version)
            return INPUT, len(self.inputs) - 1
        if type(thing) in STATIC:
            return GIVEN, type(thing), thing
        if type(thing) in (tuple, list, torch.Size) and all(type(one) in PLAIN for one in thing):
            return GIVEN, tuple, tuple(thing)
        return None

    def keep(self, values: Sequence[Any], row: int, gradients: list[Tensor]) -> None:
        """This worker's row of what was computed for many: as much of it as somebody can still look at."""
        there = [answer for known in self._answers if (answer := known()) is not None]
        self._values = {one.at: values[one.at][row].clone() for one in there}
        self.gradients = gradients

    def value(self, at: int, why: str) -> Any:
        """A value that is looked at. Before it was computed with those of others it is computed here."""
        if self._values is None:
            if why:
                self._say(f"the script uses {why} of what its model answers, before the gradient")
            self._values = self.play()
        return self._values[at]

    def play(self) -> list[Any]:
        """All values, for this worker alone, as torch computes them. Raises ScriptError when that is too late."""
        if changed := self.changed:
            raise refused(
                f"what the model answered was not computed before {changed} changed",
                got="--batched, which computes an answer when its gradient is asked for",
                expected="a look at it, or its gradient, before",
            )
        with plainly(grad=True):
            return played(self.calls, self.inputs, lambda *args: CALL(self.model.module, *args))

    def forget(self) -> None:
        """The step is done: what it was computed from is not needed any more."""
        self.inputs, self.gradients = [], None


def played(calls: Sequence[Call], inputs: Sequence[Tensor], model: Callable[..., Any]) -> list[Any]:
    """The values of a tape."""
    values: list[Any] = []

    def found(one: Argument) -> Any:
        return values[one[1]] if one[0] == VALUE else inputs[one[1]] if one[0] == INPUT else one[2]

    for function, args, kwargs in calls:
        call = model if function is None else function
        values.append(call(*map(found, args), **{name: found(one) for name, one in kwargs}))
    return values


@contextmanager
def plainly(grad: bool) -> Iterator[None]:
    """Compute as where nothing was said about modes, in which a script may stand by now."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        yield


def refused(problem: str, got: str, expected: str) -> ScriptError:
    """The error of a script that can't be simulated so."""
    return ScriptError(explain(problem, got=got, expected=expected, to_type="the same command without --batched"))


class Answer(Tensor):
    """What a model will have answered, or what is made of that."""

    tape: Tape
    at: int

    @staticmethod
    def of(tape: Tape, at: int) -> Answer:
        """Value `at` of a tape."""
        made: Answer = torch.Tensor._make_subclass(Answer, _NOTHING)
        made.tape, made.at = tape, at
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is done with it, if that can be noted; else do it with its value."""
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if function is torch.Tensor.backward:
            answer: Answer = args[0]
            is_usual = all(one is None or one is False for one in (*args[1:], *kwargs.values()))
            if is_usual and answer.tape.is_open:
                if answer.tape.step(answer.tape, answer.at):
                    return None
                name = ""
        elif name in NOTED and _can_be_noted(name, args, kwargs):
            tape = next(one.tape for one in (*args, *kwargs.values()) if isinstance(one, Answer))
            if tape.is_open and (made := tape.note(function, args, kwargs)) is not None:
                return made
        why = name if name != "__get__" else "an attribute"
        return function(*real(args, why), **real(kwargs, why))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Nothing is here to be computed with. Who does it has gone past what could be noted."""
        raise refused(
            f"what the model will have answered was given to {function} before its gradient was asked for",
            got="--batched, and a function that torch does not tell of what it is given",
            expected="torch's own functions",
        )


_NOTHING = torch.empty(())


def _can_be_noted(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled() or torch._C._is_any_autocast_enabled():
        return False
    is_nothing = name in ("eq", "__eq__") and any(one is None for one in args)
    return "out" not in kwargs and not is_nothing


def real(thing: Any, why: str) -> Any:
    """The same with values in the place of answers."""
    if isinstance(thing, Answer):
        return thing.tape.value(thing.at, why)
    if type(thing) in (list, tuple):
        return type(thing)(real(one, why) for one in thing)
    if type(thing) is dict:
        return {key: real(one, why) for key, one in thing.items()}
    return thing
