"""Implement the commands: each function reads a workspace, runs one stage and writes its results there."""
