"""Foundations of all other packages: errors, files, tables, units, workspace, processes, versions. Knows no model."""
