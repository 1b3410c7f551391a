"""A report as one HTML file: no network, no other files."""
