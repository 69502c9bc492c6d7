"""What a person is shown about a run, made from its log alone."""
