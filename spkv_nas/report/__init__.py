"""The report: charts, each described once, and the page and pictures that are made of them."""
