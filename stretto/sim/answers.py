"""What a model will have answered: noted instead of computed, so that many workers' answers can be computed at once.

A script calls its model, makes a loss of the answer and asks for the gradient. Until then nobody needs a number, and
what is done is kept on a tape. Whoever looks at a number before has the tape played for this worker alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
VALUE, INPUT, GIVEN = range(3)
Argument = tuple[Any, ...]
"""The number of an earlier value, or of an input, or something given with its type."""
Call = tuple[Callable[..., Any] | None, tuple[Argument, ...], tuple[tuple[str, Argument], ...]]
"""A function, None for the model itself, and what it is called with."""


class Model:
    """A worker's model, and what decides whether a step of another worker is the same computation."""

    def __init__(self, worker: Worker, module: nn.Module) -> None:
        self.worker, self.module = worker, module
        named = list(module.named_parameters())
        self.names = [name for name, _ in named]
        self.parameters = [one for _, one in named]
        self.nbytes = sum(one.nbytes for one in self.parameters)
        self.unfit = "the model has buffers" if next(module.buffers(), None) is not None else ""
        """Why its steps can't be computed with those of others, if they can't."""
        self.is_known = False
        """Whether it has answered once, and with a tensor."""
        self.seen: dict[Any, int] = {}
        """How often a step of each kind was computed with others."""
        self._hand, self._passes, self._passes_before = 0, 0, 1
        """The hand of the last backward pass, how many there were in it, and in the one before."""
        self._places = [_place(module, name) for name in self.names]
        self._own = [vars(one) for one in module.modules()]
        self._hooks = [own[kind] for own in self._own for kind in HOOKS]
        self._attributes = sum(map(len, self._own))
        self._plain = [(own, key) for own in self._own for key, value in own.items() if type(value) in PLAIN]
        shapes = tuple((one.shape, one.dtype, one.device) for one in self.parameters)
        codes = tuple(getattr(type(one).forward, "__code__", None) for one in module.modules())
        self.kind = (str(module), codes, tuple(self.names), shapes)
        """Alike for models that scripts have made alike, though each has classes of its own."""
        self.number = 0
        """That of its kind."""

    @property
    def is_current(self) -> bool:
        """Whether the module still has these parameters, and attributes of the same names."""
        known = zip(self._places, self.parameters, strict=True)
        is_alike = self._attributes == sum(map(len, self._own))
        return is_alike and all(place.get(key) is one for (place, key), one in known)

    @property
    def is_hooked(self) -> bool:
        """Whether others are called when the model is."""
        return any(self._hooks)

    @property
    def versions(self) -> int:
        """Grows with each change of a parameter."""
        return sum(one._version for one in self.parameters)

    @property
    def state(self) -> tuple[Any, ...]:
        """What modules have besides their parameters, as far as it is plain; and which parameters are frozen."""
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

    def progress(self) -> float:
        """How much of a hand's computing is done behind this backward pass, if all hands have as many as the last."""
        if self._hand != self.worker.steps:
            self._hand, self._passes, self._passes_before = self.worker.steps, 0, max(self._passes, 1)
        self._passes += 1
        return min(self._passes / self._passes_before, 1.0)

    def kept(self) -> Callable[[], None]:
        """Puts plain things that modules have back as they are now."""
        found = [own[key] for own, key in self._plain]

        def put_back() -> None:
            for (own, key), value in zip(self._plain, found, strict=True):
                own[key] = value

        return put_back


def _place(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, key = name.rpartition(".")
    return module.get_submodule(path)._parameters, key


class Tape:
    """What a script does with a model's answer. Value 0 is the answer, value i what the i-th further call makes.

    `play` computes the values of this worker alone. `stacked` are those of many, once they are there: this worker's
    are in `row`, as its gradients are.
    """

    def __init__(self, model: Model, step: Callable[[Tape, int], bool], say: Callable[[str], None]) -> None:
        self.model, self.step, self._say = model, step, say
        self.inputs: list[Tensor] = []
        self.calls: list[Call] = []
        self.loss = 0
        """Which value's gradient is asked for."""
        self.key: Any = None
        """Steps with the same key are the same computation."""
        self.stacked: list[Any] | None = None
        self.row = 0
        self.gradients: list[Tensor] | None = None
        self.is_alone = False
        """Whether it has turned out that this step is computed for this worker alone."""
        self._values: list[Any] | None = None
        self._versions = model.versions
        self._inputs_versions: list[int] = []

    @property
    def is_open(self) -> bool:
        """Whether nothing was computed yet."""
        return self._values is None and self.stacked is None

    def note(self, function: Callable[..., Any] | None, args: Sequence[Any], kwargs: dict[str, Any]) -> Answer | None:
        """Note a call; None if it can't be."""
        placed = [self._argument(one) for one in args]
        named = [(name, self._argument(one)) for name, one in kwargs.items()]
        if None in placed or any(one is None for _, one in named):
            return None
        self.calls.append((function, tuple(placed), tuple(named)))  # type: ignore[arg-type]
        return Answer.of(self, len(self.calls) - 1)

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

    def value(self, at: int, why: str) -> Any:
        """A value that is looked at. Before it was computed with those of others it is computed here."""
        if self.stacked is not None:
            return self.stacked[at][self.row]
        if self._values is None:
            if why:
                self._say(f"the script uses {why} of what its model answers, before the gradient")
            self._values = self.play()
        return self._values[at]

    def play(self) -> list[Any]:
        """All values, for this worker alone, as torch computes them. Raises ScriptError when that is too late."""
        changed = [one._version for one in self.inputs] != self._inputs_versions
        if changed or self.model.versions != self._versions:
            raise ScriptError(_late("its input" if changed else "the model"))
        with torch.enable_grad():
            return played(self.calls, self.inputs, lambda *args, **kwargs: CALL(self.model.module, *args, **kwargs))

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


def _late(what: str) -> str:
    return explain(
        f"the script looks at what its model answered after {what} has changed, when nobody has computed it",
        got="--batched, which computes an answer when its gradient is asked for",
        expected="a look at it before",
        to_type="the same command without --batched",
    )


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
        if function is torch.Tensor.backward and len(args) == 1 and not any(kwargs.values()):
            answer: Answer = args[0]
            if answer.tape.is_open:
                if answer.tape.step(answer.tape, answer.at):
                    return None
                name = ""
        elif name in NOTED and torch.is_grad_enabled() and "out" not in kwargs:
            tape = next(one.tape for one in (*args, *kwargs.values()) if isinstance(one, Answer))
            if tape.is_open and (made := tape.note(function, args, kwargs)) is not None:
                return made
        why = name if name != "__get__" else "an attribute"
        return function(*real(args, why), **real(kwargs, why))


_NOTHING = torch.empty(0)


def real(thing: Any, why: str) -> Any:
    """The same with values in the place of answers."""
    if isinstance(thing, Answer):
        return thing.tape.value(thing.at, why)
    if type(thing) in (list, tuple):
        return type(thing)(real(one, why) for one in thing)
    if type(thing) is dict:
        return {key: real(one, why) for key, one in thing.items()}
    return thing
