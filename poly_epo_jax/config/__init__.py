"""Configuration keys with their defaults and validators, and the meshes of named machines."""
