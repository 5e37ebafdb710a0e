"""What every room stands on: errors, files, tables, units, the workspace, processes, versions. Knows no model."""
