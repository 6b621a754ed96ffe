"""What a run of training consists of: a module for each concern."""
