"""Ways in which a recipe hooks into the loop, and the flat parameters that are exchanged."""
