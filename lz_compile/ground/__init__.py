"""What everything stands on: events, isolation, stores, the machine. Knows nothing above it."""
