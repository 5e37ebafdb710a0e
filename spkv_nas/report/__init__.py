"""Reports: charts, each described once, and the HTML page and pictures that are drawn from them."""
