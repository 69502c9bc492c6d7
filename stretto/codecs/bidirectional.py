"""Bidirectional compression: a server's replies are encoded too."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.codecs.base import Codec
from stretto.codecs.exact import exact
from stretto.codecs.wrapper import WrappingCodec
from stretto.errors import RecipeError, explain


@dataclass(frozen=True, repr=False)
class both_ways(WrappingCodec):
    """Encode the messages of workers with `up`, and the replies of a server on arrival with `down`.

    The server keeps the parameters k_i that each worker has received, and replies with the encoded difference:
    `c_i = C(theta - k_i);  k_i += c_i` at both ends. The next difference contains what a reply leaves out, so nothing
    is lost (`theta - k_i` is the server's residual). Memory at the server: one copy of its parameters per worker.
    """

    up: Codec
    down: Codec = exact()

    papers = ("Tang et al. 2019 (DoubleSqueeze, 1905.05957)",)

    def __post_init__(self) -> None:
        super().__post_init__()
        for codec in (self.up, self.down):
            if not codec.pair or codec.reply is not None:
                raise RecipeError(
                    explain(
                        f"both_ways can't send as {codec}",
                        got=str(codec),
                        expected="codecs that are a pair of encode and decode",
                        to_type="both_ways(error_feedback(top_k(0.01)), top_k(0.01))",
                    )
                )
        if self.down.keeps_residual:
            raise RecipeError(
                explain(
                    f"a server's replies can't be encoded as {self.down}, which keeps a residual",
                    got=f"down={self.down}",
                    expected="a codec without a residual: the next difference contains what a reply leaves out",
                    to_type="both_ways(error_feedback(top_k(0.01)), top_k(0.01))",
                )
            )

    def sources(self) -> tuple[str, ...]:
        """Return the papers of both codecs and of their combination."""
        return (*self.up.sources(), *self.down.sources(), *self.papers)

    @property
    def reply(self) -> Codec:
        return self.down

    @property
    def inner(self) -> Codec:
        return self.up

    @property
    def elementwise(self) -> bool:
        return self.up.elementwise

    @property
    def encodes_parts_alike(self) -> bool:
        return self.up.encodes_parts_alike and self.down.encodes_parts_alike
