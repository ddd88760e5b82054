"""Plans how much memory a configuration takes on each device."""
