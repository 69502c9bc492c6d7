"""Recipes: answers to five questions, what is exchanged, when, with whom, in which encoding, and how it is applied."""
