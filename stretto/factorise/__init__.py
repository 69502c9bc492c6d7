"""The command `stretto factorise`: the factors of a table of ratings, trained in blocks."""
