"""Plans and programs for readers."""
