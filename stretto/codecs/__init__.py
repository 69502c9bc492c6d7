"""Codecs: the encodings in which tensors are exchanged. One file for each paper. `stretto.how` is this package."""

from stretto.codecs.adaptive import when_it_pays
from stretto.codecs.base import Block, Codec, CodecContext, SingleRound
from stretto.codecs.bidirectional import both_ways
from stretto.codecs.by_size import by_size
from stretto.codecs.cast import cast
from stretto.codecs.censoring import censored
from stretto.codecs.chain import chain
from stretto.codecs.chunked_top_k import chunked
from stretto.codecs.deep_gradient_compression import deep_gradient_compression
from stretto.codecs.difference_threshold import difference_threshold
from stretto.codecs.error_feedback import error_feedback
from stretto.codecs.exact import exact
from stretto.codecs.low_rank import low_rank
from stretto.codecs.quantise import quantise
from stretto.codecs.random_k import random_k
from stretto.codecs.sign import sign
from stretto.codecs.ternary import ternary
from stretto.codecs.threshold import threshold
from stretto.codecs.top_k import top_k
from stretto.state import Members, State

__all__ = [
    "Block",
    "Codec",
    "CodecContext",
    "Members",
    "SingleRound",
    "State",
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
