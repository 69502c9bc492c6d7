"""Training one worker's share: the script's loop, hooked to a recipe."""

from stretto.train.face import abandon, close, distribute, finish, log, no_sync

__all__ = ["abandon", "close", "distribute", "finish", "log", "no_sync"]
