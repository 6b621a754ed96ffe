"""What the training scripts consist of: a module for each concern."""
