"""A convex laboratory: how many rounds, and how many bits, each way to exchange gradients needs to a target."""
