"""Other frameworks' settings, out and in."""
