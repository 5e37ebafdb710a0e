"""The commands as functions: each reads its inputs from a workspace, does one stage, and writes its results there."""
