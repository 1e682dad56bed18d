"""What everything above speaks of: meshes, layouts, graphs, techniques, and folded layers. No torch."""
