"""Convex study: rounds and uplink bits that a recipe needs to reach a given error of a convex objective."""
