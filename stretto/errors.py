"""The tree of errors, drawn by what a caller can do about it.

StrettoError                   everything that Stretto raises on purpose
├── RecipeError                a recipe that cannot be: got, expected, what to type
├── ScriptError                the script and the library do not fit: the script must change
│   ├── ModelError             the model or the optimizer cannot be distributed as it is
│   ├── LoaderError            the loader cannot be shared out among workers
│   ├── EvaluateError          `evaluate` raised, or did not return numbers
│   └── UnevenLoopsError       a worker has left the loop earlier than the others: the workers and steps are named
├── NotFiniteError             a NaN or an infinity reached the loss or the parameters
├── ReplicasDifferError        replicas that must be equal are not: the tensor and the worker are named
├── TransportError                  another worker went away or did not come in time: look for its error first
│   ├── BrokenTransportError        an exchange was broken off; those who are left can do it again
│   └── MemberOutError         this worker is no member any more: it may come back as a newcomer
├── LaunchError                the run could not be started as it was asked for
└── LogError                   the run folder cannot be written or read
"""


class StrettoError(Exception):
    """Everything that Stretto raises on purpose; its text is meant for the user."""


def explain(problem: str, *, got: object, expected: str, to_type: str) -> str:
    """Lay out an error as three answers: what was got, what was expected, what to type."""
    return f"{problem}\n  got: {got}\n  expected: {expected}\n  try: {to_type}"


class RecipeError(StrettoError):
    """A recipe that cannot be: its text has got, expected and try."""


class ScriptError(StrettoError):
    """The script and the library do not fit together."""


class ModelError(ScriptError):
    """The model or the optimizer cannot be distributed as it is."""


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
    """Another worker went away or did not come in time."""


class BrokenTransportError(TransportError):
    """An exchange was broken off, for somebody is gone; those who are left can do it again."""


class MemberOutError(TransportError):
    """This worker is no member any more: what it has is not the run's, and it may come back as a newcomer."""


class StaysOutError(MemberOutError):
    """This worker can take nothing of the run up: it does not come back."""


class LaunchError(StrettoError):
    """The run could not be started as it was asked for."""


def mistyped(problem: str, got: object, expected: str, to_type: str) -> LaunchError:
    """The error of what was asked for and cannot be, with its three answers."""
    return LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))


class LogError(StrettoError):
    """The run folder cannot be written or read."""
