"""Provide the fixtures of pages in a browser."""

from browser_cases import browser, open_file, open_page, workspace

__all__ = ["browser", "open_file", "open_page", "workspace"]
