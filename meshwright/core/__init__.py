"""The vocabulary of all other packages: meshes, layouts, graphs, techniques and folded layers. No torch."""
