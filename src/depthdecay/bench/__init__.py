"""Speed measurements, and charts of what was measured."""
