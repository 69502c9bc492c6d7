"""In what encoding? One paper, one file."""

from stretto.how.both_ways import both_ways
from stretto.how.by_size import by_size
from stretto.how.cast import cast
from stretto.how.censored import censored
from stretto.how.chain import chain
from stretto.how.chunked import chunked
from stretto.how.codec import Block, Codec, Scene, SingleRound
from stretto.how.difference import difference_threshold
from stretto.how.exact import exact
from stretto.how.feedback import error_feedback
from stretto.how.low_rank import low_rank
from stretto.how.momentum import deep_gradient_compression
from stretto.how.quantise import quantise
from stretto.how.random_k import random_k
from stretto.how.sign import sign
from stretto.how.ternary import ternary
from stretto.how.threshold import threshold
from stretto.how.top_k import top_k
from stretto.how.when_it_pays import when_it_pays

__all__ = [
    "Block",
    "Codec",
    "Scene",
    "SingleRound",
    "both_ways",
    "by_size",
    "cast",
    "censored",
    "chain",
    "chunked",
    "deep_gradient_compression",
    "difference_threshold",
    "error_feedback",
    "exact",
    "low_rank",
    "quantise",
    "random_k",
    "sign",
    "ternary",
    "threshold",
    "top_k",
    "when_it_pays",
]
