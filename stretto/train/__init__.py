"""Training one worker's share: the script's loop, hooked to a recipe."""

from stretto.train.face import distribute, finish, log, no_sync

__all__ = ["distribute", "finish", "log", "no_sync"]
