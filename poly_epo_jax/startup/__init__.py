"""Everything before the first step: the command line, the configuration, the checks and the policy to begin with."""
