"""Memory plans: the memory that a configuration needs on each device."""
