"""Probes that score how much each KV head needs global attention, measured on text; density is the main one."""
