"""A recipe: five words that say what is exchanged, when, with whom, in what encoding, and what is done with it."""
