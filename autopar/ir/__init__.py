"""The program: mesh, layouts, graphs, and how they print."""
