"""Every configuration key, its checks and its defaults; machines by name."""
