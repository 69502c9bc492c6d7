"""Hierarchy of errors, by what a caller can do about them.

StrettoError                   base of all errors that Stretto raises on purpose
├── RecipeError                invalid recipe: got, expected, what to type
├── ScriptError                the script must change to work with Stretto
│   ├── ModelError             the model or the optimizer cannot be distributed
│   ├── LoaderError            the loader cannot be shared out among workers
│   ├── EvaluateError          `evaluate` raised, or did not return numbers
│   └── UnevenLoopsError       a worker has left the loop earlier than the others: the workers and steps are named
├── NotFiniteError             a NaN or an infinity reached the loss or the parameters
├── ReplicasDifferError        replicas that must be equal are not: the tensor and the worker are named
├── TransportError             another worker failed or was too late: look for its error first
│   ├── BrokenTransportError   an exchange was aborted; the remaining workers can repeat it
│   ├── UnreachableError       this worker could not connect with others: both addresses are named
│   └── MemberOutError         this worker is no longer a member; it may join again
├── LaunchError                the run could not be started with these options
│   ├── RunFailedError         a run that was started has failed: its folder, and the last model on which workers agreed
│   └── WorkersLostError       all workers that this launcher has added to a run are lost; the run may continue
└── LogError                   the run folder cannot be written or read
"""

from collections.abc import Sequence
from pathlib import Path


class StrettoError(Exception):
    """Base of all errors that Stretto raises on purpose, with a text for the user."""


def explain(problem: str, *, got: object, expected: str, to_type: str) -> str:
    """Format an error: the problem, the value that was got, the expected value, and what to type."""
    return f"{problem}\n  got: {got}\n  expected: {expected}\n  try: {to_type}"


class RecipeError(StrettoError):
    """Invalid recipe; the text has got, expected and try."""


class ScriptError(StrettoError):
    """The script does not work with Stretto."""


class ModelError(ScriptError):
    """The model or the optimizer cannot be distributed."""


class LoaderError(ScriptError):
    """The loader cannot be shared out among the workers."""


class EvaluateError(ScriptError):
    """`evaluate` raised, or did not return a dict of numbers."""


class UnevenLoopsError(ScriptError):
    """A worker has left the loop earlier than others that wait for it."""


class NotFiniteError(StrettoError):
    """A NaN or an infinity reached the loss, a gradient or the parameters."""


class ReplicasDifferError(StrettoError):
    """Replicas that must hold identical bits do not."""


class TransportError(StrettoError):
    """Another worker failed or was too late."""


class BrokenTransportError(TransportError):
    """An exchange was aborted because a worker failed; the remaining workers can repeat it."""


class UnreachedError(BrokenTransportError):
    """Some `workers` of a generation, by their numbers, have not connected in the time that they had."""

    def __init__(self, text: str, workers: Sequence[int]) -> None:
        super().__init__(text)
        self.workers = tuple(workers)


class UnreachableError(TransportError):
    """This worker could not connect with others in several generations, and is not restarted."""


class NothingCameError(BrokenTransportError):
    """No data came within the time limit of a wait, and no failure of another worker was noticed."""


class MemberOutError(TransportError):
    """This worker is no longer a member. Its state is not part of the run; it may join again."""


class StaysOutError(MemberOutError):
    """This worker can't continue any work of the run now; it may in a later epoch if it `returns`."""

    def __init__(self, text: str, returns: bool = False) -> None:
        super().__init__(text)
        self.returns = returns


class LaunchError(StrettoError):
    """The run could not be started with these options."""


class RunFailedError(LaunchError):
    """A run that was started has failed; `folder` is its run directory."""

    def __init__(self, text: str, folder: Path) -> None:
        super().__init__(text)
        self.folder = folder


class WorkersLostError(LaunchError):
    """All workers that this launcher has added to a run are lost, without an error of the script."""


def mistyped(problem: str, got: object, expected: str, to_type: str) -> LaunchError:
    """Return the LaunchError of an invalid option, formatted by `explain`."""
    return LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))


class LogError(StrettoError):
    """The run folder cannot be written or read."""
