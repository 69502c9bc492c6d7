"""Training one worker's share: the script's loop, hooked to a recipe."""
