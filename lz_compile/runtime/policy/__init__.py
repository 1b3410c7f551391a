"""What the user wants: locks, preferences, rules, settings."""
