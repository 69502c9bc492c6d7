"""In what encoding? One paper, one file."""

from stretto.how.cast import cast
from stretto.how.codec import Codec, SingleRound
from stretto.how.exact import exact

__all__ = ["Codec", "SingleRound", "cast", "exact"]
