"""Toy task of the SP-KV paper: reverse a list that lies outside the local window."""
