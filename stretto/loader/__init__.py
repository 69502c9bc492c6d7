"""The torch side of the data: epoch order, samplers, global steps, sample weights."""
