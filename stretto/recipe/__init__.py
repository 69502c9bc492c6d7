"""Recipes: answers to the five questions what, when, whom, how and then."""
